"""Two rings of two ranks in a world of four, at the same time."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from mpi4py import MPI

import oracle
import ringrt
from support import assert_close, random_qkv

world = MPI.COMM_WORLD
color = world.rank % 2
q, k, v = random_qkv(21 + 10 * color, seed=color)
with ringrt.Ring.from_mpi(world.Split(color), timeout=30) as ring:
    assert ring.size == 2
    out, lse = ring.attention(*(ring.shard(x) for x in (q, k, v)), causal=True)
    whole = ring.unshard(out), ring.unshard(lse, axis=2)
assert_close(whole, oracle.attention(q, k, v, causal=True))
if world.rank == 0:
    print("both are right")
