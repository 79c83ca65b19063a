"""Which rows of a shard which other rank needs, so that nothing else is moved.

A shard travels, and the ranks it visits stay: in forward K,V travel to the queries; in backward
either they do (`travel` "kv"), or the queries travel to K,V (`travel` "q"). Ranks are counted by
their distance in ring order: distance d from shard b is rank (b + d) mod p.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from ringrt.plan.mask import IntArray, Mask
from ringrt.plan.partition import Partition, Runs
from ringrt.plan.rows import Rows
from ringrt.plan.tiles import lower, needed_ranges, run_table


@dataclass(frozen=True, eq=False)
class ShardNeeds:
    """Of one shard: `needed[d, i]` says whether the rank at distance d needs the rows
    [edges[i], edges[i + 1]). Distance 0, the shard's own rank, moves nothing and needs none.
    """

    edges: IntArray
    needed: npt.NDArray[np.bool_]

    def at(self, distance: int) -> Rows:
        """Rows that the rank at this distance needs."""
        return Rows.where(self.edges, self.needed[distance])

    def beyond(self, distance: int) -> Rows:
        """Rows that some rank at this distance or further needs."""
        return Rows.where(self.edges, self._beyond[distance])

    def until(self, distance: int) -> Rows:
        """Rows that some rank at this distance or nearer needs."""
        return Rows.where(self.edges, self._until[distance])

    @cached_property
    def _beyond(self) -> npt.NDArray[np.bool_]:
        return np.logical_or.accumulate(self.needed[::-1])[::-1]

    @cached_property
    def _until(self) -> npt.NDArray[np.bool_]:
        return np.logical_or.accumulate(self.needed)

    @cached_property
    def last(self) -> int:
        """The largest distance at which anything is needed; 0 if nowhere."""
        return int(np.flatnonzero(self.needed.any(axis=1))[-1]) if self.needed.any() else 0

    def moved(self, schedule: str) -> tuple[int, int]:
        """Rows and hops that it takes to bring every rank what it needs."""
        width = np.diff(self.edges)
        moves = (self._beyond if schedule == "ring" else self.needed)[1:]
        return int((moves * width).sum()), int(moves.any(axis=1).sum())

    def returned(self, schedule: str) -> tuple[int, int]:
        """Rows and hops that it takes to bring home what every rank has added. Round the ring
        the sum so far is handed on, and the last rank sends it home."""
        if schedule == "direct":
            return self.moved("direct")
        carried = self._until[1 : self.last + 1]
        return int((carried * np.diff(self.edges)).sum()), int(carried.any(axis=1).sum())


#: Thread ranks ask for the same needs at the same time; the first works them out for all.
_lock = threading.Lock()


def all_needs(
    mask: Mask, partition: Partition, q_length: int, kv_length: int, size: int, travel: str
) -> tuple[ShardNeeds, ...]:
    """The needs of every shard that travels, in rank order. The last few are kept."""
    with _lock:
        return _all_needs(mask, partition, q_length, kv_length, size, travel)


@lru_cache(maxsize=6)
def _all_needs(
    mask: Mask, partition: Partition, q_length: int, kv_length: int, size: int, travel: str
) -> tuple[ShardNeeds, ...]:
    q_shards = [partition.runs(q_length, size, rank) for rank in range(size)]
    k_shards = [partition.runs(kv_length, size, rank) for rank in range(size)]
    travellers, hosts = (k_shards, q_shards) if travel == "kv" else (q_shards, k_shards)
    everyone = run_table(hosts)
    needs = []
    for shard, runs in enumerate(travellers):
        own = run_table([runs])
        if own is not None and everyone is not None and own.stride == everyone.stride:
            pair = (everyone, own) if travel == "kv" else (own, everyone)
            ranges = needed_ranges(mask.table, *pair, travel)
        else:
            ranges = _ranges_by_tiles(mask, runs, hosts, travel)
        count = sum(run.count for run in runs)
        needs.append(_shard_needs(ranges, shard, size, count))
    return tuple(needs)


def _ranges_by_tiles(mask: Mask, own: Runs, hosts: list[Runs], travel: str) -> IntArray:
    """As `needed_ranges`, where the strides of shards differ: tile by tile."""
    tables = []
    for host, runs in enumerate(hosts):
        tiles = lower(mask, runs, own) if travel == "kv" else lower(mask, own, runs)
        columns = tiles.table[:, 2:4] if travel == "kv" else tiles.table[:, 0:2]
        owner = np.full((len(columns), 1), host, dtype=np.int64)
        tables.append(np.concatenate((owner, columns), axis=1))
    return np.concatenate(tables)


def _shard_needs(ranges: IntArray, shard: int, size: int, count: int) -> ShardNeeds:
    """From rows (host, start, stop), in any order and overlapping, of a shard of `count` rows."""
    host, start, stop = ranges[ranges[:, 0] != shard].T
    distance = (host - shard) % size
    if len(start) == 0:
        return ShardNeeds(np.zeros(1, np.int64), np.zeros((size, 0), np.bool_))
    is_edge = np.zeros(count + 1, np.bool_)
    is_edge[start] = is_edge[stop] = True
    edges, order = np.flatnonzero(is_edge), np.cumsum(is_edge) - 1
    start, stop = order[start], order[stop]
    width, cells = len(edges), size * len(edges)
    change = np.bincount(distance * width + start, minlength=cells)
    change -= np.bincount(distance * width + stop, minlength=cells)
    covered = np.cumsum(change.reshape(size, width), axis=1)[:, :-1] > 0
    return ShardNeeds(edges, covered)
