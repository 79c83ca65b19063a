"""What both passes need before their drivers run: tiles by blocks of rows, how arrays are read,
in which order products are summed up, and in which units scores are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ringrt.plan.partition import Array
from ringrt.plan.problem import Problem
from ringrt.plan.tiles import TileTable
from ringrt_backends.cpu import exact
from ringrt_backends.cpu.compiled import Shape
from ringrt_backends.cpu.pack import Source

#: Blocks with no larger number than this are *ordinary*: sums of products of such stay within
#: float32, in both passes. The compiled kernels take only these; others, and NaN, are rare and
#: go the careful way.
ORDINARY = 1e9

#: Scores of ordinary blocks are within this, in powers of 2: the rounding of larger ones would be
#: an exponent that float32 does not have.
_LARGEST_SCORE, _LARGEST_MAXIMUM = 2.0**27, 2.0**31

#: Rows of q that are looked at for the places of its columns.
_SAMPLE = 256


@dataclass(frozen=True, slots=True)
class Blocks:
    """The tiles of a shard, cut at the edges of blocks of rows: those of block b are
    table[starts[b] : starts[b + 1]]; `order` lists the blocks that have any, the most visible
    pairs first."""

    table: Array
    starts: Array
    order: Array


def blocks_of(tiles: TileTable, rows: int, size: int) -> Blocks:
    """Cut and sort the tiles."""
    count = -(-rows // size)
    edges = np.arange(count + 1, dtype=np.int64) * size
    cut = tiles.cut_at(edges) if len(tiles) else tiles
    block = cut.table[:, 0] // size
    sorting = np.argsort(block, kind="stable")
    starts = np.searchsorted(block[sorting], np.arange(count + 1)).astype(np.int64)
    work = np.bincount(block, weights=cut.visible_pairs(), minlength=count)
    order = np.argsort(-work, kind="stable")
    return Blocks(np.ascontiguousarray(cut.table[sorting]), starts, order[work[order] > 0])


def first_key(tiles: TileTable, shape: Shape) -> int:
    """The first key that is packed: a multiple of a tile's rows. So a key is the same row of a tile
    in both passes, and a score the same number, for in which order it is summed up depends on the
    row. Errors of the weights then cancel in dS = P (dP − delta), where delta is made of P."""
    return int(tiles.table[:, 2].min()) // shape.rows * shape.rows


def ordinary(sizes: Array, limit: float = ORDINARY) -> Array:
    """Which blocks are, by their sizes (see `pack`): bool as uint8."""
    return np.asarray(sizes[..., 0] <= np.float32(limit)).view(np.uint8)


def longest(sizes: Array) -> Array:
    """The square of each lane's longest row, by the sizes of its blocks."""
    return np.asarray(sizes[..., 1].max(axis=1, initial=0))


def score_limit(problem: Problem) -> float:
    """The largest number that is ordinary in q and k: no score is then too large."""
    if problem.softcap is not None:
        return ORDINARY
    factor = problem.head_dim * abs(problem.scale) / math.log(2)
    return min(ORDINARY, math.sqrt(_LARGEST_SCORE / factor))


def subtracted(maxima: Array) -> Array:
    """Maxima in units as the state keeps them, float64: as float32 numbers, for that is what the
    compiled kernels subtract; those beyond all ordinary scores as they are, for their rounding
    would be an exponent that no float64 has."""
    with np.errstate(over="ignore", invalid="ignore"):
        near = maxima.astype(np.float32).astype(np.float64)
        return np.where(abs(maxima) <= _LARGEST_MAXIMUM, near, maxima)


def source_of(x: Array) -> tuple[Source, Array]:
    """How the packing reads x, and the array that must live as long."""
    if x.shape[3] > 1 and x.strides[3] != x.itemsize:
        x = np.ascontiguousarray(x)
    batch, row, head, _ = x.strides
    return Source(x.ctypes.data, batch, row, head, x.shape[2]), x


def places_of(q: Array, problem: Problem, shape: Shape) -> Array:
    """Where each column of a KV head's q and k comes in the sums of their products, int64 `[lanes,
    depth]`: q's large columns last. In real models these cancel one another, and whatever is
    added while their sum is large is rounded as coarsely as they are."""
    sample = q[:, :: max(1, q.shape[1] // _SAMPLE)].astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        heads = problem.kv_heads, problem.group
        square = np.square(sample).reshape(*sample.shape[:2], *heads, q.shape[3])
        weight = square.sum(axis=(1, 3)).reshape(q.shape[0] * problem.kv_heads, q.shape[3])
    if shape.pairs:
        weight = weight[:, ::2] + weight[:, 1::2]
    order = np.argsort(weight, axis=1, kind="stable")
    return np.argsort(order, axis=1, kind="stable").astype(np.int64)


def flip_of(problem: Problem, pairs: bool) -> np.uint32:
    """The sign bits of an element, to be flipped in q where the scale is negative: the running
    maximum is taken of scores before they are scaled."""
    bits = (0x80008000 if pairs else 0x80000000) if problem.scale < 0 else 0
    return np.uint32(bits)


class Units(NamedTuple):
    """Exponents of 2 are counted in units of `unit` (natural logarithm) that make the factor of
    the products, `scale`, a float32 number: with the nearest float32 in its place, scores would
    be off by as much as they are long. With a softcap they are `scale` · tanh(`cap` · product).
    `least_part` and `part_factor`: which weights are large; see `exact.large_part`."""

    scale: np.float32
    cap: np.float32
    unit: float
    least_part: float
    part_factor: float


def units_of(problem: Problem) -> Units:
    """The sign of the problem's scale is left to q; see `flip_of`."""
    size, cap = abs(problem.scale), problem.softcap or 0.0
    natural = cap or size
    scale = np.float32(natural / math.log(2))
    cap_factor = np.float32(size / cap if cap else 0)
    return Units(scale, cap_factor, natural / float(scale), *exact.part_factors(float(scale)))


def grid(lanes: int, parts: int) -> Array:
    """All (lane, part), part by part: rows of all heads lie side by side in memory."""
    part, lane = np.meshgrid(np.arange(parts), np.arange(lanes), indexing="ij")
    return np.stack((lane, part), -1).reshape(-1, 2)
