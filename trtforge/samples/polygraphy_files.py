"""Reads inputs and outputs from Polygraphy's files, to go on from what it saved. `trtforge.parity.interop` writes them.

Polygraphy's reader rebuilds arrays without pickle and runs nothing from a file.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from polygraphy.comparator import RunResults
from polygraphy.json import load_json
from polygraphy.logger import G_LOGGER

from trtforge.errors import SpecError
from trtforge.samples.source import Row, Source
from trtforge.types import Graph

Array = np.ndarray[Any, np.dtype[Any]]


def open_feeds(path: Path, graph: Graph) -> Source:
    """The feeds in a file or folder of Polygraphy's, one a row. A file is held in memory while it is read.

    Raises:
        SpecError: a folder holds no such file.
    """
    names = {spec.name for spec in graph.inputs}

    def rows() -> Iterator[Row]:
        for index, feed in enumerate(load_inputs(path)):
            feeds = {name: array for name, array in feed.items() if name in names}
            yield Row(f"{path.name}[{index}]", feeds, tuple(name for name in feed if name not in names))

    return Source(path.name, tuple(_files(path)), None, lambda _: rows())


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
