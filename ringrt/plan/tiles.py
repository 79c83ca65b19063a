"""The lowering: mask × query shard × key shard → band tiles.

A band tile is `rows [q0, q1) × keys [k0, k1)` of two shards (local indices), visible iff
`lower <= (i − q0) − (j − k0) <= upper`. It is all that a backend ever sees.

Why it is exact: take a query run (a, s, n) and a key run (b, s, m) of one stride. Row i and
key j lie δ = (a − b) + s·(i − j) apart, so a bound on δ is a bound on the local difference
i − j, and a range of positions is a range of local indices. Nothing is approximated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringrt.plan.mask import UNBOUNDED, IntArray, Mask
from ringrt.plan.partition import Run, Runs
from ringrt.plan.rows import Rows


class Tile(NamedTuple):
    """One row of a `TileTable`: half-open local ranges, inclusive bounds on the local band."""

    q0: int
    q1: int
    k0: int
    k1: int
    lower: int
    upper: int

    @property
    def full(self) -> bool:
        """Every pair of the tile is visible."""
        return self.lower == -UNBOUNDED and self.upper == UNBOUNDED


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class TileTable:
    """Band tiles as one int64 array `[tiles, 6]`, columns in the order of `Tile`.

    No tile is empty, every tile is the bounding box of what it shows, and a bound that
    excludes nothing is ∓`UNBOUNDED`.
    """

    table: IntArray
    #: What `portions` has given, by count.
    _portions: dict[int, list[TileTable]] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Tile]:
        return (Tile(*row) for row in self.table.tolist())

    def visible_pairs(self) -> IntArray:
        """How many (row, key) pairs each tile shows, int64 `[tiles]`."""
        q0, q1, k0, k1, lower, upper = self.table.T
        n, m = q1 - q0, k1 - k0
        lower, upper = np.maximum(lower, -m), np.minimum(upper, n)
        return _pairs_up_to(upper, n, m) - _pairs_up_to(lower - 1, n, m)

    def rows(self, start: int, stop: int) -> TileTable:
        """What rows [start, stop) see: tiles cut to them, still in the shard's own indices."""
        q0, q1 = self.table[:, 0], self.table[:, 1]
        met = (q0 < stop) & (q1 > start)
        table = self.table[met]
        begin, end = np.maximum(table[:, 0], start), np.minimum(table[:, 1], stop)
        return TileTable(trim(_cut(table, begin, end)))

    def cut_at(self, edges: IntArray) -> TileTable:
        """The same visible pairs, in tiles that do not reach over any of the rows `edges`, which
        are sorted and begin and end beyond all tiles."""
        first = np.searchsorted(edges, self.table[:, 0], side="right") - 1
        parts = np.searchsorted(edges, self.table[:, 1], side="left") - first
        which = np.arange(parts.sum()) + np.repeat(first - np.cumsum(parts) + parts, parts)
        table = np.repeat(self.table, parts, axis=0)
        begin = np.maximum(table[:, 0], edges[which])
        end = np.minimum(table[:, 1], edges[which + 1])
        return TileTable(trim(_cut(table, begin, end)))

    def portions(self, count: int) -> list[TileTable]:
        """The same visible pairs as at most about `count` tables of about equal work, cut
        between rows, so that a caller can do something else between them. They are kept: a plan
        is run many times."""
        if count not in self._portions:
            self._portions[count] = self._cut_into(count)
        return self._portions[count]

    def _cut_into(self, count: int) -> list[TileTable]:
        if count <= 1:
            return [self]
        work = self.visible_pairs()
        total = int(work.sum())
        if total == 0:
            return [self]
        quota = -(-total // count)
        parts = -(-work // quota)
        table = np.repeat(self.table, parts, axis=0)
        part = np.arange(len(table)) - np.repeat(np.cumsum(parts) - parts, parts)
        height, of = table[:, 1] - table[:, 0], np.repeat(parts, parts)
        begin = table[:, 0] + height * part // of
        end = table[:, 0] + height * (part + 1) // of
        return _group(trim(_cut(table, begin, end)), quota)

    def compact(self, rows: Rows | None, keys: Rows | None) -> TileTable:
        """The same tiles where only some rows or keys are held, side by side. Every tile lies
        within one range of what is held; None holds all."""
        table = self.table.copy()
        for held, column in ((rows, 0), (keys, 2)):
            if held is not None and len(table):
                moved = held.compact(table[:, column])
                table[:, column + 1] += moved - table[:, column]
                table[:, column] = moved
        return TileTable(table)


EMPTY = TileTable(np.empty((0, 6), dtype=np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class RunTable:
    """Many runs of one stride, as arrays: first position, tokens, the local index at which the
    run begins in its shard, and whose shard that is."""

    start: IntArray
    count: IntArray
    base: IntArray
    owner: IntArray
    stride: int


def run_table(shards: list[Runs]) -> RunTable | None:
    """The runs of several shards; None if their strides differ."""
    rows = []
    for owner, runs in enumerate(shards):
        base = 0
        for run in runs:
            rows.append((run.start, run.count, base, owner, run.stride))
            base += run.count
    table = np.array(rows, dtype=np.int64).reshape(-1, 5)
    strides = np.unique(table[:, 4])
    if len(strides) > 1:
        return None
    start, count, base, owner, _ = np.ascontiguousarray(table.T)
    return RunTable(start, count, base, owner, int(strides[0]) if len(strides) else 1)


def lower(mask: Mask, q_runs: Runs, k_runs: Runs) -> TileTable:
    """The tiles of one query shard against one key shard. Their visible pairs are exactly
    the mask's, each once."""
    q, k = run_table([q_runs]), run_table([k_runs])
    if q is not None and k is not None and q.stride == k.stride:
        return TileTable(lower_runs(mask.table, q, k))
    parts = []
    for q_part, q_base, k_part, k_base in _equal_strides(q_runs, k_runs):
        table = lower(mask, (q_part,), (k_part,)).table
        parts.append(table + np.array((q_base, q_base, k_base, k_base, 0, 0)))
    return TileTable(np.concatenate(parts)) if parts else EMPTY


def lower_runs(pieces: IntArray, q: RunTable, k: RunTable) -> IntArray:
    """The tiles of every piece, query run and key run at once."""
    q0, q1, k0, k1, lower, upper = _boxes(pieces, q, k)
    q_base, k_base = q.base[None, :, None], k.base[None, None, :]
    columns = np.broadcast_arrays(q0 + q_base, q1 + q_base, k0 + k_base, k1 + k_base, lower, upper)
    return trim(np.stack([column.reshape(-1) for column in columns], axis=1))


def needed_ranges(pieces: IntArray, q: RunTable, k: RunTable, travel: str) -> IntArray:
    """What `lower_runs` would say of the keys alone (`travel` "kv": for each query run's owner,
    the keys [start, stop) that it sees) or of the rows alone ("q": for each key run's owner, the
    rows that see it): int64 `[n, 3]` of (owner, start, stop). Leaner, for it is asked of all
    pairs of ranks."""
    q0, q1, k0, k1, lower, upper = _boxes(pieces, q, k)
    n, m = q1 - q0, k1 - k0
    if travel == "kv":
        start, stop = np.maximum(0, -upper), np.minimum(m, n - lower)
        filled = (n > 0) & (lower <= upper) & (upper + m > 0) & (start < stop)
        start, stop = start + k0 + k.base[None, None, :], stop + k0 + k.base[None, None, :]
        owner = q.owner[None, :, None]
    else:
        start, stop = np.maximum(0, lower), np.minimum(n, m + upper)
        filled = (m > 0) & (lower <= upper) & (n - lower > 0) & (start < stop)
        start, stop = start + q0 + q.base[None, :, None], stop + q0 + q.base[None, :, None]
        owner = k.owner[None, None, :]
    owner = np.broadcast_to(owner, filled.shape)
    return np.stack((owner[filled], start[filled], stop[filled]), axis=1)


def _boxes(pieces: IntArray, q: RunTable, k: RunTable) -> tuple[IntArray, ...]:
    """q0, q1, k0, k1, lower, upper of every piece, query run and key run, broadcastable to
    `[pieces, q runs, k runs]`; ranges index the runs and may be empty."""
    # Of many pieces most meet neither side, or not the one of few runs: cheap to find out first.
    pieces = pieces[_near(pieces[:, 0], pieces[:, 1], q) & _near(pieces[:, 2], pieces[:, 3], k)]
    few, column = (q, 0) if len(q.start) <= len(k.start) else (k, 2)
    pieces = pieces[_meets(pieces[:, column], pieces[:, column + 1], few)]
    stride = q.stride
    q_start, q_stop, k_start, k_stop, low, high = pieces.T[:, :, None, None]
    q_first, k_first = q.start[None, :, None], k.start[None, None, :]
    q0, q1 = _local_range(q_first, q.count[None, :, None], stride, q_start, q_stop)
    k0, k1 = _local_range(k_first, k.count[None, None, :], stride, k_start, k_stop)
    # δ = (a − b) + s·(i − j), then (i − q0) − (j − k0) = (i − j) − (q0 − k0).
    apart, shift = q_first - k_first, q0 - k0
    lower, upper = low, high
    if (low != -UNBOUNDED).any():
        lower = np.where(low == -UNBOUNDED, low, _ceil_div(low - apart, stride) - shift)
    if (high != UNBOUNDED).any():
        upper = np.where(high == UNBOUNDED, high, _floor_div(high - apart, stride) - shift)
    shape = (len(pieces), len(q.start), len(k.start))
    return q0, q1, k0, k1, np.broadcast_to(lower, shape), np.broadcast_to(upper, shape)


def trim(table: IntArray) -> IntArray:
    """Each tile cut to the bounding box of its visible pairs; empty ones dropped; bounds
    that exclude nothing set to ∓`UNBOUNDED`.

    In a box of n rows and m keys, row i sees keys i − upper .. i − lower, hence rows
    max(0, lower) .. min(n, m + upper) − 1 and keys max(0, −upper) .. min(m, n − lower) − 1.
    """
    n, m = table[:, 1] - table[:, 0], table[:, 3] - table[:, 2]
    table = table[(n > 0) & (m > 0) & (table[:, 4] <= table[:, 5])]
    q0, q1, k0, k1, lower, upper = table.T
    n, m = q1 - q0, k1 - k0
    first_row, first_key = np.maximum(0, lower), np.maximum(0, -upper)
    rows, keys = np.minimum(n, m + upper), np.minimum(m, n - lower)
    shift = first_row - first_key
    low, high = lower - shift, upper - shift
    low = np.where(low <= -(keys - first_key - 1), -UNBOUNDED, low)
    high = np.where(high >= rows - first_row - 1, UNBOUNDED, high)
    columns = (q0 + first_row, q0 + rows, k0 + first_key, k0 + keys, low, high)
    kept = (rows > first_row) & (keys > first_key)
    trimmed: IntArray = np.stack(columns, axis=1)[kept]
    return trimmed


def _cut(table: IntArray, begin: IntArray, end: IntArray) -> IntArray:
    """Each tile cut to rows [begin, end) of its shard. A tile that begins r rows lower sees
    its band r further down; an absent bound stays absent."""
    down = (begin - table[:, 0])[:, None]
    bounds = np.where(np.abs(table[:, 4:6]) == UNBOUNDED, table[:, 4:6], table[:, 4:6] - down)
    return np.concatenate((np.stack((begin, end), axis=1), table[:, 2:4], bounds), axis=1)


#: So many runs are compared with every piece; of more, only the span.
_FEW_RUNS = 8


def _near(start: IntArray, stop: IntArray, runs: RunTable) -> npt.NDArray[np.bool_]:
    """Which ranges of positions can meet any of the runs."""
    if len(runs.start) == 0:
        return np.zeros(len(start), dtype=np.bool_)
    first, last = runs.start, runs.start + runs.stride * (runs.count - 1)
    if len(first) > _FEW_RUNS:
        first, last = first.min(keepdims=True), last.max(keepdims=True)
    met = (stop[:, None] > first) & (start[:, None] <= last)
    return np.asarray(met.any(axis=1))


def _meets(start: IntArray, stop: IntArray, runs: RunTable) -> npt.NDArray[np.bool_]:
    """Which ranges of positions hold a token of any of the runs."""
    ranges = (runs.start, runs.count, runs.stride, start[:, None], stop[:, None])
    begin, end = _local_range(*ranges)
    return np.asarray((begin < end).any(axis=1))


def _local_range(
    first: IntArray, count: IntArray, stride: int, start: IntArray, stop: IntArray
) -> tuple[IntArray, IntArray]:
    """Local indices of a run whose positions lie in [start, stop)."""
    begin = np.clip(_ceil_div(start - first, stride), 0, count)
    return begin, np.clip(_ceil_div(stop - first, stride), 0, count)


def _equal_strides(q_runs: Runs, k_runs: Runs) -> Iterator[tuple[Run, int, Run, int]]:
    """Pairs of parts with one stride, and the local index at which each part begins.

    A run of one token has any stride, so where the strides differ the shorter run is taken
    token by token. Only third-party partitions come here.
    """
    q_base = 0
    for q in q_runs:
        k_base = 0
        for k in k_runs:
            if q.stride == k.stride:
                yield q, q_base, k, k_base
            elif q.count <= k.count:
                for i in range(q.count):
                    yield Run(q.start + q.stride * i, k.stride, 1), q_base + i, k, k_base
            else:
                for j in range(k.count):
                    yield q, q_base, Run(k.start + k.stride * j, q.stride, 1), k_base + j
            k_base += k.count
        q_base += q.count


def _ceil_div(value: IntArray, divisor: int) -> IntArray:
    return -_floor_div(-value, divisor)


def _floor_div(value: IntArray, divisor: int) -> IntArray:
    """Integer division is slow; most strides are 1."""
    return value if divisor == 1 else value // divisor


def _pairs_up_to(bound: IntArray, n: IntArray, m: IntArray) -> IntArray:
    """Pairs with i − j <= bound in n × m: the sum over j < m of clip(bound + j + 1, 0, n)."""
    return _clipped_sum(bound + m, n) - _clipped_sum(bound, n)


def _clipped_sum(last: IntArray, n: IntArray) -> IntArray:
    """The sum of clip(t, 0, n) over t <= last."""
    slope, flat = np.clip(last, 0, n), np.maximum(last - n, 0)
    total: IntArray = slope * (slope + 1) // 2 + flat * n
    return total


def _group(table: IntArray, quota: int) -> list[TileTable]:
    """Consecutive tiles, gathered into tables of about `quota` visible pairs each."""
    done = np.cumsum(TileTable(table).visible_pairs())
    index = (done - 1) // quota
    edges = np.flatnonzero(np.diff(index)) + 1
    return [TileTable(part) for part in np.split(table, edges)]
