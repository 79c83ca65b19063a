"""Rank 1 of two misbehaves, in the way named; nothing is left to wait for at the end."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax

import ringrt
from support import random_qkv

coordinator, rank, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(coordinator, num_processes=2, process_id=rank)


def run() -> None:
    if rank == 1 and how == "does not come":
        time.sleep(2)
        return
    timeout = 1.0 if how == "does not come" else 60.0
    with ringrt.Ring.from_jax_distributed(timeout=timeout, backend="reference") as ring:
        shards = [ring.shard(x) for x in random_qkv(24)]
        if rank == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            raise LookupError("planted")
        ring.attention(*shards)


try:
    run()
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
# JAX's own goodbye would wait for the rank that is gone.
os._exit(0)
