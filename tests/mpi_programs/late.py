"""Rank 0 is busy with work of its own after the attention: no failure, and not cut short."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest

import ringrt
from support import random_qkv

with ringrt.Ring.from_mpi(timeout=20, backend="reference") as ring:
    ring.attention(*(ring.shard(x) for x in random_qkv(12)))
    if ring.rank == 0:
        time.sleep(5)
        print("rank 0 saved")
with pytest.raises(ringrt.TransportError, match="is closed"):
    ring.transport.barrier(1)
