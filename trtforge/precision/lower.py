"""Compiles FP16 or BF16 into a graph, with as few casts as the types allow."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from trtforge.errors import TrtForgeError
from trtforge.precision.cut import high_units
from trtforge.precision.network import (
    FLOAT,
    Network,
    Unit,
    Value,
    all_graphs,
    attribute,
    is_large,
    network_of,
    skeleton,
    standard_opset,
    without_functions,
)
from trtforge.precision.opsets import raise_for_bfloat16
from trtforge.precision.policy import WEIGHTED, KeepRules, Reasons, reasons_for_float
from trtforge.precision.weights import ONNX_TYPES, LowType, WeightsFile, write_converted, write_same
from trtforge.types import Range

_LARGE_TABLE = 1 << 16
"""A constant of more elements is halved even if that takes a cast, such as the words of an embedding."""

_UNCHECKED = "deprecated"

_TURNS = 8
"""A cast inside a loop counts as this many: more than those outside that would replace it, in most graphs."""

Type = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Decision:
    """Why a node has the type it has.

    Attributes:
        node: name; for a value that a control-flow node passes on, that node's with the value in brackets.
        op: operator; `input` or `output` for those of the model where their types change.
        dtype: type of its floating-point operands and results.
        range: range of its result in the data, of its first operand where it has no float result; None if not seen.
    """

    node: str
    op: str
    dtype: Type | Literal["int8"]
    reason: str
    range: Range | None


@dataclass(frozen=True, slots=True)
class Lowered:
    """A strongly typed model.

    Attributes:
        model: sorted, checked, without local functions, with all weights inside unless they were external and left so.
        decisions: one for every node with a floating-point operand or result, in graph order.
        num_casts: casts inserted.
        notes: what else was changed, one sentence each.
    """

    model: ModelProto
    decisions: tuple[Decision, ...]
    num_casts: int
    notes: tuple[str, ...]


def lower(
    model: ModelProto,
    *,
    dtype: LowType,
    keep: KeepRules = KeepRules(),  # noqa: B008 - frozen
    ranges: Mapping[str, Range] | None = None,
    keep_io: bool = True,
    max_opset: int = 22,
    weights_dir: Path | None = None,
    weights_file: WeightsFile | None = None,
) -> Lowered:
    """Lowers the FP32 part of `model` to `dtype`.

    Guarantees: every operator gets operands of types that its schema allows together, and elementwise operators of one
    type, as strongly typed TensorRT demands; among all assignments that respect `policy`, keep Conv, MatMul and their
    like in `dtype` and change only other nodes, the one with the fewest casts, those in a loop counting several times; a
    value is cast to a type at most once.
    `model` is not changed. Beyond it, memory holds the result and one weight; with `weights_file`, the result without its
    large weights.

    Args:
        model: sorted, as ingest gives it. Types other than FP32 in it stay.
        dtype: the lower type. bfloat16 may need the opset raised; see `Lowered.notes`.
        keep: what stays FP32 whatever the data says.
        ranges: value name -> range seen in calibration data (`observe_ranges`); None to judge by structure alone.
        keep_io: whether FP32 inputs and outputs stay FP32; else they become `dtype` where the data allows.
        max_opset: the latest opset that the result may have where the model's is earlier.
        weights_dir: folder of external weights that are not loaded; they are taken into the result.
        weights_file: takes the large weights of the result, which then refers to it.

    Raises:
        GraphError: the types of the model's values contradict each other.
        SeveralErrors: globs in `keep` that match no node.
        TrtForgeError: the result does not pass ONNX's own checks.
    """
    opened = without_functions(model)
    weights = tuple(tensor for tensor in model.graph.initializer if is_large(tensor))
    notes = raise_for_bfloat16(opened, weights, max_opset) if dtype == "bfloat16" else ()
    low_type = f"tensor({dtype})"
    network = network_of(opened, weights, low_type)
    boundary = () if keep_io else tuple(_boundary(network))
    reasons = reasons_for_float(network, dtype, keep, ranges or {}, weights_dir, boundary)
    units = [unit for unit in (*network.units, *boundary) if unit.concerns_floats]
    types = _types(units, reasons, network, dtype)
    decisions = tuple(_decision(unit, types[unit], reasons, dtype, ranges or {}) for unit in units)
    writer = _Writer(network, types, dtype, weights_dir, weights_file)
    writer.rewrite()
    writer.add_weights(weights)
    check(opened)
    return Lowered(opened, decisions, writer.num_casts, notes)


def _boundary(network: Network) -> Iterable[Unit]:
    """A unit for each FP32 input and output of the model, so that their types are decided like those of nodes."""
    graph = network.model.graph
    values = network.visible(graph)
    for info in graph.input:
        value = values[info.name]
        if value.element_type == FLOAT and value.tensor is None:
            unit = Unit(info.name, "input", None, graph, (), (value,), frozenset(), (value,))
            value.producer = unit
            yield unit
    for info in graph.output:
        value = values[info.name]
        if value.element_type == FLOAT:
            unit = Unit(info.name, "output", None, graph, (value,), (), frozenset({0}), ())
            value.readers.append(unit)
            yield unit


def _types(units: list[Unit], reasons: Reasons, network: Network, dtype: LowType) -> dict[Unit, Type]:
    number = {unit: index for index, unit in enumerate(units)}
    pinned = [number[unit] for unit in units if unit not in reasons and _is_asked_for(unit)]
    values = [
        (
            number.get(value.producer) if value.producer and value in value.producer.writes else None,
            [number[reader] for reader in dict.fromkeys(value.readers)],
            value.needs_float or _is_float_output(value),
            _TURNS ** network.depths[id(value.graph)],
        )
        for value in network.values
        if value.element_type == FLOAT and value.tensor is None
    ]
    high = high_units(len(units), [number[unit] for unit in reasons if unit in number], pinned, values)
    return {unit: "float32" if number[unit] in high else dtype for unit in units}


def _is_asked_for(unit: Unit) -> bool:
    """Whether a lower type is the point of it: work, the bytes of a large table, the model's inputs and outputs."""
    if unit.op in WEIGHTED or unit.op in ("input", "output"):
        return True
    return any(
        value.tensor is not None and math.prod(dim or 0 for dim in value.dims or (0,)) > _LARGE_TABLE
        for value in unit.reads
    )


def _decision(unit: Unit, type_: Type, reasons: Reasons, dtype: LowType, ranges: Mapping[str, Range]) -> Decision:
    if unit in reasons:
        reason = reasons[unit]
    elif type_ == "float32":
        reason = "between FP32 nodes: fewer casts"
    else:
        reason = f"{dtype} as asked"
    shown = next((v.name for v in (*unit.writes[::-1], *unit.reads) if v.name in ranges), "")
    return Decision(unit.name, unit.op, type_, reason, ranges.get(shown))


class _Writer:
    """Rewrites a model in place to the types decided."""

    def __init__(
        self,
        network: Network,
        types: Mapping[Unit, Type],
        dtype: LowType,
        folder: Path | None,
        weights_file: WeightsFile | None,
    ) -> None:
        self.network = network
        self.types = types
        self.dtype: LowType = dtype
        self.folder = folder
        self.weights_file = weights_file
        self.num_casts = 0
        self.needs: dict[Value, dict[Type, None]] = {}
        self.names: dict[tuple[Value, Type], str] = {}
        self.inserted: dict[int, dict[str | None, list[NodeProto]]] = defaultdict(lambda: defaultdict(list))

    def rewrite(self) -> None:
        """Renames operands and results, and puts casts and converted constants after what they come from."""
        for value in self.network.values:
            if value.element_type == FLOAT:
                self.needs[value] = dict.fromkeys(self._needs(value))
                self._name(value)
        for unit in self.network.units:
            self._rewrite_operands(unit)
        # From the inside out: replacing the nodes of a graph copies the graphs that they carry.
        for graph in reversed(self.network.graphs):
            self._rewrite_signature(graph)
            self._rewrite_nodes(graph)
            self._rewrite_initializers(graph)

    def add_weights(self, weights: Iterable[TensorProto]) -> None:
        """Adds the large initializers of the main graph, converted where that was decided."""
        graph = self.network.model.graph
        for tensor in weights:
            self._write(self.network.visible(graph)[tensor.name], tensor, graph)

    def _needs(self, value: Value) -> Iterable[Type]:
        yield from (self.types[reader] for reader in value.readers)
        if value.needs_float or _is_float_output(value):
            yield "float32"

    def _given(self, value: Value) -> Type:
        """The type that a value is produced in; a constant is converted where nobody needs it as it is."""
        if value.tensor is not None:
            return self.dtype if list(self.needs[value]) == [self.dtype] else "float32"
        unit = value.producer
        return self.types[unit] if unit is not None and value in unit.writes else "float32"

    def _declared(self, value: Value) -> Type:
        """The type that bears the value's own name; the names of a model's outputs never change."""
        if not value.is_output:
            return self._given(value)
        return next((self.types[reader] for reader in value.readers if reader.op == "output"), "float32")

    def _name(self, value: Value) -> None:
        given = self._given(value)
        self.names[value, self._declared(value)] = value.name
        for type_ in (given, *self.needs[value]):
            if (value, type_) not in self.names:
                self.names[value, type_] = self.network.fresh(f"{value.name}_{type_}")
        if value.tensor is None:
            for type_ in self.needs[value]:
                if type_ != given:
                    self._cast(value, given, type_)

    def _cast(self, value: Value, given: Type, type_: Type) -> None:
        source, target = self.names[value, given], self.names[value, type_]
        name = self.network.fresh(f"{value.name}/to_{type_}")
        node = helper.make_node("Cast", [source], [target], name=name, to=self._onnx_type(type_))
        self.inserted[id(value.graph)][None if value.is_input else source].append(node)
        self.num_casts += 1

    def _rewrite_operands(self, unit: Unit) -> None:
        for position, value in enumerate(unit.operands):
            if value is None or value.element_type != FLOAT:
                continue
            if unit.node is not None:
                unit.node.input[position] = self.names[value, self._read_type(unit, position, value)]
                continue
            holder, place = unit.places[position]
            if isinstance(holder, GraphProto):
                holder.output[place].name = self.names[value, self.types[unit]]
                holder.output[place].type.tensor_type.elem_type = self._onnx_type(self.types[unit])
            else:
                holder.input[place] = self.names[value, self.types[unit]]
        if unit.node is not None and self.types.get(unit) == self.dtype:
            self._rewrite_attribute(unit.node)

    def _read_type(self, unit: Unit, position: int, value: Value) -> Type:
        if unit.op == "Cast":
            return self._given(value)
        return self.types[unit] if position in unit.typed else "float32"

    def _rewrite_attribute(self, node: NodeProto) -> None:
        if node.op_type == "Cast":
            next(a for a in node.attribute if a.name == "to").i = ONNX_TYPES[self.dtype]
        elif node.op_type == "ConstantOfShape":
            fill = attribute(node, "value")
            source = fill.t if fill else helper.make_tensor("", FLOAT, [1], [0.0])
            converted = TensorProto()
            write_converted(source, converted, self.dtype, self.folder)
            del node.attribute[:]
            node.attribute.append(helper.make_attribute("value", converted))

    def _rewrite_signature(self, graph: GraphProto) -> None:
        """Types of a graph's inputs, of the model's outputs, and those recorded for values in between."""
        own = self._own(graph)
        infos = (*graph.input, *graph.value_info, *(graph.output if graph is self.network.model.graph else ()))
        for info in infos:
            value = own.get(info.name)
            if value is not None:
                info.type.tensor_type.elem_type = self._onnx_type(self._declared(value))

    def _own(self, graph: GraphProto) -> dict[str, Value]:
        """The FP32 values that a graph itself defines."""
        return {name: value for name, value in self.network.own(graph).items() if value.element_type == FLOAT}

    def _rewrite_nodes(self, graph: GraphProto) -> None:
        own = self._own(graph)
        inserted = self.inserted[id(graph)]
        nodes = inserted.pop(None, [])
        for node in graph.node:
            if node.op_type == "Constant" and node.output[0] in own:
                nodes += self._constants(node, own[node.output[0]])
                continue
            for position, name in enumerate(node.output):
                if name in own:
                    node.output[position] = self.names[own[name], self._given(own[name])]
            nodes.append(node)
            for name in node.output:
                nodes += inserted.pop(name, [])
        del graph.node[:]
        graph.node.extend(nodes)

    def _constants(self, node: NodeProto, value: Value) -> Iterable[NodeProto]:
        """A Constant node in each type that is needed of it."""
        for type_ in {self._given(value): None, **self.needs[value]}:
            if type_ == "float32":
                yield node
            elif value.tensor is not None:
                converted = TensorProto()
                write_converted(value.tensor, converted, self.dtype, self.folder)
                name = node.name if self._given(value) == type_ else self.network.fresh(f"{node.name}_{type_}")
                yield helper.make_node("Constant", [], [self.names[value, type_]], name=name, value=converted)

    def _rewrite_initializers(self, graph: GraphProto) -> None:
        own = self._own(graph)
        tensors = list(graph.initializer)
        del graph.initializer[:]
        for tensor in tensors:
            if tensor.name in own:
                self._write(own[tensor.name], tensor, graph)
            else:
                graph.initializer.add().CopyFrom(tensor)

    def _write(self, value: Value, tensor: TensorProto, graph: GraphProto) -> None:
        """Adds an initializer in each type that is needed of it."""
        if value.element_type != FLOAT:
            target = graph.initializer.add()
            write_same(tensor, target, self.folder)
            self._move_out(target)
            return
        for type_ in {self._given(value): None, **self.needs[value]}:
            target = graph.initializer.add()
            if type_ == "float32":
                write_same(tensor, target, self.folder)
            else:
                write_converted(tensor, target, self.dtype, self.folder)
            target.name = self.names[value, type_]
            self._move_out(target)

    def _move_out(self, tensor: TensorProto) -> None:
        if self.weights_file is not None and tensor.HasField("raw_data") and is_large(tensor):
            self.weights_file.take(tensor)

    def _onnx_type(self, type_: Type) -> int:
        return FLOAT if type_ == "float32" else ONNX_TYPES[type_]


def _is_float_output(value: Value) -> bool:
    """Whether it is an output of the model whose type does not change."""
    return value.is_output and not any(reader.op == "output" for reader in value.readers)


def check(model: ModelProto) -> None:
    """Runs ONNX's own checks, types included.

    Raises:
        TrtForgeError: they find something, which is a mistake of this module.
    """
    sound = skeleton(model, weights_as_inputs=True)
    try:
        onnx.checker.check_model(_without_deprecated(sound))
        onnx.shape_inference.infer_shapes(sound, check_type=True, strict_mode=False)
    except Exception as error:
        raise TrtForgeError(
            "the lowered graph does not pass ONNX's checks",
            detail=[" ".join(str(error).split())],
            next_step="report this as a bug of trtforge, with the model or the operators that the message names",
        ) from error


def _without_deprecated(model: ModelProto) -> ModelProto:
    """A copy in which deprecated operators are of a domain that ONNX's checker does not know, so that it passes over them.

    It refuses GroupNormalization-18, which was deprecated in the version that brought it; TensorRT builds it.
    """
    copy = ModelProto()
    copy.CopyFrom(model)
    opset = standard_opset(copy)
    for graph in all_graphs(copy.graph):
        for node in graph.node:
            if not node.domain and onnx.defs.has(node.op_type, opset) and _is_deprecated(node.op_type, opset):
                node.domain = _UNCHECKED
    copy.opset_import.append(helper.make_opsetid(_UNCHECKED, 1))
    return copy


def _is_deprecated(operator: str, opset: int) -> bool:
    return bool(onnx.defs.get_schema(operator, opset).deprecated)
