"""A rank checks its own rows against a float64 oracle that shares no code with what it checks:
plain softmax over all keys, no online state, no tiles, the mask by its definition.

K and V are read in blocks through the source, so no rank holds the whole sequence; of the
scores, one chunk of rows over all keys is held at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from ringrt.device.dtypes import numpy_dtype
from ringrt.jobs.oracle import Oracle, key_gradients, largest, sink_gradient
from ringrt.jobs.sources import Source
from ringrt.plan.mask import IntArray
from ringrt.plan.partition import Array
from ringrt.plan.problem import ITEMSIZE, Problem

#: Float64 scores held at a time.
_SCORES = 8_000_000

#: Bound of the absolute error that is not rounding of the result's dtype, where values are at
#: most _VALUE and scores at most _SCORE in size (real models are); it grows in proportion to
#: either beyond that; for gradients, to their largest one beyond _GRADIENT. Stated in
#: docs/accuracy.md.
_BOUND = {"float32": 2e-6, "float64": 1e-14}
_VALUE, _SCORE, _GRADIENT = 8.0, 32.0, 4.0

#: Where weights are rounded to 16 bits, out is off by at most that relative error of the largest
#: value. A gradient sums many such errors of either sign, which by chance come to a few of its
#: largest element.
_WEIGHTS = 4.0


@dataclass(slots=True)
class Figure:
    """Of one tensor: the largest absolute error, the largest beyond half a unit in the last
    place of the tensor's dtype, and the bound that the latter is held to. NaN where exactly one
    of result and oracle is NaN; `size` is the largest finite number of the oracle."""

    error: float = 0.0
    excess: float = 0.0
    bound: float = 0.0
    size: float = 0.0

    def add(self, result: Array, oracle: Array) -> None:
        """Take in some rows."""
        error = _distance(result, oracle)
        rounding = _half_ulp(np.maximum(abs(oracle), abs(result.astype(np.float64))), result)
        self.error = max_or_nan(self.error, float(error.max(initial=0.0)))
        self.excess = max_or_nan(self.excess, float((error - rounding).max(initial=0.0)))
        self.size = max(self.size, largest(oracle))


@dataclass(slots=True)
class Verdict:
    """How many rows were checked, and how far each tensor is off."""

    rows: int
    figures: dict[str, Figure] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Every error within its bound."""
        return all(figure.excess <= figure.bound for figure in self.figures.values())


def combine(verdicts: list[Verdict]) -> Verdict:
    """One verdict on all ranks' rows: bounds are those of the largest numbers anywhere."""
    figures = {}
    for name in verdicts[0].figures:
        parts = [verdict.figures[name] for verdict in verdicts]
        figures[name] = Figure(
            error=max_or_nan(*(part.error for part in parts)),
            excess=max_or_nan(*(part.excess for part in parts)),
            bound=max(part.bound for part in parts),
            size=max(part.size for part in parts),
        )
    return Verdict(sum(verdict.rows for verdict in verdicts), figures)


@dataclass(frozen=True, slots=True)
class Results:
    """A rank's results, all its rows: out and lse, and after a backward pass dq, dk and dv. Of
    the whole sequence, lse and delta = rowsum(dout · out) `[batch, q_heads, q_length]` as the
    run has them: dk, dv and dsink are checked given these, for they sum over all queries, and dq
    given delta where out is rounded to 16 bits. out and lse are checked by themselves."""

    out: Array
    lse: Array
    gradients: tuple[Array, Array, Array] | None = None
    dsink: Array | None = None
    whole_lse: Array | None = None
    whole_delta: Array | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """Rows to check: local, and their positions in the sequence."""

    local: IntArray
    index: IntArray


def verify(
    source: Source,
    problem: Problem,
    results: Results,
    queries: Sample,
    keys: Sample,
    on_progress: Callable[[int, int], None],
    sink: Array | None = None,
    rounds_weights: bool = False,
) -> Verdict:
    """Check the sampled rows: queries of out, lse and dq, keys of dk and dv. sink are the logits
    `[q_heads]` of the problem, if it has them; `rounds_weights` as in `BackendSpec`."""
    verdict = Verdict(len(queries.local))
    names = ("out", "lse", "dq", "dk", "dv") if results.gradients else ("out", "lse")
    figures = verdict.figures = {name: Figure() for name in names}
    total = len(queries.local) + (len(keys.local) if results.gradients else 0)
    value_size = score_size = 0.0
    narrow = ITEMSIZE[problem.dtype] == 2
    for begin, chunk in _chunks(queries, problem.kv_length, problem):
        oracle = Oracle(source, problem, chunk.index, sink)
        figures["out"].add(results.out[:, chunk.local], oracle.out)
        figures["lse"].add(results.lse[:, :, chunk.local], oracle.lse)
        if results.gradients:
            rounded = _whole(results)[1][:, :, chunk.index] if narrow else None
            dq = oracle.query_gradient(rounded)
            figures["dq"].add(results.gradients[0][:, chunk.local], dq)
        value_size = max(value_size, oracle.value_size)
        score_size = max(score_size, oracle.score_size)
        on_progress(begin + len(chunk.local), total)
    if results.gradients:
        for begin, chunk in _chunks(keys, problem.q_length, problem):
            dk, dv = key_gradients(source, problem, chunk.index, *_whole(results))
            figures["dk"].add(results.gradients[1][:, chunk.local], dk)
            figures["dv"].add(results.gradients[2][:, chunk.local], dv)
            on_progress(len(queries.local) + begin + len(chunk.local), total)
        if results.dsink is not None and sink is not None:
            dsink, size = sink_gradient(sink, *_whole(results))
            figures["dsink"] = Figure()
            figures["dsink"].add(results.dsink, dsink)
            # Large terms may cancel in the sum; their rounding does not.
            figures["dsink"].size = size
    base = _BOUND[problem.state_dtype] * max(1.0, score_size / _SCORE)
    weights = _unit_roundoff(problem.dtype) if rounds_weights and narrow else 0.0
    for name, figure in figures.items():
        figure.bound = base
        if name == "out":
            figure.bound = base * max(1.0, value_size / _VALUE) + weights * value_size
        elif name != "lse":
            figure.bound = base * max(1.0, figure.size / _GRADIENT)
            figure.bound += _WEIGHTS * weights * figure.size
    return verdict


def _unit_roundoff(dtype: str) -> float:
    """The largest relative error of rounding to a dtype."""
    return float(ml_dtypes.finfo(numpy_dtype(dtype)).eps) / 2  # type: ignore[no-untyped-call]


def _whole(results: Results) -> tuple[Array, Array]:
    """lse and delta of the whole sequence, which come with gradients."""
    assert results.whole_lse is not None
    assert results.whole_delta is not None
    return results.whole_lse, results.whole_delta


def _chunks(sample: Sample, others: int, problem: Problem) -> list[tuple[int, Sample]]:
    """The sample in parts, so that a part's scores with all `others` can be held."""
    step = max(1, _SCORES // max(1, problem.batch * problem.q_heads * others))
    return [
        (i, Sample(sample.local[i : i + step], sample.index[i : i + step]))
        for i in range(0, len(sample.local), step)
    ]


def _distance(result: Array, oracle: Array) -> Array:
    """Absolute difference in float64; 0 where both are NaN or the same infinity."""
    result = result.astype(np.float64)
    same = (result == oracle) | (np.isnan(result) & np.isnan(oracle))
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(same, 0, abs(result - oracle)))


def _half_ulp(size: Array, like: Array) -> Array:
    """Half a unit in the last place of like's dtype at numbers of that size."""
    info = ml_dtypes.finfo(like.dtype)  # type: ignore[no-untyped-call]
    exponent = np.frexp(np.where(np.isfinite(size), size, 0))[1] - 1
    return np.asarray(np.exp2(np.maximum(exponent, info.minexp) - info.nmant - 1.0))


def max_or_nan(*values: float) -> float:
    """The largest; NaN wins, for it must not pass."""
    return float(np.max(values))
