"""What a job file may say. Strict: no unknown keys, no guessing of types.

This file and its JSON Schema (`ringrt schema`) are the reference of the job format.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError, ValidationError

from ringrt.plan.mask import MAX_LENGTH

Dtype = Literal["float16", "bfloat16", "float32", "float64"]


def _said_once(expected: str) -> WrapValidator:
    """One message for a union, where pydantic has one for each branch."""

    def check(value: Any, validate: Any) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise PydanticCustomError("expected", "{text}", {"text": expected}) from None

    return WrapValidator(check)


Documents = Annotated[
    list[int] | list[Annotated[list[int], Field(min_length=2, max_length=2)]],
    _said_once("whole numbers: cu_seqlens, or a list of [start, stop)"),
]
Window = Annotated[list[int | None], Field(min_length=2, max_length=2)]
RowCount = Annotated[
    Literal["all"] | Annotated[int, Field(ge=0)],
    _said_once("all, or a whole number of rows >= 0"),
]


def _each_once(passes: list[Any]) -> list[Any]:
    if len(set(passes)) != len(passes):
        raise PydanticCustomError("expected", "each pass once")
    if "forward" not in passes:
        raise PydanticCustomError("expected", "forward among the passes")
    return passes


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class FileInput(_Section):
    """Whole tensors q, k and v `[batch, length, heads, dim]` in files, read row by row."""

    source: Literal["file"]
    path: str = Field(
        description="a .safetensors file with tensors q, k and v, or a folder with q.npy, k.npy "
        "and v.npy; relative to the job file"
    )
    dtype: Dtype | None = Field(None, description="compute in this dtype; as stored by default")


class RandomInput(_Section):
    """Standard normal tensors, the same for a seed whatever the ranks and the partition."""

    source: Literal["random"]
    seed: int = Field(0, ge=0)
    batch: int = Field(1, ge=1)
    length: int = Field(ge=0, le=MAX_LENGTH, description="tokens")
    q_heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    value_dim: int | None = Field(None, ge=1, description="head_dim by default")
    dtype: Dtype = "float32"

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.q_heads % self.kv_heads:
            raise PydanticCustomError("expected", "q_heads to be a multiple of kv_heads")
        return self


class Attention(_Section):
    """Options of `Ring.attention`."""

    causal: bool = False
    window: Window | None = Field(
        None, description="tokens visible on the left and right; -1 or null for all"
    )
    documents: Documents | None = Field(None, description="cu_seqlens, or a list of [start, stop)")
    prefix: int = Field(0, ge=0, description="first tokens, visible to all")
    sink_tokens: int = Field(0, ge=0, description="first tokens, visible beside a window")
    sink: list[float] | None = Field(None, description="a logit for each query head")
    scale: float | None = Field(None, description="1/sqrt(head_dim) by default")
    softcap: float | None = Field(None, gt=0)


class RingOptions(_Section):
    """Options of `Ring`."""

    ranks: int | None = Field(
        None, ge=1, description="thread ranks; under a launcher the number of processes counts"
    )
    partition: str = Field("striped", description="contiguous, striped, zigzag, or a plugin's")
    schedule: str = Field("auto", description="auto (fewest bytes), ring or direct")
    travel: str = Field("auto", description="what moves in backward: auto (fewest bytes), kv or q")
    transport: str = Field(
        "auto", description="auto, threads, mpi, torch, tcp, nccl, or a plugin's"
    )
    # YAML reads the bare word null as nothing; here it is the backend of that name.
    backend: Annotated[str, BeforeValidator(lambda x: "null" if x is None else x)] = Field(
        "auto", description="auto, cpu, reference, null, or a plugin's"
    )
    timeout: float = Field(60.0, gt=0, description="deadline of every wait for a rank, seconds")
    threads: int | None = Field(
        None, ge=1, description="CPU threads of a rank; its share of the cores by default"
    )


class Verify(_Section):
    """Compare rows of the result with a float64 oracle."""

    rows: RowCount = Field(64, description="all, or so many rows of each rank; 0 is none")


class Output(_Section):
    """Where out and lse are written."""

    path: str = Field(description="a .safetensors file; relative to the job file")


class Job(_Section):
    """A job: one attention over one sequence, on a ring of ranks."""

    input: Annotated[FileInput | RandomInput, Field(discriminator="source")]
    attention: Attention = Attention()
    ring: RingOptions = RingOptions()
    passes: Annotated[list[Literal["forward", "backward"]], AfterValidator(_each_once)] = Field(
        ["forward"], min_length=1
    )
    verify: Verify = Verify()
    output: Output | None = None
