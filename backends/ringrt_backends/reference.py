"""The living definition: plain NumPy, float64 inside, one tile at a time.

Slow on purpose. Every other backend is held to it, and a reader can see here what a backend
must do, step by step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ringrt.backend import Stream, band
from ringrt.plan.partition import Array
from ringrt.plan.problem import Problem
from ringrt.plan.tiles import Tile, TileTable
from ringrt.softmax_state import SoftmaxState, rescale


@dataclass(frozen=True, slots=True)
class ReferenceState:
    """q in float64 as `[batch, q_heads, rows, head_dim]`, and the state of its rows."""

    q: Array
    problem: Problem
    softmax: SoftmaxState


class ReferenceBackend:
    """See `ringrt.backend.Backend`."""

    def supports(self, problem: Problem) -> str | None:
        """Everything a `Problem` can say."""
        return None

    def prepare(self, problem: Problem) -> None:
        """Nothing is compiled."""

    def begin(self, q: Array, problem: Problem, stream: Stream = None) -> ReferenceState:
        """The empty state of q's rows."""
        batch, rows = q.shape[:2]
        softmax = SoftmaxState.empty(batch, problem.q_heads, rows, problem.value_dim, "float64")
        return ReferenceState(_heads_first(q), problem, softmax)

    def accumulate(
        self, state: ReferenceState, k: Array, v: Array, tiles: TileTable, stream: Stream = None
    ) -> None:
        """Absorb each tile: scores, mask, running maximum, weights, sums."""
        for tile in tiles:
            cut = slice(tile.k0, tile.k1)
            self._absorb(state, _heads_first(k[:, cut]), _heads_first(v[:, cut]), tile)

    def finish(self, state: ReferenceState, stream: Stream = None) -> tuple[Array, Array]:
        """out in the dtype of the problem, lse in its state dtype."""
        out, lse = state.softmax.finish()
        dtype = _numpy_dtype(state.problem.dtype)
        with np.errstate(over="ignore"):
            return out.astype(dtype), lse.astype(state.problem.state_dtype)

    def close(self) -> None:
        """Nothing is held."""

    def _absorb(self, state: ReferenceState, k: Array, v: Array, tile: Tile) -> None:
        problem, softmax = state.problem, state.softmax.rows(tile.q0, tile.q1)
        k, v = (np.repeat(x, problem.group, axis=1) for x in (k, v))
        visible = band(tile)
        with np.errstate(invalid="ignore", over="ignore"):
            scores = problem.scale * (state.q[:, :, tile.q0 : tile.q1] @ k.swapaxes(-1, -2))
            if problem.softcap is not None:
                scores = problem.softcap * np.tanh(scores / problem.softcap)
            scores = np.where(visible, scores, -np.inf)
            m = np.maximum(softmax.m, scores.max(axis=-1))
            weights = rescale(scores, m[..., None])
            keep = rescale(softmax.m, m)
            softmax.z[...] = softmax.z * keep + weights.sum(axis=-1)
            softmax.y[...] = softmax.y * keep[..., None] + _weighted_values(weights, v, visible)
            softmax.m[...] = m


def _weighted_values(weights: Array, v: Array, visible: Array) -> Array:
    """weights @ v, in which a key that a row does not see has no part even if its value is
    NaN or inf (0 · NaN is NaN, so a plain product would let it through)."""
    finite = np.isfinite(v)
    product: Array = weights @ np.where(finite, v, 0)
    for key in np.flatnonzero(~finite.all(axis=(0, 1, 3))):
        rows = visible[:, key]
        stray = np.where(finite[:, :, key], 0, v[:, :, key])
        product[:, :, rows] += weights[:, :, rows, key, None] * stray[:, :, None, :]
    return product


def _heads_first(x: Array) -> Array:
    """`[batch, rows, heads, dim]` to float64 `[batch, heads, rows, dim]`."""
    return x.astype(np.float64).transpose(0, 2, 1, 3)


def _numpy_dtype(name: str) -> np.dtype[Any]:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
