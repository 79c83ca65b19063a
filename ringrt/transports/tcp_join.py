"""How the ranks of a ring over TCP become connected: two connections for every pair.

Every rank listens, and hands its address in at the rendezvous. Then each connects to the ranks
below it and is connected to by those above, and no longer listens. A connection is one of this
ring if it brings the secret that rank 0 gave out at the rendezvous; any other is dropped.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
from collections.abc import Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from ringrt.errors import ExchangeTimeout, PeerLost, RankMismatch, TransportError
from ringrt.transports.rendezvous import HOST, Rendezvous, late, listen
from ringrt.transports.tcp_wire import Deadline, Frame, Kind, admit, read_frame, send_frame
from ringrt.version import __version__

#: Half of the secret is said by the rank that connects, the other half by the one that answers.
_HALF = 16


class Plane(IntEnum):
    """What a connection is for. A message of the data plane that nobody has asked for yet stops
    its connection, and must not stop the control plane."""

    CONTROL = 0
    DATA = 1


#: The connections to the other ranks.
Sockets = dict[tuple[int, Plane], socket.socket]


class Mesh(NamedTuple):
    """What joining gives: which rank of how many on this machine, and the connections."""

    local_rank: int
    local_size: int
    sockets: Sockets


def join(rendezvous: Rendezvous, timeout: float) -> Mesh:
    """Connect this rank with all others, within `timeout` seconds. Collective. Raises
    `ExchangeTimeout` naming the ranks that did not come, `RankMismatch` where versions differ,
    `PeerLost`, or `TransportError` where an address cannot be used, or this process may not open
    2·(size − 1) sockets."""
    try:
        return _join(rendezvous, Deadline(timeout))
    except OSError as error:
        raise TransportError(f"rank {rendezvous.rank} cannot join the ring: {error}") from error


def _join(rendezvous: Rendezvous, deadline: Deadline) -> Mesh:
    with contextlib.ExitStack() as on_failure:
        with _listener(rendezvous) as listener:
            mine = {"address": listener.getsockname()[:2], "machine": _machine()}
            mine |= {"version": __version__, "secret": secrets.token_hex(2 * _HALF)}
            raw = rendezvous.all_gather(json.dumps(mine).encode(), deadline)
            table = [json.loads(each) for each in raw]
            versions = {rank: each["version"] for rank, each in enumerate(table)}
            if len(set(versions.values())) > 1:
                raise RankMismatch("version", versions)
            sockets: Sockets = {}
            on_failure.callback(_close, sockets)
            _connect(rendezvous, listener, table, sockets, deadline)
        on_failure.pop_all()
    machines = [each["machine"] for each in table]
    here = [rank for rank, machine in enumerate(machines) if machine == machines[rendezvous.rank]]
    return Mesh(here.index(rendezvous.rank), len(here), sockets)


@contextlib.contextmanager
def _listener(rendezvous: Rendezvous) -> Iterator[socket.socket]:
    try:
        listener = listen(rendezvous.host, 0, rendezvous.size)
    except OSError as error:
        raise TransportError(
            f"rank {rendezvous.rank} cannot listen at {rendezvous.host}: {error}; {HOST} sets the "
            f"address at which the others reach it"
        ) from error
    with listener:
        yield listener


def _connect(
    rendezvous: Rendezvous,
    listener: socket.socket,
    table: Sequence[dict[str, Any]],
    sockets: Sockets,
    deadline: Deadline,
) -> None:
    """Call the ranks below, let those above in, and hear what those below answer: so nobody waits
    for anybody who waits."""
    rank, secret = rendezvous.rank, bytes.fromhex(table[0]["secret"])
    below = [(peer, plane) for peer in range(rank) for plane in Plane]
    for peer, plane in below:
        with _telling(rank, peer, table, deadline):
            address = tuple(table[peer]["address"])
            sock = socket.create_connection(address, deadline.left or 0.01)
            sockets[peer, plane] = sock
            send_frame(sock, Kind.HELLO, 2 * rank + plane, secret[:_HALF])
    _let_in(rank, len(table), listener, secret, sockets, deadline)
    for peer, plane in below:
        with _telling(rank, peer, table, deadline):
            answer = read_frame(sockets[peer, plane], deadline)
            if not hmac.compare_digest(answer.payload, secret[_HALF:]):
                raise ConnectionError("it is not of this ring")
    for sock in sockets.values():
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _let_in(
    rank: int,
    size: int,
    listener: socket.socket,
    secret: bytes,
    sockets: Sockets,
    deadline: Deadline,
) -> None:
    awaited = {(peer, plane) for peer in range(rank + 1, size) for plane in Plane}

    def keep(sock: socket.socket, frame: Frame) -> bool:
        key = frame.number // 2, Plane(frame.number % 2)
        if key not in awaited or not hmac.compare_digest(frame.payload, secret[:_HALF]):
            return False
        try:
            send_frame(sock, Kind.WELCOME, rank, secret[_HALF:])
        except OSError:
            return False
        awaited.remove(key)
        sockets[key] = sock
        return True

    admit(listener, keep, lambda: not awaited, deadline)
    if awaited:
        raise ExchangeTimeout(late(rank, deadline.timeout, {peer for peer, _ in awaited}))


@contextlib.contextmanager
def _telling(
    rank: int, peer: int, table: Sequence[dict[str, Any]], deadline: Deadline
) -> Iterator[None]:
    """Errors of sockets, as ours."""
    where = ":".join(map(str, table[peer]["address"]))
    try:
        yield
    except TimeoutError:
        raise ExchangeTimeout(late(rank, deadline.timeout, {peer})) from None
    except ConnectionError as error:
        raise PeerLost(
            f"rank {rank} lost rank {peer}, at {where}, while joining the ring: {error}"
        ) from error
    except OSError as error:
        raise TransportError(
            f"rank {rank} cannot reach rank {peer} at {where}: {error}; {HOST} sets the address at "
            f"which a rank is reached"
        ) from error


def _close(sockets: Sockets) -> None:
    for sock in sockets.values():
        sock.close()


def _machine() -> str:
    """A name of this machine that no other has: hosts may be called alike."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {boot.read_text().strip()}"
    return socket.gethostname()
