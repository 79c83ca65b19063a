"""Functions that make arrays of a device, and NumPy's of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ringrt.cudasim.array import ndarray
from ringrt.cudasim.errors import SimulatorError
from ringrt.cudasim.stream import BaseStream, current_lane


def empty(shape: Any, dtype: npt.DTypeLike = float, order: str = "C") -> ndarray:
    """A new array on the current device and stream, filled with 0xFF: not a number."""
    return ndarray(shape, dtype, order=order)


def zeros(shape: Any, dtype: npt.DTypeLike = float, order: str = "C") -> ndarray:
    """A new array of zeros, set on the current stream."""
    made = ndarray(shape, dtype, order=order)
    made.data.memset_async(0, made.nbytes)
    return made


def asarray(
    a: Any,
    dtype: npt.DTypeLike | None = None,
    order: str | None = None,
    *,
    copy: bool | None = None,
    blocking: bool = False,
) -> ndarray:
    """An array of the host as a new array on the current device and stream. A device array is
    returned as it is."""
    if order not in (None, "C", "K", "A") or copy is False:
        raise SimulatorError("asarray: only order='C', and no copy=False, is simulated")
    if isinstance(a, ndarray):
        if copy or (dtype is not None and np.dtype(dtype) != a.dtype):
            raise SimulatorError("asarray: a device array is neither copied nor cast")
        return a
    source = np.ascontiguousarray(np.asarray(a, dtype)).reshape(np.shape(a))
    made = empty(source.shape, source.dtype)
    made._upload(source, current_lane(), blocking)
    return made


def asnumpy(
    a: Any,
    stream: BaseStream | None = None,
    order: str = "C",
    out: npt.NDArray[Any] | None = None,
    *,
    blocking: bool = True,
) -> npt.NDArray[Any]:
    """An array as one of NumPy: `get` of an array of a device, and anything else as it is."""
    if isinstance(a, ndarray):
        return a.get(stream=stream, order=order, out=out, blocking=blocking)
    if out is not None:
        raise SimulatorError("asnumpy: out= is simulated for arrays of a device only")
    return np.asarray(a)
