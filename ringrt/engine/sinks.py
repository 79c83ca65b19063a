"""The gradient of sink logits: each rank's part, and the sum."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringrt.device import Device
from ringrt.engine.agree import gather
from ringrt.engine.backward import Tensors
from ringrt.plan.partition import Array
from ringrt.transport import Transport


def sink_part(device: Device, sink: Array, tensors: Tensors, seen: Array) -> Array:
    """This rank's part of dsink `[q_heads]`, float64 on the host: a sink is a score whose value
    is 0, so the sum over rows of p (0 − delta + dlse). `seen` bool `[rows]`: the rows that see any
    key. For the others out is 0 whatever dout holds, lse is the sink, and so only dlse counts."""
    part = device.sink_gradient(sink, tensors.lse, tensors.delta, seen)
    if tensors.dlse is None or seen.all():
        return part
    alone = device.to_host(tensors.dlse, tensors.dlse.dtype.name)[..., ~seen]
    rest = np.where(sink == -np.inf, 0, alone.astype(np.float64).sum(axis=(0, 2)))
    return np.asarray(part + rest)


def sum_of_sinks(transport: Transport, part: Array, dtype: np.dtype[Any], timeout: float) -> Array:
    """The sum of all ranks' parts, in rank order, so that it is the same everywhere. Collective."""
    raw = gather(transport, part.astype(np.float64).tobytes(), timeout)
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.sum([np.frombuffer(each, np.float64) for each in raw], axis=0)
        return np.asarray(total.astype(dtype))
