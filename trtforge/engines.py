"""The engines of a plan: built several at once, or taken from the store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtforge.backends.capabilities import capability
from trtforge.backends.protocol import load_backend
from trtforge.backends.surroundings import CalibrationBatches, Surroundings
from trtforge.bundle import BuiltUnit, MissingTarget, host_record
from trtforge.engine_process import gpu_to_itself
from trtforge.errors import BuildError, SeveralErrors, StoreError, TrtForgeError
from trtforge.events import Event
from trtforge.keys import TIMING_CACHE
from trtforge.model_source import refuse_changed_model, unchanged_model
from trtforge.plain import from_plain, to_plain
from trtforge.planning import Plan, PlannedUnit, label_of
from trtforge.release.manifest import HostRecord
from trtforge.run import Run
from trtforge.spec.load import SpecFile
from trtforge.stages import Stages
from trtforge.store import StageKey, Store
from trtforge.targets import gpu_at_hand
from trtforge.types import BuildUnit, BuiltEngine, Graph

if TYPE_CHECKING:
    from trtforge.backends.worker_process import BuildEvent
    from trtforge.calibration.table import CalibrationTable

MAX_JOBS = 4
"""Builds at once unless asked otherwise: each holds a model and its tactics in memory."""


def build_units(
    plan: Plan, graph: Graph, scales: CalibrationTable | None, run: Run, jobs: int | None
) -> tuple[list[BuiltUnit], list[MissingTarget]]:
    """Every engine that can be built here, several at once, and those whose build ended with an error."""
    units = [planned for planned in plan.units if not planned.missing]
    with ThreadPoolExecutor(max_workers=jobs or min(MAX_JOBS, os.cpu_count() or 1)) as threads:
        try:
            results = list(threads.map(lambda planned: _build_or_fail(planned, plan, graph, scales, run), units))
        except KeyboardInterrupt:
            threads.shutdown(wait=False, cancel_futures=True)
            from trtforge.backends.worker_process import end_workers  # noqa: PLC0415

            end_workers()
            raise
    built = [result for result in results if isinstance(result, BuiltUnit)]
    failed = [entry for result in results if not isinstance(result, BuiltUnit) for entry in result]
    return built, failed


def _build_or_fail(
    planned: PlannedUnit, plan: Plan, graph: Graph, scales: CalibrationTable | None, run: Run
) -> BuiltUnit | list[MissingTarget]:
    unit = planned.unit
    try:
        return _build_unit(planned, plan, graph, scales, run)
    except StoreError:
        raise  # a full disk is not this target's own
    except TrtForgeError as error:
        run.stages.tell(Event("done", label_of(unit), f"no engine: {error.problems[0].summary}"))
        return [
            MissingTarget(unit.identifier, unit.gpu, unit.backend, skipped=False, problem=problem)
            for problem in error.problems
        ]


def _build_unit(planned: PlannedUnit, plan: Plan, graph: Graph, scales: CalibrationTable | None, run: Run) -> BuiltUnit:
    unit, spec_file = planned.unit, plan.spec_file

    def compute() -> tuple[Any, dict[str, Path]]:
        work_dir = run.stages.store.new_folder(unit.identifier)
        limit = spec_file.spec.build_timeout
        on_event = _forward(label_of(unit), run.stages)
        is_recorded = unit.settings["record_tactics"] or planned.recorded is not None
        timing = work_dir / f"{unit.identifier}.timing" if is_recorded else None
        try:
            with (
                unchanged_model(spec_file, plan.graph, run),
                _scales(planned, plan, scales, work_dir, run) as (cache, batches),
                _surroundings(unit, plan, cache, run) as on_gpu,
            ):
                around = replace(on_gpu, calibration_batches=batches, timing_record=timing, recorded=planned.recorded)
                engine = load_backend(unit.backend).build(unit, graph, work_dir, on_event, limit, around)
        except BuildError as error:
            raise _with_reproduction(error, unit, work_dir, run.stages.store) from error
        if engine.weighted_layers:
            from trtforge.quality import check_network_types  # noqa: PLC0415 - loads onnxruntime

            check_network_types(graph, engine.weighted_layers, unit.identifier)
        # The path is of this machine and this run; whoever reads the record has the blob's.
        plain = {
            "engine": to_plain(BuiltEngine, replace(engine, path=Path())),
            "host": to_plain(HostRecord, host_record(plan.facts)),
        }
        kept = {TIMING_CACHE: timing} if timing else {}
        return plain, {"engine": engine.path} | kept

    def describe(plain: Any) -> tuple[str, ...]:
        size = f"{unit.identifier}.engine, {plain['engine']['size_bytes'] / 1e6:.1f} MB"
        return (size, *plain["engine"]["notes"], *filter(None, [plain["engine"]["trtexec"]]))

    record = run.stages.run(label_of(unit), planned.key, compute, describe)
    path = run.stages.store.blob_path(record.blobs["engine"])
    engine: BuiltEngine = replace(from_plain(BuiltEngine, record.result["engine"]), path=path)
    _refuse_warnings(spec_file, unit, engine)
    host: HostRecord = from_plain(HostRecord, record.result["host"])
    flags = capability(unit.backend, unit.backend_version).flags_of_network(
        implicit=spec_file.spec.precision.is_implicit
    )
    plugins = tuple(digest for name, digest in planned.key.inputs.items() if name.startswith("plugin "))
    return BuiltUnit(unit, planned.key.digest, engine, host, flags, plugins)


@contextmanager
def _surroundings(unit: BuildUnit, plan: Plan, calibration_cache: Path | None, run: Run) -> Iterator[Surroundings]:
    """What a build on this machine's GPU uses; one build at a time on a GPU, as kernels are chosen by measured times."""
    gpu = None if unit.backend == "tensorrt_rtx" else gpu_at_hand(unit.gpu, plan.facts)
    if gpu is None:
        yield Surroundings()
        return
    store, spec = run.stages.store, plan.spec_file.spec
    measured = f"{unit.backend}-{unit.backend_version}-cuda{plan.facts.cuda_version}-{gpu.model}".replace(" ", "-")
    with gpu_to_itself(gpu, label_of(unit), run):
        yield Surroundings(
            gpu_uuid=gpu.uuid if len(plan.facts.gpus) > 1 else "",
            timing_cache=store.root / "timing" / f"{measured}.cache",
            plugins=spec.plugins,
            calibration_cache=calibration_cache,
            rest_fp16=spec.precision.type == "int8" and spec.precision.rest == "fp16",
            keep_fp32=spec.precision.keep.fp32,
        )


@contextmanager
def _scales(
    planned: PlannedUnit, plan: Plan, table: CalibrationTable | None, work_dir: Path, run: Run
) -> Iterator[tuple[Path | None, CalibrationBatches | None]]:
    """A file with the scales that the builder reads, or takes the place of those that it makes of samples.

    What TensorRT's own calibrator makes goes into the store, also where the build itself ends with an error; another
    build that makes the same is waited for.
    """
    key, store = planned.scales_key, run.stages.store
    if key is None:
        yield _calibration_cache(planned.unit, plan, table, work_dir) if table else None, None
        return
    waiting = Event("step", label_of(planned.unit), "waiting for another build, which calibrates the same")
    with ExitStack() as stack:
        if store.find(key) is None:
            stack.enter_context(store.lock(key.digest, on_wait=lambda: run.stages.tell(waiting)))
        if known := store.find(key):
            yield store.blob_path(known.blobs["cache"]), None
        else:
            yield stack.enter_context(_made_scales(planned, key, plan, work_dir, run))


@contextmanager
def _made_scales(
    planned: PlannedUnit, key: StageKey, plan: Plan, work_dir: Path, run: Run
) -> Iterator[tuple[Path, CalibrationBatches]]:
    from trtforge.builder_calibration import result_of, write_batches  # noqa: PLC0415 - loads numpy

    cache = work_dir / f"{planned.unit.identifier}.calibration"
    written = write_batches(
        plan.spec_file, plan.graph, plan.profiles, planned.unit, work_dir, run.stages, run.memo.digest
    )
    try:
        yield cache, written.batches
    finally:
        for path in written.batches.files.values():
            path.unlink(missing_ok=True)
        if cache.exists():
            refuse_changed_model(plan.spec_file, plan.graph, run)  # its scales would be another model's
            result = result_of(written, key.parameters["method"], cache)
            about = f"{result['num_tensors']} tensors, {written.num_samples} samples"
            run.stages.store.put(key, result, {"cache": cache}, about)


def _calibration_cache(unit: BuildUnit, plan: Plan, table: CalibrationTable, folder: Path) -> Path:
    """A file with the scales in TensorRT's own format."""
    from trtforge.calibrate import scales_of  # noqa: PLC0415 - loads numpy and onnx
    from trtforge.calibration.trt_cache import algorithm_of, write_trt_cache  # noqa: PLC0415

    path = folder / f"{unit.identifier}.calibration"
    scales = scales_of(plan.spec_file, plan.graph, table)
    write_trt_cache(path, scales, tensorrt_version=unit.backend_version, algorithm=algorithm_of(table.method))
    return path


def _with_reproduction(error: BuildError, unit: BuildUnit, work_dir: Path, store: Store) -> TrtForgeError:
    """The error, pointing at the builder's log and a script that reproduces it, which are kept."""
    from trtforge.backends.reproduction import FOLDER  # noqa: PLC0415

    kept = store.keep_failure(unit.identifier, work_dir / FOLDER)
    if kept is None:
        return error
    line = f"log, and a script that reproduces it: {kept}"
    return SeveralErrors(replace(problem, detail=(*problem.detail, line)) for problem in error.problems)


def _forward(label: str, stages: Stages) -> Callable[[BuildEvent], None]:
    """Passes a builder's events on; a line that it repeats for each layer is told once."""
    told: set[str] = set()

    def on_event(event: BuildEvent) -> None:
        if event.kind != "message":
            stages.tell(Event("step", label, event.text, fraction=event.fraction))
        elif event.text not in told:
            from trtforge.backends.builder_log import readable_warning  # noqa: PLC0415 - loads many patterns

            told.add(event.text)
            if text := readable_warning(event.text):
                stages.tell(Event("warning", label, text))

    return on_event


def _refuse_warnings(spec_file: SpecFile, unit: BuildUnit, engine: BuiltEngine) -> None:
    if not spec_file.spec.fail_on_warning:
        return
    from trtforge.backends.builder_log import matching_warnings  # noqa: PLC0415 - loads many patterns

    refused = matching_warnings(engine.messages, spec_file.spec.fail_on_warning)
    if refused:
        raise BuildError(
            f"{unit.identifier}: the builder gave a warning that fail_on_warning does not allow",
            where=spec_file.where("fail_on_warning"),
            detail=[message.text for message in refused],
            next_step="mend the model, or remove the pattern from fail_on_warning",
        )
