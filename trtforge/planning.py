"""What a build of a spec does on this machine, decided before anything is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trtforge.backends.plugins import plugin_digests
from trtforge.backends.refusals import refusals, warnings
from trtforge.backends.surroundings import Recorded
from trtforge.bundle import MissingTarget
from trtforge.errors import CapabilityError, GraphError, Problem, SeveralErrors, TrtForgeError, raise_any, shown_path
from trtforge.events import Event
from trtforge.keys import TIMING_CACHE, calibrate_key, calibration_input, check_key, lower_key, parity_key, unit_key
from trtforge.machine import MachineFacts, machine_facts
from trtforge.model_source import ingested, source_of, with_traffic_profiles
from trtforge.performance import refuse_wishes
from trtforge.release.manifest import Artifact
from trtforge.run import Run, open_run
from trtforge.shapes.profiles import resolve_profiles
from trtforge.spec.load import SpecFile, load_spec
from trtforge.store import StageKey
from trtforge.targets import capabilities, gpu_reason, is_version, missing_reason, unit_of, version_of
from trtforge.types import BuildUnit, Graph, Profile

if TYPE_CHECKING:
    from trtforge.calibration.table import CalibrationTable
    from trtforge.quality import Exported


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """One engine, with the key of everything that decides it.

    Attributes:
        scales_key: of the scales that TensorRT's own calibrator makes; None where it makes none.
        recorded: choices of an earlier build that this one repeats.
    """

    unit: BuildUnit
    key: StageKey
    missing: MissingTarget | None
    scales_key: StageKey | None = None
    recorded: Recorded | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a build of a spec does on this machine.

    Attributes:
        units: every engine of the spec; those with `missing` are not built here.
        check_key: of the profile check.
        max_opset: the highest that every target reads.
        calibrate_key: of the calibration; None where the spec names no data.
        table: the calibration table that the spec names, if it names one.
        lower_key: of the lowering; None where the graph is built in the types that it has.
        exported: the export of this run; None where the spec names an ONNX file, or nothing may run.
        warnings: what is allowed and worth knowing.
    """

    spec_file: SpecFile
    graph: Graph
    profiles: tuple[Profile, ...]
    units: tuple[PlannedUnit, ...]
    check_key: StageKey
    max_opset: int
    calibrate_key: StageKey | None
    table: CalibrationTable | None
    lower_key: StageKey | None
    exported: Exported | None
    warnings: tuple[Problem, ...]
    facts: MachineFacts


def make_plan(spec_path: Path, run: Run, *, may_export: bool = False, exported_as: Path | None = None) -> Plan:
    """Reads and checks spec and model, and decides what is built here. Runs no builder and no onnxruntime.

    Args:
        spec_path: the spec.
        run: its surroundings.
        may_export: whether Python that the spec names may run; otherwise a PyTorch model is taken from its last export.
        exported_as: the ONNX file that another run has of the spec's model.

    Raises:
        TrtForgeError: all problems of the first stage that has any.
    """
    spec_file = load_spec(spec_path)
    spec = spec_file.spec
    facts, digest_of = machine_facts(), run.memo.digest
    rows = capabilities(spec_file, facts)
    source, exported = (exported_as, None) if exported_as else source_of(spec_file, rows, run, may_export=may_export)
    graph = ingested(spec_file, source, run)
    spec_file = with_traffic_profiles(spec_file, graph, run)
    refused = [problem for index, row in enumerate(rows) for problem in refusals(spec_file, index, graph, row)]
    try:
        profiles = resolve_profiles(spec_file, graph)
    except TrtForgeError as error:
        raise SeveralErrors([*error.problems, *refused]) from None
    raise_any(refused)
    refuse_wishes(spec_file, graph, profiles)
    noted = dict.fromkeys(
        problem for index, row in enumerate(rows) for problem in warnings(spec_file, index, graph, row)
    )
    for problem in noted:
        run.stages.tell(Event("warning", "plan", problem.summary))
    check = check_key(spec_file, graph, profiles, facts)
    max_opset = min(row.max_opset for row in rows)
    calibrated = calibrate_key(spec_file, graph, profiles, check, digest_of)
    lowered = None
    if spec.precision.type in ("fp16", "bf16", "int8") and spec.precision.quantization == "explicit":
        lowered = lower_key(spec_file, check, calibrated, max_opset, digest_of)
    scales_input = calibration_input(spec_file, calibrated, digest_of) if spec.precision.is_implicit else {}
    table = _named_table(spec_file, graph)
    units = _units(spec_file, graph, profiles, lowered, scales_input, facts, run)
    return Plan(
        spec_file,
        graph,
        profiles,
        units,
        check,
        max_opset,
        calibrated,
        table,
        lowered,
        exported,
        tuple(noted),
        facts,
    )


def _units(
    spec_file: SpecFile,
    graph: Graph,
    profiles: tuple[Profile, ...],
    lowered: StageKey | None,
    scales_input: Mapping[str, str],
    facts: MachineFacts,
    run: Run,
) -> tuple[PlannedUnit, ...]:
    """An engine for each GPU of each target.

    Raises:
        CapabilityError: two targets mean the same engine.
    """
    plugins = plugin_digests(spec_file, run.memo.digest).values()
    inputs = {**scales_input, **{f"plugin {number}": digest for number, digest in enumerate(plugins)}}
    units: dict[str, PlannedUnit] = {}
    for index, target in enumerate(spec_file.spec.targets):
        backend_reason = missing_reason(spec_file, index, target, facts)
        for position, gpu in enumerate(target.gpus):
            reason = backend_reason or gpu_reason(spec_file, index, position, facts)
            unit = unit_of(spec_file, target, gpu, version_of(target, facts), graph, profiles)
            skipped = target.when_missing == "skip"
            missing = MissingTarget(unit.identifier, gpu, target.backend, skipped, reason) if reason else None
            if unit.identifier in units:
                raise CapabilityError(
                    f"GPU '{gpu}' stands in two targets that mean the same engine, {unit.identifier}",
                    where=spec_file.where("targets", index, "gpus"),
                    next_step="remove one",
                )
            scales = _scales_key(spec_file, graph, profiles, unit, run)
            own_input = {"calibration": scales.digest} if scales else {}
            key = unit_key(unit, spec_file, lowered, inputs | own_input, facts)
            units[unit.identifier] = PlannedUnit(unit, key, missing, scales)
    return tuple(units.values())


def _scales_key(
    spec_file: SpecFile, graph: Graph, profiles: tuple[Profile, ...], unit: BuildUnit, run: Run
) -> StageKey | None:
    if spec_file.spec.calibration is None or not spec_file.spec.calibration.is_builders:
        return None
    from trtforge.builder_calibration import scales_key  # noqa: PLC0415 - loads numpy

    return scales_key(spec_file, graph, profiles, unit, run.memo.digest)


def _named_table(spec_file: SpecFile, graph: Graph) -> CalibrationTable | None:
    if spec_file.spec.calibration is None or spec_file.spec.calibration.table is None:
        return None
    from trtforge.calibration.named import named_table  # noqa: PLC0415 - loads numpy

    return named_table(spec_file, graph.digest)


def read_model(spec_path: Path, store_path: Path | None) -> tuple[SpecFile, Graph]:
    """A spec and its checked model, with nothing decided about targets. Runs no Python of the spec.

    Raises:
        TrtForgeError: all problems of the first of the two that has any.
    """
    with open_run(spec_path, store_path, lambda _event: None) as run:
        spec_file = load_spec(spec_path)
        rows = capabilities(spec_file, machine_facts())
        source, _ = source_of(spec_file, rows, run, may_export=False)
        return spec_file, ingested(spec_file, source, run)


def explain(plan: Plan, run: Run) -> dict[str, str]:
    """What a build would say of each stage: `cached`, `new`, or `stale` with the settings that changed."""
    verdicts = {stage.name: stage.verdict for stage in run.stages.done}
    verdicts["profile check"] = run.stages.verdict("profile check", plan.check_key)
    if plan.graph.path != plan.graph.source:
        key = parity_key("mended", plan.spec_file, plan.check_key, plan.check_key, run.memo.digest)
        verdicts["parity mended"] = run.stages.verdict("parity mended", key)
    if plan.calibrate_key:
        verdicts["calibrate"] = run.stages.verdict("calibrate", plan.calibrate_key)
    if plan.lower_key:
        verdicts["lower"] = run.stages.verdict("lower", plan.lower_key)
        key = parity_key("lowered", plan.spec_file, plan.check_key, plan.lower_key, run.memo.digest)
        verdicts["parity lowered"] = run.stages.verdict("parity lowered", key)
    for planned in plan.units:
        if not planned.missing and planned.scales_key:
            verdicts["calibrate"] = run.stages.verdict("calibrate", planned.scales_key)
        if not planned.missing:
            verdicts[label_of(planned.unit)] = run.stages.verdict(label_of(planned.unit), planned.key)
    return verdicts


def decision_rows(plan: Plan, run: Run) -> list[list[str]]:
    """Why each node of the lowered graph has its type: node, operator, type, range seen, reason.

    Raises:
        GraphError: the spec lowers nothing, or was not lowered here yet.
    """
    where = plan.spec_file.where("precision")
    if plan.lower_key is None:
        raise GraphError("the graph is built in the types that it has", where=where, next_step="leave out --decisions")
    record = run.stages.store.find(plan.lower_key)
    if record is None:
        text = f"the graph was not lowered to {plan.spec_file.spec.precision.type} here yet, and plan runs no model"
        raise GraphError(text, where=where, next_step=f"trtforge build {shown_path(plan.spec_file.path)}")
    rows: list[list[str]] = record.result["decisions"]
    return rows


def target_of(artifact: Artifact, plan: Plan) -> str | None:
    """Identifier of the planned unit that an engine of an earlier build is; None where it is none of them.

    What this machine does not build may have been built with another version and driver, as far as the target allows.
    """
    targets = (target for target in plan.spec_file.spec.targets for _ in target.gpus)
    driver = {"driver": artifact.built_on.driver} if artifact.built_on else {}
    built_with = {artifact.backend: artifact.backend_version} | driver
    for target, planned in zip(targets, plan.units, strict=True):
        is_elsewhere = planned.missing and is_version(artifact.backend_version, target.version or "")
        key = replace(planned.key, environment=built_with) if is_elsewhere else planned.key
        if artifact.unit_digest in (key.digest, _locked_digest(key, artifact)):
            return planned.unit.identifier
    return None


def _locked_digest(key: StageKey, artifact: Artifact) -> str | None:
    """Of the same unit, built with the tactics that the artifact names."""
    if artifact.timing_cache_digest is None:
        return None
    return replace(key, inputs={**key.inputs, TIMING_CACHE: artifact.timing_cache_digest}).digest


def label_of(unit: BuildUnit) -> str:
    """Name of the stage that builds a unit, for people."""
    return f"build {unit.gpu}"
