"""What the engines of a build do on their GPU, found before they are published: parity with onnxruntime, and the metric."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtforge.bundle import BuiltUnit
from trtforge.engine_process import answer_of, elsewhere, gpu_to_itself, lone_bundle, reaches_cuda
from trtforge.errors import ParityError, Problem, SeveralErrors, StoreError, TrtForgeError, raise_any
from trtforge.events import Event
from trtforge.evidence import accuracy_record, parity_record
from trtforge.keys import engine_key, judgement_digest
from trtforge.machine import GpuFacts, MachineFacts
from trtforge.plain import from_plain, to_plain
from trtforge.planning import Plan
from trtforge.release.gates import silently_wider
from trtforge.release.manifest import Artifact, EngineRecord, Manifest, NotRun
from trtforge.run import Run
from trtforge.targets import measured_on
from trtforge.types import BuildUnit

_VERIFY = "trtforge verify MANIFEST --spec SPEC"
_NO_LIBRARY = NotRun(
    reason="neither cuda-python nor pycuda is installed on the machine that built it",
    next_step=f"pip install cuda-python, then: {_VERIFY}",
)


def not_run(unit: BuildUnit, facts: MachineFacts) -> NotRun | None:
    """Why an engine is not run on this machine; None if it is."""
    if measured_on(unit, facts) is None:
        return elsewhere(unit, facts, _VERIFY)
    if not reaches_cuda(facts):
        return _NO_LIBRARY
    return None


def run_engines(plan: Plan, draft: Manifest, built: Iterable[BuiltUnit], run: Run) -> dict[str, EngineRecord | NotRun]:
    """Runs the engines of a bundle that is not published yet, through the store.

    Args:
        plan: the build's.
        draft: manifest of the bundle.
        built: its engines, those whose GPU is not here too.
        run: surroundings of the spec.

    Raises:
        SeveralErrors: what is wrong with any engine: `ParityError` for outputs or a metric out of bounds and for a crash,
            `CapabilityError` where it has no memory. Such an engine is run anew by each build.
    """
    records: dict[str, EngineRecord | NotRun] = {}
    problems: list[Problem] = []
    for entry in built:
        unit, name = entry.unit, entry.unit.identifier
        if reason := not_run(unit, plan.facts):
            records[name] = reason
            if reason is _NO_LIBRARY:
                text = f"{name} is published without a run: {reason.reason}; {reason.next_step}"
                run.stages.tell(Event("warning", _label(unit), text))
            continue
        try:
            records[name] = _recorded(entry, plan, draft, run)
        except StoreError:
            raise  # a full disk is not this engine's own
        except TrtForgeError as error:
            problems += error.problems
    raise_any(problems)
    return records


def _recorded(entry: BuiltUnit, plan: Plan, draft: Manifest, run: Run) -> EngineRecord:
    gpu = measured_on(entry.unit, plan.facts)
    assert gpu is not None  # noqa: S101 - there is no reason not to run it
    (artifact,) = (one for one in draft.artifacts if one.identifier == entry.unit.identifier)
    key = engine_key(plan.spec_file, plan.check_key, entry.key, artifact.digest, gpu, plan.facts, run.memo.digest)

    def compute() -> tuple[Any, dict[str, Path]]:
        found = _found(artifact, entry, gpu, plan, draft, run)
        return to_plain(EngineRecord, _record(found, artifact, plan, run)), {}

    def describe(plain: Any) -> tuple[str, ...]:
        types = ", ".join(f"{count} {name}" for name, count in plain["layer_types"].items())
        return plain["parity"]["reason"], f"layers by type: {types or 'not told'}"

    stored = run.stages.run(_label(entry.unit), key, compute, describe)
    record: EngineRecord = from_plain(EngineRecord, stored.result)
    if warning := silently_wider(artifact.precision, record.layer_types):
        run.stages.tell(Event("warning", _label(entry.unit), f"{artifact.identifier}: {warning}"))
    return record


def _found(
    artifact: Artifact, entry: BuiltUnit, gpu: GpuFacts, plan: Plan, draft: Manifest, run: Run
) -> Mapping[str, Any]:
    """What `trtforge verify --spec` tells of the engine, an `EngineProof` without problems."""
    stages, label, name = run.stages, _label(entry.unit), artifact.identifier
    folder = stages.store.new_folder(f"run-{name}")
    arguments = [
        *("verify", str(lone_bundle(folder / "bundle", draft, artifact, entry.engine.path))),
        *("--spec", str(plan.spec_file.path.absolute())),
        *("--exported-as", str(plan.graph.source.absolute())),
        *("--store", str(stages.store.root.absolute())),
        *("--device", str(gpu.index)),
    ]
    if artifact.settings.get("version_compatible"):
        arguments.append("--allow-host-code")  # this run's own engine
    with gpu_to_itself(gpu, label, run):
        stages.tell(Event("step", label, f"running on {gpu.device_name}"))
        try:
            found = answer_of(
                arguments,
                folder,
                key="engine",
                failure=ParityError,
                timeout_seconds=plan.spec_file.spec.build_timeout,
                on_step=lambda text: stages.tell(Event("step", label, text)),
            )
        except TrtForgeError as error:
            raise SeveralErrors(
                replace(problem, summary=f"{name} was not compared with onnxruntime: {problem.summary}")
                for problem in error.problems
            ) from error
    raise_any(from_plain(tuple[Problem, ...], found["problems"]))
    return found


def _record(found: Mapping[str, Any], artifact: Artifact, plan: Plan, run: Run) -> EngineRecord:
    from trtforge.parity.accuracy import AccuracyReport  # noqa: PLC0415 - loads numpy
    from trtforge.parity.report import ParityReport  # noqa: PLC0415

    parity: ParityReport = from_plain(ParityReport, found["parity"])
    facts = parity.candidate.facts if parity.candidate else {}
    accuracy: AccuracyReport | None = from_plain(AccuracyReport | None, found["accuracy"])
    return EngineRecord(
        engine_digest=artifact.digest,
        gpu=facts["gpu"],
        driver=plan.facts.cuda_driver_version,
        tensorrt=facts["tensorrt"],
        cuda=facts["cuda"],
        parity=parity_record(parity),
        accuracy=accuracy_record(plan.spec_file, accuracy, run)
        if accuracy
        else NotRun(reason="the spec names no metric"),
        judged_by=judgement_digest(plan.spec_file, plan.check_key, run.memo.digest),
        **{name: found[name] for name in ("layer_types", "engine_bytes", "run_bytes")},
    )


def _label(unit: BuildUnit) -> str:
    """Name of the stage, for people."""
    return f"parity {unit.gpu}"
