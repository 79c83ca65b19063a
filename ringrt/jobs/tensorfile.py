"""safetensors files, memory-mapped for reading and for writing.

The format is eight bytes of header length, a JSON header, and raw data. It is read and written
here, because the safetensors package gives NumPy neither a memory map with strides (a striped
shard is every p-th row) nor a file that several ranks write their own rows of. Tests hold this
to that package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ringrt.errors import ConfigError
from ringrt.plan.partition import Array

_DTYPES: dict[str, Any] = {
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
}
_NAMES = {np.dtype(dtype).name: name for name, dtype in _DTYPES.items()}
#: The format's own limit on its header.
_MAX_HEADER = 100_000_000

#: Shape and dtype name of a tensor.
Layout = tuple[tuple[int, ...], str]


def open_tensors(path: Path, key: str) -> dict[str, Array]:
    """The file's floating-point tensors as read-only memory maps. `ConfigError` at `key` if it
    is no such file."""
    try:
        header, begin = _read_header(path)
        return {
            name: _map(path, _DTYPES[entry["dtype"]], entry["shape"], begin, entry, "r")
            for name, entry in header.items()
            if name != "__metadata__" and entry["dtype"] in _DTYPES
        }
    except OSError as error:
        raise ConfigError(key, "a readable file", f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(key, "a safetensors file", f"{path}: {error}") from None


def create_tensors(path: Path, layouts: Mapping[str, Layout]) -> None:
    """Make a file of that size and header, its data unwritten (zeros)."""
    header: dict[str, Any] = {}
    end = 0
    for name, (shape, dtype) in layouts.items():
        begin, end = end, end + int(np.prod(shape)) * np.dtype(_DTYPES[_NAMES[dtype]]).itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def map_for_writing(path: Path) -> dict[str, Array]:
    """The tensors of a file made by `create_tensors`, writable."""
    header, begin = _read_header(path)
    return {
        name: _map(path, _DTYPES[entry["dtype"]], entry["shape"], begin, entry, "r+")
        for name, entry in header.items()
    }


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header and the offset of the data."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= _MAX_HEADER:
            raise ValueError("the header's length is impossible")
        text = file.read(length)
    if len(text) < length:
        raise ValueError("the file ends within its header")
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("the header is no mapping")
    return header, 8 + length


def _map(
    path: Path, dtype: Any, shape: list[int], base: int, entry: Mapping[str, Any], mode: Any
) -> Array:
    begin, end = entry["data_offsets"]
    if end - begin != int(np.prod(shape)) * np.dtype(dtype).itemsize:
        raise ValueError("shape and data offsets disagree")
    if base + end > path.stat().st_size:
        raise ValueError("the file is shorter than its header says")
    if begin == end:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, mode, base + begin, tuple(shape))
