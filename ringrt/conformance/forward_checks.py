"""What a backend computes in forward: dtypes, bands, shards, heads, scores, sinks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np

from ringrt.conformance.bounds import Bounds, hold_lse
from ringrt.conformance.cases import Case
from ringrt.conformance.checks import CheckList, Refused, each, expect
from ringrt.conformance.passes import Forward, exact, forward, hold_forward, hold_result
from ringrt.conformance.subject import Subject
from ringrt.plan import Piece
from ringrt.plan.problem import ITEMSIZE
from ringrt.plan.tiles import EMPTY

CHECKS: CheckList[Subject] = CheckList()


def right(subject: Subject, cases: Iterable[Case]) -> None:
    """Every case that is not refused equals the oracle."""
    subject.refusals += each(cases, partial(hold_forward, subject))


@CHECKS.add
def does_something(subject: Subject) -> None:
    """At least plain full attention, in one dtype."""
    try:
        case = subject.base
    except Refused as refusal:
        expect(False, f"plain full attention is refused in every dtype: {refusal}")
    else:
        hold_forward(subject, case)


def _dtype(subject: Subject, dtype: str) -> None:
    case = subject.base.but(dtype=dtype)
    right(subject, (case, case.causal()))


@CHECKS.add
def float16(subject: Subject) -> None:
    """float16, full and causal."""
    _dtype(subject, "float16")


@CHECKS.add
def bfloat16(subject: Subject) -> None:
    """bfloat16, full and causal."""
    _dtype(subject, "bfloat16")


@CHECKS.add
def float32(subject: Subject) -> None:
    """float32, full and causal."""
    _dtype(subject, "float32")


@CHECKS.add
def float64(subject: Subject) -> None:
    """float64, full and causal."""
    _dtype(subject, "float64")


@CHECKS.add
def results(subject: Subject) -> None:
    """out `[batch, rows, q_heads, value_dim]` in the dtype of the inputs, lse `[batch, q_heads,
    rows]` in that of the state: float32, or float64 for float64."""
    shape = {"batch": 2, "rows": 9, "keys": 7, "q_heads": 4, "kv_heads": 4}
    cases = (subject.base.but(dtype=dtype, **shape) for dtype in ITEMSIZE)
    subject.refusals += each(cases, partial(forward, subject))


@CHECKS.add
def natural_logarithm(subject: Subject) -> None:
    """lse is the natural logarithm of the sum of e^score."""
    case = subject.base
    _, lse = forward(subject, case)
    want = exact(case)
    hold_lse(lse, want.lse, Bounds(case.dtype, subject.spec.rounds(case.dtype)).lse(want), case)


@CHECKS.add
def lower_bound(subject: Subject) -> None:
    """Bands with a lower bound only: causal, and above and below that."""
    right(subject, (subject.base.banded(low, None) for low in (0, -7, 5, -38, 30)))


@CHECKS.add
def upper_bound(subject: Subject) -> None:
    """Bands with an upper bound only."""
    right(subject, (subject.base.banded(None, high) for high in (0, -7, 5, -38, 30)))


@CHECKS.add
def two_bounds(subject: Subject) -> None:
    """Bands with both bounds, wide and narrow, down to one diagonal."""
    bounds = ((-9, 6), (0, 10), (-20, -3), (0, 0), (4, 5))
    right(subject, (subject.base.banded(*both) for both in bounds))


@CHECKS.add
def far_bands(subject: Subject) -> None:
    """Bands far off the diagonal, of few pairs in a corner."""
    case = subject.base.but(rows=70, keys=90)
    bounds = ((66, None), (None, -86), (60, 64), (-85, -80))
    right(subject, (case.banded(*both) for both in bounds))


@CHECKS.add
def overlapping_tiles(subject: Subject) -> None:
    """Several tiles over the same rows, as a window beside sink tokens makes them; many tiles."""
    case = subject.base.but(rows=70, keys=70)
    window = (Piece(0, 70, 0, 3), Piece(0, 70, 3, 40, 4, 30), Piece(0, 70, 40, 70, 0, 9))
    documents = (Piece(0, 20, 0, 25, 0), Piece(20, 21, 25, 26), Piece(30, 70, 26, 60, None, 12))
    named = (("three pieces", window), ("documents", documents))
    right(subject, (case.but(mask=mask, pieces=pieces) for mask, pieces in named))
    small = tuple(Piece(i, i + 2, i, i + 2) for i in range(0, 200, 2))
    right(subject, (case.but(rows=200, keys=200, mask="100 documents", pieces=small),))


@CHECKS.add
def many_shards(subject: Subject) -> None:
    """Keys that come in many shards give what they give at once."""
    case = subject.base
    causal_case = case.causal()
    edges = (1, 8, 17, 30, 39)
    right(subject, (case.but(edges=edges), causal_case.but(edges=edges)))
    right(subject, (case.but(rows=64, keys=64, edges=tuple(range(2, 64, 2))).causal(),))


@CHECKS.add
def any_order(subject: Subject) -> None:
    """Shards may come in any order: the latest keys first, as in a ring."""
    case = subject.base.but(edges=(10, 20, 30)).causal()
    right(subject, (case.but(order=order) for order in ((3, 2, 1, 0), (2, 3, 0, 1), (1, 3, 0, 2))))


@CHECKS.add
def grown_maximum(subject: Subject) -> None:
    """Scores that grow, and that shrink, from shard to shard by far."""
    case = subject.base.but(edges=(10, 20, 30))
    for order in ((), (3, 2, 1, 0)):
        ordered, arrays = case.but(order=order), case.arrays()
        arrays.k *= np.linspace(0.1, 12, case.keys)[:, None, None].astype(arrays.k.dtype)
        hold_forward(subject, ordered, arrays)


@CHECKS.add
def rows_that_see_nothing(subject: Subject) -> None:
    """A row that sees no key of any shard has out 0 and lse −inf; one that sees none of some
    shards is not disturbed by them."""
    case = subject.base
    some = case.but(mask="rows 9 to 20 see nothing", pieces=(
        Piece(0, 9, 0, 40), Piece(20, 33, 5, 40, 2)))  # fmt: skip
    most = case.banded(25)
    right(subject, (each.but(edges=edges) for each in (some, most) for edges in ((), (7, 21))))


@CHECKS.add
def keys_nobody_sees(subject: Subject) -> None:
    """Keys before, between and behind those that are seen."""
    pieces = (Piece(0, 33, 3, 11), Piece(0, 33, 19, 31, None, 4))
    case = subject.base.but(mask="keys 3 to 11 and 19 to 31", pieces=pieces)
    right(subject, (case, case.but(edges=(12, 18))))


@CHECKS.add
def no_tiles(subject: Subject) -> None:
    """No shard at all, and shards of which nothing is seen: out 0 and lse −inf."""
    case = subject.base.but(mask="nothing", pieces=())
    want = exact(case)
    hold_result(subject, case, Forward(subject, case).finish(), want)
    run = Forward(subject, case)
    run.absorb(slice(0, case.keys), EMPTY)
    hold_result(subject, case, run.finish(), want)


@CHECKS.add
def grouped_heads(subject: Subject) -> None:
    """Query head h reads KV head h // (q_heads // kv_heads): 4/2, 8/1, 6/3."""
    heads = ((4, 2), (8, 1), (6, 3))
    right(subject, (subject.base.but(q_heads=q, kv_heads=kv).causal() for q, kv in heads))
    # Also where a wrong index would meet a head of the right one: in batches, with other values.
    case = subject.base.but(batch=2, q_heads=4, kv_heads=2, edges=(11,)).causal()
    right(subject, (case, case.but(value_dim=case.head_dim // 2)))


@CHECKS.add
def value_dim(subject: Subject) -> None:
    """value_dim below and above head_dim."""
    case = subject.base.causal()
    dims = (case.head_dim // 2, case.head_dim * 2, 5)
    right(subject, (case.but(value_dim=dim) for dim in dims))


@CHECKS.add
def odd_dims(subject: Subject) -> None:
    """head_dim 1, 17 and 129, and large ones."""
    case = subject.base.causal()
    right(subject, (case.but(head_dim=dim) for dim in (1, 17, 80, 129, 256)))


@CHECKS.add
def odd_lengths(subject: Subject) -> None:
    """1, 17 and 129 rows and keys, against few and many; 300 and 1100 keys."""
    lengths = ((1, 1), (1, 129), (129, 1), (17, 129), (129, 17), (65, 64), (129, 129), (9, 300))
    right(subject, (subject.base.but(rows=9, keys=1100).causal(),))
    cases = [subject.base.but(rows=rows, keys=keys) for rows, keys in lengths]
    right(subject, (made for case in cases for made in (case, case.causal())))


@CHECKS.add
def zero_rows(subject: Subject) -> None:
    """A rank without queries, or without keys."""
    right(
        subject, (subject.base.but(rows=rows, keys=keys) for rows, keys in ((0, 5), (5, 0), (0, 0)))
    )


@CHECKS.add
def batches(subject: Subject) -> None:
    """Batch 0, 2 and 3."""
    right(subject, (subject.base.but(batch=batch).causal() for batch in (0, 2, 3)))


@CHECKS.add
def scales(subject: Subject) -> None:
    """scale 0, negative, and so large that one key takes nearly all."""
    right(subject, (subject.base.but(scale=scale).causal() for scale in (0.0, -0.7, 6.0)))


@CHECKS.add
def softcap(subject: Subject) -> None:
    """softcap · tanh(score / softcap), tight and loose."""
    case = subject.base.causal()
    right(subject, (case.but(softcap=cap, scale=scale) for cap, scale in (
        (0.5, None), (30.0, 2.0), (2.0, -0.9))))  # fmt: skip


@CHECKS.add
def sinks(subject: Subject) -> None:
    """A sink's logit takes part in each row's softmax once, however many shards there are."""
    case = subject.base.but(sink=(0.5, -2.0)).causal()
    right(subject, (case, case.but(edges=(10, 20, 30)), case.but(sink=(25.0, -25.0))))
    # A sink belongs to its query head, in every batch, and is not capped.
    grouped = case.but(batch=2, q_heads=4, kv_heads=2, edges=(11,), sink=(0.5, -2.0, 3.0, -0.5))
    right(subject, (grouped, grouped.but(softcap=1.0)))


@CHECKS.add
def sinks_of_no_weight(subject: Subject) -> None:
    """A logit of −inf is no sink."""
    right(subject, (subject.base.but(sink=(-np.inf, 1.0), edges=(11,)).causal(),))


@CHECKS.add
def sinks_alone(subject: Subject) -> None:
    """A row that sees no key has out 0, and its sink as lse."""
    right(subject, (subject.base.but(sink=(1.25, -np.inf)).banded(25),))


@CHECKS.add
def large_values(subject: Subject) -> None:
    """Values in the thousands, whose rounding is in proportion."""
    case = subject.base.causal()
    arrays = case.arrays()
    arrays.v *= 1000
    hold_forward(subject, case, arrays)


@CHECKS.add
def infinite_scores(subject: Subject) -> None:
    """A score of −inf has no weight, and a row that has none but such is empty, whatever the keys
    are that it does not see; a score of +inf gives NaN."""
    case = subject.base.but(keys=subject.base.rows).causal()
    arrays = case.arrays()
    arrays.q[:] = abs(arrays.q) + 0.1
    for key in (0, 1, 7):
        arrays.k[:, key] = -np.inf
    hold_forward(subject, case, arrays)
    below = exact(case, arrays)
    arrays.k[:, 20] = np.inf
    out, lse = forward(subject, case, arrays)
    expect(np.isnan(out[:, 20:]).all(), f"a score of +inf must give an out of NaN; for {case}")
    text = f"a score of +inf must not give a finite lse; for {case}"
    expect(not np.isfinite(lse[:, :, 20:]).any(), text)
    if subject.spec.contains_nan:
        hold_result(subject, case, (out, lse), below, slice(0, 20))


@CHECKS.add
def seen_nan(subject: Subject) -> None:
    """NaN in a query row reaches its out, NaN in a key or value every row that sees it."""
    case = subject.base.but(keys=subject.base.rows).causal()
    for name in ("q", "k", "v"):
        arrays = case.arrays()
        getattr(arrays, name)[:, 20] = np.nan
        out, _ = forward(subject, case, arrays)
        rows = slice(20, 21) if name == "q" else slice(20, None)
        expect(np.isnan(out[:, rows]).all(), f"NaN in a row of {name} that counts must give an "
               f"out of NaN; for {case}")  # fmt: skip


@CHECKS.add
def unseen_nan(subject: Subject) -> None:
    """NaN and inf in tiles that a row does not see never reach it."""
    for edges in ((), (12, 25)):
        pieces = (Piece(0, 9, 0, 12), Piece(14, 33, 12, 25, None, 6))
        case = subject.base.but(mask="two rectangles", pieces=pieces, edges=edges)
        arrays = case.arrays()
        clean = exact(case, arrays)
        arrays.k[:, 25:], arrays.v[:, 25:] = np.nan, np.inf
        arrays.q[:, 9:14] = np.nan
        hold_result(subject, case, forward(subject, case, arrays), clean)
        arrays.k[:, :12], arrays.v[:, :12] = np.inf, np.nan
        hold_result(subject, case, forward(subject, case, arrays), clean, slice(9, None))


@CHECKS.add
def unseen_nan_in_a_tile(subject: Subject) -> None:
    """NaN and inf in what a row does not see of a tile that it sees in part never reach it
    (where the spec says `contains_nan`)."""
    if not subject.spec.contains_nan:
        raise Refused("the spec says contains_nan=False")
    case = subject.base.but(keys=subject.base.rows).causal()
    clean = exact(case)
    for bad_k, bad_v in ((np.nan, np.nan), (np.inf, np.inf), (-np.inf, -np.inf), (1.0, np.nan)):
        arrays = case.arrays()
        arrays.k[:, 20:], arrays.v[:, 20:] = bad_k, bad_v
        hold_result(subject, case, forward(subject, case, arrays), clean, slice(0, 20))
