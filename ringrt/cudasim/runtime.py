"""`cupy.cuda.runtime`: the calls below CuPy's classes, and how they fail."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NoReturn

from ringrt.cudasim import core
from ringrt.cudasim.core import CHANGED
from ringrt.cudasim.errors import SimulatorError

__all__ = [
    "CUDARuntimeError",
    "deviceSynchronize",
    "driverGetVersion",
    "eventQuery",
    "getDevice",
    "getDeviceCount",
    "getDeviceProperties",
    "memcpyAsync",
    "memcpyDefault",
    "memcpyDeviceToDevice",
    "memcpyDeviceToHost",
    "memcpyHostToDevice",
    "memcpyHostToHost",
    "runtimeGetVersion",
    "setDevice",
    "streamCaptureModeGlobal",
    "streamCaptureModeRelaxed",
    "streamCaptureModeThreadLocal",
]

memcpyHostToHost, memcpyHostToDevice, memcpyDeviceToHost = 0, 1, 2  # noqa: N816
memcpyDeviceToDevice, memcpyDefault = 3, 4  # noqa: N816
streamCaptureModeGlobal, streamCaptureModeThreadLocal = 0, 1  # noqa: N816
streamCaptureModeRelaxed = 2  # noqa: N816

#: Bytes of shared memory that a block has without asking, and at most.
SHARED_BYTES, MAX_SHARED_BYTES = 48 * 1024, 227 * 1024

_ERRORS = {
    1: "cudaErrorInvalidValue: invalid argument",
    9: "cudaErrorInvalidConfiguration: invalid configuration argument",
    101: "cudaErrorInvalidDevice: invalid device ordinal",
    400: "cudaErrorInvalidResourceHandle: invalid resource handle",
    401: "cudaErrorIllegalState: the operation cannot be performed in the present state",
    600: "cudaErrorNotReady: device not ready",
    900: "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing",
    903: "cudaErrorStreamCaptureUnmatched: the capture was not initiated in this stream",
    904: "cudaErrorStreamCaptureUnjoined: capturing stream has unjoined work",
    905: "cudaErrorStreamCaptureIsolation: dependency created on uncaptured work in another stream",
    906: "cudaErrorStreamCaptureImplicit: operation would make the legacy stream depend on a "
    "capturing blocking stream",
    907: "cudaErrorCapturedEvent: operation not permitted on an event last recorded in a "
    "capturing stream",
}


class CUDARuntimeError(SimulatorError, RuntimeError):
    """An error as CUDA gives it, with `status` its number; `detail` says what was wrong."""

    def __init__(self, status: int, detail: str = "") -> None:
        self.status = status
        super().__init__(status, detail)

    def __str__(self) -> str:
        text = _ERRORS.get(self.status, f"CUDA error {self.status}")
        return f"{text} ({self.args[1]})" if self.args[1] else text


_PROPERTIES: dict[str, Any] = {
    "name": b"ringrt CUDA simulator",
    "major": 9,
    "minor": 0,
    "multiProcessorCount": 8,
    "totalGlobalMem": 80 << 30,
    "sharedMemPerBlock": SHARED_BYTES,
    "sharedMemPerBlockOptin": MAX_SHARED_BYTES,
    "maxThreadsPerBlock": 1024,
    "warpSize": 32,
}


def getDeviceCount() -> int:  # noqa: N802
    """8, or what RINGRT_CUDASIM_DEVICES says."""
    text = os.environ.get("RINGRT_CUDASIM_DEVICES", "8")
    if not text.isdecimal() or not int(text):
        raise SimulatorError(f"RINGRT_CUDASIM_DEVICES: expected a number of devices, got {text!r}")
    return int(text)


def check_device(device: int) -> int:
    """The device, if there is such a one."""
    if not 0 <= device < getDeviceCount():
        raise CUDARuntimeError(101, f"device {device} of {getDeviceCount()}")
    return int(device)


def getDevice() -> int:  # noqa: N802
    """The calling thread's current device."""
    return core.current().device


def setDevice(device: int) -> None:  # noqa: N802
    """Make a device current in the calling thread."""
    core.current().device = check_device(device)


def getDeviceProperties(device: int) -> dict[str, Any]:  # noqa: N802
    """What the simulated device is like."""
    check_device(device)
    return dict(_PROPERTIES)


def eventQuery(event: int) -> int:  # noqa: N802
    """0 if the event of that `ptr` has been reached, 600 if not. Where CUDA gives the number of an
    error, the error itself is raised, which says more."""
    from ringrt.cudasim.stream import query_event

    return 0 if query_event(event) else 600


def deviceSynchronize() -> None:  # noqa: N802
    """Wait for all work of the current device."""
    from ringrt.cudasim import stream

    stream.synchronize_device(core.current().device)


def runtimeGetVersion() -> int:  # noqa: N802
    """The version of CUDA that is stood in for."""
    return 12090


def driverGetVersion() -> int:  # noqa: N802
    """The same for the driver."""
    return 12090


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
    """Copy `size` bytes between raw addresses, of which `kind` says where they lie."""
    from ringrt.cudasim import copies
    from ringrt.cudasim.lanes import find_lane

    if kind not in range(5):
        raise CUDARuntimeError(1, f"memcpyAsync: kind {kind}")
    with CHANGED:
        lane = find_lane(stream, core.enter().device)
    copies.copy(dst, src, size, lane, copies.KINDS[kind])


if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(f"the CUDA simulator does not implement cupy.cuda.runtime.{name}")
