"""One process a rank, over MPI. The only module that imports mpi4py.MPI, which initialises MPI.

Three things about MPI shape this file. A large message moves only while its requests are being
tested, so `Ticket.progress` tests them. MPI reports no dead peer, so every wait is a loop that
tests, looks for other ranks' notices, and has a deadline; only joining a ring (which duplicates
communicators) and leaving it after everyone has said goodbye block inside MPI. And MPI goes on
using the buffers of a request that was never completed, so a failed exchange keeps them alive
until the process ends.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from ringrt.backend import Stream
from ringrt.errors import (
    ExchangeTimeout,
    PeerLost,
    TransportError,
    TransportUnavailable,
    name_ranks,
)
from ringrt.transport import HostTransport, Launch, Message

#: Tags of the control communicator. Rounds of the control plane use the tags from _ROUND on,
#: in turn, so that a rank which is one round ahead is not mistaken for one that is not.
_ABORT, _LEFT, _ROUND = 0, 1, 2
_ROUNDS = 1000

#: How long a message may still be under way from a rank that has said goodbye, in seconds.
_GRACE = 1.0
#: How long `close` waits for the others' goodbyes, and a failed process at exit, in seconds.
_CLOSE_TIMEOUT, _EXIT_TIMEOUT = 1.0, 3.0

#: Requests that never completed, and their buffers: MPI may still read and write those.
_UNFINISHED: list[Any] = []


class MpiTransport(HostTransport):
    """One process's end. See `ringrt.transport.Transport`.

    `comm` is any intracommunicator; it is duplicated, so that ringrt's messages and the
    application's never meet. Collective over `comm`.
    """

    needs_progress = True

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._data, self._control = comm.Dup(), comm.Dup()
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = node.Get_rank(), node.Get_size()
        node.Free()
        self._round = 0
        self._failure: TransportError | None = None
        self._ends_job = False
        self._left: dict[int, float] = {}
        self._notices: list[MPI.Request] = []
        self._last_ticket: _MpiTicket | None = None

    @classmethod
    def world(cls, launch: Launch | None) -> MpiTransport:
        """All processes that the launcher started."""
        size = MPI.COMM_WORLD.Get_size()
        if launch and launch.size != size:
            raise TransportUnavailable(
                f"mpirun started {launch.size} processes but mpi4py sees {size}: they belong to "
                f"different MPI libraries (mpi4py uses {MPI.Get_library_version().split()[0]})"
            )
        return cls(MPI.COMM_WORLD)

    def exchange(
        self,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        *,
        step: int,
        stream: Stream = None,
    ) -> _MpiTicket:
        """Post all receives, then all sends."""
        self.poll()
        requests = [self._data.Irecv(m.data, m.peer) for m in recvs]
        requests += [self._data.Isend(m.data, m.peer) for m in sends]
        verbs = [f"recv {m.data.nbytes} bytes from rank {m.peer}" for m in recvs]
        verbs += [f"send {m.data.nbytes} bytes to rank {m.peer}" for m in sends]
        self._last_ticket = _MpiTicket(self, requests, [*recvs, *sends], verbs, step)
        return self._last_ticket

    def all_gather_bytes(self, payload: bytes, timeout: float) -> list[bytes]:
        """A message to every other rank and one from each, so that a missing rank can be
        named. Payloads may differ in size."""
        self.poll()
        tag = _ROUND + self._round % _ROUNDS
        self._round += 1
        peers = [rank for rank in range(self.size) if rank != self.rank]
        sends = [self._control.Isend(payload, peer, tag) for peer in peers]
        arrived = {self.rank: payload}

        def missing() -> set[int]:
            return set(range(self.size)) - arrived.keys()

        def complete() -> bool:
            while (found := self._receive(tag)) is not None:
                arrived[found[0]] = found[1]
            return not missing() and bool(MPI.Request.Testall(sends))

        try:
            in_time = self.wait_for(complete, missing, timeout)
        except TransportError:
            _UNFINISHED.append((sends, payload))
            raise
        if not in_time:
            _UNFINISHED.append((sends, payload))
            raise ExchangeTimeout(
                f"rank {self.rank} waited {timeout:g} s for {name_ranks(missing())} "
                f"to join a control round"
            )
        return [arrived[rank] for rank in range(self.size)]

    def barrier(self, timeout: float) -> None:
        """A control round without a payload."""
        self.all_gather_bytes(b"", timeout)

    def abort(self, reason: str) -> None:
        """Notify every other rank, and see to it that the process ends even though messages
        are left hanging: MPI's own shutdown would wait for them."""
        if self._failure is not None:
            return
        self._failure = TransportError(f"this ring was aborted by its rank {self.rank}: {reason}")
        _UNFINISHED.append(self._last_ticket)
        self._notify(_ABORT, reason.encode())
        self._end_job_at_exit()

    def close(self) -> None:
        """Say goodbye. If all have said theirs within a moment, free what MPI holds; a rank
        that is still busy with work of its own is no failure, and is not waited for."""
        if self._failure is not None:
            return
        self._failure = TransportError(f"the ring of rank {self.rank} is closed")
        self._notify(_LEFT, b"")

        def settled() -> bool:
            self._read_notices()
            return self._ends_job or len(self._left) == self.size - 1

        if _poll_until(settled, _CLOSE_TIMEOUT) and not self._ends_job:
            MPI.Request.Waitall(self._notices)
            self._data.Free()
            self._control.Free()
        else:
            _UNFINISHED.append(self._notices)

    def wait_for(
        self, ready: Callable[[], bool], peers: Callable[[], set[int]], timeout: float
    ) -> bool:
        """Poll until `ready`; False if the deadline passes first. `PeerLost` if a rank has
        failed, or one of the `peers` waited for left a while ago."""

        def settled() -> bool:
            self.poll()
            if _mapped(ready):
                return True
            late = {r for r in peers() if time.monotonic() - self._left.get(r, 1e300) > _GRACE}
            if late:
                raise PeerLost(f"rank {self.rank} waits for {name_ranks(late)}, gone from the ring")
            return False

        return _poll_until(settled, timeout)

    def finished(self, ticket: _MpiTicket) -> None:
        """The ticket is complete: its buffers are the caller's again."""
        if self._last_ticket is ticket:
            self._last_ticket = None

    def poll(self) -> None:
        """Raise `PeerLost` if another rank has said that it failed; `TransportError` if this
        end is aborted or closed."""
        if self._failure is None:
            self._read_notices()
        if self._failure is not None:
            raise self._failure

    def _read_notices(self) -> None:
        while (notice := self._receive(_LEFT)) is not None:
            self._left[notice[0]] = time.monotonic()
        while (notice := self._receive(_ABORT)) is not None:
            failure = PeerLost(f"rank {notice[0]} failed: {notice[1].decode()}")
            self._failure = self._failure or failure
            self._end_job_at_exit()

    def _receive(self, tag: int) -> tuple[int, bytes] | None:
        """The next control message of that tag, if one is there: its source and bytes."""
        status = MPI.Status()
        found = self._control.Improbe(MPI.ANY_SOURCE, tag, status)
        if found is None:
            return None
        data = bytearray(status.Get_count(MPI.BYTE))
        found.Recv([data, MPI.BYTE])
        return status.Get_source(), bytes(data)

    def _notify(self, tag: int, payload: bytes) -> None:
        peers = [rank for rank in range(self.size) if rank != self.rank]
        self._notices += [self._control.Isend(payload, peer, tag) for peer in peers]

    def _end_job_at_exit(self) -> None:
        self._ends_job = True
        atexit.unregister(self._end_job)
        atexit.register(self._end_job)

    def _end_job(self) -> None:
        """Give the other ranks a moment to report their own errors, then end the job."""
        request = self._control.Ibarrier()
        _poll_until(request.Test, _EXIT_TIMEOUT)
        self._control.Abort(1)


class _MpiTicket:
    """See `ringrt.transport.Ticket`."""

    span = None

    def __init__(
        self,
        transport: MpiTransport,
        requests: list[MPI.Request],
        messages: list[Message],
        verbs: list[str],
        step: int,
    ) -> None:
        self._transport, self._requests, self._step = transport, requests, step
        self._messages, self._verbs = messages, verbs
        self._done = [False] * len(requests)

    def progress(self) -> bool:
        """Test what is not yet complete, which is also what moves it."""
        if all(self._done):
            return True
        self._transport.poll()
        return _mapped(self._test)

    def wait(self, timeout: float) -> None:
        """Test until complete."""
        try:
            in_time = self._transport.wait_for(self._test, self._peers, timeout)
        except TransportError:
            _UNFINISHED.append(self)
            raise
        if not in_time:
            _UNFINISHED.append(self)
            open_verbs = [v for v, done in zip(self._verbs, self._done, strict=True) if not done]
            raise ExchangeTimeout(
                f"rank {self._transport.rank} waited {timeout:g} s in ring step {self._step} to "
                + "; ".join(open_verbs)
            )
        self._transport.finished(self)

    def _test(self) -> bool:
        for index, request in enumerate(self._requests):
            if not self._done[index]:
                status = MPI.Status()
                self._done[index] = request.Test(status)
                if self._done[index] and self._verbs[index].startswith("recv"):
                    self._check_size(index, status)
        return all(self._done)

    def _check_size(self, index: int, status: Any) -> None:
        got, message = status.Get_count(MPI.BYTE), self._messages[index]
        if got != message.data.nbytes:
            raise TransportError(
                f"rank {self._transport.rank}, ring step {self._step}: {got} bytes sent by rank "
                f"{message.peer} meet {message.data.nbytes} expected"
            )

    def _peers(self) -> set[int]:
        return {m.peer for m, done in zip(self._messages, self._done, strict=True) if not done}


def _poll_until(ready: Callable[[], bool], timeout: float) -> bool:
    """Call `ready` until it is true or `timeout` seconds have passed; more and more rarely, so
    that ranks that share a core do not take it from one another by waiting."""
    deadline = time.monotonic() + timeout
    pause = 0.0
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause + 2e-6, 500e-6)
    return True


def _mapped(test: Callable[[], bool]) -> bool:
    """An MPI error, as ours."""
    try:
        return test()
    except MPI.Exception as error:
        raise TransportError(f"MPI: {error.Get_error_string()}") from error
