"""A pass as a CUDA graph, in the CUDA simulator."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from cuda_support import simulator  # noqa: F401

import oracle
import ringrt
from ringrt import cudasim
from ringrt.cudasim import api as cupy
from ringrt.errors import ConfigError, ExchangeTimeout, PeerLost, Unsupported
from support import assert_close, random_qkv


def shards_on_gpu(ring, arrays):
    cupy.cuda.Device(ring.rank).use()
    return [cupy.asarray(np.ascontiguousarray(ring.cut(x))) for x in arrays]


def run(fn, ranks=3, timeout=20, **options):
    options = {"transport": "nccl", "backend": "cupy", "schedule": "ring"} | options
    return ringrt.run_threads(fn, ranks, timeout=timeout, **options)


@pytest.mark.parametrize("partition", ["contiguous", "zigzag"])
def test_a_replay_computes_on_what_the_arrays_then_hold(partition):
    shapes = {"q_heads": 4, "kv_heads": 2}
    others = [random_qkv(41, seed=seed, **shapes) for seed in (1, 2)]

    def on_rank(ring):
        arrays = shards_on_gpu(ring, random_qkv(41, **shapes))
        captured = ring.capture(*arrays, causal=True, window=(20, 0))
        results = []
        for other in others:
            for x, new in zip(arrays, other, strict=True):
                x.set(np.ascontiguousarray(ring.cut(new)))
            out, lse = captured.replay()
            results.append((ring.unshard(out).get(), ring.unshard(lse, axis=2).get()))
        return results

    results = run(on_rank, partition=partition)[0]
    apart = np.subtract.outer(np.arange(41), np.arange(41))
    for other, result in zip(others, results, strict=True):
        assert_close(result, oracle.attention(*other, (apart >= 0) & (apart <= 20)))


def test_with_a_sink_and_16_bits():
    q, k, v = random_qkv(30, head_dim=64, dtype="float16")
    sink = np.array([0.5, -1.0])

    def on_rank(ring):
        arrays = shards_on_gpu(ring, (q, k, v))
        out, lse = ring.capture(*arrays, sink=sink).replay()
        return ring.unshard(out).get(), ring.unshard(lse, axis=2).get()

    out, lse = run(on_rank, ranks=2)[0]
    expected = oracle.attention(q, k, v, sink=sink)
    np.testing.assert_allclose(out, expected[0], atol=4e-3)
    np.testing.assert_allclose(lse, expected[1], atol=4e-6)


def test_the_host_does_next_to_nothing_in_a_replay():
    counted = {}

    def on_rank(ring):
        captured = ring.capture(*shards_on_gpu(ring, random_qkv(20)), causal=True)
        before = cudasim.synchronisations()
        captured.replay()
        counted[ring.rank] = cudasim.synchronisations() - before

    run(on_rank)
    assert counted == {0: 0, 1: 0, 2: 0}


def test_one_rank_needs_no_nccl():
    q, k, v = random_qkv(20)

    def on_rank(ring):
        out, lse = ring.capture(*shards_on_gpu(ring, (q, k, v))).replay()
        return out.get(), lse.get()

    assert_close(run(on_rank, ranks=1, transport="threads")[0], oracle.attention(q, k, v))


def test_what_cannot_be_captured_is_refused_by_name():
    def on_rank(ring):
        arrays = shards_on_gpu(ring, random_qkv(20))
        return ring.capture(*arrays)

    with pytest.raises(Unsupported, match="capture: .*nccl"):
        run(on_rank, transport="threads")
    with pytest.raises(Unsupported, match="capture: .*CuPy"):
        run(lambda ring: ring.capture(*random_qkv(20)), ranks=1)
    with pytest.raises(Unsupported, match="capture: .*backend cpu"):
        run(lambda ring: ring.capture(*random_qkv(20)), ranks=1, transport="threads", backend="cpu")
    with pytest.raises(Unsupported, match=r"dropout: not implemented in Ring\.capture"):
        run(lambda ring: ring.capture(*random_qkv(20), dropout=0.1), ranks=1)
    with pytest.raises(ConfigError, match="window"):
        run(lambda ring: ring.capture(*random_qkv(20), window=3), ranks=1)


def test_a_rank_that_does_not_replay_is_missed_within_the_deadline():
    left = threading.Event()

    def on_rank(ring):
        captured = ring.capture(*shards_on_gpu(ring, random_qkv(20)), causal=False)
        if ring.rank == 1:
            left.wait(20)
            return
        try:
            captured.replay()
        finally:
            left.set()

    with pytest.raises((ExchangeTimeout, PeerLost), match=r"waited 0\.5 s for each of the 2"):
        run(on_rank, ranks=2, timeout=0.5)
