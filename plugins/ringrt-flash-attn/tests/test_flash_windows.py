"""Bands as windows: what the kernels make of them is the band, pair by pair."""

from __future__ import annotations

import flash_attention32
import flash_standins
import numpy as np
import pytest
from flash_support import tiles
from ringrt_flash_attn.kernels import KERNELS
from ringrt_flash_attn.windows import sections, window

from ringrt.backend import band
from ringrt.plan.bands import parts as cut
from ringrt.plan.mask import UNBOUNDED
from ringrt.plan.tiles import Tile


def shown(version, part, backward):
    """The pairs that a kernel shows for the window it is given for a part."""
    rows, keys = part.q1 - part.q0, part.k1 - part.k0
    left, right = window(part)
    if version == 4:
        return flash_attention32.bottom_right(rows, keys, left, right)
    bounds = (-1 if bound is None else bound for bound in (left, right))
    if version == 2:
        bounds = flash_standins.window2(rows, keys, False, *bounds, forward=not backward)
    else:
        bounds = flash_standins.window3(rows, keys, False, *bounds)
    return flash_attention32.bottom_right(rows, keys, *bounds)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("version", [2, 3, 4])
def test_every_visible_pair_is_shown_once_and_no_other(version, backward):
    kind = KERNELS[version].__new__(KERNELS[version])
    for tile in tiles(6):
        seen = np.zeros((tile.q1, tile.k1), dtype=int)
        for box in cut(tile, windows=True):
            for part in kind.parts(box):
                rows, keys = slice(part.q0, part.q1), slice(part.k0, part.k1)
                seen[rows, keys] += shown(version, part, backward).numpy()
        assert (seen == band(tile)).all(), tile


def test_no_row_of_a_part_is_empty():
    for tile in tiles(6):
        for box in cut(tile, windows=True):
            for part in sections(box):
                assert band(part).any(axis=1).all(), part


def test_sections_are_at_most_three_and_of_the_shapes_that_are_promised():
    most = 0
    for tile in tiles(7):
        for box in cut(tile, windows=True):
            found = sections(box)
            most = max(most, len(found))
            for part in found:
                left, right = window(part)
                assert right in (None, 0)
                assert left is None or part.q1 - part.q0 <= part.k1 - part.k0
    assert most == 3


def test_a_window_is_found_from_the_last_row_and_key():
    assert window(Tile(3, 8, 10, 15, 0, UNBOUNDED)) == (None, 0)
    assert window(Tile(0, 4, 0, 7, -3, UNBOUNDED)) == (None, 0)
    assert window(Tile(0, 4, 0, 7, -4, 2)) == (5, 1)
    assert window(Tile(0, 4, 0, 7, -UNBOUNDED, UNBOUNDED)) == (None, None)


def test_a_tile_that_is_not_cut_is_an_error():
    with pytest.raises(AssertionError, match="not cut"):
        window(Tile(0, 4, 0, 9, 1, UNBOUNDED))


def test_version_2_would_show_hidden_keys_of_tall_tiles():
    """What the sections are for: without them a bound is lost, in either way."""
    lower = Tile(0, 10, 0, 4, 0, UNBOUNDED)
    upper = Tile(0, 10, 0, 7, -UNBOUNDED, 3)
    for tile in (lower, upper):
        assert not (shown(2, tile, False).numpy() == band(tile)).all()
        assert (shown(3, tile, False).numpy() == band(tile)).all()
