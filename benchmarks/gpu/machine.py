"""What this machine is."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from typing import Any

from ringrt import __version__
from ringrt.device.driver import cupy, missing_nccl, simulated

_PACKAGES = ("numpy", "ml_dtypes", "torch", "flash-attn", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


def describe() -> dict[str, Any]:
    """GPUs and versions; None for what is not there."""
    module = cupy()
    runtime = module.cuda.runtime
    gpus = []
    for index in range(runtime.getDeviceCount()):
        properties = runtime.getDeviceProperties(index)
        gpus.append({
            "name": properties["name"].decode(),
            "compute capability": f"{properties['major']}.{properties['minor']}",
            "multiprocessors": properties["multiProcessorCount"],
            "memory": properties["totalGlobalMem"],
            "shared memory of a block": properties["sharedMemPerBlockOptin"],
        })  # fmt: skip
    return {
        "simulated": simulated(),
        "gpus": gpus,
        "driver": runtime.driverGetVersion(),
        "runtime": runtime.runtimeGetVersion(),
        "nvrtc": None if simulated() else ".".join(map(str, module.cuda.nvrtc.getVersion())),
        "nccl": None if missing_nccl() else module.cuda.nccl.get_version(),
        "cupy": getattr(module, "__version__", None),
        "ringrt": __version__,
        "python": sys.version.split()[0],
        "system": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def line(machine: dict[str, Any]) -> str:
    """In one line."""
    gpus, nccl = machine["gpus"], machine["nccl"]
    names = " and ".join(sorted({gpu["name"] for gpu in gpus}))
    parts = [f"{len(gpus)} × {names}", f"driver {machine['driver']}"]
    parts += [f"CUDA {machine['runtime']}", f"NCCL {nccl}" if nccl else "no NCCL"]
    parts += [f"{name} {machine[name]}" for name in ("cupy", "ringrt") if machine[name]]
    parts += [f"{name} {version}" for name, version in machine["packages"].items() if version]
    return ", ".join(parts)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
