"""Jobs on thread ranks: sources, verification that can fail, output that is whole or absent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from safetensors.numpy import load_file, save_file

import oracle
import ringrt
from ringrt.errors import ConfigError, RankMismatch
from ringrt.jobs.load import LoadedJob, validate
from ringrt.jobs.run import check_job, run_on_rank, run_on_threads
from ringrt.jobs.sources import open_source
from ringrt.jobs.verify import Figure, Results, Sample, Verdict, verify
from ringrt.plan import PARTITIONS, Mask, Problem, Run
from ringrt.plan.partition import positions
from support import PARTITIONS as NAMES, numpy_dtype, random_qkv

RANDOM = {"source": "random", "length": 300, "q_heads": 4, "kv_heads": 2, "head_dim": 8}


def loaded(folder, **sections):
    return LoadedJob(validate({"input": RANDOM} | sections), folder)


def run(job, ranks=3):
    check_job(job, ranks)
    return run_on_threads(job, ranks, "threads", lambda phase, done, total: None)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [False, True])
def test_a_job_verifies_itself_and_writes_the_right_output(tmp_path, name, causal):
    job = loaded(
        tmp_path,
        attention={"causal": causal, "softcap": 4.0},
        ring={"partition": name},
        verify={"rows": "all"},
        output={"path": "out.safetensors"},
    )
    report = run(job)
    assert report.passed
    assert sum(each.verdict.rows for each in report.ranks) == 300
    source = open_source(job.job.input, tmp_path)
    q, k, v = (source.read(n, (Run(0, 1, 300),)) for n in "qkv")
    out, lse = oracle.attention(q, k, v, causal=causal, softcap=4.0)
    written = load_file(tmp_path / "out.safetensors")
    np.testing.assert_allclose(written["out"], out, rtol=0, atol=2e-6)
    np.testing.assert_allclose(written["lse"], lse, rtol=0, atol=2e-6)
    assert [p.name for p in tmp_path.iterdir()] == ["out.safetensors"]
    for each in report.ranks:
        for done in each.passes.values():
            assert done.stats.bytes_sent == done.bytes_planned
            assert done.stats.peak_kv_bytes == done.peak_planned


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_dtype_is_within_its_bound(tmp_path, dtype):
    report = run(loaded(tmp_path, input=RANDOM | {"dtype": dtype}, verify={"rows": "all"}))
    assert report.passed
    assert report.problem.dtype == dtype


def test_sampled_rows(tmp_path):
    report = run(loaded(tmp_path, verify={"rows": 7}))
    assert [each.verdict.rows for each in report.ranks] == [7, 7, 7]
    report = run(loaded(tmp_path, verify={"rows": 0}))
    assert [each.verdict for each in report.ranks] == [None] * 3
    assert report.passed


def test_a_wrong_result_fails_verification_and_replaces_nothing(tmp_path):
    """The null backend answers 0: the job must say that it is not verified."""
    (tmp_path / "out.safetensors").write_bytes(b"old")
    output = {"path": "out.safetensors"}
    report = run(loaded(tmp_path, ring={"backend": "null"}, output=output))
    assert not report.passed
    assert not report.written
    assert (tmp_path / "out.safetensors").read_bytes() == b"old"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": [9, 2], "softcap": 2.0},
        {"documents": [3, 90, 280], "sink": [0.5, 2.0, 0.0, -1.0]},
    ],
)
def test_backward_verifies_itself(tmp_path, name, options):
    job = loaded(
        tmp_path,
        attention=options,
        ring={"partition": name},
        passes=["forward", "backward"],
        verify={"rows": "all"},
    )
    report = run(job)
    assert report.passed
    sums = {"dsink"} if "sink" in options else set()
    assert set(report.ranks[0].verdict.figures) == {"out", "lse", "dq", "dk", "dv"} | sums
    for each in report.ranks:
        for done in each.passes.values():
            assert done.stats.bytes_sent == done.bytes_planned
            assert done.stats.peak_kv_bytes == done.peak_planned


def test_a_wrong_sink_gradient_fails_verification(tmp_path, monkeypatch):
    from ringrt.device.host import HostDevice

    right = HostDevice.sink_gradient
    monkeypatch.setattr(HostDevice, "sink_gradient", lambda *a: 1.001 * right(*a))
    sections = {"attention": {"sink": [0.5, 2.0, 0.0, -1.0]}, "passes": ["forward", "backward"]}
    report = run(loaded(tmp_path, **sections))
    wrong = [name for name, f in report.verdict.figures.items() if not f.excess <= f.bound]
    assert wrong == ["dsink"]


def test_a_job_does_not_replace_its_own_input(tmp_path):
    q, k, v = random_qkv(8)
    save_file({"q": q, "k": k, "v": v}, tmp_path / "in.safetensors")
    job = loaded(
        tmp_path,
        input={"source": "file", "path": "in.safetensors"},
        output={"path": "in.safetensors"},
    )
    with pytest.raises(ConfigError, match="output.path: expected another file than input.path"):
        check_job(job, 2)


def test_ranks_with_different_jobs_do_not_work_together(tmp_path):
    jobs = [loaded(tmp_path), loaded(tmp_path, attention={"causal": True})]

    def on_rank(ring):
        return run_on_rank(ring, jobs[ring.rank], lambda phase, done, total: None)

    with pytest.raises(RankMismatch, match="ranks disagree on the job"):
        ringrt.run_threads(on_rank, 2, timeout=10)


def problem_and_source(tmp_path, length, dtype, causal):
    spec = validate({"input": RANDOM | {"length": length, "dtype": dtype}}).input
    mask = (Mask.causal if causal else Mask.full)(length, length)
    return open_source(spec, tmp_path), Problem(1, 4, 2, 8, 8, length, length, dtype, mask, 0.3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_verifier_passes_the_right_and_fails_the_slightly_wrong(tmp_path, dtype):
    source, problem = problem_and_source(tmp_path, 40, dtype, causal=True)
    q, k, v, dout = (source.read(n, (Run(0, 1, 40),)) for n in ("q", "k", "v", "dout"))
    out, lse = oracle.attention(q, k, v, causal=True, scale=0.3)
    gradients = oracle.gradients(dout, q, k, v, causal=True, scale=0.3)
    delta = np.einsum("brhd,brhd->bhr", dout.astype(float), out)
    right = {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    sample = Sample(np.arange(40), np.arange(40))

    def check(name=None, element=None, by=0.0):
        given = {n: x.astype(numpy_dtype(dtype)) for n, x in right.items()}
        given["lse"] = lse.astype(problem.state_dtype)
        if name:
            given[name][element] = np.float64(given[name][element]) + by
        results = Results(
            given["out"], given["lse"], (given["dq"], given["dk"], given["dv"]), None, lse, delta
        )
        return verify(source, problem, results, sample, sample, lambda done, total: None)

    assert check().passed
    step = {"float16": 4e-3, "bfloat16": 4e-2, "float32": 1e-5, "float64": 1e-13}[dtype]
    for name in ("out", "dq", "dk", "dv"):
        heads = 1 if name in ("dk", "dv") else 3
        verdict = check(name, (0, 17, heads, 2), step)
        assert [n for n, f in verdict.figures.items() if not f.excess <= f.bound] == [name]
        assert not check(name, (0, 17, heads, 2), np.nan).passed
    assert not check("lse", (0, 1, 5), 1e-5).passed


def test_a_verdict_of_nan_does_not_pass():
    assert not Verdict(1, {"out": Figure(excess=float("nan"), bound=1.0)}).passed
    assert Verdict(1, {"out": Figure(excess=0.5, bound=1.0)}).passed


@settings(max_examples=30)
@given(st.sampled_from(NAMES), st.integers(0, 700), st.integers(1, 5), st.sampled_from("qkv"))
def test_random_rows_depend_on_their_position_alone(name, length, size, tensor):
    source = open_source(validate({"input": RANDOM | {"length": length, "seed": 5}}).input, None)
    whole = source.read(tensor, (Run(0, 1, length),))
    assert whole.shape == source.shapes[tensor]
    for rank in range(size):
        runs = PARTITIONS[name].runs(length, size, rank)
        np.testing.assert_array_equal(source.read(tensor, runs), whole[:, positions(runs)])


def test_random_tensors_differ_by_seed_and_by_name():
    read = {}
    for seed in (0, 1):
        source = open_source(validate({"input": RANDOM | {"seed": seed, "q_heads": 2}}).input, None)
        for name in "qkv":
            read[seed, name] = source.read(name, (Run(0, 1, 300),))
    values = list(read.values())
    for i, a in enumerate(values):
        assert abs(a.mean()) < 0.05
        assert abs(a.std() - 1) < 0.05
        for b in values[:i]:
            assert not np.array_equal(a, b)


@pytest.mark.parametrize("kind", ["safetensors", "npy"])
@pytest.mark.parametrize("dtype", [None, "float64", "float16"])
def test_files_are_read_by_rows(tmp_path, kind, dtype):
    q, k, v = random_qkv(50, kv_length=60, q_heads=4, kv_heads=2, value_dim=5)
    tensors = {"q": q, "k": k, "v": v}
    if kind == "safetensors":
        save_file(tensors, tmp_path / "in.safetensors")
    else:
        for name, x in tensors.items():
            np.save(tmp_path / f"{name}.npy", x)
    path = "in.safetensors" if kind == "safetensors" else "."
    spec = {"source": "file", "path": path} | ({"dtype": dtype} if dtype else {})
    source = open_source(validate({"input": spec}).input, tmp_path)
    assert source.dtype == (dtype or "float32")
    for name, x in tensors.items():
        runs = PARTITIONS["zigzag"].runs(x.shape[1], 3, 1)
        want = x[:, positions(runs)].astype(source.dtype)
        np.testing.assert_array_equal(source.read(name, runs), want)
    job = loaded(
        tmp_path,
        input=spec,
        attention={"causal": True, "window": [9, 0]},
        passes=["forward", "backward"],
        verify={"rows": "all"},
    )
    report = run(job)
    assert report.passed
    for each in report.ranks:
        for done in each.passes.values():
            assert done.stats.bytes_sent == done.bytes_planned
            assert done.stats.peak_kv_bytes == done.peak_planned


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"q": 0, "k": 1}, "input.path: expected tensors q, k and v, got no v in"),
        ({"q": 0, "k": 1, "v": 0}, "input.path: v: expected the rows and heads of k"),
        ({}, "input.path: expected a readable file"),
    ],
)
def test_files_that_do_not_fit(tmp_path, tensors, message):
    arrays = random_qkv(8, q_heads=4, kv_heads=2)
    if tensors:
        save_file({n: arrays[i] for n, i in tensors.items()}, tmp_path / "in.safetensors")
    spec = {"source": "file", "path": "in.safetensors"}
    with pytest.raises(ConfigError, match=message):
        check_job(loaded(tmp_path, input=spec), 2)


def test_a_missing_npy_is_named(tmp_path):
    np.save(tmp_path / "q.npy", random_qkv(8)[0])
    with pytest.raises(ConfigError, match=r"k\.npy: No such file"):
        check_job(loaded(tmp_path, input={"source": "file", "path": "."}), 2)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("out.bin", r"output.path: expected a name that ends in .safetensors, got out.bin"),
        ("no/out.safetensors", "output.path: expected a folder that can be written to"),
        ("dir.safetensors", "output.path: expected a file, got the folder"),
    ],
)
def test_an_output_that_cannot_be_written_is_found_before_computing(tmp_path, path, message):
    (tmp_path / "dir.safetensors").mkdir()
    with pytest.raises(ConfigError, match=message):
        check_job(loaded(tmp_path, output={"path": path}), 2)


def test_an_old_output_stays_whole_until_the_new_one_is(tmp_path, monkeypatch):
    path = tmp_path / "out.safetensors"
    path.write_bytes(b"old")
    job = loaded(tmp_path, output={"path": "out.safetensors"})
    from ringrt.jobs import outputs

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outputs, "_write_rows", fail)
    with pytest.raises(ConfigError, match="No space left on device"):
        run(job)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.safetensors"]
    monkeypatch.undo()
    run(job)
    assert set(load_file(path)) == {"out", "lse"}


def test_no_rank_reads_more_than_its_rows_and_blocks(tmp_path, monkeypatch):
    """Reads of k and v are the rank's own rows, or a block for the oracle."""
    from ringrt.jobs import oracle as verifier, sources

    monkeypatch.setattr(verifier, "_BLOCK", 32)
    rows = []
    read = sources.RandomSource.read

    def counted(self, name, runs):
        array = read(self, name, runs)
        rows.append(array.shape[1])
        return array

    monkeypatch.setattr(sources.RandomSource, "read", counted)
    run(loaded(tmp_path, verify={"rows": 5}), ranks=4)
    assert max(rows) == 300 // 4


def test_the_problem_of_a_job_is_that_of_the_call(tmp_path, monkeypatch):
    """Options reach `Ring.attention` as they stand in the job."""
    seen = []
    original = ringrt.Ring.attention

    def spy(self, *arrays, **options):
        seen.append(options)
        return original(self, *arrays, **options)

    monkeypatch.setattr(ringrt.Ring, "attention", spy)
    given = {"causal": True, "scale": 0.25, "softcap": 3.0, "window": [5, -1], "prefix": 2,
             "sink_tokens": 3, "documents": [0, 40, 300], "sink": [0.5, 1.0, 0.0, -1.0]}  # fmt: skip
    report = run(loaded(tmp_path, attention=given, verify={"rows": "all"}), ranks=2)
    assert report.passed
    for options in seen:
        assert options.pop("sink").tolist() == given["sink"]
        assert options == {name: value for name, value in given.items() if name != "sink"}
    assert len(seen) == 2
