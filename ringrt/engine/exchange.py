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

import itertools
import math

import numpy as np

from ringrt.device import Mark
from ringrt.engine.buffers import KEPT_BYTES, NOTHING, Arrays, Buffers, Moves, Travelling
from ringrt.engine.compute import Pass
from ringrt.plan.cost import slot_rows
from ringrt.plan.partition import Array
from ringrt.plan.rows import Rows
from ringrt.plan.schedule import HOME, Hop, Step
from ringrt.transport import Message, Ticket


class Exchange:
    """The buffers of one pass. `home` are the arrays that travel, this rank's shard of them, and
    `axes` the axis of each along which its rows lie. `sums` are the like for sums: arrays of
    any length, of the right shape and dtype otherwise."""

    def __init__(
        self, home: Arrays, axes: tuple[int, ...], steps: list[Step], run: Pass, sums: Arrays = ()
    ) -> None:
        self._run, self._device, self._stats = run, run.device, run.stats
        self._home_rows = Rows.all(home[0].shape[axes[0]])
        self._axes, self._home, self._sums = axes, Travelling(home, ()), sums
        self._buffers = run.shelf.take() or self._made(steps)
        if self._buffers.from_home:
            self._home = _with_bytes(tuple([self._contiguous(x) for x in home]))
        self._held = self._buffers.held + sum([x.nbytes for x in self._home.arrays])
        self._stats.peak_kv_bytes = max(self._stats.peak_kv_bytes, self._held)
        self._posted: Mark = None

    def present(self, step: Step) -> Arrays:
        """The travelling arrays of the shard that the step computes on."""
        return self._lying_in(step.slot, step.rows).arrays

    def post(self, step: Step, leaving: Arrays = ()) -> tuple[Ticket, Arrays, Arrays]:
        """Begin the step's exchange. `leaving` are the sums of `step.grad_send`. Returns the
        ticket, and the arrays into which `step.carry` and `step.home` are being received."""
        moves = self._buffers.moves.get(step.index) or self._found(step)
        sends, recvs = moves.sends, moves.recvs
        if sends is None:
            sends = _messages(step.send, self._outgoing(step))
        if step.grad_send:
            sends = sends + _messages(step.grad_send, _with_bytes(leaving))
        self._stats.bytes_sent += sum([message.data.nbytes for message in sends])
        self._stats.bytes_received += moves.incoming
        self._posted = self._device.mark() if sends or recvs else None
        stream = self._device.stream
        ticket = self._run.transport.exchange(sends, recvs, step=step.index, stream=stream)
        return ticket, moves.carry.arrays, moves.home.arrays

    def wait(self, step: Step, ticket: Ticket) -> None:
        """Wait for the exchange; the time counts as waiting for peers."""
        begin = self._device.mark()
        ticket.wait(self._run.timeout)
        end = self._device.mark()
        self._run.recorder.note(step.index, "wait", begin, end)
        if self._posted is not None:
            span = ticket.span or (self._posted, end)
            self._run.recorder.note(step.index, "exchange", *span)

    def finish(self) -> None:
        """All is across."""
        if self._buffers.kept:
            self._run.shelf.buffers = self._buffers

    def _contiguous(self, x: Array) -> Array:
        return x if x.flags.c_contiguous else self._device.take(x, slice(None), 1)

    def _made(self, steps: list[Step]) -> Buffers:
        slots = {slot: self._buffers_of(count) for slot, count in slot_rows(steps).items()}
        held = sum(x.nbytes for slot in slots.values() for x in slot)
        from_home = any(step.send and step.send.slot == HOME for step in steps)
        hops = [hop for step in steps for hop in (step.carry, step.home) if hop]
        rows = sum(hop.rows.count for hop in hops)
        sums = sum(_size(_resized(x, 1, rows)) * x.itemsize for x in self._sums)
        kept = self._device.kind == "cpu" and held + sums <= KEPT_BYTES
        return Buffers(from_home, slots, held, kept)

    def _found(self, step: Step) -> Moves:
        carry, home = self._new_sums(step.carry), self._new_sums(step.home)
        recvs: list[Message] = []
        if step.recv:
            recvs += _messages(step.recv, self._lying_in(step.recv.slot, step.recv.rows))
        recvs += _messages(step.carry, carry) + _messages(step.home, home)
        onward = step.send is None or (step.send.slot != HOME and step.send.rows == step.rows)
        sends = _messages(step.send, self._outgoing(step)) if onward else None
        incoming = sum(message.data.nbytes for message in recvs)
        moves = Moves(sends, recvs, incoming, carry, home)
        if self._buffers.kept:
            self._buffers.moves[step.index] = moves
        return moves

    def _outgoing(self, step: Step) -> Travelling:
        """What the step sends, each array contiguous."""
        if step.send is None:
            return NOTHING
        at_home = step.send.slot == HOME
        source = self._home if at_home else self._lying_in(step.slot, step.rows)
        held = self._home_rows if at_home else step.rows
        if step.send.rows == held:
            return source
        index, take = step.send.rows.within(held), self._device.take
        packed = tuple(map(take, source.arrays, itertools.repeat(index), self._axes))
        pairs = zip(packed, source.arrays, strict=True)
        extra = sum([new.nbytes for new, old in pairs if not _inside(new, old)])
        self._stats.peak_kv_bytes = max(self._stats.peak_kv_bytes, self._held + extra)
        return _with_bytes(packed)

    def _lying_in(self, slot: int, rows: Rows) -> Travelling:
        if slot == HOME:
            return self._home
        key = slot, rows.count
        views = self._buffers.views
        if key not in views:
            views[key] = self._view(*key)
        return views[key]

    def _view(self, slot: int, rows: int) -> Travelling:
        """The front of each of a slot's buffers: a slot is as large as its largest visitor."""
        slots = self._buffers.slots
        buffers = slots[slot] if slot in slots else self._buffers_of(0)
        arrays, raw = [], []
        for buffer, x, axis in zip(buffers, self._home.arrays, self._axes, strict=True):
            shape = _resized(x, axis, rows)
            part = buffer[: _size(shape) * x.itemsize]
            raw.append(part)
            arrays.append(part.view(x.dtype).reshape(shape))
        return Travelling(tuple(arrays), tuple(raw))

    def _buffers_of(self, rows: int) -> Arrays:
        """Raw bytes for so many rows of each array: each is a message of its own, all in one
        group, so that none has to be packed beside another."""
        pairs = zip(self._home.arrays, self._axes, strict=True)
        sizes = [_size(_resized(x, axis, rows)) * x.itemsize for x, axis in pairs]
        return tuple(self._device.empty((size,), "uint8") for size in sizes)

    def _new_sums(self, hop: Hop | None) -> Travelling:
        if hop is None:
            return NOTHING
        make, rows = self._device.empty, hop.rows.count
        return _with_bytes(tuple(make(_resized(x, 1, rows), x.dtype.name) for x in self._sums))


def _with_bytes(arrays: Arrays) -> Travelling:
    """Contiguous arrays, and their bytes."""
    return Travelling(arrays, tuple([x.reshape(-1).view(np.uint8) for x in arrays]))


def _messages(hop: Hop | None, what: Travelling) -> list[Message]:
    return [] if hop is None else [Message(hop.peer, x) for x in what.raw]


def _inside(part: Array, whole: Array) -> bool:
    """Whether one lies in the memory of the other, which is contiguous, or holds nothing."""
    if isinstance(whole, np.ndarray):
        return part.nbytes == 0 or np.may_share_memory(part, whole)
    begin, at = int(whole.data.ptr), int(part.data.ptr)
    return begin <= at < begin + max(whole.nbytes, 1)


def _size(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def _resized(x: Array, axis: int, rows: int) -> tuple[int, ...]:
    return (*x.shape[:axis], rows, *x.shape[axis + 1 :])
