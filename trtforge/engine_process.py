"""Runs a verb of trtforge on one engine of a build, in a process of its own: an engine is native code, and may crash."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtforge.errors import Problem, SeveralErrors, StoreError, TrtForgeError, Where, shown_path
from trtforge.events import Event
from trtforge.machine import GpuFacts, MachineFacts
from trtforge.release import manifest as released
from trtforge.run import Run
from trtforge.targets import gpu_lock
from trtforge.types import BuildUnit

_LAST_LINES = 10


def reaches_cuda(facts: MachineFacts) -> bool:
    """Whether a library is installed through which engines are run."""
    return bool({"pycuda", "cuda-python"} & set(facts.packages))


def elsewhere(unit: BuildUnit, facts: MachineFacts, command: str) -> released.NotRun:
    """Of an engine whose GPU is not at hand; `command` does there what was not done here."""
    found = ", ".join(gpu.device_name for gpu in facts.gpus) or "no GPU"
    return released.NotRun(
        reason=f"it runs on {unit.gpu}, and the machine that built it has {found}",
        next_step=f"{command}, on a machine with {unit.gpu}",
    )


@contextmanager
def gpu_to_itself(gpu: GpuFacts, label: str, run: Run) -> Iterator[None]:
    """Nothing else of this store builds, measures or runs on the GPU meanwhile."""
    waiting = Event("step", label, f"waiting for {gpu.device_name}, which another build uses")
    with run.stages.store.lock(gpu_lock(gpu), on_wait=lambda: run.stages.tell(waiting)):
        yield


def lone_bundle(folder: Path, manifest: released.Manifest, artifact: released.Artifact, engine: Path) -> Path:
    """A bundle of one engine in a new folder. The engine's bytes are compared with the manifest by whoever loads it.

    Returns:
        Its manifest.

    Raises:
        StoreError: `engine` cannot be copied.
    """
    folder.mkdir()
    name = Path(artifact.file).name
    try:
        shutil.copyfile(engine, folder / name)
    except OSError as error:
        raise StoreError(
            f"{shown_path(engine)} cannot be copied: {error.strerror}", next_step=f"ls -l {shown_path(engine)}"
        ) from error
    alone = replace(manifest, artifacts=(replace(artifact, file=name),), missing=())
    path = folder / released.MANIFEST_NAME
    path.write_text(released.manifest_json(alone), encoding="utf-8")
    return path


def answer_of(
    arguments: Sequence[str],
    folder: Path,
    *,
    key: str,
    failure: type[TrtForgeError],
    timeout_seconds: float | None,
    on_step: Callable[[str], None],
) -> Mapping[str, Any]:
    """What `trtforge ARGUMENTS --json` prints under `key`, whatever the verb's own gates say of it.

    Args:
        arguments: a verb and what it takes, with absolute paths.
        folder: where it runs; Python takes modules from there, so it holds nothing of others.
        key: of the result.
        failure: raised where it gives no answer.
        timeout_seconds: wall seconds, None for no limit.
        on_step: told what happens now.

    Raises:
        SeveralErrors: the problems that it told of instead.
        TrtForgeError: a `failure`: it crashed, or ran too long.
    """
    command = [sys.executable, "-m", "trtforge", *arguments, "--json", "--progress", "json"]
    search_path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)  # noqa: PTH100 - may be no folder
    environment = {**os.environ, "PYTHONPATH": search_path}
    start = time.monotonic()
    with (folder / "answer").open("w+b") as answer:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=answer, stderr=subprocess.PIPE
        )
        with process, _killed_after(process, timeout_seconds):
            last_lines = _told(process.stderr or (), on_step)
        answer.seek(0)
        found = _last_object(answer.read())
    if isinstance(wanted := found.get(key), dict):
        return wanted
    if found.get("problems"):
        raise SeveralErrors(_problem(plain) for plain in found["problems"])
    if timeout_seconds is not None and time.monotonic() - start >= timeout_seconds:
        text = f"it took longer than {timeout_seconds:g} s, and was ended"
        raise failure(text, next_step="raise build_timeout in the spec")
    raise failure(
        f"its process ended {_ending(process.returncode)}",
        detail=last_lines,
        next_step="trtforge doctor  # whether TensorRT and CUDA work here",
    )


@contextmanager
def _killed_after(process: subprocess.Popen[bytes], seconds: float | None) -> Iterator[None]:
    """Ends the process after so long, and in any case where the work around it ends with an error."""
    timer = threading.Timer(threading.TIMEOUT_MAX if seconds is None else seconds, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
        process.wait()
    finally:
        timer.cancel()
        process.kill()


def _told(lines: Iterable[bytes], on_step: Callable[[str], None]) -> list[str]:
    """Passes steps on; the last of the other lines, which libraries print, are given back."""
    rest: deque[str] = deque(maxlen=_LAST_LINES)
    for line in lines:
        text = line.decode(errors="replace").rstrip()
        event = _last_object(line)
        if event.get("kind") == "step":
            on_step(str(event.get("text", "")))
        elif "kind" not in event:
            rest.append(text)
    return list(rest)


def _last_object(printed: bytes) -> Mapping[str, Any]:
    """The JSON object at the end; plugins print into the same stream."""
    text = printed.decode(errors="replace")
    starts = [0, *(place + 1 for place, letter in enumerate(text) if letter == "\n" and text[place + 1 :][:1] == "{")]
    for start in starts:
        try:
            found = json.loads(text[start:])
        except (ValueError, RecursionError):
            continue
        return found if isinstance(found, dict) else {}
    return {}


def _problem(plain: Mapping[str, Any]) -> Problem:
    place = plain["where"]
    where = Where(Path(place["path"]), place["line"], place["column"]) if place else None
    return Problem(plain["summary"], plain["next_step"], where, tuple(plain["detail"]), plain["exit_code"])


def _ending(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code} and told nothing"
