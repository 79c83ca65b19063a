"""The home shard and the two K,V slots: post the next exchange, wait for it, swap.

At step s a rank computes on one buffer, sends that same buffer on, and receives into another.
That is all the double buffering there is:

    step     0          1          2          3
    compute  home       slot 0     slot 1     slot 0
    send     home       slot 0     slot 1     -
    receive  slot 0     slot 1     slot 0     -

The wait at the end of a step covers its send too, so a slot is never received into while it
is still being sent from.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringrt.engine.stats import PassStats
from ringrt.plan.cost import slot_rows
from ringrt.plan.partition import Array
from ringrt.plan.problem import ITEMSIZE, Problem
from ringrt.plan.schedule import HOME, Hop, Step
from ringrt.transport import Message, Ticket, Transport


@dataclass(frozen=True, slots=True)
class _Slot:
    """Raw bytes for the K and the V of one visiting shard. They are two messages of one
    group, so that neither has to be packed beside the other."""

    k: Array
    v: Array

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


class KvExchange:
    """The K,V buffers of one pass. The home shard is k `[batch, rows, kv_heads, head_dim]` and
    v likewise; where it has to be sent and is not contiguous, it is copied."""

    def __init__(
        self,
        k: Array,
        v: Array,
        problem: Problem,
        steps: list[Step],
        transport: Transport,
        stats: PassStats,
    ) -> None:
        if any(step.send for step in steps):
            k, v = np.ascontiguousarray(k), np.ascontiguousarray(v)
        self._home, self._problem, self._dtype = (k, v), problem, k.dtype
        self._transport, self._stats = transport, stats
        self._slots = {slot: self._new_slot(rows) for slot, rows in slot_rows(steps).items()}
        visiting = sum(slot.nbytes for slot in self._slots.values())
        stats.peak_kv_bytes = k.nbytes + v.nbytes + visiting

    def present(self, step: Step) -> tuple[Array, Array]:
        """k and v of the shard that the step computes on."""
        return self._shard(step.slot, step.rows)

    def post(self, step: Step) -> Ticket:
        """Begin the step's exchange: what is present leaves, the next shard comes."""
        sends, recvs = self._messages(step.send), self._messages(step.recv)
        self._stats.bytes_sent += sum(message.data.nbytes for message in sends)
        self._stats.bytes_received += sum(message.data.nbytes for message in recvs)
        return self._transport.exchange(sends, recvs, step=step.index)

    def wait(self, ticket: Ticket, timeout: float) -> None:
        """Wait for the exchange; the time counts as waiting for peers."""
        begin = time.perf_counter()
        ticket.wait(timeout)
        self._stats.wait_s += time.perf_counter() - begin

    def _shard(self, slot: int, rows: int) -> tuple[Array, Array]:
        if slot == HOME:
            return self._home
        problem, buffers = self._problem, self._slots.get(slot) or self._new_slot(0)
        shape = (problem.batch, rows, problem.kv_heads)
        return (
            _typed(buffers.k, self._dtype, (*shape, problem.head_dim)),
            _typed(buffers.v, self._dtype, (*shape, problem.value_dim)),
        )

    def _messages(self, hop: Hop | None) -> list[Message]:
        if hop is None:
            return []
        shard = self._shard(hop.slot, hop.rows)
        return [Message(hop.peer, part.reshape(-1).view(np.uint8)) for part in shard]

    def _new_slot(self, rows: int) -> _Slot:
        problem = self._problem
        heads = problem.batch * rows * problem.kv_heads * ITEMSIZE[problem.dtype]
        return _Slot(
            np.empty(heads * problem.head_dim, np.uint8),
            np.empty(heads * problem.value_dim, np.uint8),
        )


def _typed(buffer: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """The front of a raw buffer as an array: a slot is as large as its largest visitor."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return buffer[:nbytes].view(dtype).reshape(shape)
