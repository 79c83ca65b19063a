"""The CUDA simulator's names and signatures against those of CuPy itself, which can be imported
without a GPU. What passes here runs on CuPy as far as names and arguments go."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import numpy as np
import pytest

from ringrt.cudasim import SimulatorError, api, nccl as sim_nccl, runtime as sim_runtime

cupy = pytest.importorskip("cupy")
real_nccl = pytest.importorskip("cupy.cuda.nccl")
pytestmark = pytest.mark.timeout(120)

needs_nccl = pytest.mark.skipif(not real_nccl.available, reason="needs the NCCL library")

#: Classes, and the functions of each that are looked at.
CLASSES = {
    "ndarray": "__len__ __getitem__ reshape view transpose get set fill",
    "cuda.Device": "use synchronize __enter__ __exit__",
    "cuda.Stream": "use record wait_event synchronize begin_capture end_capture is_capturing",
    "cuda.ExternalStream": "use record wait_event synchronize",
    "cuda.Event": "record synchronize",
    "cuda.Graph": "launch upload",
    "cuda.MemoryPointer": "copy_from_host_async copy_to_host_async copy_from_device_async memset_async",
    "cuda.MemoryPool": "used_bytes free_all_blocks",
    "cuda.PinnedMemoryPointer": "size",
    "RawModule": "get_function",
}
FUNCTIONS = """empty zeros asarray asnumpy get_default_memory_pool cuda.alloc_pinned_memory
cuda.get_current_stream cuda.get_elapsed_time cuda.is_available cuda.runtime.getDeviceCount
cuda.runtime.getDevice cuda.runtime.setDevice cuda.runtime.getDeviceProperties
cuda.runtime.deviceSynchronize cuda.runtime.runtimeGetVersion cuda.runtime.driverGetVersion
cuda.runtime.memcpyAsync""".split()
CONSTRUCTORS = """cuda.Device cuda.Stream cuda.ExternalStream cuda.Event cuda.MemoryPointer
RawModule""".split()
COMMUNICATOR = "send recv abort destroy check_async_error rank_id size device_id".split()


def find(module, path):
    for name in path.split("."):
        module = getattr(module, name)
    return module


def parameters(function):
    """Names, defaults and whether keyword-only, by inspect or by Cython's first line of the text."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return written_parameters(function.__doc__)
    return [
        (p.name, None if p.default is p.empty else repr(p.default), p.kind == p.KEYWORD_ONLY)
        for p in signature.parameters.values()
        if p.name not in ("self", "cls")
    ]


def written_parameters(text):
    inside = re.search(r"\((.*)\)", text.strip().splitlines()[0]).group(1)
    found, keyword_only = [], False
    for part in filter(None, (part.strip() for part in inside.split(","))):
        declared, _, default = part.partition("=")
        name = declared.split()[-1]
        if name == "*":
            keyword_only = True
        elif name != "self":
            found.append((name.lstrip("*"), default.strip("'\" ") or None, keyword_only))
            keyword_only |= name.startswith("*")
    return found


def assert_same(ours, theirs):
    """Ours may leave out what comes last or by keyword, and no more."""
    own, their = parameters(ours), parameters(theirs)
    by_name = {name: (default, keyword) for name, default, keyword in their}
    for name, default, keyword in own:
        assert name in by_name, f"CuPy has no parameter {name}: {their}"
        assert plain(default) == plain(by_name[name][0]), name
        assert keyword == by_name[name][1], name
    positional = [name for name, _, keyword in their if not keyword]
    assert [name for name, _, keyword in own if not keyword] == positional[: len(own)]


def plain(default):
    """Defaults as text, whether Python or Cython wrote it."""
    return default and {"<class 'float'>": "float"}.get(default, default.strip("'\""))


def test_parsing():
    assert written_parameters(
        "A.f(self, int n, *, size_t m=0, stream=None) -> int\nText (a, b)."
    ) == [
        ("n", None, False),
        ("m", "0", True),
        ("stream", "None", True),
    ]
    with pytest.raises(AssertionError):
        assert_same(lambda x, y: None, lambda y, x: None)
    with pytest.raises(AssertionError):
        assert_same(lambda x=1: None, lambda x=2: None)
    with pytest.raises(AssertionError):
        assert_same(lambda z: None, lambda y: None)
    assert_same(lambda x: None, lambda x, y=2: None)


@pytest.mark.parametrize("path", FUNCTIONS)
def test_functions(path):
    assert_same(find(api, path), find(cupy, path))


@pytest.mark.parametrize("path", [f"{c}.{f}" for c, fs in CLASSES.items() for f in fs.split()])
def test_methods(path):
    if path.endswith(("__enter__", "__exit__")):
        assert find(cupy, path)
        assert find(api, path)
    elif path.endswith(("__len__", "__getitem__")):
        assert len(parameters(find(api, path))) == len(parameters(find(cupy, path)))
    else:
        assert_same(find(api, path), find(cupy, path))


@pytest.mark.parametrize("path", CONSTRUCTORS)
def test_constructors(path):
    ours = find(api, path).__init__
    theirs = find(cupy, path)
    if path == "RawModule":  # the rest is refused by name
        assert [p[0] for p in parameters(ours)] == ["code", "path", "options", "backend", "others"]
        own = parameters(ours)[:-1]
        theirs = {p[0]: p[1:] for p in parameters(theirs)}
        for name, default, keyword in own:
            assert (plain(default), keyword) == theirs[name]
    else:
        assert_same(ours, theirs)


def test_making_an_array():
    ours = parameters(api.ndarray.__init__)
    theirs = parameters(cupy.ndarray._init)
    assert [(n, plain(d)) for n, d, _ in ours] == [(n, plain(d)) for n, d, _ in theirs]


def test_launching_a_kernel():
    """CuPy takes shared_mem and stream by keyword and hands them on."""
    kernel = api.RawModule.get_function.__annotations__["return"]
    from ringrt.cudasim import module

    ours = parameters(vars(module)[kernel].__call__)
    assert [p[0] for p in ours] == ["grid", "block", "args", "shared_mem", "stream"]
    theirs = written_parameters(cupy.RawKernel.__call__.__doc__)
    assert [p[0] for p in theirs] == ["grid", "block", "args", "kwargs"]
    for name in ("name", "max_dynamic_shared_size_bytes"):
        assert hasattr(cupy.RawKernel, name)
    launch = cupy.cuda.function.Function.linear_launch.__doc__
    assert ("stream", "None", False) in written_parameters(launch)


@needs_nccl
@pytest.mark.parametrize("name", ["groupStart", "groupEnd", "get_version", "get_unique_id"])
def test_nccl_functions(name):
    assert_same(getattr(sim_nccl, name), getattr(real_nccl, name))


@needs_nccl
@pytest.mark.parametrize("name", COMMUNICATOR)
def test_nccl_communicator(name):
    ours, theirs = (getattr(m.NcclCommunicator, name) for m in (sim_nccl, real_nccl))
    assert_same(ours, theirs)


@needs_nccl
def test_making_a_communicator():
    assert_same(sim_nccl.NcclCommunicator.__init__, real_nccl.NcclCommunicator)


@needs_nccl
def test_nccl_constants_and_errors():
    names = [name for name in vars(sim_nccl) if name.startswith("NCCL_")]
    assert len(names) > 10
    for name in names:
        assert getattr(sim_nccl, name) == getattr(real_nccl, name), name
    for status in range(1, 7):
        ours, theirs = sim_nccl.NcclError(status), real_nccl.NcclError(status)
        assert str(ours).split(":")[0] == str(theirs).split(":")[0]
        assert ours.status == theirs.status
    assert issubclass(sim_nccl.NcclError, RuntimeError)
    assert issubclass(sim_nccl.NcclError, SimulatorError)


@needs_nccl
def test_unique_ids():
    for module in (sim_nccl, real_nccl):
        one, other = module.get_unique_id(), module.get_unique_id()
        assert isinstance(one, bytes)
        assert len(one) == 128
        assert one != other
    assert sim_nccl.get_version() == real_nccl.get_version() or real_nccl.get_version() > 22000


def test_runtime_constants_and_errors():
    names = [n for n in vars(sim_runtime) if n.startswith(("memcpy", "streamCapture"))]
    for name in names:
        if not callable(getattr(sim_runtime, name)):
            assert getattr(sim_runtime, name) == getattr(cupy.cuda.runtime, name), name
    for status in sim_runtime._ERRORS:
        text = str(cupy.cuda.runtime.CUDARuntimeError(status))
        assert str(sim_runtime.CUDARuntimeError(status)).split(":")[0] == text.split(":")[0]
    error = sim_runtime.CUDARuntimeError(1, "what was wrong")
    assert (error.status, str(error)) == (
        1,
        "cudaErrorInvalidValue: invalid argument (what was wrong)",
    )
    assert issubclass(sim_runtime.CUDARuntimeError, RuntimeError)


def test_nothing_is_offered_that_cupy_lacks():
    for name in api.__all__:
        assert hasattr(cupy, name), name
    for name in api.cuda.__all__:
        assert name == "nccl" or hasattr(cupy.cuda, name), name
    for path in [*CLASSES, "cuda.Memory"]:
        theirs = find(cupy, path)
        for name, value in vars(find(api, path)).items():
            assert name.startswith("_") or hasattr(theirs, name) or path == "cuda.Memory", value
    for name in sim_runtime.__all__:
        assert hasattr(cupy.cuda.runtime, name), name
    if real_nccl.available:
        for name in sim_nccl.__all__:
            assert hasattr(real_nccl, name), name
        for name in vars(sim_nccl.NcclCommunicator):
            assert name.startswith("_") or hasattr(real_nccl.NcclCommunicator, name), name


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("ndarray", "shape strides dtype ndim size nbytes itemsize data device flags"),
        ("cuda.MemoryPointer", "ptr mem device_id"),
        ("cuda.Device", "id compute_capability attributes"),
        ("cuda.Stream", "done is_non_blocking null"),
        ("cuda.PinnedMemoryPointer", "mem ptr"),
    ],
)
def test_attributes(path, names):
    for name in names.split():
        assert hasattr(find(cupy, path), name), name
    with api.cuda.Device(0):
        made = {
            "ndarray": lambda: api.empty(3),
            "cuda.MemoryPointer": lambda: api.empty(3).data,
            "cuda.Device": lambda: api.cuda.Device(0),
            "cuda.Stream": lambda: api.cuda.Stream(),
            "cuda.PinnedMemoryPointer": lambda: api.cuda.alloc_pinned_memory(3),
        }[path]()
    for name in names.split():
        assert hasattr(made, name), name


def test_implicit_conversion_says_what_cupy_says():
    with pytest.raises(TypeError, match="Implicit conversion to a NumPy array is not allowed"):
        np.asarray(api.empty(3))


def test_importing_the_simulator_brings_in_no_cupy():
    code = (
        "import sys, ringrt.cudasim.api; print([m for m in ('cupy', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
