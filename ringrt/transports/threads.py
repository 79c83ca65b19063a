"""Ranks as threads of one process.

A send and its receive are matched in the order they were posted between two ranks, and
whoever posts the second of the two copies the bytes there and then. So nothing needs
progress, and a wait is only ever for a rank that is behind.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ringrt.backend import Stream
from ringrt.errors import ExchangeTimeout, PeerLost, TransportError, name_ranks
from ringrt.plan.partition import Array
from ringrt.transport import HostTransport, Message


@dataclass(eq=False, slots=True)
class _Post:
    """One side of a message, until both sides have met and the bytes are across."""

    verb: str
    peer: int
    data: Array
    done: bool = False
    error: str | None = None

    def __str__(self) -> str:
        link = "to" if self.verb == "send" else "from"
        return f"{self.verb} {self.data.nbytes} bytes {link} rank {self.peer}"


@dataclass(slots=True)
class _Group:
    """What the ranks of one ring share. `changed` guards all of it."""

    size: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    failure: tuple[int, str] | None = None
    left: set[int] = field(default_factory=set)
    #: Posts without a counterpart yet, all of one verb, by (source, destination).
    unmatched: dict[tuple[int, int], deque[_Post]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    #: Control-plane rounds: payloads by rank, and how many ranks have read them.
    rounds: dict[int, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))
    readers: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def match(self, source: int, destination: int, post: _Post) -> _Post | None:
        """The counterpart that waits for this post, or None after leaving it to be found."""
        with self.changed:
            queue = self.unmatched[source, destination]
            if queue and queue[0].verb != post.verb:
                return queue.popleft()
            queue.append(post)
            return None

    def wait_for(self, rank: int, peers: Callable[[], set[int]], timeout: float) -> set[int]:
        """Wait until there are no `peers` left to wait for; those that there are when the
        deadline passes. `PeerLost` if a rank has failed, or one of the peers has left."""
        deadline = time.monotonic() + timeout
        with self.changed:
            while waiting := peers():
                self.raise_if_failed(rank)
                if gone := waiting & self.left:
                    raise PeerLost(f"rank {rank} waits for {name_ranks(gone)}, gone from the ring")
                if not self.changed.wait(deadline - time.monotonic()):
                    return peers()
        return set()

    def raise_if_failed(self, rank: int) -> None:
        if self.failure and self.failure[0] == rank:
            raise TransportError(f"this ring was aborted by its rank {rank}: {self.failure[1]}")
        if self.failure:
            raise PeerLost(f"rank {self.failure[0]} failed: {self.failure[1]}")


class ThreadTransport(HostTransport):
    """One thread's end. See `ringrt.transport.Transport`."""

    needs_progress = False

    def __init__(self, group: _Group, rank: int) -> None:
        self._group, self.rank = group, rank
        self.local_rank = rank
        self.size = self.local_size = group.size
        self._round = 0

    def exchange(
        self,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        *,
        step: int,
        stream: Stream = None,
    ) -> _ThreadTicket:
        """Post all messages; copy those whose counterpart is already there."""
        posts = [_Post("recv", m.peer, m.data) for m in recvs]
        posts += [_Post("send", m.peer, m.data) for m in sends]
        for post in posts:
            incoming = post.verb == "recv"
            source, destination = (post.peer, self.rank) if incoming else (self.rank, post.peer)
            if other := self._group.match(source, destination, post):
                self._copy(*((other, post) if incoming else (post, other)))
        return _ThreadTicket(self, posts, step)

    def poll(self) -> None:
        """Whether somebody has failed."""
        self._group.raise_if_failed(self.rank)

    def all_gather_bytes(self, payload: bytes, timeout: float) -> list[bytes]:
        """Leave the payload for the others and wait for theirs."""
        self.poll()
        group, index = self._group, self._round
        self._round += 1
        with group.changed:
            arrived = group.rounds[index]
            arrived[self.rank] = payload
            group.changed.notify_all()

        def missing() -> set[int]:
            return set(range(self.size)) - arrived.keys()

        if late := group.wait_for(self.rank, missing, timeout):
            raise ExchangeTimeout(
                f"rank {self.rank} waited {timeout:g} s for {name_ranks(late)} "
                f"to join a control round"
            )
        with group.changed:
            group.readers[index] += 1
            if group.readers[index] == self.size:
                del group.rounds[index], group.readers[index]
        return [arrived[rank] for rank in range(self.size)]

    def barrier(self, timeout: float) -> None:
        """A control round without a payload."""
        self.all_gather_bytes(b"", timeout)

    def abort(self, reason: str) -> None:
        """The first failure is kept; everyone who waits wakes up to it."""
        with self._group.changed:
            self._group.failure = self._group.failure or (self.rank, reason)
            self._group.changed.notify_all()

    def close(self) -> None:
        """Leave."""
        with self._group.changed:
            self._group.left.add(self.rank)
            self._group.changed.notify_all()

    def _copy(self, send: _Post, recv: _Post) -> None:
        if send.data.nbytes == recv.data.nbytes:
            np.copyto(recv.data, send.data)
        else:
            text = f"{send.data.nbytes} bytes sent meet {recv.data.nbytes} expected"
            send.error = recv.error = text
        with self._group.changed:
            send.done = recv.done = True
            self._group.changed.notify_all()


class _ThreadTicket:
    """See `ringrt.transport.Ticket`."""

    span = None

    def __init__(self, transport: ThreadTransport, posts: list[_Post], step: int) -> None:
        self._transport, self._posts, self._step = transport, posts, step

    def progress(self) -> bool:
        """Whether all is across; nothing needs to be moved from here."""
        if self._open():
            self._transport._group.raise_if_failed(self._transport.rank)
        return not self._open()

    def wait(self, timeout: float) -> None:
        """Wait for the ranks that are behind."""
        rank = self._transport.rank
        if self._transport._group.wait_for(rank, self._peers, timeout):
            pending = "; ".join(str(post) for post in self._open())
            raise ExchangeTimeout(
                f"rank {rank} waited {timeout:g} s in ring step {self._step} to {pending}"
            )
        for post in self._posts:
            if post.error:
                raise TransportError(
                    f"rank {rank}, ring step {self._step}, rank {post.peer}: {post.error}"
                )

    def _open(self) -> list[_Post]:
        return [post for post in self._posts if not post.done]

    def _peers(self) -> set[int]:
        return {post.peer for post in self._open()}


def thread_group(size: int) -> list[ThreadTransport]:
    """The ends of a new ring of `size` thread ranks."""
    group = _Group(size)
    return [ThreadTransport(group, rank) for rank in range(size)]
