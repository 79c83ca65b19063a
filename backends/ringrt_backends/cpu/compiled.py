"""The machine code of one shape of heads: emitted, compiled in the process in some hundredths of
a second, and found by address."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from ringrt.plan.partition import Array
from ringrt_backends.cpu import backward_ir, forward_ir, move_ir
from ringrt_backends.cpu.machine import Machine
from ringrt_backends.cpu.tile import add_product

#: Forward: queries of a block, whose state stays in cache, and keys of a block, the longest sum
#: in float32. Multiples of any tile's rows and columns.
QUERIES, KEYS = 192, 288
#: Backward: the same, of one size.
SQUARE = 288
#: Floats by which a row of scores is longer than it need be: rows at a power of two would fall
#: on few sets of the first-level cache.
SKEW = 16


class Shape(NamedTuple):
    """What the drivers know of the compiled code. `depth` and `value_depth`: 32-bit elements of a
    row of K and V; `panels` and `value_panels`: of its columns, the last `narrow` (one vector
    wide) or not; `row` and `value_row`: floats of a row of dq or y, a whole number of vectors."""

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


#: Order of the addresses that the drivers are given.
FORWARD = ("score", "score_masked", "soft", "values", "values_narrow")
BACKWARD = ("prob", "prob_masked", "dscore", "by_row", "by_row_narrow", "by_column",
            "by_column_narrow", "value_by_row", "value_by_row_narrow")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Code:
    """Addresses int64 in the order of the names; `engine` owns the code."""

    shape: Shape
    addresses: Array
    engine: Any


def shape_of(machine: Machine, dim: int, value_dim: int, pairs: bool) -> Shape:
    """The sizes that follow from a head's."""
    width, panel = machine.width, machine.panel
    row, value_row = (-(-x // width) * width for x in (dim, value_dim))
    depth, value_depth = (-(-x // 2) if pairs else x for x in (dim, value_dim))
    panels, value_panels = (-(-x // panel) for x in (row, value_row))
    return Shape(
        machine.rows, panel, pairs, dim, value_dim, depth, value_depth, panels, value_panels,
        row, value_row,
    )  # fmt: skip


@cache
def forward_code(machine: Machine, dim: int, value_dim: int, pairs: bool, capped: bool) -> Code:
    """The kernels of `ringrt_backends.cpu.forward`."""
    shape = shape_of(machine, dim, value_dim, pairs)
    module = ir.Module()
    s_row = QUERIES + SKEW
    for name, masked in (("score", False), ("score_masked", True)):
        forward_ir.score(
            module, machine, name,
            depth=shape.depth, s_row=s_row, masked=masked, capped=capped, pairs=pairs,
        )  # fmt: skip
    forward_ir.soft(module, machine, "soft", s_row=s_row, pairs=pairs)
    for name, vectors in (("values", 2), ("values_narrow", 1)):
        add_product(
            module, machine, name, a_row=1, a_step=s_row, c_row=shape.value_row,
            vectors=vectors, scaled=True, pairs=pairs,
        )  # fmt: skip
    return compile_module(module, machine, shape, FORWARD)


@cache
def backward_code(machine: Machine, dim: int, value_dim: int, pairs: bool, capped: bool) -> Code:
    """The kernels of `ringrt_backends.cpu.backward`."""
    shape = shape_of(machine, dim, value_dim, pairs)
    module = ir.Module()
    p_row = SQUARE + SKEW
    for name, masked in (("prob", False), ("prob_masked", True)):
        backward_ir.prob(
            module, machine, name,
            depth=shape.depth, p_row=p_row, masked=masked, capped=capped, pairs=pairs,
        )  # fmt: skip
    backward_ir.dscore(
        module, machine, "dscore", depth=shape.value_depth, p_row=p_row, capped=capped, pairs=pairs
    )
    # Rows of bf16 are half as long, and a step along them is a pair.
    along = p_row // 2 if pairs else p_row
    product = partial(add_product, module, machine, pairs=pairs)
    for suffix, vectors in (("", 2), ("_narrow", 1)):
        by_row, by_column = (along, 1), (1, p_row)
        for name, (a_row, a_step), c_row in (
            ("by_row", by_row, shape.row),
            ("by_column", by_column, shape.row),
            ("value_by_row", by_row, shape.value_row),
        ):
            product(name + suffix, a_row=a_row, a_step=a_step, c_row=c_row, vectors=vectors)
    return compile_module(module, machine, shape, BACKWARD)


@cache
def move_code(machine: Machine) -> Code:
    """The kernels that change the dtype of rows."""
    module = ir.Module()
    move_ir.emit(module, machine)
    return compile_module(module, machine, shape_of(machine, 1, 1, False), move_ir.NAMES)


def compile_module(module: ir.Module, machine: Machine, shape: Shape, names: tuple[str, ...]) -> Code:
    """Compile what the module defines; addresses in the order of the names. Raises LLVM's
    `RuntimeError` where it cannot."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=machine.cpu, features=machine.features, opt=3
    )
    engine = llvm.create_mcjit_compiler(parsed, target)
    engine.finalize_object()
    addresses = [engine.get_function_address(name) for name in names]
    return Code(shape, np.array(addresses, np.int64), engine)
