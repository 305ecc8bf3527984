"""What one row of a log says: sizes by name, or shapes by input."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtforge.errors import Problem, SpecError, Where, closest, shown_path
from trtforge.traffic.layout import Layout

COUNT, TIMESTAMP, INPUTS = "count", "timestamp", "inputs"
RESERVED = (COUNT, TIMESTAMP, INPUTS)
MAX_SIZE = 2**31 - 1
"""TensorRT's sizes are int64, its tensors have at most 2^31 - 1 elements along an axis.

Source: https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/advanced.html (volume limits).
"""
MAX_COUNT = 2**53
_SHAPE_TEXT = re.compile(r"[\[(]?\s*(\d{1,19}(?:\s*[x,]\s*\d{1,19})*)\s*,?\s*[\])]?")


class RowError(Exception):
    """The row says nothing that can be counted; the text says why."""


class MisfitError(Exception):
    """The row is sound, and the model can never take it; the text says why."""

    def __init__(self, text: str, count: int) -> None:
        super().__init__(text)
        self.count = count


@dataclass(frozen=True, slots=True)
class Row:
    """One row: sizes in the order of `Layout.names`, and for how many requests it stands."""

    sizes: tuple[int, ...]
    count: int
    has_timestamp: bool


def read_row(values: Any, layout: Layout) -> Row:
    """The row that a JSON value, or a CSV line with its header's names, stands for.

    Args:
        values: size name -> size, input name -> shape, or `inputs` -> such shapes; `count` and `timestamp` besides.
        layout: of the model.

    Raises:
        RowError: names, types or sizes are wrong, or an open size is not given.
        MisfitError: a rank or a fixed size is not the model's, or one size has two values.
    """
    if not isinstance(values, dict):
        raise RowError(f"found {_shown(values)}, expected an object such as {example(layout)}")
    count = _whole(COUNT, values[COUNT], MAX_COUNT) if COUNT in values else 1
    known: dict[str, tuple[int, str]] = {}
    misfits = []
    shapes = _shapes(values, layout)
    for axis, size, said_by in _given(values, shapes, layout):
        if isinstance(axis, int):
            if size != axis:
                misfits.append(f"{said_by} is {size}, the model fixes it at {axis}")
        elif known.setdefault(axis, (size, said_by))[0] != size:
            misfits.append(f"'{axis}' is {known[axis][0]} in {known[axis][1]} and {size} in {said_by}")
    misfits += _rank_misfits(shapes, layout)
    if misfits:
        raise MisfitError(misfits[0], count)
    lacking = [name for name in layout.names if name not in known]
    if lacking:
        raise RowError(_lacking(lacking[0], layout))
    return Row(tuple(known[name][0] for name in layout.names), count, TIMESTAMP in values)


def example(layout: Layout) -> str:
    """A row that would be right."""
    return "{" + ", ".join(f'"{name}": {8 if name == layout.batch else 64}' for name in layout.names) + "}"


def unknown_name(name: str, layout: Layout) -> str:
    """Why `name` cannot stand in a row."""
    best = closest(name, [*layout.names, *layout.axes])
    meant = f"; '{best}' is meant?" if best else ""
    return (
        f"unknown size '{name}'{meant} (the model's open sizes: {', '.join(layout.names)}; "
        f"its inputs: {', '.join(layout.axes)})"
    )


def line_problem(path: Path, number: int, text: str) -> Problem:
    """A line that cannot be counted."""
    name = shown_path(path)
    step = f"zcat {name} | sed -n {number}p" if path.suffix == ".gz" else f"sed -n {number}p {name}"
    return Problem(text, f"look at it: {step}", Where(path, number, 1), (), SpecError.exit_code)


def falling_time(path: Path, number: int, seconds: float) -> Problem:
    """A request that came before the one above it."""
    return Problem(
        f"its timestamp is {seconds:g} s before that of the row above it, so batches cannot be told",
        "sort the log by timestamp",
        Where(path, number, 1),
        (),
        SpecError.exit_code,
    )


def _given(
    values: Mapping[str, Any], shapes: Mapping[str, list[Any]], layout: Layout
) -> Iterator[tuple[int | str, int, str]]:
    """(the model's size or its name, size, where it was said) of each size in a row."""
    for name, value in values.items():
        if name in RESERVED:
            continue
        if name in layout.names:
            yield name, _whole(f"'{name}'", value), f"'{name}'"
        elif name not in layout.axes:
            raise RowError(unknown_name(name, layout))
    for name, shape in shapes.items():
        axes = layout.axes[name]
        sizes = [_whole(f"axis {axis} of '{name}'", size) for axis, size in enumerate(shape)]
        if len(sizes) == len(axes):
            yield from (
                (dim, size, f"axis {at} of '{name}'") for at, (dim, size) in enumerate(zip(axes, sizes, strict=True))
            )


def _shapes(values: Mapping[str, Any], layout: Layout) -> dict[str, list[Any]]:
    inputs = values.get(INPUTS, {})
    if not isinstance(inputs, dict):
        raise RowError(f"'inputs' is {_shown(inputs)}, expected input names with shapes")
    for name in inputs:
        if name not in layout.axes:
            best = closest(name, layout.axes)
            meant = f"; '{best}' is meant?" if best else ""
            raise RowError(f"unknown input '{name}'{meant} (the model's inputs: {', '.join(layout.axes)})")
    given = inputs | {name: value for name, value in values.items() if name in layout.axes and name not in layout.names}
    return {name: _shape(name, value) for name, value in given.items()}


def _shape(name: str, value: Any) -> list[Any]:
    if isinstance(value, str) and (match := _SHAPE_TEXT.fullmatch(value.strip())):
        return [int(size) for size in re.split(r"\s*[x,]\s*", match[1])]
    if not isinstance(value, list):
        raise RowError(f"'{name}' is {_shown(value)}, expected a shape such as [8, 64] or 8x64")
    return value


def _rank_misfits(shapes: Mapping[str, list[Any]], layout: Layout) -> list[str]:
    return [
        f"'{name}' has {len(shape)} sizes, the model's has {len(layout.axes[name])}"
        for name, shape in shapes.items()
        if len(shape) != len(layout.axes[name])
    ]


def _whole(what: str, value: Any, most: int = MAX_SIZE) -> int:
    if isinstance(value, str) and re.fullmatch(r"\s*[-+]?\d{1,20}\s*", value):
        value = int(value)  # a CSV cell
    if isinstance(value, bool) or not isinstance(value, int):
        raise RowError(f"{what} is {_shown(value)}, expected a whole number")
    if not 1 <= value <= most:
        raise RowError(f"{what} is {value}, expected 1 {'or more' if value < 1 else f'to {most}'}")
    return value


def _lacking(name: str, layout: Layout) -> str:
    givers = [input_ for input_, axes in layout.axes.items() if name in axes]
    return f"nothing gives '{name}', neither itself nor the shape of {' or '.join(repr(giver) for giver in givers)}"


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f"'{value[:40]}'" if value else "empty"
    if value is None:
        return "null"
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return str(value).lower() if isinstance(value, bool) else str(value)[:40]
