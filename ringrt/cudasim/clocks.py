"""Vector clocks: which operations are ordered, and which accesses to memory conflict.

A clock says, for each stream, up to which of its operations everything is known to have ended:
that of an operation holds all that it comes after. So an earlier operation, number `tick` of
stream `lane`, is ordered before one with clock c exactly if c[lane] >= tick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringrt.cudasim.executor import Op

Clock = dict[int, int]


def merge(into: Clock, other: Clock) -> None:
    """Let `into` be ordered after `other` too."""
    for lane, tick in other.items():
        if into.get(lane, 0) < tick:
            into[lane] = tick


@dataclass(eq=False, slots=True)
class Access:
    """Bytes [lo, hi) of an allocation, read or written by an operation as its argument `name`."""

    lo: int
    hi: int
    write: bool
    name: str
    op: Op
    lane: int
    tick: int

    def before(self, clock: Clock) -> bool:
        """Whether it is ordered before an operation with this clock."""
        return clock.get(self.lane, 0) >= self.tick

    def meets(self, lo: int, hi: int) -> bool:
        """Whether it touches any of the bytes [lo, hi)."""
        return self.lo < hi and lo < self.hi


def conflict(ledger: list[Access], new: Access, clock: Clock) -> Access | None:
    """An earlier access that must be ordered before the new one, and is not."""
    for old in ledger:
        if (
            old.lo < new.hi
            and new.lo < old.hi
            and (old.write or new.write)
            and clock.get(old.lane, 0) < old.tick
        ):
            return old
    return None


def note(ledger: list[Access], new: Access, clock: Clock, host: Clock) -> None:
    """Add an access without conflict, and drop those that can never conflict again unless it
    does too: what a write covers, reads that a later read covers, what the host has waited for.
    """
    kept = []
    for old in ledger:
        covered = new.lo <= old.lo and old.hi <= new.hi
        stronger = new.write or not old.write
        if covered and stronger and clock.get(old.lane, 0) >= old.tick:
            continue
        if host.get(old.lane, 0) < old.tick:
            kept.append(old)
    kept.append(new)
    ledger[:] = kept
