"""The rows of suite ring."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ringrt.bench.cases import Case, Settings, Shape
from ringrt.calls import available_cores

_WAYS = ("forward", "backward")
#: Parts into which K and V are cut, and what that is called among the targets.
_PIECES = {4: "quarter pieces", 8: "eighth pieces"}
#: Tokens to the left that a window shows, and packed documents.
_WINDOW, _DOCUMENTS = 512, 8


def ring_cases(settings: Settings) -> Iterator[Case]:
    """All, what needs fewer cores first."""
    yield from _one_rank(settings)
    yield from _pieces(settings)
    yield from _gqa(settings)
    yield from _masks(settings)
    yield from _steps(settings)
    yield from _two_ranks(settings, "one")
    yield from _partitions(settings)
    yield from _two_ranks(settings, "mpi")
    yield from _gloo(settings)


def _one_rank(settings: Settings) -> Iterator[Case]:
    for shape in _shapes(settings, settings.lengths[:1]):
        name = f"ring of one rank {shape.way} {shape}"
        yield _case(name, shape, "one rank", aim="one rank")


def _two_ranks(settings: Settings, processes: str) -> Iterator[Case]:
    over, needs = ("MPI ranks", ("mpi4py",)) if processes == "mpi" else ("thread ranks", ())
    for shape in _shapes(settings, settings.lengths):
        name = f"ring of two {over} {shape.way} {shape}"
        yield _case(name, shape, "two ranks", 2, processes, needs, aim="two ranks")


def _partitions(settings: Settings) -> Iterator[Case]:
    for shape in _shapes(settings, settings.lengths):
        name = f"ring striped against contiguous {shape.way} {shape}"
        yield _case(name, shape, "partitions", 2, aim="striped")


def _gloo(settings: Settings) -> Iterator[Case]:
    for way, dim, length, causal in itertools.product(
        ("forward", "both"), settings.head_dims, settings.lengths, (False, True)
    ):
        shape = Shape(way, "float32", length, dim, settings.heads, causal)
        words = "forward" if way == "forward" else "forward+backward"
        name = f"ring against gloo by hand {words} {shape.seen} {shape}"
        aim = f"gloo {way} {shape.seen}"
        yield _case(name, shape, "gloo", 2, "gloo", ("torch",), aim)


def _steps(settings: Settings) -> Iterator[Case]:
    for ranks, way in itertools.product((2, 4), _WAYS):
        shape = Shape(way, length=64, head_dim=64, heads=settings.heads, causal=True)
        name = f"ring step without compute, {ranks} thread ranks, {way}"
        used = min(ranks, available_cores())
        yield _case(name, shape, "steps", used, aim="step", ranks=ranks)


def _pieces(settings: Settings) -> Iterator[Case]:
    for parts, shape in itertools.product(
        _PIECES, _shapes(settings, settings.lengths[:1], causal=False)
    ):
        keys = max(1, shape.length // parts)
        name = f"ring carried state, pieces of {keys} keys {shape.way} {shape}"
        yield _case(name, shape, "pieces", aim=_PIECES[parts], keys=keys)


def _gqa(settings: Settings) -> Iterator[Case]:
    """A quarter of the heads, where they can be cut so."""
    few = settings.heads // 4 if settings.heads % 4 == 0 else 1
    for shape in _shapes(settings, settings.lengths[:1]):
        name = f"ring GQA {settings.heads} on {few} heads {shape.way} {shape}"
        yield _case(name, shape, "GQA", aim="GQA", kv_heads=few)


def _masks(settings: Settings) -> Iterator[Case]:
    for shape in _shapes(settings, settings.lengths[-1:]):
        left = min(_WINDOW, shape.length // 16)
        name = f"ring window of {left} {shape.way} {shape}"
        yield _case(name, shape, "window", aim="proportional", left=left)
        name = f"ring {_DOCUMENTS} documents {shape.way} {shape}"
        yield _case(name, shape, "documents", aim="proportional", count=_DOCUMENTS)


def _shapes(settings: Settings, lengths: tuple[int, ...], causal: bool = True) -> Iterator[Shape]:
    for way, dim, length in itertools.product(_WAYS, settings.head_dims, lengths):
        yield Shape(way, "float32", length, dim, settings.heads, causal)


def _case(
    name: str,
    shape: Shape,
    kind: str,
    cores: int = 1,
    processes: str = "one",
    needs: tuple[str, ...] = (),
    aim: str | None = None,
    **detail: int,
) -> Case:
    return Case(
        name, "ring", f"ring {shape.way}", kind, cores, processes, needs, shape, detail, aim
    )
