"""Our ring beside the one written by hand, on the same two processes of one core each."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from ringrt.bench.cases import Case, Settings
from ringrt.bench.check import check, check_by_oracle
from ringrt.bench.gloo_peer import GlooRing, chunks
from ringrt.bench.interleave import Contender, interleave, ratio
from ringrt.bench.measurement import Measurement, summary
from ringrt.bench.problems import Inputs, inputs
from ringrt.bench.rings import NAMES, Shards, ranks_of
from ringrt.bench.torch_peer import array, tensor
from ringrt.plan.partition import Array


def run(case: Case, settings: Settings) -> Iterator[Measurement]:
    """The time of the other ring over that of ours, by the slower rank of each."""
    shape, names = case.shape, ("gloo by hand", "ringrt")
    given = inputs(shape)
    with ranks_of(case, settings) as ranks:
        ours = Shards(ranks, given, causal=shape.causal)
        peer = Peer(given, shape.causal)
        found = ours.whole(shape.way)
        check_by_oracle(given, found[0], ours.whole_lse(), found[1:])
        right = [x[:, peer.at] for x in found]
        check(NAMES[shape.way], peer.call(shape.way), right, shape.dtype, "our ring")
        contenders = [
            Contender(names[0], partial(ranks.seconds, lambda ring: peer.run(shape.way))),
            Contender(names[1], partial(ours.seconds, shape.way)),
        ]
        times = interleave(contenders, settings.repeats)
    yield case.row(**summary(ratio(times, *names)), times=times)


class Peer:
    """This process's rank of the other ring. `at` are its positions."""

    def __init__(self, given: Inputs, causal: bool) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        length = given.problem.q_length
        rank, size = dist.get_rank(), dist.get_world_size()
        parts = chunks(length, size, rank, causal)
        self.at = np.concatenate([np.arange(part.start, part.stop) for part in parts])
        q, k, v, dout = (tensor(x[:, self.at]) for x in (given.q, given.k, given.v, given.dout))
        self._q, self._kv, self._dout = q, torch.stack((k, v)), dout
        self._ring = GlooRing(causal, self._kv)

    def run(self, way: str) -> list[Any]:
        """Forward, or both passes: out, and then dq, dk and dv."""
        out, lse = self._ring.forward(self._q, self._kv)
        if way == "forward":
            return [out]
        dq, dkv = self._ring.backward(self._dout, self._q, self._kv, out, lse)
        return [out, dq, *dkv]

    def call(self, way: str) -> list[Array]:
        """The same as arrays."""
        return [array(x) for x in self.run(way)]
