"""What readers give, how rows become batches, and how many problems are told at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trtforge.errors import Problem, SpecError, raise_any
from trtforge.types import Graph

Array = np.ndarray[Any, np.dtype[Any]]

MOST_PROBLEMS = 20
MAX_UNPACKED_BYTES = 64 << 30
"""What a compressed file may unpack to. Rows are streamed, so this bounds the time, not the memory."""
MAX_SAMPLE_BYTES = 4 << 30
"""What one sample, or an array that cannot be streamed, may hold."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One set of inputs, with the file and index it came from (`samples.npz[3]`, `tokens.jsonl:4`).

    Attributes:
        num_rows: how many rows of the data were taken together, 1 or more.
    """

    label: str
    feeds: dict[str, Array]
    num_rows: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """What a source lists: an entry along a first axis, a line, an image, a set of feeds.

    Attributes:
        feeds: input name -> array; those of the graph's inputs that were found.
        extra: names that are no inputs of the graph.
        joins: whether every input with axes has a batch axis of 1 here, so that rows can be taken together.
    """

    label: str
    feeds: dict[str, Array]
    extra: tuple[str, ...] = ()
    joins: bool = False


@dataclass(slots=True)
class Notes:
    """What is worth saying about samples that are used all the same: each text once, with a count and the first place."""

    _found: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, text: str, label: str = "", count: int = 1) -> None:
        """Notes `text` of `count` more samples, the first of which is `label`; no label: of the data as a whole."""
        before, first = self._found.get(text, (0, label))
        self._found[text] = before + count, first

    @property
    def lines(self) -> tuple[str, ...]:
        """One sentence for each text."""
        return tuple(_line(text, count, label) for text, (count, label) in self._found.items())


def _line(text: str, count: int, label: str) -> str:
    if not label:
        return text
    return f"{label}: {text}" if count == 1 else f"{text}: {count} samples, the first is {label}"


Found = Row | Problem
"""What a reader meets: a row, or why there is none."""


@dataclass(frozen=True, slots=True)
class Source:
    """Samples where they lie, opened but not read.

    Attributes:
        name: for messages.
        files: whose bytes decide the samples; for images, in the order of the rows.
        num_rows: how many rows there are; None where only reading tells.
        read: all rows from the start. Raises `SpecError` where the data as a whole cannot be read.
        is_code: whether the user's own Python makes the rows.
    """

    name: str
    files: tuple[Path, ...]
    num_rows: int | None
    read: Callable[[Notes], Iterator[Found]]
    is_code: bool = False


def rows_at_once(graph: Graph, batch_size: int) -> int | None:
    """How many rows are taken together: the first size that all inputs fix, else `batch_size`; None: sizes differ."""
    fixed = {spec.shape[0] for spec in graph.inputs if spec.shape and isinstance(spec.shape[0], int)}
    if len(fixed) > 1:
        return None
    return next(iter(fixed)) if fixed else batch_size


def has_fixed_batch(graph: Graph) -> bool:
    """Whether an input's first size is fixed."""
    return any(spec.shape and isinstance(spec.shape[0], int) for spec in graph.inputs)


def batched(rows: Iterable[Row], graph: Graph, batch_size: int, notes: Notes) -> Iterator[Sample]:
    """Takes neighbours of equal shapes together, never more than `rows_at_once`; nothing is ever padded.

    A batch may be shorter where the next row has other sizes or the data ends. Where the model fixes the batch,
    a shorter one cannot run; its rows are left aside, with a note.
    """
    size = rows_at_once(graph, batch_size) or 1
    least = size if has_fixed_batch(graph) else 1
    group: list[Row] = []
    for row in rows:
        if group and not (row.joins and _joinable(group[0], row)):
            yield from _joined(group, least, notes)
            group = []
        if not row.joins:
            yield Sample(row.label, row.feeds)
            continue
        group.append(row)
        if len(group) == size:
            yield from _joined(group, least, notes)
            group = []
    yield from _joined(group, least, notes)


def _joinable(first: Row, row: Row) -> bool:
    return all(
        array.shape == row.feeds[name].shape and (array.ndim > 0 or array == row.feeds[name])
        for name, array in first.feeds.items()
    )


def _joined(group: list[Row], least: int, notes: Notes) -> Iterator[Sample]:
    if not group:
        return
    if len(group) < least:
        notes.add(f"fills no batch of {least}, which the model fixes, and was left aside", group[0].label, len(group))
        return
    feeds = {
        name: np.concatenate([row.feeds[name] for row in group]) if array.ndim else array
        for name, array in group[0].feeds.items()
    }
    label = group[0].label if len(group) == 1 else f"{group[0].label} to {group[-1].label}"
    yield Sample(label, feeds, len(group))


def raise_first(problems: list[Problem]) -> None:
    """Raises `SeveralErrors` with the first `MOST_PROBLEMS`, the last of which counts the rest; nothing if none."""
    if len(problems) > MOST_PROBLEMS:
        last = problems[MOST_PROBLEMS - 1]
        more = f"and {len(problems) - MOST_PROBLEMS} more problems in the same data"
        shown = Problem(last.summary, last.next_step, last.where, (*last.detail, more), last.exit_code)
        problems = [*problems[: MOST_PROBLEMS - 1], shown]
    raise_any(problems)


def problem(summary: str, next_step: str, *detail: str) -> Problem:
    """A problem of data that the spec names."""
    return Problem(summary, next_step, detail=detail, exit_code=SpecError.exit_code)
