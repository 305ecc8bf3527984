"""Traffic as a histogram, with the ranges and opts of profiles drawn over it: for a terminal, and as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np

from trtforge.errors import printable
from trtforge.traffic.choose import Box
from trtforge.traffic.histogram import Floats, Ints, Traffic

_BLOCKS = " ▁▂▃▄▅▆▇█"
_ROWS = 5
_LOG_RATIO = 16
"""Above this ratio of largest to smallest size the axis is logarithmic."""
_WIDEST = 100
_LABEL = 14
_SVG_WIDTH, _SVG_LEFT, _SVG_RIGHT, _SVG_BARS = 760, 150, 24, 120
_COLORS = ("#b3541e", "#1f6f54", "#6b3fa0", "#9c1c4a", "#37647d", "#7a6a00", "#0a6aa1", "#555555")
"""Of the profiles, each at least 4.5 to 1 against white (WCAG 2.1, 1.4.3)."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Sizes from `low` to `high`, each with a width of its own, on a line from 0 to 1."""

    low: int
    high: int

    def at(self, size: float) -> float:
        """Where a size begins; it ends where the next begins."""
        if self.high + 1 > _LOG_RATIO * self.low:
            return math.log(size / self.low) / math.log((self.high + 1) / self.low)
        return (size - self.low) / (self.high + 1 - self.low)


def axis_of(column: Ints, boxes: Sequence[Box], place: int) -> Axis:
    """An axis on which all requests and all profiles lie."""
    ends = [int(size) for box in boxes for size in (box.min[place], box.max[place])]
    return (
        Axis(min(int(column.min()), *ends), max(int(column.max()), *ends))
        if ends
        else Axis(int(column.min()), int(column.max()))
    )


def heights(column: Ints, counts: Ints, axis: Axis, num_columns: int) -> Floats:
    """(columns,) requests of each size, averaged over the sizes in a column; a wide size fills several columns."""
    sizes, places = np.unique(column, return_inverse=True)
    begins, ends = (np.array([axis.at(size + more) for size in sizes.tolist()]) for more in (0, 1))
    areas = np.concatenate([[0.0], np.cumsum(np.bincount(places, counts) * (ends - begins))])
    edges = np.stack([begins, ends], 1).ravel()
    below = np.interp(np.linspace(0, 1, num_columns + 1), edges, np.stack([areas[:-1], areas[1:]], 1).ravel())
    found: Floats = np.diff(below) * num_columns
    return np.where(found > found.max() * 1e-9, found, 0.0)


def terminal_picture(traffic: Traffic, boxes: Sequence[Box], labels: Sequence[str], width: int) -> list[str]:
    """Lines of at most `width` columns: for each open size a histogram of requests, and below it every profile.

    `├` and `┤` are min and max, `●` is opt.
    """
    num_columns = max(min(width, _WIDEST) - _LABEL - 2, 20)
    lines: list[str] = []
    for place, name in enumerate(traffic.names):
        column = traffic.sizes[:, place]
        axis = axis_of(column, boxes, place)
        lines.append(f"{_cut(name)}  {axis.low} to {axis.high}, requests of each size")
        lines += _bars(heights(column, traffic.counts, axis, num_columns))
        lines += [
            f"{_cut(label):>{_LABEL}}  {_range(box, place, axis, num_columns)}"
            for box, label in zip(boxes, labels, strict=True)
        ]
        lines.append("")
    return lines


def _cut(name: str) -> str:
    name = printable(name)
    return name if len(name) <= _LABEL else f"{name[:6]}…{name[7 - _LABEL :]}"


def _bars(found: Floats) -> list[str]:
    eighths = np.ceil(found / found.max() * _ROWS * 8).astype(int)
    lines = []
    for row in reversed(range(_ROWS)):
        cells = "".join(_BLOCKS[min(max(height - row * 8, 0), 8)] for height in eighths.tolist())
        label = f"{found.max():.0f}" if row == _ROWS - 1 else ""
        lines.append(f"{label:>{_LABEL}}  {cells}".rstrip())
    return lines


def _range(box: Box, place: int, axis: Axis, num_columns: int) -> str:
    def cell(size: int) -> int:
        return min(int(axis.at(size) * num_columns), num_columns - 1)

    low, opt, high = (int(sizes[place]) for sizes in (box.min, box.opt, box.max))
    first, last = cell(low), max(min(math.ceil(axis.at(high + 1) * num_columns) - 1, num_columns - 1), cell(low))
    line = ["─"] * (last - first + 1)
    line[0], line[-1] = "├", "┤"
    line[min(cell(opt), last) - first] = "●"
    return " " * first + "".join(line)


def svg_picture(traffic: Traffic, boxes: Sequence[Box], labels: Sequence[str], title: str) -> str:
    """A self-contained SVG of the same: one panel for each open size. All names are escaped."""
    panel = _SVG_BARS + 62 + 22 * len(boxes)
    height = 56 + panel * len(traffic.names)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_SVG_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_SVG_WIDTH} {height}" role="img" aria-labelledby="title description" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#24292f">'
    )
    parts = [
        head,
        f'<title id="title">{_text(title)}</title>',
        f'<desc id="description">{_text(_described(traffic, boxes, labels))}</desc>',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="24" y="32" font-size="16" font-weight="600">{_text(title)}</text>',
    ]
    for place in range(len(traffic.names)):
        parts += _panel(traffic, boxes, labels, place, 56 + panel * place)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _described(traffic: Traffic, boxes: Sequence[Box], labels: Sequence[str]) -> str:
    ranges = [
        f"{label}: "
        + ", ".join(
            f"{name} {box.min[place]} to {box.max[place]}, tuned for {box.opt[place]}"
            for place, name in enumerate(traffic.names)
        )
        for box, label in zip(boxes, labels, strict=True)
    ]
    return "; ".join([f"{int(traffic.counts.sum())} requests by size, with the profiles that serve them", *ranges])


def _panel(traffic: Traffic, boxes: Sequence[Box], labels: Sequence[str], place: int, top: int) -> Iterator[str]:
    column = traffic.sizes[:, place]
    axis = axis_of(column, boxes, place)
    span = _SVG_WIDTH - _SVG_LEFT - _SVG_RIGHT

    def x(size: float) -> float:
        return _SVG_LEFT + axis.at(size) * span

    yield f'<text x="24" y="{top}" font-weight="600">{_text(_cut(traffic.names[place]))}</text>'
    found = heights(column, traffic.counts, axis, span // 3)
    base = top + _SVG_BARS
    yield f'<text x="{_SVG_LEFT - 8}" y="{top + 16}" text-anchor="end" fill="#57606a">{found.max():.0f}</text>'
    for at in np.flatnonzero(found).tolist():
        bar = max(found[at] / found.max() * (_SVG_BARS - 6), 1)
        yield f'<rect x="{_SVG_LEFT + at * 3}" y="{base - bar:.1f}" width="3" height="{bar:.1f}" fill="#8aa7c7"/>'
    yield f'<path d="M{_SVG_LEFT} {base}H{_SVG_LEFT + span}" stroke="#57606a"/>'
    for size in _ticks(axis):
        middle = (x(size) + x(size + 1)) / 2
        yield f'<text x="{middle:.1f}" y="{base + 16}" text-anchor="middle" fill="#57606a">{size}</text>'
    for number, (box, label) in enumerate(zip(boxes, labels, strict=True)):
        low, opt, high = (int(sizes[place]) for sizes in (box.min, box.opt, box.max))
        y, color = base + 36 + 22 * number, _COLORS[number % len(_COLORS)]
        middle = (x(opt) + x(opt + 1)) / 2
        yield f'<text x="{_SVG_LEFT - 8}" y="{y + 4}" text-anchor="end" fill="{color}">{_text(_cut(label))}</text>'
        yield (
            f'<path d="M{x(low):.1f} {y - 6}v12m0 -6H{x(high + 1):.1f}m0 -6v12" fill="none" stroke="{color}" '
            f'stroke-width="2"/><circle cx="{middle:.1f}" cy="{y}" r="5" fill="{color}"/>'
        )


def _ticks(axis: Axis) -> list[int]:
    """Sizes to label, far enough apart: powers of two on a logarithmic axis, round steps on another."""
    if axis.high + 1 > _LOG_RATIO * axis.low:
        inner = [2**power for power in range(64) if axis.low <= 2**power <= axis.high]
    else:
        step = max(10 ** math.floor(math.log10(max(axis.high - axis.low, 1))) // 2, 1)
        inner = list(range(-(-axis.low // step) * step, axis.high + 1, step))
    ticks: list[int] = []
    for size in sorted({axis.low, axis.high, *inner}):
        middle = (axis.at(size) + axis.at(size + 1)) / 2
        if not ticks or middle - (axis.at(ticks[-1]) + axis.at(ticks[-1] + 1)) / 2 > 0.06:  # noqa: PLR2004 - a label's width
            ticks.append(size)
    return ticks


def _text(text: str) -> str:
    return escape(printable(text), {'"': "&quot;"})
