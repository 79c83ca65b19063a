"""Backends made of PyTorch kernels, on the host and on GPUs.

A subclass of `TorchBlockBackend` is a `BlockBackend` whose `block` and `block_backward` get and
give tensors. They lie on the memory of the engine's arrays, no element is copied on the way; what
is queued on a GPU is queued on the engine's stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from ringrt.backend import BlockBackend
from ringrt.device import Device
from ringrt.device.cuda import CudaDevice, carrier
from ringrt.device.driver import cupy
from ringrt.device.host import HOST
from ringrt.errors import Unsupported
from ringrt.plan.partition import Array

#: A `torch.Tensor`.
Tensor = Any


class TorchBlockBackend(BlockBackend):
    """A `BlockBackend` of tensors `[batch, rows, heads, dim]` of any strides, in `problem.dtype`,
    on that device; on the host with so many threads, by default PyTorch's number. The state and
    the sums are tensors too."""

    def __init__(self, device: Device = HOST, threads: int | None = None) -> None:
        if isinstance(device, CudaDevice):
            self.arrays = CudaTensors(device)
        else:
            self.arrays = HostTensors(threads)


class _Tensors:
    """What tensors on every device have in common; see `ringrt.block_arrays.BlockArrays`."""

    def __init__(self, place: Any) -> None:
        import torch

        self._torch, self._place = torch, torch.device(place)

    def placed(self, x: Array) -> Tensor:
        """A copy."""
        return self._torch.tensor(x, device=self._place)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """As PyTorch."""
        return self._torch.zeros(shape, dtype=self._dtype(dtype), device=self._place)

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        """As PyTorch."""
        return x.to(self._dtype(dtype))

    def _dtype(self, name: str) -> Any:
        return getattr(self._torch, name)

    def _words(self, x: Tensor, dtype: str) -> Tensor:
        """x in that dtype, contiguous; bfloat16 as int16, in which it is handed over."""
        x = self.cast(x, dtype).contiguous()
        return x.view(self._torch.int16) if dtype == "bfloat16" else x


class HostTensors(_Tensors):
    """Tensors of the host, from NumPy arrays and back."""

    def __init__(self, threads: int | None = None) -> None:
        super().__init__("cpu")
        self._threads = threads

    @contextlib.contextmanager
    def running(self, stream: Any) -> Iterator[None]:
        """At once. PyTorch keeps a number of threads for each thread that calls it."""
        before = self._torch.get_num_threads()
        self._torch.set_num_threads(self._threads or before)
        try:
            with self._torch.no_grad():
                yield
        finally:
            self._torch.set_num_threads(before)

    def taken(self, x: Array, dtype: str) -> Tensor:
        """On x's memory, unless its strides are negative."""
        words = x.view(np.int16) if dtype == "bfloat16" else x
        if any(stride < 0 or stride % words.itemsize for stride in words.strides):
            words = np.ascontiguousarray(words)
        if not words.flags.writeable:
            words = np.asarray(_Alias(words))
        return self._torch.from_numpy(words).view(self._dtype(dtype))

    def given(self, x: Tensor, dtype: str) -> Array:
        """On the tensor's memory, if it had the dtype and was contiguous."""
        words: Array = self._words(x, dtype).numpy()
        return words.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else words


class CudaTensors(_Tensors):
    """Tensors of a GPU, from CuPy arrays and back, by DLPack."""

    def __init__(self, device: CudaDevice) -> None:
        super().__init__(f"cuda:{device.index}")
        self._device = device

    @contextlib.contextmanager
    def running(self, stream: Any) -> Iterator[None]:
        """On that stream, which is CuPy's."""
        if self._device.capturing:
            raise Unsupported(
                "capture: not implemented with PyTorch kernels, which allocate memory"
            )
        external = self._torch.cuda.ExternalStream(stream.ptr, device=self._place)
        with self._torch.no_grad(), self._torch.cuda.stream(external):
            yield

    def taken(self, x: Any, dtype: str) -> Tensor:
        """On x's memory, unless its strides are negative."""
        if any(stride < 0 for stride in x.strides):
            x = x.copy()
        words = x.view(np.int16) if dtype == "bfloat16" else x
        return self._torch.from_dlpack(words).view(self._dtype(dtype))

    def given(self, x: Tensor, dtype: str) -> Array:
        """On the tensor's memory, if it had the dtype and was contiguous."""
        words: Array = cupy().from_dlpack(self._words(x, dtype))
        return words.view(carrier(dtype))


class _Alias:
    """An array that may be read only, as one that may be written: PyTorch warns of the former,
    and nothing here writes to it."""

    def __init__(self, x: Array) -> None:
        self._kept = x
        address, _ = x.__array_interface__["data"]
        self.__array_interface__ = x.__array_interface__ | {"data": (address, False)}


def per_query_head(x: Tensor, group: int) -> Tensor:
    """K or V `[batch, keys, kv_heads, dim]` for kernels that want as many heads as q has: each is
    repeated for the `group` query heads that read it."""
    return x if group == 1 else x.repeat_interleave(group, dim=2)


def per_kv_head(x: Tensor, group: int) -> Tensor:
    """The other way for gradients, summed over each group in at least float32."""
    if group == 1:
        return x
    batch, keys, heads, dim = x.shape
    wide = x.double() if x.dtype.itemsize == 8 else x.float()
    return wide.view(batch, keys, heads // group, group, dim).sum(dim=3)
