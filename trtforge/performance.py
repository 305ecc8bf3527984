"""The figures that a spec asks for: engines whose GPU is here are measured before the bundle is published."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trtforge.bundle import BuiltUnit
from trtforge.engine_process import answer_of, elsewhere, gpu_to_itself, lone_bundle, reaches_cuda
from trtforge.errors import (
    CapabilityError,
    PerformanceError,
    Problem,
    SeveralErrors,
    SpecError,
    StoreError,
    TrtForgeError,
    closest,
    raise_any,
    shown_path,
)
from trtforge.events import Event
from trtforge.keys import bench_key
from trtforge.machine import GpuFacts, MachineFacts
from trtforge.plain import from_plain, to_plain
from trtforge.release import manifest as released
from trtforge.release.gates import missed_gates, sizes_text
from trtforge.run import Run
from trtforge.spec.load import SpecFile
from trtforge.spec.model import Performance
from trtforge.targets import measured_on
from trtforge.traffic.layout import Layout, Sizes, combinations, is_taken, layout_of
from trtforge.types import BuildUnit, Graph, Profile, ShapeRange, TensorSpec

NOT_ASKED = released.NotRun(reason="the spec has no performance section", next_step="trtforge bench MANIFEST")


@dataclass(frozen=True, slots=True)
class _Previous:
    """The engine that a new one is compared with."""

    path: Path
    manifest: released.Manifest
    artifact: released.Artifact


@dataclass(frozen=True, slots=True)
class _Job:
    """An engine to measure, and what for."""

    unit: BuildUnit
    artifact: released.Artifact
    engine_path: Path
    gpu: GpuFacts
    asked: released.PerformanceRecord
    draft: released.Manifest
    spec_file: SpecFile
    run: Run

    @property
    def label(self) -> str:
        """Name of the stage, for people."""
        return f"bench {self.unit.gpu}"


def refuse_wishes(spec_file: SpecFile, graph: Graph, profiles: tuple[Profile, ...]) -> None:
    """Checks `performance:` of a spec against its model and profiles.

    Raises:
        SeveralErrors: a name in `sizes` is no open size, a size lies in no profile, `previous` is no manifest, or the
            engines will hold no weights.
    """
    wishes = spec_file.spec.performance
    if wishes is None:
        return
    problems = [*_size_problems(wishes, spec_file, layout_of(graph.inputs), profiles), *_previous_problems(spec_file)]
    if spec_file.spec.builder.strip_weights:
        problems.append(
            Problem(
                "performance is measured of engines that hold their weights, and builder.strip_weights leaves them out",
                "leave performance out, and measure with: trtforge bench MANIFEST --model MODEL.onnx",
                spec_file.where("performance"),
                exit_code=SpecError.exit_code,
            )
        )
    raise_any(problems)


def _size_problems(
    wishes: Performance, spec_file: SpecFile, layout: Layout, profiles: tuple[Profile, ...]
) -> list[Problem]:
    where, code = spec_file.where, SpecError.exit_code
    unknown = [name for name in wishes.sizes if name not in layout.names]
    if unknown:
        known = ", ".join(layout.names) or "none, it is static"
        return [
            Problem(
                f"performance.sizes: '{name}' is no open size of the model's inputs",
                f"rename it to '{meant}'" if (meant := closest(name, layout.names)) else f"name one of: {known}",
                where("performance", "sizes", name),
                (),
                code,
            )
            for name in unknown
        ]
    measured, _ = combinations(layout, profiles, wishes.sizes)
    return [
        Problem(
            f"performance.sizes.{name}: no profile holds {size}"
            + (" with any of the other sizes" if len(wishes.sizes) > 1 else ""),
            "name a size between min and max of a profile",
            where("performance", "sizes", name),
            (),
            code,
        )
        for name, sizes in wishes.sizes.items()
        for size in sizes
        if size not in {entry[name] for entry in measured}
    ]


def _previous_problems(spec_file: SpecFile) -> list[Problem]:
    wishes, where = spec_file.spec.performance, spec_file.where("performance", "previous")
    if wishes is None or wishes.previous is None:
        return []
    try:
        released.read_manifest(wishes.previous)
    except TrtForgeError as error:
        return [
            Problem(
                f"performance.previous: {problem.summary}",
                "name the manifest.json of an earlier bundle, or leave previous and max_regression out of the first build",
                where,
                problem.detail,
                SpecError.exit_code if isinstance(error, StoreError) else problem.exit_code,
            )
            for problem in error.problems
        ]
    return []


def refuse_without_cuda(spec_file: SpecFile, units: Iterable[BuildUnit], facts: MachineFacts) -> None:
    """Before hours of building for engines that can then not be measured.

    Raises:
        CapabilityError: an engine is to be measured here, and no library reaches CUDA.
    """
    if spec_file.spec.performance is None or reaches_cuda(facts):
        return
    if any(measured_on(unit, facts) for unit in units):
        raise CapabilityError(
            "performance: engines are measured here, and neither cuda-python nor pycuda is installed",
            where=spec_file.where("performance"),
            next_step="pip install cuda-python",
        )


def not_measured(unit: BuildUnit, facts: MachineFacts) -> released.NotRun:
    """Why an engine has no figures where its GPU is not at hand."""
    return elsewhere(unit, facts, "trtforge bench MANIFEST")


def measure(
    spec_file: SpecFile, draft: released.Manifest, built: Iterable[BuiltUnit], facts: MachineFacts, run: Run
) -> released.PerformanceRecord | released.NotRun:
    """Measures and judges the engines of a bundle that is not published yet, through the store.

    Args:
        spec_file: the spec.
        draft: manifest of the bundle.
        built: its engines, those whose GPU is not here too.
        facts: this machine.
        run: surroundings of the spec.

    Raises:
        SeveralErrors: every gate that is missed, by any engine; figures that miss one are measured anew each time.
        PerformanceError: an engine crashed while it was measured.
        CapabilityError: the GPU stopped, or has no memory.
    """
    wishes = spec_file.spec.performance
    if wishes is None:
        return NOT_ASKED
    asked = released.PerformanceRecord(
        p99_ms=wishes.p99_ms,
        throughput_qps=wishes.throughput_qps,
        max_regression=wishes.max_regression,
        sizes=wishes.sizes,
        cuda_graph=wishes.cuda_graph,
        engines={},
    )
    engines: dict[str, released.EngineFigures | released.NotRun] = {}
    problems: list[Problem] = []
    for entry in built:
        name, gpu = entry.unit.identifier, measured_on(entry.unit, facts)
        if gpu is None:
            engines[name] = not_measured(entry.unit, facts)
            continue
        (artifact,) = (one for one in draft.artifacts if one.identifier == name)
        job = _Job(entry.unit, artifact, entry.engine.path, gpu, asked, draft, spec_file, run)
        try:
            engines[name] = _measured(job, facts)
        except StoreError:
            raise  # a full disk is not this engine's own
        except TrtForgeError as error:
            problems += error.problems
    raise_any(problems)
    return replace(asked, engines=engines)


def _measured(job: _Job, facts: MachineFacts) -> released.EngineFigures:
    unit, artifact = job.unit, job.artifact
    previous = _previous_of(artifact, unit.profiles, job.spec_file)
    other = previous if isinstance(previous, _Previous) and previous.artifact.digest != artifact.digest else None
    if isinstance(previous, released.NotRun):
        text = f"{unit.identifier}: max_regression is not judged: {previous.reason}"
        job.run.stages.tell(Event("warning", job.label, text))
    key = bench_key(unit, artifact, other.artifact.digest if other else None, job.asked, job.gpu, facts)

    def compute() -> tuple[Any, dict[str, Path]]:
        figures = _figures(_bench(job, other), artifact.digest)
        missed = missed_gates(unit.identifier, figures, job.asked)
        raise_any(replace(problem, where=job.spec_file.where("performance")) for problem in missed)
        return to_plain(released.EngineFigures, figures), {}

    record = job.run.stages.run(job.label, key, compute, _describe)
    figures: released.EngineFigures = from_plain(released.EngineFigures, record.result)
    if isinstance(previous, _Previous):
        compared = released.PreviousRecord(identifier=previous.artifact.identifier, digest=previous.artifact.digest)
        return replace(figures, previous=compared)
    return replace(figures, previous=previous)


def _bench(job: _Job, other: _Previous | None) -> Mapping[str, Any]:
    """What `trtforge bench` tells, run while nothing else of this store uses the GPU."""
    name, stages = job.unit.identifier, job.run.stages
    folder = stages.store.new_folder(f"bench-{name}")
    with gpu_to_itself(job.gpu, job.label, job.run):
        stages.tell(Event("step", job.label, f"measuring on {job.gpu.device_name}"))
        try:
            return answer_of(
                ["bench", *_arguments(job, other, folder)],
                folder,
                key="figures",
                failure=PerformanceError,
                timeout_seconds=job.spec_file.spec.build_timeout,
                on_step=lambda text: stages.tell(Event("step", job.label, text)),
            )
        except TrtForgeError as error:
            raise SeveralErrors(
                replace(problem, summary=f"{name} was not measured: {problem.summary}") for problem in error.problems
            ) from error


def _arguments(job: _Job, other: _Previous | None, folder: Path) -> list[str]:
    """Of `trtforge bench`, for a bundle of the one engine in `folder`, and another of the engine to compare with."""
    bundle = lone_bundle(folder / "new", job.draft, job.artifact, job.engine_path)
    arguments = [str(bundle), "--device", str(job.gpu.index)]
    for name, sizes in job.asked.sizes.items():
        arguments += ["--shapes", f"{name}={','.join(map(str, sizes))}"]
    for plugin in job.spec_file.spec.plugins:
        arguments += ["--plugin", str(plugin.absolute())]
    if job.asked.cuda_graph:
        arguments.append("--cuda-graph")
    if job.artifact.settings.get("version_compatible"):
        arguments.append("--allow-host-code")  # this run's own engine; one of another bundle is not compared then
    if other:
        source = other.path.parent / other.artifact.file
        arguments += ["--against", str(lone_bundle(folder / "previous", other.manifest, other.artifact, source))]
    return arguments


def _previous_of(
    artifact: released.Artifact, profiles: tuple[Profile, ...], spec_file: SpecFile
) -> _Previous | released.NotRun | None:
    """The engine to compare with, why there is none, or None where the spec asks for no comparison."""
    wishes = spec_file.spec.performance
    if wishes is None or wishes.previous is None:
        return None
    manifest = released.read_manifest(wishes.previous)
    shown = shown_path(wishes.previous)
    same = [
        one
        for one in manifest.artifacts
        if (one.backend, one.target_gpu.upper()) == (artifact.backend, artifact.target_gpu.upper())
    ]
    same = [one for one in same if one.backend_version == artifact.backend_version] or same
    same = [one for one in same if one.identifier == artifact.identifier] or same
    next_step = "name a bundle with an engine for this GPU and version in performance.previous"
    if len(same) != 1:
        text = f"{shown} has {len(same) or 'no'} engines by {artifact.backend} for {artifact.target_gpu}"
        return released.NotRun(reason=text, next_step=next_step)
    (found,) = same
    measured, _ = combinations(_layout(artifact), profiles, wishes.sizes)
    reason = _unlike(found, artifact, measured)
    if reason:
        return released.NotRun(reason=f"{found.identifier} of {shown} {reason}", next_step=next_step)
    return _Previous(wishes.previous.absolute(), manifest, found)


def _unlike(found: released.Artifact, artifact: released.Artifact, measured: Sequence[Sizes]) -> str:
    """Why two engines cannot be measured by turns; empty where they can."""
    if found.backend_version != artifact.backend_version:
        return f"was built by {found.backend} {found.backend_version}, and this one by {artifact.backend_version}"
    if found.digest == artifact.digest:
        return ""
    if found.settings.get("version_compatible"):
        return "is version-compatible: it brings native code, which trtforge bench --allow-host-code lets run"
    if found.settings.get("strip_weights"):
        return "was built without its weights"
    if set(found.plugins) - set(artifact.plugins):
        return "needs other plugins"
    if _layout(found).axes != _layout(artifact).axes:
        return "has other inputs"
    profiles = [_profile(one) for one in found.profiles]
    outside = [sizes for sizes in measured if not is_taken(_layout(found), sizes, profiles)]
    return f"has no profile for {sizes_text(outside[0])}" if outside else ""


def _layout(artifact: released.Artifact) -> Layout:
    return layout_of(TensorSpec(one.name, one.dtype, one.shape) for one in artifact.inputs)


def _profile(record: released.ProfileRecord) -> Profile:
    return Profile(record.name, {name: ShapeRange(**asdict(ranges)) for name, ranges in record.shapes.items()})


def _figures(plain: Mapping[str, Any], digest: str) -> released.EngineFigures:
    """What `trtforge bench --json` prints, as a manifest holds it."""
    slowdowns = plain["slowdowns"] or [None] * len(plain["points"])
    return released.EngineFigures(
        engine_digest=digest,
        **{name: plain[name] for name in ("gpu", "driver", "tensorrt", "cuda", "switches", "engine_bytes")},
        points=tuple(
            released.PointRecord(
                **{
                    name: point[name] for name in ("sizes", "profile", "throughput_qps", "num_queries", "context_bytes")
                },
                latency_ms=_percentiles(point["latency"]),
                compute_ms=_percentiles(point["compute"]),
                slowdown=slowdown and released.SlowdownRecord(**slowdown),
                remarks=tuple(point["remarks"]),
            )
            for point, slowdown in zip(plain["points"], slowdowns, strict=True)
        ),
        previous=None,
        warnings=tuple(plain["warnings"]),
    )


def _percentiles(spread: Mapping[str, Any]) -> released.PercentilesRecord:
    return released.PercentilesRecord(
        **{f"p{float(share):.0f}": round(value, 5) for share, value in spread["percentiles"].items()}
    )


def _describe(plain: Any) -> tuple[str, ...]:
    points = [
        f"p50 {point['latency_ms']['p50']:.3f}, p99 {point['latency_ms']['p99']:.3f} ms at {sizes_text(point['sizes'])}"
        for point in plain["points"]
    ]
    remarks = dict.fromkeys([*plain["warnings"], *(text for point in plain["points"] for text in point["remarks"])])
    return ("; ".join(points), *remarks)
