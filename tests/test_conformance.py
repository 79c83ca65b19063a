"""The conformance suite: it passes what is right, and each of its checks finds what it is meant
to find."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib

import broken_calls  # noqa: F401 - adds to BROKEN
import broken_corners  # noqa: F401 - adds to BROKEN
import broken_gradients  # noqa: F401 - adds to BROKEN
import numpy as np
import pytest
from broken_backends import BROKEN as BROKEN_BACKENDS, ForwardOnly, NeedsOut, RoundsWeights
from broken_transports import BROKEN as BROKEN_TRANSPORTS, Hangs
from hypothesis import given, settings, strategies as st

import oracle
from ringrt.backend import BackendSpec
from ringrt.conformance import (
    backend_checks,
    fault_checks,
    oracle as dense,
    rings,
    transport_checks,
)
from ringrt.conformance.bounds import Bounds, half_ulp, hold
from ringrt.conformance.cases import Case
from ringrt.conformance.checks import Failed, Refused, each
from ringrt.conformance.passes import Given, exact, exact_gradients
from ringrt.conformance.ranks import Rank
from ringrt.conformance.suites import (
    BACKEND_CHECKS,
    TRANSPORT_CHECKS,
    BackendSuite,
    TransportSuite,
)
from ringrt.errors import BackendUnavailable, ConfigError, TransportUnavailable
from ringrt.plan import Piece
from ringrt.registry import registry
from ringrt.transport import TransportSpec
from ringrt_backends.reference import ReferenceBackend
from support import ROOT, mpirun, ringrt_command

pytestmark = pytest.mark.timeout(120)


def check_of(checks, name):
    return next(check for check in checks if check.name == name)


@pytest.fixture
def with_backend(monkeypatch):
    """Registers a backend for the test; its suite."""

    def register(kind, **spec):
        made = BackendSpec("planted", "for a test", lambda: None, lambda context: kind(), **spec)
        monkeypatch.setitem(registry().backends, "planted", made)
        return BackendSuite("planted")

    return register


@pytest.fixture
def with_transport(monkeypatch):
    """Registers a transport over threads for the test, with short deadlines; its suite."""

    def register(kind):
        monkeypatch.setattr(Rank, "timeout", 1.0)
        monkeypatch.setattr(Rank, "short", 0.2)
        monkeypatch.setattr(fault_checks, "_SOON", 1.5)
        monkeypatch.setattr(fault_checks, "_SLACK", 0.5)
        made = TransportSpec("planted", "for a test", lambda: None, over=kind)
        monkeypatch.setitem(registry().transports, "planted", made)
        return TransportSuite("planted")

    return register


# Backends


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_our_backends_pass_every_check(name):
    suite = BackendSuite(name)
    outcomes = [suite.run(check) for check in suite.checks]
    assert [each for each in outcomes if each.state != "passed" or each.detail] == []


@pytest.mark.parametrize(
    ("kind", "check", "text"),
    BROKEN_BACKENDS,
    ids=[f"{kind.__name__}-{check}" for kind, check, _ in BROKEN_BACKENDS],
)
def test_what_is_wrong_with_a_backend_is_found(with_backend, kind, check, text):
    outcome = with_backend(kind).run(check_of(BACKEND_CHECKS, check))
    assert outcome.state == "failed"
    assert text in outcome.detail
    assert len(outcome.detail.splitlines()) == 1


def test_every_check_of_backends_can_fail():
    assert {check for _, check, _ in BROKEN_BACKENDS} == {check.name for check in BACKEND_CHECKS}


def test_a_backend_that_wants_out_passes(with_backend):
    suite = with_backend(NeedsOut)
    asked = [check for check in suite.checks if check.name.startswith(("backward", "ring-s"))]
    assert {suite.run(check).state for check in asked} == {"passed"}
    assert len(asked) > 15


def test_what_is_refused_in_words_is_no_failure(with_backend):
    suite = with_backend(ForwardOnly)
    outcomes = {check.name: suite.run(check) for check in suite.checks}
    assert {each.state for each in outcomes.values()} == {"passed", "refused"}
    refused = {name: each.detail for name, each in outcomes.items() if each.state == "refused"}
    assert refused["softcap"] == "softcap is not implemented"
    assert refused["float64"] == "float64 is not implemented"
    assert refused["backward-bands"] == "backward is not implemented"
    assert "in part refused: head_dim 1: not 8 n" in outcomes["odd-dims"].detail
    plain = {"bfloat16", "float32", "many-shards", "refusals-in-words", "ring-refusals"}
    assert not plain & refused.keys()


@pytest.mark.parametrize("announced", [True, False])
def test_rounded_weights_are_allowed_where_they_are_announced(with_backend, announced):
    suite = with_backend(RoundsWeights, rounds_weights=announced)
    outcome = suite.run(check_of(BACKEND_CHECKS, "bfloat16"))
    assert outcome.state == ("passed" if announced else "failed")
    assert suite.run(check_of(BACKEND_CHECKS, "float32")).state == "passed"


def test_nan_in_tiles_is_not_asked_of_a_backend_that_lets_it_through(with_backend):
    suite = with_backend(ReferenceBackend, contains_nan=False)
    for name in ("unseen-nan-in-a-tile", "backward-unseen-nan-in-a-tile"):
        outcome = suite.run(check_of(BACKEND_CHECKS, name))
        assert (outcome.state, outcome.detail) == ("refused", "the spec says contains_nan=False")


def test_a_backend_is_closed_after_each_check(with_backend):
    closed = []

    class Counts(ReferenceBackend):
        def close(self):
            closed.append(self)

    suite = with_backend(Counts)
    suite.run(check_of(BACKEND_CHECKS, "float32"))
    assert len(closed) == 1


# Transports


@pytest.mark.parametrize("check", transport_checks("threads"), ids=str)
def test_thread_ranks_pass_every_check(check):
    assert check().state == "passed"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("kind", "check", "text"),
    BROKEN_TRANSPORTS,
    ids=[f"{kind.__name__}-{check}" for kind, check, _ in BROKEN_TRANSPORTS],
)
def test_what_is_wrong_with_a_transport_is_found(with_transport, kind, check, text):
    outcome = with_transport(kind).run(check_of(TRANSPORT_CHECKS, check))
    assert outcome.state == "failed"
    assert text in outcome.detail
    assert outcome.detail.startswith("rank ")
    assert len(outcome.detail.splitlines()) == 1


def test_every_check_of_transports_can_fail():
    names = {check.name for check in TRANSPORT_CHECKS}
    assert {check for _, check, _ in BROKEN_TRANSPORTS} == names


def test_a_rank_that_hangs_is_told(with_transport, monkeypatch):
    monkeypatch.setattr(rings, "PATIENCE", 1.0)
    outcome = with_transport(Hangs).run(check_of(TRANSPORT_CHECKS, "ring-exchange"))
    assert outcome.state == "failed"
    assert "it hangs: it did not come back in 1 s" in outcome.detail


def test_processes_of_mpi_pass_every_check():
    done = mpirun(3, "-m", "ringrt", "check-transport", "mpi", timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed") == len(TRANSPORT_CHECKS) + 1
    assert done.stdout.splitlines()[-1] == f"{len(TRANSPORT_CHECKS)} passed, 0 refused, 0 failed"


def test_a_failure_on_one_process_is_told_once_and_ends_all_with_1(tmp_path):
    """A plugin of the test's own: its rank 2 sends something else."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from dataclasses import replace\n"
        "from ringrt.cli import main\n"
        "from ringrt.registry import registry\n"
        "from ringrt.transports.mpi import MpiTransport\n"
        "class Wrong(MpiTransport):\n"
        "    def all_gather_bytes(self, payload, timeout):\n"
        "        told = super().all_gather_bytes(payload, timeout)\n"
        "        return told[::-1] if self.rank == 2 and len(payload) == 1 else told\n"
        "mpi = registry().transports['mpi']\n"
        "registry().transports['wrong'] = replace(\n"
        "    mpi, name='wrong', connect=lambda: Wrong.world(mpi.launched()))\n"
        "sys.argv = ['ringrt', 'check-transport', 'wrong', '--only', 'rank-order']\n"
        "main()\n"
    )
    done = mpirun(3, script)
    assert done.returncode == 1
    assert "rank 2 of 3: all_gather_bytes: expected" in done.stdout
    assert done.stdout.splitlines()[-1] == "0 passed, 0 refused, 1 failed"
    assert done.stdout.count("rank-order") == 1


@pytest.mark.parametrize("name", ["mpi", "planted"])
def test_processes_alone_are_refused_in_a_line_that_says_how_to_start(monkeypatch, name):
    spec = TransportSpec(name, "", lambda: None, launched=lambda: None, connect=lambda: None)
    monkeypatch.setitem(registry().transports, name, spec)
    with pytest.raises(
        TransportUnavailable, match=f"`ringrt check-transport {name}` by its launcher"
    ):
        transport_checks(name)


# On the command line, and by pytest


def test_the_command_prints_a_row_for_each_check_and_a_count():
    done = ringrt_command("check-backend", "cpu", "--only", "softcap", "--only", "float32")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[:2] == [["float32", "passed"], ["softcap", "passed"]]
    assert done.stdout.splitlines()[-1] == "2 passed, 0 refused, 0 failed"
    assert done.returncode == 0


def test_null_fails_for_it_computes_nothing():
    done = ringrt_command("check-backend", "null", "--only", "float32", "--only", "no-tiles")
    assert done.returncode == 1
    assert "lse[0, 0, 0]: expected 4.17255008, got -inf; for float32, 33 rows" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 passed, 0 refused, 1 failed"
    assert "computes nothing" in registry().backends["null"].summary


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check-backend", "nobody"], "backend: expected "),
        (["check-transport", "nobody"], "transport: expected "),
        (["check-transport", "mpi"], "as in `mpirun -n 4 ringrt check-transport mpi`"),
        (["check-backend", "cupy"], "backend cupy: there is no usable CUDA GPU"),
        (["check-backend", "reference", "--only", "soft"], "--only: expected a name that `--list`"),
    ],
)
def test_what_cannot_be_checked_is_one_line_and_exit_code_2(arguments, said):
    done = ringrt_command(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "checks"),
    [("check-backend", BACKEND_CHECKS), ("check-transport", TRANSPORT_CHECKS)],
)
def test_the_checks_are_listed(command, checks):
    done = ringrt_command(command, "any", "--list")
    assert done.returncode == 0
    rows = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert rows == [[check.name, check.summary] for check in checks]


def pytest_in(folder, *arguments, env=None):
    """pytest with the plugin and no other, in a folder without tests."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "ringrt.conformance.pytest_plugin", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | (env or {}),
    )


def test_pytest_needs_no_test_file(tmp_path):
    names = ["--ringrt-backend=reference", "--ringrt-backend=cpu", "--ringrt-transport=threads"]
    done = pytest_in(tmp_path, *names, "-v", "-k", "softcap or rank-order")
    assert done.returncode == 0, done.stdout
    for line in ("backend reference::softcap PASSED", "backend cpu::backward-softcap PASSED",
                 "transport threads::rank-order PASSED", "5 passed"):  # fmt: skip
        assert line in done.stdout


def test_pytest_fails_with_one_line(tmp_path):
    done = pytest_in(tmp_path, "--ringrt-backend=null", "-k", "float32 and not backward")
    assert done.returncode == 1
    assert "\nlse[0, 0, 0]: expected 4.17255008, got -inf; for float32" in done.stdout
    assert "Traceback" not in done.stdout


def test_pytest_shows_the_words_of_a_refusal(tmp_path):
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "from broken_backends import ForwardOnly\n"
        "from ringrt.backend import BackendSpec\n"
        "from ringrt.registry import registry\n"
        "registry().backends['mine'] = BackendSpec(\n"
        "    'mine', 'for a test', lambda: None, lambda context: ForwardOnly())\n"
    )
    done = pytest_in(tmp_path, "--ringrt-backend=mine", "-rP", "-k", "sinks-alone")
    assert done.returncode == 0, done.stdout
    assert "refused: sink is not implemented" in done.stdout


def test_pytest_refuses_an_unknown_name(tmp_path):
    done = pytest_in(tmp_path, "--ringrt-backend=nobody")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: --ringrt-backend: backend: expected " in done.stderr


def test_pytest_loads_the_plugin_by_its_entry_point_and_nothing_heavy():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module = project["entry-points"]["pytest11"]["ringrt"]
    code = f"import sys, pytest; before = set(sys.modules); import {module}; " \
           "print(*(set(sys.modules) - before))"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    new = {name for name in done.stdout.split() if not name.startswith("ringrt")}
    assert done.returncode == 0, done.stderr
    assert new <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("check", backend_checks("reference")[:3], ids=str)
def test_checks_can_be_the_parameters_of_a_test(check):
    assert check().state == "passed"


def test_a_check_that_fails_raises_its_line(with_backend):
    with_backend(type("Null", (ReferenceBackend,), {"accumulate": lambda *arguments: None}))
    check = next(each for each in backend_checks("planted") if str(each) == "softcap")
    with pytest.raises(AssertionError, match=r"lse\[0, 0, 0\]: expected .*, got -inf; for float32"):
        check()


def test_checks_of_nobody_are_an_error_at_once():
    with pytest.raises(ConfigError):
        backend_checks("nobody")
    with pytest.raises(BackendUnavailable):
        backend_checks("cupy")


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("check-backend cupy", "results bfloat16 unseen-nan strided-inputs backward-bfloat16"),
        ("check-transport nccl", "ring-exchange odd-sizes silent-peer whole-pass peer-that-left"),
    ],
)
def test_the_cuda_path_passes_in_the_simulator(command, names):
    only = [part for name in names.split() for part in ("--only", name)]
    done = ringrt_command(*command.split(), *only, env={"RINGRT_CUDASIM": "1"}, timeout=110)
    assert done.stdout.splitlines()[-1] == "5 passed, 0 refused, 0 failed", done.stdout
    assert done.returncode == 0


# What checks are made of


@settings(max_examples=30)
@given(st.data())
def test_the_oracle_is_the_tests_own(data):
    """Two oracles that share no code."""
    heads = data.draw(st.sampled_from([(2, 2), (4, 2), (3, 1)]))
    bound = st.none() | st.integers(-12, 12)
    case = Case(
        dtype="float64", batch=data.draw(st.integers(1, 2)), rows=data.draw(st.integers(0, 12)),
        keys=data.draw(st.integers(0, 12)), q_heads=heads[0], kv_heads=heads[1], head_dim=3,
        value_dim=data.draw(st.sampled_from([2, 3])),
        scale=data.draw(st.sampled_from([None, 0.0, -1.3])),
        softcap=data.draw(st.sampled_from([None, 0.8])),
        sink=data.draw(st.sampled_from([None, (0.3, -np.inf, 2.0, 0.0)[: heads[0]]])),
    ).banded(data.draw(bound), data.draw(bound))  # fmt: skip
    x, problem = case.arrays(), case.problem
    scores = {"scale": problem.scale, "softcap": problem.softcap, "sink": case.logits}
    out, lse = oracle.attention(x.q, x.k, x.v, case.seen, **scores)
    exactly = exact(case)
    np.testing.assert_allclose(exactly.out.value, out, rtol=0, atol=1e-13)
    np.testing.assert_allclose(exactly.lse, lse, rtol=0, atol=1e-13)
    wanted = oracle.gradients(x.dout, x.q, x.k, x.v, case.seen, **scores)[:3]
    got = exact_gradients(case, Given.of(case))
    for one, want in zip((got.dq, got.dk, got.dv), wanted, strict=True):
        np.testing.assert_allclose(one.value, want, rtol=0, atol=1e-13)
        assert (abs(one.value) <= one.size + 1e-12).all()
        assert (one.size <= one.gross + 1e-12).all()


def test_who_sees_whom_is_what_the_mask_says():
    pieces = (Piece(0, 5, 0, 4, -1, 2), Piece(2, 7, 4, 9, None, 0), Piece(5, 7, 0, 2))
    case = Case(rows=7, keys=9, pieces=pieces)
    seen = case.problem.mask.visible(np.arange(7), np.arange(9))
    np.testing.assert_array_equal(dense.visible(7, 9, pieces), seen)


def test_shards_come_in_order_and_hold_every_pair_once():
    case = Case(rows=20, keys=31, edges=(7, 8, 30), order=(2, 0, 3, 1)).banded(-9, 3)
    assert [cut.start for cut, _ in case.shards()] == [8, 0, 30, 7]
    pairs = sum(int(tiles.visible_pairs().sum()) for _, tiles in case.shards())
    assert pairs == case.seen.sum()


@pytest.mark.parametrize(
    ("got", "want"),
    [(np.nan, 1.0), (1.0, np.nan), (np.inf, 1.0), (1.0, -np.inf), (np.inf, -np.inf), (1.1, 1.0)],
)
def test_what_is_beyond_its_bound_is_told_with_its_place(got, want):
    values = np.array([[0.0, want]])
    with pytest.raises(Failed, match=r"out\[0, 1\]: expected \S+, got \S+.*; for a case"):
        hold("out", np.array([[0.0, got]]), values, np.full((1, 2), 0.05), "a case")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1.04])
def test_what_is_within_its_bound_passes(value):
    want = 1.0 if np.isfinite(value) else value
    hold("out", np.array([value]), np.array([want]), np.full(1, 0.05), "a case")


def test_bounds_are_those_of_the_dtype():
    case = Case(dtype="bfloat16")
    exactly = exact(case)
    want = exactly.out.value
    plain, rounding = (Bounds("bfloat16", flag).out(exactly, want) for flag in (False, True))
    beyond = 5e-6 * np.maximum(1, exactly.out.size)
    np.testing.assert_allclose(plain, half_ulp(abs(want), "bfloat16") + beyond, rtol=1e-9)
    assert (rounding > plain + 2 * 2.0**-8 * abs(want)).all()
    assert half_ulp(np.array([1.0, 1.9, 2.0]), "float16").tolist() == [2**-11, 2**-11, 2**-10]
    assert Bounds("float64", True).out(exactly, want).max() < 1e-11


def test_problems_are_refused_only_if_all_are():
    def odd(number):
        if number % 2 == 0:
            raise Refused(f"{number} is even")

    assert each([1, 2, 3, 4], odd) == ["2 is even", "4 is even"]
    with pytest.raises(Refused, match="2 is even; 4 is even"):
        each([2, 4, 4], odd)
    assert each([], odd) == []
