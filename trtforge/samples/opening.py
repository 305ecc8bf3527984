"""Opens a file or folder of samples by what it is, and reads it with every row checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from trtforge.errors import Problem, SpecError, TrtForgeError
from trtforge.samples.arrays import open_arrays
from trtforge.samples.fit import fitted
from trtforge.samples.images import is_image, open_images
from trtforge.samples.polygraphy_files import open_feeds
from trtforge.samples.source import (
    MOST_PROBLEMS,
    Found,
    Notes,
    Row,
    Sample,
    Source,
    batched,
    raise_first,
    rows_at_once,
)
from trtforge.samples.tables import JSONL_ENDINGS, open_jsonl, open_parquet
from trtforge.spec.model import Images
from trtforge.types import Graph

_ENDINGS = ".npz, .npy, .json, .jsonl, .jsonl.gz, .parquet, an image's, .txt (a list of images) or a folder"


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples that fit the model. Iterate as often as needed; each time gives them in order.

    Attributes:
        num_samples: how many, 1 or more.
        notes: what was left aside.
    """

    num_samples: int
    notes: tuple[str, ...]
    read: Callable[[], Iterator[Sample]]

    def __iter__(self) -> Iterator[Sample]:
        return self.read()


def open_samples(path: Path, graph: Graph, *, batch_size: int = 1, images: Images | None = None) -> Samples:
    """Opens the user's samples and checks each by name, element type, rank and fixed sizes, reading all of them once.

    By the end of the file's name:

    `.npz`: one array for each input, of the input's name. With one axis more than the input, its first axis counts
    samples. With as many, its first axis is the batch, cut into samples of the model's fixed batch, or of
    `batch_size` where the batch is open (the last may be shorter). An array without axes, for an input without axes,
    goes with every sample. All are equally many.

    `.npy`: the same for the only input of a model.

    `.json`, or a folder of them: feeds as Polygraphy saves them, one a sample.

    `.jsonl` (also `.jsonl.gz`), `.parquet`: a row is a sample, with a key or column for each input. Numbers with one axis
    less than the input get a batch axis of 1. Then neighbours of equal shapes are taken together, up to the batch.

    An image, a folder of them, or a `.txt` with a path a line: with `images`, see `open_images`. Taken together like rows.

    Names that are no inputs are left aside, with a note. Rows are streamed: memory does not grow with their number, except
    for arrays in Fortran order and Polygraphy's files, which are held whole. Nothing is padded, and nothing unpickled.
    bfloat16 and float8 are taken as numpy saves them, as raw values of their size.

    Raises:
        SeveralErrors: of `SpecError` problems, each with file, array or index, and input.
        SpecError: the data cannot be read, or has another ending.
        CapabilityError: the package that reads it is not installed.
    """
    source = open_source(path, graph, images, batch_size)
    notes, num_rows, taken, num_samples = Notes(), 0, 0, 0

    def counted() -> Iterator[Row]:
        nonlocal num_rows
        for row in read_rows(source, graph, notes):
            num_rows += 1
            yield row

    for sample in batched(counted(), graph, batch_size, Notes()):
        num_samples += 1
        taken += sample.num_rows
    if not num_rows:
        raise SpecError(
            f"{path.name} holds no samples", next_step="save at least one, or leave the samples out of the spec"
        )
    if taken < num_rows:
        raise SpecError(
            f"{path.name}: {num_rows - taken} of {num_rows} samples fill no batch of {rows_at_once(graph, batch_size)}, "
            "which the model fixes",
            next_step="save as many samples of equal shapes as fill whole batches",
        )
    return Samples(
        num_samples, notes.lines, lambda: batched(read_rows(source, graph, Notes()), graph, batch_size, Notes())
    )


def open_source(path: Path, graph: Graph, images: Images | None, batch_size: int) -> Source:
    """The samples in `path`, by the end of its name. See `open_samples`.

    Raises:
        SeveralErrors, SpecError, CapabilityError: as `open_samples`, for what can be told without reading all of it.
    """
    holds_images = path.suffix == ".txt" or is_image(path) or (path.is_dir() and (images or _has_images(path)))
    if holds_images:
        return open_images(path, graph, images, batch_size)
    if images is not None:
        raise SpecError(
            f"images is for image files, and {path.name} holds none",
            next_step="remove images, or name a folder of images",
        )
    if path.suffix in (".npz", ".npy"):
        return open_arrays(path, graph, batch_size)
    if path.name.endswith(JSONL_ENDINGS):
        return open_jsonl(path, graph, batch_size)
    if path.suffix == ".parquet":
        return open_parquet(path, graph, batch_size)
    if path.suffix == ".json" or path.is_dir():
        return open_feeds(path, graph)
    raise SpecError(
        f"samples in {path.name}: found the ending '{path.suffix}', expected {_ENDINGS}",
        next_step="save them with numpy.savez(FILE.npz, INPUT=array)",
    )


def read_rows(
    source: Source,
    graph: Graph,
    notes: Notes,
    *,
    limit: int | None = None,
    look: Callable[[Row], list[Problem]] = lambda _: [],
) -> Iterator[Row]:
    """The first `limit` rows, fitted to the model.

    From the first that is wrong on, none is given; the rest is read for its problems alone, which are raised at the
    end. The user's own code is asked for no more than `MOST_PROBLEMS` of them, as it may never end.

    Raises:
        SeveralErrors: of all that is wrong with the rows.
        TrtForgeError: the data as a whole cannot be read.
    """
    problems: list[Problem] = []
    try:
        for found in islice(source.read(notes), limit):
            row = _checked(found, graph, look)
            if isinstance(row, list):
                problems += row
            elif not problems:
                for name in row.extra:
                    notes.add(f"{source.name}: '{name}' is no input of the model and was left aside")
                yield row
            if source.is_code and len(problems) >= MOST_PROBLEMS:
                break
    except TrtForgeError as error:
        if not problems:
            raise
        problems += error.problems
    raise_first(problems)


def _checked(found: Found, graph: Graph, look: Callable[[Row], list[Problem]]) -> Row | list[Problem]:
    if isinstance(found, Problem):
        return [found]
    row = fitted(found, graph)
    return row if isinstance(row, list) else look(row) or row


def _has_images(folder: Path) -> bool:
    try:
        return any(is_image(file) for file in folder.iterdir())
    except OSError:
        return False  # reading it says why
