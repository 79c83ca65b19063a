"""What the tests of the CUDA simulator share: kernels in Python, streams and buffers, and NCCL ranks
as threads."""

from __future__ import annotations

import ctypes
import gc
import re
import threading

import numpy as np
import pytest

from ringrt import cudasim
from ringrt.cudasim import KernelFault, SimulatorError, api as cp
from ringrt.cudasim.compiler import parse_signatures
from ringrt.cudasim.cuda import nccl
from ringrt.cudasim.module import RawKernel

U8, F32 = nccl.NCCL_UINT8, nccl.NCCL_FLOAT32


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setenv("RINGRT_CUDASIM_TIMEOUT", "0.4")
    cudasim.reset()
    yield
    gc.collect()
    cudasim.reset()


class FakeKernel:
    """A kernel in Python: the body gets NumPy arrays for pointers and bytes for values."""

    def __init__(self, signature, body):
        name, parameters = next(iter(parse_signatures(f"KERNEL(32) {signature} {{").items()))
        self.name, self.parameters, self._body = name, parameters, body
        self.launches = []

    def run(self, grid, block, arguments, buffers, shared_bytes, seed=0):
        self.launches.append((grid, block, shared_bytes, seed))
        spans = iter(buffers)
        given = []
        for parameter, value in zip(self.parameters, arguments, strict=True):
            if parameter.pointer:
                span = next(spans)
                assert span.writable is (not parameter.const)
                raw = (ctypes.c_uint8 * span.nbytes).from_address(span.address)
                given.append(np.frombuffer(raw, np.float32))
            else:
                given.append(np.frombuffer(value, np.float32)[0])
        self._body(*given)


def _scale(x, y, f):
    y[:] = x * f


def scale_kernel():
    return RawKernel(FakeKernel("scale(const float* x, float* y, float f)", _scale))


def scale(x, y, factor, stream=None):
    scale_kernel()((1,), (32,), (x, y, np.float32(factor)), stream=stream)


def two_streams():
    return cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)


def ones(n=8):
    return cp.asarray(np.ones(n, np.float32))


def pinned(n=8):
    return np.frombuffer(cp.cuda.alloc_pinned_memory(4 * n), np.float32, n)


def boom():
    def body(x):
        raise KernelFault("it went wrong")

    return RawKernel(FakeKernel("boom(float* x)", body))


class Rank:
    """One rank: its communicator, on a device of its own, and a stream."""

    def __init__(self, size, key, rank):
        self.rank, self.size = rank, size
        self.comm = nccl.NcclCommunicator(size, key, rank)
        self.stream = cp.cuda.Stream(non_blocking=True)
        self.stream.use()

    @property
    def next(self):
        return (self.rank + 1) % self.size

    @property
    def previous(self):
        return (self.rank - 1) % self.size

    def send(self, x, peer, stream=None, nbytes=None):
        nbytes = x.nbytes if nbytes is None else nbytes
        self.comm.send(x.data.ptr, nbytes, U8, peer, (stream or self.stream).ptr)

    def recv(self, x, peer, stream=None, nbytes=None):
        nbytes = x.nbytes if nbytes is None else nbytes
        self.comm.recv(x.data.ptr, nbytes, U8, peer, (stream or self.stream).ptr)

    def array(self, value=None, n=8):
        x = cp.empty(n, np.float32)
        if value is not None:
            x.fill(value)
        return x

    def shift(self, x, y):
        nccl.groupStart()
        self.send(x, self.next)
        self.recv(y, self.previous)
        nccl.groupEnd()


def run(program, size=2):
    """Run a program on every rank; what each returned or raised."""
    key, results = nccl.get_unique_id(), [None] * size

    def body(rank):
        try:
            with cp.cuda.Device(rank):
                results[rank] = program(Rank(size, key, rank))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return results


def passes(program, size=2):
    results = run(program, size)
    for result in results:
        if isinstance(result, Exception):
            raise result
    cudasim.check()
    return results


def fails(program, text, size=2, ranks=None, kind=SimulatorError):
    results = run(program, size)
    for rank in range(size) if ranks is None else ranks:
        assert isinstance(results[rank], kind), results[rank]
        assert re.search(text, str(results[rank]))
