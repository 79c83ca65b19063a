"""Three ranks, started by hand, and one that misbehaves, in ring after ring; in the last it is
killed. Every rank writes a line for each: rank, how, what it raised, after how many seconds. The
others end with rings that nobody has closed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch.distributed as dist

import ringrt
from support import random_qkv

FAULTY = int(sys.argv[1])
# Messages that travel in frames, and larger ones.
TENSORS = {"small": random_qkv(60), "large": random_qkv(1500, head_dim=128)}
CALLS = [
    ("nothing", "small"),
    ("raises", "small"),
    ("raises", "large"),
    ("silent", "small"),
    ("silent", "large"),
    ("never posts", "small"),
    ("leaves", "small"),
    ("mismatch", "small"),
    ("argument", "small"),
    ("interrupted", "large"),
    ("killed", "large"),
]
#: Where a deadline is to pass, in seconds, and how long a rank sleeps.
DEADLINE, SLEEP = 1.5, 3


def misbehave(how):
    def after_step(step):
        """After the first ring step: the others still need what this rank holds."""
        if step.done == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how in ("silent", "interrupted"):
                time.sleep(SLEEP)
            if how == "raises":
                raise LookupError("planted")

    return after_step


def run(how, tensors):
    with ringrt.Ring.from_process_group(timeout=20, backend="reference") as ring:
        faulty = ring.rank == FAULTY
        shards = [ring.shard(x) for x in tensors]
        if how in ("silent", "never posts"):
            ring._caller.options = replace(ring._caller.options, timeout=DEADLINE)
        if faulty and how == "leaves":
            return
        if faulty and how == "never posts":
            time.sleep(SLEEP)
        if faulty and how == "argument":
            shards[0] = shards[0][0]
        if ring.rank == 2 and how == "interrupted":
            signal.setitimer(signal.ITIMER_REAL, 0.5)
        if faulty:
            ring.on_step = misbehave(how)
        ring.attention(*shards, causal=faulty and how == "mismatch")


def told(how, tensors):
    begin = time.monotonic()
    try:
        run(how, tensors)
        said = "nothing"
    except (ringrt.RingrtError, LookupError, KeyboardInterrupt) as error:
        said = f"{type(error).__name__}: {error}"
    return said, time.monotonic() - begin


# As Ctrl-C does.
signal.signal(signal.SIGALRM, signal.default_int_handler)
dist.init_process_group("gloo")
left_open = [ringrt.Ring.from_process_group(backend="reference") for _ in range(8)]
left_open[0].shard(TENSORS["small"][0])
# A forked process that ends as usual takes nothing of its parent's with it.
if (child := os.fork()) == 0:
    sys.exit()
os.waitpid(child, 0)
left_open[1].transport.barrier(20)
for how, size in CALLS:
    dist.barrier()
    line = [dist.get_rank(), f"{how}, {size}", *told(how, TENSORS[size])]
    print(json.dumps(line), flush=True)
