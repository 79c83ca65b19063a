"""Band tiles in terms of what attention kernels can be asked for: no mask, or a causal one.

Most kernels know no band but "causal", which begins at a corner of the block. A tile is cut here
into parts that are each one of three shapes:

    full      every pair is visible
    causal    row i of the part sees keys j <= i: `lower` is 0, `upper` unbounded
    flipped   causal seen from the other end: reverse the order of the part's rows and of its
              keys, and it is causal (dq, dk and dv come out reversed too)

A kernel's "causal" is aligned top-left (row i sees keys j <= i) or bottom-right (the last row
sees the last key: j <= i + keys - rows). For square parts both are the same, so a kernel of either
alignment can do them; parts that are not square are for kernels aligned top-left.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from ringrt.errors import Unsupported
from ringrt.plan.mask import UNBOUNDED
from ringrt.plan.tiles import Tile, TileTable, trim

#: More parts of one tile than that are refused, unless the caller allows more.
MOST_PARTS = 4096

Shape = Literal["full", "causal", "flipped", "band"]


def parts(
    tile: Tile, *, square: bool = True, windows: bool = False, most: int = MOST_PARTS
) -> list[Tile]:
    """The tile's visible pairs, each in exactly one part; no part is empty, and every row and
    every key of a part sees or is seen.

    Parts are full, causal or flipped (`shape_of` tells which). Where `square`, causal and flipped
    parts have as many rows as keys; otherwise they may have more rows, which fits kernels that
    align "causal" top-left. Where `windows`, the kernel does any band: the tile itself, cut to
    the rows and keys that see something, is the only part.

    A band with one bound gives at most 3 parts. One with both, `w` keys wide over n rows, gives
    about 2 n / w and at most 2 ⌈n / w⌉ + 6; `Unsupported` if that may be more than `most`.
    """
    table = trim(np.array([tile], dtype=np.int64))
    if not len(table):
        return []
    q0, q1, k0, k1, lower, upper = table[0].tolist()
    box = Tile(q0, q1, k0, k1, lower, upper)
    if windows or box.full:
        return [box]
    if lower == -UNBOUNDED or upper == UNBOUNDED:
        return _one_sided(box, square)
    width, rows = upper - lower + 1, q1 - q0
    if 2 * -(-rows // width) > most:
        raise Unsupported(
            f"a window of {width} keys over {rows} rows of a shard: kernels without windows would "
            f"be called for about {2 * rows // width} parts of it; at most {most} are allowed"
        )
    return [part for side in _cut(box, width) for part in _one_sided(side, square)]


def strips(tile: Tile, rows: int) -> list[Tile]:
    """The tile in parts of at most so many rows, each a band cut to the keys that it sees: for
    kernels that take a mask, so that the masks of a narrow window are small. At most ⌈n / rows⌉."""
    edges = np.arange(tile.q0, tile.q1 + rows, rows)
    return list(TileTable(np.array([tile], dtype=np.int64)).cut_at(edges))


def shape_of(part: Tile) -> Shape:
    """Which of the shapes above a part is; "band" if none."""
    if part.full:
        return "full"
    if (part.lower, part.upper) == (0, UNBOUNDED):
        return "causal"
    rows, keys = part.q1 - part.q0, part.k1 - part.k0
    return "flipped" if (part.lower, part.upper) == (-UNBOUNDED, rows - keys) else "band"


def _cut(tile: Tile, width: int) -> list[Tile]:
    """A band with both bounds as tiles with one: rows are taken `width` at a time, of which those
    keys that the last may miss come first, and those that the first may miss second."""
    made = []
    for first in range(tile.q0, tile.q1, width):
        stop, row = min(first + width, tile.q1), first - tile.q0
        # Keys that the first row sees are row - upper .. row - lower; one less here, so that
        # the other side begins on the diagonal.
        begin, middle = max(tile.k0, tile.k0 + row - tile.upper), tile.k0 + row - tile.lower
        end, keys = min(middle + stop - first, tile.k1), min(middle, tile.k1)
        upper = tile.upper - row + begin - tile.k0
        made.append(Tile(first, stop, begin, keys, -UNBOUNDED, upper))
        made.append(Tile(first, stop, middle, end, 0, UNBOUNDED))
    table = trim(np.array(made, dtype=np.int64))
    return [Tile(*row) for row in table.tolist()]


def _one_sided(tile: Tile, square: bool) -> list[Tile]:
    """Parts of a trimmed tile that has at most one bound."""
    if tile.full:
        return [tile]
    if tile.lower != -UNBOUNDED:
        return _lower_only(tile, square)
    turned = _lower_only(_flip(tile, tile), square)
    return [_flip(part, tile) for part in turned]


def _lower_only(tile: Tile, square: bool) -> list[Tile]:
    """All rows see the first `-lower` keys, and behind these begins a causal part. Trimmed, so
    that it has at least as many rows as keys; in those below its square all is visible."""
    q0, q1, k0, k1, lower, _ = tile
    corner = k0 - lower
    bottom = q0 + (k1 - corner) if square else q1
    boxes = (
        Tile(q0, bottom, corner, k1, 0, UNBOUNDED),
        Tile(q0, bottom, k0, corner, -UNBOUNDED, UNBOUNDED),
        Tile(bottom, q1, k0, k1, -UNBOUNDED, UNBOUNDED),
    )
    return [box for box in boxes if box.q1 > box.q0 and box.k1 > box.k0]


def _flip(part: Tile, within: Tile) -> Tile:
    """A part of a tile, seen from the tile's other end: rows and keys in reverse order, so that
    i − j becomes (rows − keys) − (i − j)."""
    q0, q1, k0, k1, lower, upper = part
    apart = (q1 - q0) - (k1 - k0)
    return Tile(
        within.q0 + within.q1 - q1,
        within.q0 + within.q1 - q0,
        within.k0 + within.k1 - k1,
        within.k0 + within.k1 - k0,
        -UNBOUNDED if upper == UNBOUNDED else apart - upper,
        UNBOUNDED if lower == -UNBOUNDED else apart - lower,
    )
