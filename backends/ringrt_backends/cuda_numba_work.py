"""What the blocks of the Numba CUDA kernels have to do: band tiles, cut to blocks of rows or of
keys, the longest first, so that the last blocks to start are short ones."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ringrt.plan.mask import UNBOUNDED, IntArray
from ringrt.plan.tiles import TileTable

#: "No bound" in 32 bits: a difference of two indices is smaller.
_FAR = (1 << 31) - 1


class Work(NamedTuple):
    """tasks int32 `[n, 3]`: first own index, range of pieces. pieces int32 `[m, 6]`: own0, own1,
    other0, other1, low, high; own i and other j see one another iff low <= i − j <= high."""

    tasks: IntArray
    pieces: IntArray


def key_range(tiles: TileTable) -> tuple[int, int]:
    """The keys [start, stop) that any tile meets; there is at least one tile."""
    return int(tiles.table[:, 2].min()), int(tiles.table[:, 3].max())


@lru_cache(maxsize=256)
def row_work(tiles: TileTable, height: int) -> Work:
    """The tiles by blocks of `height` query rows; keys count from the first of `key_range`."""
    return _work(_absolute(tiles), height)


@lru_cache(maxsize=256)
def key_work(tiles: TileTable, height: int) -> Work:
    """The same by blocks of keys: own are keys, other are rows, so the band is turned over."""
    q0, q1, k0, k1, low, high = _absolute(tiles).T
    return _work(np.stack((k0, k1, q0, q1, -high, -low), axis=1), height)


def _absolute(tiles: TileTable) -> IntArray:
    """The tiles with keys counted from the first that is met, bounds on i − j of the indices
    themselves, int64 `[tiles, 6]`."""
    table = tiles.table.copy()
    table[:, 2:4] -= key_range(tiles)[0]
    apart = (table[:, 0] - table[:, 2])[:, None]
    absent = np.abs(table[:, 4:6]) == UNBOUNDED
    table[:, 4:6] = np.where(absent, np.sign(table[:, 4:6]) * _FAR, table[:, 4:6] + apart)
    return table


def _work(table: IntArray, height: int) -> Work:
    """Each tile cut to the blocks it meets, and in each to the others that its own can see."""
    own0, own1 = table[:, 0], table[:, 1]
    parts = (own1 - 1) // height - own0 // height + 1
    index = np.repeat(np.arange(len(table)), parts)
    block = own0[index] // height + np.arange(len(index)) - (np.cumsum(parts) - parts)[index]
    own0, own1, other0, other1, low, high = table[index].T
    own0, own1 = np.maximum(own0, block * height), np.minimum(own1, (block + 1) * height)
    other0, other1 = np.maximum(other0, own0 - high), np.minimum(other1, own1 - low)
    met = np.flatnonzero(other0 < other1)
    met = met[np.argsort(block[met], kind="stable")]
    columns = (own0, own1, other0, other1, np.clip(low, -_FAR, _FAR), np.clip(high, -_FAR, _FAR))
    pieces, block = np.stack(columns, axis=1)[met], block[met]
    blocks, first = np.unique(block, return_index=True)
    stop = np.append(first[1:], len(block))
    visits = np.add.reduceat(-(-(pieces[:, 3] - pieces[:, 2]) // height), first)
    order = np.argsort(-visits, kind="stable")
    tasks = np.stack((blocks * height, first, stop), axis=1)[order]
    return Work(
        np.ascontiguousarray(tasks, dtype=np.int32), np.ascontiguousarray(pieces, dtype=np.int32)
    )
