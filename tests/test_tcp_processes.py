"""The tcp transport between processes: a job by the command, and a rank that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from tcp_support import free_port

from support import ROOT

pytestmark = pytest.mark.timeout(120)

JOB = """
input: {source: random, length: 301, q_heads: 4, kv_heads: 2, head_dim: 8}
attention: {causal: true}
ring: {backend: reference, timeout: 20}
passes: [forward, backward]
verify: {rows: all}
output: {path: out.safetensors}
"""

#: Rank 1 of three is killed, or stops, in its first step, when the others need what it holds.
PROGRAM = """
import os, signal, sys
sys.path.insert(0, "tests")
import ringrt
from ringrt.registry import registry
from support import random_qkv

def on_step(step):
    if ring.rank == 1:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))

ring = ringrt.Ring.join(registry().connect("tcp"), timeout=float(sys.argv[2]), backend="reference")
ring.on_step = on_step
q, k, v = (ring.cut(x) for x in random_qkv(1500, head_dim=128))
try:
    for _ in range(2):
        ring.attention(q, k, v)
except ringrt.RingrtError as error:
    print(f"{type(error).__name__}: {error}")
"""


#: Rank 0 of two ends early; rank 1 looks, and then waits for it.
LEAVING = """
import time
import ringrt
from ringrt.registry import registry

ring = ringrt.Ring.join(registry().connect("tcp"))
ring.transport.barrier(20)
if ring.rank == 1:
    time.sleep(1)
    ring.transport.poll()
    print("still fine")
    try:
        ring.transport.barrier(60)
    except ringrt.RingrtError as error:
        print(f"{type(error).__name__}: {error}")
"""


def ranks(size, *command, cwd=ROOT, **environment):
    """Start Python arguments in `size` processes that find one another by the environment."""
    address = f"127.0.0.1:{free_port()}"
    return [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=os.environ
            | {"RINGRT_RANK": str(rank), "RINGRT_SIZE": str(size), "RINGRT_RENDEZVOUS": address}
            | environment,
        )
        for rank in range(size)
    ]


def finish(processes, timeout=60):
    """What each of them printed; all are gone afterwards."""
    try:
        return [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()


def test_a_job_runs_one_rank_a_process(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    processes = ranks(3, "-m", "ringrt", "run", "job.yaml", cwd=tmp_path)
    said = finish(processes)
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert "3 ranks" in said[0][0]
    assert "reference" in said[0][0]
    assert [out + err for out, err in said[1:]] == ["", ""]
    assert (tmp_path / "out.safetensors").stat().st_size > 0


def test_a_mistake_that_all_ranks_make_is_told_once(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    processes = ranks(2, "-m", "ringrt", "run", "job.yaml", "--ranks", "3", cwd=tmp_path)
    said = finish(processes)
    assert [process.returncode for process in processes] == [2, 2]
    assert said[0][1] == "ringrt: --ranks: expected the 2 processes started, got 3\n"
    assert said[1][1] == ""


def test_a_wrong_environment_is_one_line(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    (process,) = ranks(1, "-m", "ringrt", "run", "job.yaml", cwd=tmp_path, RINGRT_RANK="5")
    ((out, err),) = finish([process])
    assert process.returncode == 2
    assert (out, err) == ("", "ringrt: RINGRT_RANK: expected a whole number from 0 to 0, got '5'\n")


def test_a_killed_rank_is_told_at_once():
    begin = time.monotonic()
    said = finish(ranks(3, "-c", PROGRAM, "SIGKILL", 60))
    assert time.monotonic() - begin < 40, "not before the deadline"
    for rank in (0, 2):
        assert said[rank][0].startswith("PeerLost: rank 1 failed: its connection "), said


#: Rank 0 of two forks a process that lives on, and is killed.
FORKING = """
import os, signal, time
import ringrt

with ringrt.Ring.from_environment(timeout=60) as ring:
    ring.transport.barrier(20)
    if ring.rank == 0:
        if os.fork() == 0:
            # Nobody waits for what it might still say.
            os.close(1), os.close(2)
            time.sleep(30)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        ring.transport.barrier(50)
    except ringrt.RingrtError as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_a_killed_rank_is_told_at_once_though_a_process_that_it_forked_lives_on():
    begin = time.monotonic()
    said = finish(ranks(2, "-c", FORKING))
    assert time.monotonic() - begin < 25, "not before the deadline"
    assert said[1][0].startswith("PeerLost: rank 0 failed: its connection "), said


def test_a_program_that_ends_without_closing_its_ring_has_not_failed():
    begin = time.monotonic()
    said = finish(ranks(2, "-c", LEAVING))
    assert time.monotonic() - begin < 40, "not before the deadline"
    assert said[0] == ("", "")
    assert said[1] == ("still fine\nPeerLost: rank 1 waits for rank 0, gone from the ring\n", "")


def test_a_rank_that_stops_is_named_within_the_deadline():
    processes = ranks(3, "-c", PROGRAM, "SIGSTOP", 4)
    said = finish([processes[0], processes[2]])
    processes[1].send_signal(signal.SIGKILL)
    processes[1].communicate(timeout=20)
    told = said[0][0] + said[1][0]
    assert "rank 1" in told
    for out, err in said:
        assert out.startswith(("ExchangeTimeout: rank ", "PeerLost: rank ")), err
    assert "ExchangeTimeout: rank " in told
