"""Raises the standard opset, subgraphs included, where a type needs a later version of an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from trtforge.precision.network import all_graphs, attribute, element_types, is_standard, standard_opset

_FLOAT_TYPE = "tensor(float)"
_BFLOAT16_TYPE = "tensor(bfloat16)"
_FIRST_WITH_BFLOAT16 = 13
_HIGHEST = 22
"""Opset at which Conv and most other operators have BF16.

Source: ONNX Changelog, version 22; TensorRT-RTX 1.7 was seen to parse it.
"""

_MOST_NAMED = 5


def raise_for_bfloat16(model: ModelProto, weights: Iterable[TensorProto], max_opset: int = _HIGHEST) -> tuple[str, ...]:
    """Raises the opset of a model, in place, as far as BF16 needs it, if every node can be written in the later one.

    Args:
        model: a skeleton without local functions, with unique node names.
        weights: the large initializers that it lacks.
        max_opset: the latest that may be written.

    Returns:
        A note on what was done, or on what stands in the way.
    """
    opset = standard_opset(model)
    nodes = _standard_nodes(model)
    highest = min(max_opset, _HIGHEST)
    wanted = min(highest, max([_FIRST_WITH_BFLOAT16, *(_needed(node, opset, highest) for node in nodes)]))
    if wanted <= opset:
        return ()
    stuck = raise_opset(model, weights, wanted)
    if stuck:
        names = names_of(stuck)
        return (f"bfloat16 needs opset {wanted} for more of the model; it stays {opset}, for {names} would change",)
    return (f"raised the opset from {opset} to {wanted}, which bfloat16 needs",)


def raise_opset(model: ModelProto, weights: Iterable[TensorProto], wanted: int) -> tuple[NodeProto, ...]:
    """Raises the opset of a model to `wanted`, a later one, in place.

    Returns:
        Nodes that cannot be written in it; if there is one, nothing was changed.
    """
    opset = standard_opset(model)
    nodes = _standard_nodes(model)
    changes = {id(node): list(_changes(node, opset, wanted)) for node in nodes}
    stuck = tuple(node for node in nodes if None in changes[id(node)])
    if stuck:
        return stuck
    ranks = _ranks(element_types(model, weights))
    for graph in reversed(list(all_graphs(model.graph))):
        _rewrite(graph, changes, ranks)
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = wanted
    model.ir_version = max(model.ir_version, helper.find_min_ir_version_for(model.opset_import, ignore_unknown=True))
    return ()


def names_of(nodes: Sequence[NodeProto]) -> str:
    """The first of them, for a message."""
    return ", ".join(f"'{node.name}' ({node.op_type})" for node in nodes[:_MOST_NAMED])


def _standard_nodes(model: ModelProto) -> list[NodeProto]:
    return [node for graph in all_graphs(model.graph) for node in graph.node if is_standard(node)]


def _needed(node: NodeProto, opset: int, highest: int) -> int:
    """The first opset, up to the highest, at which `node` takes BF16 wherever it takes FP32; `opset` if there is none."""
    for version in range(opset, highest + 1):
        if not onnx.defs.has(node.op_type, version, ""):
            return opset
        constraints = onnx.defs.get_schema(node.op_type, version, "").type_constraints
        floats = [types for c in constraints if _FLOAT_TYPE in (types := c.allowed_type_strs)]
        if all(_BFLOAT16_TYPE in types for types in floats):
            return version
    return opset


def _ranks(typed: ModelProto) -> dict[str, int]:
    infos = [info for graph in all_graphs(typed.graph) for info in (*graph.value_info, *graph.input, *graph.output)]
    return {
        info.name: len(info.type.tensor_type.shape.dim) for info in infos if info.type.tensor_type.HasField("shape")
    }


_Around = tuple[list[NodeProto], list[NodeProto]]
_Change = Callable[[NodeProto, int | None], _Around] | None
"""Rewrites a node for a later version, given the rank of its first operand, and gives nodes to put before and after it.

None where no rewriting is known.
"""


def _changes(node: NodeProto, opset: int, wanted: int) -> Iterator[_Change]:
    for version, change in _TABLE.get(node.op_type, {}).items():
        if opset < version <= wanted:
            yield change


def _rewrite(graph: GraphProto, changes: Mapping[int, list[_Change]], ranks: Mapping[str, int]) -> None:
    nodes: list[NodeProto] = []
    for node in graph.node:
        rank = ranks.get(node.input[0]) if node.input else None
        around = [change(node, rank) for change in changes.get(id(node), ()) if change]
        nodes += (added for before, _ in around for added in before)
        nodes.append(node)
        nodes += (added for _, after in around for added in after)
    if len(nodes) > len(graph.node):
        del graph.node[:]
        graph.node.extend(nodes)


def _ints_become_input(node: NodeProto, name: str) -> _Around:
    found = attribute(node, name)
    if found is None:
        return [], []
    value = f"{node.name}/{name}"
    tensor = helper.make_tensor("", TensorProto.INT64, [len(found.ints)], found.ints)
    node.attribute.remove(found)
    node.input.append(value)
    return [helper.make_node("Constant", [], [value], name=f"{value}/constant", value=tensor)], []


def _axes_become_input(node: NodeProto, _rank: int | None) -> _Around:
    return _ints_become_input(node, "axes")


def _sizes_become_input(node: NodeProto, _rank: int | None) -> _Around:
    return _ints_become_input(node, "split")


def _count_parts(node: NodeProto, _rank: int | None) -> _Around:
    if len(node.input) == 1:
        node.attribute.append(helper.make_attribute("num_outputs", len(node.output)))
    return [], []


def _drop_ratio(node: NodeProto, _rank: int | None) -> _Around:
    """The ratio has no effect in inference."""
    if found := attribute(node, "ratio"):
        node.attribute.remove(found)
    return [], []


def _softmax(node: NodeProto, rank: int | None) -> _Around:
    """Before opset 13 all axes from `axis` on were flattened, which is nothing to do for the last axis.

    Source: ONNX Softmax-11 and Softmax-13.
    """
    found = attribute(node, "axis")
    axis = found.i if found else 1
    if found:
        node.attribute.remove(found)
    node.attribute.append(helper.make_attribute("axis", -1))
    if axis == -1 or (rank is not None and axis == rank - 1):
        return [], []
    source, target = node.input[0], node.output[0]
    shape, flat, result = (f"{node.name}/{what}" for what in ("shape", "flat", "result"))
    node.input[0], node.output[0] = flat, result
    return [
        helper.make_node("Shape", [source], [shape], name=f"{node.name}/Shape"),
        helper.make_node("Flatten", [source], [flat], name=f"{node.name}/Flatten", axis=axis),
    ], [helper.make_node("Reshape", [result, shape], [target], name=f"{node.name}/Reshape")]


def _rename_modes(node: NodeProto, _rank: int | None) -> _Around:
    found = attribute(node, "mode")
    if found is None:
        return [], []
    found.s = {b"bilinear": b"linear", b"bicubic": b"cubic"}.get(found.s, found.s)
    return [], []


def _keep_half_pixels_off(node: NodeProto, _rank: int | None) -> _Around:
    node.attribute.append(helper.make_attribute("coordinate_transformation_mode", "output_half_pixel"))
    return [], []


_TABLE: dict[str, dict[int, _Change]] = {
    **{name: {13: _axes_become_input} for name in ("Squeeze", "Unsqueeze", "ReduceSum")},
    **{
        f"Reduce{name}": {18: _axes_become_input}
        for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
    },
    **{name: {13: _softmax} for name in ("Softmax", "LogSoftmax", "Hardmax")},
    "Split": {13: _sizes_become_input, 18: _count_parts},
    "Dropout": {12: _drop_ratio},
    "GridSample": {20: _rename_modes},
    "RoiAlign": {16: _keep_half_pixels_off},
    "BatchNormalization": {9: None},
    "Clip": {11: None},
    "DFT": {20: None},
    "GroupNormalization": {21: None},
    "Loop": {11: None},
    "NonMaxSuppression": {11: None},
    "Pad": {11: None},
    "Resize": {11: None},
    "Scan": {9: None},
    "Scatter": {11: None},
    "Slice": {10: None},
    "TopK": {10: None},
    "Upsample": {10: None},
}
"""Operator -> version that means something else, or says it otherwise, than the one before -> how to say it there.

Source: ONNX Changelog. Other changes up to opset 22 admit more types, or add attributes and inputs whose defaults are the old
behaviour.
"""
