"""A user's arrays, wherever they lie: what comes in as NumPy or CuPy goes out as the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ringrt.device import Device
from ringrt.device.cuda import CudaDevice, carrier
from ringrt.device.driver import cupy
from ringrt.inputs import Place, as_numpy
from ringrt.plan.partition import Array, Partition, Runs, positions, shard, unshard


def shard_of(x: Array, runs: Runs, axis: int, gpu: Callable[[int], CudaDevice]) -> Array:
    """The rows of x at the runs' positions, along an axis: a view where it is one run, else a
    copy, which `gpu` (a rank's device, by number) makes of a CuPy array."""
    if isinstance(x, np.ndarray) or len(runs) == 1:
        return shard(x, runs, axis)
    device = gpu(x.device.id)
    with device.running():
        return device.take(x, positions(runs), axis)


def unshard_like(shards: Sequence[Array], partition: Partition, axis: int = 1) -> Array:
    """The whole of every rank's shard, where the first lies: on a GPU by way of the host."""
    whole = unshard([as_numpy("shard", x) for x in shards], partition, axis)
    return put_like(whole, shards[0])


def give_back(device: Device, x: Array, like: Array) -> Array:
    """A result: NumPy where `like` is, otherwise where it is."""
    if isinstance(like, np.ndarray):
        dtype = like.dtype.name if x.dtype == carrier(like.dtype.name) else x.dtype.name
        return device.to_host(x, dtype)
    return x.view(like.dtype) if x.dtype == carrier(like.dtype.name) else x


def wait_for_caller(place: Place) -> None:
    """Before arrays are given to thread ranks, which know nothing of this thread's stream: wait
    for what is queued on it."""
    kind, index = place
    if kind == "cuda":
        with cupy().cuda.Device(index):
            cupy().cuda.get_current_stream().synchronize()


def put_like(x: Array, like: Array) -> Array:
    """A NumPy array, on the GPU of `like` if that lies on one."""
    if isinstance(like, np.ndarray):
        return x
    with like.device:
        placed: Array = cupy().asarray(x)
    return placed
