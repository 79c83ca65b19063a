"""The buffers that an exchange receives into, and where those of a small pass wait for the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ringrt.plan.partition import Array
from ringrt.transport import Message

Arrays = tuple[Array, ...]


class Travelling(NamedTuple):
    """Arrays, and the bytes of each: what is computed on, and what is sent and received."""

    arrays: Arrays
    raw: Arrays


class Moves(NamedTuple):
    """The exchange of one step, as far as it is the same in every pass in the same buffers. `sends`
    is None where what leaves is made anew; `incoming` are the bytes of `recvs`, `carry` and `home`
    the sums among them."""

    sends: list[Message] | None
    recvs: list[Message]
    incoming: int
    carry: Travelling
    home: Travelling


NOTHING = Travelling((), ())

#: Buffers of up to so many bytes are kept for the next pass.
KEPT_BYTES = 1 << 20


@dataclass(slots=True)
class Buffers:
    """The slots of a pass, of so many bytes, and views of them by slot and rows. Where they are
    `kept` also the moves by step, which hold what sums arrive in."""

    from_home: bool
    slots: dict[int, Arrays]
    held: int
    kept: bool
    views: dict[tuple[int, int], Travelling] = field(default_factory=dict)
    moves: dict[int, Moves] = field(default_factory=dict)


@dataclass(slots=True)
class Shelf:
    """Where the buffers of a small pass wait for the next of the same steps on a host: where little
    is computed, it would take longer to make them than to use them."""

    buffers: Buffers | None = None

    def take(self) -> Buffers | None:
        """What waits, for one pass alone."""
        buffers, self.buffers = self.buffers, None
        return buffers
