"""Each node of a model with the values it reads and writes, resolved across subgraphs."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trtforge.graph.model_file import domain_of, subgraphs


@dataclass(slots=True, eq=False)
class Value:
    """A tensor of one graph.

    Attributes:
        tensor: its values, for an initializer or the output of a Constant node.
        elem_type: of a graph input; 0 where it is not declared there.
        writer: the node that gives it.
        readers: (node, position among its inputs), in graph order.
        is_output: whether a graph, or a body, gives it back.
    """

    name: str
    tensor: TensorProto | None = None
    elem_type: int = 0
    writer: Site | None = None
    readers: list[tuple[Site, int]] = field(default_factory=list)
    is_output: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A node where it stands.

    Attributes:
        op: operator name, with the domain before it unless that is the standard one.
        scope: "" for the main graph, else the path of control-flow nodes, such as `n3/then_branch`.
        reads: None for an optional input left out.
    """

    node: NodeProto
    op: str
    graph: GraphProto
    scope: str
    reads: tuple[Value | None, ...]
    writes: tuple[Value, ...]

    def read(self, position: int) -> Value | None:
        """The value at `position` of the inputs, None if it is left out."""
        return self.reads[position] if position < len(self.reads) else None

    def attribute(self, name: str, default: Any) -> Any:
        """The value of an attribute."""
        return next((helper.get_attribute_value(a) for a in self.node.attribute if a.name == name), default)


def sites_of(model: ModelProto) -> tuple[Site, ...]:
    """All nodes of a sorted model without local functions, in graph order, each before the nodes inside it."""
    return tuple(_open(model.graph, {}, ""))


def _open(graph: GraphProto, outer: MutableMapping[str, Value], scope: str) -> Iterator[Site]:
    visible = ChainMap({}, outer)
    for info in graph.input:
        visible[info.name] = Value(info.name, elem_type=info.type.tensor_type.elem_type)
    for tensor in graph.initializer:
        visible[tensor.name] = Value(tensor.name, tensor=tensor)
    for sparse in graph.sparse_initializer:
        visible[sparse.values.name] = Value(sparse.values.name)
    for node in graph.node:
        reads = tuple(visible.setdefault(name, Value(name)) if name else None for name in node.input)
        writes = tuple(Value(name, tensor=_constant(node)) for name in node.output)
        site = Site(node, f"{domain_of(node.domain)}.{node.op_type}".lstrip("."), graph, scope, reads, writes)
        for position, value in enumerate(reads):
            if value:
                value.readers.append((site, position))
        yield site
        for attribute, body in subgraphs(node):
            yield from _open(body, visible, f"{scope}/{node.name}/{attribute}".lstrip("/"))
        for value in writes:
            value.writer = site
            visible[value.name] = value
    for info in graph.output:
        if info.name in visible:
            visible[info.name].is_output = True


def _constant(node: NodeProto) -> TensorProto | None:
    if node.op_type != "Constant" or domain_of(node.domain):
        return None
    for attribute in node.attribute:
        if attribute.type == AttributeProto.TENSOR:
            tensor: TensorProto = attribute.t
            return tensor
        if attribute.type in (AttributeProto.FLOAT, AttributeProto.FLOATS):
            return numpy_helper.from_array(np.array(helper.get_attribute_value(attribute), np.float32))
    return None


def constant_of(value: Value | None) -> TensorProto | None:
    """The constant that `value` is, through Identity too; None if it is computed or given by the caller."""
    while value and value.tensor is None and value.writer and value.writer.op == "Identity":
        value = value.writer.read(0)
    return value.tensor if value else None


def array_of(tensor: TensorProto, folder: Path) -> NDArray[Any]:
    """The values of a tensor; `folder` is where external data lies, checked before by `tensor_problems`."""
    return numpy_helper.to_array(tensor, base_dir=str(folder))
