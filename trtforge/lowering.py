"""Compiles the spec's precision into the graph, on ranges seen in data: folding, FP16 and BF16, INT8."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import onnx

from trtforge.calibrate import Calibrated
from trtforge.errors import SeveralErrors
from trtforge.events import Event
from trtforge.files import TEMPORARY, commit, explained
from trtforge.graph.ingest import ingest
from trtforge.parity.staged import Array
from trtforge.precision.audit import audit, refuse_low_share, share
from trtforge.precision.fold import fold
from trtforge.precision.lower import Decision, Lowered, Type, lower
from trtforge.precision.placement import place
from trtforge.precision.policy import KeepRules
from trtforge.precision.quantize import lower_int8
from trtforge.precision.ranges import observe_ranges
from trtforge.precision.weights import WeightsFile
from trtforge.quality import inputs_of, save_model
from trtforge.reference import ReferenceSession
from trtforge.spec.load import SpecFile
from trtforge.stages import Stages
from trtforge.types import Graph, Profile, Range

_MOST_INLINE_BYTES = 1 << 30
"""Weights of a lowered model that may be inside of it: half of what one file can hold, as some may be there in two types."""

_MOST_FROM_FOLDING = 1e-4
"""Folding rounds each weight once more, by up to 2^-24 of it; an output that moves further has been broken."""

LOW_TYPES: dict[str, Literal["float16", "bfloat16"]] = {"fp16": "float16", "bf16": "bfloat16"}
_REST: dict[str, Type] = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True, slots=True)
class LoweredGraph:
    """A graph in the asked types.

    Attributes:
        decisions: what stays FP32 and why, what does not, for every node with real numbers.
    """

    graph: Graph
    decisions: tuple[Decision, ...]
    notes: tuple[str, ...]


def lower_graph(
    spec_file: SpecFile,
    graph: Graph,
    profiles: tuple[Profile, ...],
    folder: Path,
    stages: Stages,
    *,
    max_opset: int,
    calibrated: Calibrated | None = None,
    external_above: int = _MOST_INLINE_BYTES,
) -> LoweredGraph:
    """The graph in the spec's type, decided on ranges seen over calibration data, samples and profiles.

    Args:
        spec_file: names the type and what to keep.
        graph: the model in FP32.
        profiles: whose sizes generated inputs have.
        folder: where the lowered file goes.
        stages: told what happens.
        max_opset: the highest that every target reads.
        calibrated: what was seen in calibration data; needed for INT8.
        external_above: a graph with more bytes of weights gives a file with its weights beside it, `lowered.weights`.

    Raises:
        SeveralErrors: a glob of `keep` matches no node, or the table lacks a tensor.
        GraphError: less than `min_share` of the work would be in that type.
        StoreError: the lowered file could not be written.
    """
    precision = spec_file.spec.precision
    stages.tell(Event("step", "lower", "folding"))
    keep = KeepRules(precision.keep.fp32)
    source, fold_note = _folded(spec_file, graph, profiles, keep, folder)
    stages.tell(Event("step", "lower", "observing ranges"))
    ranges = _ranges(spec_file, graph, source, profiles, calibrated)
    stages.tell(Event("step", "lower", "choosing types"))
    path = folder / "lowered.onnx"
    try:
        with _weights_beside(path, graph, external_above) as weights_file:
            model = onnx.load(source.path, load_external_data=False)
            if precision.type == "int8":
                assert calibrated is not None  # noqa: S101 - a spec without calibration was refused
                lowered = lower_int8(
                    model,
                    place(model, keep=KeepRules((*precision.keep.fp32, *precision.keep.rest))),
                    calibrated.table.amax,
                    rest=_REST[precision.rest],
                    max_opset=max_opset,
                    keep=keep,
                    ranges=ranges,
                    weights_dir=graph.weights_dir,
                    weights_file=weights_file,
                )
            else:
                lowered = lower(
                    model,
                    dtype=LOW_TYPES[precision.type],
                    keep=keep,
                    ranges=ranges,
                    max_opset=max_opset,
                    weights_dir=graph.weights_dir,
                    weights_file=weights_file,
                )
    except SeveralErrors as error:
        where = spec_file.where("precision", "keep")
        raise SeveralErrors(replace(problem, where=problem.where or where) for problem in error.problems) from None
    save_model(lowered.model, path)
    notes = (_share_note(spec_file, lowered, profiles), *fold_note, *lowered.notes)
    return LoweredGraph(ingest(path, folder, where=spec_file.where("model")), lowered.decisions, notes)


def _ranges(
    spec_file: SpecFile, graph: Graph, source: Graph, profiles: tuple[Profile, ...], calibrated: Calibrated | None
) -> dict[str, Range]:
    """What was seen of each value: in calibration data, and in samples and generated inputs over the profiles."""
    given = inputs_of(spec_file, graph, profiles)
    ranges = observe_ranges(source, (entry.feeds for entry in given if not entry.is_drawn))
    for name, seen in (calibrated.ranges if calibrated else {}).items():
        other = ranges.get(name)
        ranges[name] = seen if other is None else _joined(seen, other)
    return ranges


def _joined(one: Range, other: Range) -> Range:
    # numpy's minimum and maximum, unlike Python's, keep NaN.
    low, high = float(np.minimum(one.low, other.low)), float(np.maximum(one.high, other.high))
    return Range(low, high, max(one.absmax, other.absmax), finite=one.finite and other.finite)


def _share_note(spec_file: SpecFile, lowered: Lowered, profiles: tuple[Profile, ...]) -> str:
    """How much of the work is in the asked type; refused if it is too little."""
    precision = spec_file.spec.precision
    dtype = "int8" if precision.type == "int8" else LOW_TYPES[precision.type]
    shapes = {name: shape.opt for profile in profiles[:1] for name, shape in profile.shapes.items()}
    layers = audit(lowered.model, shapes)
    others = [decision for decision in lowered.decisions if decision.dtype != dtype]
    reasons = {decision.node: decision.reason for decision in others}
    refuse_low_share(layers, dtype, precision.min_share, reasons, spec_file.where("precision"))
    found = share(layers, dtype)
    work = "" if found.flops is None else f" ({found.flops:.0%} of the work)"
    kept = sum(decision.dtype == "float32" for decision in others)
    return f"{found.layers:.0%} of weighted layers{work} in {dtype}, {lowered.num_casts} casts, {kept} nodes in float32"


def _folded(
    spec_file: SpecFile, graph: Graph, profiles: tuple[Profile, ...], keep: KeepRules, folder: Path
) -> tuple[Graph, tuple[str, ...]]:
    """The graph with scales and shifts folded into weights, and a note; as it is where that changes what it gives."""
    model = onnx.load(graph.path, load_external_data=False)
    gone = fold(model, keep, graph.weights_dir)
    if not gone.num_moves and not gone.num_folded:
        return graph, ()
    folded = replace(graph, path=folder / "folded.onnx")
    save_model(model, folded.path)
    del model
    notes = (f"{gone.num_moves} nodes that copied or moved constants are gone",) if gone.num_moves else ()
    if not gone.num_folded:
        return folded, notes
    feeds = [entry.feeds for entry in inputs_of(spec_file, graph, profiles, num_random=0)]
    difference = _difference(graph, folded, feeds)
    if difference > _MOST_FROM_FOLDING:
        return graph, (
            f"{gone.num_folded} nodes not folded into weights: outputs would differ by {difference:.2g} of their norm",
        )
    return folded, (
        *notes,
        f"{gone.num_folded} nodes folded into weights; in FP32, outputs differ by {difference:.1g} of their norm",
    )


def _difference(one: Graph, other: Graph, feeds: list[dict[str, Array]]) -> float:
    """Largest norm of the difference of an output over the output's norm; infinite where shapes or NaNs differ.

    The two run one after the other, so that memory need not hold both.
    """
    results = []
    for graph in (one, other):
        session = ReferenceSession(graph)
        results.append([session.run(each) for each in feeds])
        del session
    return max(
        _relative_difference(first[name], second[name])
        for first, second in zip(*results, strict=True)
        for name in first
    )


def _relative_difference(first: Array, second: Array) -> float:
    if first.shape != second.shape:
        return np.inf
    if np.array_equal(first, second, equal_nan=first.dtype.kind == "f"):
        return 0.0
    reference = first.astype(np.float64)
    found = float(np.linalg.norm(second - reference) / np.linalg.norm(reference))
    return found if np.isfinite(found) else np.inf


@contextmanager
def _weights_beside(path: Path, graph: Graph, external_above: int) -> Iterator[WeightsFile | None]:
    """A file for the weights of the model at `path` where `graph` has many; it has its name when the block is done."""
    if graph.weight_bytes <= external_above:
        yield None
        return
    final = path.with_suffix(".weights")
    aside = path.parent / TEMPORARY.replace("*", path.stem)
    with explained(path.parent, graph.weight_bytes, "name another folder with --store"):
        try:
            with aside.open("wb") as file:
                yield WeightsFile(final.name, file)
                file.flush()
                os.fsync(file.fileno())
            commit(aside, final)
        finally:
            aside.unlink(missing_ok=True)
