"""One pass of one rank: what it runs on, its calls of the backend, and its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from ringrt.device import Device
from ringrt.engine.buffers import Shelf
from ringrt.engine.stats import PassStats, Recorder
from ringrt.errors import KernelError, RingrtError
from ringrt.hookspecs import RingStep
from ringrt.plan.schedule import Step
from ringrt.plan.tiles import TileTable
from ringrt.transport import Transport

#: Called after each ring step.
OnStep = Callable[[RingStep], None]

#: What a backend does with some tiles of a step.
Tiled = Callable[[TileTable], None]

#: A transport that moves data only when it is tested gets that many chances in a step. More of them
#: cost more than they give: a backend packs K and V anew for each, and the copying is work of the
#: same core. With 16 two ranks took a fifth to a third longer than two threads, with 2 at most 6 %.
_PROGRESS_CALLS = 2


@dataclass(slots=True)
class Pass:
    """`timeout` is the deadline of every wait, in seconds. Made where the device is running."""

    device: Device
    transport: Transport
    stats: PassStats
    timeout: float
    on_step: OnStep | None = None
    shelf: Shelf = field(default_factory=Shelf)
    recorder: Recorder = field(init=False)

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.device)

    def computing(self, when: str, step: int = -1) -> _Computing:
        """Times the backend; turns what goes wrong there into a `KernelError`."""
        return _Computing(self, when, step)

    def step(self, step: Step, progress: Callable[[], object], compute: Tiled) -> None:
        """Call `compute` on the step's tiles: at once, or in portions between which the
        transport makes progress."""
        for tiles in self._portions(step):
            with self.computing("in ring step", step.index):
                compute(tiles)
            progress()

    def done(self, step: int, steps: int) -> None:
        """So many steps are done."""
        stats = self.stats
        stats.steps = step
        if self.on_step is None:
            return
        self.on_step(
            RingStep(
                stats.operation,
                stats.rank,
                self.transport.size,
                stats.backend,
                done=step,
                steps=steps,
                bytes_sent=stats.bytes_sent,
                bytes_received=stats.bytes_received,
            )
        )

    def finish(self) -> None:
        """Wait for what is still under way, and fill in the times; a pass that is captured has
        not run yet."""
        if self.device.capturing:
            return
        end = self.device.mark()
        self.transport.settle(self.timeout)
        self.recorder.resolve(self.stats, end)

    def _portions(self, step: Step) -> list[TileTable]:
        portions = [step.tiles]
        if self.transport.needs_progress and step.moves:
            portions = step.tiles.portions(_PROGRESS_CALLS)
        return [tiles for tiles in portions if len(tiles)]


class _Computing:
    """A class of its own, because a pass enters it in every step: a generator takes longer."""

    __slots__ = ("_begin", "_run", "_step", "_when")

    def __init__(self, run: Pass, when: str, step: int) -> None:
        self._run, self._when, self._step = run, when, step

    def __enter__(self) -> None:
        self._begin = self._run.device.mark()

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run = self._run
        if error is None:
            run.recorder.note(self._step, "compute", self._begin, run.device.mark())
        elif isinstance(error, Exception) and not isinstance(error, RingrtError):
            when = self._when if self._step < 0 else f"{self._when} {self._step}"
            raise KernelError(
                f"backend {run.stats.backend} failed on rank {run.stats.rank} {when}: "
                f"{type(error).__name__}: {error}"
            ) from error
