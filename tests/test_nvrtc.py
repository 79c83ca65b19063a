"""The real compiler on every CUDA kernel, for GPUs that are not here: registers, spills and the
instructions that matter are read from what it makes."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from cuda.core import Program, ProgramOptions

from ringrt import kernels
from ringrt.kernels import load_source
from ringrt_backends.cuda_variants import Variant

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120")
#: What the whole table of tuned variants is compiled for; others are compiled for two.
VARIANTS = [
    *((arch, "bfloat16", dk, dv) for arch in ARCHITECTURES for dk, dv in ((64, 64), (128, 128))),
    *((arch, "bfloat16", 192, 128) for arch in ("sm_80", "sm_120")),
    *((arch, "bfloat16", 256, 256) for arch in ("sm_90a", "sm_100a")),
    *((arch, "float16", 64, 64) for arch in ARCHITECTURES),
    ("sm_90a", "float16", 128, 128),
    *((arch, "float32", 64, 64) for arch in ARCHITECTURES),
    *((arch, "float64", 128, 128) for arch in ARCHITECTURES),
    ("sm_80", "float32", 256, 256),
    ("sm_80", "float64", 256, 256),
]
#: So that the registers of a multiprocessor hold two blocks of 128 threads.
MOST_REGISTERS = 255
#: Bytes of shared memory a block can have, on the smallest and on the largest of these GPUs.
SHARED = {"sm_80": 163 << 10, "sm_90a": 227 << 10, "sm_100a": 227 << 10, "sm_120": 99 << 10}


@cache
def tool(name):
    """A program of a CUDA wheel."""
    site = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    found = sorted(site.glob(f"*/bin/{name}"))
    assert found, f"the extra `test` installs {name}"
    return found[0]


@cache
def compiled(path, options, arch, folder):
    """A cubin on disk, and each kernel's registers and bytes of stack."""
    macros = [tuple(option.removeprefix("-D").split("=")) for option in options]
    # As CuPy compiles: it always flushes fp32 subnormals to zero.
    settings = ProgramOptions(
        arch=arch,
        std="c++17",
        define_macro=macros,
        ftz=True,
        device_as_default_execution_space=True,
    )
    code = Program(load_source(path), "c++", settings).compile("cubin").code
    file = Path(folder) / f"{path.stem}-{arch}-{abs(hash(options))}.cubin"
    file.write_bytes(code)
    said = run("cuobjdump", "--dump-resource-usage", file)
    usage = re.findall(r"Function (\w+):\s*\n\s*REG:(\d+) STACK:(\d+)", said)
    assert usage
    return file, {name: (int(registers), int(stack)) for name, registers, stack in usage}


def run(name, *arguments):
    done = subprocess.run([tool(name), *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def instructions(file):
    """How often each instruction occurs, by kernel."""
    counts, name = {}, None
    for line in run("nvdisasm", "-c", file).splitlines():
        if found := re.match(r"\.section\s+\.text\.(\w+)", line.strip()):
            name = found[1]
            counts[name] = Counter()
        elif (
            name
            and "@!PT" not in line
            and (found := re.search(r"\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9]*)", line))
        ):
            counts[name][found[1]] += 1
    return counts


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cubins"))


@pytest.mark.parametrize(("arch", "dtype", "dk", "dv"), VARIANTS)
def test_attention_kernels(arch, dtype, dk, dv, folder):
    variant = Variant(dtype, dk, dv)
    for kernel in variant.all():
        file, usage = compiled(kernel.path, kernel.options, arch, folder)
        registers, stack = usage[kernel.name]
        where = f"{kernel.name} of {kernel.path.name} {kernel.options} for {arch}"
        counts = instructions(file)[kernel.name]
        assert stack == counts["LDL"] == counts["STL"] == 0, f"{where} spills registers"
        assert registers <= MOST_REGISTERS, where
        if kernel.shared <= SHARED[arch]:
            continue
        assert dtype in ("float32", "float64"), f"{where}: does not fit into shared memory"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_16_bit_products_are_made_on_tensor_cores_from_swizzled_copies(arch, folder):
    """HMMA and ldmatrix in the numbers that the tiles ask for; asynchronous copies; no bank
    conflict by construction, so no shared-memory loads element by element either. (What never
    is executed, predicated by !PT, does not count.)"""
    kernel = Variant("bfloat16", 64, 64).forward
    file, _ = compiled(kernel.path, kernel.options, arch, folder)
    counts = instructions(file)["forward"]
    rows, keys, dim = 2, 64, 64  # 16-row tiles of a warp, keys of a step
    products = rows * (keys // 8) * (dim // 16) + rows * (dim // 8) * (keys // 16)
    assert counts["HMMA"] == products
    fragments = (dim // 16) * (rows + keys // 16) + (keys // 16) * (dim // 16)
    assert counts["LDSM"] == fragments
    assert counts["LDGSTS"] >= 6
    assert counts["LDS"] == 0
    # One exponential for each score, and what the softcap takes where there is one.
    scores = rows * (keys // 8) * 4
    assert scores <= counts["MUFU"] <= 5 * scores


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("types", [("bf16", "float", "u16"), ("double", "double", "u64")])
def test_the_runtimes_own_kernels(arch, types, folder):
    names = ("TYPE", "SUM", "WORD")
    options = tuple(f"-D{name}={kind}" for name, kind in zip(names, types, strict=True))
    path = Path(kernels.__file__).parent / "rows.cu"
    _, usage = compiled(path, options, arch, folder)
    assert set(usage) == {"take", "add_rows", "rounded", "row_delta", "sink_gradient"}
    assert all(registers <= 96 for registers, _ in usage.values())
