"""What is computed in a check: a small problem, its arrays, and the shards in which keys come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np

from ringrt.conformance.oracle import Array, visible
from ringrt.device.dtypes import numpy_dtype
from ringrt.plan import Mask, Piece, Problem, Run
from ringrt.plan.problem import default_scale
from ringrt.plan.tiles import TileTable, lower


@dataclass(slots=True)
class Arrays:
    """Of the host, in the problem's dtype: q `[batch, rows, q_heads, head_dim]`, k `[batch, keys,
    kv_heads, head_dim]`, v `[batch, keys, kv_heads, value_dim]`, dout like out."""

    q: Array
    k: Array
    v: Array
    dout: Array

    def __iter__(self) -> Iterator[Array]:
        return (getattr(self, each.name) for each in fields(self))

    def copy(self) -> Arrays:
        """The same numbers, elsewhere."""
        return Arrays(*(x.copy() for x in self))


@dataclass(frozen=True, slots=True)
class Case:
    """A problem. `pieces` say who sees whom (None: everybody everything), `mask` what to call
    that; `edges` where the keys are cut into shards, which are absorbed in the order of
    `order`. Arrays are standard normal."""

    dtype: str = "float32"
    batch: int = 1
    rows: int = 33
    keys: int = 40
    q_heads: int = 2
    kv_heads: int = 2
    head_dim: int = 16
    value_dim: int | None = None
    mask: str = "full"
    pieces: tuple[Piece, ...] | None = None
    scale: float | None = None
    softcap: float | None = None
    sink: tuple[float, ...] | None = None
    edges: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    seed: int = 0

    def __str__(self) -> str:
        heads = f"{self.q_heads}/{self.kv_heads} heads of {self.head_dim}"
        parts = [self.dtype, f"{self.rows} rows, {self.keys} keys", heads, f"mask {self.mask}"]
        if self.batch != 1:
            parts.append(f"batch {self.batch}")
        if self.value_dim is not None:
            parts.append(f"value_dim {self.value_dim}")
        for name in ("scale", "softcap", "sink"):
            if getattr(self, name) is not None:
                parts.append(f"{name} {getattr(self, name)}")
        if self.edges:
            shards = f"keys in shards cut at {', '.join(map(str, self.edges))}"
            parts.append(shards + (f" in the order {self.order}" if self.order else ""))
        return ", ".join(parts)

    def but(self, **changes: Any) -> Case:
        """The same with changes."""
        return replace(self, **changes)

    def banded(self, lower: int | None = None, upper: int | None = None) -> Case:
        """Row i sees key j iff lower <= i − j <= upper."""
        piece = Piece(0, self.rows, 0, self.keys, lower, upper)
        return self.but(mask=_band(lower, upper), pieces=(piece,))

    def causal(self) -> Case:
        """Aligned at the bottom right."""
        return self.banded(self.rows - self.keys).but(mask="causal")

    @property
    def problem(self) -> Problem:
        """As a backend is asked for it."""
        return Problem(
            batch=self.batch,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim or self.head_dim,
            q_length=self.rows,
            kv_length=self.keys,
            dtype=self.dtype,
            mask=Mask(self._pieces()),
            scale=default_scale(self.head_dim) if self.scale is None else self.scale,
            softcap=self.softcap,
            sink=self.sink is not None,
        )

    @property
    def logits(self) -> Array | None:
        """The sink, float64 `[q_heads]`."""
        return None if self.sink is None else np.array(self.sink)

    @property
    def seen(self) -> Array:
        """Who sees whom, bool `[rows, keys]`."""
        return visible(self.rows, self.keys, self._pieces())

    def arrays(self) -> Arrays:
        """Standard normal, the same ones for the same case."""
        rng = np.random.default_rng(self.seed)
        value_dim = self.value_dim or self.head_dim
        shapes = (
            (self.batch, self.rows, self.q_heads, self.head_dim),
            (self.batch, self.keys, self.kv_heads, self.head_dim),
            (self.batch, self.keys, self.kv_heads, value_dim),
            (self.batch, self.rows, self.q_heads, value_dim),
        )
        dtype = numpy_dtype(self.dtype)
        return Arrays(*(rng.standard_normal(shape).astype(dtype) for shape in shapes))

    def shards(self) -> list[tuple[slice, TileTable]]:
        """The keys of each shard and what the rows see of them, in the order of absorption."""
        edges = (0, *self.edges, self.keys)
        mask, rows = self.problem.mask, (Run(0, 1, self.rows),)
        shards = []
        for start, stop in pairwise(edges):
            tiles = lower(mask, rows, (Run(start, 1, stop - start),))
            shards.append((slice(start, stop), tiles))
        return [shards[index] for index in self.order or range(len(shards))]

    def _pieces(self) -> tuple[Piece, ...]:
        if self.pieces is None:
            return (Piece(0, self.rows, 0, self.keys),)
        return self.pieces


def _band(lower: int | None, upper: int | None) -> str:
    """In words."""
    if lower is None:
        return f"i - j <= {upper}"
    return f"i - j >= {lower}" if upper is None else f"{lower} <= i - j <= {upper}"
