"""One pass of one rank: what it runs on, its calls of the backend, and its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ringrt.device import Device
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

#: A transport that moves data only when it is tested gets that many chances in a step.
_PROGRESS_CALLS = 16


@dataclass(slots=True)
class Pass:
    """`timeout` is the deadline of every wait, in seconds. Made where the device is running."""

    device: Device
    transport: Transport
    stats: PassStats
    timeout: float
    on_step: OnStep | None = None
    recorder: Recorder = field(init=False)

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.device)

    @contextlib.contextmanager
    def computing(self, when: str, step: int = -1) -> Iterator[None]:
        """Times the backend; turns what goes wrong there into a `KernelError`."""
        begin = self.device.mark()
        try:
            yield
        except RingrtError:
            raise
        except Exception as error:
            raise KernelError(
                f"backend {self.stats.backend} failed on rank {self.stats.rank} {when}: "
                f"{type(error).__name__}: {error}"
            ) from error
        self.recorder.note(step, "compute", begin, self.device.mark())

    def step(self, step: Step, progress: Callable[[], object], compute: Tiled) -> None:
        """Call `compute` on the step's tiles: at once, or in portions between which the
        transport makes progress."""
        for tiles in self._portions(step):
            with self.computing(f"in ring step {step.index}", step.index):
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

    def _portions(self, step: Step) -> Iterator[TileTable]:
        moves = (step.send, step.recv, step.grad_send, step.carry, step.home)
        count = _PROGRESS_CALLS if self.transport.needs_progress and any(moves) else 1
        yield from (tiles for tiles in step.tiles.portions(count) if len(tiles))
