from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from trtforge.precision.audit import LayerGroup, Share, audit, share
from trtforge.precision.lower import KeepRules, lower


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
