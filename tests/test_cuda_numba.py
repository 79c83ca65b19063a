"""The Numba CUDA backend without a GPU: in Numba's simulator, as PTX, and with planted bugs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ringrt.plan import Mask, Piece, Run
from ringrt.plan.tiles import TileTable, lower
from ringrt_backends import cuda_numba
from ringrt_backends.cuda_numba_work import key_range, key_work, row_work
from support import ROOT

BACKENDS = ROOT / "backends"
SITE = Path(sysconfig.get_paths()["purelib"])
KERNELS = ("absorb", "rows_backward", "keys_backward")


def simulate(folder: Path, *arguments: str, timeout: float) -> subprocess.CompletedProcess:
    """Numba simulates a whole process or nothing of it."""
    script = Path(__file__).with_name("numba_sim_check.py")
    return subprocess.run(
        [sys.executable, "-B", script, folder, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
    )


@pytest.mark.timeout(300)
def test_every_case_is_right_in_the_simulator():
    done = simulate(BACKENDS, timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr


# What the blocks have to do.


@settings(max_examples=60)
@given(st.data())
def test_work_is_every_visible_pair_once(data):
    rows, keys = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30))
    bound = st.none() | st.integers(-32, 32)
    cut = data.draw(st.integers(0, rows))
    pieces = [(0, cut), (cut, rows), (0, rows)]
    mask = Mask([Piece(a, b, 0, keys, data.draw(bound), data.draw(bound)) for a, b in pieces])
    tiles = lower(mask, (Run(0, 1, rows),), (Run(0, 1, keys),))
    if not len(tiles):
        return
    height, offset = data.draw(st.sampled_from([1, 4, 7])), key_range(tiles)[0]
    wanted = np.zeros((rows, keys), int)
    for q0, q1, k0, k1, low, high in tiles:
        apart = np.arange(q1 - q0)[:, None] - np.arange(k1 - k0)
        wanted[q0:q1, k0:k1] += (low <= apart) & (apart <= high)
    wanted = wanted[:, offset:]
    assert_each_once(row_work(tiles, height), height, wanted)
    assert_each_once(key_work(tiles, height), height, wanted.T)


def assert_each_once(work, height, wanted):
    """The pairs that the pieces show, own by other; each within its task's own; longest first."""
    found, visits = np.zeros_like(wanted), []
    for first, begin, end in work.tasks.tolist():
        visits.append(0)
        for own0, own1, other0, other1, low, high in work.pieces[begin:end].tolist():
            assert first <= own0 < own1 <= first + height
            visits[-1] += -(-(other1 - other0) // height)
            i, j = np.ogrid[own0:own1, other0:other1]
            seen = (low <= i - j) & (i - j <= high)
            assert seen.any()
            found[own0:own1, other0:other1] += seen
    np.testing.assert_array_equal(found, wanted)
    assert visits == sorted(visits, reverse=True)


def test_work_is_kept_by_table_and_holds_many_tiles():
    edges = np.arange(0, 200_000, 2)
    table = np.stack([edges, edges + 2, edges, edges + 2, 0 * edges, 0 * edges + 9], axis=1)
    tiles = TileTable(table)
    work = row_work(tiles, 64)
    assert work is row_work(tiles, 64)
    assert len(work.pieces) == len(edges)
    assert len(work.tasks) == 3125
    assert work.pieces.dtype == work.tasks.dtype == np.int32


# What is missing.


def test_what_is_missing_is_said(monkeypatch):
    from ringrt_backends.cuda_numba_pairs import SIMULATED, cuda

    if not SIMULATED:
        monkeypatch.setattr(cuda, "is_available", lambda: False)
        assert "Numba finds no CUDA GPU" in cuda_numba.missing()
        monkeypatch.setattr(cuda, "is_available", lambda: True)
        assert cuda_numba.missing() is None
    monkeypatch.setattr(cuda_numba, "find_spec", lambda name: None)
    assert cuda_numba.missing().startswith("numba-cuda is not installed: pip install 'ringrt[")


# The machine code, as far as it can be seen without a GPU.


@pytest.fixture(scope="module", params=KERNELS)
def ptx(request):
    from ringrt_backends import cuda_numba_kernels
    from ringrt_backends.cuda_numba_pairs import SIMULATED, cuda

    assert not SIMULATED, "unset NUMBA_ENABLE_CUDASIM"
    assert cuda.cudadrv.nvvm.is_available(), "the extra `test` installs libNVVM"
    kernel = getattr(cuda_numba_kernels, request.param)
    signature = cuda_numba_kernels.SIGNATURES[kernel]
    return request.param, cuda.compile_ptx(kernel.py_func, signature, cc=(8, 0))[0]


def test_the_elementwise_kernels_compile():
    from ringrt_backends.cuda_numba_arrays import ALL_SIGNATURES
    from ringrt_backends.cuda_numba_pairs import SIMULATED, cuda

    assert not SIMULATED, "unset NUMBA_ENABLE_CUDASIM"
    assert cuda.cudadrv.nvvm.is_available(), "the extra `test` installs libNVVM"
    small = {k: s for k, s in ALL_SIGNATURES.items() if k.py_func.__name__ not in KERNELS}
    assert len(small) == 3
    for kernel, signature in small.items():
        code = cuda.compile_ptx(kernel.py_func, signature, cc=(8, 0))[0]
        assert ".target sm_80" in code
        assert ".local" not in code


def test_machine_code_has_tiles_barriers_and_registers(ptx):
    """Tiles in shared memory within the 48 KiB that every device gives a block, barriers, nothing
    called, and nothing of the innermost loops in local memory."""
    name, code = ptx
    shared = [int(n) for n in re.findall(r"\.shared \.align \d+ \.b8 \S+\[(\d+)\]", code)]
    assert len(shared) == {"absorb": 6}.get(name, 3)
    assert sum(shared) <= 48 * 1024
    barriers = {"absorb": 7, "rows_backward": 6, "keys_backward": 9}[name]
    assert code.count("bar.sync") >= barriers
    assert "call.uni" not in code
    local = re.findall(r"\.local \.align \d+ \.b8 \S+\[(\d+)\]", code)
    assert sum(map(int, local)) <= 512
    blocks = re.split(r"^\$L\w+:|^.*\bbra\b.*$", code, flags=re.MULTILINE)
    loops = [block for block in blocks if block.count("fma.rn.f32") >= 48]
    assert len(loops) == {"absorb": 1}.get(name, 2), "the products of a tile, unrolled"
    for block in loops:
        assert ".local" not in block
        assert block.count("ld.shared") <= 32, "a value is loaded once for all its products"


def test_ptxas_spills_nothing(ptx, tmp_path):
    ptxas = shutil.which("ptxas") or next(SITE.glob("nvidia/*/bin/ptxas"), None)
    assert ptxas, "the extra `test` installs ptxas"
    (tmp_path / "kernel.ptx").write_text(ptx[1])
    command = [ptxas, "-v", "-arch=sm_80", tmp_path / "kernel.ptx", "-o", tmp_path / "kernel"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr
    assert int(re.search(r"Used (\d+) registers", done.stderr)[1]) <= 65536 // 256


# Planted bugs: each is noticed by the first cases of the grid.


class Mutant(NamedTuple):
    """`old` occurs `count` times in the file; the one at `which` is changed, or all if None."""

    name: str
    file: str
    old: str
    new: str
    count: int = 1
    which: int | None = 0


K, P, W = (f"cuda_numba{x}.py" for x in ("_kernels", "_pairs", "_work"))
SYNC = "cuda.syncthreads()"
MUTANTS = [
    # Barriers.
    Mutant("tiles are loaded while others read", K, SYNC, "pass", 8, 4),
    Mutant("maxima are read before they are there", K, SYNC, "pass", 8, 0),
    Mutant("values are read before they are there", K, SYNC, "pass", 8, 7),
    # The band.
    Mutant("one key too few", P, "i - low - begin + 1)", "i - low - begin)"),
    Mutant("rows beyond the piece", P, "if own0 <= i < own1 else TILE", "if i < own1 else TILE"),
    Mutant("the band is not turned over", W, "(k0, k1, q0, q1, -high, -low)", "(k0, k1, q0, q1, low, high)"),
    Mutant("what is hidden is multiplied", K, "                if starts[r] <= j < stops[r]:\n                    for c in range(WIDE)", "                if True:\n                    for c in range(WIDE)"),
    # Softmax.
    Mutant("-inf is subtracted from -inf", K, "0.0 if top == -math.inf else top", "top"),
    Mutant("y is not rescaled", K, "_rescale(y[batch, head], first, keeps)", "pass"),
    Mutant("rounding errors are dropped", K, " + (part - added)", ""),
    # Heads, dims and gradients.
    Mutant("wrong KV head", K, "head // (heads // k.shape[1])", "head % k.shape[1]", 2, None),
    Mutant("dk of the wrong rows", K, "weights, rows, begin, end,", "weights, rows, first, end,"),
    Mutant("delta left out", P, "(dp - delta)", "dp"),
    Mutant("slope of the softcap left out", P, "scale * (1 - tanh * tanh)", "scale"),
]  # fmt: skip


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_caught(mutant, tmp_path):
    source = BACKENDS / "ringrt_backends"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, tmp_path / source.name, ignore=ignored)
    path = tmp_path / source.name / mutant.file
    parts = path.read_text().split(mutant.old)
    assert len(parts) == mutant.count + 1, "the line to change is not there as often as it was"
    glue = [mutant.new if mutant.which in (None, n) else mutant.old for n in range(mutant.count)]
    path.write_text("".join(part + more for part, more in zip(parts, [*glue, ""], strict=True)))
    done = simulate(tmp_path, "quick", timeout=110)
    assert done.returncode != 0
    assert "SyntaxError" not in done.stderr
    assert "ImportError" not in done.stderr
    assert "Traceback" in done.stderr
