"""Arrays of any framework, handed over by DLPack: in without a copy, and out as the same kind.

Inside, an array of the host is NumPy's and one of a GPU is CuPy's. Anything with `__dlpack__` and
`__dlpack_device__` can be handed in, where it lies, with its strides. A result goes back by the
`from_dlpack` of whoever made the first argument: of PyTorch, JAX, or any library that follows the
array API standard.

bfloat16 goes as 16-bit words between NumPy or CuPy and the capsule (see `dlpack_capsule`). The
protocol's rules for streams are kept by CuPy: who hands an array in makes CuPy's current stream
wait for what writes it, and takes a result behind what CuPy's current stream holds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ringrt.device import kind_of
from ringrt.device.driver import cupy, missing_cuda
from ringrt.dlpack_capsule import (
    BFLOAT,
    CPU,
    CUDA,
    CUDA_HOST,
    CUDA_MANAGED,
    ROCM_HOST,
    UINT,
    tensor_of,
)
from ringrt.errors import HandoffError, Unsupported
from ringrt.plan.partition import Array

#: Makes an array of some kind from one of NumPy or CuPy.
Give = Callable[[Array], Any]

_HOSTS = (CPU, CUDA_HOST, ROCM_HOST)
_GPUS = (CUDA, CUDA_MANAGED)
#: DLDeviceType of what is known and cannot be used.
_NAMES = {
    4: "OpenCL",
    7: "Vulkan",
    8: "Metal",
    10: "ROCm",
    14: "oneAPI",
    15: "WebGPU",
    16: "Hexagon",
}


def take(name: str, x: Any) -> Array:
    """x as an array of NumPy or CuPy, which shares its memory. One of JAX is read-only. Raises
    `HandoffError` for what cannot be handed over, and says why."""
    if isinstance(x, np.ma.MaskedArray):
        raise HandoffError(f"{name}: a masked array, whose mask would be ignored; pass a plain one")
    if kind_of(x) is not None:
        # A subclass of NumPy's might index or compute in a way of its own.
        array: Array = np.asarray(x) if isinstance(x, np.ndarray) else x
        return array
    _refuse_what_loses(name, x)
    _check_speaks(name, x)
    try:
        device, index = (int(part) for part in x.__dlpack_device__())
        host = device in _HOSTS
        if not host:
            _check_gpu(name, device, index)
        producer = _Producer(x)
        array = np.from_dlpack(producer) if host else _on_gpu(producer, index)
    except HandoffError:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise HandoffError(f"{name}: a {_kind_name(x)} cannot be handed over: {reason}") from error
    if producer.words:
        array = array.view(ml_dtypes.bfloat16)
    if host and _root(x) in ("jax", "jaxlib"):
        # JAX's capsules do not say that its arrays must never be written.
        array.flags.writeable = False
    return array


def giver(name: str, x: Any) -> Give:
    """What makes results of the kind of x, on the device where they lie. Raises `HandoffError`
    if nothing is known to."""
    if kind_of(x) is not None:
        return lambda array: array
    root = _root(x)
    if root == "torch":
        import torch.utils.dlpack

        return lambda array: torch.utils.dlpack.from_dlpack(_Result(array))
    if root in ("jax", "jaxlib"):
        import jax

        # JAX takes compact arrays only.
        return lambda array: jax.numpy.from_dlpack(_Result(array, compact=True), device=x.device)
    if hasattr(x, "__array_namespace__"):
        namespace = x.__array_namespace__()
        return lambda array: namespace.from_dlpack(_Result(array))
    _check_speaks(name, x)
    raise HandoffError(
        f"{name}: nothing says how a {_kind_name(x)} is made of a result: it has no "
        f"__array_namespace__"
    )


def rewriter(name: str, x: Any) -> Give:
    """As `giver`, for results that will be written again. `Unsupported` for JAX, whose arrays are
    constant."""
    if _root(x) in ("jax", "jaxlib"):
        raise Unsupported(f"capture: not implemented for {name} of JAX, whose arrays are constant")
    return giver(name, x)


class _Producer:
    """Hands on another's capsule; one of bfloat16 as 16-bit words. `words` says whether it was."""

    def __init__(self, x: Any) -> None:
        self._x = x
        self.words = False

    def __dlpack_device__(self) -> tuple[int, int]:
        device, index = self._x.__dlpack_device__()
        return int(device), int(index)

    def __dlpack__(self, **wishes: Any) -> Any:
        # A TypeError of one from before DLPack 1.0 makes NumPy and CuPy ask with fewer wishes.
        capsule = self._x.__dlpack__(**{k: wish for k, wish in wishes.items() if wish is not None})
        tensor = tensor_of(capsule)
        if tensor.data is None and all(tensor.shape[axis] for axis in range(tensor.ndim)):
            # A wrapper of tensors that are elsewhere: NumPy would make memory of its own.
            raise BufferError("it has no memory of its own")
        if tensor.code == BFLOAT:
            tensor.code, self.words = UINT, True
        return capsule


class _Result:
    """An array of NumPy or CuPy for another's `from_dlpack`. What consumers fail on is copied:
    negative strides (PyTorch ends the process), and read-only arrays (JAX refuses them)."""

    def __init__(self, array: Array, compact: bool = False) -> None:
        self._words = array.dtype.name == "bfloat16"
        whole = array.view(np.uint16) if self._words else array
        if isinstance(whole, np.ndarray):
            odd = min(whole.strides, default=0) < 0 or (compact and not whole.flags.c_contiguous)
            whole = whole.copy() if odd or not whole.flags.writeable else whole
        self._array = whole

    def __dlpack_device__(self) -> tuple[int, int]:
        device, index = self._array.__dlpack_device__()
        return int(device), int(index)

    def __dlpack__(self, **wishes: Any) -> Any:
        capsule = self._array.__dlpack__(**wishes)
        if self._words:
            tensor_of(capsule).code = BFLOAT
        return capsule


def _refuse_what_loses(name: str, x: Any) -> None:
    """`HandoffError` for arrays that stand for more than their elements."""
    root, kind = _root(x), _kind_name(x)
    if root in ("jax", "jaxlib") and not isinstance(x, sys.modules["jax"].Array):
        return
    if root == "torch" and getattr(x, "requires_grad", False):
        raise HandoffError(
            f"{name}: a tensor that requires a gradient, which would be lost; call "
            f"ringrt.torch.ring_attention, or pass {name}.detach()"
        )
    if root == "torch" and hasattr(x, "is_neg") and x.is_neg():
        raise HandoffError(
            f"{name}: a tensor whose elements are yet to be negated; pass {name}.resolve_neg()"
        )
    if root == "torch" and hasattr(x, "to_local"):
        raise HandoffError(f"{name}: a {kind}, spread over devices; pass {name}.to_local()")
    if root in ("jax", "jaxlib"):
        jax = sys.modules["jax"]
        if isinstance(x, jax.core.Tracer):
            raise HandoffError(
                f"{name}: a value that JAX traces; call ringrt.jax.ring_attention there"
            )
        if x.is_deleted():
            raise HandoffError(f"{name}: a JAX array that has been deleted, or donated")
        if len(x.devices()) > 1:
            raise HandoffError(
                f"{name}: a JAX array spread over {len(x.devices())} devices; pass the rank's own, "
                f"{name}.addressable_shards[i].data"
            )


def _check_speaks(name: str, x: Any) -> None:
    if not hasattr(x, "__dlpack__") or not hasattr(x, "__dlpack_device__"):
        raise HandoffError(f"{name}: a {_kind_name(x)} cannot be handed over: it has no __dlpack__")


def _check_gpu(name: str, device: int, index: int) -> None:
    if device not in _GPUS:
        where = _NAMES.get(device, f"DLPack device type {device}")
        raise HandoffError(f"{name}: on {where} device {index}, which no backend of ringrt can use")
    missing = missing_cuda()
    if missing is not None:
        raise HandoffError(f"{name}: on GPU {index}, but {missing}")


def _on_gpu(producer: _Producer, index: int) -> Array:
    with cupy().cuda.Device(index):
        array: Array = cupy().from_dlpack(producer)
    return array


def _root(x: Any) -> str:
    """The package that x comes from; for a subclass, where its class comes from or one above."""
    for kind in type(x).__mro__:
        root = kind.__module__.partition(".")[0]
        if root in ("torch", "jax", "jaxlib"):
            return root
    return type(x).__module__.partition(".")[0]


def _kind_name(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"
