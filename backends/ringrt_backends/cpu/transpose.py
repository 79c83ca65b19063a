"""A square of vectors, transposed in registers."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from ringrt_backends.cpu.vectors import Body, Value

#: Lanes that the machine's shuffles work within: of 128 bits.
_QUAD = 4


def transposed(body: Body, rows: Sequence[Value]) -> list[Value]:
    """Of as many rows as vectors have lanes, 4 or a power of 2 times that, the columns. Squares of
    4 x 4 lanes first, as every machine has instructions for these; then squares of squares."""
    quads = [rows[i : i + _QUAD] for i in range(0, len(rows), _QUAD)]
    columns = [column for quad in quads for column in _quads(body, *quad)]
    size = _QUAD
    while size < body.width:
        columns = _blocks(body, columns, size)
        size *= 2
    return columns


def _quads(body: Body, a: Value, b: Value, c: Value, d: Value) -> list[Value]:
    """Of 4 rows, those 4 whose quads are the columns of the quads."""
    low, high = (0, -1, 1, -2), (2, -3, 3, -4)
    halves = [[_mixed(body, x, y, which) for which in (low, high)] for x, y in ((a, b), (c, d))]
    first, second = (0, 1, -1, -2), (2, 3, -3, -4)
    pairs = zip(*halves, strict=True)
    return [_mixed(body, ab, cd, which) for ab, cd in pairs for which in (first, second)]


def _mixed(body: Body, a: Value, b: Value, which: Sequence[int]) -> Value:
    """In each quad these of its lanes, of a, or of b: lane i of b is −1 − i."""
    lanes = []
    for quad in range(0, body.width, _QUAD):
        lanes += [quad + i if i >= 0 else body.width + quad - 1 - i for i in which]
    return _shuffled(body, a, b, lanes)


def _blocks(body: Body, rows: Sequence[Value], size: int) -> list[Value]:
    """Rows whose blocks of `size` lanes are transposed each: two by two these change places."""
    changed = list(rows)
    for i in range(len(rows)):
        if i & size:
            continue
        a, b, width = rows[i], rows[i + size], body.width
        lanes = range(width)
        changed[i] = _shuffled(body, a, b, [j + (width - size if j & size else 0) for j in lanes])
        changed[i + size] = _shuffled(
            body, a, b, [j + (width if j & size else size) for j in lanes]
        )
    return changed


def _shuffled(body: Body, a: Value, b: Value, lanes: Sequence[int]) -> Value:
    return body.build.shuffle_vector(a, b, ir.Constant(body.ints, list(lanes)))
