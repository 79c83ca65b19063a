"""The forward pass by compiled tiles: what is packed when, and who does what.

K and V are packed in chunks, so that the copies stay small however long a shard is; the tasks of
a chunk are one query head and one block of its queries each, a few heads after one another, and
of these the most work first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ringrt.plan.partition import Array
from ringrt.plan.problem import Problem
from ringrt.plan.tiles import TileTable
from ringrt.softmax_state import SoftmaxState
from ringrt_backends.cpu import careful, forward, pack
from ringrt_backends.cpu.compiled import (
    KEYS,
    QUERIES,
    SKEW,
    SQUARE,
    Code,
    Shape,
    forward_code,
    heads_of,
)
from ringrt_backends.cpu.forward import Keys, Queries, Scratch
from ringrt_backends.cpu.layout import (
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
    subtracted,
    units_of,
)
from ringrt_backends.cpu.machine import Machine
from ringrt_backends.cpu.memory import Memory, full, zeros
from ringrt_backends.cpu.pack import Panels, Source
from ringrt_backends.cpu.spans import spans_of
from ringrt_backends.cpu.workers import Workers

#: Keys of a chunk. Of its copies, no more than so many bytes are held at a time, where heads can
#: be taken one after the other.
_CHUNK, _CHUNK_BYTES = 32 * KEYS, 1 << 25
#: Keys that are packed by one task, with a size of their own (see `pack`): even, a part of SQUARE.
_PART = 96
#: Tasks that are in line at once for each thread, lest some wait for the last ones at the end.
_TASKS_A_THREAD = 8


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class TiledState:
    """The queries as given and packed, their state (m and z `[lanes, rows]` float64, m in units; y
    `[lanes, rows, value_row]` sums, see `compiled.Shape`), each thread's scratch, and what ring
    steps share: tiles cut to blocks, and the memory of packed keys. `held` is what addresses lead
    to."""

    problem: Problem
    code: Code
    units: Units
    q: Array
    queries: Queries
    softmax: SoftmaxState
    places: Array
    scratch: list[tuple[Scratch]]
    held: list[Any]
    blocks: WeakKeyDictionary[TileTable, Blocks] = field(default_factory=WeakKeyDictionary)
    memory: dict[tuple[int, ...], tuple[Array, Array]] = field(default_factory=dict)


class TiledForward:
    """The forward verbs; see `ringrt.backend.Backend`."""

    def __init__(self, machine: Machine, workers: Workers) -> None:
        self._machine, self._workers = machine, workers
        self._memory = Memory()

    def code(self, problem: Problem) -> Code:
        """Compiled for the problem's heads."""
        return forward_code(self._machine, *heads_of(problem))

    def begin(self, q: Array, problem: Problem, sink: Array | None) -> TiledState:
        """Pack q; the state is empty, or that of the sink."""
        code, units = self.code(problem), units_of(problem)
        shape, rows = code.shape, q.shape[1]
        lanes, blocks = q.shape[0] * problem.q_heads, -(-rows // QUERIES)
        padded = blocks * QUERIES
        take = self._memory.take
        panels = take((lanes, padded // shape.panel, shape.depth, shape.panel), np.uint32)
        y = take((lanes, padded, shape.value_row), shape.sums)
        sizes, places = np.zeros((lanes, blocks, 2), np.float32), places_of(q, problem, shape)
        source, given = source_of(q)
        self._workers.drive(
            pack.pack_queries, grid(lanes, blocks), code.at("q_turned", ""), source, places,
            problem.group, rows, flip_of(problem, shape.pairs), QUERIES, panels, Panels(0, 0, 1, 0),
            sizes,
        )  # fmt: skip
        m, z = full((lanes, padded), -np.inf), zeros((lanes, padded))
        if sink is not None:
            _absorb_sink(m, z, sink, units.unit, q.shape[0])
        fresh = np.ones((lanes, blocks), np.uint8)
        queries = Queries(
            panels.ctypes.data, panels.shape[1], m.ctypes.data, z.ctypes.data, y.ctypes.data,
            padded, ordinary(sizes, score_limit(problem)), fresh, longest(sizes),
        )  # fmt: skip
        scratch, arrays = zip(*(_scratch(shape) for _ in range(self._workers.count)), strict=True)
        own, held = [(one,) for one in scratch], [given, panels, *arrays]
        softmax = SoftmaxState(m, z, y)
        state = TiledState(problem, code, units, q, queries, softmax, places, own, held)
        self._memory.give_back_with(state, [panels, y])
        return state

    def accumulate(self, state: TiledState, k: Array, v: Array, tiles: TileTable) -> None:
        """Absorb all tiles."""
        slots = k.shape[0] * k.shape[2]
        if not len(tiles) or not slots:
            return
        blocks = state.blocks.get(tiles)
        if blocks is None:
            blocks = state.blocks[tiles] = blocks_of(tiles, state.q.shape[1], QUERIES)
        shape = state.code.shape
        first, last = first_key(tiles, shape), int(tiles.table[:, 3].max())
        row_bytes = (shape.depth + shape.value_panels * shape.panel) * 4
        at_once = max(1, min(slots, _CHUNK_BYTES // (min(_CHUNK, last - first) * row_bytes)))
        (k_source, k), (v_source, v) = source_of(k), source_of(v)
        for begin in range(first, last, _CHUNK):
            end = min(begin + _CHUNK, last)
            for slot in range(0, slots, at_once):
                count = min(at_once, slots - slot)
                keys = self._pack(state, k_source, v_source, slot, count, begin, end)
                group, threads = state.problem.group, self._workers.count
                tasks = _tasks(blocks.order, slot, count, group, threads)
                self._workers.drive(
                    forward.absorb, tasks, shape,
                    state.code.addresses, state.units, blocks.starts, blocks.table, keys,
                    state.queries, own=state.scratch,
                )  # fmt: skip
                shard = careful.Shard(
                    k, v, blocks, QUERIES, begin, end, _PART, keys.ordinary, first_lane=slot
                )
                careful.absorb(
                    shard, state.problem, state.units.unit, state.q, state.queries.ordinary,
                    state.queries.fresh, state.softmax,
                )  # fmt: skip

    def finish(self, state: TiledState) -> tuple[Array, Array]:
        """out in the dtype of q, lse in float32."""
        problem, softmax, rows = state.problem, state.softmax, state.q.shape[1]
        lanes, batch = len(softmax.m), state.q.shape[0]
        out = np.empty((batch, rows, problem.q_heads, problem.value_dim), state.q.dtype)
        lse = np.empty((lanes, rows), np.float32)
        self._workers.drive(
            forward.finish, grid(lanes, -(-rows // QUERIES)), state.code.shape,
            state.units.unit, state.code.at("out_rounded")[0], rows, softmax.m, softmax.z,
            state.queries, problem.q_heads, out.ctypes.data, problem.value_dim * out.itemsize, lse,
        )  # fmt: skip
        return out, lse.reshape(batch, problem.q_heads, rows)

    def _pack(
        self, state: TiledState, k: Source, v: Source, slot: int, count: int, begin: int, end: int
    ) -> Keys:
        """Keys [begin, end) of some KV lanes. The copies are the caller's until the next call."""
        shape, size = state.code.shape, end - begin
        # A tile of rows may reach over the end, and so may a pair of keys.
        rows = size + shape.rows + 2
        rows += rows % 2
        if (count, rows) not in state.memory:
            state.memory.clear()
            v_shape = count, shape.value_panels, rows // (2 if shape.pairs else 1), shape.panel
            k_rows = self._memory.take((count, rows, shape.depth), np.uint32)
            v_panels = self._memory.take(v_shape, np.uint32)
            state.memory[count, rows] = k_rows, v_panels
            self._memory.give_back_with(state, [k_rows, v_panels])
        k_rows, v_panels = state.memory[count, rows]
        parts = -(-size // _PART)
        sizes = np.zeros((2, count, parts, 2), np.float32)
        panels = Panels(v_panels.ctypes.data, *v_panels.shape[1:])
        self._workers.drive(
            pack.pack_keys, grid(count, parts), state.code.at("k_rows", "v_columns"), k, v,
            state.places, slot, begin, size, _PART, k_rows, panels, sizes,
        )  # fmt: skip
        # Of as many keys as are packed at once in backward, so that the same weights are large.
        square = np.maximum.reduceat(sizes[0, ..., 1], np.arange(0, parts, SQUARE // _PART), axis=1)
        return Keys(
            k_rows.ctypes.data, v_panels.ctypes.data, rows, v_panels.shape[2], begin, end, _PART,
            ordinary(sizes[0], score_limit(state.problem)) & ordinary(sizes[1]), square,
        )  # fmt: skip


def _scratch(shape: Shape) -> tuple[Scratch, list[Array]]:
    """One thread's, and the arrays that its addresses lead to."""
    rows = KEYS + shape.rows + 2
    scores = zeros((rows, QUERIES + SKEW), np.float32)
    weights = zeros((rows // 2, QUERIES + SKEW), np.float32) if shape.pairs else scores
    # The maximum of nothing, to which the kernels bring it back.
    top, alpha = full((shape.panel,), -np.inf, np.float32), zeros((QUERIES,), np.float32)
    # A note is of the weights of one key and a vector of queries; there is room for two blocks.
    many = 2 * KEYS * QUERIES // (shape.panel // 2)
    notes, marks = zeros((many, shape.panel), np.float32), np.zeros(1 + 2 * many, np.int64)
    held = [scores, weights, top, alpha, notes]
    at, size = [x.ctypes.data for x in held], notes.strides[0]
    spans = spans_of(QUERIES, shape)
    return Scratch(at[0], at[1], at[2], at[3], at[4], size, marks, spans), held


def _absorb_sink(m: Array, z: Array, sink: Array, unit: float, batch: int) -> None:
    """One key of the sink's score, whose value is 0."""
    exact = np.tile(sink.astype(np.float64) / unit, batch)
    near = subtracted(exact)
    with np.errstate(invalid="ignore"):
        part = np.where(near == -np.inf, 0.0, np.exp2(exact - near))
    m[...], z[...] = near[:, None], part[:, None]


def _tasks(order: Array, slot: int, count: int, group: int, threads: int) -> Array:
    """(query lane, slot, block): a few KV lanes after one another, whose K and V then stay in
    cache; of each few the largest blocks first, and lanes that share keys side by side."""
    few = max(1, -(-_TASKS_A_THREAD * threads // max(1, len(order) * group)))
    parts = [np.zeros((0, 3), np.int64)]
    for first in range(slot, slot + count, few):
        lanes = np.arange(first * group, min(first + few, slot + count) * group)
        block, lane = np.meshgrid(order, lanes, indexing="ij")
        parts.append(np.stack((lane, lane // group - slot, block), -1).reshape(-1, 3))
    return np.concatenate(parts)
