"""A lowered model as an FP32 one that rounds where the lowered one would, for runtimes that hide it.

onnxruntime on the CPU computes FP16 in FP32 and has next to no BF16 kernels. In the emulation every lower-typed value is an
FP32 value that was rounded to the lower type, to infinity where it overflows; sums inside an operator are FP32 ones, as the
tensor cores' are. A dequantized value is not rounded: the layer that reads it multiplies the integers, adds the products up
exactly and applies the scales in FP32.

Source: onnxruntime's InsertCastTransformer; its Cast to float16 and bfloat16 rounds to nearest even and overflows to infinity.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trtforge.precision.network import FLOAT, all_graphs, attribute, bodies, element_types, is_large, skeleton

_LOW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def emulated(model: ModelProto) -> ModelProto:
    """The FP32 model that gives what `model` gives with lower-typed values rounded after each node.

    Inputs and outputs of a lower type become FP32; inputs are rounded first. Run it with graph optimisations off, which would
    take the rounding out. Weights are twice the size of the lowered ones; external ones stay where they are, and the
    model widens each right before it is read.

    Args:
        model: as `lower` gives it; not changed.
    """
    result = skeleton(model, weights_as_inputs=False)
    weights = [tensor for tensor in model.graph.initializer if is_large(tensor)]
    typed = element_types(result, weights)
    pairs = list(zip(all_graphs(result.graph), all_graphs(typed.graph), strict=True))
    low_inputs = _low_types(typed.graph)
    for graph, twin in reversed(pairs):
        _emulate(graph, _low_types(twin))
    _round_inputs(result.graph, low_inputs)
    for tensor in weights:
        target = result.graph.initializer.add()
        if tensor.data_location == TensorProto.EXTERNAL:
            target.CopyFrom(tensor)
        else:
            _widen(tensor, target)
    _widen_in_graph(result.graph)
    return result


def _low_types(graph: GraphProto) -> dict[str, int]:
    infos = (*graph.input, *graph.value_info, *graph.output)
    types = {info.name: info.type.tensor_type.elem_type for info in infos}
    return {name: type_ for name, type_ in types.items() if type_ in _LOW}


def _emulate(graph: GraphProto, low: Mapping[str, int]) -> None:
    """Makes one graph FP32; values that come into a body were rounded before."""
    nodes = [rounded for node in graph.node for rounded in _rounded(node, low)]
    del graph.node[:]
    graph.node.extend(nodes)
    for info in (*graph.input, *graph.output, *graph.value_info):
        if info.type.tensor_type.elem_type in _LOW:
            info.type.tensor_type.elem_type = FLOAT
    for tensor in graph.initializer:
        _widen_in_place(tensor)


def _rounded(node: NodeProto, low: Mapping[str, int]) -> Iterator[NodeProto]:
    results = [(position, name) for position, name in enumerate(node.output) if name in low]
    is_exact = node.op_type in ("Constant", "DequantizeLinear") or any(bodies(node))
    if node.op_type in ("Constant", "ConstantOfShape") and results and (value := attribute(node, "value")):
        _widen_in_place(value.t)
    if is_exact or not results:
        yield node
        return
    for position, name in results:
        node.output[position] = f"{name}:exact"
    if node.op_type == "Cast":
        next(a for a in node.attribute if a.name == "to").i = FLOAT
    yield node
    for _, name in results:
        yield from _rounding(f"{name}:exact", name, low[name])


def _rounding(source: str, target: str, to: int) -> Iterator[NodeProto]:
    yield helper.make_node("Cast", [source], [f"{target}:low"], to=to)
    yield helper.make_node("Cast", [f"{target}:low"], [target], to=FLOAT)


def _round_inputs(graph: GraphProto, low: Mapping[str, int]) -> None:
    """Puts rounded copies in the place of the main graph's inputs."""
    names = {info.name: f"{info.name}:rounded" for info in graph.input if info.name in low}
    for inner in all_graphs(graph):
        for node in inner.node:
            node.input[:] = [names.get(name, name) for name in node.input]
    added = [node for name in names for node in _rounding(name, names[name], low[name])]
    nodes = [*added, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def _widen_in_graph(graph: GraphProto) -> None:
    """Widens external weights of a lower type by casts, at the begin of the file.

    onnxruntime then runs each right before its first reader, and frees what it gives after the last: it visits what a node
    reads depth first, beginning with what stands last in the file.

    Source: onnxruntime, GraphViewer (ReverseDFSFrom with NodeCompare); measured: with each cast before its reader in the
    file, all of them run first, and memory holds all weights in FP32.
    """
    casts: list[NodeProto] = []
    for tensor in graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL and tensor.data_type in _LOW:
            casts.append(helper.make_node("Cast", [f"{tensor.name}:low"], [tensor.name], to=FLOAT))
            tensor.name = f"{tensor.name}:low"
    nodes = [*casts, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


def _widen_in_place(tensor: TensorProto) -> None:
    if tensor.data_type in _LOW:
        widened = TensorProto()
        _widen(tensor, widened)
        tensor.CopyFrom(widened)


def _widen(source: TensorProto, target: TensorProto) -> None:
    if source.data_type not in _LOW:
        target.CopyFrom(source)
        return
    target.name = source.name
    target.data_type = FLOAT
    target.dims.extend(source.dims)
    target.raw_data = numpy_helper.to_array(source).astype("<f4").tobytes()
