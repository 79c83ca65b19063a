"""The Numba CUDA backend in Numba's simulator: a grid of small cases, each held to the dense
oracle. Run as `numba_sim_check.py FOLDER [quick]`: imports ringrt_backends from the folder; says
what is wrong, case by case, and exits non-zero if anything is. `quick` stops at the first."""

# ruff: noqa: E402 - paths and the environment are set before what depends on them is imported.

from __future__ import annotations

import itertools
import os
import sys
import time
import traceback
import warnings
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
sys.path.insert(0, sys.argv[1])
sys.path.insert(1, str(Path(__file__).parent))
warnings.simplefilter("ignore")  # The simulator computes with NumPy's scalars, which warn.
# Its threads are Python's, which a watching thread would keep waiting.
sys.setswitchinterval(1e-5)

import numpy as np
import test_backends as contract
from numba.cuda.simulator.kernelapi import FakeCUDAShared

import oracle
import ringrt
import ringrt_backends
from ringrt.backend import BackendSpec
from ringrt.errors import KernelError
from ringrt.plan import Mask, Piece, Problem, Run
from ringrt.plan.tiles import TileTable, lower
from ringrt.registry import registry
from ringrt_backends import cuda_numba_arrays, cuda_numba_kernels, cuda_numba_pairs
from ringrt_backends.cuda_numba import NumbaCudaBackend, missing
from support import assert_close, random_qkv

assert ringrt_backends.__file__.startswith(sys.argv[1])
assert missing() is None
BACKEND = NumbaCudaBackend()


def _poisoned_array(self, shape, dtype, alignment=None):
    """Shared memory begins as NaN, so that what is read before it is written shows. Kept by the
    caller's line, as the simulator does, but so that two threads never get two."""
    frame = sys._getframe(1)
    key = frame.f_code.co_filename, frame.f_lineno
    made = self._allocations.get(key)
    if made is None:
        made = self._allocations.setdefault(key, np.full(shape, np.nan, dtype))
    return made


FakeCUDAShared.array = _poisoned_array


def check(q, k, v, mask, shards=None, dtype="float32", scale=1.0, backward=True, **scores):
    """Forward, and backward where there is no sink, over key shards."""
    seen = contract.seen_by(mask, q, k)
    result = contract.run(BACKEND, q, k, v, mask, shards, **dict(scores))
    assert_close(result, oracle.attention(q, k, v, seen, **scores), dtype, scale)
    if not backward or "sink" in scores or 0 in (q.size, k.size):
        return
    dout = np.random.default_rng(9).standard_normal(result[0].shape).astype(q.dtype)
    gradients = contract.run_backward(BACKEND, dout, q, k, v, mask, shards, **dict(scores))
    contract.assert_gradients(gradients, oracle.gradients(dout, q, k, v, seen, **scores))


def windows_over_shards():
    """A group of heads, several tiles a row, a window, key shards that begin anywhere."""
    arrays = random_qkv(17, q_heads=4, kv_heads=2, head_dim=6, value_dim=5)
    shards = [Run(13, 1, 4), Run(0, 1, 3), Run(3, 1, 10)]
    check(*arrays, Mask([Piece(0, 17, 0, 17, -2, 11)]), shards, softcap=1.5)


def causal_of_every_dtype():
    for dtype in ("float32", "float16", "bfloat16"):
        arrays = random_qkv(11, batch=2, q_heads=2, head_dim=5, value_dim=3, dtype=dtype)
        check(*arrays, Mask.causal(11, 11), dtype=dtype)


def heads_and_dims():
    for heads in ((1, 1, 1, 1), (3, 1, 5, 7), (2, 2, 9, 1), (6, 2, 3, 13)):
        q_heads, kv_heads, head_dim, value_dim = heads
        shape = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
        check(*random_qkv(10, **shape, value_dim=value_dim), Mask.causal(10, 10))


def lengths():
    for rows, keys in ((0, 5), (5, 0), (1, 1), (17, 9), (9, 26)):
        arrays = random_qkv(rows, kv_length=keys, q_heads=1, head_dim=3)
        for mask in (Mask.full(rows, keys), Mask.causal(rows, keys)):
            check(*arrays, mask)
    out, lse = contract.run(BACKEND, *random_qkv(4, batch=0), Mask.full(4, 4))
    assert (out.shape, lse.shape) == ((0, 4, 2, 8), (0, 2, 4))


def any_band():
    rng = np.random.default_rng(4)
    for seed in range(5):
        rows, keys = rng.integers(1, 30, 2)
        cut, (a, b) = rng.integers(0, rows + 1), rng.integers(-25, 25, (2, 2))
        mask = Mask([Piece(0, cut, 0, keys, a.min(), a.max()), Piece(cut, rows, 0, keys, b.min())])
        edge = int(rng.integers(0, keys + 1))
        shards = [Run(edge, 1, int(keys) - edge), Run(0, 1, edge)]
        check(*random_qkv(rows, kv_length=keys, head_dim=3, seed=seed), mask, shards)


def tiny_tiles():
    """Documents of one to four tokens, in one table of many tiles; pieces over the same rows."""
    edges = np.cumsum([0, 3, 1, 4, 2, 1, 1, 4, 3, 2, 4])
    documents = [Piece(a, b, a, b, 0) for a, b in itertools.pairwise(edges)]
    check(*random_qkv(25, head_dim=4), Mask(documents))
    sinks = Mask([Piece(0, 25, 0, 3), Piece(0, 25, 3, 12, 5, 9), Piece(2, 25, 12, 25, 0, 9)])
    check(*random_qkv(25, head_dim=4), sinks)


def maxima_that_move():
    """Scores that rise or fall from key to key, so that the state is rescaled or left alone."""
    q, k, v = random_qkv(9, kv_length=30, q_heads=1, head_dim=2)
    q, v = abs(q), v + 3
    for order in (1, -1):
        k[0, :, 0, 0] = np.arange(30)[::order]
        check(q, k, v, Mask.full(9, 30), [Run(0, 1, 17), Run(17, 1, 13)], scale=2, backward=False)


def large_scores_that_cancel():
    """As real models have: scores up to about 50, and products larger than their sum, of which
    plain float32 would keep 3e-5."""
    q, k, v = random_qkv(8, kv_length=24, q_heads=1, head_dim=64)
    expected = oracle.attention(4 * q, 4 * k, v)
    assert_close(contract.run(BACKEND, 4 * q, 4 * k, v, Mask.full(8, 24)), expected, scale=2)
    q, k, v = random_qkv(6, q_heads=1, head_dim=12)
    q[..., :4], q[..., 8:], k[..., 0], k[..., 8] = 0, 0, 1, -1
    q[..., 0] = q[..., 8] = 512
    result = contract.run(BACKEND, q, k, v, Mask.full(6, 6), scale=0.5)
    assert_close(result, oracle.attention(q, k, v, scale=0.5))


def long_sums():
    q, k, v = random_qkv(1, kv_length=800, q_heads=1, head_dim=2)
    check(q, k, v + 3, Mask.full(1, 800), [Run(0, 1, 300), Run(300, 1, 500)], scale=0.3)


def sinks_and_scales():
    arrays, shards = random_qkv(13, q_heads=4, kv_heads=2, head_dim=4), [Run(0, 1, 4), Run(4, 1, 9)]
    check(*arrays, Mask.causal(13, 13), shards, sink=np.array([0.5, -2, 30, -np.inf]), scale=8)
    contract.test_a_row_without_keys_has_the_sink_as_its_lse(BACKEND)
    for scale, softcap in ((0.0, None), (-0.7, 0.5), (2.5, 30.0)):
        scores = {"scale": scale, "softcap": softcap}
        result = contract.run(BACKEND, *arrays, Mask.causal(13, 13), **dict(scores))
        assert_close(result, oracle.attention(*arrays, causal=True, **scores), scale=2)


def hidden_values():
    """NaN and inf in what is not seen, within tiles that are seen in part; also backward."""
    q, k, v = random_qkv(20, head_dim=4)
    dout = random_qkv(20, head_dim=4, seed=4)[0]
    clean = q[:, :11], k[:, :11], v[:, :11]
    expected = oracle.attention(*clean, causal=True)
    gradients = oracle.gradients(dout[:, :11], *clean, causal=True)
    k[:, 11:, :, 2], v[:, 13:, :, 3], q[:, 15:], dout[:, 17:] = np.nan, np.inf, np.nan, np.nan
    mask = Mask([Piece(0, 11, 0, 11, 0), Piece(11, 20, 11, 20, 0)])
    result = contract.run(BACKEND, q, k, v, Mask.causal(20, 20))
    assert_close((result[0][:, :11], result[1][:, :, :11]), expected)
    assert np.isnan(result[0][:, 11:]).all()
    dq, *sums = contract.run_backward(BACKEND, dout, q, k, v, mask)
    contract.assert_gradients([x[:, :11] for x in (dq, *sums)], gradients)
    assert np.isnan(dq[:, 13:]).all()
    contract.test_a_value_of_nan_reaches_only_its_element(BACKEND)


def extreme_values():
    contract.test_an_infinite_score_is_nan_and_minus_infinity_is_nothing(BACKEND)
    contract.test_no_tiles_change_nothing(BACKEND)
    for case in ((1.0, 1.0, 3e38, 1.0, 3e38), (1e20, -1e19, 2.0, 1e-39, 2.0),
                 (2e19, -2e20, 2.0, 1.0, 2.0)):  # fmt: skip
        contract.test_products_beyond_float32_are_right_where_the_result_is_finite(BACKEND, *case)


def empty_rows_have_no_gradients():
    q, k, v = random_qkv(6, q_heads=1)
    problem = Problem(1, 1, 1, 8, 8, 6, 6, "float32", Mask.causal(6, 6), 1.0)
    k[:, 0] = -np.inf
    lse, delta = np.full((1, 1, 6), -np.inf, np.float32), np.zeros((1, 1, 6), np.float32)
    grads = BACKEND.begin_backward(q, v, lse, delta, problem)
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    tiles = lower(Mask([Piece(0, 6, 1, 6)]), (Run(0, 1, 6),), (Run(0, 1, 6),))
    BACKEND.accumulate_backward(grads, k, v, dk, dv, tiles)
    for x in (dk, dv, BACKEND.finish_backward(grads)):
        assert not x.any()


def layouts():
    """Any strides are read, nothing is written; dk and dv are added to, twice the same."""
    q, k, v = random_qkv(12, batch=2, q_heads=2, head_dim=4)
    expected = oracle.attention(q, k, v, causal=True)
    turned = [
        np.ascontiguousarray(x.transpose(3, 0, 2, 1)).transpose(1, 3, 2, 0) for x in (q, k, v)
    ]
    flipped = [np.ascontiguousarray(x[:, ::-1])[:, ::-1] for x in (q, k, v)]
    results = []
    for arrays in (turned, flipped):
        for x in arrays:
            x.flags.writeable = False
        results.append(contract.run(BACKEND, *arrays, Mask.causal(12, 12)))
        assert_close(results[-1], expected)
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))
    problem = Problem(2, 2, 1, 4, 4, 12, 12, "float32", Mask.causal(12, 12), 0.5)
    delta = np.zeros((2, 2, 12), np.float32)
    tiles = lower(problem.mask, (Run(0, 1, 12),), (Run(0, 1, 12),))
    sums = [np.full(x.shape, start, np.float32) for start in (0, 2) for x in (k, v)]
    for dk, dv in (sums[:2], sums[2:]):
        grads = BACKEND.begin_backward(turned[0], turned[0], expected[1], delta, problem)
        BACKEND.accumulate_backward(grads, turned[1], turned[2], dk, dv, tiles)
    for plain, added in zip(sums[:2], sums[2:], strict=True):
        assert plain.any()
        np.testing.assert_allclose(added, plain + 2, rtol=0, atol=1e-6)


def through_the_engine():
    """Ranks are threads, of which each has a backend; what travels may be K,V or the queries."""
    spec = BackendSpec("numba", "", missing, lambda context: NumbaCudaBackend())
    registry().backends.setdefault("numba", spec)
    q, k, v = random_qkv(13, q_heads=2, head_dim=4)
    dout, expected = v[:, :, [0, 0]], oracle.attention(q, k, v, causal=True)
    gradients = oracle.gradients(dout, q, k, v, causal=True)
    for partition, travel in (("striped", "kv"), ("zigzag", "q")):
        how = {"ranks": 2, "partition": partition, "causal": True, "backend": "numba"}
        out, lse = ringrt.attention(q, k, v, **how)
        assert_close((out, lse), expected)
        result = ringrt.attention_backward(dout, q, k, v, out, lse, travel=travel, **how)
        contract.assert_gradients(result, gradients)


def sizes_of_a_device():
    """The sizes that are compiled for a GPU: 256 threads a block."""
    sizes = {"TILE": 64, "SIDE": 16, "CHUNK": 32, "PADDED_TILE": 65, "PADDED_SIDE": 17}
    sizes |= {"PADDED_CHUNK": 33, "THREADS": 256, "EACH": 4, "WIDE": 2, "PAIRS": 16, "SUMS": 8}
    with ExitStack() as stack:
        for module in (cuda_numba_pairs, cuda_numba_kernels, cuda_numba_arrays):
            names = {name: size for name, size in sizes.items() if hasattr(module, name)}
            stack.enter_context(mock.patch.multiple(module, **names))
        stack.enter_context(mock.patch.object(BACKEND, "_tile", sizes["TILE"]))
        arrays = random_qkv(5, kv_length=67, q_heads=1, head_dim=34, value_dim=3)
        check(*arrays, Mask.causal(5, 67))


def refusals_and_closing():
    for head_dim, value_dim, dtype, refused in (
        (256, 256, "float32", None),
        (4, 4, "float64", "float64"),
        (257, 4, "float16", "head_dim > 256"),
        (4, 300, "bfloat16", "value_dim > 256"),
    ):
        problem = Problem(1, 1, 1, head_dim, value_dim, 1, 1, dtype, Mask.full(1, 1), 1.0)
        text = refused and f"{refused} is not implemented on the numba backend"
        assert BACKEND.supports(problem) == text
    made, (q, k, v) = NumbaCudaBackend(), random_qkv(3, q_heads=1)
    problem = Problem(1, 1, 1, 8, 8, 3, 3, "float32", Mask.full(3, 3), 1.0)
    state = made.begin(q, problem)
    made.close()
    try:
        made.accumulate(state, k, v, TileTable(np.array([[0, 3, 0, 3, -9, 9]])))
    except KernelError:
        return
    raise AssertionError("a closed backend goes on")


CASES = [
    windows_over_shards, layouts, large_scores_that_cancel, hidden_values, extreme_values,
    maxima_that_move, tiny_tiles, causal_of_every_dtype, empty_rows_have_no_gradients,
    heads_and_dims, lengths, any_band, long_sums, sinks_and_scales, through_the_engine,
    refusals_and_closing, sizes_of_a_device,
]  # fmt: skip


def main() -> int:
    failed = 0
    for case in CASES:
        begin = time.perf_counter()
        try:
            case()
        except Exception:
            failed += 1
            traceback.print_exc()
        print(f"{case.__name__}: {time.perf_counter() - begin:.1f} s", flush=True)
        if failed and "quick" in sys.argv:
            break
    print(f"{len(CASES)} cases, {failed} wrong")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
