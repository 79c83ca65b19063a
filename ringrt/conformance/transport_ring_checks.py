"""A whole pass on a transport: the result equals the oracle, and the bytes are the plan's."""

from __future__ import annotations

import numpy as np

from ringrt.conformance import oracle
from ringrt.conformance.bounds import Bounds, hold
from ringrt.conformance.cases import Case
from ringrt.conformance.checks import CheckList, expect
from ringrt.conformance.passes import Given, exact
from ringrt.conformance.ranks import Rank
from ringrt.plan import plan
from ringrt.plan.cost import count_steps
from ringrt.plan.partition import PARTITIONS
from ringrt.ring import Ring

CHECKS: CheckList[Rank] = CheckList()


def _pass(rank: Rank, partition: str, schedule: str, case: Case) -> None:
    """Forward and backward of the reference backend (on GPUs: of cupy)."""
    backend = "reference" if rank.on_host else "cupy"
    how = f"{case}, {rank.size} ranks, {partition}, schedule {schedule}"
    arrays, given, bounds = case.arrays(), Given.of(case), Bounds(case.dtype, not rank.on_host)
    with Ring(
        rank.end, partition=partition, schedule=schedule, backend=backend, timeout=rank.timeout
    ) as ring:
        q, k, v, dout = (ring.shard(x) for x in arrays)
        out, lse = ring.attention(q, k, v, causal=True)
        _hold_bytes(ring, case, partition, schedule)
        whole, whole_lse = ring.unshard(out), ring.unshard(lse, axis=2)
        # Backward is given the oracle's out and lse: what forward did wrong is told of it alone.
        mine = ring.shard(given.out), ring.shard(given.lse, axis=2)
        parts = ring.attention_backward(dout, q, k, v, *mine, causal=True)
        _hold_bytes(ring, case, partition, schedule)
        gradients = [ring.unshard(part) for part in parts]
    want = exact(case)
    hold("lse", whole_lse, want.lse, bounds.lse(want), how)
    hold("out", whole, want.out.value, bounds.out(want, whole), how)
    x, problem = arrays, case.problem
    rows = (given.lse, given.delta, case.seen, problem.scale)
    exactly = oracle.gradients(x.q, x.k, x.v, x.dout, *rows)
    wanted = (exactly.dq, exactly.dk, exactly.dv)
    for name, one, got in zip(("dq", "dk", "dv"), wanted, gradients, strict=True):
        hold(name, got, one.value, bounds.gradient(exactly, one, got), how)


def _hold_bytes(ring: Ring, case: Case, partition: str, schedule: str) -> None:
    """What the pass sent and received is what its plan says."""
    stats = ring.stats
    assert stats is not None
    backward = stats.operation == "backward"
    planned = plan(
        case.problem,
        PARTITIONS[partition],
        ring.size,
        schedule,
        backward=backward,
        travel=stats.travel,
    )
    cost = count_steps(planned, ring.rank, backward)
    counted = stats.bytes_sent, stats.bytes_received
    told = (cost.bytes_sent, cost.bytes_received)
    text = f"{stats.operation}: {counted} bytes were sent and received, the plan says {told}"
    expect(counted == told, text)


def _causal(dtype: str, rows: int, **changes: int) -> Case:
    return Case(dtype=dtype, rows=rows, keys=rows).but(**changes).causal()


@CHECKS.add
def whole_pass(rank: Rank) -> None:
    """Forward and backward, striped, float64, uneven shards, round the ring."""
    _pass(rank, "striped", "ring", _causal("float64", 23, q_heads=4))


@CHECKS.add
def direct_pass(rank: Rank) -> None:
    """The same with grouped heads in float32, zigzag, each row straight to whom it is for."""
    _pass(rank, "zigzag", "direct", _causal("float32", 30, q_heads=4))


@CHECKS.add
def pass_of_few_rows(rank: Rank) -> None:
    """The same in bfloat16 with fewer rows than ranks, contiguous: some shards are empty."""
    _pass(rank, "contiguous", "auto", _causal("bfloat16", 2))


@CHECKS.add
def pass_of_large_shards(rank: Rank) -> None:
    """A pass whose messages are hundreds of kilobytes."""
    shape = (1, 160 * rank.size, 1, 256)
    q, k, v = (
        np.random.default_rng(seed).standard_normal(shape).astype(np.float32) for seed in (1, 2, 3)
    )
    backend = "reference" if rank.on_host else "cupy"
    with Ring(rank.end, partition="contiguous", backend=backend, timeout=rank.timeout) as ring:
        cut = [ring.cut(x) for x in (q, k, v)]
        _, lse = ring.attention(*cut, window=(-1, -1))
    own = q[0, 160 * rank.rank : 160 * (rank.rank + 1), 0].astype(float)
    scores = own @ k[0, :, 0].astype(float).T / 16
    want = np.log(np.exp(scores).sum(axis=-1))[None, None]
    hold("lse", lse, want, np.full(want.shape, 1e-5), f"{rank.size} shards of 160 rows")
