"""Rings in a world of torchrun, against the oracle: of the whole world, which ringrt joins by
itself, and of process groups, with the application's own messages going on beside."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import cases as known
import torch
import torch.distributed as dist

import oracle
import ringrt
from support import PARTITIONS, assert_close, random_qkv

#: Striped rows of uneven shards, empty shards, no rows; every dtype.
CALLS = [
    ({"length": 97, "q_heads": 4, "kv_heads": 2}, {"causal": True}),
    ({"length": 3}, {"causal": True}),
    ({"length": 0}, {}),
    ({"length": 33, "value_dim": 3, "dtype": "float64"}, {"causal": True, "softcap": 2.0}),
    ({"length": 40, "dtype": "bfloat16"}, {"scale": 0.2}),
    ({"length": 40, "dtype": "float16", "batch": 2}, {"causal": True}),
    # Messages of more than what goes into a frame.
    ({"length": 700, "kv_heads": 2, "head_dim": 64}, {"causal": True}),
]


def check(ring, shapes, options):
    q, k, v = random_qkv(**shapes)
    out, lse = ring.attention(*(ring.shard(x) for x in (q, k, v)), **options)
    whole = ring.unshard(out), ring.unshard(lse, axis=2)
    assert_close(whole, oracle.attention(q, k, v, **options), q.dtype.name)


def ring_of_the_world():
    """No process group is there before."""
    assert not dist.is_initialized()
    with ringrt.Ring.from_process_group(timeout=60, backend="reference") as ring:
        assert ring.size == int(os.environ["WORLD_SIZE"])
        assert ring.rank == int(os.environ["RANK"])
        local = ring.transport.local_rank, ring.transport.local_size
        assert local == (ring.rank, ring.size)
        for shapes, options in CALLS:
            check(ring, shapes, options)
        return ring.rank, ring.size


def known_cases(rank, size):
    """Those that need so many ranks, and those that need fewer, on the first ones."""
    count = 0
    for ranks in range(1, size + 1):
        group = dist.new_group(list(range(ranks)))
        if rank >= ranks:
            continue
        mine = [case for case in known.CASES if case.ranks == ranks]
        answers = {case.id: known.expected(case) for case in mine}
        for partition in PARTITIONS:
            schedule, travel = ("direct", "q") if partition == "striped" else ("ring", "kv")
            with ringrt.Ring.from_process_group(
                group,
                partition=partition,
                backend="reference",
                schedule=schedule,
                travel=travel,
            ) as ring:
                for case in mine:
                    known.check(ring, case, answers[case.id])
                    count += 1
    return count


def two_rings_beside_data_parallel_sums(rank):
    """Ranks 0, 1 and ranks 2, 3 are a ring each; ranks 0, 2 and ranks 1, 3 hold the same part of
    different sequences, and sum something up while attention is computed. The members of a ring
    are in different numbers of groups."""
    rings = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    sums = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    dist.new_group([0])
    ring_group, sum_group = rings[rank // 2], sums[rank % 2]
    shapes = {"length": 21 + 10 * (rank // 2), "seed": rank // 2}
    with (
        ringrt.Ring.from_process_group(ring_group, backend="reference") as one,
        ringrt.Ring.from_process_group(ring_group, backend="reference", partition="zigzag") as two,
    ):
        assert one.size == two.size == 2
        for ring in (one, two):
            gradient = torch.full((100_000,), float(rank))
            work = dist.all_reduce(gradient, group=sum_group, async_op=True)
            within = torch.full((3,), float(rank))
            inner = dist.all_reduce(within, group=ring_group, async_op=True)
            check(ring, shapes, {"causal": True})
            for each in (work, inner):
                each.wait()
            assert bool((gradient == 2 * (rank % 2) + 2).all())
            assert bool((within == 4 * (rank // 2) + 1).all())


rank, size = ring_of_the_world()
if size == 4:
    count = known_cases(rank, size)
    two_rings_beside_data_parallel_sums(rank)
    expected = [case for case in known.CASES if rank < case.ranks <= size]
    assert count == len(PARTITIONS) * len(expected)
if rank == 0:
    print(f"{size} ranks are right")
dist.destroy_process_group()
