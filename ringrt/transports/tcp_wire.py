"""What travels on a TCP connection: frames, each a small header and so many bytes after it.

    kind (1 byte) | number (8) | size of the payload in bytes (8) | payload

Integers are big-endian. What `number` means depends on the kind: a rank, or a place in a
sequence.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

_HEADER = struct.Struct("!BQQ")
#: The largest first frame of a connection, in bytes; a stranger's is not read any further.
_LARGEST_HELLO = 1 << 16


class Kind(IntEnum):
    """What a frame is."""

    #: The first frame of a connection: who is there.
    HELLO = 1
    #: Its answers: come in; you do not belong here; others did not come.
    WELCOME = 2
    REFUSED = 3
    LATE = 4
    #: A message of the data plane, counted from 0; it has arrived where so many bytes were
    #: expected, or where so many others were.
    DATA = 5
    ARRIVED = 6
    MISFIT = 7
    #: A payload of a control round, counted from 0.
    ROUND = 8
    #: The rank of that number has failed; the rank at the other end leaves.
    ABORT = 9
    LEFT = 10


class Frame(NamedTuple):
    """One frame, complete."""

    kind: Kind
    number: int
    payload: memoryview


#: Where the payload of a frame is to lie, told its kind, number and size.
Place = Callable[[Kind, int, int], memoryview]


class BadFrame(ConnectionError):
    """Bytes that are not a frame of ours: the connection is of no use any more."""


class Deadline:
    """`timeout` seconds from now."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._at = time.monotonic() + timeout

    @property
    def left(self) -> float:
        """Seconds that are left; not below 0."""
        return max(0.0, self._at - time.monotonic())


def in_memory(largest: int | None = None) -> Place:
    """A place of its own for every payload, of at most `largest` bytes."""

    def place(kind: Kind, number: int, size: int) -> memoryview:
        if largest is not None and size > largest:
            raise BadFrame(f"a frame of {size} bytes where at most {largest} are expected")
        return memoryview(bytearray(size))

    return place


class FrameReader:
    """Frames from a socket, blocking or not."""

    def __init__(self, sock: socket.socket, place: Place) -> None:
        self._sock, self._place = sock, place
        self._header = bytearray(_HEADER.size)
        self._begin()

    def read(self) -> Frame | None:
        """Go on with a frame; None while it is not complete. At most two system calls, so that
        one connection does not keep the others waiting. Raises what the socket raises
        (`BlockingIOError` too), and `ConnectionError` where the connection has been closed."""
        if self._kind is None:
            self._fill()
            if self._filled < _HEADER.size:
                return None
            self._begin_payload()
        if self._filled < len(self._target):
            self._fill()
            if self._filled < len(self._target):
                return None
        assert self._kind is not None
        frame = Frame(self._kind, self._number, self._target)
        self._begin()
        return frame

    def _begin(self) -> None:
        self._kind: Kind | None = None
        self._number = self._filled = 0
        self._target = memoryview(self._header)

    def _begin_payload(self) -> None:
        kind, self._number, size = _HEADER.unpack(self._header)
        try:
            self._kind = Kind(kind)
        except ValueError:
            raise BadFrame("it does not speak as a rank does") from None
        self._target, self._filled = self._place(self._kind, self._number, size), 0

    def _fill(self) -> None:
        count = self._sock.recv_into(self._target[self._filled :])
        if count == 0:
            raise ConnectionError("it was closed")
        self._filled += count


class FrameWriter:
    """Frames to a non-blocking socket, one after the other, from where their payloads lie."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        #: What is still to be sent of each frame.
        self._queue: deque[list[memoryview]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, kind: Kind, number: int, payload: bytes | memoryview = b"") -> None:
        """Queue a frame."""
        data = memoryview(payload)
        header = memoryview(_HEADER.pack(kind, number, data.nbytes))
        self._queue.append([header, data])

    def write(self) -> None:
        """Send what the socket takes at once of the first frame. Raises what the socket raises."""
        parts = self._queue[0]
        count = self._sock.sendmsg(parts)
        while parts and count >= parts[0].nbytes:
            count -= parts.pop(0).nbytes
        if parts:
            parts[0] = parts[0][count:]
        else:
            self._queue.popleft()

    def clear(self) -> None:
        """Send nothing more."""
        self._queue.clear()


def send_frame(sock: socket.socket, kind: Kind, number: int, payload: bytes = b"") -> None:
    """Send one small frame, on a connection without a loop."""
    sock.sendall(_HEADER.pack(kind, number, len(payload)) + payload)


def read_frame(sock: socket.socket, deadline: Deadline) -> Frame:
    """Wait for one frame, on a connection without a loop. Raises `TimeoutError` past the deadline,
    else as `FrameReader.read`."""
    reader, frame = FrameReader(sock, in_memory()), None
    while frame is None:
        left = deadline.left
        if not left:
            raise TimeoutError
        sock.settimeout(left)
        frame = reader.read()
    return frame


def admit(
    listener: socket.socket,
    keep: Callable[[socket.socket, Frame], bool],
    complete: Callable[[], bool],
    deadline: Deadline,
) -> None:
    """Accept connections until `complete()` or the deadline. `keep` gets each with its first
    frame, and says whether it belongs here. One that does not is closed, and so is one that says
    something else than HELLO; neither keeps anybody waiting."""
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while not complete() and (left := deadline.left):
                for key, _ in selector.select(left):
                    if key.data is None:
                        _accept(listener, selector)
                    else:
                        _greet(key.data, selector, keep)
        finally:
            for key in selector.get_map().values():
                if key.data is not None:
                    key.data.sock.close()


class _Guest:
    """A connection that has not said yet who it is."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.reader = FrameReader(sock, in_memory(_LARGEST_HELLO))


def _accept(listener: socket.socket, selector: selectors.BaseSelector) -> None:
    # The guest may have gone again.
    with contextlib.suppress(BlockingIOError, ConnectionError):
        sock, _ = listener.accept()
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, _Guest(sock))


def _greet(
    guest: _Guest,
    selector: selectors.BaseSelector,
    keep: Callable[[socket.socket, Frame], bool],
) -> None:
    kept = False
    # Whatever goes wrong with its connection, a guest has gone, or is a stranger.
    with contextlib.suppress(OSError):
        try:
            frame = guest.reader.read()
        except BlockingIOError:
            return
        if frame is None:
            return
        selector.unregister(guest.sock)
        guest.sock.setblocking(True)
        kept = frame.kind is Kind.HELLO and keep(guest.sock, frame)
    if not kept:
        with contextlib.suppress(KeyError):
            selector.unregister(guest.sock)
        guest.sock.close()
