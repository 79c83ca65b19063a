"""The ring schedule, its costs, and the closed formulas that they are held to."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ringrt.errors import ConfigError, PlanError
from ringrt.plan import HOME, PARTITIONS, Mask, Problem, plan
from ringrt.plan.cost import count_steps, peak_kv_bytes, ring_bytes_sent
from ringrt.plan.partition import positions
from support import PARTITIONS as NAMES


def problem(length=48, kv_length=None, mask=Mask.causal, **changes):
    kv_length = length if kv_length is None else kv_length
    values = {"batch": 1, "q_heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 16,
              "dtype": "float32", "scale": 1.0} | changes  # fmt: skip
    return Problem(q_length=length, kv_length=kv_length, mask=mask(length, kv_length), **values)


PLANS = st.builds(
    lambda length, name, size: plan(problem(length), PARTITIONS[name], size),
    st.integers(0, 40),
    st.sampled_from(NAMES),
    st.integers(1, 9),
)


@given(PLANS)
def test_at_step_s_rank_u_holds_shard_u_minus_s(planned):
    for rank in range(planned.size):
        shards = [step.shard for step in planned.steps(rank)]
        assert shards == [(rank - s) % planned.size for s in range(planned.size)]


@given(PLANS)
def test_what_one_rank_sends_the_next_receives(planned):
    every = [planned.steps(rank) for rank in range(planned.size)]
    for rank, steps in enumerate(every):
        for step in steps:
            if step.send is None:
                continue
            other = every[step.send.peer][step.index].recv
            assert (other.peer, other.shard, other.rows) == (rank, step.shard, step.rows)


@given(PLANS)
def test_a_slot_holds_what_was_received_into_it(planned):
    """Walk the steps with real buffers: each computes on its own shard, sends it from where
    it lies, and never receives into a buffer that it computes on or sends from."""
    for rank in range(planned.size):
        held = {HOME: rank}
        for step in planned.steps(rank):
            if step.rows:
                assert held[step.slot] == step.shard
            if step.send:
                assert held[step.send.slot] == step.send.shard
            if step.recv:
                assert step.recv.slot != step.slot
                assert step.recv.slot != HOME
                held[step.recv.slot] = step.recv.shard
        assert set(held) <= {HOME, 0, 1}


@given(PLANS)
def test_all_steps_together_are_the_mask(planned):
    length = planned.problem.q_length
    count = np.zeros((length, length), dtype=int)
    for rank in range(planned.size):
        rows = positions(planned.q_runs(rank))
        for step in planned.steps(rank):
            keys = positions(planned.kv_runs(step.shard))
            for tile in step.tiles:
                i, j = np.arange(tile.q1 - tile.q0), np.arange(tile.k1 - tile.k0)
                apart = i[:, None] - j[None, :]
                seen = (tile.lower <= apart) & (apart <= tile.upper)
                box = np.ix_(rows[tile.q0 : tile.q1], keys[tile.k0 : tile.k1])
                count[box] += seen
    np.testing.assert_array_equal(count, np.tril(np.ones((length, length), dtype=int)))


@given(PLANS)
def test_counted_steps_equal_the_formulas(planned):
    total = 0
    for rank in range(planned.size):
        cost = count_steps(planned, rank)
        assert cost.bytes_sent == ring_bytes_sent(planned, rank)
        assert cost.peak_kv_bytes == peak_kv_bytes(planned, rank)
        total += cost.visible_pairs
    length = planned.problem.q_length
    assert total == length * (length + 1) // 2


def test_bytes_in_numbers():
    """48 tokens, 2 KV heads of 8 + 16 floats: 192 bytes a row; 4 even shards of 12 rows."""
    planned = plan(problem(48), PARTITIONS["striped"], 4)
    cost = count_steps(planned, 1)
    assert cost.bytes_sent == cost.bytes_received == 3 * 12 * 192
    assert cost.peak_kv_bytes == 3 * 12 * 192
    assert cost.flops == cost.visible_pairs * 2 * 4 * (8 + 16)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 64])
def test_memory_is_three_shards_whatever_p(size):
    planned = plan(problem(64 * 9), PARTITIONS["contiguous"], size)
    shard_bytes = 64 * 9 // size * planned.problem.kv_row_bytes
    assert peak_kv_bytes(planned, 0) == min(size, 3) * shard_bytes


def test_causal_work_is_even_when_striped_and_zigzag():
    shares = {}
    for name in NAMES:
        planned = plan(problem(1024), PARTITIONS[name], 4)
        work = [count_steps(planned, rank).visible_pairs for rank in range(4)]
        shares[name] = max(work) / (sum(work) / 4)
    assert shares["striped"] < 1.01
    assert shares["zigzag"] < 1.01
    assert shares["contiguous"] > 1.7


@pytest.mark.parametrize("name", NAMES)
def test_1024_ranks_build_quickly(name):
    """Well under a second a rank; the best of a few, since machines are noisy."""
    planned = plan(problem(1 << 20), PARTITIONS[name], 1024)

    def seconds(rank):
        begin = time.perf_counter()
        assert len(planned.steps(rank)) == 1024
        return time.perf_counter() - begin

    assert min(seconds(rank) for rank in (0, 511, 1023)) < 1.0


def test_unknown_schedules_and_ranks_are_refused():
    with pytest.raises(ConfigError, match=r"schedule: expected auto or ring, got 'star'"):
        plan(problem(), PARTITIONS["striped"], 2, "star")
    with pytest.raises(ConfigError, match="ranks: expected at least 1, got 0"):
        plan(problem(), PARTITIONS["striped"], 0)
    with pytest.raises(PlanError, match="rank 2 is not in a plan for 2 ranks"):
        plan(problem(), PARTITIONS["striped"], 2).steps(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_heads": 3}, "q_heads: expected a multiple of kv_heads"),
        ({"kv_heads": 0}, "kv_heads: expected at least 1"),
        ({"batch": -1}, "batch: expected at least 0"),
        ({"dtype": "int8"}, "dtype: expected float16"),
        ({"scale": float("nan")}, "scale: expected a finite number"),
        ({"softcap": 0.0}, "softcap: expected a finite number > 0"),
    ],
)
def test_impossible_problems_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        problem(**change)
