"""What is found out about the model on its way to the builder: profile check, calibration, lowering, parity, accuracy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trtforge.bundle import Evidence
from trtforge.errors import SpecError, shown_path
from trtforge.events import Event
from trtforge.keys import parity_key
from trtforge.model_source import graph_to_plain, unchanged_model
from trtforge.plain import from_plain, to_plain
from trtforge.planning import Plan, make_plan
from trtforge.release.manifest import (
    AccuracyRecord,
    CalibrationRecord,
    ExportRecord,
    LoweringDecision,
    NotRun,
    ParityRecord,
)
from trtforge.run import Run
from trtforge.shapes.points import PointCheck
from trtforge.spec.load import SpecFile
from trtforge.store import Record, StageKey, Store
from trtforge.types import Graph

if TYPE_CHECKING:
    from trtforge.calibrate import Calibrated
    from trtforge.calibration.table import CalibrationTable
    from trtforge.parity.accuracy import AccuracyReport
    from trtforge.parity.report import ParityReport
    from trtforge.precision.lower import Decision
    from trtforge.quality import Exported


def check_profiles(plan: Plan, run: Run) -> tuple[PointCheck, ...]:
    """The model run by onnxruntime at every point of every profile, from the store where that is known."""
    spec_file = plan.spec_file
    index_of = {profile.name: index for index, profile in enumerate(plan.profiles)}
    failures_dir = run.stages.store.root / "failures" / f"{spec_file.spec.name}-inputs"

    def compute() -> tuple[Any, dict[str, Path]]:
        from trtforge.shapes import profile_check  # noqa: PLC0415 - loads onnxruntime

        with unchanged_model(spec_file, plan.graph, run):
            checks = profile_check.check_profiles(
                plan.graph,
                plan.profiles,
                spec_file.spec.inputs,
                failures_dir=failures_dir,
                where=lambda profile, _point: spec_file.where("profiles", index_of[profile]),
                on_point=lambda profile, point: run.stages.tell(Event("step", "profile check", f"{profile}, {point}")),
            )
        return to_plain(tuple[PointCheck, ...], checks), {}

    def describe(plain: Any) -> tuple[str, ...]:
        onnxruntime = plan.facts.packages["onnxruntime"]
        return (f"onnxruntime {onnxruntime} ran {len(plain)} points of {len(plan.profiles)} profiles",)

    record = run.stages.run("profile check", plan.check_key, compute, describe)
    checks: tuple[PointCheck, ...] = from_plain(tuple[PointCheck, ...], record.result)
    for check in checks:
        if not check.finite:
            text = f"outputs at the {check.point} of profile '{check.profile}' hold NaN or infinity in FP32 already"
            run.stages.tell(Event("warning", "profile check", text))
    return checks


def prove(plan: Plan, checks: tuple[PointCheck, ...], run: Run) -> tuple[Graph, Evidence, CalibrationTable | None]:
    """Lowers the graph as the spec asks, and compares every step with the one before it.

    Returns:
        The graph for the builder, what was found, and the scales that the graph has not got (implicit quantization).

    Raises:
        ParityError: a step broke the model, or costs too much accuracy.
    """
    spec_file, exported = plan.spec_file, plan.exported
    records = [parity_record(exported.parity)] if exported else []
    if plan.graph.path != plan.graph.source:
        records.append(_mended_record(plan, run))
    graph: Graph = plan.graph
    decisions: tuple[LoweringDecision, ...] = ()
    calibrated = calibrated_of(plan, run)
    if plan.lower_key:
        graph, decisions = _lowered(plan, plan.lower_key, calibrated, run)
        records.append(_lowered_record(plan, plan.lower_key, graph, run))
    accuracy = _accuracy(plan, graph, run)
    digest, calibration = _calibration_record(calibrated.table) if calibrated else (None, None)
    evidence = Evidence(
        checks,
        _export_record(spec_file, exported),
        decisions,
        tuple(records),
        accuracy,
        digest,
        calibration,
        {},
    )
    return graph, evidence, calibrated.table if calibrated and spec_file.spec.precision.is_implicit else None


def calibration_table(spec_path: Path, run: Run) -> CalibrationTable:
    """The table of a spec's calibration, from the store where model and data are known there.

    Raises:
        SpecError: the spec names no calibration.
        TrtForgeError: what is wrong with spec, model or data.
    """
    plan = make_plan(spec_path, run, may_export=True)
    calibration = plan.spec_file.spec.calibration
    if calibration and calibration.is_builders:
        raise SpecError(
            f"method: {calibration.method} is TensorRT's own calibrator, which runs while an engine is built",
            where=plan.spec_file.where("calibration", "method"),
            next_step=f"trtforge build {shown_path(spec_path)}  # or write method: auto",
        )
    calibrated = calibrated_of(plan, run)
    if calibrated is None:
        raise SpecError(
            "the spec names no calibration data",
            where=plan.spec_file.where(),
            next_step="write calibration: {data: FILE} with an npz, JSONL, parquet or image folder of real inputs",
        )
    return calibrated.table


def with_builder_calibration(evidence: Evidence, plan: Plan, run: Run) -> Evidence:
    """With what TensorRT's own calibrator made while the engines were built."""
    keys = [planned.scales_key for planned in plan.units if planned.scales_key and not planned.missing]
    record = next(filter(None, map(run.stages.store.find, keys)), None)
    if record is None:
        return evidence
    made: CalibrationRecord = from_plain(CalibrationRecord, record.result)
    return replace(evidence, calibration_digest=record.blobs["cache"], calibration=made)


def calibrated_of(plan: Plan, run: Run) -> Calibrated | None:
    """What calibration found: computed, stored, or read from the table that the spec names."""
    calibration = plan.spec_file.spec.calibration
    if calibration is None or calibration.is_builders:
        return None
    from trtforge import calibrate  # noqa: PLC0415 - loads numpy and onnx

    if plan.table is not None:
        return calibrate.of_table(plan.table)
    assert plan.calibrate_key is not None  # noqa: S101 - calibration without a table has data

    def compute() -> tuple[Any, dict[str, Path]]:
        with unchanged_model(plan.spec_file, plan.graph, run):
            found = calibrate.calibrate(plan.spec_file, plan.graph, plan.profiles, run.stages, run.memo.digest)
        return to_plain(calibrate.Calibrated, found), {}

    def describe(plain: Any) -> tuple[str, ...]:
        table = plain["table"]
        return (f"{len(table['tensors'])} tensors, {table['num_samples']} samples", *table["notes"])

    record = run.stages.run("calibrate", plan.calibrate_key, compute, describe)
    calibrated: Calibrated = from_plain(calibrate.Calibrated, record.result)
    return calibrated


def _mended_record(plan: Plan, run: Run) -> ParityRecord:
    def compare() -> ParityReport:
        from trtforge import quality  # noqa: PLC0415 - loads onnxruntime

        return quality.compare_mended(plan.spec_file, plan.graph, plan.profiles, run.stages)

    return _compared("mended", plan, plan.check_key, compare, run)


def _lowered_record(plan: Plan, lower_key: StageKey, lowered: Graph, run: Run) -> ParityRecord:
    def compare() -> ParityReport:
        from trtforge import quality  # noqa: PLC0415 - loads onnxruntime

        folder = run.stages.store.new_folder("emulated")
        return quality.compare_lowered(plan.spec_file, plan.graph, lowered, plan.profiles, folder, run.stages)

    return _compared("lowered", plan, lower_key, compare, run)


def _compared(
    stage: Literal["mended", "lowered"], plan: Plan, before: StageKey, compare: Callable[[], ParityReport], run: Run
) -> ParityRecord:
    """The report of a step, from the store where everything that decides it is known there; ends the run if it broke."""

    def compute() -> tuple[Any, dict[str, Path]]:
        from trtforge.parity.report import ParityReport  # noqa: PLC0415 - loads numpy

        report = compare()
        short = None if report.verdict == "failed" else to_plain(ParityRecord, parity_record(report))
        return {"report": to_plain(ParityReport, report), "short": short}, {}

    key = parity_key(stage, plan.spec_file, plan.check_key, before, run.memo.digest)
    record = run.stages.run(f"parity {stage}", key, compute, lambda plain: (plain["report"]["reason"],))
    if record.result["short"] is None:
        from trtforge.parity.refusal import refuse_broken  # noqa: PLC0415 - loads numpy
        from trtforge.parity.report import ParityReport  # noqa: PLC0415

        refuse_broken(from_plain(ParityReport, record.result["report"]), plan.spec_file)
    short: ParityRecord = from_plain(ParityRecord, record.result["short"])
    return short


def _lowered(
    plan: Plan, key: StageKey, calibrated: Calibrated | None, run: Run
) -> tuple[Graph, tuple[LoweringDecision, ...]]:
    """The graph in the asked type, and the nodes that are not in it."""
    store = run.stages.store

    def compute() -> tuple[Any, dict[str, Path]]:
        from trtforge.lowering import lower_graph  # noqa: PLC0415 - loads onnxruntime

        folder = store.new_folder("lowered")
        lowered = lower_graph(
            plan.spec_file,
            plan.graph,
            plan.profiles,
            folder,
            run.stages,
            max_opset=plan.max_opset,
            calibrated=calibrated,
        )
        asked = plan.spec_file.spec.precision.type
        plain = {
            "graph": graph_to_plain(lowered.graph),
            "kept": [
                {"node": entry.node, "op": entry.op, "dtype": entry.dtype, "reason": entry.reason}
                for entry in lowered.decisions
                if entry.dtype == "float32" or (asked == "int8" and " not INT8: " in entry.reason)
            ],
            "decisions": [_decision_row(entry) for entry in lowered.decisions],
            "notes": list(lowered.notes),
        }
        files = {"graph": lowered.graph.path}
        for file in lowered.graph.external_files:
            files["weights"] = lowered.graph.weights_dir / file.location
        return plain, files

    record = run.stages.run("lower", key, compute, lambda plain: tuple(plain["notes"]))
    return _stored_graph(plan, record, store), tuple(LoweringDecision(**entry) for entry in record.result["kept"])


def lowered_before(plan: Plan, run: Run) -> Graph | None:
    """The graph in the asked type, where the store has it."""
    record = plan.lower_key and run.stages.store.find(plan.lower_key)
    return _stored_graph(plan, record, run.stages.store) if record else None


def _stored_graph(plan: Plan, record: Record, store: Store) -> Graph:
    path, weights_dir = store.blob_path(record.blobs["graph"]), plan.graph.weights_dir
    if "weights" in record.blobs:
        # The model names its weights by their place beside it.
        weights_dir = store.new_folder("lowered")
        (location,) = (file["location"] for file in record.result["graph"]["external_files"])
        (weights_dir / location).hardlink_to(store.blob_path(record.blobs["weights"]))
        path = weights_dir / "lowered.onnx"
        path.hardlink_to(store.blob_path(record.blobs["graph"]))
    places = {"path": str(path), "source": str(plan.graph.source), "weights_dir": str(weights_dir)}
    graph: Graph = from_plain(Graph, record.result["graph"] | places)
    return graph


def _decision_row(decision: Decision) -> list[str]:
    """Node, operator, type, range seen, reason."""
    seen = decision.range
    shown = "" if seen is None else f"{seen.low:.4g} to {seen.high:.4g}"
    return [decision.node, decision.op, decision.dtype, shown, decision.reason]


def _accuracy(plan: Plan, graph: Graph, run: Run) -> AccuracyRecord | NotRun:
    """The gate on the user's metric, run each time: what the metric's code reads is not known."""
    accuracy = plan.spec_file.spec.accuracy
    if accuracy is None:
        return NotRun(reason="the spec names no metric")
    if plan.lower_key is None:
        return NotRun(
            reason="the graph is built in the types that it has; an engine's own metric stands with the engine"
        )
    from trtforge import quality  # noqa: PLC0415 - loads onnxruntime

    start = time.perf_counter()
    run.stages.tell(Event("started", "accuracy"))
    candidate, _ = quality.emulation_of(graph, run.stages.store.new_folder("accuracy"))
    report = quality.check_accuracy(plan.spec_file, plan.graph, candidate, run.stages)
    text = f"{report.reference:.4g} in FP32, {report.candidate:.4g} in {plan.spec_file.spec.precision.type}"
    run.stages.tell(Event("done", "accuracy", text, seconds=time.perf_counter() - start))
    return accuracy_record(plan.spec_file, report, run)


def accuracy_record(spec_file: SpecFile, report: AccuracyReport, run: Run) -> AccuracyRecord:
    """The report on the spec's metric, as a manifest holds it."""
    accuracy = spec_file.spec.accuracy
    assert accuracy is not None  # noqa: S101 - it was judged
    return AccuracyRecord(
        metric=accuracy.metric,
        data_digest=run.memo.digest(accuracy.data),
        num_samples=report.num_samples,
        reference=report.reference,
        candidate=report.candidate,
        drop_at_most=report.drop_at_most,
        confidence=report.confidence,
        allowed=report.allowed,
    )


def parity_record(report: ParityReport) -> ParityRecord:
    """The report in short; one that failed has ended the run."""
    closest: dict[str, tuple[float, str]] = {}
    for point in report.points:
        for output in point.outputs:
            check = output.verdict.closest
            if check and (output.name not in closest or check.excess > closest[output.name][0]):
                closest[output.name] = check.excess, f"{check}, at {point.label}"
    return ParityRecord(
        stage=report.stage,  # type: ignore[arg-type]
        verdict="passed" if report.verdict == "passed" else "not_run",
        reason=report.reason,
        reference=report.reference.name if report.reference else None,
        candidate=report.candidate.name if report.candidate else None,
        num_points=sum(point.not_run is None for point in report.points),
        outputs={name: text for name, (_, text) in closest.items()},
    )


def _export_record(spec_file: SpecFile, exported: Exported | None) -> ExportRecord | None:
    torch = spec_file.spec.model.torch
    if exported is None or torch is None:
        return None
    report = exported.report
    return ExportRecord(
        callable=torch.callable, torch=report.torch_version, exporter=report.exporter, notes=report.notes
    )


def _calibration_record(table: CalibrationTable) -> tuple[str, CalibrationRecord]:
    """Digest of the ranges, and what they come from."""
    from trtforge.calibration.table import tensors_digest  # noqa: PLC0415 - loads numpy

    record = CalibrationRecord(
        method=table.method,
        num_samples=table.num_samples,
        num_tensors=len(table.tensors),
        data_digest=table.data_digest,
        notes=table.notes,
    )
    return tensors_digest(table), record
