"""ringrt.jax: results and gradients, under JAX's transformations, against the oracle."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from jax_support import IN_JIT, arrays, assert_near, counted, dense, on_ranks, x64

import oracle
from ringrt.jax import ring_attention
from support import PARTITIONS, ROOT, TOLERANCE, assert_close, random_qkv

pytestmark = [pytest.mark.timeout(100), pytest.mark.usefixtures(x64.__name__)]

#: Ways to the gradients of a function, and on how many thread ranks.
WAYS = {
    "eager": (lambda f: jax.grad(f, (0, 1, 2)), 3),
    "vjp": (lambda f: lambda *x: jax.vjp(f, *x)[1](jnp.ones(())), 3),
    "vmap of grad": (
        lambda f: (
            lambda *x: [
                y[1] for y in jax.vmap(jax.grad(f, (0, 1, 2)))(*(jnp.stack([0 * y, y]) for y in x))
            ]
        ),
        3,
    ),
    "checkpoint": (lambda f: jax.grad(jax.checkpoint(f), (0, 1, 2)), 3),
    "jit of grad": (lambda f: jax.jit(jax.grad(f, (0, 1, 2))), IN_JIT),
    "grad of jit": (lambda f: jax.grad(jax.jit(f), (0, 1, 2)), IN_JIT),
    "jit of checkpoint": (lambda f: jax.jit(jax.grad(jax.checkpoint(f), (0, 1, 2))), IN_JIT),
    "jit of vmap": (
        lambda f: (
            lambda *x: [
                y[0] for y in jax.jit(jax.vmap(jax.grad(f, (0, 1, 2))))(*(y[None] for y in x))
            ]
        ),
        IN_JIT,
    ),
    "forward in jit": (lambda f: jax.jit(lambda *x: jax.vjp(f, *x)[1](jnp.ones(()))), IN_JIT),
}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_equal_the_oracle_s(way):
    gradients, ranks = WAYS[way]
    qkv = random_qkv(17, batch=2, q_heads=4, kv_heads=2, value_dim=6, dtype="float64")
    dout = np.random.default_rng(1).standard_normal((2, 17, 4, 6))

    def on_rank(ring):
        weight = jnp.asarray(ring.shard(dout))

        def loss(q, k, v):
            return (weight * ring_attention(q, k, v, ring=ring, causal=True)).sum()

        parts = gradients(loss)(*(jnp.asarray(ring.shard(x)) for x in qkv))
        return [ring.unshard(x) for x in parts]

    [first, *_] = on_ranks(on_rank, ranks)
    assert_near(first, list(oracle.gradients(dout, *qkv, causal=True)))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_out_and_lse_equal_the_oracle_s(dtype, jit):
    qkv = random_qkv(21, q_heads=4, kv_heads=2, value_dim=5, dtype=dtype)

    def on_rank(ring):
        def call(q, k, v):
            return ring_attention(q, k, v, ring=ring, causal=True, return_lse=True)

        call = jax.jit(call) if jit else call
        out, lse = call(*(jnp.asarray(ring.shard(x)) for x in qkv))
        assert isinstance(out, jax.Array)
        return np.asarray(ring.unshard(out)), np.asarray(ring.unshard(lse, axis=2))

    for out, lse in on_ranks(on_rank, IN_JIT, backend="auto"):
        assert out.dtype.name == dtype
        assert lse.dtype.name == ("float64" if dtype == "float64" else "float32")
        assert_close((out, lse), oracle.attention(*qkv, causal=True), dtype)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_gradients_keep_bfloat16(jit):
    qkv = arrays(16, dtype="bfloat16")

    def on_rank(ring):
        gradients = jax.grad(lambda *x: ring_attention(*x, ring=ring).sum(), (0, 1, 2))
        return (jax.jit(gradients) if jit else gradients)(*qkv)

    [got] = on_ranks(on_rank)
    want = oracle.gradients(np.ones((1, 16, 2, 8)), *map(np.asarray, qkv))
    assert [x.dtype.name for x in got] == 3 * ["bfloat16"]
    assert_near(list(got), list(want), 3e-2)


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("length", [0, 1, 5])
def test_uneven_and_empty_shards(length, jit, partition):
    qkv = random_qkv(length, dtype="float64")

    def on_rank(ring):
        def loss(q, k, v):
            return ring_attention(q, k, v, ring=ring, causal=True).sum()

        gradients = jax.grad(loss, (0, 1, 2))
        shards = [jnp.asarray(ring.shard(x)) for x in qkv]
        got = (jax.jit(gradients) if jit else gradients)(*shards)
        return [ring.unshard(x) for x in got]

    [first, *_] = on_ranks(on_rank, IN_JIT, partition=partition)
    ones = np.ones((1, length, 2, 8))
    assert_near(first, list(oracle.gradients(ones, *qkv, causal=True)))


def test_check_grads_on_one_rank():
    sink = jnp.array([0.3, -1.0])

    def on_rank(ring):
        def call(q, k, v, sink):
            options = {"causal": True, "window": (4, 0), "softcap": 3.0, "return_lse": True}
            return ring_attention(q, k, v, ring=ring, sink=sink, **options)

        check_grads(call, (*arrays(7, dtype="float64"), sink), order=1, modes=["rev"])
        check_grads(jax.jit(call), (*arrays(7, dtype="float64"), sink), order=1, modes=["rev"])

    on_ranks(on_rank)


def test_the_slope_along_a_direction_on_three_ranks():
    """All ranks move at once: the slopes of their losses, and of their gradients, add up."""
    x, along = (random_qkv(11, dtype="float64", seed=seed) for seed in (0, 1))
    step = 1e-6

    def on_rank(ring):
        own, way = ([jnp.asarray(ring.shard(part)) for part in whole] for whole in (x, along))

        def loss(q, k, v):
            out, lse = ring_attention(q, k, v, ring=ring, causal=True, return_lse=True)
            return jnp.sin(out).sum() + (lse**2).sum()

        ahead, behind = (
            loss(*(a + sign * step * b for a, b in zip(own, way, strict=True))) for sign in (1, -1)
        )
        gradients = jax.grad(loss, (0, 1, 2))(*own)
        slope = sum((a * b).sum() for a, b in zip(gradients, way, strict=True))
        return (ahead - behind) / (2 * step), slope

    measured, slopes = np.sum(on_ranks(on_rank, 3), axis=0)
    assert measured == pytest.approx(slopes, rel=1e-7)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("through", ["out", "lse", "both"])
def test_gradients_through_lse_and_of_a_sink(through, jit):
    qkv, sink = random_qkv(13, q_heads=4, kv_heads=2, dtype="float64"), jnp.linspace(-1, 2, 4)
    pick = {"out": (1, 0), "lse": (0, 1), "both": (1, 1)}[through]

    def total(out, lse):
        return (pick[0] * jnp.sin(out)).sum() + (pick[1] * lse**2).sum()

    def on_rank(ring):
        def loss(q, k, v, sink):
            call = {"causal": True, "sink": sink, "scale": 0.7, "return_lse": True}
            return total(*ring_attention(q, k, v, ring=ring, **call))

        gradients = jax.grad(loss, (0, 1, 2, 3))
        shards = [jnp.asarray(ring.shard(x)) for x in qkv]
        *parts, dsink = (jax.jit(gradients) if jit else gradients)(*shards, sink)
        return [*(ring.unshard(x) for x in parts), dsink]

    results = on_ranks(on_rank, IN_JIT)
    plain = jax.grad(lambda q, k, v, s: total(*dense(q, k, v, scale=0.7, sink=s)), (0, 1, 2, 3))
    want = jax.jit(plain)(*map(jnp.asarray, qkv), sink)
    for got in results:
        assert_near(got, list(want))


@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "checkpoint"])
def test_a_scan_over_layers(checkpoint):
    """Also in a checkpoint every forward pass is made once."""
    x = np.random.default_rng(0).standard_normal((1, 12, 2, 8))
    weights = jnp.asarray(np.random.default_rng(1).standard_normal((3, 3, 8, 8)) / 3)

    def loss_by(attention):
        def layer(x, w):
            q, k, v = (jnp.tanh(x @ w[i]) for i in range(3))
            return x + attention(q, k, v), None

        layer = jax.checkpoint(layer) if checkpoint else layer
        return lambda x, w: (jax.lax.scan(layer, x, w)[0] ** 2).sum()

    def on_rank(ring):
        passes = counted(ring)
        loss = loss_by(lambda q, k, v: ring_attention(q, k, v, ring=ring, causal=True))
        dx, dw = jax.jit(jax.grad(loss, (0, 1)))(jnp.asarray(ring.shard(x)), weights)
        return [name for name, _ in passes], np.asarray(ring.unshard(dx)), np.asarray(dw)

    results = on_ranks(on_rank, IN_JIT)
    plain = jax.grad(loss_by(lambda q, k, v: dense(q, k, v)[0]), (0, 1))
    want = jax.jit(plain)(jnp.asarray(x), weights)
    assert [names for names, _, _ in results] == IN_JIT * [3 * ["forward"] + 3 * ["backward"]]
    assert_near((results[0][1], sum(dw for _, _, dw in results)), want)


def test_vmap_folds_into_the_batch():
    """A mapped axis anywhere, and arrays that are not mapped; one pass for all."""
    q, (_, k, v) = jnp.asarray(random_qkv(8, batch=6)[0]).reshape(2, 3, 8, 2, 8), arrays(8, batch=2)

    def on_rank(ring):
        passes = counted(ring)
        call = lambda q, k: ring_attention(q, k, v, ring=ring, return_lse=True)  # noqa: E731
        mapped = jax.jit(jax.vmap(call, in_axes=(1, None), out_axes=1))(q, k)
        assert len(passes) == 1
        each = [call(q[:, i], k) for i in range(3)]
        return mapped, tuple(jnp.stack(parts, axis=1) for parts in zip(*each, strict=True))

    [(mapped, want)] = on_ranks(on_rank)
    assert_near(mapped, want, 1e-6)


def test_a_jacobian_is_a_vmap_of_gradients():
    q, k, v = arrays(5, dtype="float64")

    def on_rank(ring):
        last = lambda q: ring_attention(q, k, v, ring=ring, causal=True)[0, -1, 0]  # noqa: E731
        return jax.jit(jax.jacrev(last))(q)

    want = jax.jit(jax.jacrev(lambda q: dense(q, k, v)[0][0, -1, 0]))(q)
    assert_near(on_ranks(on_rank)[0], want)


def test_cond_and_loops():
    q, k, v = arrays(6)

    def on_rank(ring):
        def call(q):
            return ring_attention(q, k, v, ring=ring, causal=True)

        def either(which, q):
            return jax.lax.cond(which, call, lambda q: q, q)

        looped = jax.jit(lambda q: jax.lax.fori_loop(0, 2, lambda _, q: call(q), q))(q)
        return jax.jit(either)(True, q), jax.jit(either)(False, q), looped

    plain = jax.jit(lambda q: dense(q, k, v)[0])
    assert_near(on_ranks(on_rank)[0], (plain(q), q, plain(plain(q))), 1e-5)


def test_inputs_are_only_read_and_may_be_donated():
    own = arrays(6)
    before = [np.array(x) for x in own]

    def on_rank(ring):
        call = lambda q, k, v: ring_attention(q, k, v, ring=ring)  # noqa: E731
        plain = jax.grad(lambda *x: call(*x).sum(), (0, 1, 2))(*own), call(*own)
        donating = jax.jit(call, donate_argnums=(0, 1, 2))
        return plain[1], donating(*(jnp.array(x) for x in own))

    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        [(plain, donated)] = on_ranks(on_rank)
    np.testing.assert_array_equal(plain, donated)
    for x, y in zip(own, before, strict=True):
        np.testing.assert_array_equal(x, y)


def test_weakly_typed_arrays():
    def on_rank(ring):
        def loss(x):
            q = jnp.full((1, 4, 2, 3), x)
            assert q.weak_type
            return ring_attention(q, q, q, ring=ring).sum()

        return jax.grad(loss)(2.0), jax.jit(jax.grad(loss))(2.0)

    assert_near(on_ranks(on_rank)[0], (np.float64(24), np.float64(24)))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "documents",
    [
        [0, 4, 9],
        np.array([[0, 4], [4, 9]]),
        jnp.array([0, 4, 9]),
        (np.array([0, 4, 9]), [0, 4, 9]),
        (jnp.array([0, 4, 9]), np.array([0, 4, 9])),
    ],
    ids=["list", "numpy", "jax", "pair", "jax pair"],
)
def test_documents_of_every_kind(documents, jit):
    qkv = arrays(9)
    seen = np.equal.outer(np.arange(9) >= 4, np.arange(9) >= 4)

    def on_rank(ring):
        call = lambda *x: ring_attention(*x, ring=ring, documents=documents, return_lse=True)  # noqa: E731
        return (jax.jit(call) if jit else call)(*qkv)

    [result] = on_ranks(on_rank)
    assert_close(tuple(map(np.asarray, result)), oracle.attention(*map(np.asarray, qkv), seen))


def test_a_jitted_call_keeps_the_documents_that_it_was_traced_with():
    qkv, documents = arrays(9), np.array([0, 4, 9])

    def on_rank(ring):
        call = jax.jit(lambda *x: ring_attention(*x, ring=ring, documents=documents))
        first = call(*qkv)
        documents[1] = 7
        return first, call(*qkv)

    [(first, second)] = on_ranks(on_rank)
    np.testing.assert_array_equal(first, second)


def test_a_jitted_call_keeps_the_window_that_it_was_traced_with():
    window = [1, 0]

    def on_rank(ring):
        call = jax.jit(lambda *x: ring_attention(*x, ring=ring, window=window))
        first = call(*arrays(9))
        window[0] = 5
        return first, call(*arrays(9))

    [(first, second)] = on_ranks(on_rank)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("name", ["jax_grad", "numpy_threads"])
def test_the_example_runs(name):
    done = subprocess.run(
        [sys.executable, f"examples/{name}.py"],
        capture_output=True, text=True, timeout=90, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "gradient of weights o" in done.stdout or "dv (1, 640, 2, 32)" in done.stdout
