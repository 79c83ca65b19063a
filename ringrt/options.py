"""The options of one attention call, checked, and as the record by which ranks compare them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringrt.errors import ConfigError, Unsupported
from ringrt.inputs import Shapes, as_numpy, dtype_name
from ringrt.plan.mask import is_whole
from ringrt.plan.mask_options import MaskOptions
from ringrt.plan.partition import Array
from ringrt.plan.problem import ITEMSIZE, Problem, default_scale

_MASKING = ("causal", "window", "documents", "prefix", "sink_tokens", "mask")
_SCORES = ("scale", "softcap", "sink", "length")


@dataclass(frozen=True, slots=True, eq=False)
class CallOptions:
    """`sink` are logits `[q_heads]` or None; `length` (q, kv) or None; scale None is the
    default."""

    masking: MaskOptions
    scale: float | None
    softcap: float | None
    sink: Array | None
    length: tuple[int, int] | None

    @classmethod
    def of(cls, path: str, shapes: Shapes, options: Mapping[str, Any]) -> CallOptions:
        """From a user's keywords. Raises `ConfigError`, and `Unsupported` for a keyword that
        `path` does not implement."""
        unknown = sorted(options.keys() - {*_MASKING, *_SCORES})
        if unknown:
            raise Unsupported(f"{', '.join(unknown)}: not implemented in {path}")
        given = {name: options[name] for name in _MASKING if name in options}
        if "documents" in given:
            given["documents"] = _on_host(given["documents"])
        softcap = _finite("softcap", options.get("softcap"))
        if softcap is not None and softcap <= 0:
            raise ConfigError("softcap", "a finite number > 0, or None", softcap)
        return cls(
            MaskOptions.of(**given),
            _finite("scale", options.get("scale")),
            softcap,
            _sink(options.get("sink"), shapes),
            _length(options.get("length")),
        )

    def problem(self, shapes: Shapes, q_length: int, kv_length: int) -> Problem:
        """The whole problem of tensors like these over sequences of these lengths. Raises
        `ConfigError` where a mask, documents or `length` do not fit them."""
        found = (q_length, kv_length)
        if self.length not in (None, found):
            expected = f"{self.length} by the argument"
            raise ConfigError("length", expected, f"{found} from the shards")
        return Problem(
            **shapes.common(),
            q_length=q_length,
            kv_length=kv_length,
            mask=self.masking.build(q_length, kv_length),
            scale=default_scale(shapes.head_dim) if self.scale is None else self.scale,
            softcap=self.softcap,
            sink=self.sink is not None,
        )

    def record(self) -> dict[str, Any]:
        """In plain values; arrays by a digest."""
        sink = None if self.sink is None else hashlib.sha256(self.sink.tobytes()).hexdigest()[:16]
        record = {"scale": self.scale, "softcap": self.softcap, "sink": sink}
        length = None if self.length is None else list(self.length)
        return record | {"length": length} | self.masking.record()


def _finite(name: str, value: Any) -> float | None:
    """A plain float, so that ranks which pass 1 and numpy.float32(1) agree."""
    if value is None:
        return None
    if not is_number(value):
        raise ConfigError(name, "a number or None", repr(value))
    number = float(value)
    if not math.isfinite(number):
        raise ConfigError(name, "a finite number", number)
    return number


def is_number(value: Any) -> bool:
    """A real number, NumPy's included; not a bool."""
    real = isinstance(value, int | float | np.integer | np.floating)
    return real and not isinstance(value, bool)


def _on_host(documents: Any) -> Any:
    """Arrays of a framework as NumPy's; lists and what is no array stay as they are."""
    if isinstance(documents, tuple):
        return tuple(map(_on_host, documents))
    return as_numpy("documents", documents) if hasattr(documents, "__dlpack__") else documents


def _sink(sink: Any, shapes: Shapes) -> Array | None:
    if sink is None:
        return None
    array = as_numpy("sink", sink)
    if array.shape != (shapes.q_heads,):
        raise ConfigError("sink", f"shape [q_heads], ({shapes.q_heads},)", array.shape)
    if dtype_name(array) not in ITEMSIZE:
        raise ConfigError("sink", f"dtype {' or '.join(ITEMSIZE)}", array.dtype)
    return array


def _length(length: Any) -> tuple[int, int] | None:
    if length is None:
        return None
    pair = (length, length) if is_whole(length) else length
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(map(is_whole, pair)):
        raise ConfigError("length", "a whole number, or (q, kv)", repr(length))
    return int(pair[0]), int(pair[1])
