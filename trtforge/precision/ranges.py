"""Ranges of all FP32 values of a model over data, in one pass with flat memory.

Smallest and largest values are computed inside the graph, right after each value, so that onnxruntime frees tensors as it
does without being watched; only two numbers a value leave it. Values of subgraphs are carried out of them: as scan outputs
of a Loop or Scan, as outputs of both branches of an If.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper

from trtforge.precision.network import FLOAT, Network, attribute, bodies, is_large, network_of, without_functions
from trtforge.reference import ReferenceSession
from trtforge.types import Graph, Range, TensorSpec

Feeds = Mapping[str, NDArray[Any]]
_PREFIX = "trtforge:"
_RESULT, _ZERO, _ONE_LONG = _PREFIX + "ranges", _PREFIX + "zero", _PREFIX + "one"
_NOTHING = (-np.inf, -np.inf, 0.0)
"""Minus the smallest value, the largest, and 1 if a value is not finite, of no values at all; all three merge by maximum."""

_SIGNS = (-1.0, 1.0, 1.0)
_FIRST_WITH_AXES_INPUT = 18
"""Opset at which ReduceMax takes its axes as an input."""


def observe_ranges(graph: Graph, feeds: Iterable[Feeds], *, threads: int | None = None) -> dict[str, Range]:
    """The range of every FP32 value of `graph` over all `feeds`, constants left out.

    Args:
        graph: the model; it runs as it is written, with onnxruntime's optimisations off.
        feeds: sets of inputs, taken one after the other; sizes may differ between them.
        threads: as for `ReferenceSession`.

    Returns:
        Value name -> range. Values that never came about (a branch not taken) are left out; values of one name in
        several subgraphs share an entry.

    Raises:
        GraphError: onnxruntime does not load the model, or stopped at a set of inputs.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "observed.onnx"
        watched = _write_watched(graph, path)
        result = TensorSpec(_RESULT, "float32", (3 * len(watched),))
        session = ReferenceSession(replace(graph, path=path, outputs=(result,)), threads=threads)
        merged = np.tile(np.array(_NOTHING, np.float32), len(watched))
        for feed in feeds:
            merged = np.maximum(merged, session.run(feed)[_RESULT])
    return dict(_named(watched, merged.reshape(-1, 3)))


def _named(watched: list[str], merged: NDArray[np.float32]) -> Iterator[tuple[str, Range]]:
    rows: dict[str, list[int]] = {}
    for index, name in enumerate(watched):
        rows.setdefault(name, []).append(index)
    for name, indices in rows.items():
        minus_low, high, is_odd = (float(number) for number in merged[indices].max(axis=0))
        if is_odd:
            yield name, Range(-minus_low, high, float("inf"), finite=False)
        elif -minus_low <= high:
            yield name, Range(-minus_low, high, max(abs(minus_low), abs(high)), finite=True)


def _write_watched(graph: Graph, path: Path) -> list[str]:
    """Writes the model with the ranges as its output; returns the names of the values that they belong to, in order."""
    model = onnx.load(graph.path, load_external_data=False)
    weights = [tensor for tensor in model.graph.initializer if is_large(tensor)]
    opened = without_functions(model)
    network = network_of(opened, weights, "tensor(float16)")
    watched = _watch(opened.graph, _RESULT, network)
    del opened.graph.output[:]
    del opened.graph.value_info[:]
    opened.graph.output.append(_vector_info(_RESULT, len(watched)))
    opened.graph.initializer.append(helper.make_tensor(_ZERO, FLOAT, [], [0.0]))
    opened.graph.initializer.append(helper.make_tensor(_ONE_LONG, TensorProto.INT64, [1], [1]))
    for tensor in weights:
        opened.graph.initializer.add().CopyFrom(tensor)
    onnx.save(opened, path)
    return watched


def _watch(graph: GraphProto, result: str, network: Network) -> list[str]:
    """Makes `graph` compute the ranges of its values and of those in its bodies, as a vector called `result`."""
    own = {name for name, value in network.own(graph).items() if value.element_type == FLOAT and value.tensor is None}
    watched: list[str] = []
    nodes: list[NodeProto] = []
    parts: list[tuple[list[str], list[NodeProto]]] = []
    watched += (name for name in (info.name for info in graph.input) if name in own)
    parts += (_extremes(name, result) for name in watched)
    for index, node in enumerate(list(graph.node)):
        inside, part = _watch_bodies(node, f"{result}:{index}", network)
        nodes.append(node)
        if inside:
            watched += inside
            parts.append(part)
        for name in (name for name in node.output if name in own):
            watched.append(name)
            parts.append(_extremes(name, result))
    if watched:
        nodes += _joined(parts, result, len(watched))
    del graph.node[:]
    graph.node.extend(nodes)
    return watched


def _joined(parts: list[tuple[list[str], list[NodeProto]]], result: str, count: int) -> Iterator[NodeProto]:
    """One vector of all parts.

    onnxruntime runs what the vector needs from the part whose node stands last in the file, depth first. The first
    value's part is written last, so that each value is watched before the next is computed, and freed.

    Source: onnxruntime, GraphViewer (ReverseDFSFrom with NodeCompare); measured: without it every value stays until the end.
    """
    for _, nodes in reversed(parts):
        yield from nodes
    yield helper.make_node("Concat", [name for names, _ in parts for name in names], [f"{result}:all"], axis=0)
    yield _constant(f"{result}:signs", [3 * count], _SIGNS)
    yield helper.make_node("Mul", [f"{result}:all", f"{result}:signs"], [result])


def _extremes(name: str, result: str) -> tuple[list[str], list[NodeProto]]:
    """Smallest and largest value, and whether a value is not finite: then its product with zero is NaN."""
    own = f"{result}:{name}"
    low, high, odd = f"{own}:low", f"{own}:high", f"{own}:odd"
    nodes = [
        helper.make_node("ReduceMin", [name], [f"{low}0"], keepdims=0),
        helper.make_node("ReduceMax", [name], [f"{high}0"], keepdims=0),
        helper.make_node("Mul", [name, _ZERO], [f"{odd}0"]),
        helper.make_node("ReduceSum", [f"{odd}0"], [f"{odd}1"], keepdims=0),
        helper.make_node("IsNaN", [f"{odd}1"], [f"{odd}2"]),
        helper.make_node("Cast", [f"{odd}2"], [f"{odd}3"], to=FLOAT),
        helper.make_node("Reshape", [f"{low}0", _ONE_LONG], [low]),
        helper.make_node("Reshape", [f"{high}0", _ONE_LONG], [high]),
        helper.make_node("Reshape", [f"{odd}3", _ONE_LONG], [odd]),
    ]
    return [low, high, odd], nodes


def _watch_bodies(
    node: NodeProto, result: str, network: Network
) -> tuple[list[str], tuple[list[str], list[NodeProto]]]:
    """Makes a control-flow node give the ranges of its bodies; returns their values, and the part that they make up."""
    graphs = list(bodies(node))
    watched = [_watch(graph, f"{result}:{index}", network) for index, graph in enumerate(graphs)]
    names = [name for inside in watched for name in inside]
    signs = _constant(f"{result}:signs", [3 * len(names)], _SIGNS)
    # A body's vector has its signs already, and the owner's vector gives them once more.
    again = helper.make_node("Mul", [result, f"{result}:signs"], [f"{result}:signed"])
    if not names:
        return [], ([], [])
    if node.op_type == "If":
        for index, graph in enumerate(graphs):
            counts = [len(inside) for inside in watched]
            graph.node.extend(
                _padded(f"{result}:{index}", sum(counts[:index]), counts[index], sum(counts[index + 1 :]))
            )
            graph.output.append(_vector_info(f"{result}:{index}:padded", len(names)))
        node.output.append(result)
        return names, ([f"{result}:signed"], [signs, again])
    graphs[0].output.append(_vector_info(f"{result}:0", len(names)))
    node.output.append(f"{result}:turns")
    for name in ("scan_output_axes", "scan_output_directions"):
        if found := attribute(node, name):
            found.ints.append(0)
    return names, ([f"{result}:signed"], [*_over_turns(result, len(names), network.opset), signs, again])


def _padded(result: str, before: int, own: int, after: int) -> Iterator[NodeProto]:
    """A branch's vector with places for the values of the other branch."""
    parts = []
    for part, count in ((f"{result}:before", before), (result, own), (f"{result}:after", after)):
        if count:
            parts.append(part)
            if part != result:
                yield _constant(part, [3 * count], _NOTHING)
    yield helper.make_node("Concat", parts, [f"{result}:padded"], axis=0)


def _over_turns(result: str, count: int, opset: int) -> Iterator[NodeProto]:
    """One vector of those from all turns of a loop, of which there may be none."""
    yield _constant(f"{result}:none", [1, 3 * count], _NOTHING)
    yield helper.make_node("Concat", [f"{result}:turns", f"{result}:none"], [f"{result}:some"], axis=0)
    if opset < _FIRST_WITH_AXES_INPUT:
        yield helper.make_node("ReduceMax", [f"{result}:some"], [result], axes=[0], keepdims=0)
        return
    axes = helper.make_tensor("", TensorProto.INT64, [1], [0])
    yield helper.make_node("Constant", [], [f"{result}:axes"], value=axes)
    yield helper.make_node("ReduceMax", [f"{result}:some", f"{result}:axes"], [result], keepdims=0)


def _constant(name: str, dims: list[int], repeated: tuple[float, ...]) -> NodeProto:
    values = np.tile(np.array(repeated, np.float32), dims[-1] // len(repeated))
    return helper.make_node("Constant", [], [name], value=helper.make_tensor("", FLOAT, dims, values))


def _vector_info(name: str, count: int) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, FLOAT, [3 * count])
