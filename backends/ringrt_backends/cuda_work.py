"""What the blocks of a CUDA kernel work on: band tiles, cut at blocks of rows. kernels/work.cuh
reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ringrt.plan.mask import IntArray
from ringrt.plan.partition import Array
from ringrt.plan.tiles import TileTable

#: Bounds beyond every index of a shard.
_FAR = 1 << 30


class Work(NamedTuple):
    """`items` int32 `[n, 4]`: rows from and to, pieces from and to, most work first; `pieces`
    int32 `[m, 6]`."""

    items: Array
    pieces: Array


def by_queries(tiles: TileTable, rows: int, block: int) -> Work:
    """Items are blocks of query rows."""
    return _work(tiles, rows, block, transposed=False)


def by_keys(tiles: TileTable, keys: int, block: int) -> Work:
    """Items are blocks of keys."""
    return _work(_transposed(tiles), keys, block, transposed=True)


def _work(tiles: TileTable, rows: int, block: int, transposed: bool) -> Work:
    items, parts, effort, taken = [], [], [], 0
    for first, end, cut in _blocks(tiles, rows, block):
        items.append((first, end, taken, taken + len(cut)))
        parts.append((_transposed(cut) if transposed else cut).table)
        effort.append(int(cut.visible_pairs().sum()))
        taken += len(cut)
    order = np.argsort(-np.array(effort, dtype=np.int64), kind="stable")
    table = np.concatenate(parts) if parts else tiles.table
    return Work(np.array(items, np.int32).reshape(-1, 4)[order], _absolute(table))


def _blocks(tiles: TileTable, rows: int, block: int) -> Iterator[tuple[int, int, TileTable]]:
    """Blocks of at most so many rows and their tiles. They are cut where a tile begins or ends, so
    that no block has rows which have nothing to do with one of its tiles."""
    for begin in range(0, rows, block):
        there = tiles.rows(begin, begin + block)
        edges = np.unique(there.table[:, :2])
        if len(edges) == 2:
            yield int(edges[0]), int(edges[1]), there
            continue
        for first, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            part = there.rows(first, end)
            if len(part):
                yield first, end, part


def _transposed(tiles: TileTable) -> TileTable:
    """Rows and keys changed over: the distance changes its sign."""
    q0, q1, k0, k1, lower, upper = tiles.table.T
    return TileTable(np.stack((k0, k1, q0, q1, -upper, -lower), axis=1))


def _absolute(table: IntArray) -> Array:
    """Bounds on the difference of the shard's own indices, and not of those within the tile."""
    pieces = table.copy()
    shift = table[:, 0] - table[:, 2]
    for column in (4, 5):
        pieces[:, column] = np.clip(table[:, column] + shift, -_FAR, _FAR)
    return pieces.astype(np.int32)
