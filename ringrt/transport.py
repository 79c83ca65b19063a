"""What a transport is: it moves bytes between ranks, and tells when it cannot.

Two planes. The data plane (`exchange`) moves K,V as bytes, so that every dtype works. The
control plane (`all_gather_bytes`, `barrier`) moves small host messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ringrt.backend import Stream
from ringrt.device import Device, Kind, Mark
from ringrt.plan.partition import Array


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes to or from a peer: `data` is a contiguous uint8 array `[bytes]`."""

    peer: int
    data: Array


class Ticket(Protocol):
    """An exchange under way."""

    @property
    def span(self) -> tuple[Mark, Mark] | None:
        """Between which marks of the device it took place, where it runs on one; else None."""

    def progress(self) -> bool:
        """Give the transport a chance to move data, without waiting; True once complete.
        Raises `PeerLost` if the exchange can no longer complete."""

    def wait(self, timeout: float) -> None:
        """Return once all is sent and received; on a device, once what is queued from now on
        the stream comes behind that. `timeout` is in seconds. Raises `ExchangeTimeout` naming
        rank, peer, ring step and bytes, or `PeerLost`; on a device `Transport.settle` does."""


class Releasable(Protocol):
    """What can be given up."""

    def release(self) -> None:
        """Give it up."""


class Transport(Protocol):
    """One rank's end of a ring. Calls come from one thread, in the same order on all ranks."""

    #: This rank, and how many there are.
    rank: int
    size: int
    #: The like among the ranks on this machine, for sharing its cores and GPUs.
    local_rank: int
    local_size: int
    #: The kind of device on which the arrays of `exchange` lie.
    device: Kind
    #: Exchanges can be captured into a CUDA graph: the host takes no part in them.
    captures: bool
    #: Large messages move only while `Ticket.progress` or `wait` is being called.
    needs_progress: bool

    def attach(self, device: Device, places: Sequence[str], timeout: float) -> None:
        """Told before every pass on which device this rank's arrays lie, and where those of all
        ranks do, by name. Collective where that has changed."""

    def keep_graph(self, graph: Releasable) -> None:
        """A captured graph holds exchanges of this end: it must be released before the end can be
        closed or aborted."""

    def exchange(
        self,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        *,
        step: int,
        stream: Stream = None,
    ) -> Ticket:
        """Begin all sends and receives as one group, without waiting. Between two ranks,
        messages match in the order given.

        Until the ticket is complete the transport owns the buffers: sent ones may be read but
        not written, received ones not touched. On a device the exchange comes behind what the
        stream holds so far, and runs beside what is queued later. `step` is for error
        messages."""

    def settle(self, timeout: float) -> None:
        """At the end of a pass: return once every exchange begun is complete. Raises as
        `Ticket.wait`."""

    def poll(self) -> None:
        """Raise `PeerLost` if another rank has failed; return at once."""

    def all_gather_bytes(self, payload: bytes, timeout: float) -> list[bytes]:
        """Every rank's payload, in rank order. Collective. Raises `ExchangeTimeout` naming the
        ranks that did not come, or `PeerLost`."""

    def barrier(self, timeout: float) -> None:
        """Return once every rank has called it. Raises as `all_gather_bytes`."""

    def abort(self, reason: str) -> None:
        """This rank has failed: make every other rank's wait raise `PeerLost` with the reason.
        Never raises; the transport is unusable afterwards."""

    def close(self) -> None:
        """Leave in good order. Others that still wait for this rank get `PeerLost`."""


class HostTransport:
    """What is the same for every transport between hosts: nothing happens behind one's back."""

    device: Kind = "cpu"
    captures = False

    def attach(self, device: Device, places: Sequence[str], timeout: float) -> None:
        """See `Transport.attach`."""

    def keep_graph(self, graph: Releasable) -> None:
        """See `Transport.keep_graph`: none holds anything of this."""

    def settle(self, timeout: float) -> None:
        """See `Transport.settle`: every ticket has been waited for."""


class Launch(NamedTuple):
    """How a launcher (mpirun, say) started this process: as which of how many."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class TransportSpec:
    """How a plugin announces a transport, without importing what it needs.

    `probe()` says what is missing and what would mend it, or None.

    A transport between processes has `launched()`, which looks (at the environment, no more)
    whether its launcher started this process, and `connect()`, which joins the ring of all
    processes so started; `launcher` is what goes before a command to start it on four ranks, to be
    shown where it was not. A transport between thread ranks has `group(size)`, which makes the
    ends of a new ring, one for each rank. A transport that only moves data has `over(end)`, which
    makes its end of a ring from that of another transport, which stays its control plane.
    """

    name: str
    summary: str
    probe: Callable[[], str | None]
    launched: Callable[[], Launch | None] | None = None
    connect: Callable[[], Transport] | None = None
    group: Callable[[int], Sequence[Transport]] | None = None
    over: Callable[[Transport], Transport] | None = None
    launcher: str | None = None

    def start(self, command: str) -> str:
        """How a command is started by the launcher, in words."""
        return f"as in `{self.launcher} {command}`" if self.launcher else f"see: {self.summary}"
