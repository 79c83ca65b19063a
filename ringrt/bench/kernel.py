"""The kernel's verbs beside PyTorch's attention, or beside themselves in another dtype."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ringrt.bench.cases import Case, Settings
from ringrt.bench.check import check, check_by_oracle
from ringrt.bench.interleave import Contender, Times, interleave, ratio, timed
from ringrt.bench.machine import multiplies_bfloat16_tiles
from ringrt.bench.measurement import Measurement, summary
from ringrt.bench.problems import Inputs, Verbs, backend, inputs, speed
from ringrt.bench.targets import target
from ringrt.bench.torch_peer import TorchPass, installed

OURS, TORCH, WIDE = "ringrt", "torch", "ringrt float32"
_NAMES = {"forward": ("out",), "backward": ("dq", "dk", "dv")}


def run(case: Case, settings: Settings) -> Iterator[Measurement]:
    """The row, and where float32 is what a 16-bit dtype is held to, one beside PyTorch too."""
    shape, threads = case.shape, case.cores
    kernel = backend(settings.backend, threads)
    ours = Verbs(kernel, inputs(shape))
    contenders = [Contender(OURS, timed(ours.call(shape.way)))]
    peer = TorchPass(ours.inputs, shape.causal, threads) if _has_peer(case) else None
    check_verbs(ours, case, peer)
    if peer is not None:
        contenders.append(Contender(TORCH, timed(peer.call(shape.way))))
    native = shape.dtype not in ("float16", "bfloat16") or _native(kernel, shape.dtype)
    if not native:
        wide = Verbs(kernel, inputs(replace(shape, dtype="float32")))
        contenders.append(Contender(WIDE, timed(wide.call(shape.way))))
    times = interleave(contenders, settings.repeats)
    yield from _rows(case, times, native, _speed(case, ours, times, kernel))


def check_verbs(ours: Verbs, case: Case, peer: TorchPass | None) -> None:
    """Everything that a pass gives against PyTorch, or some rows against the oracle."""
    shape = case.shape
    found = _results(ours, shape.way)
    if peer is not None:
        check(_NAMES[shape.way], found, peer.results(shape.way), shape.dtype, "PyTorch")
    else:
        gradients = found if shape.way == "backward" else ()
        check_by_oracle(ours.inputs, *ours.result, gradients)


def check_against_peer(given: Inputs, case: Case, ours: Verbs) -> None:
    """As `check_verbs`, for rows in which PyTorch is no contender."""
    peer = TorchPass(given, case.shape.causal, case.cores) if installed() else None
    check_verbs(ours, case, peer)


def _results(ours: Verbs, way: str) -> Any:
    return ours.backward() if way == "backward" else ours.result[:1]


def _has_peer(case: Case) -> bool:
    """float16 is held to float32, and to nothing else."""
    return installed() and case.shape.dtype != "float16"


def _native(kernel: Any, dtype: str) -> bool:
    """Whether bfloat16 may be held to PyTorch's: the kernel multiplies it as it is, and PyTorch
    has no matrix unit for it that the kernel does not use."""
    own = bool(getattr(kernel, "native_bfloat16", False))
    return dtype == "bfloat16" and own and not multiplies_bfloat16_tiles()


def _speed(case: Case, ours: Verbs, times: Times, kernel: Any) -> Any:
    seconds = statistics.median(times[OURS])
    return speed(case.shape, ours.pairs, seconds, case.cores, kernel)


def _rows(case: Case, times: Times, native: bool, figures: Any) -> Iterator[Measurement]:
    shape = case.shape
    beside = f"{case.name} beside float32"
    if not native:
        aim = target("narrow against float32")
        measured = summary(ratio(times, WIDE, OURS)) | {"times": times, "target": aim}
        yield replace(case.row(**measured, figures=figures), name=beside)
    if TORCH in times:
        aim_name = f"{shape.way} {shape.dtype} {shape.seen}"
        named = shape.dtype in ("float32", "bfloat16") and native
        aim_or_none = target(aim_name, shape.head_dim) if named else None
        measured = summary(ratio(times, TORCH, OURS)) | {"times": times, "target": aim_or_none}
        yield case.row(**measured, figures=figures)
    elif native:
        yield case.row(
            unit="s",
            value=statistics.median(times[OURS]),
            best=min(times[OURS]),
            times=times,
            figures=figures,
            why="PyTorch is not installed",
        )
