"""The measuring itself: contenders take turns, and a ratio is the median of paired ratios.

Two runs on one machine can differ by more than what is to be told apart: clocks change and
neighbours come and go. Calls a moment apart meet the same machine, so each repeat gives a ratio
of its own, and what slows down one repeat as a whole leaves its ratio as it is.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

#: Seconds before every call. PyTorch's OpenMP threads spin for some ms after a call, and hold a
#: core that the next contender needs.
GAP_S = 0.03
#: Where a call is longer than so many seconds, so many repeats are enough. (A product in bf16 takes
#: a minute where it is not multiplied natively.)
_ENOUGH = ((2.0, 5), (30.0, 1))

Clock = Callable[[], float]
#: The seconds of every call of each contender, in the order of the repeats.
Times = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Contender:
    """`seconds` makes one call, and says how long it took."""

    name: str
    seconds: Callable[[], float]


def timed(call: Callable[[], object], clock: Clock = time.perf_counter) -> Callable[[], float]:
    """One call by the clock of this process."""

    def seconds() -> float:
        begin = clock()
        call()
        return clock() - begin

    return seconds


def interleave(
    contenders: Sequence[Contender],
    repeats: int,
    sleep: Callable[[float], object] = time.sleep,
) -> Times:
    """Warm up each contender once, then call all in turn `repeats` times (fewer where calls are
    long), in an order that is turned round from one repeat to the next."""
    with _no_collection():
        slowest = max(_after_a_gap(each, sleep) for each in contenders)
        repeats = min([repeats, *(enough for long, enough in _ENOUGH if slowest > long)])
        times: Times = {each.name: [] for each in contenders}
        for turn in range(repeats):
            for each in contenders if turn % 2 == 0 else contenders[::-1]:
                times[each.name].append(_after_a_gap(each, sleep))
    return times


@dataclass(frozen=True, slots=True)
class Comparison:
    """The median of the paired figures, the figure of the best times, and the quartiles; `of` says
    what over what."""

    value: float
    best: float
    quartiles: tuple[float, float]
    of: str = ""


def ratio(
    times: Mapping[str, Sequence[float]], over: str, under: str, factor: float = 1.0
) -> Comparison:
    """`factor` times the time of `over` by that of `under`."""
    found = compare(times, over, under, lambda a, b: factor * a / b)
    return replace(found, of=f"{over} / {under}")


def compare(
    times: Mapping[str, Sequence[float]],
    first: str,
    second: str,
    figure: Callable[[float, float], float],
) -> Comparison:
    """Any figure of the times of two contenders."""
    paired = [figure(a, b) for a, b in zip(times[first], times[second], strict=True)]
    best = figure(min(times[first]), min(times[second]))
    return Comparison(statistics.median(paired), best, quartiles(paired))


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third; of one value, itself."""
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def _after_a_gap(contender: Contender, sleep: Callable[[float], object]) -> float:
    sleep(GAP_S)
    return contender.seconds()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Collecting garbage would fall on whoever is called then."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
