"""The CUDA simulator: NCCL between thread ranks. What would hang, corrupt or crash on a GPU is an
error here, in bounded time; the same program without the mistake passes."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
from cudasim_support import (
    F32,
    boom,
    fails,
    fresh,  # noqa: F401
    passes,
    run,
)

from ringrt.cudasim import SimulatorError, api as cp
from ringrt.cudasim.cuda import nccl
from ringrt.cudasim.nccl import NcclError

pytestmark = pytest.mark.timeout(60)

# Calls that do not meet


def test_an_unmatched_receive():
    def program(me):
        if me.rank == 0:
            me.recv(me.array(), 1)
            me.stream.synchronize()

    begin = time.monotonic()
    fails(
        program,
        r"rank 0 waited 0.4 s to recv 32 bytes from rank 1 \(issued at .*cudasim_support.py:\d+\): "
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

    fails(
        program,
        r"rank 0 has not ended the NCCL group with its send \(.*cudasim_support.py",
        ranks=[1],
    )


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
