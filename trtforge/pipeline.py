"""The stages of a build in order: spec, export, ingest, profiles, capability, profile check, lowering, parity, engines, bundle.

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
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from platformdirs import user_cache_path

from trtforge.backends.capabilities import Capability, capability, newest_version
from trtforge.backends.plugins import plugin_digests
from trtforge.backends.protocol import load_backend
from trtforge.backends.refusals import refusals, target_compute_capability, warnings
from trtforge.backends.surroundings import Surroundings
from trtforge.bundle import BuiltUnit, Evidence, MissingTarget, host_record, make_manifest, publish_bundle
from trtforge.digests import model_digest
from trtforge.errors import (
    BuildError,
    CapabilityError,
    GraphError,
    Problem,
    SeveralErrors,
    SpecError,
    StoreError,
    TrtForgeError,
    raise_any,
    shown_path,
)
from trtforge.events import Event, Report
from trtforge.gpu_models import gpu_model
from trtforge.machine import GpuFacts, MachineFacts, machine_facts
from trtforge.memo import DigestMemo
from trtforge.plain import from_plain, to_plain
from trtforge.release.manifest import (
    MANIFEST_NAME,
    AccuracyRecord,
    CalibrationRecord,
    ExportRecord,
    HostRecord,
    LoweringDecision,
    Manifest,
    NotRun,
    ParityRecord,
)
from trtforge.release.output import check_output, output_lock
from trtforge.shapes.points import PointCheck
from trtforge.shapes.profiles import resolve_profiles
from trtforge.spec.load import SpecFile, load_spec
from trtforge.spec.model import FromTraffic, InputProfile, ProfileSpec, Target
from trtforge.stages import Stages
from trtforge.store import StageKey, Store, default_store_path, open_store
from trtforge.types import BuildUnit, BuiltEngine, Graph, Profile

if TYPE_CHECKING:
    from trtforge.backends.worker_process import BuildEvent
    from trtforge.calibrate import Calibrated
    from trtforge.calibration.table import CalibrationTable
    from trtforge.parity.report import ParityReport
    from trtforge.precision.lower import Decision
    from trtforge.quality import Exported

_INSTALL = {"tensorrt_rtx": "pip install 'trtforge[rtx]'", "tensorrt": "pip install 'trtforge[gpu-wheels]'"}
MAX_JOBS = 4
"""Builds at once unless asked otherwise: each holds a model and its tactics in memory."""
_VERSIONS = {
    "export": 1,
    "ingest": 1,
    "traffic": 1,
    "profile check": 1,
    "calibrate": 1,
    "parity": 3,
    "lower": 3,
    "build": 2,
}
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
    """The surroundings of one run: its store, its stages, and the digests of files that it knows."""

    stages: Stages
    memo: DigestMemo


@contextmanager
def open_run(spec_path: Path, store_path: Path | None, report: Report) -> Iterator[Run]:
    """Opens the store for one run of a spec."""
    memo = DigestMemo(user_cache_path("trtforge") / "digests.json")
    stages: Stages

    def warn(text: str) -> None:
        stages.tell(Event("warning", "store", text))

    with open_store(store_path or default_store_path(), warn, memo.digest) as store:
        stages = Stages(store, report, str(spec_path.resolve()))
        yield Run(stages, memo)


def read_model(spec_path: Path, store_path: Path | None) -> tuple[SpecFile, Graph]:
    """A spec and its checked model, with nothing decided about targets. Runs no Python of the spec.

    Raises:
        TrtForgeError: all problems of the first of the two that has any.
    """
    with open_run(spec_path, store_path, lambda _event: None) as run:
        spec_file = load_spec(spec_path)
        rows = _capabilities(spec_file, machine_facts())
        source, _ = _source(spec_file, rows, run, may_export=False)
        return spec_file, _ingest(spec_file, source, run)


def make_plan(spec_path: Path, run: Run, *, may_export: bool = False) -> Plan:
    """Reads and checks spec and model, and decides what is built here. Runs no builder and no onnxruntime.

    Args:
        spec_path: the spec.
        run: its surroundings.
        may_export: whether Python that the spec names may run; otherwise a PyTorch model is taken from its last export.

    Raises:
        TrtForgeError: all problems of the first stage that has any.
    """
    spec_file = load_spec(spec_path)
    spec = spec_file.spec
    facts = machine_facts()
    rows = _capabilities(spec_file, facts)
    source, exported = _source(spec_file, rows, run, may_export=may_export)
    graph = _ingest(spec_file, source, run)
    spec_file = _with_traffic_profiles(spec_file, graph, run)
    refused = [problem for index, row in enumerate(rows) for problem in refusals(spec_file, index, graph, row)]
    try:
        profiles = resolve_profiles(spec_file, graph)
    except TrtForgeError as error:
        raise SeveralErrors([*error.problems, *refused]) from None
    raise_any(refused)
    noted = dict.fromkeys(
        problem for index, row in enumerate(rows) for problem in warnings(spec_file, index, graph, row)
    )
    for problem in noted:
        run.stages.tell(Event("warning", "plan", problem.summary))
    check_key = _check_key(spec_file, graph, profiles, facts)
    max_opset = min(row.max_opset for row in rows)
    calibrate_key = _calibrate_key(spec_file, graph, profiles, check_key, run)
    lower_key = None
    if spec.precision.type in ("fp16", "bf16", "int8") and spec.precision.quantization == "explicit":
        lower_key = _lower_key(spec_file, check_key, calibrate_key, max_opset, run)
    plugins = plugin_digests(spec_file, run.memo.digest).values()
    plugins_input = {f"plugin {number}": digest for number, digest in enumerate(plugins)}
    scales_input = _calibration_input(spec_file, calibrate_key, run) if _is_implicit(spec_file) else {}
    table = _named_table(spec_file, graph)
    units: list[PlannedUnit] = []
    for index, target in enumerate(spec.targets):
        backend_reason = _missing_reason(spec_file, index, target, facts)
        for position, gpu in enumerate(target.gpus):
            reason = backend_reason or _gpu_reason(spec_file, index, position, facts)
            unit = _unit(spec_file, target, gpu, _version(target, facts), graph, profiles)
            skipped = target.when_missing == "skip"
            missing = MissingTarget(unit.identifier, gpu, target.backend, skipped, reason) if reason else None
            if unit.identifier in {planned.unit.identifier for planned in units}:
                raise CapabilityError(
                    f"GPU '{gpu}' stands in two targets that mean the same engine, {unit.identifier}",
                    where=spec_file.where("targets", index, "gpus"),
                    next_step="remove one",
                )
            key = _unit_key(unit, spec_file, lower_key, scales_input | plugins_input, facts)
            units.append(PlannedUnit(unit, key, missing))
    return Plan(
        spec_file,
        graph,
        profiles,
        tuple(units),
        check_key,
        max_opset,
        calibrate_key,
        table,
        lower_key,
        exported,
        tuple(noted),
        facts,
    )


def _source(spec_file: SpecFile, rows: list[Capability], run: Run, *, may_export: bool) -> tuple[Path, Exported | None]:
    """The ONNX file: the spec's own, or a fresh export of its PyTorch model, or the last one if nothing may run.

    An export is never taken for done: what the callable reads, weights for instance, is not known.
    """
    spec, store = spec_file.spec, run.stages.store
    if spec.model.onnx is not None:
        return spec.model.onnx, None
    assert spec.model.torch is not None  # noqa: S101 - the spec has one of the two
    from trtforge.usercode.process import parse_reference  # noqa: PLC0415 - few specs need it

    opset = min(row.max_opset for row in rows)
    base_dir = spec_file.marks[("model", "torch", "callable")].path.resolve().parent
    file = parse_reference(spec.model.torch.callable, base_dir, spec_file.where("model", "torch", "callable")).file
    parameters = {"callable": spec.model.torch.callable, "opset": opset}
    key = StageKey("export", _VERSIONS["export"], {"callable": run.memo.digest(file)} if file else {}, parameters, {})
    if not may_export:
        record = store.find(key)
        if record is None:
            raise GraphError(
                f"{spec.model.torch.callable} was not exported here yet, and this verb runs no Python of a spec",
                where=spec_file.where("model", "torch"),
                next_step=f"trtforge build {shown_path(spec_file.path)}",
            )
        return store.blob_path(record.blobs["onnx"]), None
    from trtforge import quality  # noqa: PLC0415 - loads onnxruntime
    from trtforge.parity.refusal import refuse_broken  # noqa: PLC0415 - loads numpy

    start = time.perf_counter()
    run.stages.tell(Event("started", "export"))
    path = store.new_folder("export") / f"{spec.name}.onnx"
    exported = quality.export(spec_file, opset, path, run.stages)
    text = f"torch {exported.report.torch_version}, {exported.report.exporter}, opset {opset}; {exported.parity.reason}"
    run.stages.tell(Event("done", "export", text, seconds=time.perf_counter() - start))
    refuse_broken(exported.parity, spec_file, exported.report.traced)
    if not exported.report.graph.external_files:
        last = path.with_suffix(".last")
        shutil.copyfile(path, last)
        store.put(key, {"notes": list(exported.report.notes)}, {"onnx": last}, text)
    return path, exported


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
        plan = make_plan(spec_path, run, may_export=True)
        output_dir = output or plan.spec_file.spec.output
        missing = [planned.missing for planned in plan.units if planned.missing]
        if len(missing) == len(plan.units):
            raise SeveralErrors(
                replace(problem, summary=f"nothing of this spec can be built here: {problem.summary}")
                for problem in dict.fromkeys(entry.problem for entry in missing)
            )
        waiting = Event("warning", "publish", f"another build writes {output_dir}; waiting for it")
        locks = run.stages.store.root / "locks"
        lock = output_lock(output_dir, on_wait=lambda: run.stages.tell(waiting), fallback=locks)
        with lock, _kept_if_filled(output_dir):
            checks = _check_profiles(plan, run)
            graph, evidence, scales = _prove(plan, checks, run)
            built, failed = _build_units(plan, graph, scales, run, jobs)
            if not built:
                raise SeveralErrors(dict.fromkeys(entry.problem for entry in failed))
            manifest, is_changed = _publish(plan, evidence, built, [*missing, *failed], output_dir, run)
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


def explain(plan: Plan, run: Run) -> dict[str, str]:
    """What a build would say of each stage: `cached`, `new`, or `stale` with the settings that changed."""
    verdicts = {stage.name: stage.verdict for stage in run.stages.done}
    verdicts["profile check"] = run.stages.verdict("profile check", plan.check_key)
    if plan.graph.path != plan.graph.source:
        key = _parity_key("mended", plan, plan.check_key, run)
        verdicts["parity mended"] = run.stages.verdict("parity mended", key)
    if plan.calibrate_key:
        verdicts["calibrate"] = run.stages.verdict("calibrate", plan.calibrate_key)
    if plan.lower_key:
        verdicts["lower"] = run.stages.verdict("lower", plan.lower_key)
        key = _parity_key("lowered", plan, plan.lower_key, run)
        verdicts["parity lowered"] = run.stages.verdict("parity lowered", key)
    for planned in plan.units:
        if not planned.missing:
            verdicts[_label(planned.unit)] = run.stages.verdict(_label(planned.unit), planned.key)
    return verdicts


def _ingest(spec_file: SpecFile, source: Path, run: Run) -> Graph:
    """The model, from the store where its bytes and those of its external data are known there."""
    where = spec_file.where("model", "onnx")

    store = run.stages.store

    def ingested() -> Graph:
        from trtforge.graph.ingest import ingest  # noqa: PLC0415 - loads onnx

        graph = ingest(source, store.work_dir, memo=run.memo, where=where)
        read = [(file.location, file.digest) for file in graph.external_files]
        if graph.digest != model_digest(source_digest, read):
            raise _changed_model(spec_file, source)
        return graph

    fresh: Graph | None = None
    source_digest = ""
    try:
        source_digest = run.memo.digest(source)
        files_key = StageKey("external files", 1, {"model": source_digest}, {}, {})
        files = store.find(files_key)
        if files is None:
            fresh = ingested()
            about = f"weights of {source.name} in {len(fresh.external_files)} other files"
            files = store.put(files_key, [file.location for file in fresh.external_files], {}, about)
        external = {name: run.memo.digest(source.parent / name) for name in files.result}
    except OSError:
        ingested()  # says what is wrong with the files
        raise
    inputs = {"model": source_digest} | {f"external file {name}": digest for name, digest in external.items()}
    key = StageKey("ingest", _VERSIONS["ingest"], inputs, {}, {})

    def compute() -> tuple[Any, dict[str, Path]]:
        graph = fresh or ingested()
        if graph.digest != model_digest(source_digest, external.items()):
            raise _changed_model(spec_file, source)
        return _graph_to_plain(graph), {} if graph.path == graph.source else {"graph": graph.path}

    record = run.stages.run("ingest", key, compute, _describe_graph)
    path = store.blob_path(record.blobs["graph"]) if record.blobs else source.absolute()
    places = {"path": path, "source": source.absolute(), "weights_dir": source.absolute().parent}
    graph: Graph = from_plain(Graph, record.result | {name: str(place) for name, place in places.items()})
    return graph


def _with_traffic_profiles(spec_file: SpecFile, graph: Graph, run: Run) -> SpecFile:
    """The spec with the profiles that its traffic log gives, written out in place of `from_traffic`."""
    if isinstance(spec_file.spec.profiles, tuple):
        return spec_file
    wishes = spec_file.spec.profiles.from_traffic
    files = {"log": wishes.log} | ({"latencies": wishes.latencies} if wishes.latencies else {})
    parameters: dict[str, Any] = to_plain(FromTraffic, replace(wishes, log=Path(wishes.log.suffix), latencies=None))
    inputs = {"model": graph.digest}
    for name, path in files.items():
        where = spec_file.where("profiles", "from_traffic", name)
        try:
            inputs[name] = run.memo.digest(path)
        except OSError as error:
            text = f"{shown_path(path)}: {error.strerror}"
            raise SpecError(text, where=where, next_step=f"write the path of the {name} there") from None
    key = StageKey("traffic", _VERSIONS["traffic"], inputs, parameters, {})

    def compute() -> tuple[Any, dict[str, Path]]:
        from trtforge.demand import choose_profiles  # noqa: PLC0415 - loads onnx and numpy

        chosen = choose_profiles(graph, wishes, lambda name: spec_file.where("profiles", "from_traffic", name))
        listed = tuple(
            ProfileSpec(
                name=profile.name,
                inputs={
                    name: InputProfile(min=shapes.min, opt=shapes.opt, max=shapes.max)
                    for name, shapes in profile.shapes.items()
                },
            )
            for profile in chosen.profiles
        )
        covered = f"{chosen.coverage.num_covered} of {chosen.coverage.num_requests} requests"
        return {"profiles": to_plain(tuple[ProfileSpec, ...], listed), "covered": covered}, {}

    record = run.stages.run(
        "traffic", key, compute, lambda plain: (f"{len(plain['profiles'])} profiles cover {plain['covered']}",)
    )
    profiles: tuple[ProfileSpec, ...] = from_plain(tuple[ProfileSpec, ...], record.result["profiles"])
    return replace(spec_file, spec=replace(spec_file.spec, profiles=profiles))


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


def _capabilities(spec_file: SpecFile, facts: MachineFacts) -> list[Capability]:
    """The row of each target's version, in the spec's order."""
    return [_capability(spec_file, index, facts) for index in range(len(spec_file.spec.targets))]


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
    if installed is None:
        return Problem(f"{target.backend} is not installed here", _INSTALL[target.backend], where, (), code)
    if target.version and not _is_version(installed, target.version):
        text = f"the target is for {target.backend} {target.version}, and {installed} is installed"
        package = target.backend.replace("_", "-")
        return Problem(text, f"pip install '{package}=={target.version}.*'", where, (), code)
    return None


def _gpu_reason(spec_file: SpecFile, index: int, position: int, facts: MachineFacts) -> Problem | None:
    """Why this machine does not build for one GPU of a target, None if it does."""
    target = spec_file.spec.targets[index]
    gpu = target.gpus[position]
    if target.backend == "tensorrt_rtx" or _gpu_at_hand(gpu, facts):
        return None
    found = ", ".join(one.device_name for one in facts.gpus) or f"no GPU ({facts.cuda_error})"
    return Problem(
        f"the target is for {gpu}, and this machine has {found}; TensorRT builds on the GPU model that an engine is for",
        f"run trtforge build on a machine with {gpu}; here it may be left out with when_missing: skip",
        spec_file.where("targets", index, "gpus", position),
        (),
        CapabilityError.exit_code,
    )


def _gpu_at_hand(gpu: str, facts: MachineFacts) -> GpuFacts | None:
    """The first GPU of this machine that is of the model `gpu`."""
    return next((one for one in facts.gpus if one.model == gpu_model(gpu).name), None)


def _unit(
    spec_file: SpecFile, target: Target, gpu: str, version: str, graph: Graph, profiles: tuple[Profile, ...]
) -> BuildUnit:
    spec = spec_file.spec
    precision = _precision_tag(graph) if spec.precision.type == "as_model" else spec.precision.type
    if _is_implicit(spec_file):
        precision += "-implicit"
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
    """Profiles for keys."""
    return [
        {
            "name": profile.name,
            "inputs": {name: asdict(shapes) for name, shapes in profile.shapes.items()},
            "values": {name: asdict(values) for name, values in profile.values.items()},
        }
        for profile in profiles
    ]


def _unit_key(
    unit: BuildUnit,
    spec_file: SpecFile,
    lower_key: StageKey | None,
    inputs: Mapping[str, str],
    facts: MachineFacts,
) -> StageKey:
    """Of an engine; `inputs` are digests of files that the builder reads besides the graph."""
    precision: dict[str, Any] = {"type": unit.precision, "quantization": spec_file.spec.precision.quantization}
    if _is_implicit(spec_file):
        precision["rest"] = spec_file.spec.precision.rest
    lowering = {"lowering": lower_key.digest} if lower_key else {}
    driver = {"driver": facts.cuda_driver_version} if unit.backend == "tensorrt" else {}
    return StageKey(
        "build",
        _VERSIONS["build"],
        {"model": unit.graph_digest, **lowering, **inputs},
        {
            "gpu": unit.gpu,
            "compute_capability": unit.compute_capability,
            "precision": precision | {"tf32": unit.tf32},
            "builder": unit.settings,
            "profiles": _profiles_parameter(unit.profiles),
        },
        {unit.backend: unit.backend_version} | driver,
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


def _samples_digest(spec_file: SpecFile, run: Run) -> dict[str, str]:
    samples = spec_file.spec.parity.samples
    if samples is None:
        return {}
    next_step = "name an npz with an array for each input"
    return {"samples": _digest_or_problem(samples, spec_file, ("parity", "samples"), next_step, run)}


def _digest_or_problem(path: Path, spec_file: SpecFile, key: tuple[str, ...], next_step: str, run: Run) -> str:
    try:
        return run.memo.digest(path)
    except OSError as error:
        text = f"{shown_path(path)}: {error.strerror}"
        raise SpecError(text, where=spec_file.where(*key), next_step=next_step) from None


def _proof_parameters(spec_file: SpecFile, check_key: StageKey) -> dict[str, Any]:
    """What decides the inputs that a model is compared on."""
    parity = spec_file.spec.parity
    return {**check_key.parameters, "parity": {"random_shapes": parity.random_shapes, "seed": parity.seed}}


def _calibrate_key(
    spec_file: SpecFile, graph: Graph, profiles: tuple[Profile, ...], check_key: StageKey, run: Run
) -> StageKey | None:
    """Of the calibration, from the bytes of its data. Runs no Python of the spec; of a script, its own file counts."""
    calibration = spec_file.spec.calibration
    if calibration is None or calibration.table is not None:
        return None
    from trtforge.samples.calibration import open_calibration  # noqa: PLC0415 - loads numpy

    data = open_calibration(spec_file, graph, profiles, digest_of=run.memo.digest)
    return StageKey(
        "calibrate",
        _VERSIONS["calibrate"],
        {"model": graph.digest, "data": data.digest},
        {
            "method": calibration.method,
            "percentile": float(calibration.percentile),
            "inputs": check_key.parameters["inputs"],
            "profiles": check_key.parameters["profiles"],
        }
        | ({"quantization": "implicit"} if _is_implicit(spec_file) else {}),
        check_key.environment,
    )


def _is_implicit(spec_file: SpecFile) -> bool:
    return spec_file.spec.precision.quantization == "implicit"


def _calibration_input(spec_file: SpecFile, calibrate_key: StageKey | None, run: Run) -> dict[str, str]:
    """What scales come from, for keys."""
    calibration = spec_file.spec.calibration
    if calibrate_key:
        return {"calibration": calibrate_key.digest}
    if calibration is None or calibration.table is None:
        return {}
    next_step = "trtforge calibrate SPEC --output TABLE"
    digest = _digest_or_problem(calibration.table, spec_file, ("calibration", "table"), next_step, run)
    return {"calibration": digest}


def _named_table(spec_file: SpecFile, graph: Graph) -> CalibrationTable | None:
    if spec_file.spec.calibration is None or spec_file.spec.calibration.table is None:
        return None
    from trtforge.calibration.named import named_table  # noqa: PLC0415 - loads numpy

    return named_table(spec_file, graph.digest)


def calibration_table(spec_path: Path, run: Run) -> CalibrationTable:
    """The table of a spec's calibration, from the store where model and data are known there.

    Raises:
        SpecError: the spec names no calibration.
        TrtForgeError: what is wrong with spec, model or data.
    """
    plan = make_plan(spec_path, run, may_export=True)
    calibrated = calibrated_of(plan, run)
    if calibrated is None:
        raise SpecError(
            "the spec names no calibration data",
            where=plan.spec_file.where(),
            next_step="write calibration: {data: FILE} with an npz, JSONL, parquet or image folder of real inputs",
        )
    return calibrated.table


def calibrated_of(plan: Plan, run: Run) -> Calibrated | None:
    """What calibration found: computed, stored, or read from the table that the spec names."""
    if plan.spec_file.spec.calibration is None:
        return None
    from trtforge import calibrate  # noqa: PLC0415 - loads numpy and onnx

    if plan.table is not None:
        return calibrate.of_table(plan.table)
    assert plan.calibrate_key is not None  # noqa: S101 - calibration without a table has data

    def compute() -> tuple[Any, dict[str, Path]]:
        with _unchanged_model(plan, run):
            found = calibrate.calibrate(plan.spec_file, plan.graph, plan.profiles, run.stages, run.memo.digest)
        return to_plain(calibrate.Calibrated, found), {}

    def describe(plain: Any) -> tuple[str, ...]:
        table = plain["table"]
        return (f"{len(table['tensors'])} tensors, {table['num_samples']} samples", *table["notes"])

    record = run.stages.run("calibrate", plan.calibrate_key, compute, describe)
    calibrated: Calibrated = from_plain(calibrate.Calibrated, record.result)
    return calibrated


def _lower_key(
    spec_file: SpecFile, check_key: StageKey, calibrate_key: StageKey | None, max_opset: int, run: Run
) -> StageKey:
    spec = spec_file.spec
    precision = spec.precision
    inputs = {
        **check_key.inputs,
        **_samples_digest(spec_file, run),
        **_calibration_input(spec_file, calibrate_key, run),
    }
    parameters: dict[str, Any] = {
        "type": precision.type,
        "keep": {"fp32": list(precision.keep.fp32)},
        "min_share": float(precision.min_share),
    }
    if precision.type != "fp16":
        parameters["max_opset"] = max_opset
    if precision.type == "int8":
        parameters["rest"] = precision.rest
        parameters["keep"] |= {"rest": list(precision.keep.rest)}
    return StageKey(
        "lower",
        _VERSIONS["lower"],
        inputs,
        _proof_parameters(spec_file, check_key) | {"precision": parameters},
        check_key.environment,
    )


def _prove(plan: Plan, checks: tuple[PointCheck, ...], run: Run) -> tuple[Graph, Evidence, CalibrationTable | None]:
    """Lowers the graph as the spec asks, and compares every step with the one before it.

    Returns:
        The graph for the builder, what was found, and the scales that the graph has not got (implicit quantization).

    Raises:
        ParityError: a step broke the model, or costs too much accuracy.
    """
    spec_file, exported = plan.spec_file, plan.exported
    records = [_parity_record(exported.parity)] if exported else []
    if plan.graph.path != plan.graph.source:
        records.append(_mended_record(plan, run))
    graph: Graph = plan.graph
    decisions: tuple[LoweringDecision, ...] = ()
    calibrated = calibrated_of(plan, run)
    if plan.lower_key:
        graph, decisions = _lowered(plan, plan.lower_key, calibrated, run)
        records.append(_lowered_record(plan, plan.lower_key, graph, run))
    records.append(
        ParityRecord(
            stage="engine",
            verdict="not_run",
            reason="an engine runs on its GPU only, and this build used none",
            reference=None,
            candidate=None,
            num_points=0,
            tightest=None,
        )
    )
    accuracy = _accuracy(plan, graph, run)
    evidence = Evidence(
        checks,
        _export_record(spec_file, exported),
        decisions,
        tuple(records),
        accuracy,
        *(_calibration_record(calibrated.table) if calibrated else (None, None)),
    )
    return graph, evidence, calibrated.table if calibrated and _is_implicit(spec_file) else None


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


def _parity_key(stage: Literal["mended", "lowered"], plan: Plan, before: StageKey, run: Run) -> StageKey:
    spec_file = plan.spec_file
    bounds = {
        "bounds": asdict(getattr(spec_file.spec.parity, stage)),
        "outputs": {name: asdict(entry) for name, entry in spec_file.spec.parity.outputs.items()},
    }
    return StageKey(
        f"parity {stage}",
        _VERSIONS["parity"],
        {**before.inputs, **_samples_digest(spec_file, run), "before": before.digest},
        _proof_parameters(spec_file, plan.check_key) | bounds,
        before.environment,
    )


def _compared(
    stage: Literal["mended", "lowered"], plan: Plan, before: StageKey, compare: Callable[[], ParityReport], run: Run
) -> ParityRecord:
    """The report of a step, from the store where everything that decides it is known there; ends the run if it broke."""

    def compute() -> tuple[Any, dict[str, Path]]:
        from trtforge.parity.report import ParityReport  # noqa: PLC0415 - loads numpy

        report = compare()
        short = None if report.verdict == "failed" else to_plain(ParityRecord, _parity_record(report))
        return {"report": to_plain(ParityReport, report), "short": short}, {}

    key = _parity_key(stage, plan, before, run)
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
            "graph": _graph_to_plain(lowered.graph),
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
    return graph, tuple(LoweringDecision(**entry) for entry in record.result["kept"])


def _decision_row(decision: Decision) -> list[str]:
    """Node, operator, type, range seen, reason."""
    seen = decision.range
    shown = "" if seen is None else f"{seen.low:.4g} to {seen.high:.4g}"
    return [decision.node, decision.op, decision.dtype, shown, decision.reason]


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


def _accuracy(plan: Plan, graph: Graph, run: Run) -> AccuracyRecord | NotRun:
    """The gate on the user's metric, run each time: what the metric's code reads is not known."""
    accuracy = plan.spec_file.spec.accuracy
    if accuracy is None:
        return NotRun(reason="the spec names no metric")
    if plan.lower_key is None:
        return NotRun(reason="the graph is built in the types that it has, and engines run on their GPU only")
    from trtforge import quality  # noqa: PLC0415 - loads onnxruntime

    start = time.perf_counter()
    run.stages.tell(Event("started", "accuracy"))
    candidate, _ = quality.emulation_of(graph, run.stages.store.new_folder("accuracy"))
    report = quality.check_accuracy(plan.spec_file, plan.graph, candidate, run.stages)
    text = f"{report.reference:.4g} in FP32, {report.candidate:.4g} in {plan.spec_file.spec.precision.type}"
    run.stages.tell(Event("done", "accuracy", text, seconds=time.perf_counter() - start))
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


def _parity_record(report: ParityReport) -> ParityRecord:
    """The report in short; one that failed has ended the run."""
    closest = [
        (output.verdict.closest, output.name, point.label)
        for point in report.points
        for output in point.outputs
        if output.verdict.closest
    ]
    worst = max(closest, key=lambda entry: entry[0].excess, default=None)
    return ParityRecord(
        stage=report.stage,  # type: ignore[arg-type]
        verdict="passed" if report.verdict == "passed" else "not_run",
        reason=report.reason,
        reference=report.reference.name if report.reference else None,
        candidate=report.candidate.name if report.candidate else None,
        num_points=sum(point.not_run is None for point in report.points),
        tightest=f"{worst[1]} at {worst[2]}: {worst[0]}" if worst else None,
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


def _check_profiles(plan: Plan, run: Run) -> tuple[PointCheck, ...]:
    spec_file = plan.spec_file
    index_of = {profile.name: index for index, profile in enumerate(plan.profiles)}
    failures_dir = run.stages.store.root / "failures" / f"{spec_file.spec.name}-inputs"

    def compute() -> tuple[Any, dict[str, Path]]:
        from trtforge.shapes.profile_check import check_profiles  # noqa: PLC0415 - loads onnxruntime

        with _unchanged_model(plan, run):
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


def _build_units(
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
        run.stages.tell(Event("done", _label(unit), f"no engine: {error.problems[0].summary}"))
        return [
            MissingTarget(unit.identifier, unit.gpu, unit.backend, skipped=False, problem=problem)
            for problem in error.problems
        ]


def _build_unit(planned: PlannedUnit, plan: Plan, graph: Graph, scales: CalibrationTable | None, run: Run) -> BuiltUnit:
    unit, spec_file = planned.unit, plan.spec_file

    def compute() -> tuple[Any, dict[str, Path]]:
        work_dir = run.stages.store.new_folder(unit.identifier)
        limit = spec_file.spec.build_timeout
        on_event = _forward(_label(unit), run.stages)
        try:
            cache = _calibration_cache(unit, plan, scales, work_dir) if scales else None
            with _unchanged_model(plan, run), _surroundings(unit, plan, cache, run) as around:
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
        return plain, {"engine": engine.path}

    def describe(plain: Any) -> tuple[str, ...]:
        size = f"{unit.identifier}.engine, {plain['engine']['size_bytes'] / 1e6:.1f} MB"
        return (size, *plain["engine"]["notes"], *filter(None, [plain["engine"]["trtexec"]]))

    record = run.stages.run(_label(unit), planned.key, compute, describe)
    path = run.stages.store.blob_path(record.blobs["engine"])
    engine: BuiltEngine = replace(from_plain(BuiltEngine, record.result["engine"]), path=path)
    _refuse_warnings(spec_file, unit, engine)
    host: HostRecord = from_plain(HostRecord, record.result["host"])
    flags = capability(unit.backend, unit.backend_version).flags_of_network(implicit=_is_implicit(spec_file))
    plugins = tuple(digest for name, digest in planned.key.inputs.items() if name.startswith("plugin "))
    return BuiltUnit(unit, planned.key.digest, engine, host, flags, plugins)


@contextmanager
def _surroundings(unit: BuildUnit, plan: Plan, calibration_cache: Path | None, run: Run) -> Iterator[Surroundings]:
    """What a build on this machine's GPU uses; one build at a time on a GPU, as kernels are chosen by measured times."""
    gpu = None if unit.backend == "tensorrt_rtx" else _gpu_at_hand(unit.gpu, plan.facts)
    if gpu is None:
        yield Surroundings()
        return
    store, spec = run.stages.store, plan.spec_file.spec
    measured = f"{unit.backend}-{unit.backend_version}-cuda{plan.facts.cuda_version}-{gpu.model}".replace(" ", "-")
    waiting = Event("step", _label(unit), f"waiting for {gpu.device_name}, which another build uses")
    with store.lock(f"gpu-{gpu.uuid or gpu.index}", on_wait=lambda: run.stages.tell(waiting)):
        yield Surroundings(
            gpu_uuid=gpu.uuid if len(plan.facts.gpus) > 1 else "",
            timing_cache=store.root / "timing" / f"{measured}.cache",
            plugins=spec.plugins,
            calibration_cache=calibration_cache,
            rest_fp16=spec.precision.type == "int8" and spec.precision.rest == "fp16",
            keep_fp32=spec.precision.keep.fp32,
        )


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


@contextmanager
def _unchanged_model(plan: Plan, run: Run) -> Iterator[None]:
    """Around work that reads the model's files itself, whose result is what its key says only if they do not change."""
    try:
        yield
    except TrtForgeError:
        _refuse_changed_model(plan, run)  # which is why it failed
        raise
    _refuse_changed_model(plan, run)


def _refuse_changed_model(plan: Plan, run: Run) -> None:
    """Compares the model's files with the graph that was ingested.

    Raises:
        BuildError: they changed, or are gone.
    """
    graph, digest_of = plan.graph, run.memo.digest
    try:
        external = [(file.location, digest_of(graph.weights_dir / file.location)) for file in graph.external_files]
        if model_digest(digest_of(graph.source), external) == graph.digest:
            return
    except OSError:
        pass  # it is gone, or being replaced
    raise _changed_model(plan.spec_file, graph.source)


def _changed_model(spec_file: SpecFile, source: Path) -> BuildError:
    return BuildError(
        f"{shown_path(source)} or a file with its weights changed during the build, so what was made of it is dropped",
        where=spec_file.where("model", "onnx"),
        next_step="run the build again once the file is written",
    )


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


def _publish(
    plan: Plan,
    evidence: Evidence,
    built: list[BuiltUnit],
    missing: list[MissingTarget],
    output_dir: Path,
    run: Run,
) -> tuple[Manifest, bool]:
    start = time.perf_counter()
    _refuse_changed_model(plan, run)
    stages = run.stages
    onnxruntime = plan.facts.packages["onnxruntime"]
    manifest = make_manifest(plan.spec_file, plan.graph, evidence, built, missing, stages.done, onnxruntime)
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
    return tuple(_backend_state(name, facts.packages.get(name), facts) for name in _INSTALL)


def _backend_state(name: str, version: str | None, facts: MachineFacts) -> BackendState:
    if version is None:
        return BackendState(name, None, (), "not installed", _INSTALL[name])
    try:
        builds_for = capability(name, version).compute_capabilities
    except CapabilityError as error:
        return BackendState(name, version, (), error.problems[0].summary, error.problems[0].next_step)
    if name == "tensorrt":  # which builds for the GPUs at hand only
        builds_for = tuple(gpu.model for gpu in facts.gpus if gpu.model and gpu.compute_capability in builds_for)
    if not builds_for:
        return BackendState(name, version, (), f"{version}, and no GPU here that it builds for", "nvidia-smi")
    return BackendState(name, version, builds_for, f"{version}, builds here for {', '.join(builds_for)}", "")
