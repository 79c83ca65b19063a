"""The known failures that need as many ranks as this world has, on every partition, backend and
schedule."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import cases as known
from mpi4py import MPI

import ringrt
from support import BACKENDS, PARTITIONS

cases = [case for case in known.CASES if case.ranks == MPI.COMM_WORLD.size]
answers = {case.id: known.expected(case) for case in cases}
for partition in PARTITIONS:
    for backend in BACKENDS:
        for schedule, travel in (("ring", "kv"), ("direct", "q")):
            how = {"partition": partition, "backend": backend, "schedule": schedule}
            with ringrt.Ring.from_mpi(travel=travel, timeout=60, **how) as ring:
                for case in cases:
                    known.check(ring, case, answers[case.id])
if MPI.COMM_WORLD.rank == 0:
    print(f"{len(cases)} cases are right")
