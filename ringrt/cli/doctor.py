"""Tries what this machine can do, rather than asking what is installed."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ringrt.calls import available_cores
from ringrt.cli import doctor_cuda, doctor_processes
from ringrt.device.driver import cupy
from ringrt.launch import attention
from ringrt.plugins import one_line
from ringrt.registry import missing_for, registry
from ringrt.version import __version__

_TRIAL_TIMEOUT = 60


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried. Without an essential one, nothing runs."""

    name: str
    works: bool
    detail: str
    remedy: str = ""
    essential: bool = False


def examine() -> Iterator[Check]:
    """All checks, one after the other."""
    yield Check("ringrt", True, f"{__version__}, Python {platform.python_version()}, "
                f"NumPy {np.__version__}, {available_cores()} cores", essential=True)  # fmt: skip
    for problem in registry().problems:
        yield Check("plugin", False, problem, "update or remove the plugin")
    if "reference" not in registry().backends:
        words = "it is not there", "unblock ringrt's backends"
        yield Check("backend reference", False, *words, essential=True)
    for spec in registry().backends.values():
        missing = missing_for(spec)
        if missing is not None:
            yield _missing(f"backend {spec.name}", missing)
        elif spec.priority is not None or spec.device == "cuda":
            yield _try_backend(spec.name)
    for finding in itertools.chain(doctor_processes.findings(), doctor_cuda.findings()):
        yield Check(*finding)
    yield _try_nccl()


def _try_backend(name: str, transport: str = "threads") -> Check:
    """Two thread ranks against one of the reference backend."""
    what = f"backend {name}" if transport == "threads" else f"transport {transport}"
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 33, heads, 16), dtype=np.float32) for heads in (4, 2, 2))
    essential = name == "reference"
    try:
        expected, _ = attention(q, k, v, ranks=1, backend="reference", causal=True)
        out, _ = attention(
            q, k, v, ranks=2, backend=name, transport=transport, causal=True, timeout=_TRIAL_TIMEOUT
        )
    except Exception as error:
        return Check(what, False, one_line(error), "report it", essential)
    error_size = float(np.max(abs(out - expected)))
    detail = f"two thread ranks, max difference to the definition {error_size:.1e}"
    describe = registry().backends[name].detail
    if describe is not None:
        detail += f"; {describe()}"
    right = error_size < 1e-5
    return Check(what, right, detail, "" if right else "report it", essential)


def _try_nccl() -> Check:
    """Two thread ranks, with a GPU for each."""
    spec = registry().transports.get("nccl")
    missing = missing_for(spec) if spec else "it is not there: unblock ringrt's transports"
    if missing is not None:
        return _missing("transport nccl", missing)
    if cupy().cuda.runtime.getDeviceCount() < 2:
        return Check("transport nccl", True, "not tried: there is one GPU")
    return _try_backend("cupy", transport="nccl")


def _missing(name: str, text: str) -> Check:
    """A probe's words: what is missing, and after the colon what would mend it."""
    detail, _, remedy = text.partition(": ")
    return Check(name, False, detail, remedy)
