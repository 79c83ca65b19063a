"""Bytes between processes, over connections of gloo that are the ring's own. The only module of
the transports that imports torch.

What torch 2.13 does, and what follows from it:

- Its `Work.is_completed` stays False until somebody waits, so a receive needs a thread that waits.
- A wait that passes its deadline closes every connection of the context, on both sides. So no wait
  has one, and that is how `Mesh.shut` closes them: `abort` and `shutdown` of a gloo group do not.
- A message larger than what its receiver expects ends that process; so sizes are compared before.
- A thread that is inside torch while the interpreter shuts down, waiting or giving back what it
  held, ends the process by SIGABRT. So `Mesh.shut` and the end of such threads come before that.
- `new_group(use_local_synchronization=True)` finds its members by a name in which each counts the
  groups that it is in. Members that are in different numbers of groups never meet. So the context
  is made from the store of the application's group, under names that only its own ranks count.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed

from ringrt.errors import (
    ConfigError,
    ExchangeTimeout,
    RingrtError,
    TransportError,
    TransportUnavailable,
    name_ranks,
)
from ringrt.plan.partition import Array
from ringrt.transports import torch_launch

#: Its type stubs leave out much of what it has.
dist: Any = torch.distributed

#: A deadline that is none.
_NEVER = datetime.timedelta(days=365)
_AT_ONCE = datetime.timedelta(milliseconds=1)
#: The tag of a message that nobody sends.
_NOBODY = 0
#: How long to wait between two looks for ranks that have not come: at first and at most, seconds.
_LOOK_EVERY = 1e-3, 50e-3


#: What must be kept until bytes have been sent: gloo's work, and their memory.
Sent = tuple[Any, Array]


class Mesh:
    """A connection from this rank to every other. Tags are numbers from 1 on; between two ranks,
    messages of one tag arrive in the order in which they are sent. Calls may come from any thread.
    They raise `ConnectionError` where the peer is gone, or the mesh is shut."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size = rank, size
        limit = datetime.timedelta(seconds=timeout)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, limit)

    def send(self, peer: int, tag: int, data: Array) -> Sent:
        """Begin to send bytes, a contiguous uint8 array. The result must be kept until they have
        arrived: to drop it earlier closes the connection."""
        with _as_connection_error():
            return self._open().send([_tensor(data)], peer, tag), data

    def recv(self, peer: int, tag: int, data: Array) -> Sent:
        """Begin to receive at most as many bytes as `data` holds; to be kept like what `send`
        returns, and given to `wait`."""
        with _as_connection_error():
            return self._open().recv([_tensor(data)], peer, tag), data

    def wait(self, received: Sent) -> None:
        """Wait for the message, with no deadline."""
        with _as_connection_error():
            received[0].wait(_NEVER)

    def flush(self, sent: Iterable[Sent], deadline: float) -> None:
        """Return once what `send` returned has been sent. If the deadline (of the monotonic clock)
        passes before that, the mesh is shut."""
        for work, _ in sent:
            left = max(_AT_ONCE, datetime.timedelta(seconds=deadline - time.monotonic()))
            with contextlib.suppress(RuntimeError):
                work.wait(left)

    def shut(self) -> None:
        """Close all connections; whoever waits on one, here or there, stops waiting."""
        gloo, self._gloo = self._gloo, None
        nothing = torch.empty(1, dtype=torch.uint8)
        for peer in range(self.size):
            if peer != self.rank:
                with contextlib.suppress(RuntimeError):
                    gloo.recv([nothing], peer, _NOBODY).wait(_AT_ONCE)

    def _open(self) -> Any:
        if self._gloo is None:
            raise ConnectionError("the connections are closed")
        return self._gloo


def join(pg: Any, timeout: float) -> tuple[Mesh, tuple[int, int]]:
    """A mesh of the ranks of a process group, and (local rank, local size): this rank among those
    on its machine. Collective over `pg`. None is the default group, which is made from the
    launcher's environment if need be. Raises `ExchangeTimeout` naming the ranks that did not come
    within `timeout` seconds, `ConfigError` if this process is not in the group, `TransportError`
    if PyTorch cannot connect them."""
    if not (dist.is_available() and dist.is_gloo_available()):
        raise TransportUnavailable("transport torch: this PyTorch is built without gloo")
    with _as_transport_error():
        if pg is None and not dist.is_initialized():
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))
        group: Any = dist.group.WORLD if pg is None else pg
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigError("pg", "a process group that this process is in, or None", repr(pg))
        rank, size = group.rank(), group.size()
        store = group.get_group_store()
        # The rings of a group are numbered by each of its ranks, in the same order on all.
        number = store.add(f"ringrt/rings of rank {rank}", 1)
        store = dist.PrefixStore(f"ringrt/ring {number}", store)
        hosts = _meet(store, rank, size, timeout)
        return Mesh(store, rank, size, timeout), _local(hosts, rank)


def _meet(store: Any, rank: int, size: int, timeout: float) -> list[str]:
    """The host names of all ranks, once all have come."""
    deadline, (pause, most) = time.monotonic() + timeout, _LOOK_EVERY
    store.set(f"host of {rank}", socket.gethostname())
    keys = [f"host of {each}" for each in range(size)]
    while not store.check(keys):
        if time.monotonic() > deadline:
            late = {each for each, key in enumerate(keys) if not store.check([key])}
            raise ExchangeTimeout(
                f"rank {rank} waited {timeout:g} s for {name_ranks(late)} to join the ring"
            )
        time.sleep(pause)
        pause = min(2 * pause, most)
    return [name.decode() for name in store.multi_get(keys)]


def _local(hosts: list[str], rank: int) -> tuple[int, int]:
    """As torchrun counts them, where the ring is all that it started; else by host name."""
    names = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    if torch_launch() == (rank, len(hosts)) and os.environ.keys() >= set(names):
        local_rank, local_size = (int(os.environ[name]) for name in names)
        return local_rank, local_size
    here = [each for each, host in enumerate(hosts) if host == hosts[rank]]
    return here.index(rank), len(here)


def _tensor(data: Array) -> torch.Tensor:
    """The same memory. An array that may not be written to is only ever sent, and torch need not
    warn of it."""
    if not data.flags.writeable:
        memory = (ctypes.c_uint8 * data.nbytes).from_address(data.ctypes.data)
        data = np.ctypeslib.as_array(memory)
    return torch.from_numpy(data)


@contextlib.contextmanager
def _as_connection_error() -> Iterator[None]:
    """What gloo says of a connection that is no more."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(_first_line(error)) from error


@contextlib.contextmanager
def _as_transport_error() -> Iterator[None]:
    """What torch says while ranks join, as ours. Its own errors are RuntimeErrors, and
    ValueErrors about the environment."""
    try:
        yield
    except RingrtError:
        raise
    except (RuntimeError, ValueError) as error:
        raise TransportError(f"transport torch: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
