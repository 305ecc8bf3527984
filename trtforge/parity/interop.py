"""Inputs and outputs in Polygraphy's files, so that either tool goes on from what the other saved.

    polygraphy run MODEL --onnxrt --load-inputs INPUTS.json --load-outputs OUTPUTS.json

Polygraphy's reader rebuilds arrays without pickle and runs nothing from a file.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from polygraphy.comparator import IterationResult, RunResults
from polygraphy.json import load_json, to_json
from polygraphy.logger import G_LOGGER

from trtforge.errors import Problem, SpecError, StoreError, raise_any
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


def load_inputs(path: Path) -> Iterator[dict[str, Array]]:
    """The feeds in a file or folder that `polygraphy run --save-inputs` or `save_inputs` wrote, in order.

    Raises:
        SpecError: it cannot be read, or holds something else; file and index are named.
    """
    index = 0
    for file in _files(path):
        plain = _read(file)
        for feed in plain if isinstance(plain, list) else [plain]:
            yield _arrays(path, index, feed)
            index += 1


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


def load_outputs(path: Path) -> dict[str, list[dict[str, Array]]]:
    """Runner name -> outputs of each run, from what `polygraphy run --save-outputs` or `save_outputs` wrote.

    Raises:
        SpecError: it cannot be read, or holds something else; file and index are named.
    """
    runners: dict[str, list[dict[str, Array]]] = {}
    for file in _files(path):
        results = _read(file)
        if not isinstance(results, RunResults):
            raise _other(f"{path.name} holds no outputs of runs", "--save-outputs")
        for name, runs in results.items():
            known = runners.setdefault(str(name), [])
            known += [_arrays(path, len(known) + index, dict(run.items())) for index, run in enumerate(runs)]
    return runners


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


def _files(path: Path) -> list[Path]:
    """The file, or those of a folder of runs, whose zero-padded names stand in the order of the runs."""
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.json"))
    if not files:
        raise _other(f"the folder {path.name} holds no .json file", "--save-inputs")
    return files


def _read(file: Path) -> Any:
    try:
        # Polygraphy prints what it raises.
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1):
            return load_json(str(file))
    except OSError as error:
        raise SpecError(f"cannot read {file}: {error.strerror}", next_step=f"ls -l {shlex.quote(str(file))}") from error
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise _other(
            f"{file.name} is no JSON of Polygraphy", "--save-inputs", (reason or type(error).__name__,)
        ) from error


def _arrays(path: Path, index: int, feed: Any) -> dict[str, Array]:
    if not isinstance(feed, Mapping) or not all(isinstance(array, np.ndarray) for array in feed.values()):
        raise _other(f"{path.name}[{index}] is no mapping of names to numpy arrays", "--save-inputs")
    return {str(name): array for name, array in feed.items()}


def _other(summary: str, option: str, detail: tuple[str, ...] = ()) -> SpecError:
    return SpecError(
        summary, detail=detail, next_step=f"write it with: polygraphy run MODEL --onnxrt {option} FILE.json"
    )
