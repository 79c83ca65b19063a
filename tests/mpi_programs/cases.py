"""The known failures that need as many ranks as this world has, on every partition and
backend."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from cases import CASES
from mpi4py import MPI

import oracle
import ringrt
from support import BACKENDS, PARTITIONS, assert_close, random_qkv

cases = [case for case in CASES if case.ranks == MPI.COMM_WORLD.size]
expected = {case.id: oracle.attention(*random_qkv(**case.shapes), **case.options) for case in cases}
for partition in PARTITIONS:
    for backend in BACKENDS:
        with ringrt.Ring.from_mpi(partition=partition, backend=backend, timeout=60) as ring:
            for case in cases:
                shards = [ring.shard(x) for x in random_qkv(**case.shapes)]
                out, lse = ring.attention(*shards, **case.options)
                assert out.shape[:3] == shards[0].shape[:3]
                whole = ring.unshard(out), ring.unshard(lse, axis=2)
                assert_close(whole, expected[case.id])
if MPI.COMM_WORLD.rank == 0:
    print(f"{len(cases)} cases are right")
