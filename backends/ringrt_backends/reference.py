"""The living definition: plain NumPy, float64 inside, one tile at a time.

Slow on purpose. Every other backend is held to it, and a reader can see here what a backend
must do, step by step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ringrt.backend import Stream, band
from ringrt.device.dtypes import numpy_dtype
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


@dataclass(frozen=True, slots=True)
class ReferenceGrads:
    """q, dout and dq as `[batch, q_heads, rows, dim]`, lse and delta `[batch, q_heads, rows]`,
    all in float64."""

    q: Array
    dout: Array
    lse: Array
    delta: Array
    dq: Array
    problem: Problem


class ReferenceBackend:
    """See `ringrt.backend.Backend`."""

    backward = True
    needs_out = False

    def supports(self, problem: Problem) -> str | None:
        """Everything a `Problem` can say."""
        return None

    def prepare(self, problem: Problem) -> None:
        """Nothing is compiled."""

    def begin(
        self, q: Array, problem: Problem, sink: Array | None = None, stream: Stream = None
    ) -> ReferenceState:
        """The empty state of q's rows, or that of the sink."""
        shape = (q.shape[0], problem.q_heads, q.shape[1], problem.value_dim)
        return ReferenceState(_heads_first(q), problem, SoftmaxState.empty(*shape, "float64", sink))

    def accumulate(
        self, state: ReferenceState, k: Array, v: Array, tiles: TileTable, stream: Stream = None
    ) -> None:
        """Absorb each tile: scores, mask, running maximum, weights, sums."""
        problem = state.problem
        for tile in tiles:
            keys, values = (_per_q_head(x[:, tile.k0 : tile.k1], problem) for x in (k, v))
            softmax = state.softmax.rows(tile.q0, tile.q1)
            visible = band(tile)
            with np.errstate(invalid="ignore", over="ignore"):
                scores, _ = _scores(state.q[:, :, tile.q0 : tile.q1], keys, problem)
                scores = np.where(visible, scores, -np.inf)
                m = np.maximum(softmax.m, scores.max(axis=-1))
                weights, keep = rescale(scores, m[..., None]), rescale(softmax.m, m)
                softmax.z[...] = softmax.z * keep + weights.sum(axis=-1)
                softmax.y[...] = softmax.y * keep[..., None] + _sum(weights, values, visible)
                softmax.m[...] = m

    def finish(self, state: ReferenceState, stream: Stream = None) -> tuple[Array, Array]:
        """out in the dtype of the problem, lse in its state dtype."""
        out, lse = state.softmax.finish()
        with np.errstate(over="ignore"):
            narrow = out.astype(numpy_dtype(state.problem.dtype))
            return narrow, lse.astype(state.problem.state_dtype)

    def begin_backward(
        self,
        q: Array,
        dout: Array,
        lse: Array,
        delta: Array,
        problem: Problem,
        stream: Stream = None,
        out: Array | None = None,
    ) -> ReferenceGrads:
        """dq is 0 so far."""
        wide = _heads_first(q)
        return ReferenceGrads(
            wide,
            _heads_first(dout),
            lse.astype(np.float64),
            delta.astype(np.float64),
            np.zeros_like(wide),
            problem,
        )

    def accumulate_backward(
        self,
        grads: ReferenceGrads,
        k: Array,
        v: Array,
        dk: Array,
        dv: Array,
        tiles: TileTable,
        stream: Stream = None,
    ) -> None:
        """For each tile, with p = e^(s − lse) of the whole row and dp = dout·v:
        dv += pᵀ dout; ds = p (dp − delta); dq += ds k; dk += dsᵀ q (Dao 2023, "FlashAttention-2",
        algorithm 2)."""
        for tile in tiles:
            self._absorb_backward(grads, k, v, dk, dv, tile)

    def finish_backward(self, grads: ReferenceGrads, stream: Stream = None) -> Array:
        """dq `[batch, rows, q_heads, head_dim]` in the state dtype."""
        return grads.dq.transpose(0, 2, 1, 3).astype(grads.problem.state_dtype)

    def close(self) -> None:
        """Nothing is held."""

    def _absorb_backward(
        self, grads: ReferenceGrads, k: Array, v: Array, dk: Array, dv: Array, tile: Tile
    ) -> None:
        problem, rows, cut = grads.problem, slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
        keys, values = _per_q_head(k[:, cut], problem), _per_q_head(v[:, cut], problem)
        q, dout = grads.q[:, :, rows], grads.dout[:, :, rows]
        lse, delta = grads.lse[:, :, rows, None], grads.delta[:, :, rows, None]
        visible = band(tile)
        with np.errstate(invalid="ignore", over="ignore"):
            scores, slope = _scores(q, keys, problem)
            # A row whose scores are all −inf is empty, and has no gradients.
            counted = visible & (lse != -np.inf)
            p = np.where(counted, np.exp(scores - lse), 0)
            dp = dout @ values.swapaxes(-1, -2)
            ds = np.where(counted, p * (dp - delta) * slope, 0)
            grads.dq[:, :, rows] += _sum(ds, keys, visible)
            turned = visible.T
            dk[:, cut] += _per_kv_head(_sum(ds.swapaxes(-1, -2), q, turned), problem, dk.dtype)
            dv[:, cut] += _per_kv_head(_sum(p.swapaxes(-1, -2), dout, turned), problem, dv.dtype)


def _scores(q: Array, k: Array, problem: Problem) -> tuple[Array, Array]:
    """Scores `[batch, q_heads, rows, keys]`, and their derivative with respect to q·k."""
    scores = problem.scale * (q @ k.swapaxes(-1, -2))
    if problem.softcap is None:
        return scores, np.full((1, 1, 1, 1), problem.scale)
    tanh = np.tanh(scores / problem.softcap)
    return problem.softcap * tanh, problem.scale * (1 - tanh**2)


def _sum(weights: Array, x: Array, visible: Array) -> Array:
    """weights @ x, in which an entry that is not visible has no part even if its x is NaN or inf
    (0 · NaN is NaN, so a plain product would let it through)."""
    finite = np.isfinite(x)
    product: Array = weights @ np.where(finite, x, 0)
    for j in np.flatnonzero(~finite.all(axis=(0, 1, 3))):
        rows = visible[:, j]
        stray = np.where(finite[:, :, j], 0, x[:, :, j])
        product[:, :, rows] += weights[:, :, rows, j, None] * stray[:, :, None, :]
    return product


def _heads_first(x: Array) -> Array:
    """`[batch, rows, heads, dim]` to float64 `[batch, heads, rows, dim]`."""
    return x.astype(np.float64).transpose(0, 2, 1, 3)


def _per_q_head(x: Array, problem: Problem) -> Array:
    """K or V for every query head: KV head h serves `group` of them."""
    return np.repeat(_heads_first(x), problem.group, axis=1)


def _per_kv_head(x: Array, problem: Problem, dtype: np.dtype[Any]) -> Array:
    """The sum over the query heads of each KV head, as `[batch, rows, kv_heads, dim]`."""
    batch, _, rows, dim = x.shape
    grouped = x.reshape(batch, problem.kv_heads, problem.group, rows, dim).sum(axis=2)
    return np.asarray(grouped.transpose(0, 2, 1, 3).astype(dtype))
