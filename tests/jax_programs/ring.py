"""One process of several: rings over multi-process JAX, of NumPy and of JAX arrays, held to the
oracle."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import numpy as np

import oracle
import ringrt
from support import assert_close, random_qkv

coordinator, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(coordinator, num_processes=size, process_id=rank)


def check(ring: ringrt.Ring, dtype: str, convert, options) -> None:
    """Both passes of one call, in arrays of one kind, are the oracle's."""
    q, k, v = random_qkv(45, q_heads=4, kv_heads=2, dtype=dtype)
    dout = random_qkv(45, q_heads=4, dtype=dtype, seed=1)[0]
    q_here, k_here, v_here, dout_here = (ring.shard(convert(x)) for x in (q, k, v, dout))
    out, lse = ring.attention(q_here, k_here, v_here, **options)
    gradients = ring.attention_backward(dout_here, q_here, k_here, v_here, out, lse, **options)
    kind = type(convert(q))
    assert all(type(x) is kind for x in (out, lse, *gradients)), "another kind of array came out"
    whole = [ring.unshard(out), ring.unshard(lse, axis=2)]
    assert_close([np.asarray(x) for x in whole], oracle.attention(q, k, v, **options), dtype)
    bound = 2e-5 if dtype == "float32" else 6e-2
    for got, want in zip(gradients, oracle.gradients(dout, q, k, v, **options), strict=True):
        whole = np.asarray(ring.unshard(got)).astype(np.float64)
        np.testing.assert_allclose(whole, want, rtol=0, atol=bound)


for turn, partition in enumerate(("striped", "zigzag", "contiguous")):
    with ringrt.Ring.from_jax_distributed(partition=partition, timeout=30) as ring:
        assert (ring.rank, ring.size) == (rank, size) == (jax.process_index(), jax.process_count())
        assert (ring.transport.local_rank, ring.transport.local_size) == (rank, size)
        check(ring, "float32", np.asarray, {"causal": True})
        check(ring, ("float32", "bfloat16")[turn % 2], jax.numpy.asarray, {"softcap": 3.0})
print(f"rank {rank} is right")
