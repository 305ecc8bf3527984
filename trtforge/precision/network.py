"""A model as floating-point values and the units that must agree on a type, subgraphs included."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, inliner
from onnx.defs import OpSchema

from trtforge.errors import GraphError

FLOAT = TensorProto.FLOAT
Place = tuple[NodeProto | GraphProto, int]
Dims = tuple[int | None, ...] | None
_LOOPS = ("Loop", "Scan")
_SKELETON_BYTES = 1 << 16
_FLOAT_TYPE = "tensor(float)"
_EXEMPT = {"Resize": frozenset({1, 2}), "Upsample": frozenset({1}), "Dropout": frozenset({1})}
"""Operator -> positions of operands that stay FP32 though the schema may let them change.

Source: ONNX Resize-19 (roi, scales), Upsample-9 (scales), Dropout-13 (ratio, unused in inference).
"""
_TYPED_BY_ATTRIBUTE = frozenset({"Cast", "ConstantOfShape"})
_FIRST_SCAN_WITHOUT_LENGTHS = 9


@dataclass(slots=True, eq=False)
class Value:
    """One tensor of one graph or subgraph.

    Attributes:
        element_type: ONNX element type, 0 where it is not known.
        dims: sizes, None for an open one; None where not even the rank is known.
        tensor: the constant it is, from an initializer or a Constant node.
        graph: the graph that defines it.
        producer: the unit that gives it; None for graph inputs and constants.
        readers: the units that read it in their own type.
        needs_float: whether a reader takes it in FP32 whatever its own type is.
        is_input: whether it is an input of its graph.
        is_output: whether it is an output of the main graph.
    """

    name: str
    element_type: int
    dims: Dims
    graph: GraphProto
    tensor: TensorProto | None = None
    producer: Unit | None = None
    readers: list[Unit] = field(default_factory=list)
    needs_float: bool = False
    is_input: bool = False
    is_output: bool = False


@dataclass(slots=True, eq=False)
class Unit:
    """A node, or a link that a control-flow node makes between values of its own graph and of its bodies.

    All of `reads` and `writes` have one element type, FP32 or the lower one. A Cast reads any type, so that its operand
    is not among them.

    Attributes:
        name: the node's name; a link is called after its control-flow node and the value it gives.
        op: operator name, "If", "Loop" or "Scan" for a link; with the domain before it unless that is the standard one.
        node: None for a link.
        operands: all values that a node reads by position, None for one left out.
        results: all values that a node gives.
        typed: positions of the operands that have the unit's type.
        places: of a link, for each operand the node or body that names it, and its position among the inputs of that
            node or the outputs of that body.
        obstacle: why no lower type may be written here, "" if one may.
    """

    name: str
    op: str
    node: NodeProto | None
    graph: GraphProto
    operands: tuple[Value | None, ...]
    results: tuple[Value, ...]
    typed: frozenset[int]
    writes: tuple[Value, ...]
    obstacle: str = ""
    places: tuple[Place, ...] = ()

    @property
    def reads(self) -> tuple[Value, ...]:
        """The operands that have the unit's type."""
        return tuple(value for position, value in enumerate(self.operands) if position in self.typed and value)

    @property
    def concerns_floats(self) -> bool:
        """Whether there is a type to decide."""
        return bool(self.reads or self.writes)


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """All values and units of a model, in topological order but for what a Loop carries back.

    Attributes:
        values: every value; those of element type FLOAT are the ones that may change.
        scopes: id of a graph -> what it sees; `graphs` keeps these ids alive.
        depths: id of a graph -> number of loops around it.
        conditions: (control-flow node, value that decides what it does).
        names: names taken by values or nodes anywhere.
    """

    model: ModelProto
    units: tuple[Unit, ...]
    values: tuple[Value, ...]
    scopes: dict[int, ChainMap[str, Value]]
    graphs: tuple[GraphProto, ...]
    depths: dict[int, int]
    conditions: tuple[tuple[str, Value], ...]
    names: set[str]

    def visible(self, graph: GraphProto) -> MutableMapping[str, Value]:
        """Name -> value, as `graph` sees them."""
        return self.scopes[id(graph)]

    @property
    def opset(self) -> int:
        """Version of the standard operator set."""
        return standard_opset(self.model)

    def own(self, graph: GraphProto) -> MutableMapping[str, Value]:
        """Name -> value, of those that `graph` itself defines."""
        return self.scopes[id(graph)].maps[0]

    def fresh(self, wish: str) -> str:
        """`wish`, or the like of it where that name is taken; taken from now on."""
        name, number = wish, 1
        while name in self.names:
            name, number = f"{wish}_{number}", number + 1
        self.names.add(name)
        return name


def is_standard(node: NodeProto) -> bool:
    """Whether its operator is one of ONNX's own."""
    return node.domain in ("", "ai.onnx")


def bodies(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs that `node` carries."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def body(node: NodeProto, name: str) -> GraphProto:
    """The graph in the attribute `name`."""
    found: GraphProto = next(attribute.g for attribute in node.attribute if attribute.name == name)
    return found


def all_graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """`graph` and every graph inside it, owners first."""
    yield graph
    for node in graph.node:
        for inner in bodies(node):
            yield from all_graphs(inner)


def standard_opset(model: ModelProto) -> int:
    """Version of the standard operator set."""
    return next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)


def skeleton(model: ModelProto, *, weights_as_inputs: bool) -> ModelProto:
    """A copy of `model` without the values of large initializers of the main graph.

    Args:
        model: not changed.
        weights_as_inputs: whether they become graph inputs, so that the copy is a sound model; else they are left out.
    """
    copy = ModelProto()
    for name, _ in model.ListFields():
        if name.name != "graph":
            _copy_field(model, copy, name.name)
    for name, _ in model.graph.ListFields():
        if name.name != "initializer":
            _copy_field(model.graph, copy.graph, name.name)
    inputs = {value.name for value in copy.graph.input}
    for tensor in model.graph.initializer:
        if not is_large(tensor):
            copy.graph.initializer.add().CopyFrom(tensor)
        elif weights_as_inputs and tensor.name not in inputs:
            copy.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return copy


def is_large(tensor: TensorProto) -> bool:
    """Whether a tensor is too large to copy without need. External data is large whatever its size."""
    return tensor.data_location == TensorProto.EXTERNAL or tensor.ByteSize() > _SKELETON_BYTES


def _copy_field(source: ModelProto | GraphProto, target: ModelProto | GraphProto, name: str) -> None:
    value = getattr(source, name)
    if hasattr(value, "CopyFrom"):
        getattr(target, name).CopyFrom(value)
    elif isinstance(value, str | int):
        setattr(target, name, value)
    else:
        getattr(target, name).extend(value)


def without_functions(model: ModelProto) -> ModelProto:
    """`model` with its local functions put in the place of their calls; a copy without large initializers' values.

    Every node has a name of its own.
    """
    opened = skeleton(model, weights_as_inputs=True)
    large = [tensor.name for tensor in model.graph.initializer if is_large(tensor)]
    given = {value.name for value in model.graph.input}
    if opened.functions:
        opened = inliner.inline_local_functions(opened)
        del opened.functions[:]
    added = set(large) - given
    kept = [value for value in opened.graph.input if value.name not in added]
    del opened.graph.input[:]
    opened.graph.input.extend(kept)
    _name_nodes(opened.graph)
    return opened


def _name_nodes(main: GraphProto) -> None:
    seen = {node.name for graph in all_graphs(main) for node in graph.node}
    used: set[str] = set()
    for graph in all_graphs(main):
        for position, node in enumerate(graph.node):
            if not node.name or node.name in used:
                wish = node.name or f"{node.op_type}_{position}"
                number = 0
                while (name := f"{wish}_{number}" if number else wish) in seen:
                    number += 1
                node.name = name
                seen.add(name)
            used.add(node.name)


def element_types(model: ModelProto, weights: Iterable[TensorProto]) -> ModelProto:
    """`model`, a skeleton, with the types and shapes of all its values inferred.

    Raises:
        GraphError: its operators contradict the types that it declares.
    """
    typed = ModelProto()
    typed.CopyFrom(model)
    inputs = {value.name for value in typed.graph.input} | {tensor.name for tensor in typed.graph.initializer}
    typed.graph.input.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in weights
        if tensor.name not in inputs
    )
    try:
        return onnx.shape_inference.infer_shapes(typed, data_prop=True)
    except Exception as error:
        raise GraphError(
            "the types of the model's values cannot be inferred",
            detail=[" ".join(str(error).split())],
            next_step="export the model again and look at it with check-model, which the onnx package installs",
        ) from error


def network_of(model: ModelProto, weights: Iterable[TensorProto], low_type: str) -> Network:
    """Opens a sorted model without local functions.

    Args:
        model: a skeleton; the network refers to its nodes and graphs.
        weights: the main graph's large initializers, which the skeleton lacks.
        low_type: the type that would be written, as in ONNX schemas ("tensor(float16)").
    """
    weights = tuple(weights)
    typed = element_types(model, weights)
    reader = _Reader(standard_opset(model), low_type)
    values = {value.name: value for value in _declare(model.graph, typed.graph, weights)}
    reader.read(model.graph, typed.graph, ChainMap(values), 0)
    for output in model.graph.output:
        if output.name in values:
            values[output.name].is_output = True
    return Network(
        model=model,
        units=tuple(reader.units),
        values=tuple(reader.values),
        scopes=reader.scopes,
        graphs=tuple(reader.graphs),
        depths=reader.depths,
        conditions=tuple(reader.conditions),
        names=_names(model, reader.values),
    )


def _names(model: ModelProto, values: Iterable[Value]) -> set[str]:
    nodes = {node.name for graph in all_graphs(model.graph) for node in graph.node}
    return nodes | {value.name for value in values}


def _declare(graph: GraphProto, typed: GraphProto, weights: Iterable[TensorProto]) -> Iterator[Value]:
    """Inputs and initializers of a graph; an input with a default value is its initializer."""
    types = _types(typed)
    for info in graph.input:
        yield Value(info.name, *types.get(info.name, _UNKNOWN), graph, is_input=True)
    for tensor in (*graph.initializer, *weights):
        yield Value(tensor.name, tensor.data_type, tuple(tensor.dims), graph, tensor)
    for sparse in graph.sparse_initializer:
        yield Value(sparse.values.name, *_UNKNOWN, graph)


_UNKNOWN: tuple[int, Dims] = (0, None)


def _types(graph: GraphProto) -> dict[str, tuple[int, Dims]]:
    infos: Iterable[ValueInfoProto] = (*graph.value_info, *graph.input, *graph.output)
    return {info.name: _type(info) for info in infos if info.type.HasField("tensor_type")}


def _type(info: ValueInfoProto) -> tuple[int, Dims]:
    tensor = info.type.tensor_type
    if not tensor.HasField("shape"):
        return tensor.elem_type, None
    return tensor.elem_type, tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim)


def constant_tensor(node: NodeProto) -> TensorProto | None:
    """The dense value of a Constant node; None for strings and sparse ones."""
    for attribute in node.attribute:
        if attribute.name == "value" and attribute.HasField("t"):
            tensor: TensorProto = attribute.t
            return tensor
        if attribute.name == "value_float":
            return onnx.helper.make_tensor("", FLOAT, [], [attribute.f])
        if attribute.name == "value_floats":
            return onnx.helper.make_tensor("", FLOAT, [len(attribute.floats)], attribute.floats)
        if attribute.name in ("value_int", "value_ints"):
            ints = [attribute.i] if attribute.name == "value_int" else list(attribute.ints)
            dims = [] if attribute.name == "value_int" else [len(ints)]
            return onnx.helper.make_tensor("", TensorProto.INT64, dims, ints)
    return None


_Read = tuple[Value | None, Place]


class _Reader:
    """Collects units and values while graphs are opened, owners before what they carry."""

    def __init__(self, opset: int, low_type: str) -> None:
        self.opset = opset
        self.low_type = low_type
        self.units: list[Unit] = []
        self.values: list[Value] = []
        self.scopes: dict[int, ChainMap[str, Value]] = {}
        self.graphs: list[GraphProto] = []
        self.conditions: list[tuple[str, Value]] = []
        self.depths: dict[int, int] = {}

    def read(self, graph: GraphProto, typed: GraphProto, names: ChainMap[str, Value], depth: int) -> None:
        self.scopes[id(graph)] = names
        self.graphs.append(graph)
        self.depths[id(graph)] = depth
        self.values += names.maps[0].values()
        types = _types(typed)
        for node, twin in zip(graph.node, typed.node, strict=True):
            operands = tuple(names.get(name) if name else None for name in node.input)
            results = [Value(name, *types.get(name, _UNKNOWN), graph) for name in node.output if name]
            self.values += results
            names.update((value.name, value) for value in results)
            if node.op_type == "Constant" and not node.domain:
                self._constant(node, results)
            elif any(bodies(node)):
                self._control_flow(node, twin, operands, names, depth)
            else:
                self._add(self._unit(node, graph, operands, tuple(results)))

    def _constant(self, node: NodeProto, results: list[Value]) -> None:
        tensor = constant_tensor(node)
        for value in results:
            value.tensor = tensor
            value.element_type = tensor.data_type if tensor is not None else 0
            value.dims = tuple(tensor.dims) if tensor is not None else None

    def _add(self, unit: Unit) -> None:
        self.units.append(unit)
        for value in unit.results:
            value.producer = unit
        for value in dict.fromkeys(unit.reads):
            value.readers.append(unit)
        for position, operand in enumerate(unit.operands):
            if operand and position not in unit.typed and unit.op != "Cast":
                operand.needs_float = True

    def _unit(
        self, node: NodeProto, graph: GraphProto, operands: tuple[Value | None, ...], results: tuple[Value, ...]
    ) -> Unit:
        op = node.op_type if is_standard(node) else f"{node.domain}.{node.op_type}"
        made = tuple(value for value in results if value.element_type == FLOAT)
        schema = _schema(node, self.opset)
        if schema is None:
            typed = frozenset(p for p, value in enumerate(operands) if value and value.element_type == FLOAT)
            obstacle = f"{op} is not an operator of ONNX opset {self.opset}"
        elif op in _TYPED_BY_ATTRIBUTE:
            typed = frozenset()
            variables = {schema.outputs[0].type_str} if made else set()
            obstacle = _type_obstacle(schema, variables, self.low_type, self.opset)
        else:
            variables = _variables(schema, op, operands)
            typed = frozenset(
                position
                for position, value in enumerate(operands)
                if value and value.element_type == FLOAT and _formal(schema, position, op) in variables
            )
            obstacle = self._obstacle(schema, node, op, operands, results, variables)
            made = tuple(
                value
                for position, value in _positions(node, results)
                if value.element_type == FLOAT and _result_type(schema, node, position) in variables
            )
        return Unit(node.name, op, node, graph, operands, results, typed, made, obstacle)

    def _obstacle(
        self,
        schema: OpSchema,
        node: NodeProto,
        op: str,
        operands: tuple[Value | None, ...],
        results: tuple[Value, ...],
        variables: set[str],
    ) -> str:
        for position, value in enumerate(operands):
            if value and value.element_type == 0 and _formal(schema, position, op) in variables:
                return f"the type of its operand '{value.name}' is not known"
        for position, value in _positions(node, results):
            formal = _result_type(schema, node, position)
            if value.element_type == FLOAT and formal not in variables and formal != _FLOAT_TYPE:
                return f"an attribute of {op} decides its type"
        return _type_obstacle(schema, variables, self.low_type, self.opset)

    def _control_flow(
        self,
        node: NodeProto,
        twin: NodeProto,
        operands: tuple[Value | None, ...],
        names: ChainMap[str, Value],
        depth: int,
    ) -> None:
        inner: dict[int, ChainMap[str, Value]] = {}
        for graph, typed in zip(bodies(node), bodies(twin), strict=True):
            inner[id(graph)] = names.new_child({value.name: value for value in _declare(graph, typed, ())})
            self.read(graph, typed, inner[id(graph)], depth + (node.op_type in _LOOPS))
        self.conditions += ((node.name, value) for value in _conditions(node, operands, inner))
        for reads, writes in _links(node, operands, names, inner, self.opset):
            self._link(node, [read for read in reads if read[0]], [value for value in writes if value])

    def _link(self, node: NodeProto, reads: list[_Read], writes: list[Value]) -> None:
        values = tuple(value for value, _ in reads if value)
        passed = (*writes[::-1], *values)
        if all(value.element_type != FLOAT for value in passed):
            return
        obstacle = _type_obstacle_of_link(node, self.opset, self.low_type)
        if any(value.element_type != FLOAT for value in passed):
            obstacle = "the type of a value that it passes on is not known"
        self._add(
            Unit(
                name=f"{node.name} ({passed[0].name})",
                op=node.op_type,
                node=None,
                graph=passed[0].graph,
                operands=values,
                results=tuple(writes),
                typed=frozenset(range(len(values))),
                writes=tuple(writes),
                obstacle=obstacle,
                places=tuple(place for _, place in reads),
            )
        )


def _conditions(
    node: NodeProto, operands: tuple[Value | None, ...], inner: Mapping[int, MutableMapping[str, Value]]
) -> Iterator[Value]:
    deciding = {"If": operands[:1], "Loop": operands[:2]}.get(node.op_type, ())
    yield from (value for value in deciding if value)
    if node.op_type == "Loop":
        graph = body(node, "body")
        yield inner[id(graph)][graph.output[0].name]


def _links(
    node: NodeProto,
    operands: tuple[Value | None, ...],
    names: Mapping[str, Value],
    inner: Mapping[int, Mapping[str, Value]],
    opset: int,
) -> Iterator[tuple[list[_Read], list[Value | None]]]:
    """(values read, values given) that a control-flow node makes one of.

    Source: ONNX If-21, Loop-21 (trip count, condition, carried -> carried, scan outputs), Scan-21.
    """

    def outputs_of(graph: GraphProto) -> list[_Read]:
        return [(inner[id(graph)].get(info.name), (graph, position)) for position, info in enumerate(graph.output)]

    given = [names.get(name) if name else None for name in node.output]
    if node.op_type == "If":
        branches = [outputs_of(body(node, name)) for name in ("then_branch", "else_branch")]
        for *reads, result in zip(*branches, given, strict=False):
            yield reads, [result]
        return
    if node.op_type not in _LOOPS:
        return
    graph = body(node, "body")
    first, num_carried = _carried(node, graph, opset)
    outer = [(value, (node, position)) for position, value in enumerate(operands)][first:]
    inside = [inner[id(graph)].get(info.name) for info in graph.input]
    turned = outputs_of(graph)
    if node.op_type == "Loop":
        inside, turned = inside[2:], turned[1:]
    for position in range(num_carried):
        yield [outer[position], turned[position]], [inside[position], given[position]]
    for read, value in zip(outer[num_carried:], inside[num_carried:], strict=False):
        yield [read], [value]
    for read, result in zip(turned[num_carried:], given[num_carried:], strict=False):
        yield [read], [result]


def _carried(node: NodeProto, graph: GraphProto, opset: int) -> tuple[int, int]:
    """(position of the first carried value among the node's inputs, number of carried values)."""
    if node.op_type == "Loop":
        return 2, len(graph.input) - 2
    num_scanned = next(attribute.i for attribute in node.attribute if attribute.name == "num_scan_inputs")
    return int(opset < _FIRST_SCAN_WITHOUT_LENGTHS), len(graph.input) - num_scanned


def _schema(node: NodeProto, opset: int) -> OpSchema | None:
    if not is_standard(node):
        return None
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    return None if schema.deprecated else schema


def _formal(schema: OpSchema, position: int, op: str) -> str:
    """Type of the input at `position`: a variable ("T") or a type ("tensor(int64)"); "" where it stays as it is."""
    if position in _EXEMPT.get(op, ()):
        return ""
    return _type_string(schema.inputs, position)


def _type_string(formals: Iterable[OpSchema.FormalParameter], position: int) -> str:
    formals = list(formals)
    if not formals:
        return ""
    return str(formals[min(position, len(formals) - 1)].type_str)


def _result_type(schema: OpSchema, node: NodeProto, position: int) -> str:
    """Type of the output at `position`, as `_formal`.

    Source: ONNX DequantizeLinear-23, whose result has the type of the scale where no attribute says otherwise.
    """
    if node.op_type == "DequantizeLinear" and attribute(node, "output_dtype") is None:
        return _type_string(schema.inputs, 1)
    return _type_string(schema.outputs, position)


def _variables(schema: OpSchema, op: str, operands: tuple[Value | None, ...]) -> set[str]:
    """Type variables of the schema that FP32 operands have here."""
    constrained = {constraint.type_param_str for constraint in schema.type_constraints}
    return {
        formal
        for position, value in enumerate(operands)
        if value and value.element_type == FLOAT and (formal := _formal(schema, position, op)) in constrained
    }


def _positions(node: NodeProto, results: tuple[Value, ...]) -> Iterator[tuple[int, Value]]:
    return zip((position for position, name in enumerate(node.output) if name), results, strict=True)


def _type_obstacle(schema: OpSchema, variables: set[str], low_type: str, opset: int) -> str:
    for constraint in schema.type_constraints:
        if constraint.type_param_str in variables and low_type not in constraint.allowed_type_strs:
            return f"{schema.name} has no {low_type[7:-1]} in ONNX opset {opset}"
    return ""


def _type_obstacle_of_link(node: NodeProto, opset: int, low_type: str) -> str:
    schema = _schema(node, opset)
    if schema is None:
        return f"{node.op_type} is not an operator of ONNX opset {opset}"
    return _type_obstacle(schema, {"V"}, low_type, opset)


def attribute(node: NodeProto, name: str) -> AttributeProto | None:
    """The attribute `name` of `node`, if it has it."""
    return next((attribute for attribute in node.attribute if attribute.name == name), None)
