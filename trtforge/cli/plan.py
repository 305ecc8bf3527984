"""`trtforge plan`: what a build would do here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtforge.cli.console import JsonOption, ProgressOption, ProgressStyle, StoreOption

if TYPE_CHECKING:
    from trtforge.machine import MachineFacts
    from trtforge.planning import Plan, PlannedUnit
    from trtforge.types import BuildUnit, Shape


def plan(
    spec: Annotated[Path, typer.Argument(help="The build spec.", show_default=False)],
    explain: Annotated[
        bool, typer.Option("--explain", help="Say of each stage whether it is cached, or what changed.")
    ] = False,
    decisions: Annotated[
        bool, typer.Option("--decisions", help="List why each node has its type, from the last lowering.")
    ] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
    progress_style: ProgressOption = ProgressStyle.auto,
) -> None:
    """Show what would be built here, every default spelled out. Runs no builder."""
    from trtforge import planning  # noqa: PLC0415
    from trtforge.cli.console import print_json, progress  # noqa: PLC0415
    from trtforge.run import open_run  # noqa: PLC0415

    with progress(progress_style, as_json=as_json) as report, open_run(spec, store, report) as run:
        made = planning.make_plan(spec, run)
        verdicts = planning.explain(made, run) if explain else {}
        rows = planning.decision_rows(made, run) if decisions else []
    if as_json:
        print_json(_json(made, verdicts) | ({"decisions": rows} if decisions else {}))
    elif decisions:
        _print_decisions(rows)
    else:
        _print(made, verdicts)


def _print_decisions(rows: list[list[str]]) -> None:
    from trtforge.cli.console import say  # noqa: PLC0415

    heads = ["node", "operator", "type", "range seen", "reason"]
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(4)]
    for row in [heads, *rows]:
        say("  ".join([*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[4]]))


def _json(made: Plan, verdicts: Mapping[str, str]) -> dict[str, Any]:
    spec, graph = made.spec_file.spec, asdict(made.graph)
    return {
        "ok": True,
        "exit_code": 0,
        "spec": {"path": made.spec_file.path, "digest": made.spec_file.digest, "values": asdict(spec)},
        "graph": {name: value for name, value in graph.items() if name not in ("path", "weights_dir", "operators")},
        "profiles": [asdict(profile) for profile in made.profiles],
        "engines": [
            _engine_json(planned) | _run_json(planned, made) | _measured_json(planned, made) for planned in made.units
        ],
        "warnings": [problem.summary for problem in made.warnings],
        "output": spec.output,
        **({"stages": dict(verdicts)} if verdicts else {}),
    }


def _engine_json(planned: PlannedUnit) -> dict[str, Any]:
    value = {
        **asdict(planned.unit),
        "key": planned.key.digest,
        "file": f"{planned.unit.identifier}.engine",
        "here": True,
    }
    if planned.missing:
        problem = planned.missing.problem
        value |= {
            "here": False,
            "skipped": planned.missing.skipped,
            "reason": problem.summary,
            "next_step": problem.next_step,
        }
    return value


def _run_json(planned: PlannedUnit, made: Plan) -> dict[str, Any]:
    """Whether a build here runs the engine against onnxruntime, and why not."""
    from trtforge.engine_evidence import not_run  # noqa: PLC0415

    if planned.missing:
        return {"run": False, "not_run": "it is not built here"}
    reason = not_run(planned.unit, made.facts)
    return {"run": reason is None, "not_run": reason.reason if reason else ""}


def _measured_json(planned: PlannedUnit, made: Plan) -> dict[str, Any]:
    """Whether a build here measures the engine, and why not."""
    if made.spec_file.spec.performance is None:
        return {"measured": False, "not_measured": "the spec does not ask for it"}
    if planned.missing:
        return {"measured": False, "not_measured": "it is not built here"}
    text = _measuring(planned.unit, made.facts)
    measured = text.startswith("measured on ")
    return {"measured": measured, "not_measured": "" if measured else text.removeprefix("not measured: ")}


def _print(made: Plan, verdicts: Mapping[str, str]) -> None:
    from trtforge.cli.console import say, shown_bytes  # noqa: PLC0415
    from trtforge.errors import shown_path  # noqa: PLC0415

    spec, graph = made.spec_file.spec, made.graph
    say(f"{spec.name}  ({shown_path(made.spec_file.path)}, sha256 {made.spec_file.digest[:12]})")
    size = shown_bytes(graph.weight_bytes)
    source = shown_path(spec.model.onnx) if spec.model.onnx else "the last export of the PyTorch model"
    _row("model", f"{source}, opset {graph.opset}, {graph.num_nodes} nodes, {size} of weights")
    _row("", f"sha256 {graph.digest}")
    for tensor in graph.inputs:
        role = graph.role(tensor.name)
        _row("input", f"{tensor}: {role.kind}, {role.low:g} to {role.high:g}; {role.reason}")
    for tensor in graph.outputs:
        depends = ", length depends on the data" if tensor.name in graph.data_dependent_outputs else ""
        _row("output", f"{tensor}{depends}")
    for profile in made.profiles:
        for name, shapes in profile.shapes.items():
            ranges = ", ".join(f"{point} {_text(getattr(shapes, point))}" for point in ("min", "opt", "max"))
            _row(f"profile {profile.name}", f"{name}: {ranges}")
        for name, values in profile.values.items():
            ranges = ", ".join(f"{point} {list(getattr(values, point))}" for point in ("min", "opt", "max"))
            _row(f"profile {profile.name}", f"{name} values: {ranges}")
    precision = spec.precision
    _row("precision", f"type {precision.type}, quantization {precision.quantization}, tf32 {_word(precision.tf32)}")
    if precision.type == "int8":
        _row(
            "not quantized",
            f"computes in {precision.rest}; kept out by name: {', '.join(precision.keep.rest) or 'none'}",
        )
    _row("keep in FP32", ", ".join(precision.keep.fp32) or "none by name")
    _row("min_share", f"{precision.min_share:g} of the work")
    if (given := spec.calibration) is not None:
        rows = f"first {given.samples} samples" if given.samples else "all samples"
        source = given.callable or shown_path(given.data or given.table or Path())
        _row("calibration", f"{source}, method {given.method}, {rows}, batch {given.batch}, {given.memory_mib} MiB")
    if spec.plugins:
        _row("plugins", ", ".join(shown_path(path) for path in spec.plugins))
    _row(
        "parity",
        f"{spec.parity.samples or 'no samples'}, {spec.parity.random_shapes} drawn sizes, seed {spec.parity.seed}",
    )
    _row("accuracy", f"{spec.accuracy.metric}, max_drop {spec.accuracy.max_drop}" if spec.accuracy else "no metric")
    for name, value in asdict(spec.performance).items() if spec.performance else ():
        shown = shown_path(value) if isinstance(value, Path) else value if isinstance(value, dict) else _word(value)
        _row("performance", f"{name} {shown or 'opt of every profile'}")
    if spec.performance is None:
        _row("performance", "not measured, as the spec does not ask for it")
    for name, value in asdict(spec.builder).items():
        _row("builder", f"{name} {_word(value)}")
    _row("fail_on_warning", ", ".join(spec.fail_on_warning) or "none")
    _row("build_timeout", _word(spec.build_timeout))
    _row("output", shown_path(spec.output))
    for planned in made.units:
        _print_engine(planned, made)
    for stage, verdict in verdicts.items():
        say(f"{stage}: {verdict}")


def _print_engine(planned: PlannedUnit, made: Plan) -> None:
    unit, spec = planned.unit, made.spec_file.spec
    if planned.missing is None:
        _row("engine", f"{unit.identifier}.engine  by {unit.backend} {unit.backend_version}")
        _row("", _running(unit, made.facts))
        if spec.performance:
            _row("", _measuring(unit, made.facts))
    else:
        _row(
            "skipped" if planned.missing.skipped else "not here",
            f"{unit.identifier}: {planned.missing.problem.summary}",
        )
        _row("", f"next: {planned.missing.problem.next_step}")
    own = [f"{name} {_word(value)}" for name, value in unit.settings.items() if value != getattr(spec.builder, name)]
    if own:
        _row("", f"builder {', '.join(own)}")


def _running(unit: BuildUnit, facts: MachineFacts) -> str:
    from trtforge.engine_evidence import not_run  # noqa: PLC0415
    from trtforge.targets import measured_on  # noqa: PLC0415

    gpu, reason = measured_on(unit, facts), not_run(unit, facts)
    if gpu and not reason:
        return f"run against onnxruntime on {gpu.device_name} before it is published"
    return f"not run against onnxruntime: {reason.reason if reason else ''}"


def _measuring(unit: BuildUnit, facts: MachineFacts) -> str:
    from trtforge.performance import not_measured  # noqa: PLC0415
    from trtforge.targets import measured_on  # noqa: PLC0415

    gpu = measured_on(unit, facts)
    return f"measured on {gpu.device_name}" if gpu else f"not measured: {not_measured(unit, facts).reason}"


def _row(label: str, text: str) -> None:
    from trtforge.cli.console import say  # noqa: PLC0415

    say(f"  {label:<16} {text}")


def _text(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "not set" if value is None else str(value)
