"""A case of attention, its arrays, and how they are laid out."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

import ml_dtypes
import numpy as np

from gpu.oracle import Attention, visible
from ringrt.device.driver import cupy

LAYOUTS = ("plain", "heads first", "unaligned", "every other element")


@dataclass(frozen=True)
class Case:
    """`mask` are keywords of `Ring.attention`; `arrays` is "numpy" or "cupy"; `layout` one of
    `LAYOUTS`; with `twice` backward must give the same bits again."""

    group: str
    dtype: str
    length: int = 193
    kv_length: int | None = None
    batch: int = 1
    q_heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    value_dim: int | None = None
    mask: dict[str, Any] = field(default_factory=dict)
    scale: float | None = None
    softcap: float | None = None
    sink: bool = False
    layout: str = "plain"
    arrays: str = "numpy"
    twice: bool = False

    @property
    def title(self) -> str:
        """The group, the dtype, and what differs from the defaults."""
        told = {"group", "dtype"}
        more = [f for f in fields(self) if f.name not in told]
        parts = [self.group, self.dtype]
        for each in more:
            value = getattr(self, each.name)
            if each.name == "mask":
                parts += [f"{name}={option}" for name, option in value.items()]
            elif value != each.default:
                parts.append(f"{each.name}={value}")
        return " ".join(parts)

    def plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self) | {"title": self.title}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Case:
        """From `plain`."""
        return cls(**{f.name: plain[f.name] for f in fields(cls)})

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of `Ring.attention`."""
        sink = np.linspace(-1, 1, self.q_heads, dtype=np.float32) if self.sink else None
        return self.mask | {"scale": self.scale, "softcap": self.softcap, "sink": sink}

    def tensors(self) -> list[np.ndarray]:
        """q, k, v and dout, standard normal."""
        keys = self.length if self.kv_length is None else self.kv_length
        values = self.head_dim if self.value_dim is None else self.value_dim
        rng = np.random.default_rng(len(self.title))
        dtype = numpy_dtype(self.dtype)
        shapes = [
            (self.batch, self.length, self.q_heads, self.head_dim),
            (self.batch, keys, self.kv_heads, self.head_dim),
            (self.batch, keys, self.kv_heads, values),
            (self.batch, self.length, self.q_heads, values),
        ]
        return [rng.standard_normal(shape).astype(dtype) for shape in shapes]

    def oracle(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Attention:
        """What is to come out."""
        wide = [x.astype(np.float64) for x in (q, k, v)]
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        sink = self.options["sink"]
        return Attention(
            *wide,
            visible(q.shape[1], k.shape[1], **self.mask),
            self.dtype,
            scale,
            self.softcap,
            None if sink is None else sink.astype(np.float64),
        )


def numpy_dtype(name: str) -> np.dtype:
    """bfloat16 included."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def on_gpu(x: np.ndarray) -> Any:
    """A CuPy array; bfloat16 goes there as uint16, which every CuPy can copy."""
    if x.dtype.name == "bfloat16":
        return cupy().asarray(x.view(np.uint16)).view(x.dtype)
    return cupy().asarray(x)


def on_host(x: Any) -> np.ndarray:
    """A NumPy array."""
    if isinstance(x, np.ndarray):
        return x
    if x.dtype.name == "bfloat16":
        return x.view(np.uint16).get().view(x.dtype)
    return x.get()


def laid_out(x: np.ndarray, layout: str, gpu: bool) -> Any:
    """The same elements, lying otherwise in memory, there or here."""
    put = on_gpu if gpu else np.array
    if layout == "heads first":
        return put(np.ascontiguousarray(x.transpose(0, 2, 1, 3))).transpose(0, 2, 1, 3)
    if layout == "unaligned":
        wider = np.zeros((*x.shape[:3], x.shape[3] + 5), x.dtype)
        wider[..., 3 : 3 + x.shape[3]] = x
        return put(wider)[..., 3 : 3 + x.shape[3]]
    if layout == "every other element":
        return put(np.repeat(x, 2, axis=3))[..., ::2]
    return put(x)
