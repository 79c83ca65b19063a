"""A rank sleeps in its kernel with its exchange posted, longer than the others wait. They raise,
drop all they hold, and go on for a while: MPI must not write into memory that was given back."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import ringrt
from ringrt.device.host import HOST
from ringrt_backends.reference import ReferenceBackend
from support import random_qkv


class Sleepy(ReferenceBackend):
    def accumulate(self, state, k, v, tiles, stream=None):
        time.sleep(3)


def attend():
    ring = ringrt.Ring.from_mpi(timeout=1, backend="reference")
    if ring.rank == 1:
        ring._caller._backends["reference", HOST] = Sleepy()
    q, k, v = random_qkv(3 * 400, q_heads=4, kv_heads=4, head_dim=256)
    rows = slice(400 * ring.rank, 400 * (ring.rank + 1))
    try:
        ring.attention(q[:, rows, :1], k[:, rows, :1], v[:, rows, :1], window=(0, 0))
        ring.attention(q[:, rows], k[:, rows], v[:, rows])
    except ringrt.RingrtError as error:
        print(f"{type(error).__name__} on rank {ring.rank}", file=sys.stderr, flush=True)


attend()
gc.collect()
junk = [bytearray(4_000_000) for _ in range(20)]
time.sleep(3)
