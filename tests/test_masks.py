"""Masks as options: each becomes the pieces of its definition, and what is wrong is told."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from masks import mask_options, visible

import oracle
import ringrt
from ringrt import Mask, Piece
from ringrt.errors import ConfigError, PlanError
from ringrt.plan.mask_options import MaskOptions
from support import PARTITIONS as NAMES, assert_close, lines_run, random_qkv


def built(q_length, kv_length, **options):
    mask = MaskOptions.of(**options).build(q_length, kv_length)
    mask.check(q_length, kv_length)
    return mask.visible(np.arange(q_length), np.arange(kv_length))


@settings(max_examples=300)
@given(st.data())
def test_options_become_the_pieces_of_their_definition(data):
    q_length, kv_length = data.draw(st.integers(0, 24)), data.draw(st.integers(0, 24))
    options = data.draw(mask_options(q_length, kv_length))
    np.testing.assert_array_equal(
        built(q_length, kv_length, **options), visible(q_length, kv_length, **options)
    )


def test_windows_by_count():
    """16 tokens: a causal window of three to the left shows 58 pairs."""
    assert built(16, 16, causal=True, window=(3, -1)).sum() == 58
    assert built(16, 16, window=(3, 0)).sum() == 58
    assert built(16, 16, window=(3, -1)).sum() == 58 + 16 * 15 // 2
    assert built(16, 16, window=(3, None)).sum() == 58 + 16 * 15 // 2
    assert built(16, 16, window=(0, 0)).sum() == 16


def test_causal_lowers_the_right_side_of_a_window_but_does_not_raise_it():
    np.testing.assert_array_equal(
        built(9, 9, causal=True, window=(2, 5)), built(9, 9, window=(2, 0))
    )


def test_documents_and_padding():
    seen = built(10, 10, causal=True, documents=[0, 4, 7])
    assert seen[:4, :4].sum() == 10
    assert seen[4:7, 4:7].sum() == 6
    assert seen.sum() == 16
    np.testing.assert_array_equal(seen, built(10, 10, causal=True, documents=[[4, 7], [0, 4]]))


def test_sinks_stay_visible_beside_a_window():
    seen = built(12, 12, causal=True, window=(2, 0), sink_tokens=2)
    assert seen[11].nonzero()[0].tolist() == [0, 1, 9, 10, 11]
    assert seen[1].nonzero()[0].tolist() == [0, 1]


def test_a_prefix_is_visible_to_all():
    seen = built(6, 6, causal=True, prefix=3)
    assert seen[0].nonzero()[0].tolist() == [0, 1, 2]
    assert seen[4].nonzero()[0].tolist() == [0, 1, 2, 3, 4]


HUGE = [sys.maxsize, 1 << 62, 1 << 61, 1 << 70]


@pytest.mark.parametrize("huge", HUGE)
@pytest.mark.parametrize("name", NAMES)
def test_numbers_larger_than_any_length_are_no_bound(huge, name):
    """And do not wrap around, in the mask or on the way to the tiles."""
    same = [
        ({"window": (huge, 0)}, {"window": (None, 0)}),
        ({"window": (0, huge)}, {"window": (0, None)}),
        ({"causal": True, "documents": [0, 10, 37], "prefix": huge}, {"documents": [0, 10, 37]}),
        (
            {"causal": True, "window": (2, 0), "documents": [0, 10, 37], "sink_tokens": huge},
            {"causal": True, "documents": [0, 10, 37]},
        ),
        ({"mask": Mask([Piece(0, 37, 0, 37, -huge, huge)])}, {}),
        ({"mask": Mask([Piece(0, 37, 0, 37, huge)])}, {"documents": []}),
    ]
    q, k, v = random_qkv(37)
    for options, plain in same:
        wanted = oracle.attention(q, k, v, visible(37, 37, **plain))
        assert_close(ringrt.attention(q, k, v, ranks=3, partition=name, **options), wanted)


def test_a_mask_is_seen_at_positions_in_any_order():
    mask = Mask([Piece(0, 9, 0, 5, 0), Piece(3, 9, 5, 9, None, 2)])
    at = np.random.default_rng(0).permutation(9)
    whole = mask.visible(np.arange(9), np.arange(9))
    np.testing.assert_array_equal(mask.visible(at, at[::-1]), whole[np.ix_(at, at[::-1])])


def test_a_mask_of_ones_own_is_taken_as_it_is():
    mask = Mask([Piece(0, 4, 0, 4, min_distance=0), Piece(4, 6, 0, 2)])
    assert MaskOptions.of(mask=mask).build(6, 6) is mask


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 3}, r"window: expected \(left, right\), .* got 3"),
        ({"window": (3,)}, "window: expected"),
        ({"window": (-2, 0)}, r"window: expected .* got \(-2, 0\)"),
        ({"window": (1.5, 0)}, "window: expected"),
        ({"prefix": -1}, "prefix: expected a whole number >= 0, got -1"),
        ({"sink_tokens": True}, "sink_tokens: expected a whole number >= 0, got True"),
        ({"documents": [0, 5, 3]}, r"documents: expected 0 <= start <= stop, got \[5, 3\]"),
        ({"documents": [-1, 3]}, "documents: expected 0 <= start <= stop"),
        (
            {"documents": [[0, 4], [3, 6]]},
            r"documents: expected ranges that do not overlap, got \[0, 4\] and \[3, 6\]",
        ),
        (
            {"documents": [0, 11]},
            r"documents: expected ranges within the 10 query rows, got \[0, 11\]",
        ),
        ({"documents": [0.5, 1]}, "documents: expected whole numbers"),
        ({"documents": [[0, 1, 2]]}, "documents: expected whole numbers"),
        ({"documents": [[0, 1], [2]]}, "documents: expected whole numbers"),
        (
            {"documents": ([0, 5], [0, 2, 4])},
            "documents: expected as many among queries as among keys, got 1 and 2",
        ),
        (
            {"documents": ((0, 4), (4, 9))},
            "documents: expected a list of ranges, or arrays .* which may mean either",
        ),
        ({"documents": [0, 1 << 40]}, "documents: expected positions of at most 2147483648"),
        ({"causal": "false"}, "causal: expected True or False, got 'false'"),
        ({"causal": 1}, "causal: expected True or False, got 1"),
        ({"mask": 3}, "mask: expected a ringrt.Mask, got int"),
        ({"mask": Mask.full(10, 10), "causal": True}, "mask: expected no causal beside it"),
        (
            {"mask": Mask.full(10, 10), "prefix": 2, "window": (1, 1)},
            "mask: expected no window and no prefix",
        ),
        ({"mask": Mask.full(10, 11)}, "mask: expected pieces within 10 × 10"),
        (
            {"mask": Mask([Piece(0, 5, 0, 5), Piece(4, 9, 4, 9)])},
            "mask: expected pieces that do not overlap",
        ),
    ],
)
def test_what_is_wrong_is_told(options, message):
    with pytest.raises(ConfigError, match=message):
        MaskOptions.of(**options).build(10, 10)


@given(st.data())
def test_overlapping_pieces_are_found_exactly(data):
    bound = st.none() | st.integers(-4, 4)

    def piece():
        q = sorted((data.draw(st.integers(0, 6)), data.draw(st.integers(0, 6))))
        k = sorted((data.draw(st.integers(0, 6)), data.draw(st.integers(0, 6))))
        return Piece(*q, *k, data.draw(bound), data.draw(bound))

    pieces = [piece() for _ in range(3)]
    at = np.arange(6)
    count = sum(Mask([each]).visible(at, at).astype(int) for each in pieces)
    if count.max() > 1:
        with pytest.raises(ConfigError, match="do not overlap"):
            Mask(pieces).check(6, 6)
    else:
        Mask(pieces).check(6, 6)


def test_checking_ten_thousand_pieces_looks_at_no_pair_of_them_in_python():
    cuts = np.arange(0, 100_001, 10)
    pieces = [Piece(int(a), int(b), int(a), int(b), 0) for a, b in itertools.pairwise(cuts)]
    mask = Mask(pieces)
    assert lines_run(lambda: mask.check(100_000, 100_000)) < len(pieces)


@pytest.mark.parametrize(
    "fields", [(0, 11.9, 0, 12), (0, 3, 0, 3, 0.7), (0, True, 0, 3), (0, 1 << 40, 0, 3)]
)
def test_a_piece_of_other_than_whole_numbers_is_refused(fields):
    with pytest.raises(PlanError, match="must be"):
        Piece(*fields)
