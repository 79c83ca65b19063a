"""Arrays as they come from the user: what is accepted, and what one line says if not."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np

from ringrt.device import Kind, kind_of
from ringrt.dlpack import take
from ringrt.errors import ConfigError, HandoffError
from ringrt.plan.partition import Array
from ringrt.plan.problem import ITEMSIZE, state_dtype

#: Where arrays lie: a kind of device, and which of them.
Place = tuple[Kind, int]


@dataclass(frozen=True, slots=True)
class Shapes:
    """What q, k and v of one rank say about the problem."""

    #: The fields in which all ranks must agree, and which `Problem` takes by the same names.
    COMMON: ClassVar = ("dtype", "batch", "q_heads", "kv_heads", "head_dim", "value_dim")

    dtype: str
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    q_rows: int
    kv_rows: int

    def common(self) -> dict[str, Any]:
        """The fields named in `COMMON`."""
        return {name: getattr(self, name) for name in self.COMMON}


def as_numpy(name: str, x: Any) -> Array:
    """A NumPy array that holds what x does; on a GPU this waits for it."""
    array = take(name, x)
    if isinstance(array, np.ndarray):
        return array
    host: Array = array.get()
    return host


def one_place(**arrays: Array) -> Place:
    """Where all of these arrays lie: a kind of device, and which of them. `HandoffError` unless
    that is one place."""
    places = {name: _place(x) for name, x in arrays.items()}
    first = next(iter(arrays))
    for name, place in places.items():
        if place != places[first]:
            texts = [f"{n} on {place_name(places[n])}" for n in (first, name)]
            raise HandoffError(f"{', '.join(texts)}: they must lie on one device")
    return places[first]


def place_name(place: Place) -> str:
    """In words."""
    kind, number = place
    return "the host" if kind == "cpu" else f"GPU {number}"


def _place(x: Array) -> Place:
    kind = kind_of(x)
    assert kind is not None
    return kind, 0 if isinstance(x, np.ndarray) else int(x.device.id)


def dtype_name(x: Array) -> str:
    """The dtype's plain name; `bfloat16` for that of ml_dtypes."""
    return _name_of(x.dtype)


@cache
def _name_of(dtype: Any) -> str:
    """NumPy makes the name anew each time, and it is asked for often."""
    return str(dtype.name)


def check_arrays(q: Array, k: Array, v: Array) -> Shapes:
    """What q `[batch, rows, q_heads, head_dim]`, k `[batch, kv_rows, kv_heads, head_dim]` and
    v `[batch, kv_rows, kv_heads, value_dim]` say; `ConfigError` where they do not fit."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ConfigError(name, "shape [batch, rows, heads, dim]", f"shape {x.shape}")
        if dtype_name(x) not in ITEMSIZE or not x.dtype.isnative:
            raise ConfigError(name, f"dtype {' or '.join(ITEMSIZE)}", x.dtype)
        if x.dtype != q.dtype:
            raise ConfigError(name, f"the dtype of q, {q.dtype}", x.dtype)
        if x.shape[0] != q.shape[0]:
            raise ConfigError(name, f"the batch of q, {q.shape[0]}", x.shape[0])
        if min(x.shape[2:]) < 1:
            raise ConfigError(name, "at least one head and one element", f"shape {x.shape}")
    if k.shape[3] != q.shape[3]:
        raise ConfigError("k", f"the head_dim of q, {q.shape[3]}", k.shape[3])
    if v.shape[1:3] != k.shape[1:3]:
        raise ConfigError("v", f"the rows and heads of k, {k.shape[1:3]}", v.shape[1:3])
    if q.shape[2] % k.shape[2]:
        raise ConfigError("q", f"a multiple of k's {k.shape[2]} heads", f"{q.shape[2]} heads")
    return Shapes(
        dtype=dtype_name(q),
        batch=q.shape[0],
        q_heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        q_rows=q.shape[1],
        kv_rows=k.shape[1],
    )


def check_result(
    shapes: Shapes, dout: Array, out: Array, lse: Array, dlse: Array | None = None
) -> None:
    """`ConfigError` unless dout and out `[batch, rows, q_heads, value_dim]` and lse and dlse
    `[batch, q_heads, rows]` fit q, k and v."""
    expected: tuple[int, ...] = (shapes.batch, shapes.q_rows, shapes.q_heads, shapes.value_dim)
    for name, x in (("dout", dout), ("out", out)):
        if x.shape != expected:
            raise ConfigError(name, f"shape {expected}", f"shape {x.shape}")
        if dtype_name(x) != shapes.dtype:
            raise ConfigError(name, f"the dtype of q, {shapes.dtype}", x.dtype)
    expected = (shapes.batch, shapes.q_heads, shapes.q_rows)
    for name, x in (("lse", lse), *([] if dlse is None else [("dlse", dlse)])):
        if x.shape != expected:
            raise ConfigError(name, f"shape {expected}", f"shape {x.shape}")
        if dtype_name(x) != state_dtype(shapes.dtype):
            raise ConfigError(name, f"dtype {state_dtype(shapes.dtype)}", x.dtype)
