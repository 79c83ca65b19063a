"""Arrays of a GPU over a transport between hosts: by way of pinned memory, in chunks.

While the host moves one chunk, the GPU copies the next one out and the last one in; and all of it
runs beside the kernels, which are queued already when the wait for the exchange begins.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ringrt.backend import Stream
from ringrt.device import Device, Kind
from ringrt.device.cuda import CudaDevice
from ringrt.device.driver import cupy
from ringrt.errors import ExchangeTimeout
from ringrt.plan.partition import Array
from ringrt.transport import Message, Releasable, Transport

#: Bytes of each message that are under way at a time; twice that is pinned.
CHUNK = 8 << 20


class Staging(NamedTuple):
    """Pinned memory: its address for the GPU, and its bytes for the host."""

    pinned: Any
    data: Array


class StagedTransport:
    """One end, `inner`, with the arrays of one GPU. See `ringrt.transport.Transport`."""

    device: Kind = "cuda"
    needs_progress = False
    captures = False

    def __init__(self, inner: Transport, on: CudaDevice, chunk: int = CHUNK) -> None:
        self.inner, self.on, self.chunk = inner, on, chunk
        self.rank, self.size = inner.rank, inner.size
        self.local_rank, self.local_size = inner.local_rank, inner.local_size
        self.copies = on.side_stream()
        self._staging: dict[tuple[str, int, int], Staging] = {}

    def attach(self, device: Device, places: Sequence[str], timeout: float) -> None:
        """Nothing: it was made for its device."""

    def keep_graph(self, graph: Releasable) -> None:
        """Only a ring of one rank is captured, and its graph holds nothing of this."""

    def exchange(
        self,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        *,
        step: int,
        stream: Stream = None,
    ) -> StagedTicket:
        """Begin to copy out the first chunk; the host's part is done in `StagedTicket.wait`,
        when there is nothing else for it to do."""
        self.copies.wait_event(stream.record())
        return StagedTicket(self, list(sends), list(recvs), step, stream)

    def settle(self, timeout: float) -> None:
        """Wait for the GPU; every ticket has been waited for."""
        self.on.wait(self.poll)

    def poll(self) -> None:
        """As the inner transport."""
        self.inner.poll()

    def all_gather_bytes(self, payload: bytes, timeout: float) -> list[bytes]:
        """As the inner transport."""
        return self.inner.all_gather_bytes(payload, timeout)

    def barrier(self, timeout: float) -> None:
        """As the inner transport."""
        self.inner.barrier(timeout)

    def abort(self, reason: str) -> None:
        """As the inner transport."""
        self.inner.abort(reason)

    def close(self) -> None:
        """As the inner transport."""
        self.inner.close()

    def staging(self, verb: str, message: int, turn: int, nbytes: int) -> Staging:
        """Pinned memory for a chunk of the nth message; two take turns."""
        key = verb, message, turn
        held = self._staging.get(key)
        if held is None or held.data.nbytes < nbytes:
            pinned = cupy().cuda.alloc_pinned_memory(nbytes)
            self._staging[key] = Staging(pinned, np.frombuffer(pinned, np.uint8, nbytes))
        held = self._staging[key]
        return Staging(held.pinned, held.data[:nbytes])


class _Chunk(NamedTuple):
    """A part of a message and where it is staged."""

    peer: int
    data: Array
    staging: Staging

    def out(self, stream: Any) -> None:
        """Copy it from the GPU."""
        self.data.data.copy_to_host_async(self.staging.pinned.ptr, self.data.nbytes, stream)  # type: ignore[attr-defined]

    def back(self, stream: Any) -> None:
        """Copy it to the GPU."""
        self.data.data.copy_from_host_async(self.staging.pinned.ptr, self.data.nbytes, stream)  # type: ignore[attr-defined]

    def message(self) -> Message:
        """As the inner transport moves it."""
        return Message(self.peer, self.staging.data)


class StagedTicket:
    """See `ringrt.transport.Ticket`."""

    def __init__(
        self,
        transport: StagedTransport,
        sends: list[Message],
        recvs: list[Message],
        step: int,
        stream: Any,
    ) -> None:
        self._transport, self._sends, self._recvs = transport, sends, recvs
        self._step, self._stream, self._done = step, stream, False
        most = max((m.data.nbytes for m in (*sends, *recvs)), default=0)
        self._rounds = -(-most // transport.chunk)
        self.span = (transport.copies.record(), None)
        self._outgoing = self._copy_out(0)

    def progress(self) -> bool:
        """The host moves nothing before `wait`."""
        return self._done

    def wait(self, timeout: float) -> None:
        """Chunk by chunk: what has been copied out goes to its peer, what arrives is copied in.
        The chunks of a message meet their like, since both ends know its size. All copies are on
        one stream, so a chunk that is out also says that the last one in its turn is in."""
        transport, copies = self._transport, self._transport.copies
        for turn in range(self._rounds):
            outgoing, ready = self._outgoing
            self._wait_for(ready, timeout)
            if turn + 1 < self._rounds:
                self._outgoing = self._copy_out(turn + 1)
            incoming = self._chunks("recv", self._recvs, turn)
            ticket = transport.inner.exchange(
                [c.message() for c in outgoing], [c.message() for c in incoming], step=self._step
            )
            ticket.wait(timeout)
            for chunk in incoming:
                chunk.back(copies)
        end = copies.record()
        self._stream.wait_event(end)
        self.span = (self.span[0], end)
        self._done = True

    def _copy_out(self, turn: int) -> tuple[list[_Chunk], Any]:
        chunks = self._chunks("send", self._sends, turn)
        for chunk in chunks:
            chunk.out(self._transport.copies)
        return chunks, self._transport.copies.record()

    def _chunks(self, verb: str, messages: list[Message], turn: int) -> list[_Chunk]:
        size, chunks = self._transport.chunk, []
        for number, message in enumerate(messages):
            part = message.data[turn * size : (turn + 1) * size]
            if part.nbytes:
                staging = self._transport.staging(verb, number, turn % 2, part.nbytes)
                chunks.append(_Chunk(message.peer, part, staging))
        return chunks

    def _wait_for(self, event: Any, timeout: float) -> None:
        """Until the GPU has copied; other ranks' failures end it too."""
        deadline = time.monotonic() + timeout
        while not self._transport.on.reached(event):
            self._transport.poll()
            if time.monotonic() > deadline:
                raise ExchangeTimeout(
                    f"rank {self._transport.rank} waited {timeout:g} s in ring step {self._step} "
                    f"for its GPU to copy what is to be exchanged"
                )
            time.sleep(20e-6)
