"""The parent side of the user's code: one fresh interpreter, watched through each call until it has answered or died.

The user's code is never imported here. An endless loop, a crash or an `os._exit` in it ends that process, never this one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from trtforge.errors import (
    CapabilityError,
    GraphError,
    SpecError,
    TrtForgeError,
    Where,
    closest,
    shown_path,
)
from trtforge.usercode.child import decoded, encoded, is_number, is_users

CHILD: Final = Path(__file__).with_name("child.py")
# With -c, Python searches the current folder first, where anything may lie; run as a file, the child's own folder.
_BOOT: Final = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; "
    "import runpy; sys.argv[:] = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
_READ_BYTES: Final = 1 << 16
_LONGEST_LINE: Final = 64 << 20
_TAIL_BYTES: Final = 16000
_LAST_LINES: Final = 10
_SECONDS_TO_SAY_WHERE: Final = 2.0
_SECONDS_BETWEEN_LOOKS: Final = 0.2
_DISTRIBUTIONS: Final = {
    "PIL": "Pillow",
    "cv2": "opencv-python-headless",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "PyYAML",
}
"""Import name -> name on the package index, where they differ."""
_STACK_LINE: Final = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')

Returns = Literal["anything", "number"]


@dataclass(frozen=True, slots=True)
class Reference:
    """`file.py:function` or `module:function` as written, and where it leads.

    Attributes:
        file: absolute path of the file; None where a module is named.
        module: dotted name of the module; empty where a file is named.
    """

    text: str
    file: Path | None
    module: str
    function: str
    base_dir: Path


@dataclass(slots=True)
class UserCode:
    """A function of the user's, loaded in a process of its own, that can be called many times.

    Attributes:
        printed: the end of what the code has printed so far.
    """

    reference: Reference
    _process: subprocess.Popen[bytes]
    _requests_fd: int
    _answers_fd: int
    _folder: Path
    _python: str
    _where: Where | None
    _failure: type[TrtForgeError]
    _on_phase: Callable[[str], None]
    printed: bytes = b""
    _phase: str = ""
    _rest: bytes = b""

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked again: always, except after it died or took too long."""
        return self._process.poll() is None

    def ask(self, call: str, payload: Mapping[str, Any], *, timeout_seconds: float | None) -> Any:
        """Calls the function, or the driver's function `call`, and gives what it returns.

        Args:
            call: `call` for `function(**payload)`, else a function of the driver.
            payload: JSON values and numpy arrays, nested as one likes; no pickles are made.
            timeout_seconds: wall seconds, None for no limit.

        Raises:
            TrtForgeError: of the class given to `user_code`; the code raised, returned what cannot be sent, ran too long or
                ended its process.
            CapabilityError: a package that it imports is not installed.
        """
        sent = encoded(dict(payload), self._folder / "request.npz")
        return self._asked({"call": call, "payload": sent}, timeout_seconds)

    def _asked(self, request: Mapping[str, Any], timeout_seconds: float | None) -> Any:
        answer = self._answer(json.dumps(request).encode() + b"\n", timeout_seconds)
        if answer["kind"] != "result":
            raise self._error_of(answer)
        return answer["value"] and decoded(answer["value"], self._folder / "answer.npz")

    def _answer(self, request: bytes, timeout_seconds: float | None) -> Mapping[str, Any]:
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        try:
            with contextlib.suppress(BrokenPipeError):  # it has died: what it printed says why
                _write(self._requests_fd, request, deadline)
            answer = self._listen(deadline)
        except _TooLate:
            raise self._too_late(timeout_seconds or 0) from None
        except _NotALine as error:
            self._end()
            raise self._fail(
                f"sent something into the channel of trtforge: {error}",
                f"write to no file descriptor that {self.reference.text} has not opened",
            ) from None
        if answer is None:
            raise self._death(self._process.wait())
        return answer

    def _listen(self, deadline: float | None) -> Mapping[str, Any] | None:
        """Reads until there is an answer; None where the process has ended without one."""
        printed_fd = self._printed_fd()
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers_fd, selectors.EVENT_READ)
            selector.register(printed_fd, selectors.EVENT_READ)
            while True:
                left = _SECONDS_BETWEEN_LOOKS if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    raise _TooLate
                has_ended = self._process.poll() is not None
                ready = [key.fd for key, _ in selector.select(0 if has_ended else min(left, _SECONDS_BETWEEN_LOOKS))]
                if printed_fd in ready and not self._take_printed():
                    selector.unregister(printed_fd)
                if self._answers_fd in ready:
                    data = os.read(self._answers_fd, _READ_BYTES)
                    if answer := self._take(data):
                        return answer
                    if not data:
                        selector.unregister(self._answers_fd)
                if has_ended and not ready:  # not at the end of the channels: processes that it started may hold them
                    return None

    def _printed_fd(self) -> int:
        assert self._process.stdout is not None  # noqa: S101 - it was opened as a pipe
        return self._process.stdout.fileno()

    def _take_printed(self) -> bool:
        data = os.read(self._printed_fd(), _READ_BYTES)
        self.printed = (self.printed + data)[-_TAIL_BYTES:]
        return bool(data)

    def _take(self, data: bytes) -> Mapping[str, Any] | None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            raise _NotALine(f"a line of more than {_LONGEST_LINE} bytes")
        for line in lines:
            try:
                value = json.loads(line)
                kind = value["kind"]
            except (ValueError, TypeError, KeyError):
                raise _NotALine(repr(line[:200])) from None
            if kind != "phase":
                return dict(value)
            self._phase = value["text"]
            self._on_phase(self._phase)
        return None

    def _error_of(self, answer: Mapping[str, Any]) -> TrtForgeError:
        if answer["kind"] == "raised":
            return self._raised(answer)
        if answer["kind"] == "unsendable":
            return self._fail(
                f"returned {answer['message']}, which cannot be passed on",
                f"return numbers, text, numpy arrays, or dicts and lists of them from {self.reference.text}",
            )
        return self._not_there(answer)

    def _raised(self, answer: Mapping[str, Any]) -> TrtForgeError:
        if answer["missing"]:
            return self._missing_package(answer["missing"], _frame_lines(answer["frames"]))
        first, *more = answer["message"].splitlines() or [""]
        summary = f"raised {answer['type']}{': ' * bool(first)}{first}{self._while()}"
        lines = [*more[:_LAST_LINES], *_frame_lines(answer["frames"])]
        if answer["cause"]:
            lines += [f"after {line}" for line in answer["cause"].splitlines()[:1]]
        if not answer["frames"]:
            return self._fail(summary, f"read {self._place()} around its call", lines)
        file, line, *_ = answer["frames"][-1]
        return self._fail(summary, f"look at {shown_path(Path(file))}:{line}", lines)

    def _while(self) -> str:
        return f", while {self._phase}" if self._phase else ""

    def _missing_package(self, name: str, lines: list[str]) -> CapabilityError:
        package = _DISTRIBUTIONS.get(name.partition(".")[0], name.partition(".")[0])
        return CapabilityError(
            f"{self.reference.text} imports '{name}', which {self._python} does not have",
            where=self._where,
            next_step=f"{shlex.quote(self._python)} -m pip install {shlex.quote(package)}",
            detail=lines,
        )

    def _not_there(self, answer: Mapping[str, Any]) -> SpecError:
        reference = self.reference
        if answer["kind"] == "no_module":
            return SpecError(
                f"'{reference.text}': there is no module '{answer['name']}' in {shown_path(reference.base_dir)} "
                "or among the installed packages",
                where=self._where,
                next_step=f"name the file, such as {reference.module.replace('.', '/')}.py:{reference.function}, "
                "or install the package",
            )
        near, names = closest(reference.function, answer["names"]), answer["names"][:_LAST_LINES]
        found = f" is of type {answer['found']}, expected a function" if answer["found"] else " is not in it"
        return SpecError(
            f"'{reference.text}': '{reference.function}'{found}",
            where=self._where,
            next_step=f"write {reference.text.rpartition(':')[0]}:{near}"
            if near
            else f"define {reference.function} in {self._place()}",
            detail=[f"functions there: {', '.join(names)}"] if names else [],
        )

    def _too_late(self, seconds: float) -> TrtForgeError:
        """Asks the process where it is, for the message."""
        self.printed = b""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + _SECONDS_TO_SAY_WHERE
        stack: list[str] = []
        while not stack and time.monotonic() < end:
            with selectors.DefaultSelector() as selector:
                selector.register(self._printed_fd(), selectors.EVENT_READ)
                if selector.select(_SECONDS_BETWEEN_LOOKS):
                    self._take_printed()
            stack = self._stack()
        self._end()
        return self._fail(
            f"gave no answer within {seconds:g} s, the limit{self._while()}",
            "make it faster, or raise the time limit",
            [f"it was at {line}" for line in stack[:1]] + stack[1:],
            with_printed=False,
        )

    def _end(self) -> None:
        """Ends the process, since what it may still say would be taken for the next answer."""
        self._process.kill()
        self._process.wait()

    def _death(self, status: int) -> TrtForgeError:
        if status == -signal.SIGKILL:
            summary = "was killed (SIGKILL); most often the system ran out of memory"
            step = "free memory, give the container more, or use smaller inputs"
        elif status < 0:
            summary = f"crashed ({signal.Signals(-status).name})"
            step = f"look for native code in {self._place()}, at the lines above"
        else:
            summary = f"ended its process with status {status} and without an answer"
            step = f"look for os._exit in {self._place()} and in what it imports, and return instead"
        return self._fail(f"{summary}{self._while()}", step, self._stack())

    def _stack(self) -> list[str]:
        """The user's lines of the stack that faulthandler printed last, innermost first."""
        matches = [_STACK_LINE.match(line) for line in self.printed.decode(errors="replace").splitlines()]
        return [f"{shown_path(Path(m[1]))}:{m[2]} in {m[3]}" for m in matches if m and is_users(m[1])][:_LAST_LINES]

    def _fail(
        self, summary: str, next_step: str, detail: list[str] | tuple[str, ...] = (), *, with_printed: bool = True
    ) -> TrtForgeError:
        printed = self.printed.decode(errors="replace").splitlines() if with_printed else []
        # From there on faulthandler speaks, whose places are told already.
        crash = next((i for i, line in enumerate(printed) if line.startswith("Fatal Python error")), len(printed))
        told = [line for line in printed[:crash] if line.strip()][-_LAST_LINES:]
        return self._failure(
            f"{self.reference.text} {summary}",
            where=self._where,
            next_step=next_step,
            detail=[*detail, *(f"printed: {line}" for line in told)],
        )

    def _place(self) -> str:
        return shown_path(self.reference.file) if self.reference.file else self.reference.module


class _TooLate(Exception):  # noqa: N818 - never leaves this module
    """The deadline has passed."""


class _NotALine(Exception):  # noqa: N818 - never leaves this module
    """Something else than the child's lines came through its channel."""


def run_user_code(
    reference: str,
    base_dir: Path,
    payload: Mapping[str, Any],
    *,
    timeout_seconds: float | None,
    returns: Returns = "anything",
    where: Where | None = None,
    failure: type[TrtForgeError] = GraphError,
    python: str = sys.executable,
) -> Any:
    """Calls the user's function once, as `function(**payload)`, in a process of its own, and gives what it returns.

    Numbers, text, None, numpy arrays, and dicts and lists of them cross in both directions; NaN and infinity do too.

    Args:
        reference: see `parse_reference`.
        base_dir: the folder that the reference is relative to; the process works there.
        payload: argument name -> value.
        timeout_seconds: wall seconds for loading, and again for the call; None for no limit.
        returns: `number` refuses all but one number.
        where: the place in the spec that names the function.
        failure: the class of errors in the function itself.
        python: the interpreter.

    Raises:
        SpecError: the reference leads to no function.
        CapabilityError: a package that the code imports is not installed.
        TrtForgeError: of class `failure`; the code raised, returned the wrong thing, ran too long or ended its process.
    """
    with user_code(
        reference, base_dir, timeout_seconds=timeout_seconds, where=where, failure=failure, python=python
    ) as code:
        value = code.ask("call", payload, timeout_seconds=timeout_seconds)
    if returns == "number" and not is_number(value):
        raise failure(
            f"{reference} returned {_described(value)}, expected one number",
            where=where,
            next_step=f"return a float from {reference}",
        )
    return value


def _described(value: Any) -> str:
    if value is None:
        return "nothing"
    shape = getattr(value, "shape", None)
    return f"an array of shape {shape}" if shape is not None else f"a {type(value).__name__}"


@contextlib.contextmanager
def user_code(
    reference: str,
    base_dir: Path,
    *,
    timeout_seconds: float | None,
    driver: Path | None = None,
    where: Where | None = None,
    failure: type[TrtForgeError] = GraphError,
    python: str = sys.executable,
    on_phase: Callable[[str], None] = lambda _: None,
) -> Iterator[UserCode]:
    """The user's function, loaded in a process of its own, for as long as the body runs.

    The process and all it started are gone on return, whichever way it returns.

    Args:
        reference: see `parse_reference`.
        base_dir: the folder that the reference is relative to; the process works there.
        timeout_seconds: wall seconds for loading, None for no limit.
        driver: a file whose functions are called with the user's function, see `trtforge.usercode.child`.
        where: the place in the spec that names the function.
        failure: the class of errors in the function itself.
        python: the interpreter.
        on_phase: called in this thread with what a driver says it does now.

    Raises:
        SpecError, CapabilityError, TrtForgeError: as `run_user_code`, for what loading meets.
    """
    found = parse_reference(reference, base_dir, where)
    with tempfile.TemporaryDirectory(prefix="trtforge-") as folder, _started(python, found, where) as started:
        code = UserCode(found, *started, Path(folder), python, where, failure, on_phase)
        setup = {
            "file": str(found.file) if found.file else None,
            "module": found.module,
            "function": found.function,
            "paths": [str(path) for path in (found.file and found.file.parent, found.base_dir) if path],
            "folder": folder,
            "driver": str(driver) if driver else None,
        }
        code._asked(setup, timeout_seconds)  # noqa: SLF001 - the class is this module's own
        yield code


def parse_reference(text: str, base_dir: Path, where: Where | None = None) -> Reference:
    """The file or module and the function that `text` names. Nothing is run.

    Args:
        text: `file.py:function`, the file from `base_dir`, or `module:function`.
        base_dir: folder of the spec.
        where: the place in the spec, for messages.

    Raises:
        SpecError: it is of neither form, or there is no such file.
    """
    base_dir = base_dir.absolute()
    place, _, function = text.rpartition(":")
    is_module = bool(place) and all(part.isidentifier() for part in place.split("."))
    if not function.isidentifier() or not (place.endswith(".py") or is_module):
        near = f"{place}.py:{function}" if place and (base_dir / f"{place}.py").is_file() else "exports/bert.py:build"
        raise SpecError(
            f"'{text}' names no function, expected file.py:function or module:function",
            where=where,
            next_step=f"write, for example, {near}",
        )
    if not place.endswith(".py"):
        return Reference(text, None, place, function, base_dir)
    file = base_dir / place
    if not file.is_file():
        raise _no_file(text, place, function, file, where)
    return Reference(text, file, "", function, base_dir)


def _no_file(text: str, place: str, function: str, file: Path, where: Where | None) -> SpecError:
    near = closest(file.stem, [path.stem for path in file.parent.glob("*.py")])
    written = Path(place).with_name(f"{near}.py")
    what = "is no file" if file.exists() else "is not there"
    return SpecError(
        f"'{text}': {shown_path(file)} {what}",
        where=where,
        next_step=f"write {written}:{function}" if near else f"ls {shlex.quote(shown_path(file.parent))}",
    )


@contextlib.contextmanager
def _started(
    python: str, reference: Reference, where: Where | None
) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    their_read, our_write = os.pipe()
    our_read, their_write = os.pipe()
    try:
        process = subprocess.Popen(
            [python, "-c", _BOOT, str(CHILD), str(their_read), str(their_write)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(their_read, their_write),
            cwd=reference.base_dir,
            start_new_session=True,
        )
    except OSError as error:
        os.close(our_read)
        os.close(our_write)
        raise SpecError(
            f"{python} cannot be started in {shown_path(reference.base_dir)}: {error.strerror}",
            where=where,
            next_step=f"ls -l {shlex.quote(python)}",
        ) from error
    finally:
        os.close(their_read)
        os.close(their_write)
    try:
        yield process, our_write, our_read
    finally:
        # The group outlives its leader while anything that it started runs.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(our_read)
        os.close(our_write)
        if process.stdout:
            process.stdout.close()


def _write(descriptor: int, data: bytes, deadline: float | None) -> None:
    """Writes all of `data`, not longer than `deadline` in case nobody reads."""
    os.set_blocking(descriptor, False)
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_WRITE)
        while data:
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            if not selector.select(left):
                raise _TooLate
            data = data[os.write(descriptor, data) :]


def _frame_lines(frames: list[list[Any]]) -> list[str]:
    return [
        f"{shown_path(Path(file))}:{line} in {name}{': ' * bool(text)}{text}"
        for file, line, name, text in reversed(frames)
    ]
