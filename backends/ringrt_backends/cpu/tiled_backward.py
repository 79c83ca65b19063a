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
from ringrt_backends.cpu.compiled import SKEW, SQUARE, Code, Shape, backward_code, heads_of
from ringrt_backends.cpu.layout import (
    ORDINARY,
    Blocks,
    Units,
    blocks_of,
    first_key,
    flip_of,
    grid,
    longest,
    ordinary,
    places_of,
    score_limit,
    source_of,
    units_of,
)
from ringrt_backends.cpu.machine import Machine
from ringrt_backends.cpu.memory import Memory, full, zeros
from ringrt_backends.cpu.pack import Panels
from ringrt_backends.cpu.spans import spans_of
from ringrt_backends.cpu.workers import Workers

#: So many tasks there should be, whatever the number of threads, for sums must not depend on it.
#: With fewer KV heads their keys are dealt out, and each task needs a dq of its own, of so many
#: blocks of rows at a time at most.
_TASKS, _AT_ONCE = 8, 14


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class TiledGrads:
    """q and dout as given, lse and delta `[lanes, rows]` float64, and all packed; dq `[lanes, rows,
    row]` as sums (see `compiled.Shape`), without the scale, and `[parts, lanes, some rows, row]`
    for each part of a head's keys; each thread's scratch, and tiles cut to blocks. `held` is what
    addresses lead to."""

    problem: Problem
    code: Code
    units: Units
    given: tuple[Array, Array, Array, Array]
    packed: Rows
    places: Array
    dq: Array
    parts: Array
    own: list[tuple[Block, Scratch]]
    held: list[Any]
    blocks: WeakKeyDictionary[TileTable, Blocks] = field(default_factory=WeakKeyDictionary)


class TiledBackward:
    """The backward verbs; see `ringrt.backend.Backend`."""

    def __init__(self, machine: Machine, workers: Workers) -> None:
        self._machine, self._workers = machine, workers
        self._memory = Memory()

    def code(self, problem: Problem) -> Code:
        """Compiled for the problem's heads."""
        return backward_code(self._machine, *heads_of(problem))

    def begin(
        self, q: Array, dout: Array, lse: Array, delta: Array, problem: Problem
    ) -> TiledGrads:
        """Pack what belongs to the queries; dq is 0 so far."""
        code, units = self.code(problem), units_of(problem)
        shape, (batch, rows) = code.shape, q.shape[:2]
        lanes, padded = batch * problem.q_heads, -(-rows // SQUARE) * SQUARE
        lse, delta = (
            np.require(x, np.float64, ("C", "W")).reshape(lanes, rows) for x in (lse, delta)
        )
        blocks, kv_lanes = padded // SQUARE, batch * problem.kv_heads
        places, as_it_is = (
            places_of(q, problem, shape),
            np.arange(shape.value_depth, dtype=np.int64)[None],
        )
        sizes = shape.depth, shape.panels
        q_packed = self._pack(q, "q", code, sizes, places, flip_of(problem, shape.pairs), padded)
        sizes = shape.value_depth, shape.value_panels
        dout_packed = self._pack(dout, "dout", code, sizes, as_it_is, np.uint32(0), padded)
        per_row = _per_row(lse, delta, units.unit, padded)
        usable = ordinary(q_packed[2], score_limit(problem)) & ordinary(dout_packed[2])
        usable &= _usable(lse, delta, padded)
        packed_arrays = [*q_packed[:2], *dout_packed[:2]]
        dq = self._memory.take((lanes, padded, shape.row), shape.sums)
        fresh, parts = np.ones((lanes, blocks), np.uint8), dq[None]
        taken = [*packed_arrays, dq]
        if kv_lanes < _TASKS:  # it is added to from elsewhere
            dq[...], fresh[...] = 0, 0
            number = -(-_TASKS // max(1, kv_lanes))
            parts = self._memory.take(
                (number, lanes, _at_once(blocks) * SQUARE, shape.row), shape.sums
            )
            taken.append(parts)
        held = [*packed_arrays, *per_row]
        at = [x.ctypes.data for x in held]
        packed = Rows(
            at[0], at[1], at[2], at[3], at[4], at[5], at[6], padded, usable, fresh,
            longest(q_packed[2]),
        )  # fmt: skip
        own = []
        for _ in range(self._workers.count):
            (block, in_block), (scratch, in_scratch) = _block(shape), _scratch(shape)
            own.append((block, scratch))
            held += in_block + in_scratch
        given = q, dout, lse, delta
        grads = TiledGrads(problem, code, units, given, packed, places, dq, parts, own, held)
        self._memory.give_back_with(grads, taken)
        return grads

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
        begin, end = first_key(tiles, grads.code.shape), int(tiles.table[:, 3].max())
        numbers = -(-(end - begin) // SQUARE)
        parts = min(-(-_TASKS // lanes), numbers)
        left_out = np.zeros((lanes, numbers), np.uint8)
        count, dq = len(blocks.starts) - 1, grads.dq
        at_once = count if parts == 1 else _at_once(count)
        for first in range(0, count, at_once):
            last = min(first + at_once, count)
            own = dq[None] if parts == 1 else grads.parts[:parts]
            rows = (last - first) * SQUARE
            if parts > 1:
                own[:, :, :rows] = 0
            work = Work(
                blocks.starts, blocks.table, first, last, begin, end, parts, grads.problem.group,
                own.ctypes.data, own.shape[2], own.shape[1], left_out,
            )  # fmt: skip
            self._absorb(grads, k, v, dk, dv, work)
            for part in own[:, :, :rows] if parts > 1 else ():
                dq[:, first * SQUARE : last * SQUARE] += part
        shard = careful.Shard(k, v, blocks, SQUARE, begin, end, SQUARE, 1 - left_out)
        careful.absorb_backward(shard, grads.problem, grads.packed, grads.given, dq, dk, dv)

    def finish(self, grads: TiledGrads) -> Array:
        """dq `[batch, rows, q_heads, head_dim]` in float32."""
        problem, (batch, rows) = grads.problem, grads.given[0].shape[:2]
        out = np.empty((batch, rows, problem.q_heads, problem.head_dim), np.float32)
        self._workers.drive(
            backward.finish, grid(len(grads.dq), -(-rows // SQUARE)), grads.code.shape,
            float(problem.scale), grads.code.at("dq_rounded")[0], rows, grads.dq.ctypes.data,
            grads.packed, problem.q_heads, out.ctypes.data, problem.head_dim * 4,
        )  # fmt: skip
        return out

    def _absorb(
        self, grads: TiledGrads, k: Array, v: Array, dk: Array, dv: Array, work: Work
    ) -> None:
        (k_source, k), (v_source, v) = source_of(k), source_of(v)
        limits = np.float32(score_limit(grads.problem)), np.float32(ORDINARY)
        source = Source(k_source, v_source, grads.places.ctypes.data, *limits)
        (dk_to, dk_whole), (dv_to, dv_whole) = source_of(dk), source_of(dv)
        self._workers.drive(
            backward.absorb, grid(k.shape[0] * k.shape[2], work.parts), grads.code.shape,
            grads.code.addresses, grads.units, float(grads.problem.scale), work, grads.packed,
            source, dk_to, dv_to, own=grads.own,
        )  # fmt: skip
        for total, whole in ((dk, dk_whole), (dv, dv_whole)):
            if whole is not total:  # their elements are not side by side
                total[...] = whole

    def _pack(
        self,
        x: Array,
        name: str,
        code: Code,
        sizes: tuple[int, int],
        places: Array,
        flip: np.uint32,
        padded: int,
    ) -> tuple[Array, Array, Array]:
        """q or dout, of so many elements and panels a row, as panels of both kinds, and the sizes
        of their blocks."""
        shape, (depth, count), lanes = code.shape, sizes, x.shape[0] * x.shape[2]
        turned = self._memory.take((lanes, padded // shape.panel, depth, shape.panel), np.uint32)
        each = 2 if shape.pairs else 1
        columns = self._memory.take((lanes, count, padded // each, shape.panel), np.uint32)
        blocks = np.zeros((lanes, padded // SQUARE, 2), np.float32)
        source, x = source_of(x)
        group = lanes // max(1, len(places))
        self._workers.drive(
            pack.pack_queries, grid(*blocks.shape[:2]),
            code.at(f"{name}_turned", f"{name}_columns"), source, places, group, x.shape[1],
            flip, SQUARE, turned,
            Panels(columns.ctypes.data, *columns.shape[1:]), blocks,
        )  # fmt: skip
        return turned, columns, blocks


def _at_once(blocks: int) -> int:
    """Blocks of rows for which the parts of a head's keys have a dq of their own: all in as few
    rounds as may be, for each packs K and V, and in rounds of one size."""
    return -(-blocks // -(-blocks // _AT_ONCE)) if blocks else 1


def _per_row(lse: Array, delta: Array, unit: float, padded: int) -> tuple[Array, Array, Array]:
    """lse in units as the sum of two float32, +inf for rows without keys and beyond the last, so
    that their weights are 0; and delta."""
    lanes, rows = lse.shape
    near = full((lanes, padded), np.inf, np.float32)
    rest, changes = (zeros((lanes, padded), np.float32) for _ in range(2))
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
    blocks = good.reshape(len(lse), padded // SQUARE, SQUARE)
    return np.asarray(blocks.all(axis=2)).view(np.uint8)


def _block(shape: Shape) -> tuple[Block, list[Array]]:
    """One thread's, and the arrays that its addresses lead to."""
    rows = SQUARE + shape.rows
    rows += rows % 2
    k_rows = rows // (2 if shape.pairs else 1)
    k, v = (zeros((rows, depth), np.uint32) for depth in (shape.depth, shape.value_depth))
    k_columns = zeros((shape.panels, k_rows, shape.panel), np.uint32)
    panels = Panels(k_columns.ctypes.data, *k_columns.shape)
    sums = [zeros((rows, row), shape.sums) for row in (shape.row, shape.value_row)]
    at, sizes = [x.ctypes.data for x in (k, v, *sums)], np.zeros((2, 2), np.float32)
    return Block(at[0], at[1], panels, at[2], at[3], sizes), [k, v, k_columns, *sums]


def _scratch(shape: Shape) -> tuple[Scratch, list[Array]]:
    keys, width = SQUARE + shape.rows, SQUARE + SKEW
    size = (keys, width // 2) if shape.pairs else (keys, width)
    p, ds = zeros(size, np.float32), zeros(size, np.float32)
    by_key = zeros((keys // 2 + 1 if shape.pairs else 1, width), np.uint32)
    # A slope goes with each weight, and lies as it does.
    tiles = (keys, shape.panel) if shape.pairs else (keys, width)
    tile, slope = zeros(tiles, np.float32), zeros(tiles, np.float32)
    top = zeros((shape.panel // 2,), np.float32)
    held = [p, ds, by_key, tile, slope, top]
    at, spans = [x.ctypes.data for x in held], spans_of(SQUARE, shape)
    return Scratch(at[0], at[1], at[2], at[3], at[4], at[5], spans), held
