"""GPUs as ranks use them: which one, what they can, what is moved; in the CUDA simulator."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from cuda_support import simulator  # noqa: F401
from hypothesis import given, settings, strategies as st

import oracle
import ringrt
from ringrt.cudasim import api as cupy
from ringrt.device.cuda import CudaDevice
from ringrt.errors import KernelError, Unsupported
from ringrt.plan import Mask, Piece, Problem, Run
from ringrt.plan.tiles import lower
from ringrt_backends.cuda_cupy import CupyBackend
from ringrt_backends.cuda_work import by_keys, by_queries
from support import assert_close, mpirun, random_qkv, ringrt_command

PATH = {"backend": "cupy", "transport": "nccl", "timeout": 20}


def test_one_rank_may_move_to_another_gpu_and_back():
    q, k, v = random_qkv(30)
    expected = oracle.attention(q, k, v, causal=True)

    def on_rank(ring):
        results = []
        for gpu in (ring.rank, 5 if ring.rank == 1 else ring.rank, ring.rank):
            cupy.cuda.Device(gpu).use()
            arrays = [cupy.asarray(np.ascontiguousarray(ring.cut(x))) for x in (q, k, v)]
            out, lse = ring.attention(*arrays, causal=True)
            assert out.device.id == gpu
            results.append((ring.unshard(out).get(), ring.unshard(lse, axis=2).get()))
        return results

    for result in ringrt.run_threads(on_rank, 3, **PATH)[0]:
        assert_close(result, expected)


def test_bfloat16_arrays_stay_bfloat16():
    q, k, v = random_qkv(20, dtype="bfloat16", head_dim=64)

    def on_rank(ring):
        arrays = [cupy.asarray(x) for x in (q, k, v)]
        out, _ = ring.attention(*arrays)
        again, _ = ring.capture(*arrays).replay()
        return out.get(), again.get()

    out, again = ringrt.run_threads(on_rank, 1, backend="cupy")[0]
    assert out.dtype == again.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(out, again)


@pytest.mark.parametrize("dtype", ["int32", "int64", "float16", "uint16"])
def test_arrays_of_other_dtypes_are_sharded_too(dtype):
    x = np.arange(60).reshape(2, 15, 2).astype(dtype)

    def on_rank(ring):
        return ring.shard(cupy.asarray(x)).get(), ring.shard(x)

    for gpu, host in ringrt.run_threads(on_rank, 2, partition="zigzag", backend="cupy"):
        np.testing.assert_array_equal(gpu, host)


def test_what_is_not_moved_is_refused_by_name():
    for x in (np.zeros((1, 8, 2), np.int8), np.zeros((1, 8, 1, 1, 1), np.float32)):
        with pytest.raises(Unsupported, match=r"shards of CuPy arrays: not implemented for \d"):
            ringrt.run_threads(
                lambda ring, x=x: ring.cut(cupy.asarray(x)), 2, partition="zigzag", backend="cupy"
            )


def problem(dtype="bfloat16", head_dim=64):
    return Problem(1, 2, 1, head_dim, head_dim, 8, 8, dtype, Mask.full(8, 8), 1.0)


def test_what_a_gpu_cannot_is_refused_by_name(monkeypatch):
    backend = CupyBackend(CudaDevice(0))
    assert backend.supports(problem()) is None
    assert "head_dim 257: it goes to 256" in backend.supports(problem(head_dim=257))
    old = {"sharedMemPerBlockOptin": 64 << 10, "major": 7, "minor": 5}
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceProperties", lambda index: old)
    assert backend.supports(problem()) == "bfloat16 needs compute capability 8.0, this GPU has 7.5"
    assert backend.supports(problem("float32")) is None
    assert "need 132 KiB of shared memory a block; this GPU has 64" in backend.supports(
        problem("float64", 256)
    )


def test_an_error_of_the_gpu_is_told_and_not_waited_for(monkeypatch):
    """CuPy's `Event.done` is False for ever after a fault."""
    device = CudaDevice(0)
    monkeypatch.setattr(cupy.cuda.runtime, "eventQuery", lambda event: 700)
    with device.gpu, pytest.raises(KernelError, match="on GPU 0: .*700"):
        device.wait(lambda: None)
    device.drain(20)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_work_is_every_visible_pair_once(data):
    rows, keys = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    bound = st.none() | st.integers(-42, 42)
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=3)))
    pieces = [
        Piece(a, b, 0, keys, data.draw(bound), data.draw(bound))
        for a, b in zip([0, *cuts], [*cuts, rows], strict=True)
    ]
    tiles = lower(Mask(pieces), (Run(0, 1, rows),), (Run(0, 1, keys),))
    wanted = np.zeros((rows, keys), int)
    for q0, q1, k0, k1, low, high in tiles:
        apart = np.arange(q1 - q0)[:, None] - np.arange(k1 - k0)
        wanted[q0:q1, k0:k1] += (low <= apart) & (apart <= high)
    block = data.draw(st.sampled_from([1, 4, 16]))
    for cut, length, side in ((by_queries, rows, 0), (by_keys, keys, 2)):
        items, table = cut(tiles, length, block)
        found, effort = np.zeros_like(wanted), []
        for first, end, begin, stop in items.tolist():
            assert 0 < end - first <= block
            before = found.sum()
            for piece in table[begin:stop].tolist():
                q0, q1, k0, k1, low, high = piece
                assert first <= piece[side] < piece[side + 1] <= end
                i, j = np.ogrid[q0:q1, k0:k1]
                found[q0:q1, k0:k1] += (low <= i - j) & (i - j <= high)
            effort.append(found.sum() - before)
        np.testing.assert_array_equal(found, wanted)
        assert effort == sorted(effort, reverse=True)
        covered = [set(range(first, end)) for first, end, *_ in items.tolist()]
        assert sum(map(len, covered)) == len(set().union(*covered)), "blocks do not overlap"


def test_a_block_has_no_rows_that_a_tile_has_not():
    mask = Mask([Piece(0, 20, 0, 20, 0, None), Piece(20, 45, 20, 45, 0, None)])
    tiles = lower(mask, (Run(0, 1, 45),), (Run(0, 1, 45),))
    assert sorted(by_queries(tiles, 45, 128).items[:, :2].tolist()) == [[0, 20], [20, 45]]
    assert sorted(by_keys(tiles, 45, 64).items[:, :2].tolist()) == [[0, 20], [20, 45]]


def test_gpu_arrays_over_mpi_by_way_of_the_host():
    """Two processes, each with simulated GPUs of its own."""
    command = ("-m", "ringrt", "run", "examples/cuda.yaml", "--set", "ring.transport=mpi")
    done = mpirun(2, *command, timeout=100, env={"RINGRT_CUDASIM": "1"})
    assert done.returncode == 0, done.stderr
    assert "backend cupy" in done.stdout
    assert "verified" in done.stdout


def test_the_example_runs_as_it_stands():
    done = ringrt_command("run", "examples/cuda.yaml", timeout=100, env={"RINGRT_CUDASIM": "1"})
    assert done.returncode == 0, done.stderr
    assert "simulated: times would say nothing of a GPU" in done.stdout
    assert "verified" in done.stdout


def test_doctor_names_what_there_is_and_what_is_missing():
    done = ringrt_command("doctor", timeout=100, env={"RINGRT_CUDASIM": "0"})
    for part in ("CuPy: works - ", "NVRTC: works - ", "NCCL: works - ", "GPU: ", "CUDA: "):
        assert part in done.stdout
    done = ringrt_command("doctor", timeout=100, env={"RINGRT_CUDASIM": "1"})
    assert "CUDA: works - simulated on the host" in done.stdout
    assert "transport nccl: works - two thread ranks" in done.stdout
