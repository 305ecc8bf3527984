"""Puts nodes into an order and under names that every later stage can rely on. Value names never change."""

from __future__ import annotations

import heapq
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from onnx import GraphProto, ModelProto, NodeProto

from trtforge.errors import Problem, Where, closest
from trtforge.graph.model_file import graph_problem, initializer_names, label, listed, subgraphs

_MAX_COMPARED = 2000
_EXPORT_AGAIN = "export the model again and look at it with check-model, which the onnx package installs"


@dataclass(frozen=True, slots=True)
class _Body:
    """What a graph and a local function have in common; `outer` maps the names that the graphs around it give."""

    scope: str
    nodes: Any
    inputs: tuple[str, ...]
    initializers: tuple[str, ...]
    outputs: tuple[str, ...]
    outer: Mapping[str, int | None]

    @property
    def inside(self) -> str:
        """Where it is, to end a message with."""
        return f" in {self.scope}" if self.scope else ""


def sort_nodes(model: ModelProto, at: Where) -> tuple[int, list[Problem]]:
    """Puts the nodes of every graph and function into topological order, in place.

    Nodes keep the file's order wherever that is legal. A subgraph may read values of the graphs around it, so its owner
    comes after whatever produces those. Sorting a sorted model changes nothing.

    Returns:
        The number of nodes that another node overtook, and all problems: values produced twice, values read and
        produced nowhere, cycles. With problems, the order is not complete.
    """
    problems: list[Problem] = []
    moved = _sort(_graph_body(model.graph, "", {}), problems, at)
    for function in model.functions:
        body = _Body(f"function {function.name}", function.node, tuple(function.input), (), tuple(function.output), {})
        moved += _sort(body, problems, at)
    return moved, problems


def _graph_body(graph: GraphProto, scope: str, outer: Mapping[str, int | None]) -> _Body:
    inputs = tuple(value.name for value in graph.input)
    outputs = tuple(value.name for value in graph.output)
    return _Body(scope, graph.node, inputs, tuple(initializer_names(graph)), outputs, outer)


def _sort(body: _Body, problems: list[Problem], at: Where) -> int:
    producers, repeated = _producers(body)
    problems += (graph_problem(what, _EXPORT_AGAIN, at) for what in repeated)
    given = dict.fromkeys((*body.inputs, *body.initializers))
    visible: Mapping[str, int | None] = ChainMap({**given, **producers}, body.outer)  # type: ignore[arg-type]
    problems += (_unknown(what, name, visible, at) for what, name in _reads(body) if name not in visible)
    moved = 0
    for node in body.nodes:
        for attribute, graph in subgraphs(node):
            scope = f"{body.scope}/{node.name or node.op_type}/{attribute}".lstrip("/")
            moved += _sort(_graph_body(graph, scope, visible), problems, at)
    order, cycle = _topological_order([_producers_read(node, producers) for node in body.nodes])
    if cycle:
        names = ", ".join(label(body.nodes[index]) for index in cycle)
        problems.append(graph_problem(f"nodes wait for each other in a cycle{body.inside}: {names}", _EXPORT_AGAIN, at))
    elif order != sorted(order):
        in_order = [body.nodes[index] for index in order]
        del body.nodes[:]
        body.nodes.extend(in_order)
        moved += _overtaken(order)
    return moved


def _producers(body: _Body) -> tuple[dict[str, int], list[str]]:
    """Value -> position of its node, and a sentence for each value that has more than one source."""
    given = {*body.inputs, *body.initializers}
    repeated = [
        f"value '{name}' is declared twice{body.inside}"
        for names in (body.inputs, body.initializers)
        for name in _repeated(names)
    ]
    producers: dict[str, int] = {}
    for index, node in enumerate(body.nodes):
        for name in filter(None, node.output):
            if name in producers or name in given:
                first = f"node {label(body.nodes[producers[name]])}" if name in producers else "an input or initializer"
                repeated.append(f"value '{name}' is produced twice{body.inside}: by {first} and by node {label(node)}")
            producers.setdefault(name, index)
    return producers, repeated


def _reads(body: _Body) -> Iterator[tuple[str, str]]:
    """(who reads it, value) for all nodes and for the body's outputs."""
    for node in body.nodes:
        for name in dict.fromkeys(filter(None, node.input)):
            yield f"node {label(node)}{body.inside} reads '{name}'", name
    for name in body.outputs:
        yield f"output '{name}'{body.inside} is declared", name


def _repeated(names: Iterable[str]) -> list[str]:
    seen: set[str] = set()
    return [name for name in names if name in seen or seen.add(name)]  # type: ignore[func-returns-value]


def _unknown(what: str, name: str, visible: Iterable[str], at: Where) -> Problem:
    near = closest(name, islice(visible, _MAX_COMPARED))
    hint = f"correct '{name}' to '{near}', or {_EXPORT_AGAIN}" if near else _EXPORT_AGAIN
    return graph_problem(f"{what}, but nothing produces that value", hint, at)


def _producers_read(node: NodeProto, producers: Mapping[str, int]) -> set[int]:
    return {producers[name] for name in _names_read(node) if name in producers}


def _names_read(node: NodeProto) -> set[str]:
    """Names that `node` reads, its subgraphs' reads of values around them included."""
    names = set(node.input)
    for _, graph in subgraphs(node):
        inside = {name for inner in graph.node for name in _names_read(inner)}
        inside.update(value.name for value in graph.output)
        defined = {name for inner in graph.node for name in inner.output}
        defined.update(value.name for value in graph.input)
        defined.update(initializer_names(graph))
        names |= inside - defined
    return names


def _topological_order(needs: list[set[int]]) -> tuple[list[int], list[int]]:
    """(order, cycle): positions such that each comes after all it needs, the lowest first; or positions of one cycle."""
    waiting = [len(need) for need in needs]
    needed_by: list[list[int]] = [[] for _ in needs]
    for index, need in enumerate(needs):
        for other in need:
            needed_by[other].append(index)
    ready = [index for index, count in enumerate(waiting) if count == 0]
    order: list[int] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for other in needed_by[index]:
            waiting[other] -= 1
            if waiting[other] == 0:
                heapq.heappush(ready, other)
    return order, _cycle(needs, set(range(len(needs))) - set(order))


def _cycle(needs: list[set[int]], stuck: set[int]) -> list[int]:
    """One cycle among `stuck`, of which each needs another one of them; empty if none is stuck."""
    path: list[int] = []
    index = min(stuck, default=None)
    while index is not None and index not in path:
        path.append(index)
        index = min(needs[index] & stuck)
    return path[path.index(index) :][::-1] if index is not None else []


def _overtaken(order: list[int]) -> int:
    """How many positions in `order` come after a higher one."""
    count, highest = 0, -1
    for index in order:
        count += index < highest
        highest = max(highest, index)
    return count


def name_nodes(model: ModelProto) -> tuple[str, ...]:
    """Gives a unique name to each node that has none or shares one, in place; call after `sort_nodes`.

    Names are unique across the main graph and all its subgraphs, and within each local function. The first of several
    equal names stays; others get `_1`, `_2`. A nameless node becomes its operator and position, such as `Relu_3`. The
    same file always gets the same names, and a named model is not changed.

    Returns:
        The new names.
    """
    renamed: list[str] = []
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        _name_list("", nodes, {node.name for node in _walk(nodes)}, set(), renamed)
    return tuple(renamed)


def _walk(nodes: Any) -> Iterator[NodeProto]:
    for node in nodes:
        yield node
        for _, graph in subgraphs(node):
            yield from _walk(graph.node)


def _name_list(prefix: str, nodes: Any, taken: set[str], seen: set[str], renamed: list[str]) -> None:
    """Names one list of nodes, then what is inside each: an inner name may be built from its owner's."""
    for position, node in enumerate(nodes):
        if not node.name or node.name in seen:
            node.name = _free(node.name or f"{prefix}{node.op_type}_{position}", taken)
            taken.add(node.name)
            renamed.append(node.name)
        seen.add(node.name)
    for node in nodes:
        for attribute, graph in subgraphs(node):
            _name_list(f"{node.name}/{attribute}/", graph.node, taken, seen, renamed)


def _free(wish: str, taken: set[str]) -> str:
    if wish not in taken:
        return wish
    number = 1
    while f"{wish}_{number}" in taken:
        number += 1
    return f"{wish}_{number}"


def unname_dims(model: ModelProto) -> int:
    """Takes the symbol "?" off every dimension, in place, and counts them.

    Paddle2ONNX writes it for each open size, equal or not, and TensorRT takes dimensions of one name to be equal.
    """
    values = (*model.graph.input, *model.graph.output, *model.graph.value_info)
    dims = [dim for value in values for dim in value.type.tensor_type.shape.dim if dim.dim_param == "?"]
    for dim in dims:
        dim.ClearField("dim_param")
    return len(dims)


def mend(model: ModelProto, at: Where) -> tuple[list[str], list[Problem]]:
    """Sorts and names the nodes of `model` in place, and takes names off dimensions that have none.

    Returns:
        A note for each kind of change, and the problems of `sort_nodes`.
    """
    moved, problems = sort_nodes(model, at)
    renamed = name_nodes(model)
    unnamed = unname_dims(model)
    notes = []
    if unnamed:
        notes.append(f"took the symbol '?' off {unnamed} dimension{'s' * (unnamed != 1)}, which need not be equal")
    if moved:
        notes.append(f"put {moved} node{'s' * (moved != 1)} into topological order")
    if renamed:
        notes.append(f"renamed {len(renamed)} node{'s' * (len(renamed) != 1)} without a unique name: {listed(renamed)}")
    return notes, problems
