"""Runs `trtforge bench` in a process of its own: an engine is native code, and its crash ends that process alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trtforge.errors import PerformanceError, Problem, SeveralErrors

_LAST_LINES = 10


def figures_of(arguments: Sequence[str], folder: Path, *, timeout_seconds: float | None) -> Mapping[str, Any]:
    """What `trtforge bench ARGUMENTS --json` found, gates not judged.

    Args:
        arguments: with absolute paths.
        folder: where it runs; Python takes modules from there, so it holds nothing of others.
        timeout_seconds: wall seconds, None for no limit.

    Raises:
        TrtForgeError: the problems that it told of.
        PerformanceError: it crashed, or ran too long.
    """
    command = [sys.executable, "-m", "trtforge", "bench", *arguments, "--json"]
    search_path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)  # noqa: PTH100 - may be no folder
    environment = {**os.environ, "PYTHONPATH": search_path}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, timeout=timeout_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        text = f"it took longer than {timeout_seconds:g} s, and was ended"
        raise PerformanceError(text, next_step="raise build_timeout, or name fewer sizes") from None
    answer = _answer(done.stdout)
    if isinstance(answer.get("figures"), dict):
        figures: dict[str, Any] = answer["figures"]
        return figures
    if answer.get("problems"):
        raise SeveralErrors(
            Problem(one["summary"], one["next_step"], None, tuple(one["detail"]), one["exit_code"])
            for one in answer["problems"]
        )
    raise PerformanceError(
        f"the process that measures ended {_ending(done.returncode)}",
        detail=done.stderr.decode(errors="replace").splitlines()[-_LAST_LINES:],
        next_step="leave performance out of the spec, and measure the bundle: trtforge bench MANIFEST",
    )


def _answer(printed: bytes) -> Mapping[str, Any]:
    """The JSON at the end; plugins print into the same stream."""
    text = printed.decode(errors="replace")
    starts = [0, *(place + 1 for place, letter in enumerate(text) if text[place : place + 2] == "\n{")]
    for start in starts:
        try:
            found = json.loads(text[start:])
        except (ValueError, RecursionError):
            continue
        return found if isinstance(found, dict) else {}
    return {}


def _ending(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code} and told nothing"
