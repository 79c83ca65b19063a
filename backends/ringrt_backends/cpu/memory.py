"""Memory that begins at a line of the cache, and is handed on from pass to pass.

A vector that lies across two lines is loaded twice: with NumPy's own alignment of 16 bytes that is
every vector of AVX-512, and every second one of AVX2. And what the system gives afresh is slow to
touch for the first time, page by page, which with little work a row is a large part of a pass.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ringrt.plan.partition import Array

#: Bytes of a line, or of two where they are fetched in pairs.
_LINE = 128
#: Bytes that are kept at most, between passes.
_KEPT = 1 << 28


def zeros(shape: tuple[int, ...], dtype: Any = np.float64) -> Array:
    """As NumPy's, from the beginning of a line on."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    array: Array = _aligned(np.zeros, size).view(dtype).reshape(shape)
    return array


def full(shape: tuple[int, ...], value: float, dtype: Any = np.float64) -> Array:
    """As NumPy's, from the beginning of a line on."""
    array = zeros(shape, dtype)
    array[...] = value
    return array


def _aligned(make: Callable[[int, Any], Array], size: int) -> Array:
    """So many bytes."""
    room = make(size + _LINE, np.uint8)
    skip = -room.ctypes.data % _LINE
    return room[skip : skip + size]


class Memory:
    """Arrays whose contents are whatever was there."""

    def __init__(self) -> None:
        self._kept: list[Array] = []
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array of this shape; it may hold anything."""
        block = self._block(math.prod(shape) * np.dtype(dtype).itemsize)
        array: Array = block.view(dtype).reshape(shape)
        return array

    def give_back_with(self, owner: Any, arrays: list[Array]) -> None:
        """Take the arrays back when their owner is gone."""
        weakref.finalize(
            owner, self._give_back, [array.reshape(-1).view(np.uint8) for array in arrays]
        )

    def _block(self, size: int) -> Array:
        with self._lock:
            for index, block in enumerate(self._kept):
                if block.nbytes == size:
                    return self._kept.pop(index)
        return _aligned(np.empty, size)

    def _give_back(self, blocks: list[Array]) -> None:
        with self._lock:
            self._kept = [*blocks, *self._kept]
            while sum(block.nbytes for block in self._kept) > _KEPT:
                self._kept.pop()
