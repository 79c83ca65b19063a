"""The CUDA simulator: the order of what is queued, and memory that is freed. Each mistake that it
is there to find is made here, and the same program without the mistake passes."""

from __future__ import annotations

import gc
from itertools import pairwise

import numpy as np
import pytest
from cudasim_support import (
    fresh,  # noqa: F401
    ones,
    pinned,
    scale,
    scale_kernel,
    two_streams,
)

from ringrt import cudasim
from ringrt.cudasim import StreamRace, api as cp
from ringrt.cudasim.lanes import HOST
from support import lines_run

pytestmark = pytest.mark.timeout(60)

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
        "cudasim_support.py:",
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
    kernel = scale_kernel()
    there, back = cp.cuda.Event(), cp.cuda.Event()

    def loop(count):
        for _ in range(count):
            kernel((1,), (32,), (x, y, np.float32(1)), stream=first)
            second.wait_event(first.record(there))
            kernel((1,), (32,), (y, x, np.float32(1)), stream=second)
            first.wait_event(second.record(back))
        first.synchronize()

    loop(50)
    short, long = (lines_run(lambda n=n: loop(n)) / n for n in (100, 2000))
    assert long < 1.5 * short
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
