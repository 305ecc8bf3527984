"""Folds scales and shifts by constants into the weights before them, as TensorRT itself does before it chooses kernels.

What stays between a convolution and its batch normalization would be rounded to the lower type, or leave its range, though
no engine ever computes it. Constants are computed in float64 and rounded once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trtforge.precision.network import FLOAT, all_graphs, attribute, constant_tensor, is_standard
from trtforge.precision.policy import KeepRules
from trtforge.precision.weights import LARGEST, values_of

_MOST_EXTERNAL_BYTES = 256 << 20
"""Folded weights are held in memory; those that lie in other files are folded up to this sum of bytes."""

_MOST = LARGEST["float16"] / 4
"""Constants that folding would make larger than this are left apart: FP16 could not hold the layer."""

_MOST_DOUBLED = 1 << 16
"""A larger constant that is read in two shapes, such as the words of an embedding, is not stored twice."""

_MOVES = frozenset(["Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"])
_FOLLOWERS = frozenset(["Add", "BatchNormalization", "Div", "Mul", "Sub"])
_Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Affine:
    """`scale * x + shift`, in arrays that broadcast with x; None for a part that is not there."""

    scale: _Array | None = None
    shift: _Array | None = None

    def then(self, after: _Affine) -> _Affine:
        """What `after` makes of the result of this."""
        scale, shift = self.scale, self.shift
        if after.scale is not None:
            scale = after.scale if scale is None else scale * after.scale
            shift = None if shift is None else shift * after.scale
        if after.shift is not None:
            shift = after.shift if shift is None else shift + after.shift
        return _Affine(scale, shift)

    @property
    def num_steps(self) -> int:
        """Nodes that it takes, written out."""
        return (self.scale is not None) + (self.shift is not None)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Where the channels of a weighted node lie.

    Attributes:
        num_channels: of its result.
        rank: largest rank of a constant that leaves the rank of the result as it is.
        axis: of the channels in the result, from the end.
        is_biased: whether it can add a constant to each channel.
    """

    num_channels: int
    rank: int
    axis: int
    is_biased: bool

    def aligned(self, constant: _Array) -> _Array | None:
        """`constant` as one number or a vector of the channels; None if it is neither, broadcast with the result."""
        if constant.size == 1 and constant.ndim <= self.rank:
            return constant.reshape(())
        if constant.size == self.num_channels and -self.axis <= constant.ndim <= self.rank:
            return constant.reshape(-1) if constant.shape[self.axis] == self.num_channels else None
        return None


@dataclass(frozen=True, slots=True)
class Folded:
    """Numbers of nodes that are gone.

    Attributes:
        num_moves: copied or moved constants, which stayed what they were.
        num_folded: computed with constants that are in weights now, rounded once more.
    """

    num_moves: int
    num_folded: int


def fold(model: ModelProto, keep: KeepRules = KeepRules(), folder: Path | None = None) -> Folded:  # noqa: B008 - frozen
    """Folds multiplications, additions and batch normalizations by constants, in place.

    Guarantees: the model computes the same function but for the rounding of FP32; values that are outputs, or that
    several nodes read, keep their names. Behind a Conv, ConvTranspose, Gemm or MatMul they go into its constant weights
    and bias; a MatMul has no bias, so that one addition stays. Elsewhere a row of them becomes one multiplication and
    one addition. Weights that several nodes read are left alone, and so are the nodes of `keep`. First, whoever reads an
    Identity of a constant, which PyTorch writes where layers share one, reads the constant, and one that is only reshaped or
    transposed, as Paddle writes biases, is stored so.

    Args:
        model: sorted, every node with a name.
        keep: globs on names of nodes that stay as they are.
        folder: where external weights lie.

    Source: Jacob et al. 2018, section 3.2, for batch normalization; ONNX BatchNormalization-15.
    """
    folding = _Folding(model, keep, folder)
    for graph in list(all_graphs(model.graph)):
        folding.fold(graph)
    folding.drop_unread()
    return Folded(folding.num_moves, folding.num_folded)


class _Folding:
    """One walk over the graphs of a model, owners first."""

    def __init__(self, model: ModelProto, keep: KeepRules, folder: Path | None) -> None:
        self.keep = keep
        self.folder = folder
        self.num_moves = 0
        self.num_folded = 0
        self.external_bytes = 0
        self.graphs = list(all_graphs(model.graph))
        nodes = [node for graph in self.graphs for node in graph.node]
        self.reads = Counter(name for node in nodes for name in node.input)
        # Whoever runs the graph reads its outputs, so that no such value has a single reader.
        self.reads.update(info.name for graph in self.graphs for info in (*graph.output, *graph.output))
        self.outputs = {info.name for graph in self.graphs for info in graph.output}
        self.names = {name for node in nodes for name in (*node.output, *node.input, node.name)}
        self.constants: dict[str, TensorProto] = {}
        self.unread: set[str] = set()

    def fold(self, graph: GraphProto) -> None:
        """Folds in one graph, not in those that its nodes carry."""
        inputs = {info.name for info in graph.input}
        self.constants.update((tensor.name, tensor) for tensor in graph.initializer if tensor.name not in inputs)
        for node in graph.node:
            if node.op_type == "Constant" and is_standard(node) and (tensor := constant_tensor(node)) is not None:
                self.constants[node.output[0]] = tensor
        self._resolve_constants(graph)
        nodes = list(graph.node)
        readers = {name: node for node in nodes for name in node.input}
        gone: set[str] = set()
        result: list[NodeProto] = []
        for node in nodes:
            if not node.output or node.output[0] not in gone:
                result += self._folded(node, graph, readers, gone)
        if gone:
            copies = [NodeProto.FromString(node.SerializeToString()) for node in result]
            del graph.node[:]
            graph.node.extend(copies)

    def _resolve_constants(self, graph: GraphProto) -> None:
        """Removes nodes that copy or move constants."""
        sources: dict[str, str] = {}
        places = []
        for place, node in enumerate(graph.node):
            self._read_instead(node, sources)
            if not self._takes_constants_alone(node):
                continue
            name = node.output[0]
            if node.op_type == "Identity":
                sources[name] = node.input[0]
            elif (array := _moved(node, [self.constants[given] for given in node.input if given])) is not None:
                self.constants[name] = numpy_helper.from_array(np.ascontiguousarray(array), name)
                graph.initializer.append(self.constants[name])
            else:
                continue
            self.reads.subtract(node.input)
            self.unread.update(node.input)
            places.append(place)
        for place in reversed(places):
            del graph.node[place]
        self.unread.update(sources)
        self.num_moves += len(places)
        for inner in (node for each in all_graphs(graph) for node in each.node if sources):
            self._read_instead(inner, sources)

    def _read_instead(self, node: NodeProto, sources: Mapping[str, str]) -> None:
        for position, name in enumerate(node.input):
            if name in sources:
                node.input[position] = sources[name]
                self.reads.subtract([name])
                self.reads.update([sources[name]])

    def _takes_constants_alone(self, node: NodeProto) -> bool:
        if node.op_type not in _MOVES or not is_standard(node) or self._is_kept(node) or node.output[0] in self.outputs:
            return False
        constant = self.constants.get(node.input[0]) if node.input else None
        if constant is None or node.op_type == "Identity":
            return constant is not None
        if self.reads[node.input[0]] > 1 and math.prod(constant.dims) > _MOST_DOUBLED:
            return False
        given = [self.constants.get(name) for name in node.input if name]
        return all(tensor is not None and tensor.data_location != TensorProto.EXTERNAL for tensor in given)

    def _folded(
        self, node: NodeProto, graph: GraphProto, readers: dict[str, NodeProto], gone: set[str]
    ) -> list[NodeProto]:
        """`node` with what follows it folded in."""
        layer = self._layer(node)
        if layer is None and node.op_type not in _FOLLOWERS:
            return [node]
        row, affine = self._row(node, layer, readers)
        num_steps = affine.num_steps if layer is None else int(affine.shift is not None and not layer.is_biased)
        if len(row) <= num_steps:
            return [node]
        if layer is None:
            source = next(name for name in node.input if name not in self.constants)
            result = self._written_out(affine, source, row, graph)
        else:
            result = self._into_weights(affine, layer, node, row, graph)
        if not result:
            return [node]
        for each in row:
            gone.add(each.output[0])
            self.unread.update(each.input)
            self.reads.subtract(each.input)
        self.num_folded += len(row) - num_steps
        return result

    def _row(
        self, node: NodeProto, layer: _Layer | None, readers: dict[str, NodeProto]
    ) -> tuple[list[NodeProto], _Affine]:
        """The nodes to fold, in order, and what they do together; without a layer, `node` is the first of them."""
        row: list[NodeProto] = []
        affine = _Affine()
        following: NodeProto | None = node
        value = ""
        if layer is not None:
            value = node.output[0]
            following = readers.get(value) if self.reads[value] == 1 else None
        while following is not None:
            step = self._step(following, value, layer)
            if step is None:
                break
            row.append(following)
            affine = affine.then(step)
            value = following.output[0]
            following = readers.get(value) if self.reads[value] == 1 else None
        return row, affine

    def _step(self, node: NodeProto, value: str, layer: _Layer | None) -> _Affine | None:
        """What `node` does with `value`, or with its one operand that is no constant; None if that is no folding."""
        if node.op_type not in _FOLLOWERS or not is_standard(node) or self._is_kept(node):
            return None
        if node.op_type == "BatchNormalization":
            return self._batch_normalization(node, layer)
        constant = next((name for name in node.input if self._is_float(name) and name != value), None)
        if constant is None or all(name in self.constants for name in node.input):
            return None
        array: _Array | None = self._array(constant)
        if layer is not None:
            array = layer.aligned(self._array(constant))
        if array is None:
            return None
        is_second = node.input[1] == constant
        match node.op_type:
            case "Add":
                return _Affine(shift=array)
            case "Sub":
                return _Affine(shift=-array) if is_second else _Affine(np.array(-1.0), array)
            case "Mul":
                return _Affine(scale=array)
            case _:
                return _Affine(scale=1 / array) if is_second and array.all() else None

    def _batch_normalization(self, node: NodeProto, layer: _Layer | None) -> _Affine | None:
        training = attribute(node, "training_mode")
        is_plain = len([name for name in node.output if name]) == 1 and not (training and training.i)
        if layer is None or layer.axis + layer.rank != 1 or not is_plain:
            return None
        if not all(self._is_float(name) for name in node.input[1:5]):
            return None
        gain, offset, mean, variance = (self._array(name) for name in node.input[1:5])
        epsilon = attribute(node, "epsilon")
        scale = gain / np.sqrt(variance + (epsilon.f if epsilon else 1e-5))
        return _Affine(scale, offset - mean * scale)

    def _layer(self, node: NodeProto) -> _Layer | None:
        if not is_standard(node) or self._is_kept(node) or len(node.input) < 2 or not self._is_float(node.input[1]):  # noqa: PLR2004
            return None
        dims = self.constants[node.input[1]].dims
        if self.reads[node.input[1]] != 1:
            return None
        match node.op_type:
            case "Conv":
                return _Layer(dims[0], len(dims), 1 - len(dims), is_biased=self._has_foldable_bias(node))
            case "ConvTranspose":
                channels = dims[1] * _integer(node, "group", 1)
                return _Layer(channels, len(dims), 1 - len(dims), is_biased=self._has_foldable_bias(node))
            case "Gemm":
                channels = dims[0] if _integer(node, "transB", 0) else dims[1]
                return _Layer(channels, 2, -1, is_biased=self._has_foldable_bias(node))
            case "MatMul" if len(dims) > 1:
                # The other operand may be a vector, so that only constants of rank 1 surely keep the result's rank.
                return _Layer(dims[-1], 1, -1, is_biased=False)
            case _:
                return None

    def _has_foldable_bias(self, node: NodeProto) -> bool:
        if len(node.input) < 3 or not node.input[2]:  # noqa: PLR2004
            return True
        return self._is_float(node.input[2])

    def _into_weights(
        self, affine: _Affine, layer: _Layer, node: NodeProto, row: list[NodeProto], graph: GraphProto
    ) -> list[NodeProto]:
        """The layer with other weights and what no bias can hold; nothing where the type would not hold them."""
        tensor = self.constants[node.input[1]]
        if tensor.data_location == TensorProto.EXTERNAL and affine.scale is not None:
            self.external_bytes += 4 * int(np.prod(tensor.dims))
            if self.external_bytes > _MOST_EXTERNAL_BYTES:
                return []
        bias = self._bias(node)
        after = _Affine(None, bias).then(affine)
        weights = None if affine.scale is None else _scaled(node, self._array(node.input[1]), affine.scale)
        if any(array is not None and not _is_holdable(array) for array in (weights, after.shift)):
            return []
        folded = NodeProto()
        folded.CopyFrom(node)
        if weights is not None:
            self._replace(folded, 1, weights, graph)
        folded.output[0] = row[-1].output[0]
        if after.shift is None:
            return [folded]
        if layer.is_biased:
            self._set_bias(folded, np.broadcast_to(after.shift, (layer.num_channels,)), graph)
            return [folded]
        return [folded, self._sum(folded, after.shift, row[-1], graph)]

    def _bias(self, node: NodeProto) -> _Array | None:
        if len(node.input) < 3 or not node.input[2] or not self._is_float(node.input[2]):  # noqa: PLR2004
            return None
        bias = self._array(node.input[2])
        return bias * _number(node, "beta", 1.0) if node.op_type == "Gemm" else bias

    def _set_bias(self, node: NodeProto, bias: _Array, graph: GraphProto) -> None:
        if len(node.input) == 2:  # noqa: PLR2004
            node.input.append("")
        self._replace(node, 2, bias, graph)
        if found := attribute(node, "beta"):
            found.f = 1.0

    def _sum(self, layer: NodeProto, shift: _Array, last: NodeProto, graph: GraphProto) -> NodeProto:
        inner = self._fresh(f"{last.output[0]}_unshifted")
        layer.output[0] = inner
        return helper.make_node("Add", [inner, self._new(shift, graph, inner)], [last.output[0]], name=last.name)

    def _written_out(self, affine: _Affine, source: str, row: list[NodeProto], graph: GraphProto) -> list[NodeProto]:
        last, parts = row[-1], [part for part in (affine.scale, affine.shift) if part is not None]
        if not all(_is_holdable(part) for part in parts):
            return []
        if affine.scale is None or affine.shift is None:
            op = "Add" if affine.scale is None else "Mul"
            return [helper.make_node(op, [source, self._new(parts[0], graph, last.name)], last.output, name=last.name)]
        inner, first = self._fresh(f"{last.output[0]}_unshifted"), row[0].name
        return [
            helper.make_node("Mul", [source, self._new(affine.scale, graph, inner)], [inner], name=first),
            helper.make_node("Add", [inner, self._new(affine.shift, graph, inner)], last.output, name=last.name),
        ]

    def _replace(self, node: NodeProto, position: int, array: _Array, graph: GraphProto) -> None:
        old = node.input[position]
        self.unread.add(old)
        self.reads[old] -= 1
        node.input[position] = self._new(array, graph, old or node.output[0])

    def _new(self, array: _Array, graph: GraphProto, wish: str) -> str:
        name = self._fresh(f"{wish}_folded")
        tensor = graph.initializer.add()
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array, np.float32), name))
        self.constants[name] = tensor
        self.reads[name] += 1
        return name

    def _fresh(self, wish: str) -> str:
        name, number = wish, 1
        while name in self.names:
            name, number = f"{wish}_{number}", number + 1
        self.names.add(name)
        return name

    def _is_float(self, name: str) -> bool:
        return name in self.constants and self.constants[name].data_type == FLOAT

    def _array(self, name: str) -> _Array:
        tensor = self.constants[name]
        return values_of(tensor, self.folder).astype(np.float64).reshape(tuple(tensor.dims))

    def _is_kept(self, node: NodeProto) -> bool:
        return any(node.name == pattern or fnmatchcase(node.name, pattern) for pattern in self.keep.patterns)

    def drop_unread(self) -> None:
        """Removes constants, and notes on values, that nothing refers to any more."""
        unread = {name for name in self.unread if self.reads[name] <= 0}
        for graph in self.graphs:
            for entries in (graph.initializer, graph.value_info):
                for position in reversed(range(len(entries))):
                    if entries[position].name in unread:
                        del entries[position]
            for position in reversed(range(len(graph.node))):
                node = graph.node[position]
                if node.op_type == "Constant" and node.output[0] in unread:
                    del graph.node[position]


def _moved(node: NodeProto, given: Sequence[TensorProto]) -> NDArray[Any] | None:
    """What `node` makes of a constant by moving its values; None where it is no legal move, or not of FP32."""
    if given[0].data_type != FLOAT:
        return None
    array = numpy_helper.to_array(given[0])
    try:
        moves = numpy_helper.to_array(given[1]).reshape(-1).tolist() if given[1:] else _integers(node, "axes")
        match node.op_type:
            case "Transpose":
                return np.transpose(array, _integers(node, "perm") or None)
            case "Squeeze":
                return np.squeeze(array, tuple(moves) or None)
            case "Unsqueeze":
                return np.expand_dims(array, tuple(moves))
            case _:
                kept = 0 if _integer(node, "allowzero", 0) else array.ndim
                return array.reshape(
                    [size or array.shape[axis] if axis < kept else size for axis, size in enumerate(moves)]
                )
    except (ValueError, IndexError, TypeError, OverflowError):  # whoever runs it says so better
        return None


def _scaled(node: NodeProto, weights: _Array, scale: _Array) -> _Array:
    """Weights whose layer gives `scale` times as much, by channel."""
    rank = weights.ndim
    if scale.ndim == 0 or node.op_type == "MatMul":
        return weights * scale
    if node.op_type == "Gemm":
        return weights * (scale[:, None] if _integer(node, "transB", 0) else scale)
    if node.op_type == "Conv":
        return weights * scale.reshape(-1, *[1] * (rank - 1))
    groups = _integer(node, "group", 1)
    grouped = weights.reshape(groups, -1, *weights.shape[1:])
    scaled = grouped * scale.reshape(groups, 1, -1, *[1] * (rank - 2))
    return np.asarray(scaled.reshape(weights.shape))


def _is_holdable(array: _Array) -> bool:
    return bool(np.isfinite(array).all()) and float(np.abs(array).max(initial=0)) <= _MOST


def _integer(node: NodeProto, name: str, default: int) -> int:
    found: Any = attribute(node, name)
    return int(found.i) if found else default


def _integers(node: NodeProto, name: str) -> list[int]:
    found: Any = attribute(node, name)
    return list(found.ints) if found else []


def _number(node: NodeProto, name: str, default: float) -> float:
    found: Any = attribute(node, name)
    return float(found.f) if found else default
