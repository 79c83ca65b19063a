"""Band tiles as parts that kernels without bands can do, against dense matrices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ringrt.errors import Unsupported
from ringrt.plan import Tile
from ringrt.plan.bands import parts, shape_of, strips
from ringrt.plan.mask import UNBOUNDED

ROWS, KEYS = 30, 26


def dense(tile, rows=ROWS, keys=KEYS):
    """How often each pair is visible, by the definition of a tile."""
    seen = np.zeros((rows, keys), dtype=int)
    for i in range(tile.q0, tile.q1):
        for j in range(tile.k0, tile.k1):
            apart = (i - tile.q0) - (j - tile.k0)
            seen[i, j] = tile.lower <= apart <= tile.upper
    return seen


@st.composite
def tiles(draw):
    """Any tile, trimmed or not, empty or not."""
    q0, q1 = sorted(draw(st.tuples(st.integers(0, ROWS), st.integers(0, ROWS))))
    k0, k1 = sorted(draw(st.tuples(st.integers(0, KEYS), st.integers(0, KEYS))))
    bound = st.integers(-ROWS - KEYS, ROWS + KEYS)
    lower = draw(bound | st.just(-UNBOUNDED))
    upper = draw(bound | st.just(UNBOUNDED))
    return Tile(q0, q1, k0, k1, lower, upper)


def reversed_is_causal(part):
    """Reading rows and keys from the end, row i sees keys j <= i."""
    seen = dense(part)[part.q0 : part.q1, part.k0 : part.k1]
    turned = seen[::-1, ::-1]
    return np.array_equal(turned, np.tri(*turned.shape, dtype=int))


@settings(max_examples=400, deadline=None)
@given(tiles(), st.booleans())
def test_every_visible_pair_is_in_exactly_one_part(tile, square):
    found = parts(tile, square=square)
    total = sum((dense(part) for part in found), np.zeros((ROWS, KEYS), dtype=int))
    np.testing.assert_array_equal(total, dense(tile))


@settings(max_examples=300, deadline=None)
@given(tiles(), st.booleans())
def test_every_part_is_of_a_shape_that_kernels_know(tile, square):
    for part in parts(tile, square=square):
        rows, keys = part.q1 - part.q0, part.k1 - part.k0
        seen = dense(part)[part.q0 : part.q1, part.k0 : part.k1]
        shape = shape_of(part)
        if shape == "full":
            assert seen.all()
        elif shape == "causal":
            np.testing.assert_array_equal(seen, np.tri(rows, keys, dtype=int))
        else:
            assert shape == "flipped"
            assert reversed_is_causal(part)
        if shape != "full":
            assert rows == keys if square else rows >= keys
        assert seen.any(axis=0).all()
        assert seen.any(axis=1).all()


@settings(max_examples=300, deadline=None)
@given(tiles())
def test_the_number_of_parts_is_bounded(tile):
    found = parts(tile)
    boxes = parts(tile, windows=True)
    if not boxes:
        assert found == []
        return
    (box,) = boxes
    if box.lower > -UNBOUNDED and box.upper < UNBOUNDED:
        width, rows = box.upper - box.lower + 1, box.q1 - box.q0
        assert len(found) <= 2 * -(-rows // width) + 6
    else:
        assert len(found) <= 3


@settings(max_examples=300, deadline=None)
@given(tiles())
def test_a_kernel_with_windows_gets_rows_and_keys_that_see_something(tile):
    boxes = parts(tile, windows=True)
    assert len(boxes) == bool(dense(tile).any())
    for box in boxes:
        seen = dense(box)
        np.testing.assert_array_equal(seen, dense(tile))
        inside = seen[box.q0 : box.q1, box.k0 : box.k1]
        assert inside.any(axis=0).all()
        assert inside.any(axis=1).all()


@settings(max_examples=300, deadline=None)
@given(tiles(), st.integers(1, 12))
def test_strips_are_the_tile_in_few_rows(tile, rows):
    found = strips(tile, rows)
    total = sum((dense(part) for part in found), np.zeros((ROWS, KEYS), dtype=int))
    np.testing.assert_array_equal(total, dense(tile))
    assert len(found) <= -(-(tile.q1 - tile.q0) // rows)
    for part in found:
        inside = dense(part)[part.q0 : part.q1, part.k0 : part.k1]
        assert len(inside) <= rows
        assert inside.any(axis=0).all()
        assert inside.any(axis=1).all()


def test_a_full_tile_and_a_causal_square_stay_as_they_are():
    for tile in (Tile(2, 9, 1, 5, -UNBOUNDED, UNBOUNDED), Tile(2, 9, 1, 8, 0, UNBOUNDED)):
        assert parts(tile) == [tile]


def test_causal_with_more_keys_is_a_rectangle_and_a_square():
    """The last rows of a sequence: what was before them is seen by all."""
    found = parts(Tile(0, 4, 0, 10, -6, UNBOUNDED))
    assert found == [Tile(0, 4, 6, 10, 0, UNBOUNDED), Tile(0, 4, 0, 6, -UNBOUNDED, UNBOUNDED)]


def test_a_tall_causal_part_is_for_kernels_that_are_aligned_top_left():
    tile = Tile(0, 9, 0, 4, 0, UNBOUNDED)
    assert parts(tile, square=False) == [tile]
    assert [shape_of(part) for part in parts(tile)] == ["causal", "full"]


def test_a_band_is_squares_of_its_width():
    found = parts(Tile(0, 24, 0, 24, 0, 5))
    sizes = [(part.q1 - part.q0, part.k1 - part.k0, shape_of(part)) for part in found]
    assert sizes == [(6, 6, "causal"), *[(5, 5, "flipped"), (6, 6, "causal")] * 3]


def test_a_narrow_window_over_many_rows_is_refused_by_name():
    tile = Tile(0, 10_000, 0, 10_000, 0, 1)
    with pytest.raises(Unsupported, match="a window of 2 keys over 10000 rows.*at most 100"):
        parts(tile, most=100)
    assert len(parts(tile, most=10_000)) == 10_000 - 1
    assert len(parts(tile, windows=True, most=100)) == 1


def test_positions_of_parts_are_those_of_the_shard():
    found = parts(Tile(100, 104, 50, 56, -2, UNBOUNDED))
    assert {(part.q0, part.k0) for part in found} == {(100, 52), (100, 50)}
