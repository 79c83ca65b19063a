"""A CUDA GPU, through CuPy: one stream on which a rank computes, and kernels by name."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ringrt import kernels
from ringrt.device import Index, Kind
from ringrt.device.driver import cupy
from ringrt.device.dtypes import numpy_dtype
from ringrt.errors import KernelError, Unsupported
from ringrt.kernels import load_source
from ringrt.plan.partition import Array
from ringrt.plan.problem import ITEMSIZE, state_dtype

#: C++ names of dtypes, and of elements that are only moved.
TYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "float", "float64": "double"}
_WORDS = {2: "u16", 4: "u32", 8: "u64"}
_ROWS = Path(kernels.__file__).parent / "rows.cu"
_THREADS, _MOST_BLOCKS = 128, 4096
#: Beyond this a kernel has to ask for shared memory by name.
_PLAIN_SHARED = 48 << 10
#: Uploaded indices that are kept, so that a call like an earlier one uploads nothing.
_KEPT = 256
_LIMIT = 1 << 30
#: Other ranks' threads go on allocating while one captures: cudaStreamCaptureModeThreadLocal.
_THREAD_LOCAL = 1
#: cudaErrorNotReady.
_NOT_READY = 600


class Arena:
    """The arrays of a pass, in the order in which it asks for them: the first pass makes them, a
    second one that goes the same way gets the same ones. Nothing can be allocated while a graph
    is captured, and a graph's addresses must last as long as it."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self._next, self._made = 0, False

    def begin(self) -> None:
        """A pass begins."""
        self._next, self._made = 0, bool(self.arrays)

    def array(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], make: Callable[..., Any]
    ) -> Array:
        """The pass's next array."""
        if not self._made:
            self.arrays.append(make(shape, dtype))
        array = self.arrays[self._next]
        assert (array.shape, array.dtype) == (shape, dtype), "a pass that goes another way"
        self._next += 1
        return array


class CudaDevice:
    """See `ringrt.device.Device`. One for each rank; `index` is the GPU."""

    kind: Kind = "cuda"

    def __init__(self, index: int) -> None:
        self._cupy, self.index = cupy(), index
        self.gpu = self._cupy.cuda.Device(index)
        with self.gpu:
            self.stream: Any = self._cupy.cuda.Stream(non_blocking=True)
        self._streams = [self.stream]
        self.capturing = False
        self._arena: Arena | None = None
        self._modules: dict[Any, Any] = {}
        self._functions: dict[Any, Any] = {}
        self._uploads: OrderedDict[bytes, tuple[Any, Any]] = OrderedDict()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """This GPU and stream are current inside."""
        with self.gpu:
            caller = self._cupy.cuda.get_current_stream()
            self.stream.wait_event(caller.record())
            with self.stream:
                yield
            caller.wait_event(self.stream.record())

    def prepare(self, dtype: str) -> None:
        """Compile and load kernels: while exchanges are under way, loading one may wait for them,
        and they for a rank that loads."""
        for each in {dtype, state_dtype(dtype)}:
            for name in ("take", "add_rows", "rounded", "row_delta", "sink_gradient"):
                self._rows(name, each)

    def place(self, x: Array) -> Array:
        """NumPy arrays are copied, on the current stream."""
        placed: Array = self._cupy.asarray(x.view(carrier(x.dtype.name)))
        return placed

    def to_host(self, x: Array, dtype: str) -> Array:
        """A copy."""
        host: Array = x.get()  # type: ignore[attr-defined]
        return host.view(numpy_dtype(dtype)) if host.dtype.name != dtype else host

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """bfloat16 is carried by uint16."""
        return self._new(shape, carrier(dtype))

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        """As above."""
        array = self._new(shape, carrier(dtype))
        if array.nbytes:
            array.data.memset_async(0, array.nbytes, self.stream)  # type: ignore[attr-defined]
        return array

    def take(self, x: Array, index: Index, axis: int) -> Array:
        """One kernel, or none."""
        if isinstance(index, slice):
            view = x[(*(slice(None),) * axis, index)]
            if view.flags.c_contiguous:
                return view
        function = self._rows("take", _moved(x))
        count = _count(index, x.shape[axis])
        shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
        taken = self._new(shape, x.dtype)
        rest = 4 - x.ndim
        strides = [stride // x.itemsize for stride in x.strides]
        dims = [*map(np.int64, (*shape, *(1,) * rest, *strides, *(0,) * rest))]
        self.run(function, taken.size, x, taken,
                 *self._index(index), np.int32(axis), *dims)  # fmt: skip
        return taken

    def add_rows(self, total: Array, to: Index, part: Array, rows: Index) -> None:
        """One kernel."""
        batch, count = total.shape[0], _count(to, total.shape[1])
        width = int(np.prod(total.shape[2:]))
        sizes = map(np.int64, (batch, count, width, total.shape[1], part.shape[1]))
        self.run(self._rows("add_rows", total.dtype.name), batch * count * width,
                 total, part, *self._index(to), *self._index(rows), *sizes)  # fmt: skip

    def rounded(self, x: Array, dtype: str) -> Array:
        """x itself if it has the dtype already."""
        if x.dtype.name == dtype:
            return x
        narrow = self.empty(x.shape, dtype)
        function = self._rows("rounded", dtype)
        self.run(function, x.size, x, narrow, np.int64(x.size))
        return narrow

    def row_delta(self, dout: Array, out: Array, dtype: str, dlse: Array | None = None) -> Array:
        """One kernel."""
        batch, rows, heads, dim = dout.shape
        sums = state_dtype(dtype)
        delta = self.empty((batch, heads, rows), sums)
        strides = [np.int64(s // x.itemsize) for x in (dout, out) for s in x.strides]
        less = self.upload(np.zeros(1, sums)) if dlse is None else dlse
        self.run(self._rows("row_delta", dtype), delta.size * 32, dout, out, delta, less,
                 np.int32(dlse is not None), *map(np.int64, (batch, rows, heads)), np.int32(dim),
                 *strides)  # fmt: skip
        return delta

    def sink_gradient(self, sink: Array, lse: Array, delta: Array, seen: Array) -> Array:
        """One kernel, and a wait for its result."""
        batch, heads, rows = lse.shape
        part = self.zeros((batch, heads), "float64")
        if lse.size:
            function = self._rows("sink_gradient", lse.dtype.name)
            logits, flags = self.upload(sink.astype(np.float64)), self.upload(seen.view(np.uint8))
            arguments = logits, lse, delta, flags, part, np.int64(rows), np.int32(heads)
            function((batch * heads, 1, 1), (32, 1, 1), arguments)
        total: Array = self.to_host(part, "float64").sum(axis=0)
        return total

    def mark(self) -> Any | None:
        """An event on the stream."""
        if self.capturing:
            return None
        event = self._cupy.cuda.Event()
        event.record(self.stream)
        return event

    def seconds_between(self, begin: Any, end: Any) -> float:
        """By the GPU's clock."""
        return float(self._cupy.cuda.get_elapsed_time(begin, end)) / 1e3

    def bytes(self, count: int) -> Any:
        """Zeros, made and set on the current stream."""
        return self._cupy.zeros(count, np.uint8)

    def side_stream(self, priority: int | None = None) -> Any:
        """A further stream of this rank, which runs beside `stream`."""
        with self.gpu:
            stream = self._cupy.cuda.Stream(non_blocking=True, priority=priority)
        self._streams.append(stream)
        return stream

    def wait(self, check: Callable[[], None]) -> None:
        """Return once all that was queued is done; calls `check`, which may raise, now and then
        meanwhile."""
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(self.stream)
        pause = 0.0
        while not self.reached(event):
            check()
            time.sleep(pause)
            pause = min(pause + 5e-6, 1e-3)
        check()
        while len(self._uploads) > _KEPT:
            self._uploads.popitem(last=False)

    def drain(self, timeout: float) -> None:
        """After a failure: wait so many seconds at most for what is queued, so that memory is not
        given up which the GPU still uses. Never raises."""
        deadline = time.monotonic() + timeout
        for stream in self._streams:
            with contextlib.suppress(Exception), self.gpu:
                event = self._cupy.cuda.Event(disable_timing=True)
                event.record(stream)
                while not self.reached(event) and time.monotonic() < deadline:
                    time.sleep(1e-3)

    def reached(self, event: Any) -> bool:
        """Whether an event has come to pass; `KernelError` if something went wrong on the GPU.
        (CuPy's `event.done` is False for ever then.)"""
        runtime = self._cupy.cuda.runtime
        status = int(runtime.eventQuery(event.ptr))
        if status in (0, _NOT_READY):
            return status == 0
        raise KernelError(f"on GPU {self.index}: {runtime.CUDARuntimeError(status)}")

    @contextlib.contextmanager
    def keeping(self, arena: Arena) -> Iterator[None]:
        """New arrays are taken from an arena: a second pass with it makes none."""
        arena.begin()
        self._arena = arena
        try:
            yield
        finally:
            self._arena = None

    @contextlib.contextmanager
    def capture(self) -> Iterator[list[Any]]:
        """What is queued inside goes into a graph, which is then the list's only element."""
        graphs: list[Any] = []
        self.stream.begin_capture(_THREAD_LOCAL)
        self.capturing = True
        try:
            yield graphs
        finally:
            self.capturing = False
            graph = self.stream.end_capture()
        graphs.append(graph)

    def upload(self, x: Array) -> Any:
        """A small host array, on the GPU, without waiting: through pinned memory, and kept, at
        least until a `wait`, for the copy may be under way and the array in use."""
        key = x.dtype.str.encode() + x.tobytes()
        if key not in self._uploads:
            pinned = self._cupy.cuda.alloc_pinned_memory(max(x.nbytes, 1))
            np.frombuffer(pinned, x.dtype, x.size)[...] = x.reshape(-1)
            there = self._cupy.empty(max(x.size, 1), x.dtype)[: x.size]
            if x.size:
                there.data.copy_from_host_async(pinned.ptr, x.nbytes, self.stream)
            self._uploads[key] = there, pinned
        self._uploads.move_to_end(key)
        return self._uploads[key][0]

    def uploaded(self) -> list[Any]:
        """What `upload` has made so far, for whoever needs it to last."""
        return list(self._uploads.values())

    def function(self, path: Path, name: str, options: Sequence[str], shared: int = 0) -> Any:
        """A kernel of a source file, compiled with these options once; `shared` bytes of shared
        memory will be asked for at its launch."""
        key = path, name, tuple(options), shared
        if key not in self._functions:
            flags = ("-std=c++17", *options)
            if (path, flags) not in self._modules:
                code = load_source(path)
                module = self._cupy.RawModule(code=code, options=flags, backend="nvrtc")
                self._modules[path, flags] = module
            function = self._modules[path, flags].get_function(name)
            if shared > _PLAIN_SHARED:
                function.max_dynamic_shared_size_bytes = shared
            self._functions[key] = function
        return self._functions[key]

    def run(self, function: Any, threads: int, *arguments: Any) -> None:
        """Launch a kernel that strides over `threads` elements."""
        blocks = min(-(-threads // _THREADS), _MOST_BLOCKS)
        if blocks:
            function((blocks, 1, 1), (_THREADS, 1, 1), arguments)

    @property
    def capability(self) -> int:
        """80 for sm_80."""
        properties = self._cupy.cuda.runtime.getDeviceProperties(self.index)
        return 10 * int(properties["major"]) + int(properties["minor"])

    @property
    def shared_limit(self) -> int:
        """Shared memory that a block can have, in bytes."""
        properties = self._cupy.cuda.runtime.getDeviceProperties(self.index)
        return int(properties["sharedMemPerBlockOptin"])

    def _new(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        if self._arena is not None:
            return self._arena.array(shape, dtype, self._cupy.empty)
        array: Array = self._cupy.empty(shape, dtype)
        return array

    def _rows(self, name: str, dtype: str) -> Any:
        """A kernel of rows.cu for arrays of that dtype, and for sums of them."""
        types = (TYPES[dtype], TYPES[state_dtype(dtype)], _WORDS[ITEMSIZE[dtype]])
        named = zip(("TYPE", "SUM", "WORD"), types, strict=True)
        return self.function(_ROWS, name, tuple(f"-D{key}={kind}" for key, kind in named))

    def _index(self, index: Index) -> tuple[Any, Any, Any]:
        """An index as the kernels take it: an array, whether it counts, and a first row."""
        if isinstance(index, slice):
            nothing = self.upload(np.zeros(1, np.int32))
            return nothing, np.int32(0), np.int64(index.start or 0)
        return self.upload(index.astype(np.int32)), np.int32(1), np.int64(0)


def carrier(dtype: str) -> np.dtype[Any]:
    """The dtype of the CuPy array that holds elements of this one."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def _moved(x: Array) -> str:
    """A dtype of the size of x's elements, its own if kernels know it."""
    by_size = {2: "bfloat16", 4: "float32", 8: "float64"}
    if x.ndim > 4 or x.itemsize not in by_size:
        raise Unsupported(
            f"shards of CuPy arrays: not implemented for {x.ndim} dimensions of {x.dtype}, only "
            f"for up to 4 dimensions of elements of 2, 4 or 8 bytes"
        )
    return x.dtype.name if x.dtype.name in TYPES else by_size[x.itemsize]


def check_rows(*counts: int) -> None:
    """Kernels count rows of a shard in 32 bits."""
    if max(counts) >= _LIMIT:
        raise Unsupported(f"CUDA kernels: shards of {max(counts)} rows; they go to {_LIMIT - 1}")


def _count(index: Index, length: int) -> int:
    return len(range(length)[index]) if isinstance(index, slice) else len(index)


assert set(TYPES) == set(ITEMSIZE)
