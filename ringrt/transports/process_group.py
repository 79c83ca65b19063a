"""One process a rank, where PyTorch's processes find one another: a `torch.distributed` process
group. No MPI is needed, and the application's own messages are never met.

`gloo.py` makes the connections; `gloo_link.py` is what is said on one. A thread for each other rank
reads it. gloo moves the bytes by a thread of its own, so nothing needs progress.

A rank that dies closes its connections, and every other rank hears of it at once; unless a process
that it forked lives on and holds them too: then it is the deadline that tells.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ringrt.backend import Stream
from ringrt.errors import ExchangeTimeout, TransportError, name_ranks
from ringrt.transport import HostTransport, Message
from ringrt.transports.gloo import Mesh, join
from ringrt.transports.gloo_link import Link
from ringrt.transports.posts import Itself, Meeting, Post, PostTicket

#: How long the ranks wait for one another to join, in seconds, where nobody says otherwise.
JOIN_TIMEOUT = 60.0
#: How long a rank that leaves waits for the others to leave too, in seconds.
_CLOSE_TIMEOUT = 1.0
#: How long a process that ends waits for the others to hear its last words, in seconds.
_EXIT_TIMEOUT = 5.0


class ProcessGroupTransport(HostTransport):
    """One process's end. See `ringrt.transport.Transport`."""

    needs_progress = False

    def __init__(self, mesh: Mesh, local: tuple[int, int]) -> None:
        self.rank, self.size = mesh.rank, mesh.size
        self.local_rank, self.local_size = local
        self._mesh, self._meeting = mesh, Meeting()
        peers = [peer for peer in range(self.size) if peer != self.rank]
        self._links = {peer: Link(mesh, peer, self._meeting) for peer in peers}
        self._itself = Itself()
        self._closed = self._shut = False
        self._threads = [
            threading.Thread(
                target=self._read,
                args=(link,),
                name=f"ringrt-torch-{self.rank}-from-{link.peer}",
                daemon=True,
            )
            for link in self._links.values()
        ]
        for end in list(_OPEN):
            if not any(thread.is_alive() for thread in end._threads):
                _OPEN.discard(end)
        for thread in self._threads:
            thread.start()
        _OPEN.add(self)

    @classmethod
    def of(cls, pg: Any = None, timeout: float = JOIN_TIMEOUT) -> ProcessGroupTransport:
        """The ranks of a process group; see `ringrt.transports.gloo.join`."""
        return cls(*join(pg, timeout))

    def exchange(
        self,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        *,
        step: int,
        stream: Stream = None,
    ) -> PostTicket:
        """Tell every peer what is awaited from it, and send what it awaits."""
        received = [Post("recv", m.peer, m.data) for m in recvs]
        sent = [Post("send", m.peer, m.data) for m in sends]
        posts = received + sent
        with self._meeting.changed:
            self.poll()
            for peer in dict.fromkeys(post.peer for post in posts):
                mine = [[p for p in side if p.peer == peer] for side in (received, sent)]
                if peer == self.rank:
                    self._itself.post(*mine)
                else:
                    self._links[peer].post(*mine)
        return PostTicket(self, posts, step)

    def wait_for(self, peers: Callable[[], set[int]], timeout: float) -> set[int]:
        """See `Meeting.wait_for`."""
        with self._meeting.changed:
            if peers():
                self.poll()
        return self._meeting.wait_for(self.rank, peers, timeout)

    def poll(self) -> None:
        """Whether somebody has failed, or this end is closed."""
        if self._closed:
            raise TransportError(f"the ring of rank {self.rank} is closed")
        self._meeting.raise_if_failed(self.rank)

    def all_gather_bytes(self, payload: bytes, timeout: float) -> list[bytes]:
        """A message to every other rank and one from each."""
        with self._meeting.changed:
            self.poll()
            for link in self._links.values():
                link.contribute(payload)

        def missing() -> set[int]:
            return {peer for peer, link in self._links.items() if not link.rounds}

        if late := self.wait_for(missing, timeout):
            raise ExchangeTimeout(
                f"rank {self.rank} waited {timeout:g} s for {name_ranks(late)} "
                f"to join a control round"
            )
        with self._meeting.changed:
            parts = {peer: link.rounds.popleft() for peer, link in self._links.items()}
        return [payload if rank == self.rank else parts[rank] for rank in range(self.size)]

    def barrier(self, timeout: float) -> None:
        """A control round without a payload."""
        self.all_gather_bytes(b"", timeout)

    def abort(self, reason: str) -> None:
        """Tell every other rank, unless the ring has failed already."""
        with self._meeting.changed:
            if self._meeting.failure is None and not self._closed:
                self._meeting.fail(self.rank, reason)
                for link in self._links.values():
                    link.report(self.rank, reason)

    def close(self) -> None:
        """Say goodbye. The connections are closed when all have said theirs; a rank that is still
        busy with work of its own is not waited for longer than a moment. A failure that this rank
        has heard of is passed on: whoever waits for this rank should hear that first."""
        if self.leave():
            self._wait_until_over(time.monotonic() + _CLOSE_TIMEOUT)
            if self._shut_if(self._over):
                self._join()

    def leave(self) -> bool:
        """Say goodbye; False if that has been said."""
        with self._meeting.changed:
            if self._closed:
                return False
            self._closed = True
            for link in self._links.values():
                if self._meeting.failure is not None:
                    link.report(*self._meeting.failure)
                link.leave()
        return True

    def end(self, deadline: float) -> None:
        """After `leave`, before the process ends: close the connections, when all have said
        goodbye or at the deadline (of the monotonic clock), but not before they have been told."""
        self._wait_until_over(deadline)
        with self._meeting.changed:
            unheard = [sent for link in self._links.values() for sent in link.unheard()]
        self._mesh.flush(unheard, deadline + _EXIT_TIMEOUT)
        self._shut_if(lambda: True)
        self._join()

    def _wait_until_over(self, deadline: float) -> None:
        with self._meeting.changed:
            self._meeting.changed.wait_for(self._over, max(0.0, deadline - time.monotonic()))

    def _read(self, link: Link) -> None:
        link.read()
        self._shut_if(lambda: self._closed and self._over())

    def _over(self) -> bool:
        """Nobody says anything more."""
        return all(link.ended for link in self._links.values())

    def _shut_if(self, over: Callable[[], bool]) -> bool:
        """Close the connections, once; whether that has been done, or is being done."""
        with self._meeting.changed:
            if self._shut or not over():
                return self._shut
            self._shut = True
        self._mesh.shut()
        with self._meeting.changed:
            # What they keep alive would keep gloo's threads and sockets alive.
            self._links.clear()
        return True

    def _join(self) -> None:
        """Wait for the threads, which have nothing to wait for any more."""
        for thread in self._threads:
            thread.join(_EXIT_TIMEOUT)
        _OPEN.discard(self)


#: The ends whose threads may be inside gloo or PyTorch, if only to give back what they held.
_OPEN: set[ProcessGroupTransport] = set()
# A forked process has none of the threads, and must not leave in its parent's name.
os.register_at_fork(after_in_child=_OPEN.clear)


@atexit.register
def _end_all() -> None:
    """A thread that is in there when the interpreter shuts down would end the process badly."""
    ends = list(_OPEN)
    for end in ends:
        end.leave()
    deadline = time.monotonic() + _CLOSE_TIMEOUT
    for end in ends:
        end.end(deadline)
