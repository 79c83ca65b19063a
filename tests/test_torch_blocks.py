"""Backends made of PyTorch kernels: arrays become tensors without a copy, and back."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import warnings
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from masks import mask_options, visible

import oracle
import ringrt
from ringrt import torch_blocks
from ringrt.backend import BackendSpec
from ringrt.device.cuda import CudaDevice
from ringrt.errors import Unsupported
from ringrt.plan.bands import parts, shape_of
from ringrt.registry import registry
from ringrt.torch_blocks import (
    CudaTensors,
    HostTensors,
    TorchBlockBackend,
    per_kv_head,
    per_query_head,
)
from support import TOLERANCE, assert_close, random_qkv

INF = float("inf")
DTYPES = ("float16", "bfloat16", "float32", "float64")


class PlainKernel(TorchBlockBackend):
    """Full and causal attention of one block by plain PyTorch, in at least float32; what a
    flipped part takes is done here as a real kernel's wrapper would."""

    def supports(self, problem):
        return None

    def parts(self, tile, problem):
        return parts(tile)

    def block(self, q, k, v, tile, problem):
        turn = shape_of(tile) == "flipped"
        q, k, v = (x.flip(1) if turn else x for x in (q, k, v))
        out, lse = self._attend(*self._wide(q, k, v, problem), tile, problem)
        out, lse = (out.flip(2), lse.flip(2)) if turn else (out, lse)
        return out.transpose(1, 2).to(q.dtype), lse

    def block_backward(self, q, k, v, out, lse, dout, tile, problem):
        turn = shape_of(tile) == "flipped"
        q, k, v, out, dout = (x.flip(1) if turn else x for x in (q, k, v, out, dout))
        lse = lse.flip(2) if turn else lse
        q, k, v = self._wide(q, k, v, problem)
        out, dout = (x.transpose(1, 2).to(q.dtype) for x in (out, dout))
        p = (self._scores(q, k, tile, problem) - lse[..., None]).exp()
        delta = (dout * out).sum(-1, keepdim=True)
        ds = p * (dout @ v.mT - delta) * problem.scale
        gradients = ds @ k, ds.mT @ q, p.mT @ dout
        dq, dk, dv = (x.flip(2) if turn else x for x in gradients)
        dk, dv = (per_kv_head(x.transpose(1, 2), problem.group) for x in (dk, dv))
        return dq.transpose(1, 2), dk, dv

    def _wide(self, q, k, v, problem):
        k, v = (per_query_head(x, problem.group) for x in (k, v))
        wide = torch.float64 if problem.dtype == "float64" else torch.float32
        return (x.transpose(1, 2).to(wide) for x in (q, k, v))

    def _scores(self, q, k, tile, problem):
        scores = q @ k.mT * problem.scale
        if shape_of(tile) == "full":
            return scores
        assert scores.shape[-1] == scores.shape[-2], "a square"
        return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -INF)

    def _attend(self, q, k, v, tile, problem):
        scores = self._scores(q, k, tile, problem)
        return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.fixture(autouse=True, scope="module")
def plain():
    """The kernel above as a backend."""
    spec = BackendSpec("plain", "a test", lambda: None, lambda context: PlainKernel(context.device))
    registry().backends["plain"] = spec
    yield
    del registry().backends["plain"]


def both_passes(q, k, v, dout, **options):
    options = {"backend": "plain", "timeout": 60} | options
    out, lse = ringrt.attention(q, k, v, **options)
    gradients = ringrt.attention_backward(dout, q, k, v, out, lse, **options)
    return (out, lse), gradients


def example(length, dtype="float32", **shape):
    shape = {"q_heads": 4, "kv_heads": 2, "value_dim": 6} | shape
    q, k, v = random_qkv(length, dtype=dtype, **shape)
    return q, k, v, random_qkv(length, dtype=dtype, seed=3, q_heads=4, head_dim=6)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("partition", ["contiguous", "striped", "zigzag"])
def test_a_ring_of_tensors_is_right(dtype, partition):
    q, k, v, dout = example(37, dtype)
    result, gradients = both_passes(q, k, v, dout, ranks=3, partition=partition, causal=True)
    # A block's result is rounded to 16 bits before it is merged, and the whole once more.
    bits = 2 if dtype in ("float16", "bfloat16") else 1
    out, lse = result
    want_out, want_lse = oracle.attention(q, k, v, causal=True)
    bounds = TOLERANCE[dtype]
    np.testing.assert_allclose(np.float64(out), want_out, rtol=0, atol=bits * bounds[0])
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=bounds[1])
    wanted = oracle.gradients(dout, q, k, v, causal=True)
    for x, want in zip(gradients, wanted, strict=True):
        assert x.dtype == q.dtype
        bound = 4 * bounds[0] * max(1, abs(want).max())
        np.testing.assert_allclose(np.float64(x), want, rtol=0, atol=bound)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_mask_is_right(data):
    length = data.draw(st.integers(1, 24))
    options = data.draw(mask_options(length, length))
    q, k, v, dout = example(length, "float64")
    seen = visible(length, length, **options)
    result, gradients = both_passes(q, k, v, dout, ranks=2, **options)
    assert_close(result, oracle.attention(q, k, v, seen), "float64")
    for x, want in zip(gradients, oracle.gradients(dout, q, k, v, seen), strict=True):
        np.testing.assert_allclose(x, want, rtol=0, atol=1e-12)


def test_a_sink_and_a_row_that_sees_nothing_but_it():
    q, k, v, dout = example(20, "float64")
    options = {"documents": [0, 8, 15], "sink": np.array([0.5, -INF, 2.0, -1.0])}
    seen = visible(20, 20, documents=[0, 8, 15])
    result, gradients = both_passes(q, k, v, dout, ranks=2, **options)
    assert_close(result, oracle.attention(q, k, v, seen, sink=options["sink"]), "float64")
    wanted = oracle.gradients(dout, q, k, v, seen, sink=options["sink"])
    for x, want in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(x, want, rtol=0, atol=1e-12)


def address(x):
    return x.__array_interface__["data"][0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_the_host_become_tensors_on_their_memory(dtype):
    arrays, (x, *_) = HostTensors(), random_qkv(6, dtype=dtype)
    for view in (x, x[:, 1:], x[:, ::2], x.transpose(0, 2, 1, 3)[:, :, 2:5], x[:, :0]):
        tensor = arrays.taken(view, dtype)
        assert (tensor.shape, str(tensor.dtype)) == (view.shape, f"torch.{dtype}")
        assert view.size == 0 or tensor.data_ptr() == address(view)
        np.testing.assert_array_equal(tensor.double().numpy(), view.astype(np.float64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_that_tensors_do_not_have_are_copied(dtype):
    arrays, (x, *_) = HostTensors(), random_qkv(6, dtype=dtype)
    for view in (x[:, ::-1], x[..., ::-1]):
        tensor = arrays.taken(view, dtype)
        np.testing.assert_array_equal(tensor.double().numpy(), view.astype(np.float64))
    packed = np.zeros(6, np.dtype([("flag", np.int8), ("x", x.dtype)]))["x"]
    assert packed.strides[0] % packed.itemsize
    assert arrays.taken(packed, dtype).tolist() == [0] * 6


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_read_only_arrays_are_taken_without_a_word(dtype):
    x, *_ = random_qkv(6, dtype=dtype)
    x.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = HostTensors().taken(x, dtype)
    assert tensor.data_ptr() == address(x)
    want = x.astype(np.float64)
    del x
    np.testing.assert_array_equal(tensor.double().numpy(), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_come_back_as_arrays(dtype):
    arrays = HostTensors()
    tensor = torch.randn(2, 5, 3).transpose(0, 1)
    x = arrays.given(tensor, dtype)
    assert (x.dtype.name, x.shape, x.flags.c_contiguous) == (dtype, (5, 2, 3), True)
    want = tensor.to(getattr(torch, dtype)).double().numpy()
    np.testing.assert_array_equal(x.astype(np.float64), want)
    same = torch.ones(3, dtype=getattr(torch, dtype))
    assert address(arrays.given(same, dtype)) == same.data_ptr()


def test_inside_there_are_so_many_threads_and_no_gradients():
    before = torch.get_num_threads()
    with HostTensors(before + 1).running(None):
        assert torch.get_num_threads() == before + 1
        assert not torch.is_grad_enabled()
        others = []
        thread = threading.Thread(target=lambda: others.append(torch.is_grad_enabled()))
        thread.start()
        thread.join()
        assert others == [True]
    assert torch.get_num_threads() == before
    with pytest.raises(KeyError), HostTensors(before + 1).running(None):
        raise KeyError
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == (before, True)
    with HostTensors().running(None):
        assert torch.get_num_threads() == before


def test_heads_of_groups():
    x = torch.arange(12.0).view(1, 2, 2, 3)
    wide = per_query_head(x, 2)
    assert wide[0, 1, :, 0].tolist() == [6, 6, 9, 9]
    narrow = per_kv_head(wide.bfloat16(), 2)
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow, 2 * x)
    assert per_kv_head(wide.double(), 2).dtype == torch.float64
    assert per_query_head(x, 1) is x
    assert per_kv_head(x, 1) is x


class FakeGpu(CudaDevice):
    """What a `CudaTensors` asks of a device, with no GPU."""

    def __init__(self):
        self.index, self.capturing = 3, False


@pytest.fixture
def gpu(monkeypatch):
    """A GPU whose arrays are NumPy's, which have DLPack as CuPy's do; a log of the streams."""
    used = []
    monkeypatch.setattr(torch_blocks, "cupy", lambda: np)
    monkeypatch.setattr(
        torch.cuda, "ExternalStream", lambda pointer, device: (pointer, str(device))
    )
    monkeypatch.setattr(
        torch.cuda, "stream", lambda stream: used.append(stream) or contextlib.nullcontext()
    )
    return SimpleNamespace(device=FakeGpu(), streams=used)


def test_a_gpu_backend_works_on_the_engines_stream(gpu):
    backend = PlainKernel(gpu.device)
    assert isinstance(backend.arrays, CudaTensors)
    with backend.arrays.running(SimpleNamespace(ptr=1234)):
        assert gpu.streams == [(1234, "cuda:3")]
        assert not torch.is_grad_enabled()


def test_a_gpu_backend_refuses_to_be_captured(gpu):
    gpu.device.capturing = True
    arrays = CudaTensors(gpu.device)
    with pytest.raises(Unsupported, match="capture: not implemented with PyTorch"):
        arrays.running(SimpleNamespace(ptr=1)).__enter__()


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_a_gpu_go_by_dlpack_on_their_memory(gpu, dtype):
    arrays = CudaTensors(gpu.device)
    x, *_ = random_qkv(6, dtype=dtype)
    carried = x.view(np.uint16) if dtype == "bfloat16" else x
    for there, here in ((carried, x), (carried[:, 2:], x[:, 2:])):
        tensor = arrays.taken(there, dtype)
        assert (str(tensor.dtype), tensor.data_ptr()) == (f"torch.{dtype}", address(here))
        np.testing.assert_array_equal(tensor.double().numpy(), here.astype(np.float64))
    turned = arrays.taken(carried[:, ::-1], dtype)
    np.testing.assert_array_equal(turned.double().numpy(), x[:, ::-1].astype(np.float64))
    back = arrays.given(arrays.taken(carried, dtype), dtype)
    assert (back.dtype, address(back)) == (carried.dtype, address(x))
    narrow = arrays.given(torch.tensor([1.5, -2.0]), "bfloat16")
    assert narrow.dtype == np.uint16
    assert narrow.view(ml_dtypes.bfloat16).astype(float).tolist() == [1.5, -2.0]


@pytest.mark.parametrize("module", ["ringrt.backend", "ringrt.torch_blocks", "ringrt.plan.bands"])
def test_importing_brings_in_no_torch(module):
    code = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
