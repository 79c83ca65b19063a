"""The CUDA simulator: streams, events, memory, kernels' arguments, capture. Each mistake that it
is there to find is made here, and the same program without the mistake passes."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from ringrt import cudasim
from ringrt.cudasim import KernelFault, SimulatorError, StreamRace, api as cp
from ringrt.cudasim.compiler import parse_signatures
from ringrt.cudasim.lanes import HOST
from ringrt.cudasim.module import RawKernel
from ringrt.cudasim.runtime import CUDARuntimeError

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setenv("RINGRT_CUDASIM_TIMEOUT", "0.4")
    cudasim.reset()
    yield
    gc.collect()
    cudasim.reset()


class FakeKernel:
    """A kernel in Python: the body gets NumPy arrays for pointers and bytes for values."""

    def __init__(self, signature, body):
        name, parameters = next(iter(parse_signatures(f"KERNEL(32) {signature} {{").items()))
        self.name, self.parameters, self._body = name, parameters, body
        self.launches = []

    def run(self, grid, block, arguments, buffers, shared_bytes, seed=0):
        self.launches.append((grid, block, shared_bytes, seed))
        spans = iter(buffers)
        given = []
        for parameter, value in zip(self.parameters, arguments, strict=True):
            if parameter.pointer:
                span = next(spans)
                assert span.writable is (not parameter.const)
                raw = (ctypes.c_uint8 * span.nbytes).from_address(span.address)
                given.append(np.frombuffer(raw, np.float32))
            else:
                given.append(np.frombuffer(value, np.float32)[0])
        self._body(*given)


def _scale(x, y, f):
    y[:] = x * f


def scale_kernel():
    return RawKernel(FakeKernel("scale(const float* x, float* y, float f)", _scale))


def scale(x, y, factor, stream=None):
    scale_kernel()((1,), (32,), (x, y, np.float32(factor)), stream=stream)


def two_streams():
    return cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)


def ones(n=8):
    return cp.asarray(np.ones(n, np.float32))


def pinned(n=8):
    return np.frombuffer(cp.cuda.alloc_pinned_memory(4 * n), np.float32, n)


# Arrays


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


# Order and races


def test_a_missing_event_wait_is_a_race():
    first, second = two_streams()
    x, y, z = ones(), cp.empty(8, np.float32), cp.empty(8, np.float32)
    second.wait_event(cp.cuda.get_current_stream().record())
    first.wait_event(cp.cuda.get_current_stream().record())
    scale(x, y, 2, first)
    with pytest.raises(StreamRace) as caught:
        scale(y, z, 2, second)
    text = str(caught.value)
    for part in (
        "kernel scale",
        "reads x",
        "writes y",
        "bytes 0 to 32",
        "test_cudasim_streams.py:",
    ):
        assert part in text
    assert "\n" not in text


def test_with_the_event_wait_it_is_none():
    first, second = two_streams()
    x, y, z = ones(), cp.empty(8, np.float32), cp.empty(8, np.float32)
    for stream in (first, second):
        stream.wait_event(cp.cuda.get_current_stream().record())
    scale(x, y, 2, first)
    second.wait_event(first.record())
    scale(y, z, 3, second)
    np.testing.assert_array_equal(z.get(second), np.full(8, 6, np.float32))
    cudasim.check()


@pytest.mark.parametrize("waits", [True, False])
def test_a_slot_reused_too_early(waits):
    compute, copy = two_streams()
    with compute:
        slot, total = cp.zeros(8, np.float32), cp.zeros(8, np.float32)
    compute.synchronize()
    source = pinned()
    source[:] = 1
    freed = cp.cuda.Event()

    def step():
        if waits:
            copy.wait_event(freed)
        slot.set(source, copy)
        compute.wait_event(copy.record())
        scale(slot, total, 2, compute)
        freed.record(compute)

    step()
    if waits:
        step()
        np.testing.assert_array_equal(total.get(compute), np.full(8, 2, np.float32))
    else:
        with pytest.raises(StreamRace, match="copy to device .* not ordered after kernel scale"):
            step()


def test_two_readers_need_no_order_but_a_writer_after_them_does():
    first, second = two_streams()
    x = ones()
    outs = [cp.empty(8, np.float32) for _ in range(2)]
    cp.cuda.Device().synchronize()
    scale(x, outs[0], 1, first)
    scale(x, outs[1], 1, second)
    second.wait_event(first.record())
    with second:
        x.fill(0)
    with first, pytest.raises(StreamRace):
        x.fill(1)


def test_only_bytes_that_meet_are_a_race():
    first, second = two_streams()
    x = cp.zeros(16, np.float32)
    cp.cuda.Device().synchronize()
    with first:
        x[:8].fill(1)
    with second:
        x[8:].fill(2)
        with pytest.raises(StreamRace, match="bytes 28 to 32"):
            x[7:9].fill(3)


def test_views_that_run_backwards():
    first, second = two_streams()
    x = cp.zeros(8, np.float32)
    cp.cuda.Device().synchronize()
    with first:
        x[::-1][:4].fill(1)
    with second:
        x[:4].fill(2)
        with pytest.raises(StreamRace, match="meet in bytes 16 to 32"):
            x[4:].fill(3)
    np.testing.assert_array_equal(x[4:].get(first), np.ones(4))
    np.testing.assert_array_equal(x[:4].get(second), np.full(4, 2))


def test_a_write_is_not_forgotten_over_a_later_read():
    first, second = two_streams()
    with first:
        x = cp.zeros(8, np.float32)
    second.wait_event(first.record())
    outs = [pinned(), pinned()]
    x.get(second, out=outs[0], blocking=False)
    third = cp.cuda.Stream(non_blocking=True)
    with pytest.raises(StreamRace, match="copy to host .* not ordered after memset"):
        x.get(third, out=outs[1], blocking=False)
    second.synchronize()


def test_a_write_is_not_forgotten_over_one_beside_it():
    first, second = two_streams()
    with first:
        x = cp.zeros(16, np.float32)
        x[8:].fill(1)
    with second, pytest.raises(StreamRace, match="not ordered after memset"):
        x[:8].fill(1)


def test_the_host_orders_what_it_waited_for():
    first, second = two_streams()
    x = ones()
    cp.cuda.Device().synchronize()
    with first:
        x.fill(2)
    event = first.record()
    assert event.done
    with second:
        x.fill(3)
    np.testing.assert_array_equal(x.get(second), np.full(8, 3, np.float32))


def test_an_event_stands_for_what_was_before_it_only():
    first, second = two_streams()
    x = ones()
    cp.cuda.Device().synchronize()
    event = first.record()
    with first:
        x.fill(2)
    second.wait_event(event)
    with second, pytest.raises(StreamRace):
        x.fill(3)
    event.record(first)
    second.wait_event(event)
    with second:
        x.fill(3)


def test_an_operation_that_was_refused_is_nobody_elses():
    first, second, x = *two_streams(), cp.zeros(8, np.float32)
    with first, pytest.raises(StreamRace):
        x.fill(1)
    first.synchronize()
    cp.cuda.Device().synchronize()
    with first:
        x.fill(1)
    with second, pytest.raises(StreamRace):
        x.fill(2)


def test_order_is_handed_on_from_event_to_event():
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(4)]
    with streams[0]:
        x = cp.zeros(8, np.float32)
    for one, next_one in pairwise(streams):
        next_one.wait_event(one.record())
    with streams[-1]:
        x.fill(3)
    np.testing.assert_array_equal(x.get(streams[-1]), np.full(8, 3, np.float32))


def test_waiting_for_an_event_never_recorded_does_nothing():
    stream, _ = two_streams()
    event = cp.cuda.Event()
    stream.wait_event(event)
    event.synchronize()
    assert event.done
    stream.synchronize()


@pytest.mark.parametrize("non_blocking", [True, False])
def test_the_null_stream_waits_for_blocking_streams(non_blocking):
    stream = cp.cuda.Stream(non_blocking=non_blocking)
    x = cp.zeros(8, np.float32)  # on the null stream
    if non_blocking:
        with stream, pytest.raises(StreamRace):
            x.fill(1)
        return
    with stream:
        x.fill(1)
    x.fill(2)
    with stream:
        x.fill(3)
    np.testing.assert_array_equal(x.get(), np.full(8, 3, np.float32))


def test_waiting_for_a_stream_is_not_waiting_for_the_null_stream():
    blocking, free = cp.cuda.Stream(), cp.cuda.Stream(non_blocking=True)
    x = cp.zeros(8, np.float32)
    blocking.synchronize()
    with free, pytest.raises(StreamRace):
        x.fill(1)
    cp.cuda.Stream.null.synchronize()
    with free:
        x.fill(1)
    free.synchronize()


def test_long_loops_stay_linear():
    first, second = two_streams()
    with first:
        x, y = cp.zeros(8, np.float32), cp.zeros(8, np.float32)
    second.wait_event(first.record())
    kernel = RawKernel(FakeKernel("scale(const float* x, float* y, float f)", _scale))
    there, back = cp.cuda.Event(), cp.cuda.Event()

    def loop(count):
        begin = time.perf_counter()
        for _ in range(count):
            kernel((1,), (32,), (x, y, np.float32(1)), stream=first)
            second.wait_event(first.record(there))
            kernel((1,), (32,), (y, x, np.float32(1)), stream=second)
            first.wait_event(second.record(back))
        first.synchronize()
        return (time.perf_counter() - begin) / count

    loop(50)
    short, long = loop(100), loop(2000)
    assert long < 4 * short
    assert len(x.data.mem._allocation.ledger) < 4


def test_destroyed_streams_leave_the_clocks():
    before = len(HOST.clock)
    with cp.cuda.Device(7):
        for _ in range(200):
            stream = cp.cuda.Stream(non_blocking=True)
            with stream:
                x = cp.zeros(8, np.float32)
            stream.synchronize()
            del stream, x
        cudasim.check()
        assert len(HOST.clock) < before + 150


# Running late


def test_nothing_runs_before_somebody_waits():
    ran = []
    kernel = RawKernel(FakeKernel("probe(float* x)", lambda x: ran.append(len(x))))
    x, (stream, other) = ones(), two_streams()
    cp.cuda.Device().synchronize()
    kernel((1,), (32,), (x,), stream=stream)
    event = stream.record()
    kernel((1,), (32,), (x,), stream=stream)
    other.synchronize()
    assert ran == []
    assert event.done
    assert ran == [8]
    stream.synchronize()
    assert ran == [8, 8]
    assert stream.done


def test_reading_pinned_memory_before_waiting_finds_poison():
    stream, _ = two_streams()
    with stream:
        x = cp.zeros(8, np.float32)
    out = pinned()
    for _ in range(2):
        x.get(stream=stream, out=out, blocking=False)
        assert np.isnan(out).all()
        stream.synchronize()
        np.testing.assert_array_equal(out, np.zeros(8))


def test_overwriting_a_pinned_source_early_corrupts_the_copy():
    stream, _ = two_streams()
    with stream:
        x = cp.empty(8, np.float32)
    source = pinned()
    source[:] = 1
    x.set(source, stream)
    source[:] = 2
    assert x.get(stream)[0] == 2
    source[:] = 1
    x.set(source, stream)
    stream.synchronize()
    source[:] = 2
    assert x.get(stream)[0] == 1


def test_a_download_does_not_spoil_an_upload_queued_before_it():
    stream, _ = two_streams()
    buffer = pinned()
    buffer[:] = 5
    with stream:
        x = cp.empty(8, np.float32)
    x.set(buffer, stream)
    x.get(stream, out=buffer, blocking=False)
    stream.synchronize()
    np.testing.assert_array_equal(buffer, np.full(8, 5, np.float32))


def test_pinned_buffers_are_checked_for_races_too():
    first, second = two_streams()
    x, y, buffer = ones(), ones(), pinned()
    cp.cuda.Device().synchronize()
    x.get(first, out=buffer, blocking=False)
    with pytest.raises(StreamRace, match="pinned memory"):
        y.set(buffer, second)


def test_copies_by_address():
    stream, _ = two_streams()
    host, x, y = pinned(), ones(), cp.zeros(8, np.float32)
    cp.cuda.Device().synchronize()
    address = host.ctypes.data
    host[:] = np.arange(8)
    with stream:
        x.data.copy_from_host_async(address, 32)
        y.data.copy_from_device_async(x[4:].data, 16)
        y[4:].data.memset_async(0, 16)
    stream.synchronize()
    y.data.copy_to_host_async(ctypes.c_void_p(address), 32, stream)
    stream.synchronize()
    np.testing.assert_array_equal(host, [4, 5, 6, 7, 0, 0, 0, 0])
    cp.cuda.runtime.memcpyAsync(x.data.ptr, y.data.ptr, 32, 3, stream.ptr)
    cp.cuda.runtime.memcpyAsync(address, x.data.ptr, 16, 4, stream.ptr)
    stream.synchronize()
    np.testing.assert_array_equal(x.get(stream), [4, 5, 6, 7, 0, 0, 0, 0])
    with pytest.raises(CUDARuntimeError, match="not on the host"):
        cp.cuda.runtime.memcpyAsync(x.data.ptr, y.data.ptr, 32, 2, stream.ptr)
    with pytest.raises(SimulatorError, match="beyond the end"):
        y.data.memset_async(0, 33, stream)
    with pytest.raises(SimulatorError, match="in no live allocation"):
        x.data.copy_from_device_async(cp.cuda.MemoryPointer(y.data.mem, 1 << 40), 4, stream)


def test_pageable_memory_is_copied_at_the_call():
    stream, _ = two_streams()
    with stream:
        x = cp.empty(8, np.float32)
    source, out = np.ones(8, np.float32), np.empty(8, np.float32)
    before = cudasim.synchronisations()
    x.set(source, stream)
    source[:] = 2
    x.get(stream, out=out, blocking=False)
    np.testing.assert_array_equal(out, np.ones(8))
    x.data.copy_from_host_async(source.ctypes.data, 32, stream)
    x.data.copy_to_host_async(out.ctypes.data, 32, stream)
    np.testing.assert_array_equal(out, np.full(8, 2, np.float32))
    assert cudasim.synchronisations() == before + 4


def test_synchronisations_are_counted_by_thread():
    stream, _ = two_streams()
    event = stream.record()
    before = cudasim.synchronisations()
    for act in (stream.synchronize, event.synchronize, cp.cuda.Device().synchronize):
        act()
    cp.cuda.runtime.deviceSynchronize()
    assert cudasim.synchronisations() == before + 4
    assert event.done
    assert stream.done
    stream.wait_event(event)
    other = threading.Thread(target=stream.synchronize)
    other.start()
    other.join()
    assert cudasim.synchronisations() == before + 4


def test_two_threads_wait_for_one_kernel():
    begun, go = threading.Event(), threading.Event()

    def body(x):
        begun.set()
        go.wait(5)
        x[:] = 4

    kernel = RawKernel(FakeKernel("slow(float* x)", body))
    x, (stream, _) = ones(), two_streams()
    cp.cuda.Device().synchronize()
    kernel((1,), (32,), (x,), stream=stream)
    event = stream.record()
    threads = [threading.Thread(target=event.synchronize) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert begun.wait(5)
    assert not event.done
    time.sleep(0.6)  # longer than the time after which a wait for another rank is given up
    go.set()
    for thread in threads:
        thread.join(5)
    assert event.done
    np.testing.assert_array_equal(x.get(stream), np.full(8, 4, np.float32))


# Freeing


@pytest.mark.parametrize("waits", [True, False])
def test_memory_freed_before_another_stream_is_done_with_it(waits):
    first, second = two_streams()
    with first:
        x, y = cp.zeros(8, np.float32), cp.empty(8, np.float32)
    second.wait_event(first.record())
    scale(x, y, 1, second)
    if waits:
        first.wait_event(second.record())
    del x
    if waits:
        first.synchronize()
        cudasim.check()
        return
    with pytest.raises(StreamRace, match="freed too early: 32 bytes .* kernel scale"):
        first.synchronize()
    first.synchronize()
    cudasim.check()


def test_check_raises_what_was_freed_too_early():
    first, second = two_streams()
    with first:
        x = cp.zeros(8, np.float32)
    second.wait_event(first.record())
    with second:
        x.fill(1)
    del x
    with pytest.raises(StreamRace, match="freed too early"):
        cudasim.check()
    cudasim.check()


def test_freeing_after_the_host_has_waited():
    first, second = two_streams()
    with first:
        x = cp.zeros(8, np.float32)
    second.wait_event(first.record())
    with second:
        x.fill(1)
    second.synchronize()
    del x
    cudasim.check()


def test_a_temporary_lives_until_its_kernel_has_run():
    stream, _ = two_streams()
    with stream:
        y = cp.empty(8, np.float32)
        x = cp.zeros(8, np.float32)
        x.fill(3)
        scale(x, y, 2)
        del x
        gc.collect()
        for _ in range(20):
            cp.empty(8, np.float32).fill(0)
    np.testing.assert_array_equal(y.get(stream), np.full(8, 6, np.float32))
    cudasim.check()


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_memory_freed_too_early(waits):
    stream, _ = two_streams()
    with stream:
        x = cp.zeros(8, np.float32)
    out = pinned()
    x.get(stream, out=out, blocking=False)
    if waits:
        stream.synchronize()
    del out
    if waits:
        cudasim.check()
    else:
        with pytest.raises(StreamRace, match="pinned memory.* the host has not waited for copy"):
            cudasim.check()


def test_pinned_memory():
    memory = cp.cuda.alloc_pinned_memory(100)
    assert isinstance(memory, cp.cuda.PinnedMemoryPointer)
    assert memory.size() == 512
    assert memory.mem.ptr == memory.ptr
    x = np.frombuffer(memory, np.uint8, 100)
    assert x.ctypes.data == memory.ptr
    assert (x == 255).all()
    x[:] = 1
    del memory
    gc.collect()
    cudasim.check()
    assert (x == 1).all()


# Streams, events, devices


def test_current_streams_belong_to_threads():
    stream, other = two_streams()
    assert cp.cuda.get_current_stream() == cp.cuda.Stream.null
    with stream as entered:
        assert entered is stream
        assert cp.cuda.get_current_stream() is stream
        with other:
            assert cp.cuda.get_current_stream() is other
        assert cp.cuda.get_current_stream() is stream
        seen = []
        thread = threading.Thread(target=lambda: seen.append(cp.cuda.get_current_stream()))
        thread.start()
        thread.join()
        assert seen == [cp.cuda.Stream.null]
    other.use()
    assert cp.cuda.get_current_stream() is other
    cp.cuda.Stream.null.use()
    assert cp.cuda.get_current_stream().ptr == 0
    assert stream.ptr != other.ptr != 0


def test_external_streams():
    stream, _ = two_streams()
    outside = cp.cuda.ExternalStream(stream.ptr)
    assert outside == stream
    assert hash(outside) == hash(stream)
    x = ones()
    cp.cuda.Device().synchronize()
    with outside:
        x.fill(2)
    with stream:
        x.fill(3)
    outside.synchronize()
    del stream
    gc.collect()
    with pytest.raises(SimulatorError, match="no stream, or one that has been destroyed"):
        outside.synchronize()
    with pytest.raises(SimulatorError, match="no stream"):
        cp.cuda.ExternalStream(12345)


def test_a_destroyed_stream_ends_its_work():
    stream = cp.cuda.Stream()
    x = cp.zeros(8, np.float32)
    with stream:
        x.fill(2)
    del stream
    gc.collect()
    np.testing.assert_array_equal(x.get(), np.full(8, 2, np.float32))


def test_devices():
    assert cp.cuda.runtime.getDeviceCount() == 8
    with cp.cuda.Device(3) as device:
        assert device.id == cp.cuda.runtime.getDevice() == 3
        x = ones()
        assert x.device == cp.cuda.Device(3)
        assert x.data.device_id == 3
    assert cp.cuda.runtime.getDevice() == 0
    assert cp.cuda.Device(1).compute_capability == "80"
    assert cp.cuda.runtime.getDeviceProperties(1)["name"] == b"ringrt CUDA simulator"
    for act in (cp.cuda.Device(8).use, lambda: cp.cuda.runtime.setDevice(-1)):
        with pytest.raises(CUDARuntimeError, match="cudaErrorInvalidDevice"):
            act()


def test_the_number_of_devices(monkeypatch):
    monkeypatch.setenv("RINGRT_CUDASIM_DEVICES", "2")
    assert cp.cuda.runtime.getDeviceCount() == 2
    monkeypatch.setenv("RINGRT_CUDASIM_DEVICES", "none")
    with pytest.raises(SimulatorError, match="RINGRT_CUDASIM_DEVICES"):
        cp.cuda.runtime.getDeviceCount()


def test_arrays_are_used_on_their_own_device_only():
    x, out = ones(), pinned()
    with cp.cuda.Device(1):
        y = cp.empty(8, np.float32)
        for act in (
            lambda: scale(x, y, 1),
            x.get,
            lambda: x.set(out),
            lambda: x.fill(1),
            lambda: y.data.copy_from_device_async(x.data, 32),
            lambda: x.data.memset_async(0, 4),
        ):
            with pytest.raises(CUDARuntimeError, match="device 1 is current"):
                act()
        scale(y, y, 1)
    np.testing.assert_array_equal(x.get(), np.ones(8))


def test_streams_and_events_belong_to_their_device():
    stream, _ = two_streams()
    event = cp.cuda.Event()
    with cp.cuda.Device(1):
        with pytest.raises(RuntimeError, match="does not match"):
            stream.use()
        with pytest.raises(CUDARuntimeError, match="is current, the launch is on"):
            scale(cp.empty(8, np.float32), cp.empty(8, np.float32), 1, stream)
        with pytest.raises(CUDARuntimeError, match="cudaErrorInvalidResourceHandle"):
            event.record()
        there = cp.cuda.Stream(non_blocking=True)
        there.wait_event(stream.record(event))
        there.synchronize()


def test_elapsed_time_is_that_of_the_critical_path():
    first, second = two_streams()
    x, y, z = ones(), cp.empty(8, np.float32), cp.empty(8, np.float32)
    for stream in (first, second):
        stream.wait_event(cp.cuda.Stream.null.record())
    begin = first.record()
    second.wait_event(begin)
    kernel = scale_kernel()
    kernel((10,), (32,), (x, y, np.float32(1)), stream=first)
    kernel((25,), (32,), (x, z, np.float32(1)), stream=second)
    first.wait_event(second.record())
    end = first.record()
    with pytest.raises(CUDARuntimeError, match="cudaErrorNotReady"):
        cp.cuda.get_elapsed_time(begin, end)
    end.synchronize()
    assert cp.cuda.get_elapsed_time(begin, end) == pytest.approx(0.030)
    kernel((1,), (32,), (y, z, np.float32(1)), stream=first)
    later = first.record()
    later.synchronize()
    assert cp.cuda.get_elapsed_time(end, later) == pytest.approx(0.006)


def test_time_goes_on_over_a_synchronisation():
    first, second = two_streams()
    x, y = ones(), cp.empty(8, np.float32)
    cp.cuda.Device().synchronize()
    scale_kernel()((10,), (32,), (x, y, np.float32(1)), stream=first)
    begin = first.record()
    begin.synchronize()
    scale_kernel()((1,), (32,), (x, y, np.float32(1)), stream=second)
    end = second.record()
    end.synchronize()
    assert cp.cuda.get_elapsed_time(begin, end) == pytest.approx(0.006)


def test_events_without_timing():
    stream, _ = two_streams()
    event = cp.cuda.Event(disable_timing=True)
    stream.record(event)
    event.synchronize()
    for other in (event, cp.cuda.Event()):
        with pytest.raises(CUDARuntimeError, match="InvalidResourceHandle"):
            cp.cuda.get_elapsed_time(other, other)


# Kernels


def call(signature="f(const float* x, int n)", args=None, grid=(1,), block=(32,), **options):
    args = (ones(), np.int32(8)) if args is None else args
    RawKernel(FakeKernel(signature, lambda *_: None))(grid, block, args, **options)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (lambda: (ones(),), "1 arguments for 2: x, n"),
        (lambda: (ones(), 8), "n is a value of type int: pass a NumPy scalar of 4 bytes, not int"),
        (lambda: (ones(), np.int64(8)), "n is of type int, 4 bytes, got numpy.int64"),
        (lambda: (ones(), np.float32(8)), "n is of type int"),
        (lambda: (ones(), np.uint32(8)), "n is of type int"),
        (lambda: (np.ones(3, np.float32), np.int32(8)), "x is a pointer"),
        (lambda: (ones().data.ptr, np.int32(8)), "x is a pointer"),
        (lambda: (None, np.int32(8)), "x is a pointer"),
        (lambda: (cp.empty(3, np.float64), np.int32(8)), "points to float of 4 bytes, got"),
    ],
)
def test_wrong_arguments(args, text):
    with pytest.raises((SimulatorError, TypeError), match=text):
        call(args=args())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"grid": (0,)}, "grid"),
        ({"grid": (1, 65536)}, "grid"),
        ({"block": (32, 0)}, "block"),
        ({"block": (2048,)}, "block"),
        ({"block": (32, 64)}, "more than 1024 threads"),
        ({"block": (1, 1, 128)}, "block"),
        ({"shared_mem": 49153}, "max_dynamic_shared_size_bytes is 49152"),
        ({"shared_mem": -1}, "shared memory"),
    ],
)
def test_impossible_launches(options, text):
    with pytest.raises(CUDARuntimeError, match=text):
        call(**options)
    with pytest.raises(TypeError, match="tuple of 1 to 3"):
        call(grid=[1])


def test_more_shared_memory_has_to_be_asked_for():
    fake = FakeKernel("f(const float* x)", lambda x: None)
    kernel = RawKernel(fake)
    kernel.max_dynamic_shared_size_bytes = 227 * 1024
    cudasim.set_seed(5)
    kernel((2, 3), (32, 2), (ones(),), shared_mem=227 * 1024)
    cudasim.set_seed(0)
    cp.cuda.Device().synchronize()
    assert fake.launches == [((2, 3, 1), (32, 2, 1), 227 * 1024, 5)]
    assert kernel.name == "f"
    with pytest.raises(CUDARuntimeError, match="at most 232448"):
        kernel.max_dynamic_shared_size_bytes = 227 * 1024 + 1


SOURCE = """
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
struct bf16 { u16 bits; };
struct f16 { u16 bits; };
struct alignas(16) Vec16 { u32 x[4]; };
#include "cudasim.h"

KERNEL(32) scale(const float* x, float* y, int n, float f) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * f;
}
"""


def test_a_real_kernel():
    module = cp.RawModule(code=SOURCE, options=("-std=c++17",))
    kernel = module.get_function("scale")
    x, y = cp.asarray(np.arange(40, dtype=np.float32)), cp.empty(40, np.float32)
    kernel((2,), (32,), (x, y, np.int32(40), np.float32(3)))
    np.testing.assert_array_equal(y.get(), np.arange(40) * 3)
    view = y[1:39]
    kernel((2,), (32,), (x[2:], view, np.int32(38), np.float32(1)))
    np.testing.assert_array_equal(view.get(), np.arange(2, 40))
    with pytest.raises(SimulatorError, match="no kernel 'missing'"):
        module.get_function("missing")
    kernel((2,), (32,), (x, view, np.int32(40), np.float32(1)))
    with pytest.raises(KernelFault, match=r"kernel scale .*streams.py:\d+: .*out of bounds"):
        view.get()


# Faults


def boom():
    def body(x):
        raise KernelFault("it went wrong")

    return RawKernel(FakeKernel("boom(float* x)", body))


def test_a_fault_sticks_to_the_thread_and_device():
    x, (stream, other) = ones(), two_streams()
    cp.cuda.Device().synchronize()
    boom()((1,), (32,), (x,), stream=stream)
    event = stream.record()
    for act in (
        stream.synchronize,
        lambda: event.done,
        other.synchronize,
        lambda: other.done,
        lambda: scale(x, x, 1, other),
        x.get,
        cp.cuda.Device().synchronize,
    ):
        with pytest.raises(KernelFault, match="kernel boom on stream .*: it went wrong"):
            act()
    with cp.cuda.Device(1):
        assert ones().get()[0] == 1
    cudasim.reset()
    assert x.get()[0] == 1


def test_a_fault_found_by_a_query():
    x, (stream, _) = ones(), two_streams()
    cp.cuda.Device().synchronize()
    boom()((1,), (32,), (x,), stream=stream)
    with pytest.raises(KernelFault, match="it went wrong"):
        _ = stream.done


def test_other_errors_of_a_kernel_are_faults_too():
    def body(x):
        raise ZeroDivisionError("oh")

    x = ones()
    RawKernel(FakeKernel("odd(float* x)", body))((1,), (32,), (x,))
    with pytest.raises(SimulatorError, match="kernel odd .*ZeroDivisionError: oh"):
        x.get()


def test_another_threads_fault_is_not_mine():
    x, (stream, other) = ones(), two_streams()
    cp.cuda.Device().synchronize()
    thread = threading.Thread(target=lambda: boom()((1,), (32,), (x,), stream=stream))
    thread.start()
    thread.join()
    other.synchronize()
    cp.cuda.Device().synchronize()
    other.synchronize()
    with pytest.raises(KernelFault):
        stream.synchronize()


def test_another_threads_fault_is_not_the_null_streams():
    x, y, stream = ones(), ones(), cp.cuda.Stream()
    cp.cuda.Device().synchronize()
    thread = threading.Thread(target=lambda: boom()((1,), (32,), (x,), stream=stream))
    thread.start()
    thread.join()
    for value in (2, 3):
        y.fill(value)
        assert y.get()[0] == value


# Capture


def captured():
    """A graph of y = 2 x, z = 3 y with z computed on a forked stream."""
    stream, fork = two_streams()
    with stream:
        x, y, z = (cp.zeros(8, np.float32) for _ in range(3))
    fork.wait_event(stream.record())
    stream.begin_capture()
    assert stream.is_capturing()
    scale(x, y, 2, stream)
    fork.wait_event(stream.record())
    assert fork.is_capturing()
    scale(y, z, 3, fork)
    stream.wait_event(fork.record())
    graph = stream.end_capture()
    assert not stream.is_capturing()
    assert not fork.is_capturing()
    return stream, graph, x, y, z


def test_a_graph_runs_at_every_launch():
    stream, graph, x, _y, z = captured()
    assert not z.get(stream).any()
    for value in (1, 5):
        with stream:
            x.fill(value)
        graph.upload(stream)
        graph.launch(stream)
        np.testing.assert_array_equal(z.get(stream), np.full(8, 6 * value, np.float32))
    with stream:
        graph.launch()
        graph.launch()
    stream.synchronize()


def test_a_launch_is_checked_for_races():
    stream, graph, _x, _y, z = captured()
    other = cp.cuda.Stream(non_blocking=True)
    stream.synchronize()
    with other:
        z.fill(0)
    with pytest.raises(StreamRace, match="kernel scale .* not ordered after fill"):
        graph.launch(stream)
    cudasim.reset()
    stream.wait_event(other.record())
    graph.launch(stream)
    with other, pytest.raises(StreamRace):
        z.fill(0)
    other.wait_event(stream.record())
    with other:
        z.fill(0)


def test_launches_of_one_graph_do_not_overlap():
    stream, graph, *arrays = captured()
    other = cp.cuda.Stream(non_blocking=True)
    other.wait_event(stream.record())
    graph.launch(stream)
    graph.launch(other)
    other.synchronize()
    for array in arrays:
        assert not array.get(other).any()


def test_a_captured_array_must_not_be_freed():
    stream, graph, _x, y, _z = captured()
    stream.synchronize()
    del y
    with pytest.raises(SimulatorError, match="has been freed since the capture"):
        graph.launch(stream)


def test_races_inside_a_capture():
    stream, fork = two_streams()
    with stream:
        x, y = cp.zeros(8, np.float32), cp.zeros(8, np.float32)
    stream.begin_capture()
    event = stream.record()
    scale(x, y, 2, stream)
    fork.wait_event(event)
    with pytest.raises(StreamRace, match="kernel scale"):
        scale(y, x, 2, fork)
    stream.wait_event(fork.record())
    stream.end_capture()


def test_what_a_capture_does_not_allow():
    stream, other = two_streams()
    outside = other.record()
    with stream:
        x = cp.zeros(8, np.float32)
    event = stream.record()
    stream.begin_capture(2)
    event.record(stream)
    for act, text in (
        (stream.synchronize, "StreamCaptureUnsupported"),
        (lambda: stream.done, "StreamCaptureUnsupported"),
        (cp.cuda.Device().synchronize, "StreamCaptureUnsupported"),
        (event.synchronize, "CapturedEvent"),
        (lambda: event.done, "CapturedEvent"),
        (lambda: stream.wait_event(outside), "StreamCaptureIsolation"),
        (lambda: x.set(np.zeros(8, np.float32), stream), "not pinned"),
        (lambda: x.get(stream), "not pinned"),
        (lambda: cp.empty(3), "allocation during capture"),
        (stream.begin_capture, "IllegalState"),
        (other.end_capture, "IllegalState"),
    ):
        with pytest.raises(CUDARuntimeError, match=text):
            act()
    stream.end_capture()
    for act in (event.synchronize, lambda: other.wait_event(event)):
        with pytest.raises(CUDARuntimeError, match="CapturedEvent"):
            act()
    with pytest.raises(RuntimeError, match="default \\(legacy\\) stream"):
        cp.cuda.Stream.null.begin_capture()
    stream.synchronize()


def test_forked_streams_must_be_joined():
    stream, fork = two_streams()
    with stream:
        x = cp.zeros(8, np.float32)
    stream.begin_capture()
    fork.wait_event(stream.record())
    with fork:
        x.fill(1)
    with pytest.raises(CUDARuntimeError, match="the capture began on"):
        fork.end_capture()
    with pytest.raises(CUDARuntimeError, match="StreamCaptureUnjoined"):
        stream.end_capture()
    assert not fork.is_capturing()


def test_the_null_stream_and_the_capture_of_a_blocking_stream():
    stream = cp.cuda.Stream()
    x = ones()
    stream.begin_capture()
    with pytest.raises(CUDARuntimeError, match="StreamCaptureImplicit"):
        x.fill(1)
    stream.end_capture()
    x.fill(1)


def test_a_captured_download_is_poisoned_at_each_launch():
    stream, _ = two_streams()
    with stream:
        x = cp.zeros(8, np.float32)
    out = pinned()
    out[:] = 1
    stream.begin_capture()
    x.get(stream, out=out, blocking=False)
    graph = stream.end_capture()
    assert (out == 1).all()
    for _ in range(2):
        graph.launch(stream)
        assert np.isnan(out).all()
        stream.synchronize()
        assert not out.any()
