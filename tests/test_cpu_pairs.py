"""bf16 multiplied in pairs, its instructions emulated: within the bounds of backends that round
weights, whatever is odd."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_support import (
    PAIRS,
    assert_gradients,
    assert_same_bits,
    backward,
    cpu,
    expected,
    expected_gradients,
    forward,
    masked,
    pieces_of,
    seen_by,
)
from hypothesis import given, settings
from test_cpu_backend import LENGTHS, MASKS, cases

from ringrt.conformance import oracle
from ringrt.conformance.bounds import Bounds, hold
from ringrt.conformance.cases import Case
from ringrt_backends import _cpu_rounds_weights
from ringrt_backends.cpu import backend, machine

pytestmark = pytest.mark.timeout(240)

CASE = Case("bfloat16", rows=101, keys=119, q_heads=4, kv_heads=2, head_dim=6, value_dim=4)


def hold_pairs(case, threads=1):
    """out, lse and the gradients, within the conformance bounds."""
    made, x, problem = cpu(PAIRS, threads), case.arrays(), case.problem
    seen = seen_by(pieces_of(case), case.rows, case.keys)
    bounds, scores = Bounds("bfloat16", True), (problem.scale, case.softcap)
    exact = oracle.attention(x.q, x.k, x.v, seen, *scores, case.logits)
    out, lse = forward(made, case)
    hold("lse", lse, exact.lse, bounds.lse(exact), case)
    hold("out", out, exact.out.value, bounds.out(exact, out), case)
    delta = np.einsum("brhd,brhd->bhr", x.dout.astype(float), exact.out.value)
    rows = exact.lse.astype(np.float32), delta.astype(np.float32)
    wanted = oracle.gradients(x.q, x.k, x.v, x.dout, *rows, seen, *scores)
    got = backward(made, case, x, *rows)
    for name, one in zip(("dq", "dk", "dv"), got, strict=True):
        want = getattr(wanted, name)
        hold(name, one, want.value, bounds.gradient(wanted, want, one), case)
    made.close()


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(lengths):
    case = CASE.but(rows=lengths[0], keys=lengths[1], q_heads=1, kv_heads=1)
    hold_pairs(case)
    hold_pairs(case.causal())


@pytest.mark.parametrize(
    "dims", [(1, 1), (2, 3), (3, 2), (5, 7), (16, 17), (17, 16), (33, 64), (65, 80), (128, 127)], ids=str
)  # fmt: skip
def test_dims_even_and_odd(dims):
    hold_pairs(CASE.but(head_dim=dims[0], value_dim=dims[1], rows=70, keys=81).causal())


@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask):
    case = masked(
        Case("bfloat16", rows=330, keys=330, q_heads=2, kv_heads=1, head_dim=5), **MASKS[mask]
    )
    hold_pairs(case)


@pytest.mark.parametrize("edges", [(1,), (2,), (59, 60), (1, 2, 3, 98), (7, 96, 97, 118)], ids=str)
def test_shards_that_begin_at_odd_keys(edges):
    case = CASE.but(edges=edges, order=tuple(range(len(edges), -1, -1)))
    hold_pairs(case.causal())
    hold_pairs(case.banded(-30, 25))


@pytest.mark.parametrize("bounds", [(-17, None), (-16, None), (None, 3), (-10, -3), (1, 1), (99, None)], ids=str)  # fmt: skip
def test_bands_that_begin_at_odd_rows_and_keys(bounds):
    hold_pairs(CASE.banded(*bounds))
    hold_pairs(CASE.but(rows=333, keys=299, q_heads=1, kv_heads=1).banded(*bounds))


def test_batch_and_threads():
    case = CASE.but(batch=2, rows=300, keys=601, q_heads=2, kv_heads=1, edges=(333,)).causal()
    hold_pairs(case, threads=3)
    makes = [cpu(PAIRS, threads) for threads in (1, 2, 4)]
    assert_same_bits([forward(made, case) + backward(made, case) for made in makes])


@pytest.mark.parametrize(
    "change", [{"scale": -0.7}, {"softcap": 1.5}, {"scale": -0.3, "softcap": 0.5}, {"sink": (0.5, -2.0, 9.0, -np.inf)}], ids=str
)  # fmt: skip
def test_scores(change):
    hold_pairs(CASE.but(**change, edges=(51,)).causal())


@settings(max_examples=25)
@given(cases())
def test_any_pieces_in_any_shards(case):
    hold_pairs(case.but(dtype="bfloat16"))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes_are_not_rounded(dtype):
    """They take the same code as without pairs, at its accuracy."""
    case = CASE.but(dtype=dtype).causal()
    out, lse = forward(cpu(PAIRS), case)
    want, want_lse = expected(case)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=2e-6)
    half = 1e-3 if dtype == "float16" else 0
    np.testing.assert_allclose(out.astype(float), want, rtol=0, atol=half + 2e-6)
    assert_gradients(backward(cpu(PAIRS), case), expected_gradients(case))


def test_weights_are_rounded_and_nothing_else():
    """The weight of a single key is 1, a bf16, so out is the value itself; and the mean of many keys
    of one value is that value, but for weights and out that are rounded."""
    single, many = CASE.but(rows=40, keys=1), CASE.but(rows=40, keys=97)
    out, _ = forward(cpu(PAIRS), single)
    value = single.arrays().v.repeat(2, axis=2)
    np.testing.assert_array_equal(out, np.broadcast_to(value, out.shape))
    arrays = many.arrays()
    arrays.v[...] = value[:, :, ::2]
    out, _ = forward(cpu(PAIRS), many, arrays)
    wide = np.broadcast_to(value, out.shape).astype(float)
    np.testing.assert_allclose(out.astype(float), wide, rtol=2**-7, atol=0)


def test_the_backend_says_that_it_rounds_weights(monkeypatch):
    """So its checks and jobs allow for that, for bf16 alone, and where pairs are multiplied."""
    for found, rounds in (
        (PAIRS, True),
        (None, False),
        (machine.this_machine(("avx512bf16",)), False),
    ):
        monkeypatch.setattr(backend, "code_in_use", lambda found=found: (found, ""))
        assert _cpu_rounds_weights("bfloat16") is rounds
        assert not _cpu_rounds_weights("float16")
        assert not _cpu_rounds_weights("float32")
