"""The CUDA simulator: streams, events, copies, devices; nothing runs before it must."""

from __future__ import annotations

import ctypes
import gc
import threading
import time

import numpy as np
import pytest
from cudasim_support import (
    FakeKernel,
    fresh,  # noqa: F401
    ones,
    pinned,
    scale,
    scale_kernel,
    two_streams,
)

from ringrt import cudasim
from ringrt.cudasim import SimulatorError, StreamRace, api as cp
from ringrt.cudasim.module import RawKernel
from ringrt.cudasim.runtime import CUDARuntimeError

pytestmark = pytest.mark.timeout(60)

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
    assert cp.cuda.Device(1).compute_capability == "90"
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
