"""What passes between this rank and one other: frames, each a few signals, and large payloads.

A receive that is posted is told to the sender (READY), which answers with its oldest message. A
small one it sends before it is asked (DATA); a large one then (GO, and the bytes), straight from
the sender's memory into the receiver's, which says when it is there (DONE):

    receiver   READY 9 MB ->                 -> DONE        READY 4 kB ->
    sender                  GO 9 MB, bytes ->               DATA, with the bytes ->

So both sides compare the sizes, no large message goes where it is not awaited, and a send that is
complete has arrived or lies before all that its sender says later.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from ringrt.plan.partition import Array
from ringrt.transports.gloo import Mesh, Sent
from ringrt.transports.posts import NO_GOODBYE, Meeting, Post

#: The largest payload that travels in a frame, in bytes.
SMALL = 1 << 16
#: The largest frame, in bytes. It begins with numbers, int64: how many frames of the other side
#: have been dealt with, how many signals there are, and for each the signal and its number. Small
#: payloads come behind, in order.
_FRAME_BYTES = 1024 + SMALL
#: How many frames may be on their way before they are dealt with.
_FRAMES = 4


class Signal(IntEnum):
    """What a frame says. Each comes with a number: of bytes, but for DONE and LEFT."""

    #: I await your next message.
    READY = 1
    #: Here is your next message.
    DATA = 2
    #: Your next message follows, if you expect so many bytes.
    GO = 3
    #: A message that followed has arrived.
    DONE = 4
    #: My part of the next control round is here, or follows if it is large.
    ROUND = 5
    #: A rank, which may be me, has failed: "rank reason".
    FAILED = 6
    #: I leave, and say nothing more.
    LEFT = 7


_WITH_PAYLOAD = {Signal.DATA, Signal.ROUND, Signal.FAILED}


class Tag(IntEnum):
    """What a message of the mesh is: a frame, or what follows one."""

    FRAME = 1
    MESSAGE = 2
    ROUND = 3


class Item(NamedTuple):
    """One signal of a frame, and its payload."""

    signal: Signal
    number: int = 0
    payload: Array | None = None

    @property
    def inline(self) -> bool:
        """Whether the payload travels in the frame."""
        return self.signal in _WITH_PAYLOAD and self.number <= SMALL


@dataclass(slots=True)
class _Send:
    """A send that the peer has not asked for; it may have been given to it."""

    post: Post
    given: bool


class Link:
    """This rank's end. All but `read` is called with the meeting's `changed` held."""

    def __init__(self, mesh: Mesh, peer: int, meeting: Meeting) -> None:
        self.peer = peer
        self._mesh, self._meeting = mesh, meeting
        #: Receives that wait for a message, or small messages that wait for a receive.
        self._receives: deque[Post] = deque()
        self._arrived: deque[Array] = deque()
        #: Sends that wait to be asked for, or sizes of receives that wait for a send.
        self._sends: deque[_Send] = deque()
        self._asked: deque[int] = deque()
        #: Large sends that have been begun, and what must be kept until they are done.
        self._under_way: deque[tuple[Post, Sent]] = deque()
        #: What the peer gave to control rounds that this rank is not at yet.
        self.rounds: deque[bytes] = deque()
        #: The peer says nothing more.
        self.ended = False
        #: Frames, with what followed them, that the peer may not have dealt with; how many it has,
        #: and how many of its frames this rank has.
        self._told: deque[list[Sent]] = deque()
        self._seen = self._heard = 0
        #: Receives of frames under way.
        self._frames: deque[Sent] = deque()

    def post(self, receives: Sequence[Post], sends: Sequence[Post]) -> None:
        """Take part in an exchange."""
        items = [Item(Signal.READY, post.data.nbytes) for post in receives]
        for post in sends:
            # A message must not overtake one before it that is not asked for yet.
            give = post.data.nbytes <= SMALL and all(send.given for send in self._sends)
            self._sends.append(_Send(post, give))
            if give:
                items.append(_data(post))
        self._tell(items + self._answers())
        self._receives += receives
        self._take()

    def contribute(self, payload: bytes) -> None:
        """Send this rank's part of the next control round."""
        self._tell([Item(Signal.ROUND, len(payload), np.frombuffer(payload, np.uint8))])

    def report(self, rank: int, reason: str) -> None:
        """Say that a rank has failed, and why."""
        text = f"{rank} {reason}".encode()[:SMALL]
        self._tell([Item(Signal.FAILED, len(text), np.frombuffer(text, np.uint8))])

    def leave(self) -> None:
        """Say goodbye."""
        self._tell([Item(Signal.LEFT)])

    def unheard(self) -> list[Sent]:
        """What may not have been sent yet."""
        return [sent for told in self._told for sent in told]

    def read(self) -> None:
        """Deal with what the peer says, until it leaves or dies. Runs on the link's thread."""
        try:
            for _ in range(_FRAMES):
                self._await(np.empty(_FRAME_BYTES, np.uint8))
            while not self.ended:
                sent = self._frames.popleft()
                self._mesh.wait(sent)
                self._hear(sent[1])
                if not self.ended:
                    self._await(sent[1])
        except ConnectionError:
            self._meeting.fail(self.peer, NO_GOODBYE)
        except Exception as error:
            self._meeting.fail(self.peer, f"what it says is not understood: {error!r}")
        with self._meeting.changed:
            self.ended = True
            self._meeting.changed.notify_all()

    def _await(self, frame: Array) -> None:
        self._frames.append(self._mesh.recv(self.peer, Tag.FRAME, frame))

    def _tell(self, items: Sequence[Item]) -> None:
        """Send signals. What the peer is no longer there to hear is dropped: the thread finds out
        why."""
        for part in _frames(items):
            signals = [number for item in part for number in (item.signal, item.number)]
            numbers = np.array([self._heard, len(part), *signals], np.int64)
            inline = [item.payload for item in part if item.payload is not None and item.inline]
            frame = np.concatenate([numbers.view(np.uint8), *inline])
            try:
                kept = [self._mesh.send(self.peer, Tag.FRAME, frame)]
                for item in part:
                    if item.payload is not None and not item.inline:
                        kept.append(self._mesh.send(self.peer, Tag.ROUND, item.payload))
            except ConnectionError:
                return
            self._told.append(kept)

    def _answers(self) -> list[Item]:
        """What the peer has asked for and has not been given."""
        items = []
        while self._asked and self._sends:
            expected, send = self._asked.popleft(), self._sends.popleft()
            size = send.post.data.nbytes
            if size > SMALL:
                items.append(Item(Signal.GO, size))
            elif not send.given:
                items.append(_data(send.post))
            if size != expected:
                send.post.refuse(size, expected)
            elif size > SMALL:
                self._begin(send.post)
            else:
                send.post.done = True
        return items

    def _begin(self, post: Post) -> None:
        """Hand a large message to gloo. That comes before the GO: a send that is awaited already
        would be done by the thread that calls it, and not by gloo's."""
        with contextlib.suppress(ConnectionError):
            self._under_way.append((post, self._mesh.send(self.peer, Tag.MESSAGE, post.data)))

    def _take(self) -> None:
        """Receive what has arrived."""
        while self._receives and self._arrived:
            post, data = self._receives.popleft(), self._arrived.popleft()
            if data.nbytes != post.data.nbytes:
                post.refuse(data.nbytes, post.data.nbytes)
            else:
                np.copyto(post.data, data)
                post.done = True

    def _hear(self, frame: Array) -> None:
        items = _read(frame)
        with self._meeting.changed:
            seen = int(frame[:8].view(np.int64)[0])
            for _ in range(seen - self._seen):
                self._told.popleft()
            self._seen = seen
            self._asked += [item.number for item in items if item.signal is Signal.READY]
            self._tell(self._answers())
            self._meeting.changed.notify_all()
        for item in items:
            if item.signal is Signal.GO:
                self._receive(item.number)
            payload = item.payload
            if item.signal is Signal.ROUND and payload is None:
                payload = np.empty(item.number, np.uint8)
                self._mesh.wait(self._mesh.recv(self.peer, Tag.ROUND, payload))
            with self._meeting.changed:
                self._note(item.signal, payload)
                self._meeting.changed.notify_all()
        with self._meeting.changed:
            self._heard += 1

    def _note(self, signal: Signal, payload: Array | None) -> None:
        if signal is Signal.DATA and payload is not None:
            self._arrived.append(payload.copy())
            self._take()
        elif signal is Signal.DONE:
            self._under_way.popleft()[0].done = True
        elif signal is Signal.ROUND and payload is not None:
            self.rounds.append(payload.tobytes())
        elif signal is Signal.FAILED and payload is not None:
            rank, _, reason = payload.tobytes().decode(errors="replace").partition(" ")
            self._note_failure(int(rank), reason)
        elif signal is Signal.LEFT:
            self.ended = True
            self._meeting.leave(self.peer)

    def _note_failure(self, rank: int, reason: str) -> None:
        if rank == self._mesh.rank:
            rank, reason = self.peer, f"it has lost rank {rank}: {reason}"
        self._meeting.fail(rank, reason)

    def _receive(self, size: int) -> None:
        """Read the large message that the peer has begun to send."""
        post = self._receives[0]
        right = size == post.data.nbytes
        if right:
            self._mesh.wait(self._mesh.recv(self.peer, Tag.MESSAGE, post.data))
        with self._meeting.changed:
            self._receives.popleft()
            if right:
                # Before anybody can know that it is done, and say goodbye.
                self._tell([Item(Signal.DONE)])
                post.done = True
            else:
                post.refuse(size, post.data.nbytes)
            self._meeting.changed.notify_all()


def _data(post: Post) -> Item:
    return Item(Signal.DATA, post.data.nbytes, post.data)


def _frames(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Items in the order given, as many as go into a frame."""
    part: list[Item] = []
    size = 16
    for item in items:
        more = 16 + (item.number if item.inline else 0)
        if size + more > _FRAME_BYTES:
            yield part
            part, size = [], 16
        part.append(item)
        size += more
    if part:
        yield part


def _read(frame: Array) -> list[Item]:
    """The items of a frame."""
    count = int(frame[8:16].view(np.int64)[0])
    begin = 16 + 16 * count
    items = []
    for signal, number in frame[16:begin].view(np.int64).reshape(count, 2).tolist():
        item = Item(Signal(signal), number)
        if item.inline:
            item = item._replace(payload=frame[begin : begin + number])
            begin += number
        items.append(item)
    return items
