"""The gradients of a small transformer in JAX, its sequence sharded over four ranks.

    python examples/jax_grad.py

Each rank computes the loss of its own tokens, in `jax.jit`, with `jax.lax.scan` over checkpointed
layers. Weights are the same on all ranks, so their gradients are summed over ranks, as is the loss;
those of the tokens stay with the rank that holds them. The same model with plain attention in one
piece says what is right.

The ranks are threads here, so that one command shows it all. In earnest a rank is a process, and
`ringrt.Ring.from_jax_distributed()` or `from_mpi()` takes the place of `run_threads`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ringrt
from ringrt.jax import ring_attention

RANKS, TOKENS, HEADS, KV_HEADS, DIM, LAYERS = 4, 250, 4, 2, 16, 2
WIDTH = HEADS * DIM

# A thread rank that waits inside of a jitted function holds a worker of JAX's CPU client, which has
# one for each core, or for each device where these are more. Processes do not need this.
jax.config.update("jax_num_cpu_devices", RANKS)

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Weights = dict[str, jax.Array]


def main() -> None:
    """Compute on four ranks and in one piece, compare, and say how far apart the results are."""
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((1, TOKENS, WIDTH), dtype=np.float32)
    shapes = {"q": (WIDTH, HEADS * DIM), "k": (WIDTH, KV_HEADS * DIM), "v": (WIDTH, KV_HEADS * DIM)}
    shapes |= {"o": (HEADS * DIM, WIDTH)}
    weights = {
        name: jnp.asarray(rng.standard_normal((LAYERS, *shape), dtype=np.float32) / WIDTH**0.5)
        for name, shape in shapes.items()
    }

    def on_rank(ring: ringrt.Ring) -> Any:
        def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return ring_attention(q, k, v, ring=ring, causal=True)

        step = jax.jit(jax.value_and_grad(lambda w, x: loss(w, x, attention), argnums=(0, 1)))
        value, (dweights, dtokens) = step(weights, jnp.asarray(ring.shard(tokens)))
        return value, dweights, ring.unshard(dtokens)

    results = ringrt.run_threads(on_rank, ranks=RANKS, partition="striped")
    value = sum(each[0] for each in results)
    dweights = jax.tree.map(lambda *parts: sum(parts), *(each[1] for each in results))

    step = jax.jit(jax.value_and_grad(lambda w, x: loss(w, x, dense), argnums=(0, 1)))
    one, (one_dweights, one_dtokens) = step(weights, jnp.asarray(tokens))
    print(f"loss on {RANKS} ranks {value:.4f}, in one piece {one:.4f}")
    compare("tokens", results[0][2], one_dtokens)
    for name in weights:
        compare(f"weights {name}", dweights[name], one_dweights[name])
    assert abs(value - one) < 1e-5 * abs(one)


def loss(weights: Weights, x: jax.Array, attention: Attention) -> jax.Array:
    """A loss that is a sum over tokens. x `[batch, rows, WIDTH]`."""

    @jax.checkpoint  # keeps what attention returns, and computes the rest again
    def layer(x: jax.Array, w: Weights) -> tuple[jax.Array, None]:
        q, k, v = (jnp.tanh(x @ w[name]).reshape(*x.shape[:2], -1, DIM) for name in "qkv")
        out = attention(q, k, v).reshape(*x.shape[:2], HEADS * DIM)
        return x + out @ w["o"], None

    x, _ = jax.lax.scan(layer, x, weights)
    return (x**2).sum()


def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention over the whole sequence at once."""
    k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
    scores = jnp.einsum("bihd,bjhd->bhij", q, k) * DIM**-0.5
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhij,bjhd->bihd", weights, v)


def compare(name: str, got: Any, want: Any) -> None:
    """Print how far apart two gradients are; they must be close."""
    error = float(jnp.abs(got - want).max() / jnp.abs(want).max())
    print(f"gradient of {name}: {error:.1e} of its largest element apart")
    assert error < 1e-5, name


if __name__ == "__main__":
    main()
