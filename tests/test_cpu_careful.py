"""Numbers that the compiled kernels are not for: NaN, inf, and such that products overflow. What a
row does not see never reaches it, what it sees does, and other blocks stay with the fast code."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_support import (
    MACHINES,
    PAIRS,
    assert_gradients,
    backward,
    cpu,
    delta_of,
    expected,
    expected_gradients,
    forward,
)

from ringrt.conformance.cases import Case
from ringrt.plan import Piece
from ringrt_backends.cpu import careful
from ringrt_backends.reference import ReferenceBackend

pytestmark = pytest.mark.timeout(240)

#: Several blocks of queries and of keys, several parts of a block of keys, in both passes.
CASE = Case(rows=400, keys=410, q_heads=2, kv_heads=1, head_dim=4, value_dim=3).causal()
GROUPED = CASE.but(batch=2, q_heads=4, kv_heads=2, edges=(130, 131), order=(2, 0, 1))
BAD = (np.nan, np.inf, -np.inf, 1e20, 3e38)
#: Beside the edges of parts (96), blocks (192, 288) and shards, and in a row that all see.
PLACES = (0, 95, 96, 191, 192, 288, 399)

REFERENCE = ReferenceBackend()


@pytest.fixture
def made():
    backend = cpu(MACHINES["8"], 2)
    yield backend
    backend.close()


@pytest.fixture(params=["4", "16"])
def others(request):
    """Of other widths, where that may matter."""
    backend = cpu(MACHINES[request.param], 1)
    yield backend
    backend.close()


def same(got, want, tolerance=4e-6):
    """NaN and inf where the other has them; otherwise close, relative to the size of each row's
    largest number."""
    for one, other in zip(got, want, strict=True):
        one, other = one.astype(float), other.astype(float)
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
        finite = np.isfinite(other)
        np.testing.assert_array_equal(one[~finite], other[~finite])
        size = np.maximum(1, np.max(np.where(finite, abs(other), 0), axis=-1, keepdims=True))
        with np.errstate(invalid="ignore"):
            off = np.where(finite, abs(one - other) / size, 0)
        assert off.max(initial=0) <= tolerance


def both(made, case, arrays, lse=None, delta=None, tolerance=4e-6):
    """Both passes as the reference backend does them."""
    same(forward(made, case, arrays), forward(REFERENCE, case, arrays), tolerance)
    if lse is None:
        out, lse = forward(REFERENCE, case, arrays)
        delta = delta_of(arrays, out)
    with np.errstate(over="ignore", invalid="ignore"):
        want = backward(REFERENCE, case, arrays, lse, delta)
        same(backward(made, case, arrays, lse, delta), want, tolerance)


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
def test_one_number_anywhere(which, bad):
    made, case = cpu(MACHINES["8"]), CASE.but(q_heads=1)
    for number, place in enumerate(PLACES):
        shards = {"edges": (96, 300), "order": (1, 2, 0)} if number % 2 else {}
        arrays = case.arrays()
        getattr(arrays, which)[0, place, 0, 2] = bad
        both(made, case.but(**shards), arrays)


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_several_heads_batches_and_shards(made, bad):
    """Only one batch and head has such a number; of rows, keys and values each somewhere else."""
    arrays = GROUPED.arrays()
    arrays.q[1, 200, 3, 0] = bad
    arrays.k[0, 300, 1, 1] = bad
    arrays.v[1, 130, 0, 2] = bad
    arrays.dout[0, 20, 2, 1] = bad
    both(made, GROUPED, arrays)


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("which", ["k", "v"])
def test_what_nobody_sees_reaches_nobody(made, which, bad):
    """Keys between two bands, in a tile that is seen in part, and after the last one seen."""
    case = CASE.banded(60, 200)
    arrays = case.arrays()
    getattr(arrays, which)[0, 341:] = bad
    np.testing.assert_array_equal(case.seen[:, 341:], False)
    for got, want in zip(forward(made, case, arrays), expected(case), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
    out, lse = expected(case)
    got = backward(made, case, arrays, lse, delta_of(arrays, out))
    assert_gradients(got, expected_gradients(case))


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_rows_that_do_not_see_it(others, bad):
    """In a block of keys that the rows see in part: those before it are as ever, those after it
    have what the definition says."""
    for place in (50, 97, 290):
        arrays = CASE.arrays()
        arrays.k[0, place], arrays.v[0, place] = bad, bad
        out, lse = forward(others, CASE, arrays)
        want, want_lse = expected(CASE)
        first = place - 10
        np.testing.assert_allclose(out[:, :first], want[:, :first], rtol=0, atol=2e-6)
        np.testing.assert_allclose(lse[..., :first], want_lse[..., :first], rtol=0, atol=2e-6)
        both(others, CASE, arrays)


@pytest.mark.parametrize("bad", [-np.inf, np.inf, np.nan, 1e20, -1e20], ids=str)
@pytest.mark.parametrize("which", ["lse", "delta"])
def test_what_backward_is_given_of_the_rows(made, which, bad):
    out, lse = expected(CASE)
    arrays = CASE.arrays()
    for place in PLACES:
        rows = {"lse": lse.copy(), "delta": delta_of(arrays, out)}
        rows[which][0, 1, place] = bad
        with np.errstate(over="ignore", invalid="ignore"):
            want = backward(REFERENCE, CASE, arrays, **rows)
            same(backward(made, CASE, arrays, **rows), want)


def test_an_empty_row_s_delta_may_be_anything(made):
    """A row without keys has lse −inf, and no gradients whatever else it has."""
    case = CASE.banded(100, None)
    arrays, (out, lse) = case.arrays(), expected(case)
    assert np.isneginf(lse[0, :, 99]).all()
    delta = delta_of(arrays, out)
    delta[0, 0, 40], delta[0, 1, 50] = np.nan, 1e30
    assert_gradients(backward(made, case, arrays, lse, delta), expected_gradients(case))


@pytest.mark.parametrize("sink", [(0.5, -np.inf), (1e4, -3.0)], ids=str)
def test_with_sinks(made, sink):
    case = CASE.but(sink=sink, edges=(200,))
    for which in "qkv":
        arrays = case.arrays()
        getattr(arrays, which)[0, 250, 0, 0] = np.inf
        both(made, case, arrays)


@pytest.mark.parametrize("change", [{"softcap": 2.0}, {"scale": -0.4}, {"scale": -0.4, "softcap": 9.0}], ids=str)  # fmt: skip
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e20], ids=str)
def test_scales_and_softcaps(made, change, bad):
    case = CASE.but(**change, edges=(200,))
    for which in "qkv":
        arrays = case.arrays()
        getattr(arrays, which)[0, 250, 0, 0] = bad
        both(made, case, arrays)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_dtypes(dtype):
    """Rounded alike: out is compared in its own dtype, by twice its unit."""
    for machine in (MACHINES["8"], PAIRS):
        case = CASE.but(dtype=dtype, edges=(100,))
        for bad in (np.nan, np.inf, -np.inf, *([3e38] if dtype == "bfloat16" else [])):
            for which in "qkv":
                arrays = case.arrays()
                getattr(arrays, which)[0, 250, 0, 1] = bad
                both(cpu(machine), case, arrays, tolerance=2**-6)


@pytest.mark.parametrize("size", [1e3, 3e4, 1e5, 1e6, 1e8, 9e8, 1e12])
def test_long_rows_have_long_scores(others, size):
    """Numbers of float32 whose scores are so large that rounding one is an exponent: the largest
    has all the weight even so, and equal ones share it."""
    case = Case(rows=8, keys=9, q_heads=1, kv_heads=1, head_dim=8, edges=(4,))
    for equal in (True, False):
        arrays = case.arrays()
        arrays.q[...], arrays.k[...] = (size, size) if equal else (size * arrays.q, size * arrays.k)
        out, lse = forward(others, case, arrays)
        want, want_lse = forward(REFERENCE, case, arrays)
        np.testing.assert_allclose(lse, want_lse, rtol=5e-7, atol=0)
        np.testing.assert_allclose(out, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sink", [1e6, 1e10, 1e12, 1e20, 3e38, -1e12, -3e38])
def test_sinks_of_any_size(made, sink):
    case = Case(rows=8, keys=9, q_heads=2, kv_heads=1, sink=(sink, 0.5), edges=(4,))
    out, lse = forward(made, case)
    want, want_lse = expected(case)
    np.testing.assert_allclose(lse, want_lse, rtol=2e-7, atol=2e-6)
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-6)


# What goes the careful way, and what does not.


class Spy(ReferenceBackend):
    """The reference backend, and the tiles of each call."""

    def __init__(self):
        self.forward, self.backward = [], []

    def accumulate(self, state, k, v, tiles, stream=None):
        self.forward.append(tiles.table.copy())
        super().accumulate(state, k, v, tiles, stream)

    def accumulate_backward(self, grads, k, v, dk, dv, tiles, stream=None):
        self.backward.append(tiles.table.copy())
        super().accumulate_backward(grads, k, v, dk, dv, tiles, stream)


@pytest.fixture
def spy(monkeypatch):
    """In the place of the careful path's backend."""
    made = Spy()
    monkeypatch.setattr(careful, "_REFERENCE", made)
    return made


@pytest.mark.parametrize(("size", "careful"), [(1e9, False), (2e9, True), (np.nan, True)])
def test_ordinary_is_what_products_allow(made, spy, size, careful):
    """Values of 1e9 and below stay with the compiled kernels."""
    arrays = CASE.arrays()
    arrays.v[0, 7, 0, 0] = size
    result = forward(made, CASE, arrays)
    assert bool(spy.forward) == careful
    same(result, forward(REFERENCE, CASE, arrays))


def test_ordinary_numbers_never_take_the_careful_path(made, spy):
    forward(made, GROUPED)
    backward(made, GROUPED)
    assert spy.forward == []
    assert spy.backward == []


def test_only_a_query_s_own_block_is_taken_with_care(made, spy):
    """One row of one of four heads: its block of 192 queries in forward, of 288 in backward,
    against three shards."""
    arrays = GROUPED.arrays()
    arrays.q[1, 200, 3, 0] = np.nan
    out, lse = forward(REFERENCE, GROUPED, arrays)
    forward(made, GROUPED, arrays)
    backward(made, GROUPED, arrays, lse, delta_of(arrays, out))
    assert 1 <= len(spy.forward) <= 3
    assert 1 <= len(spy.backward) <= 3
    assert all(table[:, 1].max() <= 192 for table in spy.forward if len(table))
    assert all(table[:, 1].max() <= 288 for table in spy.backward if len(table))


def test_only_the_tiles_that_touch_a_bad_key_are_taken_with_care(made, spy):
    """Of a window, whose rows see few keys: rows that do not see the part of the bad key stay."""
    case = CASE.banded(-5, 20).but(q_heads=1)
    arrays = case.arrays()
    arrays.v[0, 30, 0, 0] = np.inf
    out, lse = expected(case)
    forward(made, case, arrays)
    backward(made, case, arrays, lse, delta_of(arrays, out))
    # The third block of queries, from 192 on, sees no key before 172.
    assert [len(table) > 0 for table in spy.forward].count(True) == 2
    # Of the two blocks of keys only the first.
    assert all(table[:, 3].max() <= 288 for table in spy.backward if len(table))
    for rows in ((), (lse, delta_of(arrays, out))):
        both(made, case, arrays, *rows)


def test_numbers_of_an_earlier_pass_are_forgotten(others):
    """What was packed lies in memory that is used again: NaN of an earlier pass, and of a longer
    one, reach nothing."""
    for bad in (np.nan, 3e38):
        for case in (GROUPED, CASE, CASE.but(rows=30, keys=33), CASE.but(rows=390, keys=301)):
            arrays = case.arrays()
            for x in arrays:
                x[...] = bad
            forward(others, case, arrays)
            out, lse = expected(case)
            backward(others, case, arrays, lse, delta_of(arrays, out))
            for other in (CASE, CASE.but(rows=31, keys=29), case):
                result = forward(others, other)
                for got, want in zip(result, expected(other), strict=True):
                    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
                assert_gradients(backward(others, other), expected_gradients(other))


@pytest.mark.parametrize("machine", [MACHINES["8"], PAIRS], ids=str)
def test_numbers_of_an_earlier_block_are_forgotten(machine):
    """Of keys, in backward: where a tile, or a pair of keys, reaches over the end of a short block,
    a longer one of the same thread had NaN."""
    pieces = (Piece(0, 50, 0, 288), Piece(50, 100, 288, 409))
    case = Case("bfloat16", rows=100, keys=409, q_heads=1, kv_heads=1, head_dim=4, value_dim=2)
    case = case.but(mask="two pieces", pieces=pieces)
    arrays, (out, lse) = case.arrays(), expected(case)
    arrays.k[0, 121:130], arrays.v[0, 121:130] = np.nan, np.nan
    dq, dk, dv = backward(cpu(machine), case, arrays, lse, delta_of(arrays, out))
    wanted = expected_gradients(case)
    assert np.isnan(dq[:, :50]).all()
    kept = (
        (dq[:, 50:], wanted[0][:, 50:]),
        (dk[:, 288:], wanted[1][:, 288:]),
        (dv[:, 288:], wanted[2][:, 288:]),
    )
    for got, want in kept:
        np.testing.assert_allclose(got, want, rtol=0, atol=0.02 if machine.pairs else 2e-6)


def test_a_head_of_those_that_are_packed_last(made):
    """So many heads and such long rows that a chunk's copies are made in turns."""
    case = Case(rows=2, keys=1000, q_heads=24, kv_heads=24, head_dim=256, value_dim=256)
    arrays = case.arrays()
    arrays.v[0, 7, 20, 3] = np.nan
    out, lse = forward(made, case, arrays)
    np.testing.assert_array_equal(np.argwhere(np.isnan(out)), [[0, row, 20, 3] for row in (0, 1)])
    assert np.isfinite(lse).all()
