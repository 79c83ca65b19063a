"""The compiled cpu kernels at every width of vectors, against the oracle."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from cpu_support import (
    CASE,
    MACHINES,
    assert_gradients,
    assert_same_bits,
    backward,
    cpu,
    delta_of,
    expected,
    expected_gradients,
    forward,
    masked,
)
from hypothesis import given, settings, strategies as st

import oracle
from ringrt.conformance.cases import Case
from ringrt.plan import Piece
from ringrt_backends.cpu import tiled_backward
from support import assert_close

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(params=list(MACHINES))
def machine(request):
    return MACHINES[request.param]


def hold(machine, case, threads=1, scale=1.0):
    """Both passes, against the oracle."""
    made = cpu(machine, threads)
    assert_close(forward(made, case), expected(case), case.dtype, scale)
    assert_gradients(backward(made, case), expected_gradients(case), 2e-6 * scale)
    made.close()


#: Around the edges of blocks of queries (192, 288), of keys (288), of parts of 96 keys, and of
#: tiles and panels.
LENGTHS = [
    (1, 1), (1, 500), (500, 1), (5, 7), (6, 6), (7, 15), (15, 5), (16, 17), (17, 16), (31, 33),
    (95, 97), (97, 96), (96, 95), (191, 193), (193, 191), (192, 288), (287, 289), (289, 287),
    (288, 192), (385, 290), (500, 321),
]  # fmt: skip


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths_at_the_edges_of_blocks(machine, lengths):
    case = CASE.but(rows=lengths[0], keys=lengths[1], q_heads=1, kv_heads=1)
    hold(machine, case)
    hold(machine, case.causal())


DIMS = [
    (1, 1), (3, 17), (17, 3), (33, 64), (64, 33), (65, 80), (80, 65), (128, 128), (128, 1), (1, 128),
]  # fmt: skip


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dims_of_heads(machine, dims):
    case = CASE.but(head_dim=dims[0], value_dim=dims[1], rows=70, keys=83, q_heads=2, kv_heads=1)
    hold(machine, case.causal())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (4, 2), (6, 6)], ids=str)
def test_dtypes_and_heads(machine, dtype, heads):
    case = CASE.but(dtype=dtype, q_heads=heads[0], kv_heads=heads[1], batch=2, edges=(50,))
    hold(machine, case.causal())


MASKS = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": (37, 0)},
    "both sides": {"window": (20, 55)},
    "one diagonal": {"window": (0, 0)},
    "sink tokens": {"causal": True, "window": (30, 0), "sink_tokens": 5},
    "prefix": {"causal": True, "prefix": 40},
    "documents": {"causal": True, "documents": [[0, 7], [9, 130], [130, 131], [150, 330]]},
    "short documents": {"documents": list(range(0, 331, 11))},
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks(machine, mask):
    case = masked(Case(rows=330, keys=330, q_heads=2, kv_heads=1, head_dim=5), **MASKS[mask])
    hold(machine, case)
    hold(machine, case.but(edges=(1, 120, 193, 194), order=(3, 0, 4, 1, 2)))


@pytest.mark.parametrize("bounds", [(250, None), (None, -301), (240, 245), (-330, -300)], ids=str)
def test_bands_far_off_the_diagonal(machine, bounds):
    """Whole blocks see nothing, and a tile begins in the midst of one."""
    hold(machine, Case(rows=300, keys=340, q_heads=1, kv_heads=1, head_dim=3).banded(*bounds))


def test_many_shards_in_any_order(machine):
    case = CASE.but(rows=200, keys=310).causal()
    edges = (3, 4, 100, 101, 289, 300)
    for order in (tuple(range(7)), (6, 5, 4, 3, 2, 1, 0), (2, 5, 0, 6, 3, 1, 4)):
        hold(machine, case.but(edges=edges, order=order))


@pytest.mark.parametrize("sink", [(0.5, -2.0, 30.0, -np.inf), (-90.0, 0.0, 200.0, 1e4)], ids=str)
def test_sinks(machine, sink):
    case = CASE.but(edges=(1, 60), sink=sink).causal()
    out, lse = forward(cpu(machine), case)
    want, want_lse = expected(case)
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-7, atol=2e-6)
    assert_gradients(backward(cpu(machine), case), expected_gradients(case))


@pytest.mark.parametrize(
    ("scale", "softcap"),
    [(-0.7, None), (2.5, None), (1e-3, None), (0.3, 0.5), (-1.3, 30.0), (2.0, 1e4), (0.2, 0.05)],
)
def test_scales_and_softcaps(machine, scale, softcap):
    hold(machine, CASE.but(scale=scale, softcap=softcap, edges=(70,)).causal(), scale=4)


@pytest.mark.parametrize(
    ("scale", "softcap"), [(0.0, None), (0.0, 2.0), (1e-31, None), (1e6, 1.0), (1.0, 1e-31)]
)
def test_factors_of_no_usual_size_go_the_plain_way(machine, scale, softcap):
    made, case = cpu(machine), CASE.but(scale=scale, softcap=softcap)
    assert type(made.begin(case.arrays().q, case.problem)).__name__ == "PlainState"
    hold(machine, case)


def test_float64_goes_the_plain_way(machine):
    made, case = cpu(machine), CASE.but(dtype="float64").causal()
    assert_close(forward(made, case), expected(case), "float64")
    assert_gradients(backward(made, case), expected_gradients(case), 1e-13)


@pytest.mark.parametrize("rows", [0, 40])
def test_no_batch_no_rows_no_keys(machine, rows):
    made = cpu(machine, 2)
    for batch, keys in ((0, 40), (2, 0), (0, 0)):
        case = CASE.but(batch=batch, rows=rows, keys=keys)
        out, lse = forward(made, case)
        assert out.shape == (batch, rows, 4, 3)
        assert not out.any()
        assert np.isneginf(lse).all()
        dq, dk, dv = backward(made, case)
        assert dq.shape == (batch, rows, 4, 5)
        assert not any(gradient.any() for gradient in (dq, dk, dv))
    made.close()


def test_keys_beyond_a_chunk():
    """Of more than 16 blocks of keys, the copies are made anew; a short last one too."""
    for machine in (MACHINES["8"], MACHINES["16"]):
        case = Case(rows=3, keys=16 * 288 + 101, q_heads=2, kv_heads=1, head_dim=3, value_dim=2)
        hold(machine, case)
        hold(machine, case.banded(-4650, -3).but(edges=(4000,)))


def test_heads_whose_copies_do_not_fit_at_once():
    """So many heads and such long rows that a chunk's copies exceed what may be held at a time."""
    case = Case(rows=2, keys=1000, q_heads=24, kv_heads=24, head_dim=256, value_dim=256)
    hold(MACHINES["8"], case.banded(-998, None))


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (6, 2), (6, 3)], ids=str)
def test_threads(machine, threads, heads):
    """More threads than heads, and fewer."""
    case = CASE.but(rows=400, keys=600, q_heads=heads[0], kv_heads=heads[1]).causal()
    hold(machine, case, threads)


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_results_do_not_depend_on_threads(machine, kv_heads):
    """With few heads keys are dealt out in backward: sums are added up in one order even so."""
    case = CASE.but(rows=300, keys=1500, q_heads=2 * kv_heads, kv_heads=kv_heads).causal()
    makes = [cpu(machine, threads) for threads in (1, 2, 4)]
    assert_same_bits([forward(made, case) + backward(made, case) for made in makes])
    for made in makes:
        made.close()


def test_dq_of_the_parts_comes_in_rounds_of_one_size():
    sizes = {blocks: tiled_backward._at_once(blocks) for blocks in range(60)}
    assert [sizes[blocks] for blocks in (0, 1, 14, 15, 16, 28, 29)] == [1, 1, 14, 8, 8, 14, 10]
    for blocks, size in sizes.items():
        rounds = -(-blocks // size)
        assert size <= 14
        assert rounds == -(-blocks // 14)
        assert rounds * size - blocks < max(1, rounds)


def test_more_rows_than_one_dq_of_the_parts():
    """Parts of the keys have a dq of their own for 14 blocks of rows at a time at most, in memory
    that has been used before."""
    case = Case(rows=15 * 288 + 7, keys=600, q_heads=1, kv_heads=1, head_dim=3, value_dim=2)
    case = case.banded(-590, None)
    made = cpu(MACHINES["8"])
    for _ in range(2):
        assert_gradients(backward(made, case), expected_gradients(case))
    case = case.banded(4000, None)
    assert_gradients(backward(cpu(MACHINES["8"], 2), case), expected_gradients(case))


def test_gradients_are_added_to_what_is_there(machine):
    case, made = CASE.causal(), cpu(machine)
    x, (out, lse) = case.arrays(), expected(case)
    delta = np.einsum("brhd,brhd->bhr", x.dout, out).astype(np.float32)
    grads = made.begin_backward(x.q, x.dout, lse.astype(np.float32), delta, case.problem)
    dk, dv = np.full(x.k.shape, 1.5, np.float32), np.full(x.v.shape, -2.5, np.float32)
    ((_, tiles),) = case.shards()
    made.accumulate_backward(grads, x.k, x.v, dk, dv, tiles)
    dq = made.finish_backward(grads)
    assert_gradients((dq, dk - 1.5, dv + 2.5), expected_gradients(case))


def test_states_are_apart(machine):
    """Two passes of one backend at once, turn by turn: nothing is shared that is written."""
    made, cases = cpu(machine), [CASE.but(seed=seed, edges=(60,)).causal() for seed in (1, 2)]
    arrays = [case.arrays() for case in cases]
    states = [made.begin(x.q, case.problem) for x, case in zip(arrays, cases, strict=True)]
    for step in range(2):
        for state, x, case in zip(states, arrays, cases, strict=True):
            cut, tiles = case.shards()[step]
            made.accumulate(state, x.k[:, cut], x.v[:, cut], tiles)
    for state, case in zip(states, cases, strict=True):
        assert_close(made.finish(state), expected(case))


def test_what_is_handed_over_may_change_afterwards(machine):
    """K and V lie in slots that the ring writes to again."""
    made, case = cpu(machine), CASE.but(edges=(60,)).causal()
    x, before = case.arrays(), case.arrays()
    state = made.begin(x.q, case.problem)
    for cut, tiles in case.shards():
        k, v = x.k[:, cut].copy(), x.v[:, cut].copy()
        made.accumulate(state, k, v, tiles)
        k[:], v[:] = np.nan, np.nan
    assert_close(made.finish(state), expected(case))
    for one, other in zip(x, before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_long_scores_that_are_exact_cost_nothing(machine):
    """Scores of some thousands whose products are whole numbers: the scale is a float32 in the units
    of exponents, and lse is carried as two, so weights are as exact as those of short ones."""
    case = CASE.but(rows=60, keys=70, head_dim=4, scale=0.3).causal()
    arrays, rng = case.arrays(), np.random.default_rng(0)
    arrays.q[...] = rng.integers(40, 60, arrays.q.shape)
    arrays.k[...] = 60
    arrays.k[..., 0] += rng.integers(0, 2, arrays.k.shape[:3])
    arrays.q[..., 0] = rng.integers(1, 4, arrays.q.shape[:3])
    how = {"causal": True, "scale": 0.3}
    want, lse = oracle.attention(arrays.q, arrays.k, arrays.v, **how)
    assert lse.max() > 3000
    made = cpu(machine)
    out, got = forward(made, case, arrays)
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-6)
    np.testing.assert_allclose(got, lse, rtol=1e-7, atol=0)
    # With lse in float64: rounded to float32 it would be off by more than all else.
    grads = made.begin_backward(arrays.q, arrays.dout, lse, delta_of(arrays, want), case.problem)
    dk, dv = np.zeros_like(arrays.k), np.zeros_like(arrays.v)
    ((_, tiles),) = case.shards()
    made.accumulate_backward(grads, arrays.k, arrays.v, dk, dv, tiles)
    wanted = oracle.gradients(arrays.dout, arrays.q, arrays.k, arrays.v, **how)
    assert_gradients([dv], wanted[2:], 1e-6)
    # These sum the same with factors of 60, which cancel.
    assert_gradients((made.finish_backward(grads), dk), wanted[:2], 1e-5)


@st.composite
def cases(draw, edges=(96, 192, 288)):
    """Disjoint pieces, cut by a grid and each with a band or none, over shards in any order; often
    of lengths and bounds next to the edges of blocks."""
    near = st.sampled_from(edges).flatmap(lambda edge: st.integers(edge - 2, edge + 2))
    length = st.integers(1, 40) | near | st.integers(1, 400)
    rows, keys = draw(length), draw(length)
    q_edges, k_edges = (
        sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in (rows, keys)
    )
    pieces = [
        Piece(q0, q1, k0, k1, *draw(_band(rows, keys)))
        for q0, q1 in pairwise(q_edges)
        for k0, k1 in pairwise(k_edges)
        if draw(st.integers(0, 3))
    ]
    cuts = tuple(sorted(set(draw(st.lists(st.integers(1, max(1, keys - 1)), max_size=3)))))
    cuts = tuple(cut for cut in cuts if cut < keys)
    order = tuple(draw(st.permutations(range(len(cuts) + 1))))
    kv_heads = draw(st.integers(1, 2))
    return Case(
        rows=rows, keys=keys, q_heads=kv_heads * draw(st.integers(1, 2)), kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 5, 17])), value_dim=draw(st.sampled_from([1, 3])),
        mask="drawn", pieces=tuple(pieces), edges=cuts, order=order,
        softcap=draw(st.sampled_from([None, None, 1.5])),
    )  # fmt: skip


def _band(rows, keys):
    bound = st.none() | st.integers(-keys, rows)
    return st.tuples(bound, bound)


@settings(max_examples=40)
@given(cases(), st.sampled_from(list(MACHINES)), st.sampled_from([1, 3]))
def test_any_pieces_in_any_shards(case, machine, threads):
    hold(MACHINES[machine], case, threads)


def test_machines_compute_alike():
    """But for rounding: nothing of the result hangs on the width."""
    case = CASE.causal()
    results = [forward(cpu(machine), case)[0] for machine in MACHINES.values()]
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], rtol=0, atol=2e-6)
    assert replace(MACHINES["8"], rows=6) == MACHINES["8"]


@pytest.mark.parametrize("name", ["8", "16"])
def test_gradients_are_added_wherever_their_elements_lie(name):
    """dk and dv with heads, or elements, that are not side by side; what is there stays."""
    case = CASE.causal()
    arrays, problem = case.arrays(), case.problem
    out, lse = expected(case)
    _, *want = expected_gradients(case)
    made = cpu(MACHINES[name])
    made.prepare(problem)
    rows = lse.astype(np.float32), delta_of(arrays, out).astype(np.float32)
    ((_, tiles),) = case.shards()
    for axes in ((0, 2, 1, 3), (3, 0, 2, 1), (0, 1, 2, 3)):
        back = np.argsort(axes)
        totals = [
            np.full([x.shape[axis] for axis in axes], 3, np.float32).transpose(back)
            for x in (arrays.k, arrays.v)
        ]
        grads = made.begin_backward(arrays.q, arrays.dout, *rows, problem)
        made.accumulate_backward(grads, arrays.k, arrays.v, *totals, tiles)
        assert_gradients([total - 3 for total in totals], want)
    made.close()
