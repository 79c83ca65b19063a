"""The ring schedule, its costs, and the closed formulas that they are held to."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, strategies as st

from ringrt.errors import ConfigError, PlanError
from ringrt.plan import HOME, PARTITIONS, Mask, Problem, plan
from ringrt.plan.cost import (
    count_steps,
    least_bytes,
    peak_kv_bytes,
    ring_bytes_sent,
    traffic,
)
from ringrt.plan.mask_options import MaskOptions
from ringrt.plan.needs import _all_needs
from ringrt.plan.partition import positions
from ringrt.plan.rows import Rows
from support import PARTITIONS as NAMES, lines_run


def problem(length=48, kv_length=None, mask=Mask.causal, **changes):
    kv_length = length if kv_length is None else kv_length
    values = {"batch": 1, "q_heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 16,
              "dtype": "float32", "scale": 1.0} | changes  # fmt: skip
    return Problem(q_length=length, kv_length=kv_length, mask=mask(length, kv_length), **values)


def some_plan(length, kv_length, name, size, schedule, travel, options):
    mask = MaskOptions.of(**options).build(length, kv_length)
    return plan(
        problem(length, kv_length, mask=lambda q, k: mask),
        PARTITIONS[name],
        size,
        schedule,
        backward=travel is not None,
        travel=travel or "auto",
    )


#: Plans of any kind, for both passes; a window, documents and sinks leave things out.
PLANS = st.builds(
    some_plan,
    st.integers(0, 40),
    st.integers(30, 40),
    st.sampled_from(NAMES),
    st.integers(1, 9),
    st.sampled_from(["ring", "direct"]),
    st.sampled_from([None, "kv", "q"]),
    st.sampled_from(
        [
            {},
            {"causal": True},
            {"window": (3, 0)},
            {"window": (2, 5), "sink_tokens": 2},
            {"documents": ([[0, 0]], [[3, 20]])},
            {"causal": True, "prefix": 4, "window": (1, -1)},
        ]
    ),
)


def full_plan(length, name, size, schedule="ring"):
    return plan(problem(length, mask=Mask.full), PARTITIONS[name], size, schedule)


@given(st.integers(9, 40), st.sampled_from(NAMES), st.integers(1, 9))
def test_at_step_s_rank_u_holds_shard_u_minus_s(length, name, size):
    planned = full_plan(length, name, size)
    for rank in range(size):
        shards = [step.shard for step in planned.steps(rank)]
        assert shards == [(rank - s) % size for s in range(size)]


def hops_of(planned, rank, kind, backward):
    """(step, peer, shard, rows) of every hop of a kind, in order."""
    steps = planned.backward_steps(rank) if backward else planned.steps(rank)
    hops = [(step.index, getattr(step, kind)) for step in steps]
    return [(i, hop.peer, hop.shard, hop.rows) for i, hop in hops if hop]


@given(PLANS, st.booleans())
def test_what_one_rank_sends_another_receives(planned, backward):
    sent, received = [], []
    for rank in range(planned.size):
        for kind in ("send", "grad_send"):
            sent += [
                (kind == "send", i, rank, *hop)
                for i, *hop in hops_of(planned, rank, kind, backward)
            ]
        for kind in ("recv", "carry", "home"):
            for i, peer, *hop in hops_of(planned, rank, kind, backward):
                received.append((kind == "recv", i, peer, rank, *hop))
    assert len(sent) == len(received)
    key = lambda hop: hop[:5]  # noqa: E731
    assert sorted(sent, key=key) == sorted(received, key=key)


@given(PLANS, st.booleans())
def test_a_slot_holds_what_was_received_into_it(planned, backward):
    """Walk the steps with real buffers: each computes on rows that lie where it says, sends
    rows from where they lie, and never receives into a buffer that it computes on or sends
    from."""
    for rank in range(planned.size):
        lengths = planned.problem.kv_length if planned.travel == "kv" else planned.problem.q_length
        home = Rows.all(planned.partition.count(lengths, planned.size, rank))
        held = {HOME: (rank, home)}
        steps = planned.backward_steps(rank) if backward else planned.steps(rank)
        for step in steps:
            if step.rows:
                assert held[step.slot] == (step.shard, step.rows)
            if step.send:
                shard, rows = held[step.send.slot]
                assert shard == step.send.shard
                assert holds(rows, step.send.rows)
            if step.recv:
                assert step.recv.slot not in (step.slot, HOME)
                held[step.recv.slot] = (step.recv.shard, step.recv.rows)
        assert set(held) <= {HOME, 0, 1}


def holds(rows, part):
    """Every row of `part` is one of `rows`."""
    whole = {i for start, stop in rows.ranges.tolist() for i in range(start, stop)}
    return all(i in whole for start, stop in part.ranges.tolist() for i in range(start, stop))


@given(PLANS)
def test_all_steps_together_are_the_mask(planned):
    """In compact coordinates, each visible pair once; in backward the travelling side is Q or
    K,V."""
    problem = planned.problem
    count = np.zeros((problem.q_length, problem.kv_length), dtype=int)
    for rank in range(planned.size):
        for step in planned.backward_steps(rank):
            q_owner, k_owner = (rank, step.shard) if planned.travel == "kv" else (step.shard, rank)
            rows, keys = positions(planned.q_runs(q_owner)), positions(planned.kv_runs(k_owner))
            present = [i for a, b in step.rows.ranges.tolist() for i in range(a, b)]
            if planned.travel == "kv":
                keys = keys[present]
            else:
                rows = rows[present]
            for tile in step.tiles:
                i, j = np.arange(tile.q1 - tile.q0), np.arange(tile.k1 - tile.k0)
                apart = i[:, None] - j[None, :]
                seen = (tile.lower <= apart) & (apart <= tile.upper)
                count[np.ix_(rows[tile.q0 : tile.q1], keys[tile.k0 : tile.k1])] += seen
    every = np.arange(problem.q_length), np.arange(problem.kv_length)
    np.testing.assert_array_equal(count, problem.mask.visible(*every))


@given(PLANS)
def test_sums_are_carried_home_complete(planned):
    """Follow the sums of every shard: each rank's part is added once, and what comes home is
    the union of all parts."""
    size = planned.size
    parts = {shard: {} for shard in range(size)}
    for rank in range(size):
        for step in planned.backward_steps(rank):
            if step.adds:
                parts[step.shard][rank] = step.adds
                assert holds(step.rows, step.adds)
                assert holds(step.sums, step.adds)
            if step.carry:
                assert holds(step.sums, step.carry.rows)
    for shard in range(size):
        home = [hop[2] for _, *hop in hops_of(planned, shard, "home", True)]
        union = {
            i
            for rows in parts[shard].values()
            for a, b in rows.ranges.tolist()
            for i in range(a, b)
        }
        back = [i for rows in home for a, b in rows.ranges.tolist() for i in range(a, b)]
        if planned.schedule == "ring":
            assert sorted(back) == sorted(union)
        else:
            assert len(back) == sum(rows.count for rows in parts[shard].values())


@given(PLANS, st.booleans())
def test_counted_steps_equal_what_the_needs_say(planned, backward):
    if not backward and planned.travel == "q":
        return
    costs = [count_steps(planned, rank, backward) for rank in range(planned.size)]
    whole = traffic(planned, backward)
    assert sum(cost.bytes_sent for cost in costs) == whole.bytes
    assert sum(cost.bytes_received for cost in costs) == whole.bytes
    kinds = ("send", "grad_send") if backward else ("send",)
    made = [hops_of(planned, r, kind, backward) for r in range(planned.size) for kind in kinds]
    assert sum(map(len, made)) == whole.hops
    every = np.arange(planned.problem.q_length), np.arange(planned.problem.kv_length)
    assert sum(cost.visible_pairs for cost in costs) == planned.problem.mask.visible(*every).sum()


@given(st.integers(9, 40), st.sampled_from(NAMES), st.integers(1, 9))
def test_counted_steps_equal_the_closed_formulas(length, name, size):
    planned = full_plan(length, name, size)
    for rank in range(size):
        cost = count_steps(planned, rank)
        assert cost.bytes_sent == ring_bytes_sent(planned, rank)
        assert cost.peak_kv_bytes == peak_kv_bytes(planned, rank)


@given(PLANS)
def test_direct_moves_the_least_and_the_ring_no_less(planned):
    least = least_bytes(planned)
    for schedule in ("ring", "direct"):
        moved = traffic(dataclasses.replace(planned, schedule=schedule)).bytes
        assert moved == least if schedule == "direct" else moved >= least


def test_bytes_in_numbers():
    """48 tokens, 2 KV heads of 8 + 16 floats: 192 bytes a row; 4 even shards of 12 rows."""
    cost = count_steps(full_plan(48, "striped", 4), 1)
    assert cost.bytes_sent == cost.bytes_received == 3 * 12 * 192
    assert cost.peak_kv_bytes == 3 * 12 * 192
    assert cost.flops == cost.visible_pairs * 2 * 4 * (8 + 16)


def test_a_window_on_a_contiguous_partition_ends_the_ring_early():
    """Each rank needs 3 rows of the shard before its own, and nothing else moves."""
    planned = plan(
        problem(80, mask=MaskOptions.of(window=(3, 0)).build), PARTITIONS["contiguous"], 8
    )
    for rank in range(8):
        cost = count_steps(planned, rank)
        assert cost.bytes_sent == (3 * 192 if rank < 7 else 0)
        assert len(planned.steps(rank)) == (2 if rank else 1)
    # In backward K,V of these rows go, and their dk, dv come back; the same rows of Q would
    # not be fewer, but wider.
    both = plan(problem(80, mask=MaskOptions.of(window=(3, 0)).build), PARTITIONS["contiguous"], 8,
                backward=True)  # fmt: skip
    assert both.travel == "kv"
    assert traffic(both, backward=True).bytes == 7 * 3 * (192 + 192)


def test_many_heads_on_one_kv_head_move_k_and_v_and_equal_heads_in_bf16_move_q():
    wide = {"head_dim": 128, "value_dim": 128, "dtype": "bfloat16"}
    grouped = problem(64, mask=Mask.full, q_heads=8, kv_heads=1, **wide)
    equal = problem(64, mask=Mask.full, q_heads=4, kv_heads=4, **wide)
    for problem_, travel in ((grouped, "kv"), (equal, "q")):
        planned = plan(problem_, PARTITIONS["striped"], 4, backward=True)
        assert planned.travel == travel
        assert "ring moving kv" in planned.why
        others = [
            traffic(plan(problem_, PARTITIONS["striped"], 4, backward=True, travel=t), True).bytes
            for t in ("kv", "q")
        ]
        assert traffic(planned, True).bytes == min(others)


@pytest.mark.parametrize("name", ["contiguous", "zigzag"])
def test_packed_documents_move_at_most_5_percent_more_than_they_must(name):
    cuts = np.unique(np.random.default_rng(0).integers(1, 20_000, 200))
    documents = [0, *cuts.tolist(), 20_000]
    mask = MaskOptions.of(causal=True, documents=documents).build
    planned = plan(problem(20_000, mask=mask), PARTITIONS[name], 16)
    assert traffic(planned).bytes <= 1.05 * least_bytes(planned)


@pytest.mark.parametrize("name", NAMES)
def test_planning_runs_no_more_python_for_more_documents(name):
    """Over a million tokens and 64 ranks; ten thousand documents are a matter of arrays."""
    length = 1 << 20
    tiles = 0

    def plan_of(documents):
        nonlocal tiles
        cuts = np.random.default_rng(0).choice(np.arange(1, length), documents - 1, replace=False)
        starts = np.concatenate(([0], np.sort(cuts), [length]))
        mask = MaskOptions.of(causal=True, documents=starts).build
        planned = plan(problem(length, mask=mask), PARTITIONS[name], 64)
        tiles = sum(len(step.tiles) for step in planned.steps(7))

    some, many = (lines_run(lambda n=n: plan_of(n)) for n in (1_000, 10_000))
    assert many < 1.1 * some
    if name != "striped":
        # About the rank's share of the documents; striped, every document meets every rank.
        assert tiles < 2 * 10_000 / 64 + 100


@pytest.mark.parametrize("size", [1, 2, 3, 8, 64])
def test_memory_is_three_shards_whatever_p(size):
    planned = full_plan(64 * 9, "contiguous", size)
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
def test_planning_for_1024_ranks_runs_so_much_python_a_rank_as_for_64(name):
    """For the first rank that asks, who works out what all need, and for the others."""

    def lines(size, rank):
        planned = plan(problem(1 << 20), PARTITIONS[name], size, "ring")
        return lines_run(lambda: planned.steps(rank)) / size

    _all_needs.cache_clear()
    few = lines(64, 31), lines(64, 63)
    _all_needs.cache_clear()
    many = lines(1024, 511), lines(1024, 1023)
    assert many[0] < 1.2 * few[0]
    assert many[1] < 1.2 * few[1]


def test_unknown_schedules_and_ranks_are_refused():
    with pytest.raises(ConfigError, match=r"schedule: expected auto or ring or direct, got 'star'"):
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
        ({"batch": -1}, "batch: expected from 0 to"),
        ({"dtype": "int8"}, "dtype: expected float16"),
        ({"scale": float("nan")}, "scale: expected a finite number"),
        ({"softcap": 0.0}, "softcap: expected a finite number > 0"),
    ],
)
def test_impossible_problems_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        problem(**change)
