"""Partitions hold every position once, for any length and any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ringrt.errors import ConfigError
from ringrt.plan import PARTITIONS
from ringrt.plan.partition import positions, shard, unshard
from ringrt.registry import registry
from support import PARTITIONS as NAMES

SIZES = st.integers(1, 9)
LENGTHS = st.integers(0, 60)


def positions_of(name, length, size, rank):
    return positions(PARTITIONS[name].runs(length, size, rank)).tolist()


@given(st.sampled_from(NAMES), LENGTHS, SIZES)
def test_every_position_is_held_once(name, length, size):
    held = [p for rank in range(size) for p in positions_of(name, length, size, rank)]
    assert sorted(held) == list(range(length))


@given(st.sampled_from(NAMES), LENGTHS, SIZES)
def test_shards_differ_by_at_most_the_number_of_runs(name, length, size):
    counts = PARTITIONS[name].counts(length, size)
    assert sum(counts) == length
    assert max(counts) - min(counts) <= (2 if name == "zigzag" else 1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("contiguous", [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]),
        ("striped", [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]),
        ("zigzag", [[0, 1, 9], [2, 3, 8], [4, 5, 6, 7]]),
    ],
)
def test_ten_tokens_on_three_ranks(name, expected):
    assert [positions_of(name, 10, 3, rank) for rank in range(3)] == expected


@pytest.mark.parametrize("name", NAMES)
def test_more_ranks_than_tokens_leaves_some_empty(name):
    counts = PARTITIONS[name].counts(3, 8)
    assert sum(counts) == 3
    assert counts.count(0) == 5


@given(st.sampled_from(NAMES), LENGTHS, SIZES, st.integers(0, 2))
def test_unshard_undoes_shard(name, length, size, axis):
    shape = [2, 3, 4]
    shape[axis] = length
    whole = np.arange(np.prod(shape)).reshape(shape)
    rule = PARTITIONS[name]
    shards = [shard(whole, rule.runs(length, size, rank), axis) for rank in range(size)]
    np.testing.assert_array_equal(unshard(shards, rule, axis), whole)


def test_a_shard_of_one_run_is_a_view():
    whole = np.zeros((1, 12, 1, 1))
    assert np.shares_memory(shard(whole, PARTITIONS["striped"].runs(12, 3, 1)), whole)


def test_an_unknown_partition_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"partition: expected contiguous .*, got 'diagonal'"):
        registry().partition("diagonal")
