"""The online softmax state (m, z, y): identity, merge, finish.

Per query row: running maximum m, partition sum z = Σ e^(s−m), accumulator y = Σ e^(s−m)·v.
Absorbing further scores, or merging two states, rescales both to the common maximum
(Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"):

    m' = max(m_a, m_b);  z' = z_a·e^(m_a−m') + z_b·e^(m_b−m');  y' likewise
    out = y / z,  lse = m + ln z

m = −inf is the identity. A row that saw no key has out 0 and lse −inf; there is no finite
stand-in for −inf anywhere, so nothing can be mistaken for a score.

Written for NumPy arrays, and in what PyTorch names as NumPy does, so that the same lines merge
tensors, on whatever device they lie.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringrt.plan.partition import Array


@dataclass(slots=True)
class SoftmaxState:
    """m, z: `[batch, heads, rows]`; y: `[batch, heads, rows, value_dim]`; one floating dtype."""

    m: Array
    z: Array
    y: Array

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        rows: int,
        value_dim: int,
        dtype: str,
        sink: Array | None = None,
        zeros: Callable[[tuple[int, ...], str], Array] = np.zeros,
    ) -> SoftmaxState:
        """No key seen yet: the identity, or with sink logits `[heads]` the state that has seen
        one key of that score, whose value is 0. `zeros(shape, dtype)` makes the arrays."""
        shape = batch, heads, rows
        state = cls(zeros(shape, dtype), zeros(shape, dtype), zeros((*shape, value_dim), dtype))
        state.m[...] = -np.inf
        if sink is not None:
            for head, logit in enumerate(sink.astype(dtype).tolist()):
                state.m[:, head] = logit
                state.z[:, head] = logit != -np.inf
        return state

    def rows(self, start: int, stop: int) -> SoftmaxState:
        """A view of some rows: writing to it writes here."""
        cut = slice(start, stop)
        return SoftmaxState(self.m[..., cut], self.z[..., cut], self.y[..., cut, :])

    def absorb(self, other: SoftmaxState) -> None:
        """Merge `other` into this state, in place."""
        m = module_of(self.m).maximum(self.m, other.m)
        keep, add = rescale(self.m, m), rescale(other.m, m)
        self.z[...] = self.z * keep + other.z * add
        self.y[...] = self.y * keep[..., None] + other.y * add[..., None]
        self.m[...] = m

    def finish(self) -> tuple[Array, Array]:
        """out `[batch, rows, heads, value_dim]` and lse `[batch, heads, rows]`, natural log."""
        xp, empty = module_of(self.z), self.z == 0
        divisor = xp.where(empty, 1, self.z)
        out = xp.where(empty[..., None], 0, self.y) / divisor[..., None]
        lse = xp.where(empty, -np.inf, self.m + xp.log(divisor))
        return out.swapaxes(1, 2), lse


def from_block(out: Array, lse: Array, empty: Array | bool) -> SoftmaxState:
    """The state of one block that a kernel has already finished.

    out `[batch, rows, heads, value_dim]`, lse `[batch, heads, rows]` in natural logarithm;
    `empty` (bool, broadcast to lse) marks the rows that see no key of the block. Emptiness
    comes from the tile's geometry and never from the kernel's lse, because kernels disagree
    on what they report for such a row (+inf, −inf, or a large finite number).
    With m = lse the block's own sum is z = 1 and its accumulator is y = out.
    """
    xp, gone = module_of(lse), empty | (lse == -np.inf)
    nothing = xp.zeros_like(lse)
    y = xp.where(gone[..., None], nothing[..., None], out.swapaxes(1, 2))
    return SoftmaxState(xp.where(gone, -np.inf, lse), xp.where(gone, nothing, 1), y)


def rescale(old: Array, new: Array) -> Array:
    """e^(old − new) for a running maximum that moved from `old` to `new`; 0 where nothing
    had been seen (−inf − −inf would be NaN), NaN where a score was +inf or NaN."""
    xp = module_of(old)
    with np.errstate(invalid="ignore"):
        weight: Array = xp.where(old == -np.inf, xp.zeros_like(old), xp.exp(old - new))
    return weight


def module_of(x: Any) -> Any:
    """The module whose functions take x: NumPy for its arrays, PyTorch for its tensors."""
    return sys.modules[type(x).__module__.partition(".")[0]]
