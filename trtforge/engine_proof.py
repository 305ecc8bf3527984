"""An engine on its GPU against onnxruntime over all profiles, and by the user's metric. Builds run it in a process of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trtforge import quality
from trtforge.backends.inspection import engine_layers
from trtforge.errors import IntegrityError, ParityError, Problem, SpecError, Where, shown_path
from trtforge.events import Event
from trtforge.evidence import lowered_before
from trtforge.parity.accuracy import AccuracyReport
from trtforge.parity.report import ParityReport, lines
from trtforge.parity.staged import OnnxRunner, compare_stage
from trtforge.parity.tolerances import Tolerance
from trtforge.planning import Plan, make_plan
from trtforge.reference import ReferenceSession
from trtforge.release.manifest import Artifact, read_manifest
from trtforge.run import Run
from trtforge.runtime.session import EngineSession

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class EngineRunner:
    """An engine as a side of a comparison. FP16 and BF16 outputs are compared as FP32."""

    name: str
    session: EngineSession

    @property
    def facts(self) -> dict[str, str]:
        """GPU, TensorRT and the CUDA library."""
        return {
            "gpu": self.session.gpu.device_name,
            "tensorrt": self.session.tensorrt,
            "cuda": self.session.cuda.name,
        }

    def run(self, feeds: Mapping[str, Array], /) -> Mapping[str, Array]:
        """Runs the engine once, in the profile that fits."""
        return self.session.run(feeds)


@dataclass(frozen=True, slots=True)
class EngineProof:
    """What was found of one engine.

    Attributes:
        precision: that the engine was built for.
        problems: what is wrong: outputs out of tolerance, a metric that dropped too far.
        accuracy: of the spec's metric; None where it names none, or refused the engine.
        layer_types: element type -> number of the engine's layers, as TensorRT's inspector tells.
        engine_bytes: GPU memory that loading took.
        run_bytes: GPU memory that contexts and tensors took besides, after all comparisons.
    """

    identifier: str
    precision: str
    problems: tuple[Problem, ...]
    parity: ParityReport
    accuracy: AccuracyReport | None
    layer_types: dict[str, int]
    engine_bytes: int
    run_bytes: int


def prove_engine(
    manifest_path: Path,
    spec_path: Path,
    run: Run,
    *,
    exported_as: Path | None,
    identifier: str | None,
    cuda_library: str | None,
    device: int,
    runtime: str | None,
    allow_host_code: bool,
) -> EngineProof:
    """Runs the engine for the GPU at hand on the spec's samples and on generated inputs over all profiles.

    As of lowered graphs, INT8 is compared on real inputs only.

    Args:
        manifest_path: of the bundle.
        spec_path: the spec that it was built from; its Python runs, the manifest's never.
        run: surroundings of the spec.
        exported_as: the ONNX file of the model that a running build has; spec and model are then the bundle's own.
        identifier: which engine, where several fit.
        cuda_library: "cuda-python", "pycuda", or what is installed.
        device: CUDA's index of the GPU.
        runtime: see `EngineSession.open`.
        allow_host_code: whether a version-compatible engine may run native code that it brings.

    Raises:
        IntegrityError: bundle and spec are of different models, or the engine's bytes are not the manifest's.
        CapabilityError: no GPU, no TensorRT, or too little memory.
    """
    plan = make_plan(spec_path, run, may_export=True, exported_as=exported_as)
    _refuse_other_model(manifest_path, plan, is_own=exported_as is not None)
    with EngineSession.open(
        manifest_path,
        identifier=identifier,
        cuda_library=cuda_library,
        device=device,
        plugins=plan.spec_file.spec.plugins,
        models=tuple(filter(None, (plan.graph, lowered_before(plan, run)))),
        runtime=runtime,
        allow_host_code=allow_host_code,
    ) as session:
        candidate = EngineRunner(session.artifact.identifier, session)
        graph, spec_file = plan.graph, plan.spec_file
        parity = compare_stage(
            OnnxRunner("onnxruntime, FP32", ReferenceSession(graph)),
            candidate,
            quality.lowered_inputs(spec_file, graph, plan.profiles),
            _tolerances(plan, session.artifact),
            "engine",
            lambda point: run.stages.tell(Event("step", "parity engine", point)),
        )
        accuracy, problems = None, _parity_problems(parity, candidate.name, plan)
        if spec_file.spec.accuracy is not None:
            size = _batch_size(session)
            try:
                accuracy = quality.check_accuracy(spec_file, graph, candidate, run.stages, batch_size=size)
            except ParityError as error:
                problems += [replace(one, summary=f"{candidate.name}: {one.summary}") for one in error.problems]
        return EngineProof(
            candidate.name,
            session.artifact.precision,
            tuple(problems),
            parity,
            accuracy,
            layer_types(session.layers_json()),
            session.engine_bytes,
            session.run_bytes,
        )


def layer_types(inspection: str) -> dict[str, int]:
    """Number of an engine's layers by element type, most frequent first: of their weights, else of their first output.

    Args:
        inspection: the inspector's JSON; "unknown" stands for layers of which it tells no type.
    """
    found = Counter(
        layer.weights or next(iter(layer.outputs.values()), "") or "unknown" for layer in engine_layers(inspection)
    )
    return dict(found.most_common())


def _tolerances(plan: Plan, artifact: Artifact) -> dict[str, Tolerance]:
    """Of every output. TensorRT 8.6 has no int64, and gives int32 in its place."""
    types = {tensor.name: tensor.dtype for tensor in plan.graph.outputs}
    narrowed = {one.name for one in artifact.outputs if (types.get(one.name), one.dtype) == ("int64", "int32")}
    found = quality.tolerances_of(plan.spec_file, "engine", types, built_as=artifact.precision)
    return {name: replace(one, dtype="int32") if name in narrowed else one for name, one in found.items()}


def _parity_problems(report: ParityReport, identifier: str, plan: Plan) -> list[Problem]:
    if report.verdict != "failed":
        return []
    return [
        Problem(
            f"{identifier} does not do what the model does: {report.reason}",
            f"trtforge parity {shown_path(plan.spec_file.path)} --per-layer  # names nodes that lower precision breaks",
            plan.spec_file.where("parity", "engine"),
            tuple(lines(report)[1:12]),
            ParityError.exit_code,
        )
    ]


def _refuse_other_model(manifest_path: Path, plan: Plan, *, is_own: bool) -> None:
    manifest = read_manifest(manifest_path)
    if is_own and manifest.spec.digest != plan.spec_file.digest:
        text = f"{shown_path(plan.spec_file.path)} changed during the build, so what was made of it is dropped"
        raise IntegrityError(text, next_step=f"trtforge build {shown_path(plan.spec_file.path)}")
    is_known = is_own or plan.spec_file.spec.model.torch is None  # another export may differ in its bytes alone
    if is_known and manifest.model.digest != plan.graph.digest:
        raise IntegrityError(
            f"the bundle was built from {manifest.model.file} {manifest.model.digest[:12]}, and the spec names "
            f"{plan.graph.source.name} {plan.graph.digest[:12]}",
            where=Where(manifest_path),
            next_step="name the spec that the bundle was built from, or build it again",
        )


def _batch_size(session: EngineSession) -> int:
    """The largest first axis that every input of some profile allows."""
    allowed = [[shapes.max[0] for shapes in profile.shapes.values() if shapes.max] for profile in session.profiles]
    sizes = [min(firsts) for firsts in allowed if firsts]
    if not sizes or not max(sizes):
        raise SpecError("no profile has a batch axis", next_step="leave accuracy out of the spec")
    return max(sizes)
