"""A plan as a picture: who computes which pairs at which step. Made from the plan's own tiles.

On the left the pairs where they are in the sequence, queries downwards and keys to the right; on
the right as they are sharded, a block for every rank and shard, with the band tiles in it. The
colour is the step at which a pair is computed.
"""

from __future__ import annotations

import colorsys
import itertools
from collections.abc import Iterator

from ringrt.plan import Plan, Step, Tile
from ringrt.plan.partition import positions

#: Longer sequences are drawn by shards only: a pair would be too small to see.
_PAIRS_UP_TO = 96
#: Edge of a panel and width of the margins, in pixels.
_EDGE, _MARGIN = 260, 34
#: Tiles of more rows are drawn as one shape, whose steps would be too fine to see.
_ROWS_UP_TO = 128


def draw(plan: Plan) -> str:
    """The forward pass of a plan as SVG text."""
    problem = plan.problem
    steps = [plan.steps(rank) for rank in range(plan.size)]
    pairs = max(problem.q_length, problem.kv_length) <= _PAIRS_UP_TO
    panels = [_sharded(plan, steps)]
    if pairs:
        panels.insert(0, _in_sequence(plan, steps))
    width = _MARGIN + len(panels) * (_EDGE + _MARGIN)
    height = 2 * _MARGIN + _EDGE + 14
    body = "".join(
        f'<g transform="translate({_MARGIN + i * (_EDGE + _MARGIN)},{_MARGIN})">{panel}</g>'
        for i, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="10">'
        f'<rect width="{width}" height="{height}" fill="white"/>{body}'
        f"{_legend(plan, height)}</svg>\n"
    )


def _in_sequence(plan: Plan, steps: list[list[Step]]) -> str:
    """Pairs at their positions."""
    problem = plan.problem
    unit = _EDGE / max(problem.q_length, problem.kv_length, 1)
    step_of: dict[tuple[int, int], int] = {}
    for rank, mine in enumerate(steps):
        rows = positions(plan.q_runs(rank)).tolist()
        for step in mine:
            keys = positions(plan.kv_runs(step.shard)).tolist()
            held = [keys[i] for a, b in step.rows.ranges.tolist() for i in range(a, b)]
            step_of |= {(rows[i], held[j]): step.index for i, j in _pairs(step)}
    shapes = []
    for row in range(problem.q_length):
        seen = [step_of.get((row, key)) for key in range(problem.kv_length)]
        for index, first, last in _same(seen):
            colour = _colour(index, plan.size)
            shapes.append(_rect(first * unit, row * unit, (last - first) * unit, unit, colour))
    frame = _frame(problem.kv_length * unit, problem.q_length * unit)
    return _title("by position: queries down, keys right") + "".join(shapes) + frame


def _same(values: list[int | None]) -> Iterator[tuple[int, int, int]]:
    """(value, first, last) of every stretch of equal values that are not None."""
    begin = 0
    for value, stretch in itertools.groupby(values):
        end = begin + len(list(stretch))
        if value is not None:
            yield value, begin, end
        begin = end


def _sharded(plan: Plan, steps: list[list[Step]]) -> str:
    """Tiles in blocks of (rank, shard)."""
    counts = plan.partition.counts(plan.problem.q_length, plan.size), plan.kv_counts()
    unit = _EDGE / max(*map(sum, counts), 1)
    starts = [[sum(count[:i]) for i in range(plan.size + 1)] for count in counts]
    shapes = []
    for rank, mine in enumerate(steps):
        for step in mine:
            colour = _colour(step.index, plan.size)
            origin = starts[1][step.shard] * unit, starts[0][rank] * unit
            shapes += [_shape(tile, key, origin, unit, colour) for tile, key in _held_tiles(step)]
    for edges, horizontal in ((starts[0], True), (starts[1], False)):
        for edge in edges[1:-1]:
            ends = (
                (0, edge, sum(counts[1]), edge) if horizontal else (edge, 0, edge, sum(counts[0]))
            )
            shapes.append(_line(*(end * unit for end in ends)))
    frame = _frame(sum(counts[1]) * unit, sum(counts[0]) * unit)
    return _title("by shard: ranks down, shards right") + "".join(shapes) + frame


def _held_tiles(step: Step) -> Iterator[tuple[Tile, int]]:
    """The step's tiles, and the shard's own index of the first key of each."""
    held = [i for a, b in step.rows.ranges.tolist() for i in range(a, b)]
    for tile in step.tiles:
        yield tile, held[tile.k0]


def _pairs(step: Step) -> Iterator[tuple[int, int]]:
    """(row, key) of every visible pair, keys in compact order."""
    for tile in step.tiles:
        for i in range(tile.q0, tile.q1):
            first, last = _span(tile, i - tile.q0)
            yield from ((i, tile.k0 + j) for j in range(first, last))


def _span(tile: Tile, row: int) -> tuple[int, int]:
    """The keys [first, last) of the tile that its row sees."""
    keys = tile.k1 - tile.k0
    return max(0, row - tile.upper), min(keys, row - tile.lower + 1)


def _shape(tile: Tile, key: int, origin: tuple[float, float], unit: float, colour: str) -> str:
    """The tile's visible pairs as one outline, row by row where rows are few."""
    rows = tile.q1 - tile.q0
    step = max(1, rows // _ROWS_UP_TO)
    left, right = [], []
    for row in range(0, rows, step):
        first, last = _span(tile, row)
        for y in (row, min(row + step, rows)):
            left.append((first, y))
            right.append((last, y))
    points = " ".join(
        f"{_number(origin[0] + (key + x) * unit)},{_number(origin[1] + (tile.q0 + y) * unit)}"
        for x, y in left + right[::-1]
    )
    return f'<polygon points="{points}" fill="{colour}"/>'


def _colour(step: int, size: int) -> str:
    red, green, blue = colorsys.hls_to_rgb(0.58 + 0.85 * step / max(size, 1), 0.62, 0.55)
    return f"#{int(255 * red):02x}{int(255 * green):02x}{int(255 * blue):02x}"


def _legend(plan: Plan, height: int) -> str:
    shown = min(plan.size, 12)
    items = [
        f'<rect x="{_MARGIN + 56 * i}" y="{height - 22}" width="9" height="9" '
        f'fill="{_colour(i, plan.size)}"/>'
        f'<text x="{_MARGIN + 56 * i + 13}" y="{height - 14}">step {i}</text>'
        for i in range(shown)
    ]
    return "".join(items)


def _title(text: str) -> str:
    return f'<text x="0" y="-8" fill="#444">{text}</text>'


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    edges = " ".join(
        f'{name}="{_number(value)}"'
        for name, value in (("x", x), ("y", y), ("width", width), ("height", height))
    )
    return f'<rect {edges} fill="{colour}" stroke="white" stroke-width="0.6"/>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    ends = f'x1="{_number(x1)}" y1="{_number(y1)}" x2="{_number(x2)}" y2="{_number(y2)}"'
    return f'<line {ends} stroke="#888" stroke-width="0.7"/>'


def _frame(width: float, height: float) -> str:
    size = f'width="{_number(width)}" height="{_number(height)}"'
    return f'<rect {size} fill="none" stroke="#444"/>'


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
