"""What is asked of the bench, and the rows that come of it: plain data, handed to children."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ringrt.bench.measurement import Measurement
from ringrt.bench.targets import Target, target


@dataclass(frozen=True, slots=True)
class Settings:
    """`repeats` of every comparison; `threads` are the numbers of cores that the kernel is
    measured on; `backend` is the one that is measured."""

    threads: tuple[int, ...] = (1, 2)
    lengths: tuple[int, ...] = (4096, 8192)
    head_dims: tuple[int, ...] = (64, 128)
    heads: int = 8
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    repeats: int = 7
    quick: bool = False
    backend: str = "cpu"


@dataclass(frozen=True, slots=True)
class Shape:
    """One attention over itself, batch 1. `way` is forward, backward or both."""

    way: str = "forward"
    dtype: str = "float32"
    length: int = 4096
    head_dim: int = 128
    heads: int = 8
    causal: bool = False

    @property
    def seen(self) -> str:
        """The mask in one word."""
        return "causal" if self.causal else "full"

    def __str__(self) -> str:
        return f"d{self.head_dim} {self.length}"


@dataclass(frozen=True, slots=True)
class Case:
    """One row to be measured (a few, where something is shown beside it). `kind` names what
    measures it; `processes` is one, mpi or gloo: two ranks each a process; `cores` are what all
    may use together; `needs` are modules that must be installed; `detail` what else `kind` wants
    to know; `aim` the name of the target."""

    name: str
    suite: str
    group: str
    kind: str
    cores: int = 1
    processes: str = "one"
    needs: tuple[str, ...] = ()
    shape: Shape = field(default_factory=Shape)
    detail: Mapping[str, Any] = field(default_factory=dict)
    aim: str | None = None

    def row(self, **measured: Any) -> Measurement:
        """The row of this case. Its target is the case's own unless one is given, and counts
        only from its length on."""
        aim = self.aim and target(self.aim, self.shape.head_dim)
        fields: dict[str, Any] = {"name": self.name, "suite": self.suite, "group": self.group}
        fields |= {"threads": self.cores, "target": aim or None} | measured
        counts: Target | None = fields["target"]
        if counts is not None and self.shape.length < counts.from_length:
            fields["target"] = None
            short = f"the target counts from {counts.from_length} tokens on"
            fields["why"] = fields.get("why") or short
        return Measurement(**fields)

    def to_json(self) -> dict[str, Any]:
        """In values that JSON knows."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Case:
        """The inverse of `to_json`."""
        more = {"shape": Shape(**record["shape"]), "needs": tuple(record["needs"])}
        return cls(**{**record, **more})


def settings_from_json(record: Mapping[str, Any]) -> Settings:
    """From `asdict`, by way of JSON."""
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in record.items()
    }
    return Settings(**fields)


def chosen(cases: Sequence[Case], only: Sequence[str]) -> list[Case]:
    """The cases whose names hold one of the texts, or all if there are none."""
    return [case for case in cases if not only or any(text in case.name for text in only)]
