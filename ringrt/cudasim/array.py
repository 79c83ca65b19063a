"""`cupy.ndarray` and what makes one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from ringrt.cudasim import copies
from ringrt.cudasim.copies import MemoryPointer, lane_of
from ringrt.cudasim.core import CHANGED, enter
from ringrt.cudasim.errors import SimulatorError
from ringrt.cudasim.heap import Span, allocate, find
from ringrt.cudasim.lanes import Lane, Touch
from ringrt.cudasim.memory import Memory
from ringrt.cudasim.stream import BaseStream, Device, current_lane
from ringrt.cudasim.waiting import refuse_capture
from ringrt.dlpack_capsule import CUDA

_IMPLICIT = (
    "Implicit conversion to a NumPy array is not allowed. "
    "Please use `.get()` to construct a NumPy array explicitly."
)
_NOT_HERE = (
    "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "matmul", "rmatmul",
    "truediv", "rtruediv", "itruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow",
    "neg", "pos", "abs", "invert", "and", "rand", "or", "ror", "xor", "rxor", "lshift",
    "rshift", "eq", "ne", "lt", "le", "gt", "ge", "bool", "int", "float", "complex", "index",
    "contains", "setitem",
)  # fmt: skip


class Flags(NamedTuple):
    """How an array lies in memory."""

    c_contiguous: bool


class ndarray:  # noqa: N801
    """An array in device memory. It has shape, strides and dtype, and can be viewed, copied and
    given to kernels; nothing is computed with it otherwise."""

    __slots__ = ("__weakref__", "_memory", "_ptr", "_view")
    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        shape: int | tuple[int, ...],
        dtype: npt.DTypeLike = float,
        memptr: MemoryPointer | None = None,
        strides: tuple[int, ...] | None = None,
        order: str = "C",
    ) -> None:
        """An array on memory that is there, at `memptr`, or on new memory of the current stream."""
        if order != "C":
            raise SimulatorError(f"order={order!r} is not simulated, only 'C'")
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise ValueError(f"Unsupported dtype {kind}")
        if memptr is None:
            if strides is not None:
                raise SimulatorError("ndarray: strides are taken only together with memptr")
            lengths = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
            memptr = _allocate(int(np.prod(lengths, dtype=np.int64)) * kind.itemsize)
        raw = memptr.mem._allocation.raw
        self._memory, self._ptr = memptr.mem, memptr.ptr
        offset = memptr.ptr - memptr.mem.ptr
        self._view: npt.NDArray[Any] = np.ndarray(shape, kind, raw, offset, strides)

    @property
    def shape(self) -> tuple[int, ...]:
        """Length along each axis."""
        return self._view.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next along each axis."""
        return self._view.strides

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        return self._view.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self._view.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._view.size

    @property
    def nbytes(self) -> int:
        """Bytes of all elements together."""
        return self._view.nbytes

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self._view.itemsize

    @property
    def data(self) -> MemoryPointer:
        """Where the first element lies."""
        return MemoryPointer(self._memory, self._ptr - self._memory.ptr)

    @property
    def device(self) -> Device:
        """The device in whose memory it lies."""
        return Device(self._memory.device_id)

    @property
    def flags(self) -> Flags:
        """How it lies in memory."""
        return Flags(bool(self._view.flags.c_contiguous))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """See Numba's documentation of the interface. Whoever uses the address does so behind the
        simulator's back: in no order, and with no check."""
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "data": (self._ptr, False),
            "strides": None if self._view.flags.c_contiguous else self.strides,
            "stream": current_lane().ptr or 1,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's number of CUDA, and the device's."""
        return CUDA, self._memory.device_id

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule; see `ringrt.cudasim.dlpack`."""
        from ringrt.cudasim.dlpack import export

        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise SimulatorError("__dlpack__: no copy, and no other device, is simulated")
        return export(self, stream, max_version)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __getitem__(self, slices: Any) -> ndarray:
        """A view, by integers, slices, None and Ellipsis."""
        keys = slices if isinstance(slices, tuple) else (slices,)
        for each in keys:
            if isinstance(each, bool) or not (
                each is None or each is ... or isinstance(each, int | np.integer | slice)
            ):
                raise SimulatorError(
                    f"indexing with {type(each).__name__} is not simulated, only views by integers "
                    f"and slices"
                )
        return self._viewed(self._view[keys if ... in keys else (*keys, ...)])

    def reshape(self, *shape: Any, order: str = "C", copy: bool | None = None) -> ndarray:
        """A view of another shape. Where CuPy would copy this is refused."""
        if order != "C" or copy:
            raise SimulatorError("reshape: only order='C' without a copy is simulated")
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        view = self._view.reshape(sizes)
        if view.size and not np.may_share_memory(view, self._view):
            raise SimulatorError(f"reshape of {self} to {tuple(sizes)} needs a copy: not simulated")
        return self._viewed(view)

    def view(self, dtype: npt.DTypeLike | None = None, type: Any = None) -> ndarray:
        """The same bytes as elements of another type."""
        if type is not None:
            raise SimulatorError("view: type= is not simulated")
        return self._viewed(self._view if dtype is None else self._view.view(dtype))

    def transpose(self, *axes: Any) -> ndarray:
        """A view with its axes in another order, by default the opposite one."""
        return self._viewed(self._view.transpose(*axes))

    def get(
        self,
        stream: BaseStream | None = None,
        order: str = "C",
        out: npt.NDArray[Any] | None = None,
        blocking: bool = True,
    ) -> npt.NDArray[Any]:
        """A copy in host memory, in `out` if that is given. With `blocking=False` and `out` in
        pinned memory it is still under way when this returns."""
        if order != "C":
            raise SimulatorError(f"get: order={order!r} is not simulated, only 'C'")
        result = np.empty(self.shape, self.dtype) if out is None else out
        if result.dtype != self.dtype or result.shape != self.shape:
            raise ValueError(
                f"get: out is {result.dtype}{list(result.shape)}, "
                f"the array {self.dtype}{list(self.shape)}"
            )
        if not result.flags.c_contiguous or not result.flags.writeable:
            raise SimulatorError("get: out must be contiguous and writeable")
        lane = lane_of(stream)
        with CHANGED:
            pinned = self._begin_copy(result, "copy to host")
            touches = [self._touch(False, "source")]
            if pinned:
                copies.poison(pinned, lane)
                touches.append(Touch(*pinned, True, "destination"))
            run = partial(np.copyto, _held(result, pinned), self._view)
            wait = blocking or pinned is None
            copies.queue(lane, "copy to host", run, touches, self.nbytes, wait=wait)
        return result

    def set(self, arr: npt.NDArray[Any], stream: BaseStream | None = None) -> None:
        """Copy from host memory. From pinned memory the copy is still under way when this
        returns, unless it is on the null stream by default."""
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if self.dtype != arr.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if self.shape != arr.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not self.flags.c_contiguous:
            raise RuntimeError("Cannot set to non-contiguous array")
        lane = lane_of(stream)
        self._upload(np.ascontiguousarray(arr), lane, wait=stream is None and lane.null)

    def _upload(self, source: npt.NDArray[Any], lane: Lane, wait: bool) -> None:
        """Queue the copy of an array of the same dtype and shape, and wait for it if it is to be
        waited for, or does not lie in pinned memory."""
        with CHANGED:
            pinned = self._begin_copy(source, "copy to device")
            touches = [self._touch(True, "destination")]
            if pinned:
                touches.append(Touch(*pinned, False, "source"))
            run = partial(np.copyto, self._view, _held(source, pinned))
            wait = wait or pinned is None
            copies.queue(lane, "copy to device", run, touches, self.nbytes, wait=wait)

    def fill(self, value: Any) -> None:
        """Set every element, on the current stream."""
        scalar = np.asarray(value)
        if scalar.ndim:
            raise SimulatorError("fill: expected a scalar")
        lane, touch = current_lane(), self._touch(True, "destination")
        run = partial(self._view.fill, scalar.astype(self.dtype)[()])
        copies.fill(self._memory, touch.lo, touch.hi, lane, run, "fill")

    def _touch(self, write: bool, name: str) -> Touch:
        """An access to all bytes from its first to its last element."""
        lo = hi = self._ptr - self._memory.ptr
        if self._view.flags.c_contiguous:
            hi += self._view.nbytes
        elif self._view.size:
            for length, stride in zip(self.shape, self.strides, strict=True):
                lo += min(0, (length - 1) * stride)
                hi += max(0, (length - 1) * stride)
            hi += self._view.itemsize
        return Touch(self._memory._allocation, lo, hi, write, name)

    def _begin_copy(self, host: npt.NDArray[Any], label: str) -> Span | None:
        """The pinned memory in which an array of the host lies, if it does."""
        enter()
        copies.check_current(self._memory._allocation, label, "the array")
        address = int(host.__array_interface__["data"][0])
        allocation = find(address)
        if allocation is None or not host.nbytes:
            return None
        lo = address - allocation.address
        return Span(allocation, lo, lo + host.nbytes)

    def _viewed(self, view: npt.NDArray[Any]) -> ndarray:
        made = object.__new__(ndarray)
        made._memory, made._view = self._memory, view
        made._ptr = int(view.__array_interface__["data"][0]) if view.size else self._ptr
        return made

    def __repr__(self) -> str:
        return f"<{self.dtype}{list(self.shape)} on device {self._memory.device_id}>"

    def __array__(self, *args: Any, **options: Any) -> NoReturn:
        raise TypeError(_IMPLICIT)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"the CUDA simulator does not implement cupy.ndarray.{name}")


def _held(host: npt.NDArray[Any], pinned: Span | None) -> npt.NDArray[Any]:
    """An array of the host for a queued copy, which does not keep its owner: pinned memory may be
    freed too early like any other."""
    return host if pinned is None else pinned.bytes.view(host.dtype).reshape(host.shape)


def _refuse(name: str) -> Any:
    def refuse(self: ndarray, *args: Any) -> NoReturn:
        raise TypeError(
            f"the CUDA simulator does not implement cupy.ndarray.__{name}__: "
            f"use a kernel, or get() the array and compute with NumPy"
        )

    return refuse


for _name in _NOT_HERE:
    setattr(ndarray, f"__{_name}__", _refuse(_name))


def _allocate(nbytes: int) -> MemoryPointer:
    lane = current_lane()
    with CHANGED:
        thread = enter()
        refuse_capture(lane, f"allocation during capture: {nbytes} bytes")
        if thread.captures:
            refuse_capture(thread.captures[0], f"allocation during capture: {nbytes} bytes")
        return MemoryPointer(Memory(allocate(nbytes, thread.device, lane)), 0)
