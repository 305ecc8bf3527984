"""The `trtforge` program: verbs, errors, exit codes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from typing import Annotated

import typer

import trtforge
from trtforge.cli import bench, build, calibrate, doctor, init, lint, parity, plan, profile, store, verify
from trtforge.cli.console import fail
from trtforge.errors import CommandLineError, StoreError, TrtForgeError

# Click's own class, from whichever Click this typer carries
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

_INTERRUPTED = 128 + signal.SIGINT

_VERBS = {
    verb.__name__: verb
    for verb in (
        *(init.init, plan.plan, calibrate.calibrate, parity.parity, build.build, verify.verify, bench.bench),
        *(profile.profile, lint.lint, doctor.doctor),
    )
}


def _version(wanted: bool) -> None:  # noqa: FBT001 - typer's callback signature
    if wanted:
        typer.echo(f"trtforge {trtforge.__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _program(verbs: Iterable[str]) -> typer.Typer:
    program = typer.Typer(
        name="trtforge",
        help="From one YAML build spec to released TensorRT engines, checked at every step.",
        epilog="Exit codes: 2 spec, 3 model, 4 calibration, 5 parity or accuracy, 6 capability, 7 build, 8 file system,"
        " 9 performance, 10 integrity, 11 some targets missing, 12 coverage, 13 lint, 14 regression, 64 usage, 70 a bug."
        " --traceback, anywhere, adds Python's traceback to an error.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    program.callback()(_options)
    for verb in verbs:
        program.command()(_VERBS[verb])
    return program


app = _program(_VERBS)
app.add_typer(store.verbs, name="store")


def _usage_problem(error: Exception, arguments: list[str]) -> TrtForgeError:
    verb = next((word for word in arguments if word in (*_VERBS, "store")), "")
    return CommandLineError(error.format_message(), next_step=f"trtforge {verb} --help".replace("  ", " "))  # type: ignore[attr-defined]


def main(argv: list[str] | None = None) -> None:
    """Runs the program and exits with its code."""
    arguments = sys.argv[1:] if argv is None else argv
    was_interrupted = False

    def interrupt(_signal: int, _frame: object) -> None:
        nonlocal was_interrupted
        was_interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        code = _run(arguments)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - for Python's own flush at exit
        code = 128 + signal.SIGPIPE
    # Python code that is interrupted inside an import or a callback raises all kinds of errors.
    if was_interrupted or code == _INTERRUPTED:
        typer.echo("interrupted; finished stages are kept", err=True)
        code = _INTERRUPTED
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    traceback = "--traceback" in arguments
    as_json = "--json" in arguments
    try:
        words = [word for word in arguments if word != "--traceback"]
        # typer makes the options of every verb that a program has, which takes longer than to parse those of one.
        program = _program(words[:1]) if words and words[0] in _VERBS else app
        return program(words, standalone_mode=False) or 0
    except UsageError as error:
        return fail(_usage_problem(error, arguments), as_json=as_json, traceback=traceback)
    except TrtForgeError as error:
        return fail(error, as_json=as_json, traceback=traceback)
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    except BrokenPipeError:
        raise
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        failed = StoreError(f"{place}{error.strerror or error}", next_step="mend the path or the folder named above")
        return fail(failed, as_json=as_json, traceback=traceback)
    except Exception as error:  # noqa: BLE001 - the last resort: a bug is named as one
        return fail(error, as_json=as_json, traceback=traceback)
