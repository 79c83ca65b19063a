"""Attention on a CUDA GPU: kernels in `kernels/*.cu`, launched through CuPy.

fp16 and bf16 on tensor cores; fp32 and fp64 without, exactly. Everything is queued on the rank's
stream and nothing here waits for it. What the kernels need to know of the tiles is made on the
host once for a plan and stays on the GPU with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ringrt.backend import Stream
from ringrt.device.cuda import CudaDevice, check_rows
from ringrt.errors import KernelError
from ringrt.plan.partition import Array
from ringrt.plan.problem import Problem
from ringrt.plan.tiles import TileTable
from ringrt_backends.cuda_variants import MAX_DIM, Kernel, Variant
from ringrt_backends.cuda_work import Work, by_keys, by_queries

_THREADS = 128


@dataclass(frozen=True, slots=True)
class CupyState:
    """q as it came, and the state of its rows: m, z `[batch, q_heads, rows]`, y `[batch, q_heads,
    rows, value_dim]`."""

    q: Array
    m: Array
    z: Array
    y: Array
    problem: Problem


@dataclass(frozen=True, slots=True)
class CupyGrads:
    """What a backward pass has been given, and dq, all on the GPU."""

    q: Array
    dout: Array
    lse: Array
    delta: Array
    dq: Array
    problem: Problem


class CupyBackend:
    """See `ringrt.backend.Backend`."""

    backward = True
    needs_out = False

    def __init__(self, device: CudaDevice) -> None:
        self._device, self._stopped = device, False
        self._work: WeakKeyDictionary[TileTable, dict[Any, Any]] = WeakKeyDictionary()

    def supports(self, problem: Problem) -> str | None:
        """All but large heads."""
        for name in ("head_dim", "value_dim"):
            if getattr(problem, name) > MAX_DIM:
                return f"{name} {getattr(problem, name)}: it goes to {MAX_DIM}"
        if Variant.of(problem).tensor_cores and self._device.capability < 80:
            return f"{problem.dtype} needs compute capability 8.0, this GPU has " + ".".join(
                str(self._device.capability)
            )
        need = max(kernel.shared for kernel in Variant.of(problem).all())
        if need > self._device.shared_limit:
            return (
                f"head_dim {problem.head_dim} and value_dim {problem.value_dim} in {problem.dtype} "
                f"need {need >> 10} KiB of shared memory a block; this GPU has "
                f"{self._device.shared_limit >> 10}"
            )
        return None

    def prepare(self, problem: Problem) -> None:
        """Compile the kernels."""
        for kernel in Variant.of(problem).all():
            self._function(kernel)

    def begin(
        self, q: Array, problem: Problem, sink: Array | None = None, stream: Stream = None
    ) -> CupyState:
        """The empty state, or that of the sink."""
        variant, device = Variant.of(problem), self._device
        heads, rows = problem.batch * problem.q_heads, q.shape[1]
        shape = problem.batch, problem.q_heads, rows
        m, z = (device.empty(shape, variant.state_dtype) for _ in range(2))
        y = device.empty((*shape, problem.value_dim), variant.state_dtype)
        logits = np.zeros(1) if sink is None else sink.astype(np.float64)
        device.run(
            self._function(variant.begin), heads * rows, m, z, y, device.upload(logits),
            np.int32(sink is not None), np.int32(rows), np.int32(problem.q_heads),
            np.int64(heads), np.int32(problem.value_dim),
        )  # fmt: skip
        return CupyState(self._readable(q), m, z, y, problem)

    def accumulate(
        self, state: CupyState, k: Array, v: Array, tiles: TileTable, stream: Stream = None
    ) -> None:
        """Absorb all tiles in one launch."""
        problem, rows = state.problem, state.q.shape[1]
        variant = Variant.of(problem)
        check_rows(rows, k.shape[1])
        kernel = variant.forward
        items, pieces = self._lists(tiles, by_queries, rows, kernel.block)
        tensors = state.q, self._readable(k), self._readable(v)
        self._launch(
            kernel, len(items) * problem.batch * problem.q_heads,
            *tensors, state.m, state.z, state.y, items, pieces, np.int32(rows),
            *_sizes(problem), *_strides(tensors), *_scores(problem, variant, tensors),
        )  # fmt: skip

    def finish(self, state: CupyState, stream: Stream = None) -> tuple[Array, Array]:
        """out in the problem's dtype, lse in its state dtype."""
        problem, device, rows = state.problem, self._device, state.q.shape[1]
        out = device.empty((problem.batch, rows, problem.q_heads, problem.value_dim), problem.dtype)
        lse = device.empty((problem.batch, problem.q_heads, rows), problem.state_dtype)
        heads = problem.batch * problem.q_heads
        function = self._function(Variant.of(problem).finish)
        device.run(
            function, out.size, state.m, state.z, state.y, out, lse, np.int32(rows),
            np.int32(problem.q_heads), np.int64(heads), np.int32(problem.value_dim),
        )  # fmt: skip
        return out, lse

    def begin_backward(
        self,
        q: Array,
        dout: Array,
        lse: Array,
        delta: Array,
        problem: Problem,
        stream: Stream = None,
        out: Array | None = None,
    ) -> CupyGrads:
        """dq is 0 so far."""
        shape = problem.batch, q.shape[1], problem.q_heads, problem.head_dim
        dq = self._device.zeros(shape, problem.state_dtype)
        return CupyGrads(self._readable(q), self._readable(dout), lse, delta, dq, problem)

    def accumulate_backward(
        self,
        grads: CupyGrads,
        k: Array,
        v: Array,
        dk: Array,
        dv: Array,
        tiles: TileTable,
        stream: Stream = None,
    ) -> None:
        """Add the gradients of all tiles: dq by query rows, dk and dv by keys. Every element has
        one owner, so the order of addition is always the same."""
        problem, rows, keys = grads.problem, grads.q.shape[1], k.shape[1]
        check_rows(rows, keys)
        variant = Variant.of(problem)
        tensors = grads.q, grads.dout, self._readable(k), self._readable(v)
        rest = *_sizes(problem), *_strides(tensors), *_scores(problem, variant, tensors)
        kernel = variant.backward_q
        items, pieces = self._lists(tiles, by_queries, rows, kernel.block)
        self._launch(
            kernel, len(items) * problem.batch * problem.q_heads,
            *tensors, grads.lse, grads.delta, grads.dq, items, pieces, np.int32(rows), *rest,
        )  # fmt: skip
        for kernel in variant.backward_kv:
            items, pieces = self._lists(tiles, by_keys, keys, kernel.block)
            self._launch(
                kernel, len(items) * problem.batch * problem.kv_heads,
                *tensors, grads.lse, grads.delta, dk, dv, items, pieces, np.int32(rows),
                np.int32(keys), *rest,
            )  # fmt: skip

    def finish_backward(self, grads: CupyGrads, stream: Stream = None) -> Array:
        """dq."""
        return grads.dq

    def close(self) -> None:
        """Queue nothing more; what is queued comes to its end."""
        self._stopped = True

    def _function(self, kernel: Kernel) -> Any:
        return self._device.function(kernel.path, kernel.name, kernel.options, kernel.shared)

    def _launch(self, kernel: Kernel, blocks: int, *arguments: Any) -> None:
        if self._stopped:
            raise KernelError("backend cupy was broken off while it was computing")
        if blocks:
            function, threads = self._function(kernel), (_THREADS, 1, 1)
            function((blocks, 1, 1), threads, arguments, shared_mem=kernel.shared)

    def _lists(
        self, tiles: TileTable, cut: Callable[[TileTable, int, int], Work], rows: int, block: int
    ) -> tuple[Any, Any]:
        """A table's items and pieces, on the GPU; made once for it."""
        made = self._work.setdefault(tiles, {})
        key = cut, rows, block
        if key not in made:
            items, pieces = (self._device.upload(x) for x in cut(tiles, rows, block))
            made[key] = items.reshape(-1, 4), pieces
        lists: tuple[Any, Any] = made[key]
        return lists

    def _readable(self, x: Array) -> Array:
        """x itself, if the elements of a row lie side by side."""
        side_by_side = x.shape[3] == 1 or x.strides[3] == x.itemsize
        return x if side_by_side else self._device.take(x, slice(None), 1)


def _sizes(problem: Problem) -> tuple[Any, ...]:
    names = (problem.batch, problem.q_heads, problem.group, problem.head_dim, problem.value_dim)
    return tuple(map(np.int32, names))


def _strides(tensors: tuple[Array, ...]) -> list[Any]:
    """From one batch, row and head to the next, in elements."""
    return [np.int64(stride // x.itemsize) for x in tensors for stride in x.strides[:3]]


def _scores(problem: Problem, variant: Variant, tensors: tuple[Array, ...]) -> tuple[Any, ...]:
    """scale and softcap; for the tensor-core kernels also, bit by bit, which tensors can be read
    16 bytes at a time."""
    if not variant.tensor_cores:
        return np.float64(problem.scale), np.float64(problem.softcap or 0)
    bits = sum(1 << n for n, x in enumerate(tensors) if _aligned(x))
    return np.float32(problem.scale), np.float32(problem.softcap or 0), np.int32(bits)


def _aligned(x: Array) -> bool:
    address = int(x.data.ptr)  # type: ignore[attr-defined]
    steps = [s for s, n in zip(x.strides[:3], x.shape[:3], strict=True) if n > 1]
    return x.shape[3] % 8 == 0 and address % 16 == 0 and all(step % 16 == 0 for step in steps)
