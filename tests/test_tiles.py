"""The lowering is exact: tiles show the mask's pairs, each once, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ringrt.errors import PlanError
from ringrt.plan import PARTITIONS, Mask, Piece, Run, TileTable
from ringrt.plan.partition import positions
from ringrt.plan.tiles import lower
from support import PARTITIONS as NAMES


def shown(tiles: TileTable, rows: int, keys: int) -> np.ndarray:
    """How often tiles show each pair, int [rows, keys], straight from their definition."""
    count = np.zeros((rows, keys), dtype=int)
    for tile in tiles:
        for i in range(tile.q0, tile.q1):
            for j in range(tile.k0, tile.k1):
                count[i, j] += tile.lower <= (i - tile.q0) - (j - tile.k0) <= tile.upper
    return count


def pairs_of(pieces, q_positions, k_positions) -> np.ndarray:
    """How often pieces show each pair, from their definition."""
    count = np.zeros((len(q_positions), len(k_positions)), dtype=int)
    for piece in pieces:
        low = -(10**9) if piece.min_distance is None else piece.min_distance
        high = 10**9 if piece.max_distance is None else piece.max_distance
        for a, i in enumerate(q_positions):
            for b, j in enumerate(k_positions):
                inside = piece.q_start <= i < piece.q_stop and piece.k_start <= j < piece.k_stop
                count[a, b] += inside and low <= i - j <= high
    return count


@st.composite
def pieces(draw, q_length, k_length):
    q = sorted(draw(st.tuples(st.integers(0, q_length), st.integers(0, q_length))))
    k = sorted(draw(st.tuples(st.integers(0, k_length), st.integers(0, k_length))))
    bound = st.none() | st.integers(-12, 12)
    return Piece(*q, *k, draw(bound), draw(bound))


@st.composite
def runs(draw, length):
    """A run within range(length): of any stride, possibly of one token or none."""
    stride = draw(st.integers(1, 5))
    start = draw(st.integers(0, max(0, length - 1)))
    most = -(-(length - start) // stride)
    return Run(start, stride, draw(st.integers(0, max(0, most))))


@settings(max_examples=300)
@given(st.data())
def test_a_ring_covers_the_mask_exactly_once(data):
    q_length, k_length = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 20))
    size = data.draw(st.integers(1, 9))
    rule = PARTITIONS[data.draw(st.sampled_from(NAMES))]
    piece = data.draw(pieces(q_length, k_length))
    for q_rank in range(size):
        q_runs = rule.runs(q_length, size, q_rank)
        for k_rank in range(size):
            k_runs = rule.runs(k_length, size, k_rank)
            q_at, k_at = positions(q_runs), positions(k_runs)
            tiles = lower(Mask([piece]), q_runs, k_runs)
            np.testing.assert_array_equal(
                shown(tiles, len(q_at), len(k_at)), pairs_of([piece], q_at, k_at)
            )


@settings(max_examples=300)
@given(st.data())
def test_runs_of_unequal_stride_are_split_until_they_agree(data):
    q_run, k_run = data.draw(runs(24)), data.draw(runs(24))
    mask = [data.draw(pieces(24, 24))]
    tiles = lower(Mask(mask), (q_run,), (k_run,))
    expected = pairs_of(mask, positions((q_run,)), positions((k_run,)))
    np.testing.assert_array_equal(shown(tiles, q_run.count, k_run.count), expected)


@settings(max_examples=200)
@given(st.data())
def test_tiles_are_tight_and_know_their_size(data):
    mask = Mask([data.draw(pieces(20, 20))])
    tiles = lower(mask, (data.draw(runs(20)),), (data.draw(runs(20)),))
    for tile, pairs in zip(tiles, tiles.visible_pairs(), strict=True):
        seen = shown(TileTable(np.array([tile])), tile.q1, tile.k1)[tile.q0 :, tile.k0 :]
        assert seen.sum() == pairs > 0
        assert seen.all() == tile.full
        for edge in (seen[0], seen[-1], seen[:, 0], seen[:, -1]):
            assert edge.any()


@settings(max_examples=200)
@given(st.data(), st.integers(1, 9))
def test_portions_and_rows_keep_every_pair(data, count):
    length = 20
    mask = Mask([Piece(0, 20, 0, 9, data.draw(st.none() | st.integers(-5, 5))),
                 Piece(0, 20, 9, 20, None, data.draw(st.none() | st.integers(-5, 5)))])  # fmt: skip
    tiles = lower(mask, (Run(0, 1, length),), (Run(0, 1, length),))
    whole = shown(tiles, length, length)
    portions = tiles.portions(count)
    np.testing.assert_array_equal(sum(shown(p, length, length) for p in portions), whole)
    cut = data.draw(st.integers(0, length))
    low, high = (shown(tiles.rows(*edge), length, length) for edge in ((0, cut), (cut, length)))
    np.testing.assert_array_equal(low + high, whole)
    assert not low[cut:].any()
    assert not high[:cut].any()


def test_portions_are_of_about_equal_work():
    tiles = lower(Mask.causal(512, 512), (Run(0, 1, 512),), (Run(0, 1, 512),))
    work = [int(portion.visible_pairs().sum()) for portion in tiles.portions(8)]
    assert sum(work) == 512 * 513 // 2
    assert 6 <= len(work) <= 10
    assert max(work) < 3 * sum(work) / 8


@pytest.mark.parametrize("name", NAMES)
def test_bounds_that_exclude_nothing_are_dropped(name):
    """Under causal, a contiguous shard sees earlier shards whole."""
    rule = PARTITIONS[name]
    tiles = lower(Mask.causal(24, 24), rule.runs(24, 3, 2), rule.runs(24, 3, 0))
    assert len(list(tiles)) == {"contiguous": 1, "striped": 1, "zigzag": 2}[name]
    assert any(tile.full for tile in tiles) == (name != "striped")


def test_huge_positions_do_not_overflow():
    length = 1 << 31
    tiles = lower(Mask.causal(length, length), (Run(0, 1, length),), (Run(0, 1, length),))
    [tile] = tiles
    assert (tile.lower, tile.full) == (0, False)


def test_masks_compare_by_content():
    assert Mask.causal(5, 5) == Mask([Piece(0, 5, 0, 5, min_distance=0)])
    assert Mask.causal(5, 5) != Mask.full(5, 5)
    assert len({Mask.full(5, 5), Mask.full(5, 5)}) == 1
    assert Mask.full(3, 4).pieces() == [Piece(0, 3, 0, 4)]


@given(st.integers(0, 9), st.integers(0, 9))
def test_causal_is_aligned_at_the_bottom_right(q_length, k_length):
    seen = Mask.causal(q_length, k_length).visible(np.arange(q_length), np.arange(k_length))
    for i in range(q_length):
        for j in range(k_length):
            assert seen[i, j] == (q_length - 1 - i <= k_length - 1 - j)


def test_a_piece_of_reversed_ranges_is_refused():
    with pytest.raises(PlanError, match="0 <= start <= stop"):
        Piece(4, 3, 0, 5)
