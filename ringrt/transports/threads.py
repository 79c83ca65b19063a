"""Ranks as threads of one process.

A send and its receive are matched in the order they were posted between two ranks, and
whoever posts the second of the two copies the bytes there and then. So nothing needs
progress, and a wait is only ever for a rank that is behind.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ringrt.backend import Stream
from ringrt.errors import ExchangeTimeout, name_ranks
from ringrt.transport import HostTransport, Message
from ringrt.transports.posts import Post, PostTicket, Standing, copy_across


class _Sleeper(NamedTuple):
    """A rank that waits until there are no `peers` to wait for. Whoever sees to that releases
    `bell`, which the rank holds and tries to take again."""

    peers: Callable[[], set[int]]
    bell: threading.Lock


@dataclass(slots=True, kw_only=True)
class _Group(Standing):
    """What the ranks of one ring share. `lock` guards all of it.

    A rank sleeps by itself, and is woken when all that it waits for is there, not before: a
    waking costs more than a message."""

    size: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    asleep: dict[int, _Sleeper] = field(default_factory=dict)
    #: Posts without a counterpart yet, all of one verb, by (source, destination).
    unmatched: dict[tuple[int, int], deque[Post]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    #: Control-plane rounds that are not complete: payloads by rank.
    rounds: dict[int, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))

    def match(self, rank: int, posts: Iterable[Post]) -> list[tuple[Post, Post]]:
        """Each of a rank's posts whose counterpart waits already, with it: (send, recv). The
        others are left to be found."""
        pairs = []
        with self.lock:
            for post in posts:
                incoming = post.verb == "recv"
                queue = self.unmatched[(post.peer, rank) if incoming else (rank, post.peer)]
                if queue and queue[0].verb != post.verb:
                    other = queue.popleft()
                    pairs.append((other, post) if incoming else (post, other))
                else:
                    queue.append(post)
        return pairs

    def join_round(self, index: int, rank: int, payload: bytes) -> dict[int, bytes]:
        """Leave a payload in a control round; the payloads by rank, to which others may be yet to
        come."""
        with self.lock:
            arrived = self.rounds[index]
            arrived[rank] = payload
            if len(arrived) == self.size:
                # Every rank holds it by now.
                del self.rounds[index]
                self._wake(list(self.asleep))
        return arrived

    def wake(self, ranks: Iterable[int]) -> None:
        """Those of the ranks that have nothing left to wait for."""
        with self.lock:
            self._wake(ranks)

    def fail(self, rank: int, reason: str) -> None:
        """The first failure is kept; everyone who waits wakes up to it."""
        with self.lock:
            self.failure = self.failure or (rank, reason)
            self._wake_all()

    def leave(self, rank: int) -> None:
        """Whoever waits for that rank wakes up to it."""
        with self.lock:
            self.left.add(rank)
            self._wake_all()

    def wait_for(self, rank: int, peers: Callable[[], set[int]], timeout: float) -> set[int]:
        """Wait until there are no `peers` left to wait for; those that there are when the
        deadline passes. `PeerLost` if a rank has failed, or one of the peers has left."""
        deadline = time.monotonic() + timeout
        while True:
            bell = threading.Lock()
            bell.acquire()
            with self.lock:
                if not (waiting := peers()):
                    return waiting
                self.raise_if_lost(rank, waiting)
                self.asleep[rank] = _Sleeper(peers, bell)
            if not bell.acquire(timeout=max(0.0, deadline - time.monotonic())):
                with self.lock:
                    self.asleep.pop(rank, None)
                    return peers()

    def _wake(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            sleeper = self.asleep.get(rank)
            if sleeper is not None and not sleeper.peers():
                self.asleep.pop(rank).bell.release()

    def _wake_all(self) -> None:
        for sleeper in self.asleep.values():
            sleeper.bell.release()
        self.asleep.clear()


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
        group = self._group
        posts = [Post("recv", m.peer, m.data) for m in recvs]
        posts += [Post("send", m.peer, m.data) for m in sends]
        if pairs := group.match(self.rank, posts):
            for send, recv in pairs:
                copy_across(send, recv)
            group.wake({post.peer for post in posts if post.done})
        return PostTicket(self, posts, step)

    def wait_for(self, peers: Callable[[], set[int]], timeout: float) -> set[int]:
        """See `_Group.wait_for`."""
        return self._group.wait_for(self.rank, peers, timeout)

    def poll(self) -> None:
        """Whether somebody has failed."""
        self._group.raise_if_failed(self.rank)

    def all_gather_bytes(self, payload: bytes, timeout: float) -> list[bytes]:
        """Leave the payload for the others and wait for theirs."""
        self.poll()
        arrived = self._group.join_round(self._round, self.rank, payload)
        self._round += 1

        def missing() -> set[int]:
            return set(range(self.size)) - arrived.keys()

        if len(arrived) < self.size and (late := self.wait_for(missing, timeout)):
            raise ExchangeTimeout(
                f"rank {self.rank} waited {timeout:g} s for {name_ranks(late)} "
                f"to join a control round"
            )
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
