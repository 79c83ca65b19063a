"""Another framework's arrays on a GPU (here the simulator's, and a stand-in for the framework):
where they lie, on whose stream, and bfloat16, which CuPy carries as words."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from cuda_support import PATH, assert_right, example, simulator  # noqa: F401

import ringrt
from ringrt.cudasim import api
from ringrt.dlpack import giver, take
from ringrt.dlpack_capsule import BFLOAT, UINT, tensor_of
from ringrt.errors import HandoffError

pytestmark = pytest.mark.timeout(120)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Tensor:
    """An array of a framework that has streams of its own, as PyTorch has: made on its current
    stream, handed over by its own rules. bfloat16 is its own business, inside are words."""

    #: The framework's current stream, by device; None is the default stream.
    streams: dict = {}  # noqa: RUF012
    #: The streams for which consumers asked.
    asked: list = []  # noqa: RUF012

    def __init__(self, array, bfloat=False):
        self.array, self.bfloat = array, bfloat

    @classmethod
    def of(cls, x, device=0):
        bfloat = x.dtype == BFLOAT16
        with api.cuda.Device(device), cls.stream(device):
            words = api.asarray(x.view(np.uint16) if bfloat else x)
            made = api.empty(words.shape, words.dtype)
            # Still under way when this returns.
            made.data.copy_from_device_async(words.data, words.nbytes, cls.stream(device))
        return cls(made, bfloat)

    @classmethod
    def stream(cls, device):
        if device not in cls.streams:
            with api.cuda.Device(device):
                cls.streams[device] = api.cuda.Stream(non_blocking=True)
        return cls.streams[device]

    def numpy(self):
        device = self.array.device.id
        with api.cuda.Device(device), self.stream(device):
            x = self.array.get()
        return x.view(BFLOAT16) if self.bfloat else x

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream=None, max_version=None, **others):
        self.asked.append(stream)
        device = self.array.device.id
        with api.cuda.Device(device), self.stream(device):
            capsule = self.array.__dlpack__(stream=stream, max_version=max_version)
        if self.bfloat:
            tensor_of(capsule).code = BFLOAT
        return capsule

    def __array_namespace__(self):
        return Tensor

    @classmethod
    def from_dlpack(cls, x):
        kind, device = x.__dlpack_device__()
        assert kind == 2
        with api.cuda.Device(device), cls.stream(device) as stream:
            capsule = x.__dlpack__(stream=stream.ptr, max_version=(1, 0))
            tensor = tensor_of(capsule)
            bfloat = tensor.code == BFLOAT
            if bfloat:
                tensor.code = UINT
            return cls(api.from_dlpack(Capsule(capsule, device)), bfloat)


class Capsule:
    """A capsule that was asked for already."""

    def __init__(self, capsule, device):
        self.capsule, self.device = capsule, device

    def __dlpack_device__(self):
        return 2, self.device

    def __dlpack__(self, **wishes):
        return self.capsule


@pytest.fixture(autouse=True)
def fresh(simulator):  # noqa: F811
    Tensor.streams, Tensor.asked = {}, []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_is_handed_over_comes_back_on_the_same_gpu(dtype):
    """Every rank's tensors were made on a stream that nothing has waited for, and its results are
    read on it."""
    arrays = example(40, dtype=dtype)

    def on_rank(ring):
        own = [Tensor.of(np.ascontiguousarray(ring.cut(x)), ring.rank) for x in arrays]
        q, k, v, dout = own
        out, lse = ring.attention(q, k, v, causal=True)
        results = out, lse, *ring.attention_backward(dout, q, k, v, out, lse, causal=True)
        assert all(isinstance(x, Tensor) for x in results)
        assert {x.array.device.id for x in results} == {ring.rank}
        return [x.numpy() for x in results]

    ranks = ringrt.run_threads(on_rank, 2, partition="contiguous", **PATH)
    whole = [
        np.concatenate(parts, axis=1 + (i == 1)) for i, parts in enumerate(zip(*ranks, strict=True))
    ]
    assert {x.dtype.name for x in whole} == {dtype, "float32"}
    assert_right(whole[:2], whole[2:], arrays, {"causal": True})


def test_a_tensor_is_taken_where_it_lies():
    x = Tensor.of(example(8)[0])
    array = take("x", x)
    assert array.data.ptr == x.array.data.ptr
    back = giver("x", x)(array)
    assert back.array.data.ptr == array.data.ptr


def test_bfloat16_is_carried_as_words():
    x = Tensor.of(example(8, dtype="bfloat16")[0])
    array = take("x", x)
    assert array.dtype == BFLOAT16
    back = giver("x", x)(array)
    assert back.bfloat
    np.testing.assert_array_equal(back.numpy(), x.numpy())


def test_the_producer_is_told_the_stream_on_which_it_will_be_used():
    x = Tensor.of(example(8)[0])
    take("x", x)
    with api.cuda.Stream(non_blocking=True) as stream:
        take("x", x)
    assert Tensor.asked == [1, stream.ptr], "the default stream is 1, never 0"


def test_memory_lives_as_long_as_whoever_was_given_it():
    x = Tensor.of(example(8)[0])
    array = take("x", x)
    kept = x.numpy()
    del x
    np.testing.assert_array_equal(array.get(), kept)


def test_whole_tensors_and_shards():
    q, k, v, dout = example(21)
    tensors = [Tensor.of(x) for x in (q, k, v, dout)]
    on_one_gpu = PATH | {"transport": "threads"}
    out, lse = ringrt.attention(*tensors[:3], ranks=2, **on_one_gpu)
    gradients = ringrt.attention_backward(tensors[3], *tensors[:3], out, lse, ranks=2, **on_one_gpu)
    results = [x.numpy() for x in (out, lse, *gradients)]
    assert_right(results[:2], results[2:], (q, k, v, dout), {})


def test_a_captured_pass_gives_what_it_was_given():
    q, k, v, _ = example(16)

    def on_rank(ring):
        tensors = [Tensor.of(x) for x in (q, k, v)]
        captured = ring.capture(*tensors)
        assert isinstance(captured.out, Tensor)
        captured.replay()
        return captured.out.numpy(), captured.lse.numpy()

    [result] = ringrt.run_threads(on_rank, 1, **PATH)
    expected = ringrt.attention(q, k, v, ranks=1, backend="reference")
    np.testing.assert_allclose(result[0], expected[0], atol=2e-6)


def test_tensors_in_two_places_are_refused_by_name():
    q, k, v, _ = example(8)
    with pytest.raises(HandoffError, match="q on GPU 0, k on GPU 1: they must lie on one device"):
        ringrt.attention(Tensor.of(q), Tensor.of(k, 1), Tensor.of(v), ranks=1)
    with pytest.raises(HandoffError, match="q on GPU 0, k on the host"):
        ringrt.attention(Tensor.of(q), k, v, ranks=1)
    text = "backend cpu: it computes on the host, and q, k and v lie on GPU 1"
    with pytest.raises(HandoffError, match=text):
        ringrt.attention(*(Tensor.of(x, 1) for x in (q, k, v)), ranks=1, backend="cpu")
