"""What the process tells its parent, and the files that it leaves."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

Json = dict[str, Any]
Send = Callable[[Json], None]

LONGEST_TEXT = 8000
SECONDS_BETWEEN_STEPS = 0.1


class Refused(Exception):  # noqa: N818 - it carries an answer, and is caught in one place
    """Ends the build; `answer` becomes the last line."""

    def __init__(self, answer: Json) -> None:
        super().__init__(answer["kind"])
        self.answer = answer


def problem(error: str, summary: str, next_step: str, *detail: str) -> Json:
    """One problem for the parent to raise as the class `error` of `trtforge.errors`."""
    return {"error": error, "summary": summary, "next_step": next_step, "detail": detail}


def refuse_if_any(problems: list[Json]) -> None:
    """Ends the build if there is a problem.

    Raises:
        Refused: with all of them.
    """
    if problems:
        raise Refused({"kind": "problems", "problems": problems})


def sender(fd: int) -> Send:
    """A function that sends one line, whole, from any thread."""
    lock = threading.Lock()

    def send(line: Json) -> None:
        data = memoryview(json.dumps(line).encode() + b"\n")
        with lock:
            while data:
                data = data[os.write(fd, data) :]

    return send


def send_warning(send: Send, text: str) -> None:
    """Sends a warning of trtforge's own, among those of the builder."""
    send({"kind": "message", "severity": "warning", "text": text})


def end(send: Send, answer: Json) -> NoReturn:
    """Sends the last line and ends the process at once, from wherever it is called.

    The library's own clean-up can crash or take seconds, and nothing of it is needed.
    """
    send(answer)
    os._exit(0)


def write_whole(path: Path, data: memoryview, what: str) -> None:
    """Writes a file and forces it to the disk; there is either all of it or what was there before.

    Raises:
        Refused: there is no room or no permission.
    """
    aside = path.with_name(f"{path.name}.part")
    try:
        with aside.open("wb", buffering=0) as file:
            rest = data.cast("B")
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        free = shutil.disk_usage(path.parent).free
        summary = f"{path}: the {what} of {data.nbytes} bytes could not be written: {error.strerror}; {free} bytes free"
        step = f"make room for {data.nbytes} bytes in {path.parent}, or lift its size limit"
        refuse_if_any([problem("StoreError", summary, step)])
