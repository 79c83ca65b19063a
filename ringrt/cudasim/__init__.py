"""A simulator of CUDA, for the tests of code that uses CuPy: streams, events, kernels and NCCL
between the threads of one process, without a GPU.

`ringrt.cudasim.api` stands in for the module `cupy`. Work is queued as on a device, and runs as
late as it may: only when the host waits for something, or asks. Missing waits therefore show, on
every run: a host that reads too early finds 0xFF bytes, operations on memory that nothing orders
raise `StreamRace` where they are issued, and memory freed too early is found when it is freed.

What is simulated is order, not speed: times between events show which overlap the order of
operations permits, as if each kernel had the device to itself.
"""

from __future__ import annotations

from ringrt.cudasim.core import check, reset, set_seed, synchronisations
from ringrt.cudasim.errors import KernelFault, SimulatorError, StreamRace

__all__ = [
    "KernelFault",
    "SimulatorError",
    "StreamRace",
    "check",
    "reset",
    "set_seed",
    "synchronisations",
]
