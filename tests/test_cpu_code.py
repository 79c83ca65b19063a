"""Which code the cpu backend runs, what it says of it, and what is in it."""

from __future__ import annotations

import re
from functools import cache

import llvmlite.binding as llvm
import numpy as np
import pytest
from cpu_support import CASE, MACHINES, cpu, expected, forward
from llvmlite import ir

from ringrt.backend import BackendContext
from ringrt.errors import ConfigError
from ringrt.registry import registry
from ringrt_backends.cpu import backend, compiled, limit, machine
from ringrt_backends.cpu.machine import Machine
from support import assert_close

ZEN4 = ("avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512bf16", "avx2", "fma", "f16c")


def found(monkeypatch, names, triple="x86_64-unknown-linux-gnu"):
    """As if LLVM found these features and no others."""
    all_names = {*ZEN4, "sse2", "neon"}
    monkeypatch.setattr(
        machine.llvm, "get_host_cpu_features", lambda: llvm.FeatureMap({n: n in names for n in all_names})
    )  # fmt: skip
    monkeypatch.setattr(machine.llvm, "get_host_cpu_name", lambda: "znver4")
    monkeypatch.setattr(machine.llvm, "get_process_triple", lambda: triple)


def this_machine(*without) -> Machine | None:
    """Not what was found out before."""
    return machine.this_machine.__wrapped__(without)


def in_use():
    return backend.code_in_use.__wrapped__()


# Which code.


@pytest.mark.parametrize(
    ("without", "name", "width", "scalef", "pairs"),
    [
        ((), "avx512", 16, True, "native"),
        (("avx512bf16",), "avx512", 16, True, ""),
        (("avx512f",), "avx2", 8, False, ""),
        (("avx512dq",), "avx2", 8, False, ""),
        (("avx512f", "avx512bf16"), "avx2", 8, False, ""),
        (("neon",), "avx512", 16, True, "native"),
        (("no_such_feature",), "avx512", 16, True, "native"),
    ],
)
def test_the_widest_code_that_is_allowed(monkeypatch, without, name, width, scalef, pairs):
    found(monkeypatch, ZEN4)
    made = this_machine(*without)
    assert (made.name, made.width, made.scalef, made.pairs) == (name, width, scalef, pairs)
    assert ("-prefer-256-bit" in made.features) == (name == "avx512")
    assert made.panel == 2 * width
    for absent in without:
        assert f"+{absent}" not in made.features.split(",")
    # LLVM would use what the named processor has, whatever the features say.
    assert made.cpu == ("generic" if without else "znver4")


@pytest.mark.parametrize("without", ["avx2", "fma", "f16c"])
def test_without_avx2_there_is_none(monkeypatch, without):
    found(monkeypatch, set(ZEN4) - {"avx512f"})
    assert this_machine(without) is None


def test_avx2_takes_avx512_along(monkeypatch):
    found(monkeypatch, ZEN4)
    assert this_machine("avx2") is None


def test_arm(monkeypatch):
    for triple in ("aarch64-unknown-linux-gnu", "arm64-apple-darwin"):
        found(monkeypatch, {"neon"}, triple)
        assert (this_machine().name, this_machine().width) == ("neon", 4)
        assert this_machine("neon") is None
    found(monkeypatch, {"neon"})
    assert this_machine() is None


def test_tiles_fit_the_blocks_and_pairs():
    """Blocks are whole numbers of tiles, parts of pairs, and the registers of the machine hold
    what a tile needs."""
    for width in (4, 8, 16):
        made = Machine("any", width, "generic", "")
        # Queries are columns of a tile and its rows, keys its rows alone.
        for size in (compiled.QUERIES, compiled.SQUARE):
            assert size % made.panel == 0
        for size in (compiled.QUERIES, compiled.KEYS, compiled.SQUARE):
            assert size % made.rows == 0
        assert made.rows % 2 == 0


# What is said of it.


@pytest.mark.parametrize(
    ("value", "without"),
    [("", ()), ("avx512bf16", ("avx512bf16",)), (" avx2 , avx512f,", ("avx2", "avx512f"))],
)
def test_the_environment(monkeypatch, value, without):
    monkeypatch.setenv("RINGRT_CPU_WITHOUT", value)
    assert machine.asked_for() == without


def test_an_unknown_feature_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("RINGRT_CPU_WITHOUT", "avx2,avx1024")
    with pytest.raises(ConfigError, match=r"RINGRT_CPU_WITHOUT.*avx512bf16.*avx1024"):
        machine.asked_for()


def test_words_for_each_code(monkeypatch):
    found(monkeypatch, ZEN4)
    monkeypatch.setattr(backend, "this_machine", lambda without: this_machine(*without))
    # Code for another machine is not compiled here.
    monkeypatch.setattr(backend, "forward_code", lambda *_: None)
    words = {}
    for without in ("", "avx512bf16", "avx512f", "avx2"):
        monkeypatch.setenv("RINGRT_CPU_WITHOUT", without)
        made, words[without] = in_use()
        assert (made is None) == (without == "avx2")
    rows = this_machine().rows
    assert words == {
        "": f"avx512, tiles of {rows} x 32 floats, bf16 in pairs",
        "avx512bf16": f"avx512, tiles of {rows} x 32 floats",
        "avx512f": f"avx2, tiles of {this_machine('avx512f').rows} x 16 floats",
        "avx2": "plain Numba (RINGRT_CPU_WITHOUT=avx2)",
    }
    found(monkeypatch, {"sse2"})
    monkeypatch.delenv("RINGRT_CPU_WITHOUT")
    assert in_use() == (None, "plain Numba (no vector code for this machine)")


def test_what_does_not_compile_is_plain_and_said(monkeypatch):
    def fail(*_):
        raise RuntimeError("LLVM is out of sorts\nand says more")

    monkeypatch.setattr(backend, "forward_code", fail)
    monkeypatch.setattr(backend, "this_machine", lambda _: Machine("avx2", 8, "generic", "+avx2"))
    expected_words = "plain Numba (LLVM does not compile for avx2: LLVM is out of sorts)"
    assert in_use() == (None, expected_words)


def test_the_registry_takes_the_code_in_use(monkeypatch):
    monkeypatch.setattr(backend, "code_in_use", lambda: (None, "plain Numba (a test)"))
    made = registry().backend("cpu").load(BackendContext(2))
    assert made.machine is None
    assert not made.native_bfloat16
    assert made.flop_limit("float32") is None
    assert registry().backend("cpu").detail() == "plain Numba (a test)"
    assert_close(forward(made, CASE.causal()), expected(CASE.causal()))
    made.close()


def test_the_multiply_add_limit():
    made = cpu(MACHINES["8"])
    assert made.flop_limit("float32") > 1e8
    assert made.flop_limit("float16") is None
    assert made.flop_limit("float64") is None


# What is in it: compiled for other machines, and read.


def x86(name):
    """A machine of that kind, whatever this one is."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    features = ",".join(f"+{feature}" for feature in ZEN4)
    return {
        "avx512": Machine("avx512", 16, "znver4", features + ",-prefer-256-bit", scalef=True, pairs="native"),
        "avx2": Machine("avx2", 8, "haswell", "+avx2,+fma,+f16c", registers=16),
    }[name]  # fmt: skip


@cache
def assembly(name, dtype, capped=False):
    """Of the kernels of both passes for heads of 128, by name."""
    made, kernels = x86(name), {}
    for emit in (compiled.forward_module, compiled.backward_module):
        kernels |= _kernels(emit(made, 128, 128, dtype, capped), made)
    return made, kernels


def _kernels(module, made):
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    target = llvm.Target.from_triple("x86_64-unknown-linux-gnu").create_target_machine(
        cpu=made.cpu, features=made.features, opt=3
    )
    text = target.emit_assembly(parsed)
    bodies = re.findall(r"^(\w+):\s*(?:#[^\n]*)?\n(.*?)^\.Lfunc_end", text, re.M | re.S)
    return dict(bodies)


def inner_loops(text):
    """Stretches of code from a label to a jump back to it, that hold no other label."""
    return re.findall(r"^(\.LBB\w+):((?:(?!^\.LBB\w+:).)*?)\tj\w+\t\1$", text, re.M | re.S)


PRODUCTS = ("score", "score_masked", "values", "prob", "prob_masked", "dscore", "by_row", "by_column", "value_by_row")  # fmt: skip
CODES = [("avx512", "float32"), ("avx512", "bfloat16"), ("avx2", "float32")]


@pytest.mark.parametrize(("name", "dtype"), CODES)
def test_the_limit_is_of_multiply_adds_alone(name, dtype):
    """One for each sum in every step, all in registers."""
    made, module = x86(name), ir.Module()
    limit._emit(module, made, "tile", dtype == "bfloat16")
    [(_, lines)] = inner_loops(_kernels(module, made)["tile"])
    each = len(re.findall(r"\tv(?:dpbf16|fmadd\w+)ps\t", lines))
    assert each > 0
    assert each % (2 * made.rows) == 0
    assert "(" not in lines, "something is in memory"


@pytest.mark.parametrize(("name", "dtype"), CODES)
@pytest.mark.parametrize("kernel", PRODUCTS)
def test_the_inner_loop_is_all_multiply_adds(name, dtype, kernel):
    """A chunk: for each of its steps a product for every vector of the tile, one broadcast a row
    and two loads of B; and for each vector one addition to its total, in memory with AVX2, but none
    where weights are bf16. What LLVM moves to the stack besides is little, and no more than every
    second step asks for a line."""
    made, kernels = assembly(name, dtype)
    product = r"\tvdpbf16ps\t" if dtype == "bfloat16" else r"\t(?:vfn?madd\w+|vmul)ps\t"
    register = "%zmm" if made.width == 16 else "%ymm"
    loops = [
        (lines, re.findall(rf"{product}[^\n]*{register}", lines))
        for _, lines in inner_loops(kernels[kernel])
    ]
    lines, products = max(loops, key=lambda loop: len(loop[1]))
    vectors = 2 * made.rows
    assert len(products) == vectors * made.chunk
    totals = 0 if dtype == "bfloat16" and not kernel.startswith("score") else vectors
    assert len(re.findall(rf"\tvaddps\t[^\n]*{register}", lines)) == totals
    of_totals = 2 * vectors if name == "avx2" else 0
    moved = lines.count("(%rsp)") - of_totals
    assert moved <= (0 if totals == 0 else 4 if name == "avx2" else 12)
    broadcasts = len(re.findall(r"\tv(?:p)?broadcast\w+\t", lines))
    assert broadcasts == made.rows * made.chunk
    loads = len(re.findall(rf"\tvmov[au]p[sd]\t[^%\n][^\n]*{register}", lines))
    assert loads <= 2 * made.chunk + moved
    assert 1 <= lines.count("\tprefetcht0\t") <= made.chunk // 2


@pytest.mark.parametrize(("dtype", "most"), [("float32", 12), ("bfloat16", 4)])
@pytest.mark.parametrize(
    "kernel", ["score", "values", "dscore", "by_row", "by_column", "value_by_row"]
)
def test_hardly_a_vector_is_spilled(dtype, most, kernel):
    """AVX-512 has registers for the sums of a tile, their totals and operands. A chunk of fp32 is
    ordered by LLVM such that it needs a few more; products have two loops of these, before and
    after they ask for C."""
    _, kernels = assembly("avx512", dtype)
    loops = 1 if kernel in ("score", "dscore") else 2
    assert len(spills(kernels[kernel])) <= most * loops


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", ["score_masked", "prob", "prob_masked"])
def test_few_vectors_are_spilled_around_a_tile(dtype, kernel):
    """Constants of the mask and of 2^x, once a tile: some stores for each of its rows, where its
    products are some hundreds."""
    made, kernels = assembly("avx512", dtype)
    stores = [line for line in spills(kernels[kernel]) if line.endswith("(%rsp)")]
    assert len(stores) <= 10 * made.rows


def spills(text):
    """What moves vectors to the stack, or from there."""
    return re.findall(r"%zmm\d+, -?\d*\(%rsp\)|-?\d*\(%rsp\)[^\n]*, %zmm\d+", text)


def test_bf16_is_multiplied_in_pairs_and_narrowed_by_the_machine():
    _, kernels = assembly("avx512", "bfloat16")
    for kernel in PRODUCTS:
        assert "\tvdpbf16ps\t" in kernels[kernel]
    for kernel in ("soft", "prob", "dscore"):
        assert "\tvcvtne2ps2bf16\t" in kernels[kernel]
    _, kernels = assembly("avx512", "float32")
    assert "vdpbf16ps" not in "".join(kernels.values())


def test_powers_of_two_take_the_machine_s_own_instructions():
    _, kernels = assembly("avx512", "float32")
    for kernel in ("soft", "prob"):
        assert "\tvscalefps\t" in kernels[kernel]
        assert "\tvrndscaleps\t" in kernels[kernel]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vectors_are_not_split(dtype):
    """LLVM prefers halves for the sake of the clock, unless it is told otherwise."""
    _, kernels = assembly("avx512", dtype)
    for kernel in ("score", "soft", "prob"):
        assert not re.search(r"\tvfmadd\w+ps\t[^\n]*%ymm", kernels[kernel])


def test_capped_kernels_compile_for_other_machines_too():
    for name, dtype in CODES:
        _, kernels = assembly(name, dtype, True)
        assert len(kernels["score"]) > len(assembly(name, dtype)[1]["score"])
    assert np.all([name in kernels for name in PRODUCTS])
