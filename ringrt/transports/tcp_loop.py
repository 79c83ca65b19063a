"""The thread that does a rank's input and output, so that data moves while the rank computes: the
GIL is not held in system calls. Everything here but `Loop.call`, `Loop.end` and `Loop.wait` runs on
that thread."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable

from ringrt.transports.tcp_wire import Deadline, Frame, FrameReader, FrameWriter, Kind, Place

_LOOPS: weakref.WeakSet[Loop] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked process would keep its parent's connections open beyond the parent's death, of which
    nobody would hear then. Only its own copies are closed; the selector is the parent's too."""
    for loop in list(_LOOPS):
        for connection in list(loop._connections):
            connection.sock.close()


os.register_at_fork(after_in_child=_close_in_child)


class Loop:
    """Waits for all connections of one rank at once. `on_crash` is told if it ends by an error of
    its own; every connection is closed then, which tells the other ranks."""

    def __init__(self, name: str, on_crash: Callable[[BaseException], None]) -> None:
        self._selector = selectors.DefaultSelector()
        self._connections: set[Connection] = set()
        self._calls: deque[Callable[[], None]] = deque()
        self._waker, self._woken = socket.socketpair()
        for sock in (self._waker, self._woken):
            sock.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._wake_up)
        self._on_crash = on_crash
        self._over: Callable[[], bool] = lambda: False
        self._last: Deadline | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        _LOOPS.add(self)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Call it on the thread, soon and in order. From any thread."""
        self._calls.append(function)
        # A full pipe wakes the thread as well; a closed one has none.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def end(self, over: Callable[[], bool], timeout: float) -> None:
        """End once `over()`, or after `timeout` seconds. On the thread."""
        self._over, self._last = over, Deadline(timeout)

    def wait(self, timeout: float) -> None:
        """Until the thread has ended, for so many seconds at most. From any thread."""
        if self._thread.is_alive():
            self._thread.join(timeout)

    def watch(self, connection: Connection, events: int) -> None:
        """What to wait for on a connection, in place of what was waited for."""
        self._connections.add(connection)
        known = connection.sock in self._selector.get_map()
        if events and known:
            self._selector.modify(connection.sock, events, connection.handle)
        elif events:
            self._selector.register(connection.sock, events, connection.handle)
        elif known:
            self._selector.unregister(connection.sock)

    def forget(self, connection: Connection) -> None:
        """The connection is about to be closed."""
        self.watch(connection, 0)
        self._connections.discard(connection)

    def _run(self) -> None:
        try:
            while not self._over() and (self._last is None or self._last.left):
                timeout = None if self._last is None else self._last.left
                for key, events in self._selector.select(timeout):
                    key.data(events)
                while self._calls:
                    self._calls.popleft()()
        except BaseException as error:
            self._on_crash(error)
        finally:
            for connection in list(self._connections):
                connection.close()
            for end in (self._selector, self._waker, self._woken):
                end.close()

    def _wake_up(self, events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)


class Connection:
    """One socket of a loop. `place` says where the payloads of frames are to lie, `on_frame` is
    told of each, and `on_end` once, and why, when the other end is no longer there."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        place: Place,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.sock, self._loop = sock, loop
        sock.setblocking(False)
        self._reader, self._writer = FrameReader(sock, place), FrameWriter(sock)
        self._on_frame, self._on_end = on_frame, on_end
        self._events, self._reading, self._finishing = 0, False, False
        #: It has been closed at this end.
        self.closed = False
        loop.watch(self, 0)

    def read(self, wanted: bool) -> None:
        """Whether to read; what is not read waits, and stops the sender in the end."""
        self._reading = wanted
        self._update()

    def send(self, kind: Kind, number: int, payload: bytes | memoryview = b"") -> None:
        """Queue a frame, which is sent from where its payload lies."""
        if not self.closed:
            self._writer.put(kind, number, payload)
            self._update()

    def finish(self) -> None:
        """Say that nothing more will come, once all is sent."""
        self._finishing = True
        self._update()

    def stop_sending(self) -> None:
        """Send nothing more, be it in the middle of a frame."""
        self._writer.clear()
        self._update()

    def drain(self) -> None:
        """Read all that has come."""
        while not self.closed and self._attempt(self._read):
            pass

    def close(self) -> None:
        """Close this end."""
        if not self.closed:
            self.closed = True
            self._writer.clear()
            self._loop.forget(self)
            self.sock.close()

    def handle(self, events: int) -> None:
        """Do what the socket is ready for."""
        if events & selectors.EVENT_WRITE and not self.closed and self._writer:
            self._attempt(self._writer.write)
        if events & selectors.EVENT_READ and not self.closed and self._reading:
            self._attempt(self._read)
        self._update()

    def _read(self) -> None:
        frame = self._reader.read()
        if frame is not None:
            self._on_frame(frame)

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Whether there was anything to do; the end of the connection is told."""
        try:
            action()
        except BlockingIOError:
            return False
        except OSError as error:
            self.close()
            self._on_end(error.strerror or str(error))
        return True

    def _update(self) -> None:
        if self.closed:
            return
        if self._finishing and not self._writer:
            self._finishing = False
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)
        events = selectors.EVENT_READ if self._reading else 0
        events |= selectors.EVENT_WRITE if self._writer else 0
        if events != self._events:
            self._events = events
            self._loop.watch(self, events)
