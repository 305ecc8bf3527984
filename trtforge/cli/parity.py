"""`trtforge parity`: where a model changed on its way to the builder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from trtforge.cli.console import JsonOption, ProgressOption, ProgressStyle, StoreOption


def parity(
    spec: Annotated[Path, typer.Argument(help="The build spec.", show_default=False)],
    per_layer: Annotated[
        bool, typer.Option("--per-layer", help="Name the nodes at which the first broken step parts.")
    ] = False,
    apply_keep: Annotated[
        bool, typer.Option("--apply-keep", help="Lower again with the keep lines that --per-layer suggests.")
    ] = False,
    candidate: Annotated[
        Path | None, typer.Option(help="An ONNX file of another tool's to compare with the spec's.", show_default=False)
    ] = None,
    reproduction: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the first node at fault, as --per-layer names it, and its inputs.", show_default=False
        ),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Save all figures here as JSON.", show_default=False)] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Folder for all inputs and reference outputs, for polygraphy run.", show_default=False),
    ] = None,
    rejudge: Annotated[
        Path | None,
        typer.Option(help="Judge a saved report by the spec's bounds; nothing runs.", show_default=False),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
    progress_style: ProgressOption = ProgressStyle.auto,
) -> None:
    """Compare every step from PyTorch or ONNX to the builder with the step before it."""
    from trtforge import proof  # noqa: PLC0415 - keeps --help quick
    from trtforge.cli.console import print_json, print_problems, progress, say  # noqa: PLC0415
    from trtforge.errors import exit_code_of  # noqa: PLC0415
    from trtforge.files import write_text  # noqa: PLC0415
    from trtforge.parity import bisect  # noqa: PLC0415
    from trtforge.parity.report import lines  # noqa: PLC0415
    from trtforge.plain import to_plain  # noqa: PLC0415
    from trtforge.planning import make_plan  # noqa: PLC0415
    from trtforge.run import open_run  # noqa: PLC0415

    saved = None
    if rejudge:
        found = proof.rejudged(rejudge, spec)
    else:
        with progress(progress_style, as_json=as_json) as told, open_run(spec, store, told) as run:
            plan = make_plan(spec, run, may_export=True)
            saved = proof.save_for_polygraphy(plan, save) if save else None
            found = proof.prove(
                plan,
                run,
                candidate=candidate,
                per_layer=per_layer or apply_keep or reproduction is not None,
                apply_keep=apply_keep,
                reproduction=reproduction,
            )
    if report:
        write_text(report, json.dumps([to_plain(type(one), one) for one in found.reports], indent=1))
    code = exit_code_of(found.problems) if found.problems else 0
    if as_json:
        print_json({"ok": code == 0, "exit_code": code, **proof.changes_of(found)})
        raise typer.Exit(code)
    for one in found.reports:
        for line in lines(one):
            say(line)
    if found.nodes is None and (per_layer or apply_keep or reproduction) and not rejudge:
        say("per layer: no step of this spec changes the graph, so there are no nodes to compare")
    if found.nodes:
        for line in bisect.lines(found.nodes):
            say(line)
    if found.keep:
        say(f"keep lines that would mend it: precision: {{keep: {{fp32: {json.dumps(list(found.keep))}}}}}")
    if found.kept:
        say("with these lines:")
        for line in lines(found.kept):
            say(line)
    if found.subgraph:
        say(f"the first node at fault: polygraphy run {found.subgraph[0]} --onnxrt --load-inputs {found.subgraph[1]}")
    if saved:
        say(f"continue with: polygraphy run MODEL --onnxrt --load-inputs {saved[0]} --load-outputs {saved[1]}")
    print_problems(found.problems)
    raise typer.Exit(code)
