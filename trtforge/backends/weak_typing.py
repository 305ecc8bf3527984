"""What a graph computes in FP32, for TensorRT before strong typing, where casts alone do not bind.

The builder of a weakly typed network may run every layer in any type that its flags allow, and takes casts away where
it does. What shall stay FP32 has to be said layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto

_OWN_TYPE: Final = frozenset({"Cast", "Constant", "ConstantOfShape", "QuantizeLinear", "DequantizeLinear", "Identity"})
_MOVES: Final = frozenset({"Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze"})
"""Operators through which a dequantized tensor stays a quantized one for the layer that reads it."""
_FUSED: Final = frozenset({"Add", "BatchNormalization", "Clip", "LeakyRelu", "Mul", "Relu", "Sigmoid"})
"""Operators that TensorRT fuses into the quantized layer before them; bound to FP32, they would stand alone.

Source: TensorRT developer guide, "Working with Quantized Types", Q/DQ layer-placement recommendations.
"""


def float32_tensors(model_path: Path) -> dict[str, str]:
    """Every tensor that a node computes -> the node's name if it shall stay FP32, else "".

    FP32 are the tensors that the graph's types say so, without those of casts and constants, and without those of
    layers that read quantized tensors and what is fused into them: they take no precision of their own.

    Raises:
        OSError: the file cannot be read.
    """
    model = onnx.load(model_path, load_external_data=False)
    typed = onnx.shape_inference.infer_shapes(model)
    return {
        name: node.name if is_float32 and not is_free else ""
        for graph in _graphs(typed.graph)
        for name, node, is_float32, is_free in _tensors(graph)
    }


def _graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """`graph` and all that its control-flow nodes hold."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from _graphs(attribute.g)


def _tensors(graph: GraphProto) -> Iterator[tuple[str, NodeProto, bool, bool]]:
    """(tensor, its node, whether it is FP32, whether TensorRT chooses its type) of each node's outputs."""
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}
    dequantized: set[str] = set()
    computed_from: set[str] = set()
    for node in graph.node:
        reads_quantized = any(name in dequantized for name in node.input)
        is_fused = node.op_type in _FUSED and any(name in computed_from for name in node.input)
        if node.op_type == "DequantizeLinear" or (reads_quantized and node.op_type in _MOVES):
            dequantized.update(node.output)
        elif reads_quantized or is_fused:
            computed_from.update(node.output)
        is_free = reads_quantized or is_fused or node.op_type in _OWN_TYPE
        for name in filter(None, node.output):
            yield name, node, types.get(name) == TensorProto.FLOAT, is_free
