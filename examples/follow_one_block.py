"""Follow one K,V block round the ring: from the tensor to the output, layer by layer.

    python examples/follow_one_block.py

Three ranks hold 8 tokens, striped. Every step of the runtime is done here by hand, with the
runtime's own parts and without its engine, and the result is compared with the real thing.
"""

from __future__ import annotations

import numpy as np

import ringrt
from ringrt.backend import BackendContext
from ringrt.plan import PARTITIONS, Mask, Problem, plan
from ringrt.plan.partition import positions, shard, unshard
from ringrt.registry import registry

RANKS, TOKENS, DIM = 3, 8, 4


def main() -> None:
    """Print what happens to the block of rank 1 at each ring step."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, TOKENS, 1, DIM)) for _ in range(3))

    # 1. The problem: what is computed, free of how.
    mask = Mask.causal(TOKENS, TOKENS)
    problem = Problem(1, 1, 1, DIM, DIM, TOKENS, TOKENS, "float64", mask, scale=0.5)

    # 2. The partition: which tokens lie where.
    striped = PARTITIONS["striped"]
    for rank in range(RANKS):
        print(f"rank {rank} holds tokens {positions(striped.runs(TOKENS, RANKS, rank)).tolist()}")

    # 3. The plan: at step s rank u holds the block of rank u - s, and computes its band tiles.
    planned = plan(problem, striped, RANKS)
    print("\nthe block of rank 1 travels:")
    for index in range(RANKS):
        for rank in range(RANKS):
            step = planned.steps(rank)[index]
            if step.shard == 1:
                where = "at home" if step.slot < 0 else f"in slot {step.slot}"
                goes = f", then goes to rank {step.send.peer}" if step.send else ""
                tiles = [f"rows {t.q0}:{t.q1} x keys {t.k0}:{t.k1}, i - j >= {t.lower}"
                         for t in step.tiles]  # fmt: skip
                print(f"  step {index}: on rank {rank}, {where}: {tiles}{goes}")

    # 4. The backend: absorbs the tiles of each visiting block into (m, z, y), in any order.
    outs = []
    for rank in range(RANKS):
        backend = registry().backend("reference").load(BackendContext(threads=1))
        state = backend.begin(shard(q, planned.q_runs(rank)), problem)
        for step in planned.steps(rank):
            runs = planned.kv_runs(step.shard)
            backend.accumulate(state, shard(k, runs), shard(v, runs), step.tiles)
        out, _ = backend.finish(state)
        outs.append(out)

    # 5. The same by the runtime: its engine executes that plan, over a transport.
    expected, _ = ringrt.attention(q, k, v, ranks=RANKS, partition="striped", causal=True)
    difference = np.max(abs(unshard(outs, striped) - expected))
    print(f"\nby hand and by ringrt.attention differ by {difference:.1e}")
    assert difference < 1e-14


if __name__ == "__main__":
    main()
