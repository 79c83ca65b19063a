"""`BlockBackend`: kernels that finish one block, merged forwards and added up backwards."""

from __future__ import annotations

import numpy as np
import pytest
from masks import visible

import oracle
import ringrt
from ringrt.backend import BackendSpec, BlockBackend, band
from ringrt.errors import Unsupported
from ringrt.plan import Mask, Piece, Problem, Run, Tile
from ringrt.plan.bands import parts
from ringrt.plan.mask import UNBOUNDED
from ringrt.plan.tiles import EMPTY, TileTable, lower
from ringrt.registry import registry
from support import TOLERANCE, assert_close, random_qkv

INF = float("inf")


class BlockKernel(BlockBackend):
    """Dense attention of one tile in float64. `calls` are the tiles it was given, `handed` the lse
    of each backward call."""

    def __init__(self, base=np.e):
        self.lse_base, self.calls, self.handed = base, [], []

    def supports(self, problem):
        return None

    def block(self, q, k, v, tile, problem):
        self.calls.append(tile)
        out, lse = oracle.attention(q, k, v, band(tile), scale=problem.scale)
        return out.astype(q.dtype), lse / np.log(self.lse_base)

    def block_backward(self, q, k, v, out, lse, dout, tile, problem):
        self.calls.append(tile)
        self.handed.append(lse)
        q, k, v, out, dout = (np.asarray(x, np.float64) for x in (q, k, v, out, dout))
        k, v = (np.repeat(x, problem.group, axis=2) for x in (k, v))
        scores = problem.scale * np.einsum("bihd,bjhd->bhij", q, k)
        with np.errstate(invalid="ignore"):
            p = np.exp(
                np.where(band(tile), scores, -INF) - (lse * np.log(self.lse_base))[..., None]
            )
        delta = np.einsum("bihd,bihd->bhi", dout, out)
        ds = p * (np.einsum("bihd,bjhd->bhij", dout, v) - delta[..., None]) * problem.scale
        dq = np.einsum("bhij,bjhd->bihd", ds, k)
        dq[np.isposinf(lse).swapaxes(1, 2)] = np.nan
        dk, dv = np.einsum("bhij,bihd->bjhd", ds, q), np.einsum("bhij,bihd->bjhd", p, dout)
        batch, keys, heads, _ = dk.shape
        shape = batch, keys, heads // problem.group, problem.group, -1
        return dq, *(x.reshape(shape).sum(axis=3) for x in (dk, dv))


class SquareKernel(BlockKernel):
    """One that knows causal squares, and no bands."""

    def parts(self, tile, problem):
        return parts(tile)


class ForwardKernel(BlockBackend):
    """One without a backward pass."""

    def supports(self, problem):
        return None

    def block(self, q, k, v, tile, problem):
        return BlockKernel().block(q, k, v, tile, problem)


def problem_of(q, k, v, mask, sink=False):
    batch, rows, heads, dim = q.shape
    keys, kv_heads, value_dim = v.shape[1:]
    lengths = rows, keys, q.dtype.name, mask, dim**-0.5
    return Problem(batch, heads, kv_heads, dim, value_dim, *lengths, sink=sink)


def inputs(rows=23, keys=17, dtype="float64", **shape):
    shape = {"q_heads": 4, "kv_heads": 2, "value_dim": 6} | shape
    q, k, v = random_qkv(rows, kv_length=keys, dtype=dtype, **shape)
    dout = random_qkv(rows, dtype=dtype, seed=9, q_heads=4, head_dim=shape["value_dim"])[0]
    return q, k, v, dout


def forward(kernel, q, k, v, problem, shards, sink=None):
    """out and lse over tiles of several key shards, [(first key, tiles), ...]."""
    state = kernel.begin(q, problem, sink)
    for first, tiles in shards:
        kernel.accumulate(state, k[:, first:], v[:, first:], tiles)
    return kernel.finish(state)


def backward(kernel, arrays, result, problem, shards, begin=0.0):
    """dq, dk, dv, the latter two on accumulators that hold `begin` already."""
    q, k, v, dout = arrays
    out, lse = result
    grads = kernel.begin_backward(q, dout, lse, None, problem, out=out)
    dk, dv = (np.full(x.shape, begin, lse.dtype) for x in (k, v))
    for first, tiles in shards:
        cut = slice(first, None)
        kernel.accumulate_backward(grads, k[:, cut], v[:, cut], dk[:, cut], dv[:, cut], tiles)
    return kernel.finish_backward(grads), dk, dv


def shards_of(mask, rows, keys, size=5):
    """The keys in shards, and what rows see of each."""
    for first in range(0, keys, size):
        yield first, lower(mask, (Run(0, 1, rows),), (Run(first, 1, min(size, keys - first)),))


MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (4, 2)},
    "right": {"window": (-1, 3)},
    "left": {"window": (6, -1)},
}


def mask_of(rows, keys, causal=False, window=(-1, -1)):
    """Aligned at the end, as in `masks.visible`."""
    shift = keys - rows
    left, right = window
    right = 0 if causal else right
    least = None if right < 0 else -right - shift
    most = None if left < 0 else left - shift
    return Mask([Piece(0, rows, 0, keys, least, most)])


@pytest.mark.parametrize("kernel", [BlockKernel, SquareKernel])
@pytest.mark.parametrize("name", MASKS)
def test_both_passes_are_those_of_the_whole(name, kernel):
    arrays, mask = inputs(), mask_of(23, 17, **MASKS[name])
    q, k, v, dout = arrays
    seen = visible(23, 17, **MASKS[name])
    problem, shards = problem_of(q, k, v, mask), list(shards_of(mask, 23, 17))
    result = forward(kernel(), q, k, v, problem, shards)
    assert_close(result, oracle.attention(q, k, v, seen), "float64")
    got = backward(kernel(), arrays, result, problem, shards)
    for x, want in zip(got, oracle.gradients(dout, q, k, v, seen), strict=True):
        np.testing.assert_allclose(x, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes_of_results_and_sums(dtype):
    arrays = inputs(dtype=dtype)
    q, k, v, dout = arrays
    mask = mask_of(23, 17)
    problem, shards = problem_of(q, k, v, mask), list(shards_of(mask, 23, 17))
    out, lse = forward(BlockKernel(), q, k, v, problem, shards)
    sums = "float64" if dtype == "float64" else "float32"
    assert (out.dtype, lse.dtype.name) == (q.dtype, sums)
    bound = 3 * TOLERANCE[dtype][0]
    np.testing.assert_allclose(np.float64(out), oracle.attention(q, k, v)[0], rtol=0, atol=bound)
    gradients = backward(BlockKernel(), arrays, (out, lse), problem, shards)
    for x, want in zip(gradients, oracle.gradients(dout, q, k, v), strict=True):
        assert x.dtype.name == sums
        assert x.flags.c_contiguous
        np.testing.assert_allclose(x, want, rtol=0, atol=4 * bound)


@pytest.mark.parametrize("base", [2.0, 10.0])
@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 2e-7), ("float64", 1e-15)])
def test_a_kernel_has_its_own_base_in_both_passes(base, dtype, rounding):
    arrays, mask = inputs(dtype=dtype), mask_of(23, 17)
    q, k, v, dout = arrays
    problem, shards = problem_of(q, k, v, mask), list(shards_of(mask, 23, 17))
    result = forward(BlockKernel(base), q, k, v, problem, shards)
    assert_close(result, oracle.attention(q, k, v), dtype)
    kernel = BlockKernel(base)
    got = backward(kernel, arrays, result, problem, shards)
    assert kernel.handed[0].dtype == result[1].dtype
    np.testing.assert_allclose(kernel.handed[0], result[1] / np.log(base), rtol=rounding)
    for x, want in zip(got, oracle.gradients(dout, q, k, v), strict=True):
        np.testing.assert_allclose(x, want, rtol=0, atol=50 * rounding)


def test_rows_without_any_key_have_no_gradients_whatever_the_kernel_leaves_there():
    """Rows 0 to 5 see nothing at all; the kernel is told +inf, and its NaN for them is dropped."""
    arrays, mask = inputs(), mask_of(23, 17, causal=True)
    q, k, v, dout = arrays
    # The whole box, so that the kernel meets rows that see nothing of it.
    problem, shards = problem_of(q, k, v, mask), [(0, [Tile(0, 23, 0, 17, 6, UNBOUNDED)])]
    kernel = BlockKernel()
    result = forward(kernel, q, k, v, problem, shards)
    seen = visible(23, 17, causal=True)
    assert_close(result, oracle.attention(q, k, v, seen), "float64")
    assert np.isneginf(result[1][..., :6]).all()
    dq, dk, dv = backward(kernel, arrays, result, problem, shards)
    assert np.isposinf(kernel.handed[0][..., :6]).all()
    assert np.all(dq[:, :6] == 0)
    for x, want in zip((dq, dk, dv), oracle.gradients(dout, q, k, v, seen), strict=True):
        np.testing.assert_allclose(x, want, rtol=0, atol=1e-13)


def test_a_row_whose_scores_are_all_endless_has_no_gradients_and_gives_none():
    arrays, mask = inputs(q_heads=4, kv_heads=2), mask_of(23, 17)
    q, k, v, _ = arrays
    q[:], k[:] = 1, -INF
    problem, shards = problem_of(q, k, v, mask), list(shards_of(mask, 23, 17))
    kernel = BlockKernel()
    result = forward(kernel, q, k, v, problem, shards)
    assert np.isneginf(result[1]).all()
    gradients = backward(kernel, arrays, result, problem, shards)
    assert np.isposinf(kernel.handed[0]).all()
    for x in gradients:
        assert np.all(x == 0)


def test_rows_that_see_nothing_of_one_tile_keep_what_others_gave():
    """Row i sees keys up to i - 4 of the first shard, and all of the second."""
    arrays = inputs()
    q, k, v, dout = arrays
    seen = np.ones((23, 17), dtype=bool)
    seen[:, :9] = np.arange(23)[:, None] - np.arange(9)[None, :] >= 4
    shards = [
        (9, [Tile(0, 23, 0, 8, -UNBOUNDED, UNBOUNDED)]),
        (0, [Tile(0, 23, 0, 9, 4, UNBOUNDED)]),
    ]
    problem, kernel = problem_of(q, k, v, mask_of(23, 17)), BlockKernel()
    result = forward(kernel, q, k, v, problem, shards)
    assert_close(result, oracle.attention(q, k, v, seen), "float64")
    got = backward(kernel, arrays, result, problem, shards)
    assert np.isposinf(kernel.handed[1][..., :4]).all()
    for x, want in zip(got, oracle.gradients(dout, q, k, v, seen), strict=True):
        np.testing.assert_allclose(x, want, rtol=0, atol=1e-13)


def test_gradients_are_added_to_what_is_there():
    arrays, mask = inputs(), mask_of(23, 17)
    q, k, v, dout = arrays
    problem, shards = problem_of(q, k, v, mask), list(shards_of(mask, 23, 17))
    result = oracle.attention(q, k, v)
    _, dk, dv = backward(BlockKernel(), arrays, result, problem, shards, begin=3.0)
    _, want_dk, want_dv = oracle.gradients(dout, q, k, v)
    np.testing.assert_allclose(dk, want_dk + 3, rtol=0, atol=1e-13)
    np.testing.assert_allclose(dv, want_dv + 3, rtol=0, atol=1e-13)


def test_a_sink_is_part_of_the_state():
    q, k, v, _ = inputs()
    sink, mask = np.array([0.5, -INF, 2.0, -1.0]), mask_of(23, 17)
    problem = problem_of(q, k, v, mask, sink=True)
    result = forward(BlockKernel(), q, k, v, problem, shards_of(mask, 23, 17), sink)
    assert_close(result, oracle.attention(q, k, v, sink=sink), "float64")


def test_the_kernel_gets_the_parts_and_nothing_else():
    q, k, v, _ = inputs(20, 20)
    kernel, tile = SquareKernel(), Tile(0, 20, 0, 20, 0, 6)
    kernel.accumulate(kernel.begin(q, problem_of(q, k, v, mask_of(20, 20))), k, v, [tile])
    assert kernel.calls == parts(tile)
    assert len(kernel.calls) > 2


def test_no_kernel_is_called_for_nothing():
    q, k, v, dout = inputs(rows=6, keys=5)
    full = TileTable(np.array([[0, 6, 0, 5, -UNBOUNDED, UNBOUNDED]]))
    for batch, tiles in ((0, full), (1, EMPTY)):
        arrays = [x[:batch] for x in (q, k, v, dout)]
        problem, kernel = problem_of(*arrays[:3], mask_of(6, 5)), BlockKernel()
        out, lse = forward(kernel, *arrays[:3], problem, [(0, tiles)])
        dq, *_ = backward(kernel, arrays, (out, lse), problem, [(0, tiles)])
        assert kernel.calls == []
        assert (out.shape, dq.shape) == (arrays[3].shape, arrays[0].shape)


def test_there_is_a_backward_pass_where_there_is_a_block_backward():
    assert (BlockKernel.backward, BlockKernel.needs_out) == (True, True)
    assert (SquareKernel.backward, SquareKernel.needs_out) == (True, True)
    assert (ForwardKernel.backward, ForwardKernel.needs_out) == (False, False)
    with pytest.raises(Unsupported, match="backward is not implemented"):
        backward(ForwardKernel(), inputs(), oracle.attention(*inputs()[:3]),
                 problem_of(*inputs()[:3], mask_of(23, 17)),
                 shards_of(mask_of(23, 17), 23, 17))  # fmt: skip


@pytest.fixture
def backends(monkeypatch):
    """The kernels of this file as backends."""
    for name, kernel in (("squares", SquareKernel), ("forward-only", ForwardKernel)):
        spec = BackendSpec(name, "a test", lambda: None, lambda context, kernel=kernel: kernel())
        monkeypatch.setitem(registry().backends, name, spec)


@pytest.mark.parametrize("partition", ["contiguous", "striped", "zigzag"])
def test_in_a_ring(backends, partition):
    q, k, v, dout = inputs(rows=29, keys=29)
    options = {"ranks": 3, "partition": partition, "backend": "squares", "window": (7, 4)}
    seen = visible(29, 29, window=(7, 4))
    out, lse = ringrt.attention(q, k, v, **options)
    assert_close((out, lse), oracle.attention(q, k, v, seen), "float64")
    got = ringrt.attention_backward(dout, q, k, v, out, lse, **options)
    for x, want in zip(got, oracle.gradients(dout, q, k, v, seen), strict=True):
        np.testing.assert_allclose(x, want, rtol=0, atol=1e-12)


def test_what_a_kernel_lacks_is_refused_before_data_moves(backends):
    q, k, v, dout = inputs(rows=12, keys=12)
    result = ringrt.attention(q, k, v, ranks=2, backend="forward-only")
    with pytest.raises(Unsupported, match="forward-only: backward is not implemented"):
        ringrt.attention_backward(dout, q, k, v, *result, ranks=2, backend="forward-only")
    with pytest.raises(Unsupported, match="squares: travel q is not implemented: .* needs out"):
        ringrt.attention_backward(dout, q, k, v, *result, ranks=2, backend="squares", travel="q")
