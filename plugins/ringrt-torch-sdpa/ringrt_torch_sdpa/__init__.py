"""PyTorch's own attention kernels as backends: `torch-sdpa` on the host, `torch-sdpa-cuda` on
GPUs. Nothing heavy is imported before one of them is asked for."""

from __future__ import annotations

from importlib.util import find_spec

from ringrt.backend import Backend, BackendContext, BackendSpec
from ringrt.device.driver import missing_cuda, simulated
from ringrt.hookspecs import hookimpl

RINGRT_PROTOCOL = 1


@hookimpl
def ringrt_register_backends() -> list[BackendSpec]:
    """torch-sdpa and torch-sdpa-cuda. Neither is taken unasked."""
    return [
        BackendSpec(
            name="torch-sdpa",
            summary="PyTorch's flash attention for CPUs",
            probe=_missing_torch,
            load=_load_host,
            # Scores are masked after they have met the values of all keys of a tile.
            contains_nan=False,
        ),
        BackendSpec(
            name="torch-sdpa-cuda",
            summary="CUDA GPUs: PyTorch's cuDNN, flash and memory-efficient attention",
            probe=_missing_cuda_torch,
            load=_load_cuda,
            device="cuda",
            rounds_weights=True,
            contains_nan=False,
        ),
    ]


def _missing_torch() -> str | None:
    return None if find_spec("torch") else "PyTorch is not installed: pip install torch"


def _missing_cuda_torch() -> str | None:
    missing = _missing_torch() or missing_cuda()
    if missing is not None:
        return missing
    if simulated():
        return "PyTorch does not run in the CUDA simulator: unset RINGRT_CUDASIM"
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} does not see the GPU: install its build for CUDA"
    return None


def _load_host(context: BackendContext) -> Backend:
    from ringrt_torch_sdpa.host import HostSdpa

    return HostSdpa(context.threads)


def _load_cuda(context: BackendContext) -> Backend:
    from ringrt_torch_sdpa.cuda import CudaSdpa

    return CudaSdpa(context.device)
