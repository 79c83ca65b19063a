"""Which rows there are, in the order in which they are measured."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from ringrt.bench.cases import Case, Settings, Shape
from ringrt.bench.ring_suite import ring_cases

_WAYS = ("forward", "backward")
_MASKS = (False, True)


def cases(suite: str, settings: Settings) -> list[Case]:
    """The rows of a suite; "cpu" is all of them."""
    made = {"limits": limit_cases, "kernel": kernel_cases, "ring": ring_cases}
    names = tuple(made) if suite == "cpu" else (suite,)
    return [case for name in names for case in made[name](settings)]


def kernel_cases(settings: Settings) -> Iterator[Case]:
    """The kernel beside PyTorch, and after them the best of the limit."""
    for threads, way, dtype, dim, length, causal in itertools.product(
        settings.threads, _WAYS, settings.dtypes, settings.head_dims, settings.lengths, _MASKS
    ):
        shape = Shape(way, dtype, length, dim, settings.heads, causal)
        name = f"kernel {way} {dtype} {shape.seen} {shape} t{threads}"
        yield Case(name, "kernel", f"{way} {dtype}", "kernel", threads, shape=shape)
    if "float32" in settings.dtypes:
        for threads, way in itertools.product(settings.threads, _WAYS):
            name = f"kernel {way} float32 best of the limit t{threads}"
            yield _limit(name, "best", threads, "kernel", way=way, aim="best of the limit")


def limit_cases(settings: Settings) -> Iterator[Case]:
    """What the machine can do, how soon the first result is there, and what memory it takes."""
    for dtype in settings.dtypes:
        if dtype in ("float32", "bfloat16"):
            yield _limit(f"limits multiply-adds {dtype} t1", "flop limit", 1, dtype=dtype)
    for threads, size in itertools.product(settings.threads, _sizes(settings)):
        power = f"{size}³ t{threads}"
        yield _limit(f"limits sgemm {power}", "sgemm", threads, size=size)
        for dtype in ("float32", "bfloat16"):
            name = f"limits torch.mm {dtype} {power}"
            yield _limit(name, "torch.mm", threads, dtype=dtype, needs=("torch",), size=size)
    yield _limit("limits import ringrt", "import", 1)
    for cache in ("warm", "empty"):
        name = f"limits cold start, {cache} cache"
        yield _limit(name, "cold", 1, aim=f"cold start, {cache} cache", cache=cache)
    length = settings.lengths[0]
    shape = Shape("both", length=length, heads=settings.heads, causal=True)
    name = f"limits memory d128 {length} and {2 * length}"
    yield Case(name, "limits", "memory", "memory", shape=shape, aim="memory")


def _sizes(settings: Settings) -> tuple[int, ...]:
    """Of the products of matrices."""
    return (1024,) if settings.quick else (1024, 2048)


def _limit(
    name: str,
    kind: str,
    threads: int,
    suite: str = "limits",
    way: str = "forward",
    dtype: str = "float32",
    needs: tuple[str, ...] = (),
    aim: str | None = None,
    **detail: Any,
) -> Case:
    group = f"{way} {dtype}" if suite == "kernel" else kind
    shape = Shape(way, dtype)
    return Case(name, suite, group, kind, threads, "one", needs, shape, detail, aim)
