"""Which plan: the one that was asked for, or the one that moves the fewest bytes."""

from __future__ import annotations

from ringrt.errors import ConfigError
from ringrt.plan.cost import traffic
from ringrt.plan.partition import Partition
from ringrt.plan.problem import Problem
from ringrt.plan.schedule import Plan

SCHEDULES = ("ring", "direct")
TRAVELS = ("kv", "q")

#: Bytes beyond the fewest that a plan of a better kind may move.
_TOLERANCE = 1.02


def plan(
    problem: Problem,
    partition: Partition,
    size: int,
    schedule: str = "auto",
    *,
    backward: bool = False,
    travel: str = "auto",
) -> Plan:
    """The plan of a pass. `auto` takes the schedule (and in backward the travel) that moves the
    fewest bytes, to 2%; among those the fewest hops; among those K,V rather than Q, and the ring,
    which talks to neighbours only, rather than direct. Raises `ConfigError` for an unknown name
    or no ranks."""
    if size < 1:
        raise ConfigError("ranks", "at least 1", size)
    schedules = _choices("schedule", schedule, SCHEDULES)
    travels = _choices("travel", travel, TRAVELS) if backward else ["kv"]
    options = [Plan(problem, partition, size, s, t) for t in travels for s in schedules]
    if len(options) == 1:
        return options[0]
    bytes_of = [traffic(option, backward) for option in options]
    enough = _TOLERANCE * min(cost.bytes for cost in bytes_of)
    near = [i for i, cost in enumerate(bytes_of) if cost.bytes <= enough]
    best = min(near, key=lambda i: bytes_of[i].hops)
    why = "; ".join(
        f"{_name(option, backward)}: {cost.bytes:,} bytes in {cost.hops:,} hops"
        for option, cost in zip(options, bytes_of, strict=True)
    )
    chosen = options[best]
    return Plan(problem, partition, size, chosen.schedule, chosen.travel, why)


def check_names(schedule: str, travel: str) -> None:
    """`ConfigError` for a schedule or travel that there is not."""
    _choices("schedule", schedule, SCHEDULES)
    _choices("travel", travel, TRAVELS)


def _choices(key: str, name: str, known: tuple[str, ...]) -> list[str]:
    if name != "auto" and name not in known:
        raise ConfigError(key, "auto or " + " or ".join(known), repr(name))
    return list(known) if name == "auto" else [name]


def _name(option: Plan, backward: bool) -> str:
    return f"{option.schedule} moving {option.travel}" if backward else option.schedule
