"""What the blocks of a CUDA kernel work on: band tiles, cut at blocks of rows. kernels/work.cuh
reads it."""

from __future__ import annotations

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
    """Blocks are cut where a tile begins or ends, so that none has rows which have nothing to do
    with one of its tiles."""
    starts = np.append(np.arange(0, rows, block), rows)
    edges = np.unique(np.concatenate((starts, tiles.table[:, 0], tiles.table[:, 1])))
    cut = tiles.cut_at(edges)
    owner = np.searchsorted(edges, cut.table[:, 0], side="right") - 1
    order = np.argsort(owner, kind="stable")
    cut, owner = TileTable(cut.table[order]), owner[order]
    blocks, begin = np.unique(owner, return_index=True)
    end = np.append(begin, len(owner))[1:]
    items = np.stack((edges[blocks], edges[blocks + 1], begin, end), axis=1)
    effort = np.add.reduceat(cut.visible_pairs(), begin) if len(begin) else begin
    items = items[np.argsort(-effort, kind="stable")]
    table = (_transposed(cut) if transposed else cut).table
    return Work(items.astype(np.int32), _absolute(table))


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
