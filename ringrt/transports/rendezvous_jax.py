"""The coordination service of multi-process JAX as a rendezvous.

JAX offers no messages between hosts, but its processes share a key-value store. It has no public
name: what is used here is that of JAX 0.10.2. Which process this is, and of how many, the service
knows too: `jax.process_index()` would make JAX take its devices, and wait for the other processes
to take theirs, past any deadline of ours.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from importlib.util import find_spec
from typing import Any

from ringrt.errors import ExchangeTimeout, TransportError, TransportUnavailable
from ringrt.transports.rendezvous import HOST, late
from ringrt.transports.tcp_wire import Deadline

_TESTED = "0.10.2"
_FIELDS = ("client", "process_id", "num_processes", "coordinator_address")
_METHODS = ("key_value_set_bytes", "key_value_dir_get_bytes", "key_value_delete", "wait_at_barrier")

#: Rings are made in the same order in all processes: each has keys of its own.
_RINGS = itertools.count()
#: How often to look whether the others have come, in seconds: ever more rarely.
_FIRST_LOOK, _LAST_LOOK = 0.005, 0.2


class JaxRendezvous:
    """See `ringrt.transports.rendezvous.Rendezvous`. Raises `TransportUnavailable` without JAX,
    before `jax.distributed.initialize()`, and with a JAX whose service cannot be found."""

    def __init__(self) -> None:
        state = _service()
        self._client = state.client
        self.rank, self.size = int(state.process_id), int(state.num_processes)
        self.host = os.environ.get(HOST) or _address_towards(state.coordinator_address)
        self._keys = f"ringrt/{next(_RINGS)}/"

    def all_gather(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        """See `Rendezvous.all_gather`."""
        try:
            self._client.key_value_set_bytes(f"{self._keys}{self.rank}", payload)
            arrived = self._wait_for_all(deadline)
            # Once all have read, one sweeps.
            self._client.wait_at_barrier(self._keys, int(1000 * deadline.left) + 1000)
            if self.rank == 0:
                self._client.key_value_delete(self._keys)
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            raise TransportError(f"JAX's coordination service: {first}") from error
        return [arrived[rank] for rank in range(self.size)]

    def _wait_for_all(self, deadline: Deadline) -> dict[int, bytes]:
        pause = _FIRST_LOOK
        while True:
            found = self._client.key_value_dir_get_bytes(self._keys)
            arrived = {int(key.rpartition("/")[2]): value for key, value in found}
            if len(arrived) == self.size:
                return arrived
            if not deadline.left:
                missing = set(range(self.size)) - arrived.keys()
                raise ExchangeTimeout(late(self.rank, deadline.timeout, missing))
            time.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK)


def _service() -> Any:
    """What JAX keeps of the coordination service."""
    if find_spec("jax") is None:
        raise TransportUnavailable("JAX is not installed: pip install 'ringrt[jax]'")
    import jax

    try:
        from jax._src import distributed

        state: Any = distributed.global_state
        missing = [name for name in _FIELDS if not hasattr(state, name)]
        if not missing and state.client is not None:
            missing = [name for name in _METHODS if not hasattr(state.client, name)]
    except (ImportError, AttributeError) as error:
        missing = [str(error)]
    if missing:
        raise TransportUnavailable(
            f"the coordination service of JAX {jax.__version__} is not the one that ringrt knows, "
            f"of JAX {_TESTED}: {missing[0]}"
        )
    if state.client is None:
        raise TransportUnavailable(
            "multi-process JAX has not begun: call jax.distributed.initialize() first"
        )
    return state


def _address_towards(where: str) -> str:
    """The address of this machine from which packets to host:port leave. None is sent."""
    host, _, port = where.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        with socket.socket(found[0][0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[0][4])
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TransportError(
            f"there is no way from here to {where}: {error}; {HOST} sets this machine's address"
        ) from error
