"""Each backend on band tiles, without a ring: dtypes, shapes, masks, NaN, state."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import oracle
from ringrt.backend import BackendContext
from ringrt.plan import Mask, Piece, Problem, Run
from ringrt.plan.tiles import TileTable, lower
from ringrt.registry import registry
from support import BACKENDS, assert_close, numpy_dtype, random_qkv

DTYPES = ("float16", "bfloat16", "float32", "float64")


@pytest.fixture(params=[*BACKENDS, "cpu-3-threads"])
def backend(request):
    name, threads = (request.param, 1) if request.param in BACKENDS else ("cpu", 3)
    made = registry().backend(name).load(BackendContext(threads))
    yield made
    made.close()


def run(backend, q, k, v, mask, shards=None, **options):
    """A pass over key shards (runs of k's rows), absorbed one after the other."""
    problem = Problem(
        q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.shape[1], k.shape[1],
        q.dtype.name, mask, options.pop("scale", q.shape[3] ** -0.5), **options,
    )  # fmt: skip
    assert backend.supports(problem) is None
    backend.prepare(problem)
    state = backend.begin(q, problem)
    for shard in shards or [Run(0, 1, k.shape[1])]:
        cut = slice(shard.start, shard.start + shard.stride * shard.count, shard.stride)
        tiles = lower(mask, (Run(0, 1, q.shape[1]),), (shard,))
        backend.accumulate(state, k[:, cut], v[:, cut], tiles)
    return backend.finish(state)


def seen_by(mask, q, k):
    seen = np.zeros((q.shape[1], k.shape[1]), dtype=bool)
    for piece in mask.pieces():
        for i in range(piece.q_start, piece.q_stop):
            for j in range(piece.k_start, piece.k_stop):
                low = piece.min_distance is None or piece.min_distance <= i - j
                high = piece.max_distance is None or i - j <= piece.max_distance
                seen[i, j] |= low and high
    return seen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_dtypes(backend, dtype, causal):
    q, k, v = random_qkv(67, batch=2, q_heads=4, kv_heads=2, head_dim=16, dtype=dtype)
    mask = (Mask.causal if causal else Mask.full)(67, 67)
    out, lse = run(backend, q, k, v, mask)
    assert out.dtype == numpy_dtype(dtype)
    assert lse.dtype == np.dtype("float64" if dtype == "float64" else "float32")
    assert_close((out, lse), oracle.attention(q, k, v, causal=causal), dtype)


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "value_dim"),
    [(1, 1, 1, 1), (3, 1, 5, 7), (4, 4, 33, 1), (6, 2, 3, 40), (8, 2, 192, 128)],
)
def test_heads_and_dims(backend, q_heads, kv_heads, head_dim, value_dim):
    q, k, v = random_qkv(
        41, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim
    )
    result = run(backend, q, k, v, Mask.causal(41, 41))
    assert_close(result, oracle.attention(q, k, v, causal=True))


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (1, 1), (129, 33), (33, 600), (300, 513)])
def test_lengths_that_fit_no_block(backend, lengths):
    q, k, v = random_qkv(lengths[0], kv_length=lengths[1])
    for mask, causal in ((Mask.full, False), (Mask.causal, True)):
        result = run(backend, q, k, v, mask(*lengths))
        assert_close(result, oracle.attention(q, k, v, causal=causal))


@pytest.mark.parametrize("scale", [0.0, -0.7, 2.5])
@pytest.mark.parametrize("softcap", [None, 0.5, 30.0])
def test_scale_and_softcap(backend, scale, softcap):
    q, k, v = random_qkv(50)
    result = run(backend, q, k, v, Mask.causal(50, 50), scale=scale, softcap=softcap)
    expected = oracle.attention(q, k, v, causal=True, scale=scale, softcap=softcap)
    assert_close(result, expected, scale=2)


@settings(max_examples=40)
@given(st.data())
def test_any_band_in_any_shards(data):
    lengths = data.draw(st.integers(1, 80)), data.draw(st.integers(1, 80))
    bound = st.none() | st.integers(-90, 90)
    cut = data.draw(st.integers(0, lengths[0]))
    mask = Mask(
        [
            Piece(0, cut, 0, lengths[1], data.draw(bound), data.draw(bound)),
            Piece(cut, lengths[0], 0, lengths[1], data.draw(bound), data.draw(bound)),
        ]
    )
    q, k, v = random_qkv(lengths[0], kv_length=lengths[1], dtype="float64")
    edge = data.draw(st.integers(0, lengths[1]))
    shards = [Run(edge, 1, lengths[1] - edge), Run(0, 1, edge)]
    expected = oracle.attention(q, k, v, seen_by(mask, q, k))
    for name in BACKENDS:
        backend = registry().backend(name).load(BackendContext(1))
        assert_close(run(backend, q, k, v, mask, shards), expected, "float64")


def test_what_a_row_does_not_see_never_reaches_it(backend):
    """NaN and inf in keys and values that causal rows do not see, also within a tile that
    they see in part; a key that is seen does reach its rows."""
    q, k, v = random_qkv(70, dtype="float32")
    k[:, 40:, :, 2], v[:, 40:, :, 3] = np.nan, np.inf
    v[:, 50:] = np.nan
    out, lse = run(backend, q, k, v, Mask.causal(70, 70))
    clean = oracle.attention(q[:, :40], k[:, :40], v[:, :40], causal=True)
    assert_close((out[:, :40], lse[:, :, :40]), clean)
    assert np.isnan(out[:, 40:]).all()
    assert np.isnan(lse[:, :, 40:]).all()


def test_a_value_of_nan_reaches_only_its_element(backend):
    q, k, v = random_qkv(20)
    v[0, 7, 0, 3] = np.nan
    out, lse = run(backend, q, k, v, Mask.causal(20, 20))
    assert np.isnan(out[0, 7:, :, 3]).all()
    assert np.isfinite(out[0, :7]).all()
    assert np.isfinite(np.delete(out, 3, axis=3)).all()
    assert np.isfinite(lse).all()


def test_an_infinite_score_is_nan_and_minus_infinity_is_nothing(backend):
    q, k, v = random_qkv(6, q_heads=1)
    q[0, :, 0, :] = np.abs(q[0, :, 0, :])
    k[0, 3] = np.inf
    out, _ = run(backend, q, k, v, Mask.causal(6, 6))
    assert np.isnan(out[0, 3:]).all()
    assert np.isfinite(out[0, :3]).all()
    k[0, 3] = -np.inf
    k[0, 0] = -np.inf
    out, lse = run(backend, q, k, v, Mask.causal(6, 6))
    expected = oracle.attention(np.where(np.isfinite(q), q, 0), k, v, causal=True)
    assert out[0, 0].tolist() == [[0.0] * 8]
    assert lse[0, 0, 0] == -np.inf
    assert_close((out[:, 1:], lse[:, :, 1:]), (expected[0][:, 1:], expected[1][:, :, 1:]))


def test_inputs_of_any_layout_are_read_and_never_written(backend):
    q, k, v = random_qkv(48, batch=2, q_heads=4, kv_heads=2, head_dim=8)
    expected = oracle.attention(q, k, v, causal=True)
    transposed = tuple(np.ascontiguousarray(x.transpose(3, 0, 2, 1)).transpose(1, 3, 2, 0)
                       for x in (q, k, v))  # fmt: skip
    reversed_twice = tuple(np.ascontiguousarray(x[:, ::-1])[:, ::-1] for x in (q, k, v))
    for arrays in (transposed, reversed_twice):
        for x in arrays:
            x.flags.writeable = False
        assert_close(run(backend, *arrays, Mask.causal(48, 48)), expected)


def test_no_tiles_change_nothing(backend):
    q, k, v = random_qkv(9)
    out, lse = run(backend, q, k, v, Mask([]))
    assert not out.any()
    assert np.isneginf(lse).all()


def test_two_passes_give_the_same_bits(backend):
    q, k, v = random_qkv(200, q_heads=6, kv_heads=3)
    first, second = (run(backend, q, k, v, Mask.causal(200, 200)) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_null_computes_nothing():
    q, k, v = random_qkv(5)
    null = registry().backend("null").load(BackendContext(1))
    out, lse = run(null, q, k, v, Mask.full(5, 5))
    assert out.shape == q.shape
    assert not out.any()
    assert np.isneginf(lse).all()


def test_tiles_may_overlap_in_rows(backend):
    """Three pieces over the same rows, as sinks beside a window will be."""
    q, k, v = random_qkv(150)
    mask = Mask([Piece(0, 150, 0, 3), Piece(0, 150, 3, 80, 5, 60), Piece(0, 150, 80, 150, 0, 9)])
    tiles = lower(mask, (Run(0, 1, 150),), (Run(0, 1, 150),))
    assert isinstance(tiles, TileTable)
    assert len(tiles) == 3
    assert_close(run(backend, q, k, v, mask), oracle.attention(q, k, v, seen_by(mask, q, k)))
