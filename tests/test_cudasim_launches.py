"""The CUDA simulator: launches of kernels, what they may be given, and their faults."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from cudasim_support import (
    FakeKernel,
    boom,
    fresh,  # noqa: F401
    ones,
    scale,
    two_streams,
)

from ringrt import cudasim
from ringrt.cudasim import KernelFault, SimulatorError, api as cp
from ringrt.cudasim.module import RawKernel
from ringrt.cudasim.runtime import CUDARuntimeError

pytestmark = pytest.mark.timeout(60)

# Kernels


def call(signature="f(const float* x, int n)", args=None, grid=(1,), block=(32,), **options):
    args = (ones(), np.int32(8)) if args is None else args
    RawKernel(FakeKernel(signature, lambda *_: None))(grid, block, args, **options)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (lambda: (ones(),), "1 arguments for 2: x, n"),
        (lambda: (ones(), 8), "n is a value of type int: pass a NumPy scalar of 4 bytes, not int"),
        (lambda: (ones(), np.int64(8)), "n is of type int, 4 bytes, got numpy.int64"),
        (lambda: (ones(), np.float32(8)), "n is of type int"),
        (lambda: (ones(), np.uint32(8)), "n is of type int"),
        (lambda: (np.ones(3, np.float32), np.int32(8)), "x is a pointer"),
        (lambda: (ones().data.ptr, np.int32(8)), "x is a pointer"),
        (lambda: (None, np.int32(8)), "x is a pointer"),
        (lambda: (cp.empty(3, np.float64), np.int32(8)), "points to float of 4 bytes, got"),
    ],
)
def test_wrong_arguments(args, text):
    with pytest.raises((SimulatorError, TypeError), match=text):
        call(args=args())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"grid": (0,)}, "grid"),
        ({"grid": (1, 65536)}, "grid"),
        ({"block": (32, 0)}, "block"),
        ({"block": (2048,)}, "block"),
        ({"block": (32, 64)}, "more than 1024 threads"),
        ({"block": (1, 1, 128)}, "block"),
        ({"shared_mem": 49153}, "max_dynamic_shared_size_bytes is 49152"),
        ({"shared_mem": -1}, "shared memory"),
    ],
)
def test_impossible_launches(options, text):
    with pytest.raises(CUDARuntimeError, match=text):
        call(**options)
    with pytest.raises(TypeError, match="tuple of 1 to 3"):
        call(grid=[1])


def test_more_shared_memory_has_to_be_asked_for():
    fake = FakeKernel("f(const float* x)", lambda x: None)
    kernel = RawKernel(fake)
    kernel.max_dynamic_shared_size_bytes = 227 * 1024
    cudasim.set_seed(5)
    kernel((2, 3), (32, 2), (ones(),), shared_mem=227 * 1024)
    cudasim.set_seed(0)
    cp.cuda.Device().synchronize()
    assert fake.launches == [((2, 3, 1), (32, 2, 1), 227 * 1024, 5)]
    assert kernel.name == "f"
    with pytest.raises(CUDARuntimeError, match="at most 232448"):
        kernel.max_dynamic_shared_size_bytes = 227 * 1024 + 1


SOURCE = """
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
struct bf16 { u16 bits; };
struct f16 { u16 bits; };
struct alignas(16) Vec16 { u32 x[4]; };
#include "cudasim.h"

KERNEL(32) scale(const float* x, float* y, int n, float f) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * f;
}
"""


def test_a_real_kernel():
    module = cp.RawModule(code=SOURCE, options=("-std=c++17",))
    kernel = module.get_function("scale")
    x, y = cp.asarray(np.arange(40, dtype=np.float32)), cp.empty(40, np.float32)
    kernel((2,), (32,), (x, y, np.int32(40), np.float32(3)))
    np.testing.assert_array_equal(y.get(), np.arange(40) * 3)
    view = y[1:39]
    kernel((2,), (32,), (x[2:], view, np.int32(38), np.float32(1)))
    np.testing.assert_array_equal(view.get(), np.arange(2, 40))
    with pytest.raises(SimulatorError, match="no kernel 'missing'"):
        module.get_function("missing")
    kernel((2,), (32,), (x, view, np.int32(40), np.float32(1)))
    with pytest.raises(KernelFault, match=r"kernel scale .*launches.py:\d+: .*out of bounds"):
        view.get()


# Faults


def test_a_fault_sticks_to_the_thread_and_device():
    x, (stream, other) = ones(), two_streams()
    cp.cuda.Device().synchronize()
    boom()((1,), (32,), (x,), stream=stream)
    event = stream.record()
    for act in (
        stream.synchronize,
        lambda: cp.cuda.runtime.eventQuery(event.ptr),
        other.synchronize,
        lambda: other.done,
        lambda: scale(x, x, 1, other),
        x.get,
        cp.cuda.Device().synchronize,
    ):
        with pytest.raises(KernelFault, match="kernel boom on stream .*: it went wrong"):
            act()
    assert not event.done, "as with CuPy, which does not tell"
    with cp.cuda.Device(1):
        assert ones().get()[0] == 1
    cudasim.reset()
    assert x.get()[0] == 1


def test_a_fault_found_by_a_query():
    x, (stream, _) = ones(), two_streams()
    cp.cuda.Device().synchronize()
    boom()((1,), (32,), (x,), stream=stream)
    with pytest.raises(KernelFault, match="it went wrong"):
        _ = stream.done


def test_other_errors_of_a_kernel_are_faults_too():
    def body(x):
        raise ZeroDivisionError("oh")

    x = ones()
    RawKernel(FakeKernel("odd(float* x)", body))((1,), (32,), (x,))
    with pytest.raises(SimulatorError, match="kernel odd .*ZeroDivisionError: oh"):
        x.get()


def test_another_threads_fault_is_not_mine():
    x, (stream, other) = ones(), two_streams()
    cp.cuda.Device().synchronize()
    thread = threading.Thread(target=lambda: boom()((1,), (32,), (x,), stream=stream))
    thread.start()
    thread.join()
    other.synchronize()
    cp.cuda.Device().synchronize()
    other.synchronize()
    with pytest.raises(KernelFault):
        stream.synchronize()


def test_another_threads_fault_is_not_the_null_streams():
    x, y, stream = ones(), ones(), cp.cuda.Stream()
    cp.cuda.Device().synchronize()
    thread = threading.Thread(target=lambda: boom()((1,), (32,), (x,), stream=stream))
    thread.start()
    thread.join()
    for value in (2, 3):
        y.fill(value)
        assert y.get()[0] == value
