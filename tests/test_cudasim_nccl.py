"""The CUDA simulator: NCCL between thread ranks. What would hang, corrupt or crash on a GPU is an
error here, in bounded time; the same program without the mistake passes."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
import weakref

import numpy as np
import pytest

from ringrt import cudasim
from ringrt.cudasim import SimulatorError, StreamRace, api as cp
from ringrt.cudasim.cuda import nccl
from ringrt.cudasim.nccl import NcclError

pytestmark = pytest.mark.timeout(60)
U8, F32 = nccl.NCCL_UINT8, nccl.NCCL_FLOAT32


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setenv("RINGRT_CUDASIM_TIMEOUT", "0.4")
    cudasim.reset()
    yield
    gc.collect()
    cudasim.reset()


class Rank:
    """One rank: its communicator, on a device of its own, and a stream."""

    def __init__(self, size, key, rank):
        self.rank, self.size = rank, size
        self.comm = nccl.NcclCommunicator(size, key, rank)
        self.stream = cp.cuda.Stream(non_blocking=True)
        self.stream.use()

    @property
    def next(self):
        return (self.rank + 1) % self.size

    @property
    def previous(self):
        return (self.rank - 1) % self.size

    def send(self, x, peer, stream=None, nbytes=None):
        nbytes = x.nbytes if nbytes is None else nbytes
        self.comm.send(x.data.ptr, nbytes, U8, peer, (stream or self.stream).ptr)

    def recv(self, x, peer, stream=None, nbytes=None):
        nbytes = x.nbytes if nbytes is None else nbytes
        self.comm.recv(x.data.ptr, nbytes, U8, peer, (stream or self.stream).ptr)

    def array(self, value=None, n=8):
        x = cp.empty(n, np.float32)
        if value is not None:
            x.fill(value)
        return x

    def shift(self, x, y):
        nccl.groupStart()
        self.send(x, self.next)
        self.recv(y, self.previous)
        nccl.groupEnd()


def run(program, size=2):
    """Run a program on every rank; what each returned or raised."""
    key, results = nccl.get_unique_id(), [None] * size

    def body(rank):
        try:
            with cp.cuda.Device(rank):
                results[rank] = program(Rank(size, key, rank))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return results


def passes(program, size=2):
    results = run(program, size)
    for result in results:
        if isinstance(result, Exception):
            raise result
    cudasim.check()
    return results


def fails(program, text, size=2, ranks=None, kind=SimulatorError):
    results = run(program, size)
    for rank in range(size) if ranks is None else ranks:
        assert isinstance(results[rank], kind), results[rank]
        assert re.search(text, str(results[rank]))


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


# Calls that do not meet


def test_an_unmatched_receive():
    def program(me):
        if me.rank == 0:
            me.recv(me.array(), 1)
            me.stream.synchronize()

    begin = time.monotonic()
    fails(
        program,
        r"rank 0 waited 0.4 s to recv 32 bytes from rank 1 \(issued at .*nccl.py:\d+\): "
        r"rank 1 has issued no send",
        ranks=[0],
    )
    assert time.monotonic() - begin < 5


def test_a_query_of_an_unmatched_call_stays_false_and_abort_ends_it():
    def program(me):
        y = me.array()
        if me.rank == 0:
            me.recv(y, 1)
            event = me.stream.record()
            for _ in range(20):
                assert not event.done
                assert not me.stream.done
                time.sleep(0.03)
            me.comm.abort()
            assert event.done
            me.stream.synchronize()
            assert np.isnan(y.get(me.stream)).all()
            with pytest.raises(NcclError, match="rank 0 has aborted its communicator"):
                me.send(y, 1)
            with pytest.raises(NcclError):
                me.comm.check_async_error()
            me.comm.abort()
            me.comm.destroy()

    passes(program)


def test_a_wait_for_a_rank_that_has_aborted():
    aborted = threading.Event()

    def program(me):
        x, y = me.array(1), me.array()
        me.stream.synchronize()
        me.shift(x, y)
        event = me.stream.record()
        if me.rank == 0:
            me.comm.abort()
            event.synchronize()
            aborted.set()
            return
        assert aborted.wait(5)
        try:
            event.synchronize()
        finally:
            me.comm.abort()
            event.synchronize()

    fails(program, "rank 0 has aborted its communicator", ranks=[1])


@pytest.mark.parametrize("late", [True, False])
def test_mismatched_lengths_fail_on_both_ranks(late):
    def program(me):
        x = me.array(1)
        if me.rank == 0:
            me.send(x, 1)
        else:
            if late:
                time.sleep(0.1)
            me.recv(x, 0, nbytes=16)
        try:
            me.stream.synchronize()
        finally:
            with pytest.raises(NcclError, match="expects 16"):
                me.comm.check_async_error()

    fails(program, r"rank 0 sends 32 bytes \(.*\), rank 1 expects 16", kind=NcclError)


def test_a_deadlock_is_found_at_once(monkeypatch):
    """Each rank sends before it receives, without a group."""
    monkeypatch.setenv("RINGRT_CUDASIM_TIMEOUT", "30")
    posted = threading.Barrier(3)

    def program(me):
        x, y = me.array(1), me.array()
        me.send(x, me.next)
        me.recv(y, me.previous)
        posted.wait(5)
        me.stream.synchronize()

    begin = time.monotonic()
    fails(
        program, "ranks 0, 1, 2 wait for each other.*rank 0: NCCL send 32 bytes to rank 1", size=3
    )
    assert time.monotonic() - begin < 10


def test_without_the_group_in_the_right_order_it_is_none():
    def program(me):
        x, y = me.array(me.rank), me.array()
        for verb in "sr" if me.rank == 0 else "rs":
            if verb == "s":
                me.send(x, me.next)
            else:
                me.recv(y, me.previous)
        return y.get(me.stream)[0]

    assert passes(program) == [1, 0]


def test_a_deadlock_through_events():
    """Rank 0's send waits for its receive by an event, rank 1's the same."""
    posted = threading.Barrier(2)

    def program(me):
        comm, x, y = cp.cuda.Stream(non_blocking=True), me.array(1), me.array()
        comm.wait_event(me.stream.record())
        me.recv(y, me.previous)
        comm.wait_event(me.stream.record())
        me.send(x, me.next, comm)
        posted.wait(5)
        comm.synchronize()

    fails(program, "wait for each other")


# Groups


def test_waiting_inside_a_group():
    def program(me):
        x = me.array(1)
        nccl.groupStart()
        me.send(x, me.next)
        me.stream.synchronize()

    fails(program, r"groupEnd\(\) has not been called")


def test_a_missing_group_end_seen_from_the_other_rank():
    over = threading.Event()

    def program(me):
        x = me.array(1)
        if me.rank == 0:
            nccl.groupStart()
            me.send(x, 1)
            over.wait(10)
            return
        try:
            me.recv(x, 0)
            me.stream.synchronize()
        finally:
            over.set()

    fails(program, r"rank 0 has not ended the NCCL group with its send \(.*nccl.py", ranks=[1])


def test_a_group_end_too_many():
    with pytest.raises(NcclError, match=r"groupEnd\(\) without groupStart"):
        nccl.groupEnd()


# Wrong arguments


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda me, x: me.send(x, 2), "peer 2 of 2 ranks"),
        (lambda me, x: me.recv(x, -1), "peer -1 of 2 ranks"),
        (lambda me, x: me.send(x, me.rank), "sends 1 messages to itself and receives 0"),
        (lambda me, x: me.send(x, me.next, nbytes=33), "beyond the end"),
        (lambda me, x: me.comm.send(x.data.ptr + 4, 8, F32, 0, 0), "beyond the end"),
        (lambda me, x: me.comm.send(4096, 8, F32, 0, 0), "in no live allocation"),
        (lambda me, x: me.comm.send(x.data.ptr, 8, 77, 0, 0), "datatype 77"),
        (lambda me, x: me.comm.send(x.data.ptr, -1, F32, 0, 0), "-1 elements"),
        (lambda me, x: me.comm.send(x.data.ptr, 8, F32, 0, 12345), "no stream"),
    ],
)
def test_wrong_calls(call, text):
    def program(me):
        call(me, me.array(1))

    fails(program, text)


def test_pinned_memory_and_other_devices_are_refused():
    host = cp.cuda.alloc_pinned_memory(32)
    with cp.cuda.Device(5):
        there, stream = cp.zeros(8, np.float32), cp.cuda.Stream(non_blocking=True)

    def program(me):
        x = me.array(1)
        for address, ptr in (
            (host.ptr, me.stream.ptr),
            (there.data.ptr, me.stream.ptr),
            (x.data.ptr, stream.ptr),
        ):
            with pytest.raises(NcclError, match="the communicator is on device"):
                me.comm.send(address, 8, F32, me.next, ptr)

    passes(program)


def test_freed_memory_is_refused():
    def program(me):
        x = me.array(1)
        address = x.data.ptr
        del x
        me.comm.send(address, 8, F32, me.next, me.stream.ptr)

    fails(program, "in no live allocation")


def test_memory_freed_before_its_group_ends():
    def program(me):
        x, y = me.array(1), me.array()
        nccl.groupStart()
        me.send(x, me.next)
        me.recv(y, me.previous)
        del x
        nccl.groupEnd()

    fails(program, "send buffer .* has been freed")


def test_destroying_with_a_call_open():
    def program(me):
        if me.rank == 0:
            me.send(me.array(1), 1)
            me.comm.destroy()

    fails(program, "no counterpart: send 32 bytes to rank 1", ranks=[0], kind=NcclError)


def test_use_after_destroy():
    def program(me):
        me.comm.destroy()
        me.comm.destroy()
        me.send(me.array(1), me.next)

    fails(program, "has destroyed its communicator", kind=NcclError)


# Communicators


def join(size, ranks, devices=None):
    key, results = nccl.get_unique_id(), {}

    def body(index, rank, ndev):
        with cp.cuda.Device(index if devices is None else devices[index]):
            try:
                results[index] = nccl.NcclCommunicator(ndev, key, rank)
            except NcclError as error:
                results[index] = error

    threads = [
        threading.Thread(target=body, args=(i, rank, size if isinstance(size, int) else size[i]))
        for i, rank in enumerate(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return [str(results[i]) for i in range(len(ranks))]


def test_a_rank_that_does_not_come():
    assert "rank 1 did not come within 0.4 s" in join(2, [0])[0]


def test_a_rank_that_comes_twice():
    results = join(3, [0, 0])
    assert all("rank 0 comes twice" in text for text in results)


def test_ranks_that_disagree_on_the_size():
    assert all("ranks, others" in text for text in join([3, 2], [0, 1]))


@pytest.mark.parametrize("allowed", [True, False])
def test_two_ranks_on_one_device(allowed, monkeypatch):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1" if allowed else "0")
    results = join(3, [0, 1, 2], devices=[1, 0, 1])
    refused = ["ranks 0, 2 are on device 1" in text for text in results]
    assert refused == [not allowed] * 3


def test_wrong_ids_and_ranks():
    with pytest.raises(NcclError, match="of no communicator to come"):
        nccl.NcclCommunicator(1, os.urandom(128), 0)
    with pytest.raises(NcclError, match="rank 1 of 1"):
        nccl.NcclCommunicator(1, nccl.get_unique_id(), 1)
    with pytest.raises(SimulatorError, match="config= is not simulated"):
        nccl.NcclCommunicator(1, nccl.get_unique_id(), 0, config=object())


# Faults on one rank


def test_a_fault_on_one_rank_is_that_ranks():
    """Rank 1's stream breaks before its send: rank 0 learns why it waits in vain."""
    broken = threading.Event()

    def program(me):
        x = me.array(1)
        me.stream.synchronize()
        if me.rank == 0:
            me.recv(x, 1)
            assert broken.wait(5)
            me.stream.synchronize()
            return
        from test_cudasim_streams import boom

        boom()((1,), (32,), (x,), stream=me.stream)
        me.send(x, 0)
        broken.set()
        time.sleep(0.2)
        me.stream.synchronize()

    results = run(program)
    assert "rank 1 failed before: kernel boom" in str(results[0])
    assert "it went wrong" in str(results[1])
    assert type(results[0]) is SimulatorError
    assert type(results[1]).__name__ == "KernelFault"
