"""`torch-sdpa`: PyTorch's flash attention for CPUs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from ringrt.backend import band
from ringrt.plan import bands
from ringrt.plan.bands import shape_of
from ringrt.plan.problem import Problem
from ringrt.plan.tiles import Tile
from ringrt.torch_blocks import Tensor
from ringrt_torch_sdpa.blocks import SdpaBackend, drop_infinite, padded
from ringrt_torch_sdpa.schemas import CPU, operators

#: A narrower window goes to the kernel as a mask, in strips of so many rows; a wider one as
#: squares of its width.
STRIP = 128
#: Windows that are cut into squares are wide, so any number of squares is worth it.
_MOST_PARTS = 1 << 30


class HostSdpa(SdpaBackend):
    """See `ringrt.backend.Backend`. `threads` is for PyTorch.

    16-bit inputs are widened to float32: the kernel is no faster in 16 bits without AMX, takes
    its weights from a coarser exponential (lse is off by up to 7e-5), and would round each
    block's result."""

    def __init__(self, threads: int | None = None) -> None:
        super().__init__(threads=threads)
        found = operators((CPU,))
        self._forward, self._backward = found[CPU], found[f"{CPU}_backward"]

    def supports(self, problem: Problem) -> str | None:
        """All but a softcap."""
        return None if problem.softcap is None else "softcap is not implemented"

    def parts(self, tile: Tile, problem: Problem) -> Iterable[Tile]:
        """Full and causal parts, which the kernel aligns top-left; bands of a narrow window."""
        if tile.upper - tile.lower < STRIP:
            return bands.strips(tile, STRIP)
        return bands.parts(tile, square=False, most=_MOST_PARTS)

    def forward(
        self, qkv: list[Tensor], scale: float, tile: Tile, problem: Problem
    ) -> tuple[Tensor, Tensor]:
        """See `SdpaBackend.forward`."""
        qkv = [_readable(x, problem) for x in qkv]
        causal, mask = _masking(qkv, tile)
        out, lse = self._forward(*qkv, 0.0, causal, attn_mask=mask, scale=scale)
        if bool((lse == 0).any()):
            lse = drop_infinite(qkv, out, lse, scale)
        return out[..., : problem.value_dim], lse

    def backward_of(
        self, tensors: list[Tensor], lse: Tensor, scale: float, tile: Tile, problem: Problem
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `SdpaBackend.backward_of`."""
        dout, *qkv, out = (_readable(x, problem) for x in tensors)
        causal, mask = _masking(qkv, tile)
        rest = {"attn_mask": mask, "scale": scale}
        dq, dk, dv = self._backward(dout, *qkv, out, lse, 0.0, causal, **rest)
        dim = problem.head_dim
        return dq[..., :dim], dk[..., :dim], dv[..., : problem.value_dim]


def _readable(x: Tensor, problem: Problem) -> Tensor:
    """x as the kernel reads it: in at least float32, with one dim for q, k and v, whose elements
    lie side by side (of others it reads the wrong ones, and says nothing)."""
    wide = x.float() if x.dtype.itemsize == 2 else x
    wide = padded(wide, max(problem.head_dim, problem.value_dim))
    return wide if wide.stride(-1) == 1 else wide.contiguous()


def _masking(qkv: list[Tensor], tile: Tile) -> tuple[bool, Tensor | None]:
    """Whether the part is causal, and its mask if it is a band."""
    shape = shape_of(tile)
    if shape != "band":
        return shape != "full", None
    rows, keys = tile.q1 - tile.q0, tile.k1 - tile.k0
    return False, _mask(Tile(0, rows, 0, keys, tile.lower, tile.upper), qkv[0].dtype)


@lru_cache(maxsize=32)
def _mask(tile: Tile, dtype: Any) -> Tensor:
    """0 where the tile's pairs are visible and −inf elsewhere, `[rows, keys]`. The strips of a
    window are mostly alike."""
    import torch

    hidden = torch.from_numpy(~band(tile))
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -float("inf"))
