"""Getting Numba's part compiled, or loaded from its disk cache, before data moves."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np

from ringrt.device.dtypes import numpy_dtype
from ringrt.plan.mask import Mask
from ringrt.plan.partition import Run
from ringrt.plan.problem import Problem
from ringrt.plan.tiles import lower
from ringrt_backends.cpu.machine import Machine
from ringrt_backends.cpu.tiled_backward import TiledBackward
from ringrt_backends.cpu.tiled_forward import TiledForward
from ringrt_backends.cpu.workers import Workers

_lock = threading.Lock()
_done: set[Machine] = set()


def compile_drivers(machine: Machine, problem: Problem) -> None:
    """Run one row and key of the problem through both passes; free when called again. The drivers
    are the same for all dtypes and heads; the vector code is that of the problem."""
    with _lock:
        if machine in _done:
            return
        workers = Workers(1)
        mask = Mask.full(1, 1)
        small = replace(
            problem, batch=1, q_heads=1, kv_heads=1, q_length=1, kv_length=1, mask=mask, sink=False
        )
        tiles = lower(mask, (Run(0, 1, 1),), (Run(0, 1, 1),))
        k, v = (np.zeros((1, 1, 1, dim), np.float32) for dim in (small.head_dim, small.value_dim))
        given = [x.astype(numpy_dtype(small.dtype)) for x in (k, k, v, v)]
        forward, backward = TiledForward(machine, workers), TiledBackward(machine, workers)
        state = forward.begin(given[0], small, None)
        forward.accumulate(state, given[1], given[2], tiles)
        _, lse = forward.finish(state)
        grads = backward.begin(given[0], given[3], lse, np.zeros_like(lse), small)
        backward.accumulate(grads, given[1], given[2], k, v, tiles)
        backward.finish(grads)
        _done.add(machine)
