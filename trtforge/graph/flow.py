"""The whole model as one flat data flow: subgraphs and local functions opened, values under names of their own.

A local function is opened once, however many nodes call it: all calls share its values. What is found that way may be
more than what happens, never less, and no nest of functions can blow it up.
"""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from trtforge.graph.external_data import ONE_ENTRY_TYPES, is_external
from trtforge.graph.model_file import domain_of, dtype_name, size_bytes, subgraphs

_SEPARATOR = "\0"
_MAX_ARRAY_BYTES = 1 << 20
_Names = MutableMapping[str, str]

SHAPE_KEEPING = frozenset({"Identity", "Cast", "CastLike", "DequantizeLinear"})
VALUE_KEEPING = frozenset(
    [
        "Identity",
        "Cast",
        "CastLike",
        "Clip",
        "Concat",
        "Dropout",
        "Expand",
        "Flatten",
        "Gather",
        "GatherElements",
        "GatherND",
        "Pad",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
    ]
)
"""Operators whose outputs hold values of their first input (of any, for Concat): moved, repeated, left out, clipped."""

SHAPE_OPERANDS: dict[str, frozenset[int]] = {
    "AffineGrid": frozenset({1}),
    "BlackmanWindow": frozenset({0}),
    "CenterCropPad": frozenset({1}),
    "Col2Im": frozenset({1, 2}),
    "ConstantOfShape": frozenset({0}),
    "DFT": frozenset({1}),
    "Expand": frozenset({1}),
    "HammingWindow": frozenset({0}),
    "HannWindow": frozenset({0}),
    "LoopScan": frozenset({1}),
    "MaxUnpool": frozenset({2}),
    "NonMaxSuppression": frozenset({2}),
    "OneHot": frozenset({1}),
    "Pad": frozenset({1}),
    "Range": frozenset({0, 1, 2}),
    "Reshape": frozenset({1}),
    "Resize": frozenset({1, 2, 3}),
    "STFT": frozenset({1, 3}),
    "Slice": frozenset({1, 2, 3, 4}),
    "Split": frozenset({1}),
    "SplitToSequence": frozenset({1}),
    "Squeeze": frozenset({1}),
    "Tile": frozenset({1}),
    "TopK": frozenset({1}),
    "Unsqueeze": frozenset({1}),
    "Upsample": frozenset({1}),
}
"""Operator -> positions of the inputs whose values decide the shape of its output, over all opsets.

Source: https://onnx.ai/onnx/operators/, each operator's shape inference. `LoopScan` stands for a Loop's scan output.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One node, or a link between a subgraph's or function's values and those around it (op `Identity`, no node).

    Attributes:
        op: operator name; with the domain before it ("com.microsoft.Attention") unless that is the standard one.
            `LoopScan` and `LoopScanUntil` link a Loop's scan output to its body, after a number of turns that is
            known before, or that the body itself decides. They read the body's value and the trip count.
        reads, writes: values; "" for an optional one left out.
    """

    op: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    node: NodeProto | None = None

    def attribute(self, name: str, default: int) -> int:
        """The integer attribute `name`."""
        found = [a.i for a in self.node.attribute if a.name == name] if self.node else []
        return int(found[0]) if found else default


@dataclass(frozen=True, slots=True)
class Flow:
    """All steps of a model, in topological order but for what a Loop carries back.

    Attributes:
        tensors: constant values, from initializers and Constant nodes.
        readers: value -> (step, position among its inputs).
        writers: value -> the steps that give it; several for a function's inputs.
    """

    steps: tuple[Step, ...]
    tensors: dict[str, TensorProto]
    readers: dict[str, list[tuple[Step, int]]]
    writers: dict[str, list[Step]]

    def origins(self, value: str, ops: frozenset[str]) -> list[TensorProto]:
        """The constants that `value` comes from through `ops` alone; none if one of its sources is no constant."""
        found: list[TensorProto] = []
        todo, seen = [value], {value}
        while todo:
            name = todo.pop()
            if name in self.tensors:
                found.append(self.tensors[name])
                continue
            writers = self.writers.get(name, ())
            if not writers or any(step.op not in ops for step in writers):
                return []
            sources = {name for step in writers for name in step.reads[:1]} - seen
            seen |= sources
            todo += sources
        return found

    def reach(self, value: str, ops: frozenset[str]) -> set[str]:
        """`value` and all that hold values of it, as far as `ops` carry them; shape operands and indices do not."""
        reached, todo = {value}, [value]
        while todo:
            for step, position in self.readers.get(todo.pop(), ()):
                if step.op in ops and carries(step, position):
                    new = {name for name in step.writes if name} - reached
                    reached |= new
                    todo += new
        return reached


def carries(step: Step, position: int) -> bool:
    """Whether the input at `position` holds values, not sizes or indices, of a step that passes values on."""
    if step.op == "Where":
        return position > 0
    if step.op in VALUE_KEEPING and step.op != "Concat":
        return position == 0
    return position not in SHAPE_OPERANDS.get(step.op, ())


def local_name(value: str) -> str:
    """The value's name in its own graph."""
    return value.rpartition(_SEPARATOR)[2]


def array(tensor: TensorProto) -> NDArray[Any] | None:
    """The values of a numeric tensor that is small and lies in the model file."""
    dtype = dtype_name(tensor.data_type)
    if dtype not in ONE_ENTRY_TYPES or is_external(tensor):
        return None
    size = size_bytes(dtype, tensor.dims)
    return numpy_helper.to_array(tensor) if size is not None and size <= _MAX_ARRAY_BYTES else None


@dataclass(frozen=True, slots=True)
class _Opening:
    """What is shared while a model is opened: its functions, the constants found so far, the steps found so far."""

    functions: dict[tuple[str, str], FunctionProto]
    tensors: dict[str, TensorProto]
    steps: list[Step]

    def link(self, sources: Iterable[str], targets: Iterable[str]) -> None:
        """Adds a step from each source to the target at its position; either may have more."""
        for source, target in zip(sources, targets, strict=False):
            if source and target:
                self.steps.append(Step("Identity", (source,), (target,)))


def flow_of(model: ModelProto) -> Flow:
    """Opens a model whose nodes are sorted and whose tensors are sound."""
    opening = _Opening({(domain_of(f.domain), f.name): f for f in model.functions}, {}, [])
    _open_graph(model.graph, {}, "", opening)
    for key, function in opening.functions.items():
        prefix = _function_prefix(key)
        names = {name: prefix + name for name in [*function.input, *_outputs(function.node)] if name}
        _open_nodes(function.node, names, prefix, opening)
    readers: dict[str, list[tuple[Step, int]]] = defaultdict(list)
    writers: dict[str, list[Step]] = defaultdict(list)
    for step in opening.steps:
        for position, name in enumerate(step.reads):
            readers[name].append((step, position))
        for name in step.writes:
            writers[name].append(step)
    return Flow(tuple(opening.steps), opening.tensors, dict(readers), dict(writers))


def _function_prefix(key: tuple[str, str]) -> str:
    return f"{key[0]}:{key[1]}{_SEPARATOR}"


def _outputs(nodes: Iterable[NodeProto]) -> Iterator[str]:
    for node in nodes:
        yield from node.output


def _open_graph(graph: GraphProto, outer: _Names, prefix: str, opening: _Opening) -> _Names:
    """Adds the graph's steps; returns what each name visible in it stands for."""
    defined = [*(v.name for v in graph.input), *(t.name for t in graph.initializer), *_outputs(graph.node)]
    names = ChainMap({name: prefix + name for name in defined if name}, outer)
    opening.tensors.update((names[tensor.name], tensor) for tensor in graph.initializer if tensor.name)
    _open_nodes(graph.node, names, prefix, opening)
    return names


def _open_nodes(nodes: Iterable[NodeProto], names: _Names, prefix: str, opening: _Opening) -> None:
    for node in nodes:
        reads = tuple(names.get(name, name) for name in node.input)
        writes = tuple(names.get(name, name) for name in node.output)
        key = (domain_of(node.domain), node.op_type)
        bodies = list(subgraphs(node))
        if function := opening.functions.get(key):
            inside = _function_prefix(key)
            opening.link(reads, [inside + name for name in function.input])
            opening.link([inside + name for name in function.output], writes)
        elif node.op_type == "Constant" and writes and (value := _constant(node)):
            opening.tensors[writes[0]] = value
        elif not bodies:
            opening.steps.append(Step(f"{key[0]}.{key[1]}".lstrip("."), reads, writes, node))
        for attribute, body in bodies:
            inside = f"{prefix}{node.name}/{attribute}{_SEPARATOR}"
            _open_body(Step(node.op_type, reads, writes, node), body, names, inside, opening)


def _open_body(owner: Step, body: GraphProto, names: _Names, prefix: str, opening: _Opening) -> None:
    """Opens a branch of an If, or the body of a Loop or Scan, with its links to the values around it.

    Source: ONNX Loop-21 (trip count, condition, carried values -> carried values, scan outputs) and Scan-21.
    """
    inputs = [prefix + value.name for value in body.input]
    if owner.op == "Loop":
        opening.link(owner.reads[1:], inputs[1:])
    elif owner.op == "Scan":
        opening.link(owner.reads, inputs)
    first = len(opening.steps)
    inner = _open_graph(body, names, prefix, opening)
    outputs = [inner.get(value.name, value.name) for value in body.output]
    if owner.op != "Loop":
        opening.link(outputs, owner.writes)
        return
    scan = "LoopScan" if _condition_is_passed_on(opening.steps[first:], inputs, outputs) else "LoopScanUntil"
    num_carried = max(len(inputs) - 2, 0)
    opening.link(outputs[: num_carried + 1], inputs[1:])
    opening.link(outputs[1 : num_carried + 1], owner.writes)
    trip_count = owner.reads[0] if owner.reads else ""
    for source, target in zip(outputs[num_carried + 1 :], owner.writes[num_carried:], strict=False):
        opening.steps.append(Step(scan, (source, trip_count), (target,), owner.node))


def _condition_is_passed_on(steps: Iterable[Step], inputs: Sequence[str], outputs: Sequence[str]) -> bool:
    """Whether a Loop's body gives back the condition it got, or a constant, so that it never ends the loop early."""
    writer = {name: step for step in steps for name in step.writes if step.op in SHAPE_KEEPING and step.reads}
    written = {name for step in steps for name in step.writes}
    condition, seen = outputs[0] if outputs else "", set[str]()
    while condition in writer and condition not in seen:
        seen.add(condition)
        condition = writer[condition].reads[0]
    return condition in inputs or condition not in written


def _constant(node: NodeProto) -> TensorProto | None:
    """The dense numeric value of a Constant node."""
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            return None
        if attribute.name == "value" and attribute.HasField("t"):
            tensor: TensorProto = attribute.t
            return tensor
        if values := _plain_value(attribute):
            return numpy_helper.from_array(values[0])
    return None


def _plain_value(attribute: AttributeProto) -> tuple[NDArray[Any]] | None:
    match attribute.name:
        case "value_int":
            return (np.array(attribute.i, np.int64),)
        case "value_ints":
            return (np.array(attribute.ints, np.int64),)
        case "value_float":
            return (np.array(attribute.f, np.float32),)
        case "value_floats":
            return (np.array(attribute.floats, np.float32),)
    return None
