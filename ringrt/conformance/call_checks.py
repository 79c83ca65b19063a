"""How a backend behaves in its calls: refusals, inputs of any layout, states that do not meet."""

from __future__ import annotations

import threading

from ringrt.conformance.cases import Case
from ringrt.conformance.checks import CheckList, Refused, each, expect
from ringrt.conformance.layouts import Keeping, layouts
from ringrt.conformance.oracle import Array
from ringrt.conformance.passes import (
    Forward,
    exact,
    forward,
    hold_forward,
    hold_result,
)
from ringrt.conformance.subject import Subject, new_device
from ringrt.plan.problem import ITEMSIZE

CHECKS: CheckList[Subject] = CheckList()

#: How long two threads may take, in seconds.
_PATIENCE = 300.0

#: Words of which a refusal must hold one, by the field of a problem that alone brought it about;
#: one of a dtype must name the dtype.
_WORDS = {
    "head_dim": ("head_dim", "head dim"),
    "value_dim": ("value_dim", "value dim"),
    "kv_heads": ("kv_heads", "q_heads", "group", "gqa"),
    "scale": ("scale",),
    "softcap": ("softcap",),
    "sink": ("sink",),
    "batch": ("batch",),
}


def probes(case: Case) -> list[tuple[str, Case]]:
    """Problems that differ from the given one in one field."""
    found = [("dtype", case.but(dtype=dtype)) for dtype in ITEMSIZE if dtype != case.dtype]
    found += [("head_dim", case.but(head_dim=dim)) for dim in (1, 17, 129, 512, 4096)]
    found += [("value_dim", case.but(value_dim=dim)) for dim in (1, case.head_dim * 2, 512, 4096)]
    found += [("kv_heads", case.but(q_heads=8, kv_heads=heads)) for heads in (1, 2)]
    found += [("scale", case.but(scale=scale)) for scale in (0.0, -1.0, 100.0)]
    found += [("softcap", case.but(softcap=cap)) for cap in (0.5, 50.0)]
    found += [("sink", case.but(sink=(0.0,) * case.q_heads))]
    found += [("batch", case.but(batch=batch)) for batch in (0, 3)]
    return found


@CHECKS.add
def refusals_in_words(subject: Subject) -> None:
    """What `supports` refuses it refuses in words that name the option, and always the same."""
    for field, case in probes(subject.base):
        answers = {subject.backend.supports(case.problem) for _ in range(2)}
        expect(len(answers) == 1, f"supports says now this, now that: {answers}; for {case}")
        try:
            subject.ask(case)
        except Refused as refusal:
            words = _WORDS.get(field, (case.dtype,))
            said = str(refusal).lower()
            expect(
                any(word in said for word in words),
                f"a refusal must name {words[0]}, got {str(refusal)!r}; for {case}",
            )


@CHECKS.add
def attributes(subject: Subject) -> None:
    """`backward` and `needs_out` are bool, and `needs_out` goes with `backward` only; the spec has
    a summary of one line."""
    for name in ("backward", "needs_out"):
        value = getattr(subject.backend, name, None)
        expect(isinstance(value, bool), f"{name}: expected True or False, got {value!r}")
    backend = subject.backend
    expect(backend.backward or not backend.needs_out, "needs_out is True where backward is False")
    summary = subject.spec.summary
    expect(len(summary.splitlines()) == 1, f"summary: expected one line, got {summary!r}")


@CHECKS.add
def prepare_twice(subject: Subject) -> None:
    """`prepare` may be called again, also for another problem in between."""
    case = subject.base
    for other in (case, case.causal(), case):
        with subject.verb("prepare", other):
            subject.backend.prepare(subject.ask(other))
    hold_forward(subject, case)


@CHECKS.add
def strided_inputs(subject: Subject) -> None:
    """q, k and v in any layout: transposed, cut out of larger arrays, on a host also reversed."""
    case = subject.base.but(batch=2, edges=(13,)).causal()
    for name, put in layouts(subject.device):
        hold_forward(subject, case.but(mask=f"causal, inputs {name}"), case.arrays(), put)


@CHECKS.add
def unwritten_inputs(subject: Subject) -> None:
    """q, k, v and the sink are never written."""
    plain = subject.base.but(edges=(13,)).causal()

    def unwritten(case: Case) -> None:
        keeping = Keeping()
        run = Forward(subject, case, put=keeping)
        for cut, tiles in case.shards():
            run.absorb(cut, tiles)
        run.finish()
        keeping.hold(case)
        text = f"the sink was written to; for {case}"
        expect(run.sink is None or (run.sink == case.logits).all(), text)

    subject.refusals += each((plain, plain.but(sink=(0.5, -1.0))), unwritten)


@CHECKS.add
def overwritten_keys(subject: Subject) -> None:
    """k and v may be overwritten once `accumulate` has returned (on a device: behind it on the
    stream)."""
    case = subject.base.but(edges=(13, 27)).causal()
    run = Forward(subject, case)
    for cut, tiles in case.shards():
        run.absorb(cut, tiles)
        overwrite(subject, run.handed)
    hold_result(subject, case, run.finish(), exact(case))


def overwrite(subject: Subject, arrays: tuple[Array, ...]) -> None:
    """Fill arrays with something else, behind what the stream holds."""
    with subject.device.running():
        for x in arrays:
            x.fill(7)


@CHECKS.add
def same_bits(subject: Subject) -> None:
    """Two passes over the same arrays give the same bits."""
    case = subject.base.but(rows=150, keys=150, q_heads=6, kv_heads=6, edges=(70,)).causal()
    text = f"two passes give different bits; for {case}"
    hold_same(forward(subject, case), forward(subject, case), ("out", "lse"), text)


@CHECKS.add
def kept_results(subject: Subject) -> None:
    """out and lse stay as they are when the backend computes again."""
    case = subject.base.causal()
    result = forward(subject, case)
    forward(subject, case.but(seed=3))
    hold_result(subject, case, result, exact(case))


def hold_same(
    first: tuple[Array, ...], second: tuple[Array, ...], names: tuple[str, ...], text: str
) -> None:
    """`Failed` with that text unless both hold the same bits."""
    for name, a, b in zip(names, first, second, strict=True):
        expect(a.tobytes() == b.tobytes(), f"{name}: {text}")


@CHECKS.add
def interleaved_states(subject: Subject) -> None:
    """Two passes of one backend at a time do not meet."""
    base = subject.base.but(edges=(20,))
    first, second = base.but(seed=1).causal(), base.but(seed=2, rows=21, scale=0.9).causal()
    runs = [Forward(subject, case) for case in (first, second)]
    for a, b in zip(first.shards(), second.shards(), strict=True):
        runs[0].absorb(*a)
        runs[1].absorb(*b)
    results = [run.finish() for run in reversed(runs)]
    hold_result(subject, second, results[0], exact(second))
    hold_result(subject, first, results[1], exact(first))


@CHECKS.add
def two_threads(subject: Subject) -> None:
    """Instances of their own compute at the same time in threads of their own."""
    failures: list[Exception] = []

    def compute(seed: int) -> None:
        try:
            case = subject.base.but(seed=seed, rows=60, keys=60, edges=(25,)).causal()
            other = Subject(subject.name, new_device(subject.spec))
            for _ in range(3):
                hold_forward(other, case)
            other.close()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=compute, args=(seed,), daemon=True) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE)
        expect(not thread.is_alive(), f"a thread computes for longer than {_PATIENCE:g} s")
    if failures:
        raise failures[0]


@CHECKS.add
def close_twice(subject: Subject) -> None:
    """`close` may be called again, and before anything was computed."""
    case = subject.base
    subject.close()
    subject.close()
    other = Subject(subject.name, subject.device)
    hold_forward(other, case)
    other.close()
    other.close()
