"""Before anything is timed its results are compared: a wrong result has no speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ringrt.bench.problems import Inputs
from ringrt.device.host import HOST
from ringrt.jobs.oracle import Oracle, key_gradients
from ringrt.plan.mask import IntArray
from ringrt.plan.partition import Array, Run, positions

#: The largest distance of a row from what it should be, over its own norm and the root mean
#: square of all rows' norms. Rounding is well below, and a row that is wrong well above.
_BOUND = {"float64": 1e-9, "float32": 5e-5, "float16": 0.01, "bfloat16": 0.05}
#: So many rows are compared with the oracle.
_SAMPLED = 12


class Wrong(Exception):
    """A result that is not what it should be."""


def check(
    names: Sequence[str], found: Sequence[Array], right: Sequence[Array], dtype: str, by: str
) -> None:
    """`Wrong` unless every array `[batch, rows, heads, dim]` is what `by` says it should be."""
    for name, mine, other in zip(names, found, right, strict=True):
        error = worst_row(mine, other)
        if not error <= _BOUND[dtype]:
            raise Wrong(
                f"wrong: a row of {name} differs from that of {by} by {error:.2g} of its norm"
            )


def worst_row(found: Array, right: Array) -> float:
    """The largest distance of a row from the right one, in norms of rows; NaN if there is one."""
    mine, other = found.astype(np.float64), right.astype(np.float64)
    apart, size = (np.linalg.norm(x, axis=-1) for x in (mine - other, other))
    scale = size + np.sqrt(np.mean(size**2))
    return float(np.max(apart / np.where(scale > 0, scale, 1), initial=0.0))


def check_by_oracle(
    inputs: Inputs, out: Array, lse: Array, gradients: Sequence[Array] = ()
) -> None:
    """`Wrong` unless some rows of out, and of dq, dk and dv where given, are those of the float64
    oracle. dk and dv are checked given lse, and delta of `out`, for they sum over all rows."""
    problem, at = inputs.problem, _sample(inputs.problem.q_length)
    source = _Held({"q": inputs.q, "k": inputs.k, "v": inputs.v, "dout": inputs.dout})
    oracle = Oracle(source, problem, at)
    found, right, names = [out[:, at]], [oracle.out], ["out"]
    if gradients:
        delta = HOST.row_delta(inputs.dout, out, "float64")
        keys = key_gradients(source, problem, at, lse.astype(np.float64), delta)
        found += [x[:, at] for x in gradients]
        right += [oracle.query_gradient(delta[:, :, at]), *keys]
        names += ["dq", "dk", "dv"]
    check(names, found, right, problem.dtype, "the float64 oracle")


def _sample(length: int) -> IntArray:
    """The first and the last position, and some between."""
    drawn = np.random.default_rng(1).integers(0, length, _SAMPLED)
    drawn[:2] = 0, length - 1
    return np.unique(drawn)


class _Held:
    """Arrays as the oracle reads them; see `ringrt.jobs.sources.Source`."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = arrays
        self.shapes: Mapping[str, tuple[int, ...]] = {n: x.shape for n, x in arrays.items()}
        self.dtype: str = arrays["q"].dtype.name

    def read(self, name: str, runs: tuple[Run, ...]) -> Array:
        """Rows of a tensor."""
        return self._arrays[name][:, positions(runs)]
