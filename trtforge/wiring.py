"""A model taken apart: which node gives and reads which value, and pieces of it that run on their own."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, external_data_helper, helper, numpy_helper

from trtforge.errors import GraphError
from trtforge.types import Graph

Array = np.ndarray[Any, np.dtype[Any]]
Source = Graph | ModelProto | Path

SMALL_SIZE = 128
"""Elements of a constant that goes with a piece of a model."""


@dataclass(frozen=True, slots=True, eq=False)
class Wiring:
    """A model's main graph by node and value. Control-flow nodes are one node each, with all that their bodies read.

    Attributes:
        model: as it was read; weights in other files stay there.
        weights_dir: the folder of those files; None if all weights are inside.
        label: how messages call the model.
        nodes: of the main graph, in topological order, without Constants.
        names: of the nodes; one without a name is called after what it gives.
        reads: for each node the names of all values it reads, constants too.
        constants: initializers and Constant nodes, by value name.
        inputs, outputs: of the model; initializers are no inputs.
        producer: value -> position in `nodes`.
        readers: value -> positions in `nodes`.
    """

    model: ModelProto
    weights_dir: Path | None
    label: str
    nodes: tuple[NodeProto, ...]
    names: tuple[str, ...]
    reads: tuple[tuple[str, ...], ...]
    constants: dict[str, TensorProto]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    producer: dict[str, int]
    readers: dict[str, tuple[int, ...]]

    def constant(self, name: str) -> Array:
        """The values of a constant."""
        return np.asarray(numpy_helper.to_array(_loaded(self.constants[name], self.weights_dir)))


def wire(source: Source) -> Wiring:
    """Takes a model apart.

    Args:
        source: a graph as ingest gives it, a file, or a model with its weights inside; nodes sorted.

    Raises:
        GraphError: a node reads a value that nothing before it gives.
    """
    model, weights_dir, label = _opened(source)
    graph = model.graph
    constants = {t.name: t if is_large(t) else _loaded(t, weights_dir) for t in graph.initializer}
    constants |= {tensor.values.name: _dense(tensor, tensor.values.name) for tensor in graph.sparse_initializer}
    constants |= {node.output[0]: _constant(node) for node in graph.node if node.op_type == "Constant"}
    nodes = tuple(node for node in graph.node if node.op_type != "Constant")
    inputs = tuple(info.name for info in graph.input if info.name not in constants)
    reads = tuple(_reads(node) for node in nodes)
    producer = {name: place for place, node in enumerate(nodes) for name in node.output if name}
    readers: dict[str, list[int]] = {}
    for place, names in enumerate(reads):
        for name in names:
            readers.setdefault(name, []).append(place)
    wiring = Wiring(
        model=model,
        weights_dir=weights_dir,
        label=label,
        nodes=nodes,
        names=tuple(node.name or f"{node.op_type} of {next(filter(None, node.output), '')}" for node in nodes),
        reads=reads,
        constants=constants,
        inputs=inputs,
        outputs=tuple(info.name for info in graph.output),
        producer=producer,
        readers={name: tuple(places) for name, places in readers.items()},
    )
    _refuse_unsorted(wiring)
    return wiring


def _loaded(tensor: TensorProto, folder: Path | None) -> TensorProto:
    """A tensor with its values inside."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return tensor
    copy = TensorProto()
    copy.CopyFrom(tensor)
    external_data_helper.load_external_data_for_tensor(copy, str(folder or Path.cwd()))
    copy.data_location = TensorProto.DEFAULT
    del copy.external_data[:]
    return copy


def _opened(source: Source) -> tuple[ModelProto, Path | None, str]:
    if isinstance(source, ModelProto):
        return source, None, source.graph.name or "the model"
    if isinstance(source, Path):
        return onnx.load(source, load_external_data=False), source.parent, source.name
    return onnx.load(source.path, load_external_data=False), source.weights_dir, source.source.name


def _constant(node: NodeProto) -> TensorProto:
    """The tensor of a Constant node, under the name of the value it gives."""
    value = node.attribute[0]
    tensor = TensorProto()
    if value.HasField("t"):
        tensor.CopyFrom(value.t)
    elif value.name == "sparse_value":
        tensor.CopyFrom(_dense(value.sparse_tensor, node.output[0]))
    else:
        plain = helper.get_attribute_value(value)
        is_float = value.type in (onnx.AttributeProto.FLOAT, onnx.AttributeProto.FLOATS)
        is_text = value.type in (onnx.AttributeProto.STRING, onnx.AttributeProto.STRINGS)
        dtype: Any = np.float32 if is_float else object if is_text else np.int64
        tensor.CopyFrom(numpy_helper.from_array(np.array(plain, dtype)))
    tensor.name = node.output[0]
    return tensor


def _dense(sparse: Any, name: str) -> TensorProto:
    values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    flat = indices if indices.ndim == 1 else np.ravel_multi_index(tuple(indices.T), dense.shape)
    dense.reshape(-1)[flat] = values
    return numpy_helper.from_array(dense, name)


def bodies(node: NodeProto) -> Iterator[GraphProto]:
    """The graphs that a node carries."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _reads(node: NodeProto) -> tuple[str, ...]:
    names = dict.fromkeys(filter(None, node.input))
    for body in bodies(node):
        names |= dict.fromkeys(_captured(body))
    return tuple(names)


def _captured(body: GraphProto) -> list[str]:
    """Names that a body takes from the graphs around it."""
    own = {info.name for info in body.input} | {tensor.name for tensor in body.initializer}
    own |= {tensor.values.name for tensor in body.sparse_initializer}
    own |= {name for node in body.node for name in node.output}
    read = dict.fromkeys(name for node in body.node for name in _reads(node))
    read |= dict.fromkeys(info.name for info in body.output)
    return [name for name in read if name not in own]


def _refuse_unsorted(wiring: Wiring) -> None:
    for place, names in enumerate(wiring.reads):
        for name in names:
            is_given = name in wiring.constants or name in wiring.inputs
            if not is_given and wiring.producer.get(name, place) >= place:
                raise GraphError(
                    f"{wiring.label}: node '{wiring.names[place]}' reads '{name}', which nothing before it gives",
                    next_step="give the model that trtforge build writes, whose nodes are sorted",
                )


def piece(wiring: Wiring, nodes: Sequence[int], given: Mapping[str, TypeProto], outputs: Iterable[str]) -> ModelProto:
    """A model of some of the nodes, with small constants.

    Args:
        wiring: where the nodes are from.
        nodes: positions, in order.
        given: type of each value that the nodes read and neither constants nor each other give.
        outputs: values to give out. Their types are left to the runtime.
    """
    model = ModelProto(ir_version=wiring.model.ir_version, producer_name="trtforge")
    model.opset_import.extend(wiring.model.opset_import)
    model.functions.extend(wiring.model.functions)
    model.graph.name = wiring.model.graph.name or "piece"
    model.graph.node.extend(wiring.nodes[place] for place in nodes)
    model.graph.initializer.extend(tensor for tensor in constants_of(wiring, nodes) if not is_large(tensor))
    for name, type_ in given.items():
        info = model.graph.input.add()
        info.name = name
        info.type.CopyFrom(type_)
    for name in outputs:
        model.graph.output.add().name = name
    return model


def constants_of(wiring: Wiring, nodes: Iterable[int]) -> list[TensorProto]:
    """The constants that nodes read, each once."""
    read = dict.fromkeys(name for place in nodes for name in wiring.reads[place])
    return [wiring.constants[name] for name in read if name in wiring.constants]


def is_large(tensor: TensorProto) -> bool:
    """Whether a constant is a weight, rather than a size or a setting that inference of shapes may need."""
    return int(math.prod(tensor.dims)) > SMALL_SIZE


def needed(wiring: Wiring, nodes: Collection[int]) -> list[str]:
    """Values that the nodes read and that neither constants nor the nodes themselves give, in order."""
    own = {name for place in nodes for name in wiring.nodes[place].output}
    read = dict.fromkeys(name for place in nodes for name in wiring.reads[place])
    return [name for name in read if name not in own and name not in wiring.constants]
