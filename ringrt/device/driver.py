"""CuPy, or what stands in for it. The only place that imports either."""

from __future__ import annotations

import os
import shutil
import warnings
from importlib.util import find_spec
from typing import Any


def simulated() -> bool:
    """Whether CUDA is to be simulated on the host: `RINGRT_CUDASIM=1`."""
    return os.environ.get("RINGRT_CUDASIM", "0") not in ("", "0")


def cupy() -> Any:
    """The module that offers CuPy's names."""
    if simulated():
        from ringrt.cudasim import api

        return api
    import cupy

    return cupy


def nccl() -> Any:
    """CuPy's NCCL module, whose names are there only where NCCL is."""
    if simulated():
        return cupy().cuda.nccl
    from cupy.cuda import nccl

    return nccl


def missing_cuda() -> str | None:
    """What is missing to run CUDA kernels here, and after a colon what would mend it; None if
    nothing is."""
    if simulated():
        compiler = os.environ.get("CXX", "g++")
        found = shutil.which(compiler)
        return None if found else f"the CUDA simulator needs {compiler}: install it, or set CXX"
    if find_spec("cupy") is None:
        return "CuPy is not installed: pip install 'ringrt[cuda12]' or 'ringrt[cuda13]'"
    module = cupy()
    try:
        count = module.cuda.runtime.getDeviceCount()
    except module.cuda.runtime.CUDARuntimeError as error:
        reason = str(error).split(":")[0]
        return f"there is no usable CUDA GPU ({reason}): install a driver, or set RINGRT_CUDASIM=1"
    if not count:
        return "there is no CUDA GPU: set RINGRT_CUDASIM=1 to simulate one"
    try:
        module.cuda.nvrtc.getVersion()
    except Exception:
        return "NVRTC is not installed: pip install 'ringrt[cuda12]' or 'ringrt[cuda13]'"
    return None


def missing_nccl() -> str | None:
    """The like for NCCL."""
    missing = missing_cuda()
    if missing is not None:
        return missing
    with warnings.catch_warnings():
        # CuPy warns where NCCL is missing; the answer says so.
        warnings.simplefilter("ignore")
        if not nccl().available:
            return "NCCL is not installed: pip install 'ringrt[cuda12]' or 'ringrt[cuda13]'"
    return None
