"""Allocations, and which of them an address lies in."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ringrt.cudasim.clocks import Access
from ringrt.cudasim.core import Where, caller, place
from ringrt.cudasim.errors import SimulatorError

if TYPE_CHECKING:
    from ringrt.cudasim.lanes import Lane

#: What CuPy's pool aligns and rounds to.
ALIGNMENT = 512


@dataclass(eq=False, slots=True)
class Allocation:
    """Memory of a device, or pinned memory of the host (device -1). `raw` are its bytes, which
    queued operations keep alive; `lane` is the stream it was allocated on."""

    raw: npt.NDArray[np.uint8]
    address: int
    device: int
    lane: Lane | None
    where: Where
    freed: bool = False
    ledger: list[Access] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return int(self.raw.nbytes)

    def __str__(self) -> str:
        kind = "pinned memory" if self.device < 0 else f"memory of device {self.device}"
        return f"{self.nbytes} bytes of {kind}, allocated at {place(self.where)}"


class Span(NamedTuple):
    """Bytes [lo, hi) of an allocation, found from a raw address."""

    allocation: Allocation
    lo: int
    hi: int

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """The bytes themselves."""
        return self.allocation.raw[self.lo : self.hi]


#: Allocations whose owner is gone, noted by `__del__` and not yet looked at.
FREED: deque[Allocation] = deque()
_by_address: dict[int, Allocation] = {}
_addresses: list[int] = []
_NOTHING = Allocation(np.empty(0, np.uint8), 0, -1, None, ("", 0))


def allocate(nbytes: int, device: int, lane: Lane | None) -> Allocation:
    """New memory, aligned, filled with 0xFF: not a number in every floating-point type. The lock
    is held."""
    block = np.empty(nbytes + ALIGNMENT, np.uint8)
    address = int(block.ctypes.data)
    shift = -address % ALIGNMENT
    raw = block[shift : shift + nbytes]
    raw.fill(0xFF)
    made = Allocation(raw, address + shift if nbytes else 0, device, lane, caller())
    if nbytes:
        _by_address[made.address] = made
        _addresses.insert(bisect_right(_addresses, made.address), made.address)
    return made


def forget(allocation: Allocation) -> None:
    """An allocation is freed: no address lies in it any more. The lock is held."""
    allocation.freed = True
    if _by_address.pop(allocation.address, None) is not None:
        del _addresses[bisect_left(_addresses, allocation.address)]


def live() -> Iterable[Allocation]:
    """All allocations that are not freed. The lock is held."""
    return _by_address.values()


def find(address: int) -> Allocation | None:
    """The live allocation in which an address lies. The lock is held."""
    index = bisect_right(_addresses, address) - 1
    if index < 0:
        return None
    found = _by_address[_addresses[index]]
    return found if address < found.address + found.nbytes else None


def span(address: int, nbytes: int, what: str) -> Span:
    """The bytes from an address on, all in one live allocation. The lock is held."""
    if nbytes == 0:
        return Span(_NOTHING, 0, 0)
    found = find(address)
    if found is None:
        raise SimulatorError(f"{what}: {address:#x} is in no live allocation")
    lo = address - found.address
    if lo + nbytes > found.nbytes:
        raise SimulatorError(
            f"{what}: {nbytes} bytes from byte {lo} on go beyond the end of {found}"
        )
    return Span(found, lo, lo + nbytes)
