"""Arrays on their way to the device and back, and launches there, for the Numba CUDA backend."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import numpy as np

from ringrt.plan.partition import Array
from ringrt_backends.cuda_numba_elements import clear, widen_bfloat16, widen_float16
from ringrt_backends.cuda_numba_kernels import SIGNATURES
from ringrt_backends.cuda_numba_pairs import SIMULATED, THREADS, cuda

#: The simulator runs one kernel at a time, whoever launches it.
_SIMULATOR = threading.Lock()


def launch(kernel: Any, blocks: int, stream: Any, *arguments: Any) -> None:
    """Queue a kernel, of any number of blocks."""
    if not blocks:
        return
    if not SIMULATED:
        kernel[blocks, THREADS, stream](*arguments)
        return
    with _SIMULATOR:
        kernel[blocks, THREADS, stream](*arguments)


def upload(x: Array, stream: Any) -> Any:
    """`[batch, rows, heads, dim]` of any strides as `[batch, heads, rows, dim]` on the device,
    float32 and contiguous. 16-bit dtypes travel as they are. x may be overwritten on return:
    CUDA copies pageable memory aside before it goes on."""
    turned = np.ascontiguousarray(x.transpose(0, 2, 1, 3))
    if not x.size:
        return cuda.device_array(turned.shape, np.float32, stream=stream)
    if x.dtype == np.float32:
        return cuda.to_device(turned, stream=stream)
    flat = turned.reshape(-1)
    if x.dtype == np.float16:
        wide = cuda.device_array(flat.size, np.float32, stream=stream)
        narrow, kernel = cuda.to_device(flat, stream=stream), widen_float16
    else:
        wide = cuda.device_array(flat.size, np.uint32, stream=stream)
        narrow, kernel = cuda.to_device(flat.view(np.uint16), stream=stream), widen_bfloat16
    launch(kernel, _blocks(flat.size), stream, narrow, wide)
    return wide.view(np.float32).reshape(turned.shape)


def zeros(shape: tuple[int, ...], stream: Any) -> Any:
    """float64 zeros on the device."""
    made = cuda.device_array(shape, np.float64, stream=stream)
    if made.size:
        launch(clear, _blocks(made.size), stream, made.reshape(made.size))
    return made


def _blocks(size: int) -> int:
    """Enough blocks to keep a device busy; where simulated, few threads that do much each."""
    return min(-(-size // THREADS), 1 if SIMULATED else 4096)


#: Every kernel has one signature, whatever the problem.
ALL_SIGNATURES = SIGNATURES | {
    clear: "void(float64[::1])",
    widen_float16: "void(float16[::1], float32[::1])",
    widen_bfloat16: "void(uint16[::1], uint32[::1])",
}


@cache
def compile_for(dtype: str) -> None:
    """Compile what a dtype needs, so that the time does not fall into a ring step."""
    idle = {"float32": (widen_float16, widen_bfloat16), "float16": (widen_bfloat16,)}
    for kernel, signature in ALL_SIGNATURES.items():
        if not SIMULATED and kernel not in idle.get(dtype, (widen_float16,)):
            kernel.compile(signature)
