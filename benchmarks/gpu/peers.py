"""What ringrt's speed is measured beside: PyTorch's SDPA with each of its backends, and
flash-attn where it is installed. They read the same elements; SDPA gets them in the layout it
likes best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

#: Backends of SDPA, and the longest sequence that each is measured at.
_SDPA = {"FLASH_ATTENTION": None, "CUDNN_ATTENTION": None, "EFFICIENT_ATTENTION": None,
         "MATH": 2048}  # fmt: skip
#: Modules with a `flash_attn_func`: FlashAttention 2, and 3.
_FLASH = {"flash_attn": "flash-attn", "flash_attn_interface": "flash-attn 3"}


@dataclass
class Peer:
    """`call()` gives out, or the gradients, in the layout of ringrt. Its work is queued on
    PyTorch's current stream."""

    name: str
    call: Callable[[], list[Any]]


def missing_torch() -> str | None:
    """Why there is no PyTorch to measure, or None."""
    if find_spec("torch") is None:
        return "PyTorch is not installed"
    import torch

    return None if torch.cuda.is_available() else f"PyTorch {torch.__version__} has no CUDA here"


def as_torch(x: Any) -> Any:
    """A tensor of a CuPy array of 16-bit elements, in the same memory."""
    import torch

    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}[x.dtype.name]
    return torch.as_tensor(x.view(np.int16), device=f"cuda:{x.device.id}").view(dtype)


def peers(
    tensors: list[Any], causal: bool, backward: bool, length: int
) -> tuple[list[Peer], dict[str, str]]:
    """Those that work here on q, k, v and dout (CuPy arrays), and why the others do not."""
    missing = missing_torch()
    if missing is not None:
        return [], {"PyTorch": missing}
    found, absent = [], {}
    for name, make in _makers(causal, length, absent).items():
        try:
            peer = Peer(name, _call(make, tensors, backward, heads_first=name.startswith("SDPA")))
            peer.call()
            found.append(peer)
        except Exception as error:
            absent[name] = (str(error).strip() or type(error).__name__).splitlines()[0]
    return found, absent


def _makers(causal: bool, length: int, absent: dict[str, str]) -> dict[str, Callable[..., Any]]:
    """out of q, k and v, by name."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def sdpa(backend: Any) -> Callable[..., Any]:
        def call(q: Any, k: Any, v: Any) -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        return call

    def flash(module: str) -> Callable[..., Any]:
        function = import_module(module).flash_attn_func

        def call(q: Any, k: Any, v: Any) -> Any:
            out = function(q, k, v, causal=causal)
            return out[0] if isinstance(out, tuple) else out

        return call

    makers = {}
    for name, longest in _SDPA.items():
        if hasattr(SDPBackend, name) and (longest is None or length <= longest):
            makers[f"SDPA {name.removesuffix('_ATTENTION')}"] = sdpa(getattr(SDPBackend, name))
    for module, name in _FLASH.items():
        if find_spec(module) is None:
            absent[name] = "not installed"
            continue
        try:
            makers[name] = flash(module)
        except Exception as error:
            absent[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return makers


def _call(
    make: Callable[..., Any], tensors: list[Any], backward: bool, heads_first: bool
) -> Callable[[], list[Any]]:
    import torch

    def there(x: Any) -> Any:
        return x.transpose(1, 2).contiguous() if heads_first else x

    def back(x: Any) -> Any:
        return x.transpose(1, 2) if heads_first else x

    *qkv, dout = (there(as_torch(x)) for x in tensors)
    if not backward:
        return lambda: [back(make(*qkv))]
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = make(*leaves)
    return lambda: [back(x) for x in torch.autograd.grad(out, leaves, dout, retain_graph=True)]
