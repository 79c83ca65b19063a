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

Dtype = Literal["float16", "bfloat16", "float32", "float64"]


def _all_or_count(value: Any, check: Any) -> Any:
    """One message for the union, where pydantic has one for each branch."""
    try:
        return check(value)
    except ValidationError:
        raise PydanticCustomError("expected", "all, or a whole number of rows >= 0") from None


def _each_once(passes: list[Any]) -> list[Any]:
    if len(set(passes)) != len(passes):
        raise PydanticCustomError("expected", "each pass once")
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
    length: int = Field(ge=0, description="tokens")
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
    scale: float | None = Field(None, description="1/sqrt(head_dim) by default")
    softcap: float | None = Field(None, gt=0)


class RingOptions(_Section):
    """Options of `Ring`."""

    ranks: int | None = Field(
        None, ge=1, description="thread ranks; under mpirun the number of processes counts"
    )
    partition: str = Field("striped", description="contiguous, striped or zigzag")
    schedule: str = Field("auto", description="auto or ring")
    transport: str = Field("auto", description="auto, threads, mpi, or a plugin's")
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

    rows: Annotated[Literal["all"] | Annotated[int, Field(ge=0)], WrapValidator(_all_or_count)] = (
        Field(64, description="all, or so many rows of each rank; 0 is none")
    )


class Output(_Section):
    """Where out and lse are written."""

    path: str = Field(description="a .safetensors file; relative to the job file")


class Job(_Section):
    """A job: one attention over one sequence, on a ring of ranks."""

    input: Annotated[FileInput | RandomInput, Field(discriminator="source")]
    attention: Attention = Attention()
    ring: RingOptions = RingOptions()
    passes: Annotated[list[Literal["forward"]], AfterValidator(_each_once)] = Field(
        ["forward"], min_length=1
    )
    verify: Verify = Verify()
    output: Output | None = None
