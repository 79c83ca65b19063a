"""Real queries, keys and values of a language model's layer: the data of the quickstart."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from cpu_support import cpu, vectors

from ringrt.jobs.tensorfile import open_tensors
from ringrt.plan import PARTITIONS, Mask, Problem
from ringrt.plan.partition import positions
from ringrt.plan.tiles import lower
from support import ROOT

pytestmark = pytest.mark.timeout(120)

LENGTH, SCALE = 2048, 0.125
#: Both have the chunk that is shipped.
WIDTHS = {"8": vectors(8), "16": vectors(16)}


@cache
def data():
    """q, k and v as `[1, tokens, heads, 64]`, float32."""
    path = ROOT / "examples/data/smollm2-135m-layer15-2048.safetensors"
    tensors = open_tensors(path, "input.path")
    arrays = (np.asarray(tensors[name]).astype(np.float32) for name in "qkv")
    return tuple(x.reshape(1, LENGTH, *x.shape[-2:]) for x in arrays)


@cache
def exact():
    """out and lse, dense in float64."""
    q, k, v = (x[0].astype(float) for x in data())
    group = q.shape[1] // k.shape[1]
    out, lse = np.empty(q.shape), np.empty((q.shape[1], LENGTH))
    hidden = np.triu(np.full((LENGTH, LENGTH), -np.inf), 1)
    for head in range(q.shape[1]):
        scores = SCALE * q[:, head] @ k[:, head // group].T + hidden
        top = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=1, keepdims=True)
        out[:, head] = weights @ v[:, head // group] / total
        lse[head] = (top + np.log(total))[:, 0]
    return out, lse


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("partition", ["striped", "contiguous"])
def test_real_data(width, ranks, partition):
    """Within the bound of docs/accuracy.md on rings of every size: each rank's queries absorb the
    shards in the order in which they pass by."""
    q, k, v = data()
    mask = Mask.causal(LENGTH, LENGTH)
    problem = Problem(1, q.shape[2], k.shape[2], 64, 64, LENGTH, LENGTH, "float32", mask, SCALE)
    made, (want, want_lse) = cpu(WIDTHS[width], 2), exact()
    made.prepare(problem)
    runs = [PARTITIONS[partition].runs(LENGTH, ranks, rank) for rank in range(ranks)]
    cuts = [positions(each) for each in runs]
    for rank in range(ranks):
        own = cuts[rank]
        state = made.begin(q[:, own], problem)
        for step in range(ranks):
            shard = (rank - step) % ranks
            tiles = lower(mask, runs[rank], runs[shard])
            made.accumulate(state, k[:, cuts[shard]], v[:, cuts[shard]], tiles)
        out, lse = made.finish(state)
        assert abs(out[0] - want[own]).max() <= 2e-6
        assert abs(lse[0] - want_lse[:, own]).max() <= 2e-6
    made.close()
