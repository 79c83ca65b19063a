"""What travels: the home shard, two slots for visitors, and the sums that go with them.

At step s a rank computes on one buffer, passes that same buffer on, and receives into another.
That is all the double buffering there is (round the ring; a direct schedule sends from home):

    step     0          1          2          3
    compute  home       slot 0     slot 1     slot 0
    send     home       slot 0     slot 1     -
    receive  slot 0     slot 1     slot 0     -

The wait at the end of a step covers its sends too, so a slot is never received into while it
is still being sent from. Only rows that some later rank needs are sent; where they are a part
of what lies here, they are packed first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringrt.device import Mark
from ringrt.engine.compute import Pass
from ringrt.plan.cost import slot_rows
from ringrt.plan.partition import Array
from ringrt.plan.rows import Rows
from ringrt.plan.schedule import HOME, Hop, Step
from ringrt.transport import Message, Ticket

Arrays = tuple[Array, ...]


class Exchange:
    """The buffers of one pass. `home` are the arrays that travel, this rank's shard of them, and
    `axes` the axis of each along which its rows lie. `sums` are the like for sums: arrays of
    any length, of the right shape and dtype otherwise."""

    def __init__(
        self, home: Arrays, axes: tuple[int, ...], steps: list[Step], run: Pass, sums: Arrays = ()
    ) -> None:
        self._run, self._device, self._stats = run, run.device, run.stats
        rows = Rows.all(home[0].shape[axes[0]])
        if any(step.send and step.send.slot == HOME for step in steps):
            everything = slice(None)
            home = tuple(self._device.take(x, everything, 1) for x in home)
        self._home, self._home_rows, self._axes, self._sums = home, rows, axes, sums
        self._slots = {slot: self._buffers(count) for slot, count in slot_rows(steps).items()}
        visiting = [buffer for slot in self._slots.values() for buffer in slot]
        self._held = sum(x.nbytes for x in (*home, *visiting))
        self._stats.peak_kv_bytes = max(self._stats.peak_kv_bytes, self._held)
        self._posted: Mark = None

    def present(self, step: Step) -> Arrays:
        """The travelling arrays of the shard that the step computes on."""
        return self._lying_in(step.slot, step.rows)

    def post(self, step: Step, leaving: Arrays = ()) -> tuple[Ticket, Arrays, Arrays]:
        """Begin the step's exchange. `leaving` are the sums of `step.grad_send`. Returns the
        ticket, and the arrays into which `step.carry` and `step.home` are being received."""
        carry, home = self._new_sums(step.carry), self._new_sums(step.home)
        sends = self._messages(step.send, self._outgoing(step))
        sends += self._messages(step.grad_send, leaving)
        recvs = []
        if step.recv:
            recvs += self._messages(step.recv, self._lying_in(step.recv.slot, step.recv.rows))
        recvs += self._messages(step.carry, carry) + self._messages(step.home, home)
        self._stats.bytes_sent += sum(message.data.nbytes for message in sends)
        self._stats.bytes_received += sum(message.data.nbytes for message in recvs)
        self._posted = self._device.mark() if sends or recvs else None
        stream = self._device.stream
        ticket = self._run.transport.exchange(sends, recvs, step=step.index, stream=stream)
        return ticket, carry, home

    def wait(self, step: Step, ticket: Ticket) -> None:
        """Wait for the exchange; the time counts as waiting for peers."""
        begin = self._device.mark()
        ticket.wait(self._run.timeout)
        end = self._device.mark()
        self._run.recorder.note(step.index, "wait", begin, end)
        if self._posted is not None:
            span = ticket.span or (self._posted, end)
            self._run.recorder.note(step.index, "exchange", *span)

    def _outgoing(self, step: Step) -> Arrays:
        """What the step sends, each array contiguous."""
        if step.send is None:
            return ()
        at_home = step.send.slot == HOME
        source = self._home if at_home else self.present(step)
        index = step.send.rows.within(self._home_rows if at_home else step.rows)
        take = self._device.take
        packed = tuple(take(x, index, axis) for x, axis in zip(source, self._axes, strict=True))
        pairs = zip(packed, source, strict=True)
        extra = sum(new.nbytes for new, old in pairs if not _inside(new, old))
        self._stats.peak_kv_bytes = max(self._stats.peak_kv_bytes, self._held + extra)
        return packed

    def _lying_in(self, slot: int, rows: Rows) -> Arrays:
        if slot == HOME:
            return self._home
        buffers = self._slots[slot] if slot in self._slots else self._buffers(0)
        return tuple(
            _typed(buffer, x.dtype, _resized(x, axis, rows.count))
            for buffer, x, axis in zip(buffers, self._home, self._axes, strict=True)
        )

    def _buffers(self, rows: int) -> Arrays:
        """Raw bytes for so many rows of each array: each is a message of its own, all in one
        group, so that none has to be packed beside another."""
        shapes = [_resized(x, axis, rows) for x, axis in zip(self._home, self._axes, strict=True)]
        pairs = zip(shapes, self._home, strict=True)
        return tuple(self._device.empty((_size(s) * x.itemsize,), "uint8") for s, x in pairs)

    def _new_sums(self, hop: Hop | None) -> Arrays:
        if hop is None:
            return ()
        make = self._device.empty
        return tuple(make(_resized(x, 1, hop.rows.count), x.dtype.name) for x in self._sums)

    def _messages(self, hop: Hop | None, arrays: Arrays) -> list[Message]:
        if hop is None:
            return []
        return [Message(hop.peer, x.reshape(-1).view(np.uint8)) for x in arrays]


def _inside(part: Array, whole: Array) -> bool:
    """Whether one lies in the memory of the other, which is contiguous."""
    begin, at = (_address(x) for x in (whole, part))
    return begin <= at < begin + max(whole.nbytes, 1)


def _address(x: Array) -> int:
    return int(x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr)


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape))


def _resized(x: Array, axis: int, rows: int) -> tuple[int, ...]:
    return (*x.shape[:axis], rows, *x.shape[axis + 1 :])


def _typed(buffer: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """The front of a raw buffer as an array: a slot is as large as its largest visitor."""
    return buffer[: _size(shape) * dtype.itemsize].view(dtype).reshape(shape)
