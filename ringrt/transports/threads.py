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
from ringrt.errors import ExchangeTimeout, TransportError, name_ranks
from ringrt.plan.partition import Array
from ringrt.transport import HostTransport, Message
from ringrt.transports.posts import Standing, copied


@dataclass(eq=False, slots=True)
class _Bundle:
    """What one exchange sends to one rank, or receives (`incoming`) from it: arrays of bytes, in
    order. Of these so many have `met` their counterparts, and so many are `across`."""

    incoming: bool
    peer: int
    data: list[Array]
    met: int = 0
    across: int = 0
    error: str | None = None

    def pending(self) -> list[str]:
        """What is not across, each in words."""
        verb, link = ("recv", "from") if self.incoming else ("send", "to")
        return [
            f"{verb} {x.nbytes} bytes {link} rank {self.peer}" for x in self.data[self.across :]
        ]


class _Match(NamedTuple):
    """Arrays of a bundle that is sent, each with its counterpart in one that is received."""

    sent: _Bundle
    received: _Bundle
    pairs: list[tuple[Array, Array]]

    def copy(self) -> None:
        """The bytes of all."""
        for send, recv in self.pairs:
            if not copied(send, recv):
                words = f"{send.nbytes} bytes sent meet {recv.nbytes} expected"
                self.sent.error = self.received.error = words


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
    #: What waits for its counterpart, all of one direction, by (source, destination).
    unmatched: dict[tuple[int, int], deque[_Bundle]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    #: Control-plane rounds that are not complete: payloads by rank.
    rounds: dict[int, dict[int, bytes]] = field(default_factory=lambda: defaultdict(dict))

    def match(self, rank: int, bundles: Iterable[_Bundle]) -> list[_Match]:
        """What of a rank's bundles meets what waits already. The rest is left to be found."""
        found: list[_Match] = []
        with self.lock:
            for bundle in bundles:
                incoming, peer = bundle.incoming, bundle.peer
                queue = self.unmatched[(peer, rank) if incoming else (rank, peer)]
                while queue and queue[0].incoming != incoming and bundle.met < len(bundle.data):
                    other = queue[0]
                    sent, received = (other, bundle) if incoming else (bundle, other)
                    rest = sent.data[sent.met :], received.data[received.met :]
                    pairs = list(zip(*rest, strict=False))
                    found.append(_Match(sent, received, pairs))
                    bundle.met += len(pairs)
                    other.met += len(pairs)
                    if other.met == len(other.data):
                        queue.popleft()
                if bundle.met < len(bundle.data):
                    queue.append(bundle)
        return found

    def settle(self, matches: Iterable[_Match]) -> None:
        """These have been copied: wake who has waited for them, and for nothing else."""
        with self.lock:
            for match in matches:
                match.sent.across += len(match.pairs)
                match.received.across += len(match.pairs)
            if self.asleep:
                self._wake(
                    {rank for each in matches for rank in (each.sent.peer, each.received.peer)}
                )

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


class _Ticket:
    """See `ringrt.transport.Ticket`."""

    span = None

    def __init__(self, end: ThreadTransport, bundles: list[_Bundle], step: int) -> None:
        self._end, self._bundles, self._step = end, bundles, step

    def progress(self) -> bool:
        """Whether all is across; nothing needs to be moved from here."""
        if not self._complete():
            self._end.poll()
        return self._complete()

    def wait(self, timeout: float) -> None:
        """Wait for the ranks that are behind."""
        rank = self._end.rank
        if not self._complete() and self._end.wait_for(self._peers, timeout):
            pending = [words for bundle in self._bundles for words in bundle.pending()]
            raise ExchangeTimeout(
                f"rank {rank} waited {timeout:g} s in ring step {self._step} to "
                f"{'; '.join(pending)}"
            )
        for bundle in self._bundles:
            if bundle.error:
                raise TransportError(
                    f"rank {rank}, ring step {self._step}, rank {bundle.peer}: {bundle.error}"
                )

    def _complete(self) -> bool:
        return all([each.across == len(each.data) for each in self._bundles])

    def _peers(self) -> set[int]:
        return {each.peer for each in self._bundles if each.across < len(each.data)}


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
    ) -> _Ticket:
        """Post all messages; copy those whose counterpart is already there."""
        bundles = _bundles(recvs, incoming=True) + _bundles(sends, incoming=False)
        if matches := self._group.match(self.rank, bundles):
            for match in matches:
                match.copy()
            self._group.settle(matches)
        return _Ticket(self, bundles, step)

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


def _bundles(messages: Sequence[Message], incoming: bool) -> list[_Bundle]:
    """Messages by peer."""
    if not messages:
        return []
    data: dict[int, list[Array]] = {}
    for message in messages:
        if message.peer in data:
            data[message.peer].append(message.data)
        else:
            data[message.peer] = [message.data]
    return [_Bundle(incoming, peer, arrays) for peer, arrays in data.items()]


def thread_group(size: int) -> list[ThreadTransport]:
    """The ends of a new ring of `size` thread ranks."""
    group = _Group(size=size)
    return [ThreadTransport(group, rank) for rank in range(size)]
