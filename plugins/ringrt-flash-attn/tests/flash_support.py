"""Tiles and problems to try."""

from __future__ import annotations

from itertools import product

from ringrt.plan import Mask, Problem
from ringrt.plan.mask import UNBOUNDED
from ringrt.plan.tiles import Tile


def tiles(most):
    """Every tile of up to so many rows and keys, with every pair of bounds."""
    for rows in range(1, most + 1):
        for keys in range(1, most + 1):
            lows = (-UNBOUNDED, *range(1 - keys, rows))
            highs = (UNBOUNDED, *range(1 - keys, rows))
            for lower, upper in product(lows, highs):
                yield Tile(0, rows, 0, keys, lower, upper)


def problem(**changes):
    """Two query heads for each of two KV heads, bfloat16, full."""
    plain = dict(batch=1, q_heads=4, kv_heads=2, head_dim=16, value_dim=16, q_length=8)
    plain |= dict(kv_length=8, dtype="bfloat16", mask=Mask.full(8, 8), scale=0.25)
    return Problem(**plain | changes)
