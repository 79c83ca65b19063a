"""Getting Numba's part compiled, or loaded from its disk cache, before data moves."""

from __future__ import annotations

import threading

import numpy as np

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


def compile_drivers(machine: Machine) -> None:
    """Run the smallest of problems through both passes; free when called again. The drivers are
    the same for all dtypes and heads."""
    with _lock:
        if machine in _done:
            return
        workers = Workers(1)
        x, row = np.zeros((1, 1, 1, 1), np.float32), np.zeros((1, 1, 1), np.float32)
        problem = Problem(1, 1, 1, 1, 1, 1, 1, "float32", Mask.full(1, 1), 1.0)
        tiles = lower(problem.mask, (Run(0, 1, 1),), (Run(0, 1, 1),))
        forward, backward = TiledForward(machine, workers), TiledBackward(machine, workers)
        state = forward.begin(x, problem, None)
        forward.accumulate(state, x, x, tiles)
        forward.finish(state)
        grads = backward.begin(x, x, row, row, problem)
        backward.accumulate(grads, x, x, x.copy(), x.copy(), tiles)
        backward.finish(grads)
        _done.add(machine)
