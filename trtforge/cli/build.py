"""`trtforge build`: engines and a manifest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
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
    locked: Annotated[
        bool, typer.Option("--locked", help="Take the tactics of the published engines again; others are an error.")
    ] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
    progress_style: ProgressOption = ProgressStyle.auto,
) -> None:
    """Build the engines of a spec, with a manifest."""
    from trtforge import pipeline  # noqa: PLC0415
    from trtforge.cli.console import print_json, print_problems, progress  # noqa: PLC0415

    with progress(progress_style, as_json=as_json) as report:
        bundle = pipeline.build(spec, output, report, store_path=store, jobs=jobs, locked=locked)
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
        "engine_runs": {name: asdict(found) for name, found in bundle.manifest.engines.items()},
        "performance": asdict(bundle.manifest.performance),
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
    for line in (*_run_lines(bundle), *_figure_lines(bundle)):
        say(line)
    for entry in bundle.missing:
        if entry.skipped:
            say(f"skipped {entry.identifier}: {entry.problem.summary}")
    say(f"{bundle.seconds:.2f} s in all, {bundle.builder_seconds:.2f} s in builders")
    say(f"  next: trtforge verify {shown_path(bundle.manifest_path)}")


def _run_lines(bundle: Bundle) -> Iterator[str]:
    from trtforge.cli.console import shown_bytes  # noqa: PLC0415
    from trtforge.release.manifest import EngineRecord  # noqa: PLC0415

    for name, found in bundle.manifest.engines.items():
        if isinstance(found, EngineRecord):
            types = ", ".join(f"{count} {kind}" for kind, count in found.layer_types.items())
            memory = f"{shown_bytes(found.engine_bytes)} loaded, {shown_bytes(found.run_bytes)} more to run"
            yield f"{name} on {found.gpu}: {found.parity.reason}; layers {types or 'untold'}; {memory}"


def _figure_lines(bundle: Bundle) -> Iterator[str]:
    from trtforge.release.gates import sizes_text  # noqa: PLC0415
    from trtforge.release.manifest import NotRun  # noqa: PLC0415

    asked = bundle.manifest.performance
    for name, figures in () if isinstance(asked, NotRun) else asked.engines.items():
        if isinstance(figures, NotRun):
            yield f"{name} was not measured: {figures.reason}"
            continue
        for point in figures.points:
            latency = point.latency_ms
            yield (
                f"{name} at {sizes_text(point.sizes)}: p50 {latency.p50:.3f}, p99 {latency.p99:.3f} ms, "
                f"{point.throughput_qps:.1f} queries/s on {figures.gpu}"
            )
