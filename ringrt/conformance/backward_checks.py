"""What a backend computes in backward, held to the oracle: dq, dk and dv, given out and lse of the
whole row."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np

from ringrt.conformance.call_checks import hold_same, overwrite
from ringrt.conformance.cases import Case
from ringrt.conformance.checks import CheckList, Refused, each, expect
from ringrt.conformance.layouts import Keeping, layouts
from ringrt.conformance.passes import (
    Backward,
    Given,
    backward,
    exact_gradients,
    hold_backward,
    hold_forward,
    hold_gradients,
)
from ringrt.conformance.subject import Subject
from ringrt.plan import Piece

CHECKS: CheckList[Subject] = CheckList()


def right(subject: Subject, cases: Iterable[Case]) -> None:
    """The gradients of every case that is not refused equal the oracle."""
    subject.refusals += each(cases, partial(hold_backward, subject))


def _dtype(subject: Subject, dtype: str) -> None:
    case = subject.base.but(dtype=dtype)
    right(subject, (case, case.causal()))


@CHECKS.add
def backward_float16(subject: Subject) -> None:
    """Gradients of float16, full and causal."""
    _dtype(subject, "float16")


@CHECKS.add
def backward_bfloat16(subject: Subject) -> None:
    """Gradients of bfloat16, full and causal."""
    _dtype(subject, "bfloat16")


@CHECKS.add
def backward_float32(subject: Subject) -> None:
    """Gradients of float32, full and causal."""
    _dtype(subject, "float32")


@CHECKS.add
def backward_float64(subject: Subject) -> None:
    """Gradients of float64, full and causal."""
    _dtype(subject, "float64")


@CHECKS.add
def backward_bands(subject: Subject) -> None:
    """Bands with either bound, both, far off the diagonal, and several tiles over the same
    rows."""
    bounds = ((-7, None), (5, None), (None, 6), (None, -20), (-9, 6), (0, 0), (30, None))
    right(subject, (subject.base.banded(*both) for both in bounds))
    window = (Piece(0, 33, 0, 3), Piece(0, 33, 3, 20, 4, 30), Piece(0, 33, 20, 40, -15, 9))
    right(subject, (subject.base.but(mask="three pieces", pieces=window),))


@CHECKS.add
def backward_many_shards(subject: Subject) -> None:
    """out and lse of the whole row, not a shard's own, drive every shard, in any order."""
    case = subject.base.causal()
    cut = case.but(edges=(1, 8, 17, 30))
    right(subject, (cut, cut.but(order=(4, 2, 0, 3, 1)), subject.base.but(edges=(20,))))


@CHECKS.add
def backward_adds(subject: Subject) -> None:
    """dk and dv are added to what the sums hold already."""
    case = subject.base.but(edges=(20,)).causal()
    subject.ask_backward(case)
    given = Given.of(case)
    run = Backward(subject, case, given)
    run.before = 3.0
    for cut, tiles in case.shards():
        run.absorb(cut, tiles)
    dq, dk, dv = run.finish()
    want = exact_gradients(case, given)
    for name, got, one in (("dk", dk, want.dk), ("dv", dv, want.dv)):
        added = got.astype(np.float64) - one.value
        expect(
            abs(added).mean() > 1,
            f"{name} must be added to what is there, and was put in its place; for {case}",
        )
    hold_gradients(subject, case, (dq, dk - run.before, dv - run.before), want)


@CHECKS.add
def backward_grouped_heads(subject: Subject) -> None:
    """dk and dv of a KV head are the sums over its query heads: 4/2, 8/1, 6/3."""
    heads = ((4, 2), (8, 1), (6, 3))
    right(subject, (subject.base.but(q_heads=q, kv_heads=kv).causal() for q, kv in heads))
    right(subject, (subject.base.but(batch=2, q_heads=4, kv_heads=2, edges=(11,)).causal(),))


@CHECKS.add
def backward_dims(subject: Subject) -> None:
    """Gradients where value_dim is not head_dim, and of odd dims."""
    case = subject.base.causal()
    right(subject, (case.but(value_dim=dim) for dim in (case.head_dim // 2, case.head_dim * 2, 5)))
    right(subject, (case.but(head_dim=dim) for dim in (1, 17, 80, 129)))


@CHECKS.add
def backward_lengths(subject: Subject) -> None:
    """Gradients of 0, 1, 17 and 129 rows and keys, and of batch 0 and 2."""
    lengths = ((0, 5), (5, 0), (1, 1), (1, 129), (129, 1), (17, 129), (129, 17))
    right(subject, (subject.base.but(rows=rows, keys=keys) for rows, keys in lengths))
    right(subject, (subject.base.but(batch=batch).causal() for batch in (0, 2)))


@CHECKS.add
def backward_scales(subject: Subject) -> None:
    """Gradients with scale 0, negative and large."""
    right(subject, (subject.base.but(scale=scale).causal() for scale in (0.0, -0.7, 3.0)))


@CHECKS.add
def backward_softcap(subject: Subject) -> None:
    """Gradients through a softcap."""
    case = subject.base.causal()
    right(subject, (case.but(softcap=0.5), case.but(softcap=30.0, scale=2.0, edges=(17,))))


@CHECKS.add
def backward_sinks(subject: Subject) -> None:
    """Gradients where a sink is part of lse."""
    case = subject.base.causal()
    right(subject, (case.but(sink=(0.5, -np.inf)), case.but(sink=(3.0, -2.0), edges=(17,))))


@CHECKS.add
def backward_rows_that_see_nothing(subject: Subject) -> None:
    """A row that sees no key, or none but scores of −inf, has no gradients and adds none."""
    case = subject.base
    some = case.but(mask="rows 9 to 20 see nothing", pieces=(
        Piece(0, 9, 0, 40), Piece(20, 33, 5, 40, 2)))  # fmt: skip
    most = case.but(edges=(7,)).banded(25)
    right(subject, (some, most, case.but(mask="nothing", pieces=())))
    square = case.but(keys=case.rows).causal().but(mask="causal, keys 0 and 1 of -inf")
    arrays = square.arrays()
    arrays.q[:] = abs(arrays.q) + 0.1
    arrays.k[:, :2] = -np.inf
    given = Given.of(square, arrays)
    _, dk, dv = backward(subject, square, given, arrays)
    want = exact_gradients(square, given, arrays)
    # dq there is 0 · inf, of which nothing is asked.
    hold_gradients(subject, square, (want.dq.value, dk, dv), want)


@CHECKS.add
def backward_unseen_nan(subject: Subject) -> None:
    """NaN and inf of rows and keys that see nothing of one another reach no gradient."""
    pieces = (Piece(0, 9, 0, 12), Piece(14, 33, 12, 25, None, 6))
    case = subject.base.but(mask="two rectangles", pieces=pieces, edges=(12,))
    _spoiled(subject, case, slice(9, 14), slice(25, None))
    # Neither do they reach what lies beside them in the same shard.
    case = case.but(edges=())
    _spoiled(subject, case, slice(0, 9), slice(0, 12), slice(9, None), slice(12, None))


@CHECKS.add
def backward_unseen_nan_in_a_tile(subject: Subject) -> None:
    """The same inside a tile that is seen in part (where the spec says `contains_nan`)."""
    subject.ask_backward(subject.base)
    if not subject.spec.contains_nan:
        raise Refused("the spec says contains_nan=False")
    case = subject.base.but(keys=subject.base.rows).causal()
    late, early, none = slice(20, None), slice(0, 10), slice(0)
    after, before = (case.but(mask=f"causal, NaN {where}") for where in ("from 20 on", "before 10"))
    _spoiled(subject, after, late, late, slice(0, 20), none)
    _spoiled(subject, before, early, none, none, slice(10, None))


def _spoiled(
    subject: Subject,
    case: Case,
    bad_rows: slice,
    bad_keys: slice,
    rows: slice = slice(None),
    keys: slice = slice(None),
) -> None:
    """Some rows and keys are NaN or inf; the gradients of `rows` and `keys`, none of which meets
    any of them, are held to the oracle."""
    subject.ask_backward(case)
    clean = case.arrays()
    given, arrays = Given.of(case, clean), clean.copy()
    arrays.q[:, bad_rows], arrays.dout[:, bad_rows] = np.nan, np.inf
    arrays.k[:, bad_keys], arrays.v[:, bad_keys] = np.nan, np.inf
    got = backward(subject, case, given, arrays)
    hold_gradients(subject, case, got, exact_gradients(case, given, clean), rows, keys)


@CHECKS.add
def backward_strided_inputs(subject: Subject) -> None:
    """q, k, v and dout in any layout."""
    case = subject.base.but(batch=2, edges=(13,)).causal()
    for name, put in layouts(subject.device):
        hold_backward(subject, case.but(mask=f"causal, inputs {name}"), case.arrays(), put)


@CHECKS.add
def backward_unwritten_inputs(subject: Subject) -> None:
    """q, k, v, dout, lse and delta are never written."""
    case = subject.base.but(edges=(13,)).causal()
    subject.ask_backward(case)
    keeping, given, before = Keeping(), Given.of(case), Given.of(case)
    backward(subject, case, given, put=keeping)
    keeping.hold(case)
    pairs = (given.lse, given.delta), (before.lse, before.delta)
    hold_same(*pairs, ("lse", "delta"), f"it was written to; for {case}")


@CHECKS.add
def backward_overwritten_keys(subject: Subject) -> None:
    """k and v may be overwritten once `accumulate_backward` has returned (on a device: behind it
    on the stream)."""
    case = subject.base.but(edges=(13, 27)).causal()
    subject.ask_backward(case)
    given = Given.of(case)
    run = Backward(subject, case, given)
    for cut, tiles in case.shards():
        run.absorb(cut, tiles)
        overwrite(subject, run.handed)
    hold_gradients(subject, case, run.finish(), exact_gradients(case, given))


@CHECKS.add
def backward_same_bits(subject: Subject) -> None:
    """Two backward passes over the same arrays give the same bits."""
    case = subject.base.but(rows=150, keys=150, q_heads=6, kv_heads=6, edges=(70,)).causal()
    subject.ask_backward(case)
    given = Given.of(case)
    first, second = (backward(subject, case, given) for _ in range(2))
    hold_same(first, second, ("dq", "dk", "dv"), f"two passes give different bits; for {case}")


@CHECKS.add
def backward_interleaved(subject: Subject) -> None:
    """A backward and a forward pass of one backend at a time do not meet."""
    case = subject.base.but(edges=(20,)).causal()
    subject.ask_backward(case)
    given = Given.of(case)
    run = Backward(subject, case, given)
    for cut, tiles in case.shards():
        run.absorb(cut, tiles)
        hold_forward(subject, case.but(seed=5))
    hold_gradients(subject, case, run.finish(), exact_gradients(case, given))
