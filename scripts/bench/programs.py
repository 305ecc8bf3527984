"""The programs that the benchmarks compare, run as their console scripts run them, and the table they print."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = (sys.executable, "-c")
TRTFORGE = (*PYTHON, "import sys; from trtforge.cli.app import main; sys.exit(main())")
POLYGRAPHY = (*PYTHON, "import sys; from polygraphy.tools import main; sys.exit(main())")


def timed(command: Sequence[str], environment: Mapping[str, str] | None = None) -> float:
    """Wall seconds of a fresh process, from its start to its end.

    Raises:
        SystemExit: it ended with another exit code than 0; what it wrote is told.
    """
    environment = {**os.environ, **(environment or {})}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # installed programs have their bytecode
    start = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    seconds = time.perf_counter() - start
    if result.returncode:
        arguments = " ".join(command[3:])
        raise SystemExit(
            f"error: '{arguments}' ended with exit code {result.returncode}\n{result.stdout}{result.stderr}"
        )
    return seconds


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A Markdown table, first column left and the others right aligned, under a line about the machine."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores\n")
    for row in (header, rule, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print(f"| {' | '.join(cells)} |")
