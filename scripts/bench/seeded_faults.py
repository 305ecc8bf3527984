"""Faults put into models on purpose, for the benchmark and the tests of bisecting, and an encoder to put them into."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

Array = np.ndarray[Any, np.dtype[Any]]
LENGTH = 37
"""The only size at which a fault of one length shows."""
_SWAPS = {
    "Add": "Sub",
    "Sub": "Add",
    "Mul": "Add",
    "Div": "Mul",
    "Relu": "Sigmoid",
    "Sigmoid": "Tanh",
    "Tanh": "Sigmoid",
}
_SCALED = {"BatchNormalization": 1, "Conv": 1, "Gemm": 1, "LayerNormalization": 1, "MatMul": 1, "Mul": 1}


@dataclass(frozen=True, slots=True)
class Fault:
    """A model with one fault.

    Attributes:
        kind: one of `KINDS`.
        nodes: the node at fault; those that read it where the fault is in a shared constant.
    """

    kind: str
    nodes: frozenset[str]
    model: ModelProto


def seed_fault(model: ModelProto, kind: str, rng: np.random.Generator, axis: tuple[str, int]) -> Fault | None:
    """One fault at a random node.

    Args:
        model: with unique node names; not changed.
        kind: one of `KINDS`.
        rng: decides where.
        axis: input and axis that a fault of one length looks at.

    Returns:
        None if the model has no node for it.
    """
    faulty = ModelProto()
    faulty.CopyFrom(model)
    nodes = KINDS[kind](faulty.graph, rng, axis)
    return Fault(kind, frozenset(nodes), faulty) if nodes else None


def _pick(rng: np.random.Generator, found: list[Any]) -> Any:
    return found[int(rng.integers(len(found)))] if found else None


def _constants(graph: GraphProto) -> dict[str, TensorProto]:
    found = {tensor.name: tensor for tensor in graph.initializer}
    return found | {node.output[0]: node.attribute[0].t for node in graph.node if node.op_type == "Constant"}


def _is_float(tensor: TensorProto | None) -> bool:
    return tensor is not None and tensor.data_type == TensorProto.FLOAT and bool(np.prod(tensor.dims) > 0)


def _replace(graph: GraphProto, name: str, values: Array) -> set[str]:
    """Gives a constant other values, and names the nodes that read it."""
    tensor = _constants(graph)[name]
    changed = numpy_helper.from_array(values.astype(np.float32), tensor.name)
    tensor.CopyFrom(changed)
    return {node.name for node in graph.node if name in node.input}


def _wrong_transpose(graph: GraphProto, rng: np.random.Generator, _: tuple[str, int]) -> set[str]:
    # A Conv of another number of channels than its weights makes onnxruntime 1.32 abort the process.
    convolved = {name for node in graph.node if node.op_type == "Conv" for name in node.input}
    nodes = [node for node in graph.node if node.op_type == "Transpose" and node.output[0] not in convolved]
    node = _pick(rng, nodes)
    if node is None:
        return set()
    perm = node.attribute[0].ints
    first, second = rng.choice(len(perm), 2, replace=False)
    perm[first], perm[second] = perm[second], perm[first]
    return {node.name}


def _wrong_constant(graph: GraphProto, rng: np.random.Generator, _: tuple[str, int]) -> set[str]:
    constants = _constants(graph)
    read = sorted({name for node in graph.node for name in node.input if _is_float(constants.get(name))})
    name = _pick(rng, read)
    return _replace(graph, name, numpy_helper.to_array(constants[name]) * 1.01) if name else set()


def _corrupt_scale(graph: GraphProto, rng: np.random.Generator, _: tuple[str, int]) -> set[str]:
    constants = _constants(graph)
    places = [(node, _SCALED[node.op_type]) for node in graph.node if node.op_type in _SCALED]
    names = [node.input[place] for node, place in places if _is_float(constants.get(node.input[place]))]
    name = _pick(rng, names)
    if name is None:
        return set()
    values = numpy_helper.to_array(constants[name]).copy()
    values.reshape(-1)[int(rng.integers(values.size)) :: 7] *= 3
    return _replace(graph, name, values)


def _one_length(graph: GraphProto, rng: np.random.Generator, axis: tuple[str, int]) -> set[str]:
    nodes = [node for node in graph.node if node.op_type in ("Add", "Conv", "Gemm", "LSTM", "MatMul", "Mul", "Relu")]
    node = _pick(rng, [node for node in nodes if _is_float_result(graph, node)])
    if node is None:
        return set()
    result = node.output[0]
    node.output[0] = f"{result}_right"
    graph.initializer.extend(
        [
            numpy_helper.from_array(np.array(axis[1], np.int64), "fault_axis"),
            numpy_helper.from_array(np.array(LENGTH, np.int64), "fault_length"),
            numpy_helper.from_array(np.array(1.5, np.float32), "fault_scale"),
        ]
    )
    added = [
        helper.make_node("Shape", [axis[0]], ["fault_shape"], name="fault_shape"),
        helper.make_node("Gather", ["fault_shape", "fault_axis"], ["fault_size"], name="fault_size"),
        helper.make_node("Equal", ["fault_size", "fault_length"], ["fault_is_it"], name="fault_is_it"),
        helper.make_node("Mul", [node.output[0], "fault_scale"], ["fault_wrong"], name="fault_wrong"),
        helper.make_node("Where", ["fault_is_it", "fault_wrong", node.output[0]], [result], name="fault_where"),
    ]
    place = list(graph.node).index(node)
    for number, new in enumerate(added):
        graph.node.insert(place + 1 + number, new)
    return {node.name}


def _is_float_result(graph: GraphProto, node: NodeProto) -> bool:
    """Whether a node surely works on floats: it reads a float constant, or an operator that knows no other does."""
    constants = _constants(graph)
    return node.op_type in ("Conv", "Gemm", "LSTM") or any(_is_float(constants.get(name)) for name in node.input)


def _swapped_operator(graph: GraphProto, rng: np.random.Generator, _: tuple[str, int]) -> set[str]:
    node = _pick(rng, [node for node in graph.node if node.op_type in _SWAPS])
    if node is None:
        return set()
    node.op_type = _SWAPS[node.op_type]
    return {node.name}


def _dropped_bias(graph: GraphProto, rng: np.random.Generator, _: tuple[str, int]) -> set[str]:
    constants = _constants(graph)
    with_bias = [node for node in graph.node if node.op_type in ("Conv", "Gemm") and len(node.input) > 2]  # noqa: PLR2004
    sums = [node for node in graph.node if node.op_type == "Add" and _bias(node, constants) is not None]
    outputs = {info.name for info in graph.output}
    node = _pick(rng, [*with_bias, *(node for node in sums if node.output[0] not in outputs)])
    if node is None:
        return set()
    if node.op_type != "Add":
        del node.input[2]
        return {node.name}
    kept = node.input[1 - (_bias(node, constants) or 0)]
    for reader in graph.node:
        reader.input[:] = [kept if name == node.output[0] else name for name in reader.input]
    name = node.name
    graph.node.remove(node)
    return {name}


def _bias(node: NodeProto, constants: dict[str, TensorProto]) -> int | None:
    places = [place for place, name in enumerate(node.input) if _is_float(constants.get(name))]
    return places[0] if len(places) == 1 else None


def _wrong_softmax(graph: GraphProto, rng: np.random.Generator, _: tuple[str, int]) -> set[str]:
    node = _pick(rng, [node for node in graph.node if node.op_type in ("Softmax", "LogSoftmax")])
    if node is None:
        return set()
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("axis", int(rng.integers(2))))
    return {node.name}


def _wrong_bound(graph: GraphProto, rng: np.random.Generator, _: tuple[str, int]) -> set[str]:
    constants = _constants(graph)
    bounds = [name for node in graph.node if node.op_type == "Clip" for name in node.input[1:] if name in constants]
    name = _pick(rng, bounds)
    return _replace(graph, name, numpy_helper.to_array(constants[name]) * 0.5 + 0.25) if name else set()


KINDS: dict[str, Callable[[GraphProto, np.random.Generator, tuple[str, int]], set[str]]] = {
    "wrong transpose": _wrong_transpose,
    "constant off by 1 %": _wrong_constant,
    "corrupt scale": _corrupt_scale,
    "only at length 37": _one_length,
    "operator swapped": _swapped_operator,
    "bias dropped": _dropped_bias,
    "wrong softmax axis": _wrong_softmax,
    "wrong clip bound": _wrong_bound,
}


def encoder(num_layers: int, hidden: int, num_heads: int, num_words: int, seed: int) -> ModelProto:
    """A BERT encoder as exporters write it, with seeded weights.

    Inputs `input_ids` and `attention_mask` (batch, length) int64, output `hidden` (batch, length, hidden) float32.
    """
    builder = _Encoder(np.random.default_rng(seed), hidden, num_heads)
    sizes = ["batch", "length"]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, sizes) for name in ("input_ids", "attention_mask")]
    output = helper.make_tensor_value_info("hidden", TensorProto.FLOAT, [*sizes, hidden])
    value = builder.embed(num_words)
    for layer in range(num_layers):
        value = builder.layer(f"/layer.{layer}", value)
    builder.node("Identity", [value], "/output", output="hidden")
    graph = helper.make_graph(builder.nodes, "encoder", inputs, [output], builder.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


class _Encoder:
    def __init__(self, rng: np.random.Generator, hidden: int, num_heads: int) -> None:
        self.rng, self.hidden, self.num_heads = rng, hidden, num_heads
        self.nodes: list[NodeProto] = []
        self.weights: list[TensorProto] = []

    def node(self, op: str, inputs: list[str], name: str, output: str = "", **attributes: Any) -> str:
        output = output or f"{name}_output"
        self.nodes.append(helper.make_node(op, inputs, [output], name=name, **attributes))
        return output

    def constant(self, name: str, values: Any, dtype: Any = np.float32) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def random(self, name: str, *shape: int, mean: float = 0.0, spread: float = 0.05) -> str:
        return self.constant(name, mean + spread * self.rng.standard_normal(shape, dtype=np.float32))

    def embed(self, num_words: int) -> str:
        words = self.node("Gather", [self.random("words", num_words, self.hidden, spread=1), "input_ids"], "/words")
        mask = self.node("Cast", ["attention_mask"], "/mask/cast", to=TensorProto.FLOAT)
        mask = self.node("Unsqueeze", [mask, self.constant("mask_axes", [1, 2], np.int64)], "/mask/unsqueeze")
        mask = self.node("Sub", [self.constant("one", 1.0), mask], "/mask/sub")
        self.node("Mul", [mask, self.constant("lowest", np.finfo(np.float32).min)], "/mask/mul", output="mask")
        self.constant("heads", [0, 0, self.num_heads, self.hidden // self.num_heads], np.int64)
        self.constant("joined", [0, 0, self.hidden], np.int64)
        self.constant("half", 0.5)
        self.constant("root_two", np.sqrt(2))
        return self.norm("/norm", words)

    def norm(self, name: str, value: str) -> str:
        scale = self.random(f"{name}.weight", self.hidden, mean=1)
        return self.node("LayerNormalization", [value, scale, self.random(f"{name}.bias", self.hidden)], name, axis=-1)

    def dense(self, name: str, value: str, width: int, out: int) -> str:
        value = self.node("MatMul", [value, self.random(f"{name}.weight", width, out)], f"{name}/MatMul")
        return self.node("Add", [self.random(f"{name}.bias", out), value], f"{name}/Add")

    def heads(self, name: str, value: str, perm: list[int]) -> str:
        value = self.dense(name, value, self.hidden, self.hidden)
        value = self.node("Reshape", [value, "heads"], f"{name}/Reshape")
        return self.node("Transpose", [value], f"{name}/Transpose", perm=perm)

    def layer(self, name: str, value: str) -> str:
        query = self.heads(f"{name}/query", value, [0, 2, 1, 3])
        key = self.heads(f"{name}/key", value, [0, 2, 3, 1])
        scores = self.node("MatMul", [query, key], f"{name}/MatMul")
        scale = self.constant(f"{name}.scale", np.sqrt(self.hidden / self.num_heads))
        scores = self.node("Div", [scores, scale], f"{name}/Div")
        scores = self.node("Softmax", [self.node("Add", [scores, "mask"], f"{name}/Add")], f"{name}/Softmax", axis=-1)
        mixed = self.node("MatMul", [scores, self.heads(f"{name}/value", value, [0, 2, 1, 3])], f"{name}/MatMul_1")
        mixed = self.node("Transpose", [mixed], f"{name}/Transpose", perm=[0, 2, 1, 3])
        mixed = self.node("Reshape", [mixed, "joined"], f"{name}/Reshape")
        mixed = self.dense(f"{name}/attention", mixed, self.hidden, self.hidden)
        value = self.norm(f"{name}/attention/norm", self.node("Add", [mixed, value], f"{name}/attention/residual"))
        wide = self.dense(f"{name}/wide", value, self.hidden, 4 * self.hidden)
        erf = self.node("Erf", [self.node("Div", [wide, "root_two"], f"{name}/gelu/Div")], f"{name}/gelu/Erf")
        gelu = self.node("Mul", [wide, self.node("Add", [erf, "one"], f"{name}/gelu/Add")], f"{name}/gelu/Mul")
        narrow = self.dense(
            f"{name}/narrow", self.node("Mul", [gelu, "half"], f"{name}/gelu/Mul_1"), 4 * self.hidden, self.hidden
        )
        return self.norm(f"{name}/norm", self.node("Add", [narrow, value], f"{name}/residual"))


def faults(
    model: ModelProto, seed: int, axis: tuple[str, int], shows: Callable[[ModelProto], bool], num_draws: int = 20
) -> Iterator[Fault]:
    """A fault of each kind that the model has a node for and that `shows`, with what `shows` by chance drawn again."""
    for number, kind in enumerate(KINDS):
        rng = np.random.default_rng([seed, number])
        for _ in range(num_draws):
            fault = seed_fault(model, kind, rng, axis)
            if fault is None:
                break
            if shows(fault.model):
                yield fault
                break
