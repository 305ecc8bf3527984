"""`trtforge build`: engines and a manifest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtforge.cli.console import JsonOption, ProgressOption, ProgressStyle, StoreOption
from trtforge.errors import PARTIAL_EXIT_CODE

if TYPE_CHECKING:
    from trtforge.pipeline import Bundle


def build(
    spec: Annotated[Path, typer.Argument(help="The build spec.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for engines and manifest.json, instead of the spec's.", show_default=False),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Engines to build at once.  [default: processors, 4 at most]", min=1, show_default=False),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
    progress_style: ProgressOption = ProgressStyle.auto,
) -> None:
    """Build the engines of a spec, with a manifest."""
    from trtforge import pipeline  # noqa: PLC0415
    from trtforge.cli.console import print_json, print_problems, progress  # noqa: PLC0415

    with progress(progress_style, as_json=as_json) as report:
        bundle = pipeline.build(spec, output, report, store_path=store, jobs=jobs)
    failed = tuple(entry.problem for entry in bundle.missing if not entry.skipped)
    code = PARTIAL_EXIT_CODE if failed else 0
    if as_json:
        print_json(_json(bundle, code))
    else:
        print_problems(dict.fromkeys(failed))
        _print(bundle)
    raise typer.Exit(code)


def _json(bundle: Bundle, code: int) -> dict[str, Any]:
    from trtforge.cli.console import problem_json  # noqa: PLC0415

    return {
        "ok": code == 0,
        "exit_code": code,
        "manifest": bundle.manifest_path,
        "engines": [
            {
                "identifier": artifact.identifier,
                "file": artifact.file,
                "size_bytes": artifact.size_bytes,
                "digest": artifact.digest,
            }
            for artifact in bundle.manifest.artifacts
        ],
        "stages": dict(bundle.verdicts),
        "changed": bundle.is_changed,
        "missing": [
            {"identifier": entry.identifier, "skipped": entry.skipped, **problem_json(entry.problem)}
            for entry in bundle.missing
        ],
        "warnings": [problem.summary for problem in bundle.warnings],
        "seconds": {"total": round(bundle.seconds, 3), "builder": round(bundle.builder_seconds, 3)},
    }


def _print(bundle: Bundle) -> None:
    from trtforge.cli.console import say, shown_bytes  # noqa: PLC0415
    from trtforge.errors import shown_path  # noqa: PLC0415

    for artifact in bundle.manifest.artifacts:
        verdict = bundle.verdicts.get(artifact.identifier, "kept from an earlier build")
        say(f"{artifact.file}  {shown_bytes(artifact.size_bytes)}  sha256 {artifact.digest[:12]}  {verdict}")
    for entry in bundle.missing:
        if entry.skipped:
            say(f"skipped {entry.identifier}: {entry.problem.summary}")
    say(f"{bundle.seconds:.2f} s in all, {bundle.builder_seconds:.2f} s in builders")
    say(f"  next: trtforge verify {shown_path(bundle.manifest_path)}")
