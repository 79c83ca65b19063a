"""Compiled code on disk: found again, thrown away with what it was made from, and done without
where it cannot be kept."""

import os
import subprocess
import sys

import numpy as np
import pytest
from cpu_support import CASE, MACHINES, cpu, expected, forward

from ringrt_backends.cpu import calls, compiled, disk, memory, tiled_forward
from support import assert_close

KEY = ("forward", MACHINES["8"], 5, 3)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_stored_is_found(folder):
    assert disk.load(KEY) is None
    disk.store(KEY, b"code")
    assert disk.load(KEY) == b"code"
    assert [path.parent for path in folder.iterdir()] == [folder]


@pytest.mark.parametrize(
    "other", [("backward", *KEY[1:]), (KEY[0], MACHINES["8-low"], 5, 3), (*KEY[:3], 4)]
)
def test_another_key_is_not_found(folder, other):
    disk.store(KEY, b"code")
    assert disk.load(other) is None


def test_other_sources_are_another_key(folder, monkeypatch):
    disk.store(KEY, b"code")
    monkeypatch.setattr(disk, "sources", lambda: "changed")
    assert disk.load(KEY) is None


def test_sources_are_all_of_the_package(tmp_path, monkeypatch):
    (tmp_path / "one.py").write_text("SIZE = 1")
    monkeypatch.setattr(disk, "_HERE", tmp_path)
    digests = {disk.sources.__wrapped__()}
    (tmp_path / "one.py").write_text("SIZE = 2")
    digests.add(disk.sources.__wrapped__())
    (tmp_path / "two.py").touch()
    digests.add(disk.sources.__wrapped__())
    monkeypatch.setattr(disk.numba, "__version__", "of tomorrow")
    digests.add(disk.sources.__wrapped__())
    assert len(digests) == 4


@pytest.mark.parametrize("change", [lambda code: code[:-1], lambda code: b"?" + code[1:]])
def test_what_is_damaged_is_made_again(folder, change):
    disk.store(KEY, b"code")
    (path,) = folder.iterdir()
    path.write_bytes(change(path.read_bytes()))
    assert disk.load(KEY) is None
    disk.store(KEY, b"code")
    assert disk.load(KEY) == b"code"


def test_a_folder_that_cannot_be_made_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "below"))
    disk.store(KEY, b"code")
    assert disk.load(KEY) is None


def test_what_cannot_be_written_whole_leaves_nothing(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.os, "replace", full)
    disk.store(KEY, b"code")
    assert list(folder.iterdir()) == []


def test_the_second_folder_is_taken_where_the_first_one_cannot(tmp_path, monkeypatch):
    (tmp_path / "__pycache__").touch()
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(disk, "_HERE", tmp_path)
    disk.store(KEY, b"code")
    assert disk.load(KEY) == b"code"
    assert len(list((tmp_path / "home" / "ringrt").iterdir())) == 1


def test_the_oldest_files_go(folder, monkeypatch):
    monkeypatch.setattr(disk, "_KEPT", 2)
    for age, key in ((30, "oldest"), (20, "old"), (10, "new")):
        disk.store(key, b"code")
        found = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)
        os.utime(found[-1], (found[-1].stat().st_mtime - age,) * 2)
    assert [disk.load(key) for key in ("oldest", "old", "new")] == [None, b"code", b"code"]


def test_code_from_disk_computes_the_same(folder, monkeypatch):
    """What is found is not compiled."""
    machine, heads = MACHINES["8"], (CASE.head_dim, CASE.value_dim, "float32", False)
    fresh = compiled.forward_code.__wrapped__(machine, *heads)
    with monkeypatch.context() as patched:
        patched.setattr(compiled, "object_code", None)
        again = compiled.forward_code.__wrapped__(machine, *heads)
    assert fresh.names == again.names
    monkeypatch.setattr(tiled_forward, "forward_code", lambda *_: again)
    assert_close(forward(cpu(machine), CASE.causal()), expected(CASE.causal()))


def test_numba_s_cache_depends_on_the_whole_package():
    """Left alone, it depends on the file of the function only; constants of others are compiled
    in as well."""
    from ringrt_backends.cpu import forward as driver

    stamp = driver.absorb._cache._cache_file._source_stamp
    assert disk.sources() in stamp
    assert calls.driver(lambda control: None)._cache._cache_file._source_stamp[1] == disk.sources()


def test_a_numba_without_such_a_cache_is_taken_as_it_is():
    function = object()
    assert disk.stamp(function) is function


def test_a_second_process_compiles_nothing(folder):
    program = (
        "import sys, numpy as np, ringrt\n"
        "from ringrt_backends.cpu import compiled\n"
        "if sys.argv[1:]: compiled.object_code = None\n"
        "q = np.ones((1, 9, 2, 8), np.float32)\n"
        "print(ringrt.attention(q, q, q, ranks=1, backend='cpu')[0].sum())\n"
    )
    for arguments in ([], ["again"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert float(done.stdout) == 144.0


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_memory_begins_at_a_line(dtype):
    kept = memory.Memory()
    for array in (
        memory.zeros((3, 5), dtype), memory.full((7,), 2, dtype), kept.take((11, 3), dtype)
    ):  # fmt: skip
        assert array.ctypes.data % 64 == 0
        assert array.flags.c_contiguous
        assert array.dtype == dtype
    assert memory.zeros((3, 5), dtype).sum() == 0
    assert memory.full((7,), 2, dtype).sum() == 14
