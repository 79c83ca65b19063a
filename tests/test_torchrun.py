"""Rings over torch.distributed between processes, started by torchrun or by hand, and what becomes
of them when a rank fails."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from support import PROGRAMS, ROOT, ringrt_command, torchrun

pytestmark = pytest.mark.timeout(120)
TORCH_PROGRAMS = PROGRAMS.parent / "torch_programs"


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_ring_equals_the_oracle(ranks):
    done = torchrun(ranks, TORCH_PROGRAMS / "world.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{ranks} ranks are right"


def by_hand(ranks, *command, timeout=90):
    """Python arguments in so many processes, with the environment that PyTorch reads."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    common = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {k: str(v) for k, v in (common | {"RANK": rank}).items()},
        )
        for rank in range(ranks)
    ]
    try:
        ended = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        SimpleNamespace(returncode=process.returncode, stdout=out, stderr=err)
        for process, (out, err) in zip(processes, ended, strict=True)
    ]


@pytest.fixture(scope="module")
def faults():
    """What came of the misbehaviour of rank 1 of three; see the program."""
    return by_hand(3, TORCH_PROGRAMS / "faults.py", 1)


def told(faults, how):
    """What each rank raised, and the seconds that the slowest took."""
    lines = [json.loads(line) for done in faults for line in done.stdout.splitlines()]
    found = {rank: (said, took) for rank, name, said, took in lines if name == how}
    return [found.get(rank, (None, 0))[0] for rank in range(3)], max(t for _, t in found.values())


def test_no_fault_is_no_failure(faults):
    assert told(faults, "nothing, small")[0] == ["nothing"] * 3


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_rank_that_raises_tells_the_others_why(faults, size):
    said, took = told(faults, f"raises, {size}")
    lost = "PeerLost: rank 1 failed: planted"
    assert said == [lost, "LookupError: planted", lost]
    assert took < 10


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_silent_rank_is_named_by_the_others(faults, size):
    said, took = told(faults, f"silent, {size}")
    count = 640 if size == "small" else 256000
    late = [
        rf"rank {rank} waited 1.5 s in ring step 1 to {verb} {count} bytes {link} rank 1"
        for rank, verb, link in ((0, "send", "to"), (2, "recv", "from"))
    ]
    assert any(s.startswith("ExchangeTimeout") for s in said)
    for each in said:
        assert re.match(rf"(ExchangeTimeout|PeerLost: rank [02] failed): ({'|'.join(late)})", each)
    assert took < 15


def test_a_rank_that_never_posts_is_named_by_the_others(faults):
    for each in told(faults, "never posts, small")[0]:
        assert "waited 1.5 s for rank 1 to join a control round" in each


def test_a_rank_that_leaves_is_not_waited_for(faults):
    said, took = told(faults, "leaves, small")
    assert said[1] == "nothing"
    for each in (said[0], said[2]):
        assert re.match(r"PeerLost: .*rank [02] waits for rank 1, gone from the ring$", each)
    assert took < 10


def test_a_mismatch_is_named_on_every_rank(faults):
    said = told(faults, "mismatch, small")[0]
    assert (
        said == ["RankMismatch: ranks disagree on causal: False on ranks 0, 2; True on rank 1"] * 3
    )
    said = told(faults, "argument, small")[0]
    assert said[1].startswith("ConfigError: q: expected shape")
    for each in (said[0], said[2]):
        assert each.startswith("RankMismatch: ranks disagree on whether the call is right")


def test_an_interrupt_ends_a_wait(faults):
    """Of rank 2, while rank 1 sleeps and the deadline is far."""
    said, took = told(faults, "interrupted, large")
    lost = "PeerLost: rank 2 failed: KeyboardInterrupt"
    assert said == [lost, lost, "KeyboardInterrupt: "]
    assert took < 10


def test_a_killed_rank_is_noticed_at_once(faults):
    said, took = told(faults, "killed, large")
    lost = "PeerLost: rank 1 failed: its connection ended without a goodbye"
    assert said == [lost, None, lost]
    assert took < 10


def test_processes_end_well_with_rings_that_nobody_closed(faults):
    assert [done.returncode for done in faults] == [0, -9, 0]
    for done in faults:
        assert "terminate called" not in done.stderr
        assert "Fatal Python error" not in done.stderr


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "input: {source: random, length: 50, q_heads: 2, kv_heads: 1, head_dim: 4}\n"
        "passes: [forward, backward]\nverify: {rows: all}\nring: {backend: reference}\n"
        "output: {path: out.safetensors}\n"
    )
    return path


def test_a_job_under_torchrun(job):
    done = torchrun(2, "-m", "ringrt", "run", job, "--set", "ring.transport=torch")
    assert done.returncode == 0, done.stderr
    assert "striped over 2 ranks" in done.stdout
    assert done.stdout.count("\nverified") == 1
    assert job.with_name("out.safetensors").exists()


def test_a_mistake_in_a_job_is_said_once(job):
    done = by_hand(2, "-m", "ringrt", "run", job, "--set", "ring.transport=mpi")
    assert [each.returncode for each in done] == [2, 2]
    assert done[1].stderr == ""
    assert done[0].stderr.strip() == (
        "ringrt: ring.transport: expected auto, torch or one that works over it, as these "
        "processes were started, got mpi"
    )


def test_transport_torch_wants_its_launcher(job):
    done = ringrt_command("run", job, "--set", "ring.transport=torch")
    assert done.returncode == 2
    assert "torchrun --nproc-per-node 4 --no-python ringrt run" in done.stderr
