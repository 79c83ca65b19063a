"""Plugins as their users have them: wheels, in an environment into which nothing of this checkout
is installed otherwise."""

from __future__ import annotations

import re

import pytest
from plugin_support import PLUGINS, Environment
from test_layering import HEAVY

from ringrt.scaffold import new_plugin
from support import ROOT

pytestmark = pytest.mark.timeout(150)
MINIMAL, COUNTING = (
    ROOT / "plugins" / name for name in ("ringrt-minimal", "ringrt-transport-counting")
)
JOB = """
input: {source: random, length: 60, q_heads: 4, kv_heads: 2, head_dim: 8}
attention: {causal: true}
ring: {ranks: 3, backend: minimal}
passes: [forward, backward]
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """With ringrt, the two plugins of its documentation, and a new one."""
    folder = tmp_path_factory.mktemp("plugins")
    _, new = new_plugin("Fast.One", folder)
    return Environment.make(folder, ROOT, MINIMAL, COUNTING, new)


@pytest.fixture(scope="module", params=PLUGINS, ids=lambda path: path.name)
def installed(request, tmp_path_factory):
    """Each plugin of plugins/ by itself: its source, and an environment with its wheel."""
    folder = tmp_path_factory.mktemp("plugin")
    return request.param, Environment.make(folder, ROOT, request.param)


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def test_it_is_the_wheels_that_are_imported(environment, tmp_path):
    modules = "ringrt", "ringrt_backends", "ringrt_minimal", "ringrt_fast_one"
    code = f"import {', '.join(modules)}\nfor x in ({', '.join(modules)}): print(x.__file__)"
    done = environment.run("python", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    files = done.stdout.split()
    assert len(files) == 4
    assert all(file.startswith(f"{environment.folder}/lib/") for file in files), files


def test_all_plugins_are_listed(environment, tmp_path):
    done = environment.run("ringrt", "backends", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("backend minimal", "backend fast-one", "backend cpu", "transport counting"):
        assert f"\n{name}: " in f"\n{done.stdout}"


def test_a_plugin_is_sound_and_imports_nothing_heavy_before_it_is_used(installed, tmp_path):
    plugin, environment = installed
    module = plugin.name.replace("-", "_")
    code = (
        "import sys, ringrt.registry as r\n"
        f"problems = [line for line in r.registry().problems if {module!r} in line]\n"
        f"print({module!r} in sys.modules, problems, "
        f"[name for name in {HEAVY} if name in sys.modules])"
    )
    done = environment.run("python", "-c", code, cwd=tmp_path)
    assert done.stdout.strip() == "True [] []", done.stdout + done.stderr


@pytest.mark.timeout(650)
def test_a_plugin_s_own_tests_pass_on_its_wheel(installed, tmp_path):
    """-P keeps the current folder out of the way, so the module is the wheel's."""
    plugin, environment = installed
    tests = ("-P", "-m", "pytest", "-p", "no:cacheprovider", plugin / "tests")
    done = environment.run("python", *tests, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_job_uses_the_backend_by_its_name(environment, job, tmp_path):
    done = environment.run("ringrt", "run", job, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "backend minimal" in done.stdout
    assert "\nverified" in done.stdout


def test_the_readme_s_example_runs(environment, tmp_path):
    """Its commands, but for pip's, and its program."""
    text = (ROOT / "README.md").read_text().split("\n## Plugins\n")[1].split("\n## ")[0]
    [console], [code] = (
        re.findall(rf"```{x}\n(.*?)```", text, re.S) for x in ("console", "python")
    )
    (tmp_path / "job.yaml").write_text(JOB.replace("minimal", "reference"))
    (tmp_path / "use.py").write_text(code)
    commands = [line.removeprefix("$ ") for line in console.splitlines()]
    assert commands.pop(0) == "pip install plugins/ringrt-minimal"
    assert len(commands) == 3
    for command in [*commands, "python use.py"]:
        done = environment.run(*command.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_backend_does_not_do_is_one_line(environment, job, tmp_path):
    softcap = ("--set", "attention.softcap=5.0")
    done = environment.run("ringrt", "run", job, *softcap, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("ringrt: backend minimal: softcap is not implemented")
    assert len(done.stderr.splitlines()) == 1


def test_a_blocked_plugin_is_not_there(environment, job, tmp_path):
    blocked = {"RINGRT_BLOCK_PLUGINS": "ringrt_minimal"}
    done = environment.run("ringrt", "backends", cwd=tmp_path, **blocked)
    assert done.returncode == 0
    assert "backend minimal" not in done.stdout
    assert "backend fast-one" in done.stdout
    done = environment.run("ringrt", "run", job, cwd=tmp_path, **blocked)
    assert done.returncode == 2
    assert "got 'minimal'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_plugin_that_is_uninstalled_leaves_the_rest(tmp_path, job):
    environment = Environment.make(tmp_path, ROOT, MINIMAL)
    assert "backend minimal" in environment.run("ringrt", "backends", cwd=tmp_path).stdout
    environment.pip("uninstall", "--quiet", "--yes", "ringrt-minimal")
    done = environment.run("ringrt", "backends", cwd=tmp_path)
    assert done.returncode == 0
    assert "minimal" not in done.stdout
    command = ("ringrt", "run", job, "--set", "ring.backend=reference")
    done = environment.run(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_command_writes_its_files_from_a_wheel(environment, tmp_path):
    done = environment.run("ringrt", "new-plugin", "other", "--into", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ringrt-other" / "ringrt_other.py").exists()
