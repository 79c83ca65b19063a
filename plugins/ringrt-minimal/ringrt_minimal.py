"""The backend `minimal` for ringrt: exact attention in plain NumPy, one query row at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ringrt.backend import Backend, BackendContext, BackendSpec, Stream
from ringrt.device.dtypes import numpy_dtype
from ringrt.hookspecs import hookimpl
from ringrt.plan.partition import Array
from ringrt.plan.problem import Problem
from ringrt.plan.tiles import Tile, TileTable
from ringrt.softmax_state import SoftmaxState, rescale

RINGRT_PROTOCOL = 1


@hookimpl
def ringrt_register_backends() -> list[BackendSpec]:
    """What this plugin brings. ringrt asks once, and imports this module to do so: what is only
    needed to compute is imported in `probe` and `load`."""
    return [
        BackendSpec(
            name="minimal",
            summary="plain NumPy, one query row at a time",
            probe=lambda: None,
            load=_load,
        )
    ]


def _load(context: BackendContext) -> Backend:
    return MinimalBackend()


def _rows(tile: Tile) -> Iterator[tuple[int, slice]]:
    """The tile's rows, each with the keys that it sees: j such that
    lower <= (i − q0) − (j − k0) <= upper. Rows that see none are left out."""
    for i in range(tile.q0, tile.q1):
        diagonal = tile.k0 + i - tile.q0
        first = max(tile.k0, diagonal - tile.upper)
        last = min(tile.k1 - 1, diagonal - tile.lower)
        if first <= last:
            yield i, slice(first, last + 1)


def _grouped(x: Array, problem: Problem) -> Array:
    """Query rows `[batch, rows, q_heads, dim]` as float64 `[batch, rows, kv_heads, group, dim]`:
    the query heads that share a KV head are one axis."""
    shape = (*x.shape[:2], problem.kv_heads, problem.group, x.shape[3])
    return x.astype(np.float64).reshape(shape)


def _heads_first(x: Array) -> Array:
    """Keys or values as float64 `[batch, kv_heads, keys, dim]`."""
    return x.astype(np.float64).transpose(0, 2, 1, 3)


def _scores(q: Array, k: Array, problem: Problem) -> Array:
    """scale · q·k of one row, `[batch, kv_heads, group, keys]`."""
    scores: Array = problem.scale * (q @ k.swapaxes(-1, -2))
    return scores


@dataclass(frozen=True, slots=True)
class State:
    """One rank's queries, as `_grouped` has them, and the softmax state of their rows."""

    q: Array
    problem: Problem
    softmax: SoftmaxState

    def absorb(self, i: int, k: Array, v: Array) -> None:
        """Row i meets the keys that it sees, k and v `[batch, kv_heads, keys, dim]`."""
        scores = _scores(self.q[:, i], k, self.problem)
        m = scores.max(axis=-1)
        p = rescale(scores, m[..., None])
        shape = (len(m), self.problem.q_heads, 1)
        z, y = p.sum(axis=-1).reshape(shape), (p @ v).reshape(*shape, self.problem.value_dim)
        self.softmax.rows(i, i + 1).absorb(SoftmaxState(m.reshape(shape), z, y))


@dataclass(frozen=True, slots=True)
class Grads:
    """q, dout and dq as `_grouped` has them; lse and delta `[batch, kv_heads, group, rows]`."""

    q: Array
    dout: Array
    lse: Array
    delta: Array
    dq: Array
    problem: Problem

    def absorb(self, i: int, k: Array, v: Array, dk: Array, dv: Array) -> None:
        """Row i meets the keys that it sees once more: k and v, and their gradients so far, all
        `[batch, kv_heads, keys, dim]`."""
        q, dout = self.q[:, i], self.dout[:, i]
        p = rescale(_scores(q, k, self.problem), self.lse[..., i, None])
        dp = dout @ v.swapaxes(-1, -2)
        ds = self.problem.scale * p * (dp - self.delta[..., i, None])
        self.dq[:, i] += ds @ k
        dk += ds.swapaxes(-1, -2) @ q
        dv += p.swapaxes(-1, -2) @ dout


class MinimalBackend:
    """See `ringrt.backend.Backend`."""

    backward = True
    needs_out = False

    def supports(self, problem: Problem) -> str | None:
        """All but softcap."""
        return None if problem.softcap is None else "softcap is not implemented"

    def prepare(self, problem: Problem) -> None:
        """Nothing is compiled."""

    def begin(
        self, q: Array, problem: Problem, sink: Array | None = None, stream: Stream = None
    ) -> State:
        """No key has been seen, or only the sink."""
        shape = (q.shape[0], problem.q_heads, q.shape[1], problem.value_dim)
        return State(_grouped(q, problem), problem, SoftmaxState.empty(*shape, "float64", sink))

    def accumulate(
        self, state: State, k: Array, v: Array, tiles: TileTable, stream: Stream = None
    ) -> None:
        """Tile by tile, row by row. NaN and inf are the caller's to see: no warning."""
        k, v = _heads_first(k), _heads_first(v)
        with np.errstate(invalid="ignore", over="ignore"):
            for tile in tiles:
                for i, seen in _rows(tile):
                    state.absorb(i, k[:, :, seen], v[:, :, seen])

    def finish(self, state: State, stream: Stream = None) -> tuple[Array, Array]:
        """out in the problem's dtype, lse in its state dtype."""
        problem = state.problem
        out, lse = state.softmax.finish()
        with np.errstate(over="ignore"):
            return out.astype(numpy_dtype(problem.dtype)), lse.astype(problem.state_dtype)

    def begin_backward(
        self,
        q: Array,
        dout: Array,
        lse: Array,
        delta: Array,
        problem: Problem,
        stream: Stream = None,
        out: Array | None = None,
    ) -> Grads:
        """dq is 0 so far."""
        shape = (len(q), problem.kv_heads, problem.group, q.shape[1])
        lse, delta = (x.astype(np.float64).reshape(shape) for x in (lse, delta))
        q, dout = _grouped(q, problem), _grouped(dout, problem)
        return Grads(q, dout, lse, delta, np.zeros(q.shape), problem)

    def accumulate_backward(
        self,
        grads: Grads,
        k: Array,
        v: Array,
        dk: Array,
        dv: Array,
        tiles: TileTable,
        stream: Stream = None,
    ) -> None:
        """Summed up in float64, and rounded once to the dtype of dk and dv."""
        k, v = _heads_first(k), _heads_first(v)
        more_dk, more_dv = np.zeros_like(k), np.zeros_like(v)
        with np.errstate(invalid="ignore", over="ignore"):
            for tile in tiles:
                for i, seen in _rows(tile):
                    grads.absorb(i, *(x[:, :, seen] for x in (k, v, more_dk, more_dv)))
            dk += more_dk.transpose(0, 2, 1, 3)
            dv += more_dv.transpose(0, 2, 1, 3)

    def finish_backward(self, grads: Grads, stream: Stream = None) -> Array:
        """dq in the state dtype."""
        batch, rows, *_, head_dim = grads.dq.shape
        dq = grads.dq.reshape(batch, rows, grads.problem.q_heads, head_dim)
        with np.errstate(over="ignore"):
            return dq.astype(grads.problem.state_dtype)

    def close(self) -> None:
        """Nothing is held."""
