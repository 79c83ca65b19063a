"""Known failures of systems like ours, with the right value. Where a case is about merging
(N), the transports (C) or run-time refusals, its test lies with that part:

    N1 to N4      test_softmax_state.py           C1 C2  test_threads.py, test_mpi.py
    N5 N7 N8 N9   test_gradients.py               C3     test_mpi.py, test_cli.py
    L7            test_ring.py, test_mpi.py       C4     test_refusals.py, test_mpi.py
    M1 (by count) test_masks.py                   C5     test_ring.py
    M3            test_refusals.py
"""

from __future__ import annotations

import numpy as np
import pytest
from cases import CASES, check, expected

import oracle
import ringrt
from support import BACKENDS, PARTITIONS, PROGRAMS, assert_close, mpirun, random_qkv


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_on_threads(case, backend, partition):
    answers = expected(case)
    for schedule, travel in (("ring", "kv"), ("ring", "q"), ("direct", "kv"), ("direct", "q")):
        how = {"partition": partition, "backend": backend, "schedule": schedule}
        ringrt.run_threads(
            lambda ring: check(ring, case, answers), case.ranks, travel=travel, timeout=30, **how
        )


@pytest.mark.parametrize("partition", PARTITIONS)
def test_l1_a_length_that_is_no_multiple_of_anything(partition):
    """2999 tokens over 4 ranks, forward and backward: equal to one rank."""
    q, k, v = random_qkv(2999, q_heads=1, head_dim=4)
    dout = random_qkv(2999, q_heads=1, head_dim=4, seed=5)[0]
    results = []
    for ranks in (1, 4):
        out, lse = ringrt.attention(q, k, v, ranks=ranks, partition=partition, causal=True)
        gradients = ringrt.attention_backward(
            dout, q, k, v, out, lse, ranks=ranks, partition=partition, causal=True
        )
        results.append((out, lse, *gradients))
    for alone, shared in zip(*results, strict=True):
        np.testing.assert_allclose(shared, alone, rtol=0, atol=2e-6 * max(1, abs(alone).max()))


def test_l5_padding_gives_the_same_bits_on_a_repeat():
    q, k, v = random_qkv(704, head_dim=4)
    runs = [ringrt.attention(q, k, v, ranks=4, causal=True, documents=[0, 698]) for _ in range(2)]
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not runs[0][0][:, 698:].any()


@pytest.mark.parametrize("length", [512, 1024, 2048])
def test_m8_what_is_sharded_does_not_change_with_size(length):
    q, k, v = random_qkv(length, q_heads=2, kv_heads=2, head_dim=4)
    out, lse = ringrt.attention(q, k, v, ranks=2)
    assert (out.shape, lse.shape) == ((1, length, 2, 4), (1, 2, length))
    rows = [0, 1, length // 2, length - 1]
    expected_rows = oracle.attention(q[:, rows], k, v)
    assert_close((out[:, rows], lse[:, :, rows]), expected_rows)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", sorted({case.ranks for case in CASES}))
def test_on_mpi(ranks):
    done = mpirun(ranks, PROGRAMS / "cases.py", timeout=100)
    assert done.returncode == 0, done.stderr
    assert f"{sum(case.ranks == ranks for case in CASES)} cases are right" in done.stdout


@pytest.mark.parametrize("backend", [*BACKENDS])
def test_m2_causal_is_never_dropped(backend):
    q, k, v = random_qkv(16)
    causal, full = (
        ringrt.attention(q, k, v, ranks=2, backend=backend, causal=c) for c in (True, False)
    )
    assert not np.allclose(causal[0], full[0], atol=0.1)
    np.testing.assert_allclose(causal[0][:, -1], full[0][:, -1], atol=1e-6)


def test_m4_query_heads_read_their_own_kv_head():
    """Values are the number of their KV head, so out is too: heads 0, 1 read 0 and 2, 3 read 1."""
    q, k, v = random_qkv(20, q_heads=4, kv_heads=2)
    v[:] = np.arange(2)[None, None, :, None]
    out, _ = ringrt.attention(q, k, v, ranks=2)
    np.testing.assert_allclose(out, np.broadcast_to([[[[0], [0], [1], [1]]]], out.shape), rtol=1e-6)


def test_m5_kv_travels_unrepeated():
    """8 query heads on 2 KV heads, 2 ranks of 10 tokens: a rank sends 10 rows of 2 heads."""
    q, k, v = random_qkv(20, q_heads=8, kv_heads=2, head_dim=8)

    def sent(ring):
        ring.attention(*(ring.shard(x) for x in (q, k, v)))
        return ring.stats.bytes_sent

    assert ringrt.run_threads(sent, 2) == [10 * 2 * (8 + 8) * 4] * 2


def test_d1_arrays_that_are_not_contiguous():
    q, k, v = random_qkv(40, q_heads=4, kv_heads=2)
    expected = oracle.attention(q, k, v, causal=True)
    transposed = [
        np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in (q, k, v)
    ]
    padded = [np.pad(x, ((0, 0), (3, 2), (1, 1), (0, 5)))[:, 3:-2, 1:-1, :-5] for x in (q, k, v)]
    for arrays in (transposed, padded):
        assert not any(x.flags.c_contiguous for x in arrays)
        for partition in PARTITIONS:
            result = ringrt.attention(*arrays, ranks=3, partition=partition, causal=True)
            assert_close(result, expected)
