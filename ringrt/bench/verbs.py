"""The kernel beside itself, in what a ring asks of it: K and V in pieces, fewer KV heads, and
masks of which most is not visible."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ringrt.bench.cases import Case, Settings
from ringrt.bench.check import check_by_oracle
from ringrt.bench.interleave import Contender, interleave, ratio, timed
from ringrt.bench.measurement import Measurement, summary
from ringrt.bench.problems import Inputs, Verbs, backend, inputs


def run(case: Case, settings: Settings) -> Iterator[Measurement]:
    """The time of the one over that of the other. By pairs, where masks differ: 1 is time in
    proportion to what is visible."""
    kernel, way = backend(settings.backend, case.cores), case.shape.way
    names, given, pieces = _pair(case)
    pair = [Verbs(kernel, x, piece) for x, piece in zip(given, pieces, strict=True)]
    for each in pair:
        check_by_oracle(each.inputs, *each.result, each.backward() if way == "backward" else ())
    timers = [timed(each.call(way)) for each in pair]
    times = interleave([*map(Contender, names, timers)], settings.repeats)
    factor = pair[1].pairs / pair[0].pairs
    measured = summary(ratio(times, names[0], names[1], factor)) | {"times": times}
    yield case.row(**measured, figures={"visible pairs": pair[0].pairs})


def _pair(case: Case) -> tuple[list[str], list[Inputs], list[int | None]]:
    """Names, inputs, and in pieces of how many keys: first what stands above."""
    shape, detail = case.shape, case.detail
    plain = inputs(shape)
    if case.kind == "pieces":
        return ["in pieces", "in one"], [plain, plain], [detail["keys"], None]
    if case.kind == "GQA":
        names = [f"{shape.heads} KV heads", f"{detail['kv_heads']} KV heads"]
        return names, [plain, inputs(shape, detail["kv_heads"])], [None, None]
    if case.kind == "window":
        masked = inputs(shape, window=(detail["left"], 0))
    else:
        masked = inputs(
            shape, documents=np.linspace(0, shape.length, detail["count"] + 1).astype(int)
        )
    return [case.kind, "causal"], [masked, plain], [None, None]
