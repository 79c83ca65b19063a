"""Where q, k and v come from. A rank reads its own rows and never holds the whole sequence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from ringrt.errors import ConfigError
from ringrt.inputs import check_arrays
from ringrt.jobs.schema import FileInput, RandomInput
from ringrt.jobs.tensorfile import open_tensors
from ringrt.plan.partition import Array, Run, Runs, positions, shard

#: Random rows are generated in blocks of so many positions, each from its own seed.
_RANDOM_BLOCK = 256


class Source(Protocol):
    """Whole tensors q, k and v `[batch, length, heads, dim]`, read by rows."""

    #: Whole shapes of q, k and v, and the dtype that they are read in.
    shapes: Mapping[str, tuple[int, ...]]
    dtype: str

    def read(self, name: str, runs: Runs) -> Array:
        """The rows at the runs' positions, in their order, as a new or mapped array."""


def open_source(spec: FileInput | RandomInput, folder: Path) -> Source:
    """The source that a job's `input` names. Raises `ConfigError`; reads no rows yet."""
    if isinstance(spec, RandomInput):
        return RandomSource(spec)
    return FileSource(spec, folder)


class FileSource:
    """Tensors in a .safetensors file or three .npy files, through memory maps."""

    def __init__(self, spec: FileInput, folder: Path) -> None:
        path = folder / spec.path
        tensors = _open_npy(path) if path.is_dir() else _open_safetensors(path)
        try:
            check_arrays(tensors["q"], tensors["k"], tensors["v"])
        except ConfigError as error:
            raise ConfigError(f"input.path: {error.key}", error.expected, error.got) from None
        self._tensors = tensors
        self.shapes: Mapping[str, tuple[int, ...]] = {n: x.shape for n, x in tensors.items()}
        self.dtype: str = spec.dtype or tensors["q"].dtype.name

    def read(self, name: str, runs: Runs) -> Array:
        """Only the pages that hold these rows are touched."""
        rows = shard(self._tensors[name], runs)
        with np.errstate(over="ignore"):
            return np.asarray(rows.astype(numpy_dtype(self.dtype), copy=False))


class RandomSource:
    """Standard normal tensors. A row depends on the seed and its position alone."""

    def __init__(self, spec: RandomInput) -> None:
        value_dim = spec.value_dim or spec.head_dim
        start = (spec.batch, spec.length)
        self.shapes: Mapping[str, tuple[int, ...]] = {
            "q": (*start, spec.q_heads, spec.head_dim),
            "k": (*start, spec.kv_heads, spec.head_dim),
            "v": (*start, spec.kv_heads, value_dim),
        }
        self.dtype: str = spec.dtype
        self._seed = spec.seed

    def read(self, name: str, runs: Runs) -> Array:
        """Generate the blocks that hold these rows, one after the other."""
        batch, _, *rest = self.shapes[name]
        parts = [part for run in runs for part in self._read_run(name, run)]
        if parts:
            return np.concatenate(parts, axis=1)
        return np.empty((batch, 0, *rest), numpy_dtype(self.dtype))

    def _read_run(self, name: str, run: Run) -> list[Array]:
        if run.count == 0:
            return []
        block, row = np.divmod(positions((run,)), _RANDOM_BLOCK)
        edges = np.flatnonzero(np.diff(block)) + 1
        parts = zip(np.split(block, edges), np.split(row, edges), strict=True)
        return [self._block(name, int(blocks[0]))[:, rows] for blocks, rows in parts]

    def _block(self, name: str, index: int) -> Array:
        batch, _, *rest = self.shapes[name]
        generator = np.random.default_rng([self._seed, "qkv".index(name), index])
        block = generator.standard_normal((batch, _RANDOM_BLOCK, *rest), dtype=np.float32)
        return block.astype(numpy_dtype(self.dtype))


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of that name, bfloat16 included."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _open_safetensors(path: Path) -> dict[str, Array]:
    tensors = open_tensors(path, "input.path")
    missing = [name for name in "qkv" if name not in tensors]
    if missing:
        raise ConfigError("input.path", "tensors q, k and v", f"no {missing[0]} in {path}")
    return {name: tensors[name] for name in "qkv"}


def _open_npy(folder: Path) -> dict[str, Array]:
    tensors = {}
    for name in "qkv":
        path = folder / f"{name}.npy"
        try:
            tensors[name] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError("input.path", "q.npy, k.npy and v.npy", f"{path}: {reason}") from None
    return tensors
