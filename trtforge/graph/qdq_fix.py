"""Rewrites quantized models into the form that TensorRT reads, where every value stays what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trtforge.graph.model_file import domain_of, graphs, subgraphs
from trtforge.graph.qdq_lint import FIRST_PER_CHANNEL_OPSET, Finding, findings
from trtforge.graph.quantized import DEQUANTIZE, MOVING, QUANTIZE, bias_position, params_of, source_of
from trtforge.graph.sites import Site, Value, array_of, constant_of, sites_of

_MIDDLE = 128
"""Zero point of uint8 that makes it int8 moved by a constant."""

_FIRST_QDQ_OPSET = 10
_IN_EVERY_OPSET = frozenset({"int8", "uint8", "int32"})
_INT8 = np.iinfo(np.int8)


def lint(model: ModelProto, folder: Path, refused_types: Mapping[str, str]) -> tuple[Finding, ...]:
    """All `findings`, each with whether `mend` takes it away, which is found out by doing it on a copy."""
    found = findings(model, folder, refused_types)
    if not found:
        return ()
    mended = ModelProto()
    mended.CopyFrom(model)
    mend(mended, folder)
    left = {(one.rule, one.scope, one.node) for one in findings(mended, folder, refused_types)}
    return tuple(replace(one, mendable=(one.rule, one.scope, one.node) not in left) for one in found)


def mend(model: ModelProto, folder: Path) -> None:
    """Mends `model` in place.

    Exactly, value for value: uint8 with zero point 128 becomes int8 with 0; weights lose their zero point where they fit
    int8 without it; quantized biases become floating point; pairs that undo each other go; Q/DQ of com.microsoft become
    ONNX's own; a low opset is raised for per-channel scales. Operators that compute on quantized tensors become floating-point
    ones between Q/DQ nodes: the same real function, whose result may round to the neighbouring step where a sum lies halfway.
    What is not sure stays as it is.

    Args:
        model: as `findings` takes it, large weights left in other files or not.
        folder: where its external data lies.
    """
    model.ir_version = max(model.ir_version, 4)  # from which on a constant need not be an input too
    used = _names_read(model)
    for step in _STEPS:
        edit = _Edit(folder, _all_names(model))
        step(sites_of(model), edit)
        edit.apply(model)
    _drop_unused(model, used)
    _raise_opset(model)


@dataclass(slots=True)
class _Edit:
    """What one step changes: nodes to put in the place of others, and new constants. Nodes are compared by identity."""

    folder: Path
    names: set[str]
    replaced: list[tuple[Site, list[NodeProto]]] = field(default_factory=list)
    constants: list[tuple[GraphProto, TensorProto]] = field(default_factory=list)
    retyped: set[str] = field(default_factory=set)

    def name(self, wish: str) -> str:
        """A name that no value or node has yet."""
        name, count = wish, 1
        while name in self.names:
            name, count = f"{wish}_{count}", count + 1
        self.names.add(name)
        return name

    def constant(self, graph: GraphProto, wish: str, array: NDArray[Any]) -> str:
        """The name of a new initializer of `graph`."""
        name = self.name(wish)
        self.constants.append((graph, numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)))
        return name

    def apply(self, model: ModelProto) -> None:
        """Inner graphs first: putting nodes into a list copies them, with the graphs they hold."""
        for graph, tensor in self.constants:
            graph.initializer.append(tensor)
        new = {id(site.node): nodes for site, nodes in self.replaced}
        for graph in reversed(list(graphs(model))):
            nodes = [added for node in graph.node for added in new.get(id(node), [node])]
            if any(id(node) in new for node in graph.node):
                del graph.node[:]
                graph.node.extend(nodes)
            _remove(graph.value_info, self.retyped)


def _remove(items: Any, names: set[str]) -> None:
    """Takes the items called so out of a repeated field, without copying the others."""
    for index in reversed(range(len(items))):
        if items[index].name in names:
            del items[index]


def _own_domain(sites: Sequence[Site], edit: _Edit) -> None:
    """Q/DQ of com.microsoft mean what ONNX's do, which take 16 bits and FP16 scales only from opset 19 and 21 on.

    Source: onnxruntime ContribOperators.md; ONNX QuantizeLinear-19 and -21.
    """
    for site in sites:
        if site.op in (QUANTIZE[1], DEQUANTIZE[1]):
            params = params_of(site, edit.folder)
            if params.scale is not None and params.scale.dtype == np.float32 and params.dtype in _IN_EVERY_OPSET:
                site.node.domain = ""


@dataclass(frozen=True, slots=True)
class _Opened:
    """How a quantized operator is written in floating point.

    Attributes:
        op: the float operator.
        operands: positions of quantized inputs, each followed by its scale and zero point.
        result: position of the result's scale, followed by its zero point.
        bias: position of an int32 bias, 0 if there is none.
    """

    op: str
    operands: tuple[int, ...]
    result: int
    bias: int = 0


_OPENED = {
    "QLinearConv": _Opened("Conv", (0, 3), 6, 8),
    "QLinearMatMul": _Opened("MatMul", (0, 3), 6),
    "com.microsoft.QGemm": _Opened("Gemm", (0, 3), 7, 6),
    "com.microsoft.QLinearAdd": _Opened("Add", (0, 3), 6),
    "com.microsoft.QLinearMul": _Opened("Mul", (0, 3), 6),
    "com.microsoft.QLinearAveragePool": _Opened("AveragePool", (0,), 3),
    "com.microsoft.QLinearGlobalAveragePool": _Opened("GlobalAveragePool", (0,), 3),
    "com.microsoft.QLinearLeakyRelu": _Opened("LeakyRelu", (0,), 3),
    "com.microsoft.QLinearSigmoid": _Opened("Sigmoid", (0,), 3),
}
"""Source: ONNX QLinearConv-10, QLinearMatMul-21; onnxruntime ContribOperators.md."""


def _open_quantized(sites: Sequence[Site], edit: _Edit) -> None:
    """Puts DQ before and Q behind: both forms are saturate(round(float result / y_scale) + y_zero_point)."""
    for site in sites:
        form = _OPENED.get(site.op)
        if form and not site.attribute("channels_last", 0) and site.read(form.result):
            nodes = _nodes(site, form, edit)
            edit.replaced += [(site, nodes)] if nodes else []


def _nodes(site: Site, form: _Opened, edit: _Edit) -> list[NodeProto]:
    """The nodes in place of `site`; none where a scale is not constant or its axis is not known."""
    node, read = site.node, site.node.input
    nodes, floats = [], []
    for position in form.operands:
        axis = _operand_axis(site, form, position)
        if axis is None:
            return []
        floats.append(edit.name(f"{read[position]}_dequantized"))
        name = edit.name(f"{node.name}/Dequantize_{position}")
        inputs = read[position : position + 3]
        nodes.append(helper.make_node("DequantizeLinear", inputs, [floats[-1]], name=name, **axis))
    if form.bias and (bias := site.read(form.bias)):
        steps, x_scale, w_scale = (constant_of(value) for value in (bias, site.read(1), site.read(4)))
        if steps is None or x_scale is None or w_scale is None:
            return []
        scale = array_of(x_scale, edit.folder).reshape(()) * array_of(w_scale, edit.folder).reshape(-1)
        if scale.size not in (1, np.prod(steps.dims, dtype=int)):
            return []
        real = array_of(steps, edit.folder).astype(np.float32) * scale * np.float32(site.attribute("alpha", 1.0))
        floats.append(edit.constant(site.graph, f"{bias.name}_float", real.astype(np.float32)))
    result = edit.name(f"{node.output[0]}_float")
    layer = helper.make_node(form.op, floats, [result], name=node.name)
    layer.attribute.extend(attribute for attribute in node.attribute if attribute.name != "channels_last")
    name = edit.name(f"{node.name}/Quantize")
    last = helper.make_node("QuantizeLinear", [result, *read[form.result : form.result + 2]], node.output, name=name)
    return [*nodes, layer, last]


def _operand_axis(site: Site, form: _Opened, position: int) -> dict[str, Any] | None:
    """The `axis` attribute for an operand's scales, none needed for a single one; None if it cannot be told."""
    scale = constant_of(site.read(position + 1))
    if scale is None:
        return None
    if np.prod(scale.dims, dtype=int) == 1:
        return {}
    weight = constant_of(site.read(position))
    if position == 0 or len(scale.dims) != 1 or weight is None or form.op not in ("Conv", "MatMul", "Gemm"):
        return None
    if form.op == "MatMul":
        return {"axis": len(weight.dims) - 1}
    return {"axis": 0 if form.op == "Conv" or site.attribute("transB", 0) else 1}


def _float_biases(sites: Sequence[Site], edit: _Edit) -> None:
    """Source: ONNX DequantizeLinear: y = (x - zero point) * scale, the difference taken in integers."""
    biases = {
        value.writer
        for site in sites
        if (position := bias_position(site)) and (value := site.read(position)) and value.writer
    }
    for site in sites:
        if site.op not in DEQUANTIZE or site.writes[0].is_output:
            continue
        tensor = constant_of(site.read(0))
        params = params_of(site, edit.folder)
        only_bias = all(bias_position(reader) == position for reader, position in site.writes[0].readers)
        if tensor is None or params.scale is None or params.zero_point is None:
            continue
        if params.dtype != "int32" and not (params.dtype in ("int8", "uint8") and site in biases and only_bias):
            continue
        sizes = {1, _length(tensor, params.axis)}
        if (
            params.scale.dtype not in (np.float32, np.float16)
            or not {params.scale.size, params.zero_point.size} <= sizes
        ):
            continue
        values = array_of(tensor, edit.folder).astype(np.int64)
        steps = values - _along(params.zero_point, values.ndim, params.axis).astype(np.int64)
        real = steps.astype(np.float32) * _along(params.scale, values.ndim, params.axis).astype(np.float32)
        edit.constants.append(
            (site.graph, numpy_helper.from_array(real.astype(params.scale.dtype), site.writes[0].name))
        )
        edit.replaced.append((site, []))


def _length(tensor: TensorProto, axis: int) -> int:
    return int(tensor.dims[axis]) if -len(tensor.dims) <= axis < len(tensor.dims) else 1


def _along(values: NDArray[Any], rank: int, axis: int) -> NDArray[Any]:
    """`values` shaped to lie along `axis` of an array of `rank` axes."""
    if values.size == 1:
        return values.reshape(())
    shape = [1] * rank
    shape[axis] = -1
    return values.reshape(shape)


def _symmetric_weights(sites: Sequence[Site], edit: _Edit) -> None:
    """Takes the zero point out of weights whose differences from it fit int8."""
    made: dict[tuple[int, int, bytes], str] = {}
    for site in sites:
        source = source_of(site.read(0))
        tensor = constant_of(source)
        if site.op not in DEQUANTIZE or tensor is None or site.read(0) is not source or source is None:
            continue
        params = params_of(site, edit.folder)
        if params.dtype not in ("int8", "uint8") or params.zero_point is None or params.blocked:
            continue
        if params.zero_point.size > 1 and params.zero_point.size != _length(tensor, params.axis):
            continue
        if params.dtype == "int8" and not params.zero_point.any():
            continue
        values = array_of(tensor, edit.folder).astype(np.int16)
        steps = values - _along(params.zero_point, values.ndim, params.axis).astype(np.int16)
        if steps.size == 0 or steps.min() < _INT8.min or steps.max() > _INT8.max:
            continue
        key = (id(source), id(site.graph), params.zero_point.tobytes())
        if key not in made:
            made[key] = edit.constant(site.graph, f"{source.name}_int8", steps.astype(np.int8))
        site.node.input[0] = made[key]
        _zero(site, params.zero_point.shape, edit)


def _zero(site: Site, shape: tuple[int, ...], edit: _Edit) -> None:
    name = edit.constant(site.graph, f"{site.node.name}_zero_point", np.zeros(shape, np.int8))
    del site.node.input[2:]
    site.node.input.append(name)


def _signed_activations(sites: Sequence[Site], edit: _Edit) -> None:
    """Turns uint8 with zero point 128 into int8, for a Q node and all that reads its integers, or not at all.

    saturate(round(x / s) + 128) to 0..255 is saturate(round(x / s)) to -128..127, plus 128.
    """
    for site in sites:
        if site.op not in QUANTIZE or not _is_middle(site, edit.folder):
            continue
        values, ends = _integers_of(site.writes[0])
        if any(value.is_output for value in values):
            continue
        if not all(position == 0 and end.op in DEQUANTIZE and _is_middle(end, edit.folder) for end, position in ends):
            continue
        edit.retyped |= {value.name for value in values}
        for one in (site, *(end for end, _ in ends)):
            zero = params_of(one, edit.folder).zero_point
            _zero(one, () if zero is None else zero.shape, edit)


def _is_middle(site: Site, folder: Path) -> bool:
    params = params_of(site, folder)
    zero = params.zero_point
    return params.dtype == "uint8" and zero is not None and zero.size > 0 and bool((zero == _MIDDLE).all())


def _integers_of(value: Value) -> tuple[list[Value], list[tuple[Site, int]]]:
    """The values that hold the integers of `value`, moved at most, and who reads them otherwise."""
    values, ends = [value], list[tuple[Site, int]]()
    for held in values:
        for reader, position in held.readers:
            if reader.op in MOVING and position == 0 and len(reader.writes) == 1:
                values.append(reader.writes[0])
            else:
                ends.append((reader, position))
    return values, ends


def _drop_pairs(sites: Sequence[Site], edit: _Edit) -> None:
    """Takes out DQ -> Q with equal parameters: round((k * s) / s) is k for every normal s and |k| up to 255."""
    renamed: dict[str, str] = {}
    for site in sites:
        value = site.read(0)
        before = value.writer if value else None
        if site.op not in QUANTIZE or before is None or before.op not in DEQUANTIZE or before.graph is not site.graph:
            continue
        own, given = params_of(site, edit.folder), params_of(before, edit.folder)
        source = before.read(0)
        if source is None or site.writes[0].is_output or own.dtype not in ("int8", "uint8") or not own.same_as(given):
            continue
        if own.scale is None or not _is_normal(own.scale):
            continue
        name = renamed.get(source.name, source.name)
        renamed[site.writes[0].name] = name
        for reader, position in site.writes[0].readers:
            reader.node.input[position] = name
        edit.replaced.append((site, []))
        if not before.writes[0].is_output and all(reader is site for reader, _ in before.writes[0].readers):
            edit.replaced.append((before, []))


def _is_normal(scale: NDArray[Any]) -> bool:
    if scale.dtype not in (np.float32, np.float16):
        return False
    limits = np.finfo(scale.dtype)
    return bool(((scale >= limits.tiny) & (scale <= limits.max / 256)).all())


_STEPS: tuple[Callable[[Sequence[Site], _Edit], None], ...] = (
    _own_domain,
    _open_quantized,
    _float_biases,
    _symmetric_weights,
    _signed_activations,
    _drop_pairs,
)


def _raise_opset(model: ModelProto) -> None:
    """Raises the standard opset where per-channel scales need it and onnx's own converter carries the whole model over."""
    entry = next((entry for entry in model.opset_import if not domain_of(entry.domain)), None)
    if entry is None or not _FIRST_QDQ_OPSET <= entry.version < FIRST_PER_CHANNEL_OPSET:
        return
    qdq = [node for node in model.graph.node if node.op_type in (QUANTIZE[0], DEQUANTIZE[0])]
    has_axis = any(attribute.name == "axis" for node in qdq for attribute in node.attribute)
    foreign = any(domain_of(node.domain) or any(subgraphs(node)) for node in model.graph.node)
    external = any(tensor.data_location == TensorProto.EXTERNAL for tensor in model.graph.initializer)
    if not has_axis or foreign or external:
        return
    stripped = ModelProto()
    stripped.CopyFrom(model)
    axes = {}
    for node in stripped.graph.node:
        for attribute in [
            a for a in node.attribute if a.name == "axis" and node.op_type in (QUANTIZE[0], DEQUANTIZE[0])
        ]:
            axes[node.output[0]] = attribute.i
            node.attribute.remove(attribute)
    try:
        raised = onnx.version_converter.convert_version(stripped, FIRST_PER_CHANNEL_OPSET)
        for node in raised.graph.node:
            if node.output[0] in axes:
                node.attribute.append(helper.make_attribute("axis", axes[node.output[0]]))
        onnx.checker.check_model(raised)
    except Exception:  # noqa: BLE001 - onnx throws many types; the model stays, and the finding with it
        return
    model.CopyFrom(raised)


def _names_read(model: ModelProto) -> set[str]:
    sites = sites_of(model)
    return {name for site in sites for name in site.node.input} | _outputs(graphs(model))


def _outputs(all_graphs: Iterable[GraphProto]) -> set[str]:
    return {info.name for graph in all_graphs for info in graph.output}


def _all_names(model: ModelProto) -> set[str]:
    return {name for graph in graphs(model) for name in _names(graph)}


def _names(graph: GraphProto) -> Iterator[str]:
    yield from (item.name for item in (*graph.input, *graph.output, *graph.initializer, *graph.value_info))
    for node in graph.node:
        yield from (node.name, *node.input, *node.output)


def _drop_unused(model: ModelProto, used: set[str]) -> None:
    """Takes out constants that were read before and no longer are, and nodes and inputs that only held them."""
    unused = used - _names_read(model)
    for graph in graphs(model):
        constants = {tensor.name for tensor in graph.initializer} & unused
        _remove(graph.initializer, constants)
        _remove(graph.input, constants)
        for node in [node for node in graph.node if node.op_type == "Constant" and set(node.output) <= unused]:
            graph.node.remove(node)
