"""Attention on a CUDA GPU by kernels in Python, compiled by Numba: for hosts that have a driver
and no compiler, and to be read.

It takes and gives arrays of the host. q is uploaded once a pass, k and v with every visit, as far
as the tiles meet them; the state, or dq, stays on the device until the pass is finished. Numba is
imported when a backend is made, so that `missing` can say that it is not there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from ringrt.backend import Stream
from ringrt.errors import KernelError
from ringrt.plan.partition import Array
from ringrt.plan.problem import Problem
from ringrt.plan.tiles import TileTable
from ringrt.softmax_state import SoftmaxState
from ringrt_backends.cuda_numba_work import Work, key_range, key_work, row_work

_MAX_DIM = 256


def missing() -> str | None:
    """What is missing to run here, and after a colon what would mend it."""
    if find_spec("numba") is None or find_spec("numba_cuda") is None:
        extras = "'ringrt[numba-cuda12]' or 'ringrt[numba-cuda13]'"
        return f"numba-cuda is not installed: pip install {extras}"
    from ringrt_backends.cuda_numba_pairs import SIMULATED, cuda

    if not SIMULATED and not cuda.is_available():
        return (
            "Numba finds no CUDA GPU, driver or libNVVM: run where there are, or set "
            "NUMBA_ENABLE_CUDASIM=1 before Numba is imported to simulate one"
        )
    return None


@dataclass(frozen=True, slots=True)
class NumbaState:
    """On the device: q float32 `[batch, q_heads, rows, head_dim]`, m and z float64 `[batch,
    q_heads, rows]`, y float64 `[batch, q_heads, rows, value_dim]`."""

    q: Any
    m: Any
    z: Any
    y: Any
    problem: Problem
    out_dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class NumbaGrads:
    """On the device: q and dout float32 `[batch, q_heads, rows, dim]`, lse and delta float32
    `[batch, q_heads, rows]`, dq like q in float64."""

    q: Any
    dout: Any
    lse: Any
    delta: Any
    dq: Any
    problem: Problem


class NumbaCudaBackend:
    """See `ringrt.backend.Backend`. Works on the current device, on a stream of its own unless
    it is given one of Numba's."""

    backward = True
    needs_out = False

    def __init__(self) -> None:
        from ringrt_backends import cuda_numba_arrays, cuda_numba_kernels, cuda_numba_pairs

        self._arrays, self._kernels = cuda_numba_arrays, cuda_numba_kernels
        self._tile, self._simulated = cuda_numba_pairs.TILE, cuda_numba_pairs.SIMULATED
        self._cuda = cuda_numba_pairs.cuda
        self._own_stream = self._cuda.stream()
        self._stopped = False

    def supports(self, problem: Problem) -> str | None:
        """All but float64 and very long rows."""
        if problem.dtype == "float64":
            return "float64 is not implemented on the numba backend"
        for name in ("head_dim", "value_dim"):
            if getattr(problem, name) > _MAX_DIM:
                return f"{name} > {_MAX_DIM} is not implemented on the numba backend"
        return None

    def prepare(self, problem: Problem) -> None:
        """Compile the kernels."""
        self._arrays.compile_for(problem.dtype)

    def begin(
        self, q: Array, problem: Problem, sink: Array | None = None, stream: Stream = None
    ) -> NumbaState:
        """The empty state, or that of the sink."""
        stream = self._stream(stream)
        shape = q.shape[0], problem.q_heads, q.shape[1]
        rows = SoftmaxState.empty(*shape, 0, "float64", sink)
        m, z = (self._cuda.to_device(x, stream=stream) for x in (rows.m, rows.z))
        y = self._arrays.zeros((*shape, problem.value_dim), stream)
        return NumbaState(self._arrays.upload(q, stream), m, z, y, problem, q.dtype)

    def accumulate(
        self, state: NumbaState, k: Array, v: Array, tiles: TileTable, stream: Stream = None
    ) -> None:
        """Queue the tiles, blocks of rows with the most keys first."""
        if not len(tiles):
            return
        stream, problem = self._stream(stream), state.problem
        k, v = (self._arrays.upload(x, stream) for x in _met(tiles, k, v))
        kernel, work = self._kernels.absorb, row_work(tiles, self._tile)
        self._launch(kernel, problem.q_heads, work, problem, stream,
                     state.q, k, v, state.m, state.z, state.y)  # fmt: skip

    def finish(self, state: NumbaState, stream: Stream = None) -> tuple[Array, Array]:
        """out in the dtype of q, lse in float32. The last division is the host's."""
        arrays = self._download(stream, state.m, state.z, state.y)
        out, lse = SoftmaxState(*arrays).finish()
        with np.errstate(over="ignore"):
            narrow = np.ascontiguousarray(out.astype(state.out_dtype))
            return narrow, lse.astype(state.problem.state_dtype)

    def begin_backward(
        self,
        q: Array,
        dout: Array,
        lse: Array,
        delta: Array,
        problem: Problem,
        stream: Stream = None,
        out: Array | None = None,
    ) -> NumbaGrads:
        """dq is 0 so far."""
        stream = self._stream(stream)
        wide, wide_dout = (self._arrays.upload(x, stream) for x in (q, dout))
        lse, delta = (
            self._cuda.to_device(np.ascontiguousarray(x, dtype=np.float32), stream=stream)
            for x in (lse, delta)
        )
        dq = self._arrays.zeros(wide.shape, stream)
        return NumbaGrads(wide, wide_dout, lse, delta, dq, problem)

    def accumulate_backward(
        self,
        grads: NumbaGrads,
        k: Array,
        v: Array,
        dk: Array,
        dv: Array,
        tiles: TileTable,
        stream: Stream = None,
    ) -> None:
        """Add the tiles' gradients: one launch whose blocks own keys, for dk and dv, and one whose
        blocks own rows, for dq. The former is waited for, since dk and dv are the host's."""
        if not len(tiles):
            return
        stream, problem, kernels = self._stream(stream), grads.problem, self._kernels
        k, v = (self._arrays.upload(x, stream) for x in _met(tiles, k, v))
        sums = [self._arrays.zeros(x.shape, stream) for x in (k, v)]
        rows = grads.q, grads.dout, grads.lse, grads.delta
        self._launch(kernels.keys_backward, problem.kv_heads, key_work(tiles, self._tile),
                     problem, stream, *rows, k, v, *sums)  # fmt: skip
        self._launch(kernels.rows_backward, problem.q_heads, row_work(tiles, self._tile),
                     problem, stream, *rows, grads.dq, k, v)  # fmt: skip
        totals = self._download(stream, *sums)
        with np.errstate(invalid="ignore", over="ignore"):
            for x, total in zip(_met(tiles, dk, dv), totals, strict=True):
                x += total.transpose(0, 2, 1, 3)

    def finish_backward(self, grads: NumbaGrads, stream: Stream = None) -> Array:
        """dq `[batch, rows, q_heads, head_dim]` float32."""
        (dq,) = self._download(stream, grads.dq)
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(dq.transpose(0, 2, 1, 3), grads.problem.state_dtype)

    def close(self) -> None:
        """Launch nothing more and wait for nothing more. Memory goes with the states."""
        self._stopped = True

    def _stream(self, stream: Stream) -> Any:
        return self._own_stream if stream is None else stream

    def _launch(
        self, kernel: Any, heads: int, work: Work, problem: Problem, stream: Any, *arrays: Any
    ) -> None:
        self._check()
        tasks, pieces = (self._cuda.to_device(x, stream=stream) for x in work)
        blocks = len(work.tasks) * arrays[0].shape[0] * heads
        scores = float(problem.scale), float(problem.softcap or 0)
        self._arrays.launch(kernel, blocks, stream, *arrays, tasks, pieces, *scores)

    def _download(self, stream: Stream, *arrays: Any) -> list[Array]:
        """Wait for the stream, so that `close` can break it off, and fetch."""
        stream = self._stream(stream)
        if not self._simulated:
            done = self._cuda.event(timing=False)
            done.record(stream)
            while not done.query():
                self._check()
                time.sleep(50e-6)
        self._check()
        return [x.copy_to_host(stream=stream) for x in arrays]

    def _check(self) -> None:
        if self._stopped:
            raise KernelError("backend numba was broken off while it was computing")


def _met(tiles: TileTable, *arrays: Array) -> tuple[Array, ...]:
    """The keys that the tiles meet, of arrays `[batch, keys, heads, dim]`."""
    start, stop = key_range(tiles)
    return tuple(x[:, start:stop] for x in arrays)
