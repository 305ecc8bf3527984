"""The way to INT8 by TensorRT's own calibrator: the user's samples as batches on disk, and what came of them.

TensorRT's calibrator runs inside of the build, so that its scales are a stage's result that a build leaves behind; the
next build with the same key hands them over and calibrates no more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from trtforge.backends.capabilities import capability
from trtforge.backends.surroundings import CalibrationBatches
from trtforge.errors import CalibrationError, CapabilityError, Problem, StoreError, Where
from trtforge.events import Event
from trtforge.files import explained, free_bytes
from trtforge.samples.calibration import CalibrationData, open_calibration
from trtforge.samples.source import Array, Sample, raise_first
from trtforge.spec.load import SpecFile
from trtforge.stages import Stages
from trtforge.store import StageKey
from trtforge.types import BuildUnit, Graph, Profile, Shape

_ALGORITHMS: Final = {"tensorrt_entropy": "EntropyCalibration2", "tensorrt_minmax": "MinMaxCalibration"}
_VERSION: Final = 1
"""Raised where the same inputs start to give other scales."""
_SECONDS_BETWEEN_EVENTS: Final = 0.1
_MORE_ROOM: Final = "name a folder with more room with --store"


@dataclass(frozen=True, slots=True)
class Written:
    """Batches on disk, and what is worth knowing of the samples in them.

    Attributes:
        num_samples: rows in the batches.
        notes: one sentence each.
    """

    batches: CalibrationBatches
    num_samples: int
    data_digest: str
    notes: tuple[str, ...]


def scales_key(
    spec_file: SpecFile, graph: Graph, profiles: tuple[Profile, ...], unit: BuildUnit, digest_of: Callable[[Path], str]
) -> StageKey | None:
    """Of the scales that TensorRT's calibrator makes; None where the spec does not ask for it. Runs no Python of the spec.

    Scales may be used on another GPU, and by no other version.

    Source: TensorRT developer guide, "Calibration Cache" ("INT8 calibration using custom calibration").

    Raises:
        CapabilityError: an input's values decide a tensor's shape.
        SeveralErrors, CalibrationError: the data cannot be opened.
    """
    calibration = spec_file.spec.calibration
    if calibration is None or calibration.method not in _ALGORITHMS:
        return None
    for role in graph.roles:
        if role.kind == "shape_values":
            raise CapabilityError(
                f"the values of '{role.name}' decide a tensor's shape, and TensorRT's own calibrator is not fed such values",
                where=spec_file.where("calibration", "method"),
                next_step="write method: auto",
            )
    data = open_calibration(spec_file, graph, profiles, digest_of=digest_of)
    shapes = {name: list(shape) for name, shape in _opt_shapes(graph, profiles).items()}
    return StageKey(
        "calibrate in build",
        _VERSION,
        {"model": graph.digest, "data": data.digest},
        {"method": calibration.method, "profiles": [{"inputs": shapes}]},
        {unit.backend: unit.backend_version},
    )


def write_batches(
    spec_file: SpecFile,
    graph: Graph,
    profiles: tuple[Profile, ...],
    unit: BuildUnit,
    folder: Path,
    stages: Stages,
    digest_of: Callable[[Path], str],
) -> Written:
    """Reads the spec's samples once and writes them as batches of the first profile's opt shapes. Its Python may run.

    One sample is in memory at a time. Rows that fill no batch are left aside, with a note; nothing is padded.

    Args:
        spec_file: its `calibration` names data or a callable, and TensorRT's calibrator.
        graph: the model in FP32.
        profiles: the first is calibrated at.
        unit: what is built; its version decides the type of an input.
        folder: for the files.
        stages: told what happens.
        digest_of: SHA-256 of a file.

    Raises:
        CalibrationError, SeveralErrors: samples of other sizes, too few for a batch, or that cannot be read.
        StoreError: no space.
    """
    calibration = spec_file.spec.calibration
    assert calibration is not None  # noqa: S101 - the caller looked
    where = spec_file.where("calibration", "callable" if calibration.data is None else "data")
    data = open_calibration(spec_file, graph, profiles, digest_of=digest_of)
    shapes = _opt_shapes(graph, profiles)
    types = capability(unit.backend, unit.backend_version).narrowed_dtypes
    dtypes = {spec.name: types.get(spec.dtype, spec.dtype) for spec in graph.inputs}
    paths = {spec.name: folder / f"{number}.batches" for number, spec in enumerate(graph.inputs)}
    _refuse_no_room(folder, (data.num_samples or 0) * _row_bytes(shapes, dtypes))
    with explained(folder, 0, _MORE_ROOM), ExitStack() as stack:
        files = {name: stack.enter_context(path.open("wb")) for name, path in paths.items()}
        num_rows = _write_rows(_told(data, stages), shapes, dtypes, files, profiles, where)
        batch_bytes = _batch_bytes(files, shapes, num_rows)
    batch_size = _batch_size(shapes) or 1
    num_batches = num_rows // batch_size
    if not num_batches:
        raise CalibrationError(
            f"the calibration data hold {num_rows} samples, expected a batch of {batch_size}, the opt of "
            f"{_profile_text(profiles)}",
            where=where,
            next_step=f"add {batch_size - num_rows} or more samples, or write a smaller opt",
        )
    left = num_rows - num_batches * batch_size
    notes = (f"{left} samples fill no batch of {batch_size}, and were left aside",) if left else ()
    batches = CalibrationBatches(_ALGORITHMS[calibration.method], paths, batch_bytes, batch_size, num_batches)
    return Written(batches, num_rows - left, data.digest, (*data.notes, *notes))


def result_of(written: Written, method: str, cache_path: Path) -> dict[str, Any]:
    """What the manifest says of a calibration, as a stage's result."""
    lines = cache_path.read_text(encoding="utf-8", errors="replace").splitlines()[1:]
    return {
        "method": method,
        "num_samples": written.num_samples,
        "num_tensors": sum(bool(line.strip()) for line in lines),
        "data_digest": written.data_digest,
        "notes": list(written.notes),
    }


def _opt_shapes(graph: Graph, profiles: tuple[Profile, ...]) -> dict[str, Shape]:
    if profiles:
        return {spec.name: profiles[0].shapes[spec.name].opt for spec in graph.inputs}
    return {spec.name: tuple(size for size in spec.shape if isinstance(size, int)) for spec in graph.inputs}


def _batch_size(shapes: Mapping[str, Shape]) -> int | None:
    """The first size that all inputs have, along which rows are taken together; None: a sample is a whole batch."""
    first = {shape[:1] for shape in shapes.values()}
    return next(iter(first))[0] if len(first) == 1 and () not in first else None


def _row_bytes(shapes: Mapping[str, Shape], dtypes: Mapping[str, str]) -> int:
    """Of one sample in all files."""
    sizes = (math.prod(shape) * np.dtype(dtypes[name]).itemsize for name, shape in shapes.items())
    return sum(sizes) // (_batch_size(shapes) or 1)


def _refuse_no_room(folder: Path, needed_bytes: int) -> None:
    free = free_bytes(folder)
    if free < needed_bytes:
        raise StoreError(
            f"{folder} has too little space for the calibration batches: {needed_bytes} bytes needed, {free} bytes free",
            next_step=_MORE_ROOM,
        )


def _batch_bytes(files: Mapping[str, IO[bytes]], shapes: Mapping[str, Shape], num_rows: int) -> dict[str, int]:
    size = _batch_size(shapes) or 1
    return {name: file.tell() // num_rows * size if num_rows else 0 for name, file in files.items()}


def _write_rows(
    samples: Iterator[Sample],
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, str],
    files: Mapping[str, IO[bytes]],
    profiles: tuple[Profile, ...],
    where: Where,
) -> int:
    """Appends the samples' rows to the files, and counts them. Rows one after the other are batches, whatever their size.

    Raises:
        SeveralErrors: samples that have other sizes than `shapes`, or values that their type does not hold.
    """
    num_rows, problems = 0, list[Problem]()
    for sample in samples:
        found = _misfit(sample, shapes, profiles) or _out_of_range(sample, dtypes)
        if found:
            problems.append(found)
        if problems:
            continue
        for name, file in files.items():
            array = sample.feeds[name]
            typed = array if array.dtype.name == dtypes[name] else array.astype(dtypes[name])
            file.write(typed.tobytes())
        num_rows += next(iter(sample.feeds.values())).shape[0] if _batch_size(shapes) else 1
    raise_first([replace(problem, where=where) for problem in problems])
    return num_rows


def _misfit(sample: Sample, shapes: Mapping[str, Shape], profiles: tuple[Profile, ...]) -> Problem | None:
    count = next(iter(sample.feeds.values())).shape[:1]
    for name, opt in shapes.items():
        expected = (*count, *opt[1:]) if _batch_size(shapes) else opt
        if sample.feeds[name].shape != expected:
            return Problem(
                f"{sample.label}: '{name}' is {list(sample.feeds[name].shape)}, and TensorRT calibrates at the opt of "
                f"{_profile_text(profiles)}, {list(opt)}",
                "pad or cut the samples to that size, or put a profile first whose opt they have",
                exit_code=CalibrationError.exit_code,
            )
    return None


def _out_of_range(sample: Sample, dtypes: Mapping[str, str]) -> Problem | None:
    for name, array in sample.feeds.items():
        if dtypes[name] == "int32" and array.dtype == np.int64 and not _fits_int32(array):
            return Problem(
                f"{sample.label}: '{name}' holds values from {array.min()} to {array.max()}, and this TensorRT reads int32",
                "remove the sample, or write values that int32 holds",
                exit_code=CalibrationError.exit_code,
            )
    return None


def _fits_int32(array: Array) -> bool:
    limits = np.iinfo(np.int32)
    return array.size == 0 or bool(limits.min <= array.min() and array.max() <= limits.max)


def _profile_text(profiles: tuple[Profile, ...]) -> str:
    return f"profile '{profiles[0].name}'" if profiles else "the model"


def _told(data: CalibrationData, stages: Stages) -> Iterator[Sample]:
    """The samples, with progress."""
    num_rows, last = 0, 0.0
    for sample in data:
        yield sample
        num_rows += sample.num_rows
        if time.monotonic() - last >= _SECONDS_BETWEEN_EVENTS:
            last = time.monotonic()
            fraction = num_rows / data.num_samples if data.num_samples else None
            stages.tell(
                Event("step", "calibrate", f"{num_rows} samples written for TensorRT's calibrator", fraction=fraction)
            )
