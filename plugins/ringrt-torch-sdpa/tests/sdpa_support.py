"""What the tests of both backends need: inputs, both passes on tiles, and float64 answers."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from ringrt_torch_sdpa.choose import Machine

from ringrt.backend import band
from ringrt.plan import Mask, Problem
from ringrt.plan.mask import UNBOUNDED
from ringrt.plan.tiles import Tile

INF = float("inf")
HOPPER = Machine(capability=90, cudnn=91700, flash=True, efficient=True)


def inputs(rows, keys=None, dtype="float32", *, heads=(4, 2), dims=(16, 16), seed=0):
    """q, k, v and dout, standard normal."""
    rng, keys = np.random.default_rng(seed), rows if keys is None else keys
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    shapes = ((rows, heads[0], dims[0]), (keys, heads[1], dims[0]), (keys, heads[1], dims[1]),
              (rows, heads[0], dims[1]))  # fmt: skip
    return [rng.standard_normal((1, *shape)).astype(kind) for shape in shapes]


def problem_of(q, v, scale=0.25, **changes):
    """One whose mask nobody looks at."""
    rows, heads, dim = q.shape[1:]
    keys, kv_heads, value_dim = v.shape[1:]
    mask = Mask.full(rows, keys)
    fixed = (1, heads, kv_heads, dim, value_dim, rows, keys, q.dtype.name, mask, scale)
    return Problem(*fixed, **changes)


def tile_of(q, k, lower=-UNBOUNDED, upper=UNBOUNDED):
    """One band over everything."""
    return Tile(0, q.shape[1], 0, k.shape[1], lower, upper)


def forward(backend, q, k, v, problem, tiles):
    """out and lse."""
    state = backend.begin(q, problem)
    backend.accumulate(state, k, v, tiles)
    return backend.finish(state)


def backward(backend, arrays, result, problem, tiles):
    """dq, dk and dv."""
    q, k, v, dout = arrays
    out, lse = result
    grads = backend.begin_backward(q, dout, lse, None, problem, out=out)
    dk, dv = (np.zeros(x.shape, lse.dtype) for x in (k, v))
    backend.accumulate_backward(grads, k, v, dk, dv, tiles)
    return backend.finish_backward(grads), dk, dv


def exact(arrays, tile, scale=0.25):
    """out, lse, dq, dk and dv by the definition, in float64; rows that see nothing are not
    thought of."""
    q, k, v, dout = (x.astype(np.float64) for x in arrays)
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    scores = np.where(band(tile), np.einsum("bihd,bjhd->bhij", q, k) * scale, -INF)
    top = scores.max(axis=-1, keepdims=True)
    lse = np.log(np.exp(scores - top).sum(axis=-1)) + top[..., 0]
    p = np.exp(scores - lse[..., None])
    out = np.einsum("bhij,bjhd->bihd", p, v)
    delta = np.einsum("bihd,bihd->bhi", dout, out)
    ds = p * (np.einsum("bihd,bjhd->bhij", dout, v) - delta[..., None]) * scale
    dk, dv = np.einsum("bhij,bihd->bjhd", ds, q), np.einsum("bhij,bihd->bjhd", p, dout)
    dk, dv = (x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(axis=3) for x in (dk, dv))
    return out, lse, np.einsum("bhij,bjhd->bihd", ds, k), dk, dv


def close(got, want, bound):
    """All of them, in float64; the bound is of the largest, if that is more than 1."""
    for x, y in zip(got, want, strict=True):
        size = max(1, abs(y).max())
        np.testing.assert_allclose(x.astype(np.float64), y, rtol=0, atol=bound * size)
