"""The ring written by hand that `ringrt bench` holds ours to, against the oracle: full and causal,
out, dq, dk and dv. Rank 0 says how far off the worst element is."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch.distributed as dist

import oracle
from ringrt.bench.cases import Shape
from ringrt.bench.gloo_ring import Peer
from ringrt.bench.problems import inputs

LENGTH, WAYS = 48, ("forward", "both")

dist.init_process_group("gloo")
for causal in (False, True):
    given = inputs(Shape("both", "float32", LENGTH, 8, 2, causal))
    arrays = given.q, given.k, given.v
    out, _ = oracle.attention(*arrays, causal=causal)
    right = out, *oracle.gradients(given.dout, *arrays, causal=causal)
    peer = Peer(given, causal)
    for way in (*WAYS, *WAYS):
        found = peer.call(way)
        apart = [np.abs(x - y[:, peer.at]).max() for x, y in zip(found, right, strict=False)]
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, (len(found), max(apart), peer.at.tolist()))
        if dist.get_rank() == 0:
            counts, errors, at = zip(*every, strict=True)
            positions = [place for each in at for place in each]
            assert sorted(positions) == list(range(LENGTH)), "every position once"
            assert set(counts) == {1 if way == "forward" else 4}
            print(f"causal={causal} {way} {max(errors):.1e}")
dist.destroy_process_group()
