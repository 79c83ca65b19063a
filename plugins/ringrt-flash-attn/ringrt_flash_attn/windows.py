"""A band tile as the window that FlashAttention takes.

With its bottom-right alignment, row i of n rows lies at key p = i + (keys - rows), and sees the
keys p - left .. p + right. So of a band lower <= i - j <= upper

    left = upper + (keys - rows)        right = -lower - (keys - rows)

Neither may be negative: the kernels take that for "no bound" (2 and 3). In a tile cut to what it
shows neither is: its last row sees the last key or an earlier one, and its last key is seen.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ringrt.plan.mask import UNBOUNDED
from ringrt.plan.tiles import Tile, trim

#: Keys that a row sees to the left and to the right of its place; None is no bound.
Window = tuple[int | None, int | None]


def window(tile: Tile) -> Window:
    """The tile's window. The tile is cut to what it shows."""
    apart = (tile.k1 - tile.k0) - (tile.q1 - tile.q0)
    left = None if tile.upper == UNBOUNDED else tile.upper + apart
    right = None if tile.lower == -UNBOUNDED else -tile.lower - apart
    assert min(left or 0, right or 0) >= 0, f"{tile} is not cut to what it shows"
    return left, right


def sections(tile: Tile) -> list[Tile]:
    """The same visible pairs in up to three tiles, cut between rows where the lower bound stops
    and where the upper one begins to hide keys. Wherever a section has an upper bound it has no
    more rows than keys, and wherever it has a lower one its window ends with right = 0.

    FlashAttention 2 needs this of tiles with more rows than keys: it takes right >= keys for no
    bound, and no bound for right = keys, which is exact only where rows <= keys + 1
    (csrc/flash_attn/flash_api.cpp; issue 895 of its repository).
    """
    q0, q1, k0, k1, lower, upper = tile
    rows, keys = q1 - q0, k1 - k0
    # From row `seen` on the last key is visible; from row `hidden` on the first one is not.
    seen = 0 if lower == -UNBOUNDED else keys - 1 + lower
    hidden = rows if upper == UNBOUNDED else upper + 1
    edges = sorted({0, min(max(seen, 0), rows), min(max(hidden, 0), rows), rows})
    made = []
    for begin, end in pairwise(edges):
        low = lower if lower == -UNBOUNDED else lower - begin
        high = upper if upper == UNBOUNDED else upper - begin
        made.append(Tile(q0 + begin, q0 + end, k0, k1, low, high))
    table = trim(np.array(made, dtype=np.int64))
    return [Tile(*row) for row in table.tolist()]
