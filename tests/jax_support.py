"""What the tests of `ringrt.jax` share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ringrt
from support import random_qkv

#: Thread ranks inside of `jax.jit` are no more than the cores, of which there are two.
IN_JIT = 2


@pytest.fixture
def x64():
    """64-bit types, in all threads, as long as a test runs."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def on_ranks(fn, ranks=1, *, backend="reference", **options):
    """Every rank's result of `fn(ring)`, on thread ranks."""
    return ringrt.run_threads(fn, ranks, timeout=20, backend=backend, **options)


def arrays(length=9, **options):
    """q, k, v as whole JAX arrays."""
    return tuple(map(jnp.asarray, random_qkv(length, **options)))


def counted(ring):
    """The options of every pass that the ring makes, "forward" or "backward" first."""
    passes = []

    def count(name, run):
        def counting(*args, **options):
            passes.append((name, options))
            return run(*args, **options)

        return counting

    ring.attention = count("forward", ring.attention)
    ring.attention_backward = count("backward", ring.attention_backward)
    return passes


def dense(q, k, v, *, scale=None, sink=None):
    """Causal out and lse of whole sequences in plain JAX, which differentiates it itself."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    scores = jnp.einsum("bihd,bjhd->bhij", q, k) * scale
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    if sink is not None:
        shape = (*scores.shape[:3], 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink[:, None, None], shape)], axis=-1)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - lse[..., None])[..., : v.shape[1]]
    return jnp.einsum("bhij,bjhd->bihd", weights, v), lse


def assert_near(got, want, tolerance=1e-12):
    """Trees of arrays, in float64."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=tolerance
        )
