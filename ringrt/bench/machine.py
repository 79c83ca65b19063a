"""What a result was measured on, and with."""

from __future__ import annotations

import os
import platform
import time
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ringrt.bench.cores import can_pin, cores
from ringrt.calls import available_cores
from ringrt.version import __version__

_PACKAGES = ("numpy", "numba", "llvmlite", "ml_dtypes", "torch", "mpi4py", "mpich")
#: What decides how fast a kernel can be.
_FLAGS = (
    "avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve", "bf16",
)  # fmt: skip


def describe() -> dict[str, Any]:
    """The machine, its software, and how it was used."""
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _cpuinfo().get("model name") or platform.processor() or "unknown",
        "features": sorted(flags() & set(_FLAGS)),
        "cores": available_cores(),
        "measured on cores": cores(available_cores()),
        "threads are pinned": can_pin(),
        "load before": list(os.getloadavg()),
        "versions": _versions(),
    }


def flags() -> set[str]:
    """What the processor says it can do; empty where the system does not tell."""
    return set(_cpuinfo().get("flags", _cpuinfo().get("Features", "")).split())


def multiplies_bfloat16_tiles() -> bool:
    """Whether the processor has AMX, which PyTorch uses."""
    return "amx_bf16" in flags()


@cache
def _cpuinfo() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _versions() -> dict[str, str]:
    found = {"ringrt": __version__, "Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
