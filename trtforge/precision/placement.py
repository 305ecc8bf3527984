"""Which nodes compute in INT8, which tensors need a scale for it, and why the other nodes do not."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

from onnx import ModelProto

from trtforge.errors import GraphError
from trtforge.precision.network import FLOAT, Network, Unit, Value, attribute, is_large, network_of, without_functions
from trtforge.precision.policy import WEIGHTED, KeepRules, kept

QUANTIZED_OPERATORS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
"""Operators whose activation and weights are quantized. Source: TensorRT documentation, Q/DQ placement recommendations."""

_SMALLEST_SIDE = 16
"""Matrices and channels narrower than this gain nothing in INT8. Source: NVIDIA ModelOpt's INT8 policy (ONNX).

Unlike there, the few input channels of an image are no reason, if its first kernel adds up enough of them, as ResNet-50's
does. Seen on an H200 with TensorRT 8.6 at batch 32, one build each: 1.150 ms, 1.060 with this convolution in INT8, and 0.821 with
the last average pool as well; two builds of one graph differed by 15 %. Waveforms stay out, whose quiet parts one scale would
lose: a judgement, not measured.
"""

_IMAGE_RANK = 4

_ALIGNED = 8
"""Narrow convolutions gain if their channels come in multiples of this. Source: as above."""

_SHORTEST_SUM = 32
"""Layers that add up fewer products stay as they are: they leave an INT8 instruction partly idle, and errors do not even out.

Source: PTX ISA, mma.sync m16n8k32 for s8. Measured on a text recogniser, whose first layers are such: 100 % of lines are
right without these and depthwise layers in INT8, 94 % with them, and 93 % of the work is INT8 still.
"""

_POOLS = frozenset({"AveragePool", "GlobalAveragePool"})
_CARRIERS = frozenset({"Concat", "Flatten", "Identity", "MaxPool", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators over which TensorRT moves a QuantizeLinear backward, as they commute with it."""

_BEFORE_QUANTIZED = frozenset({"BatchNormalization", "Identity"})
"""What may stand between a convolution and the addition that TensorRT fuses with it."""

_FUSED = frozenset({"Clip", "Identity", "Relu"})
"""What TensorRT computes at the end of the layer before."""

_QUANTIZED_ALREADY = frozenset(
    [
        *("ConvInteger", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger"),
        *("QLinearConv", "QLinearMatMul", "QuantizeLinear"),
    ]
)
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Weights:
    """Constant operand of a quantized node.

    Attributes:
        position: among the node's inputs.
        axis: of the channels that have a scale of their own.
    """

    name: str
    position: int
    axis: int


@dataclass(frozen=True, slots=True)
class QuantizedNode:
    """A node that reads INT8.

    Attributes:
        activations: position among its inputs -> tensor that is quantized there.
        weights: None for additions and pooling, which have none.
    """

    node: str
    op: str
    activations: Mapping[int, str]
    weights: Weights | None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where QuantizeLinear and DequantizeLinear go.

    Attributes:
        nodes: in graph order, all of the main graph.
        tensors: activations that need a scale, in the order of their first reader.
        groups: tensors of `tensors` that share one scale, because what joins them commutes with quantization.
        reasons: node with weights, or that could be quantized, -> why it is not.
    """

    nodes: tuple[QuantizedNode, ...]
    tensors: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]
    reasons: Mapping[str, str]


def place(model: ModelProto, *, keep: KeepRules = KeepRules()) -> Placement:  # noqa: B008 - frozen
    """Decides by structure alone what is quantized.

    Quantized are the activation and the weights of Conv, ConvTranspose, Gemm and MatMul; the residual of an addition to a
    convolution's result, so that both fuse; average pooling between quantized layers. Outputs are not, nor are products of
    two activations (attention), depthwise and tiny layers, and nodes in subgraphs. Where one tensor is quantized for
    several nodes, it is quantized once.

    Args:
        model: an FP32 model as ingest gives it, folded as it will be lowered; not changed.
        keep: globs on names of nodes that are not quantized.

    Raises:
        GraphError: the model carries quantization already.
        SeveralErrors: globs in `keep` that match no node.
    """
    network = network_of(without_functions(model), filter(is_large, model.graph.initializer), "tensor(float16)")
    _refuse_quantized(network)
    kept_units = dict(kept(network, keep))
    named = {name for node in model.graph.node for name in node.output} | {info.name for info in model.graph.input}
    reasons: dict[str, str] = {}
    nodes: dict[Unit, QuantizedNode] = {}
    for unit in network.units:
        if unit.op in WEIGHTED:
            reason = kept_units.get(unit) or _why_not(unit, network, named)
            if reason:
                reasons[unit.name] = reason
            else:
                nodes[unit] = _layer(unit)
    nodes |= {unit: node for unit, node in _residuals(network, nodes, named) if unit not in kept_units}
    _add_pools(network, nodes, named, kept_units, reasons)
    ordered = tuple(nodes[unit] for unit in network.units if unit in nodes)
    tensors = tuple(dict.fromkeys(name for node in ordered for name in node.activations.values()))
    return Placement(ordered, tensors, _groups(network, tensors), reasons)


def _refuse_quantized(network: Network) -> None:
    found = [unit for unit in network.units if unit.op in _QUANTIZED_ALREADY or _is_foreign_quantized(unit.op)]
    if found:
        names = ", ".join(f"'{unit.name}' ({unit.op})" for unit in found[:_SHOWN])
        raise GraphError(
            f"the model is quantized already: {len(found)} such nodes, {names}",
            next_step="write precision: {type: as_model}, or give the FP32 model",
        )


def _is_foreign_quantized(op: str) -> bool:
    return op.startswith("com.microsoft.") and any(
        part in op for part in ("QLinear", "Quantize", "QAttention", "Integer")
    )


def _why_not(unit: Unit, network: Network, named: set[str]) -> str:
    """Why a node with weights is not quantized, "" if it is."""
    if unit.op not in QUANTIZED_OPERATORS:
        return f"{unit.op} has no INT8"
    if unit.graph is not network.model.graph:
        return "it is in a subgraph"
    data, weights = unit.operands[:2]
    if data is None or weights is None or data.element_type != FLOAT or weights.element_type != FLOAT:
        return "its operands are not FP32"
    if data.tensor is not None:
        return "its weights are the first operand"
    if weights.tensor is None:
        return "both operands are activations"
    if data.name not in named:
        return "it is in a function of the model's own"
    dims = [size or 0 for size in weights.dims or ()]
    reason = _why_not_product(dims) if unit.op in ("Gemm", "MatMul") else _why_not_convolution(unit, data, dims)
    if not reason and (terms := _num_terms(unit, dims)) < _SHORTEST_SUM:
        return f"it adds up {terms} products, fewer than {_SHORTEST_SUM}"
    return reason


def _why_not_product(dims: list[int]) -> str:
    if len(dims) < 2:  # noqa: PLR2004 - a matrix
        return "its weights are no matrix"
    if min(dims[-2:]) < _SMALLEST_SIDE:
        return f"its weights of {dims[-2]} x {dims[-1]} are narrower than {_SMALLEST_SIDE}"
    return ""


def _why_not_convolution(unit: Unit, data: Value, dims: list[int]) -> str:
    groups = _group_count(unit)
    channels = (dims[0], dims[1] * groups) if unit.op == "Conv" else (dims[1] * groups, dims[0])
    if groups > 1 and groups == channels[1]:
        return "depthwise: one scale would serve channels that have nothing to do with each other"
    sides = [size // groups for size in channels]
    is_over_images = groups == 1 and len(dims) == _IMAGE_RANK
    judged = sides[:1] if is_over_images else sides
    if min(judged) < _SMALLEST_SIDE and any(size % _ALIGNED for size in sides):
        return f"its {sides[1]} channels to {sides[0]} are narrower than {_SMALLEST_SIDE}"
    if data.dims is not None and set(data.dims[2:]) == {1}:
        return "it sees a single pixel, which is hardly any work"
    return ""


def _num_terms(unit: Unit, dims: list[int]) -> int:
    """How many products each result adds up; of a transposed convolution, those of one position of its kernel."""
    if unit.op == "Conv":
        return math.prod(dims[1:])
    if unit.op == "ConvTranspose":
        return dims[0] // _group_count(unit)
    return dims[-1] if unit.op == "Gemm" and _is_transposed(unit) else dims[-2]


def _is_transposed(unit: Unit) -> bool:
    found = attribute(unit.node, "transB") if unit.node else None
    return bool(found and found.i)


def _group_count(unit: Unit) -> int:
    found = attribute(unit.node, "group") if unit.node else None
    return int(found.i) if found else 1


def _layer(unit: Unit) -> QuantizedNode:
    data, weights = (value for value in unit.operands[:2] if value)
    return QuantizedNode(unit.name, unit.op, {0: data.name}, Weights(weights.name, 1, _channel_axis(unit, weights)))


def _channel_axis(unit: Unit, weights: Value) -> int:
    """Axis of the weights along which results are told apart.

    Source: ONNX Conv-11 (M, C/group, ...), ConvTranspose-11 (C, M/group, ...), Gemm-13 (B' = B or its transpose), MatMul-13.
    """
    if unit.op == "Conv":
        return 0
    if unit.op == "Gemm":
        return 0 if _is_transposed(unit) else 1
    return 1 if unit.op == "ConvTranspose" else len(weights.dims or ()) - 1


def _residuals(
    network: Network, nodes: Mapping[Unit, QuantizedNode], named: set[str]
) -> Iterator[tuple[Unit, QuantizedNode]]:
    """Additions of an activation to the result of a quantized convolution.

    Of two convolutions, the later one takes the addition in, so that the result of the earlier one is quantized.
    """
    number = {unit: index for index, unit in enumerate(network.units)}
    for unit in network.units:
        operands = unit.operands
        if unit.op != "Add" or unit.graph is not network.model.graph or _are_unlike(*operands):
            continue
        makers = {position: maker for position in (0, 1) if (maker := _convolution_of(operands[position], nodes))}
        if not makers:
            continue
        position = 1 - max(makers, key=lambda place: number[makers[place]])
        residual = operands[position]
        if residual and residual.name in named:
            yield unit, QuantizedNode(unit.name, unit.op, {position: residual.name}, None)


def _are_unlike(first: Value | None, second: Value | None) -> bool:
    """Whether they are no two activations of one shape, as far as shapes are known."""
    if first is None or second is None or first is second:
        return True
    if any(value.tensor is not None or value.element_type != FLOAT for value in (first, second)):
        return True
    if first.dims is None or second.dims is None:
        return False
    pairs = zip(first.dims, second.dims, strict=False)
    return len(first.dims) != len(second.dims) or any(a != b for a, b in pairs if a is not None and b is not None)


def _convolution_of(value: Value | None, nodes: Mapping[Unit, QuantizedNode]) -> Unit | None:
    """The quantized convolution whose result `value` is and that nothing else reads."""
    while value is not None and value.producer and len(value.readers) == 1 and not value.is_output:
        unit = value.producer
        if unit.op not in _BEFORE_QUANTIZED:
            return unit if unit in nodes and unit.op in ("Conv", "ConvTranspose") else None
        value = unit.operands[0]
    return None


def _add_pools(
    network: Network,
    nodes: dict[Unit, QuantizedNode],
    named: Container[str],
    kept_units: Mapping[Unit, str],
    reasons: dict[str, str],
) -> None:
    """Average pooling between quantized layers computes in INT8; it does not commute with quantization.

    Without it the layer before could not give INT8; for what that cost see `_SMALLEST_SIDE`.
    """
    quantized = {name for node in nodes.values() for name in node.activations.values()}
    for unit in network.units:
        if unit.op not in _POOLS or unit.graph is not network.model.graph:
            continue
        source = unit.operands[0]
        if unit in kept_units:
            reasons[unit.name] = kept_units[unit]
        elif (
            source
            and source.name in named
            and _gives_int8(source, quantized, nodes)
            and _becomes_int8(unit.results[0], quantized)
        ):
            nodes[unit] = QuantizedNode(unit.name, unit.op, {0: source.name}, None)
        else:
            reasons[unit.name] = "it does not stand between quantized layers"


def _gives_int8(value: Value, quantized: Container[str], nodes: Container[Unit]) -> bool:
    """Whether a tensor is quantized anyway, or is made by a quantized layer for one reader alone."""
    if value.name in quantized:
        return True
    maker: Value | None = value
    while maker is not None and len(maker.readers) == 1 and not maker.is_output and maker.producer:
        if maker.producer in nodes:
            return True
        maker = maker.producer.operands[0] if maker.producer.op in _FUSED else None
    return False


def _becomes_int8(value: Value, quantized: Container[str]) -> bool:
    """Whether a tensor is quantized, at once or after its form has changed."""
    while value.name not in quantized:
        if len(value.readers) != 1 or value.is_output or value.readers[0].op not in _CARRIERS:
            return False
        value = value.readers[0].results[0]
    return True


def _groups(network: Network, tensors: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Tensors that TensorRT would quantize in one place, at one scale: joined by Concat, pooling and reshaping."""
    own = network.own(network.model.graph)
    leader = {name: name for name in tensors}

    def root(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    for name in leader:
        for other in _carried(own[name]):
            if other.name in leader:
                leader[root(other.name)] = root(name)
    groups: dict[str, list[str]] = {}
    for name in leader:
        groups.setdefault(root(name), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def _carried(value: Value) -> Iterator[Value]:
    """Everything that reaches `value` through operators that commute with quantization."""
    todo = [value]
    seen = {value}
    while todo:
        unit = todo.pop().producer
        if unit is None or unit.op not in _CARRIERS:
            continue
        before = unit.reads if unit.op == "Concat" else unit.reads[:1]
        new = [each for each in before if each.tensor is None and each not in seen]
        yield from new
        seen.update(new)
        todo += new
