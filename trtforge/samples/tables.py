"""JSONL and parquet: a row is a sample, and a key or column of the input's name holds its numbers or nested lists."""

from __future__ import annotations

import gzip
import json
import shlex
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import numpy as np

from trtforge.errors import CapabilityError, SpecError
from trtforge.samples.fit import NARROW, missing
from trtforge.samples.source import MAX_UNPACKED_BYTES, Found, Row, Source, problem, raise_first, rows_at_once
from trtforge.types import Graph, TensorSpec

Array = np.ndarray[Any, np.dtype[Any]]

JSONL_ENDINGS = (".jsonl", ".jsonl.gz")
_LONGEST_LINE_BYTES = 256 << 20
_ROWS_AT_ONCE = 16


def open_jsonl(path: Path, graph: Graph, batch_size: int) -> Source:
    """Lines of JSON objects, gzipped where the name ends in `.gz`; empty lines are skipped.

    JSON has no element types: whole numbers are taken for integers and floats, others for floats, which are rounded to
    the input's type; true and false are for bool alone.
    """
    joins = rows_at_once(graph, batch_size) is not None
    return Source(path.name, (path,), None, lambda _: _jsonl_rows(path, graph, may_join=joins))


def open_parquet(path: Path, graph: Graph, batch_size: int) -> Source:
    """A parquet file with a column for each input, whose element types are those of the file.

    Raises:
        CapabilityError: pyarrow is not installed.
        SeveralErrors: of `SpecError` problems, one for each input without a column.
        SpecError: the file cannot be read.
    """
    with _opened_parquet(path) as file:
        names = file.schema_arrow.names
        group_bytes = [file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups)]
        num_rows = int(file.metadata.num_rows)
    if sum(group_bytes) > MAX_UNPACKED_BYTES:
        raise SpecError(
            f"{path.name} unpacks to {sum(group_bytes) >> 20} MiB, more than the {MAX_UNPACKED_BYTES >> 20} MiB "
            "that are read",
            next_step="save fewer rows",
        )
    raise_first(list(missing(path.name, graph, dict.fromkeys(names), names)))
    joins = rows_at_once(graph, batch_size) is not None
    return Source(path.name, (path,), num_rows, lambda _: _parquet_rows(path, graph, may_join=joins))


def _jsonl_rows(path: Path, graph: Graph, *, may_join: bool) -> Iterator[Found]:
    with _opened_lines(path) as file:
        unpacked_bytes = 0
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE_BYTES + 1), b""), 1):
            unpacked_bytes += len(line)
            if max(unpacked_bytes - MAX_UNPACKED_BYTES, len(line) - _LONGEST_LINE_BYTES) > 0:
                raise SpecError(
                    f"{path.name}:{number}: found more than a line of {_LONGEST_LINE_BYTES >> 20} MiB or "
                    f"{MAX_UNPACKED_BYTES >> 20} MiB in all, which is the limit",
                    next_step="save large arrays with numpy.savez(FILE.npz, INPUT=array)",
                )
            if line.strip():
                yield _jsonl_row(f"{path.name}:{number}", line, graph, may_join=may_join)


def _jsonl_row(label: str, line: bytes, graph: Graph, *, may_join: bool) -> Found:
    wanted = ", ".join(f'"{name}": [...]' for name in _names(graph))
    try:
        values = json.loads(line.strip())
    except (ValueError, RecursionError) as error:
        at = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else at
        return problem(f"{label} is no JSON: {reason}", f"write one object a line: {{{wanted}}}")
    if not isinstance(values, dict):
        return problem(f"{label} is no object of names and numbers", f"write one object a line: {{{wanted}}}")
    return _row(label, values, graph.inputs, may_join=may_join)


def _row(label: str, values: Mapping[str, Any], inputs: Sequence[TensorSpec], *, may_join: bool) -> Found:
    """Numbers of one row as arrays, with a batch axis of 1 where they have one axis less than the input."""
    feeds: dict[str, Array] = {}
    joins = may_join
    for spec in inputs:
        if spec.name not in values:
            continue
        array = _array(values[spec.name], spec)
        if isinstance(array, str):
            return problem(f"{label}: '{spec.name}' {array}, expected {spec}", "write numbers or nested lists of them")
        lacks_batch = array.ndim == len(spec.shape) - 1
        feeds[spec.name] = array[np.newaxis] if lacks_batch else array
        joins = joins and (lacks_batch or not spec.shape)
    names = {spec.name for spec in inputs}
    extra = tuple(name for name in values if name not in names)
    return Row(label, feeds, extra, joins)


def _array(value: Any, spec: TensorSpec) -> Array | str:
    """The value as an array of the input's type where its numbers allow that, else why it is none."""
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError, RecursionError):
        return "holds lists of different lengths inside one row"
    if array.dtype.kind not in "biuf":
        return "holds something else than numbers, or a whole number beyond 64 bits"
    if not array.size:
        return f"is empty {list(array.shape)}"
    if spec.dtype.startswith(("int", "uint")) and array.dtype.kind in "iu" and spec.dtype not in ("int4", "uint4"):
        bounds = np.iinfo(spec.dtype)
        beyond = array[(array < bounds.min) | (array > bounds.max)]
        return f"holds {beyond.flat[0]}, beyond {spec.dtype}" if beyond.size else array.astype(spec.dtype)
    if "float" in spec.dtype and array.dtype.kind in "iuf":
        with np.errstate(over="ignore"):
            rounded = array.astype(NARROW.get(spec.dtype) or spec.dtype)
        beyond = array[~np.isfinite(rounded.astype(np.float64)) & np.isfinite(array)]
        return f"holds {beyond.flat[0]:g}, beyond {spec.dtype}" if beyond.size else rounded
    return array


def _parquet_rows(path: Path, graph: Graph, *, may_join: bool) -> Iterator[Found]:
    names = _names(graph)
    with _opened_parquet(path) as file:
        types = {name: _element_type(file.schema_arrow.field(name).type) for name in names}
        stored = [TensorSpec(spec.name, types[spec.name], spec.shape) for spec in graph.inputs]
        index = 0
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=names, use_threads=False):
            for values in batch.to_pylist():
                label = f"{path.name}[{index}]"
                yield _row(label, values, stored, may_join=may_join)
                index += 1


def _element_type(kind: Any) -> str:
    """Numpy's name of the Arrow type inside nested lists."""
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    try:
        return str(np.dtype(kind.to_pandas_dtype()).name)
    except (NotImplementedError, TypeError):  # records and the like
        return str(kind)


def _names(graph: Graph) -> list[str]:
    return [spec.name for spec in graph.inputs]


@contextmanager
def _opened_lines(path: Path) -> Iterator[BufferedIOBase]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise SpecError(
            f"{path.name} is no whole gzip file: {error}", next_step=f"gzip --test {shlex.quote(str(path))}"
        ) from error
    except OSError as error:
        raise _unreadable(path, error) from error


@contextmanager
def _opened_parquet(path: Path) -> Iterator[Any]:
    try:
        from pyarrow import ArrowException  # noqa: PLC0415 - an extra, and slow to load
        from pyarrow.parquet import ParquetFile  # noqa: PLC0415
    except ImportError as error:
        raise CapabilityError(
            f"reading {path.name} takes pyarrow, which is not installed", next_step="pip install 'trtforge[parquet]'"
        ) from error
    try:
        with ParquetFile(path, pre_buffer=False) as file:
            yield file
    except (ArrowException, ValueError) as error:
        raise SpecError(
            f"{path.name} is no parquet file",
            detail=[" ".join(str(error).split())[:300]],
            next_step="write it with pyarrow.parquet.write_table",
        ) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> SpecError:
    return SpecError(f"cannot read {path}: {error.strerror or error}", next_step=f"ls -l {shlex.quote(str(path))}")
