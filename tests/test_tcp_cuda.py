"""Arrays of GPUs over the tcp transport: by way of the host, and by NCCL, whose control plane it
then is. The GPUs are simulated, and so is NCCL."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_support import (
    example,
    simulator,  # noqa: F401
)
from tcp_support import on_ends

import oracle
import ringrt
from ringrt.registry import registry
from support import assert_close

pytestmark = pytest.mark.timeout(120)

OPTIONS = {"causal": True}


@pytest.mark.parametrize("transport", ["nccl", "staged"])
def test_both_passes_equal_the_oracle(transport):
    q, k, v, dout = example(45)
    over = registry().transport("nccl").over if transport == "nccl" else lambda end: end

    def on_rank(end):
        with ringrt.Ring.join(over(end), backend="cupy", timeout=60) as ring:
            shards = [ring.shard(x) for x in (q, k, v)]
            out, lse = ring.attention(*shards, **OPTIONS)
            gradients = ring.attention_backward(ring.shard(dout), *shards, out, lse, **OPTIONS)
            whole = ring.unshard(out), ring.unshard(lse, axis=2)
            return whole, [ring.unshard(x) for x in gradients]

    expected = oracle.gradients(dout, q, k, v, **OPTIONS)
    results = on_ends(2, on_rank)
    assert not [x for x in results if isinstance(x, Exception)]
    for whole, gradients in results:
        assert_close(whole, oracle.attention(q, k, v, **OPTIONS))
        for got, want in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


def test_a_failure_reaches_the_other_rank_s_gpu():
    def on_rank(end):
        with ringrt.Ring.join(
            registry().transport("nccl").over(end), backend="cupy", timeout=60
        ) as ring:
            shards = [ring.shard(x) for x in example(45)[:3]]
            ring.attention(*shards)
            if ring.rank == 1:
                raise LookupError("planted")
            ring.attention(*shards)

    first, second = on_ends(2, on_rank)
    assert isinstance(second, LookupError)
    assert isinstance(first, ringrt.PeerLost)
    assert str(first) == "rank 1 failed: LookupError: planted"
