"""One process a rank, on plain TCP: for machines without MPI, and for multi-process JAX.

A thread of each rank (`tcp_loop.py`) moves the data, into and out of the buffers that the engine
gives, so nothing needs progress and two ranks that send to one another never block. Between two
ranks there are a data and a control connection (`tcp_join.py`). A message that no receive has been
posted for stays in the data connection, and stops its sender when that is full; notices of arrival
and of failure pass it by on the control connection, which is always read.

A rank that dies closes its connections, and every other rank hears of it at once; only of a
machine that loses its power or its network does a deadline have to tell.

Nothing is encrypted, and whoever can listen to the rendezvous can join: trusted networks only.
"""

from __future__ import annotations

import atexit
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from ringrt.backend import Stream
from ringrt.errors import ExchangeTimeout, TransportError, name_ranks
from ringrt.transport import HostTransport, Message
from ringrt.transports.posts import NO_GOODBYE, Itself, Meeting, Post, PostTicket
from ringrt.transports.rendezvous import Rendezvous, SocketRendezvous, read_environment
from ringrt.transports.tcp_join import Plane, Sockets, join
from ringrt.transports.tcp_line import Line
from ringrt.transports.tcp_loop import Connection, Loop
from ringrt.transports.tcp_wire import Deadline, Frame, Kind, in_memory

#: How long the ranks wait for one another to start, in seconds, where nobody says otherwise.
_JOIN_TIMEOUT = 120.0
#: How long a rank that leaves waits for the others to hear its goodbye, in seconds.
_CLOSE_TIMEOUT = 1.0


def connect() -> TcpTransport:
    """Join the ring that RINGRT_RANK, RINGRT_SIZE and RINGRT_RENDEZVOUS name."""
    rank, size, address = read_environment(os.environ)
    deadline = Deadline(_JOIN_TIMEOUT)
    return TcpTransport(SocketRendezvous(rank, size, address, deadline), _JOIN_TIMEOUT)


class TcpTransport(HostTransport):
    """One process's end. See `ringrt.transport.Transport`. Made by all ranks that meet at the
    rendezvous, within `timeout` seconds; raises as `ringrt.transports.tcp_join.join`."""

    needs_progress = False

    def __init__(self, rendezvous: Rendezvous, timeout: float = _JOIN_TIMEOUT) -> None:
        self.rank, self.size = rendezvous.rank, rendezvous.size
        mesh = join(rendezvous, timeout)
        self.local_rank, self.local_size = mesh.local_rank, mesh.local_size
        self._meeting = Meeting()
        #: Control rounds that are under way: how many there were, and payloads by rank.
        self._round = 0
        self._rounds: dict[int, dict[int, bytes]] = defaultdict(dict)
        self._itself = Itself()
        self._closed = self._leaving = False
        self._loop = Loop(f"ringrt-tcp-{self.rank}", self._crashed)
        self._controls: dict[int, Connection] = {}
        self._lines: dict[int, Line] = {}
        self._take_over(mesh.sockets)
        self._loop.start()
        # A program that ends without closing its ring has not failed.
        atexit.register(self.close)

    def exchange(
        self,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        *,
        step: int,
        stream: Stream = None,
    ) -> PostTicket:
        """Hand all messages to the I/O thread."""
        self.poll()
        receiving = [Post("recv", m.peer, m.data) for m in recvs]
        sending = [Post("send", m.peer, m.data) for m in sends]
        posts = receiving + sending
        own = [[p for p in side if p.peer == self.rank] for side in (receiving, sending)]
        self._itself.post(*own)

        def post() -> None:
            for peer in {each.peer for each in posts} - {self.rank}:
                mine = [[p for p in side if p.peer == peer] for side in (receiving, sending)]
                self._lines[peer].post(*mine)

        self._loop.call(post)
        return PostTicket(self, posts, step)

    def wait_for(self, peers: Callable[[], set[int]], timeout: float) -> set[int]:
        """See `ringrt.transports.posts.Meeting.wait_for`."""
        if peers():
            self.poll()
        return self._meeting.wait_for(self.rank, peers, timeout)

    def poll(self) -> None:
        """Whether somebody has failed, or this end is closed."""
        if self._closed:
            raise TransportError(f"the ring of rank {self.rank} is closed")
        self._meeting.raise_if_failed(self.rank)

    def all_gather_bytes(self, payload: bytes, timeout: float) -> list[bytes]:
        """A frame to every other rank and one from each."""
        self.poll()
        index = self._round
        self._round += 1
        self._loop.call(partial(self._tell_all, Kind.ROUND, index, payload))
        with self._meeting.changed:
            arrived = self._rounds[index]
            arrived[self.rank] = payload

        def missing() -> set[int]:
            return set(range(self.size)) - arrived.keys()

        if late := self.wait_for(missing, timeout):
            raise ExchangeTimeout(
                f"rank {self.rank} waited {timeout:g} s for {name_ranks(late)} "
                f"to join a control round"
            )
        del self._rounds[index]
        return [arrived[rank] for rank in range(self.size)]

    def barrier(self, timeout: float) -> None:
        """A control round without a payload."""
        self.all_gather_bytes(b"", timeout)

    def abort(self, reason: str) -> None:
        """Tell the others. What they may know already, of another rank's failure, is told as it
        is."""
        if not self._closed:
            self._meeting.fail(self.rank, reason)
            self._leave()

    def close(self) -> None:
        """Say goodbye, and wait a moment for the others to hear it. A failure that this rank has
        heard of is passed on, to those who have not."""
        if not self._closed:
            self._leave()
            self._closed = True

    def _leave(self) -> None:
        atexit.unregister(self.close)
        self._loop.call(self._say_goodbye)
        self._loop.wait(2 * _CLOSE_TIMEOUT)

    def _take_over(self, sockets: Sockets) -> None:
        for peer in {peer for peer, _ in sockets}:
            hear, ended = partial(self._hear, peer), partial(self._control_ended, peer)
            control = Connection(self._loop, sockets[peer, Plane.CONTROL], in_memory(), hear, ended)
            control.read(True)
            ended = partial(self._line_ended, peer)
            data = sockets[peer, Plane.DATA]
            self._controls[peer] = control
            self._lines[peer] = Line(self._loop, data, control, self._meeting, ended)

    # From here on, all of it runs on the I/O thread.

    def _tell_all(self, kind: Kind, number: int, payload: bytes) -> None:
        for control in self._controls.values():
            control.send(kind, number, payload)

    def _hear(self, peer: int, frame: Frame) -> None:
        """What a peer says on its control connection."""
        if frame.kind is Kind.ROUND:
            with self._meeting.changed:
                self._rounds[frame.number][peer] = bytes(frame.payload)
                self._meeting.changed.notify_all()
        elif frame.kind is Kind.LEFT:
            self._lines[peer].drop()
            self._meeting.leave(peer)
        elif frame.kind is Kind.ABORT:
            reason = bytes(frame.payload).decode()
            if frame.number == self.rank:
                self._fail(peer, f"it has lost rank {self.rank}: {reason}")
            else:
                self._fail(frame.number, reason)
        else:
            self._lines[peer].hear(frame)

    def _control_ended(self, peer: int, reason: str) -> None:
        if peer not in self._meeting.left:
            self._fail(peer, NO_GOODBYE)

    def _line_ended(self, peer: int, reason: str) -> None:
        """Why, the control connection may have told; if it has not, the peer has died."""
        self._controls[peer].drain()
        if peer not in self._meeting.left:
            self._fail(peer, f"its connection broke: {reason}")

    def _fail(self, rank: int, reason: str) -> None:
        self._meeting.fail(rank, reason)
        self._let_go()

    def _let_go(self) -> None:
        """After a failure: touch nobody's buffers any more. The connections stay, lest others
        take this rank for the one that has died."""
        for line in self._lines.values():
            line.drop()

    def _say_goodbye(self) -> None:
        if self._leaving:
            return
        self._leaving, failure = True, self._meeting.failure
        self._let_go()
        if failure is None:
            self._tell_all(Kind.LEFT, self.rank, b"")
        else:
            self._tell_all(Kind.ABORT, failure[0], failure[1].encode())
        for control in self._controls.values():
            control.finish()
        # The others close their ends when they have heard.
        self._loop.end(self._all_heard, _CLOSE_TIMEOUT)

    def _all_heard(self) -> bool:
        return all(control.closed for control in self._controls.values())

    def _crashed(self, error: BaseException) -> None:
        self._meeting.fail(self.rank, f"its I/O thread: {type(error).__name__}: {error}")
