"""What `trtforge parity` does: every step compared and none skipped, then the nodes at which a step broke."""

from __future__ import annotations

import glob
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtforge import quality
from trtforge.errors import ParityError, Problem, SpecError
from trtforge.events import Event
from trtforge.evidence import calibrated_of
from trtforge.files import explained
from trtforge.graph.ingest import ingest
from trtforge.lowering import lower_graph
from trtforge.parity.bisect import BisectReport, bisect, keep_lines
from trtforge.parity.interop import save_inputs, save_outputs
from trtforge.parity.report import ParityReport, not_run, rejudge
from trtforge.parity.staged import OnnxRunner, ParityInput, compare_stage
from trtforge.parity.subgraph import extract, write
from trtforge.parity.tolerances import Stage
from trtforge.plain import from_plain
from trtforge.planning import Plan
from trtforge.reference import ReferenceSession
from trtforge.run import Run
from trtforge.spec.load import SpecFile, load_spec
from trtforge.types import Graph

_MOST_FEEDS = 4
_MOST_ROUNDS = 20
_ENGINE_NOT_RUN = "an engine runs on its GPU only"


@dataclass(frozen=True, slots=True)
class _Step:
    """One step that can be taken apart: both graphs, and whether trtforge itself lowered the second."""

    report: ParityReport
    before: Graph
    after: Graph
    is_own_lowering: bool = False


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found.

    Attributes:
        reports: of every step, in order; those that cannot run here are `not_run`.
        nodes: where the step in question parts, if that was asked.
        keep: lines for `precision.keep.fp32` that would mend a lowered graph.
        kept: the report of the lowered graph with these lines, if that was asked; it stands for the lowered one's.
        subgraph: the first node at fault as a model of its own, with its inputs.
        replaced: of `reports`, the one that `kept` stands for.
    """

    reports: tuple[ParityReport, ...]
    nodes: BisectReport | None
    keep: tuple[str, ...]
    kept: ParityReport | None
    subgraph: tuple[Path, Path] | None
    replaced: ParityReport | None = None

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The steps that broke, for the exit code."""
        # Another tool's file has the stage `lowered` too, and no line of ours mends it.
        final = [report for report in self.reports if report is not self.replaced]
        return tuple(
            Problem(
                f"parity broke at '{report.stage}': {report.reason}",
                "read the table above; --per-layer names the nodes",
                exit_code=ParityError.exit_code,
            )
            for report in (*final, *filter(None, [self.kept]))
            if report.verdict == "failed"
        )


def prove(
    plan: Plan, run: Run, *, candidate: Path | None, per_layer: bool, apply_keep: bool, reproduction: Path | None
) -> Proof:
    """Compares every step of a plan with the one before it.

    Args:
        plan: made with the export, where there is one.
        run: its surroundings.
        candidate: an ONNX file of somebody else's to compare with the spec's graph, as if trtforge had lowered it.
        per_layer: whether to name the nodes of the first step that broke, or of the last one if none did.
        apply_keep: whether to lower again with the lines that this suggests, and compare again.
        reproduction: folder for the first node at fault as a model of its own.
    """
    spec_file, graph = plan.spec_file, plan.graph
    reports: list[ParityReport] = [plan.exported.parity] if plan.exported else []
    steps: list[_Step] = []
    mended = quality.compare_mended(spec_file, graph, plan.profiles, run.stages)
    reports.append(mended)
    if mended.verdict != "not_run":
        steps.append(_Step(mended, replace(graph, path=graph.source), graph))
    if plan.lower_key:
        steps.append(_lowered_step(spec_file, plan, run, "lowered"))
        reports.append(steps[-1].report)
    if candidate:
        steps.append(_candidate_step(candidate, plan, run))
        reports.append(steps[-1].report)
    reports.append(not_run("engine", _ENGINE_NOT_RUN))
    broken = [step for step in steps if step.report.verdict == "failed"]
    if not per_layer or not steps:
        return Proof(tuple(reports), None, (), None, None)
    step = (broken or steps[-1:])[0]
    inputs = _telling_inputs(plan, step.report)
    nodes = _nodes(step, inputs, plan, run)
    keep = keep_lines(nodes) if step.is_own_lowering and step.report.verdict == "failed" else ()
    kept = None
    if apply_keep and keep:
        keep, kept = _mended_by_keeping(keep, plan, run)
    written = _reproduced(step, nodes, inputs, reproduction) if reproduction else None
    return Proof(tuple(reports), nodes, keep, kept, written, replaced=step.report if kept else None)


def _mended_by_keeping(keep: tuple[str, ...], plan: Plan, run: Run) -> tuple[tuple[str, ...], ParityReport]:
    """Lowers again with lines to keep, and with those that this brings to light, until it holds or nothing is left."""
    for number in range(_MOST_ROUNDS):
        step = _lowered_step(_with_keep(plan.spec_file, keep), plan, run, f"kept-{number}")
        if step.report.verdict != "failed":
            break
        nodes = _nodes(step, _telling_inputs(plan, step.report), plan, run)
        # Where no node is at fault by itself, roundings of many add up: those furthest outside go first, then all.
        furthest = tuple(glob.escape(difference.node) for difference in nodes.worst)
        more = next((names for names in (keep_lines(nodes), furthest, ("*",)) if set(names) - set(keep)), ())
        if not more:
            break
        keep = tuple(dict.fromkeys((*keep, *more)))
    return keep, step.report


def rejudged(saved: Path, spec_path: Path) -> Proof:
    """The reports of a file that `--report` wrote, judged by the bounds that the spec has now. Nothing is run.

    Raises:
        SpecError: the file is none.
    """
    spec_file = load_spec(spec_path)
    try:
        reports = [from_plain(ParityReport, plain) for plain in json.loads(saved.read_text())]
    except (OSError, ValueError) as error:
        raise SpecError(
            f"{saved} is no saved report: {str(error).splitlines()[0]}",
            next_step=f"trtforge parity {spec_path} --report {saved}",
        ) from None
    judged = [
        rejudge(report, quality.tolerances_of(spec_file, report.stage, list(report.tolerances)))
        if report.tolerances
        else report
        for report in reports
    ]
    return Proof(tuple(judged), None, (), None, None)


def _lowered_step(spec_file: SpecFile, plan: Plan, run: Run, name: str) -> _Step:
    folder = run.stages.store.new_folder(name)
    lowered = lower_graph(
        spec_file,
        plan.graph,
        plan.profiles,
        folder,
        run.stages,
        max_opset=plan.max_opset,
        calibrated=calibrated_of(plan, run),
    )
    report = quality.compare_lowered(spec_file, plan.graph, lowered.graph, plan.profiles, folder, run.stages)
    return _Step(report, plan.graph, quality.emulation_of(lowered.graph, folder)[1], is_own_lowering=True)


def _candidate_step(candidate: Path, plan: Plan, run: Run) -> _Step:
    graph = ingest(candidate, run.stages.store.new_folder("candidate"))
    stage: Stage = "lowered"
    tolerances = quality.tolerances_of(plan.spec_file, stage, [tensor.name for tensor in plan.graph.outputs])
    report = compare_stage(
        OnnxRunner("onnxruntime, FP32", ReferenceSession(plan.graph)),
        OnnxRunner(f"onnxruntime, {candidate.name}", ReferenceSession(graph)),
        quality.lowered_inputs(plan.spec_file, plan.graph, plan.profiles),
        tolerances,
        stage,
        lambda label: run.stages.tell(Event("step", "candidate", label)),
    )
    return _Step(report, plan.graph, graph)


def _telling_inputs(plan: Plan, report: ParityReport) -> dict[str, ParityInput]:
    """The inputs at which a step broke, a few of them; the first few if it did not."""
    broken = {point.label for point in report.points if not point.passed}
    found: dict[str, ParityInput] = {}
    source = quality.lowered_inputs if report.stage == "lowered" else quality.inputs_of
    for given in source(plan.spec_file, plan.graph, plan.profiles):
        if given.label in broken or not broken:
            found.setdefault(given.label, given)
        if len(found) == _MOST_FEEDS:
            break
    return found


def _nodes(step: _Step, inputs: Mapping[str, ParityInput], plan: Plan, run: Run) -> BisectReport:
    def on_progress(done: int, total: int) -> None:
        run.stages.tell(Event("step", "per layer", f"{done} of {total} nodes", fraction=done / max(total, 1)))

    tolerances = quality.tolerances_of(plan.spec_file, step.report.stage, [plan.graph.outputs[0].name])
    return bisect(
        step.before.path,
        step.after.path,
        {label: given.feeds for label, given in inputs.items()},
        tolerance=next(iter(tolerances.values())),
        on_progress=on_progress,
    )


def _with_keep(spec_file: SpecFile, keep: tuple[str, ...]) -> SpecFile:
    precision = spec_file.spec.precision
    more = replace(precision.keep, fp32=(*precision.keep.fp32, *keep))
    # How much may stay FP32 is for the build to judge; here the lines that mend it are looked for.
    kept = replace(precision, keep=more, min_share=0.0)
    return replace(spec_file, spec=replace(spec_file.spec, precision=kept))


def _reproduced(
    step: _Step, nodes: BisectReport, inputs: Mapping[str, ParityInput], folder: Path
) -> tuple[Path, Path] | None:
    culprit = nodes.first
    if culprit is None:
        return None
    label = next((label for label in culprit.feeds if label in inputs), next(iter(inputs)))
    model, feeds = extract(step.before.path, culprit.node, inputs[label].feeds)
    return write(folder, "node", model, feeds)


def save_for_polygraphy(plan: Plan, folder: Path) -> tuple[Path, Path]:
    """Writes the inputs of every point and the reference's outputs, and returns both paths.

    polygraphy run MODEL --onnxrt --load-inputs inputs.json --load-outputs outputs.json

    Raises:
        StoreError: a file cannot be written.
    """
    with explained(folder, 0, f"ls -ld {folder.parent}"):
        folder.mkdir(parents=True, exist_ok=True)
    session = ReferenceSession(plan.graph)
    inputs = [given.feeds for given in quality.inputs_of(plan.spec_file, plan.graph, plan.profiles)]
    inputs_path, outputs_path = folder / "inputs.json", folder / "outputs.json"
    save_inputs(inputs_path, inputs)
    save_outputs(outputs_path, "trtforge", (session.run(feeds) for feeds in inputs))
    return inputs_path, outputs_path


def changes_of(proof: Proof) -> dict[str, Any]:
    """What a person may want as JSON: verdicts, nodes at fault, lines to keep."""
    return {
        "steps": [
            {"stage": report.stage, "verdict": report.verdict, "reason": report.reason} for report in proof.reports
        ],
        "nodes": [culprit.node for culprit in proof.nodes.culprits] if proof.nodes else None,
        "keep": list(proof.keep),
        "kept": proof.kept.verdict if proof.kept else None,
        "subgraph": [str(path) for path in proof.subgraph] if proof.subgraph else None,
    }
