"""Each backend on band tiles, without a ring: dtypes, shapes, masks, NaN, state."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest
from cpu_support import MACHINES, cpu
from hypothesis import given, settings, strategies as st
from numba.core.dispatcher import Dispatcher

import oracle
from ringrt.backend import BackendContext
from ringrt.errors import KernelError
from ringrt.plan import Mask, Piece, Problem, Run
from ringrt.plan.tiles import TileTable, lower
from ringrt.registry import registry
from ringrt_backends.cpu.backend import CpuBackend
from support import BACKENDS, assert_close, numpy_dtype, random_qkv

DTYPES = ("float16", "bfloat16", "float32", "float64")


@pytest.fixture(params=[*BACKENDS, "cpu-3-threads", "cpu-plain"])
def backend(request):
    if request.param == "cpu-plain":
        made = CpuBackend(2, None)
    else:
        name, threads = (request.param, 1) if request.param in BACKENDS else ("cpu", 3)
        made = registry().backend(name).load(BackendContext(threads))
    yield made
    made.close()


def run(backend, q, k, v, mask, shards=None, **options):
    """A pass over key shards (runs of k's rows), absorbed one after the other."""
    sink = options.pop("sink", None)
    options["sink"] = sink is not None
    problem = Problem(
        q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.shape[1], k.shape[1],
        q.dtype.name, mask, options.pop("scale", q.shape[3] ** -0.5), **options,
    )  # fmt: skip
    assert backend.supports(problem) is None
    backend.prepare(problem)
    state = backend.begin(q, problem, sink)
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


@pytest.mark.parametrize(
    ("q", "k", "v", "scale", "out"),
    [
        (1.0, 1.0, 3e38, 1.0, 3e38),
        (1e20, -1e19, 2.0, 1e-39, 2.0),
        (1e20, 1e19, 2.0, 1e-39, 2.0),
        (2e19, -2e20, 2.0, 1.0, 2.0),
    ],
)
def test_products_beyond_float32_are_right_where_the_result_is_finite(backend, q, k, v, scale, out):
    arrays = (np.full((1, 8, 1, 8), x, np.float32) for x in (q, k, v))
    result, lse = run(backend, *arrays, Mask.full(8, 8), scale=scale)
    np.testing.assert_allclose(result, out, rtol=1e-6)
    score = 8 * float(np.float32(q)) * float(np.float32(k)) * scale
    if abs(score) < 3e38:
        np.testing.assert_allclose(lse, score + np.log(8), rtol=1e-6)


def test_long_sums_keep_their_bits(backend):
    """A hundred thousand keys, whole and in many visits: rounding must not pile up."""
    q, k, v = random_qkv(2, kv_length=100_000, q_heads=1, head_dim=4)
    v += 3
    expected = oracle.attention(q, k, v)
    for shard in (100_000, 5_000):
        shards = [Run(start, 1, shard) for start in range(0, 100_000, shard)]
        out, lse = run(backend, q, k, v, Mask.full(2, 100_000), shards)
        np.testing.assert_allclose(out, expected[0], rtol=0, atol=5e-7)
        np.testing.assert_allclose(lse, expected[1], rtol=0, atol=1.5e-6)


def test_sinks_enter_once_however_many_shards(backend):
    q, k, v = random_qkv(40, q_heads=4, kv_heads=2)
    sink = np.array([0.5, -2.0, 30.0, -np.inf])
    shards = [Run(start, 1, 10) for start in range(0, 40, 10)]
    result = run(backend, q, k, v, Mask.causal(40, 40), shards, sink=sink)
    assert_close(result, oracle.attention(q, k, v, causal=True, sink=sink), scale=10)


def test_a_row_without_keys_has_the_sink_as_its_lse(backend):
    q, k, v = random_qkv(3, q_heads=2)
    out, lse = run(backend, q, k, v, Mask([]), sink=np.array([1.25, -np.inf]))
    assert not out.any()
    assert lse[0].tolist() == [[1.25] * 3, [-np.inf] * 3]


def drivers():
    """All that threads are given to run on compiled tiles, and in how many ways each is compiled.
    (What is compiled into others has no wrapper for Python.)"""
    found = {}
    for part in ("pack", "forward", "backward"):
        for name, value in vars(sys.modules[f"ringrt_backends.cpu.{part}"]).items():
            if isinstance(value, Dispatcher) and "no_cpython_wrapper" not in value.targetoptions:
                found[f"{part}.{name}"] = len(value.signatures)
    return found


def layouts(x):
    """The same numbers: read-only, in strides of every kind, and of few of several heads."""
    frozen = x.copy()
    frozen.flags.writeable = False
    turned = np.ascontiguousarray(x.transpose(3, 0, 2, 1)).transpose(1, 3, 2, 0)
    reversed_twice = np.ascontiguousarray(x[:, ::-1])[:, ::-1]
    padded = np.zeros((x.shape[0], x.shape[1], x.shape[2] + 1, x.shape[3] + 1), x.dtype)
    padded[:, :, 1:, 1:] = x
    heads_first = np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    return frozen, turned, reversed_twice, padded[:, :, 1:, 1:], heads_first


def test_no_input_compiles_anything_more():
    """After `prepare`: compiling takes seconds, in which the other ranks' deadlines pass."""
    made = cpu(MACHINES["8"], 2)
    made.prepare(Problem(1, 1, 1, 8, 8, 70, 70, "float32", Mask.full(70, 70), 1.0))
    before = drivers()
    assert {"forward.absorb", "forward.finish", "backward.absorb", "backward.finish"} <= set(before)
    assert set(before.values()) == {1}, before
    mask = Mask([Piece(0, 30, 0, 25, 0), Piece(31, 70, 26, 70, None, 12)])
    sink = np.array([0.5, -1.0, 2.0, -np.inf])
    for dtype in ("float32", "float16", "bfloat16"):
        for batch in (2, 1, 0):
            arrays = random_qkv(70, batch=batch, q_heads=4, kv_heads=2, dtype=dtype)
            for q, k, v in zip(*map(layouts, arrays), strict=True):
                run(made, q, k, v, mask, sink=sink, softcap=2.0)
                dout = layouts(q.copy())[0]
                shards = [Run(30, 1, 40), Run(0, 1, 30)]
                run_backward(made, dout, q, k, v, mask, shards, softcap=2.0)
    assert drivers() == before


def run_backward(backend, dout, q, k, v, mask, shards=None, **options):
    """Gradients over key shards, given the exact out and lse; dk, dv put together."""
    problem = Problem(
        q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.shape[1], k.shape[1],
        q.dtype.name, mask, options.pop("scale", q.shape[3] ** -0.5), **options,
    )  # fmt: skip
    backend.prepare(problem)
    seen = seen_by(mask, q, k)
    out, lse = oracle.attention(q, k, v, seen, scale=problem.scale, softcap=problem.softcap)
    delta = np.einsum("brhd,brhd->bhr", dout.astype(float), out).astype(problem.state_dtype)
    grads = backend.begin_backward(q, dout, lse.astype(problem.state_dtype), delta, problem)
    dk, dv = (np.zeros(x.shape, problem.state_dtype) for x in (k, v))
    for shard in shards or [Run(0, 1, k.shape[1])]:
        cut = slice(shard.start, shard.start + shard.count)
        tiles = lower(mask, (Run(0, 1, q.shape[1]),), (shard,))
        part = [np.zeros(x[:, cut].shape, problem.state_dtype) for x in (k, v)]
        backend.accumulate_backward(grads, k[:, cut], v[:, cut], *part, tiles)
        dk[:, cut] += part[0]
        dv[:, cut] += part[1]
    return backend.finish_backward(grads), dk, dv


def assert_gradients(result, expected, dtype="float32"):
    """Relative to the largest gradient; the 16-bit dtypes by the rounding of their inputs only,
    since these come back in the state's dtype."""
    tolerance = 1e-13 if dtype == "float64" else 2e-6
    for got, want in zip(result, expected, strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(1, abs(want).max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_dtypes(backend, dtype, causal):
    shape = {"batch": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 16, "value_dim": 5}
    q, k, v = random_qkv(67, dtype=dtype, **shape)
    dout = random_qkv(67, dtype=dtype, seed=9, **shape | {"head_dim": 5})[0]
    result = run_backward(backend, dout, q, k, v, (Mask.causal if causal else Mask.full)(67, 67))
    assert_gradients(result, oracle.gradients(dout, q, k, v, causal=causal), dtype)


@settings(max_examples=40)
@given(st.data())
def test_gradients_of_any_band_in_any_shards(data):
    lengths = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 70))
    bound = st.none() | st.integers(-80, 80)
    mask = Mask([Piece(0, lengths[0], 0, lengths[1], data.draw(bound), data.draw(bound))])
    q, k, v = random_qkv(lengths[0], kv_length=lengths[1], dtype="float64")
    dout = random_qkv(lengths[0], dtype="float64", seed=3)[0]
    softcap = data.draw(st.none() | st.just(1.5))
    edge = data.draw(st.integers(0, lengths[1]))
    shards = [Run(edge, 1, lengths[1] - edge), Run(0, 1, edge)]
    expected = oracle.gradients(dout, q, k, v, seen_by(mask, q, k), softcap=softcap)
    for name in BACKENDS:
        made = registry().backend(name).load(BackendContext(1))
        result = run_backward(made, dout, q, k, v, mask, shards, softcap=softcap)
        assert_gradients(result, expected, "float64")


def test_gradients_of_what_a_row_does_not_see_never_reach_it(backend):
    """NaN in keys, values, queries and dout: only pairs that see one another are touched."""
    q, k, v = random_qkv(70, dtype="float64")
    dout = random_qkv(70, dtype="float64", seed=4)[0]
    expected = oracle.gradients(dout[:, :40], q[:, :40], k[:, :40], v[:, :40], causal=True)
    k[:, 40:, :, 2], v[:, 45:, :, 3], q[:, 50:], dout[:, 60:] = np.nan, np.inf, np.nan, np.nan
    mask = Mask([Piece(0, 40, 0, 40, 0), Piece(40, 70, 40, 70, 0)])
    result = run_backward(backend, dout, q, k, v, mask)
    assert_gradients([x[:, :40] for x in result], expected, "float64")
    assert np.isnan(result[0][:, 45:]).all()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_closing_breaks_off_what_is_being_computed(pass_, threads):
    """From another thread, as on an interrupt: the call ends at once, and no worker goes on."""
    made = registry().backend("cpu").load(BackendContext(threads))
    q, k, v = random_qkv(40_000, q_heads=1, head_dim=64)
    mask, zeros = Mask.full(40_000, 40_000), np.zeros((1, 1, 40_000), np.float32)
    problem = Problem(1, 1, 1, 64, 64, 40_000, 40_000, "float32", mask, 1.0)
    tiles = lower(mask, (Run(0, 1, 40_000),), (Run(0, 1, 40_000),))
    made.prepare(problem)
    errors = []

    def compute():
        try:
            if pass_ == "forward":
                made.accumulate(made.begin(q, problem), k, v, tiles)
            else:
                grads = made.begin_backward(q, v, zeros, zeros, problem)
                made.accumulate_backward(grads, k, v, np.zeros_like(k), np.zeros_like(v), tiles)
        except KernelError as error:
            errors.append(error)

    thread = threading.Thread(target=compute)
    thread.start()
    time.sleep(0.5)
    assert thread.is_alive(), "the work was over before it could be broken off"
    made.close()
    thread.join(10)
    assert not thread.is_alive()
    assert "was broken off while it was computing" in str(errors[0])
