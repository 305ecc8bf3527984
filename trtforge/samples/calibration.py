"""The calibration data of a spec: streamed, checked sample by sample, and known by a digest."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from trtforge.digests import file_digest, value_digest
from trtforge.errors import CalibrationError, Problem, SpecError, TrtForgeError, Where, shown_path
from trtforge.samples.opening import open_source, read_rows
from trtforge.samples.script import POLYGRAPHY_FUNCTION, open_script
from trtforge.samples.source import Notes, Row, Sample, Source, batched, raise_first, rows_at_once
from trtforge.samples.values import ValueChecks, fits_a_profile
from trtforge.spec.load import SpecFile
from trtforge.spec.model import Calibration
from trtforge.types import Graph, Profile

FEW_SAMPLES: Final = 1000
"""Fewer are noted.

Source: NVIDIA, TensorRT Developer Guide, "Post-Training Quantization Using Calibration": about 500 images suffice for
    ImageNet classification; other data are less even.
"""


@dataclass(slots=True)
class CalibrationData:
    """Calibration data that was opened. Iterate as often as needed; each pass reads and checks all of it once more.

    A pass gives samples one at a time up to the first that is wrong, reads on for further problems alone, and raises
    them together at its end; so whoever uses samples as they come throws the result away if the pass raises. Memory does
    not grow with the number of samples, but for 16 bytes each to know it again.

    Attributes:
        digest: SHA-256 of the data's bytes and of all that decides what becomes of them: images, batch, number of samples.
            Names and times of files do not count. Of the user's Python, its file alone.
        num_samples: rows that a pass reads; None where the data does not tell and no pass has ended yet.
        notes: what is odd about the data, one sentence each; whole after a pass.
    """

    digest: str
    num_samples: int | None
    notes: tuple[str, ...]
    _read: Callable[[Notes], Iterator[Sample]]

    def __iter__(self) -> Iterator[Sample]:
        """Samples in order.

        Raises:
            SeveralErrors: of `CalibrationError` problems, at most 20 and a count: all that is wrong with the samples.
            CalibrationError: the data ends early or cannot be read, or the user's Python fails.
            CapabilityError: a package that the user's Python imports is not installed.
        """
        notes = Notes()
        num_rows = 0
        for sample in self._read(notes):
            num_rows += sample.num_rows
            yield sample
        if num_rows < FEW_SAMPLES:
            notes.add(
                f"{num_rows} calibration samples; where they are fewer than {FEW_SAMPLES}, rare values are easily missed"
            )
        self.num_samples, self.notes = num_rows, notes.lines


def open_calibration(
    spec_file: SpecFile,
    graph: Graph,
    profiles: tuple[Profile, ...] = (),
    *,
    digest_of: Callable[[Path], str] = file_digest,
) -> CalibrationData:
    """Opens the data that a spec's `calibration` names. The user's Python is not run before the first sample is asked for.

    Args:
        spec_file: its `calibration` names `data` or `callable`.
        graph: the model that the samples feed.
        profiles: samples outside of all of them are counted in a note.
        digest_of: SHA-256 of a file, remembered or computed; asked only where the data are a single file.

    Raises:
        SeveralErrors, CalibrationError: the data cannot be read, or its headers show that it does not fit.
        SpecError: `callable` leads to no file.
        CapabilityError: the package that reads the data is not installed.
    """
    calibration = spec_file.spec.calibration
    if calibration is None or calibration.table is not None:
        raise ValueError("the spec names no calibration data")
    key = "data" if calibration.data is not None else "callable"
    where = spec_file.where("calibration", key)
    try:
        source = _source(spec_file, calibration, graph, where)
        digest = _digest(source, calibration, digest_of)
    except TrtForgeError as error:
        raise _of_calibration(error, where) from error

    def read(notes: Notes) -> Iterator[Sample]:
        if source.is_code:
            notes.add(f"what {source.name} reads besides its own file is not known, and changes of it are not seen")
        checks = ValueChecks(graph, spec_file.spec.inputs, notes)
        try:
            rows = _enough(
                read_rows(source, graph, notes, limit=calibration.samples, look=checks.of_row),
                source,
                graph,
                calibration,
            )
            num_taken = 0
            for sample in batched(rows, graph, calibration.batch, notes):
                num_taken += 1
                if not fits_a_profile(sample, profiles):
                    notes.add("lies outside of every profile", sample.label, sample.num_rows)
                yield sample
            if not num_taken:
                raise SpecError(
                    f"no neighbours in {source.name} have equal shapes and fill a batch of "
                    f"{rows_at_once(graph, calibration.batch)}, which the model fixes",
                    next_step="give all samples one shape",
                )
        except TrtForgeError as error:
            raise _of_calibration(error, where) from error

    return CalibrationData(digest, _num_samples(source, calibration), (), read)


def _source(spec_file: SpecFile, calibration: Calibration, graph: Graph, where: Where) -> Source:
    if calibration.callable is not None:
        reference, base_dir = calibration.callable, where.path.resolve().parent
    elif calibration.data is not None and calibration.data.suffix == ".py":
        reference, base_dir = f"{calibration.data.name}:{POLYGRAPHY_FUNCTION}", calibration.data.parent
    else:
        assert calibration.data is not None  # noqa: S101 - exactly one of them is given
        return open_source(calibration.data, graph, calibration.images, calibration.batch)
    if calibration.images is not None:
        raise SpecError(
            f"images is for image files, and {reference} makes arrays",
            where=spec_file.where("calibration", "images"),
            next_step=f"remove images, and normalise in {reference}",
        )
    return open_script(reference, base_dir, graph, timeout_seconds=calibration.timeout, where=where)


def _num_samples(source: Source, calibration: Calibration) -> int | None:
    return source.num_rows and min(source.num_rows, calibration.samples or source.num_rows)


def _enough(rows: Iterator[Row], source: Source, graph: Graph, calibration: Calibration) -> Iterator[Row]:
    """The rows; refused at their end where there is none, or not one batch."""
    count, joins = 0, False
    for row in rows:
        count += 1
        joins = joins or row.joins
        yield row
    needed = (rows_at_once(graph, calibration.batch) or 1) if joins else 1
    if count < needed:
        found = f"{source.name} holds {count or 'no'} sample{'s' * (count != 1)}"
        if calibration.samples == count:
            found = f"samples: {count} takes the first {count} of {source.name}"
        asked = "one or more" if needed == 1 else f"the batch of {needed} or more"
        step = f"write batch: {count}" if count and needed == calibration.batch else f"add {needed - count} or more"
        raise SpecError(f"{found}, expected {asked}", next_step=step)


def _digest(source: Source, calibration: Calibration, digest_of: Callable[[Path], str]) -> str:
    files: list[str] = []
    problems: list[Problem] = []
    is_one_row_each = len(source.files) == source.num_rows
    # A memo of thousands of small files costs more than it saves.
    read = digest_of if len(source.files) == 1 else file_digest
    for file in source.files[: calibration.samples] if is_one_row_each else source.files:
        try:
            files.append(read(file))
        except OSError as error:
            summary, step = f"cannot read {shown_path(file)}: {error.strerror}", f"ls -l {shlex.quote(str(file))}"
            problems.append(Problem(summary, step, exit_code=SpecError.exit_code))
    raise_first(problems)
    return value_digest(
        {
            "files": sorted(files),
            "code": source.name.rpartition(":")[2] if files and source.is_code else source.is_code and source.name,
            "images": calibration.images and asdict(calibration.images),
            "batch": calibration.batch,
            "samples": calibration.samples,
        }
    )


def _of_calibration(error: TrtForgeError, where: Where) -> TrtForgeError:
    """The error with the exit code of calibration data, at the place that names them; one with a place is the spec's own."""
    problems = [
        problem
        if problem.where
        else replace(
            problem,
            where=where,
            exit_code=CalibrationError.exit_code if problem.exit_code == SpecError.exit_code else problem.exit_code,
        )
        for problem in error.problems
    ]
    if isinstance(error, SpecError) and problems[0].exit_code == CalibrationError.exit_code:
        first = problems[0]
        return CalibrationError(first.summary, where=where, next_step=first.next_step, detail=first.detail)
    error.problems = tuple(problems)
    return error
