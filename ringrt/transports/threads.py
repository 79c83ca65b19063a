"""Ranks as threads of one process.

A send and its receive are matched in the order they were posted between two ranks, and
whoever posts the second of the two copies the bytes there and then. So nothing needs
progress, and a wait is only ever for a rank that is behind.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ringrt.backend import Stream
from ringrt.errors import ExchangeTimeout, name_ranks
from ringrt.transport import HostTransport, Message
from ringrt.transports.posts import Meeting, Post, PostTicket, copy_across


@dataclass(slots=True, kw_only=True)
class _Group(Meeting):
    """What the ranks of one ring share. `changed` guards all of it."""

    size: int
    #: Posts without a counterpart yet, all of one verb, by (source, destination).
    unmatched: dict[tuple[int, int], deque[Post]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    #: Control-plane rounds: payloads by rank, and how many ranks have read them.
    rounds: dict[int, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))
    readers: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def match(self, source: int, destination: int, post: Post) -> Post | None:
        """The counterpart that waits for this post, or None after leaving it to be found."""
        with self.changed:
            queue = self.unmatched[source, destination]
            if queue and queue[0].verb != post.verb:
                return queue.popleft()
            queue.append(post)
            return None


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
    ) -> PostTicket:
        """Post all messages; copy those whose counterpart is already there."""
        posts = [Post("recv", m.peer, m.data) for m in recvs]
        posts += [Post("send", m.peer, m.data) for m in sends]
        for post in posts:
            incoming = post.verb == "recv"
            source, destination = (post.peer, self.rank) if incoming else (self.rank, post.peer)
            if other := self._group.match(source, destination, post):
                copy_across(*((other, post) if incoming else (post, other)))
                with self._group.changed:
                    self._group.changed.notify_all()
        return PostTicket(self, posts, step)

    def wait_for(self, peers: Callable[[], set[int]], timeout: float) -> set[int]:
        """See `Meeting.wait_for`."""
        return self._group.wait_for(self.rank, peers, timeout)

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

        if late := self.wait_for(missing, timeout):
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
        self._group.fail(self.rank, reason)

    def close(self) -> None:
        """Leave."""
        self._group.leave(self.rank)


def thread_group(size: int) -> list[ThreadTransport]:
    """The ends of a new ring of `size` thread ranks."""
    group = _Group(size=size)
    return [ThreadTransport(group, rank) for rank in range(size)]
