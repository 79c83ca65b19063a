"""The threads transport, and what a ring of threads does when a rank fails or is silent."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import pytest

import ringrt
from ringrt import ExchangeTimeout, KernelError, PeerLost, TransportError
from ringrt.device.host import HOST
from ringrt.transport import Message
from ringrt.transports.threads import thread_group
from ringrt_backends.reference import ReferenceBackend
from support import at_once, data, random_qkv

pytestmark = pytest.mark.timeout(60)


def on_threads(group, fn):
    """fn(end) on each end; what each returned or raised."""
    return at_once([partial(fn, end) for end in group])


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("order", ["send first", "recv first"])
def test_a_grouped_exchange_completes_in_any_order(size, order):
    """Every rank sends before it receives; nothing waits for anything but the ticket."""

    def rotate(end):
        received = data(255)
        after, before = (end.rank + 1) % size, (end.rank - 1) % size
        sends, recvs = [Message(after, data(end.rank))], [Message(before, received)]
        if order == "send first":
            tickets = [end.exchange(sends, [], step=0), end.exchange([], recvs, step=0)]
        else:
            tickets = [end.exchange([], recvs, step=0), end.exchange(sends, [], step=0)]
        for ticket in tickets:
            ticket.wait(10)
            assert ticket.progress()
        return int(received[0])

    assert on_threads(thread_group(size), rotate) == [(r - 1) % size for r in range(size)]


def test_messages_between_two_ranks_match_in_order():
    def several(end):
        peer = 1 - end.rank
        got = [data(0), data(0, 9), data(0, 0)]
        sends = [Message(peer, data(1)), Message(peer, data(2, 9)), Message(peer, data(3, 0))]
        end.exchange(sends, [Message(peer, x) for x in got], step=0).wait(10)
        return [x.tolist() for x in got]

    assert on_threads(thread_group(2), several) == [[[1] * 5, [2] * 9, []]] * 2


@pytest.mark.parametrize("together", ["sends", "receives", "neither"])
def test_messages_match_however_they_are_grouped(together):
    """Of two ranks that post at the same time, one or both message by message; the third posts
    nothing of the sort, and is not mixed up with them."""

    def several(end):
        peer, other = (1, 2) if end.rank == 0 else (0, 2)
        if end.rank == 2:
            got = [data(0), data(0)]
            end.exchange([], [Message(1, got[1]), Message(0, got[0])], step=0).wait(10)
            return [int(x[0]) for x in got]
        got = [data(0, n) for n in range(4)]
        sends = [Message(peer, data(10 * end.rank + n, n)) for n in range(4)]
        sends.insert(2, Message(other, data(100 + end.rank)))
        recvs = [Message(peer, x) for x in got]
        parts = [(sends, [])] if together == "sends" else [([each], []) for each in sends]
        parts += [([], recvs)] if together == "receives" else [([], [each]) for each in recvs]
        for ticket in [end.exchange(*part, step=0) for part in parts]:
            ticket.wait(10)
        return [x.tolist() for x in got]

    first, second, third = on_threads(thread_group(3), several)
    assert first == [[10 + n] * n for n in range(4)]
    assert second == [[n] * n for n in range(4)]
    assert third == [100, 101]


def test_sizes_that_do_not_match_are_an_error_on_both_sides():
    def wrong(end):
        peer = 1 - end.rank
        size = 4 if end.rank == 0 else 5
        sends, recvs = [Message(peer, data(0, size))], [Message(peer, data(0, size))]
        end.exchange(sends, recvs, step=7).wait(10)

    for error in on_threads(thread_group(2), wrong):
        assert isinstance(error, TransportError)
        assert "ring step 7" in str(error)
        assert "bytes sent meet" in str(error)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_gather_keeps_rank_order_over_many_rounds(size):
    def rounds(end):
        return [end.all_gather_bytes(bytes([end.rank] * n), 10) for n in range(30)]

    expected = [[bytes([rank] * n) for rank in range(size)] for n in range(30)]
    assert on_threads(thread_group(size), rounds) == [expected] * size


def test_nobody_passes_a_barrier_early():
    arrived = []

    def late(end):
        time.sleep(0.05 * end.rank)
        arrived.append(end.rank)
        end.barrier(10)
        return len(arrived)

    assert on_threads(thread_group(4), late) == [4] * 4


def test_a_peer_that_never_posts_is_named_with_step_and_bytes():
    def two_of_three(end):
        if end.rank == 1:
            time.sleep(3)
            return None
        before, after = (end.rank - 1) % 3, (end.rank + 1) % 3
        sends, recvs = [Message(after, data(0, 64))], [Message(before, data(0, 64))]
        end.exchange(sends, recvs, step=4).wait(1)
        return None

    first, second, third = on_threads(thread_group(3), two_of_three)
    assert second is None
    assert str(first) == "rank 0 waited 1 s in ring step 4 to send 64 bytes to rank 1"
    assert str(third) == "rank 2 waited 1 s in ring step 4 to recv 64 bytes from rank 1"
    assert type(first) is type(third) is ExchangeTimeout


def test_a_rank_that_misses_a_control_round_is_named():
    def but_two(end):
        if end.rank != 2:
            end.all_gather_bytes(b"", 1)

    results = on_threads(thread_group(4), but_two)
    for rank in (0, 1, 3):
        assert isinstance(results[rank], ExchangeTimeout)
        assert "rank 2" in str(results[rank])


@pytest.mark.parametrize("how", ["abort", "close"])
def test_waiting_ends_at_once_when_a_peer_aborts_or_leaves(how):
    def leave(end):
        if end.rank == 1:
            end.abort("out of memory") if how == "abort" else end.close()
            return None
        end.exchange([], [Message(1, data(0))], step=0).wait(20)
        return None

    begin = time.monotonic()
    error = on_threads(thread_group(2), leave)[0]
    assert time.monotonic() - begin < 10
    assert isinstance(error, PeerLost)
    assert ("rank 1 failed: out of memory" if how == "abort" else "gone from the ring") in str(
        error
    )


class Failing(ReferenceBackend):
    """Fails, sleeps or leaves at a given accumulate call of one rank."""

    def __init__(self, action, at):
        self._action, self._at, self._calls = action, at, 0

    def accumulate(self, state, k, v, tiles, stream=None):
        self._calls += 1
        if self._calls == self._at:
            self._action()
        super().accumulate(state, k, v, tiles, stream)


def with_failing_rank(action, at=2, ranks=3, timeout=10, faulty=1):
    """Attention in which one rank's backend does `action` in its at-th step."""
    q, k, v = random_qkv(24)

    def on_rank(ring):
        shards = [ring.shard(x) for x in (q, k, v)]
        if ring.rank == faulty:
            ring._caller._backends["reference", HOST] = Failing(action, at)
        return ring.attention(*shards)

    ringrt.run_threads(on_rank, ranks, backend="reference", timeout=timeout)


def test_a_kernel_that_fails_ends_all_ranks_and_says_where():
    def fail():
        raise ZeroDivisionError("planted")

    begin = time.monotonic()
    with pytest.raises(KernelError) as caught:
        with_failing_rank(fail)
    assert time.monotonic() - begin < 9
    assert "backend reference failed on rank 1 in ring step 1: ZeroDivisionError: planted" in str(
        caught.value
    )
    assert caught.value.__notes__ == ["on rank 1"]
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(("at", "ranks"), [(1, 3), (1, 5), (2, 5), (3, 5)])
def test_a_rank_that_falls_silent_is_named_within_the_deadline(at, ranks):
    """With more ranks, the deadline may pass first for one whose neighbour waits itself."""
    begin = time.monotonic()
    named = "1" if ranks == 3 else "[0-4]"
    with pytest.raises(ExchangeTimeout, match=rf"ring step \d to .* (from|to) rank {named}\b"):
        with_failing_rank(lambda: time.sleep(8), at=at, ranks=ranks, timeout=1.5)
    assert time.monotonic() - begin < 8


def test_an_interrupt_in_a_rank_reaches_the_caller():
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with_failing_rank(interrupt)


def test_run_threads_raises_the_first_failure_with_its_rank():
    def on_rank(ring):
        if ring.rank == 2:
            time.sleep(0.1)
            raise LookupError("planted")
        ring.attention(*(ring.shard(x) for x in random_qkv(12)))

    with pytest.raises(LookupError, match="planted") as caught:
        ringrt.run_threads(on_rank, 3, timeout=10)
    assert caught.value.__notes__ == ["on rank 2"]


def test_a_rank_that_returns_early_is_not_waited_for():
    begin = time.monotonic()
    with pytest.raises(PeerLost, match="rank 0 waits for rank 1, gone from the ring"):
        ringrt.run_threads(
            lambda ring: None if ring.rank == 1 else ring.shard(np.zeros((1, 4, 1, 1))),
            2,
            timeout=20,
        )
    assert time.monotonic() - begin < 10


def test_a_ring_is_closed_to_use_after_a_failure():
    q, k, v = random_qkv(12)
    seen = {}

    def on_rank(ring):
        shards = [ring.shard(x) for x in (q, k, v)]
        if ring.rank == 0:
            ring._caller._backends["reference", HOST] = Failing(lambda: 1 / 0, 1)
        for call in range(2):
            try:
                ring.attention(*shards)
            except ringrt.RingrtError as error:
                seen[ring.rank, call] = error

    ringrt.run_threads(on_rank, 4, backend="reference", timeout=5)
    assert isinstance(seen[0, 0], KernelError)
    assert "aborted by its rank 0" in str(seen[0, 1])
    for rank in (1, 2, 3):
        for call in range(2):
            assert isinstance(seen[rank, call], PeerLost)
            assert "rank 0 failed" in str(seen[rank, call])
