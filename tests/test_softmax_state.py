"""The online softmax state: identity, merge in any order, finish."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

import oracle
from ringrt.backend import BlockBackend
from ringrt.plan import Mask, Problem, Tile
from ringrt.plan.mask import UNBOUNDED
from ringrt.softmax_state import SoftmaxState, from_block, rescale
from support import assert_close, random_qkv

INF = float("inf")


def row(lse: float, value: float, dtype="float32") -> SoftmaxState:
    """One row in the state that a block with this lse and out leaves."""
    out = np.full((1, 1, 1, 1), value, dtype)
    return from_block(out, np.full((1, 1, 1), lse, dtype), np.array([lse == -INF]))


def merged(*states: SoftmaxState) -> tuple[float, float]:
    total = SoftmaxState.empty(1, 1, 1, 1, states[0].m.dtype.name)
    for state in states:
        total.absorb(state)
    out, lse = total.finish()
    return float(out[0, 0, 0, 0]), float(lse[0, 0, 0])


def test_empty_with_empty_is_empty():
    assert merged(row(-INF, 5.0), row(-INF, np.nan)) == (0.0, -INF)


@pytest.mark.parametrize("order", [0, 1])
def test_empty_is_the_identity(order):
    states = [row(-INF, 5.0), row(1.5, 2.0)]
    assert merged(*states[:: 1 if order else -1]) == (2.0, 1.5)


def test_far_apart_does_not_overflow():
    assert merged(row(0.0, 3.0), row(100.0, 7.0)) == (7.0, 100.0)


def test_weights_follow_the_natural_logarithm():
    """Partial sums 2 and 8 weigh 0.2 and 0.8."""
    out, lse = merged(row(np.log(2), 1.0, "float64"), row(np.log(8), 0.0, "float64"))
    assert out == pytest.approx(0.2, abs=1e-15)
    assert lse == pytest.approx(np.log(10), abs=1e-15)


def test_infinite_and_nan_scores_give_nan():
    assert np.isnan(merged(row(INF, 1.0), row(1.0, 2.0))).all()
    assert np.isnan(merged(row(1.0, 2.0), row(np.nan, 1.0))).all()


@given(st.lists(st.floats(-80, 80) | st.just(-INF), min_size=1, max_size=4))
def test_any_order_of_merging_is_the_same_and_right(logs):
    states = [row(lse, float(n), "float64") for n, lse in enumerate(logs)]
    sums = np.exp(np.array(logs))
    total = sums.sum()
    want = (sums @ np.arange(len(logs)) / total, np.log(total)) if total else (0.0, -INF)
    for order in itertools.permutations(states):
        got = merged(*order)
        assert got[1] == want[1] if want[1] == -INF else got[1] == pytest.approx(want[1])
        assert got[0] == pytest.approx(want[0], abs=1e-12)


def test_rescale_never_makes_nan_of_nothing():
    old, new = np.array([-INF, -INF, 0.0, INF]), np.array([-INF, 3.0, 1.0, INF])
    np.testing.assert_allclose(rescale(old, new)[:3], [0.0, 0.0, np.exp(-1)])
    assert np.isnan(rescale(old, new)[3])


class OddKernel(BlockBackend):
    """A kernel of one block with its own habits about lse."""

    def __init__(self, empty_lse: float, base: float) -> None:
        self.lse_base, self._empty = base, empty_lse

    def supports(self, problem):
        return None

    def block(self, q, k, v, tile, problem):
        i, j = np.arange(q.shape[1]), np.arange(k.shape[1])
        apart = i[:, None] - j[None, :]
        seen = (tile.lower <= apart) & (apart <= tile.upper)
        out, lse = oracle.attention(q, k, v, seen, scale=problem.scale)
        lse = np.where(lse == -INF, self._empty, lse / np.log(self.lse_base))
        return np.where(seen.any(1)[None, :, None, None], out, np.nan).astype(q.dtype), lse


@pytest.mark.parametrize("base", [np.e, 2.0])
@pytest.mark.parametrize("empty", [-INF, INF, -1e30, np.nan])
def test_a_block_kernel_is_merged_whatever_it_reports_for_empty_rows(empty, base):
    """Keys in two shards, the first of which some rows do not see at all: row 0 of a band
    tile whose corner is cut off sees nothing of it."""
    q, k, v = random_qkv(12, q_heads=2, kv_heads=1, dtype="float64")
    problem = Problem(1, 2, 1, 8, 8, 12, 12, "float64", Mask.causal(12, 12), 0.3)
    kernel = OddKernel(empty, base)
    state = kernel.begin(q, problem)
    for start, count in ((5, 7), (0, 5)):
        # The whole box, not only its visible part, so that the kernel meets empty rows.
        boxes = [Tile(0, 12, 0, count, start, UNBOUNDED)]
        kernel.accumulate(state, k[:, start : start + count], v[:, start : start + count], boxes)
    result = kernel.finish(state)
    assert_close(result, oracle.attention(q, k, v, causal=True, scale=0.3), "float64")
