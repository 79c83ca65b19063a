"""A backend in a ring of thread ranks: every partition, forward and backward; and what it does not
do is refused before data moves."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ringrt.conformance.call_checks import probes
from ringrt.conformance.cases import Case
from ringrt.conformance.checks import CheckList, Refused, each, expect
from ringrt.conformance.passes import Given, exact, exact_gradients, hold_gradients, hold_result
from ringrt.conformance.subject import Subject
from ringrt.errors import BackendUnavailable, RingrtError, Unsupported
from ringrt.launch import attention, attention_backward, run_threads
from ringrt.plugins import one_line
from ringrt.ring import Ring

CHECKS: CheckList[Subject] = CheckList()

_TIMEOUT = 60.0
_RANKS = (1, 2, 3, 4)


def _options(case: Case) -> dict[str, Any]:
    """As `Ring.attention` takes them."""
    scores = {"scale": case.scale, "softcap": case.softcap, "sink": case.logits}
    return {"causal": case.pieces is not None} | scores


def _hold(subject: Subject, partition: str, turn: tuple[int, Case]) -> None:
    """Forward and backward over some ranks, held to the oracle."""
    ranks, case = turn
    subject.ask(case)
    x, named = case.arrays(), case.but(mask=f"{case.mask}, {ranks} ranks, {partition}")
    how = _options(case) | {"partition": partition, "backend": subject.name, "ranks": ranks}
    out, lse = attention(x.q, x.k, x.v, timeout=_TIMEOUT, **how)
    hold_result(subject, named, (out, lse), exact(case))
    if not subject.backend.backward:
        raise Refused("backward is not implemented")
    gradients = attention_backward(x.dout, x.q, x.k, x.v, out, lse, timeout=_TIMEOUT, **how)[:3]
    delta = np.einsum("brhd,brhd->bhr", x.dout.astype(float), out.astype(float))
    want = exact_gradients(case, Given(out, lse, delta))
    hold_gradients(subject, named, gradients, want)


def _ring(subject: Subject, partition: str) -> None:
    """1 to 4 ranks; uneven lengths, all dtypes in turn, more keys than queries, empty shards."""
    base = subject.base
    dtypes: list[str] = []
    subject.refusals += each(
        ("float32", "bfloat16", "float64", "float16"),
        lambda dtype: dtypes.append(subject.ask(base.but(dtype=dtype)).dtype),
    )
    lengths = ((29, 29), (21, 34), (31, 31), (3, 3))
    turns = []
    for index, (ranks, (rows, keys)) in enumerate(zip(_RANKS, lengths, strict=True)):
        case = base.but(rows=rows, keys=keys, dtype=dtypes[index % len(dtypes)])
        turns.append((ranks, case.causal()))
    turns.append((3, base.but(rows=20, keys=20)))
    subject.refusals += each(turns, partial(_hold, subject, partition))


@CHECKS.add
def ring_contiguous(subject: Subject) -> None:
    """A ring of 1 to 4 ranks, partition contiguous, equals the oracle in both passes."""
    _ring(subject, "contiguous")


@CHECKS.add
def ring_striped(subject: Subject) -> None:
    """The same, partition striped."""
    _ring(subject, "striped")


@CHECKS.add
def ring_zigzag(subject: Subject) -> None:
    """The same, partition zigzag."""
    _ring(subject, "zigzag")


@CHECKS.add
def ring_options(subject: Subject) -> None:
    """Grouped heads, softcap, sinks, value_dim and scale in a ring of 3 ranks."""
    base = subject.base.but(rows=25, keys=25).causal()
    cases = (
        base.but(q_heads=4, kv_heads=2),
        base.but(softcap=2.0),
        base.but(sink=(0.5, -1.0)),
        base.but(value_dim=base.head_dim // 2, scale=-0.4),
    )
    turns = [(3, case) for case in cases]
    subject.refusals += each(turns, partial(_hold, subject, "striped"))


@CHECKS.add
def ring_refusals(subject: Subject) -> None:
    """What `supports` refuses, and backward where there is none, the ring refuses by the same
    words on every rank, before data moves."""
    for _, case in probes(subject.base):
        small = case.but(rows=5, keys=5)
        try:
            subject.ask(small)
        except Refused as refusal:
            _hold_refused(subject, small, "forward", str(refusal))
    if not subject.backend.backward:
        _hold_refused(subject, subject.base.but(rows=5, keys=5), "backward", "backward")


def _hold_refused(subject: Subject, case: Case, operation: str, words: str) -> None:
    """Two ranks ask for it, and both get a refusal with these words."""
    arrays = case.arrays()
    zeros = np.zeros((case.batch, case.q_heads, case.rows), case.problem.state_dtype)

    def on_rank(ring: Ring) -> tuple[str, bool]:
        q, k, v = (ring.cut(x) for x in (arrays.q, arrays.k, arrays.v))
        try:
            if operation == "forward":
                ring.attention(q, k, v, **_options(case))
            else:
                dout, lse = ring.cut(arrays.dout), ring.cut(zeros, 2)
                ring.attention_backward(dout, q, k, v, dout, lse, **_options(case))
        except (Unsupported, BackendUnavailable) as error:
            return str(error), ring.stats is not None
        except RingrtError as error:
            return one_line(error), True
        return "", True

    said = run_threads(on_rank, 2, backend=subject.name, timeout=_TIMEOUT)
    for rank, (text, moved) in enumerate(said):
        what = f"{operation} of {case}"
        expect(text, f"rank {rank} must refuse {words!r}, and computed something; {what}")
        expect(words in text, f"rank {rank} must refuse by {words!r}, got {text!r}; {what}")
        expect(not moved, f"rank {rank} must refuse before data moves, got {text!r}; {what}")
