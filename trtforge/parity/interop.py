"""Writes inputs and outputs to Polygraphy's files, so that it goes on from what was saved.

    polygraphy run MODEL --onnxrt --load-inputs INPUTS.json --load-outputs OUTPUTS.json

`trtforge.samples.polygraphy_files` reads them.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from polygraphy.comparator import IterationResult, RunResults
from polygraphy.json import to_json

from trtforge.errors import Problem, StoreError, raise_any
from trtforge.files import commit, explained, write_aside

Array = np.ndarray[Any, np.dtype[Any]]


def save_inputs(path: Path, feeds: Iterable[Mapping[str, Array]]) -> None:
    """Writes inputs for `polygraphy run --load-inputs`. The file appears whole or not at all; all feeds are in memory.

    Args:
        path: the file; its name ends in `.json`, as Polygraphy takes any other for a folder.
        feeds: input name -> array, for each run.

    Raises:
        SeveralErrors: of `StoreError` problems, one for each array of a type that numpy's file format loses
            (bfloat16, float8).
        StoreError: the file cannot be written.
    """
    runs = [dict(feed) for feed in feeds]
    raise_any(_unsaved(path, runs))
    _write(path, runs)


def save_outputs(path: Path, runner: str, outputs: Iterable[Mapping[str, Array]]) -> None:
    """Writes one runner's outputs for `polygraphy run --load-outputs`. See `save_inputs`.

    Args:
        path: the file; its name ends in `.json`.
        runner: name of what ran, as Polygraphy shows it.
        outputs: output name -> array, for each run in the order of the inputs.

    Raises:
        SeveralErrors: as for `save_inputs`.
        StoreError: the file cannot be written.
    """
    runs = [dict(run) for run in outputs]
    raise_any(_unsaved(path, runs))
    _write(path, RunResults([(runner, [IterationResult(run, 0.0, runner) for run in runs])]))


def _unsaved(path: Path, runs: list[dict[str, Array]]) -> Iterator[Problem]:
    lost = {(name, array.dtype.name) for run in runs for name, array in run.items() if array.dtype.isbuiltin != 1}
    for name, dtype in sorted(lost):
        yield Problem(
            f"{path.name}: '{name}' is {dtype}, which numpy's file format does not keep",
            f"make '{name}' float32 in the model, with a Cast beside it",
            exit_code=StoreError.exit_code,
        )


def _write(path: Path, value: Any) -> None:
    data = to_json(value).encode()
    with explained(path.parent, len(data), f"ls -ld {shlex.quote(str(path.parent))}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside, _ = write_aside(path.parent, io.BytesIO(data))
        commit(aside, path)
