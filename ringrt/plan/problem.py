"""What is to be computed, free of how: shapes, dtype, scores and mask of one attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ringrt.errors import ConfigError
from ringrt.plan.mask import MAX_LENGTH, Mask

#: Bytes an element, by the name of the dtype.
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def default_scale(head_dim: int) -> float:
    """1/√head_dim (Vaswani et al. 2017)."""
    return 1 / math.sqrt(head_dim)


def state_dtype(dtype: str) -> str:
    """dtype of lse, of the online softmax state and of sums: float32, or float64 for float64."""
    return "float64" if dtype == "float64" else "float32"


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention over the whole (unsharded) sequence.

    Shapes are q `[batch, q_length, q_heads, head_dim]`, k `[batch, kv_length, kv_heads,
    head_dim]`, v `[batch, kv_length, kv_heads, value_dim]`. Query head h reads KV head
    h // (q_heads // kv_heads). Scores are `scale * q·k`, then `softcap * tanh(score / softcap)`
    where a softcap is given. `sink`: a learnable logit for each query head takes part in every
    row's softmax, with no value. Raises `ConfigError` for values that cannot be.
    """

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    q_length: int
    kv_length: int
    dtype: str
    mask: Mask
    scale: float
    softcap: float | None = None
    sink: bool = False

    def __post_init__(self) -> None:
        for name in ("q_heads", "kv_heads", "head_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(name, "at least 1", getattr(self, name))
        for name in ("batch", "q_length", "kv_length"):
            if not 0 <= getattr(self, name) <= MAX_LENGTH:
                expected = f"from 0 to {MAX_LENGTH}"
                raise ConfigError(name, expected, getattr(self, name))
        if self.q_heads % self.kv_heads:
            raise ConfigError("q_heads", f"a multiple of kv_heads ({self.kv_heads})", self.q_heads)
        if self.dtype not in ITEMSIZE:
            raise ConfigError("dtype", " or ".join(ITEMSIZE), self.dtype)
        if not math.isfinite(self.scale):
            raise ConfigError("scale", "a finite number", self.scale)
        if self.softcap is not None and not (0 < self.softcap < math.inf):
            raise ConfigError("softcap", "a finite number > 0, or none", self.softcap)

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def state_dtype(self) -> str:
        """dtype of lse, of the state and of sums; see `state_dtype`."""
        return state_dtype(self.dtype)

    @property
    def kv_row_bytes(self) -> int:
        """Bytes of one key row and one value row, all batches and KV heads: KV travels
        unrepeated."""
        row = self.batch * self.kv_heads * (self.head_dim + self.value_dim)
        return row * ITEMSIZE[self.dtype]

    @property
    def dkv_row_bytes(self) -> int:
        """Bytes of one row of dk and dv while they are summed up."""
        row = self.batch * self.kv_heads * (self.head_dim + self.value_dim)
        return row * ITEMSIZE[self.state_dtype]

    @property
    def q_row_bytes(self) -> int:
        """Bytes of one row of q, dout, lse and delta, which travel where K,V stay."""
        values = (self.head_dim + self.value_dim) * ITEMSIZE[self.dtype]
        return self.batch * self.q_heads * (values + 2 * ITEMSIZE[self.state_dtype])

    @property
    def dq_row_bytes(self) -> int:
        """Bytes of one row of dq while it is summed up."""
        return self.batch * self.q_heads * self.head_dim * ITEMSIZE[self.state_dtype]

    @property
    def flops_per_pair(self) -> int:
        """Multiply-adds count as two: q·k and p·v of one visible pair, all batches and heads."""
        return 2 * self.batch * self.q_heads * (self.head_dim + self.value_dim)
