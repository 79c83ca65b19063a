"""CUDA kernels that take each element by itself, for the Numba CUDA backend. A module of their own:
while a kernel runs, the simulator puts something else in the place of its module's `cuda`, which
host code of another rank would then find."""

from __future__ import annotations

import numpy as np

from ringrt_backends.cuda_numba_pairs import cuda


@cuda.jit
def widen_float16(narrow, wide):  # type: ignore[no-untyped-def]
    """float16 `[n]` to float32."""
    for at in range(cuda.grid(1), narrow.shape[0], cuda.gridsize(1)):
        wide[at] = np.float32(narrow[at])


@cuda.jit
def widen_bfloat16(narrow, bits):  # type: ignore[no-untyped-def]
    """The bits of bfloat16 `[n]`, as uint16, to those of float32: they are its upper half."""
    for at in range(cuda.grid(1), narrow.shape[0], cuda.gridsize(1)):
        bits[at] = np.uint32(narrow[at]) << np.uint32(16)


@cuda.jit
def clear(x):  # type: ignore[no-untyped-def]
    """x `[n]` = 0."""
    for at in range(cuda.grid(1), x.shape[0], cuda.gridsize(1)):
        x[at] = 0.0
