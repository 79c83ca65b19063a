"""How ranks over TCP find one another: the rendezvous, the environment, and who is kept out."""

from __future__ import annotations

import errno
import socket
import threading
import time

import pytest
from tcp_support import Meeting, frame, free_port, on_ends, on_ranks

from ringrt import ExchangeTimeout, PeerLost, RankMismatch, TransportError
from ringrt.errors import TransportUnavailable
from ringrt.registry import registry
from ringrt.transport import Launch, Message
from ringrt.transports.rendezvous import SocketRendezvous, read_environment
from ringrt.transports.tcp_wire import Deadline
from support import data

pytestmark = pytest.mark.timeout(60)

STRANGERS = []


def strangers(addresses):
    """At every rank: one that is silent, one of another protocol, one that goes again, one that
    announces more than there is, and one that speaks as rank 2 does but has not the secret."""
    http = b"GET / HTTP/1.1\r\nHost: ringrt\r\n\r\n"
    endless = frame(1, 5, b"")[:-8] + (1 << 60).to_bytes(8)
    for address in addresses:
        for word in (b"", http, None, endless, frame(1, 5, b"x" * 16)):
            sock = socket.create_connection(address)
            STRANGERS.append(sock)
            if word is None:
                sock.close()
            else:
                sock.sendall(word)


def test_strangers_do_not_confuse_the_ranks():
    def rotate(end):
        got, peer = data(0), (end.rank + 1) % 3
        sends, recvs = [Message(peer, data(end.rank))], [Message((end.rank - 1) % 3, got)]
        end.exchange(sends, recvs, step=0).wait(10)
        return int(got[0])

    assert on_ends(3, rotate, Meeting(3, spy=strangers)) == [2, 0, 1]
    all_are_outside()


def all_are_outside():
    """Every stranger's connection has been closed, without a word to it."""
    for sock in STRANGERS:
        if sock.fileno() >= 0:
            sock.settimeout(5)
            assert end_of(sock), "a stranger was let in"
            sock.close()
    STRANGERS.clear()


def end_of(sock):
    """Whether a connection was closed from the other side, which said nothing."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_listener_that_is_not_of_this_ring_is_not_taken_for_a_rank():
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer():
            for _ in range(2):
                sock, _ = other.accept()
                sock.sendall(frame(1, 0, b"x" * 16))
                STRANGERS.append(sock)

        thread = threading.Thread(target=answer)
        thread.start()
        meeting = Meeting(2, forge={0: {"address": other.getsockname()}})
        first, second = on_ends(2, lambda end: None, meeting, timeout=2)
        thread.join()
    assert isinstance(second, PeerLost)
    assert str(second) == (
        f"rank 1 lost rank 0, at 127.0.0.1:{meeting.forge[0]['address'][1]}, while joining the ring: "
        "it is not of this ring"
    )
    assert str(first) == "rank 0 waited 2 s for rank 1 to join the ring"
    STRANGERS.clear()


@pytest.mark.parametrize("how", ["dead", "silent"])
def test_a_rank_that_does_not_answer_is_named(how):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        if how == "dead":
            listener.close()
        meeting = Meeting(2, forge={0: {"address": address}})
        first, second = on_ends(2, lambda end: None, meeting, timeout=1.5)
    assert str(first) == "rank 0 waited 1.5 s for rank 1 to join the ring"
    if how == "dead":
        assert isinstance(second, PeerLost)
        text = f"rank 1 lost rank 0, at 127.0.0.1:{address[1]}, while joining the ring: "
        assert str(second).startswith(text)
    else:
        assert isinstance(second, ExchangeTimeout)
        assert str(second) == "rank 1 waited 1.5 s for rank 0 to join the ring"


def test_versions_must_agree():
    results = on_ends(3, lambda end: None, Meeting(3, forge={1: {"version": "0.0"}}))
    for error in results:
        assert isinstance(error, RankMismatch)
        assert "ranks disagree on version: " in str(error)
        assert "0.0 on rank 1" in str(error)


def test_ranks_are_counted_by_machine():
    forge = {0: {"machine": "a"}, 1: {"machine": "b"}, 2: {"machine": "a"}, 3: {"machine": "a"}}
    # What a rank says of itself is what the others see of it.
    places = on_ends(4, lambda end: (end.local_rank, end.local_size), Meeting(4, forge=forge))
    assert places == [(0, 3), (0, 1), (1, 3), (2, 3)]


def test_an_address_of_no_interface_is_refused_with_what_mends_it():
    meeting = Meeting(1)
    meeting.host = "192.0.2.1"
    (error,) = on_ends(1, lambda end: None, meeting)
    assert isinstance(error, TransportError)
    assert str(error).startswith("rank 0 cannot listen at 192.0.2.1: ")
    assert "RINGRT_HOST" in str(error)


def test_a_process_that_may_not_open_more_files_is_told(monkeypatch):
    def exhausted(listener, *others):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("ringrt.transports.tcp_join.admit", exhausted)
    (error,) = on_ends(1, lambda end: None)
    assert type(error) is TransportError
    assert str(error) == "rank 0 cannot join the ring: [Errno 24] Too many open files"


# At the socket of rank 0.


def meet(address, rank, size, payload=b"", timeout=10):
    deadline = Deadline(timeout)
    return SocketRendezvous(rank, size, address, deadline).all_gather(payload, deadline)


@pytest.fixture
def address():
    return "127.0.0.1", free_port()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_meet_at_the_same_address_again_and_again(address, size):
    def thrice(rank):
        return [meet(address, rank, size, bytes([10 * n + rank] * rank)) for n in range(3)]

    expected = [[bytes([10 * n + rank] * rank) for rank in range(size)] for n in range(3)]
    assert on_ranks(size, thrice) == [expected] * size


def test_rank_0_may_come_last(address):
    def delayed(rank):
        time.sleep(0 if rank else 0.4)
        return meet(address, rank, 2, bytes([rank]))

    assert on_ranks(2, delayed) == [[b"\0", b"\1"]] * 2


def test_who_does_not_come_is_named_to_all_who_did(address):
    def but_two(rank):
        return meet(address, rank, 5, timeout=1.5) if rank not in (2, 3) else None

    results = on_ranks(5, but_two)
    for rank in (0, 1, 4):
        assert isinstance(results[rank], ExchangeTimeout)
        assert str(results[rank]) == "rank 0 waited 1.5 s for ranks 2, 3 to join the ring"


def test_a_rendezvous_without_rank_0_is_named(address):
    with pytest.raises(ExchangeTimeout) as caught:
        meet(address, 1, 2, timeout=0.3)
    assert "rank 1 waited 0.3 s for rank 0 to listen at 127.0.0.1:" in str(caught.value)


@pytest.mark.parametrize("how", ["silent", "closes"])
def test_a_rendezvous_that_does_not_answer_is_named(address, monkeypatch, how):
    """The process that listens there is another's."""
    monkeypatch.setattr("ringrt.transports.rendezvous._GRACE", 0.1)
    with socket.create_server(address) as listener:
        if how == "closes":
            threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True).start()
        with pytest.raises(ExchangeTimeout) as caught:
            meet(address, 1, 2, timeout=0.3)
    assert "rank 1 waited 0.3 s for all ranks to meet at 127.0.0.1:" in str(caught.value)


@pytest.mark.parametrize(
    ("rank", "size", "reason"),
    [
        (1, 3, "rank 1 is taken by another process"),
        (0, 3, "rank 0 is taken by another process"),
        (7, 3, "there is no rank 7 of 3"),
        (2, 4, "it says that there are 4 ranks, and rank 0 that there are 3"),
    ],
)
def test_a_process_too_many_is_refused_and_the_others_go_on(address, rank, size, reason):
    refused = []

    def come(seat):
        if seat == 2:
            time.sleep(0.3)
            with socket.create_connection(address) as sock:
                sock.sendall(frame(1, rank, b"ringrt rendezvous 1\n" + size.to_bytes(8) + b"x"))
                refused.append(sock.makefile("rb").read())
        return meet(address, seat, 3, bytes([seat]))

    assert on_ranks(3, come) == [[b"\0", b"\1", b"\2"]] * 3
    assert refused == [frame(3, rank, f"rank {rank} is refused: {reason}".encode())]


def test_a_rank_that_is_refused_says_so_and_rank_0_too(address):
    def come(rank):
        return meet(address, rank, 2 + rank, timeout=1.5)

    first, second = on_ranks(2, come)
    reason = "it says that there are 3 ranks, and rank 0 that there are 2"
    assert str(second) == f"127.0.0.1:{address[1]} says: rank 1 is refused: {reason}"
    assert str(first).startswith(
        "rank 0 waited 1.5 s for rank 1 to join the ring; rank 1 at 127.0."
    )
    assert str(first).endswith(f" was refused: {reason}")


def test_a_rank_that_is_started_again_takes_its_place(address):
    def come(seat):
        if seat == 1:
            time.sleep(0.2)
            with socket.create_connection(address) as gone:
                gone.sendall(frame(1, 1, b"ringrt rendezvous 1\n" + (3).to_bytes(8) + b"old"))
        time.sleep((0.0, 0.0, 1.5)[seat])
        return meet(address, seat, 3, b"new")

    assert on_ranks(3, come) == [[b"new"] * 3] * 3


def test_strangers_do_not_confuse_the_rendezvous(address):
    def come(rank):
        if rank == 1:
            time.sleep(0.2)
            strangers([address])
        return meet(address, rank, 2, bytes([rank]))

    assert on_ranks(2, come) == [[b"\0", b"\1"]] * 2
    all_are_outside()


def test_an_address_in_use_is_told(address):
    with socket.create_server(address), pytest.raises(TransportError) as caught:
        meet(address, 0, 2)
    assert f"rank 0 cannot listen at 127.0.0.1:{address[1]}: " in str(caught.value)


# The environment.

GOOD = {"RINGRT_RANK": "1", "RINGRT_SIZE": "3", "RINGRT_RENDEZVOUS": "node0:29500"}


def test_the_environment_names_rank_size_and_rendezvous():
    assert read_environment(GOOD) == (1, 3, ("node0", 29500))
    assert read_environment(GOOD | {"RINGRT_RENDEZVOUS": "[fe80::1]:7"})[2] == ("fe80::1", 7)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RINGRT_RANK", None, "RINGRT_RANK: expected a whole number from 0 to 2, got nothing"),
        ("RINGRT_RANK", "3", "RINGRT_RANK: expected a whole number from 0 to 2, got '3'"),
        ("RINGRT_RANK", "-1", "RINGRT_RANK: expected a whole number from 0 to 2, got '-1'"),
        ("RINGRT_SIZE", "0", "RINGRT_SIZE: expected a whole number from 1, got '0'"),
        ("RINGRT_SIZE", "two", "RINGRT_SIZE: expected a whole number from 1, got 'two'"),
        ("RINGRT_RENDEZVOUS", None, "RINGRT_RENDEZVOUS: expected host:port, where rank 0 is to listen, got nothing"),
        ("RINGRT_RENDEZVOUS", "node0", "RINGRT_RENDEZVOUS: expected host:port, where rank 0 is to listen, got 'node0'"),
        ("RINGRT_RENDEZVOUS", "node0:0", "RINGRT_RENDEZVOUS: expected host:port, where rank 0 is to listen, got 'node0:0'"),
        ("RINGRT_RENDEZVOUS", "node0:65536", "RINGRT_RENDEZVOUS: expected host:port, where rank 0 is to listen, got 'node0:65536'"),
        ("RINGRT_RENDEZVOUS", ":29500", "RINGRT_RENDEZVOUS: expected host:port, where rank 0 is to listen, got ':29500'"),
    ],
)  # fmt: skip
def test_a_wrong_environment_is_one_line_that_is_spoken(monkeypatch, name, value, message):
    for key, good in GOOD.items():
        monkeypatch.setenv(key, good)
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    spec, launch = registry().launched()
    assert (spec.name, launch) == ("tcp", Launch(0, 1))
    with pytest.raises(TransportUnavailable) as caught:
        registry().connect("tcp")
    assert str(caught.value) == message


def test_the_environment_goes_before_that_of_mpirun(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "8")
    assert registry().launched()[0].name == "mpi"
    for key, value in GOOD.items():
        monkeypatch.setenv(key, value)
    spec, launch = registry().launched()
    assert (spec.name, launch) == ("tcp", Launch(1, 3))


def test_a_ring_by_the_environment(monkeypatch, address):
    for key, value in {
        "RINGRT_SIZE": "1",
        "RINGRT_RANK": "0",
        "RINGRT_RENDEZVOUS": ":".join(map(str, address)),
    }.items():
        monkeypatch.setenv(key, value)
    end = registry().connect("tcp")
    assert (end.rank, end.size, end.local_rank, end.local_size) == (0, 1, 0, 1)
    assert end.all_gather_bytes(b"x", 1) == [b"x"]
    end.close()


def test_ringrt_host_is_where_a_rank_listens(monkeypatch, address):
    monkeypatch.setenv("RINGRT_HOST", "127.0.0.3")
    deadline = Deadline(5)

    def come(rank):
        rendezvous = SocketRendezvous(rank, 2, ("127.0.0.3", address[1]), deadline)
        rendezvous.all_gather(b"", deadline)
        return rendezvous.host

    assert on_ranks(2, come) == ["127.0.0.3"] * 2
    monkeypatch.delenv("RINGRT_HOST")
    address = "127.0.0.1", free_port()

    def by_default(rank):
        rendezvous = SocketRendezvous(rank, 2, address, deadline)
        rendezvous.all_gather(b"", deadline)
        return rendezvous.host

    assert on_ranks(2, by_default) == ["127.0.0.1"] * 2
