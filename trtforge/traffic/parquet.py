"""Reads a traffic log in parquet, by pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtforge.errors import CapabilityError, SpecError, raise_any, shown_path
from trtforge.traffic.histogram import Floats, Ints, Tally, Traffic, joined_arrivals
from trtforge.traffic.layout import Layout
from trtforge.traffic.rows import (
    COUNT,
    MAX_COUNT,
    RESERVED,
    TIMESTAMP,
    MisfitError,
    RowError,
    falling_time,
    line_problem,
    read_row,
    unknown_name,
)

_BATCH_ROWS = 1 << 18


def read_parquet(path: Path, layout: Layout, *, with_arrivals: bool) -> Traffic:
    """The requests in a parquet file: a column of whole numbers for an open size, of lists for an input's shape.

    Raises:
        CapabilityError: pyarrow is not installed.
        SpecError, SeveralErrors: it is no parquet file, or rows cannot be counted.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415 - optional
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ImportError:
        raise CapabilityError(
            f"{shown_path(path)} needs pyarrow, which is not installed", next_step="pip install 'trtforge[parquet]'"
        ) from None
    try:
        file = pq.ParquetFile(path, memory_map=True)
    except pa.ArrowException as error:
        raise SpecError(f"{shown_path(path)} is no parquet file: {error}", next_step="write it again") from None
    names = file.schema_arrow.names
    known = {*layout.names, *layout.axes, *RESERVED[:2]}
    problems = [line_problem(path, 1, unknown_name(name, layout)) for name in names if name not in known]
    if with_arrivals and TIMESTAMP not in names:
        problems.append(line_problem(path, 1, "it has no timestamp, which --window-ms needs"))
    raise_any(problems)
    wanted = [name for name in names if with_arrivals or name != TIMESTAMP]
    tally = Tally(layout.names)
    seconds: list[Floats] = []
    shapes: list[NDArray[np.int32]] = []
    first = 1
    for batch in file.iter_batches(_BATCH_ROWS, columns=wanted, use_threads=False):
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        rows, counts = _count(path, columns, layout, tally, first)
        if with_arrivals:
            times = _times(path, columns[TIMESTAMP], first, seconds[-1][-1] if seconds else -np.inf)
            fits = rows >= 0
            if fits.any():
                seconds.append(np.repeat(times[fits], counts[fits]))
                shapes.append(np.repeat(rows[fits].astype(np.int32), counts[fits]))
        first += batch.num_rows
    return tally.traffic(joined_arrivals(seconds, shapes) if with_arrivals else None)


def _count(path: Path, columns: Mapping[str, Any], layout: Layout, tally: Tally, first: int) -> tuple[Ints, Ints]:
    """Adds a batch to the tally; (row of the tally, -1 for a misfit; requests) of each of its rows."""
    counts = _numbers(path, COUNT, columns[COUNT], first, MAX_COUNT) if COUNT in columns else None
    given = {name: column for name, column in columns.items() if name not in (COUNT, TIMESTAMP)}
    table = np.stack([part for name, column in given.items() for part in _parts(path, name, column, layout, first)], 1)
    num = len(table)
    requests = np.ones(num, np.int64) if counts is None else counts
    unique, places = np.unique(_packed(table), return_inverse=True)
    sums = np.zeros(len(unique), np.int64)
    np.add.at(sums, places, requests)
    firsts = np.full(len(unique), num)
    np.minimum.at(firsts, places, np.arange(num))
    ids = np.empty(len(unique), np.int64)
    for place, row in enumerate(firsts.tolist()):
        ids[place] = _learn(
            path,
            {name: column[row].as_py() for name, column in given.items()},
            layout,
            tally,
            first + row,
            int(sums[place]),
        )
    return ids[places], requests


def _learn(path: Path, values: dict[str, Any], layout: Layout, tally: Tally, number: int, requests: int) -> int:
    """Counts a shape by the rules of every other format; its row of the tally, -1 for a misfit."""
    try:
        row = tally.id_of(read_row(values, layout).sizes)
    except MisfitError as misfit:
        tally.misfit_counts[tally.misfit_id(str(misfit), number)] += requests
        return -1
    except RowError as error:
        raise_any([line_problem(path, number, str(error))])
        raise
    tally.counts[row] += requests
    return row


def _parts(path: Path, name: str, column: Any, layout: Layout, first: int) -> Iterator[Ints]:
    """A column as columns of whole numbers that tell its different values apart."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.compute as pc  # noqa: PLC0415

    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        yield _numbers(path, name, column, first)
        return
    lengths = pc.fill_null(pc.list_value_length(column), -1).to_numpy(zero_copy_only=False).astype(np.int64)
    yield lengths
    starts = np.concatenate([[0], np.cumsum(np.maximum(lengths, 0))[:-1]])
    flat = _numbers(path, name, column.flatten(), first)
    for axis in range(len(layout.axes.get(name, ()))):
        has = lengths > axis
        part = np.zeros(len(lengths), np.int64)
        part[has] = flat[starts[has] + axis]
        yield part


def _numbers(path: Path, name: str, column: Any, first: int, most: int = 2**62) -> Ints:
    import pyarrow as pa  # noqa: PLC0415

    if not pa.types.is_integer(column.type):
        raise SpecError(
            f"column '{name}' of {shown_path(path)} is {column.type}, expected whole numbers or lists of them",
            next_step=f"write '{name}' as int64",
        )
    if column.null_count:
        number = first + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise_any([line_problem(path, number, f"'{name}' is null, expected a whole number")])
    numbers: Ints = column.to_numpy(zero_copy_only=False).astype(np.int64)
    bad = np.flatnonzero((numbers < 1) | (numbers > most))
    if name == COUNT and bad.size:
        raise_any([line_problem(path, first + int(bad[0]), f"count is {numbers[bad[0]]}, expected 1 or more")])
    return numbers


def _packed(table: Ints) -> Any:
    """(rows, columns) as one sortable value a row."""
    spans = [int(column.max()) - int(column.min()) + 1 for column in table.T]
    packed = np.zeros(len(table), np.int64)
    total = 1
    for column, span in zip(table.T, spans, strict=True):
        total *= span
        if total >= 2**63:
            return np.ascontiguousarray(table).view([("", np.int64)] * table.shape[1]).ravel()
        packed = packed * span + (column - column.min())
    return packed


def _times(path: Path, column: Any, first: int, before: float) -> Floats:
    import pyarrow as pa  # noqa: PLC0415

    if pa.types.is_timestamp(column.type):
        seconds = (
            column.cast(pa.timestamp("us", column.type.tz), safe=False).cast(pa.int64()).to_numpy(zero_copy_only=False)
            / 1e6
        )
    elif pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        seconds = column.to_numpy(zero_copy_only=False).astype(np.float64)
    else:
        raise SpecError(
            f"column 'timestamp' of {shown_path(path)} is {column.type}, expected timestamps or seconds",
            next_step="write it as a timestamp column",
        )
    bad = np.flatnonzero(~np.isfinite(seconds))
    if bad.size or column.null_count:
        raise_any(
            [line_problem(path, first + int(bad[0]) if bad.size else first, "its timestamp is null or no number")]
        )
    falls = np.flatnonzero(np.diff(seconds, prepend=before) < 0)
    if falls.size:
        at = int(falls[0])
        earlier = float(seconds[at - 1]) if at else float(before)
        raise_any([falling_time(path, first + at, earlier - float(seconds[at]))])
    return seconds  # type: ignore[no-any-return]
