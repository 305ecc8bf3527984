"""Every error a person can meet: one summary, where it is, what was found, and one next step that can be typed.

Each class carries the exit code that the process ends with, so that a script can tell a wrong spec from a failed build.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Where:
    """A place in a file that a person wrote. `line` and `column` count from 1; 0 means the file as a whole."""

    path: Path
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        path = shown_path(self.path)
        return f"{path}:{self.line}:{self.column}" if self.line else path


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        summary: one sentence that names the thing as the user wrote it, with what was found and what was expected.
        next_step: one thing to do about it, preferably a command or a line to type.
        where: the place in the spec or the file concerned, if there is one.
        detail: further lines, such as the builder's own words.
        exit_code: see the subclasses of `TrtForgeError`.
    """

    summary: str
    next_step: str
    where: Where | None = None
    detail: tuple[str, ...] = ()
    exit_code: int = 70

    def lines(self, severity: str = "error") -> list[str]:
        """The problem as plain text, location first, with control characters made visible."""
        head = f"{self.where}: {severity}: " if self.where else f"{severity}: "
        text = [head + self.summary, *(f"  {line}" for line in self.detail), f"  next: {self.next_step}"]
        return [printable(line) for line in text]


class TrtForgeError(Exception):
    """One or more problems that stop the work. `next_step` cannot be left out."""

    exit_code: ClassVar[int] = 70

    def __init__(self, summary: str, *, next_step: str, where: Where | None = None, detail: Iterable[str] = ()) -> None:
        super().__init__(summary)
        self.problems: tuple[Problem, ...] = (Problem(summary, next_step, where, tuple(detail), self.exit_code),)


class SeveralErrors(TrtForgeError):  # noqa: N818 - it is several
    """All problems of one pass, reported together."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        problems = tuple(problems)
        Exception.__init__(self, f"{len(problems)} problems")
        self.problems = problems


class SpecError(TrtForgeError):
    """The build spec is wrong."""

    exit_code = 2


class GraphError(TrtForgeError):
    """The model file cannot be used as it is."""

    exit_code = 3


class CalibrationError(TrtForgeError):
    """Calibration data do not fit the model, or cannot be read."""

    exit_code = 4


class ParityError(TrtForgeError):
    """A graph or an engine does not do what its reference does, or loses too much accuracy."""

    exit_code = 5


class CapabilityError(TrtForgeError):
    """A TensorRT version, a GPU or an installed package cannot do what was asked, or does not fit."""

    exit_code = 6


class BuildError(TrtForgeError):
    """The builder gave no engine."""

    exit_code = 7


class StoreError(TrtForgeError):
    """A file or folder could not be written or read."""

    exit_code = 8


class PerformanceError(TrtForgeError):
    """An engine is slower than the spec or the command line allows."""

    exit_code = 9


class RegressionError(TrtForgeError):
    """An engine is slower than the one before it."""

    exit_code = 14


class IntegrityError(TrtForgeError):
    """A released file is not what its manifest says."""

    exit_code = 10


class LintError(TrtForgeError):
    """A quantized model holds what TensorRT refuses or misreads."""

    exit_code = 13


class CoverageError(TrtForgeError):
    """Optimization profiles cover too few of the requests."""

    exit_code = 12


class CommandLineError(TrtForgeError):
    """The command line is wrong."""

    exit_code = 64


PARTIAL_EXIT_CODE = 11
_PRECEDENCE = (10, 6, 5, 9, 12)


def exit_code_of(problems: Iterable[Problem]) -> int:
    """The process's exit code for `problems`: the first of 10, 6, 5, 9, 12 that occurs, else the first problem's own."""
    codes = [problem.exit_code for problem in problems]
    return next((code for code in _PRECEDENCE if code in codes), codes[0])


def raise_any(problems: Iterable[Problem]) -> None:
    """Raises `SeveralErrors` if there is any problem."""
    problems = tuple(problems)
    if problems:
        raise SeveralErrors(problems)


def shown_path(path: Path) -> str:
    """`path` from the working directory where it lies below it, else whole."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def printable(text: str) -> str:
    """`text` with everything that could move a terminal's cursor or hide text written as an escape, line by line.

    Names in models, specs and manifests come from other people.
    """
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text)


def closest(word: str, known: Iterable[str]) -> str | None:
    """The member of `known` that `word` was most likely meant to be, if any is close."""
    import difflib  # noqa: PLC0415 - only when something is already wrong

    known = list(known)
    by_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None
