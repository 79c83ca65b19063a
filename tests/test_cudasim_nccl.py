"""The CUDA simulator: NCCL between thread ranks, in right programs and in ones with races."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import numpy as np
import pytest
from cudasim_support import (
    F32,
    U8,
    fails,
    fresh,  # noqa: F401
    passes,
)

from ringrt import cudasim
from ringrt.cudasim import StreamRace, api as cp
from ringrt.cudasim.cuda import nccl

pytestmark = pytest.mark.timeout(60)

# Right programs


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_ring(size):
    def program(me):
        slots = [me.array(me.rank), me.array()]
        seen = []
        for step in range(size):
            seen.append(slots[step % 2].get(me.stream)[0])
            if step < size - 1:
                me.shift(slots[step % 2], slots[(step + 1) % 2])
        me.comm.destroy()
        return seen

    for rank, seen in enumerate(passes(program, size)):
        assert seen == [(rank - step) % size for step in range(size)]


def test_a_ring_without_a_synchronisation_in_its_loop():
    def program(me):
        comm, total, slots = cp.cuda.Stream(non_blocking=True), me.array(0), [me.array(1)]
        slots.append(me.array())
        computed, arrived = me.stream.record(), cp.cuda.Event()
        before = cudasim.synchronisations()
        for step in range(6):
            a, b = slots[step % 2], slots[(step + 1) % 2]
            comm.wait_event(computed)
            nccl.groupStart()
            me.send(a, me.next, comm)
            me.recv(b, me.previous, comm)
            nccl.groupEnd()
            comm.record(arrived)
            total.data.copy_from_device_async(a.data, a.nbytes, me.stream)
            me.stream.wait_event(arrived)
            me.stream.record(computed)
        assert cudasim.synchronisations() == before
        return total.get(me.stream)[0]

    assert passes(program, 3) == [1, 1, 1]


def test_sends_and_receives_match_in_order():
    def program(me):
        x, y = me.array(), me.array()
        if me.rank == 0:
            x.fill(1)
            y.fill(2)
            me.send(x, 1)
            me.send(y, 1)
        else:
            nccl.groupStart()
            me.recv(x, 0)
            me.recv(y, 0)
            nccl.groupEnd()
        me.stream.synchronize()
        return x.get()[0], y.get()[0]

    assert passes(program) == [(1, 2), (1, 2)]


def test_one_thread_may_run_its_partners_work():
    """Rank 1 queues and leaves; rank 0 alone waits."""
    left = threading.Event()

    def program(me):
        x = me.array(me.rank)
        y = me.array()
        me.shift(x, y)
        if me.rank == 1:
            left.set()
            return x, y
        assert left.wait(5)
        return y.get(me.stream)[0]

    assert passes(program)[0] == 1


def test_a_query_moves_things_along():
    def program(me):
        x, y = me.array(me.rank), me.array()
        me.shift(x, y)
        event, end = me.stream.record(), time.monotonic() + 5
        while not event.done:
            assert time.monotonic() < end
            time.sleep(0.001)
        return y.get(me.stream)[0]

    assert passes(program) == [1, 0]


def test_received_memory_is_given_back_at_once():
    def program(me):
        gc.disable()
        try:
            x, held = me.array(1), []
            for _ in range(5):
                y = me.array()
                held.append(weakref.ref(y.data.mem._allocation.raw))
                me.shift(x, y)
                x = y
            me.stream.synchronize()
            me.stream.record()
            del y
            cudasim.check()
            return sum(each() is not None for each in held)
        finally:
            gc.enable()

    assert max(passes(program)) <= 1


def test_groups_nest():
    def program(me):
        x, y = me.array(me.rank), me.array()
        nccl.groupStart()
        me.send(x, me.next)
        nccl.groupStart()
        me.recv(y, me.previous)
        nccl.groupEnd()
        nccl.groupEnd()
        return y.get(me.stream)[0]

    assert passes(program) == [1, 0]


def test_a_message_to_oneself():
    def program(me):
        x, y = me.array(me.rank), me.array()
        nccl.groupStart()
        me.send(x, me.rank)
        me.recv(y, me.rank)
        nccl.groupEnd()
        return y.get(me.stream)[0]

    assert passes(program) == [0, 1]


def test_counts_are_of_elements():
    def program(me):
        x, y = me.array(me.rank), me.array()
        nccl.groupStart()
        me.comm.send(x.data.ptr, 4, F32, me.next, me.stream.ptr)
        me.comm.recv(y.data.ptr, 16, U8, me.previous, me.stream.ptr)
        nccl.groupEnd()
        return np.isnan(y.get(me.stream)).tolist()

    assert passes(program)[0] == [False] * 4 + [True] * 4


def test_messages_of_no_bytes():
    def program(me):
        x = cp.empty(0, np.float32)
        me.shift(x, x)
        me.stream.synchronize()

    passes(program)


def test_receive_buffers_are_undefined_until_all_is_there():
    looked = threading.Event()

    def program(me):
        x = me.array(3)
        if me.rank == 1:
            assert looked.wait(5)
            me.send(x, 0)
            return x
        me.recv(x, 1)
        event = me.stream.record()
        assert not event.done
        assert (x.data.mem._allocation.raw == 255).all()
        looked.set()
        return x.get(me.stream)[0]

    assert passes(program)[0] == 3


def test_time_of_an_exchange():
    def program(me):
        x, y = me.array(1, 250_000), me.array(n=250_000)
        me.stream.synchronize()
        begin = me.stream.record()
        me.shift(x, y)
        end = me.stream.record()
        end.synchronize()
        return cp.cuda.get_elapsed_time(begin, end)

    assert passes(program) == [pytest.approx(0.015)] * 2


def test_an_exchange_begins_with_the_later_of_both_sides():
    def program(me):
        x, y = me.array(1), me.array()
        me.stream.synchronize()
        begin = me.stream.record()
        if me.rank == 0:
            for _ in range(10):
                x.fill(1)
        me.shift(x, y)
        end = me.stream.record()
        end.synchronize()
        return cp.cuda.get_elapsed_time(begin, end)

    times = passes(program)
    assert times == [pytest.approx(0.055, rel=1e-3)] * 2


def test_group_calls_on_two_streams_are_two_operations():
    def program(me):
        other = cp.cuda.Stream(non_blocking=True)
        x, y = me.array(me.rank), me.array()
        other.wait_event(me.stream.record())
        nccl.groupStart()
        me.send(x, me.next)
        me.recv(y, me.previous, other)
        nccl.groupEnd()
        return y.get(other)[0]

    assert passes(program) == [1, 0]


def test_what_a_communicator_says():
    def program(me):
        me.comm.check_async_error()
        return me.comm.rank_id(), me.comm.size(), me.comm.device_id()

    assert passes(program) == [(0, 2, 0), (1, 2, 1)]


def test_a_captured_exchange():
    def program(me):
        x, y = me.array(me.rank), me.array()
        me.stream.synchronize()
        me.stream.begin_capture()
        me.shift(x, y)
        graph = me.stream.end_capture()
        seen = []
        for value in (1, 2):
            x.fill(10 * value + me.rank)
            graph.launch()
            seen.append(y.get(me.stream)[0])
        return seen

    assert passes(program) == [[11, 21], [10, 20]]


# Races


@pytest.mark.parametrize("right", [True, False])
def test_sending_what_another_stream_still_writes(right):
    def program(me):
        compute = cp.cuda.Stream(non_blocking=True)
        x, y = me.array(0), me.array()
        compute.wait_event(me.stream.record())
        with compute:
            x.fill(me.rank)
        if right:
            me.stream.wait_event(compute.record())
        me.shift(x, y)
        return y.get(me.stream)[0]

    if right:
        assert passes(program) == [1, 0]
    else:
        fails(program, "NCCL group .*reads send buffer .*not ordered after fill", kind=StreamRace)


@pytest.mark.parametrize("right", [True, False])
def test_reading_what_is_being_received(right):
    def program(me):
        compute = cp.cuda.Stream(non_blocking=True)
        x, y, z = me.array(me.rank), me.array(), me.array()
        compute.wait_event(me.stream.record())
        me.shift(x, y)
        if right:
            compute.wait_event(me.stream.record())
        z.data.copy_from_device_async(y.data, y.nbytes, compute)
        return z.get(compute)[0]

    if right:
        assert passes(program) == [1, 0]
    else:
        fails(program, "copy on device .*not ordered after NCCL group", kind=StreamRace)


def test_receiving_into_what_is_being_sent():
    def program(me):
        x = me.array(me.rank)
        me.shift(x, x)

    fails(program, "writes recv buffer .*not ordered after .*reads send buffer", kind=StreamRace)


def test_freeing_what_is_being_sent():
    def program(me):
        comm = cp.cuda.Stream(non_blocking=True)
        x, y = me.array(me.rank), me.array()
        comm.wait_event(me.stream.record())
        nccl.groupStart()
        me.send(x, me.next, comm)
        me.recv(y, me.previous, comm)
        nccl.groupEnd()
        del x
        me.stream.synchronize()

    fails(program, "freed too early: 32 bytes.*NCCL group", kind=StreamRace)
    passes(lambda me: me.stream.synchronize())
