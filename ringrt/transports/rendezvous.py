"""Where ranks meet before they are connected: who am I, how many are we, and once a few bytes from
everybody to everybody, by which they find one another.

A rendezvous is either a socket, at which rank 0 listens, or the coordination service of
multi-process JAX. `RINGRT_HOST` says at which address of this machine the other ranks reach it; by
default that is the one on the network by which the rendezvous was reached.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from ringrt.errors import ExchangeTimeout, TransportError, TransportUnavailable, name_ranks
from ringrt.transport import Launch
from ringrt.transports.tcp_wire import Deadline, Frame, Kind, admit, read_frame, send_frame

RANK, SIZE, ADDRESS = "RINGRT_RANK", "RINGRT_SIZE", "RINGRT_RENDEZVOUS"
HOST = "RINGRT_HOST"

#: How a rank begins at the rendezvous, its size after that: a stranger says something else.
_MAGIC = b"ringrt rendezvous 1\n"
_COUNT = struct.Struct("!Q")
#: How long a rank waits for rank 0 to say who is late, beyond its own deadline, in seconds.
_GRACE = 2.0
#: Connections of strangers that do not keep a rank's own waiting.
_STRANGERS = 128
#: How often a rank tries to reach rank 0, which may not be there yet, in seconds.
_TRY_EVERY = 0.1


class Rendezvous(Protocol):
    """Where the ranks of a new ring meet, once."""

    rank: int
    size: int
    #: The address of this machine at which others reach it.
    host: str

    def all_gather(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        """Every rank's payload, in rank order. Raises `ExchangeTimeout` naming the ranks that did
        not come, or `TransportError`."""


def environment_launch() -> Launch | None:
    """Whether the environment says which rank this process is. What it says wrong is told when
    the rank joins: until then it counts as the only one, and so as the one that speaks."""
    if not any(name in os.environ for name in (RANK, SIZE, ADDRESS)):
        return None
    try:
        rank, size, _ = read_environment(os.environ)
    except TransportUnavailable:
        return Launch(0, 1)
    return Launch(rank, size)


def read_environment(environment: Mapping[str, str]) -> tuple[int, int, tuple[str, int]]:
    """(rank, size, (host, port)) as the environment gives them. `TransportUnavailable` names the
    variable that is missing or wrong."""
    size = _number(environment, SIZE, 1, None)
    rank = _number(environment, RANK, 0, size - 1)
    text = environment.get(ADDRESS)
    host, _, port = (text or "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise _wrong(ADDRESS, "host:port, where rank 0 is to listen", text)
    return rank, size, (host.strip("[]"), int(port))


def _number(environment: Mapping[str, str], name: str, least: int, most: int | None) -> int:
    text = environment.get(name)
    number = int(text) if text is not None and text.isdecimal() else -1
    if number < least or (most is not None and number > most):
        beyond = "" if most is None else f" to {most}"
        raise _wrong(name, f"a whole number from {least}{beyond}", text)
    return number


def _wrong(name: str, expected: str, got: str | None) -> TransportUnavailable:
    shown = "nothing" if got is None else repr(got)
    return TransportUnavailable(f"{name}: expected {expected}, got {shown}")


def late(rank: int, timeout: float, missing: Sequence[int] | set[int]) -> str:
    """Who did not come, in words."""
    return f"rank {rank} waited {timeout:g} s for {name_ranks(missing)} to join the ring"


def listen(host: str, port: int, ranks: int) -> socket.socket:
    """A socket that listens at an address of this machine, to so many ranks and some strangers."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, address = found[0][0], found[0][4]
    return socket.create_server(address, family=family, backlog=2 * ranks + _STRANGERS)


class SocketRendezvous:
    """Rank 0 listens at (host, port). The others connect, hand in their payloads, and get back
    everybody's. Joining again at the same address is possible once all have met. A connection that
    is not a rank's is dropped; one whose rank is taken, or whose size is another, is told so."""

    def __init__(self, rank: int, size: int, address: tuple[str, int], deadline: Deadline) -> None:
        self.rank, self.size, self._address = rank, size, address
        self._refused: list[str] = []
        if rank == 0:
            try:
                self._sock = listen(os.environ.get(HOST) or address[0], address[1], size)
            except OSError as error:
                raise TransportError(f"rank 0 cannot listen at {self._where}: {error}") from error
        else:
            self._sock = self._reach(deadline)
        self.host = os.environ.get(HOST) or str(self._sock.getsockname()[0])

    def all_gather(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        """See `Rendezvous.all_gather`."""
        try:
            if self.rank == 0:
                return self._receive(payload, deadline)
            return self._hand_in(payload, deadline)
        finally:
            self._sock.close()

    @property
    def _where(self) -> str:
        return ":".join(map(str, self._address))

    def _reach(self, deadline: Deadline) -> socket.socket:
        """Connect to rank 0, as soon as it listens."""
        while True:
            try:
                return socket.create_connection(self._address, max(deadline.left, 0.01))
            except OSError as error:
                if not deadline.left:
                    raise ExchangeTimeout(
                        f"rank {self.rank} waited {deadline.timeout:g} s for rank 0 to listen at "
                        f"{self._where}: {error}"
                    ) from error
            time.sleep(_TRY_EVERY)

    def _hand_in(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        hello = _MAGIC + _COUNT.pack(self.size) + payload
        patience = Deadline(deadline.left + _GRACE)
        while True:
            try:
                send_frame(self._sock, Kind.HELLO, self.rank, hello)
                answer = read_frame(self._sock, patience)
                break
            except TimeoutError:
                raise ExchangeTimeout(
                    f"rank {self.rank} waited {deadline.timeout:g} s for all ranks to meet at "
                    f"{self._where}"
                ) from None
            except OSError:
                # It was the ring before this one that still listened there, or rank 0 died.
                self._sock.close()
                time.sleep(_TRY_EVERY)
                self._sock = self._reach(deadline)
        if answer.kind is Kind.LATE:
            raise ExchangeTimeout(bytes(answer.payload).decode())
        if answer.kind is not Kind.WELCOME:
            raise TransportError(f"{self._where} says: {bytes(answer.payload).decode()}")
        return _unpack(bytes(answer.payload))

    def _receive(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        """Rank 0's part."""
        payloads, guests = {0: payload}, dict[int, socket.socket]()

        def keep(sock: socket.socket, frame: Frame) -> bool:
            text = bytes(frame.payload)
            if not text.startswith(_MAGIC) or len(text) < len(_MAGIC) + _COUNT.size:
                return False
            (size,) = _COUNT.unpack_from(text, len(_MAGIC))
            if self._refuses(sock, frame.number, size, guests):
                return False
            guests[frame.number] = sock
            payloads[frame.number] = text[len(_MAGIC) + _COUNT.size :]
            return True

        try:
            admit(self._sock, keep, lambda: len(payloads) == self.size, deadline)
            # A rank that comes to join the next ring would find this one, and have to try again.
            self._sock.close()
            missing = set(range(self.size)) - payloads.keys()
            if missing:
                text = late(0, deadline.timeout, missing) + "".join(self._refused)
                _answer(guests, Kind.LATE, text.encode())
                raise ExchangeTimeout(text)
            table = [payloads[rank] for rank in range(self.size)]
            _answer(guests, Kind.WELCOME, _pack(table))
            return table
        finally:
            for sock in guests.values():
                sock.close()

    def _refuses(
        self, sock: socket.socket, rank: int, size: int, guests: dict[int, socket.socket]
    ) -> bool:
        """Whether a rank is not of this ring, which it is then told."""
        if size != self.size:
            reason = f"it says that there are {size} ranks, and rank 0 that there are {self.size}"
        elif rank == 0 or (rank in guests and not _closed(guests[rank])):
            reason = f"rank {rank} is taken by another process"
        elif rank < size:
            return False
        else:
            reason = f"there is no rank {rank} of {size}"
        who = ":".join(map(str, sock.getpeername()[:2]))
        self._refused.append(f"; rank {rank} at {who} was refused: {reason}")
        _answer({rank: sock}, Kind.REFUSED, f"rank {rank} is refused: {reason}".encode())
        return True


def _answer(guests: Mapping[int, socket.socket], kind: Kind, payload: bytes) -> None:
    """Tell guests; one that has died meanwhile will be missed soon enough."""
    for rank, sock in guests.items():
        try:
            sock.settimeout(_GRACE)
            send_frame(sock, kind, rank, payload)
        except OSError:
            continue


def _closed(sock: socket.socket) -> bool:
    """Whether the process at the other end, which has nothing to say, has gone."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _pack(payloads: Sequence[bytes]) -> bytes:
    return b"".join(_COUNT.pack(len(each)) + each for each in payloads)


def _unpack(data: bytes) -> list[bytes]:
    payloads, at = [], 0
    while at < len(data):
        (size,) = _COUNT.unpack_from(data, at)
        at += _COUNT.size
        payloads.append(data[at : at + size])
        at += size
    return payloads
