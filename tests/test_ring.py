"""The whole ring on thread ranks, against the oracle: partitions × ranks × lengths × dtypes,
and what `Ring`, `attention` and `run_threads` promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import oracle
import ringrt
from ringrt.plan import PARTITIONS
from ringrt.plan.partition import shard, unshard
from support import BACKENDS, PARTITIONS as NAMES, assert_close, random_qkv

TIMEOUT = 20


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("causal", [False, True])
def test_every_ring_equals_the_oracle(name, ranks, causal):
    q, k, v = random_qkv(97, q_heads=4, kv_heads=2, head_dim=16)
    result = ringrt.attention(q, k, v, ranks=ranks, partition=name, causal=causal, timeout=TIMEOUT)
    assert_close(result, oracle.attention(q, k, v, causal=causal))


# On a new machine it compiles vector code for each size of heads.
@pytest.mark.timeout(600)
@settings(max_examples=150)
@given(st.data())
def test_anything(data):
    draw = data.draw
    q_length, kv_length = draw(st.integers(0, 40)), draw(st.integers(0, 40))
    kv_heads = draw(st.integers(1, 2))
    dtype = draw(st.sampled_from(["float16", "bfloat16", "float32", "float64"]))
    causal = draw(st.booleans())
    softcap = draw(st.none() | st.just(3.0))
    q, k, v = random_qkv(
        q_length,
        kv_length=kv_length,
        batch=draw(st.integers(1, 2)),
        q_heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 9)),
        value_dim=draw(st.integers(1, 9)),
        dtype=dtype,
        seed=draw(st.integers(0, 99)),
    )
    result = ringrt.attention(
        q, k, v,
        ranks=draw(st.integers(1, 8)),
        partition=draw(st.sampled_from(NAMES)),
        backend=draw(st.sampled_from(BACKENDS)),
        causal=causal,
        softcap=softcap,
        timeout=TIMEOUT,
    )  # fmt: skip
    assert result[0].dtype == q.dtype
    assert_close(result, oracle.attention(q, k, v, causal=causal, softcap=softcap), dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_error_does_not_grow_with_the_ring(dtype):
    q, k, v = random_qkv(256, q_heads=2, kv_heads=1, head_dim=32, dtype=dtype, seed=3)
    expected = oracle.attention(q, k, v, causal=True)

    def errors(ranks):
        result = ringrt.attention(q, k, v, ranks=ranks, causal=True, backend="cpu")
        pairs = zip(result, expected, strict=True)
        return [float(np.max(abs(got.astype(np.float64) - want))) for got, want in pairs]

    alone = errors(1)
    for ranks in (2, 4, 8):
        for error, bound in zip(errors(ranks), alone, strict=True):
            # In units of fp32's own rounding there is nothing to compare.
            assert error <= max(1.25 * bound, 2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_shard_attention_unshard(name):
    q, k, v = random_qkv(29, kv_length=31, q_heads=4, kv_heads=2)

    def whole_on_every_rank(ring):
        shards = [ring.shard(x) for x in (q, k, v)]
        out, lse = ring.attention(*shards, causal=True, length=(29, 31))
        assert out.shape[1] == shards[0].shape[1] == lse.shape[2]
        return ring.unshard(out), ring.unshard(lse, axis=2)

    expected = oracle.attention(q, k, v, causal=True)
    for result in ringrt.run_threads(whole_on_every_rank, 3, partition=name, timeout=TIMEOUT):
        assert_close(result, expected)


def test_unshard_inverts_shard_for_every_dtype_and_axis():
    for dtype in ("float16", "bfloat16", "float64"):
        _, _, x = random_qkv(11, batch=2, value_dim=5, dtype=dtype)
        for axis in range(4):
            results = ringrt.run_threads(
                lambda ring, x=x, axis=axis: ring.unshard(ring.shard(x, axis), axis), 3
            )
            for whole in results:
                np.testing.assert_array_equal(whole, x)


def test_calls_of_other_lengths_and_dtypes_on_one_ring():
    """Buffers and plans of an earlier call must not shape a later one."""
    calls = [random_qkv(n, dtype=d, seed=n) for n, d in
             [(40, "float32"), (9, "float32"), (64, "float64"), (0, "float32"), (40, "float32")]]  # fmt: skip

    def all_calls(ring):
        results = []
        for q, k, v in calls:
            shards = (ring.shard(x) for x in (q, k, v))
            out, lse = ring.attention(*shards, causal=True)
            results.append((ring.unshard(out), ring.unshard(lse, axis=2)))
        return results

    for results in ringrt.run_threads(all_calls, 3, timeout=TIMEOUT):
        for result, (q, k, v) in zip(results, calls, strict=True):
            assert_close(result, oracle.attention(q, k, v, causal=True), q.dtype.name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_counters_equal_the_formulas(name, ranks):
    """Bytes by the transport's messages and K,V by the buffers made, against arithmetic."""
    q, k, v = random_qkv(47, q_heads=8, kv_heads=2, head_dim=4, value_dim=6)
    row = 2 * (4 + 6) * 4

    def stats(ring):
        ring.attention(*(ring.shard(x) for x in (q, k, v)))
        return ring.stats

    counts = PARTITIONS[name].counts(47, ranks)
    for rank, stat in enumerate(ringrt.run_threads(stats, ranks, partition=name)):
        ahead, behind = counts[(rank + 1) % ranks], counts[rank]
        assert stat.bytes_sent == (47 - ahead) * row * (ranks > 1)
        assert stat.bytes_received == (47 - behind) * row
        visits = [counts[(rank - s) % ranks] for s in range(1, ranks)]
        slots = max(visits[::2], default=0) + max(visits[1::2], default=0)
        assert stat.peak_kv_bytes == (counts[rank] + slots) * row
        assert (stat.tokens, stat.steps) == (counts[rank], ranks)
        assert stat.seconds >= stat.compute_s >= 0


def test_on_step_is_called_after_every_ring_step():
    q, k, v = random_qkv(12)

    def steps(ring):
        seen = []
        ring.on_step = lambda step: seen.append((step.done, step.steps))
        ring.attention(*(ring.shard(x) for x in (q, k, v)))
        return seen

    assert ringrt.run_threads(steps, 3) == [[(1, 3), (2, 3), (3, 3)]] * 3


def test_inputs_are_not_written_and_may_be_read_only():
    q, k, v = random_qkv(33)
    before = [x.copy() for x in (q, k, v)]
    for x in (q, k, v):
        x.flags.writeable = False
    ringrt.attention(q, k, v, ranks=4, causal=True)
    for x, old in zip((q, k, v), before, strict=True):
        np.testing.assert_array_equal(x, old)


def test_ranks_may_use_different_backends():
    """State never travels, so a rank without Numba can join."""
    q, k, v = random_qkv(31, dtype="float64")
    rule = PARTITIONS["striped"]

    def on_rank(ring):
        ring.backend = BACKENDS[ring.rank % 2]
        return ring.attention(*(shard(x, rule.runs(31, 3, ring.rank)) for x in (q, k, v)))

    outs, lses = zip(*ringrt.run_threads(on_rank, 3), strict=True)
    result = unshard(outs, rule), unshard(lses, rule, axis=2)
    assert_close(result, oracle.attention(q, k, v), "float64")


def test_a_rank_may_change_its_backend_between_calls_that_are_otherwise_alike():
    """What the others keep of the first call must not let them skip what the one has to say."""
    q, k, v = random_qkv(30, dtype="float64")
    expected = oracle.attention(q, k, v)

    def on_rank(ring):
        shards = [ring.shard(x) for x in (q, k, v)]
        used = []
        for backend in ("cpu", "reference", "cpu"):
            if ring.rank == 1:
                ring.backend = backend
            out, lse = ring.attention(*shards)
            used.append(ring.stats.backend)
            assert_close((ring.unshard(out), ring.unshard(lse, axis=2)), expected, "float64")
        return used

    used = ringrt.run_threads(on_rank, 3, backend="cpu", timeout=TIMEOUT)
    assert used == [["cpu"] * 3, ["cpu", "reference", "cpu"], ["cpu"] * 3]


def test_a_call_like_an_earlier_one_is_not_planned_again(monkeypatch):
    """Other values of q, k, v and of the sinks, as in training; but another mask is."""
    from ringrt import calls

    planned = []
    plan = calls.plan
    monkeypatch.setattr(calls, "plan", lambda *a, **b: planned.append(1) or plan(*a, **b))
    q, k, v = random_qkv(30)

    def on_rank(ring):
        shards = [ring.shard(x) for x in (q, k, v)]
        for step in range(3):
            ring.attention(*(x + step for x in shards), sink=np.full(2, float(step)))
        ring.attention(*shards, causal=True)
        ring.attention(*shards)

    ringrt.run_threads(on_rank, 1, timeout=TIMEOUT)
    assert len(planned) == 3


def test_two_rings_at_once_do_not_meet():
    """Two rings of two ranks, as in a world of four."""
    first, second = random_qkv(21, seed=1), random_qkv(34, seed=2)

    def outer(ring):
        mine = first if ring.rank < 2 else second
        return ringrt.attention(*mine, ranks=2, causal=True, timeout=TIMEOUT)

    results = ringrt.run_threads(outer, 4, timeout=TIMEOUT)
    for rank, result in enumerate(results):
        mine = first if rank < 2 else second
        assert_close(result, oracle.attention(*mine, causal=True))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 2.0}, {"scale": 0.0}])
def test_the_same_bits_on_a_repeat(options):
    q, k, v = random_qkv(80)
    runs = [ringrt.attention(q, k, v, ranks=4, **options) for _ in range(2)]
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a, b)
