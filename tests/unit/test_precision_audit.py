from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from trtforge.errors import BuildError, GraphError, Where
from trtforge.precision.audit import LayerGroup, Share, audit, refuse_low_share, refuse_other_types, share
from trtforge.precision.lower import KeepRules, lower
from trtforge.types import NetworkLayers


def parse(text, opset=17, **weights):
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items())
    return model


def zeros(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("text", "weights", "flops"),
    [
        (
            "g (float[N,3,8,8] x) => (float[N,4,6,6] y) { y = Conv(x, w) }",
            {"w": zeros(4, 3, 3, 3)},
            2 * 2 * 4 * 6 * 6 * 27,
        ),
        (
            "g (float[N,4,8,8] x) => (float[N,4,8,8] y) { y = Conv<group = 4>(x, w) }",
            {"w": zeros(4, 1, 1, 1)},
            2 * 2 * 4 * 64,
        ),
        (
            "g (float[N,4,8,8] x) => (float[N,5,9,9] y) { y = ConvTranspose(x, w) }",
            {"w": zeros(4, 5, 2, 2)},
            2 * 2 * 4 * 64 * 20,
        ),
        ("g (float[N,7,5] x) => (float[N,7,6] y) { y = MatMul(x, w) }", {"w": zeros(5, 6)}, 2 * 2 * 7 * 6 * 5),
        ("g (float[N,5] x) => (float[N,6] y) { y = Gemm<transB = 1>(x, w) }", {"w": zeros(6, 5)}, 2 * 2 * 6 * 5),
        (
            "g (float[N,3,5] x) => (float[N,1,3,4] y) { y = LSTM<hidden_size = 4>(x, w, r) }",
            {"w": zeros(1, 16, 5), "r": zeros(1, 16, 4)},
            2 * 2 * 3 * 16 * 9,
        ),
    ],
    ids=["conv", "depthwise", "deconv", "matmul", "gemm", "lstm"],
)
def test_work_at_given_shapes(text, weights, flops):
    model = parse(text, **weights)
    (dims,) = [[dim.dim_value for dim in info.type.tensor_type.shape.dim] for info in model.graph.input]

    (group,) = audit(model, {"x": (2, *dims[1:])})

    assert (group.flops, group.num_unsized, group.dtype) == (flops, 0, "float")


TWO = "g (float[N,4] x) => (float[N,4] y) { [big] a = MatMul(x, w) [small] y = MatMul(a, v) }"


def test_share_of_layers_and_of_work():
    model = parse(TWO, w=np.ones((4, 12), np.float32), v=np.ones((12, 4), np.float32))
    model.graph.node[1].op_type = "Gemm"
    lowered = lower(model, dtype="float16", keep=KeepRules(("small",))).model

    groups = audit(lowered, {"x": (1, 4)})

    assert groups == (
        LayerGroup("Gemm", "float", 1, 96, 0, ("small",)),
        LayerGroup("MatMul", "float16", 1, 96, 0, ("big",)),
    )
    assert share(groups, "float16") == Share(0.5, 0.5)
    assert share(groups, "bfloat16") == Share(0, 0)
    assert share((), "float16") == Share(1, 1)


def test_layers_without_known_sizes_are_counted():
    groups = audit(parse(TWO, w=np.ones((4, 4), np.float32), v=np.ones((4, 4), np.float32)), {})

    assert [(group.num_layers, group.num_unsized, group.flops) for group in groups] == [(2, 2, 0)]
    assert share(groups, "float") == Share(1, None)


def test_a_layer_between_dequantized_operands_computes_in_int8():
    text = """g (float[1,4] x) => (float[1,4] y) {
      q = QuantizeLinear(x, s, z) a = DequantizeLinear(q, s, z) b = DequantizeLinear(w, s, z) y = MatMul(a, b) }"""
    model = parse(text, s=np.float32(0.1), z=np.int8(0), w=np.ones((4, 4), np.int8))

    assert [group.dtype for group in audit(model, {})] == ["int8"]


def test_layers_in_subgraphs_count():
    text = """g (float[2,4] x, bool c) => (float[2,4] y) {
      y = If (c) <then_branch = t () => (float[2,4] p) { p = MatMul(x, w) },
                  else_branch = e () => (float[2,4] q) { q = MatMul(x, w) }> }"""

    assert audit(parse(text, w=np.ones((4, 4), np.float32)), {})[0].flops == 2 * 64


def group(op, dtype, flops, *names, num_unsized=0):
    return LayerGroup(op, dtype, len(names), flops, num_unsized, names)


GROUPS = (
    group("Conv", "float16", 400, "a"),
    group("Conv", "float", 350, "b", "c", "d", "e"),
    group("Gemm", "float", 250, "f"),
)
REASONS = {"b": "keep 'b'", "c": "beyond 65504", "d": "beyond 65504", "f": "beyond 65504"}


@pytest.mark.parametrize(
    ("groups", "least", "most"),
    [
        (GROUPS, 0.4, 0.401),
        ((group("Conv", "float16", 0, "a", num_unsized=1), *GROUPS[1:]), 1 / 6, 0.17),
        ((), 1, None),
        ((group("Conv", "int8", 9, "a"),), 0, 0.001),
    ],
    ids=["work", "layers, where some work is unknown", "no layers", "another low type"],
)
def test_the_least_share(groups, least, most):
    refuse_low_share(groups, "float16", least, {}, None)
    if most is not None:
        with pytest.raises(GraphError):
            refuse_low_share(groups, "float16", most, {}, None)


def test_a_low_share_is_told_with_groups_and_reasons():
    where = Where(Path("spec.yaml"), 3, 1)

    with pytest.raises(GraphError) as caught:
        refuse_low_share(GROUPS, "float16", 0.5, REASONS, where)

    (problem,) = caught.value.problems
    assert problem.where == where
    assert "40.0% of the work (FLOPs)" in problem.summary
    assert problem.detail == (
        "4 Conv in float, 35.0% of the work: 'b', 'c', 'd' and 1 more",
        "1 Gemm in float, 25.0% of the work: 'f'",
        "'c' and 2 more: beyond 65504",
        "'b': keep 'b'",
    )
    assert "min_share: 0.4 " in problem.next_step


def test_a_network_in_wider_types_than_the_graph():
    graph = (group("Conv", "int8", 1, "a", "b"), group("Gemm", "float16", 1, "c"), group("MatMul", "float", 1, "d"))
    inner = NetworkLayers("MATRIX_MULTIPLY", "float32", ("d", "(Unnamed Layer* 7) [Matrix Multiply]"))
    same = (
        NetworkLayers("CONVOLUTION", "int8", ("a", "b")),
        NetworkLayers("MATRIX_MULTIPLY", "float16", ("c",)),
        inner,
    )
    refuse_other_types(graph, same, "engine")
    other = (
        NetworkLayers("CONVOLUTION", "float32", ("b",)),
        NetworkLayers("MATRIX_MULTIPLY", "float32", ("c",)),
        inner,
    )

    with pytest.raises(BuildError) as caught:
        refuse_other_types(graph, other, "engine")

    assert caught.value.problems[0].detail == (
        "'b' (CONVOLUTION): int8 in the graph, float32 in the network",
        "'c' (MATRIX_MULTIPLY): float16 in the graph, float32 in the network",
    )
