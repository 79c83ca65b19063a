"""benchmarks/gpu_acceptance.py without a GPU: on the simulator, and what it says where none is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import masks
import numpy as np
import pytest

import oracle as definition
from support import ROOT

BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from gpu import children, oracle  # noqa: E402
from gpu.cases import Case, numpy_dtype  # noqa: E402
from gpu.report import lines  # noqa: E402

PLAIN = {name: value for name, value in os.environ.items() if not name.startswith("RINGRT_CUDASIM")}


def program(*arguments, timeout=90, **environment):
    return subprocess.run(
        [sys.executable, BENCHMARKS / "gpu_acceptance.py", *arguments],
        capture_output=True, text=True, timeout=timeout, env=PLAIN | environment, cwd=ROOT,
    )  # fmt: skip


def in_one_process(code, timeout=90):
    """Run code beside the program's modules, where it can plant things."""
    start = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
    return subprocess.run(
        [sys.executable, "-c", start + code],
        capture_output=True, text=True, timeout=timeout, env=PLAIN, cwd=ROOT,
    )  # fmt: skip


# No GPU: no device is visible, and no compiler for the simulator.


@pytest.mark.parametrize(
    ("arguments", "status"), [((), 2), (("--allow-missing",), 0), (("--simulate",), 2)]
)
def test_without_a_gpu_it_says_so_in_one_line(arguments, status):
    done = program(*arguments, CUDA_VISIBLE_DEVICES="", CXX="no-such-compiler")
    assert done.returncode == status
    [line] = done.stdout.splitlines()
    assert line.startswith("gpu acceptance: nothing was run: ")


def test_unknown_sections_are_refused():
    done = program("--sections", "correctness,seed")
    assert done.returncode == 2
    assert "no section 'seed'" in done.stderr


def test_nothing_run_is_nothing_accepted():
    done = program("--simulate", "--sections", "speed")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "gpu acceptance: nothing was run"


# On the simulator.


@pytest.mark.timeout(300)
def test_it_is_accepted_on_the_simulator(tmp_path):
    done = program("--simulate", "--json", tmp_path / "gpu.json", timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gpu acceptance: accepted, " in done.stdout.splitlines()[-1]
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["accepted"]
    assert report["machine"]["simulated"]
    assert list(report["sections"]) == ["correctness", "contract", "handover", "ring"]
    handed = {r["title"]: r for r in report["sections"]["handover"]}
    assert {"torch bfloat16 gradients", "jax float32 ring"} <= handed.keys()
    assert not any("refused" in each for each in handed.values())
    contract = report["sections"]["contract"]
    assert {r["title"] for r in contract} >= {"cupy does-something", "cupy backward-float16"}
    ring = report["sections"]["ring"]
    assert {(r["group"], r["title"].split()[0]) for r in ring} == {
        (transport, ranks) for transport in ("nccl", "threads") for ranks in "23"
    }
    [timed] = [r for r in ring if "time" in r["title"] and r["title"].startswith("2 ranks nccl")]
    for name in ("forward", "backward"):
        assert 0 < timed["figures"][name]["overlap"] <= 1
        assert timed["figures"][name]["overhead"] > 0


def test_a_wrong_result_is_reported_and_not_accepted(tmp_path):
    done = in_one_process(f"""
import gpu_acceptance
from gpu import child, oracle

right = oracle.Attention.forward

def wrong(self):
    found = right(self)
    out = found["out"]
    return found | {{"out": oracle.Expected(out.value * 1.01, out.bound)}}

oracle.Attention.forward = wrong
few = lambda module, cases, environment, limit_s: child.results(module, cases[2:5])
arguments = ["--simulate", "--sections", "correctness", "--json", {str(tmp_path / "gpu.json")!r}]
sys.exit(gpu_acceptance.main(arguments, few))
""")
    assert done.returncode == 1, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("wrong: ")]
    assert len(told) == 3
    assert all(": out: " in line and "times its bound" in line for line in told)
    assert "not accepted: 3 wrong" in done.stdout.splitlines()[-1]
    assert not json.loads((tmp_path / "gpu.json").read_text())["accepted"]


def test_arrays_that_come_back_wrong_are_not_accepted():
    done = in_one_process("""
import gpu_acceptance
from gpu import child, handover

right = handover._Torch.ring
handover._Torch.ring = lambda self, *x: [y.float() * 1.2 for y in right(self, *x)]
run = lambda module, cases, environment, limit_s: child.results(module, cases)
sys.exit(gpu_acceptance.main(["--simulate", "--sections", "handover", "--quick"], run))
""")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "wrong: handover: torch float32 ring: out: " in done.stdout
    text = "wrong: handover: torch bfloat16 ring: out: of another kind, device or dtype than q"
    assert text in done.stdout


def test_a_backend_that_breaks_the_contract_is_not_accepted():
    done = in_one_process("""
import gpu_acceptance
from gpu import child
from ringrt_backends.cuda_cupy import CupyBackend

right = CupyBackend.finish
CupyBackend.finish = lambda self, state, stream=None: right(self, state, stream)[::-1]
run = lambda module, cases, environment, limit_s: child.results(module, cases)
sys.exit(gpu_acceptance.main(["--simulate", "--sections", "contract"], run))
""")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "wrong: contract: cupy does-something: " in done.stdout


def test_speed_is_measured_beside_peers():
    """On fakes: the simulator for CuPy, the host for PyTorch's GPU."""
    done = in_one_process("""
import os
os.environ["RINGRT_CUDASIM"] = "1"
import torch
from gpu import cases, peers, report, speed

class Event:
    def __init__(self, enable_timing): pass
    def record(self): pass
    def synchronize(self): pass
    def elapsed_time(self, end): return 2.0

def as_torch(x):
    host = cases.on_host(x)
    return torch.from_numpy(host.view("int16").copy()).view(getattr(torch, host.dtype.name))

torch.cuda.Event, torch.cuda.synchronize, torch.cuda.empty_cache = Event, lambda: None, lambda: None
peers.missing_torch = speed.missing_torch = lambda: None
peers.as_torch = speed.as_torch = as_torch
speed._TOKENS, speed._WIDTH = 64, 128
results = [{"section": "speed", "group": "matmul", "title": "matmul", "wrong": [],
            "figures": {"by": "nobody", "TFLOP/s": 1.0}}]
for case in speed.cases(quick=True)[1::4]:
    case |= {"length": 32, "repeats": 1}
    results.append(case | speed.run(case))
    assert not results[-1]["wrong"], results[-1]["wrong"]
    rates = results[-1]["figures"]["rates"]
    assert rates["SDPA MATH"]["ms"] == 2.0
    pairs = 32 * 32 / (2 if case["causal"] else 1)
    flop = 4 * 2 * 128 * pairs * (2.5 if case["group"] == "backward" else 1)
    assert abs(rates["SDPA MATH"]["TFLOP/s"] - flop / 2e-3 / 1e12) < 1e-12
assert {r["group"] for r in results} == {"matmul", "forward", "backward"}
for table in report.tables("speed", results):
    report.console().print(table)
""")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MATH" in done.stdout
    assert "flash-attn 3" in done.stdout


# Its own oracle.

SCORES = [{}, {"softcap": 3.0, "sink": True}, {"scale": -0.3}]
MASKS = [
    {"causal": True},
    {"window": [4, 2], "documents": [[0, 9], [11, 30]]},
    {"causal": True, "window": [5, 0], "sink_tokens": 2, "prefix": 3, "documents": [0, 3, 20, 33]},
]


@pytest.mark.parametrize("mask", [{}, *MASKS])
@pytest.mark.parametrize("scores", SCORES)
def test_the_oracle_is_the_definition(monkeypatch, mask, scores):
    monkeypatch.setattr(oracle, "_ROWS", 10)
    case = Case("", "float64", 33, batch=2, q_heads=4, kv_heads=2, head_dim=5, value_dim=3,
                mask=mask, **scores)  # fmt: skip
    q, k, v, dout = case.tensors()
    what = case.oracle(q, k, v)
    forward = what.forward()
    options = {name: case.options[name] for name in ("scale", "softcap", "sink")}
    seen = masks.visible(33, 33, **mask)
    found = forward | what.backward(dout, forward["out"].value, forward["lse"].value)
    names = ("out", "lse", "dq", "dk", "dv", "dsink")
    wanted = definition.attention(q, k, v, seen, **options)
    wanted += definition.gradients(dout, q, k, v, seen, **options)
    for name, want in zip(names, wanted, strict=False):
        np.testing.assert_allclose(found[name].value, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(7, 12), (12, 7), (1, 9)])
def test_the_oracle_s_mask_is_aligned_at_the_end(rows, keys, causal):
    wanted = masks.visible(rows, keys, causal=causal)
    assert np.array_equal(oracle.visible(rows, keys, causal=causal), wanted)


@pytest.mark.parametrize("dtype", oracle.ROUNDING)
def test_one_lost_key_is_beyond_every_bound(dtype):
    """Rounded results of the oracle itself are within."""
    case = Case("", dtype, 257)
    q, k, v, dout = case.tensors()
    what = case.oracle(q, k, v)
    seen = what.seen.copy()
    seen[:, 100] = False
    forward, state = what.forward(), "float64" if dtype == "float64" else "float32"
    out = forward["out"].value.astype(numpy_dtype(dtype))
    lse = forward["lse"].value.astype(state)
    right = forward | what.backward(dout, out, lse)
    lost = replace(what, seen=seen)
    wrong = lost.forward() | lost.backward(dout, out, lse)
    for name, expected in right.items():
        kind = state if name == "lse" else numpy_dtype(dtype)
        assert oracle.share_of_bound(expected.value.astype(kind), expected)[0] <= 1
        assert oracle.share_of_bound(wrong[name].value.astype(kind), expected)[0] > 5


def test_infinities_and_nan_are_compared_too():
    expected = oracle.Expected(np.array([-np.inf, 0.0]), np.array([1e-3, 0.0]))
    for result, share in (([-np.inf, 0], 0), ([-1e30, 0], np.inf), ([-np.inf, np.nan], np.inf)):
        assert oracle.share_of_bound(np.array(result, np.float32), expected)[0] == share
    assert oracle.share_of_bound(np.array([0.0]), expected)[0] == np.inf


# Cases in processes of their own.

SECTION = """
import os, time

def run(case):
    print("noise")
    if case["do"] == "hang":
        time.sleep(600)
    if case["do"] == "crash":
        os.abort()
    if case["do"] == "raise":
        raise ValueError("first line\\nsecond")
    return {"wrong": [], "figures": {"pid": os.getpid(), "set": os.environ.get("SET")}}
"""


@pytest.fixture
def outcomes(tmp_path, monkeypatch):
    (tmp_path / "some_section.py").write_text(SECTION)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RINGRT_CUDASIM", "1")

    def run(*what, limit_s=20.0):
        cases = [{"group": "g", "title": f"case {i}", "do": do} for i, do in enumerate(what)]
        return list(children.run("some_section", cases, {"SET": "so"}, limit_s))

    return run


def test_a_case_that_crashes_hangs_or_raises_stops_no_other(outcomes):
    results = outcomes("work", "crash", "work", "raise", "work", "hang", "work", limit_s=8.0)
    assert [r["title"] for r in results] == [f"case {i}" for i in range(7)]
    told = [line for r in results for line in lines(r)]
    assert told[0] == "wrong: some_section: case 1: the process ended with signal SIGABRT: noise"
    assert told[1] == "wrong: some_section: case 3: ValueError: first line"
    assert told[2].startswith("wrong: some_section: case 5: no answer in 8 s")
    assert len(told) == 3
    pids = [r["figures"].get("pid") for r in results]
    assert pids[2] == pids[4] != pids[0]
    assert all(r["figures"]["set"] == "so" for r in results if r["figures"])


def test_where_nothing_works_the_rest_is_given_up(outcomes, monkeypatch):
    monkeypatch.setattr(children, "_MOST_LOST", 2)
    results = outcomes("work", "crash", "crash", "crash", "crash")
    assert [bool(r["wrong"]) for r in results] == [False, True, True, True, True][: len(results)]
    assert "not run, nor" in results[-1]["wrong"][0]
