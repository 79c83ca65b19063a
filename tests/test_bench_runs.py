"""`ringrt bench` as it runs: small sizes, and what goes wrong. Nothing here holds a time to
anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import oracle
from ringrt.bench import check, child, children, kernel, memory, problems, startup
from ringrt.bench.cases import Case, Settings, Shape
from ringrt.bench.cores import can_pin, environment, pinned
from ringrt.bench.suites import cases
from ringrt.bench.targets import target
from ringrt.bench.team import Team
from ringrt.errors import RingrtError
from support import PROGRAMS, ringrt_command, torchrun

pytestmark = pytest.mark.timeout(150)

FEW = Settings(
    threads=(1,), lengths=(32,), head_dims=(8,), heads=4, repeats=2, quick=True, backend="reference"
)
FORWARD = Case("n", "kernel", "g", "kernel", shape=Shape("forward", "float32", 32, 8, 2))


def rows_of(*texts, settings=FEW, suite="cpu"):
    """The rows of the cases whose names hold a text, measured in this process."""
    found = [each for each in cases(suite, settings) if any(text in each.name for text in texts)]
    assert found
    return [row for each in found for row in child.rows(each, settings)]


def test_the_kernel_beside_pytorch():
    rows = rows_of("kernel forward float32 full d8", "kernel backward float32 causal d8")
    assert [each.verdict for each in rows] == ["no target"] * 2
    first = rows[0]
    assert first.of == "torch / ringrt"
    assert [len(each) for each in first.times.values()] == [2, 2]
    assert first.figures["GF/s a core"] > 0


def one(way, dtype):
    shape = Shape(way, dtype, 32, 8, 2, causal=True)
    return child.rows(replace(FORWARD, shape=shape), FEW)


def test_16_bits_are_held_to_32_where_they_are_not_native():
    beside, torch = one("forward", "bfloat16")
    assert (beside.name, beside.of) == ("n beside float32", "ringrt float32 / ringrt")
    assert (torch.name, torch.of, torch.target) == ("n", "torch / ringrt", None)
    [float16] = one("backward", "float16")
    assert float16.of == "ringrt float32 / ringrt"


def test_native_bfloat16_is_held_to_pytorch(monkeypatch):
    loaded = problems.backend("reference", 1)
    monkeypatch.setattr(loaded, "native_bfloat16", True, raising=False)
    monkeypatch.setattr(kernel, "multiplies_bfloat16_tiles", lambda: False)
    shape = Shape("forward", "bfloat16", 1024, 8, 1, causal=True)
    [row] = child.rows(replace(FORWARD, shape=shape), FEW)
    assert (row.of, row.target) == ("torch / ringrt", target("forward bfloat16 causal"))
    # PyTorch uses AMX, which the kernel does not.
    monkeypatch.setattr(kernel, "multiplies_bfloat16_tiles", lambda: True)
    assert [each.target for each in one("forward", "bfloat16")] == [None, None]


def test_the_share_of_the_limit_that_the_backend_states(monkeypatch):
    problems.flop_limit.cache_clear()
    loaded = problems.backend("reference", 1)
    monkeypatch.setattr(loaded, "flop_limit", lambda dtype: 2e9, raising=False)
    [row] = child.rows(FORWARD, FEW)
    rate = row.figures["GF/s a core"]
    assert row.figures["% of limit"] == pytest.approx(100 * rate / 2)
    assert [each.value for each in rows_of("multiply-adds float32")] == [2.0]
    problems.flop_limit.cache_clear()


def test_without_pytorch_results_are_held_to_the_oracle(monkeypatch):
    monkeypatch.setattr(kernel, "installed", lambda: False)
    [row] = child.rows(FORWARD, FEW)
    assert (row.unit, row.why) == ("s", "PyTorch is not installed")
    assert list(row.times) == ["ringrt"]


@pytest.mark.parametrize("torch", [True, False])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_wrong_result_has_no_ratio(monkeypatch, torch, way):
    """One row that is 1 % off, of out or of dk."""
    monkeypatch.setattr(kernel, "installed", lambda: torch)
    method, place = ("forward", 0) if way == "forward" else ("backward", 1)
    right = getattr(problems.Verbs, method)

    def wrong(self):
        found = right(self)
        found[place][:, 0] *= 1.01
        return found

    monkeypatch.setattr(problems.Verbs, method, wrong)
    [row] = child.rows(replace(FORWARD, shape=replace(FORWARD.shape, way=way)), FEW)
    assert row.verdict == "failed"
    assert (row.value, row.times) == (None, {})
    name, by = "out" if way == "forward" else "dk", "PyTorch" if torch else "the float64 oracle"
    assert row.why.startswith(f"wrong: a row of {name} differs from that of {by} by 0.0")


def test_nan_is_wrong():
    right = np.ones((1, 4, 1, 2))
    with pytest.raises(check.Wrong, match="by nan of its norm"):
        check.check(["out"], [right * np.nan], [right], "float32", "it")


@pytest.mark.parametrize("piece", [None, 8, 5])
def test_verbs_in_pieces_equal_the_oracle(piece):
    given = problems.inputs(Shape(length=21, head_dim=8, heads=2, causal=True))
    verbs = problems.Verbs(problems.backend("reference", 1), given, piece)
    arrays = given.q, given.k, given.v
    np.testing.assert_allclose(
        verbs.result[0], oracle.attention(*arrays, causal=True)[0], atol=2e-6
    )
    right = oracle.gradients(given.dout, *arrays, causal=True)
    for mine, other in zip(verbs.backward(), right, strict=True):
        np.testing.assert_allclose(mine, other, atol=5e-6)
    assert verbs.pairs == 21 * 22 // 2


def test_the_kernel_beside_itself():
    rows = rows_of("pieces of", "GQA", "window", "documents")
    assert {each.verdict for each in rows} == {"no target"}
    pairs = {each.name: each.figures["visible pairs"] for each in rows}
    assert pairs["ring window of 2 forward d8 32"] == 1 + 2 + 30 * 3
    assert pairs["ring 8 documents backward d8 32"] == 8 * 10


def test_thread_rings_beside_the_kernel():
    rows = rows_of("one rank", "two thread ranks", "striped", "step without compute")
    assert len(rows) == 14
    assert not [each.why for each in rows if each.state]
    by_name = {each.name: each for each in rows}
    assert by_name["ring of one rank forward d8 32"].of == "ring / kernel"
    assert by_name["ring of two thread ranks forward d8 32"].of == "kernel / ring"
    assert by_name["ring striped against contiguous forward d8 32"].of == "contiguous / striped"
    assert by_name["ring step without compute, 4 thread ranks, forward"].unit == "µs a step"
    call = by_name["ring call without compute, 4 thread ranks, forward"]
    assert (call.unit, call.target) == ("µs a call", None)


@pytest.mark.parametrize(("way", "most"), [("forward", 4), ("backward", 5)])
def test_a_step_is_what_a_pass_of_more_steps_takes_longer(monkeypatch, way, most):
    """A pass is made to take 1 µs for each of its steps."""
    from ringrt.bench import rings

    def seconds(self, way, calls):
        def steps(ring):
            self._pass(way, ring)
            return ring.stats.steps

        return 1e-6 * self._ranks.do(steps)

    monkeypatch.setattr(rings.Shards, "seconds", seconds)
    step, call = rows_of(f"step without compute, 4 thread ranks, {way}")
    assert step.value == pytest.approx(1)
    assert call.value == pytest.approx(1)
    assert step.times == {"all steps": [most * 1e-6] * 2, "one step": [1e-6] * 2}


def test_a_ring_that_is_wrong_fails_its_row(monkeypatch):
    from ringrt.bench import rings

    right = rings.Shards._pass
    monkeypatch.setattr(
        rings.Shards,
        "_pass",
        lambda self, way, ring: tuple(x * 1.01 for x in right(self, way, ring)),
    )
    [row] = rows_of("two thread ranks forward")
    assert row.why.startswith("wrong: a row of out differs from that of the kernel alone by 0.0")


def test_a_rank_that_fails_is_heard_of():
    with Team(2, backend="reference") as team, pytest.raises(RingrtError, match="planted"):
        team.do(lambda ring: (_ for _ in ()).throw(RingrtError("planted")) if ring.rank else 0)


def test_importing_ringrt_compiles_nothing():
    [row] = rows_of("import ringrt")
    assert row.verdict == "no target"
    assert row.why == ""


def test_an_import_that_compiles_fails_the_row(monkeypatch):
    monkeypatch.setattr(startup, "_IMPORT", "print('numba')")
    [row] = rows_of("import ringrt")
    assert row.why == "import ringrt imports numba"


def test_a_cold_start_runs_and_one_that_fails_says_why(monkeypatch):
    [row] = rows_of("cold start, empty")
    assert row.target == target("cold start, empty cache")
    monkeypatch.setattr(startup, "_CALL", "raise SystemExit('planted')")
    [row] = rows_of("cold start, warm")
    assert row.why == "a fresh process failed: planted"


@pytest.mark.parametrize(
    ("grown", "verdict"), [((30, 60), "reached"), ((30, 120), "missed"), ((1, 4), "reached")]
)
def test_memory_is_held_to_what_it_grows_by(monkeypatch, grown, verdict):
    """In MiB; what is below the noise says nothing."""
    left = iter(grown)
    monkeypatch.setattr(memory, "_measured", lambda shape, settings: next(left) << 20)
    [row] = rows_of("memory")
    assert row.verdict == verdict
    assert row.figures["bytes a token"] == (grown[0] << 20) / 32


def test_memory_is_measured():
    [row] = rows_of("memory")
    assert row.verdict in ("reached", "missed")


def test_a_process_is_bound_before_it_imports_anything(tmp_path):
    """Where processes can be bound at all; elsewhere it runs as it is."""
    (tmp_path / "probe.py").write_text(
        "import os, sys\n"
        "bound = getattr(os, 'sched_getaffinity', lambda _: {0})(0)\n"
        "print(bound, sys.argv[1:])"
    )
    cores = [max(os.sched_getaffinity(0))] if can_pin() else []
    done = subprocess.run(
        pinned(cores, "probe", "a"), env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.strip() == f"{{{max(cores, default=0)}}} ['a']", done.stderr


def test_libraries_are_told_their_threads_and_not_bound():
    told = environment(2)
    assert {told[f"{name}_NUM_THREADS"] for name in ("OMP", "MKL", "OPENBLAS")} == {"2"}
    assert told["OMP_PROC_BIND"] == "false"


def test_a_case_without_an_answer_in_time_is_lost_and_named():
    [row] = children.measured([FORWARD], FEW, limit_s=0.01)
    assert row.why == "no answer in 0.01 s; the process was ended"


def test_a_process_that_dies_costs_its_row(monkeypatch):
    monkeypatch.setattr(children, "_CHILD", "no_such_module")
    rows = list(children.measured([FORWARD, replace(FORWARD, name="m")], FEW))
    assert [each.name for each in rows] == ["n", "m"]
    assert all("status 1" in each.why and "no_such_module" in each.why for each in rows)


def test_a_rank_that_dies_is_not_waited_for(monkeypatch):
    def commands(case, file):
        return [
            [sys.executable, "-c", program]
            for program in ("import time; time.sleep(90)", "raise SystemExit('gone')")
        ]

    monkeypatch.setattr(children, "_commands", commands)
    [row] = children.measured([replace(FORWARD, processes="gloo")], FEW, limit_s=60)
    assert row.why == "the process ended with status 1: gone"


def test_what_goes_wrong_fails_its_case_and_the_next_is_measured():
    odd = replace(FORWARD, name="odd", shape=replace(FORWARD.shape, heads=0))
    rows = list(children.measured([odd, FORWARD], FEW))
    assert [(each.name, each.verdict) for each in rows] == [("odd", "failed"), ("n", "no target")]
    assert rows[0].why.startswith("ConfigError: q_heads: expected at least 1")


def test_processes_are_given_up_together():
    case = replace(FORWARD, processes="mpi")
    wrong = [case.row(state="failed", why="wrong")]
    found = list(child.answers([case, case], FEW, lambda *_: wrong))
    assert len(found) == 2
    assert found[1] == {"done": "n", "broken": True}


@pytest.mark.parametrize("over", ["two MPI ranks backward", "gloo by hand forward+backward causal"])
def test_rings_of_processes(over):
    found = [each for each in cases("ring", FEW) if over in each.name]
    [row] = children.measured(found, FEW)
    assert row.verdict == "no target", row.why
    assert [len(each) for each in row.times.values()] == [2, 2]


def run_bench(tmp_path, *arguments):
    """The command, and its rows."""
    file = tmp_path / "bench.json"
    done = ringrt_command(
        "bench", "--quick", "--lengths", "128", "--json", file, *arguments, timeout=140
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(file.read_text())
    assert all(each["name"] in done.stdout for each in record["rows"])
    return record


def test_a_quick_run_of_the_kernel(tmp_path):
    record = run_bench(tmp_path, "--suite", "kernel", "--only", "float32 causal d64")
    assert [each["name"] for each in record["rows"]] == [
        "kernel forward float32 causal d64 128 t1",
        "kernel backward float32 causal d64 128 t1",
    ]
    assert {len(times) for each in record["rows"] for times in each["times"].values()} == {3}


def test_a_quick_run_of_the_thread_ring(tmp_path):
    record = run_bench(tmp_path, "--suite", "ring", "--only", "two thread ranks forward d64")
    [row] = record["rows"]
    assert row["value"] > 0
    assert row["of"] == "kernel / ring"


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_ring_written_by_hand_equals_the_oracle(ranks):
    done = torchrun(ranks, PROGRAMS.parent / "torch_programs" / "gloo_ring.py")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 8
    assert all(float(line.split()[-1]) < 5e-6 for line in lines), lines
