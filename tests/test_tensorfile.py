"""safetensors files, held to the safetensors package."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save_file

from ringrt.errors import ConfigError
from ringrt.jobs.tensorfile import create_tensors, map_for_writing, open_tensors


def test_reads_what_the_package_writes(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {n: rng.standard_normal((2, 3)).astype(d) for n, d in
               [("a", "f2"), ("b", "f4"), ("c", "f8"), ("d", ml_dtypes.bfloat16)]}  # fmt: skip
    tensors["none"] = np.empty((0, 4), "f4")
    path = tmp_path / "x.safetensors"
    save_file(tensors | {"ignored": np.arange(3)}, path, metadata={"note": "hello"})
    found = open_tensors(path, "key")
    assert set(found) == set(tensors)
    for name, want in tensors.items():
        assert found[name].dtype == want.dtype
        np.testing.assert_array_equal(found[name], want)


def test_the_package_reads_what_is_written_here(tmp_path):
    path = tmp_path / "x.safetensors"
    create_tensors(path, {"out": ((1, 3, 2), "bfloat16"), "lse": ((1, 3), "float32")})
    maps = map_for_writing(path)
    maps["out"][0, 1] = [1.5, -2]
    maps["lse"][:] = [[1, 2, 3]]
    for each in maps.values():
        each.flush()
    with safetensors.safe_open(path, "np") as file:
        assert set(file.keys()) == {"out", "lse"}
    found = load_file(path)
    np.testing.assert_array_equal(found["lse"], [[1, 2, 3]])
    np.testing.assert_array_equal(found["out"][0].astype("f4"), [[0, 0], [1.5, -2], [0, 0]])


def header(values, data=b""):
    text = json.dumps(values).encode() if not isinstance(values, bytes) else values
    return len(text).to_bytes(8, "little") + text + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"12",
        (1 << 60).to_bytes(8, "little"),
        (100).to_bytes(8, "little") + b"{}",
        header(b"not json"),
        header([1]),
        header({"q": 3}),
        header({"q": ENTRY | {"shape": [3]}}, bytes(8)),
        header({"q": ENTRY}, bytes(7)),
        header({"q": {"dtype": "F32"}}),
    ],
)
def test_a_broken_file_is_one_clear_line(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"input\.path: expected a safetensors file, got"
    ) as caught:
        open_tensors(path, "input.path")
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        open_tensors(tmp_path / "none", "input.path")
