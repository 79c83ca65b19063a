"""The CUDA simulator: device arrays."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from cudasim_support import (
    fresh,  # noqa: F401
    ones,
    scale,
)

from ringrt.cudasim import SimulatorError, api as cp

pytestmark = pytest.mark.timeout(60)


def test_an_array_comes_back_as_it_went():
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    y = cp.asarray(x)
    assert (y.shape, y.strides, y.dtype, y.ndim) == (x.shape, x.strides, x.dtype, 3)
    assert (y.size, y.nbytes, y.itemsize, len(y)) == (24, 96, 4, 2)
    np.testing.assert_array_equal(y.get(), x)
    np.testing.assert_array_equal(cp.asnumpy(y), x)


def test_views_share_memory():
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    y = cp.asarray(x)
    for made, want in [
        (y[1], x[1]),
        (y[:, 1:, ::2], x[:, 1:, ::2]),
        (y[..., None, -1], x[..., None, -1]),
        (y[0, 1, 2], x[0, 1, 2]),
        (y.reshape(6, 4), x.reshape(6, 4)),
        (y.reshape((4, -1)), x.reshape(4, -1)),
        (y.transpose(2, 0, 1), x.transpose(2, 0, 1)),
        (y.transpose(), x.T),
        (y.view(np.uint8), x.view(np.uint8)),
        (y[:, ::-1], x[:, ::-1]),
        (y[2:], x[2:]),
    ]:
        assert made.shape == want.shape
        np.testing.assert_array_equal(made.get(), want)
    y[1].fill(7)
    x[1] = 7
    np.testing.assert_array_equal(y.get(), x)
    assert y[1].data.ptr == y.data.ptr + 48
    assert y[1].data.mem is y.data.mem


@pytest.mark.parametrize("dtype", [np.float16, np.int64, np.bool_, ml_dtypes.bfloat16])
def test_any_dtype(dtype):
    x = np.array([0, 1, 1], dtype)
    y = cp.asarray(x)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y.get().view(np.uint8), x.view(np.uint8))


def test_fresh_memory_is_not_a_number_and_aligned():
    x = cp.empty((3, 5), np.float32)
    assert np.isnan(x.get()).all()
    assert x.data.ptr % 512 == 0
    assert np.isnan(cp.empty(3, ml_dtypes.bfloat16).get().astype(np.float32)).all()
    assert not cp.zeros((3, 5), np.float32).get().any()
    assert cp.empty(2).dtype == np.float64


def test_empty_arrays():
    x = cp.empty((0, 4), np.float32)
    assert x.get().shape == (0, 4)
    x.fill(1)
    assert cp.zeros(0).get().shape == (0,)
    scale(x, cp.empty(0, np.float32), 1)


def test_set_and_get_into_an_array():
    x = cp.empty((2, 3), np.int32)
    x.set(np.arange(6, dtype=np.int32).reshape(2, 3))
    out = np.empty((2, 3), np.int32)
    assert x.get(out=out) is out
    np.testing.assert_array_equal(out, np.arange(6).reshape(2, 3))
    with pytest.raises(TypeError, match="int64 array cannot be set to int32"):
        x.set(np.zeros((2, 3), np.int64))
    with pytest.raises(ValueError, match="Shape mismatch"):
        x.set(np.zeros((3, 2), np.int32))
    with pytest.raises(ValueError, match="get: out is"):
        x.get(out=np.empty(6, np.int32))
    with pytest.raises(RuntimeError, match="non-contiguous"):
        x.transpose().set(np.zeros((3, 2), np.int32))


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x + 1,
        lambda x: 1 + x,
        lambda x: np.float32(1) + x,
        lambda x: np.ones(3, np.float32) * x,
        lambda x: -x,
        lambda x: x == 1,
        bool,
        float,
        hash,
        np.asarray,
        lambda x: x.__setitem__(0, 1),
        lambda x: 1 in x,
    ],
)
def test_arithmetic_and_conversion_are_refused(act):
    with pytest.raises(TypeError):
        act(ones(3))


def test_what_is_not_implemented_says_so():
    x = ones(4)
    for name in ("sum", "astype", "T"):
        with pytest.raises(AttributeError, match=f"does not implement cupy.ndarray.{name}"):
            getattr(x, name)
    for act in (
        lambda: x[[0, 1]],
        lambda: x[x],
        lambda: cp.empty(3, order="F"),
        lambda: x.get(order="F"),
        lambda: ones(6).reshape(2, 3).transpose().reshape(6),
        lambda: x.reshape(4, order="F"),
        lambda: cp.asarray(x, np.float64),
        lambda: cp.cuda.Stream(ptds=True),
        lambda: cp.cuda.Event(interprocess=True),
    ):
        with pytest.raises(SimulatorError):
            act()
    for module, name in ((cp, "dot"), (cp.cuda, "MemoryAsyncPool"), (cp.cuda.nccl, "NcclConfig")):
        with pytest.raises(AttributeError, match="simulator does not implement"):
            getattr(module, name)
    with pytest.raises(AttributeError, match="simulator does not implement"):
        _ = cp.cuda.runtime.memcpy


def test_array_interface():
    x = ones(6).reshape(2, 3)
    face = x.__cuda_array_interface__
    assert face["shape"] == (2, 3)
    assert face["strides"] is None
    assert face["data"] == (x.data.ptr, False)
    assert face["typestr"] == "<f4"
    assert x.transpose().__cuda_array_interface__["strides"] == (4, 12)
    assert x.flags.c_contiguous
    assert not x.transpose().flags.c_contiguous


def test_an_array_on_memory_that_is_there():
    x = ones(8)
    y = cp.ndarray((2, 2), np.float32, x[4:].data)
    y.fill(3)
    np.testing.assert_array_equal(x.get(), [1, 1, 1, 1, 3, 3, 3, 3])
    with pytest.raises(TypeError):
        cp.ndarray((5,), np.float32, x[4:].data)


def test_used_bytes():
    pool = cp.get_default_memory_pool()
    before = pool.used_bytes()
    x = cp.empty(1000, np.uint8)
    assert pool.used_bytes() == before + 1024
    view = x[3:]
    del x
    assert pool.used_bytes() == before + 1024
    del view
    pool.free_all_blocks()
    assert pool.used_bytes() == before
