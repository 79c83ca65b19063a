"""What the tests of the compiled cpu kernels share: machines of any width, passes over the shards
of a case, and what comes of them by the oracle."""

from __future__ import annotations

import ctypes
from functools import cache

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

import oracle
from ringrt.conformance.cases import Arrays, Case
from ringrt.plan import Piece
from ringrt.plan.mask_options import MaskOptions
from ringrt_backends.cpu import compiled
from ringrt_backends.cpu.backend import CpuBackend
from ringrt_backends.cpu.machine import Machine, emulated_pairs
from support import numpy_dtype


def vectors(width, rows=6, chunk=16, pairs="", registers=32):
    """Code of any width: LLVM makes this machine's vectors of it."""
    return Machine(
        f"w{width}", width, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(),
        rows=rows, chunk=chunk, pairs=pairs, registers=registers,
    )  # fmt: skip


#: Every width, height of a tile, and length of a chunk, once at least.
MACHINES = {
    "4": vectors(4, rows=12, chunk=16),
    "8": vectors(8, rows=6, chunk=16, registers=16),
    "8-low": vectors(8, rows=4, chunk=1),
    "16": vectors(16, rows=12, chunk=8),
}
PAIRS = emulated_pairs()


def cpu(machine, threads=1):
    """A backend of that code; None is plain Numba."""
    return CpuBackend(threads, machine)


def masked(case, **options):
    """The case with a mask by the options of `Ring.attention`."""
    mask = MaskOptions.of(**options).build(case.rows, case.keys)
    name = ", ".join(f"{key} {value}" for key, value in options.items())
    return case.but(mask=name, pieces=tuple(mask.pieces()))


def seen_by(pieces, rows, keys):
    """Who sees whom, by the definition of a piece."""
    apart = np.arange(rows)[:, None] - np.arange(keys)
    seen = np.zeros((rows, keys), bool)
    for piece in pieces:
        at = slice(piece.q_start, piece.q_stop), slice(piece.k_start, piece.k_stop)
        low = -np.inf if piece.min_distance is None else piece.min_distance
        high = np.inf if piece.max_distance is None else piece.max_distance
        seen[at] |= (low <= apart[at]) & (apart[at] <= high)
    return seen


def pieces_of(case):
    whole = (Piece(0, case.rows, 0, case.keys),)
    return whole if case.pieces is None else case.pieces


def _how(case):
    seen = seen_by(pieces_of(case), case.rows, case.keys)
    return {"seen": seen, "scale": case.problem.scale, "softcap": case.softcap, "sink": case.logits}


@cache
def expected(case):
    """out and lse."""
    x = case.arrays()
    return oracle.attention(x.q, x.k, x.v, **_how(case))


@cache
def expected_gradients(case):
    """dq, dk and dv."""
    x = case.arrays()
    return oracle.gradients(x.dout, x.q, x.k, x.v, **_how(case))[:3]


def delta_of(arrays, out):
    """rowsum(dout · out), float64."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.einsum("brhd,brhd->bhr", arrays.dout.astype(float), out.astype(float))


def forward(made, case, arrays: Arrays | None = None):
    """out and lse of a pass over the case's shards."""
    x, problem = arrays or case.arrays(), case.problem
    made.prepare(problem)
    state = made.begin(x.q, problem, case.logits)
    for cut, tiles in case.shards():
        made.accumulate(state, x.k[:, cut], x.v[:, cut], tiles)
    out, lse = made.finish(state)
    assert out.dtype == numpy_dtype(case.dtype)
    return out, lse


def backward(made, case, arrays=None, lse=None, delta=None):
    """dq, dk and dv, given lse and delta, or those of the oracle."""
    x, problem = arrays or case.arrays(), case.problem
    if lse is None:
        out, lse = expected(case)
        delta = delta_of(x, out)
    dtype = problem.state_dtype
    made.prepare(problem)
    with np.errstate(over="ignore"):
        rows = lse.astype(dtype), delta.astype(dtype)
    grads = made.begin_backward(x.q, x.dout, *rows, problem)
    dk, dv = (np.zeros(each.shape, dtype) for each in (x.k, x.v))
    for cut, tiles in case.shards():
        parts = [np.zeros(each[:, cut].shape, dtype) for each in (x.k, x.v)]
        made.accumulate_backward(grads, x.k[:, cut], x.v[:, cut], *parts, tiles)
        for total, part in zip((dk, dv), parts, strict=True):
            with np.errstate(invalid="ignore", over="ignore"):
                total[:, cut] += part
    return made.finish_backward(grads), dk, dv


def assert_gradients(result, wanted, tolerance=2e-6):
    """Relative to the largest gradient."""
    for got, want in zip(result, wanted, strict=True):
        assert got.shape == want.shape
        size = max(1, np.max(abs(want), initial=0))
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * size)


def assert_same_bits(results):
    """All of them, of several passes."""
    first, *others = results
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


#: Heads and masks of all kinds in one: what a test takes that is not about them.
CASE = Case(rows=101, keys=119, q_heads=4, kv_heads=2, head_dim=5, value_dim=3)


#: With pairs of bf16 too.
NAMES = [*MACHINES, "pairs"]


def machine_of(name):
    return PAIRS if name == "pairs" else MACHINES[name]


class Function:
    """A compiled function. Arrays are passed by their address."""

    def __init__(self, machine, emit, name="f"):
        module = ir.Module()
        emit(module, machine, name)
        shape = compiled.shape_of(machine, 1, 1, False)
        self._code = compiled.compile_module(module, machine, shape, (name,))

    def __call__(self, *arguments):
        kinds = {np.ndarray: ctypes.c_void_p, int: ctypes.c_int64, np.uint32: ctypes.c_uint32,
                 float: ctypes.c_double, np.float32: ctypes.c_float}  # fmt: skip
        function = ctypes.CFUNCTYPE(None, *(kinds[type(x)] for x in arguments))
        given = [x.ctypes.data if isinstance(x, np.ndarray) else x for x in arguments]
        function(int(self._code.addresses[0]))(*given)
