"""The stages that change the model and compare each change with what was before: export, mending, lowering, accuracy.

Python that a spec names runs here, in a process of its own; so `plan` uses nothing of this module but keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from io import BytesIO
from itertools import chain, islice
from pathlib import Path
from typing import Any

import onnx

from trtforge.errors import GraphError, ParityError, SeveralErrors
from trtforge.events import Event
from trtforge.files import commit, explained, write_aside
from trtforge.graph.export import ExportReport, ExportRun, export_torch
from trtforge.parity.accuracy import AccuracyReport, MaxDrop, accuracy_gate
from trtforge.parity.report import ParityReport, RunnerFacts, concluded, not_run
from trtforge.parity.staged import Array, OnnxRunner, ParityInput, Runner, compare_stage, parity_inputs
from trtforge.parity.tolerances import PRESETS, Precision, Stage, Tolerance, resolve_tolerances
from trtforge.precision.audit import audit, refuse_other_types
from trtforge.precision.emulate import emulated
from trtforge.reference import ReferenceSession
from trtforge.samples.calibration import open_calibration
from trtforge.samples.opening import open_samples
from trtforge.samples.source import Sample
from trtforge.samples.values import fits_a_profile
from trtforge.shapes.inputs import generate_at
from trtforge.spec.load import SpecFile
from trtforge.spec.model import Bounds, RelativeDrop
from trtforge.stages import Stages
from trtforge.types import POINTS, Graph, NetworkLayers, Profile, Shape

_MOST_CALIBRATION_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Exported:
    """A model that came from PyTorch, and how near the ONNX file is to it."""

    report: ExportReport
    parity: ParityReport


@dataclass(frozen=True, slots=True)
class _Given:
    """A runner whose outputs are known already."""

    name: str
    facts: dict[str, str]
    outputs: Mapping[str, Array]

    def run(self, _feeds: Mapping[str, Array], /) -> Mapping[str, Array]:
        return self.outputs


def export(spec_file: SpecFile, opset: int, output: Path, stages: Stages) -> Exported:
    """Exports the spec's PyTorch model and compares it with onnxruntime at the profiles' sizes.

    Args:
        spec_file: names the callable.
        opset: the highest that every target reads.
        output: the ONNX file.
        stages: told what happens.

    Raises:
        TrtForgeError: see `export_torch`. A difference beyond tolerance is in the report, not raised.
    """
    spec = spec_file.spec
    assert spec.model.torch is not None  # noqa: S101 - the caller looked
    where = spec_file.where("model", "torch", "callable")
    reports: list[ParityReport] = []

    def compare(run: ExportRun) -> None:
        tolerances = tolerances_of(spec_file, "onnx", list(run.torch_outputs))
        label = ", ".join(f"{name} {list(shape)}" for name, shape in run.shapes.items())
        given = ParityInput(label, run.feeds, {}, spec.parity.seed, is_drawn=False)
        torch = _Given("torch", {}, run.torch_outputs)
        exported = _Given("onnxruntime, as exported", {}, run.onnx_outputs)
        reports.append(compare_stage(torch, exported, [given], tolerances, "onnx", lambda _: None))

    report = export_torch(
        spec.model.torch.callable,
        spec_file.marks[("model", "torch", "callable")].path.resolve().parent,
        output,
        opset=opset,
        work_dir=output.parent / "ingested",
        inputs_at=lambda graph, shapes: generate_at(graph, shapes, {}, spec.inputs, spec.parity.seed),
        shapes_to_check=_written_shapes(spec_file),
        on_run=compare,
        on_event=lambda text: stages.tell(Event("step", "export", text)),
        timeout_seconds=spec.model.torch.timeout,
        where=where,
    )
    points = [point for one in reports for point in one.points]
    torch_facts = RunnerFacts("torch", {"torch": report.torch_version, "exporter": report.exporter})
    onnx_facts = RunnerFacts("onnxruntime, as exported", {})
    parity = concluded("onnx", torch_facts, onnx_facts, points, reports[0].tolerances)
    return Exported(report, parity)


def _written_shapes(spec_file: SpecFile) -> list[dict[str, Shape]]:
    """min, opt and max of every profile, as far as the spec spells them out."""
    found: list[dict[str, Shape]] = []
    profiles = spec_file.spec.profiles
    for profile in profiles if isinstance(profiles, tuple) else ():
        for point in POINTS:
            shapes = {name: getattr(entry, point) for name, entry in profile.inputs.items()}
            if shapes and all(shapes.values()) and shapes not in found:
                found.append(shapes)
    return found


def tolerances_of(
    spec_file: SpecFile, stage: Stage, outputs: Iterable[str], *, built_as: str = ""
) -> dict[str, Tolerance]:
    """The tolerance of every output at a stage: the spec's bounds over the preset.

    Args:
        spec_file: the spec.
        stage: whose result is judged.
        outputs: names of the model's outputs.
        built_as: the types that an engine has where the spec takes those of the model.

    Raises:
        SeveralErrors: the spec names an output that the model does not have.
    """
    spec = spec_file.spec
    asked = built_as.removesuffix("-implicit") or spec.precision.type
    precision: Precision = "tf32" if spec.precision.tf32 and asked == "fp32" else "fp32"
    if asked in ("fp16", "bf16", "int8", "fp8"):
        precision = asked  # type: ignore[assignment]
    default = _bounded(PRESETS[stage][precision], getattr(spec.parity, stage, None))
    overrides = {name: _bounded(default, getattr(bounds, stage, None)) for name, bounds in spec.parity.outputs.items()}
    try:
        return resolve_tolerances(outputs, default, overrides)
    except SeveralErrors as error:
        where = spec_file.where("parity", "outputs")
        raise SeveralErrors(replace(problem, where=where) for problem in error.problems) from None


def _bounded(preset: Tolerance, bounds: Bounds | None) -> Tolerance:
    if bounds is None:
        return preset
    given = {field.name: getattr(bounds, field.name) for field in fields(bounds)}
    return replace(preset, **{name: value for name, value in given.items() if value is not None})


def inputs_of(
    spec_file: SpecFile, graph: Graph, profiles: tuple[Profile, ...], *, num_random: int | None = None
) -> Iterator[ParityInput]:
    """The user's samples, and generated inputs over every profile; `num_random` drawn sizes, or as the spec says."""
    parity = spec_file.spec.parity
    samples: Iterable[Sample] = open_samples(parity.samples, graph) if parity.samples else ()
    drawn = parity.random_shapes if num_random is None else num_random
    return parity_inputs(graph, profiles, spec_file.spec.inputs, samples, num_random=drawn, seed=parity.seed)


def lowered_inputs(spec_file: SpecFile, graph: Graph, profiles: tuple[Profile, ...]) -> Iterator[ParityInput]:
    """What a lowered graph is compared on.

    INT8 ranges come from real inputs and promise nothing for generated noise, on which a recogniser that reads every line
    right was seen to fail. So INT8 is compared on the user's samples and the first of its calibration data that fit a
    profile; anything else, and INT8 from a table alone, on `inputs_of`.
    """
    spec = spec_file.spec
    given = 0
    if spec.precision.type == "int8" and spec.calibration is not None and spec.calibration.table is None:
        own: Iterable[Sample] = open_samples(spec.parity.samples, graph) if spec.parity.samples else ()
        data = (sample for sample in open_calibration(spec_file, graph) if fits_a_profile(sample, profiles))
        for given, sample in enumerate(chain(own, islice(data, _MOST_CALIBRATION_SAMPLES)), 1):  # noqa: B007 - counted
            yield ParityInput(sample.label, sample.feeds, {}, None, is_drawn=False)
    if not given:
        yield from inputs_of(spec_file, graph, profiles)


def compare_mended(spec_file: SpecFile, graph: Graph, profiles: tuple[Profile, ...], stages: Stages) -> ParityReport:
    """The mended graph against the file as it was given, at min, opt and max: names and order depend on no size."""
    if graph.path == graph.source:
        return not_run("mended", "the file is built as it is, nothing was mended")
    original = replace(graph, path=graph.source)
    try:
        reference = OnnxRunner("onnxruntime, as given", ReferenceSession(original))
    except GraphError as error:
        return not_run("mended", f"the file as given does not run: {error.problems[0].detail[0]}")
    candidate = OnnxRunner("onnxruntime, mended", ReferenceSession(graph))
    tolerances = tolerances_of(spec_file, "mended", [tensor.name for tensor in graph.outputs])
    return compare_stage(
        reference,
        candidate,
        inputs_of(spec_file, graph, profiles, num_random=0),
        tolerances,
        "mended",
        _teller(stages, "parity mended"),
    )


def compare_lowered(
    spec_file: SpecFile, graph: Graph, lowered: Graph, profiles: tuple[Profile, ...], folder: Path, stages: Stages
) -> ParityReport:
    """The lowered graph, with every value rounded as its type rounds, against FP32."""
    candidate, _ = emulation_of(lowered, folder)
    tolerances = tolerances_of(spec_file, "lowered", [tensor.name for tensor in graph.outputs])
    return compare_stage(
        OnnxRunner("onnxruntime, FP32", ReferenceSession(graph)),
        candidate,
        lowered_inputs(spec_file, graph, profiles),
        tolerances,
        "lowered",
        _teller(stages, "parity lowered"),
    )


def emulation_of(lowered: Graph, folder: Path) -> tuple[OnnxRunner, Graph]:
    """Runs a lowered graph as a GPU rounds it. onnxruntime on the CPU computes FP16 in FP32 and hides overflow.

    Returns:
        The runner, and the graph that it runs.
    """
    graph = replace(lowered, path=folder / "emulated.onnx")
    save_model(emulated(onnx.load(lowered.path, load_external_data=False)), graph.path)
    return OnnxRunner("onnxruntime, emulated", ReferenceSession(graph)), graph


def check_network_types(graph: Graph, layers: tuple[NetworkLayers, ...], identifier: str) -> None:
    """Compares the layers of a parsed network with the graph that it was parsed from.

    Args:
        graph: that was built.
        layers: the network's, see `BuiltEngine.weighted_layers`.
        identifier: of the engine.

    Raises:
        BuildError: some compute in a wider type than the graph says.
    """
    model = onnx.load(graph.path, load_external_data=False)
    refuse_other_types(audit(model, {}), layers, identifier)


def save_model(model: onnx.ModelProto, path: Path) -> None:
    """Writes a model whole or not at all.

    Raises:
        StoreError: it cannot be written.
    """
    with explained(path.parent, model.ByteSize(), "name another folder with --store"):
        commit(write_aside(path.parent, BytesIO(model.SerializeToString()))[0], path)


def check_accuracy(
    spec_file: SpecFile, graph: Graph, candidate: Runner, stages: Stages, *, batch_size: int = 32
) -> AccuracyReport:
    """The user's metric on FP32 and on the candidate, `batch_size` samples a run where the model leaves it open.

    Raises:
        ParityError: the drop is too large, or the evaluation set too small to say that it is not.
    """
    accuracy = spec_file.spec.accuracy
    assert accuracy is not None  # noqa: S101 - the caller looked
    drop = accuracy.max_drop
    where = spec_file.where("accuracy")
    report = accuracy_gate(
        accuracy.metric,
        spec_file.marks[("accuracy", "metric")].path.resolve().parent,
        accuracy.data,
        graph,
        OnnxRunner("onnxruntime, FP32", ReferenceSession(graph)),
        candidate,
        MaxDrop(drop.relative, is_relative=True) if isinstance(drop, RelativeDrop) else MaxDrop(drop),
        where=where,
        scale=accuracy.scale,
        batch_size=batch_size,
        on_phase=lambda text: stages.tell(Event("step", "accuracy", text)),
    )
    found = f"{accuracy.metric} is {report.candidate:.4g}, {report.reference:.4g} in FP32"
    if report.verdict == "failed":
        raise ParityError(
            f"{found}, by {report.drop:.4g}; max_drop allows {report.allowed:.4g}",
            where=where,
            next_step="keep more nodes in FP32 (precision.keep.fp32), or raise max_drop",
        )
    if report.verdict == "undecided":
        raise ParityError(
            f"{found}, and with {report.num_samples} samples the true drop may be {report.drop_at_most:.2g}; "
            f"max_drop allows {report.allowed:.4g}",
            where=where,
            next_step=f"evaluate on {report.num_samples_needed} samples or more",
        )
    return report


def _teller(stages: Stages, label: str) -> Any:
    return lambda point: stages.tell(Event("step", label, point))
