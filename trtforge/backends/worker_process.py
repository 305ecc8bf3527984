"""The parent side of a build: one fresh interpreter a build, watched until it has answered or died.

A native crash, a kill for lack of memory or a hang of the builder ends that process, never this one.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from trtforge import errors
from trtforge.errors import BuildError, Problem, SeveralErrors, TrtForgeError
from trtforge.types import BuilderMessage

_ROOT: Final = str(Path(__file__).parents[2])
# trtforge itself is found first, whatever else is installed. All other modules are looked for neither there, where there
# may be files of their names, nor in the current folder, where anything may lie.
_BOOT: Final = (
    "import sys; sys.path[:] = [sys.argv[1], *filter(None, sys.path)]; import trtforge; del sys.path[0]; "
    "from trtforge.backends.worker.__main__ import main; main(int(sys.argv[2]))"
)
_READ_BYTES: Final = 1 << 16
_LONGEST_LINE: Final = 16 << 20
_TAIL_BYTES: Final = 8000
_LAST_LINES: Final = 10
_RUNNING: Final[set[int]] = set()
"""Process groups of the builds that run now, in all threads."""


@dataclass(frozen=True, slots=True)
class BuildEvent:
    """Something that happened during a build, for progress displays.

    Attributes:
        kind: `message` is a warning in the builder's log; `phase` is the begin of a part of the
            build; `step` is progress within one.
        text: the log line or the phase's name.
        fraction: how much of the builder's own steps is done, 0 to 1, never falling. Steps differ in length by
            orders of magnitude, so it is no measure of time. 0 before the builder has started.
    """

    kind: Literal["message", "phase", "step"]
    text: str
    fraction: float


class _TooLate(Exception):  # noqa: N818 - never leaves this module
    """The deadline has passed."""


class _NotALine(Exception):  # noqa: N818 - never leaves this module
    """Something else than the worker's lines came through its channel."""


@dataclass(slots=True)
class Transcript:
    """What a worker has said.

    Attributes:
        messages: the builder's log from warning upwards, in order.
        answer: the last line, None while there is none.
        phase: the part of the build that began last.
        fraction: see `BuildEvent`.
        printed: the end of what the native libraries printed past the log.
    """

    messages: list[BuilderMessage] = field(default_factory=list)
    answer: Mapping[str, Any] | None = None
    phase: str = "loading the library"
    fraction: float = 0.0
    printed: bytes = b""

    def last_lines(self) -> list[str]:
        """The last of the log and of what was printed past it."""
        lines = [line for message in self.messages for line in message.text.splitlines()]
        printed = self.printed.decode(errors="replace").splitlines()
        return lines[-_LAST_LINES:] + printed[-_LAST_LINES:]


def run_worker(
    request: Mapping[str, Any],
    said: Transcript,
    *,
    subject: str,
    on_event: Callable[[BuildEvent], None],
    timeout_seconds: float | None,
) -> None:
    """Runs one build in a process of its own and fills `said`, with an `answer` of kind `built` or `no_engine` at the end.

    The process and all it started are gone on return, whichever way it returns (an exception of `on_event` and
    KeyboardInterrupt included). No file is left behind, except the engine that `request` asks for.

    Args:
        request: see `trtforge.backends.engine_build`; `module` names the TensorRT module to load.
        said: a fresh transcript; it holds what was said also when this raises.
        subject: what is built, begins every error's summary.
        on_event: called in this thread, for every event.
        timeout_seconds: wall seconds for the whole build; None for no limit.

    Raises:
        BuildError: the process died, sent something else than its lines, or took longer than `timeout_seconds`.
        TrtForgeError: of the class that the worker named.
    """
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    with _started(request) as (process, events_fd):
        try:
            _listen(process, events_fd, said, on_event, deadline)
        except _TooLate:
            raise BuildError(
                f"{subject}: no engine after {timeout_seconds:g} s, the limit; it was at '{said.phase}'",
                next_step="raise build_timeout, or build with builder.optimization_level: 0",
                detail=said.last_lines(),
            ) from None
        except _NotALine as error:
            raise BuildError(
                f"{subject}: the build process sent something that is none of its lines: {error}",
                next_step="build again; if it comes back, report it to the makers of trtforge",
                detail=said.last_lines(),
            ) from None
        returncode = 0 if said.answer else process.wait()
    if said.answer is None:
        raise _death(subject, returncode, said)
    if said.answer["kind"] == "problems":
        raise _as_error(subject, said.answer["problems"])


def end_workers() -> None:
    """Kills every build of this process; each `run_worker` then ends with an error in its own thread."""
    for group in tuple(_RUNNING):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


@contextlib.contextmanager
def _started(request: Mapping[str, Any]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    read_fd, write_fd = os.pipe()
    try:
        with tempfile.TemporaryFile() as request_file:
            request_file.write(json.dumps({**request, "started": time.monotonic()}).encode())
            request_file.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, _ROOT, str(write_fd)],
                stdin=request_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(write_fd,),
                start_new_session=True,
            )
    except BaseException:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    _RUNNING.add(process.pid)
    try:
        yield process, read_fd
    finally:
        _RUNNING.discard(process.pid)
        # The group outlives its leader while anything that it started runs.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(read_fd)
        if process.stdout:
            process.stdout.close()


def _listen(
    process: subprocess.Popen[bytes],
    events_fd: int,
    said: Transcript,
    on_event: Callable[[BuildEvent], None],
    deadline: float | None,
) -> None:
    """Reads until the worker has answered or closed its end.

    Raises:
        _TooLate: `deadline` (of `time.monotonic`) has passed.
        _NotALine: a line is none of the worker's.
    """
    assert process.stdout is not None  # noqa: S101 - it was opened as a pipe
    printed_fd = process.stdout.fileno()
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(events_fd, selectors.EVENT_READ)
        selector.register(printed_fd, selectors.EVENT_READ)
        while said.answer is None:
            left = None if deadline is None else deadline - time.monotonic()
            ready = selector.select(left) if left is None or left > 0 else []
            if not ready:
                raise _TooLate
            # Printed text first: it says most when the worker has just died.
            for fd in sorted((key.fd for key, _ in ready), key=lambda fd: fd != printed_fd):
                data = os.read(fd, _READ_BYTES)
                if fd == printed_fd:
                    said.printed = (said.printed + data)[-_TAIL_BYTES:]
                    if not data:
                        selector.unregister(printed_fd)
                elif data:
                    *lines, rest = (rest + data).split(b"\n")
                    if len(rest) > _LONGEST_LINE:
                        raise _NotALine(f"a line of more than {_LONGEST_LINE} bytes")
                    for line in lines:
                        _take(line, said, on_event)
                else:
                    return


def _take(line: bytes, said: Transcript, on_event: Callable[[BuildEvent], None]) -> None:
    try:
        value = json.loads(line)
        kind, text = value["kind"], value.get("text", "")
        fraction = float(value.get("fraction", said.fraction))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _NotALine(repr(line[:200])) from None
    if kind == "message":
        said.messages.append(BuilderMessage(value["severity"], text))
        if value["severity"] != "warning":
            return  # an error ends the build, and is told with its cause
    elif kind in ("phase", "step"):
        said.phase, said.fraction = text, fraction
    else:
        said.answer = value
        return
    on_event(BuildEvent(kind, text, fraction))


def _death(subject: str, returncode: int, said: Transcript) -> BuildError:
    if returncode == -signal.SIGKILL:
        summary = "was killed (SIGKILL); most often the system ran out of memory"
        step = "free memory, give the container more, or build fewer engines at once"
    elif returncode < 0:
        summary = f"crashed ({signal.Signals(-returncode).name})"
        step = "build with builder.optimization_level: 0; if that crashes too, report it to NVIDIA with the lines above"
    else:
        summary = f"ended with status {returncode} and without an answer"
        step = "read the lines above; the Python environment may be damaged"
    return BuildError(
        f"{subject}: the build process {summary}; it was at '{said.phase}'", next_step=step, detail=said.last_lines()
    )


def _as_error(subject: str, problems: list[dict[str, Any]]) -> TrtForgeError:
    found: list[Problem] = []
    for problem in problems:
        error_class = getattr(errors, problem["error"])
        summary = f"{subject}: {problem['summary']}"
        one: TrtForgeError = error_class(summary, next_step=problem["next_step"], detail=problem["detail"])
        if len(problems) == 1:
            return one
        found += one.problems
    return SeveralErrors(found)
