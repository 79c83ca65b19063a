"""Short runs that together notice every planted bug of tests/cuda_mutants.py.

The kernels' run in the process of the test. That of what queues them runs alone, with the folder
to import ringrt from, and exits non-zero if anything is wrong."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np


def run_kernels(name: str) -> None:
    """One of the checks below; raises if anything is wrong."""
    from ringrt import cudasim
    from ringrt.device.cuda import CudaDevice

    CHECKS[name](CudaDevice(0))
    cudasim.check()


# Each kernel by itself, on the shards of a ring.


def problem_of(arrays, mask, *, scale=None, softcap=None, sink=None):
    from ringrt.plan import Problem

    q, k, v = arrays[:3]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return Problem(
        q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.shape[1], k.shape[1],
        q.dtype.name, mask, scale, softcap, sink is not None,
    )  # fmt: skip


def shards(arrays, mask, edges):
    """k's rows from edge to edge, and the tiles of each."""
    from ringrt.plan import Run
    from ringrt.plan.tiles import lower

    for begin, end in pairwise(edges):
        yield (
            slice(begin, end),
            lower(mask, (Run(0, 1, arrays[0].shape[1]),), (Run(begin, 1, end - begin),)),
        )


def seen_by(mask, arrays):
    seen = np.zeros((arrays[0].shape[1], arrays[1].shape[1]), dtype=bool)
    for p in mask.pieces():
        for i in range(p.q_start, p.q_stop):
            for j in range(p.k_start, p.k_stop):
                low = p.min_distance is None or p.min_distance <= i - j
                seen[i, j] |= low and (p.max_distance is None or i - j <= p.max_distance)
    return seen


def forward(device, arrays, mask, edges, *, put=None, first=None, **scores):
    """Absorbs the shards in turn; out and lse (of the first rows) must be the oracle's."""
    from cuda_support import assert_right

    from ringrt_backends.cuda_cupy import CupyBackend

    problem, backend, sink = (
        problem_of(arrays, mask, **scores),
        CupyBackend(device),
        scores.get("sink"),
    )
    with device.running():
        q, k, v = map(put or device.place, arrays[:3])
        state = backend.begin(q, problem, sink)
        for cut, tiles in shards(arrays, mask, edges):
            backend.accumulate(state, k[:, cut], v[:, cut], tiles)
        out, lse = backend.finish(state)
        result = device.to_host(out, problem.dtype), device.to_host(lse, problem.state_dtype)
    result = result[0][:, :first], result[1][:, :, :first]
    seen = seen_by(mask, arrays)[:first, :first]
    assert_right(result, (), [x[:, :first] for x in arrays], seen=seen, scores=scores)


def backward(device, arrays, mask, edges, **scores):
    """The like for dq, dk and dv, from the oracle's out and lse."""
    from cuda_support import assert_right

    import oracle
    from ringrt_backends.cuda_cupy import CupyBackend

    problem, backend = problem_of(arrays, mask, **scores), CupyBackend(device)
    seen = seen_by(mask, arrays)
    out, lse = oracle.attention(*arrays[:3], seen, **scores)
    narrow = out.astype(arrays[0].dtype)
    delta = np.einsum("brhd,brhd->bhr", arrays[3].astype(float), narrow.astype(float))
    state = problem.state_dtype
    with device.running():
        q, k, v, dout = map(device.place, arrays)
        rows = [device.place(x.astype(state)) for x in (lse, delta)]
        grads = backend.begin_backward(q, dout, *rows, problem)
        sums = []
        for cut, tiles in shards(arrays, mask, edges):
            part = [device.zeros(x[:, cut].shape, state) for x in arrays[1:3]]
            backend.accumulate_backward(grads, k[:, cut], v[:, cut], *part, tiles)
            sums.append([device.to_host(x, state) for x in part])
        dq = device.to_host(backend.finish_backward(grads), state)
    dk, dv = (np.concatenate(x, axis=1) for x in zip(*sums, strict=True))
    gradients = [x.astype(arrays[0].dtype) for x in (dq, dk, dv)]
    assert_right((narrow, lse), gradients, arrays, seen=seen, scores=scores)


def band(rows, keys, low, high, q_stop=None):
    """Rows from q_stop on see nothing."""
    from ringrt import Mask, Piece

    return Mask([Piece(0, rows if q_stop is None else q_stop, 0, keys, low, high)])


def arrays_of(dtype, length=45, kv_length=None, **shape):
    from cuda_support import example

    return example(length, kv_length, dtype=dtype, **shape)


def loud(arrays, most=9.0):
    """Keys that grow louder along the sequence, so that old maxima have to be left behind."""
    q, k, v, dout = arrays
    return q, (k * np.linspace(0.1, most, k.shape[1])[:, None, None]).astype(k.dtype), v, dout


SHAPE = {"q_heads": 4, "kv_heads": 2, "head_dim": 48, "value_dim": 24}


def tensor_core_forward(device):
    """Grouped heads, dims of their own, blocks and tiles that are not full, two shards, rows
    that see nothing, scores of either kind; bounds that lie right beside a whole tile's."""
    arrays = loud(arrays_of("bfloat16", 140, 150, **SHAPE))
    forward(device, arrays, band(140, 150, -5, 60, 120), (0, 80, 150))
    one_head = {"q_heads": 1, "kv_heads": 1, "head_dim": 8}
    arrays = arrays_of("bfloat16", 128, **one_head)
    forward(device, arrays, band(128, 128, -30, None), (0, 128))
    forward(device, arrays, band(128, 128, None, 62), (0, 128))
    arrays = arrays_of("bfloat16", 40, head_dim=5, value_dim=7, batch=2)
    sink = np.array([0.5, -1.0, 3.0, -np.inf])
    forward(device, arrays, band(40, 40, 0, None), (0, 40), scale=-0.9)
    forward(device, arrays, band(40, 40, -3, 9, 30), (0, 25, 40), softcap=1.5, sink=sink)


def long_strides(device):
    """From one batch to the next more elements than 32 bits count."""
    arrays = arrays_of("bfloat16", 9, q_heads=1, kv_heads=1, batch=2)
    far = spread(arrays[0], (1 << 31) + 64)
    put = lambda x: far if x is arrays[0] else device.place(x)  # noqa: E731
    forward(device, arrays, band(9, 9, 0, None), (0, 9), put=put)


def spread(x, far):
    """An array on device 0 whose batches lie far apart, in memory that nothing fills."""
    from ringrt.cudasim import api, heap
    from ringrt.cudasim.copies import MemoryPointer
    from ringrt.cudasim.memory import Memory

    memory = _memory.get(far)
    if memory is None:
        raw = np.zeros((far + x[0].size) * x.itemsize, np.uint8)
        made = heap.Allocation(raw, raw.ctypes.data, 0, None, (__file__, 0))
        memory = _memory[far] = Memory(made)
    strides = (far * x.itemsize, *x.strides[1:])
    there = api.ndarray(x.shape, x.dtype, MemoryPointer(memory, 0), strides)
    there._view[:] = x
    return there


#: Kept: the simulator fills what is freed.
_memory: dict = {}


def tensor_core_backward(device):
    """The like."""
    arrays = loud(arrays_of("bfloat16", 70, 140, **SHAPE), 2.0)
    backward(device, arrays, band(70, 140, -60, 5, 66), (0, 75, 140))
    arrays = arrays_of("bfloat16", 40, head_dim=5, value_dim=7, batch=2)
    backward(device, arrays, band(40, 40, -3, 9, 30), (0, 25, 40), softcap=1.5)


def exact_forward(device):
    """The like, and NaN within a tile."""
    arrays = loud(arrays_of("float32", 45, 70, q_heads=4, kv_heads=2, head_dim=8, value_dim=6))
    mask = band(45, 70, -30, 12, 40)
    forward(device, arrays, mask, (0, 40, 70))
    forward(device, arrays, mask, (0, 70), softcap=1.5, sink=np.array([0.5, -1.0, 3.0, -np.inf]))
    q, k, v, dout = arrays_of("float32", 20)
    k[:, 15:], v[:, 15:] = np.nan, np.inf
    forward(device, (q, k, v, dout), band(20, 20, 0, None), (0, 20), first=15)


def exact_backward(device):
    """The like."""
    arrays = arrays_of("float32", 40, 45, head_dim=8, value_dim=6)
    backward(device, arrays, band(40, 45, -30, 12, 36), (0, 20, 45))
    backward(device, arrays, band(40, 45, -9, 12, 36), (0, 45), softcap=1.5)


def rows(device):
    """What the runtime does between steps, beside what it does on the host."""
    from ringrt.device.host import HOST

    rng = np.random.default_rng(0)
    x, part = (rng.standard_normal((2, n, 3, 5)).astype(np.float32) for n in (9, 4))
    index, other = np.array([7, 0, 5]), np.array([3, 1, 2])

    def same(verb):
        with device.running():
            theirs = verb(device)
            theirs = theirs if isinstance(theirs, np.ndarray) else theirs.get()
        np.testing.assert_allclose(theirs, verb(HOST), rtol=1e-6, atol=1e-7)

    def take(d, index, axis):
        return d.take(d.place(x.transpose(0, 1, 3, 2)), index, axis)

    def add(d, to, rows):
        total = d.take(d.place(x), np.arange(9), 1)
        d.add_rows(total, to, d.place(part), rows)
        return total

    def sink(d):
        lse, delta = (d.place(np.ascontiguousarray(y[..., 0])) for y in (x, x + 1))
        return d.sink_gradient(np.array([0.5] * 9), lse, delta, np.array([True, False, True]))

    same(lambda d: take(d, index, 1))
    same(lambda d: take(d, slice(2, 6), 1))
    same(lambda d: take(d, np.array([2, 0]), 3))
    same(lambda d: add(d, index, other))
    same(lambda d: add(d, slice(3, 7), slice(None)))
    same(lambda d: d.row_delta(d.place(x), d.place(x + 1), "float32"))
    same(lambda d: d.row_delta(*(d.place(np.repeat(y, 9, axis=3)) for y in (x, x + 1)), "float32"))
    same(sink)
    np.testing.assert_array_equal(
        device.to_host(device.rounded(device.place(x), "float16"), "float16"), x.astype(np.float16)
    )


CHECKS = {check.__name__: check for check in (
    tensor_core_forward, long_strides, tensor_core_backward, exact_forward, exact_backward, rows,
)}  # fmt: skip


# What queues them: rings by NCCL and by way of the host.


def run_rings(folder: str, transport: str) -> None:
    """Both passes on arrays that the caller's own stream is just making."""
    import ringrt
    from ringrt import cudasim
    from ringrt.transports.staged import StagedTransport

    assert ringrt.__file__.startswith(folder)
    StagedTransport.__init__.__defaults__ = (64,)
    for schedule, travel in (("ring", "kv"), ("direct", "q")):
        one_ring(transport, schedule, travel)
        cudasim.check()


def one_ring(transport, schedule, travel):
    from cuda_support import assert_right

    import ringrt
    from ringrt.cudasim import api

    arrays = arrays_of("float32", 29, q_heads=2, kv_heads=1)
    seen = np.tril(np.ones((29, 29), dtype=bool))
    options = {"causal": True, "sink": np.array([0.5, -1.0])}

    def on_rank(ring):
        ring.attention(*map(ring.cut, arrays[:3]), **options)
        with api.cuda.Device(7 - ring.rank), api.cuda.Stream(non_blocking=True) as mine:
            whole = [upload(api, x, mine) for x in arrays]
            q, k, v, dout = (ring.cut(x) for x, _ in whole)
            np.testing.assert_array_equal(q.get(), ring.cut(arrays[0]))
            out, lse = ring.attention(q, k, v, **options)
            gradients = ring.attention_backward(dout, q, k, v, out, lse, **options)
            for x, _ in whole:
                x.fill(9)
            result = ring.unshard(out).get(), ring.unshard(lse, axis=2).get()
            return result, [ring.unshard(x).get() for x in gradients[:3]] + [gradients[3].get()]

    results = ringrt.run_threads(
        on_rank, 3, transport=transport, schedule=schedule, travel=travel, backend="cupy",
        timeout=5, partition="zigzag",
    )  # fmt: skip
    for result, gradients in results:
        assert_right(result, gradients, arrays, scores={"sink": options["sink"]}, seen=seen)


def upload(api, x, stream):
    """A copy that is under way; and the pinned memory that it is made from."""
    pinned = api.cuda.alloc_pinned_memory(x.nbytes)
    np.frombuffer(pinned, x.dtype, x.size)[:] = x.reshape(-1)
    there = api.empty(x.shape, x.dtype)
    there.data.copy_from_host_async(pinned.ptr, x.nbytes, stream)
    return there, pinned


if __name__ == "__main__":
    # An editable install would otherwise lead back to the original.
    sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in f"{f!r} {type(f).__module__}"]
    sys.path[:0] = [sys.argv[1], str(Path(__file__).parent)]
    run_rings(*sys.argv[1:])
