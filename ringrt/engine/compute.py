"""Calling a backend: timed, in portions where the transport wants it, its errors mapped."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ringrt.engine.stats import PassStats
from ringrt.errors import KernelError, RingrtError
from ringrt.plan.schedule import Step
from ringrt.plan.tiles import TileTable
from ringrt.transport import Transport

#: A transport that moves data only when it is tested gets that many chances in a step.
_PROGRESS_CALLS = 16


def portions(step: Step, transport: Transport) -> Iterator[TileTable]:
    """The step's tiles, at once or with pauses in which the transport can make progress."""
    moves = (step.send, step.recv, step.grad_send, step.carry, step.home)
    count = _PROGRESS_CALLS if transport.needs_progress and any(moves) else 1
    yield from (tiles for tiles in step.tiles.portions(count) if len(tiles))


class Computing:
    """Counts time in the backend, and turns what goes wrong there into a `KernelError`."""

    def __init__(self, stats: PassStats, when: str) -> None:
        self._stats, self._when, self._begin = stats, when, 0.0

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stats.compute_s += time.perf_counter() - self._begin
        if isinstance(error, Exception) and not isinstance(error, RingrtError):
            raise KernelError(
                f"backend {self._stats.backend} failed on rank {self._stats.rank} {self._when}: "
                f"{type(error).__name__}: {error}"
            ) from error
