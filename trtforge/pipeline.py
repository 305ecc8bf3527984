"""The stages of a build in order: spec, ingest, profiles, capability, profile check, engines, bundle.

Every stage that costs time goes through the store; what it needs is imported when it really runs, so that a rebuild
with nothing changed loads neither onnx nor onnxruntime.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

import trtforge
from trtforge.backends.builder_log import matching_warnings
from trtforge.backends.capabilities import Capability, capability, newest_version
from trtforge.backends.protocol import BACKENDS, BuildEvent
from trtforge.backends.refusals import refusals, target_compute_capability, warnings
from trtforge.backends.reproduction import FOLDER
from trtforge.bundle import BuiltUnit, MissingTarget, host_record, make_manifest, publish_bundle
from trtforge.digests import model_digest
from trtforge.errors import BuildError, CapabilityError, Problem, SeveralErrors, TrtForgeError, raise_any, shown_path
from trtforge.events import Event, Report
from trtforge.machine import MachineFacts, machine_facts
from trtforge.memo import DigestMemo
from trtforge.plain import from_plain, to_plain
from trtforge.release.manifest import MANIFEST_NAME, HostRecord, Manifest
from trtforge.release.output import check_output, output_lock
from trtforge.shapes.points import PointCheck
from trtforge.shapes.profiles import resolve_profiles
from trtforge.spec.load import SpecFile, load_spec
from trtforge.spec.model import Target
from trtforge.stages import Stages
from trtforge.store import StageKey, Store, default_store_path
from trtforge.types import BuildUnit, BuiltEngine, Graph, Profile

_INSTALL = {"tensorrt_rtx": "pip install 'trtforge[rtx]'", "tensorrt": "pip install 'trtforge[gpu-wheels]'"}
MAX_JOBS = 4
"""Builds at once unless asked otherwise: each holds a model and its tactics in memory."""
_VERSIONS = {"ingest": 1, "profile check": 1, "build": 1}
"""Raise one where the stage's code starts to give another result for the same inputs."""


@dataclass(frozen=True, slots=True)
class PlannedUnit:
    """One engine, with the key of everything that decides it."""

    unit: BuildUnit
    key: StageKey
    missing: MissingTarget | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a build of a spec does on this machine.

    Attributes:
        units: every engine of the spec; those with `missing` are not built here.
        check_key: of the profile check.
        capabilities: of each backend's planned version.
        warnings: what is allowed and worth knowing.
    """

    spec_file: SpecFile
    graph: Graph
    profiles: tuple[Profile, ...]
    units: tuple[PlannedUnit, ...]
    check_key: StageKey
    warnings: tuple[Problem, ...]
    facts: MachineFacts


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


@dataclass(frozen=True, slots=True)
class Run:
    """The surroundings of one run: its store, its stages, and a folder for intermediate files."""

    stages: Stages
    memo: DigestMemo
    work_dir: Path


@contextmanager
def open_run(spec_path: Path, store_path: Path | None, report: Report) -> Iterator[Run]:
    """Opens the store for one run of a spec."""
    memo = DigestMemo(user_cache_path("trtforge") / "digests.json")
    stages: Stages

    def warn(text: str) -> None:
        stages.tell(Event("warning", "store", text))

    store = Store(store_path or default_store_path(), warn, memo.digest)
    stages = Stages(store, report, str(spec_path.resolve()))
    with store.work_folder() as work_dir:
        yield Run(stages, memo, work_dir)


def read_model(spec_path: Path) -> tuple[SpecFile, Graph]:
    """A spec and its checked model, with nothing decided about targets.

    Raises:
        TrtForgeError: all problems of the first of the two that has any.
    """
    with open_run(spec_path, None, lambda _event: None) as run:
        spec_file = load_spec(spec_path)
        return spec_file, _ingest(spec_file, run)


def make_plan(spec_path: Path, run: Run) -> Plan:
    """Reads and checks spec and model, and decides what is built here. Runs no builder and no onnxruntime.

    Raises:
        TrtForgeError: all problems of the first stage that has any.
    """
    spec_file = load_spec(spec_path)
    spec = spec_file.spec
    graph = _ingest(spec_file, run)
    profiles = resolve_profiles(spec_file, graph)
    facts = machine_facts()
    rows = [_capability(spec_file, index, facts) for index in range(len(spec.targets))]
    raise_any(problem for index, row in enumerate(rows) for problem in refusals(spec_file, index, graph, row))
    noted = dict.fromkeys(
        problem for index, row in enumerate(rows) for problem in warnings(spec_file, index, graph, row)
    )
    for problem in noted:
        run.stages.tell(Event("warning", "plan", problem.summary))
    units = []
    for index, target in enumerate(spec.targets):
        reason = _missing_reason(spec_file, index, target, facts)
        for gpu in target.gpus:
            unit = _unit(spec_file, target, gpu, _version(target, facts), graph, profiles)
            skipped = target.when_missing == "skip"
            missing = MissingTarget(unit.identifier, gpu, target.backend, skipped, reason) if reason else None
            units.append(PlannedUnit(unit, _unit_key(unit), missing))
    return Plan(
        spec_file, graph, profiles, tuple(units), _check_key(spec_file, graph, profiles, facts), tuple(noted), facts
    )


def build(
    spec_path: Path,
    output: Path | None,
    report: Report,
    *,
    store_path: Path | None = None,
    jobs: int | None = None,
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

    Raises:
        TrtForgeError: nothing could be built; all reasons at once.
    """
    start = time.perf_counter()
    with open_run(spec_path, store_path, report) as run:
        plan = make_plan(spec_path, run)
        output_dir = output or plan.spec_file.spec.output
        missing = [planned.missing for planned in plan.units if planned.missing]
        if len(missing) == len(plan.units):
            raise SeveralErrors(dict.fromkeys(entry.problem for entry in missing))
        waiting = Event("warning", "publish", f"another build writes {output_dir}; waiting for it")
        with output_lock(output_dir, on_wait=lambda: run.stages.tell(waiting)):
            check_output(output_dir)
            checks = _check_profiles(plan, run)
            built, failed = _build_units(plan, run, jobs)
            if not built:
                raise SeveralErrors(dict.fromkeys(entry.problem for entry in failed))
            manifest, is_changed = _publish(plan, checks, built, [*missing, *failed], output_dir, run)
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


def explain(plan: Plan, run: Run) -> dict[str, str]:
    """What a build would say of each stage: `cached`, `new`, or `stale` with the settings that changed."""
    verdicts = {stage.name: stage.verdict for stage in run.stages.done}
    verdicts["profile check"] = run.stages.verdict("profile check", plan.check_key)
    for planned in plan.units:
        if not planned.missing:
            verdicts[_label(planned.unit)] = run.stages.verdict(_label(planned.unit), planned.key)
    return verdicts


def _ingest(spec_file: SpecFile, run: Run) -> Graph:
    """The model, from the store where its bytes and those of its external data are known there."""
    source = spec_file.spec.model.onnx
    where = spec_file.where("model", "onnx")

    def ingested() -> Graph:
        from trtforge.graph.ingest import ingest  # noqa: PLC0415 - loads onnx

        return ingest(source, run.work_dir, memo=run.memo, where=where)

    store = run.stages.store
    fresh: Graph | None = None
    try:
        model_digest = run.memo.digest(source)
        files_key = StageKey("external files", 1, {"model": model_digest}, {}, {})
        files = store.find(files_key)
        if files is None:
            fresh = ingested()
            files = store.put(files_key, [file.location for file in fresh.external_files], {})
        inputs = {"model": model_digest, **{name: run.memo.digest(source.parent / name) for name in files.result}}
    except OSError:
        ingested()  # says what is wrong with the files
        raise
    key = StageKey("ingest", _VERSIONS["ingest"], inputs, {}, {})

    def compute() -> tuple[Any, dict[str, Path]]:
        graph = fresh or ingested()
        return _graph_to_plain(graph), {} if graph.path == graph.source else {"graph": graph.path}

    record = run.stages.run("ingest", key, compute, _describe_graph)
    path = store.blob_path(record.blobs["graph"]) if record.blobs else source.absolute()
    places = {"path": path, "source": source.absolute(), "weights_dir": source.absolute().parent}
    graph: Graph = from_plain(Graph, record.result | {name: str(place) for name, place in places.items()})
    return graph


def _graph_to_plain(graph: Graph) -> dict[str, Any]:
    """Without paths, which differ between machines."""
    plain: dict[str, Any] = to_plain(Graph, graph)
    return {name: value for name, value in plain.items() if name not in ("path", "source", "weights_dir")}


def _describe_graph(plain: Mapping[str, Any]) -> tuple[str, ...]:
    opset = dict(map(tuple, plain["opsets"])).get("", 0)
    size = f"opset {opset}, {plain['num_nodes']} nodes, sha256 {plain['digest'][:12]}"
    return (size, *plain["notes"])


def _version(target: Target, facts: MachineFacts) -> str:
    """The version that a target is planned for: the installed one, unless the spec asks for another."""
    installed = facts.packages.get(target.backend)
    if target.version and not (installed and _is_version(installed, target.version)):
        return target.version
    return installed or newest_version(target.backend)


def _is_version(installed: str, wanted: str) -> bool:
    return installed.split(".")[: len(wanted.split("."))] == wanted.split(".")


def _capability(spec_file: SpecFile, index: int, facts: MachineFacts) -> Capability:
    target = spec_file.spec.targets[index]
    try:
        return capability(target.backend, _version(target, facts))
    except CapabilityError as error:
        problem = error.problems[0]
        raise SeveralErrors([replace(problem, where=spec_file.where("targets", index, "version"))]) from None


def _missing_reason(spec_file: SpecFile, index: int, target: Target, facts: MachineFacts) -> Problem | None:
    """Why this machine builds no engine of a target, None if it does."""
    installed = facts.packages.get(target.backend)
    where = spec_file.where("targets", index)
    code = CapabilityError.exit_code
    if target.backend not in BACKENDS:
        text = f"trtforge {trtforge.__version__} plans targets of {target.backend} and does not build them"
        return Problem(text, "write when_missing: skip there, or a tensorrt_rtx target", where, (), code)
    if installed is None:
        return Problem(f"{target.backend} is not installed here", _INSTALL[target.backend], where, (), code)
    if target.version and not _is_version(installed, target.version):
        text = f"the target is for {target.backend} {target.version}, and {installed} is installed"
        package = target.backend.replace("_", "-")
        return Problem(text, f"pip install '{package}=={target.version}.*'", where, (), code)
    return None


def _unit(
    spec_file: SpecFile, target: Target, gpu: str, version: str, graph: Graph, profiles: tuple[Profile, ...]
) -> BuildUnit:
    spec = spec_file.spec
    precision = _precision_tag(graph) if spec.precision.type == "as_model" else spec.precision.type
    short = {"tensorrt": "trt", "tensorrt_rtx": "trtrtx"}[target.backend] + ".".join(version.split(".")[:3])
    return BuildUnit(
        identifier=f"{spec.name}-{precision}-{re.sub(r'[^a-z0-9]+', '-', gpu.lower())}-{short}",
        backend=target.backend,
        backend_version=version,
        gpu=gpu,
        compute_capability=target_compute_capability(target.backend, gpu),
        precision=precision,
        tf32=spec.precision.tf32,
        settings=asdict(spec.builder),
        graph_digest=graph.digest,
        profiles=profiles,
    )


def _precision_tag(graph: Graph) -> str:
    """One word for the types that a model carries, the narrowest deciding."""
    types = graph.element_types
    if any(name.startswith("float8") for name in types):
        return "fp8"
    if graph.has_qdq:
        return "int8"
    return "fp16" if "float16" in types else "bf16" if "bfloat16" in types else "fp32"


def _profiles_parameter(profiles: tuple[Profile, ...]) -> list[dict[str, Any]]:
    """Profiles for keys, so that a difference reads `profiles[0].image.max`."""
    return [
        {"name": profile.name}
        | {name: asdict(shapes) for name, shapes in profile.shapes.items()}
        | {f"{name}.values": asdict(values) for name, values in profile.values.items()}
        for profile in profiles
    ]


def _unit_key(unit: BuildUnit) -> StageKey:
    return StageKey(
        "build",
        _VERSIONS["build"],
        {"model": unit.graph_digest},
        {
            "gpu": unit.gpu,
            "compute_capability": unit.compute_capability,
            "precision": {"type": unit.precision, "tf32": unit.tf32},
            "builder": unit.settings,
            "profiles": _profiles_parameter(unit.profiles),
        },
        {unit.backend: unit.backend_version},
    )


def _check_key(spec_file: SpecFile, graph: Graph, profiles: tuple[Profile, ...], facts: MachineFacts) -> StageKey:
    return StageKey(
        "profile check",
        _VERSIONS["profile check"],
        {"model": graph.digest},
        {
            "profiles": _profiles_parameter(profiles),
            "inputs": {name: asdict(values) for name, values in spec_file.spec.inputs.items()},
        },
        {"onnxruntime": facts.packages["onnxruntime"]},
    )


def _check_profiles(plan: Plan, run: Run) -> tuple[PointCheck, ...]:
    spec_file = plan.spec_file
    index_of = {profile.name: index for index, profile in enumerate(plan.profiles)}
    failures_dir = run.stages.store.root / "failures" / f"{spec_file.spec.name}-inputs"

    def compute() -> tuple[Any, dict[str, Path]]:
        from trtforge.shapes.profile_check import check_profiles  # noqa: PLC0415 - loads onnxruntime

        checks = check_profiles(
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


def _label(unit: BuildUnit) -> str:
    return f"build {unit.gpu}"


def _build_units(plan: Plan, run: Run, jobs: int | None) -> tuple[list[BuiltUnit], list[MissingTarget]]:
    """Every engine that can be built here, several at once, and those whose build ended with an error."""
    units = [planned for planned in plan.units if not planned.missing]
    with ThreadPoolExecutor(max_workers=jobs or min(MAX_JOBS, os.cpu_count() or 1)) as threads:
        results = list(threads.map(lambda planned: _build_or_fail(planned, plan, run), units))
    built = [result for result in results if isinstance(result, BuiltUnit)]
    failed = [entry for result in results if not isinstance(result, BuiltUnit) for entry in result]
    return built, failed


def _build_or_fail(planned: PlannedUnit, plan: Plan, run: Run) -> BuiltUnit | list[MissingTarget]:
    unit = planned.unit
    try:
        return _build_unit(planned, plan, run)
    except TrtForgeError as error:
        run.stages.tell(Event("done", _label(unit), f"no engine: {error.problems[0].summary}"))
        return [
            MissingTarget(unit.identifier, unit.gpu, unit.backend, skipped=False, problem=problem)
            for problem in error.problems
        ]


def _build_unit(planned: PlannedUnit, plan: Plan, run: Run) -> BuiltUnit:
    unit, spec_file = planned.unit, plan.spec_file

    def compute() -> tuple[Any, dict[str, Path]]:
        work_dir = run.work_dir / unit.identifier
        work_dir.mkdir()
        limit = spec_file.spec.build_timeout
        on_event = _forward(_label(unit), run.stages)
        try:
            engine = BACKENDS[unit.backend].build(unit, plan.graph, work_dir, on_event, limit)
        except BuildError as error:
            raise _with_reproduction(error, unit, work_dir, run.stages.store) from error
        _refuse_changed_model(plan, run)
        plain = {"engine": to_plain(BuiltEngine, engine), "host": to_plain(HostRecord, host_record(plan.facts))}
        return plain, {"engine": engine.path}

    def describe(plain: Any) -> tuple[str, ...]:
        return (f"{unit.identifier}.engine, {plain['engine']['size_bytes'] / 1e6:.1f} MB",)

    record = run.stages.run(_label(unit), planned.key, compute, describe)
    path = run.stages.store.blob_path(record.blobs["engine"])
    engine: BuiltEngine = replace(from_plain(BuiltEngine, record.result["engine"]), path=path)
    _refuse_warnings(spec_file, unit, engine)
    host: HostRecord = from_plain(HostRecord, record.result["host"])
    return BuiltUnit(
        unit, planned.key.digest, engine, host, capability(unit.backend, unit.backend_version).network_flags
    )


def _with_reproduction(error: BuildError, unit: BuildUnit, work_dir: Path, store: Store) -> SeveralErrors:
    """The error, pointing at the builder's log and a script that reproduces it, which are kept."""
    kept = store.root / "failures" / unit.identifier
    shutil.rmtree(kept, ignore_errors=True)
    kept.parent.mkdir(exist_ok=True)
    shutil.move(work_dir / FOLDER, kept)
    line = f"log, and a script that reproduces it: {kept}"
    return SeveralErrors(replace(problem, detail=(*problem.detail, line)) for problem in error.problems)


def _forward(label: str, stages: Stages) -> Callable[[BuildEvent], None]:
    def on_event(event: BuildEvent) -> None:
        if event.kind == "message":
            stages.tell(Event("warning", label, event.text))
        else:
            stages.tell(Event("step", label, event.text, fraction=event.fraction))

    return on_event


def _refuse_changed_model(plan: Plan, run: Run) -> None:
    """A builder reads the model's files itself, so an engine is what its key says only if they did not change."""
    graph = plan.graph
    external = [(file.location, run.memo.digest(graph.weights_dir / file.location)) for file in graph.external_files]
    if model_digest(run.memo.digest(graph.source), external) != graph.digest:
        raise BuildError(
            f"{graph.source} changed while its engines were built, so they were dropped",
            where=plan.spec_file.where("model", "onnx"),
            next_step="run the build again once the file is written",
        )


def _refuse_warnings(spec_file: SpecFile, unit: BuildUnit, engine: BuiltEngine) -> None:
    refused = matching_warnings(engine.messages, spec_file.spec.fail_on_warning)
    if refused:
        raise BuildError(
            f"{unit.identifier}: the builder gave a warning that fail_on_warning does not allow",
            where=spec_file.where("fail_on_warning"),
            detail=[message.text for message in refused],
            next_step="mend the model, or remove the pattern from fail_on_warning",
        )


def _publish(
    plan: Plan,
    checks: tuple[PointCheck, ...],
    built: list[BuiltUnit],
    missing: list[MissingTarget],
    output_dir: Path,
    run: Run,
) -> tuple[Manifest, bool]:
    start = time.perf_counter()
    stages = run.stages
    onnxruntime = plan.facts.packages["onnxruntime"]
    manifest = make_manifest(plan.spec_file, plan.graph, checks, built, missing, stages.done, onnxruntime)
    manifest, is_changed = publish_bundle(
        manifest,
        built,
        frozenset(planned.key.digest for planned in plan.units),
        output_dir,
        digest_of=run.memo.digest,
        warn=lambda text: stages.tell(Event("warning", "publish", text)),
    )
    verdict = "written" if is_changed else "cached"
    text = f"{verdict}; {shown_path(output_dir / MANIFEST_NAME)}, {len(manifest.artifacts)} engines"
    stages.tell(Event("done", "publish", text, seconds=time.perf_counter() - start))
    return manifest, is_changed


@dataclass(frozen=True, slots=True)
class BackendState:
    """Whether a backend builds here, for which GPUs, and what is missing."""

    name: str
    version: str | None
    builds_for: tuple[str, ...]
    text: str
    next_step: str


def backend_states(facts: MachineFacts) -> tuple[BackendState, ...]:
    """Every backend that the capability table knows, as this machine has it."""
    return tuple(_backend_state(name, facts.packages.get(name)) for name in _INSTALL)


def _backend_state(name: str, version: str | None) -> BackendState:
    if name not in BACKENDS:
        text = (
            f"{version or 'not installed'}; trtforge {trtforge.__version__} plans its targets and does not build them"
        )
        return BackendState(name, version, (), text, "")
    if version is None:
        return BackendState(name, None, (), "not installed", _INSTALL[name])
    try:
        builds_for = capability(name, version).compute_capabilities
    except CapabilityError as error:
        return BackendState(name, version, (), error.problems[0].summary, error.problems[0].next_step)
    return BackendState(name, version, builds_for, f"{version}, builds here for {', '.join(builds_for)}", "")
