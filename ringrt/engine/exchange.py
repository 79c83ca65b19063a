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

import math
from typing import NamedTuple

import numpy as np

from ringrt.device import Mark
from ringrt.engine.compute import Pass
from ringrt.plan.cost import slot_rows
from ringrt.plan.partition import Array
from ringrt.plan.rows import Rows
from ringrt.plan.schedule import HOME, Hop, Step
from ringrt.transport import Message, Ticket

Arrays = tuple[Array, ...]


class Travelling(NamedTuple):
    """Arrays, and the bytes of each: what is computed on, and what is sent and received."""

    arrays: Arrays
    raw: Arrays


_NOTHING = Travelling((), ())


class Exchange:
    """The buffers of one pass. `home` are the arrays that travel, this rank's shard of them, and
    `axes` the axis of each along which its rows lie. `sums` are the like for sums: arrays of
    any length, of the right shape and dtype otherwise."""

    def __init__(
        self, home: Arrays, axes: tuple[int, ...], steps: list[Step], run: Pass, sums: Arrays = ()
    ) -> None:
        self._run, self._device, self._stats = run, run.device, run.stats
        self._home_rows = Rows.all(home[0].shape[axes[0]])
        self._axes, self._home = axes, Travelling(home, ())
        self._sums = [(x, x.dtype.name) for x in sums] if any(map(_has_sums, steps)) else []
        if any(step.send and step.send.slot == HOME for step in steps):
            everything = slice(None)
            self._home = _with_bytes(tuple(self._device.take(x, everything, 1) for x in home))
        self._slots = {slot: self._buffers(count) for slot, count in slot_rows(steps).items()}
        #: Views of the slots, by slot and rows.
        self._views: dict[tuple[int, int], Travelling] = {}
        visiting = [buffer for slot in self._slots.values() for buffer in slot]
        self._held = sum(x.nbytes for x in (*self._home.arrays, *visiting))
        self._stats.peak_kv_bytes = max(self._stats.peak_kv_bytes, self._held)
        self._posted: Mark = None

    def present(self, step: Step) -> Arrays:
        """The travelling arrays of the shard that the step computes on."""
        return self._lying_in(step.slot, step.rows).arrays

    def post(self, step: Step, leaving: Arrays = ()) -> tuple[Ticket, Arrays, Arrays]:
        """Begin the step's exchange. `leaving` are the sums of `step.grad_send`. Returns the
        ticket, and the arrays into which `step.carry` and `step.home` are being received."""
        carry, home = self._new_sums(step.carry), self._new_sums(step.home)
        sends: list[Message] = []
        recvs: list[Message] = []
        if step.send:
            sends += _messages(step.send, self._outgoing(step, step.send))
        if step.grad_send:
            sends += _messages(step.grad_send, _with_bytes(leaving))
        if step.recv:
            recvs += _messages(step.recv, self._lying_in(step.recv.slot, step.recv.rows))
        if step.carry:
            recvs += _messages(step.carry, carry)
        if step.home:
            recvs += _messages(step.home, home)
        self._stats.bytes_sent += sum(message.data.nbytes for message in sends)
        self._stats.bytes_received += sum(message.data.nbytes for message in recvs)
        self._posted = self._device.mark() if sends or recvs else None
        stream = self._device.stream
        ticket = self._run.transport.exchange(sends, recvs, step=step.index, stream=stream)
        return ticket, carry.arrays, home.arrays

    def wait(self, step: Step, ticket: Ticket) -> None:
        """Wait for the exchange; the time counts as waiting for peers."""
        begin = self._device.mark()
        ticket.wait(self._run.timeout)
        end = self._device.mark()
        self._run.recorder.note(step.index, "wait", begin, end)
        if self._posted is not None:
            span = ticket.span or (self._posted, end)
            self._run.recorder.note(step.index, "exchange", *span)

    def _outgoing(self, step: Step, send: Hop) -> Travelling:
        """What the step sends, each array contiguous."""
        at_home = send.slot == HOME
        source = self._home if at_home else self._lying_in(step.slot, step.rows)
        held = self._home_rows if at_home else step.rows
        if send.rows == held:
            return source
        index, take = send.rows.within(held), self._device.take
        pairs = zip(source.arrays, self._axes, strict=True)
        packed = tuple(take(x, index, axis) for x, axis in pairs)
        extra = sum(
            new.nbytes
            for new, old in zip(packed, source.arrays, strict=True)
            if not _inside(new, old)
        )
        self._stats.peak_kv_bytes = max(self._stats.peak_kv_bytes, self._held + extra)
        return _with_bytes(packed)

    def _lying_in(self, slot: int, rows: Rows) -> Travelling:
        if slot == HOME:
            return self._home
        key = slot, rows.count
        if key not in self._views:
            self._views[key] = self._view(*key)
        return self._views[key]

    def _view(self, slot: int, rows: int) -> Travelling:
        """The front of each of a slot's buffers: a slot is as large as its largest visitor."""
        buffers = self._slots[slot] if slot in self._slots else self._buffers(0)
        arrays, raw = [], []
        for buffer, x, axis in zip(buffers, self._home.arrays, self._axes, strict=True):
            shape = _resized(x, axis, rows)
            raw.append(buffer[: _size(shape) * x.itemsize])
            arrays.append(raw[-1].view(x.dtype).reshape(shape))
        return Travelling(tuple(arrays), tuple(raw))

    def _buffers(self, rows: int) -> Arrays:
        """Raw bytes for so many rows of each array: each is a message of its own, all in one
        group, so that none has to be packed beside another."""
        pairs = zip(self._home.arrays, self._axes, strict=True)
        sizes = [_size(_resized(x, axis, rows)) * x.itemsize for x, axis in pairs]
        return tuple(self._device.empty((size,), "uint8") for size in sizes)

    def _new_sums(self, hop: Hop | None) -> Travelling:
        if hop is None:
            return _NOTHING
        make, rows = self._device.empty, hop.rows.count
        return _with_bytes(tuple(make(_resized(x, 1, rows), dtype) for x, dtype in self._sums))


def _has_sums(step: Step) -> bool:
    return step.carry is not None or step.home is not None


def _with_bytes(arrays: Arrays) -> Travelling:
    """Contiguous arrays, and their bytes."""
    return Travelling(arrays, tuple(x.reshape(-1).view(np.uint8) for x in arrays))


def _messages(hop: Hop, what: Travelling) -> list[Message]:
    return [Message(hop.peer, x) for x in what.raw]


def _inside(part: Array, whole: Array) -> bool:
    """Whether one lies in the memory of the other, which is contiguous."""
    begin, at = (_address(x) for x in (whole, part))
    return begin <= at < begin + max(whole.nbytes, 1)


def _address(x: Array) -> int:
    return int(x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr)


def _size(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def _resized(x: Array, axis: int, rows: int) -> tuple[int, ...]:
    return (*x.shape[:axis], rows, *x.shape[axis + 1 :])
