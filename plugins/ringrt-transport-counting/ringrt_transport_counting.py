"""The transport `counting` for ringrt: moves everything by the transport it is put over, `threads`
or what the launcher uses, and counts messages and bytes by peer.

Only the data plane is counted: what `exchange` is given. Control rounds and barriers are not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ringrt.backend import Stream
from ringrt.device import Device
from ringrt.errors import ConfigError, TransportError
from ringrt.hookspecs import hookimpl
from ringrt.transport import Message, Releasable, Ticket, Transport, TransportSpec

RINGRT_PROTOCOL = 1

#: A path: when a rank's end is closed, its counts are written beside it, as path.RANK.json.
VARIABLE = "RINGRT_COUNTING"


@hookimpl
def ringrt_register_transports() -> list[TransportSpec]:
    """counting, over any other transport."""
    return [
        TransportSpec(
            name="counting",
            summary="counts messages and bytes by peer, over threads or a launcher's transport",
            probe=lambda: None,
            over=_over,
        )
    ]


def _over(end: Transport) -> Transport:
    given = os.environ.get(VARIABLE)
    return CountingTransport(end, Path(given) if given else None)


@dataclass(slots=True)
class Counts:
    """What one rank has exchanged with one peer."""

    messages_sent: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    bytes_received: int = 0


class CountingTransport:
    """One end, `inner`, and what has been asked of it. See `ringrt.transport.Transport`.

    `path`: see `VARIABLE`. Raises `ConfigError` where its folder does not exist.
    """

    def __init__(self, inner: Transport, path: Path | None = None) -> None:
        if path is not None and not path.parent.is_dir():
            raise ConfigError(VARIABLE, "a path in a folder that exists", path)
        self.inner, self.path = inner, path
        self.rank, self.size = inner.rank, inner.size
        self.local_rank, self.local_size = inner.local_rank, inner.local_size
        self.device, self.captures = inner.device, inner.captures
        self.needs_progress = inner.needs_progress
        self._counts: dict[int, Counts] = {}

    def counts(self) -> Mapping[int, Counts]:
        """So far, by peer; peers with which nothing was exchanged are not in it."""
        return {peer: replace(each) for peer, each in sorted(self._counts.items())}

    def attach(self, device: Device, places: Sequence[str], timeout: float) -> None:
        """As the inner transport."""
        self.inner.attach(device, places, timeout)

    def keep_graph(self, graph: Releasable) -> None:
        """As the inner transport."""
        self.inner.keep_graph(graph)

    def exchange(
        self,
        sends: Sequence[Message],
        recvs: Sequence[Message],
        *,
        step: int,
        stream: Stream = None,
    ) -> Ticket:
        """Counted once the inner transport has taken it."""
        ticket = self.inner.exchange(sends, recvs, step=step, stream=stream)
        for message in sends:
            counts = self._counts.setdefault(message.peer, Counts())
            counts.messages_sent += 1
            counts.bytes_sent += message.data.nbytes
        for message in recvs:
            counts = self._counts.setdefault(message.peer, Counts())
            counts.messages_received += 1
            counts.bytes_received += message.data.nbytes
        return ticket

    def settle(self, timeout: float) -> None:
        """As the inner transport."""
        self.inner.settle(timeout)

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
        """As the inner transport; then the counts are written, where they are asked for."""
        self.inner.close()
        if self.path is None:
            return
        target = self.path.with_name(f"{self.path.name}.{self.rank}.json")
        peers = {peer: asdict(each) for peer, each in self.counts().items()}
        record = {"rank": self.rank, "size": self.size, "peers": peers}
        try:
            target.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise TransportError(f"{VARIABLE}: cannot write {target}: {error.strerror}") from error
