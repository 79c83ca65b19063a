"""PyTorch's three kernels for GPUs, with one face.

Each takes q `[batch, q_heads, rows, head_dim]`, k and v `[batch, kv_heads, keys, dim]`, gives out
and the natural lse `[batch, q_heads, rows]` with −inf for a row without finite scores; and
backward dq, dk and dv. Nothing is dropped out. `causal` is for as many rows as keys.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any, Protocol

from ringrt.torch_blocks import Tensor, per_kv_head, per_query_head
from ringrt_torch_sdpa.blocks import drop_infinite
from ringrt_torch_sdpa.choose import Name
from ringrt_torch_sdpa.schemas import CUDNN, EFFICIENT, FLASH

INF = float("inf")
#: Rows of lse as the memory-efficient kernel reads them.
_LSE_ROWS = 32
_Gradients = tuple[Tensor, Tensor, Tensor]


class Kernel(Protocol):
    """What follows has in common."""

    #: q, k and v must have one dim.
    one_dim: bool

    def forward(self, qkv: list[Tensor], causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """out and lse."""

    def backward(
        self, dout: Tensor, qkv: list[Tensor], out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> _Gradients:
        """dq, dk and dv; lse is contiguous."""


class Cudnn:
    """cuDNN's. Its backward pass is not the same twice."""

    one_dim = False

    def __init__(self, operators: dict[str, Any]) -> None:
        self._forward, self._backward = operators[CUDNN], operators[f"{CUDNN}_backward"]
        self._axes_of_lse = cache(self._ask_axes_of_lse)

    def forward(self, qkv: list[Tensor], causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """lse has a fourth axis of 1 in some versions of PyTorch."""
        out, lse, *_ = self._forward(*qkv, None, True, 0.0, causal, False, scale=scale)
        return out, _without_infinity(out, lse.reshape(lse.shape[:3]))

    def backward(
        self, dout: Tensor, qkv: list[Tensor], out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> _Gradients:
        """lse is handed over with the axes that forward would have given it."""
        seed = _number(dout)
        lse = lse[..., None] if self._axes_of_lse() == 4 else lse
        lengths = None, None, dout.shape[2], qkv[1].shape[2]
        gradients: _Gradients = self._backward(
            dout, *qkv, out, lse, seed, seed, None, *lengths, 0.0, causal, scale=scale
        )
        return gradients

    def _ask_axes_of_lse(self) -> int:
        """From what the operator says of tensors without content."""
        import torch

        x = torch.empty(1, 1, 8, 8, dtype=torch.float16, device="meta")
        axes: int = self._forward(x, x, x, None, True, scale=1.0)[1].dim()
        return axes


class Flash:
    """FlashAttention 2."""

    one_dim = True

    def __init__(self, operators: dict[str, Any]) -> None:
        self._forward, self._backward = operators[FLASH], operators[f"{FLASH}_backward"]

    def forward(self, qkv: list[Tensor], causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """lse is +inf for a row without finite scores, or with NaN among them."""
        out, lse, *_ = self._forward(*qkv, 0.0, causal, False, scale=scale)
        return out, _without_infinity(out, lse)

    def backward(
        self, dout: Tensor, qkv: list[Tensor], out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> _Gradients:
        """The same twice."""
        import torch

        state = torch.empty(2, dtype=torch.uint64, device=dout.device)
        lengths = None, None, dout.shape[2], qkv[1].shape[2]
        with deterministic():
            gradients: _Gradients = self._backward(
                dout, *qkv, out, lse, *lengths, 0.0, causal, state, _number(dout), scale=scale
            )
        return gradients


class Efficient:
    """The memory-efficient kernel, which alone takes float32. It knows no groups of heads."""

    one_dim = False

    def __init__(self, operators: dict[str, Any]) -> None:
        self._forward, self._backward = operators[EFFICIENT], operators[f"{EFFICIENT}_backward"]

    def forward(self, qkv: list[Tensor], causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """lse has a multiple of 32 rows, the last of them of nothing."""
        q, k, v = _same_heads(qkv)
        out, lse, *_ = self._forward(q, k, v, None, True, 0.0, causal, scale=scale)
        return out, drop_infinite([q, k, v], out, lse[..., : q.shape[2]], scale)

    def backward(
        self, dout: Tensor, qkv: list[Tensor], out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> _Gradients:
        """The same twice. lse gets its further rows, +inf as forward leaves them."""
        from torch.nn.functional import pad

        q, k, v = _same_heads(qkv)
        lse = pad(lse, (0, -lse.shape[2] % _LSE_ROWS), value=INF)
        seed, wanted = _number(dout), [True, True, True, False]
        with deterministic():
            dq, dk, dv, _ = self._backward(
                dout, q, k, v, None, out, lse, seed, seed, 0.0, wanted, causal, scale=scale
            )
        group = q.shape[1] // qkv[1].shape[1]
        dk, dv = (per_kv_head(x.transpose(1, 2), group).transpose(1, 2) for x in (dk, dv))
        return dq, dk, dv


def kernels(operators: dict[str, Any]) -> dict[Name, Kernel]:
    """All three."""
    return {
        "cudnn": Cudnn(operators),
        "flash": Flash(operators),
        "efficient": Efficient(operators),
    }


def _without_infinity(out: Tensor, lse: Tensor) -> Tensor:
    """lse with −inf in place of +inf, or with NaN where out has it."""
    import torch

    of_row = torch.where(out[..., 0].isnan(), float("nan"), -INF)
    return torch.where(lse == INF, of_row, lse)


def _same_heads(qkv: list[Tensor]) -> list[Tensor]:
    q, *kv = qkv
    group = q.shape[1] // kv[0].shape[1]
    return [q, *(per_query_head(x.transpose(1, 2), group).transpose(1, 2) for x in kv)]


def _number(like: Tensor) -> Tensor:
    """Where a kernel wants the seed of a dropout that there is not."""
    import torch

    return torch.empty((), dtype=torch.int64, device=like.device)


_lock = threading.Lock()
_inside = 0
_before = (False, False)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """PyTorch's switch for kernels whose result does not depend on chance is on inside, which they
    look at when they are called. It is one for all threads: the first that comes in turns it on,
    the last that goes out puts it back."""
    import torch

    global _inside, _before
    with _lock:
        if not _inside:
            on = torch.are_deterministic_algorithms_enabled()
            _before = on, torch.is_deterministic_algorithms_warn_only_enabled()
            # The public function would change how torch.compile works as well.
            torch._C._set_deterministic_algorithms(True, warn_only=False)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                on, warn_only = _before
                torch._C._set_deterministic_algorithms(on, warn_only=warn_only)
