"""The online softmax state (m, z, y) in NumPy: identity, merge, finish.

Per query row: running maximum m, partition sum z = Σ e^(s−m), accumulator y = Σ e^(s−m)·v.
Absorbing further scores, or merging two states, rescales both to the common maximum
(Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"):

    m' = max(m_a, m_b);  z' = z_a·e^(m_a−m') + z_b·e^(m_b−m');  y' likewise
    out = y / z,  lse = m + ln z

m = −inf is the identity. A row that saw no key has out 0 and lse −inf; there is no finite
stand-in for −inf anywhere, so nothing can be mistaken for a score.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    ) -> SoftmaxState:
        """No key seen yet: the identity, or with sink logits `[heads]` the state that has seen
        one key of that score, whose value is 0."""
        state = cls(
            m=np.full((batch, heads, rows), -np.inf, dtype=dtype),
            z=np.zeros((batch, heads, rows), dtype=dtype),
            y=np.zeros((batch, heads, rows, value_dim), dtype=dtype),
        )
        if sink is not None:
            logits = sink.astype(dtype)[None, :, None]
            state.m[...] = logits
            state.z[...] = logits != -np.inf
        return state

    def rows(self, start: int, stop: int) -> SoftmaxState:
        """A view of some rows: writing to it writes here."""
        cut = slice(start, stop)
        return SoftmaxState(self.m[..., cut], self.z[..., cut], self.y[..., cut, :])

    def absorb(self, other: SoftmaxState) -> None:
        """Merge `other` into this state, in place."""
        m = np.maximum(self.m, other.m)
        keep, add = rescale(self.m, m), rescale(other.m, m)
        self.z[...] = self.z * keep + other.z * add
        self.y[...] = self.y * keep[..., None] + other.y * add[..., None]
        self.m[...] = m

    def finish(self) -> tuple[Array, Array]:
        """out `[batch, rows, heads, value_dim]` and lse `[batch, heads, rows]`, natural log."""
        empty = self.z == 0
        divisor = np.where(empty, 1, self.z)
        out = np.where(empty[..., None], 0, self.y) / divisor[..., None]
        lse = np.where(empty, -np.inf, self.m + np.log(divisor))
        return out.transpose(0, 2, 1, 3), lse.astype(self.m.dtype)


def from_block(out: Array, lse: Array, empty: Array) -> SoftmaxState:
    """The state of one block that a kernel has already finished.

    out `[batch, rows, heads, value_dim]`, lse `[batch, heads, rows]` in natural logarithm;
    `empty` (bool, broadcast to lse) marks the rows that see no key of the block. Emptiness
    comes from the tile's geometry and never from the kernel's lse, because kernels disagree
    on what they report for such a row (+inf, −inf, or a large finite number).
    With m = lse the block's own sum is z = 1 and its accumulator is y = out.
    """
    gone = np.broadcast_to(empty, lse.shape) | (lse == -np.inf)
    m = np.where(gone, -np.inf, lse)
    y = np.where(gone[..., None], 0, out.transpose(0, 2, 1, 3).astype(lse.dtype))
    return SoftmaxState(m, np.where(gone, 0, 1).astype(lse.dtype), y)


def rescale(old: Array, new: Array) -> Array:
    """e^(old − new) for a running maximum that moved from `old` to `new`; 0 where nothing
    had been seen (−inf − −inf would be NaN), NaN where a score was +inf or NaN."""
    with np.errstate(invalid="ignore"):
        return np.where(old == -np.inf, np.zeros_like(old), np.exp(old - new))
