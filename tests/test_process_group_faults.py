"""The transport over torch.distributed, between ends in one process: deadlines, ranks that fail, die
or leave. Real processes are in tests/test_torchrun.py."""

from __future__ import annotations

import os
import time

import pytest
from process_group_support import ends, on_all

from ringrt import ExchangeTimeout, PeerLost, TransportError
from ringrt.transport import Message
from ringrt.transports.gloo_link import SMALL
from ringrt.transports.process_group import ProcessGroupTransport
from support import at_once, data

pytestmark = pytest.mark.timeout(120)
LARGE = SMALL + 1


@pytest.mark.parametrize("count", [64, LARGE])
def test_a_peer_that_never_posts_is_named_with_step_and_bytes(count):
    def two_of_three(end):
        if end.rank != 1:
            before, after = (end.rank - 1) % 3, (end.rank + 1) % 3
            sends, recvs = [Message(after, data(0, count))], [Message(before, data(0, count))]
            end.exchange(sends, recvs, step=4).wait(0.7)

    with ends(3) as group:
        first, second, third = on_all(group, two_of_three)
    assert second is None
    begin = "waited 0.7 s in ring step 4 to"
    assert str(first) == f"rank 0 {begin} send {count} bytes to rank 1"
    assert str(third) == f"rank 2 {begin} recv {count} bytes from rank 1"
    assert type(first) is type(third) is ExchangeTimeout


def test_a_rank_that_misses_a_control_round_is_named():
    def but_two(end):
        if end.rank != 2:
            end.all_gather_bytes(b"", 0.5)

    with ends(4) as group:
        results = on_all(group, but_two)
    for rank in (0, 1, 3):
        text = f"rank {rank} waited 0.5 s for rank 2 to join a control round"
        assert (type(results[rank]), str(results[rank])) == (ExchangeTimeout, text)


WAITS = {
    "message": lambda end, peer: end.exchange([], [Message(peer, data(0))], step=0).wait(20),
    "round": lambda end, peer: end.barrier(20),
}


def cut_off(end):
    """As when its process dies."""
    end._mesh.shut()


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda end: end.abort("out of memory"), "rank 1 failed: out of memory"),
        (cut_off, "rank 1 failed: its connection ended without a goodbye"),
        (ProcessGroupTransport.close, "rank {} waits for rank 1, gone from the ring"),
    ],
    ids=["abort", "death", "close"],
)
def test_waiting_ends_at_once_when_a_peer_aborts_dies_or_leaves(how, said, wait):
    def leave(end):
        if end.rank == 1:
            time.sleep(0.1)
            how(end)
        else:
            WAITS[wait](end, 1)

    begin = time.monotonic()
    with ends(3) as group:
        errors = on_all(group, leave)
    assert time.monotonic() - begin < 10
    for rank in (0, 2):
        assert type(errors[rank]) is PeerLost
        assert str(errors[rank]) == said.format(rank)


def poll_until_it_raises(end):
    while True:
        end.poll()
        time.sleep(0.01)


@pytest.mark.parametrize("how", [lambda end: end.abort("out of memory"), cut_off])
def test_a_rank_that_waits_for_another_hears_of_a_failure_too(how):
    def third(end):
        if end.rank == 0:
            end.exchange([], [Message(1, data(0))], step=0).wait(20)
        if end.rank == 1:
            poll_until_it_raises(end)
        if end.rank == 2:
            how(end)

    begin = time.monotonic()
    with ends(3) as group:
        errors = on_all(group, third)
    assert time.monotonic() - begin < 10
    assert isinstance(errors[0], PeerLost)
    assert isinstance(errors[1], PeerLost)
    for error in errors[:2]:
        assert "rank 2 failed" in str(error)
    assert errors[2] is None


def test_a_rank_that_leaves_passes_on_why():
    """Whoever waits for it hears of the failure, and not only that it has gone."""
    with ends(3) as group:
        first, second, third = group
        third._links[0].report = lambda rank, reason: None
        third.abort("out of memory")
        with pytest.raises(PeerLost, match="rank 2 failed: out of memory"):
            second.barrier(10)
        at_once([second.close])
        with pytest.raises(PeerLost, match="rank 2 failed: out of memory"):
            first.exchange([], [Message(1, data(0))], step=0).wait(10)


def test_a_rank_that_another_has_lost_is_told():
    with ends(2) as (first, second):
        second._links[0].report(0, "no answer")
        with pytest.raises(PeerLost, match="rank 1 failed: it has lost rank 0: no answer"):
            first.barrier(10)


def test_an_aborted_ring_stays_aborted_and_the_first_reason_is_kept():
    with ends(2) as (first, second):
        first.abort("out of memory")
        first.abort("something else")
        with pytest.raises(TransportError, match="aborted by its rank 0: out of memory"):
            first.barrier(5)
        for _ in range(2):
            with pytest.raises(PeerLost, match="rank 0 failed: out of memory"):
                second.barrier(5)
        second.abort("late")
        with pytest.raises(PeerLost, match="rank 0 failed: out of memory"):
            second.exchange([], [], step=0)


def test_what_was_sent_before_a_goodbye_arrives():
    """However late the other rank asks for it."""

    def early(end):
        if end.rank == 0:
            end.exchange([Message(1, data(7))], [], step=0)
            end._links[1].contribute(b"a round")
            end.close()
            return None
        time.sleep(0.3)
        got = data(0)
        end.exchange([], [Message(0, got)], step=0).wait(10)
        return got.tolist(), end.all_gather_bytes(b"", 10)

    with ends(2) as group:
        assert on_all(group, early)[1] == ([7] * 5, [b"a round", b""])


def test_a_closed_end_is_of_no_more_use():
    with ends(2) as group:
        ticket = group[0].exchange([], [Message(1, data(0))], step=0)
        assert not ticket.progress()
        on_all(group, ProcessGroupTransport.close)
        for use in (group[0].poll, lambda: group[0].barrier(1), lambda: ticket.wait(1)):
            with pytest.raises(TransportError, match="the ring of rank 0 is closed"):
                use()


def test_closing_leaves_no_thread_and_no_socket_behind():
    def held():
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    with ends(3):
        pass
    before = held()
    with ends(3) as group:
        on_all(group, lambda end: end.barrier(10))
        assert held() > before
    deadline = time.monotonic() + 10
    while held() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert held() <= before
    assert all(end._closed for end in group), "the ends themselves are still there"
