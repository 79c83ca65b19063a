"""Where q, k and v come from. A rank reads its own rows and never holds the whole sequence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from ringrt.device.dtypes import numpy_dtype
from ringrt.errors import ConfigError
from ringrt.inputs import check_arrays
from ringrt.jobs.schema import FileInput, RandomInput
from ringrt.jobs.tensorfile import open_tensors
from ringrt.plan.partition import Array, Run, Runs, positions, shard

#: Random rows are generated in blocks of so many positions, each from its own seed.
_RANDOM_BLOCK = 256


class Source(Protocol):
    """Whole tensors q, k, v and dout `[batch, length, heads, dim]`, read by rows. dout, the
    gradient of out, is standard normal unless a file has it."""

    #: Whole shapes of these, and the dtype that they are read in.
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
        self.dtype: str = spec.dtype or tensors["q"].dtype.name
        shapes = {name: x.shape for name, x in tensors.items()}
        self.shapes: Mapping[str, tuple[int, ...]] = shapes | {"dout": _dout_shape(shapes)}
        if "dout" in tensors and tensors["dout"].shape != self.shapes["dout"]:
            expected = f"shape {self.shapes['dout']}"
            raise ConfigError("input.path: dout", expected, f"shape {tensors['dout'].shape}")
        self._tensors = tensors

    def read(self, name: str, runs: Runs) -> Array:
        """Only the pages that hold these rows are touched."""
        if name not in self._tensors:
            return _Normal(0, self.shapes, self.dtype).read(name, runs)
        rows = shard(self._tensors[name], runs)
        with np.errstate(over="ignore"):
            return np.asarray(rows.astype(numpy_dtype(self.dtype), copy=False))


class RandomSource:
    """Standard normal tensors. A row depends on the seed and its position alone."""

    def __init__(self, spec: RandomInput) -> None:
        value_dim = spec.value_dim or spec.head_dim
        start = (spec.batch, spec.length)
        shapes: dict[str, tuple[int, ...]] = {
            "q": (*start, spec.q_heads, spec.head_dim),
            "k": (*start, spec.kv_heads, spec.head_dim),
            "v": (*start, spec.kv_heads, value_dim),
        }
        self.shapes: Mapping[str, tuple[int, ...]] = shapes | {"dout": _dout_shape(shapes)}
        self.dtype: str = spec.dtype
        self._normal = _Normal(spec.seed, self.shapes, spec.dtype)

    def read(self, name: str, runs: Runs) -> Array:
        """Generate the rows."""
        return self._normal.read(name, runs)


class _Normal:
    """Standard normal rows, each depending on seed, tensor and position alone."""

    def __init__(self, seed: int, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
        self._seed, self._shapes, self._dtype = seed, shapes, dtype

    def read(self, name: str, runs: Runs) -> Array:
        """Generate the blocks that hold these rows, one after the other."""
        batch, _, *rest = self._shapes[name]
        parts = [part for run in runs for part in self._read_run(name, run)]
        if parts:
            return np.concatenate(parts, axis=1)
        return np.empty((batch, 0, *rest), numpy_dtype(self._dtype))

    def _read_run(self, name: str, run: Run) -> list[Array]:
        if run.count == 0:
            return []
        block, row = np.divmod(positions((run,)), _RANDOM_BLOCK)
        edges = np.flatnonzero(np.diff(block)) + 1
        parts = zip(np.split(block, edges), np.split(row, edges), strict=True)
        return [self._block(name, int(blocks[0]))[:, rows] for blocks, rows in parts]

    def _block(self, name: str, index: int) -> Array:
        batch, _, *rest = self._shapes[name]
        generator = np.random.default_rng([self._seed, list(self._shapes).index(name), index])
        block = generator.standard_normal((batch, _RANDOM_BLOCK, *rest), dtype=np.float32)
        return block.astype(numpy_dtype(self._dtype))


def _dout_shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    return (*shapes["q"][:3], shapes["v"][3])


def _open_safetensors(path: Path) -> dict[str, Array]:
    tensors = open_tensors(path, "input.path")
    missing = [name for name in "qkv" if name not in tensors]
    if missing:
        raise ConfigError("input.path", "tensors q, k and v", f"no {missing[0]} in {path}")
    return {name: tensors[name] for name in ("q", "k", "v", "dout") if name in tensors}


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
