"""The command line as a person meets it: output, exit codes, and one-line errors."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from support import ROOT, mpirun, ringrt_command

pytestmark = pytest.mark.timeout(150)
QUICKSTART = "examples/quickstart.yaml"
SMALL = "input: {source: random, length: 50, q_heads: 2, kv_heads: 1, head_dim: 4}\n"


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(SMALL)
    return path


def errors_in(text):
    """The two figures: max error of out and of lse."""
    found = re.search(r"out +([0-9.e-]+) .*\n +lse +([0-9.e-]+) ", text)
    assert found, text
    return float(found[1]), float(found[2])


@pytest.mark.parametrize("launch", ["threads", "mpi"])
def test_the_quickstart_is_right_on_real_data(launch):
    if launch == "threads":
        done = ringrt_command("run", QUICKSTART)
    else:
        done = mpirun(4, "-m", "ringrt", "run", QUICKSTART)
    assert done.returncode == 0, done.stderr
    assert "2,048 tokens, 9 query heads on 3 KV heads" in done.stdout
    assert max(errors_in(done.stdout)) <= 2e-6
    rows = [line.split() for line in done.stdout.splitlines() if re.match(r"\s+\d +512 ", line)]
    assert len(rows) == 8, "forward and backward"
    rows = rows[:4]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    for row in rows:
        # tokens, steps, sent, by formula, home of all, peak, by formula, peak of all
        assert row[1:8] == ["512", "4", "2.25", "2.25", "25.0%", "2.25", "2.25"]
        # Rank 0 sees all but the last key of the other shards, which it is not sent.
        assert row[8] == ("74.9%" if row[0] == "0" else "75.0%")
    assert done.stdout.count("\nverified") == 1


@pytest.mark.parametrize("partition", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_other_rings_on_real_data(partition, ranks):
    done = ringrt_command("run", QUICKSTART, "--ranks", ranks, "--set", f"ring.partition={partition}")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(errors_in(done.stdout)) <= 2e-6
    assert f"{partition} over {ranks} ranks" in done.stdout


def test_float16_costs_no_more_than_rounding():
    done = ringrt_command("run", QUICKSTART, "--set", "input.dtype=float16")
    assert done.returncode == 0, done.stdout
    beyond = float(re.search(r"\(([0-9.e+-]+) beyond the rounding of float16", done.stdout)[1])
    assert beyond <= 2e-6


def test_both_transports_write_the_same_file(job, tmp_path):
    wrote = []
    for name in ("threads", "mpi"):
        overrides = ["--set", f"output.path={name}.safetensors", "--set", "attention.causal=true"]
        if name == "threads":
            done = ringrt_command("run", job, "--ranks", "3", *overrides)
        else:
            done = mpirun(3, "-m", "ringrt", "run", job, *overrides)
        assert done.returncode == 0, done.stderr
        wrote.append(load_file(tmp_path / f"{name}.safetensors"))
    for tensor in ("out", "lse"):
        np.testing.assert_allclose(wrote[0][tensor], wrote[1][tensor], rtol=0, atol=1e-6)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "job.yaml", "mpi.safetensors", "threads.safetensors",
    ]  # fmt: skip


def test_a_result_beyond_its_bound_exits_1(job):
    done = ringrt_command("run", job, "--set", "ring.backend=null")
    assert done.returncode == 1
    assert "NOT VERIFIED" in done.stdout
    assert "no output was written" not in done.stdout, "none was asked for"
    done = ringrt_command(
        "run", job, "--set", "ring.backend=null", "--set", "output.path=x.safetensors"
    )
    assert "no output was written" in done.stdout


MISTAKES = [
    (["run", "none.yaml"], "none.yaml: expected a readable job file, got No such file"),
    (["run", "JOB", "--set", "ring.partition=diagonal"], "ring.partition: expected contiguous or"),
    (
        ["run", "JOB", "--set", "ring.schedule=star"],
        "ring.schedule: expected auto or ring or direct, got 'star'",
    ),
    (["run", "JOB", "--set", "ring.travel=zz"], "ring.travel: expected auto or kv or q, got 'zz'"),
    (["run", "JOB", "--set", "attention.dropout=0.1"], "attention.dropout: expected one of"),
    (
        ["run", "JOB", "--set", "ring.backend=abacus"],
        "ring.backend: expected auto or cpu or cupy or null",
    ),
    (["run", "JOB", "--set", "output.path=x.bin"], "output.path: expected a name that ends in"),
    (["plan", "JOB", "--set", "ring.schedule=star"], "ring.schedule: expected auto or ring"),
    (
        ["run", "JOB", "--set", "attention.documents=[0, 90]"],
        "attention.documents: expected ranges",
    ),
    (
        ["run", "JOB", "--set", "attention.sink=[1]"],
        "attention.sink: expected shape [q_heads], (2,)",
    ),
    (["plan", "JOB", "--set", "input.length=-1"], "input.length: expected at least 0, got -1"),
    (["plan", "JOB", "--set", "input.length=1e30"], "input.length: expected a whole number"),
    (
        ["plan", "JOB", "--set", "input.length=4000000000"],
        "input.length: expected at most 2147483648",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_handled_error_is_one_line_and_exit_2(job, arguments, message):
    done = ringrt_command(*(job if a == "JOB" else a for a in arguments))
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize(("arguments", "message"), [MISTAKES[1], MISTAKES[4]])
def test_a_handled_error_is_exit_2_and_said_once_under_mpirun_too(job, arguments, message):
    done = mpirun(3, "-m", "ringrt", *(job if a == "JOB" else a for a in arguments))
    assert done.returncode == 2
    assert done.stderr.count(message) == 1
    assert "Traceback" not in done.stderr


def test_a_mistake_that_one_rank_finds_reaches_the_others(job, tmp_path):
    """As when a file is missing on one node: no rank waits for the faulty one inside MPI."""
    import shutil

    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(SMALL.replace("length: 50", "length: -1"))
    launcher = shutil.which("mpirun", path=os.path.dirname(sys.executable)) or "mpirun"
    ringrt = [sys.executable, "-m", "ringrt", "run"]
    done = subprocess.run(
        [launcher, "-n", "2", *ringrt, job, ":", "-n", "1", *ringrt, wrong],
        capture_output=True, text=True, timeout=40, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 2
    assert "input.length: expected at least 0, got -1 on rank 2" in done.stderr


def test_the_table_fits_a_narrow_terminal():
    done = ringrt_command("run", QUICKSTART, env={"COLUMNS": "80", "FORCE_COLOR": "1"})
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_a_plugin_whose_probe_fails_does_not_break_the_lists():
    code = (
        "import sys, dataclasses\n"
        "import ringrt_backends as b\n"
        "def probe(): raise OSError('driver not found')\n"
        "b._probe_numba = probe\n"
        "sys.argv = ['ringrt', sys.argv[1]]\n"
        "from ringrt.cli import main\nmain()"
    )
    for command in ("backends", "doctor"):
        done = subprocess.run(
            [sys.executable, "-c", code, command], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert "OSError" in done.stdout
        assert "driver not found" in done.stdout


def test_transport_mpi_wants_its_launcher(job):
    done = ringrt_command("run", job, "--set", "ring.transport=mpi")
    assert done.returncode == 2
    assert "mpirun -n 4 ringrt run" in done.stderr


def test_ranks_that_contradict_mpirun(job):
    done = mpirun(2, "-m", "ringrt", "run", job, "--ranks", "3")
    assert done.returncode == 2
    assert "--ranks: expected the 2 processes started, got 3" in done.stderr


def long_job(tmp_path):
    """A job of a few minutes, so that it is surely under way when something is done to it."""
    path = tmp_path / "long.yaml"
    path.write_text(
        "input: {source: random, length: 100000, q_heads: 8, kv_heads: 8, head_dim: 64}\n"
        "output: {path: out.safetensors}\nring: {timeout: 10}\n"
    )
    return path


def test_killing_one_process_of_a_job_ends_all(tmp_path):
    """SIGKILL of one rank in the midst of a job: everything ends, non-zero, and no output is
    left under its name."""
    import shutil

    launcher = shutil.which("mpirun", path=os.path.dirname(sys.executable)) or "mpirun"
    job = subprocess.Popen(
        [launcher, "-n", "3", sys.executable, "-m", "ringrt", "run", long_job(tmp_path)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT,
    )  # fmt: skip
    ranks = []
    deadline = time.monotonic() + 30
    while len(ranks) < 3 and time.monotonic() < deadline:
        time.sleep(0.2)
        ranks = [pid for pid in os.listdir("/proc") if pid.isdigit() and _runs(pid, tmp_path)]
    time.sleep(2)
    os.kill(int(ranks[1]), signal.SIGKILL)
    assert job.wait(timeout=30) != 0
    assert not any(_runs(pid, tmp_path) for pid in ranks)
    assert not (tmp_path / "out.safetensors").exists()


def _runs(pid, folder):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return False
    return (
        b"ringrt" in words
        and b"-m" in words[:3]
        and any(str(folder).encode() in word for word in words)
    )


@pytest.mark.parametrize(("ranks", "threads"), [(2, 1), (1, 2)])
def test_interrupting_thread_ranks_ends_them(tmp_path, ranks, threads):
    """In the midst of compute, with worker threads and without."""
    job = subprocess.Popen(
        [
            sys.executable, "-m", "ringrt", "run", long_job(tmp_path),
            "--ranks", str(ranks), "--set", f"ring.threads={threads}",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT,
        # A shell that runs the tests in the background has interrupts ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    time.sleep(4)
    job.send_signal(signal.SIGINT)
    assert job.wait(timeout=30) != 0


def test_help_imports_little_and_needs_no_extras():
    """With every extra made impossible to import, and without NumPy, which takes longer than all
    the rest: a person waits for it."""
    code = (
        "import sys\n"
        "for name in ('cupy', 'numba', 'mpi4py', 'torch', 'jax', 'numpy', 'yaml', 'pluggy'):\n"
        "    sys.modules[name] = None\n"
        "sys.argv = ['ringrt', '--help']\n"
        "from ringrt.cli import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "run " in done.stdout


def test_commands_work_without_the_extras():
    code = (
        "import sys\n"
        "for name in ('cupy', 'numba', 'mpi4py', 'torch', 'jax'): sys.modules[name] = None\n"
        f"sys.argv = ['ringrt', 'run', {QUICKSTART!r}, '--set', 'ring.backend=reference']\n"
        "from ringrt.cli import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "verified" in done.stdout


def test_plan_prints_every_step():
    done = ringrt_command("plan", QUICKSTART, "--ranks", "2", "--set", "passes=[forward]")
    assert done.returncode == 0
    lines = [line.split() for line in done.stdout.splitlines() if re.match(r"\s+[01]  ", line)]
    assert [line[:4] for line in lines] == [
        ["0", "0", "0", "home"],
        ["0", "1", "1", "slot"],
        ["1", "0", "1", "home"],
        ["1", "1", "0", "slot"],
    ]
    assert "1.50 MiB to 1" in done.stdout
    assert "50.0%" in done.stdout or "50.1%" in done.stdout


def test_backward_on_real_data():
    done = ringrt_command("run", QUICKSTART, "--set", "passes=[forward, backward]")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert re.search(rf"^  {name} +[0-9.e-]+ \(", done.stdout, re.M)
    assert "backward: striped over 4 ranks" in done.stdout


def test_plan_says_why():
    done = ringrt_command("plan", QUICKSTART, "--set", "passes=[forward, backward]")
    assert done.returncode == 0
    assert "chosen by bytes: ring:" in done.stdout
    assert "ring moving kv:" in done.stdout
    assert "sums received" in done.stdout


def test_plan_of_many_ranks_is_one_row_each():
    forward = ["--set", "passes=[forward]"]
    done = ringrt_command("plan", QUICKSTART, "--ranks", "64", *forward)
    assert done.returncode == 0
    assert len([line for line in done.stdout.splitlines() if "of even" in line]) == 64
    done = ringrt_command("plan", QUICKSTART, "--ranks", "64", "--rank", "9", *forward)
    assert len([line for line in done.stdout.splitlines() if line.startswith("   9 ")]) == 64
    done = ringrt_command("plan", QUICKSTART, "--ranks", "200", *forward)
    assert len([line for line in done.stdout.splitlines() if "of even" in line]) == 64
    assert "64 of 200 ranks; --rank shows the steps of one" in done.stdout


def test_doctor_and_backends_say_what_works():
    done = ringrt_command("doctor", timeout=110)
    assert done.returncode == 0, done.stdout
    parts = (
        "backend cpu",
        "backend reference",
        *(f"transport {x}" for x in ("mpi", "torch", "tcp")),
    )
    for part in parts:
        assert f"{part}: works" in done.stdout, done.stdout
    done = ringrt_command("backends")
    assert done.returncode == 0
    for name in ("cpu", "reference", "null", "threads", "mpi"):
        assert re.search(rf"{name}: .*\n +(supports float16|runs here)", done.stdout), done.stdout
    assert "partition zigzag: an early and a late chunk" in done.stdout


def test_a_blocked_plugin_is_not_listed_and_said_to_be_blocked():
    env = {"RINGRT_BLOCK_PLUGINS": "ringrt_partitions, absent"}
    done = ringrt_command("backends", env=env)
    assert done.returncode == 0
    assert "partition striped" not in done.stdout
    assert "blocked by RINGRT_BLOCK_PLUGINS: ringrt_partitions" in done.stdout
    assert "RINGRT_BLOCK_PLUGINS names 'absent', which is not installed" in done.stdout


def test_doctor_names_what_is_missing_and_its_remedy():
    code = (
        "import sys, importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name in ('numba', 'mpi4py') else real(name, *a)\n"
        "sys.argv = ['ringrt', 'doctor']\n"
        "from ringrt.cli import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "backend cpu: does not work - Numba is not installed" in done.stdout
    assert "to mend it: pip install 'ringrt[cpu]'" in done.stdout
    assert "transport mpi: does not work - mpi4py is not installed" in done.stdout


def test_schema_is_json():
    done = ringrt_command("schema")
    assert done.returncode == 0
    assert json.loads(done.stdout)["properties"].keys() >= {"input", "attention", "ring", "verify"}
