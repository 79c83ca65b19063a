"""What is wrong with a call is said in one line, by name, on every rank, before data moves."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import ringrt
from ringrt import (
    BackendUnavailable,
    ConfigError,
    HandoffError,
    RankMismatch,
    TransportError,
    Unsupported,
)
from ringrt.plan import PARTITIONS, Mask, Piece
from support import random_qkv


def call(change=None, **options):
    q, k, v = random_qkv(12, q_heads=4, kv_heads=2)
    arrays = {"q": q, "k": k, "v": v} | (change or {})
    return ringrt.attention(**arrays, **({"ranks": 2} | options))


Q, K, V = random_qkv(12, q_heads=4, kv_heads=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": Q[0]}, r"q: expected shape \[batch, rows, heads, dim\], got shape \(12, 4, 8\)"),
        ({"k": K[..., :5]}, "k: expected the head_dim of q, 8, got 5"),
        ({"v": V[:, :9]}, r"v: expected the rows and heads of k, \(12, 2\), got \(9, 2\)"),
        ({"k": K.astype("f8")}, "k: expected the dtype of q, float32, got float64"),
        ({"q": Q.astype("i4")}, "q: expected dtype float16 or bfloat16 .* got int32"),
        ({"q": Q.astype(">f4")}, "q: expected dtype"),
        ({"q": Q[:, :, :3]}, "q: expected a multiple of k's 2 heads, got 3 heads"),
        ({"k": np.concatenate([K, K])}, "k: expected the batch of q, 1, got 2"),
        ({"q": Q[..., :0]}, "q: expected at least one head and one element"),
    ],
)
def test_arrays(change, message):
    with pytest.raises(ConfigError, match=message):
        call(change)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": float("inf")}, "scale: expected a finite number, got inf"),
        ({"scale": "big"}, "scale: expected a number or None, got 'big'"),
        ({"softcap": "2"}, "softcap: expected a number or None, got '2'"),
        ({"scale": True}, "scale: expected a number or None, got True"),
        ({"partition": ["a"]}, "partition: expected contiguous"),
        ({"timeout": True}, "timeout: expected a number of seconds > 0, got True"),
        ({"scale": float("nan")}, "scale: expected a finite number, got nan"),
        ({"softcap": float("nan")}, "softcap: expected a finite number, got nan"),
        ({"length": 12.0}, "length: expected a whole number, or"),
        ({"timeout": "5"}, "timeout: expected a number of seconds > 0, got '5'"),
        ({"sink": np.zeros(3)}, r"sink: expected shape \[q_heads\], \(4,\), got \(3,\)"),
        ({"documents": [0, 13]}, "documents: expected ranges within the 12 query rows"),
        ({"mask": 1}, "mask: expected a ringrt.Mask, got int"),
        ({"softcap": -1.0}, "softcap: expected a finite number > 0"),
        ({"length": 13}, r"length: expected \(13, 13\) by the argument, got \(12, 12\)"),
        ({"partition": "diagonal"}, "partition: expected contiguous or striped or zigzag"),
        ({"schedule": "star"}, "schedule: expected auto or ring or direct, got 'star'"),
        (
            {"backend": "abacus"},
            "backend: expected auto or cpu or cupy or null or numba or reference",
        ),
        ({"transport": "pigeon"}, "transport: expected mpi or nccl or .*threads"),
        ({"transport": "mpi"}, "transport: expected one whose ranks are threads, got 'mpi'"),
        ({"ranks": 0}, "ranks: expected a whole number of at least 1, got 0"),
        ({"timeout": 0}, "timeout: expected a number of seconds > 0, got 0"),
    ],
)
def test_options(options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        call(**options)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", ["dropout_p", "alibi_slopes", "attn_bias", "is_causal"])
def test_what_is_not_implemented_is_refused_by_name(name):
    with pytest.raises(Unsupported, match=f"{name}: not implemented in Ring.attention"):
        call(**{name: 1})


def test_numpy_integers_are_whole_numbers():
    call(ranks=np.int64(2), length=np.int64(12), prefix=np.int32(1), timeout=1e12)


def test_a_masked_array_is_refused_since_its_mask_would_be_ignored():
    with pytest.raises(HandoffError, match="q: a masked array"):
        call({"q": np.ma.masked_array(Q, Q > 0)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"travel": "zz"}, "travel: expected auto or kv or q, got 'zz'"),
        ({"schedule": "zz"}, "schedule: expected auto or ring or direct, got 'zz'"),
        ({"threads": 0}, "threads: expected a whole number of at least 1, or None, got 0"),
        ({"threads": "x"}, "threads: expected a whole number"),
    ],
)
def test_options_of_a_ring_are_checked_when_it_is_made(options, message):
    with pytest.raises(ConfigError, match=message):
        ringrt.run_threads(lambda ring: None, 2, **options)


def test_a_closed_ring_says_so():
    def on_rank(ring):
        ring.close()
        with pytest.raises(TransportError, match="the ring of rank 0 is closed"):
            ring.shard(Q)

    ringrt.run_threads(on_rank, 1)


BACKWARD = {"dout": Q, "out": Q, "lse": np.zeros((1, 4, 12), np.float32)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dout": Q[:, :3]}, r"dout: expected shape \(1, 12, 4, 8\), got shape \(1, 3, 4, 8\)"),
        ({"out": Q.astype("f8")}, "out: expected the dtype of q, float32, got float64"),
        ({"lse": BACKWARD["lse"].transpose(0, 2, 1)}, r"lse: expected shape \(1, 4, 12\)"),
        ({"lse": BACKWARD["lse"].astype("f8")}, "lse: expected dtype float32, got float64"),
    ],
)
def test_arrays_of_the_backward_pass(change, message):
    given = BACKWARD | change
    with pytest.raises(ConfigError, match=message):
        ringrt.attention_backward(given["dout"], Q, K, V, given["out"], given["lse"], ranks=2)


def test_options_of_the_backward_pass_are_refused_by_name():
    with pytest.raises(Unsupported, match="dropout_p: not implemented in Ring.attention_backward"):
        ringrt.attention_backward(Q, Q, K, V, Q, BACKWARD["lse"], ranks=2, dropout_p=0.5)


def test_a_backend_without_backward_says_so(monkeypatch):
    from ringrt_backends.reference import ReferenceBackend

    monkeypatch.setattr(ReferenceBackend, "backward", False)
    with pytest.raises(Unsupported, match="backend reference: backward is not implemented"):
        ringrt.attention_backward(Q, Q, K, V, Q, BACKWARD["lse"], ranks=2, backend="reference")


def test_auto_passes_over_a_backend_that_cannot_be_loaded(monkeypatch):
    """Numba is there, but refuses to be imported beside this NumPy, say."""
    import ringrt_backends.cpu.backend

    def fail(threads, machine):
        raise ImportError("Numba needs NumPy 2.2 or less")

    monkeypatch.setattr(ringrt_backends.cpu.backend, "CpuBackend", fail)
    with pytest.warns(RuntimeWarning, match="Numba needs NumPy 2.2 or less; trying the next"):
        assert call()[0].shape == (1, 12, 4, 8)
    with pytest.raises(BackendUnavailable, match="backend cpu: ImportError: Numba needs NumPy"):
        call(backend="cpu")


@pytest.mark.parametrize("x", [[[1.0]], None, memoryview(b"12")])
def test_other_kinds_of_array(x):
    with pytest.raises(
        HandoffError, match="q: a builtins.* cannot be handed over: it has no __dlpack__"
    ):
        call({"q": x})


def outcomes(fn, ranks, **options):
    """What each rank raised."""
    raised = {}

    def on_rank(ring):
        try:
            fn(ring)
        except Exception as error:
            raised[ring.rank] = error
        else:
            raised[ring.rank] = None

    ringrt.run_threads(on_rank, ranks, timeout=10, **options)
    return [raised[rank] for rank in range(ranks)]


def shards(ring, length=12, **changes):
    q, k, v = random_qkv(length, q_heads=4, kv_heads=2, **changes)
    return [ring.shard(x) for x in (q, k, v)]


@pytest.mark.parametrize(
    ("odd", "field"),
    [
        (lambda ring, a: ring.attention(*a, causal=ring.rank == 1), "causal"),
        (lambda ring, a: ring.attention(*a, scale=float(ring.rank == 1)), "scale"),
        (lambda ring, a: ring.attention(*a, softcap=2.0 if ring.rank == 1 else None), "softcap"),
        (lambda ring, a: ring.attention(*a, window=(int(ring.rank == 1), 2)), "window"),
        (lambda ring, a: ring.attention(*a, documents=[0, 4 + (ring.rank == 1)]), "documents"),
        (lambda ring, a: ring.attention(*a, prefix=int(ring.rank == 1)), "prefix"),
        (lambda ring, a: ring.attention(*a, sink=np.full(4, float(ring.rank == 1))), "sink"),
        (
            lambda ring, a: ring.attention(*a, mask=Mask([Piece(0, 12, 0, 3 + (ring.rank == 1))])),
            "mask",
        ),
        (lambda ring, a: ring.attention(*a, length=12 if ring.rank == 1 else None), "length"),
        (
            lambda ring, a: ring.attention(*(x.astype("f8") if ring.rank == 1 else x for x in a)),
            "dtype",
        ),
        (
            lambda ring, a: ring.attention(a[0][:, :, : 2 * (1 + (ring.rank != 1))], *a[1:]),
            "q_heads",
        ),
        (lambda ring, a: ring.attention(*a) if ring.rank != 1 else ring.shard(a[0]), "operation"),
        (lambda ring, a: ring.shard(a[0], axis=int(ring.rank == 1)), "axis"),
        (lambda ring, a: ring.unshard(a[0], axis=1 + 2 * (ring.rank == 1)), "axis"),
        (lambda ring, a: ring.unshard(a[0][..., : 8 - (ring.rank == 1)]), "shape without the axis"),
    ],
)
def test_disagreement_is_a_mismatch_on_every_rank_naming_field_and_ranks(odd, field):
    for error in outcomes(lambda ring: odd(ring, shards(ring)), 3):
        assert isinstance(error, RankMismatch), error
        assert error.field == field
        assert "on rank 1" in str(error)
        assert "ranks 0, 2" in str(error)


@pytest.mark.parametrize(
    ("field", "value"),
    [("partition", PARTITIONS["zigzag"]), ("schedule", "direct"), ("travel", "q")],
)
def test_rings_of_different_make_do_not_work_together(field, value):
    q, k, v = random_qkv(12)

    def on_rank(ring):
        if ring.rank == 2:
            caller = ring._caller
            caller.options = dataclasses.replace(caller.options, **{field: value})
        ring.attention(q[:, :4], k[:, :4], v[:, :4])

    for error in outcomes(on_rank, 3):
        assert isinstance(error, RankMismatch)
        assert error.field == field


def test_rows_that_are_not_the_partitions_share():
    def on_rank(ring):
        q, k, v = random_qkv(3 + ring.rank)
        ring.attention(q, k, v)

    for error in outcomes(on_rank, 3):
        assert isinstance(error, RankMismatch)
        assert "q rows (striped shards of 12)" in str(error)
        assert "3, its share is 4 on rank 0" in str(error)


def test_an_argument_error_on_one_rank_is_raised_there_and_named_on_the_others():
    def on_rank(ring):
        q, k, v = shards(ring)
        ring.attention(q[0] if ring.rank == 1 else q, k, v)

    first, second, third = outcomes(on_rank, 3)
    assert type(second) is ConfigError
    for error in (first, third):
        assert isinstance(error, RankMismatch)
        assert "q: expected shape [batch, rows, heads, dim]" in str(error)
        assert "on rank 1" in str(error)


def test_the_ring_still_works_after_a_refusal():
    q, k, v = random_qkv(12)

    def on_rank(ring):
        mine = [ring.shard(x) for x in (q, k, v)]
        with pytest.raises((Unsupported, RankMismatch)):
            ring.attention(*mine, **({"dropout_p": 0.1} if ring.rank == 0 else {}))
        with pytest.raises(RankMismatch):
            ring.attention(*mine, causal=ring.rank == 0)
        return ring.unshard(ring.attention(*mine)[0])

    results = ringrt.run_threads(on_rank, 3, timeout=10)
    np.testing.assert_array_equal(results[0], results[2])


def test_a_backend_that_cannot_is_refused_on_every_rank(monkeypatch):
    from ringrt_backends.reference import ReferenceBackend

    monkeypatch.setattr(
        ReferenceBackend, "supports", lambda self, problem: "softcap is not implemented"
    )
    with pytest.raises(Unsupported, match="backend reference: softcap is not implemented"):
        call(backend="reference", softcap=1.0)
    # auto passes over it.
    assert call(backend="auto", softcap=1.0)[0].shape == (1, 12, 4, 8)
