"""npz and npy: checked by their headers, then streamed a row at a time, compressed or not."""

from __future__ import annotations

import math
import shlex
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from trtforge.errors import SpecError
from trtforge.samples.fit import described_misfit, fits, missing
from trtforge.samples.source import (
    MAX_SAMPLE_BYTES,
    MAX_UNPACKED_BYTES,
    Row,
    Source,
    raise_first,
    rows_at_once,
)
from trtforge.types import Graph, TensorSpec

Array = np.ndarray[Any, np.dtype[Any]]

_PIECE_BYTES = 1 << 18
_DAMAGES = (
    ValueError,
    EOFError,
    MemoryError,
    KeyError,
    RuntimeError,  # an encrypted member; an unknown compression is its subclass
    SyntaxError,  # with TokenError: numpy parses its headers as Python
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True, slots=True)
class _Header:
    """What a numpy file says before its values."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_fortran: bool


@dataclass(frozen=True, slots=True)
class _Cut:
    """How an array is cut into rows: `step` entries each, one entry without its axis (0), or whole for each (None)."""

    num_rows: int | None
    step: int | None


def open_arrays(path: Path, graph: Graph, batch_size: int) -> Source:
    """An npz with an array for each input, or a npy for the only one. See `open_samples` for how they are cut.

    Raises:
        SeveralErrors: of `SpecError` problems, each with its array.
        SpecError: the file cannot be read, or holds something else.
    """
    headers = _headers(path, graph)
    names = [spec.name for spec in graph.inputs]
    extra = tuple(name for name in headers if name not in names)
    problems = list(missing(path.name, graph, headers, extra))
    size = rows_at_once(graph, batch_size)
    cuts: dict[str, _Cut] = {}
    for spec in graph.inputs:
        if spec.name in headers:
            header = headers[spec.name]
            step = spec.shape[0] if spec.shape and isinstance(spec.shape[0], int) else batch_size
            cut = _cut(header, spec, step, must_divide=size is None)
            if cut is None:
                expected = f"{spec}, stacked along a new first axis or along its batch"
                place = f"{path.name}: array '{spec.name}'"
                problems.append(described_misfit(place, header.shape, header.dtype, spec, expected))
            else:
                cuts[spec.name] = cut
    raise_first(problems)
    joins = size is not None and all(cuts[spec.name].step for spec in graph.inputs if spec.shape)
    if joins:
        cuts = {name: _Cut(headers[name].shape[0], 1) if graph.input(name).shape else cut for name, cut in cuts.items()}
    num_rows = _num_rows(path, headers, cuts)
    return Source(path.name, (path,), num_rows, lambda _: _rows(path, graph, cuts, num_rows, extra, joins=joins))


def _cut(header: _Header, spec: TensorSpec, step: int, *, must_divide: bool) -> _Cut | None:
    """How an array holds rows of `spec`; None if it does not."""
    shape, rank = header.shape, len(spec.shape)
    if len(shape) == rank + 1:
        return _Cut(shape[0], 0) if fits(shape[1:], header.dtype, spec) else None
    if not fits(shape, header.dtype, spec, skip_batch=True):
        return None
    if rank == 0:
        return _Cut(None, None)
    if must_divide and shape[0] % step:
        return None
    return _Cut(-(-shape[0] // step), step)


def _num_rows(path: Path, headers: Mapping[str, _Header], cuts: Mapping[str, _Cut]) -> int:
    counts = {name: cut.num_rows for name, cut in cuts.items() if cut.num_rows is not None}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{count} of '{name}' {list(headers[name].shape)}" for name, count in counts.items())
        raise SpecError(
            f"{path.name} holds differing numbers of samples: {found}",
            next_step="stack the samples of every input along a new first axis: numpy.stack(samples)",
        )
    return next(iter(counts.values()), 1)


def _rows(
    path: Path, graph: Graph, cuts: Mapping[str, _Cut], num_rows: int, extra: tuple[str, ...], *, joins: bool
) -> Iterator[Row]:
    with _explained(path), ExitStack() as stack:
        openers = stack.enter_context(_members(path, graph))
        parts = {name: _parts(stack.enter_context(openers[name]()), cut.step, num_rows) for name, cut in cuts.items()}
        for index in range(num_rows):
            feeds = {name: next(part) for name, part in parts.items()}
            yield Row(f"{path.name}[{index}]", feeds, extra, joins)


def _parts(stream: IO[bytes], step: int | None, num_rows: int) -> Iterator[Array]:
    header = _header(stream)
    if step is None:
        array = _filled(stream, header.shape, header.dtype)
        for _ in range(num_rows):
            yield array
        return
    whole = _columns_first(stream, header) if header.is_fortran else None
    size = max(step, 1)
    for start in range(0, header.shape[0], size):
        stop = min(start + size, header.shape[0])
        shape = (stop - start, *header.shape[1:])
        part = _filled(stream, shape, header.dtype) if whole is None else whole[start:stop]
        yield part if step else np.asarray(part[0])


def _columns_first(stream: IO[bytes], header: _Header) -> Array:
    """An array in Fortran order, whose rows lie scattered over the file: the one case that is loaded whole."""
    return _filled(stream, header.shape[::-1], header.dtype).transpose()


def _filled(stream: IO[bytes], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """The next values of the stream."""
    if math.prod(shape) * dtype.itemsize > MAX_SAMPLE_BYTES:
        raise ValueError(f"one sample of {list(shape)} is larger than the {MAX_SAMPLE_BYTES >> 20} MiB that are read")
    array = np.empty(shape, dtype)
    target = array.reshape(-1).view(np.uint8).data
    filled = 0
    while filled < len(target):
        piece = stream.read(min(_PIECE_BYTES, len(target) - filled))
        if not piece:
            raise EOFError(f"it ends {len(target) - filled} bytes early")
        target[filled : filled + len(piece)] = piece
        filled += len(piece)
    return array


@contextmanager
def _members(path: Path, graph: Graph) -> Iterator[dict[str, Callable[[], AbstractContextManager[IO[bytes]]]]]:
    """Array name -> what opens its bytes."""
    if path.suffix == ".npy":
        if len(graph.inputs) != 1:
            raise SpecError(
                f"{path.name} holds one array, and {graph.source.name} has {len(graph.inputs)} inputs: "
                f"{', '.join(spec.name for spec in graph.inputs)}",
                next_step="save all of them in one file: numpy.savez(FILE.npz, INPUT=array, ...)",
            )
        yield {graph.inputs[0].name: lambda: path.open("rb")}
        return
    with zipfile.ZipFile(path) as archive:
        yield {member.filename.removesuffix(".npy"): partial(archive.open, member) for member in archive.infolist()}


def _headers(path: Path, graph: Graph) -> dict[str, _Header]:
    with _explained(path):
        sizes = _sizes(path, graph)
        if sum(sizes.values()) > MAX_UNPACKED_BYTES and path.suffix == ".npz":
            raise SpecError(
                f"{path.name} unpacks to {sum(sizes.values()) >> 20} MiB, more than the {MAX_UNPACKED_BYTES >> 20} MiB "
                "that are read",
                next_step="save fewer samples, or a .npy file, which is read in place",
            )
        headers = {}
        with _members(path, graph) as openers:
            for name, opener in openers.items():
                with opener() as stream:
                    headers[name] = header = _header(stream)
                    if stream.tell() + math.prod(header.shape) * header.dtype.itemsize != sizes[name]:
                        raise ValueError(f"'{name}' is not as long as {header.dtype} {list(header.shape)} takes")
        return headers


def _sizes(path: Path, graph: Graph) -> dict[str, int]:
    if path.suffix == ".npy":
        return {spec.name: path.stat().st_size for spec in graph.inputs}
    with zipfile.ZipFile(path) as archive:
        return {member.filename.removesuffix(".npy"): member.file_size for member in archive.infolist()}


def _header(stream: IO[bytes]) -> _Header:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    elif version == (2, 0):
        shape, is_fortran, dtype = np.lib.format.read_array_header_2_0(stream)
    else:
        raise ValueError(f"it is of numpy's file version {version[0]}.{version[1]}, which only records need")
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which only unpickling can read")
    return _Header(shape, dtype, is_fortran and len(shape) > 1)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SpecError(
            f"cannot read {path}: {error.strerror or error}", next_step=f"ls -l {shlex.quote(str(path))}"
        ) from error
    except _DAMAGES as error:
        raise SpecError(
            f"{path.name} is no {path.suffix} file of plain arrays",
            detail=[" ".join(str(error).split())[:300]],
            next_step="save it with numpy.savez(FILE.npz, INPUT=array), with no Python objects in it",
        ) from error
