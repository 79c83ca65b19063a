"""ringrt.jax inside compiled programs: no pass is lost, doubled or moved, and errors come out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_support import arrays, counted, on_ranks

import ringrt
from ringrt.jax import original_errors, ring_attention
from support import mpirun

pytestmark = pytest.mark.timeout(100)

#: So long that XLA computes it behind the caller's back.
SLOW = (1, 512, 2, 64)


@jax.jit
def slowly(x):
    """x, a fraction of a second later."""
    zeros = jnp.zeros((512, 512))
    return jax.lax.fori_loop(0, 100, lambda _, y: y + jnp.einsum("st,bthd->bshd", zeros, y), x)


# What JAX must not do to a pass.


def test_a_pass_is_made_though_nobody_uses_its_result():
    def on_rank(ring):
        passes = counted(ring)
        jax.jit(lambda q, k, v: (ring_attention(q, k, v, ring=ring), q)[1])(*arrays())
        return len(passes)

    assert on_ranks(on_rank) == [1]


def test_two_equal_passes_are_two():
    def on_rank(ring):
        passes = counted(ring)
        call = lambda q, k, v: ring_attention(q, k, v, ring=ring)  # noqa: E731
        jax.jit(lambda *x: call(*x) + call(*x))(*arrays())
        return len(passes)

    assert on_ranks(on_rank) == [2]


def test_passes_are_made_in_the_order_of_the_program():
    """Though none depends on another, and the first has to wait the longest."""
    scales = [0.1, 0.2, 0.3, 0.4]

    def on_rank(ring):
        passes = counted(ring)

        def loss(x):
            late = [slowly(x), x @ jnp.eye(64), x + 1, x]
            return sum(
                ring_attention(y[:, :8], x, x, ring=ring, scale=scale).sum()
                for y, scale in zip(late, scales, strict=True)
            )

        jax.jit(jax.grad(loss))(jnp.ones(SLOW)).block_until_ready()
        return [(name, options["scale"]) for name, options in passes]

    forward = [("forward", scale) for scale in scales]
    backward = [("backward", scale) for scale in reversed(scales)]
    assert on_ranks(on_rank, backend="cpu") == [forward + backward]


def test_a_program_under_way_comes_before_an_eager_call_and_before_the_next():
    """Rank 1's arrays are not there yet when it is called."""

    def on_rank(ring):
        passes = counted(ring)
        call = lambda x, scale: ring_attention(x, x, x, ring=ring, scale=scale)  # noqa: E731
        first, second = (jax.jit(lambda x, scale=s: call(x, scale)) for s in (0.1, 0.3))
        x = jnp.ones(SLOW)
        jax.block_until_ready([slowly(x), first(x), second(x)])
        passes.clear()
        first(slowly(x) if ring.rank else x)
        call(x, 0.2)
        first(slowly(x) if ring.rank else x)
        second(x).block_until_ready()
        return [options["scale"] for _, options in passes]

    assert on_ranks(on_rank, 2, backend="cpu") == 2 * [[0.1, 0.2, 0.1, 0.3]]


def test_programs_of_processes():
    """The callback comes on whatever thread XLA likes."""
    code = """if True:
        import jax, jax.numpy as jnp, numpy as np, ringrt
        from ringrt.jax import ring_attention
        whole = np.random.default_rng(0).standard_normal((1, 33, 2, 8), dtype=np.float32)
        def gradient(ring):
            def layer(x, _):
                y = jnp.tanh(x @ jnp.eye(8))
                return x + ring_attention(y, y, y, ring=ring, causal=True), None
            loss = lambda x: (jax.lax.scan(layer, x, length=3)[0] ** 2).sum()
            return ring.unshard(jax.jit(jax.grad(loss))(jnp.asarray(ring.shard(whole))))
        with ringrt.Ring.from_mpi(timeout=30) as ring:
            got = gradient(ring)
        [want] = ringrt.run_threads(gradient, 1)
        np.testing.assert_allclose(got, want, atol=1e-4)
        print("right")
    """
    done = mpirun(2, "-c", code)
    assert done.stdout.split() == ["right", "right"], done.stderr


# Errors.


def test_an_error_inside_a_program_comes_out_as_it_was():
    """At once or later; and the thread can go on."""

    def on_rank(ring):
        x = jnp.ones(SLOW)
        call = jax.jit(lambda x, y: ring_attention(x, y, y, ring=ring, scale=1.0 + ring.rank))
        for late in (False, True):
            y = slowly(x) if late else x
            mismatch = pytest.raises(ringrt.RankMismatch, match="ranks disagree on scale")
            with mismatch, original_errors(ring):
                call(x, y)
        return jax.jit(lambda x: ring_attention(x, x, x, ring=ring))(x).shape

    assert on_ranks(on_rank, 2) == [SLOW, SLOW]


def test_without_original_errors_its_text_is_there():
    def on_rank(ring):
        with pytest.raises(jax.errors.JaxRuntimeError, match="RankMismatch: .* on scale: 1.0 on"):
            jax.jit(lambda *x: ring_attention(*x, ring=ring, scale=1.0 + ring.rank))(*arrays())

    on_ranks(on_rank, 2)


def test_errors_of_others_pass_original_errors_as_they_are():
    def boom(*_, **__):
        raise LookupError("planted")

    def on_rank(ring):
        ring.attention = boom
        with pytest.raises(jax.errors.JaxRuntimeError, match="LookupError: planted"):
            jax.jit(lambda *x: ring_attention(*x, ring=ring))(*arrays())
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        fails = jax.jit(lambda x: jax.pure_callback(boom, shape, x))
        wrapped = pytest.raises(jax.errors.JaxRuntimeError, match="LookupError: planted")
        with wrapped, original_errors(ring):
            fails(1.0)
        with pytest.raises(LookupError), original_errors(ring):
            raise LookupError

    on_ranks(on_rank)


def test_a_rank_that_fails_between_passes_is_told_to_one_inside_a_program():
    seen = {}

    def on_rank(ring):
        if ring.rank:
            raise LookupError("planted")
        try:
            with original_errors(ring):
                jax.jit(lambda *x: ring_attention(*x, ring=ring))(*arrays())
        except ringrt.RingrtError as error:
            seen[0] = error

    with pytest.raises(LookupError):
        on_ranks(on_rank, 2)
    assert isinstance(seen[0], ringrt.PeerLost)
    assert "LookupError: planted" in str(seen[0])


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_wrong_argument_on_one_rank_is_told_to_the_others(jit):
    def on_rank(ring):
        def call(q, k, v):
            return ring_attention(q, k, v, ring=ring, softcap=-1.0 if ring.rank else None)

        kind = ringrt.ConfigError if ring.rank else ringrt.RankMismatch
        told = pytest.raises(kind, match="softcap: expected a finite number > 0")
        with told, original_errors(ring):
            (jax.jit(call) if jit else call)(*arrays(8))

    on_ranks(on_rank, 2)


def test_a_wrong_argument_is_told_behind_the_programs_under_way():
    """And not in the midst of a pass that is still to come."""

    def on_rank(ring):
        x = jnp.ones(SLOW)
        call = lambda x, **more: ring_attention(x, x, x, ring=ring, **more)  # noqa: E731
        program = jax.jit(call)
        want = jax.block_until_ready([slowly(x), program(x)])[1]
        got = program(slowly(x))
        kind = ringrt.ConfigError if ring.rank else ringrt.RankMismatch
        with pytest.raises(kind, match="prefix: expected a whole number"):
            call(x, prefix=-1 if ring.rank else 0)
        np.testing.assert_array_equal(got, want)

    on_ranks(on_rank, 2, backend="cpu")


def test_an_interrupt_inside_a_program():
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    def on_rank(ring):
        ring.attention = interrupted
        with pytest.raises(KeyboardInterrupt), original_errors(ring):
            jax.jit(lambda *x: ring_attention(*x, ring=ring))(*arrays())

    on_ranks(on_rank)


def test_a_closed_ring():
    [ring] = on_ranks(lambda ring: ring)
    with pytest.raises(ringrt.TransportError, match="closed"):
        ring_attention(*arrays(), ring=ring)
