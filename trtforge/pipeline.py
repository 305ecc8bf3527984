"""A build in order: plan, profile check, lowering and parity, engines, their parity and figures, bundle.

Every stage that costs time goes through the store; what it needs is imported when it really runs, so that a rebuild
with nothing changed loads neither onnx nor onnxruntime.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from trtforge.bundle import BuiltUnit, Evidence, MissingTarget, make_manifest, publish_bundle
from trtforge.engine_evidence import run_engines
from trtforge.engines import build_units
from trtforge.errors import Problem, SeveralErrors, shown_path
from trtforge.events import Event, Report
from trtforge.evidence import check_profiles, prove, with_builder_calibration
from trtforge.keys import judgement_digest
from trtforge.locking import locked_plan
from trtforge.model_source import refuse_changed_model
from trtforge.performance import NOT_ASKED, measure, refuse_without_cuda
from trtforge.planning import Plan, make_plan, target_of
from trtforge.release.gates import misses_of_kept
from trtforge.release.manifest import MANIFEST_NAME, Manifest
from trtforge.release.output import check_output, output_lock
from trtforge.run import Run, open_run


@dataclass(frozen=True, slots=True)
class Bundle:
    """What a build left in the output folder.

    Attributes:
        verdicts: identifier -> `cached`, `new`, or `stale, ... changed`, for the engines of this run.
        is_changed: whether anything in the folder had to be written.
        seconds: wall seconds of the whole run.
        builder_seconds: of which inside a builder: library load, parse and build.
    """

    manifest_path: Path
    manifest: Manifest
    verdicts: Mapping[str, str]
    missing: tuple[MissingTarget, ...]
    warnings: tuple[Problem, ...]
    is_changed: bool
    seconds: float
    builder_seconds: float


def build(
    spec_path: Path,
    output: Path | None,
    report: Report,
    *,
    store_path: Path | None = None,
    jobs: int | None = None,
    locked: bool = False,
) -> Bundle:
    """Builds all engines of a spec into `output`, or into the spec's own output folder, with a manifest.

    An engine that cannot be built loses no other: the rest is published, and the manifest lists what is missing. With
    no engine at all, the output folder stays as it was.

    Args:
        spec_path: the spec.
        output: folder for the bundle.
        report: told what happens.
        store_path: folder of the store.
        jobs: engines that are built at once; by default as many as there are processors, four at most.
        locked: whether the tactics of the engines in the output folder are taken again, and others are an error.

    Raises:
        TrtForgeError: nothing could be built; all reasons at once.
    """
    start = time.perf_counter()
    with open_run(spec_path, store_path, report) as run:
        plan = make_plan(spec_path, run, may_export=True)
        output_dir = output or plan.spec_file.spec.output
        missing = [planned.missing for planned in plan.units if planned.missing]
        if len(missing) == len(plan.units):
            raise SeveralErrors(
                replace(problem, summary=f"nothing of this spec can be built here: {problem.summary}")
                for problem in dict.fromkeys(entry.problem for entry in missing)
            )
        here = [planned.unit for planned in plan.units if not planned.missing]
        refuse_without_cuda(plan.spec_file, here, plan.facts)
        waiting = Event("warning", "publish", f"another build writes {output_dir}; waiting for it")
        locks = run.stages.store.root / "locks"
        lock = output_lock(output_dir, on_wait=lambda: run.stages.tell(waiting), fallback=locks)
        with lock, _kept_if_filled(output_dir):
            if locked:
                plan = locked_plan(plan, output_dir, run)
            checks = check_profiles(plan, run)
            graph, evidence, scales = prove(plan, checks, run)
            built, failed = build_units(plan, graph, scales, run, jobs)
            evidence = with_builder_calibration(evidence, plan, run)
            if not built or (locked and failed):  # what was published stays whole
                raise SeveralErrors(dict.fromkeys(entry.problem for entry in failed))
            try:
                manifest, is_changed = _publish(plan, evidence, built, [*missing, *failed], output_dir, run)
            except SeveralErrors as error:
                raise SeveralErrors(dict.fromkeys((*error.problems, *(entry.problem for entry in failed)))) from error
        verdicts = {stage.key: stage.verdict for stage in run.stages.done}
    new = [entry for entry in built if verdicts[entry.key] != "cached"]
    return Bundle(
        output_dir / MANIFEST_NAME,
        manifest,
        {entry.unit.identifier: verdicts[entry.key] for entry in built},
        (*missing, *failed),
        plan.warnings,
        is_changed,
        time.perf_counter() - start,
        sum(seconds for entry in new for part, seconds in entry.engine.seconds.items() if part != "write"),
    )


@contextmanager
def _kept_if_filled(output_dir: Path) -> Iterator[None]:
    """Makes sure of the output folder before the work, and takes it away again if the work left nothing in it."""
    is_new = not output_dir.exists()
    try:
        check_output(output_dir)
        yield
    except BaseException:
        if is_new:
            with suppress(OSError):
                output_dir.rmdir()
        raise


def _publish(
    plan: Plan,
    evidence: Evidence,
    built: list[BuiltUnit],
    missing: list[MissingTarget],
    output_dir: Path,
    run: Run,
) -> tuple[Manifest, bool]:
    refuse_changed_model(plan.spec_file, plan.graph, run)
    stages, spec_file = run.stages, plan.spec_file
    onnxruntime = plan.facts.packages["onnxruntime"]
    draft = make_manifest(spec_file, plan.graph, evidence, built, missing, stages.done, onnxruntime, NOT_ASKED)
    evidence = replace(evidence, engines=run_engines(plan, draft, built, run))
    performance = measure(spec_file, draft, built, plan.facts, run)
    start = time.perf_counter()
    manifest, is_changed = publish_bundle(
        make_manifest(spec_file, plan.graph, evidence, built, missing, stages.done, onnxruntime, performance),
        built,
        lambda artifact: target_of(artifact, plan),
        judgement_digest(spec_file, plan.check_key, run.memo.digest),
        output_dir,
        digest_of=run.memo.digest,
        warn=lambda text: stages.tell(Event("warning", "publish", text)),
    )
    for problem in misses_of_kept(manifest, {entry.unit.identifier for entry in built}):
        stages.tell(Event("warning", "publish", problem.summary))
    verdict = "written" if is_changed else "cached"
    text = f"{verdict}; {shown_path(output_dir / MANIFEST_NAME)}, {len(manifest.artifacts)} engines"
    stages.tell(Event("done", "publish", text, seconds=time.perf_counter() - start))
    return manifest, is_changed
