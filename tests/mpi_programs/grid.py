"""Every partition, length and option over this world of MPI ranks, against the oracle."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import oracle
import ringrt
from support import BACKENDS, PARTITIONS, assert_close, random_qkv

CALLS = [
    ({"length": 97, "q_heads": 4, "kv_heads": 2}, {"causal": True}),
    ({"length": 5}, {"causal": True}),
    ({"length": 3}, {}),
    ({"length": 0}, {}),
    ({"length": 1, "kv_length": 20}, {"causal": True}),
    ({"length": 33, "value_dim": 3, "dtype": "float64"}, {"causal": True, "softcap": 2.0}),
    ({"length": 40, "dtype": "bfloat16"}, {"scale": 0.2}),
    ({"length": 40, "dtype": "float16", "batch": 2}, {"causal": True}),
]

for partition in PARTITIONS:
    for backend in BACKENDS:
        with ringrt.Ring.from_mpi(partition=partition, backend=backend, timeout=30) as ring:
            for shapes, options in CALLS:
                q, k, v = random_qkv(**shapes)
                out, lse = ring.attention(*(ring.shard(x) for x in (q, k, v)), **options)
                whole = ring.unshard(out), ring.unshard(lse, axis=2)
                assert_close(whole, oracle.attention(q, k, v, **options), q.dtype.name)
            rank, size = ring.rank, ring.size
if rank == 0:
    print(f"{size} ranks are right")
