"""The backward pass by compiled tiles: what is packed when, and who does what."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np

from ringrt.plan.partition import Array
from ringrt.plan.problem import Problem
from ringrt.plan.tiles import TileTable
from ringrt_backends.cpu import backward, pack
from ringrt_backends.cpu.backward import Block, Exact, Factors, Rows, Scratch, Work
from ringrt_backends.cpu.compiled import SKEW, SQUARE, Code, Shape, backward_code, move_code
from ringrt_backends.cpu.layout import (
    Blocks,
    Units,
    address,
    blocks_of,
    flip_of,
    grid,
    has_pairs,
    orders_of,
    source_of,
    units_of,
)
from ringrt_backends.cpu.machine import Machine
from ringrt_backends.cpu.workers import Workers

#: So many tasks there should be, whatever the number of threads, for sums must not depend on it.
#: With fewer KV heads their keys are dealt out, and each task needs a dq of its own, of so many
#: blocks of rows at a time.
_TASKS, _AT_ONCE = 8, 14
#: Largest number that a product may reach: sums of such stay within float32.
_LIMIT = 1e37


@dataclass(frozen=True, slots=True)
class TiledGrads:
    """The packed rows, dq `[lanes, rows, row]` float64, each thread's scratch, and tiles cut to
    blocks."""

    problem: Problem
    code: Code
    factors: Factors
    exact: Exact
    packed: Rows
    orders: Array
    dq: Array
    own: list[tuple[Block, Scratch]]
    rows: int
    batch: int
    blocks: WeakKeyDictionary[TileTable, Blocks] = field(default_factory=WeakKeyDictionary)


class TiledBackward:
    """The backward verbs; see `ringrt.backend.Backend`."""

    def __init__(self, machine: Machine, workers: Workers) -> None:
        self._machine, self._workers = machine, workers
        self._move = move_code(machine)

    def code(self, problem: Problem) -> Code:
        """Compiled for the problem's heads."""
        return backward_code(
            self._machine,
            problem.head_dim,
            problem.value_dim,
            has_pairs(self._machine, problem),
            problem.softcap is not None,
        )

    def begin(self, q: Array, dout: Array, lse: Array, delta: Array, problem: Problem) -> TiledGrads:
        """Pack what belongs to the queries; dq is 0 so far."""
        code, units = self.code(problem), units_of(problem)
        shape, (batch, rows) = code.shape, q.shape[:2]
        lanes, padded = batch * problem.q_heads, -(-rows // SQUARE) * SQUARE
        orders = orders_of(q, problem, shape)
        plain = np.tile(np.arange(shape.value_depth), (batch * problem.kv_heads, 1))
        flip = flip_of(problem, shape.pairs)
        q_packed = self._pack(q, shape, shape.depth, shape.panels, orders, problem.group, flip)
        sizes = shape.value_depth, shape.value_panels
        dout_packed = self._pack(dout, shape, *sizes, plain, problem.group, np.uint32(0))
        lse, delta = (
            np.require(x, np.float64, ("C", "W")).reshape(lanes, rows) for x in (lse, delta)
        )
        softmax = _per_row(lse, delta, units.unit, padded)
        packed = Rows(*q_packed, *dout_packed, *softmax)
        packed.dout_peaks[_unusable(lse, padded)] = np.inf
        own = [(_block(shape), _scratch(shape)) for _ in range(self._workers.count)]
        exact = Exact(lse, delta, problem.scale, problem.softcap or 0.0)
        dq = np.zeros((lanes, padded, shape.row))
        factors = _factors(problem, units)
        return TiledGrads(problem, code, factors, exact, packed, orders, dq, own, rows, batch)

    def accumulate(
        self, grads: TiledGrads, k: Array, v: Array, dk: Array, dv: Array, tiles: TileTable
    ) -> None:
        """Add the gradients of all tiles."""
        lanes = k.shape[0] * k.shape[2]
        if not len(tiles) or not lanes:
            return
        blocks = grads.blocks.get(tiles)
        if blocks is None:
            blocks = grads.blocks[tiles] = blocks_of(tiles, grads.rows, SQUARE)
        begin, end = int(tiles.table[:, 2].min()), int(tiles.table[:, 3].max())
        parts = min(-(-_TASKS // lanes), -(-(end - begin) // SQUARE))
        count = len(blocks.starts) - 1
        if parts == 1:
            work = Work(blocks.starts, blocks.table, 0, count, begin, end, 1, grads.problem.group)
            self._absorb(grads, k, v, dk, dv, grads.dq[None], work)
            return
        for first in range(0, count, _AT_ONCE):
            last = min(first + _AT_ONCE, count)
            rows = slice(first * SQUARE, last * SQUARE)
            dq = np.zeros((parts, *grads.dq[:, rows].shape))
            work = Work(
                blocks.starts, blocks.table, first, last, begin, end, parts, grads.problem.group
            )
            self._absorb(grads, k, v, dk, dv, dq, work)
            with np.errstate(invalid="ignore", over="ignore"):
                grads.dq[:, rows] += dq.sum(axis=0)

    def finish(self, grads: TiledGrads) -> Array:
        """dq `[batch, rows, q_heads, head_dim]` in float32."""
        problem, rows = grads.problem, grads.rows
        out = np.empty((grads.batch, rows, problem.q_heads, problem.head_dim), np.float32)
        rounding = address(self._move, "round_float32")
        self._workers.drive(
            backward.finish, grid(len(grads.dq), -(-rows // SQUARE)), grads.code.shape,
            problem.scale, rounding, rows, grads.dq, problem.q_heads, out,
        )  # fmt: skip
        return out

    def _absorb(
        self, grads: TiledGrads, k: Array, v: Array, dk: Array, dv: Array, dq: Array, work: Work
    ) -> None:
        pairs, lanes = grads.code.shape.pairs, k.shape[0] * k.shape[2]
        (k_source, k), (v_source, v) = (source_of(self._move, x, pairs) for x in (k, v))
        self._workers.drive(
            backward.absorb, grid(lanes, work.parts), grads.code.shape, grads.code.addresses,
            grads.factors, grads.exact, work, grads.packed, k_source, v_source, grads.orders,
            dk, dv, dq, own=grads.own,
        )  # fmt: skip

    def _pack(
        self,
        x: Array,
        shape: Shape,
        depth: int,
        panels: int,
        orders: Array,
        group: int,
        flip: np.uint32,
    ) -> tuple[Array, Array, Array]:
        """q or dout as panels of both kinds, and the peaks of their blocks."""
        rows, lanes = x.shape[1], x.shape[0] * x.shape[2]
        blocks = -(-rows // SQUARE)
        padded = blocks * SQUARE
        turned = np.empty((lanes, padded // shape.panel, depth, shape.panel), np.uint32)
        half = 2 if shape.pairs else 1
        columns = np.zeros((lanes, panels, padded // half, shape.panel), np.uint32)
        peaks = np.zeros((lanes, blocks), np.uint32)
        tasks, drive = grid(lanes, blocks), self._workers.drive
        source, x = source_of(self._move, x, shape.pairs)
        drive(pack.pack_turned, tasks, source, orders, group, rows, flip, SQUARE, turned, peaks)
        drive(
            pack.pack_columns, tasks, source, 0, 0, rows, np.uint32(0), SQUARE, columns, peaks.copy()
        )
        return turned, columns, peaks.view(np.float32)


def _per_row(lse: Array, delta: Array, unit: float, padded: int) -> tuple[Array, Array, Array, Array]:
    """lse in units as the sum of two float32, +inf for rows without keys and beyond the last, so
    that their weights are 0; delta, and the largest of each block."""
    lanes, rows = lse.shape
    near = np.full((lanes, padded), np.inf, np.float32)
    rest, changes = (np.zeros((lanes, padded), np.float32) for _ in range(2))
    with np.errstate(invalid="ignore", over="ignore"):
        exact = np.where(lse == -np.inf, np.inf, lse / unit)
        near[:, :rows] = exact
        rest[:, :rows] = np.where(np.isfinite(exact), exact - near[:, :rows], 0)
        changes[:, :rows] = delta
        peaks = abs(changes).reshape(lanes, -1, SQUARE).max(axis=2)
    return near, rest, changes, peaks


def _unusable(lse: Array, padded: int) -> Array:
    """Blocks of rows in which some lse is NaN or +inf, bool `[lanes, blocks]`."""
    bad = np.zeros((len(lse), padded), bool)
    bad[:, : lse.shape[1]] = np.isnan(lse) | (lse > np.finfo(np.float32).max)
    return bad.reshape(len(lse), -1, SQUARE).any(axis=2)


def _factors(problem: Problem, units: Units) -> Factors:
    """The factors, and the size of products that the compiled kernels are safe with."""
    largest = max(1.0, float(units.scale), float(units.cap))
    limit = _LIMIT / max(problem.head_dim, problem.value_dim, SQUARE) / largest
    return Factors(units.scale, units.cap, limit)


def _block(shape: Shape) -> Block:
    rows = SQUARE + shape.rows
    rows += rows % 2
    return Block(
        np.zeros((rows, shape.depth), np.uint32),
        np.zeros((rows, shape.value_depth), np.uint32),
        np.zeros((shape.panels, rows // (2 if shape.pairs else 1), shape.panel), np.uint32),
        np.zeros((rows, shape.row)),
        np.zeros((rows, shape.value_row)),
        np.zeros(2, np.uint32),
    )


def _scratch(shape: Shape) -> Scratch:
    row, width = np.zeros(shape.panels * shape.panel, np.uint32), SQUARE + SKEW
    keys = SQUARE + shape.rows
    # In bf16 half of it is used: with a dtype of its own Numba would compile once more.
    p, ds = (np.empty((keys, width), np.float32) for _ in range(2))
    by_key = np.empty((keys // 2 + 1 if shape.pairs else 1, width), np.uint32)
    tile = np.empty((2, shape.rows, shape.panel) if shape.pairs else (2, keys, width), np.float32)
    first, last = np.empty(SQUARE, np.int32), np.empty(SQUARE, np.int32)
    low, high = (np.empty(-(-SQUARE // shape.rows), np.int64) for _ in range(2))
    return Scratch(row, row.copy(), p, ds, by_key, tile[0], tile[1], first, last, low, high)
