"""Tries what this machine can do, rather than asking what is installed."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ringrt.calls import available_cores
from ringrt.cli.doctor_cuda import findings
from ringrt.device.driver import cupy
from ringrt.launch import attention
from ringrt.plugins import one_line
from ringrt.registry import missing_for, registry
from ringrt.version import __version__

#: Two MPI ranks that pass one message round, through the product's own transport.
_MPI_TRIAL = """
import numpy, ringrt
with ringrt.Ring.from_mpi(backend="reference", timeout=20) as ring:
    x = numpy.ones((1, 2, 1, 4), "float32")
    out, _ = ring.attention(x, x, x)
    if ring.rank == 0:
        print(ring.size, float(out.sum()))
"""
_TRIAL_TIMEOUT = 60
#: Open MPI by itself refuses root, and more ranks than cores.
_OPEN_MPI_TRIAL = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


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
    for spec in registry().backends.values():
        missing = missing_for(spec)
        if missing is not None:
            yield _missing(f"backend {spec.name}", missing)
        elif spec.priority is not None or spec.device == "cuda":
            yield _try_backend(spec.name)
    yield _try_mpi()
    for part, works, detail, remedy in findings():
        yield Check(part, works, detail, remedy)
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
    right = error_size < 1e-5
    return Check(what, right, detail, "" if right else "report it", essential)


def _try_nccl() -> Check:
    """Two thread ranks, with a GPU for each."""
    missing = missing_for(registry().transports["nccl"])
    if missing is not None:
        return _missing("transport nccl", missing)
    if cupy().cuda.runtime.getDeviceCount() < 2:
        return Check("transport nccl", True, "not tried: there is one GPU")
    return _try_backend("cupy", transport="nccl")


def _try_mpi() -> Check:
    name = "transport mpi"
    missing = missing_for(registry().transports["mpi"])
    if missing is not None:
        return _missing(name, missing)
    mpirun = _mpirun()
    if mpirun is None:
        return Check(name, False, "there is no mpirun", "pip install 'ringrt[mpi]'")
    command = [mpirun, "-n", "2", sys.executable, "-c", _MPI_TRIAL]
    try:
        trial = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TRIAL_TIMEOUT,
            env=os.environ | _OPEN_MPI_TRIAL,
        )
    except subprocess.TimeoutExpired:
        return Check(name, False, f"{mpirun} -n 2 did not end in {_TRIAL_TIMEOUT} s", _MPI_REMEDY)
    if trial.returncode == 0 and trial.stdout.split() == ["2", "8.0"]:
        return Check(name, True, f"two processes by {mpirun}")
    said = (trial.stderr or trial.stdout).strip().splitlines()
    return Check(name, False, f"{mpirun}: {said[-1] if said else 'wrong answer'}", _MPI_REMEDY)


_MPI_REMEDY = "use the mpirun of the MPI library that mpi4py was built for"


def _mpirun() -> str | None:
    """The one beside this Python before any other."""
    beside = shutil.which("mpirun", path=os.path.dirname(sys.executable))
    return beside or shutil.which("mpirun")


def _missing(name: str, text: str) -> Check:
    """A probe's words: what is missing, and after the colon what would mend it."""
    detail, _, remedy = text.partition(": ")
    return Check(name, False, detail, remedy)
