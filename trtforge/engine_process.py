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
from tempfile import TemporaryFile
from typing import Any, Final

from trtforge.errors import IntegrityError, Problem, SeveralErrors, TrtForgeError, Where, shown_path
from trtforge.events import Event
from trtforge.files import explained, locked
from trtforge.machine import GpuFacts, MachineFacts
from trtforge.release import manifest as released
from trtforge.run import Run
from trtforge.targets import gpu_lock
from trtforge.types import BuildUnit

_PR_SET_PDEATHSIG: Final = 1
"""Source: Linux, prctl(2), include/uapi/linux/prctl.h."""
# The process dies with the build, however that does, and the user's code that it runs with it. Its standard output is
# Python's alone; what native libraries print there goes to standard error.
_BOOT: Final = (
    "import ctypes, os, signal, sys; "
    f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, int(signal.SIGKILL)); "
    "os.getppid() == int(sys.argv.pop(1)) or sys.exit('the build has ended'); "
    "sys.stdout = os.fdopen(os.dup(1), 'w', encoding='utf-8'); os.dup2(2, 1); "
    "from trtforge.cli.app import main; main()"
)
_SECONDS_TO_END: Final = 5.0
_LAST_LINES: Final = 10


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
    """No other build of this user uses the GPU meanwhile."""
    waiting = Event("step", label, f"waiting for {gpu.device_name}, which another build uses")
    with locked(gpu_lock(gpu), on_wait=lambda: run.stages.tell(waiting), next_step="set XDG_CACHE_HOME"):
        yield


def lone_bundle(folder: Path, manifest: released.Manifest, artifact: released.Artifact, engine: Path) -> Path:
    """A bundle of one engine in a new folder. The engine's bytes are compared with the manifest by whoever loads it.

    Returns:
        Its manifest.

    Raises:
        StoreError: `engine` cannot be read, or there is no space for a copy.
        IntegrityError: it is no file of the manifest's size.
    """
    name, next_step = Path(artifact.file).name, f"ls -l {shown_path(engine)}"
    alone = replace(manifest, artifacts=(replace(artifact, file=name),), missing=())
    path = folder / released.MANIFEST_NAME
    with explained(folder.parent, artifact.size_bytes, next_step):
        if not engine.is_file() or engine.stat().st_size != artifact.size_bytes:  # a device would never end
            text = f"{shown_path(engine)} is no file of {artifact.size_bytes} bytes, as its manifest says"
            raise IntegrityError(text, next_step=next_step)
        folder.mkdir()
        shutil.copyfile(engine, folder / name)  # a link would change its times, and have it hashed again
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
        folder: where it runs, removed with all that is in it; Python takes modules from there, so it holds nothing of others.
        key: of the result.
        failure: raised where it gives no answer.
        timeout_seconds: wall seconds, None for no limit.
        on_step: told what happens now.

    Raises:
        SeveralErrors: the problems that it told of instead.
        TrtForgeError: a `failure`: it crashed, or ran too long.
    """
    command = [sys.executable, "-c", _BOOT, str(os.getpid()), *arguments, "--json", "--progress", "json"]
    search_path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)  # noqa: PTH100 - may be no folder
    environment = {**os.environ, "PYTHONPATH": search_path}
    start = time.monotonic()
    try:
        with TemporaryFile() as answer:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=answer, stderr=subprocess.PIPE
            )
            with process, _ended_after(process, timeout_seconds):
                last_lines = _told(process.stderr or (), on_step)
            answer.seek(0)
            found = _object(answer.read())
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # an engine may be large
    if isinstance(wanted := found.get(key), dict):
        return wanted
    if timeout_seconds is not None and time.monotonic() - start >= timeout_seconds:
        text = f"it took longer than {timeout_seconds:g} s, and was ended"
        raise failure(text, next_step="raise build_timeout in the spec")
    if found.get("problems"):
        raise SeveralErrors(_problem(plain) for plain in found["problems"])
    raise failure(
        f"its process ended {_ending(process.returncode)}",
        detail=last_lines,
        next_step="trtforge doctor  # whether TensorRT and CUDA work here",
    )


@contextmanager
def _ended_after(process: subprocess.Popen[bytes], seconds: float | None) -> Iterator[None]:
    """Ends the process after so long, and in any case where the work around it ends with an error."""
    timer = threading.Timer(threading.TIMEOUT_MAX if seconds is None else seconds, _end, [process])
    timer.daemon = True
    timer.start()
    try:
        yield
        process.wait()
    finally:
        timer.cancel()
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupts the process, so that it takes the user's code and its files away, and kills it where it goes on."""
    try:
        process.send_signal(signal.SIGINT)
        process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        pass  # it is in native code
    finally:
        process.kill()


def _told(lines: Iterable[bytes], on_step: Callable[[str], None]) -> list[str]:
    """Passes steps on; the last of the other lines, which libraries print, are given back."""
    rest: deque[str] = deque(maxlen=_LAST_LINES)
    for line in lines:
        text = line.decode(errors="replace").rstrip()
        event = _object(line)
        if event.get("kind") == "step":
            on_step(str(event.get("text", "")))
        elif "kind" not in event:
            rest.append(text)
    return list(rest)


def _object(printed: bytes) -> Mapping[str, Any]:
    """The JSON object that was printed; an empty one if it was anything else."""
    try:
        found = json.loads(printed)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _problem(plain: Mapping[str, Any]) -> Problem:
    place = plain["where"]
    where = Where(Path(place["path"]), place["line"], place["column"]) if place else None
    return Problem(plain["summary"], plain["next_step"], where, tuple(plain["detail"]), plain["exit_code"])


def _ending(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code} and told nothing"
