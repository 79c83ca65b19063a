"""Attention on the cores of the host: blockwise, never holding more scores than one block.

Work is cut into tasks of one KV head and a block of query rows; a task absorbs all tiles of
its rows, for the query heads that share the KV head, so that K and V are unpacked once for all
of them and no two tasks write the same state. fp16 and bf16 are widened as they are unpacked.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ringrt.backend import Stream
from ringrt.plan.partition import Array
from ringrt.plan.problem import Problem
from ringrt.plan.tiles import Tile, TileTable
from ringrt.softmax_state import SoftmaxState
from ringrt_backends.cpu_kernel import BLOCK, absorb_block, compile_for

#: Query rows of a task, and keys that it unpacks at a time: K and V of one chunk stay in the
#: second-level cache while the rows pass over them.
_ROWS, _KEYS = 128, 512

#: "No bound" for the kernel: any band index is smaller.
_FAR = 1 << 31


@dataclass(frozen=True, slots=True)
class CpuState:
    """q as `[batch, q_heads, rows, head_dim]` in the state's dtype, packed once a pass."""

    q: Array
    problem: Problem
    softmax: SoftmaxState
    out_dtype: np.dtype[Any]


class CpuBackend:
    """See `ringrt.backend.Backend`. `threads` workers of its own; one runs in the caller."""

    def __init__(self, threads: int) -> None:
        self._threads = max(1, threads)
        self._pool = ThreadPoolExecutor(self._threads, "ringrt-cpu") if threads > 1 else None

    def supports(self, problem: Problem) -> str | None:
        """Everything a `Problem` can say."""
        return None

    def prepare(self, problem: Problem) -> None:
        """Compile the kernel for the dtype that is computed in."""
        compile_for(problem.state_dtype)

    def begin(self, q: Array, problem: Problem, stream: Stream = None) -> CpuState:
        """The empty state."""
        dtype = problem.state_dtype
        batch, rows = q.shape[:2]
        packed = np.ascontiguousarray(_widen(q, dtype).transpose(0, 2, 1, 3))
        softmax = SoftmaxState.empty(batch, problem.q_heads, rows, problem.value_dim, dtype)
        return CpuState(packed, problem, softmax, q.dtype)

    def accumulate(
        self, state: CpuState, k: Array, v: Array, tiles: TileTable, stream: Stream = None
    ) -> None:
        """Absorb all tiles, the rows with the most work first."""
        blocks = [tiles.rows(r, r + _ROWS) for r in range(0, state.q.shape[2], _ROWS)]
        blocks = sorted((b for b in blocks if len(b)), key=lambda b: -b.visible_pairs().sum())
        heads = [(b, h) for b in range(state.problem.batch) for h in range(state.problem.kv_heads)]
        tasks = [partial(_absorb, state, k, v, b, h, rows) for rows in blocks for b, h in heads]
        if self._pool is None:
            for task in tasks:
                task()
        else:
            for future in [self._pool.submit(task) for task in tasks]:
                future.result()

    def finish(self, state: CpuState, stream: Stream = None) -> tuple[Array, Array]:
        """out in the dtype of q, lse in the state's."""
        out, lse = state.softmax.finish()
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(out.astype(state.out_dtype)), lse

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.shutdown()


def _absorb(
    state: CpuState, k: Array, v: Array, batch: int, kv_head: int, tiles: TileTable
) -> None:
    """One task: the tiles of some rows, for the query heads of one KV head."""
    problem = state.problem
    for tile in tiles:
        for key in range(tile.k0, tile.k1, _KEYS):
            cut = slice(key, min(key + _KEYS, tile.k1))
            panels = _panels(_widen(k[batch, cut, kv_head], problem.state_dtype))
            values = np.ascontiguousarray(_widen(v[batch, cut, kv_head], problem.state_dtype))
            for head in range(kv_head * problem.group, (kv_head + 1) * problem.group):
                _absorb_chunk(state, batch, head, tile, cut.start, panels, values)


def _absorb_chunk(
    state: CpuState, batch: int, head: int, tile: Tile, key: int, panels: Array, values: Array
) -> None:
    rows, softmax, problem = slice(tile.q0, tile.q1), state.softmax, state.problem
    shift = key - tile.k0
    absorb_block(
        state.q[batch, head, rows],
        panels,
        values,
        softmax.m[batch, head, rows],
        softmax.z[batch, head, rows],
        softmax.y[batch, head, rows],
        max(tile.lower, -_FAR) + shift,
        min(tile.upper, _FAR) + shift,
        problem.scale,
        problem.softcap or 0.0,
    )


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
