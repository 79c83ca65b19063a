"""Ratios as a picture: a bar for every row that has one, a line at 1, a tick at each target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from ringrt.bench.measurement import FAILED, MISSED, NO_TARGET, REACHED, Measurement

_PLOT, _RIGHT = 420, 130
_ROW, _BAR, _HEAD, _TOP, _BOTTOM = 20, 13, 34, 76, 40
#: Of a letter of a label, about.
_LETTER = 6.7
#: Told apart without colour vision too, and named in the legend.
_COLOURS = {REACHED: "#2b6cb0", MISSED: "#dd6b20", NO_TARGET: "#a0aec0"}
_WORDS = {REACHED: "target reached", MISSED: "target missed", NO_TARGET: "no target"}
_INK, _FAINT = "#222", "#ddd"


def chart(rows: Sequence[Measurement], title: str) -> str:
    """SVG text, grouped as the rows are: by forward or backward, and by dtype."""
    bars = [row for row in rows if row.unit == "ratio" and _shown(row)]
    groups: dict[str, list[Measurement]] = {}
    for row in bars:
        groups.setdefault(row.group, []).append(row)
    left = 24 + round(_LETTER * max((len(_label(row)) for row in bars), default=0))
    most = max([1.0, *(_end(row) for row in bars)])
    scale = _PLOT / (most * 1.05)
    plot = sum(_HEAD + _ROW * len(each) for each in groups.values())
    width, height = max(left + _PLOT + _RIGHT, 640), _TOP + plot + _BOTTOM
    parts = [_legend(title), f'<g transform="translate({left},0)">', *_axis(most, scale, plot)]
    top = _TOP
    for name, each in groups.items():
        parts.append(_text(12 - left, top + 22, _heading(name, each), size=13, weight="bold"))
        top += _HEAD
        for row in each:
            parts.append(_bar(row, top, scale))
            top += _ROW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif">'
        f'<rect width="{width}" height="{height}" fill="white"/>{"".join(parts)}</g></svg>\n'
    )


def _shown(row: Measurement) -> bool:
    """What failed is there too, without a bar: a gap would not be seen."""
    return row.value is not None or row.state == FAILED


def _heading(name: str, rows: Sequence[Measurement]) -> str:
    """The group, and what its ratios are of where they are all of the same."""
    kinds = {row.of for row in rows}
    return f"{name}: {kinds.pop()}" if len(kinds) == 1 and "" not in kinds else name


def _end(row: Measurement) -> float:
    """The largest figure that is drawn of a row."""
    target = row.target.limit if row.target is not None else 0.0
    return max(row.value or 0.0, target, *(row.quartiles or ()))


def _bar(row: Measurement, top: float, scale: float) -> str:
    """A row: its name, the bar, the quartiles as a thin line, the target's tick, the figure."""
    if row.value is None:
        return _text(-8, top + 10.5, _label(row), anchor="end") + _text(7, top + 10.5, row.verdict)
    length, middle = row.value * scale, top + _BAR / 2
    shapes = [
        _text(-8, top + 10.5, _label(row), anchor="end"),
        f'<rect class="bar" x="0" y="{_number(top)}" width="{_number(length)}" '
        f'height="{_BAR}" fill="{_COLOURS[row.verdict]}"><title>{escape(row.of)}</title></rect>',
    ]
    if row.quartiles is not None:
        first, third = (x * scale for x in row.quartiles)
        shapes.append(_line(first, middle, third, middle, _INK, 1))
    if row.target is not None:
        at = row.target.limit * scale
        shapes.append(_line(at, top - 2, at, top + _BAR + 2, _INK, 2.5, "target"))
    words = f"{row.value:.2f}" + (f" ({row.target})" if row.target is not None else "")
    shapes.append(_text(_end(row) * scale + 7, top + 10.5, words))
    return "".join(shapes)


def _label(row: Measurement) -> str:
    """The name without what the group's heading says."""
    words = row.name.removeprefix(f"{row.suite} ")
    return words.removeprefix(f"{row.group} ")


def _axis(most: float, scale: float, plot: float) -> Iterator[str]:
    """A faint line at every half, and a strong one at 1."""
    for halves in range(int(most * 2) + 1):
        at = halves / 2 * scale
        strong = halves == 2
        yield _line(at, _TOP, at, _TOP + plot, _INK if strong else _FAINT, 1.5 if strong else 1)
        yield _text(at, _TOP + plot + 18, f"{halves / 2:g}", anchor="middle")


def _legend(title: str) -> str:
    parts = [_text(12, 24, title, size=15, weight="bold")]
    for place, (verdict, colour) in enumerate(_COLOURS.items()):
        left = 12 + 130 * place
        parts.append(f'<rect x="{left}" y="42" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(left + 18, 52, _WORDS[verdict]))
    left = 12 + 130 * len(_COLOURS)
    parts.append(_line(left + 5, 41, left + 5, 55, _INK, 2.5))
    parts.append(_text(left + 14, 52, "target"))
    parts.append(_line(left + 75, 48, left + 95, 48, _INK, 1))
    parts.append(_text(left + 101, 52, "quartiles"))
    return "".join(parts)


def _text(
    x: float, y: float, words: str, size: int = 12, anchor: str = "start", weight: str = "normal"
) -> str:
    return (
        f'<text x="{_number(x)}" y="{_number(y)}" font-size="{size}" text-anchor="{anchor}" '
        f'font-weight="{weight}" fill="{_INK}" stroke="white" stroke-width="3" '
        f'paint-order="stroke">{escape(words)}</text>'
    )


def _line(
    x1: float, y1: float, x2: float, y2: float, colour: str, width: float, kind: str = "rule"
) -> str:
    ends = f'x1="{_number(x1)}" y1="{_number(y1)}" x2="{_number(x2)}" y2="{_number(y2)}"'
    return f'<line class="{kind}" {ends} stroke="{colour}" stroke-width="{width:g}"/>'


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
