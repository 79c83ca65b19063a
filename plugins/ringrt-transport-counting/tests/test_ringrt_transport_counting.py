"""The contract of a transport, check by check; and that what is counted is what the plan says, on
threads and under mpirun."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import ringrt
from ringrt.conformance import transport_checks
from ringrt.errors import ConfigError, PeerLost, TransportError
from ringrt.plan import Mask, Problem, plan
from ringrt.plan.cost import count_steps, payload_bytes, sum_bytes
from ringrt.registry import registry
from ringrt.transport import Message

LENGTH, HEADS, KV_HEADS, DIM = 29, 4, 2, 8
JOB = f"""
input: {{source: random, length: {LENGTH}, q_heads: {HEADS}, kv_heads: {KV_HEADS}, head_dim: {DIM}}}
attention: {{causal: true}}
ring: {{ranks: 3, transport: counting, partition: striped, backend: reference, travel: kv}}
passes: [forward, backward]
"""


@pytest.mark.parametrize("check", transport_checks("counting"), ids=str)
def test_the_contract(check):
    check()


def planned(partition="striped", size=3, schedule="auto", backward=False, travel="kv"):
    """The plan of JOB."""
    problem = Problem(
        1, HEADS, KV_HEADS, DIM, DIM, LENGTH, LENGTH, "float32", Mask.causal(LENGTH, LENGTH), 1.0
    )
    rule = registry().partition(partition)
    return plan(problem, rule, size, schedule, backward=backward, travel=travel)


def expected(made, rank, backward=False):
    """Bytes by peer and way, from the plan's own steps."""
    row = payload_bytes(made.problem, made.travel)
    sums = sum_bytes(made.problem, made.travel)
    total = {}
    for step in made.backward_steps(rank) if backward else made.steps(rank):
        for hop, way, each in (
            (step.send, "bytes_sent", row),
            (step.recv, "bytes_received", row),
            (step.grad_send, "bytes_sent", sums),
            (step.carry, "bytes_received", sums),
            (step.home, "bytes_received", sums),
        ):
            if hop is not None:
                peer = total.setdefault(hop.peer, {"bytes_sent": 0, "bytes_received": 0})
                peer[way] += hop.rows.count * each
    return total


def both_passes(rank, size=3):
    """Forward and backward of JOB together."""
    total = expected(planned(size=size), rank)
    for peer, ways in expected(planned(size=size, backward=True), rank, backward=True).items():
        for way, count in ways.items():
            total.setdefault(peer, {"bytes_sent": 0, "bytes_received": 0})[way] += count
    return total


def only_bytes(peers):
    """Counts as read from a file, without the numbers of messages."""
    return {
        int(peer): {way: counts[way] for way in ("bytes_sent", "bytes_received")}
        for peer, counts in peers.items()
    }


def arrays():
    rng = np.random.default_rng(0)
    shapes = [(1, LENGTH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


@pytest.mark.parametrize("partition", ["contiguous", "striped", "zigzag"])
@pytest.mark.parametrize("schedule", ["ring", "direct"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_counts_are_the_plan_s(partition, schedule, size):
    def on_rank(ring):
        ring.attention(*map(ring.cut, arrays()), causal=True)
        return ring.transport.counts(), ring.stats

    how = {"partition": partition, "schedule": schedule, "backend": "null"}
    made = planned(partition, size, schedule)
    results = ringrt.run_threads(on_rank, size, transport="counting", **how)
    for rank, (counts, stats) in enumerate(results):
        found = {
            peer: {"bytes_sent": each.bytes_sent, "bytes_received": each.bytes_received}
            for peer, each in counts.items()
        }
        assert found == expected(made, rank)
        cost = count_steps(made, rank)
        assert sum(each.bytes_sent for each in counts.values()) == cost.bytes_sent
        assert stats.bytes_sent == cost.bytes_sent


def test_counts_of_messages_and_that_they_are_copies():
    one, two = (
        registry().transport("counting").over(end) for end in registry().group("threads", 2)
    )
    data = [np.zeros(n, np.uint8) for n in (3, 5, 7)]
    ticket = one.exchange([Message(1, data[0]), Message(1, data[1])], [Message(1, data[2])], step=0)
    before = one.counts()
    two.exchange([Message(0, data[2])], [Message(0, data[0]), Message(0, data[1])], step=0).wait(5)
    ticket.wait(5)
    assert (before[1].messages_sent, before[1].bytes_sent) == (2, 8)
    assert (before[1].messages_received, before[1].bytes_received) == (1, 7)
    assert (two.counts()[0].messages_sent, two.counts()[0].bytes_received) == (1, 8)
    before[1].bytes_sent = 99
    assert one.counts()[1].bytes_sent == 8


def test_an_exchange_that_is_refused_is_not_counted():
    [one, two] = registry().group("counting", 2)
    two.abort("planted")
    with pytest.raises(PeerLost, match="planted"):
        one.poll()

    def refuse(sends, recvs, *, step, stream=None):
        raise PeerLost("planted")

    one.inner.exchange = refuse
    with pytest.raises(PeerLost):
        one.exchange([Message(1, np.zeros(3, np.uint8))], [], step=0)
    assert one.counts() == {}


def run(*command, **env):
    return subprocess.run(
        [*map(str, command)], capture_output=True, text=True, timeout=60, env=os.environ | env
    )


def mpirun(ranks):
    """The command `ringrt` on so many processes."""
    beside = shutil.which("mpirun", path=os.path.dirname(sys.executable))
    launcher = beside or shutil.which("mpirun")
    assert launcher, "the extra `mpi` of ringrt installs mpirun"
    return [launcher, "-n", ranks, sys.executable, "-P", "-m", "ringrt"]


@pytest.mark.parametrize("launch", ["threads", "mpi"])
def test_a_job_writes_the_plan_s_bytes(tmp_path, launch):
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    command = mpirun(3) if launch == "mpi" else [sys.executable, "-P", "-m", "ringrt"]
    done = run(*command, "run", job, RINGRT_COUNTING=str(tmp_path / "counts"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verified" in done.stdout
    for rank in range(3):
        record = json.loads((tmp_path / f"counts.{rank}.json").read_text())
        assert (record["rank"], record["size"]) == (rank, 3)
        assert only_bytes(record["peers"]) == both_passes(rank)


def test_the_contract_under_mpirun():
    checks = ("all-to-all", "whole-pass", "silent-peer", "abort-ends-a-wait")
    only = [word for check in checks for word in ("--only", check)]
    done = run(*mpirun(3), "check-transport", "counting", *only)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed, 0 refused, 0 failed" in done.stdout


def test_nothing_is_written_unasked(tmp_path, monkeypatch):
    monkeypatch.delenv("RINGRT_COUNTING", raising=False)
    monkeypatch.chdir(tmp_path)
    q, k, v = arrays()
    ringrt.attention(q, k, v, ranks=2, transport="counting", backend="null")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_does_not_exist_is_refused_before_anything_moves(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGRT_COUNTING", str(tmp_path / "absent" / "counts"))
    with pytest.raises(ConfigError, match="RINGRT_COUNTING: expected a path in a folder that exi"):
        registry().group("counting", 2)


def test_a_file_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "counts.0.json").mkdir()
    monkeypatch.setenv("RINGRT_COUNTING", str(tmp_path / "counts"))
    [end] = registry().group("counting", 1)
    with pytest.raises(TransportError, match=r"cannot write .*counts\.0\.json: Is a directory"):
        end.close()
