"""The backend `flash-attn`: FlashAttention 2, 3 or 4, whichever is installed and fits the GPU.

Nothing heavy is imported before it is asked for.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from ringrt.backend import Backend, BackendContext, BackendSpec
from ringrt.device.driver import missing_cuda, simulated
from ringrt.errors import BackendUnavailable
from ringrt.hookspecs import hookimpl
from ringrt_flash_attn.choose import VARIABLE, choose, installed

RINGRT_PROTOCOL = 1


@hookimpl
def ringrt_register_backends() -> list[BackendSpec]:
    """flash-attn."""
    return [
        BackendSpec(
            name="flash-attn",
            summary="CUDA GPUs: FlashAttention 2, 3 or 4 through PyTorch, 16 bits",
            probe=_probe,
            load=_load,
            # Not taken unasked: whether it is faster than ringrt's own kernels is not measured.
            priority=None,
            device="cuda",
            # Its kernels also round a block's results, and its gradients, to 16 bits.
            rounds_weights=True,
            # In a block that a row sees in part, hidden values are multiplied by 0, not left out.
            contains_nan=False,
        )
    ]


def _probe() -> str | None:
    if find_spec("torch") is None:
        return "PyTorch is not installed: pip install torch"
    if not installed():
        return "FlashAttention is not installed: pip install flash-attn or flash-attn-4"
    if simulated():
        return "PyTorch cannot use the CUDA simulator: unset RINGRT_CUDASIM"
    if (missing := missing_cuda()) is not None:
        return missing
    import torch

    if not torch.cuda.is_available():
        return "this PyTorch finds no CUDA GPU: install a build of it for CUDA"
    major, minor = torch.cuda.get_device_capability()
    try:
        choose(10 * major + minor, installed(), os.environ.get(VARIABLE))
    except BackendUnavailable as error:
        return str(error)
    return None


def _load(context: BackendContext) -> Backend:
    from ringrt_flash_attn.backend import load

    return load(context)
