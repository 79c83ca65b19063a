"""One rank of three misbehaves, in the way named on the command line."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import ringrt
from ringrt.hookspecs import RingStep
from support import random_qkv

how, timeout = sys.argv[1], float(sys.argv[2])
FAULTY = 1
# Large enough that MPI does not deliver a message before its receiver asks for it.
q, k, v = random_qkv(1500, head_dim=128)


def misbehave(step: RingStep) -> None:
    """After the first ring step of rank 1: the others still need what it holds."""
    if step.done == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "silent":
            time.sleep(30)
        if how == "raises":
            raise LookupError("planted")


def run() -> None:
    with ringrt.Ring.from_mpi(timeout=timeout, backend="reference") as ring:
        faulty = ring.rank == FAULTY
        shards = [ring.shard(x) for x in (q, k, v)]
        if faulty and how == "leaves":
            return
        if faulty and how == "never posts":
            time.sleep(30)
        if faulty and how == "argument":
            shards[0] = shards[0][0]
        if faulty:
            ring.on_step = misbehave
        ring.attention(*shards, causal=faulty and how == "mismatch")


try:
    run()
except ringrt.RingrtError as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    sys.exit(3)
