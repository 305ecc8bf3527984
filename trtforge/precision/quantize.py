"""Writes a placement into a graph as QuantizeLinear and DequantizeLinear, and lowers the rest around them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, external_data_helper, helper

from trtforge.errors import CalibrationError, GraphError, Problem, raise_any
from trtforge.precision.int8_weights import LEVELS, Int8Weights, int8_weights, scale_of
from trtforge.precision.lower import Decision, Lowered, Type, check, lower
from trtforge.precision.network import all_graphs, constant_tensor, is_large, standard_opset, without_functions
from trtforge.precision.opsets import names_of, raise_opset
from trtforge.precision.placement import Placement, QuantizedNode
from trtforge.precision.policy import QDQ, KeepRules
from trtforge.precision.weights import WeightsFile, write_same
from trtforge.types import Range

_FIRST_WITH_AXIS = 13
_FIRST_WITH_LOW_SCALES = 19
"""QuantizeLinear and DequantizeLinear take scales by channel from 13 on, FP16 and BF16 from 19 on. Source: ONNX Changelog."""

_ZERO = "int8_zero"

_MATRIX = frozenset({"Gemm", "MatMul"})


@dataclass(frozen=True, slots=True)
class Quantized:
    """A model with explicit quantization; what is not quantized is FP32 still.

    Attributes:
        model: sorted, checked, without local functions; the INT8 weights are inside.
        decisions: one for each quantized node, in graph order, with its scales in the reason.
        ranges: dequantized tensor or weights -> what INT8 can make of them at their scale.
        notes: what else there is to know, one sentence each.
    """

    model: ModelProto
    decisions: tuple[Decision, ...]
    ranges: Mapping[str, Range]
    notes: tuple[str, ...]


def lowers_rest(rest: Type, max_opset: int) -> bool:
    """Whether what is not quantized is lowered in the graph.

    Before opset 19 QuantizeLinear knows FP32 only, and casts between it and a layer would keep TensorRT from fusing them. So
    for TensorRT 8.6 the graph stays FP32 around its Q/DQ nodes, and the builder's FP16 flag lets TensorRT choose.
    """
    return rest != "float32" and max_opset >= _FIRST_WITH_LOW_SCALES


def lower_int8(
    model: ModelProto,
    placement: Placement,
    amax: Mapping[str, float],
    *,
    rest: Type,
    max_opset: int,
    keep: KeepRules = KeepRules(),  # noqa: B008 - frozen
    ranges: Mapping[str, Range] | None = None,
    keep_io: bool = True,
    weights_dir: Path | None = None,
    weights_file: WeightsFile | None = None,
) -> Lowered:
    """`quantize`, then `lower` of the rest where `lowers_rest`; with one table of decisions for both.

    A scale has the type of the layer that it is for, and no cast stands between a DequantizeLinear and its layer.

    For the arguments see `quantize` and `lower`.

    Raises:
        TrtForgeError: see `quantize` and `lower`.
    """
    quantized = quantize(model, placement, amax, max_opset=max_opset, rest=rest, weights_dir=weights_dir)
    if not lowers_rest(rest, max_opset):
        _settle_weights(quantized.model, weights_dir, weights_file)
        why = "float32 as asked" if rest == "float32" else f"{rest} is left to the builder"
        rows = (Decision(node.name, node.op_type, "float32", why, None) for node in quantized.model.graph.node)
        known = {row.node for row in quantized.decisions} | placement.reasons.keys()
        decisions = tuple(_merged((row for row in rows if row.node in known), quantized.decisions, placement.reasons))
        notes = () if rest == "float32" else (_left_to_builder(rest, max_opset),)
        return Lowered(quantized.model, decisions, 0, (*quantized.notes, *notes))
    lowered = lower(
        quantized.model,
        dtype="bfloat16" if rest == "bfloat16" else "float16",
        keep=keep,
        ranges={name: _up_to(limit) for name, limit in amax.items()} | dict(ranges or {}) | dict(quantized.ranges),
        keep_io=keep_io,
        max_opset=max_opset,
        weights_dir=weights_dir,
        weights_file=weights_file,
    )
    decisions = tuple(_merged(lowered.decisions, quantized.decisions, placement.reasons))
    return replace(lowered, decisions=decisions, notes=(*quantized.notes, *lowered.notes))


def _up_to(limit: float) -> Range:
    return Range(-limit, limit, limit, finite=True)


def _left_to_builder(rest: Type, max_opset: int) -> str:
    return (
        f"what is not quantized stays FP32 in the graph and {rest} is left to the builder's flag: QuantizeLinear takes"
        f" {rest} from opset {_FIRST_WITH_LOW_SCALES} on, the target reads up to {max_opset}"
    )


def _settle_weights(model: ModelProto, folder: Path | None, file: WeightsFile | None) -> None:
    """Takes external weights in, where it is known from where, and large ones out, where it is known to where."""
    for tensor in model.graph.initializer:
        if folder and tensor.data_location == TensorProto.EXTERNAL:
            external_data_helper.load_external_data_for_tensor(tensor, str(folder))
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]
        if file and tensor.HasField("raw_data") and is_large(tensor):
            file.take(tensor)


def _merged(rows: Iterable[Decision], quantized: Iterable[Decision], reasons: Mapping[str, str]) -> Iterable[Decision]:
    int8 = {row.node: row for row in quantized}
    for row in rows:
        if row.op in QDQ:
            continue
        if row.node in int8:
            reason = f"{int8[row.node].reason}; {row.dtype} around it: {row.reason}"
            yield replace(int8[row.node], reason=reason, range=row.range)
        elif row.node in reasons:
            yield replace(row, reason=f"{row.reason}; not INT8: {reasons[row.node]}")
        else:
            yield row


def quantize(
    model: ModelProto,
    placement: Placement,
    amax: Mapping[str, float],
    *,
    max_opset: int,
    rest: Type,
    weights_dir: Path | None = None,
) -> Quantized:
    """Puts INT8 into the graph by QuantizeLinear and DequantizeLinear, zero points 0.

    An activation is quantized once, with one scale, and dequantized for each node that reads it. Weights become INT8
    initializers with a scale for each channel, and are dequantized for each node; a bias stays as it is. `model` is not
    changed. Beyond it, memory holds the result and one weight.

    Args:
        model: that `placement` was made for.
        placement: see `place`.
        amax: for each of `placement.tensors`, the largest magnitude to represent.
        max_opset: latest opset that the target reads; the model's is raised to 13, or to 19 where `rest` needs it.
        rest: type of what is not quantized; every scale is a number that it holds.
        weights_dir: folder of external weights that are not loaded.

    Raises:
        GraphError: a node cannot be written in the opset that is needed, or weights are not finite.
        SeveralErrors: tensors without an `amax`, or with one that is no magnitude.
    """
    _check_amax(placement, amax)
    opened = without_functions(model)
    weights = [tensor for tensor in model.graph.initializer if is_large(tensor)]
    notes = _raise(opened, weights, _FIRST_WITH_LOW_SCALES if lowers_rest(rest, max_opset) else _FIRST_WITH_AXIS)
    writer = _Writer(opened, weights, rest, weights_dir, keeps_matrices=max_opset < _FIRST_WITH_LOW_SCALES)
    scales = _scales(placement, amax, rest)
    decisions = tuple(writer.quantize(node, scales) for node in placement.nodes)
    writer.finish()
    check(opened)
    return Quantized(opened, decisions, writer.ranges, (*notes, *writer.notes))


def _check_amax(placement: Placement, amax: Mapping[str, float]) -> None:
    problems = []
    for name in placement.tensors:
        found = amax.get(name)
        if found is None or not (math.isfinite(found) and found >= 0):
            what = "has no range" if found is None else f"has the range {found}, expected a finite number from 0 on"
            problems.append(
                Problem(
                    f"tensor '{name}' {what}",
                    "calibrate again with the model as it is now: trtforge calibrate SPEC",
                    exit_code=CalibrationError.exit_code,
                )
            )
    raise_any(problems)


def _raise(opened: ModelProto, weights: Iterable[TensorProto], wanted: int) -> tuple[str, ...]:
    opset = standard_opset(opened)
    if opset >= wanted:
        return ()
    if stuck := raise_opset(opened, weights, wanted):
        raise GraphError(
            f"INT8 needs opset {wanted}; the model has {opset}, and {names_of(stuck)} cannot be written in the later one",
            next_step=f"export the model with opset {wanted}",
        )
    return (f"raised the opset from {opset} to {wanted}, which INT8 needs",)


def _scales(placement: Placement, amax: Mapping[str, float], rest: Type) -> dict[str, float]:
    """Tensor -> scale; a group shares that of its largest member."""
    shared = {name: max(amax[member] for member in group) for group in placement.groups for name in group}
    return {name: scale_of(shared.get(name, amax[name]), rest) for name in placement.tensors}


@dataclass(slots=True)
class _Written:
    """Names of weights in INT8 and of their scales."""

    values: str
    scales: str
    zeros: str
    found: Int8Weights


class _Writer:
    """Quantizes nodes of the main graph in place.

    Attributes:
        keeps_matrices: whether weights of MatMul and Gemm stay FP32 before a QuantizeLinear. TensorRT 8.6 ends in an
            internal error on INT8 ones ("convertMyelinWeightsToFp32 ... weights.type() != DataType::kINT8").
    """

    def __init__(
        self, model: ModelProto, large: list[TensorProto], rest: Type, folder: Path | None, *, keeps_matrices: bool
    ) -> None:
        self.keeps_matrices = keeps_matrices
        self.graph: GraphProto = model.graph
        self.large = large
        self.rest: Type = rest
        self.folder = folder
        graphs = list(all_graphs(model.graph))
        self.nodes = {node.name: node for node in model.graph.node}
        self.constants = {tensor.name: tensor for tensor in (*model.graph.initializer, *large)} | {
            node.output[0]: tensor for node in model.graph.node if (tensor := constant_tensor(node)) is not None
        }
        self.names = {name for graph in graphs for node in graph.node for name in (node.name, *node.output)}
        self.names |= {value.name for graph in graphs for value in (*graph.input, *graph.initializer)}
        self.names |= self.constants.keys()
        self.produced = {name for node in model.graph.node for name in node.output}
        self.quantized: dict[str, tuple[str, str]] = {}
        self.written: dict[tuple[str, int], _Written] = {}
        self.after: dict[str | None, list[NodeProto]] = defaultdict(list)
        self.before: dict[str, list[NodeProto]] = defaultdict(list)
        self.ranges: dict[str, Range] = {}
        self.notes: list[str] = []
        self.zero = self._initializer(_ZERO, np.zeros((), np.int8))

    def quantize(self, chosen: QuantizedNode, scales: Mapping[str, float]) -> Decision:
        node = self.nodes[chosen.node]
        told = []
        for position, tensor in chosen.activations.items():
            integers, scale = self._activation(tensor, scales[tensor])
            copy = self._dequantize(node, position, [integers, scale, self.zero])
            self.ranges[copy] = _up_to(scales[tensor] * (LEVELS + 1))
            told.append(f"'{tensor}' at scale {scales[tensor]:.3g}")
        if chosen.weights:
            weights = self._weights(chosen.weights.name, chosen.weights.axis, node)
            position, axis = chosen.weights.position, chosen.weights.axis
            copy = self._dequantize(node, position, [weights.values, weights.scales, weights.zeros], axis=axis)
            self.ranges[copy] = _up_to(weights.found.absmax)
            told.append(_told(weights.found, axis))
        return Decision(chosen.node, chosen.op, "int8", "; ".join(told), None)

    def finish(self) -> None:
        """Puts the new nodes in their places, and leaves out weights that nothing reads any more."""
        nodes = list(self.after[None])
        for node in self.graph.node:
            nodes += (*self.before[node.name], node)
            nodes += (added for name in node.output for added in self.after[name])
        replaced = {name for name, _ in self.written}
        main, *inner = all_graphs(self.graph)
        read = Counter(name for node in nodes for name in node.input)
        read.update(name for graph in inner for node in graph.node for name in node.input)
        read.update(info.name for graph in (main, *inner) for info in graph.output)
        unread = {name for name in replaced if not read[name]}
        del self.graph.node[:]
        self.graph.node.extend(node for node in nodes if unread.isdisjoint(node.output))
        for values in (self.graph.initializer, self.graph.input, self.graph.value_info):
            for index in reversed([i for i, value in enumerate(values) if value.name in unread]):
                del values[index]
        for tensor in self.large:
            if tensor.name not in unread:
                write_same(tensor, self.graph.initializer.add(), None)

    def _activation(self, tensor: str, scale: float) -> tuple[str, str]:
        """Names of the integers and the scale of a tensor, quantized right after what gives it."""
        if tensor not in self.quantized:
            name = self._initializer(f"{tensor}_scale", np.float32(scale))
            integers = self._fresh(f"{tensor}_int8")
            node = helper.make_node(
                "QuantizeLinear", [tensor, name, self.zero], [integers], name=self._fresh(f"{tensor}/QuantizeLinear")
            )
            self.after[tensor if tensor in self.produced else None].append(node)
            self.quantized[tensor] = integers, name
        return self.quantized[tensor]

    def _dequantize(self, node: NodeProto, position: int, operands: list[str], axis: int | None = None) -> str:
        copy = self._fresh(f"{node.input[position]}_dequantized")
        name = self._fresh(f"{node.name}/DequantizeLinear_{position}")
        added = helper.make_node("DequantizeLinear", operands, [copy], name=name)
        if axis is not None:
            added.attribute.append(helper.make_attribute("axis", axis))
        self.before[node.name].append(added)
        node.input[position] = copy
        return copy

    def _weights(self, name: str, axis: int, reader: NodeProto) -> _Written:
        if (name, axis) not in self.written:
            found = int8_weights(self.constants[name], axis, self.rest, self.folder)
            if found is None:
                raise GraphError(
                    f"the weights '{name}' of '{reader.name}' hold values that are not finite",
                    next_step="export the model again from a checkpoint without NaN and infinity",
                )
            if found.num_coarse:
                self.notes.append(
                    f"in {found.num_coarse} of {len(found.scales)} channels of '{name}' ('{reader.name}') a few weights are so"
                    " much larger than the others that most of these become zero; if accuracy suffers, name the node in"
                    " keep.rest"
                )
            scales = self._initializer(f"{name}_scales", found.scales)
            # TensorRT 8.6's parser crashes on a DequantizeLinear without its third operand.
            zeros = self._initializer(f"{name}_zeros", np.zeros(found.scales.shape, np.int8))
            if self.keeps_matrices and reader.op_type in _MATRIX:
                values = self._quantize_in_graph(name, scales, zeros, axis)
            else:
                values = self._initializer(f"{name}_int8", found.values)
            self.written[name, axis] = _Written(values, scales, zeros, found)
        return self.written[name, axis]

    def _quantize_in_graph(self, name: str, scales: str, zeros: str, axis: int) -> str:
        integers = self._fresh(f"{name}_int8")
        wish = self._fresh(f"{name}/QuantizeLinear")
        node = helper.make_node("QuantizeLinear", [name, scales, zeros], [integers], name=wish, axis=axis)
        self.after[name if name in self.produced else None].append(node)
        return integers

    def _initializer(self, wish: str, values: NDArray[Any] | np.generic) -> str:
        name = self._fresh(wish)
        tensor = self.graph.initializer.add()
        tensor.name = name
        tensor.data_type = TensorProto.INT8 if values.dtype == np.int8 else TensorProto.FLOAT
        tensor.dims.extend(values.shape)
        tensor.raw_data = values.tobytes()
        return name

    def _fresh(self, wish: str) -> str:
        name, number = wish, 1
        while name in self.names:
            name, number = f"{wish}_{number}", number + 1
        self.names.add(name)
        return name


def _told(weights: Int8Weights, axis: int) -> str:
    dead = f", {weights.num_dead} channels are zeros" if weights.num_dead else ""
    return f"weights by channel (axis {axis}), {weights.loss:.1%} of their norm lost{dead}"
