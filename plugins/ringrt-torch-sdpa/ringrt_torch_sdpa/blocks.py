"""What both backends share: a part of a tile becomes one call of a kernel."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from ringrt.plan.bands import shape_of
from ringrt.plan.problem import Problem
from ringrt.plan.tiles import Tile
from ringrt.torch_blocks import Tensor, TorchBlockBackend


class SdpaBackend(TorchBlockBackend):
    """PyTorch's kernels take `[batch, heads, rows, dim]`, a scale > 0, and causal parts but not
    flipped ones.

    A subclass gives `forward` and `backward_of` of a part that is full or causal (a flipped one
    is turned around, and then causal), or of any band that its own `parts` leaves."""

    @abstractmethod
    def forward(
        self, qkv: list[Tensor], scale: float, tile: Tile, problem: Problem
    ) -> tuple[Tensor, Tensor]:
        """out `[batch, q_heads, rows, value_dim]` and the natural lse `[batch, q_heads, rows]`, of
        q, k and v."""

    @abstractmethod
    def backward_of(
        self, tensors: list[Tensor], lse: Tensor, scale: float, tile: Tile, problem: Problem
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv, of dout, q, k, v and out."""

    def block(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, problem: Problem) -> Any:
        """See `BlockBackend.block`."""
        flipped = shape_of(tile) == "flipped"
        scale, sign = _scale_and_sign(problem)
        qkv = [_turned(x, flipped) for x in (_times(q, sign), k, v)]
        out, lse = self.forward(qkv, scale, tile, problem)
        return _turned_back(out, flipped), lse.flip(2) if flipped else lse

    def block_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        tile: Tile,
        problem: Problem,
    ) -> Any:
        """See `BlockBackend.block_backward`."""
        flipped = shape_of(tile) == "flipped"
        scale, sign = _scale_and_sign(problem)
        tensors = [_turned(x, flipped) for x in (dout, _times(q, sign), k, v, out)]
        # Some of the kernels read lse as if it were contiguous.
        rows = (lse.flip(2) if flipped else lse).contiguous()
        gradients = self.backward_of(tensors, rows, scale, tile, problem)
        dq, dk, dv = (_turned_back(x, flipped) for x in gradients)
        return _times(dq, sign), dk, dv


def _scale_and_sign(problem: Problem) -> tuple[float, int]:
    """Kernels mask scores, or look for the largest of a row, before they scale them: a scale <= 0
    makes +inf or NaN of −inf there. So its sign (or 0) goes into q instead, and so with dq."""
    if problem.scale > 0:
        return problem.scale, 1
    return (-problem.scale, -1) if problem.scale else (1.0, 0)


def _times(x: Tensor, sign: int) -> Tensor:
    return x if sign == 1 else x * sign


def _turned(x: Tensor, flipped: bool) -> Tensor:
    """`[batch, rows, heads, dim]` as `[batch, heads, rows, dim]`, the rows reversed for a flipped
    part."""
    return (x.flip(1) if flipped else x).transpose(1, 2)


def _turned_back(x: Tensor, flipped: bool) -> Tensor:
    x = x.transpose(1, 2)
    return x.flip(1) if flipped else x


def padded(x: Tensor, dim: int) -> Tensor:
    """x with so many elements in its last axis, the new ones 0: scores and sums stay the same."""
    from torch.nn.functional import pad

    return x if x.shape[-1] == dim else pad(x, (0, dim - x.shape[-1]))


def drop_infinite(qkv: list[Tensor], out: Tensor, lse: Tensor, scale: float) -> Tensor:
    """lse of a kernel that reports 0 (and out 0) for a row whose scores are all −inf, with −inf
    for such rows. A score of 0 with values of 0 looks the same, so only rows that can have
    infinite scores come into question: |q| · |k| · dim, of the largest elements, is beyond
    float32 (scaled or not), or not a number."""
    q, k, _ = qkv
    heads, dim = q.shape[1], q.shape[3]
    of_keys = k.abs().amax((2, 3)).repeat_interleave(heads // k.shape[1], dim=1)
    bound = q.abs().amax(3).float() * of_keys.float()[..., None] * dim * max(1, abs(scale))
    empty = (lse == 0) & (out == 0).all(3) & ~(bound < 1e38)
    return lse.masked_fill(empty, -float("inf"))
