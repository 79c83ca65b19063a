"""The data plane between two ranks over TCP: messages, matched in the order in which they were
posted. All of it runs on the I/O thread."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable

from ringrt.transports.posts import Meeting, Post
from ringrt.transports.tcp_loop import Connection, Loop
from ringrt.transports.tcp_wire import BadFrame, Frame, Kind


class Line:
    """Messages to and from one peer, on a connection of their own. That they have arrived is said
    on `control`, and only then is a send complete: a rank that has waited for its sends may go.
    `on_end` is told why the data connection is of no use any more."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        control: Connection,
        meeting: Meeting,
        on_end: Callable[[str], None],
    ) -> None:
        self._control, self._meeting = control, meeting
        self._data = Connection(loop, sock, self._place, self._arrived, on_end)
        self._receiving: deque[Post] = deque()
        self._sending: deque[Post] = deque()
        #: Messages so far: posted for sending, and received.
        self._sent = self._received = 0
        self._dropped = False

    def post(self, receives: Iterable[Post], sends: Iterable[Post]) -> None:
        """Read the peer's next messages into the buffers of `receives`, and send `sends`."""
        if self._dropped:
            return
        self._receiving += receives
        self._data.read(bool(self._receiving))
        for post in sends:
            self._sending.append(post)
            self._data.send(Kind.DATA, self._sent, post.data.data)
            self._sent += 1

    def hear(self, frame: Frame) -> None:
        """The peer has received a message, or one of another size than it expected."""
        post = self._sending.popleft()
        with self._meeting.changed:
            if frame.kind is Kind.ARRIVED:
                post.done = True
            else:
                post.refuse(post.data.nbytes, frame.number)
            self._meeting.changed.notify_all()

    def drop(self) -> None:
        """Forget all posts, those to come too, and touch their buffers no more."""
        self._dropped = True
        self._data.read(False)
        self._data.stop_sending()

    def _place(self, kind: Kind, number: int, size: int) -> memoryview:
        """The buffer of the receive that the coming message meets; one of another size is read
        into a place of its own, so that what comes after it is not lost."""
        if kind is not Kind.DATA or number != self._received:
            raise BadFrame(f"message {number} came in place of {self._received}")
        expected = self._receiving[0].data
        return expected.data if size == expected.nbytes else memoryview(bytearray(size))

    def _arrived(self, frame: Frame) -> None:
        self._received += 1
        post = self._receiving.popleft()
        self._data.read(bool(self._receiving))
        sent, expected = frame.payload.nbytes, post.data.nbytes
        # Before this rank can know, and say goodbye.
        if sent == expected:
            self._control.send(Kind.ARRIVED, expected)
        else:
            self._control.send(Kind.MISFIT, expected)
        with self._meeting.changed:
            if sent == expected:
                post.done = True
            else:
                post.refuse(sent, expected)
            self._meeting.changed.notify_all()
