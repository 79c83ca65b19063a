"""What Numba's code needs to work with machine code that it did not compile: calls by address,
which are arguments, so that Numba can still keep its own code on disk."""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils, errors
from numba.extending import intrinsic

from ringrt_backends.cpu.disk import stamp

_cgutils: Any = cgutils
_unliteral: Any = types.unliteral

#: What the functions here take: int64 for integers and pointers alike. A uint64 is not among them,
#: for its sum with an int64 may turn into a float64.
_KINDS = (types.int64, types.uint32, types.float32, types.float64)


#: What threads are given to run. The rest is compiled into it, with no door of its own to Python:
#: half the time of compiling goes into these.
_njit: Any = numba.njit
_driver: Any = _njit(nogil=True, cache=True, error_model="numpy")
inner: Any = _njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


def driver(function: Any) -> Any:
    """Compiled when first called, and kept on disk as long as the package is the same."""
    return stamp(_driver(function))


def _base(typing: Any, array: Any) -> Any:
    """base(array): where it begins, int64. (Its `ctypes.data` calls two functions for that.)"""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        made = context.make_array(signature.args[0])(context, builder, values[0])
        return builder.ptrtoint(made.data, ir.IntType(64))

    return types.int64(array), generate


def _call(typing: Any, address: Any, arguments: Any) -> Any:
    """call(address, (a, b, ...)): the function there, which returns nothing."""
    for kind in arguments:
        if _unliteral(kind) not in _KINDS:
            raise errors.TypingError(f"call: no argument may be of type {kind}")

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        given = _cgutils.unpack_tuple(builder, values[1])
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in given])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), given)
        return context.get_dummy_value()

    return types.void(address, arguments), generate


def _take(typing: Any, counter: Any) -> Any:
    """take(address): the int64 there, which is then one more, whoever else takes at once."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        where = builder.inttoptr(values[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", where, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(counter), generate


def _clear(typing: Any, address: Any, size: Any) -> Any:
    """clear(address, size): so many bytes are 0."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        where = builder.inttoptr(values[0], ir.IntType(8).as_pointer())
        _cgutils.memset(builder, where, values[1], 0)
        return context.get_dummy_value()

    return types.void(address, size), generate


base: Any = intrinsic(_base)
call: Any = intrinsic(_call)
take: Any = intrinsic(_take)
clear: Any = intrinsic(_clear)
