"""The passes of a backend under test, called as the engine calls them, and what they give held to
the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ringrt.conformance import oracle
from ringrt.conformance.bounds import Bounds, hold, hold_lse
from ringrt.conformance.cases import Arrays, Case
from ringrt.conformance.checks import Failed, expect
from ringrt.conformance.layouts import Put, place
from ringrt.conformance.oracle import Array, Exact, Gradients
from ringrt.conformance.subject import Subject
from ringrt.device import kind_of
from ringrt.device.dtypes import numpy_dtype
from ringrt.plan.tiles import TileTable

_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Given:
    """What backward is given beside q, k, v and dout: lse and delta `[batch, q_heads, rows]` in
    the state dtype, and out in the problem's dtype, all of the whole row. delta is that of this
    out."""

    out: Array
    lse: Array
    delta: Array

    @classmethod
    def of(cls, case: Case, arrays: Arrays | None = None) -> Given:
        """From the oracle."""
        arrays = arrays or case.arrays()
        exactly = exact(case, arrays)
        with np.errstate(invalid="ignore", over="ignore"):
            out = exactly.out.value.astype(numpy_dtype(case.dtype))
            state = case.problem.state_dtype
            delta = np.einsum("brhd,brhd->bhr", arrays.dout.astype(float), out.astype(float))
            return cls(out, exactly.lse.astype(state), delta.astype(state))


class Forward:
    """A forward pass on its way, so far without a key. `put` brings arrays to the device."""

    def __init__(
        self, subject: Subject, case: Case, arrays: Arrays | None = None, put: Put = place
    ) -> None:
        self._subject, self._case, self._put = subject, case, put
        self._arrays, self._problem = arrays or case.arrays(), subject.ask(case)
        #: What the backend was given in the last call, where it lies.
        self.handed: tuple[Array, ...] = ()
        device, backend = subject.device, subject.backend
        with subject.verb("prepare", case):
            device.prepare(case.dtype)
            backend.prepare(self._problem)
        with subject.verb("begin", case):
            q, self.sink = put(device, self._arrays.q), case.logits
            self._state = backend.begin(q, self._problem, self.sink, device.stream)

    def absorb(self, cut: slice, tiles: TileTable) -> None:
        """One shard: the keys of a range, and what the rows see of them."""
        subject, device = self._subject, self._subject.device
        with subject.verb("accumulate", self._case):
            k, v = (self._put(device, x[:, cut]) for x in (self._arrays.k, self._arrays.v))
            self.handed = k, v
            subject.backend.accumulate(self._state, k, v, tiles, device.stream)

    def finish(self) -> tuple[Array, Array]:
        """out and lse on the host, their kind, dtype and shape as they must be."""
        subject, case, problem = self._subject, self._case, self._problem
        with subject.verb("finish", case):
            result = subject.backend.finish(self._state, subject.device.stream)
            expect(
                isinstance(result, tuple) and len(result) == 2,
                f"finish returns out and lse, not {type(result).__name__}; for {case}",
            )
            out_shape = (case.batch, case.rows, case.q_heads, problem.value_dim)
            lse_shape = (case.batch, case.q_heads, case.rows)
            out = fetched(subject, "out", result[0], problem.dtype, out_shape, case)
            lse = fetched(subject, "lse", result[1], problem.state_dtype, lse_shape, case)
        return out, lse


class Backward:
    """A backward pass on its way. Each shard's dk and dv are sums of its own, as in a ring."""

    def __init__(
        self,
        subject: Subject,
        case: Case,
        given: Given,
        arrays: Arrays | None = None,
        put: Put = place,
    ) -> None:
        arrays = arrays or case.arrays()
        self._subject, self._case, self._put, self._arrays = subject, case, put, arrays
        self._problem = problem = subject.ask_backward(case)
        #: What dk and dv hold before the backend adds to them.
        self.before = 0.0
        #: What the backend was given in the last call, where it lies.
        self.handed: tuple[Array, ...] = ()
        shapes = (arrays.k.shape, arrays.v.shape)
        self._sums = [np.zeros(shape, problem.state_dtype) for shape in shapes]
        device, backend = subject.device, subject.backend
        with subject.verb("prepare", case):
            device.prepare(case.dtype)
            backend.prepare(problem)
        with subject.verb("begin_backward", case):
            # lse and delta come contiguous, as the engine makes them.
            lse, delta = (device.place(x) for x in (given.lse, given.delta))
            q, dout = put(device, arrays.q), put(device, arrays.dout)
            out = put(device, given.out) if backend.needs_out else None
            self._grads = backend.begin_backward(q, dout, lse, delta, problem, device.stream, out)

    def absorb(self, cut: slice, tiles: TileTable) -> None:
        """One shard."""
        subject, device = self._subject, self._subject.device
        state = self._problem.state_dtype
        with subject.verb("accumulate_backward", self._case):
            k, v = (self._put(device, x[:, cut]) for x in (self._arrays.k, self._arrays.v))
            sums = [np.full(x[:, cut].shape, self.before, state) for x in self._sums]
            dk, dv = (device.place(x) for x in sums)
            self.handed = k, v
            subject.backend.accumulate_backward(self._grads, k, v, dk, dv, tiles, device.stream)
            for total, part in zip(self._sums, (dk, dv), strict=True):
                with np.errstate(invalid="ignore", over="ignore"):
                    total[:, cut] += device.to_host(part, state)

    def finish(self) -> tuple[Array, Array, Array]:
        """dq, dk and dv on the host."""
        subject, case, problem = self._subject, self._case, self._problem
        with subject.verb("finish_backward", case):
            dq = subject.backend.finish_backward(self._grads, subject.device.stream)
            shape = (case.batch, case.rows, case.q_heads, case.head_dim)
            host = fetched(subject, "dq", dq, problem.state_dtype, shape, case)
        return host, self._sums[0], self._sums[1]


def exact(case: Case, arrays: Arrays | None = None) -> Exact:
    """The oracle's out and lse."""
    arrays, problem = arrays or case.arrays(), case.problem
    scores = problem.scale, problem.softcap, case.logits
    return oracle.attention(arrays.q, arrays.k, arrays.v, case.seen, *scores)


def exact_gradients(case: Case, given: Given, arrays: Arrays | None = None) -> Gradients:
    """The oracle's gradients."""
    x, problem = arrays or case.arrays(), case.problem
    rows = (given.lse, given.delta, case.seen, problem.scale, problem.softcap)
    return oracle.gradients(x.q, x.k, x.v, x.dout, *rows)


def fetched(
    subject: Subject, name: str, x: Any, dtype: str, shape: tuple[int, ...], case: Case
) -> Array:
    """A result on the host; `Failed` unless it lies where it must, in its dtype and shape."""
    kind = subject.device.kind
    if kind_of(x) != kind:
        lies = "a NumPy array" if kind == "cpu" else "a CuPy array"
        raise Failed(f"{name}: expected {lies}, got a {type(x).__name__}; for {case}")
    carried = "uint16" if kind == "cuda" and dtype == "bfloat16" else dtype
    if x.dtype.name != carried:
        raise Failed(f"{name}: expected dtype {carried}, got {x.dtype.name}; for {case}")
    if tuple(x.shape) != shape:
        raise Failed(f"{name}: expected shape {shape}, got {tuple(x.shape)}; for {case}")
    return subject.device.to_host(x, dtype)


def forward(
    subject: Subject, case: Case, arrays: Arrays | None = None, put: Put = place
) -> tuple[Array, Array]:
    """out and lse of a whole pass, on the host."""
    run = Forward(subject, case, arrays, put)
    for cut, tiles in case.shards():
        run.absorb(cut, tiles)
    return run.finish()


def hold_forward(
    subject: Subject, case: Case, arrays: Arrays | None = None, put: Put = place
) -> None:
    """A forward pass, held to the oracle."""
    hold_result(subject, case, forward(subject, case, arrays, put), exact(case, arrays))


def hold_result(
    subject: Subject, case: Case, got: tuple[Array, Array], want: Exact, rows: slice = _ALL
) -> None:
    """out and lse, or some rows of them, held to the oracle."""
    bounds = Bounds(case.dtype, subject.spec.rounds(case.dtype))
    out, lse = got
    # First lse: where it is wrong, out is as well, and says less of why.
    bound = bounds.lse(want)
    hold_lse(lse[..., rows], want.lse[..., rows], bound[..., rows], case)
    bound = bounds.out(want, out)
    hold("out", out[:, rows], want.out.value[:, rows], bound[:, rows], case)


def backward(
    subject: Subject, case: Case, given: Given, arrays: Arrays | None = None, put: Put = place
) -> tuple[Array, Array, Array]:
    """dq, dk and dv of a whole pass, on the host."""
    run = Backward(subject, case, given, arrays, put)
    for cut, tiles in case.shards():
        run.absorb(cut, tiles)
    return run.finish()


def hold_backward(
    subject: Subject, case: Case, arrays: Arrays | None = None, put: Put = place
) -> None:
    """A backward pass, held to the oracle."""
    subject.ask_backward(case)
    given = Given.of(case, arrays)
    got = backward(subject, case, given, arrays, put)
    hold_gradients(subject, case, got, exact_gradients(case, given, arrays))


def hold_gradients(
    subject: Subject,
    case: Case,
    got: tuple[Array, ...],
    want: Gradients,
    rows: slice = _ALL,
    keys: slice = _ALL,
) -> None:
    """dq, dk and dv, or some rows and keys of them, held to the oracle."""
    bounds = Bounds(case.dtype, subject.spec.rounds(case.dtype))
    dq, dk, dv = got
    # dv first: it hangs on the weights alone.
    for name, x, one, cut in (
        ("dv", dv, want.dv, keys),
        ("dk", dk, want.dk, keys),
        ("dq", dq, want.dq, rows),
    ):
        bound = bounds.gradient(want, one, x)
        hold(name, x[:, cut], one.value[:, cut], bound[:, cut], case)
