"""Profiles for one model from its traffic: reads the log, counts the model's work, chooses, and says what is left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import ModelProto, TensorProto
from onnx.helper import make_tensor_value_info, tensor_dtype_to_np_dtype

from trtforge.errors import Problem, SpecError, Where, closest, raise_any
from trtforge.graph.model_file import read_model
from trtforge.precision.audit import audit
from trtforge.precision.network import skeleton
from trtforge.spec.model import FromTraffic
from trtforge.traffic.batching import formed_batches
from trtforge.traffic.choose import MAX_OPEN_SIZES, Option, Wishes, choose, fewest, round_up
from trtforge.traffic.cost import MAX_DEGREE, Cost, Counted, Work, fit_work, measured, modelled, read_latencies
from trtforge.traffic.coverage import Coverage, Outlier, coverage_of, outliers, profiles_of, refuse_low, volumes
from trtforge.traffic.histogram import Ints, Traffic, distinct
from trtforge.traffic.layout import Layout, layout_of
from trtforge.traffic.read import read_traffic
from trtforge.types import Graph, Profile

_MIB = 1 << 20
Locate = Callable[[str], Where | None]
"""Key of `from_traffic` -> its place in the spec, None without one."""


@dataclass(frozen=True, slots=True)
class CoverAll:
    """What it would take to cover every request that the model can take.

    Attributes:
        largest: max of the range, by name.
        mean_ms: of all those requests, with as many profiles.
        held_bytes: estimate of activations at that max.
    """

    largest: tuple[int, ...]
    mean_ms: float
    held_bytes: float


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """Profiles for a model, and why.

    Attributes:
        traffic: what was counted; batches where a queue window was given.
        options: the best of 1, 2, ... profiles; `option` is the one taken.
        held_bytes: estimate of activations at each profile's max.
        cover_all: None where every request is covered, or constraints forbid it.
    """

    layout: Layout
    traffic: Traffic
    profiles: tuple[Profile, ...]
    options: tuple[Option, ...]
    option: Option
    coverage: Coverage
    outliers: tuple[Outlier, ...]
    held_bytes: tuple[float, ...]
    cover_all: CoverAll | None


def choose_profiles(graph: Graph, wishes: FromTraffic, where: Locate = lambda _key: None) -> Chosen:
    """The optimization profiles that serve the requests of a log at the least cost.

    Guarantees: profiles together cover a box of sizes without gaps, and at least `wishes.coverage` of all requests.

    Raises:
        SpecError, SeveralErrors: a wish does not fit the model, or the log cannot be counted.
        CoverageError: the constraints leave too few requests covered.
    """
    layout = layout_of(graph.inputs)
    raise_any(_wish_problems(graph, layout, wishes, where))
    traffic = read_demand(layout, wishes)
    if not len(traffic.sizes):
        nothing = coverage_of(traffic, (), layout)
        refuse_low(nothing, 1.0, layout.names, "profiles can cover", "log requests that the model takes", where("log"))
    multiples = _multiples(layout, wishes)
    work = fit_work(_points(traffic.sizes), counter(graph, layout))
    cost = measured(read_latencies(wishes.latencies, layout.names)) if wishes.latencies else modelled(work)
    limits = Wishes(
        coverage=wishes.coverage,
        max_profiles=wishes.max_profiles,
        multiples=multiples,
        is_allowed=_limits(layout, wishes, work),
        padded=wishes.padded,
        by_cost=wishes.opt_by == "cost",
    )
    options = choose(traffic, limits, cost, lambda highs: volumes(highs, layout))
    option = fewest(options) if options else Option((), 0.0)
    coverage = coverage_of(traffic, option.boxes, layout)
    step = _how_to_cover(wishes, coverage)
    refuse_low(coverage, wishes.coverage, layout.names, "profiles can cover", step, where("coverage"))
    return Chosen(
        layout,
        traffic,
        profiles_of(option.boxes, layout),
        options,
        option,
        coverage,
        outliers(traffic),
        tuple(work.at(np.array([box.max for box in option.boxes]))[:, 2].tolist()),
        _cover_all(traffic, limits, cost, work, layout, len(option.boxes)) if coverage.uncovered else None,
    )


def read_demand(layout: Layout, wishes: FromTraffic) -> Traffic:
    """The requests of a log as the model sees them: as batches where a window is given, padded to the multiples."""
    if wishes.window_ms is None or wishes.max_batch is None or layout.batch is None:
        traffic = read_traffic(wishes.log, layout)
    else:
        traffic = read_traffic(wishes.log, layout, with_arrivals=True)
        traffic = formed_batches(traffic, layout.batch, wishes.window_ms / 1e3, wishes.max_batch)
    if not len(traffic.sizes):
        return traffic
    padded = round_up(traffic.sizes, _multiples(layout, wishes))
    return Traffic(traffic.names, *distinct(padded, traffic.counts), traffic.misfits)


def _multiples(layout: Layout, wishes: FromTraffic) -> tuple[int, ...]:
    return tuple(wishes.multiple_of.get(name, 1) for name in layout.names)


def _wish_problems(graph: Graph, layout: Layout, wishes: FromTraffic, where: Locate) -> list[Problem]:
    def problem(key: str, summary: str, next_step: str) -> Problem:
        return Problem(summary, next_step, where(key), exit_code=SpecError.exit_code)

    found = []
    by_value = [role.name for role in graph.roles if role.kind == "shape_values"]
    if by_value:
        text = f"the values of '{by_value[0]}' decide a shape, which no log of shapes tells"
        found.append(problem("log", text, "write the profiles by hand, with values for that input"))
    if not 1 <= len(layout.names) <= MAX_OPEN_SIZES:
        named = f"{len(layout.names)} open sizes ({', '.join(layout.names)})" if layout.names else "no open size"
        text = f"{graph.source.name} has {named}, expected 1 to {MAX_OPEN_SIZES} to choose profiles for"
        step = (
            "export the model with one symbol for sizes that are always equal" if layout.names else "leave profiles out"
        )
        found.append(problem("log", text, step))
    for name in wishes.multiple_of:
        if name not in layout.names:
            meant = closest(name, layout.names)
            text = f"multiple_of names '{name}', expected one of {', '.join(layout.names)}"
            found.append(problem("multiple_of", text, f"rename it to '{meant}'" if meant else f"remove '{name}'"))
    for key in ("max_batch", "window_ms"):
        if getattr(wishes, key) is not None and layout.batch is None:
            text = f"{key} needs one open size that is axis 0 of every input with open sizes, and the model has none"
            found.append(problem(key, text, f"remove {key}, or export the model with a shared batch symbol"))
    if wishes.window_ms is not None and wishes.max_batch is None:
        found.append(
            problem("window_ms", "window_ms needs max_batch, at which a queue sends a batch off", "add max_batch: 32")
        )
    return found


def _limits(
    layout: Layout, wishes: FromTraffic, work: Work
) -> Callable[[Ints], np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    def is_allowed(sizes: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        allowed = np.ones(len(sizes), bool)
        if wishes.max_batch is not None and layout.batch is not None:
            allowed &= sizes[:, layout.names.index(layout.batch)] <= wishes.max_batch
        if wishes.memory_mib is not None:
            allowed &= work.at(sizes)[:, 2] <= wishes.memory_mib * _MIB
        return allowed

    return is_allowed


def _how_to_cover(wishes: FromTraffic, coverage: Coverage) -> str:
    limits = [key for key in ("max_batch", "memory_mib") if getattr(wishes, key) is not None]
    raised = f"raise {' or '.join(limits)}" if limits else "mend what sends these requests"
    return f"{raised}, or lower coverage to {math.floor(coverage.share * 1e4) / 1e4:g}"


def _cover_all(traffic: Traffic, limits: Wishes, cost: Cost, work: Work, layout: Layout, count: int) -> CoverAll | None:
    fitting = Traffic(traffic.names, traffic.sizes, traffic.counts)
    everything = Wishes(1.0, count, limits.multiples, limits.is_allowed, limits.padded, limits.by_cost)
    options = choose(fitting, everything, cost, lambda highs: volumes(highs, layout))
    largest = round_up(traffic.sizes, limits.multiples).max(axis=0)
    if not options or not limits.is_allowed(largest[None])[0]:
        return None
    return CoverAll(tuple(largest.tolist()), options[-1].mean_ms, float(work.at(largest[None])[0, 2]))


def _points(sizes: Ints) -> list[list[int]]:
    """For each open size the smallest, a middle and the largest that occur."""
    found = []
    for column in sizes.T:
        values = np.unique(column)
        middle = values[np.searchsorted(values, np.sqrt(float(values[0]) * float(values[-1])))]
        found.append(np.unique([values[0], middle, values[-1]]).tolist()[: MAX_DEGREE + 1])
    return found


def counter(graph: Graph, layout: Layout) -> Callable[[Sequence[int]], Counted]:
    """A function that counts the work of a run at given open sizes, by ONNX's shape inference.

    Every tensor is written once and read by each node that takes it, weights are read once: what fusion saves is not
    known before a build. Operators whose sizes inference does not tell count nothing.
    """
    model = read_model(graph.path, Where(graph.path))
    bare = skeleton(model, weights_as_inputs=True)

    def count(sizes: Sequence[int]) -> Counted:
        shapes = layout.shapes(sizes)
        flops = sum(group.flops for group in audit(model, shapes))
        moved, held = _bytes(_sized(bare, shapes))
        return Counted(flops, moved, held)

    return count


def _sized(bare: ModelProto, shapes: dict[str, tuple[int, ...]]) -> ModelProto:
    sized = ModelProto()
    sized.CopyFrom(bare)
    for place, info in enumerate(bare.graph.input):
        if info.name in shapes:
            fixed = make_tensor_value_info(info.name, info.type.tensor_type.elem_type, shapes[info.name])
            sized.graph.input[place].CopyFrom(fixed)
    for values in (sized.graph.value_info, sized.graph.output):
        for info in values:
            info.type.tensor_type.ClearField("shape")
    return onnx.shape_inference.infer_shapes(sized, data_prop=True)


def _bytes(sized: ModelProto) -> tuple[float, float]:
    """Bytes moved by one run, and the most that tensors between nodes hold at once."""
    graph = sized.graph
    size_of = {tensor.name: _size_bytes(tensor.data_type, tensor.dims) for tensor in graph.initializer}
    for info in (*graph.input, *graph.value_info, *graph.output):
        tensor = info.type.tensor_type
        dims = [dim.dim_value for dim in tensor.shape.dim]
        size_of[info.name] = _size_bytes(tensor.elem_type, dims)
    last_use = {name: place for place, node in enumerate(graph.node) for name in node.input}
    made: dict[str, float] = {}
    moved = held = 0.0
    for place, node in enumerate(graph.node):
        moved += sum(size_of.get(name, 0) for name in (*node.input, *node.output))
        made |= {name: size_of.get(name, 0) for name in node.output}
        held = max(held, sum(made.values()))
        for name in node.input:
            if last_use[name] == place:
                made.pop(name, None)
    return moved, held


def _size_bytes(type_: int, dims: Sequence[int]) -> float:
    if type_ in (TensorProto.STRING, TensorProto.UNDEFINED):
        return 0.0
    return float(np.prod(dims, dtype=np.float64)) * tensor_dtype_to_np_dtype(type_).itemsize
