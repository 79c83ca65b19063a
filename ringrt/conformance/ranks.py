"""One rank of a transport under test, as the checks see it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringrt.conformance.checks import expect
from ringrt.conformance.oracle import Array
from ringrt.device import Device
from ringrt.device.cuda import CudaDevice
from ringrt.device.driver import cupy
from ringrt.device.host import HOST
from ringrt.transport import Message, Ticket, Transport


class Rank:
    """One rank's end, on whose kind of device bytes lie."""

    #: The deadline of waits that are not meant to pass it, and of those that are, in seconds.
    timeout, short = 20.0, 0.5

    def __init__(self, end: Transport) -> None:
        self.end, self.rank, self.size = end, end.rank, end.size
        self.device: Device = HOST
        #: Exchanges that nobody waits for.
        self.unwaited: list[Ticket] = []
        self._closed = False

    @property
    def after(self) -> int:
        """The next rank round the ring."""
        return (self.rank + 1) % self.size

    @property
    def before(self) -> int:
        """The rank before this one."""
        return (self.rank - 1) % self.size

    @property
    def on_host(self) -> bool:
        """Whether the transport moves bytes of the host."""
        return self.end.device == "cpu"

    def attach(self) -> None:
        """As before a pass: collective."""
        if not self.on_host:
            count = cupy().cuda.runtime.getDeviceCount()
            self.device = CudaDevice(self.end.local_rank % count)
        place = f"{self.device.kind} {getattr(self.device, 'index', 0)}"
        places = [raw.decode() for raw in self.end.all_gather_bytes(place.encode(), self.timeout)]
        self.end.attach(self.device, places, self.timeout)

    def put(self, data: Array) -> Array:
        """Bytes of the host, where the transport takes them."""
        with self.device.running():
            return self.device.place(data)

    def get(self, x: Array) -> Array:
        """Bytes on the host."""
        with self.device.running():
            return self.device.to_host(x, "uint8")

    def empty(self, count: int) -> Array:
        """Where so many bytes will be received."""
        return self.put(np.full(count, 255, np.uint8))

    def hold(self, got: Array, want: Array, what: str) -> None:
        """What was received is what was sent."""
        host = self.get(got)
        wrong = np.flatnonzero(host != want)
        if len(wrong):
            at = int(wrong[0])
            text = f"byte {at} of {len(want)} is {host[at]}, sent was {want[at]}"
            expect(False, f"{what}: {text}")

    def exchange(
        self,
        sends: Sequence[tuple[int, Array]],
        recvs: Sequence[tuple[int, Array]],
        step: int = 0,
    ) -> Ticket:
        """Begin an exchange of (peer, bytes)."""
        with self.device.running():
            return self.end.exchange(
                [Message(*each) for each in sends],
                [Message(*each) for each in recvs],
                step=step,
                stream=self.device.stream,
            )

    def wait(self, ticket: Ticket, timeout: float | None = None) -> None:
        """For an exchange; on a device until it has taken place."""
        timeout = self.timeout if timeout is None else timeout
        with self.device.running():
            ticket.wait(timeout)
            self.end.settle(timeout)

    def settle(self) -> None:
        """As at the end of a pass."""
        with self.device.running():
            self.end.settle(self.timeout)

    def close(self) -> None:
        """Leave, once."""
        if not self._closed:
            self._closed = True
            self.end.close()


def pattern(count: int, source: int, destination: int, salt: int = 0) -> Array:
    """Bytes by which a message can be told from others."""
    begin = 7 * source + 31 * destination + 101 * salt + 1
    return np.resize(((begin + 13 * np.arange(251)) % 251).astype(np.uint8), count)
