"""The manifest: what was built, from what, on what, and what is missing. The JSON Schema in `configs/` is generated here.

A manifest that was read is well-formed and names no file outside its folder. That its files are what it says is for
`trtforge.release.verify` to find out.
"""

from __future__ import annotations

import json
import reprlib
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config

from trtforge.errors import IntegrityError, Problem, StoreError, TrtForgeError, Where, raise_any, shown_path

SCHEMA_VERSION = 1
MAX_MANIFEST_BYTES = 16 << 20
"""A manifest with hundreds of engines is below 1 MiB; anything near this is not one."""
MANIFEST_NAME = "manifest.json"
_MAX_LISTED_PROBLEMS = 50
_NAME_A_MANIFEST = f"name the {MANIFEST_NAME} in an output folder"
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_COPY_AGAIN = "copy the whole folder again from where it was built, or run: trtforge build SPEC"
_CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)
_STRICT = with_config(_CONFIG)


def _bundle_path(value: str) -> str:
    parts = value.split("/")
    if any(part in {"", ".", ".."} for part in parts) or any(c in "\\:" or not c.isprintable() for c in value):
        raise ValueError(
            f"found {value!r}, expected a path inside the manifest's folder, without '..', '\\', ':', leading '/' "
            "or control characters"
        )
    return value


Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
"""Lower-case hex SHA-256."""
BundlePath = Annotated[str, AfterValidator(_bundle_path)]
"""Relative path with '/' that stays inside the manifest's folder."""
EnumName = Annotated[str, Field(pattern="^[A-Z][A-Z0-9_]*$")]
"""A TensorRT enum member by name. Its integers changed between TensorRT 10 and 11."""
Capability = Annotated[str, Field(pattern="^sm[0-9]{2,3}$")]
UtcTime = Annotated[str, Field(pattern="^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$")]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
ManifestShape = tuple[Count, ...]
BackendVersion = Annotated[str, Field(pattern=r"^[0-9]{1,6}(\.[0-9]{1,6}){1,3}")]
BackendName = Literal["tensorrt", "tensorrt_rtx"]
SettingValue = bool | int | str | tuple[str, ...] | None


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class SpecRecord:
    """The build spec."""

    file: str
    """Its file name, without folder."""
    digest: Digest
    """Of its values, as `SpecFile.digest`."""


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalFileRecord:
    """A file that held weights of the model."""

    location: str
    """As the model names it. Never opened by whoever reads a manifest."""
    size_bytes: Count
    digest: Digest


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """The model that the engines were made from."""

    file: str
    """Its file name, without folder."""
    digest: Digest
    """Of the source's bytes and its external files, as `Graph.digest`."""
    size_bytes: Count
    """Of the model file alone."""
    opset: Count
    producer: str
    external_files: tuple[ExternalFileRecord, ...] = ()


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """One stage of the build that wrote this manifest."""

    name: str
    key: Digest
    """Of everything that decides the stage's result."""
    seconds: Seconds
    """Wall time; 0 where the stored result was used."""
    notes: tuple[str, ...] = ()


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class HostGpu:
    """A GPU of the machine that built."""

    device_name: str
    compute_capability: Capability
    num_sms: Count
    memory_bytes: Count


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class HostRecord:
    """The machine that built."""

    python: str
    platform: str
    packages: dict[str, str]
    """Package name -> full version."""
    driver: str | None
    cuda: str | None
    gpus: tuple[HostGpu, ...]


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltOn:
    """The GPU that an engine was timed and built on."""

    device_name: str
    num_sms: Count
    memory_bytes: Count
    driver: str


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRecord:
    """min, opt and max shape of a tensor, or values of a shape-value input."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRecord:
    """One optimization profile, at its index in the engine."""

    name: str
    shapes: dict[str, RangeRecord]
    """Input name -> shapes, for every input."""
    values: dict[str, RangeRecord]
    """Shape-value input name -> values."""


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One input or output of an engine."""

    name: str
    dtype: str
    """As the engine has it, after the parser's own narrowing."""
    shape: tuple[Count | str | None, ...]
    """Sizes, symbols, or null for an unnamed dynamic dimension."""
    ranges: dict[str, RangeRecord]
    """Profile name -> shapes. Empty for a data-dependent output."""
    data_dependent: bool
    """Whether the shape depends on the values of the inputs."""


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedLayers:
    """Layers that do most of the work, of one kind and type."""

    kind: EnumName
    """TensorRT's LayerType."""
    dtype: str
    """What they compute in."""
    num_layers: Count


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One engine."""

    identifier: str
    file: BundlePath
    size_bytes: Count
    digest: Digest
    backend: BackendName
    backend_version: BackendVersion
    """Full version of the builder, such as 10.9.0.34."""
    network_flags: tuple[EnumName, ...]
    builder_flags: tuple[EnumName, ...]
    settings: dict[str, SettingValue]
    """Builder settings by name, defaults included."""
    tf32: bool
    precision: str
    target_gpu: str
    """As in the spec: a compute capability for tensorrt_rtx, a GPU model for tensorrt."""
    compute_capability: Capability
    built_on: BuiltOn | None
    """Null for tensorrt_rtx, which builds without a GPU."""
    host: Digest
    """Key in `hosts` of the machine that built it."""
    timing_cache_digest: Digest | None
    graph_digest: Digest
    unit_digest: Digest
    """Of everything that decides the engine; engines themselves are not bit-reproducible."""
    profiles: tuple[ProfileRecord, ...]
    inputs: tuple[TensorRecord, ...]
    outputs: tuple[TensorRecord, ...]
    seconds: dict[str, Seconds]
    """Wall seconds of the build by part: start, parse, build, write."""
    warnings: tuple[str, ...]
    """The builder's warnings, in order."""
    peak_memory_bytes: Count | None
    """Largest resident size of the builder's process."""
    notes: tuple[str, ...] = ()
    """What the build found out about the engine besides."""
    trtexec: str = ""
    """The command of TensorRT's own tool that asks for the same engine; empty where there is none."""
    weighted_layers: tuple[WeightedLayers, ...] = ()
    """Of the network that was built; empty where TensorRT chooses the types (8.6, implicit quantization)."""
    plugins: tuple[Digest, ...] = ()
    """Of the plugin libraries that it was built with, and that have to be loaded before it."""


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileCheck:
    """One run of the model by the reference at one point of one profile."""

    profile: str
    point: Literal["min", "opt", "max"]
    input_shapes: dict[str, ManifestShape]
    output_shapes: dict[str, ManifestShape]
    finite: bool
    """Whether every output value was finite."""
    reference_provider: str
    reference_version: str


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class NotRun:
    """A check that did not happen."""

    status: Literal["not_run"] = "not_run"
    reason: str
    next_step: str = ""


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class ParityRecord:
    """One step of the model compared with the step before it."""

    stage: Literal["onnx", "mended", "lowered", "engine"]
    """Whose result was compared."""
    verdict: Literal["passed", "not_run"]
    """A bundle with a failed one is never written."""
    reason: str
    reference: str | None
    candidate: str | None
    num_points: Count
    outputs: dict[str, str]
    """Output -> the bound that was nearest to its limit, with what was found, what is allowed, and where."""


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyRecord:
    """The user's metric on the reference and on the candidate."""

    metric: str
    data_digest: Digest
    num_samples: Count
    reference: float
    candidate: float
    drop_at_most: float
    """Upper bound of the drop."""
    confidence: float
    allowed: float


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """What an engine did on its GPU."""

    status: Literal["run"] = "run"
    engine_digest: Digest
    gpu: str
    driver: str
    tensorrt: str
    cuda: str
    """Library that reached CUDA."""
    parity: ParityRecord
    """Against onnxruntime in FP32."""
    accuracy: AccuracyRecord | NotRun
    judged_by: Digest
    """Of inputs, bounds and metric; a build that judges by others does not take the record over."""
    layer_types: dict[str, Count]
    """Element type -> number of layers, as TensorRT's inspector tells; `unknown` for layers of which it tells none."""
    engine_bytes: Count
    """GPU memory that loading took."""
    run_bytes: Count
    """GPU memory that contexts and tensors took besides, after all comparisons."""


Milliseconds = Annotated[float, Field(ge=0)]


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class PercentilesRecord:
    """Of one kind of time, in milliseconds, by trtexec's rule."""

    p50: Milliseconds
    p90: Milliseconds
    p95: Milliseconds
    p99: Milliseconds


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class SlowdownRecord:
    """Median latency over that of the previous engine, minus 1, with its confidence interval."""

    ratio: float
    low: float
    high: float


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class PointRecord:
    """An engine at one set of sizes."""

    sizes: dict[str, Count]
    """Name of the open size -> size."""
    profile: str
    latency_ms: PercentilesRecord
    """Copies of inputs and outputs included."""
    compute_ms: PercentilesRecord
    throughput_qps: Annotated[float, Field(ge=0)]
    num_queries: Count
    context_bytes: Count
    """GPU memory that contexts and tensors take besides the engine."""
    slowdown: SlowdownRecord | None
    """Null where nothing was compared."""
    remarks: tuple[str, ...]
    """What makes the figures less sure than they look, such as clocks that move."""


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousRecord:
    """The engine of an earlier bundle that was measured by turns with this one."""

    identifier: str
    digest: Digest


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """Everything measured of one engine."""

    status: Literal["measured"] = "measured"
    engine_digest: Digest
    gpu: str
    driver: str
    tensorrt: str
    cuda: str
    """Library that reached CUDA."""
    switches: dict[str, bool | int | float]
    """How it was measured, as `trtforge bench` names them."""
    engine_bytes: Count
    """GPU memory that loading took."""
    points: Annotated[tuple[PointRecord, ...], Field(min_length=1)]
    previous: PreviousRecord | NotRun | None
    """Null where no regression was to be found."""
    warnings: tuple[str, ...]


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class PerformanceRecord:
    """What the spec asks of the engines, and what was measured of each."""

    status: Literal["measured"] = "measured"
    p99_ms: float | None
    throughput_qps: float | None
    max_regression: float | None
    sizes: dict[str, tuple[Count, ...]]
    cuda_graph: bool
    engines: dict[str, Annotated[EngineFigures | NotRun, Field(discriminator="status")]]
    """Identifier -> figures."""


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRecord:
    """What the ranges of a calibrated build come from."""

    method: Literal["auto", "minmax", "percentile", "entropy", "mse", "tensorrt_entropy", "tensorrt_minmax"]
    """As asked for."""
    num_samples: Count
    """Rows, not batches."""
    num_tensors: Count
    """With a range."""
    data_digest: Digest
    notes: tuple[str, ...]


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord:
    """How the ONNX file came from PyTorch."""

    callable: str
    torch: str
    exporter: str
    notes: tuple[str, ...]


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class LoweringDecision:
    """Why a node computes in the type it does."""

    node: str
    op: str
    dtype: str
    reason: str


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class MissingTarget:
    """A target without an engine."""

    identifier: str
    gpu: str
    backend: BackendName
    verdict: Literal["skipped", "failed"]
    reason: str
    next_step: str
    exit_code: Annotated[int, Field(ge=0, le=255)]


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything a release of engines can be judged by. Digests never depend on `created` or on any duration."""

    schema_version: Literal[1] = 1
    """Version of this format."""
    trtforge_version: str
    created: UtcTime
    """When the newest build ended, in UTC."""
    name: str
    spec: SpecRecord
    model: ModelRecord
    calibration_digest: Digest | None
    """Of the calibrated ranges; null where nothing was calibrated."""
    calibration: CalibrationRecord | None = None
    """Null where nothing was calibrated."""
    stages: tuple[StageRecord, ...]
    """Of the newest build, in order."""
    hosts: dict[Digest, HostRecord]
    """The machines that built the artifacts, by the digest of their record."""
    artifacts: tuple[Artifact, ...]
    profile_checks: tuple[ProfileCheck, ...]
    export: ExportRecord | None
    """Null where the spec names an ONNX file."""
    lowering: tuple[LoweringDecision, ...]
    """Nodes that stay FP32 though the spec asks for a lower type."""
    parity: tuple[ParityRecord, ...]
    """Of the steps up to the builder, in their order."""
    accuracy: AccuracyRecord | NotRun
    """Of the graph that was built; `engines` has that of each engine."""
    engines: dict[str, Annotated[EngineRecord | NotRun, Field(discriminator="status")]]
    """Identifier -> what the engine did."""
    performance: Annotated[PerformanceRecord | NotRun, Field(discriminator="status")]
    missing: tuple[MissingTarget, ...]


_Found = TypeVar("_Found", EngineFigures, EngineRecord)
_NEVER_RUN = NotRun(
    reason="it was not run when it was built, or judged by another spec",
    next_step="trtforge verify MANIFEST --spec SPEC, on its GPU",
)
_NO_FIGURES = NotRun(
    reason="it was built before the spec asked for these figures", next_step="trtforge build SPEC, on its GPU"
)


def _consistent(manifest: Manifest) -> Manifest:
    files = Counter(artifact.file for artifact in manifest.artifacts)
    identifiers = Counter(artifact.identifier for artifact in manifest.artifacts)
    hosts = {artifact.host for artifact in manifest.artifacts} - set(manifest.hosts)
    problems = [
        *(
            f"artifacts: {count} entries for the file {file!r}, expected one"
            for file, count in files.items()
            if count > 1
        ),
        *(
            f"artifacts: {count} entries called {name!r}, expected one"
            for name, count in identifiers.items()
            if count > 1
        ),
        *(f"hosts: no entry {host!r}, which an artifact names" for host in sorted(hosts)),
    ]
    if problems:
        raise ValueError("; ".join(problems[:_MAX_LISTED_PROBLEMS]))
    return manifest


@cache
def _adapter() -> TypeAdapter[Manifest]:
    return TypeAdapter(Annotated[Manifest, AfterValidator(_consistent)])


def manifest_json(manifest: Manifest) -> str:
    """`manifest` as JSON text that `read_manifest` accepts and that is the same for equal manifests.

    Keys stand in the order of the classes above; names given by people, flags, artifacts and missing targets are
    sorted, as their order has no meaning.

    Raises:
        ValidationError: a value is not what its class says, which is a bug of the caller.
    """
    text = _text(_ordered(manifest))
    _adapter().validate_json(text)
    return text


def _text(manifest: Manifest) -> str:
    return json.dumps(_plain(manifest), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _ordered(manifest: Manifest) -> Manifest:
    artifacts = tuple(
        replace(
            artifact,
            network_flags=tuple(sorted(artifact.network_flags)),
            builder_flags=tuple(sorted(artifact.builder_flags)),
        )
        for artifact in sorted(manifest.artifacts, key=lambda artifact: artifact.identifier)
    )
    missing = tuple(sorted(manifest.missing, key=lambda target: target.identifier))
    return replace(manifest, artifacts=artifacts, missing=missing)


def same_before(path: Path, manifest: Manifest) -> Manifest | None:
    """The manifest at `path` if it differs from `manifest` in times only; None where that has to be looked at more closely.

    It is what `read_manifest` gives, without an adapter for all of a manifest: 60 ms of the 900 that an unchanged
    build takes.
    """
    try:
        text = _read_text(path)
        told = _parse_json(text, path)
        created, stages = _times().validate_json(json.dumps([told["created"], told["stages"]]))
    except (TrtForgeError, ValueError, TypeError, KeyError):
        return None
    timed = _ordered(replace(manifest, created=created, stages=stages))
    return timed if _text(timed) == text else None


@cache
def _times() -> TypeAdapter[tuple[UtcTime, tuple[StageRecord, ...]]]:
    return TypeAdapter(tuple[UtcTime, tuple[StageRecord, ...]])


def read_manifest(path: Path) -> Manifest:
    """The manifest at `path`, whoever wrote it.

    Raises:
        StoreError: there is no readable regular file at `path`.
        IntegrityError, SeveralErrors: it is not a manifest of this schema version; each problem with its place.
    """
    text = _read_text(path)
    data = _parse_json(text, path)
    _check_schema_version(data, path)
    try:
        return _adapter().validate_json(text)
    except ValidationError as error:
        raise_any(_problems_of(error, path))
        raise


def manifest_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a manifest."""
    # Reading the docstrings takes a tenth of a second, which every build would pay.
    _CONFIG["use_attribute_docstrings"] = True
    try:
        schema = TypeAdapter(Manifest).json_schema()
    finally:
        del _CONFIG["use_attribute_docstrings"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "trtforge manifest"}


def merge(previous: Manifest, new: Manifest, planned: Mapping[str, str], judged_by: str) -> Manifest:
    """`new`, with those engines of `previous` that it did not build again and whose unit is still planned.

    So a build on one GPU keeps the engines of another, entry by entry as they were, and drops what the spec no longer
    asks for. A target is missing only if neither has its engine.

    Args:
        previous: the manifest in the output folder.
        new: what this run built.
        planned: unit digest of an engine that the spec asks for today -> identifier of the target that it is.
        judged_by: see `EngineRecord`, of the spec as it is today.
    """
    taken = {artifact.file for artifact in new.artifacts} | {artifact.unit_digest for artifact in new.artifacts}
    kept = tuple(
        artifact
        for artifact in previous.artifacts
        if artifact.unit_digest in planned and artifact.unit_digest not in taken and artifact.file not in taken
    )
    artifacts = new.artifacts + kept
    built = {artifact.identifier for artifact in new.artifacts} | {planned[artifact.unit_digest] for artifact in kept}
    used_hosts = {artifact.host for artifact in artifacts}
    hosts = {key: host for key, host in {**previous.hosts, **new.hosts}.items() if key in used_hosts | set(new.hosts)}
    missing = tuple(target for target in new.missing if target.identifier not in built)
    performance = _merged_performance(previous.performance, new.performance, artifacts)
    judged = {name: run for name, run in previous.engines.items() if getattr(run, "judged_by", "") == judged_by}
    engines = _merged(judged, new.engines, artifacts, _NEVER_RUN)
    return replace(new, artifacts=artifacts, hosts=hosts, missing=missing, engines=engines, performance=performance)


def _merged_performance(
    previous: PerformanceRecord | NotRun, new: PerformanceRecord | NotRun, artifacts: tuple[Artifact, ...]
) -> PerformanceRecord | NotRun:
    """What `new` asks for; of an engine that it has no figures of, those of `previous` that were taken the same way."""
    if isinstance(new, NotRun):
        return new
    known: Mapping[str, EngineFigures | NotRun] = {}
    if isinstance(previous, PerformanceRecord) and (previous.sizes, previous.cuda_graph) == (new.sizes, new.cuda_graph):
        known = previous.engines
    return replace(new, engines=_merged(known, new.engines, artifacts, _NO_FIGURES))


def _merged(
    previous: Mapping[str, _Found | NotRun],
    new: Mapping[str, _Found | NotRun],
    artifacts: tuple[Artifact, ...],
    absent: NotRun,
) -> dict[str, _Found | NotRun]:
    """What is known of each engine: by `new`, else by `previous` of the same bytes."""
    merged = {}
    for artifact in artifacts:
        found, earlier = (known.get(artifact.identifier, absent) for known in (new, previous))
        is_same = not isinstance(earlier, NotRun) and earlier.engine_digest == artifact.digest
        merged[artifact.identifier] = earlier if is_same and isinstance(found, NotRun) else found
    return merged


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(value[key]) for key in sorted(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _read_text(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise StoreError(f"{path} is a folder, expected a manifest", next_step=f"name {path / MANIFEST_NAME}")
        if not stat.S_ISREG(mode):
            raise StoreError(f"{path} is no regular file, expected a manifest", next_step=_NAME_A_MANIFEST)
        with path.open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise StoreError(f"{shown_path(path)} cannot be read: {error.strerror}", next_step=_NAME_A_MANIFEST) from error
    if len(data) > MAX_MANIFEST_BYTES:
        raise IntegrityError(
            f"{path} is larger than {MAX_MANIFEST_BYTES >> 20} MiB, so it is not a manifest", next_step=_COPY_AGAIN
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise IntegrityError(
            f"{path} is not UTF-8 text (byte {error.start})", where=Where(path), next_step=_COPY_AGAIN
        ) from error


def _parse_json(text: str, path: Path) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        where = Where(path, error.lineno, error.colno)
        raise IntegrityError(f"not JSON: {error.msg}", where=where, next_step=_COPY_AGAIN) from error
    except (ValueError, RecursionError) as error:
        reason = "values nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise IntegrityError(f"not a manifest: {reason}", where=Where(path), next_step=_COPY_AGAIN) from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {repeated!r} occurs twice in one object")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _check_schema_version(data: Any, path: Path) -> None:
    if not isinstance(data, dict) or "schema_version" not in data:
        raise IntegrityError(
            "no manifest of trtforge: it has no 'schema_version'", where=Where(path), next_step=_COPY_AGAIN
        )
    found = data["schema_version"]
    if type(found) is not int or found != SCHEMA_VERSION:
        raise IntegrityError(
            f"found schema_version {found!r}, this trtforge reads {SCHEMA_VERSION}",
            where=Where(path),
            next_step="pip install --upgrade trtforge",
        )


def _problems_of(error: ValidationError, path: Path) -> Iterator[Problem]:
    details = error.errors(include_url=False)
    for detail in details[:_MAX_LISTED_PROBLEMS]:
        summary = f"{_dotted(detail['loc'])}: {_reason(detail)}"
        yield Problem(summary, _COPY_AGAIN, Where(path), exit_code=IntegrityError.exit_code)
    if len(details) > _MAX_LISTED_PROBLEMS:
        summary = f"and {len(details) - _MAX_LISTED_PROBLEMS} more problems"
        yield Problem(summary, _COPY_AGAIN, Where(path), exit_code=IntegrityError.exit_code)


def _dotted(keys: tuple[int | str, ...]) -> str:
    """`("artifacts", 0, "digest")` as `artifacts[0].digest`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).lstrip(".") or "the manifest"


def _reason(detail: Any) -> str:
    match detail["type"]:
        case "missing":
            return "not there, expected a value"
        case "unexpected_keyword_argument":
            return "unknown key"
        case "value_error":
            return str(detail["ctx"]["error"])
    return f"found {_SHORT.repr(detail['input'])}: {detail['msg'].lower()}"
