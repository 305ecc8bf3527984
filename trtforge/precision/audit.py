"""What precision a graph really has: the share of weighted layers and of their work in each type."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from trtforge.errors import BuildError, GraphError, Where
from trtforge.precision.network import all_graphs, attribute, is_large, skeleton
from trtforge.precision.policy import WEIGHTED
from trtforge.types import NetworkLayers

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_LOW_TYPES = ("float16", "bfloat16", "int8", "float8e4m3fn")
_MOST_NAMES = 3
_MOST_REASONS = 8
_Dims = tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers of one operator that compute in one type.

    Attributes:
        op: operator name.
        dtype: type that the layers compute in, as in ONNX in lower case ("float", "float16", "int8"); that of the
            quantized values where both operands of a layer are dequantized right before it.
        num_layers: how many there are.
        flops: floating-point or integer operations of one run, a multiply-add as two; of those whose sizes are known.
        num_unsized: layers whose work is not known, because a size of theirs is not.
        names: of the layers, in graph order.
    """

    op: str
    dtype: str
    num_layers: int
    flops: int
    num_unsized: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """Part of a model's weighted layers that compute in a type, 0 to 1; `flops` is None if no layer's work is known."""

    layers: float
    flops: float | None


def audit(model: ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> tuple[LayerGroup, ...]:
    """The weighted layers of `model`, in subgraphs too, by operator and type.

    Args:
        model: the graph that goes to the builder.
        shapes: input name -> shape, for the work; inputs left out keep the model's own sizes.
    """
    sized = skeleton(model, weights_as_inputs=False)
    weights = [tensor for tensor in model.graph.initializer if is_large(tensor)]
    for info in sized.graph.input:
        if info.name in shapes:
            dims = info.type.tensor_type.shape
            dims.ClearField("dim")
            dims.dim.extend(onnx.TensorShapeProto.Dimension(dim_value=size) for size in shapes[info.name])
    for values in (sized.graph.value_info, sized.graph.output):
        for info in values:
            info.type.tensor_type.ClearField("shape")
    known = {info.name for info in sized.graph.input}
    sized.graph.input.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in weights
        if tensor.name not in known
    )
    typed = onnx.shape_inference.infer_shapes(sized, data_prop=True)
    groups: dict[tuple[str, str], list[tuple[str, int | None]]] = {}
    for op, dtype, name, flops in _layers(typed):
        groups.setdefault((op, dtype), []).append((name, flops))
    return tuple(
        LayerGroup(
            op=op,
            dtype=dtype,
            num_layers=len(layers),
            flops=sum(flops or 0 for _, flops in layers),
            num_unsized=sum(flops is None for _, flops in layers),
            names=tuple(name for name, _ in layers),
        )
        for (op, dtype), layers in sorted(groups.items())
    )


def share(groups: tuple[LayerGroup, ...], dtype: str) -> Share:
    """The share of `dtype` in all layers; 1 where there are none, for nothing is in another type."""
    layers = sum(group.num_layers for group in groups)
    flops = sum(group.flops for group in groups)
    mine = [group for group in groups if group.dtype == dtype]
    return Share(
        layers=sum(group.num_layers for group in mine) / layers if layers else 1.0,
        flops=sum(group.flops for group in mine) / flops if flops else (None if layers else 1.0),
    )


def refuse_low_share(
    groups: tuple[LayerGroup, ...], dtype: str, min_share: float, reasons: Mapping[str, str], where: Where | None
) -> None:
    """Ends the run where too little of the work is in the asked type.

    The share of the work counts if every layer's is known, else that of the layers.

    Args:
        groups: of the graph that goes to the builder.
        dtype: asked for, as in `LayerGroup`.
        min_share: 0 to 1.
        reasons: node name -> why it is not in that type, for the nodes of which that is known.
        where: the place in the spec that asks for the share.

    Raises:
        GraphError: the share is smaller.
    """
    found = share(groups, dtype)
    is_sized = found.flops is not None and not any(group.num_unsized for group in groups)
    part = found.flops if found.flops is not None and is_sized else found.layers
    if part >= min_share:
        return
    what = "work (FLOPs)" if is_sized else "layers"
    others = [group for group in groups if group.dtype != dtype]
    raise GraphError(
        f"{part:.1%} of the {what} of Conv, MatMul and their like would be in {dtype}, min_share asks for {min_share:.1%}",
        where=where,
        detail=[*(_group_line(group, groups) for group in others), *_reason_lines(others, reasons)],
        next_step=f"write min_share: {math.floor(part * 100) / 100:g} under precision, or take away what the reasons name",
    )


def _group_line(group: LayerGroup, groups: tuple[LayerGroup, ...]) -> str:
    work = 0 if any(each.num_unsized for each in groups) else sum(each.flops for each in groups)
    part = f", {group.flops / work:.1%} of the work" if work else ""
    more = f" and {group.num_layers - _MOST_NAMES} more" if group.num_layers > _MOST_NAMES else ""
    names = ", ".join(f"'{name}'" for name in group.names[:_MOST_NAMES])
    return f"{group.num_layers} {group.op} in {group.dtype}{part}: {names}{more}"


def _reason_lines(groups: list[LayerGroup], reasons: Mapping[str, str]) -> Iterator[str]:
    """Each reason once, with how many layers it holds back and the first of them, the most frequent first."""
    held: dict[str, list[str]] = {}
    for name in (name for group in groups for name in group.names):
        if name in reasons:
            held.setdefault(reasons[name], []).append(name)
    for reason, names in sorted(held.items(), key=lambda entry: -len(entry[1]))[:_MOST_REASONS]:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"'{names[0]}'{more}: {reason}"


def refuse_other_types(groups: tuple[LayerGroup, ...], network: tuple[NetworkLayers, ...], identifier: str) -> None:
    """Ends a build whose parsed network computes a layer in a wider type than the graph does.

    Args:
        groups: of the graph.
        network: the weighted layers of the parsed network.
        identifier: of the engine.

    Raises:
        BuildError: there are such layers; all are named in it.
    """
    asked = {name: group.dtype for group in groups if group.dtype in _LOW_TYPES for name in group.names}
    wider = [
        f"'{name}' ({layers.kind}): {asked[name]} in the graph, {layers.dtype} in the network"
        for layers in network
        for name in layers.names
        if name in asked and layers.dtype != asked[name]
    ]
    if wider:
        raise BuildError(
            f"{identifier}: the parsed network has {len(wider)} layer{'s' * (len(wider) != 1)} in another type than the graph",
            detail=wider,
            next_step="report this as a bug of trtforge, with the lines above",
        )


def _layers(typed: ModelProto) -> Iterator[tuple[str, str, str, int | None]]:
    """(operator, type, name, operations) of each weighted layer."""
    dims: dict[str, _Dims] = {}
    types: dict[str, int] = {}
    producers: dict[str, NodeProto] = {}
    for graph in all_graphs(typed.graph):
        _record(graph, dims, types)
        producers.update((name, node) for node in graph.node for name in node.output)
        for node in graph.node:
            if node.op_type in WEIGHTED:
                type_ = _computed_type(node, types, producers)
                yield node.op_type, TensorProto.DataType.Name(type_).lower(), node.name, _flops(node, dims)


def _record(graph: GraphProto, dims: dict[str, _Dims], types: dict[str, int]) -> None:
    for info in (*graph.value_info, *graph.input, *graph.output):
        tensor = info.type.tensor_type
        types[info.name] = tensor.elem_type
        sizes = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim]
        dims[info.name] = tuple(sizes) if tensor.HasField("shape") and -1 not in sizes else None
    for initializer in graph.initializer:
        types[initializer.name] = initializer.data_type
        dims[initializer.name] = tuple(initializer.dims)


def _computed_type(node: NodeProto, types: Mapping[str, int], producers: Mapping[str, NodeProto]) -> int:
    givers = [producers.get(name) for name in node.input[:2]]
    quantized = [types.get(giver.input[0], 0) for giver in givers if giver and giver.op_type == "DequantizeLinear"]
    is_quantized = len(quantized) == len(node.input[:2])
    return quantized[0] if is_quantized and quantized else types.get(node.input[0], 0)


def _flops(node: NodeProto, dims: Mapping[str, _Dims]) -> int | None:
    """Operations of one layer, a multiply-add as two.

    Source: the loops of each operator's definition, https://onnx.ai/onnx/operators/.
    """
    first, second = (dims.get(name) for name in (*node.input[:2], "", "")[:2])
    result = dims.get(node.output[0])
    if first is None or second is None:
        return None
    match node.op_type:
        case "Conv" | "DeformConv":
            return None if result is None else 2 * math.prod(result) * math.prod(second[1:])
        case "ConvTranspose":
            return 2 * math.prod(first) * math.prod(second[1:])
        case "MatMul":
            return None if result is None else 2 * math.prod(result) * first[-1]
        case "Gemm":
            return None if result is None else 2 * math.prod(result) * first[1 - _integer(node, "transA")]
        case "LSTM" | "GRU" | "RNN":
            hidden = _integer(node, "hidden_size")
            return 2 * first[0] * first[1] * second[0] * _GATES[node.op_type] * hidden * (first[2] + hidden)
        case _:
            return None


def _integer(node: NodeProto, name: str) -> int:
    found = attribute(node, name)
    return int(found.i) if found else 0
