"""The plain path: Numba alone, blockwise. It computes in float64, and in float32 where there is no
compiled vector code for the machine; one tenth as fast as that.

Work is cut into tasks that share nothing they write. In forward a task is one KV head and a
block of query rows, for the query heads that share the KV head, so that K and V are unpacked
once for all of them. In backward it is one KV head, which owns its dk and dv and the dq of its
query heads. fp16 and bf16 are widened as they are unpacked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ringrt.plan.partition import Array
from ringrt.plan.problem import Problem
from ringrt.plan.tiles import Tile, TileTable
from ringrt.softmax_state import SoftmaxState
from ringrt_backends.cpu.plain_kernel import BLOCK, absorb, absorb_backward, compile_for
from ringrt_backends.cpu.workers import Workers

#: Query rows of a task, and keys that it unpacks at a time: K and V of one chunk stay in the
#: second-level cache while the rows pass over them.
_ROWS, _KEYS = 128, 512

#: "No bound" for the kernels: any band index is smaller.
_FAR = 1 << 31


@dataclass(frozen=True, slots=True)
class PlainState:
    """q as `[batch, q_heads, rows, head_dim]` in the dtype that is computed in, packed once a
    pass, and the state of its rows in float64: it never travels, and sums over a million keys
    would lose bits in float32."""

    q: Array
    problem: Problem
    softmax: SoftmaxState
    out_dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class PlainGrads:
    """q and dout as `[batch, q_heads, rows, dim]`, packed once; lse, delta `[batch, q_heads,
    rows]` and dq like q, in float64."""

    q: Array
    dout: Array
    lse: Array
    delta: Array
    dq: Array
    problem: Problem


class Plain:
    """The verbs of a backend; see `ringrt.backend.Backend`."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def prepare(self, problem: Problem) -> None:
        """Compile the kernels for the dtype that is computed in."""
        compile_for(problem.state_dtype)

    def begin(self, q: Array, problem: Problem, sink: Array | None) -> PlainState:
        """The empty state, or that of the sink."""
        shape = (q.shape[0], problem.q_heads, q.shape[1], problem.value_dim)
        softmax = SoftmaxState.empty(*shape, "float64", sink)
        return PlainState(_heads_first(q, problem.state_dtype), problem, softmax, q.dtype)

    def accumulate(self, state: PlainState, k: Array, v: Array, tiles: TileTable) -> None:
        """Absorb all tiles, the rows with the most work first."""
        blocks = [tiles.rows(r, r + _ROWS) for r in range(0, state.q.shape[2], _ROWS)]
        blocks = sorted((b for b in blocks if len(b)), key=lambda b: -b.visible_pairs().sum())
        heads = _heads(state.problem)
        tasks = [partial(_absorb, state, k, v, *at, rows) for rows in blocks for at in heads]
        self._workers.each(tasks)

    def finish(self, state: PlainState) -> tuple[Array, Array]:
        """out in the dtype of q, lse in the problem's state dtype."""
        out, lse = state.softmax.finish()
        with np.errstate(over="ignore"):
            narrow = np.ascontiguousarray(out.astype(state.out_dtype))
            return narrow, lse.astype(state.problem.state_dtype)

    def begin_backward(
        self, q: Array, dout: Array, lse: Array, delta: Array, problem: Problem
    ) -> PlainGrads:
        """dq is 0 so far."""
        dtype = problem.state_dtype
        packed = _heads_first(q, dtype)
        return PlainGrads(
            packed,
            _heads_first(dout, dtype),
            np.require(lse, np.float64, ("C", "W")),
            np.require(delta, np.float64, ("C", "W")),
            np.zeros(packed.shape),
            problem,
        )

    def accumulate_backward(
        self, grads: PlainGrads, k: Array, v: Array, dk: Array, dv: Array, tiles: TileTable
    ) -> None:
        """Add the gradients of all tiles."""
        heads = _heads(grads.problem)
        tasks = [partial(_absorb_backward, grads, k, v, dk, dv, *at, tiles) for at in heads]
        self._workers.each(tasks)

    def finish_backward(self, grads: PlainGrads) -> Array:
        """dq `[batch, rows, q_heads, head_dim]` in the state dtype."""
        dq = grads.dq.transpose(0, 2, 1, 3)
        return np.ascontiguousarray(dq, dtype=grads.problem.state_dtype)


def _heads(problem: Problem) -> list[tuple[int, int]]:
    return [(b, h) for b in range(problem.batch) for h in range(problem.kv_heads)]


def _absorb(
    state: PlainState,
    k: Array,
    v: Array,
    batch: int,
    kv_head: int,
    tiles: TileTable,
    check: Callable[[], None],
) -> None:
    """One forward task: the tiles of some rows, for the query heads of one KV head. `check`
    raises if the work is to be broken off."""
    problem, softmax = state.problem, state.softmax
    for tile in tiles:
        rows = slice(tile.q0, tile.q1)
        for cut, bounds in _chunks(tile):
            check()
            panels = _panels(_unpack(k[batch, cut, kv_head], problem.state_dtype))
            values = _unpack(v[batch, cut, kv_head], problem.state_dtype)
            for head in range(kv_head * problem.group, (kv_head + 1) * problem.group):
                absorb(
                    state.q[batch, head, rows],
                    panels,
                    values,
                    softmax.m[batch, head, rows],
                    softmax.z[batch, head, rows],
                    softmax.y[batch, head, rows],
                    *bounds,
                    problem.scale,
                    problem.softcap or 0.0,
                )


def _absorb_backward(
    grads: PlainGrads,
    k: Array,
    v: Array,
    dk: Array,
    dv: Array,
    batch: int,
    kv_head: int,
    tiles: TileTable,
    check: Callable[[], None],
) -> None:
    """One backward task: all tiles, for the query heads of one KV head. `check` raises if the
    work is to be broken off."""
    problem = grads.problem
    for tile in tiles:
        for cut, (low, high) in _chunks(tile):
            check()
            # Rows that see any key of the chunk: i >= low and i < keys + high.
            first = max(0, low)
            last = min(tile.q1 - tile.q0, cut.stop - cut.start + high)
            if first >= last:
                continue
            rows = slice(tile.q0 + first, tile.q0 + last)
            keys = _unpack(k[batch, cut, kv_head], problem.state_dtype)
            values = _unpack(v[batch, cut, kv_head], problem.state_dtype)
            panels = _panels(keys), _panels(values)
            sums = np.zeros(keys.shape), np.zeros(values.shape)
            for head in range(kv_head * problem.group, (kv_head + 1) * problem.group):
                absorb_backward(
                    grads.q[batch, head, rows],
                    grads.dout[batch, head, rows],
                    grads.lse[batch, head, rows],
                    grads.delta[batch, head, rows],
                    grads.dq[batch, head, rows],
                    keys,
                    values,
                    *panels,
                    *sums,
                    low - first,
                    high - first,
                    problem.scale,
                    problem.softcap or 0.0,
                )
            with np.errstate(invalid="ignore", over="ignore"):
                dk[batch, cut, kv_head] += sums[0]
                dv[batch, cut, kv_head] += sums[1]


def _chunks(tile: Tile) -> list[tuple[slice, tuple[int, int]]]:
    """The tile's keys in chunks, and the band's bounds in each."""
    low, high = max(tile.lower, -_FAR), min(tile.upper, _FAR)
    chunks = []
    for key in range(tile.k0, tile.k1, _KEYS):
        shift = key - tile.k0
        chunks.append((slice(key, min(key + _KEYS, tile.k1)), (low + shift, high + shift)))
    return chunks


def _heads_first(x: Array, dtype: str) -> Array:
    """`[batch, rows, heads, dim]` as a contiguous `[batch, heads, rows, dim]`."""
    return np.require(_widen(x, dtype).transpose(0, 2, 1, 3), requirements=("C", "W"))


def _unpack(x: Array, dtype: str) -> Array:
    """`[keys, dim]`, contiguous. Writable too: Numba would compile its kernels once more for
    arrays that are not."""
    return np.require(_widen(x, dtype), requirements=("C", "W"))


def _panels(x: Array) -> Array:
    """`[keys, dim]` as `[blocks, dim, BLOCK]`, the last block filled up with zeros."""
    keys, dim = x.shape
    blocks = -(-keys // BLOCK)
    padded = np.zeros((blocks * BLOCK, dim), x.dtype)
    padded[:keys] = x
    return np.ascontiguousarray(padded.reshape(blocks, BLOCK, dim).transpose(0, 2, 1))


def _widen(x: Array, dtype: str) -> Array:
    """x in the dtype that is computed in. bf16 is the upper half of an fp32, so it takes a
    shift, which NumPy does without holding the interpreter's lock."""
    if x.dtype.name == "bfloat16":
        return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return x.astype(dtype, copy=False)
