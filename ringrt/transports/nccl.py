"""Arrays of GPUs by NCCL, from stream to stream: the host only queues.

The control plane (who is there, who has failed, the communicator's id) is another transport,
between threads or over MPI. Exchanges run on a stream of their own, of high priority, so that
kernels which compute do not keep them from starting. They are handed over by events: an exchange
waits for what the computing stream held when it was posted, and what is queued after
`NcclTicket.wait` waits for the exchange. The host waits once, at the end of a pass.

NCCL reports no dead peer: its kernels wait for ever. So a thread watches the oldest exchange that
has begun, and aborts the communicator when it is past its deadline; then the GPU's queue drains,
and `settle` tells what happened.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

from ringrt.backend import Stream
from ringrt.device import Device, Kind, Mark
from ringrt.device.cuda import CudaDevice
from ringrt.device.driver import cupy, nccl
from ringrt.errors import ExchangeTimeout, RingrtError, TransportError
from ringrt.transport import Message, Releasable, Transport

#: The scheduler takes the highest that there is where this is higher.
_HIGH_PRIORITY = -5
#: How often the watchdog looks, in seconds.
_WATCH_EVERY = 0.01
#: How long to wait for a call of NCCL to return before the communicator is aborted under it.
_CALL_TIMEOUT = 1.0
#: The setting by which NCCL lets several ranks share a GPU.
_SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"


class NcclTransport:
    """One rank's end. See `ringrt.transport.Transport`. Ranks on one GPU need NCCL 2.30 and
    `NCCL_MULTI_RANK_GPU_ENABLE=1`; see docs/gpu.md."""

    device: Kind = "cuda"
    needs_progress = False
    captures = True

    def __init__(self, control: Transport) -> None:
        self._control = control
        self.rank, self.size = control.rank, control.size
        self.local_rank, self.local_size = control.local_rank, control.local_size
        #: By where the arrays of all ranks lie.
        self._links: dict[tuple[str, ...], _Link] = {}
        self._link: _Link | None = None
        self._graphs: WeakSet[Releasable] = WeakSet()

    def attach(self, device: Device, places: Sequence[str], timeout: float) -> None:
        """Join a communicator of all ranks on their devices, unless there is one already."""
        assert isinstance(device, CudaDevice)
        key = tuple(places)
        if key not in self._links:
            link = _Link(self._control, device)
            try:
                link.connect(timeout)
            except BaseException as error:
                self.abort(str(error) or type(error).__name__)
                raise
            self._links[key] = link
        self._link = self._links[key]

    def keep_graph(self, graph: Releasable) -> None:
        """NCCL waits, in abort and destroy, for graphs that hold its communicator."""
        self._graphs.add(graph)

    def exchange(
        self,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        *,
        step: int,
        stream: Stream = None,
    ) -> NcclTicket:
        """Queue all receives and sends as one group."""
        assert self._link is not None, "attach comes first"
        return self._link.exchange(sends, recvs, step, stream)

    def settle(self, timeout: float) -> None:
        """Wait for the GPU."""
        assert self._link is not None
        self._link.settle()

    def poll(self) -> None:
        """As the control plane."""
        self._control.poll()

    def all_gather_bytes(self, payload: bytes, timeout: float) -> list[bytes]:
        """As the control plane."""
        return self._control.all_gather_bytes(payload, timeout)

    def barrier(self, timeout: float) -> None:
        """As the control plane."""
        self._control.barrier(timeout)

    def abort(self, reason: str) -> None:
        """Tell the others, and free this GPU from what it waits for."""
        self._control.abort(reason)
        self._release()
        for link in self._links.values():
            link.abort()

    def close(self) -> None:
        """Leave the communicators."""
        self._release()
        for link in self._links.values():
            link.close()
        self._control.close()

    def _release(self) -> None:
        for graph in list(self._graphs):
            graph.release()


class NcclTicket:
    """See `ringrt.transport.Ticket`."""

    def __init__(
        self, link: _Link, messages: Sequence[str], buffers: Any, step: int, stream: Any
    ) -> None:
        self._link, self._step, self._stream = link, step, stream
        self._messages = messages
        #: The transport's until the exchange is complete.
        self.buffers = buffers
        self.begin: Mark = None
        self.end: Mark = None
        self.deadline: float | None = None
        self.timeout: float | None = None

    @property
    def span(self) -> tuple[Mark, Mark]:
        """On the transport's stream; none while capturing."""
        captured = self._link.device.capturing
        return (None, None) if captured else (self.begin, self.end)

    def progress(self) -> bool:
        """The GPU needs no help; whether it is done is nobody's concern yet."""
        return False

    def wait(self, timeout: float) -> None:
        """Make the computing stream wait; from now on the exchange has a deadline."""
        self.timeout = timeout
        self._stream.wait_event(self.end)

    def late(self) -> str:
        """What it waits for, in words."""
        return (
            f"rank {self._link.rank} waited {self.timeout:g} s in ring step {self._step} to "
            + "; ".join(self._messages)
        )


class _Link:
    """A communicator on one device, and who watches it."""

    def __init__(self, control: Transport, device: CudaDevice) -> None:
        self.rank, self.size, self.device = control.rank, control.size, device
        self._control, self._nccl = control, nccl()
        self._stream: Any = device.side_stream(_HIGH_PRIORITY)
        self._comm: Any = None
        self._failure: RingrtError | None = None
        self._open: deque[NcclTicket] = deque()
        self._changed = threading.Condition()
        #: Held while NCCL is called: a communicator must not be aborted under a call.
        self._calling = threading.RLock()
        self._closed = False

    def connect(self, timeout: float) -> None:
        """Join the communicator, and pass a byte to every other rank and from it: NCCL makes its
        connections when two ranks first talk, and its host threads wait for one another there,
        with no deadline. Collective; afterwards all ranks have come so far."""
        if self.size == 1:
            return
        mine = b""
        if self.rank == 0:
            with _mapped(self._nccl):
                mine = bytes(self._nccl.get_unique_id())
        unique = self._control.all_gather_bytes(mine, timeout)[0]
        late = f"rank {self.rank} waited {timeout:g} s for others to join its NCCL communicator"
        self._comm = _within(timeout, lambda: self._join(unique), self._control.poll, late)
        self._control.barrier(timeout)
        name = f"ringrt-nccl-{self.rank}"
        threading.Thread(target=self._watch, name=name, daemon=True).start()

    def _join(self, unique: bytes) -> Any:
        peers = [rank for rank in range(self.size) if rank != self.rank]
        with self.device.gpu, self._stream, _mapped(self._nccl):
            comm = self._nccl.NcclCommunicator(self.size, unique, self.rank)
            sent, got = self.device.bytes(self.size), self.device.bytes(self.size)
            sends = [Message(peer, sent[peer : peer + 1]) for peer in peers]
            recvs = [Message(peer, got[peer : peer + 1]) for peer in peers]
            self._group(comm, sends, recvs)
            self._stream.synchronize()
        return comm

    def exchange(
        self, sends: Sequence[Message], recvs: Sequence[Message], step: int, stream: Any
    ) -> NcclTicket:
        """Behind what the computing stream holds so far."""
        sends, recvs = ([m for m in each if m.data.nbytes] for each in (sends, recvs))
        words = [f"recv {m.data.nbytes} bytes from rank {m.peer}" for m in recvs]
        words += [f"send {m.data.nbytes} bytes to rank {m.peer}" for m in sends]
        ticket = NcclTicket(self, words, (sends, recvs), step, stream)
        self._stream.wait_event(stream.record())
        ticket.begin = self._mark()
        if words:
            with self._calling, _mapped(self._nccl):
                if self._comm is None:
                    raise self._failure or TransportError(
                        f"the NCCL communicator of rank {self.rank} was aborted"
                    )
                self._group(self._comm, sends, recvs)
        ticket.end = self._mark()
        if words and not self.device.capturing:
            with self._changed:
                self._open.append(ticket)
                self._changed.notify()
        return ticket

    def _group(self, comm: Any, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        self._nccl.groupStart()
        try:
            for verb, messages in ((comm.recv, recvs), (comm.send, sends)):
                for m in messages:
                    address = m.data.data.ptr  # type: ignore[attr-defined]
                    count, kind = m.data.nbytes, self._nccl.NCCL_UINT8
                    verb(address, count, kind, m.peer, self._stream.ptr)
        finally:
            self._nccl.groupEnd()

    def _mark(self) -> Any:
        event = cupy().cuda.Event()
        event.record(self._stream)
        return event

    def settle(self) -> None:
        """Wait until the GPU is done, or somebody has failed."""
        try:
            self.device.wait(self._check)
        except RingrtError:
            self.abort()
            raise
        with self._changed:
            self._open.clear()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._control.poll()

    def abort(self) -> None:
        """Take the communicator off the GPU, once."""
        self._leave(lambda comm: comm.abort())

    def close(self) -> None:
        """Leave the communicator; the other ranks may still be at work."""
        self._leave(lambda comm: comm.destroy())

    def _leave(self, leave: Callable[[Any], None]) -> None:
        """Not while a call of NCCL is under way in another thread, unless it does not end."""
        held = self._calling.acquire(timeout=_CALL_TIMEOUT)
        try:
            with self._changed:
                comm, self._comm, self._closed = self._comm, None, True
                self._changed.notify()
            if comm is not None:
                with contextlib.suppress(Exception), self.device.gpu:
                    leave(comm)
        finally:
            if held:
                self._calling.release()

    def _watch(self) -> None:
        """The watchdog's thread. The clock of an exchange starts when the GPU has come to it."""
        self.device.gpu.use()
        while True:
            with self._changed:
                while not self._open and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                ticket = self._open[0]
            try:
                done, late = self.device.reached(ticket.end), self._past_deadline(ticket)
                self._check_network()
            except RingrtError as error:
                # The rank itself finds out what has failed on its GPU; of the network, here.
                self._failure = self._failure or error
                self.abort()
                return
            if done:
                self._drop(ticket)
            elif late:
                self._failure = ExchangeTimeout(ticket.late())
                self.abort()
                return
            else:
                time.sleep(_WATCH_EVERY)

    def _check_network(self) -> None:
        """NCCL tells of broken connections only when asked."""
        if self._calling.acquire(blocking=False):
            try:
                with _mapped(self._nccl):
                    if self._comm is not None:
                        self._comm.check_async_error()
            finally:
                self._calling.release()

    def _drop(self, ticket: NcclTicket) -> None:
        with self._changed:
            if self._open and self._open[0] is ticket:
                self._open.popleft()

    def _past_deadline(self, ticket: NcclTicket) -> bool:
        if ticket.timeout is None or not self.device.reached(ticket.begin):
            return False
        now = time.monotonic()
        if ticket.deadline is None:
            ticket.deadline = now + ticket.timeout
        return now > ticket.deadline


def _within(timeout: float, join: Callable[[], Any], poll: Callable[[], None], late: str) -> Any:
    """`join()`, which blocks until every rank has come, for so many seconds at most and while
    `poll` does not raise."""
    result: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(join())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(0.02)
        poll()
    if failure:
        raise failure[0]
    if not result:
        raise ExchangeTimeout(late)
    return result[0]


@contextlib.contextmanager
def _mapped(nccl: Any) -> Iterator[None]:
    """NCCL's errors, as ours."""
    try:
        yield
    except nccl.NcclError as error:
        text = f"NCCL: {error}"
        if os.environ.get(_SHARED_GPU) != "1":
            text += f" (ranks on one GPU need {_SHARED_GPU}=1)"
        raise TransportError(text) from error
