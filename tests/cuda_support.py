"""What the tests of the CUDA path need: calls through the simulator, and how far off a result
of tensor cores may be."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import oracle
import ringrt
from ringrt import cudasim
from ringrt.cudasim import api
from support import TOLERANCE, assert_close, random_qkv

#: The path under test.
PATH = {"backend": "cupy", "transport": "nccl", "timeout": 60}

#: Largest relative error of a number rounded to the dtype: half a unit in the last of its 8
#: (11) bits.
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11}
#: Relative error of a probability in fp32 (of its score, and of lse), and absolute error of lse,
#: for scores up to LOUD in size; they grow in proportion beyond.
FP32, LSE, LOUD = 1e-5, 4e-6, 16.0
#: Of the largest gradient, as in tests/test_gradients.py.
GRADIENT = {"float64": 1e-13, "float32": 3e-6}


@pytest.fixture(autouse=True)
def simulator(monkeypatch):
    """CUDA is simulated; what the simulator finds too late for a call is an error of the test."""
    monkeypatch.setenv("RINGRT_CUDASIM", "1")
    cudasim.reset()
    cudasim.set_seed(0)
    yield
    gc.collect()
    cudasim.check()
    cudasim.reset()
    cudasim.set_seed(0)


def example(length=45, kv_length=None, dtype="float32", seed=0, **shape):
    """q, k, v and dout, standard normal."""
    shape = {"q_heads": 2, "kv_heads": 1, "head_dim": 8} | shape
    q, k, v = random_qkv(length, kv_length=kv_length, dtype=dtype, seed=seed, **shape)
    dout_shape = shape | {"head_dim": shape.get("value_dim") or shape["head_dim"]}
    return q, k, v, random_qkv(length, dtype=dtype, seed=seed + 50, **dout_shape)[0]


def gpu(x, device=0):
    """A NumPy array on a GPU."""
    with api.cuda.Device(device):
        return api.asarray(x)


def both_passes(q, k, v, dout, ranks, *, travel="auto", **options):
    """(out, lse), (dq, dk, dv[, dsink]), by default on the path under test."""
    options = PATH | options
    out, lse = ringrt.attention(q, k, v, ranks=ranks, **options)
    gradients = ringrt.attention_backward(
        dout, q, k, v, out, lse, ranks=ranks, travel=travel, **options
    )
    return (out, lse), gradients


def check(arrays, ranks, masking=None, scores=None, seen=None, clean=None, **how):
    """Both passes against the oracle, on `clean` where arrays hold what nobody must see."""
    masking, scores = masking or {}, scores or {}
    result, gradients = both_passes(*arrays, ranks, **masking, **scores, **how)
    assert_right(result, gradients, clean or arrays, masking, scores, seen)
    return result, gradients


def assert_right(result, gradients, arrays, masking=None, scores=None, seen=None):
    """Results of both passes (or of forward alone) within the bounds of the dtype."""
    q, k, v, dout = arrays
    masking, scores, dtype = masking or {}, scores or {}, q.dtype.name
    if seen is None:
        from masks import visible

        seen = visible(q.shape[1], k.shape[1], **masking)
    expected = oracle.attention(q, k, v, seen, **scores)
    wanted = oracle.gradients(dout, q, k, v, seen, **scores) if gradients else ()
    assert {x.dtype for x in (result[0], *gradients[:3])} == {q.dtype}
    assert len(gradients) == len(wanted)
    if dtype in ROUNDING:
        bounds = tensor_core_bounds(arrays, seen, expected, wanted, **scores)
    else:
        assert_close(result, expected, dtype)
        bounds = [*TOLERANCE[dtype]]
        bounds += [GRADIENT[dtype] * max(1, abs(want).max(initial=0)) for want in wanted]
    names = ("out", "lse", "dq", "dk", "dv", "dsink")
    for name, got, want, bound in zip(
        names, (*result, *gradients), (*expected, *wanted), bounds, strict=False
    ):
        assert got.shape == want.shape, name
        got = got.astype(np.float64)
        empty = np.isneginf(want)
        np.testing.assert_array_equal(np.isneginf(got), empty, err_msg=name)
        with np.errstate(invalid="ignore"):
            excess = np.where(empty, 0, abs(got - want) - bound)
        assert np.all(excess <= 0), f"{name}: {np.max(excess)} beyond {np.max(bound)}"


def tensor_core_bounds(arrays, seen, expected, wanted, *, scale=None, softcap=None, sink=None):
    """Elementwise bounds of the error of out, lse, dq, dk, dv and dsink in 16 bits.

    With u = ROUNDING, |x| of every number and the probabilities p of the exact result:

    - out is p v, with p rounded, and is rounded: u (p |v| + |out|);
    - delta = rowsum(dout · out) comes from that out: |dout| · (error of out);
    - ds = p (dout · v − delta) slope is rounded, so dq = scale · ds k is off by
      scale · (u |ds| + p · error of delta) |k|, and by u |dq| when it is rounded; so is dk;
    - dv = pᵀ dout with p rounded, and rounded: u (pᵀ |dout| + |dv|).

    Besides each p has the relative error FP32, and float16 has the least step 2⁻²⁴. Errors are
    mostly a tenth to two thirds of that; rounding goes either way, and so cancels in part."""
    q, k, v, dout = (np.asarray(x).astype(np.float64) for x in arrays)
    u = ROUNDING[arrays[0].dtype.name]
    least = 2.0**-25 if u == ROUNDING["float16"] else 0.0
    batch, keys, kv_heads, _ = k.shape
    group = q.shape[2] // kv_heads
    scale = q.shape[3] ** -0.5 if scale is None else scale
    scores = np.einsum("bihd,bjhd->bhij", q, np.repeat(k, group, axis=2)) * scale
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(seen, scores, -np.inf)
    loudest = abs(scores[np.isfinite(scores)]).max(initial=0.0)
    louder = max(1.0, loudest / LOUD)
    fp32 = FP32 * louder
    lse = np.where(np.isneginf(expected[1]), 0, expected[1])
    p = np.exp(scores - lse[..., None])
    k_abs, v_abs = (np.repeat(abs(x), group, axis=2) for x in (k, v))
    p_off = (u + fp32) * p + least * seen
    out_off = np.einsum("bhij,bjhd->bihd", p_off, v_abs) + u * abs(expected[0]) + least
    delta = np.einsum("bihd,bihd->bhi", dout, expected[0])
    delta_off = np.einsum("bihd,bihd->bhi", abs(dout), out_off) + fp32 * abs(delta)
    dp = np.einsum("bihd,bjhd->bhij", dout, np.repeat(v, group, axis=2))
    dp_abs = np.einsum("bihd,bjhd->bhij", abs(dout), v_abs)
    ds_off = p * (u * abs(dp - delta[..., None]) + delta_off[..., None] + fp32 * dp_abs)
    ds_off = abs(scale) * (ds_off + least * seen)

    def of_group(x):
        return x.reshape(batch, keys, kv_heads, group, x.shape[3]).sum(axis=3)

    dq_off = np.einsum("bhij,bjhd->bihd", ds_off, k_abs)
    dk_off = of_group(np.einsum("bhij,bihd->bjhd", ds_off, abs(q)))
    dv_off = of_group(np.einsum("bhij,bihd->bjhd", p_off, abs(dout)))
    off = [dq_off, dk_off, dv_off]
    off = [x + u * abs(want) + least for x, want in zip(off, wanted, strict=False)]
    bounds = [out_off, np.full(expected[1].shape, LSE * louder), *off]
    if wanted and sink is not None:
        with np.errstate(invalid="ignore"):
            weight = np.exp(sink[None, :, None] - expected[1])
        weight = np.where(np.isfinite(weight), weight, 0)
        bounds.append((weight * (delta_off + fp32 * abs(delta))).sum(axis=(0, 2)))
    return bounds
