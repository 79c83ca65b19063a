"""The tcp transport when a rank is late, fails, leaves or dies."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from tcp_support import LARGE, frame, on_ends

import ringrt
from ringrt import ExchangeTimeout, KernelError, PeerLost, TransportError
from ringrt.device.host import HOST
from ringrt.transport import Message
from ringrt.transports.posts import Meeting, Post
from ringrt.transports.tcp_line import Line
from ringrt.transports.tcp_loop import Connection, Loop
from ringrt.transports.tcp_wire import in_memory
from ringrt_backends.reference import ReferenceBackend
from support import data, random_qkv

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("size", [64, LARGE])
def test_a_peer_that_never_posts_is_named_with_step_and_bytes(size):
    """Also where the bytes are on their way already: a send is complete when they have arrived."""

    def two_of_three(end):
        if end.rank == 1:
            time.sleep(2.5)
        elif end.rank == 0:
            sends, recvs = [Message(1, data(0, size))], [Message(2, data(0))]
            end.exchange(sends, recvs, step=4).wait(1)
        else:
            sends, recvs = [Message(0, data(0))], [Message(1, data(0, size))]
            end.exchange(sends, recvs, step=4).wait(1)

    first, second, third = on_ends(3, two_of_three)
    assert second is None
    assert str(first) == f"rank 0 waited 1 s in ring step 4 to send {size} bytes to rank 1"
    assert str(third) == f"rank 2 waited 1 s in ring step 4 to recv {size} bytes from rank 1"
    assert type(first) is type(third) is ExchangeTimeout


def test_a_rank_that_misses_a_control_round_is_named():
    def but_two(end):
        if end.rank == 2:
            time.sleep(2)
        else:
            end.all_gather_bytes(b"", 1)

    results = on_ends(4, but_two)
    for rank in (0, 1, 3):
        text = f"rank {rank} waited 1 s for rank 2 to join a control round"
        assert isinstance(results[rank], ExchangeTimeout)
        assert str(results[rank]) == text


def waiting(end, where):
    """Wait for rank 1, in the way named."""
    if where == "receive":
        end.exchange([], [Message(1, data(0))], step=0).wait(20)
    elif where == "send":
        end.exchange([Message(1, data(0, LARGE))], [], step=0).wait(20)
    elif where == "control round":
        end.barrier(20)
    elif where == "third rank":
        end.exchange([], [Message(2 - end.rank, data(0))], step=0).wait(20)
    elif where == "poll":
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            end.poll()
            time.sleep(0.01)


@pytest.mark.parametrize("where", ["receive", "send", "control round", "third rank", "poll"])
def test_an_abort_ends_every_wait_at_once(where):
    def abort_one(end):
        if end.rank == 1:
            time.sleep(0.1)
            end.abort("out of memory")
            end.barrier(10)
        waiting(end, where)

    begin = time.monotonic()
    first, second, third = on_ends(3, abort_one)
    assert time.monotonic() - begin < 10
    for error in (first, third):
        assert isinstance(error, PeerLost)
        assert str(error) == "rank 1 failed: out of memory"
    assert type(second) is TransportError
    assert str(second) == "this ring was aborted by its rank 1: out of memory"


@pytest.mark.parametrize("where", ["receive", "send", "control round"])
def test_nobody_waits_for_a_rank_that_has_left(where):
    def leave_one(end):
        if end.rank == 1:
            time.sleep(0.1)
            end.close()
            end.barrier(10)
        waiting(end, where)

    begin = time.monotonic()
    first, second, third = on_ends(3, leave_one)
    assert time.monotonic() - begin < 10
    for rank, error in ((0, first), (2, third)):
        assert isinstance(error, PeerLost)
        assert str(error) == f"rank {rank} waits for rank 1, gone from the ring"
    assert type(second) is TransportError
    assert str(second) == "the ring of rank 1 is closed"


def test_what_a_rank_posts_for_one_that_has_left_already_is_lost():
    def late(end):
        if end.rank == 0:
            end.close()
            return []
        with pytest.raises(PeerLost):
            end.barrier(10)
        posts = [([Message(0, data(0))], []), ([], [Message(0, data(0))])]
        errors = []
        for sends, recvs in posts:
            with pytest.raises(PeerLost) as caught:
                end.exchange(sends, recvs, step=0).wait(10)
            errors.append(str(caught.value))
        return errors

    assert on_ends(2, late)[1] == ["rank 1 waits for rank 0, gone from the ring"] * 2


def test_a_rank_may_leave_once_its_messages_have_arrived():
    """And the others, who are not concerned, go on."""
    left = threading.Event()

    def leave_early(end):
        got, peer = data(0, LARGE), 3 - end.rank
        if end.rank == 0:
            end.exchange([Message(1, data(5, LARGE))], [], step=0).wait(10)
            end.close()
            left.set()
            return None
        if end.rank == 1:
            time.sleep(0.2)
            assert not left.is_set()
            end.exchange([], [Message(0, got)], step=0).wait(10)
            assert got.min() == 5
        left.wait(10)
        end.exchange([Message(peer, data(8))], [Message(peer, got[:5])], step=1).wait(10)
        return got[:5].tolist()

    assert on_ends(3, leave_early) == [None, [8] * 5, [8] * 5]


def test_a_rank_without_a_goodbye_has_failed():
    """As when a process is killed: its sockets are closed, and that is all."""

    def vanish(end):
        if end.rank == 1:
            end._loop.call(lambda: 1 / 0)
        waiting(end, "third rank" if end.rank != 1 else "poll")

    begin = time.monotonic()
    first, second, third = on_ends(3, vanish)
    assert time.monotonic() - begin < 10
    assert str(second) == (
        "this ring was aborted by its rank 1: its I/O thread: ZeroDivisionError: division by zero"
    )
    for error in (first, third):
        assert isinstance(error, PeerLost)
        assert str(error).startswith("rank 1 failed: its connection ")


def test_a_failure_is_passed_on_by_those_who_have_heard_of_it():
    """Rank 0 alone sees that rank 1 is lost."""

    def lose_one(end):
        end.barrier(10)
        if end.rank == 0:
            end._loop.call(lambda: end._fail(1, "planted"))
        waiting(end, "poll")

    first, second, third = on_ends(3, lambda end: catching(end, lose_one))
    assert str(first) == str(third) == "rank 1 failed: planted"
    assert str(second) == "rank 0 failed: it has lost rank 1: planted"
    assert type(first) is type(second) is type(third) is PeerLost


def catching(end, fn):
    """A rank whose ring raises closes it, as `with Ring(...)` does."""
    try:
        fn(end)
    finally:
        end.close()


def test_buffers_are_let_go_when_a_rank_fails():
    """What comes after that is not received into a buffer that is the caller's again, and what is
    there is not sent."""
    loop, got = Loop("ringrt-tcp-test", pytest.fail), data(0)
    (here, there), (one, other) = socket.socketpair(), socket.socketpair()
    control = Connection(loop, one, in_memory(), pytest.fail, pytest.fail)
    line = Line(loop, here, control, Meeting(), pytest.fail)
    early, late = Post("recv", 1, got), Post("recv", 1, got)
    sends = Post("send", 1, data(7, LARGE)), Post("send", 1, got)
    loop.call(lambda: line.post([early], sends[:1]))
    loop.call(line.drop)
    loop.call(lambda: line.post([late], sends[1:]))
    loop.start()
    with there, other:
        there.sendall(frame(5, 0, b"12345"))
        there.settimeout(0.2)
        with pytest.raises(TimeoutError):
            there.recv(1)
        loop.call(lambda: loop.end(lambda: True, 1))
        loop.wait(10)
    assert got.tolist() == [0] * 5
    assert not any(post.done for post in (early, late, *sends))


def test_a_failed_end_receives_nothing_any_more():
    failed = threading.Event()

    def fail_alone(end):
        got = data(0)
        if end.rank == 0:
            failed.wait(10)
            end.exchange([Message(1, data(7))], [], step=0).wait(0.3)
        ticket = end.exchange([], [Message(0, got)], step=0)
        end._loop.call(lambda: end._fail(0, "planted"))
        with pytest.raises(PeerLost):
            ticket.wait(10)
        failed.set()
        time.sleep(0.5)
        return got.tolist()

    first, second = on_ends(2, fail_alone)
    assert isinstance(first, ExchangeTimeout)
    assert second == [0] * 5


def test_the_reason_is_told_even_where_the_data_connection_ends_first():
    ready, listening, aborted = (threading.Event() for _ in range(3))

    def deaf_until_it_is_said(end):
        listening.set()
        aborted.wait(10)
        end._line_ended(1, "planted")

    def abort_one(end):
        if end.rank == 1:
            ready.set()
            listening.wait(10)
            end.abort("out of memory")
            aborted.set()
            return
        ready.wait(10)
        end._loop.call(lambda: deaf_until_it_is_said(end))
        waiting(end, "poll")

    first, _ = on_ends(2, abort_one)
    assert str(first) == "rank 1 failed: out of memory"


def test_nothing_is_left_behind_by_a_ring():
    on_ends(3, lambda end: end.barrier(10))
    assert not [t.name for t in threading.enumerate() if t.name.startswith("ringrt-tcp")]


def test_closing_and_aborting_again_is_nothing():
    def again(end):
        end.close()
        end.close()
        end.abort("late")
        with pytest.raises(TransportError, match="the ring of rank 0 is closed"):
            end.poll()

    assert on_ends(1, again) == [None]


def test_a_message_out_of_order_ends_the_ring():
    def skip_one(end):
        if end.rank == 1:
            end._loop.call(lambda: setattr(end._lines[0], "_sent", 3))
        end.exchange(
            [Message(1 - end.rank, data(0))], [Message(1 - end.rank, data(0))], step=0
        ).wait(10)

    first, second = on_ends(2, lambda end: catching(end, skip_one))
    assert str(first) == "rank 1 failed: its connection broke: message 3 came in place of 0"
    assert (
        str(second)
        == "rank 0 failed: it has lost rank 1: its connection broke: message 3 came in place of 0"
    )


def test_a_kernel_that_fails_ends_all_ranks_and_says_where():
    class Failing(ReferenceBackend):
        def accumulate(self, *args):
            raise ZeroDivisionError("planted")

    def on_rank(end):
        with ringrt.Ring.join(end, backend="reference", timeout=20) as ring:
            shards = [ring.shard(x) for x in random_qkv(24)]
            if ring.rank == 1:
                ring._caller._backends["reference", HOST] = Failing()
            ring.attention(*shards)

    first, second, third = on_ends(3, on_rank)
    assert isinstance(second, KernelError)
    for error in (first, third):
        assert isinstance(error, PeerLost)
        assert "rank 1 failed: backend reference failed on rank 1 in ring step" in str(error)
