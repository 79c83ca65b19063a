"""What there is of CUDA on this machine: GPU, driver, CuPy, NVRTC, NCCL; each by asking it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

from ringrt.device.driver import cupy, missing_cuda, nccl, simulated
from ringrt.plugins import one_line

_EXTRAS = "pip install 'ringrt[cuda12]' or 'ringrt[cuda13]'"


class Finding(NamedTuple):
    """One part: whether it works, what it is or what is missing, and what would mend it."""

    part: str
    works: bool
    detail: str
    remedy: str = ""


def findings() -> Iterator[Finding]:
    """All parts, one after the other; a missing one does not hide the others."""
    if simulated():
        missing = missing_cuda()
        detail, _, remedy = (missing or "simulated on the host (RINGRT_CUDASIM)").partition(": ")
        yield Finding("CUDA", missing is None, detail, remedy)
        return
    if find_spec("cupy") is None:
        yield Finding("CuPy", False, "not installed", _EXTRAS)
        return
    yield _ask("CuPy", lambda: f"{cupy().__version__}", _EXTRAS)
    yield _ask("GPU", _gpus, "install NVIDIA's driver, or set RINGRT_CUDASIM=1 to simulate one")
    yield _ask("CUDA", _cuda, "install NVIDIA's driver")
    yield _ask("NVRTC", lambda: _dotted(cupy().cuda.nvrtc.getVersion()), _EXTRAS)
    yield _ask("NCCL", _nccl, _EXTRAS)


def _ask(part: str, question: Callable[[], str], remedy: str) -> Finding:
    try:
        return Finding(part, True, question())
    except Exception as error:
        return Finding(part, False, one_line(error), remedy)


def _gpus() -> str:
    runtime = cupy().cuda.runtime
    names = []
    for index in range(runtime.getDeviceCount()):
        properties = runtime.getDeviceProperties(index)
        name, memory = properties["name"].decode(), properties["totalGlobalMem"] >> 30
        names.append(f"{name} (sm_{properties['major']}{properties['minor']}, {memory} GiB)")
    if not names:
        raise RuntimeError("there is none")
    return ", ".join(names)


def _cuda() -> str:
    """The runtime is CuPy's own; a driver of 0 means that there is none."""
    runtime = cupy().cuda.runtime
    driver = runtime.driverGetVersion()
    if not driver:
        raise RuntimeError(f"runtime {_number(runtime.runtimeGetVersion())}, but no driver")
    return f"runtime {_number(runtime.runtimeGetVersion())}, driver {_number(driver)}"


def _nccl() -> str:
    if not nccl().available:
        raise RuntimeError("not installed")
    version: int = nccl().get_version()
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _number(version: int) -> str:
    """12090 is 12.9."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _dotted(version: Any) -> str:
    return ".".join(map(str, version))
