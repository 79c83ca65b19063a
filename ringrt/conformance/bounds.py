"""How far off a result may be, and the line that says how far it is.

With u the largest relative error of rounding to the inputs' dtype, s the largest |scale| Σ |q| |k|
of a score, of which its rounding is a part, and the sizes that stand beside the oracle's results:

- out is within B · (s / 32) · Σ p |v|, neither factor below 1, and half a unit in the last place of
  its own dtype; where `BackendSpec.rounds_weights`, 2 u Σ p |v| are added (the weights, or the
  results of blocks, are rounded);
- lse is within B · (s / 32), the 16-bit dtypes' too;
- a gradient is within B · (s / 32) · Σ of its terms' sizes; where `rounds_weights`, 4 u Σ |ds| |k|
  are added, and so for dk and dv.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from ringrt.conformance.checks import Failed
from ringrt.conformance.oracle import Array, Exact, Gradients, Sized
from ringrt.device.dtypes import numpy_dtype
from ringrt.plan.problem import ITEMSIZE, state_dtype

#: The bound B of an absolute error, by the dtype of the state.
_BOUND = {"float32": 5e-6, "float64": 1e-12}
_SCORE = 32.0
_WEIGHTS, _GRADIENT_WEIGHTS = 2.0, 4.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a backend: whether it rounds weights, and the dtype of its inputs."""

    dtype: str
    rounds_weights: bool

    def out(self, exact: Exact, got: Array) -> Array:
        """Like out; `got` says by what it may have been rounded."""
        bound = self._base(exact.score) * np.maximum(1, exact.out.size)
        narrow = half_ulp(np.maximum(_sizes(exact.out.value), _sizes(got)), self.dtype)
        return np.asarray(bound + self._rounding(exact.out, _WEIGHTS) + narrow)

    def lse(self, exact: Exact) -> Array:
        """Like lse."""
        return np.full(exact.lse.shape, self._base(exact.score))

    def gradient(self, exact: Gradients, one: Sized, got: Array) -> Array:
        """Like the gradient, in the dtype in which it came."""
        bound = self._base(exact.score) * np.maximum(1, one.gross)
        bound = bound + self._rounding(one, _GRADIENT_WEIGHTS)
        if ITEMSIZE[got.dtype.name] == 2:
            bound = bound + half_ulp(np.maximum(_sizes(one.value), _sizes(got)), got.dtype.name)
        return np.asarray(bound)

    def _base(self, score: float) -> float:
        return _BOUND[state_dtype(self.dtype)] * max(1.0, score / _SCORE)

    def _rounding(self, one: Sized, factor: float) -> Array:
        """What rounded weights cost; weights below the dtype's least step vanish."""
        if not self.rounds_weights or ITEMSIZE[self.dtype] != 2:
            return np.zeros(one.size.shape)
        info = ml_dtypes.finfo(numpy_dtype(self.dtype))  # type: ignore[no-untyped-call]
        least = float(info.smallest_subnormal) / 2
        return np.asarray(factor * (float(info.eps) / 2 * one.size + least * one.unweighted))


def half_ulp(size: Array, dtype: str) -> Array:
    """Half a unit in the last place of a dtype at numbers of that size."""
    info = ml_dtypes.finfo(numpy_dtype(dtype))  # type: ignore[no-untyped-call]
    exponent = np.frexp(size)[1] - 1
    return np.asarray(np.exp2(np.maximum(exponent, info.minexp) - info.nmant - 1.0))


def hold(name: str, got: Array, want: Array, bound: Array, what: object) -> None:
    """`Failed` unless `got` is within its bound of `want` everywhere: −inf where that is −inf,
    NaN where that is NaN."""
    got = got.astype(np.float64)
    for odd in (np.isnan, np.isinf):
        wrong = np.argwhere(odd(got) != odd(want))
        if len(wrong):
            raise Failed(_line(name, got, want, tuple(wrong[0]), what))
    with np.errstate(invalid="ignore"):
        off = np.where(got == want, 0, abs(got - want))
        excess = np.where(np.isnan(want), 0, off - bound)
    if excess.size and excess.max() > 0:
        worst = np.unravel_index(int(np.argmax(excess)), excess.shape)
        text = f" (off by {off[worst]:.2e}, bound {bound[worst]:.2e})"
        raise Failed(_line(name, got, want, tuple(int(i) for i in worst), what, text))


def hold_lse(got: Array, want: Array, bound: Array, what: object) -> None:
    """As `hold`; a logarithm of another base is told as such."""
    try:
        hold("lse", got, want, bound, what)
    except Failed:
        natural = got.astype(np.float64) * np.log(2)
        known = np.isfinite(want) & (abs(want) > 0.1)
        with np.errstate(invalid="ignore"):
            fits = abs(natural - want) <= bound + 1e-6 * abs(want)
        if known.any() and fits[known].all():
            raise Failed(
                f"lse is in base 2: it must be the natural logarithm; for {what}"
            ) from None
        raise


def _line(
    name: str, got: Array, want: Array, at: tuple[int, ...], what: object, text: str = ""
) -> str:
    index = ", ".join(map(str, at))
    came = f"{name}[{index}]: expected {want[at]:.9g}, got {got[at]:.9g}"
    return f"{came}{text}; for {what}"


def _sizes(x: Array) -> Array:
    x = x.astype(np.float64)
    return np.where(np.isfinite(x), abs(x), 0)
