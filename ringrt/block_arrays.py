"""What a `BlockBackend` needs of its kernel's arrays, so that one loop serves NumPy and tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from ringrt.device.dtypes import numpy_dtype
from ringrt.plan.partition import Array

#: An array of the kernel's kind: NumPy's, or a tensor. Indexing, arithmetic and `swapaxes` are
#: the same for both, and so are the functions of `ringrt.softmax_state.module_of`.
KernelArray = Any


class BlockArrays(Protocol):
    """The ways between the engine's arrays (see `ringrt.device.Device`) and the kernel's."""

    def running(self, stream: Any) -> AbstractContextManager[None]:
        """What is done inside is done on the engine's stream."""

    def taken(self, x: Array, dtype: str) -> KernelArray:
        """An array of the engine, of that dtype, as the kernel's: on the same memory wherever its
        strides allow, and always if it is contiguous."""

    def placed(self, x: Array) -> KernelArray:
        """A small NumPy array as the kernel's, where the kernel computes."""

    def zeros(self, shape: tuple[int, ...], dtype: str) -> KernelArray:
        """A new array of zeros."""

    def cast(self, x: KernelArray, dtype: str) -> KernelArray:
        """x in that dtype: itself if it has it."""

    def given(self, x: KernelArray, dtype: str) -> Array:
        """x as an array of the engine, in that dtype, contiguous."""


class NumpyArrays:
    """Kernels that take the engine's host arrays as they are. See `BlockArrays`."""

    @contextlib.contextmanager
    def running(self, stream: Any) -> Iterator[None]:
        """At once; NaN and inf are the caller's to see."""
        with np.errstate(invalid="ignore", over="ignore"):
            yield

    def taken(self, x: Array, dtype: str) -> Array:
        """Itself."""
        return x

    def placed(self, x: Array) -> Array:
        """Itself."""
        return x

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        """As NumPy."""
        return np.zeros(shape, numpy_dtype(dtype))

    def cast(self, x: Array, dtype: str) -> Array:
        """As NumPy."""
        return x.astype(numpy_dtype(dtype), copy=False)

    def given(self, x: Array, dtype: str) -> Array:
        """As NumPy."""
        return np.ascontiguousarray(self.cast(x, dtype))
