"""Messages as their two sides are posted, and the waiting for them, where no library does it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ringrt.errors import ExchangeTimeout, PeerLost, TransportError, name_ranks
from ringrt.plan.partition import Array


@dataclass(eq=False, slots=True)
class Post:
    """One side of a message ("send" or "recv"), until its bytes are across."""

    verb: str
    peer: int
    data: Array
    done: bool = False
    error: str | None = None

    def __str__(self) -> str:
        link = "to" if self.verb == "send" else "from"
        return f"{self.verb} {self.data.nbytes} bytes {link} rank {self.peer}"

    def refuse(self, sent: int, expected: int) -> None:
        """The other side is of another size, in bytes."""
        self.error = f"{sent} bytes sent meet {expected} expected"
        self.done = True


#: Up to so many bytes are copied without giving up the interpreter: they are across sooner than
#: a thread that asks for it back would have it.
_AT_ONCE = 1 << 16


def copied(send: Array, recv: Array) -> bool:
    """Copy the bytes of one array to another, unless they are of different sizes."""
    size = send.nbytes
    if size != recv.nbytes:
        return False
    if size <= _AT_ONCE:
        recv.data[:] = send.data
    else:
        np.copyto(recv, send)
    return True


def copy_across(send: Post, recv: Post) -> None:
    """Both sides lie in this process."""
    if copied(send.data, recv.data):
        send.done = recv.done = True
    else:
        sizes = send.data.nbytes, recv.data.nbytes
        send.refuse(*sizes)
        recv.refuse(*sizes)


#: Why a rank counts as failed whose connection has ended.
NO_GOODBYE = "its connection ended without a goodbye"


class Itself:
    """A rank's messages to itself, which meet in the order in which they are posted."""

    def __init__(self) -> None:
        self._receives: deque[Post] = deque()
        self._sends: deque[Post] = deque()

    def post(self, receives: Iterable[Post], sends: Iterable[Post]) -> None:
        """Copy what has met its counterpart."""
        self._receives += receives
        self._sends += sends
        while self._receives and self._sends:
            copy_across(self._sends.popleft(), self._receives.popleft())


@dataclass(slots=True)
class Standing:
    """How the ranks stand."""

    #: Which rank failed first, and why.
    failure: tuple[int, str] | None = None
    #: Ranks that have left in good order.
    left: set[int] = field(default_factory=set)

    def raise_if_failed(self, rank: int) -> None:
        """Raise on behalf of `rank`: `PeerLost` if another has failed."""
        if self.failure and self.failure[0] == rank:
            raise TransportError(f"this ring was aborted by its rank {rank}: {self.failure[1]}")
        if self.failure:
            raise PeerLost(f"rank {self.failure[0]} failed: {self.failure[1]}")

    def raise_if_lost(self, rank: int, waiting: set[int]) -> None:
        """Raise on behalf of `rank`, which waits for some ranks: `PeerLost` if one has failed, or
        one of those has left."""
        self.raise_if_failed(rank)
        if gone := waiting & self.left:
            raise PeerLost(f"rank {rank} waits for {name_ranks(gone)}, gone from the ring")


@dataclass(slots=True)
class Meeting(Standing):
    """Where ranks are waited for. `changed` guards it, and whatever they wait for."""

    changed: threading.Condition = field(default_factory=threading.Condition)

    def fail(self, rank: int, reason: str) -> None:
        """The first failure is kept; everyone who waits wakes up to it."""
        with self.changed:
            self.failure = self.failure or (rank, reason)
            self.changed.notify_all()

    def leave(self, rank: int) -> None:
        """Whoever waits for that rank wakes up to it."""
        with self.changed:
            self.left.add(rank)
            self.changed.notify_all()

    def wait_for(self, rank: int, peers: Callable[[], set[int]], timeout: float) -> set[int]:
        """Wait until there are no `peers` left to wait for; those that there are when the
        deadline passes. `PeerLost` if a rank has failed, or one of the peers has left."""
        deadline = time.monotonic() + timeout
        with self.changed:
            while waiting := peers():
                self.raise_if_lost(rank, waiting)
                if not self.changed.wait(deadline - time.monotonic()):
                    return peers()
        return set()


class Waiter(Protocol):
    """The rank that waits for a ticket."""

    rank: int

    def poll(self) -> None:
        """See `ringrt.transport.Transport`."""

    def wait_for(self, peers: Callable[[], set[int]], timeout: float) -> set[int]:
        """See `Meeting`."""


class PostTicket:
    """See `ringrt.transport.Ticket`."""

    span = None

    def __init__(self, waiter: Waiter, posts: list[Post], step: int) -> None:
        self._waiter, self._posts, self._step = waiter, posts, step

    def progress(self) -> bool:
        """Whether all is across; nothing needs to be moved from here."""
        if self._done():
            return True
        self._waiter.poll()
        return self._done()

    def wait(self, timeout: float) -> None:
        """Wait for the ranks that are behind."""
        rank = self._waiter.rank
        if not self._done() and self._waiter.wait_for(self._peers, timeout):
            pending = "; ".join(str(post) for post in self._open())
            raise ExchangeTimeout(
                f"rank {rank} waited {timeout:g} s in ring step {self._step} to {pending}"
            )
        for post in self._posts:
            if post.error:
                raise TransportError(
                    f"rank {rank}, ring step {self._step}, rank {post.peer}: {post.error}"
                )

    def _done(self) -> bool:
        return all([post.done for post in self._posts])

    def _open(self) -> list[Post]:
        return [post for post in self._posts if not post.done]

    def _peers(self) -> set[int]:
        return {post.peer for post in self._open()}
