"""The user's own inputs, read one at a time and checked against the model."""

from __future__ import annotations

import shlex
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from trtforge.errors import Problem, SpecError, closest, raise_any
from trtforge.parity.interop import load_inputs
from trtforge.types import Graph, TensorSpec

Array = np.ndarray[Any, np.dtype[Any]]

MAX_UNPACKED_BYTES = 8 << 30
"""What an npz may unpack to, since a file of a few MiB can claim any size."""
_MOST_PROBLEMS = 20
_NARROW = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One set of inputs, with the file and index it came from (`samples.npz[3]`)."""

    label: str
    feeds: dict[str, Array]


@dataclass(frozen=True, slots=True)
class Samples:
    """A file of samples that fits the model. Iterate as often as needed; each time gives them in order.

    Attributes:
        num_samples: how many, 1 or more.
        notes: what was left aside.
    """

    num_samples: int
    notes: tuple[str, ...]
    read: Callable[[], Iterator[Sample]]

    def __iter__(self) -> Iterator[Sample]:
        return self.read()


def open_samples(path: Path, graph: Graph, *, batch_size: int = 1) -> Samples:
    """Opens the user's samples and checks each by name, element type, rank and fixed sizes.

    By the end of the file's name:

    `.npz`: one array for each input, of the input's name. With one axis more than the input, its first axis counts
    samples. With as many, its first axis is the batch, cut into samples of the model's fixed batch, or of
    `batch_size` where the batch is open (the last may be shorter). An array without axes, for an input without axes,
    goes with every sample. All are equally many. Arrays of other names are left aside, with a note.

    `.npy`: the same for the only input of a model.

    `.json`, or a folder of them: feeds as Polygraphy saves them, one a sample.

    Nothing is unpickled. bfloat16 and float8 are taken as numpy saves them, as raw values of their size.

    Raises:
        SeveralErrors: of `SpecError` problems, each with file, array or index, and input.
        SpecError: the file cannot be read or has another ending.
    """
    if path.suffix == ".json" or path.is_dir():
        return _open_json(path, graph)
    if path.suffix in (".npz", ".npy"):
        return _open_arrays(path, graph, batch_size)
    raise SpecError(
        f"samples in {path.name}: found the ending '{path.suffix}', expected .npz, .npy or .json",
        next_step="save them with numpy.savez(FILE.npz, INPUT=array)",
    )


def _open_json(path: Path, graph: Graph) -> Samples:
    problems: list[Problem] = []
    extra: dict[str, None] = {}
    count = 0
    for feed in load_inputs(path):
        label = f"{path.name}[{count}]"
        problems += _missing(label, graph, feed)
        problems += [
            _misfit(f"{label}: '{spec.name}'", feed[spec.name], f"{spec}")
            for spec in graph.inputs
            if spec.name in feed and not _fits(feed[spec.name].shape, feed[spec.name].dtype, spec)
        ]
        extra.update(dict.fromkeys(name for name in feed if name not in _names(graph)))
        count += 1
    _raise(problems)
    if not count:
        raise _empty(path)
    return Samples(count, _notes(path, extra), lambda: _json_samples(path, graph))


def _json_samples(path: Path, graph: Graph) -> Iterator[Sample]:
    for index, feed in enumerate(load_inputs(path)):
        feeds = {spec.name: _native(feed[spec.name], spec) for spec in graph.inputs}
        yield Sample(f"{path.name}[{index}]", feeds)


def _open_arrays(path: Path, graph: Graph, batch_size: int) -> Samples:
    arrays = _load(path, graph)
    problems = list(_missing(path.name, graph, arrays))
    cuts = {spec.name: _cut(arrays[spec.name], spec, batch_size) for spec in graph.inputs if spec.name in arrays}
    problems += [
        _misfit(f"{path.name}: array '{name}'", arrays[name], _expected(graph.input(name)))
        for name, cut in cuts.items()
        if cut is None
    ]
    _raise(problems)
    counts = {name: cut.num_samples for name, cut in cuts.items() if cut and cut.num_samples is not None}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{count} of '{name}' {list(arrays[name].shape)}" for name, count in counts.items())
        raise SpecError(
            f"{path.name} holds differing numbers of samples: {found}",
            next_step="stack the samples of every input along a new first axis: numpy.stack(samples)",
        )
    count = next(iter(counts.values()), 1)
    if not count:
        raise _empty(path)
    extra = [name for name in arrays if name not in _names(graph)]
    return Samples(count, _notes(path, dict.fromkeys(extra)), lambda: _array_samples(path, graph, batch_size, count))


def _array_samples(path: Path, graph: Graph, batch_size: int, count: int) -> Iterator[Sample]:
    arrays = _load(path, graph)
    cuts = {spec.name: _cut(arrays[spec.name], spec, batch_size) for spec in graph.inputs}
    for index in range(count):
        feeds = {
            spec.name: _native(cut.part(arrays[spec.name], index), spec)
            for spec in graph.inputs
            if (cut := cuts[spec.name])
        }
        yield Sample(f"{path.name}[{index}]", feeds)


@dataclass(frozen=True, slots=True)
class _Cut:
    """How an array is cut into samples: `step` rows each, one row without its axis (0), or whole (None)."""

    num_samples: int | None
    step: int | None

    def part(self, array: Array, index: int) -> Array:
        if self.step is None:
            return array
        part = array[index] if self.step == 0 else array[index * self.step : (index + 1) * self.step]
        return np.asarray(part)


def _cut(array: Array, spec: TensorSpec, batch_size: int) -> _Cut | None:
    """How `array` holds samples of `spec`; None if it does not."""
    rank = len(spec.shape)
    if array.ndim == rank + 1:
        return _Cut(len(array), 0) if _fits(array.shape[1:], array.dtype, spec) else None
    if array.ndim != rank:
        return None
    if rank == 0:
        return _Cut(None, None) if _fits((), array.dtype, spec) else None
    batch = spec.shape[0]
    step = batch if isinstance(batch, int) else batch_size
    if not _fits((step, *array.shape[1:]), array.dtype, spec) or (isinstance(batch, int) and len(array) % step):
        return None
    return _Cut(-(-len(array) // step), step)


def _load(path: Path, graph: Graph) -> Mapping[str, Array]:
    try:
        if path.suffix == ".npy":
            return _single(path, graph)
        with zipfile.ZipFile(path) as archive:
            unpacked_bytes = sum(member.file_size for member in archive.infolist())
        if unpacked_bytes > MAX_UNPACKED_BYTES:
            raise SpecError(
                f"{path.name} unpacks to {unpacked_bytes >> 20} MiB, more than the {MAX_UNPACKED_BYTES >> 20} MiB "
                "that are read",
                next_step="save fewer samples, or a .npy file, which is read in place",
            )
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except OSError as error:
        raise SpecError(
            f"cannot read {path}: {error.strerror or error}", next_step=f"ls -l {shlex.quote(str(path))}"
        ) from error
    except (ValueError, EOFError, MemoryError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise SpecError(
            f"{path.name} is no {path.suffix} file of plain arrays",
            detail=[" ".join(str(error).split())[:300]],
            next_step="save it with numpy.savez(FILE.npz, INPUT=array), with no Python objects in it",
        ) from error


def _single(path: Path, graph: Graph) -> Mapping[str, Array]:
    if len(graph.inputs) != 1:
        raise SpecError(
            f"{path.name} holds one array, and {graph.source.name} has {len(graph.inputs)} inputs: "
            f"{', '.join(_names(graph))}",
            next_step="save all of them in one file: numpy.savez(FILE.npz, INPUT=array, ...)",
        )
    # Not numpy.load, which takes an archive for what it is, and leaves a damaged one open.
    return {graph.inputs[0].name: np.lib.format.open_memmap(path, mode="r")}


def _native(array: Array, spec: TensorSpec) -> Array:
    """The array in the input's own type, byte order and memory order."""
    dtype = _NARROW.get(spec.dtype)
    contiguous = np.array(array, order="C")
    if dtype is not None:
        return contiguous.view(dtype)
    return contiguous.astype(spec.dtype, copy=False)


def _fits(shape: tuple[int, ...], dtype: np.dtype[Any], spec: TensorSpec) -> bool:
    return (
        _has_type(dtype, spec)
        and len(shape) == len(spec.shape)
        and all(not isinstance(dim, int) or dim == size for dim, size in zip(spec.shape, shape, strict=True))
    )


def _has_type(dtype: np.dtype[Any], spec: TensorSpec) -> bool:
    narrow = _NARROW.get(spec.dtype)
    if narrow is None:
        return dtype.name == spec.dtype
    return dtype == narrow or dtype == np.dtype(f"V{narrow.itemsize}")


def _names(graph: Graph) -> list[str]:
    return [spec.name for spec in graph.inputs]


def _missing(label: str, graph: Graph, given: Mapping[str, Array]) -> Iterator[Problem]:
    extra = [name for name in given if name not in _names(graph)]
    for spec in graph.inputs:
        if spec.name not in given:
            meant = closest(spec.name, extra)
            step = f"rename '{meant}' to '{spec.name}'" if meant else f"add an array named '{spec.name}'"
            yield Problem(f"{label} has no array for the input {spec}", step, exit_code=SpecError.exit_code)


def _misfit(place: str, array: Array, expected: str) -> Problem:
    return Problem(
        f"{place} is {array.dtype.name} {list(array.shape)}, expected {expected}",
        "convert it where it is saved: numpy.asarray(values, dtype).reshape(shape)",
        exit_code=SpecError.exit_code,
    )


def _expected(spec: TensorSpec) -> str:
    return f"{spec}, stacked along a new first axis or along its batch"


def _notes(path: Path, extra: Mapping[str, None]) -> tuple[str, ...]:
    return tuple(f"{path.name}: '{name}' is no input of the model and was left aside" for name in extra)


def _empty(path: Path) -> SpecError:
    return SpecError(
        f"{path.name} holds no samples", next_step="save at least one, or leave the samples out of the spec"
    )


def _raise(problems: list[Problem]) -> None:
    if len(problems) > _MOST_PROBLEMS:
        more = f"and {len(problems) - _MOST_PROBLEMS} more problems in the same file"
        last = problems[_MOST_PROBLEMS - 1]
        problems = [
            *problems[: _MOST_PROBLEMS - 1],
            Problem(last.summary, last.next_step, last.where, (more,), last.exit_code),
        ]
    raise_any(problems)
