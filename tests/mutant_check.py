"""A few seconds of checks that together notice every planted bug of tests/mutants.py. Run with
the folder to import ringrt from; exits non-zero if anything is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

# Before ringrt is imported: an editable install would otherwise lead back to the original.
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in f"{f!r} {type(f).__module__}"]
sys.path.insert(0, sys.argv[1])
sys.path.insert(1, str(Path(__file__).parent))

import numpy as np
from masks import visible

import oracle
import ringrt
from ringrt.plan import PARTITIONS

assert ringrt.__file__.startswith(sys.argv[1])
SINK = np.array([0.4, -0.7, 1.2, 0.0])
CALLS = [
    (21, 21, {"causal": True}, {}),
    (22, 22, {"causal": True, "window": (4, 9), "prefix": 2}, {"softcap": 1.0}),
    (20, 20, {"window": (6, 2), "sink_tokens": 3, "causal": True}, {"sink": SINK}),
    (24, 24, {"documents": [[0, 7], [9, 24]], "causal": True}, {"sink": SINK}),
    (9, 17, {"causal": True}, {}),
    (17, 9, {"causal": True}, {"scale": 0.9}),
    (18, 18, {}, {}),
]
WAYS = [
    ("striped", "ring", "kv"),
    ("zigzag", "ring", "q"),
    ("contiguous", "direct", "kv"),
    ("zigzag", "direct", "q"),
    ("contiguous", "ring", "kv"),
    ("zigzag", "ring", "kv"),
]
SIZES = {"float32": (4, 4), "float64": (8, 8), "float16": (2, 4)}


def arrays(q_length, kv_length, dtype="float64"):
    rng = np.random.default_rng(q_length)
    shapes = [(1, q_length, 4, 6), (1, kv_length, 2, 6), (1, kv_length, 2, 5), (1, q_length, 4, 5)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def close(got, want):
    return np.array_equal(np.isneginf(got), np.isneginf(want)) and np.allclose(
        np.where(np.isneginf(got), 0, got), np.where(np.isneginf(want), 0, want), rtol=0, atol=1e-11
    )


def check_results():
    for ranks in (4, 3):
        for q_length, kv_length, masking, scores in CALLS:
            q, k, v, dout = arrays(q_length, kv_length)
            seen = visible(q_length, kv_length, **masking)
            answers = [
                *oracle.attention(q, k, v, seen, **scores),
                *oracle.gradients(dout, q, k, v, seen, **scores),
            ]
            if "documents" in masking:
                k[:, 7:9], v[:, 7:9] = np.nan, np.inf
            for partition, schedule, travel in WAYS:
                how = {"ranks": ranks, "partition": partition, "schedule": schedule,
                       "backend": "reference", "timeout": 10} | masking | scores  # fmt: skip
                out, lse = ringrt.attention(q, k, v, **how)
                gradients = ringrt.attention_backward(dout, q, k, v, out, lse, travel=travel, **how)
                for got, want in zip((out, lse, *gradients), answers, strict=True):
                    assert got.shape == want.shape
                    assert close(got, want), (masking, partition, schedule, travel)


def check_bytes():
    """What the runtime counts, the plan says, and arithmetic gives."""
    for dtype, (size, sum_size) in SIZES.items():
        for schedule in ("ring", "direct"):
            check_traffic(dtype, schedule, size, sum_size)


def check_traffic(dtype, schedule, size, sum_size):
    q, k, v, dout = arrays(20, 20, dtype)

    def on_rank(ring):
        own = [ring.shard(x) for x in (q, k, v, dout)]
        out, lse = ring.attention(*own[:3])
        forward = ring.stats
        ring.attention_backward(own[3], *own[:3], out, lse)
        return forward, ring.stats

    counts = PARTITIONS["zigzag"].counts(20, 3)
    results = ringrt.run_threads(
        on_rank, 3, partition="zigzag", schedule=schedule, travel="kv", backend="reference"
    )
    elements = 2 * (6 + 5)
    for rank, (forward, backward) in enumerate(results):
        others = 20 - counts[(rank + 1) % 3] if schedule == "ring" else 2 * counts[rank]
        assert forward.bytes_sent == others * elements * size
        assert forward.bytes_received == (20 - counts[rank]) * elements * size
        # Sums: round the ring those of the two shards that visited, directly the same.
        sums = 20 - counts[rank]
        assert backward.bytes_sent == (others * size + sums * sum_size) * elements
        assert forward.peak_kv_bytes <= 3 * max(counts) * elements * size


def check_plans():
    from ringrt.plan import Mask, Problem, plan
    from ringrt.plan.cost import count_steps, traffic

    for dtype in SIZES:
        problem = Problem(1, 4, 2, 6, 5, 20, 20, dtype, Mask.causal(20, 20), 1.0)
        for travel in ("kv", "q"):
            planned = plan(problem, PARTITIONS["zigzag"], 3, "ring", backward=True, travel=travel)
            costs = [count_steps(planned, rank, backward=True) for rank in range(3)]
            assert sum(cost.bytes_sent for cost in costs) == traffic(planned, True).bytes
            if travel == "kv":
                stats = measured(dtype)
                assert [cost.bytes_sent for cost in costs] == stats


def measured(dtype):
    q, k, v, dout = arrays(20, 20, dtype)

    def on_rank(ring):
        own = [ring.shard(x) for x in (q, k, v, dout)]
        out, lse = ring.attention(*own[:3], causal=True)
        ring.attention_backward(own[3], *own[:3], out, lse, causal=True)
        return ring.stats.bytes_sent

    how = {"partition": "zigzag", "schedule": "ring", "travel": "kv", "backend": "reference"}
    return ringrt.run_threads(on_rank, 3, **how)


def check_containment():
    """NaN in what a row does not see, in a tile that it sees in part; and a row whose scores are
    all -inf, which is empty."""
    q, k, v, _ = arrays(20, 20)
    clean = oracle.attention(q[:, :14], k[:, :14], v[:, :14], causal=True)
    k[:, 14:], v[:, 15:] = np.nan, np.inf
    out, lse = ringrt.attention(q, k, v, ranks=3, causal=True, backend="reference")
    assert close(out[:, :14], clean[0])
    assert close(lse[:, :, :14], clean[1])
    q, k, v, _ = arrays(6, 6)
    q, k = abs(q), abs(k)
    k[:, 0] = -np.inf
    out, lse = ringrt.attention(q, k, v, ranks=2, causal=True, backend="reference")
    assert not out[:, 0].any()
    assert np.isneginf(lse[:, :, 0]).all()
    want = oracle.attention(q, k[:, 1:], v[:, 1:], causal=True)
    assert close(out[:, 1:], want[0][:, 1:])


def check_again():
    """A second pass of a ring, in the buffers of the first."""
    every = [arrays(20, 20), [x[::-1] for x in map(np.negative, arrays(20, 20))]]

    def on_rank(ring):
        passes = [ring.attention(*map(ring.cut, each[:3])) for each in every]
        return [ring.unshard(out) for out, _ in passes]

    outs = ringrt.run_threads(on_rank, 3, backend="reference")[0]
    for out, each in zip(outs, every, strict=True):
        assert close(out, oracle.attention(*each[:3])[0])


check_results()
check_again()
check_containment()
check_bytes()
check_plans()
