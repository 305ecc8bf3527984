"""`trtforge verify`: whether a bundle is what its manifest says, and fits."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trtforge.cli.console import JsonOption


def verify(
    manifest: Annotated[Path, typer.Argument(help="The manifest.json of a bundle.", show_default=False)],
    gpu: Annotated[
        str | None, typer.Option("--for", help="GPU that it is for: sm89, or a model such as L4.", show_default=False)
    ] = None,
    tensorrt: Annotated[
        str | None,
        typer.Option(help="TensorRT that it shall run on: 10.9, or 'tensorrt_rtx 1.7.1'.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a bundle before a release: digests, sizes, headers, versions, GPU. Needs no GPU and loads no engine."""
    from trtforge.cli.console import print_json, say  # noqa: PLC0415
    from trtforge.errors import exit_code_of  # noqa: PLC0415
    from trtforge.machine import machine_facts  # noqa: PLC0415
    from trtforge.release.verify import verify as verify_bundle  # noqa: PLC0415

    report = verify_bundle(manifest, wanted_gpu=gpu, wanted_tensorrt=tensorrt, facts=machine_facts())
    code = exit_code_of(report.problems) if report.problems else 0
    if as_json:
        print_json({"ok": code == 0, "exit_code": code, "checks": [asdict(check) for check in report.checks]})
        raise typer.Exit(code)
    for check in report.checks:
        say(f"{check.verdict.replace('_', ' '):<11} {check.name:<25} {check.text}")
        if check.next_step and check.verdict in ("failed", "warning"):
            say(f"{'':<11} next: {check.next_step}")
    failed = len(report.problems)
    warned = sum(check.verdict == "warning" for check in report.checks)
    warnings = f", {warned} warnings" if warned else ""
    say(
        f"{failed} failed of {len(report.checks)} checks{warnings}"
        if failed
        else f"all {len(report.checks)} checks passed or not due{warnings}"
    )
    raise typer.Exit(code)
