"""`cupy.RawModule`: kernels, compiled for the host, launched with every argument checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ringrt.cudasim.array import ndarray
from ringrt.cudasim.compiler import Buffer, HostKernel, HostModule, Parameter
from ringrt.cudasim.copies import check_current, lane_of
from ringrt.cudasim.core import CHANGED, SHARED, current, enter
from ringrt.cudasim.errors import SimulatorError
from ringrt.cudasim.lanes import Touch, issue
from ringrt.cudasim.runtime import MAX_SHARED_BYTES, SHARED_BYTES, CUDARuntimeError
from ringrt.cudasim.stream import BaseStream

#: Simulated time of a kernel: to launch it, and for each of its blocks.
LAUNCH, PER_BLOCK = 5e-6, 1e-6

_GRID_LIMIT, _BLOCK_LIMIT = (2**31 - 1, 65535, 65535), (1024, 1024, 64)
#: NumPy's kinds of values for the C types that have exactly one meaning.
_KINDS = {
    "float": "f", "double": "f", "char": "i", "short": "i", "int": "i", "long": "i",
    "long long": "i", "i64": "i", "unsigned": "u", "unsigned char": "u", "unsigned short": "u",
    "unsigned int": "u", "unsigned long": "u", "unsigned long long": "u", "u16": "u", "u32": "u",
    "size_t": "u",
}  # fmt: skip


class RawModule:
    """CUDA C++ text, compiled for the host by g++ when its first kernel is asked for. What the
    text may hold: see `ringrt.cudasim.compiler`."""

    def __init__(
        self,
        code: str | None = None,
        *,
        path: str | None = None,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        **others: Any,
    ) -> None:
        if code is None or path is not None:
            raise SimulatorError("RawModule: only code= is simulated, not path=")
        if backend != "nvrtc":
            raise SimulatorError(f"RawModule: backend={backend!r} is not simulated, only 'nvrtc'")
        if others:
            raise SimulatorError(f"RawModule: {', '.join(others)}= is not simulated")
        self.code, self.options, self.backend = code, tuple(options), backend
        self._module: HostModule | None = None

    def get_function(self, name: str) -> RawKernel:
        """A kernel of the module."""
        if self._module is None:
            self._module = HostModule(self.code, self.options)
        return RawKernel(self._module.kernel(name))


@dataclass(eq=False, slots=True)
class RawKernel:
    """A kernel. Call it to queue it, on the current stream by default."""

    _kernel: HostKernel
    _shared: int = SHARED_BYTES

    @property
    def name(self) -> str:
        """Its name in the module."""
        return self._kernel.name

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """How much dynamic shared memory a launch may ask for. More than 48 KiB must be set."""
        return self._shared

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, nbytes: int) -> None:
        if not 0 <= nbytes <= MAX_SHARED_BYTES:
            raise CUDARuntimeError(
                1,
                f"kernel {self.name}: {nbytes} bytes of shared memory, at most {MAX_SHARED_BYTES}",
            )
        self._shared = nbytes

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        *,
        shared_mem: int = 0,
        stream: BaseStream | None = None,
    ) -> None:
        """Queue the kernel. Arrays are passed for pointers, NumPy scalars of the exact type for
        values."""
        label = f"kernel {self.name}"
        blocks = _size(label, "grid", grid, _GRID_LIMIT)
        threads = _size(label, "block", block, _BLOCK_LIMIT)
        if threads[0] * threads[1] * threads[2] > 1024:
            raise CUDARuntimeError(9, f"{label}: block {block} has more than 1024 threads")
        if not 0 <= shared_mem <= self._shared:
            raise CUDARuntimeError(
                1,
                f"{label}: {shared_mem} bytes of shared memory, but "
                f"max_dynamic_shared_size_bytes is {self._shared}",
            )
        values, buffers, touches = self._bind(label, args)
        lane = lane_of(stream)
        if lane.device != current().device:
            raise CUDARuntimeError(
                400, f"{label}: device {current().device} is current, the launch is on {lane}"
            )
        launch = partial(
            self._kernel.run, blocks, threads, values, buffers, shared_mem, SHARED.seed
        )
        # Addresses keep nothing alive: the bytes must outlast arrays that are freed meanwhile.
        run = partial(_run_holding, launch, [touch.allocation.raw for touch in touches])
        count = blocks[0] * blocks[1] * blocks[2]
        with CHANGED:
            enter()
            for touch in touches:
                check_current(touch.allocation, label, touch.name)
            issue(lane, label, run, touches, duration=LAUNCH + PER_BLOCK * count)

    def _bind(
        self, label: str, args: Sequence[Any]
    ) -> tuple[list[int | bytes], list[Buffer], list[Touch]]:
        parameters = self._kernel.parameters
        if len(args) != len(parameters):
            names = ", ".join(p.name for p in parameters)
            raise SimulatorError(f"{label}: {len(args)} arguments for {len(parameters)}: {names}")
        values: list[int | bytes] = []
        buffers, touches = [], []
        for parameter, value in zip(parameters, args, strict=True):
            if not parameter.pointer:
                values.append(_value(label, parameter, value))
                continue
            touch = _pointer(label, parameter, value)
            values.append(value._ptr)
            start = touch.allocation.address + touch.lo
            buffers.append(Buffer(start, touch.hi - touch.lo, touch.write, parameter.name))
            touches.append(touch)
        return values, buffers, touches


def _run_holding(launch: Callable[[], None], held: Sequence[Any]) -> None:
    launch()


def _size(
    label: str, what: str, size: tuple[int, ...], limits: tuple[int, int, int]
) -> tuple[int, int, int]:
    if not isinstance(size, tuple) or not 1 <= len(size) <= 3:
        raise TypeError(f"{label}: {what} must be a tuple of 1 to 3 integers, got {size!r}")
    x, y, z = (*size, 1, 1)[:3]
    for length, limit in zip((x, y, z), limits, strict=True):
        if not 1 <= length <= limit:
            raise CUDARuntimeError(9, f"{label}: {what} {size} is outside 1 to {limits}")
    return int(x), int(y), int(z)


def _pointer(label: str, parameter: Parameter, value: Any) -> Touch:
    if not isinstance(value, ndarray):
        raise TypeError(
            f"{label}: {parameter.name} is a pointer: pass an array of the device, "
            f"not {type(value).__name__}"
        )
    if parameter.element and value.itemsize != parameter.element:
        raise TypeError(
            f"{label}: {parameter.name} points to {parameter.type} of {parameter.element} bytes, "
            f"got an array of {value.dtype}"
        )
    return value._touch(not parameter.const, parameter.name)


def _value(label: str, parameter: Parameter, value: Any) -> bytes:
    kind = _KINDS.get(parameter.type, "")
    if not isinstance(value, np.generic):
        raise TypeError(
            f"{label}: {parameter.name} is a value of type {parameter.type}: pass a NumPy scalar "
            f"of {parameter.size} bytes, not {type(value).__name__}"
        )
    if value.nbytes != parameter.size or (kind and value.dtype.kind != kind):
        raise TypeError(
            f"{label}: {parameter.name} is of type {parameter.type}, {parameter.size} bytes, "
            f"got numpy.{value.dtype}"
        )
    return value.tobytes()
