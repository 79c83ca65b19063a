"""ringrt's own partitions. They enter by the `ringrt` entry-point group, as anybody's do."""

from __future__ import annotations

from ringrt.hookspecs import hookimpl
from ringrt.plan.partition import PARTITIONS, Partition

RINGRT_PROTOCOL = 1


@hookimpl
def ringrt_register_partitions() -> list[Partition]:
    """contiguous, striped and zigzag."""
    return list(PARTITIONS.values())
