"""A module imports only from its own floor or below, and nothing heavy before it is used."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from support import ROOT

#: From the ground up. A name stands for a module of ringrt or a package of it.
FLOORS = [
    {"version", "errors", "dlpack_capsule"},
    {"plan"},
    {"cudasim", "kernels"},
    {"device"},
    {"softmax_state", "block_arrays", "backend", "torch_blocks", "transport"},
    {"hookspecs", "plugins", "registry", "partitions", "dlpack", "inputs"},
    {"engine"},
    {"transports"},
    {"options", "places", "calls", "capture", "ring_keys", "ring", "launch"},
    {"torch", "jax"},
    {"jobs", "scaffold", "bench"},
    {"conformance"},
    {"cli", "__main__"},
]
LEVEL = {name: level for level, floor in enumerate(FLOORS) for name in floor}
HEAVY = ("cupy", "numba", "mpi4py", "torch", "jax")
#: Packages that import their framework when they are imported; nobody else imports them.
ADAPTERS = {"torch", "jax"}
CORE = sorted((ROOT / "ringrt").rglob("*.py"))
BACKENDS = sorted((ROOT / "backends").rglob("*.py"))


def imports(path):
    """Every module that a file imports, and whether it does so at import time."""
    tree = ast.parse(path.read_text())
    at_top = {id(node) for node in _outside_functions(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in at_top
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module, id(node) in at_top


def _outside_functions(node):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _outside_functions(child)


def floor_of(module):
    parts = module.split(".")
    return LEVEL[parts[1]] if len(parts) > 1 else None


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_core_imports_downwards(path):
    relative = path.relative_to(ROOT / "ringrt")
    if relative.parts == ("__init__.py",):
        return
    own = LEVEL[relative.parts[0].removesuffix(".py")]
    for module, at_top in imports(path):
        assert module.split(".")[0] != "ringrt_backends", "the core imports no backend"
        if module.split(".")[0] == "ringrt":
            level = floor_of(module)
            assert level is None or level <= own, f"{path} imports {module} from above"
        if at_top and module.split(".")[0] in HEAVY:
            lazy = path.name in {"mpi.py", "gloo.py"} or relative.parts[0] in ADAPTERS
            assert lazy, f"{path} imports {module} at import time"


@pytest.mark.parametrize("path", BACKENDS, ids=lambda path: path.name)
def test_backends_import_plan_protocols_and_state_only(path):
    allowed = {"plan", "backend", "softmax_state", "errors", "hookspecs", "device", "kernels"}
    for module, at_top in imports(path):
        parts = module.split(".")
        if parts[0] == "ringrt":
            assert parts[1] in allowed, f"{path} imports {module}"
        if at_top and parts[0] in HEAVY:
            assert path.name != "__init__.py"


def test_every_module_has_a_floor():
    names = {path.relative_to(ROOT / "ringrt").parts[0].removesuffix(".py") for path in CORE}
    assert names - {"__init__"} == set(LEVEL)


def test_plan_imports_nothing_heavier_than_numpy():
    for path in (ROOT / "ringrt" / "plan").glob("*.py"):
        for module, _ in imports(path):
            root = module.split(".")[0]
            assert root in {"numpy", "ringrt"} or root in sys.stdlib_module_names


@pytest.mark.parametrize("module", ["ringrt", "ringrt.cli", "ringrt.registry", "ringrt.jobs.run"])
def test_importing_brings_in_nothing_heavy(module):
    code = f"import sys, {module}; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_files_are_short():
    for path in CORE + BACKENDS:
        assert len(path.read_text().splitlines()) <= 400, f"{path} is long"
