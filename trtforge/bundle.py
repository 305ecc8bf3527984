"""Puts together what a build gave: the manifest, and the output folder with engines of earlier builds kept."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import trtforge
from trtforge.digests import value_digest
from trtforge.errors import Problem, StoreError, TrtForgeError, shown_path
from trtforge.gpu_models import gpu_model, model_of_device
from trtforge.machine import MachineFacts
from trtforge.release import manifest as released
from trtforge.release.output import publish
from trtforge.shapes.points import PointCheck
from trtforge.spec.load import SpecFile
from trtforge.stages import Stage
from trtforge.types import BuildUnit, BuiltEngine, Graph, Profile, TensorSpec


@dataclass(frozen=True, slots=True)
class BuiltUnit:
    """An engine of this run, built or from the store.

    Attributes:
        key: digest of everything that decides it.
        engine: as the backend gave it; its path is a blob of the store.
        host: the machine that built it, which may be another one.
        network_flags: names of the flags that the network was made with.
        plugins: digests of the plugin libraries that it was built with.
    """

    unit: BuildUnit
    key: str
    engine: BuiltEngine
    host: released.HostRecord
    network_flags: tuple[str, ...]
    plugins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MissingTarget:
    """A target without an engine, and why. `skipped` is what `when_missing: skip` allows."""

    identifier: str
    gpu: str
    backend: str
    skipped: bool
    problem: Problem


def host_record(facts: MachineFacts) -> released.HostRecord:
    """This machine, as a manifest holds it."""
    return released.HostRecord(
        python=facts.python_version,
        platform=f"{platform.system()} {facts.cpu}, {facts.os}",
        packages=facts.packages,
        driver=facts.cuda_driver_version or None,
        cuda=facts.cuda_version or None,
        gpus=tuple(
            released.HostGpu(
                device_name=gpu.device_name,
                compute_capability=gpu.compute_capability,
                num_sms=gpu.num_sms,
                memory_bytes=gpu.memory_bytes,
            )
            for gpu in facts.gpus
        ),
    )


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was found out about the model on its way to the builder, and about each engine on its GPU."""

    checks: tuple[PointCheck, ...]
    export: released.ExportRecord | None
    lowering: tuple[released.LoweringDecision, ...]
    parity: tuple[released.ParityRecord, ...]
    accuracy: released.AccuracyRecord | released.NotRun
    calibration_digest: str | None
    calibration: released.CalibrationRecord | None
    engines: Mapping[str, released.EngineRecord | released.NotRun]


def make_manifest(
    spec_file: SpecFile,
    graph: Graph,
    evidence: Evidence,
    built: Iterable[BuiltUnit],
    missing: Iterable[MissingTarget],
    stages: Iterable[Stage],
    onnxruntime: str,
    performance: released.PerformanceRecord | released.NotRun,
) -> released.Manifest:
    """The manifest of one run, before engines of earlier runs join it."""
    built = tuple(built)
    checks = evidence.checks
    return released.Manifest(
        trtforge_version=trtforge.__version__,
        created=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        name=spec_file.spec.name,
        spec=released.SpecRecord(file=spec_file.path.name, digest=spec_file.digest),
        model=released.ModelRecord(
            file=graph.source.name,
            digest=graph.digest,
            size_bytes=graph.source.stat().st_size,
            opset=graph.opset,
            producer=graph.producer,
            external_files=tuple(
                released.ExternalFileRecord(location=file.location, size_bytes=file.size_bytes, digest=file.digest)
                for file in graph.external_files
            ),
        ),
        calibration_digest=evidence.calibration_digest,
        calibration=evidence.calibration,
        stages=tuple(
            released.StageRecord(
                name=stage.name, key=stage.key, seconds=round(stage.seconds, 3), notes=(stage.verdict, *stage.notes)
            )
            for stage in stages
        ),
        hosts={_host_key(entry.host): entry.host for entry in built},
        artifacts=tuple(_artifact(entry, graph, checks) for entry in built),
        profile_checks=tuple(
            released.ProfileCheck(
                profile=check.profile,
                point=check.point,
                input_shapes=check.input_shapes,
                output_shapes=check.output_shapes,
                finite=check.finite,
                reference_provider="CPUExecutionProvider",
                reference_version=onnxruntime,
            )
            for check in checks
        ),
        export=evidence.export,
        lowering=evidence.lowering,
        parity=evidence.parity,
        accuracy=evidence.accuracy,
        engines=dict(evidence.engines),
        performance=performance,
        missing=tuple(
            released.MissingTarget(
                identifier=entry.identifier,
                gpu=entry.gpu,
                backend=entry.backend,  # type: ignore[arg-type]
                verdict="skipped" if entry.skipped else "failed",
                reason=entry.problem.summary,
                next_step=entry.problem.next_step,
                exit_code=entry.problem.exit_code,
            )
            for entry in {entry.identifier: entry for entry in missing}.values()
        ),
    )


def publish_bundle(
    manifest: released.Manifest,
    built: Iterable[BuiltUnit],
    target_of: Callable[[released.Artifact], str | None],
    judged_by: str,
    output_dir: Path,
    *,
    digest_of: Callable[[Path], str],
    warn: Callable[[str], None],
) -> tuple[released.Manifest, bool]:
    """Writes engines and manifest to `output_dir`, and says whether anything had to be written.

    Engines of an earlier build that this run did not make stay as they are while their target is still planned; those
    that are planned no more are removed. The caller holds the output's lock.

    Args:
        manifest: of this run.
        built: the engines of this run.
        target_of: identifier of the spec's unit that an engine of an earlier build is, wherever it was built; None if
            the spec asks for it no more.
        judged_by: see `EngineRecord`.
        output_dir: folder of the bundle, made if needed.
        digest_of: SHA-256 of a file; may remember files that have not changed since.
        warn: told about an earlier manifest that cannot be read.

    Raises:
        StoreError: the folder holds something else, or cannot be written.
    """
    same = released.same_before(output_dir / released.MANIFEST_NAME, manifest)
    if same and len(_whole(same, output_dir, digest_of)) == len(same.artifacts):
        return same, False
    previous = _previous(output_dir, manifest.name, warn)
    whole = _whole(previous, output_dir, digest_of) if previous else ()
    if previous:
        planned = {one.unit_digest: target for one in whole if (target := target_of(one))}
        manifest = released.merge(replace(previous, artifacts=whole), manifest, planned, judged_by)
    if previous and len(whole) == len(previous.artifacts) and _is_same(previous, manifest):
        return previous, False
    kept = {artifact.file for artifact in manifest.artifacts}
    stale = [artifact.file for artifact in previous.artifacts if artifact.file not in kept] if previous else []
    there = {artifact.file: artifact.digest for artifact in whole}
    files = {_file(entry.unit): entry.engine for entry in built}
    new = {name: engine.path for name, engine in files.items() if there.get(name) != engine.digest}
    publish(output_dir, new, released.manifest_json(manifest), stale=stale)
    return manifest, True


def _is_same(previous: released.Manifest, manifest: released.Manifest) -> bool:
    """Whether two manifests differ in times only."""
    timed = replace(manifest, created=previous.created, stages=previous.stages)
    return released.manifest_json(timed) == released.manifest_json(previous)


def _previous(output_dir: Path, name: str, warn: Callable[[str], None]) -> released.Manifest | None:
    """The manifest of an earlier build of the same spec.

    Raises:
        StoreError: the folder holds another bundle, or a manifest.json that is none of trtforge's.
    """
    path = output_dir / released.MANIFEST_NAME
    if not path.exists():
        return None
    try:
        previous = released.read_manifest(path)
    except TrtForgeError as error:
        if b'"schema_version"' not in path.read_bytes()[:4096]:
            raise StoreError(
                f"{shown_path(path)} is no manifest of trtforge, and would be overwritten",
                next_step=f"build into another folder: --output {shown_path(output_dir)}/{name}",
            ) from None
        warn(f"the earlier manifest is replaced: {error.problems[0].summary}")
        return None
    if previous.name != name:
        raise StoreError(
            f"{shown_path(output_dir)} holds the bundle '{previous.name}', whose engines would be removed",
            next_step=f"build into a folder of its own: --output {shown_path(output_dir)}/{name}",
        )
    return previous


def _whole(
    manifest: released.Manifest, output_dir: Path, digest_of: Callable[[Path], str]
) -> tuple[released.Artifact, ...]:
    """The artifacts whose files are what the manifest says."""

    def is_whole(artifact: released.Artifact) -> bool:
        path = output_dir / artifact.file
        return path.is_file() and not path.is_symlink() and digest_of(path) == artifact.digest

    return tuple(artifact for artifact in manifest.artifacts if is_whole(artifact))


def _file(unit: BuildUnit) -> str:
    return f"{unit.identifier}.engine"


def _host_key(host: released.HostRecord) -> str:
    return value_digest(asdict(host))


def _artifact(entry: BuiltUnit, graph: Graph, checks: tuple[PointCheck, ...]) -> released.Artifact:
    unit, engine = entry.unit, entry.engine
    return released.Artifact(
        identifier=unit.identifier,
        file=_file(unit),
        size_bytes=engine.size_bytes,
        digest=engine.digest,
        backend=unit.backend,  # type: ignore[arg-type]
        backend_version=unit.backend_version,
        network_flags=entry.network_flags,
        builder_flags=engine.builder_flags,
        settings=unit.settings,  # type: ignore[arg-type]
        tf32=unit.tf32,
        precision=unit.precision,
        target_gpu=unit.gpu,
        compute_capability=unit.compute_capability,
        built_on=_built_on(entry),
        host=_host_key(entry.host),
        timing_cache_digest=engine.timing_cache_digest,
        graph_digest=unit.graph_digest,
        unit_digest=entry.key,
        profiles=tuple(_profile(profile) for profile in unit.profiles),
        inputs=tuple(_input(tensor, unit.profiles) for tensor in engine.inputs),
        outputs=tuple(_output(tensor, graph, checks) for tensor in engine.outputs),
        seconds={part: round(seconds, 3) for part, seconds in engine.seconds.items()},
        warnings=tuple(message.text for message in engine.messages if message.severity == "warning"),
        peak_memory_bytes=engine.peak_memory_bytes,
        notes=engine.notes,
        trtexec=engine.trtexec,
        weighted_layers=tuple(
            released.WeightedLayers(kind=group.kind, dtype=group.dtype, num_layers=len(group.names))
            for group in engine.weighted_layers
        ),
        plugins=entry.plugins,
    )


def _built_on(entry: BuiltUnit) -> released.BuiltOn | None:
    """The GPU of the target on the machine that built; none for TensorRT-RTX, which uses none."""
    if entry.unit.backend == "tensorrt_rtx":
        return None
    model = gpu_model(entry.unit.gpu).name
    gpu = next(gpu for gpu in entry.host.gpus if model_of_device(gpu.device_name) == model)
    return released.BuiltOn(
        device_name=gpu.device_name,
        num_sms=gpu.num_sms,
        memory_bytes=gpu.memory_bytes,
        driver=entry.host.driver or "",
    )


def _profile(profile: Profile) -> released.ProfileRecord:
    return released.ProfileRecord(
        name=profile.name,
        shapes={name: released.RangeRecord(**asdict(shapes)) for name, shapes in profile.shapes.items()},
        values={name: released.RangeRecord(**asdict(values)) for name, values in profile.values.items()},
    )


def _input(tensor: TensorSpec, profiles: tuple[Profile, ...]) -> released.TensorRecord:
    ranges = {profile.name: released.RangeRecord(**asdict(profile.shapes[tensor.name])) for profile in profiles}
    return released.TensorRecord(
        name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, ranges=ranges, data_dependent=False
    )


def _output(tensor: TensorSpec, graph: Graph, checks: tuple[PointCheck, ...]) -> released.TensorRecord:
    """Ranges are the shapes that the reference gave at each profile's points; none where the data decides them."""
    data_dependent = tensor.name in graph.data_dependent_outputs
    ranges = {}
    for profile in dict.fromkeys(check.profile for check in checks):
        shapes = {check.point: check.output_shapes[tensor.name] for check in checks if check.profile == profile}
        low = shapes["min"]
        opt = shapes.get("opt", low)  # a point that equals an earlier one was not run again
        ranges[profile] = released.RangeRecord(min=low, opt=opt, max=shapes.get("max", opt))
    return released.TensorRecord(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        ranges={} if data_dependent else ranges,
        data_dependent=data_dependent,
    )
