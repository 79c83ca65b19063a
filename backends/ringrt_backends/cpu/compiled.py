"""The machine code of one shape of heads: emitted and compiled in about a second, kept on disk, and
found by address."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from ringrt.plan.partition import Array
from ringrt.plan.problem import Problem
from ringrt_backends.cpu import backward_ir, disk, exact, forward_ir, mend_ir, pack_ir
from ringrt_backends.cpu.machine import Machine
from ringrt_backends.cpu.tile import add_product, part_of_panel
from ringrt_backends.cpu.vectors import F32, F64

#: Forward: queries of a block, whose state stays in cache, and keys of a block, the longest sum
#: in float32. Both are multiples of a tile's rows, queries of its columns too.
QUERIES, KEYS = 96, 288
#: Backward: the same, of one size.
SQUARE = 288
#: Floats by which a row of scores is longer than it need be: rows at a power of two would fall
#: on few sets of the first-level cache.
SKEW = 16


class Shape(NamedTuple):
    """What the drivers know of the compiled code. `depth` and `value_depth`: 32-bit elements of a
    row of K and V; `panels` and `value_panels`: of its columns, the last `narrow` (one vector
    wide) or not; `row` and `value_row`: elements of a row of dq or y, a whole number of vectors;
    `sum_bytes`: of an element of the `sums` y, dq, dk and dv."""

    rows: int
    panel: int
    pairs: bool
    dim: int
    value_dim: int
    depth: int
    value_depth: int
    panels: int
    value_panels: int
    row: int
    value_row: int
    sum_bytes: int

    @property
    def sums(self) -> Any:
        """The dtype of what is added up over blocks of keys or queries: float64, or float32 where
        the weights are rounded to bf16, which loses far more."""
        return np.float32 if self.sum_bytes == 4 else np.float64


#: Order of the addresses that the drivers are given; the last few are those of packing and
#: rounding, see `Code`.
FORWARD = ("score", "score_masked", "soft", "values", "values_narrow", "mend",
           "k_rows", "v_columns", "q_turned", "out_rounded")  # fmt: skip
BACKWARD = ("prob", "prob_masked", "dscore", "by_row", "by_row_narrow", "by_column",
            "by_column_narrow", "value_by_row", "value_by_row_narrow", "k_rows", "k_columns",
            "v_rows", "dk_added", "dv_added", "q_turned", "q_columns", "dout_turned",
            "dout_columns", "dq_rounded")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Code:
    """Addresses int64 in the order of the names, 0 for what heads of this size have no use for;
    `engine` owns the code."""

    shape: Shape
    names: tuple[str, ...]
    addresses: Array
    engine: Any

    def at(self, *names: str) -> Array:
        """Addresses of some functions, int64; 0 for the name ''."""
        found = [self.addresses[self.names.index(name)] if name else 0 for name in names]
        return np.array(found, np.int64)


def shape_of(machine: Machine, dim: int, value_dim: int, pairs: bool) -> Shape:
    """The sizes that follow from a head's."""
    width, panel = machine.width, machine.panel
    row, value_row = (-(-x // width) * width for x in (dim, value_dim))
    depth, value_depth = (x // 2 if pairs else x for x in (dim, value_dim))
    panels, value_panels = (-(-x // panel) for x in (row, value_row))
    return Shape(
        machine.rows, panel, pairs, dim, value_dim, depth, value_depth, panels, value_panels,
        row, value_row, 4 if pairs else 8,
    )  # fmt: skip


def heads_of(problem: Problem) -> tuple[int, int, str, bool]:
    """What code is compiled for: head_dim, value_dim, dtype, and whether there is a softcap."""
    capped = problem.softcap is not None
    return problem.head_dim, problem.value_dim, problem.dtype, capped


def in_pairs(machine: Machine, dim: int, value_dim: int, dtype: str) -> bool:
    """Whether operands are pairs of bf16 as they lie in memory."""
    return dtype == "bfloat16" and machine.pairs != "" and dim % 2 == value_dim % 2 == 0


@cache
def forward_code(machine: Machine, dim: int, value_dim: int, dtype: str, capped: bool) -> Code:
    """The kernels of a forward pass over heads of these sizes, q, k and v of this dtype."""
    return _code(forward_module, FORWARD, machine, dim, value_dim, dtype, capped)


@cache
def backward_code(machine: Machine, dim: int, value_dim: int, dtype: str, capped: bool) -> Code:
    """The kernels of a backward pass, likewise."""
    return _code(backward_module, BACKWARD, machine, dim, value_dim, dtype, capped)


def _code(
    emit: Callable[..., ir.Module],
    names: tuple[str, ...],
    machine: Machine,
    dim: int,
    value_dim: int,
    dtype: str,
    capped: bool,
) -> Code:
    """From disk, or compiled and then kept there."""
    key = (emit.__name__, machine, dim, value_dim, dtype, capped)
    binary = disk.load(key)
    if binary is None:
        binary = object_code(emit(machine, dim, value_dim, dtype, capped), machine)
        disk.store(key, binary)
    pairs = in_pairs(machine, dim, value_dim, dtype)
    return loaded(binary, machine, shape_of(machine, dim, value_dim, pairs), names)


def forward_module(
    machine: Machine, dim: int, value_dim: int, dtype: str, capped: bool
) -> ir.Module:
    """The text of `FORWARD`."""
    pairs = in_pairs(machine, dim, value_dim, dtype)
    shape = shape_of(machine, dim, value_dim, pairs)
    module = ir.Module()
    kind: Any = {"dtype": dtype, "pairs": pairs}
    pack_ir.rows_in_place(module, machine, "k_rows", dim=dim, **kind)
    pack_ir.columns(module, machine, "v_columns", dim=value_dim, **kind)
    pack_ir.turned(module, machine, "q_turned", dim=dim, **kind)
    sums = _sums(shape)
    pack_ir.rounded(module, machine, "out_rounded", dim=value_dim, dtype=dtype, sums=sums)
    s_row = QUERIES + SKEW
    for name, masked in (("score", False), ("score_masked", True)):
        forward_ir.score(
            module, machine, name,
            depth=shape.depth, s_row=s_row, masked=masked, capped=capped, pairs=pairs,
        )  # fmt: skip
    forward_ir.soft(module, machine, "soft", s_row=s_row, capped=capped, pairs=pairs)
    if exact.mended(pairs, capped):
        mend_ir.mend(module, machine, "mend", depth=shape.depth, value_row=shape.value_row)
    for name, vectors in _widths("values", machine, shape.value_row):
        add_product(
            module, machine, name, a_row=1, a_step=s_row, c_row=shape.value_row,
            vectors=vectors, scaled=True, pairs=pairs, sums=sums,
            later_step=part_of_panel(machine, QUERIES),
        )  # fmt: skip
    return module


def backward_module(
    machine: Machine, dim: int, value_dim: int, dtype: str, capped: bool
) -> ir.Module:
    """The text of `BACKWARD`."""
    pairs = in_pairs(machine, dim, value_dim, dtype)
    shape = shape_of(machine, dim, value_dim, pairs)
    module = ir.Module()
    kind: Any = {"dtype": dtype, "pairs": pairs}
    for name, size in (("q", dim), ("dout", value_dim)):
        pack_ir.turned(module, machine, f"{name}_turned", dim=size, **kind)
        pack_ir.columns(module, machine, f"{name}_columns", dim=size, **kind)
    pack_ir.rows_in_place(module, machine, "k_rows", dim=dim, **kind)
    pack_ir.columns(module, machine, "k_columns", dim=dim, **kind)
    pack_ir.rows(module, machine, "v_rows", dim=value_dim, **kind)
    sums = _sums(shape)
    pack_ir.added(module, machine, "dk_added", dim=dim, row=shape.row, sums=sums)
    pack_ir.added(module, machine, "dv_added", dim=value_dim, row=shape.value_row, sums=sums)
    pack_ir.rounded(module, machine, "dq_rounded", dim=dim, dtype="float32", sums=sums)
    p_row, later = SQUARE + SKEW, part_of_panel(machine, SQUARE)
    for name, masked in (("prob", False), ("prob_masked", True)):
        backward_ir.prob(
            module, machine, name,
            depth=shape.depth, p_row=p_row, later=later, masked=masked, capped=capped, pairs=pairs,
        )  # fmt: skip
    backward_ir.dscore(
        module, machine, "dscore",
        depth=shape.value_depth, p_row=p_row, later=later, capped=capped, pairs=pairs,
    )  # fmt: skip
    # Rows of bf16 are half as long, and a step along them is a pair.
    along = p_row // 2 if pairs else p_row
    product = partial(add_product, module, machine, pairs=pairs, sums=sums)
    by_row, by_column = (along, 1), (1, p_row)
    for kind_of, (a_row, a_step), c_row in (
        ("by_row", by_row, shape.row),
        ("by_column", by_column, shape.row),
        ("value_by_row", by_row, shape.value_row),
    ):
        for name, vectors in _widths(kind_of, machine, c_row):
            product(
                name, a_row=a_row, a_step=a_step, c_row=c_row, vectors=vectors, later_step=later,
            )  # fmt: skip
    return module


def _sums(shape: Shape) -> ir.Type:
    """`Shape.sums` in LLVM's words."""
    return F32 if shape.sum_bytes == 4 else F64


def _widths(name: str, machine: Machine, row: int) -> Iterator[tuple[str, int]]:
    """Which of a product's functions are needed for rows of so many floats, with the vectors of
    each: one for whole panels, and one for the half of a panel that is left."""
    if row >= machine.panel:
        yield name, 2
    if row % machine.panel:
        yield f"{name}_narrow", 1


def compile_module(
    module: ir.Module, machine: Machine, shape: Shape, names: tuple[str, ...]
) -> Code:
    """Compile what the module defines; addresses in the order of the names. Raises LLVM's
    `RuntimeError` where it cannot."""
    return loaded(object_code(module, machine), machine, shape, names)


def object_code(module: ir.Module, machine: Machine) -> bytes:
    """As an object file."""
    target = _target(machine)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    return bytes(target.emit_object(parsed))


def loaded(binary: bytes, machine: Machine, shape: Shape, names: tuple[str, ...]) -> Code:
    """The functions of an object file."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target(machine))
    engine.add_object_file(llvm.ObjectFileRef.from_data(binary))
    engine.finalize_object()
    addresses = [engine.get_function_address(name) for name in names]
    return Code(shape, names, np.array(addresses, np.int64), engine)


def _target(machine: Machine) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=machine.cpu, features=machine.features, opt=3, jit=True
    )
