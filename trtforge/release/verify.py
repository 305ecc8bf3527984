"""Compares a bundle with its manifest, and the manifest with a GPU and a TensorRT version. Runs and loads nothing of it."""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trtforge.digests import file_digest
from trtforge.errors import PARTIAL_EXIT_CODE, CapabilityError, IntegrityError, ParityError, Problem, StoreError, Where
from trtforge.gpu_models import compute_capability_number, gpu_model, model_of_device, parse_compute_capability
from trtforge.plan_header import RTX_COMPUTE_CAPABILITIES, PlanHeader, read_plan_header
from trtforge.release.gates import missed_gates, not_judged, silently_wider, sizes_text
from trtforge.release.later_versions import reaches, version_parts
from trtforge.release.manifest import (
    AccuracyRecord,
    Artifact,
    EngineFigures,
    EngineRecord,
    Manifest,
    NotRun,
    ParityRecord,
    PerformanceRecord,
    read_manifest,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trtforge.machine import GpuFacts, MachineFacts

Verdict = Literal["ok", "failed", "warning", "not_checked"]
_REBUILD = "trtforge build SPEC"
_ADD_GPU = f"add that GPU to gpus: of the spec's targets, then: {_REBUILD}"
_COPY_AGAIN = f"copy the file again from where it was built, or run: {_REBUILD}"
_WANTED_TENSORRT = re.compile(r"(?:(tensorrt(?:[_-]rtx)?)[ =]+)?(\d{1,6}(?:\.\d{1,6})*)")
# TensorRT-RTX counts from 1.0; the first TensorRT that trtforge supports is 8.6.
_LAST_RTX_MAJOR = 7
SEE_DECISIONS = "trtforge plan SPEC --decisions  # why each node has its type"
_AMPERE = 80


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        artifact: the file concerned, as the manifest names it; None for the bundle as a whole.
        name: which check: artifacts, exists, size, sha256, header_kind, header_size, header_version,
            header_compute_capability, listed, gpu, tensorrt, target, parity, accuracy, precision or performance.
        verdict: `not_checked` where this run cannot know.
        text: what was found, and what was expected where they differ.
        next_step: what to do about it; empty for `ok`.
        exit_code: 0 unless the verdict is `failed`.
    """

    artifact: str | None
    name: str
    verdict: Verdict
    text: str
    next_step: str = ""
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All checks of one bundle, in the order of its manifest."""

    manifest_path: Path
    manifest: Manifest
    checks: tuple[Check, ...]

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The failed checks as problems, for the exit code and for printing."""
        return tuple(
            Problem(check.text, check.next_step, Where(self.manifest_path), exit_code=check.exit_code)
            for check in self.checks
            if check.verdict == "failed"
        )


@dataclass(frozen=True, slots=True)
class _Gpu:
    """A GPU that engines shall run on; `models` is empty where only its compute capability is known."""

    text: str
    compute_capability: str
    models: frozenset[str] = frozenset()
    num_sms: int | None = None


@dataclass(frozen=True, slots=True)
class _Version:
    """A version of one backend that engines shall run on, with as many parts as were given."""

    text: str
    backend: str
    parts: tuple[int, ...]


def verify(
    manifest_path: Path, *, wanted_gpu: str | None, wanted_tensorrt: str | None, facts: MachineFacts | None
) -> VerifyReport:
    """Every check of the bundle around `manifest_path`, each with its own line.

    Guaranteed where no check failed: the folder holds the engines that the manifest lists and no others, byte by byte
    as they were built (each file is read in full, every time), and one of them fits each wanted GPU and version. It is
    not proof that an engine loads, as nothing is loaded.

    Args:
        manifest_path: the manifest; the engines lie beside it.
        wanted_gpu: a compute capability (`sm89`) or a GPU model (`L4`).
        wanted_tensorrt: `10.9`, `1.7.1`, or with the backend `tensorrt_rtx 1.7.1`; compared part by part as numbers,
            for as many parts as given. A bare version below 8 is one of TensorRT-RTX.
        facts: this machine, which stands in where neither is wanted by name.

    Raises:
        StoreError, IntegrityError, SeveralErrors: the manifest itself cannot be read.
        CapabilityError: `wanted_gpu` or `wanted_tensorrt` is none.
    """
    manifest = read_manifest(manifest_path)
    bundle = manifest_path.parent
    here = facts if wanted_gpu is None and wanted_tensorrt is None else None
    gpus = [_gpu_here(gpu) for gpu in here.gpus] if here else []
    if wanted_gpu is not None:
        gpus = [_named_gpu(wanted_gpu)]
    version = None if wanted_tensorrt is None else _named_version(wanted_tensorrt)
    groups = _groups(manifest, gpus)
    checks = [
        *_artifacts_checks(manifest),
        *(check for artifact in manifest.artifacts for check in _file_checks(bundle, artifact)),
        *_listed_checks(bundle, manifest),
        *_gpu_checks(manifest, gpus),
        *_tensorrt_checks(groups, version, here),
        *_target_checks(manifest),
        *_measured_checks(manifest),
    ]
    return VerifyReport(manifest_path, manifest, tuple(checks))


def _broken(artifact: str | None, name: str, text: str, next_step: str = _COPY_AGAIN) -> Check:
    return Check(artifact, name, "failed", text, next_step, IntegrityError.exit_code)


def _unfit(artifact: str | None, name: str, text: str, next_step: str = _REBUILD) -> Check:
    return Check(artifact, name, "failed", text, next_step, CapabilityError.exit_code)


def _artifacts_checks(manifest: Manifest) -> Iterator[Check]:
    if not manifest.artifacts:
        yield _broken(None, "artifacts", "the manifest lists no engine, expected at least one", _REBUILD)


def _file_checks(bundle: Path, artifact: Artifact) -> Iterator[Check]:
    try:
        path = _located(bundle, artifact.file)
        if isinstance(path, str):
            yield _broken(artifact.file, "exists", path)
            return
        size_bytes = path.stat().st_size
        digest = file_digest(path)
        header = read_plan_header(path)
    except OSError as error:
        text = f"{artifact.file} cannot be read: {error.strerror}"
        yield Check(artifact.file, "exists", "failed", text, f"ls -l {shlex.quote(str(bundle))}", StoreError.exit_code)
        return
    yield Check(artifact.file, "exists", "ok", f"{artifact.file} is there")
    yield _size_check(artifact, size_bytes)
    yield _digest_check(artifact, digest)
    yield from _header_checks(artifact, header, size_bytes)


def _located(bundle: Path, file: str) -> Path | str:
    """The real path of a regular file inside `bundle`, or what is wrong with it."""
    try:
        real = Path(os.path.realpath(bundle / file, strict=True))
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR}:
            return f"{file} is not there"
        if error.errno == errno.ELOOP:
            return f"{file} is a link that leads in a circle"
        raise
    if not real.is_relative_to(os.path.realpath(bundle)):
        return f"{file} is a link that leaves the bundle's folder, to {real}"
    if not stat.S_ISREG(real.stat().st_mode):
        return f"{file} is no regular file"
    return real


def _size_check(artifact: Artifact, size_bytes: int) -> Check:
    if size_bytes == artifact.size_bytes:
        return Check(artifact.file, "size", "ok", f"{size_bytes} bytes")
    text = f"{artifact.file} has {size_bytes} bytes, the manifest says {artifact.size_bytes}"
    return _broken(artifact.file, "size", text)


def _digest_check(artifact: Artifact, digest: str) -> Check:
    if digest == artifact.digest:
        return Check(artifact.file, "sha256", "ok", digest)
    text = f"{artifact.file} has SHA-256 {digest}, the manifest says {artifact.digest}"
    return _broken(artifact.file, "sha256", text)


def _header_checks(artifact: Artifact, header: PlanHeader | None, size_bytes: int) -> Iterator[Check]:
    """What the first bytes contradict. An unknown header is no proof against an engine, as the layout may change."""
    file = artifact.file
    if header is None:
        text = f"{file} does not begin like an engine of {artifact.backend} {artifact.backend_version}"
        yield Check(file, "header_kind", "warning", text, "load it once with that version before the release")
        return
    if header.kind != artifact.backend:
        yield _broken(file, "header_kind", f"{file} begins like {header.kind}, the manifest says {artifact.backend}")
        return
    yield Check(file, "header_kind", "ok", header.kind)

    found = ".".join(map(str, header.version))
    stated = version_parts(artifact.backend_version)
    agreeing = [one == other % 256 for one, other in zip(header.version, stated, strict=False)]
    if all(agreeing):
        yield Check(file, "header_version", "ok", found)
    elif all(agreeing[:2]):
        # Seen: the Python module of 8.6.1 with the libraries of 8.6.0. The libraries decide where an engine loads.
        text = f"{file} was written by the libraries of {header.kind} {found}, the Python module said "
        yield Check(file, "header_version", "warning", text + artifact.backend_version, f"run it with {found}")
    else:
        text = f"{file} was written by {header.kind} {found}, the manifest says {artifact.backend_version}"
        yield _broken(file, "header_version", text)

    if header.size_bytes is not None and header.size_bytes != size_bytes:
        text = f"{file} has {size_bytes} bytes, its own header says {header.size_bytes}"
        yield _broken(file, "header_size", text)
    elif header.size_bytes is not None:
        yield Check(file, "header_size", "ok", f"{size_bytes} bytes")

    if header.compute_capabilities is not None:
        yield _mask_check(artifact, header.compute_capabilities)


def _mask_check(artifact: Artifact, found: tuple[str, ...]) -> Check:
    file, expected = artifact.file, artifact.compute_capability
    if found == (expected,):
        return Check(file, "header_compute_capability", "ok", expected)
    text = f"{file} targets {', '.join(found) or 'no compute capability'}, the manifest says {expected}"
    if expected in found or expected not in RTX_COMPUTE_CAPABILITIES:
        return Check(file, "header_compute_capability", "warning", text, _REBUILD)
    return _broken(file, "header_compute_capability", text)


def _listed_checks(bundle: Path, manifest: Manifest) -> Iterator[Check]:
    """Engines that somebody could load and that the manifest does not vouch for."""
    listed = {bundle / artifact.file for artifact in manifest.artifacts}
    for folder in sorted({bundle} | {path.parent for path in listed}):
        for path in sorted(folder.glob("*.engine")):
            if path not in listed:
                file = str(path.relative_to(bundle))
                yield _broken(file, "listed", f"{file} is not in the manifest", f"rm {shlex.quote(str(path))}")


def _named_gpu(text: str) -> _Gpu:
    if re.match(r"(?i)sm_?\d|\d", text):
        return _Gpu(text, parse_compute_capability(text))
    model = gpu_model(text)
    return _Gpu(text, model.compute_capability, frozenset({model.name}))


def _gpu_here(gpu: GpuFacts) -> _Gpu:
    names = frozenset(name for name in (gpu.model, gpu.device_name) if name)
    return _Gpu(f"GPU {gpu.index} here ({gpu.device_name})", gpu.compute_capability, names, gpu.num_sms)


def _model_name(target_gpu: str) -> str:
    """`RTX 4090` for `rtx4090`; a name that is not known as it is."""
    try:
        return gpu_model(target_gpu).name
    except CapabilityError:
        return target_gpu


def _fit(artifact: Artifact, gpu: _Gpu) -> tuple[Verdict, str] | None:
    """Whether the engine runs on `gpu`, with what to know about it; None if it does not.

    Source: TensorRT documentation, "Hardware Compatibility": an engine checks the compute capability it was built on;
    another model of the same one loads it with a warning, unless it was built for compatibility.
    """
    label = f"{artifact.file}, built for {artifact.target_gpu} ({artifact.compute_capability})"
    level = artifact.settings.get("hardware_compatibility", "none")
    if artifact.backend == "tensorrt" and level == "ampere_plus":
        is_ampere_plus = compute_capability_number(gpu.compute_capability) >= _AMPERE
        return ("ok", f"{label} and all from Ampere on") if is_ampere_plus else None
    if artifact.compute_capability != gpu.compute_capability:
        return None
    if artifact.backend == "tensorrt_rtx" or level == "same_compute_capability" or not gpu.models:
        return "ok", label
    built_on = artifact.built_on
    if gpu.models.isdisjoint({_model_name(artifact.target_gpu), built_on.device_name if built_on else ""}):
        return "warning", f"{label}: same compute capability, other model, so it may be slow or out of memory"
    if built_on and gpu.num_sms is not None and gpu.num_sms != built_on.num_sms:
        return "warning", f"{label} with {built_on.num_sms} SMs, found {gpu.num_sms}: same model, other size"
    return "ok", label


def _gpu_checks(manifest: Manifest, gpus: list[_Gpu]) -> Iterator[Check]:
    if not gpus:
        text = "no GPU here, and none was named"
        yield Check(None, "gpu", "not_checked", text, "name one: --for L4")
    served = any(_fit(artifact, gpu) for artifact in manifest.artifacts for gpu in gpus)
    for gpu in gpus:
        fits = [(artifact, fit) for artifact in manifest.artifacts if (fit := _fit(artifact, gpu))]
        best = [(artifact, fit) for artifact, fit in fits if fit[0] == "ok"] or fits
        for artifact, (verdict, text) in best:
            next_step = "" if verdict == "ok" else _ADD_GPU
            yield Check(artifact.file, "gpu", verdict, f"{gpu.text}: {text}", next_step)
        if not fits:
            yield _no_engine_for(gpu, manifest, served=served)


def _no_engine_for(gpu: _Gpu, manifest: Manifest, *, served: bool) -> Check:
    """Failed, or a warning where another GPU of the same machine has its engine."""
    have = ", ".join(
        sorted({f"{artifact.target_gpu} ({artifact.compute_capability})" for artifact in manifest.artifacts})
    )
    text = f"no engine for {gpu.text} ({gpu.compute_capability}); there are engines for {have or 'no GPU'}"
    return Check(None, "gpu", "warning", text, _ADD_GPU) if served else _unfit(None, "gpu", text, _ADD_GPU)


def _named_version(text: str) -> _Version:
    match = _WANTED_TENSORRT.fullmatch(text.strip())
    if not match:
        raise CapabilityError(
            f"'{text}' is no TensorRT version, expected such as 10.9 or 'tensorrt_rtx 1.7.1'",
            next_step="--tensorrt 10.9",
        )
    parts = version_parts(match[2])
    backend = "tensorrt_rtx" if parts[0] <= _LAST_RTX_MAJOR else "tensorrt"
    backend = match[1].replace("-", "_") if match[1] else backend
    return _Version(f"{backend} {match[2]}", backend, parts)


def _groups(manifest: Manifest, gpus: list[_Gpu]) -> list[list[Artifact]]:
    """The engines to choose from for each of `gpus`, or for each GPU of the bundle where none of `gpus` has any."""
    fitting = [[artifact for artifact in manifest.artifacts if _fit(artifact, gpu)] for gpu in gpus]
    if any(fitting):
        return [group for group in fitting if group]
    by_target: dict[str, list[Artifact]] = {}
    for artifact in manifest.artifacts:
        by_target.setdefault(artifact.target_gpu, []).append(artifact)
    return list(by_target.values())


def _tensorrt_checks(
    groups: list[list[Artifact]], version: _Version | None, here: MachineFacts | None
) -> Iterator[Check]:
    if version is not None:
        yield from _version_checks(groups, version)
    elif here is None:
        text = "no TensorRT version was named"
        yield Check(None, "tensorrt", "not_checked", text, "name one: --tensorrt 10.9")
    else:
        for backend in sorted({artifact.backend for group in groups for artifact in group}):
            installed = here.packages.get(backend, "")
            if parts := version_parts(installed):
                yield from _version_checks(groups, _Version(f"{backend} {installed} here", backend, parts))
            else:
                text = f"{backend} is not installed here"
                yield Check(None, "tensorrt", "not_checked", text, "name a version: --tensorrt 10.9")


def _version_checks(groups: list[list[Artifact]], version: _Version) -> Iterator[Check]:
    """Whether each of `groups` has an engine for `version`."""
    found: dict[Check, None] = {}
    for group in groups:
        checks = [_version_check(artifact, version) for artifact in group if artifact.backend == version.backend]
        found |= dict.fromkeys([check for check in checks if check.verdict != "failed"] or checks)
    yield from found
    if not found:
        have = ", ".join(sorted({f"{one.backend} {one.backend_version}" for group in groups for one in group}))
        text = f"no engine for {version.text}; there are engines for {have or 'no version'}"
        next_step = f"add backend: {version.backend} to the spec's targets, then: {_REBUILD}"
        yield _unfit(None, "tensorrt", text, next_step)


def _version_check(artifact: Artifact, version: _Version) -> Check:
    built = version_parts(artifact.backend_version)
    text = f"{artifact.file} was built by {artifact.backend} {artifact.backend_version}, expected {version.text}"
    if all(one == other for one, other in zip(built, version.parts, strict=False)):
        text = f"{artifact.file} was built by {artifact.backend} {artifact.backend_version}"
        return Check(artifact.file, "tensorrt", "ok", text)
    if (
        artifact.backend == "tensorrt"
        and artifact.settings.get("version_compatible") is True
        and reaches(built, version.parts)
    ):
        text += "; it is version compatible, so that loads it once host code is allowed"
        return Check(artifact.file, "tensorrt", "warning", text, "runtime.engine_host_code_allowed = True")
    return _unfit(artifact.file, "tensorrt", text)


def _target_checks(manifest: Manifest) -> Iterator[Check]:
    for target in manifest.missing:
        if target.verdict == "failed":
            text = f"{target.identifier} was not built: {target.reason}"
            yield Check(None, "target", "failed", text, target.next_step, PARTIAL_EXIT_CODE)
        else:
            yield Check(
                None, "target", "not_checked", f"{target.identifier} was skipped: {target.reason}", target.next_step
            )


def _measured_checks(manifest: Manifest) -> Iterator[Check]:
    for record in manifest.parity:
        yield _parity_check(None, record, f"{record.stage}: {record.reason}")
    for artifact in manifest.artifacts:
        yield from _engine_checks(artifact, manifest.engines.get(artifact.identifier))
    accuracy = manifest.accuracy
    if isinstance(accuracy, AccuracyRecord):
        yield _accuracy_check(None, accuracy, "in the asked types")
    else:
        yield Check(
            None, "accuracy", "not_checked", f"accuracy was not measured: {accuracy.reason}", accuracy.next_step
        )
    asked = manifest.performance
    if isinstance(asked, PerformanceRecord):
        for artifact in manifest.artifacts:
            yield from _performance_checks(artifact, asked)
    else:
        text = f"performance was not measured: {asked.reason}"
        yield Check(None, "performance", "not_checked", text, asked.next_step)


def _parity_check(file: str | None, record: ParityRecord, text: str) -> Check:
    return Check(file, "parity", "ok" if record.verdict == "passed" else "not_checked", text)


def _accuracy_check(file: str | None, record: AccuracyRecord, where: str) -> Check:
    text = f"{record.metric} {record.reference:.4g}, {record.candidate:.4g} {where}"
    if max(record.reference - record.candidate, record.drop_at_most) <= record.allowed:
        return Check(file, "accuracy", "ok", text)
    text += f"; the drop may be {record.drop_at_most:.2g}, and {record.allowed:.4g} is allowed"
    return Check(file, "accuracy", "failed", text, _REBUILD, ParityError.exit_code)


def _engine_checks(artifact: Artifact, record: EngineRecord | NotRun | None) -> Iterator[Check]:
    """What the engine did on its GPU."""
    name, file = artifact.identifier, artifact.file
    if not isinstance(record, EngineRecord):
        reason, next_step = (record.reason, record.next_step) if record else ("the manifest does not name it", "")
        yield Check(file, "parity", "not_checked", f"engine: {name} was not run: {reason}", next_step)
        return
    if text := _of_another(artifact, record, "run"):
        yield _broken(file, "parity", text, _REBUILD)
        return
    yield _parity_check(file, record.parity, f"engine: {name} {record.parity.reason} on {record.gpu}")
    if isinstance(record.accuracy, AccuracyRecord):
        yield _accuracy_check(file, record.accuracy, f"by {name} on {record.gpu}")
    if warning := silently_wider(artifact.precision, record.layer_types):
        yield Check(file, "precision", "warning", f"{name}: {warning}", SEE_DECISIONS)


def _of_another(artifact: Artifact, found: EngineRecord | EngineFigures, done: str) -> str:
    """Why what was found by an engine that was `done` is not of this one; empty where it is."""
    name = artifact.identifier
    if found.engine_digest != artifact.digest:
        return f"the engine that was {done} as {name} is another one, {found.engine_digest[:12]}"
    if not _is_for(artifact, found.gpu):
        return f"{name} was {done} on {found.gpu}, and is for {artifact.target_gpu}"
    return ""


def _is_for(artifact: Artifact, device_name: str) -> bool:
    """Whether a build runs an engine on this GPU. Of a GPU that is not listed, the compute capability is not known."""
    model = model_of_device(device_name)
    if artifact.backend == "tensorrt":
        return model == _model_name(artifact.target_gpu)
    return model is None or gpu_model(model).compute_capability == artifact.compute_capability


def _unmeasured(figures: EngineFigures, asked: PerformanceRecord) -> str:
    """Sizes asked for that the figures leave out; empty where they leave out none."""
    found = {(name, size) for point in figures.points for name, size in point.sizes.items()}
    return ", ".join(
        f"{name}={size}" for name, sizes in asked.sizes.items() for size in sizes if (name, size) not in found
    )


def _performance_checks(artifact: Artifact, asked: PerformanceRecord) -> Iterator[Check]:
    name, file = artifact.identifier, artifact.file
    figures = asked.engines.get(name)
    if not isinstance(figures, EngineFigures):
        reason, next_step = (
            (figures.reason, figures.next_step) if figures else ("the manifest has no figures of it", "")
        )
        yield Check(file, "performance", "not_checked", f"{name} was not measured: {reason}", next_step)
        return
    if text := _of_another(artifact, figures, "measured"):
        yield _broken(file, "performance", text, _REBUILD)
        return
    if unmeasured := _unmeasured(figures, asked):
        yield _broken(file, "performance", f"{name} has no figures at {unmeasured}", _REBUILD)
    problems = tuple(missed_gates(name, figures, asked))
    for problem in problems:
        yield Check(file, "performance", "failed", problem.summary, problem.next_step, problem.exit_code)
    if not problems:
        gates = [gate for gate in ("p99_ms", "throughput_qps") if getattr(asked, gate) is not None]
        worst = max(figures.points, key=lambda point: point.latency_ms.p99)
        text = f"{name}: p99 {worst.latency_ms.p99:.3f} ms at {sizes_text(worst.sizes)} on {figures.gpu}"
        yield Check(file, "performance", "ok", f"{text}; keeps {' and '.join(gates)}" if gates else f"{text}; no limit")
    if unjudged := not_judged(figures, asked):
        text = f"max_regression of {name} was not judged: {unjudged.reason}"
        yield Check(file, "performance", "not_checked", text, unjudged.next_step)
