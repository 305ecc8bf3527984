"""Output of all verbs: errors, JSON results, and progress for people and machines."""

from __future__ import annotations

import json
import sys
import time
import traceback as python_traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from trtforge.errors import Problem, TrtForgeError, exit_code_of, printable
from trtforge.events import Event, Report

_PLAIN_STEP_SECONDS = 5.0

JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]


StoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store",
        help="Folder of stored results.  [default: $TRTFORGE_STORE, or in the user's cache folder]",
        show_default=False,
    ),
]


class ProgressStyle(str, Enum):
    """How progress is shown on standard error."""

    auto = "auto"
    plain = "plain"
    json = "json"
    none = "none"


ProgressOption = Annotated[
    ProgressStyle,
    typer.Option(
        "--progress",
        help="auto draws on a terminal and prints plain lines elsewhere; json prints an event a line.",
        show_choices=True,
    ),
]


def fail(error: BaseException, *, as_json: bool, traceback: bool) -> int:
    """Reports `error` and returns the exit code it stands for."""
    if traceback:
        python_traceback.print_exception(error)
    if isinstance(error, TrtForgeError):
        problems = error.problems
    else:
        problems = (
            Problem(
                f"this is a bug in trtforge: {type(error).__name__}: {error}",
                "report it with the output of --traceback",
            ),
        )
    code = exit_code_of(problems)
    if as_json:
        print_json({"ok": False, "exit_code": code, "problems": [problem_json(problem) for problem in problems]})
    else:
        print_problems(problems)
    return code


def print_problems(problems: Iterable[Problem], severity: str = "error") -> None:
    """Problems as text on standard error, location first."""
    for problem in problems:
        typer.echo("\n".join(problem.lines(severity)), err=True)


def problem_json(problem: Problem) -> dict[str, Any]:
    """A problem as JSON values."""
    value = asdict(problem)
    if problem.where:
        value["where"]["path"] = str(problem.where.path)
    return value


def print_json(value: dict[str, Any]) -> None:
    """A result for machines: indented JSON on standard output."""
    typer.echo(json.dumps(value, indent=2, default=str))


def say(text: str = "") -> None:
    """A line for people on standard output, with control characters made visible."""
    typer.echo(printable(text))


def shown_bytes(num_bytes: int) -> str:
    """A size for people, in decimal units."""
    size = float(num_bytes)
    for unit in ("B", "KB", "MB"):
        if size < 1000:  # noqa: PLR2004 - decimal units
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


@contextmanager
def progress(style: ProgressStyle, *, as_json: bool) -> Iterator[Report]:
    """A report that shows events on standard error. With a JSON result and no style named, nothing is shown."""
    if style is ProgressStyle.none or (style is ProgressStyle.auto and as_json):
        yield lambda _event: None
    elif style is ProgressStyle.json:
        yield _json_line
    elif style is ProgressStyle.auto and sys.stderr.isatty():
        with _drawn() as report:
            yield report
    else:
        yield _plain_report()


def _json_line(event: Event) -> None:
    typer.echo(json.dumps({name: value for name, value in asdict(event).items() if value not in (None, "")}), err=True)


def _line(event: Event) -> str:
    seconds = f"{event.seconds:6.2f} s" if event.seconds is not None else " " * 8
    return printable(f"  {event.stage:<14} {seconds}  {event.text}".rstrip())


def _plain_report() -> Report:
    last_step = time.monotonic()

    def report(event: Event) -> None:
        nonlocal last_step
        if event.kind == "done":
            typer.echo(_line(event), err=True)
        elif event.kind == "warning":
            typer.echo(printable(f"  warning: {event.stage}: {event.text}"), err=True)
        elif event.kind == "step" and time.monotonic() - last_step > _PLAIN_STEP_SECONDS:
            percent = f" {event.fraction:.0%}" if event.fraction is not None else ""
            typer.echo(printable(f"  {event.stage} ...{percent} {event.text}"), err=True)
            last_step = time.monotonic()

    return report


@contextmanager
def _drawn() -> Iterator[Report]:
    from rich.console import Console  # noqa: PLC0415 - only on a terminal, and not for --help
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def report(event: Event) -> None:
            if event.kind == "started":
                tasks[event.stage] = bars.add_task(printable(event.stage), total=None)
            elif event.kind == "step" and event.stage in tasks:
                words = printable(f"{event.stage}  {event.text}".rstrip())
                if event.fraction is None:
                    bars.update(tasks[event.stage], description=words)
                else:
                    bars.update(tasks[event.stage], description=words, total=1.0, completed=event.fraction)
            elif event.kind == "done":
                if event.stage in tasks:
                    bars.remove_task(tasks.pop(event.stage))
                bars.console.print(Text(_line(event)))
            elif event.kind == "warning":
                bars.console.print(Text(printable(f"  warning: {event.stage}: {event.text}"), style="yellow"))

        yield report
