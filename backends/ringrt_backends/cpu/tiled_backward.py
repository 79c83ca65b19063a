"""The backward pass by compiled tiles: what is packed when, and who does what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ringrt.plan.partition import Array
from ringrt.plan.problem import Problem
from ringrt.plan.tiles import TileTable
from ringrt_backends.cpu import backward, careful, pack
from ringrt_backends.cpu.backward import Block, Rows, Scratch, Source, Work
from ringrt_backends.cpu.compiled import SKEW, SQUARE, Code, Shape, backward_code, move_code
from ringrt_backends.cpu.layout import (
    ORDINARY,
    Blocks,
    Units,
    address,
    blocks_of,
    flip_of,
    grid,
    has_pairs,
    ordinary,
    orders_of,
    source_of,
    spans_of,
    units_of,
)
from ringrt_backends.cpu.machine import Machine
from ringrt_backends.cpu.pack import Panels
from ringrt_backends.cpu.workers import Workers

#: So many tasks there should be, whatever the number of threads, for sums must not depend on it.
#: With fewer KV heads their keys are dealt out, and each task needs a dq of its own, of so many
#: blocks of rows at a time.
_TASKS, _AT_ONCE = 8, 14


@dataclass(frozen=True, slots=True)
class TiledGrads:
    """q and dout as given, lse and delta `[lanes, rows]` float64, and all packed; dq `[lanes, rows,
    row]` float64, without the scale; each thread's scratch, and tiles cut to blocks. `held` is
    what addresses lead to."""

    problem: Problem
    code: Code
    units: Units
    given: tuple[Array, Array, Array, Array]
    packed: Rows
    orders: Array
    dq: Array
    own: list[tuple[Block, Scratch]]
    held: list[Any]
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
        lse, delta = (
            np.require(x, np.float64, ("C", "W")).reshape(lanes, rows) for x in (lse, delta)
        )
        orders = orders_of(q, problem, shape)
        plain = np.tile(np.arange(shape.value_depth), (batch * problem.kv_heads, 1))
        flip = flip_of(problem, shape.pairs)
        q_packed = self._pack(q, shape, shape.depth, shape.panels, orders, problem.group, flip)
        sizes = shape.value_depth, shape.value_panels
        dout_packed = self._pack(dout, shape, *sizes, plain, problem.group, np.uint32(0))
        per_row = _per_row(lse, delta, units.unit, padded)
        usable = ordinary(q_packed[2]) & ordinary(dout_packed[2]) & _usable(lse, delta, padded)
        held = [*q_packed[:2], *dout_packed[:2], *per_row]
        packed = Rows(*(x.ctypes.data for x in held), padded, usable)
        own = []
        for _ in range(self._workers.count):
            (block, in_block), (scratch, in_scratch) = _block(shape), _scratch(shape)
            own.append((block, scratch))
            held += in_block + in_scratch
        dq = np.zeros((lanes, padded, shape.row))
        given = q, dout, lse, delta
        return TiledGrads(problem, code, units, given, packed, orders, dq, own, held)

    def accumulate(
        self, grads: TiledGrads, k: Array, v: Array, dk: Array, dv: Array, tiles: TileTable
    ) -> None:
        """Add the gradients of all tiles."""
        lanes = k.shape[0] * k.shape[2]
        if not len(tiles) or not lanes:
            return
        blocks = grads.blocks.get(tiles)
        if blocks is None:
            blocks = grads.blocks[tiles] = blocks_of(tiles, grads.given[0].shape[1], SQUARE)
        begin, end = int(tiles.table[:, 2].min()), int(tiles.table[:, 3].max())
        numbers = -(-(end - begin) // SQUARE)
        parts = min(-(-_TASKS // lanes), numbers)
        left_out = np.zeros((lanes, numbers), np.uint8)
        count, dq = len(blocks.starts) - 1, grads.dq
        for first in range(0, count, count if parts == 1 else _AT_ONCE):
            last = count if parts == 1 else min(first + _AT_ONCE, count)
            rows = slice(first * SQUARE, last * SQUARE)
            own = dq[None] if parts == 1 else np.zeros((parts, *dq[:, rows].shape))
            work = Work(
                blocks.starts, blocks.table, first, last, begin, end, parts, grads.problem.group,
                own.ctypes.data, own.shape[2], own.shape[1], left_out,
            )  # fmt: skip
            self._absorb(grads, k, v, dk, dv, work)
            if parts > 1:
                dq[:, rows] += own.sum(axis=0)
        shard = careful.Shard(k, v, blocks, SQUARE, begin, end, SQUARE, 1 - left_out)
        ordinary_rows = grads.packed.ordinary
        careful.absorb_backward(shard, grads.problem, ordinary_rows, grads.given, dq, dk, dv)

    def finish(self, grads: TiledGrads) -> Array:
        """dq `[batch, rows, q_heads, head_dim]` in float32."""
        problem, (batch, rows) = grads.problem, grads.given[0].shape[:2]
        out = np.empty((batch, rows, problem.q_heads, problem.head_dim), np.float32)
        dq, rounding = grads.dq, address(self._move, "round_float32")
        self._workers.drive(
            backward.finish, grid(len(dq), -(-rows // SQUARE)), grads.code.shape,
            float(problem.scale), rounding, rows, dq.ctypes.data, dq.shape[1], problem.q_heads,
            out.ctypes.data, problem.head_dim * 4,
        )  # fmt: skip
        return out

    def _absorb(
        self, grads: TiledGrads, k: Array, v: Array, dk: Array, dv: Array, work: Work
    ) -> None:
        pairs, lanes = grads.code.shape.pairs, k.shape[0] * k.shape[2]
        (k_source, k), (v_source, v) = (source_of(self._move, x, pairs) for x in (k, v))
        source = Source(k_source, v_source, grads.orders.ctypes.data, np.float32(ORDINARY))
        self._workers.drive(
            backward.absorb, grid(lanes, work.parts), grads.code.shape, grads.code.addresses,
            grads.units, float(grads.problem.scale), work, grads.packed, source, dk, dv,
            own=grads.own,
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
        tasks, drive = grid(x.shape[0], blocks), self._workers.drive
        source, x = source_of(self._move, x, shape.pairs)
        drive(pack.pack_turned, tasks, source, orders, group, rows, flip, SQUARE, turned, peaks)
        to = Panels(columns.ctypes.data, *columns.shape[1:])
        drive(pack.pack_columns, tasks, source, rows, SQUARE, to, peaks.copy())
        return turned, columns, peaks


def _per_row(lse: Array, delta: Array, unit: float, padded: int) -> tuple[Array, Array, Array]:
    """lse in units as the sum of two float32, +inf for rows without keys and beyond the last, so
    that their weights are 0; and delta."""
    lanes, rows = lse.shape
    near = np.full((lanes, padded), np.inf, np.float32)
    rest, changes = (np.zeros((lanes, padded), np.float32) for _ in range(2))
    with np.errstate(invalid="ignore", over="ignore"):
        exact = np.where(lse == -np.inf, np.inf, lse / unit)
        near[:, :rows] = exact
        rest[:, :rows] = np.where(np.isfinite(exact), exact - near[:, :rows], 0)
        # Of a row without keys it may be anything.
        changes[:, :rows] = np.where(lse == -np.inf, 0, delta)
    return near, rest, changes


def _usable(lse: Array, delta: Array, padded: int) -> Array:
    """Blocks of rows whose lse and delta are numbers of a usual size, or whose rows are empty; as
    uint8 `[lanes, blocks]`."""
    good = np.ones((len(lse), padded), bool)
    with np.errstate(invalid="ignore"):
        usual = (abs(lse) < ORDINARY) & (abs(delta) < ORDINARY)
    good[:, : lse.shape[1]] = usual | (lse == -np.inf)
    return good.reshape(len(lse), padded // SQUARE, SQUARE).all(axis=2).view(np.uint8)


def _block(shape: Shape) -> tuple[Block, list[Array]]:
    """One thread's, and the arrays that its addresses lead to."""
    rows = SQUARE + shape.rows
    rows += rows % 2
    k_rows = rows // (2 if shape.pairs else 1)
    k, v = (np.zeros((rows, depth), np.uint32) for depth in (shape.depth, shape.value_depth))
    k_columns = np.zeros((shape.panels, k_rows, shape.panel), np.uint32)
    panels = Panels(k_columns.ctypes.data, *k_columns.shape)
    sums = np.zeros((rows, shape.row)), np.zeros((rows, shape.value_row))
    pair = np.zeros((2, shape.panels * shape.panel), np.uint32)
    peaks = np.zeros(2, np.float32)
    block = Block(k.ctypes.data, v.ctypes.data, panels, *sums, pair, peaks)
    return block, [k, v, k_columns]


def _scratch(shape: Shape) -> tuple[Scratch, list[Array]]:
    keys, width = SQUARE + shape.rows, SQUARE + SKEW
    size = (keys, width // 2) if shape.pairs else (keys, width)
    p, ds = np.empty(size, np.float32), np.empty(size, np.float32)
    by_key = np.empty((keys // 2 + 1 if shape.pairs else 1, width), np.uint32)
    # A slope goes with each weight, and lies as it does.
    tiles = (keys, shape.panel) if shape.pairs else (keys, width)
    tile, slope = np.empty(tiles, np.float32), np.empty(tiles, np.float32)
    held = [p, ds, by_key, tile, slope]
    return Scratch(*(x.ctypes.data for x in held), *spans_of(SQUARE, shape)), held
