"""Known failures of systems like ours, with the right value. Where a case is about merging
(N), the transports (C) or run-time refusals, its test lies with that part:

    N1 N2 N4      test_softmax_state.py           C1 C2  test_threads.py, test_mpi.py
    N3            test_softmax_state.py           C3     test_mpi.py, test_cli.py
    L7            test_ring.py, test_mpi.py       C4     test_refusals.py, test_mpi.py
    M3            test_refusals.py                C5     test_ring.py
"""

from __future__ import annotations

import numpy as np
import pytest
from cases import CASES

import oracle
import ringrt
from support import BACKENDS, PARTITIONS, PROGRAMS, assert_close, mpirun, random_qkv


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_on_threads(case, backend, partition):
    q, k, v = random_qkv(**case.shapes)

    def on_rank(ring):
        shards = [ring.shard(x) for x in (q, k, v)]
        out, lse = ring.attention(*shards, **case.options)
        rows, heads = shards[0].shape[1:3]
        assert out.shape == (1, rows, heads, v.shape[3]), "what was sharded stays sharded"
        return ring.unshard(out), ring.unshard(lse, axis=2)

    results = ringrt.run_threads(on_rank, case.ranks, partition=partition, backend=backend)
    expected = oracle.attention(q, k, v, **case.options)
    for result in results:
        assert_close(result, expected)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", sorted({case.ranks for case in CASES}))
def test_on_mpi(ranks):
    done = mpirun(ranks, PROGRAMS / "cases.py", timeout=100)
    assert done.returncode == 0, done.stderr
    assert f"{sum(case.ranks == ranks for case in CASES)} cases are right" in done.stdout


@pytest.mark.parametrize("backend", [*BACKENDS])
def test_m2_causal_is_never_dropped(backend):
    q, k, v = random_qkv(16)
    causal, full = (ringrt.attention(q, k, v, ranks=2, backend=backend, causal=c) for c in (1, 0))
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
