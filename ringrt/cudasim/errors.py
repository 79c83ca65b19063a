"""What the simulator raises. All of it means that the program under test is wrong on a GPU too."""

from __future__ import annotations

from ringrt.errors import RingrtError


class SimulatorError(RingrtError):
    """A misuse of CUDA, or something that the simulator does not implement."""


class StreamRace(SimulatorError):
    """Two operations touch the same memory and nothing orders one after the other; the text
    names both."""


class KernelFault(SimulatorError):
    """A kernel did what it must not: an access out of bounds, two threads at one place with no
    barrier between them, a barrier that some thread never reaches."""
