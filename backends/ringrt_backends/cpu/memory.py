"""Memory that passes hand on to one another: what the system gives afresh is slow to touch for the
first time, page by page, which with little work a row is a large part of a pass."""

from __future__ import annotations

import math
import threading
import weakref
from typing import Any

import numpy as np

from ringrt.plan.partition import Array

#: Bytes that are kept at most, between passes.
_KEPT = 1 << 28


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
        return np.empty(size, np.uint8)

    def _give_back(self, blocks: list[Array]) -> None:
        with self._lock:
            self._kept = [*blocks, *self._kept]
            while sum(block.nbytes for block in self._kept) > _KEPT:
                self._kept.pop()
