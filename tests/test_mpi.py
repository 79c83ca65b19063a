"""The mpi transport: right at every size, and never a hang when a rank fails."""

from __future__ import annotations

import re
import time

import pytest

from support import PROGRAMS, mpirun

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_ring_equals_the_oracle(ranks):
    done = mpirun(ranks, PROGRAMS / "grid.py", timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{ranks} ranks are right"


def test_two_rings_in_a_world_of_four():
    done = mpirun(4, PROGRAMS / "world_of_four.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "both are right"


def fault(how, timeout=4.0):
    begin = time.monotonic()
    done = mpirun(3, PROGRAMS / "fault.py", how, timeout, timeout=40)
    assert time.monotonic() - begin < 25, "not within the deadline"
    assert done.returncode != 0
    return done.stderr


def test_a_killed_rank_ends_the_job():
    fault("killed")


def test_a_silent_rank_is_named_by_the_others():
    said = fault("silent")
    assert re.search(
        r"ExchangeTimeout: rank [02] waited 4 s in ring step 1 to (send|recv) 256000 bytes "
        r"(to|from) rank 1",
        said,
    )
    for rank in (0, 2):
        other = 2 - rank
        assert f"ExchangeTimeout: rank {rank} waited" in said or (
            f"PeerLost: rank {other} failed" in said
        )


def test_a_rank_that_never_posts_is_named_by_the_others():
    said = fault("never posts")
    assert "waited 4 s for rank 1 to join a control round" in said


def test_a_rank_that_raises_tells_the_others_why():
    said = fault("raises", timeout=20)
    assert said.count("PeerLost: rank 1 failed: planted") >= 1
    assert "LookupError: planted" in said


def test_a_rank_that_leaves_is_not_waited_for():
    said = fault("leaves", timeout=20)
    assert "waits for rank 1, gone from the ring" in said


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("mismatch", "RankMismatch: ranks disagree on causal: False on ranks 0, 2; True on rank 1"),
        ("argument", "RankMismatch: ranks disagree on whether the call is right"),
    ],
)
def test_a_mismatch_is_named_on_every_rank(how, message):
    said = fault(how, timeout=20)
    assert said.count(message) == (3 if how == "mismatch" else 2), said
    if how == "argument":
        assert "ConfigError: q: expected shape" in said


def test_a_rank_that_leaves_late_is_no_failure():
    done = mpirun(3, PROGRAMS / "late.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "rank 0 saved"


def test_memory_of_an_unfinished_exchange_stays(tmp_path):
    """With MPI's single-copy path off, the sender writes into the receiver's buffers late."""
    done = mpirun(3, PROGRAMS / "unfinished.py", env={"MPIR_CVAR_CH4_CMA_ENABLE": "0"})
    assert "Segmentation fault" not in done.stderr
    assert "Fatal Python error" not in done.stderr
    assert "ExchangeTimeout on rank" in done.stderr
    assert done.returncode != 0
