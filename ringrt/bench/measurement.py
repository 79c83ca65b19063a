"""A row of the result, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ringrt.bench.interleave import Comparison
from ringrt.bench.targets import Target

#: The words for how a row ended.
REACHED, MISSED, NO_TARGET, FAILED, SKIPPED = VERDICTS = (
    "reached", "missed", "no target", "failed", "skipped",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was measured under one name.

    `value` is a median, in `unit`: "ratio" (the only one that charts show), or "GF/s", "s",
    "µs a step", "µs a call", "% of limit"; `of` says which contenders a ratio is of. `times` are
    the seconds of every call of each contender. `figures` are further numbers by name. `state` is
    "failed" or "skipped" where there is no value, and `why` says why, or why there is no target.
    """

    name: str
    suite: str
    group: str
    threads: int
    unit: str = "ratio"
    value: float | None = None
    best: float | None = None
    quartiles: tuple[float, float] | None = None
    of: str = ""
    target: Target | None = None
    times: Mapping[str, Sequence[float]] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    state: str = ""
    why: str = ""

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`."""
        if self.state:
            return self.state
        if self.target is None or self.value is None:
            return NO_TARGET
        return REACHED if self.target.reached(self.value) else MISSED

    def to_json(self) -> dict[str, Any]:
        """In values that JSON knows."""
        return asdict(self) | {"verdict": self.verdict}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Measurement:
        """The inverse of `to_json`."""
        known = {name: value for name, value in record.items() if name != "verdict"}
        if known["target"] is not None:
            known["target"] = Target(**known["target"])
        if known["quartiles"] is not None:
            known["quartiles"] = tuple(known["quartiles"])
        return cls(**known)


def summary(comparison: Comparison) -> dict[str, Any]:
    """A comparison as fields of a `Measurement`."""
    return asdict(comparison)


def passed(rows: Iterable[Measurement]) -> bool:
    """Whether no target was missed and nothing failed."""
    return not any(row.verdict in (MISSED, FAILED) for row in rows)
