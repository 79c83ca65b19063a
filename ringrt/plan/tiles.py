"""The lowering: mask × query shard × key shard → band tiles.

A band tile is `rows [q0, q1) × keys [k0, k1)` of two shards (local indices), visible iff
`lower <= (i − q0) − (j − k0) <= upper`. It is all that a backend ever sees.

Why it is exact: take a query run (a, s, n) and a key run (b, s, m) of one stride. Row i and
key j lie δ = (a − b) + s·(i − j) apart, so a bound on δ is a bound on the local difference
i − j, and a range of positions is a range of local indices. Nothing is approximated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringrt.plan.mask import UNBOUNDED, IntArray, Mask
from ringrt.plan.partition import Run, Runs


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


@dataclass(frozen=True, slots=True, eq=False)
class TileTable:
    """Band tiles as one int64 array `[tiles, 6]`, columns in the order of `Tile`.

    No tile is empty, every tile is the bounding box of what it shows, and a bound that
    excludes nothing is ∓`UNBOUNDED`.
    """

    table: IntArray

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
        q0, q1, k0, k1, lower, upper = self.table.T
        begin = np.clip(start - q0, 0, None)
        table = np.stack((q0 + begin, np.minimum(q1, stop), k0, k1, lower, upper), axis=1)
        table[:, 4:] = _shift_band(table[:, 4:], -begin[:, None])
        return TileTable(trim(table))

    def portions(self, count: int) -> list[TileTable]:
        """The same visible pairs as at most about `count` tables of about equal work, cut
        between rows, so that a caller can do something else between them."""
        work = self.visible_pairs()
        total = int(work.sum())
        if count <= 1 or total == 0:
            return [self]
        quota = -(-total // count)
        stacks = []
        for index, parts in enumerate((-(-work // quota)).tolist()):
            tile = TileTable(self.table[index : index + 1])
            begin, end = int(tile.table[0, 0]), int(tile.table[0, 1])
            edges = [begin + (end - begin) * part // parts for part in range(parts + 1)]
            stacks += [tile.rows(*edge).table for edge in itertools.pairwise(edges)]
        return _group(np.concatenate(stacks), quota)


EMPTY = TileTable(np.empty((0, 6), dtype=np.int64))


def lower(mask: Mask, q_runs: Runs, k_runs: Runs) -> TileTable:
    """The tiles of one query shard against one key shard. Their visible pairs are exactly
    the mask's, each once."""
    tables = []
    q_base = 0
    for q_run in q_runs:
        k_base = 0
        for k_run in k_runs:
            for q_part, k_part, q_at, k_at in _equal_strides(q_run, k_run):
                tables.append(_lower_runs(mask, q_part, k_part, q_base + q_at, k_base + k_at))
            k_base += k_run.count
        q_base += q_run.count
    return TileTable(np.concatenate(tables)) if tables else EMPTY


def trim(table: IntArray) -> IntArray:
    """Each tile cut to the bounding box of its visible pairs; empty ones dropped; bounds
    that exclude nothing set to ∓`UNBOUNDED`.

    In a box of n rows and m keys, row i sees keys i − upper .. i − lower, hence rows
    max(0, lower) .. min(n, m + upper) − 1 and keys max(0, −upper) .. min(m, n − lower) − 1.
    """
    q0, q1, k0, k1, lower, upper = table.T
    n, m = q1 - q0, k1 - k0
    first_row, first_key = np.maximum(0, lower), np.maximum(0, -upper)
    rows, keys = np.minimum(n, m + upper), np.minimum(m, n - lower)
    shift = first_row - first_key
    low, high = lower - shift, upper - shift
    low = np.where(low <= -(keys - first_key - 1), -UNBOUNDED, low)
    high = np.where(high >= rows - first_row - 1, UNBOUNDED, high)
    kept = (n > 0) & (m > 0) & (lower <= upper) & (rows > first_row) & (keys > first_key)
    columns = (q0 + first_row, q0 + rows, k0 + first_key, k0 + keys, low, high)
    trimmed: IntArray = np.stack(columns, axis=1)[kept]
    return trimmed


def _lower_runs(mask: Mask, q: Run, k: Run, q_base: int, k_base: int) -> IntArray:
    """The tiles of two runs of one stride, all pieces of the mask at once."""
    q_start, q_stop, k_start, k_stop, low, high = mask.table.T
    q0, q1 = _local_range(q, q_start, q_stop)
    k0, k1 = _local_range(k, k_start, k_stop)
    # δ = (a − b) + s·(i − j), then (i − q0) − (j − k0) = (i − j) − (q0 − k0).
    apart, stride, shift = q.start - k.start, q.stride, q0 - k0
    lower = np.where(low == -UNBOUNDED, low, _ceil_div(low - apart, stride) - shift)
    upper = np.where(high == UNBOUNDED, high, (high - apart) // stride - shift)
    table = np.stack((q0, q1, k0, k1, lower, upper), axis=1)
    table[:, 0:2] += q_base
    table[:, 2:4] += k_base
    return trim(table)


def _local_range(run: Run, start: IntArray, stop: IntArray) -> tuple[IntArray, IntArray]:
    """Local indices of the run whose positions lie in [start, stop)."""
    first = np.clip(_ceil_div(start - run.start, run.stride), 0, run.count)
    return first, np.clip(_ceil_div(stop - run.start, run.stride), 0, run.count)


def _equal_strides(q: Run, k: Run) -> Iterator[tuple[Run, Run, int, int]]:
    """Pairs of parts with one stride, and the local index at which each part begins.

    A run of one token has any stride, so where the strides differ the shorter run is taken
    token by token. Only third-party partitions come here.
    """
    if q.stride == k.stride:
        yield q, k, 0, 0
    elif q.count <= k.count:
        for i in range(q.count):
            yield Run(q.start + q.stride * i, k.stride, 1), k, i, 0
    else:
        for j in range(k.count):
            yield q, Run(k.start + k.stride * j, q.stride, 1), 0, j


def _ceil_div(value: IntArray, divisor: int) -> IntArray:
    quotient: IntArray = -(-value // divisor)
    return quotient


def _pairs_up_to(bound: IntArray, n: IntArray, m: IntArray) -> IntArray:
    """Pairs with i − j <= bound in n × m: the sum over j < m of clip(bound + j + 1, 0, n)."""
    return _clipped_sum(bound + m, n) - _clipped_sum(bound, n)


def _clipped_sum(last: IntArray, n: IntArray) -> IntArray:
    """The sum of clip(t, 0, n) over t <= last."""
    slope, flat = np.clip(last, 0, n), np.maximum(last - n, 0)
    total: npt.NDArray[np.int64] = slope * (slope + 1) // 2 + flat * n
    return total


def _shift_band(bounds: IntArray, by: IntArray) -> IntArray:
    """Bounds after the tile's corner has moved; an absent bound stays absent."""
    shifted: IntArray = np.where(np.abs(bounds) == UNBOUNDED, bounds, bounds + by)
    return shifted


def _group(table: IntArray, quota: int) -> list[TileTable]:
    """Consecutive tiles, gathered into tables of about `quota` visible pairs each."""
    done = np.cumsum(TileTable(table).visible_pairs())
    index = (done - 1) // quota
    edges = np.flatnonzero(np.diff(index)) + 1
    return [TileTable(part) for part in np.split(table, edges)]
