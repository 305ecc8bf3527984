"""Reads a traffic log, JSONL, CSV, parquet or a JSON histogram, as a stream.

Logs repeat themselves: a few thousand different shapes in millions of rows. So lines are counted as they stand, with
their time cut out, and only different lines are parsed.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from trtforge.errors import Problem, SpecError, StoreError, Where, raise_any, shown_path
from trtforge.traffic.histogram import Floats, Tally, Traffic, joined_arrivals
from trtforge.traffic.layout import Layout
from trtforge.traffic.rows import (
    COUNT,
    RESERVED,
    TIMESTAMP,
    MisfitError,
    Row,
    RowError,
    falling_time,
    line_problem,
    read_row,
    unknown_name,
)

MAX_PROBLEMS = 20
_NOTHING = -1
MAX_LINE_BYTES = 1 << 20
MAX_HISTOGRAM_BYTES = 64 << 20
_CHUNK_BYTES = 4 << 20
_MAX_KNOWN_LINES = 200_000
_JSON_STAMP = re.compile(rb'"timestamp"\s*:\s*("[^"\\]*"|[-+0-9.eE]+)')
_CSV_FIELD = rb'(?:"[^"\n]*"|[^,"\n]*)'
_ZERO_STAMP = b'"timestamp":0'
FORMATS = (".jsonl", ".csv", ".parquet", ".json")

Parse = Callable[[bytes], Row]
Cut = Callable[[bytes], tuple[bytes, list[bytes]]]
"""A block of lines -> the block with each time replaced by 0, and the times."""


def read_traffic(path: Path, layout: Layout, *, with_arrivals: bool = False) -> Traffic:
    """The requests in `path`, counted by shape.

    Args:
        path: `.jsonl` or `.csv`, also with `.gz`; `.parquet`; `.json` for a list of rows with counts.
        layout: of the model that they go to.
        with_arrivals: whether to keep when each request came; then every row needs a `timestamp`, in seconds or as
            ISO 8601 in UTC.

    Raises:
        SpecError, SeveralErrors: the log is empty, or rows cannot be counted: each with its line, 20 at most.
        StoreError: there is no such file, or it cannot be read.
    """
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if kind not in FORMATS or (path.suffix == ".gz" and kind == ".parquet"):
        raise SpecError(
            f"{shown_path(path)} has an unknown kind of name, expected {', '.join(FORMATS)}; .gz after .jsonl or .csv",
            next_step=f"mv {path.name} {path.name}.jsonl, if each line of it is a JSON object",
        )
    try:
        if kind == ".parquet":
            from trtforge.traffic.parquet import read_parquet  # noqa: PLC0415 - loads pyarrow, which is optional

            traffic = read_parquet(path, layout, with_arrivals=with_arrivals)
        elif kind == ".json":
            traffic = _read_histogram(path, layout, with_arrivals=with_arrivals)
        else:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                traffic = _read_lines(path, file, layout, is_csv=kind == ".csv", with_arrivals=with_arrivals)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise SpecError(
            f"{shown_path(path)} is no whole gzip file: {error}", next_step=f"gzip -t {path.name}"
        ) from error
    except OSError as error:
        raise StoreError(f"{shown_path(path)}: {error.strerror or error}", next_step=f"ls -l {path.name}") from error
    if not traffic.num_requests:
        raise SpecError(
            f"{shown_path(path)} holds no requests", next_step="log the shapes of real requests, one JSON object a line"
        )
    return traffic


@dataclass(slots=True)
class _Lines:
    """Reads blocks of lines into a tally.

    Attributes:
        known: line -> its place in `meanings`.
        meanings: (row of the tally, requests); row `_NOTHING` of a line that says nothing, below it of a misfit.
        first: number of the first line of the next block.
    """

    path: Path
    layout: Layout
    parse: Parse
    cut: Cut
    with_arrivals: bool
    first: int
    tally: Tally
    known: dict[bytes, int] = field(default_factory=dict)
    meanings: list[tuple[int, int]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    seconds: list[Floats] = field(default_factory=list)
    shapes: list[NDArray[np.int32]] = field(default_factory=list)

    def add(self, block: bytes) -> None:
        text, stamps = self.cut(block)
        lines = text.split(b"\n")
        if not lines[-1]:
            lines.pop()
        if len(self.known) > _MAX_KNOWN_LINES:
            self.known.clear()
            self.meanings.clear()
        number_of = _numbering(lines, self.first)
        for line, times in Counter(lines).items():
            if line not in self.known:
                self.meanings.append(self._meaning(line, number_of))
                self.known[line] = len(self.meanings) - 1
            row, requests = self.meanings[self.known[line]]
            if row >= 0:
                self.tally.counts[row] += times * requests
            elif row < _NOTHING:
                self.tally.misfit_counts[_NOTHING - 1 - row] += times * requests
        if len(self.problems) >= MAX_PROBLEMS:
            raise_any(self.problems[:MAX_PROBLEMS])
        if self.with_arrivals and not self.problems:
            self._keep_times(lines, stamps)
        self.first += len(lines)

    def _meaning(self, line: bytes, number_of: Callable[[bytes], int]) -> tuple[int, int]:
        if not line.strip():
            return _NOTHING, 0
        try:
            row = self.parse(line)
            if self.with_arrivals and not row.has_timestamp:
                raise RowError("it has no timestamp, which --window-ms needs")  # noqa: TRY301 - one place for both
        except MisfitError as misfit:
            return _NOTHING - 1 - self.tally.misfit_id(str(misfit), number_of(line)), misfit.count
        except RowError as error:
            self.problems.append(line_problem(self.path, number_of(line), str(error)))
            return _NOTHING, 0
        return self.tally.id_of(row.sizes), row.count

    def _keep_times(self, lines: list[bytes], stamps: list[bytes]) -> None:
        places = np.fromiter(map(self.known.__getitem__, lines), np.int64, len(lines))
        meanings = np.array(self.meanings, np.int64)[places]
        numbers = np.flatnonzero(meanings[:, 0] != _NOTHING)
        rows, requests = meanings[numbers].T
        seconds = _seconds(stamps)
        if seconds is None or len(seconds) != len(rows):
            at, stamp = _first_bad(stamps)
            summary = f"its timestamp is {stamp}, expected seconds, or ISO 8601 in UTC such as 2025-01-31T23:59:59.5Z"
            self.problems.append(line_problem(self.path, self.first + int(numbers[at]), summary))
            return
        before = np.concatenate([[self.seconds[-1][-1] if self.seconds else -np.inf], seconds[:-1]])
        falls = np.flatnonzero(seconds < before)
        if falls.size:
            at = int(falls[0])
            self.problems.append(
                falling_time(self.path, self.first + int(numbers[at]), float(before[at] - seconds[at]))
            )
            return
        fits = rows >= 0
        if fits.any():
            self.seconds.append(np.repeat(seconds[fits], requests[fits]))
            self.shapes.append(np.repeat(rows[fits].astype(np.int32), requests[fits]))


def _numbering(lines: list[bytes], first: int) -> Callable[[bytes], int]:
    """The number of the first line that reads so; nothing is numbered before one is asked for."""
    numbers: dict[bytes, int] = {}

    def number_of(line: bytes) -> int:
        if not numbers:
            numbers.update(zip(reversed(lines), range(first + len(lines) - 1, first - 1, -1), strict=True))
        return numbers[line]

    return number_of


def _read_lines(path: Path, file: Any, layout: Layout, *, is_csv: bool, with_arrivals: bool) -> Traffic:
    blocks = _blocks(path, file)
    block = next(blocks, b"").removeprefix(b"\xef\xbb\xbf")
    parse, first = _json_parser(layout), 1
    cut: Cut = _cut_json
    if is_csv:
        header, _, block = block.partition(b"\n")
        parse, cut = _csv_format(path, header, layout)
        first = 2
    reader = _Lines(path, layout, parse, cut, with_arrivals, first, Tally(layout.names))
    while block:
        reader.add(block)
        block = next(blocks, b"")
    raise_any(reader.problems)
    return reader.tally.traffic(joined_arrivals(reader.seconds, reader.shapes) if with_arrivals else None)


def _blocks(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """Blocks that end at the end of a line."""
    rest = b""
    number = 1
    while data := file.read(_CHUNK_BYTES):
        data = rest + data
        end = data.rfind(b"\n") + 1
        rest = data[end:]
        if len(rest) > MAX_LINE_BYTES:
            number += data.count(b"\n")
            raise_any([line_problem(path, number, f"it is longer than {MAX_LINE_BYTES} bytes, which no row is")])
        number += data.count(b"\n", 0, end)
        if end:
            yield data[:end]
    if rest:
        yield rest


def _cut_json(block: bytes) -> tuple[bytes, list[bytes]]:
    # Inside a JSON string the quotes would be escaped, so what matches is a key and its value.
    parts = _JSON_STAMP.split(block)
    return _ZERO_STAMP.join(parts[::2]), parts[1::2]


def _json_parser(layout: Layout) -> Parse:
    decoder = json.JSONDecoder(object_pairs_hook=_without_duplicates)

    def parse(line: bytes) -> Row:
        try:
            values = decoder.decode(line.decode())
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise RowError(f"it is no JSON object: {reason}") from None
        return read_row(values, layout)

    return parse


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise RowError(f"it has the key '{Counter(name for name, _ in pairs).most_common(1)[0][0]}' twice")
    return values


def _csv_format(path: Path, header: bytes, layout: Layout) -> tuple[Parse, Cut]:
    names = [name.strip() for name in next(csv.reader([header.decode("utf-8", "replace").rstrip("\r")]), [])]
    known = {*layout.names, *layout.axes, *RESERVED[:2]}
    problems = [line_problem(path, 1, unknown_name(name, layout)) for name in names if name not in known]
    problems += [
        line_problem(path, 1, f"it names the column '{name}' {times} times")
        for name, times in Counter(names).items()
        if times > 1
    ]
    raise_any(problems)

    def parse(line: bytes) -> Row:
        cells = next(csv.reader([line.decode("utf-8", "replace").rstrip("\r")]))
        if len(cells) != len(names):
            raise RowError(f"it has {len(cells)} cells, the header has {len(names)}")
        return read_row(dict(zip(names, cells, strict=True)), layout)

    if TIMESTAMP not in names:
        return parse, lambda block: (block, [])
    before = b"(?:" + _CSV_FIELD + b",){%d}" % names.index(TIMESTAMP)
    stamp = re.compile(b"(?m)^(" + before + b")([^,\r\n]+)")

    def cut(block: bytes) -> tuple[bytes, list[bytes]]:
        parts = stamp.split(block)
        stamps = parts[2::3]
        parts[2::3] = [b"0"] * len(stamps)
        return b"".join(parts), stamps

    return parse, cut


def _read_histogram(path: Path, layout: Layout, *, with_arrivals: bool) -> Traffic:
    """A JSON list of rows, each with its count."""
    if with_arrivals:
        raise SpecError(
            f"{shown_path(path)} is a histogram, which has no times for --window-ms",
            next_step="give the log itself, with a timestamp in each row",
        )
    if path.stat().st_size > MAX_HISTOGRAM_BYTES:
        raise SpecError(
            f"{shown_path(path)} is larger than {MAX_HISTOGRAM_BYTES} bytes", next_step="write it as .jsonl"
        )
    try:
        rows = json.loads(path.read_bytes(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError, RowError) as error:
        raise SpecError(
            f"{shown_path(path)} is no JSON: {error}", next_step="name it .jsonl if each line of it is an object"
        ) from None
    if not isinstance(rows, list):
        raise SpecError(
            f"{shown_path(path)} holds no list of rows, which a histogram is",
            next_step=f'write [{{"{next(iter(layout.names), COUNT)}": 8, "count": 1200}}, ...]',
        )
    tally = Tally(layout.names)
    problems = []
    for number, values in enumerate(rows):
        try:
            row = read_row(values, layout)
            tally.counts[tally.id_of(row.sizes)] += row.count
        except MisfitError as misfit:
            tally.misfit_counts[tally.misfit_id(str(misfit), 0)] += misfit.count
        except RowError as error:
            summary = f"row {number} of {shown_path(path)}: {error}"
            problems.append(Problem(summary, "mend that row", Where(path), exit_code=SpecError.exit_code))
    raise_any(problems[:MAX_PROBLEMS])
    return tally.traffic(None)


def _seconds(stamps: list[bytes]) -> Floats | None:
    """Seconds of times as they are written, None where one of them is none."""
    if not stamps:
        return np.zeros(0)
    # numpy warns of a time zone that it leaves out.
    with suppress(ValueError, UserWarning), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        if stamps[0].strip(b'" ')[4:5] == b"-":
            plain = b"\n".join(stamps).translate(None, b'"Z ').split(b"\n")
            return np.array(plain).astype("datetime64[us]").astype(np.int64) / 1e6
        seconds = np.array(b"\n".join(stamps).translate(None, b'"').split(b"\n")).astype(np.float64)
        return seconds if np.isfinite(seconds).all() else None
    return None


def _first_bad(stamps: list[bytes]) -> tuple[int, str]:
    bad = (number for number, stamp in enumerate(stamps) if _seconds([stamp]) is None)
    number = next(bad, 0)
    return number, stamps[number].decode("utf-8", "replace") if stamps else "missing"
