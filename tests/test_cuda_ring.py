"""What the CUDA path promises besides right results: where arrays lie, that the host queues a
pass without waiting, what overlaps, what is counted, and how a failure ends on every rank."""

from __future__ import annotations

import threading
import time

import ml_dtypes
import numpy as np
import pytest
from cuda_support import (
    PATH,
    assert_right,
    both_passes,
    example,
    gpu,
    simulator,  # noqa: F401
)

import ringrt
from ringrt import cudasim
from ringrt.cudasim import KernelFault, api
from ringrt.errors import ExchangeTimeout, HandoffError, KernelError, PeerLost, Unsupported
from ringrt.plan import PARTITIONS, Mask, Problem, plan
from ringrt.plan.cost import count_steps
from support import ROOT, ringrt_command

pytestmark = pytest.mark.timeout(120)


def shards_of(ring, arrays, *, on_gpu=False):
    own = [ring.cut(x) for x in arrays]
    return [gpu(x, ring.rank) for x in own] if on_gpu else own


def passes(ring, arrays, **options):
    """Both passes of one rank, and their stats."""
    q, k, v, dout = arrays
    out, lse = ring.attention(q, k, v, **options)
    forward = ring.stats
    gradients = ring.attention_backward(dout, q, k, v, out, lse, **options)
    return (out, lse, *gradients), (forward, ring.stats)


# Where arrays lie.


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("transport", ["nccl", "threads"])
def test_arrays_of_a_gpu_come_out_on_that_gpu(dtype, transport):
    arrays, sink = example(40, dtype=dtype), np.array([0.5, -1.0])
    state = np.float32

    def on_rank(ring):
        results, _ = passes(ring, shards_of(ring, arrays, on_gpu=True), causal=True, sink=sink)
        assert all(isinstance(x, api.ndarray) for x in results)
        assert {x.device.id for x in results} == {ring.rank}
        dtypes = [x.dtype for x in results]
        assert dtypes == [arrays[0].dtype, state, *[arrays[0].dtype] * 3, sink.dtype]
        with api.cuda.Device(ring.rank):
            return [x.get() for x in results]

    how = PATH | {"transport": transport}
    ranks = ringrt.run_threads(on_rank, 3, partition="contiguous", **how)
    whole = [
        np.concatenate(x, axis=1 + (i == 1))
        for i, x in enumerate(zip(*ranks, strict=True))
        if i < 5
    ]
    gradients = [*whole[2:], ranks[0][5]]
    assert_right(whole[:2], gradients, arrays, {"causal": True}, {"sink": sink})


def test_whole_arrays_of_a_gpu_and_shard_and_unshard(monkeypatch):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    arrays = example(30, dtype="bfloat16")
    there = [gpu(x) for x in arrays]
    result, gradients = both_passes(*there, 2, causal=True)
    for x in (*result, *gradients):
        assert isinstance(x, api.ndarray)
    assert result[0].dtype == ml_dtypes.bfloat16
    host = [[x.get() for x in each] for each in (result, gradients)]
    assert_right(*host, arrays, {"causal": True})

    def there_and_back(ring):
        back = ring.unshard(ring.shard(there[0]))
        return isinstance(back, api.ndarray) and back.get()

    for whole in ringrt.run_threads(there_and_back, 3, **PATH):
        np.testing.assert_array_equal(whole, arrays[0])


def test_the_caller_s_own_stream_is_waited_for_and_waits():
    """What the caller has queued on its stream comes before the pass, what it queues later
    after."""
    arrays = example(20)

    def on_rank(ring):
        with api.cuda.Device(ring.rank):
            mine = api.cuda.Stream(non_blocking=True)
            shards = []
            with mine:
                for x in shards_of(ring, arrays):
                    pinned = api.cuda.alloc_pinned_memory(x.nbytes)
                    np.frombuffer(pinned, x.dtype, x.size)[:] = np.ascontiguousarray(x).reshape(-1)
                    there = api.empty(x.shape, x.dtype)
                    there.data.copy_from_host_async(pinned.ptr, x.nbytes, mine)
                    shards.append((there, pinned))
                out, _ = ring.attention(*(x for x, _ in shards[:3]))
                copy = api.cuda.alloc_pinned_memory(out.nbytes)
                out.data.copy_to_host_async(copy.ptr, out.nbytes, mine)
                for x, _ in shards:
                    x.fill(7)
                mine.synchronize()
                return np.frombuffer(copy, out.dtype, out.size).reshape(out.shape).copy()

    outs = ringrt.run_threads(on_rank, 2, partition="contiguous", **PATH)
    expected = ringrt.attention(*arrays[:3], ranks=1, backend="reference")[0]
    np.testing.assert_allclose(np.concatenate(outs, axis=1), expected, atol=2e-6)


def test_arrays_on_different_devices_are_refused():
    q, k, v, dout = example(8)
    for other, text in ((gpu(k, 1), "q on GPU 0, k on GPU 1"), (k, "q on GPU 0, k on the host")):
        with pytest.raises(HandoffError, match=f"{text}: they must lie on one device"):
            ringrt.run_threads(lambda ring, k=other: ring.attention(gpu(q), k, gpu(v)), 1, **PATH)
    out, lse = ringrt.attention(q, k, v, ranks=1, **PATH)
    with pytest.raises(HandoffError, match="q on GPU 0, dout on the host"):
        ringrt.run_threads(
            lambda ring: ring.attention_backward(dout, *map(gpu, (q, k, v, out, lse))), 1, **PATH
        )


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_backend_of_the_host_is_refused_by_name(backend):
    q, k, v, _ = example(8)
    text = f"backend {backend}: it computes on the host, and q, k and v lie on GPU 0"
    with pytest.raises(HandoffError, match=text):
        ringrt.attention(gpu(q), gpu(k), gpu(v), ranks=1, backend=backend)
    text = (
        f"backend {backend}: it computes on the host, and the ring's transport moves arrays of GPUs"
    )
    with pytest.raises(Unsupported, match=text):
        ringrt.attention(q, k, v, ranks=2, backend=backend, transport="nccl")


def test_dims_beyond_what_the_kernels_hold_are_refused():
    q, k, v, _ = example(8, head_dim=257, value_dim=8)
    with pytest.raises(Unsupported, match="backend cupy: head_dim 257: it goes to 256"):
        ringrt.attention(q, k, v, ranks=2, **PATH)


def test_more_uploads_in_a_pass_than_are_kept():
    """Pinned memory is not given back while the GPU still copies from it."""
    from ringrt.device.cuda import _KEPT, CudaDevice

    device = CudaDevice(0)
    with device.running():
        kept = [device.upload(np.arange(n, n + 4, dtype=np.int32)) for n in range(_KEPT + 2)]
    cudasim.check()
    np.testing.assert_array_equal(kept[0].get(), np.arange(4))


# Transports.


@pytest.mark.parametrize(("schedule", "travel"), [("ring", "kv"), ("direct", "q")])
def test_by_way_of_the_host_in_chunks_the_bits_are_those_of_nccl(schedule, travel, monkeypatch):
    """Three to ten chunks a message."""
    monkeypatch.setattr("ringrt.transports.staged.StagedTransport.__init__.__defaults__", (300,))
    arrays = example(70, dtype="float16")
    how = {"schedule": schedule, "travel": travel, "causal": True, "partition": "zigzag"}
    by_nccl = both_passes(*arrays, 3, **how)
    staged = both_passes(*arrays, 3, **how | {"transport": "threads"})
    for first, second in zip(by_nccl, staged, strict=True):
        for a, b in zip(first, second, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("travel", ["kv", "q"])
def test_the_host_waits_for_nothing_in_the_loop(travel):
    """In the second call of a kind; the first compiles and uploads what is kept."""
    arrays = example(40)

    def on_rank(ring):
        own = shards_of(ring, arrays, on_gpu=True)
        counts = []
        ring.on_step = lambda step: counts.append(cudasim.synchronisations())
        passes(ring, own, causal=True)
        counts.clear()
        before = cudasim.synchronisations()
        passes(ring, own, causal=True)
        return before, counts, cudasim.synchronisations()

    for before, counts, after in ringrt.run_threads(
        on_rank, 3, travel=travel, schedule="ring", **PATH
    ):
        assert len(counts) >= 6
        assert {before, *counts, after} == {before}, "waits are by asking events, at the end"


@pytest.mark.parametrize("transport", ["nccl", "threads"])
@pytest.mark.parametrize("schedule", ["ring", "direct"])
def test_exchanges_run_beside_the_compute_of_their_step(transport, schedule, monkeypatch):
    """Where messages take longer than the zeroing of sums, with which a step begins."""
    arrays = example(150, dtype="float16", head_dim=64)

    def on_rank(ring):
        mine = shards_of(ring, arrays)
        passes(ring, mine)  # the communicator is made, and time goes on
        ring.transport.barrier(20)
        duration = lambda nbytes: 6e-5 + nbytes / 1e9  # noqa: E731
        monkeypatch.setattr("ringrt.cudasim.nccl.duration", duration)
        return passes(ring, mine)[1]

    how = PATH | {"transport": transport, "schedule": schedule}
    overlaps = 0
    for stats in ringrt.run_threads(on_rank, 4, **how):
        for stat in stats:
            spans = {what: [s for s in stat.timeline if s.what == what and s.end > s.begin]
                     for what in ("compute", "exchange", "wait")}  # fmt: skip
            for exchange in spans["exchange"]:
                assert stat.steps >= exchange.step >= 0
                beside = [s for s in spans["compute"] if s.step == exchange.step]
                if beside:
                    begin, end = min(s.begin for s in beside), max(s.end for s in beside)
                    assert max(exchange.begin, begin) < min(exchange.end, end)
                    overlaps += 1
            one_by_one = sum(s.end - s.begin for s in spans["exchange"])
            waited = sum(s.end - s.begin for s in spans["wait"])
            assert waited == pytest.approx(stat.wait_s)
            assert waited < one_by_one
            assert stat.compute_s <= stat.seconds
    assert overlaps >= 4 * (3 + 3)


@pytest.mark.parametrize(
    ("schedule", "travel", "dtype"),
    [("ring", "kv", "bfloat16"), ("ring", "q", "float64"), ("direct", "kv", "float64")],
)
def test_the_bytes_are_those_of_the_plan(schedule, travel, dtype):
    arrays = example(41, dtype=dtype, value_dim=6)

    def on_rank(ring):
        return passes(ring, shards_of(ring, arrays), causal=True)[1]

    how = {"schedule": schedule, "travel": travel, "partition": "zigzag"}
    measured = ringrt.run_threads(on_rank, 3, **how, **PATH)
    problem = Problem(1, 2, 1, 8, 6, 41, 41, dtype, Mask.causal(41, 41), 1.0)
    for backward in (False, True):
        planned = plan(problem, PARTITIONS["zigzag"], 3, schedule, backward=backward, travel=travel)
        for rank, stats in enumerate(measured):
            cost = count_steps(planned, rank, backward=backward)
            assert stats[backward].bytes_sent == cost.bytes_sent
            assert stats[backward].bytes_received == cost.bytes_received


# Failures.


def outcomes(fn, ranks, **options):
    """What each rank raised, and None where it returned; within the timeout and a little."""
    ends: dict[int, BaseException | None] = {}

    def on_rank(ring):
        try:
            fn(ring)
        except BaseException as error:
            ends[ring.rank] = error
            raise
        ends[ring.rank] = None

    begin = time.monotonic()
    with pytest.raises(Exception):  # noqa: B017 - looked at one by one
        ringrt.run_threads(on_rank, ranks, **PATH | options)
    return [ends[rank] for rank in range(ranks)], time.monotonic() - begin


def nothing_is_left_behind():
    """No thread of ours, and a new ring works."""
    deadline = time.monotonic() + 5
    while left := [t.name for t in threading.enumerate() if t.name.startswith("ringrt-")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
    arrays = example(20)
    result, gradients = both_passes(*arrays, 3, causal=True)
    assert_right(result, gradients, arrays, {"causal": True})


def test_a_call_that_fails_ends_all_ranks(monkeypatch):
    from ringrt_backends.cuda_cupy import CupyBackend

    accumulate = CupyBackend.accumulate
    calls = {}

    def failing(self, *arguments):
        calls[self] = calls.get(self, 0) + 1
        if self._device.index == 1 and calls[self] == 2:
            raise MemoryError("no memory for it")
        accumulate(self, *arguments)

    monkeypatch.setattr(CupyBackend, "accumulate", failing)
    arrays = example(30)
    errors, seconds = outcomes(lambda ring: passes(ring, shards_of(ring, arrays)), 3, timeout=20)
    assert isinstance(errors[1], KernelError)
    text = "backend cupy failed on rank 1 in ring step 1: MemoryError: no memory for it"
    assert text in str(errors[1])
    for rank in (0, 2):
        assert isinstance(errors[rank], PeerLost)
        assert text in str(errors[rank])
    assert seconds < 10
    monkeypatch.undo()
    monkeypatch.setenv("RINGRT_CUDASIM", "1")
    nothing_is_left_behind()


def test_a_kernel_that_faults_ends_all_ranks(monkeypatch):
    """The fault comes to light on the GPU, while the host has long gone on; and the thread that
    watches the exchanges, which here hears of it first, does not die of it aloud."""
    from ringrt.device.cuda import CudaDevice
    from ringrt_backends.cuda_cupy import CupyBackend

    launch, wait = CupyBackend._launch, CudaDevice.wait

    def late(self, check):
        time.sleep(0.2)
        wait(self, check)

    monkeypatch.setattr(CudaDevice, "wait", late)

    def spoilt(self, kernel, blocks, *arguments):
        if self._device.index == 1 and kernel.name == "forward":
            arguments = list(arguments)
            arguments[8] = np.int32(10_000)  # rows
        launch(self, kernel, blocks, *arguments)

    monkeypatch.setattr(CupyBackend, "_launch", spoilt)
    arrays = example(30)
    errors, seconds = outcomes(lambda ring: passes(ring, shards_of(ring, arrays)), 3, timeout=20)
    assert isinstance(errors[1], KernelFault)
    assert "out of bounds" in str(errors[1])
    for rank in (0, 2):
        assert isinstance(errors[rank], PeerLost)
        assert "rank 1 failed" in str(errors[rank])
    assert seconds < 10
    monkeypatch.undo()
    monkeypatch.setenv("RINGRT_CUDASIM", "1")
    nothing_is_left_behind()


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_a_rank_that_falls_silent_is_named_within_the_deadline(pass_, monkeypatch):
    from ringrt.transports.nccl import NcclTransport

    exchange, over, timeout = NcclTransport.exchange, threading.Event(), 1.5
    passes_done = []

    def silent(self, sends, recvs, *, step, stream=None):
        if self.rank == 1 and step == 1 and len(passes_done) == (pass_ == "backward") * 3:
            over.wait(30)
        return exchange(self, sends, recvs, step=step, stream=stream)

    monkeypatch.setattr(NcclTransport, "exchange", silent)
    arrays = example(30, dtype="float16")

    def on_rank(ring):
        q, k, v, dout = shards_of(ring, arrays)
        try:
            out, lse = ring.attention(q, k, v)
            passes_done.append(ring.rank)
            ring.transport.barrier(20)
            ring.attention_backward(dout, q, k, v, out, lse)
        except BaseException:
            if ring.rank != 1:
                passes_done.append("failed")
                if passes_done.count("failed") == 2:
                    over.set()
            raise

    begin = time.monotonic()
    errors, _ = outcomes(on_rank, 3, timeout=timeout, schedule="ring", travel="kv")
    assert time.monotonic() - begin < timeout + 8
    late = [error for error in errors if isinstance(error, ExchangeTimeout)]
    assert late
    # Who waits for the silent rank itself: rank 2 for what it sends, rank 0 for what it takes.
    for error in late:
        rank = errors.index(error)
        assert f"rank {rank} waited 1.5 s in ring step 1 to " in str(error)
        verb = "recv" if rank == 2 else "send"
        link = "from" if rank == 2 else "to"
        assert f"{verb} " in str(error)
        assert f" bytes {link} rank 1" in str(error)
    assert all(isinstance(error, ExchangeTimeout | PeerLost) for error in errors), errors
    monkeypatch.undo()
    monkeypatch.setenv("RINGRT_CUDASIM", "1")
    nothing_is_left_behind()


def test_an_error_of_the_caller_between_steps_frees_the_others():
    arrays = example(30)

    def on_rank(ring):
        def stop(step):
            if ring.rank == 2 and step.done == 1:
                raise KeyboardInterrupt

        ring.on_step = stop
        passes(ring, shards_of(ring, arrays))

    errors = []

    def guarded(ring):
        try:
            on_rank(ring)
        except BaseException as error:
            errors.append((ring.rank, error))
            raise

    with pytest.raises(KeyboardInterrupt):
        ringrt.run_threads(guarded, 3, **PATH | {"timeout": 20})
    assert {rank: type(error) for rank, error in errors} == {
        0: PeerLost, 1: PeerLost, 2: KeyboardInterrupt,
    }  # fmt: skip
    nothing_is_left_behind()


# Jobs.


def test_the_quickstart_s_job_on_fewer_tokens(tmp_path):
    """The first tokens and heads of the quickstart's data: verified against the job's own oracle,
    and equal to what the CPU gives."""
    from safetensors.numpy import load_file, save_file

    whole = load_file(ROOT / "examples/data/smollm2-135m-layer15-2048.safetensors")
    cut = {"q": whole["q"][:, :150, :3], "k": whole["k"][:, :150, :1], "v": whole["v"][:, :150, :1]}
    save_file(
        {name: np.ascontiguousarray(x) for name, x in cut.items()}, tmp_path / "cut.safetensors"
    )
    text = (ROOT / "examples/quickstart.yaml").read_text()
    job = tmp_path / "job.yaml"
    job.write_text(text.replace("data/smollm2-135m-layer15-2048.safetensors", "cut.safetensors"))
    results = []
    for backend, transport in (("cupy", "nccl"), ("cpu", "threads")):
        done = ringrt_command(
            "run", job, "--set", f"ring.backend={backend}", "--set", f"ring.transport={transport}",
            "--set", f"output.path={backend}.safetensors", timeout=100, env={"RINGRT_CUDASIM": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert f"backend {backend}" in done.stdout
        assert "verified" in done.stdout
        results.append(load_file(tmp_path / f"{backend}.safetensors"))
    assert results[0].keys() == results[1].keys() >= {"out", "lse"}
    for name in results[0]:
        np.testing.assert_allclose(results[0][name], results[1][name], rtol=0, atol=2e-6)
