"""The tcp transport between ends in one process: what it promises."""

from __future__ import annotations

import socket
import time

import numpy as np
import pytest
from tcp_support import LARGE, frame, on_ends

import oracle
import ringrt
from ringrt import TransportError
from ringrt.transport import Message
from ringrt.transports.tcp_wire import FrameReader, Kind, in_memory
from support import PARTITIONS, assert_close, data, random_qkv

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("order", ["send first", "recv first"])
def test_a_grouped_exchange_completes_in_any_order(size, order):
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
        return int(received[0]), end.local_rank, end.local_size

    assert on_ends(size, rotate) == [((r - 1) % size, r, size) for r in range(size)]


def test_messages_between_two_ranks_match_in_order():
    def several(end):
        peer = 1 - end.rank
        got = [data(0), data(0, 9), data(0, 0)]
        sends = [Message(peer, data(1)), Message(peer, data(2, 9)), Message(peer, data(3, 0))]
        end.exchange(sends, [Message(peer, x) for x in got], step=0).wait(10)
        return [x.tolist() for x in got]

    assert on_ends(2, several) == [[[1] * 5, [2] * 9, []]] * 2


def test_large_messages_cross_without_waiting_for_one_another():
    """Both send before they receive, in both directions and to themselves, all at once."""

    def everywhere(end):
        sent = [data(10 * end.rank + peer, LARGE) for peer in range(3)]
        got = [data(255, LARGE) for _ in range(3)]
        sends = [Message(peer, sent[peer]) for peer in range(3)]
        end.exchange(sends, [Message(peer, got[peer]) for peer in range(3)], step=0).wait(30)
        return [(int(x.min()), int(x.max())) for x in got]

    results = on_ends(3, everywhere)
    assert results == [[(10 * peer + rank,) * 2 for peer in range(3)] for rank in range(3)]


def test_a_message_that_nobody_expects_yet_stops_nothing_else():
    def early_and_late(end):
        if end.rank == 0:
            ticket = end.exchange([Message(1, data(7, LARGE))], [], step=0)
            rounds = [end.all_gather_bytes(b"x" * n, 10) for n in (0, 1, LARGE)]
            assert not ticket.progress()
            end.barrier(10)
            ticket.wait(10)
            return [len(each) for each in rounds[-1]]
        rounds = [end.all_gather_bytes(b"y", 10) for _ in range(3)]
        end.barrier(10)
        got = data(0, LARGE)
        end.exchange([], [Message(0, got)], step=0).wait(10)
        assert got.min() == 7
        return [len(each) for each in rounds[-1]]

    assert on_ends(2, early_and_late) == [[LARGE, 1]] * 2


def test_sizes_that_do_not_match_are_an_error_on_both_sides_and_no_confusion():
    """What comes after the message that does not fit is received as it is."""

    def wrong(end):
        peer, got = 1 - end.rank, data(0, 8)
        size = 4 if end.rank == 0 else 5
        first = end.exchange([Message(peer, data(0, size))], [], step=6)
        second = end.exchange([Message(peer, data(9, 8))], [Message(peer, data(0, size))], step=7)
        third = end.exchange([], [Message(peer, got)], step=8)
        errors = []
        for ticket in (first, second):
            with pytest.raises(TransportError) as caught:
                ticket.wait(10)
            errors.append(str(caught.value))
        third.wait(10)
        assert got.tolist() == [9] * 8
        return errors

    text = "rank {}, ring step {}, rank {}: {} bytes sent meet {} expected"
    assert on_ends(2, wrong) == [
        [text.format(0, 6, 1, 4, 5), text.format(0, 7, 1, 5, 4)],
        [text.format(1, 6, 0, 5, 4), text.format(1, 7, 0, 4, 5)],
    ]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_gather_keeps_rank_order_over_many_rounds(size):
    def rounds(end):
        return [end.all_gather_bytes(bytes([end.rank] * (n + end.rank)), 10) for n in range(30)]

    expected = [[bytes([rank] * (n + rank)) for rank in range(size)] for n in range(30)]
    assert on_ends(size, rounds) == [expected] * size


def test_nobody_passes_a_barrier_early():
    arrived = []

    def later(end):
        time.sleep(0.05 * end.rank)
        arrived.append(end.rank)
        end.barrier(10)
        return len(arrived)

    assert on_ends(4, later) == [4] * 4


@pytest.mark.parametrize("partition", PARTITIONS)
def test_a_ring_over_it_equals_the_oracle(partition):
    options = {"causal": True, "softcap": 5.0}
    q, k, v = random_qkv(41, q_heads=4, kv_heads=2)
    dout = random_qkv(41, q_heads=4, seed=1)[0]

    def on_rank(end):
        with ringrt.Ring.join(end, partition=partition, timeout=20) as ring:
            shards = [ring.shard(x) for x in (q, k, v)]
            out, lse = ring.attention(*shards, **options)
            gradients = ring.attention_backward(ring.shard(dout), *shards, out, lse, **options)
            whole = [ring.unshard(out), ring.unshard(lse, axis=2)]
            return whole, [ring.unshard(x) for x in gradients]

    for whole, gradients in on_ends(3, on_rank):
        assert_close(whole, oracle.attention(q, k, v, **options))
        expected = oracle.gradients(dout, q, k, v, **options)
        for got, want in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


# Frames.


@pytest.fixture
def pipe():
    """A reader, and where what it reads is written."""
    here, there = socket.socketpair()
    here.setblocking(False)
    with here, there:
        yield FrameReader(here, in_memory(100)), there


def test_a_frame_may_come_in_pieces(pipe):
    reader, there = pipe
    for byte in frame(8, 1 << 40, b"abc"):
        assert read(reader) is None
        there.sendall(bytes([byte]))
    kind, number, payload = read(reader)
    assert (kind, number, bytes(payload)) == (Kind.ROUND, 1 << 40, b"abc")
    there.sendall(frame(10, 2, b"") + frame(9, 1, b"x"))
    assert [read(reader)[:2] for _ in range(2)] == [(Kind.LEFT, 2), (Kind.ABORT, 1)]


def read(reader):
    try:
        return reader.read()
    except BlockingIOError:
        return None


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (frame(99, 0, b""), "it does not speak as a rank does"),
        (frame(8, 0, bytes(101)), "a frame of 101 bytes where at most 100 are expected"),
        (b"", "it was closed"),
    ],
)
def test_what_is_no_frame_of_ours_ends_the_connection(pipe, word, message):
    reader, there = pipe
    there.sendall(word)
    there.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError) as caught:
        reader.read()
    assert str(caught.value) == message
