"""Folding, judged by running both models in ONNX's own reference evaluator, and by what is left of them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper
from onnx.external_data_helper import convert_model_to_external_data
from onnx.reference import ReferenceEvaluator

from trtforge.precision.fold import fold
from trtforge.precision.policy import KeepRules

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def positive(*shape):
    return RNG.uniform(0.5, 2, shape).astype(np.float32)


def parse(text, **weights):
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {text}')
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items())
    for number, node in enumerate(model.graph.node):
        node.name = node.name or f"n{number}"
    return model


def gone(folded):
    return folded.num_moves + folded.num_folded


def folded(model, **arguments):
    """(number of nodes gone, operators left, largest difference of outputs relative to the largest output)."""
    feeds = {
        info.name: normal(*(dim.dim_value or 2 for dim in info.type.tensor_type.shape.dim))
        for info in model.graph.input
    }
    before = ReferenceEvaluator(model).run(None, feeds)
    count = gone(fold(model, **arguments))
    onnx.checker.check_model(model, full_check=True)
    after = ReferenceEvaluator(model).run(None, feeds)
    assert [one.shape for one in before] == [one.shape for one in after]
    difference = max(np.abs(one - other).max() / np.abs(one).max() for one, other in zip(before, after, strict=True))
    return count, [node.op_type for node in model.graph.node], difference


BATCH_NORM = {"g": positive(4), "o": normal(4), "m": normal(4), "v": positive(4)}
CHANNELS = normal(4, 1, 1)
CASES = {
    "batch normalization": (
        "(float[N,3,8,8] x) => (float[N,4,6,6] y) { h = Conv(x, w, b) y = BatchNormalization<epsilon = 0.1>(h, g, o, m, v) }",
        {"w": normal(4, 3, 3, 3), "b": normal(4), **BATCH_NORM},
        1,
        ["Conv"],
    ),
    "no bias, depthwise": (
        "(float[N,4,8,8] x) => (float[N,4,6,6] y) { h = Conv<group = 4>(x, w) y = BatchNormalization(h, g, o, m, v) }",
        {"w": normal(4, 1, 3, 3), **BATCH_NORM},
        1,
        ["Conv"],
    ),
    "transposed": (
        """(float[N,6,5,5] x) => (float[N,4,6,6] y) { h = ConvTranspose(x, w)
           k = Add(h, c) y = BatchNormalization(k, g, o, m, v) }""",
        {"w": normal(6, 4, 2, 2), "c": CHANNELS[None], **BATCH_NORM},
        2,
        ["ConvTranspose"],
    ),
    "every arithmetic": (
        """(float[N,3,8,8] x) => (float[N,4,6,6] y) { h = Conv(x, w, b) i = Mul(c, h) j = Sub(two, i)
           k = Div(j, c2) l = Sub(k, c) y = Add(l, two) }""",
        {"w": normal(4, 3, 3, 3), "b": normal(4), "c": CHANNELS, "c2": positive(1, 4, 1, 1), "two": np.float32(2)},
        5,
        ["Conv"],
    ),
    "gemm": (
        "(float[N,5] x) => (float[N,4] y) { h = Gemm<transB = 1, alpha = 0.5, beta = 2.0>(x, w, b) i = Mul(h, c) y = Add(i, c) }",
        {"w": normal(4, 5), "b": normal(4), "c": normal(4)},
        2,
        ["Gemm"],
    ),
    "gemm, scalar bias": (
        "(float[N,5] x) => (float[N,4] y) { h = Gemm(x, w, b) y = BatchNormalization(h, g, o, m, v) }",
        {"w": normal(5, 4), "b": np.float32(3), **BATCH_NORM},
        1,
        ["Gemm"],
    ),
    "matmul keeps a sum": (
        "(float[N,3,5] x) => (float[N,3,4] y) { h = MatMul(x, w) i = Add(h, b) j = Mul(i, c) y = Add(j, b) }",
        {"w": normal(5, 4), "b": normal(4), "c": normal(4)},
        2,
        ["MatMul", "Add"],
    ),
    "copies of a constant": (
        """(float[N,3,8,8] x) => (float[N,4,6,6] y) { copy = Identity(b) again = Identity(copy)
           h = Conv(x, w, copy) i = Add(h, c) y = Mul(i, i) z = Mul(again, again) }""",
        {"w": normal(4, 3, 3, 3), "b": normal(4), "c": CHANNELS},
        3,
        ["Conv", "Mul", "Mul"],
    ),
    "a bias that is reshaped": (
        """(float[N,3,8,8] x) => (float[N,4,6,6] y) { again = Identity(b) c = Reshape(again, shape)
           h = Conv(x, w) y = Add(h, c) }""",
        {"w": normal(4, 3, 3, 3), "b": normal(4), "shape": np.array([1, -1, 1, 1])},
        3,
        ["Conv"],
    ),
    "weights that are transposed": (
        """(float[N,5] x) => (float[N,4] y) { v = Transpose(w) u = Unsqueeze(v, axes) t = Squeeze(u)
           s = Reshape<allowzero = 0>(t, same) h = MatMul(x, s) y = Mul(h, c) }""",
        {"w": normal(4, 5), "c": normal(4), "axes": np.array([-1, 0]), "same": np.array([0, -1])},
        5,
        ["MatMul"],
    ),
    "a row without a layer": (
        "(float[N,4] x) => (float[N,4] y) { h = Relu(x) i = Div(h, six) j = Mul(c, i) k = Add(j, c) y = Sub(k, six) }",
        {"c": normal(4), "six": np.float32(6)},
        2,
        ["Relu", "Mul", "Add"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_folded_computes_the_same(name):
    text, weights, num_gone, left = CASES[name]
    model = parse(text, **weights)

    count, operators, difference = folded(model)

    assert (count, operators) == (num_gone, left)
    assert difference < 2e-6
    read = {name for node in model.graph.node for name in node.input}
    assert {tensor.name for tensor in model.graph.initializer} <= read, "constants that nothing reads are gone"


CONV = "h = Conv(x, w, b)"
W = {"w": normal(4, 3, 3, 3), "b": normal(4)}
LEFT_ALONE = {
    "a copy that is an output": (f"(float[N,3,8,8] x) => (float[N,4,6,6] h, float[4] d) {{ {CONV} d = Identity(b) }}", {}),
    "a reshape that is none": (
        "(float[N,3,8,8] x) => (float[N,4,6,6] y) { d = Reshape(b, shape) e = Relu(d) y = Conv(x, w, b) }",
        {"shape": np.array([3, 5])},
    ),
    "large weights in two shapes": (
        "(float[N,3] x) => (float[N,30000] y, float[30000,N] z) { v = Transpose(big) y = MatMul(x, v) u = Transpose(x) z = MatMul(big, u) }",
        {"big": normal(30000, 3)},
    ),
    "a bias of integers": (
        "(float[N,3,8,8] x) => (float[N,4,6,6] y) { d = Squeeze(n) e = Cast<to = 1>(d) y = Conv(x, w, e) }",
        {"n": np.ones((1, 4), np.int64)},
    ),
    "a copy of what others may set": (
        "(float[N,3,8,8] x, float[4] c) => (float[N,4,6,6] y) { d = Identity(c) y = Conv(x, w, d) }",
        {},
    ),
    "read twice": (f"(float[N,3,8,8] x) => (float[N,4,6,6] y) {{ {CONV} i = Mul(h, c) y = Add(i, h) }}", {"c": CHANNELS}),
    "an output": (f"(float[N,3,8,8] x) => (float[N,4,6,6] h, float[N,4,6,6] y) {{ {CONV} y = Mul(h, c) }}", {"c": CHANNELS}),
    "along another axis": (f"(float[N,3,8,8] x) => (float[N,4,6,6] y) {{ {CONV} y = Mul(h, c) }}", {"c": normal(6)}),
    "along the wrong axis": (
        "(float[N,3,6,6] x) => (float[N,4,4,4] y) { h = Conv(x, w, b) y = Mul(h, c) }",
        {"c": normal(4)},
    ),
    "more axes than the result": (
        f"(float[N,3,8,8] x) => (float[1,N,4,6,6] y) {{ {CONV} y = Mul(h, c) }}",
        {"c": normal(1, 1, 4, 1, 1)},
    ),
    "an input that others may set": (
        f"(float[N,3,8,8] x, float[4,1,1] c) => (float[N,4,6,6] y) {{ {CONV} y = Mul(h, c) }}",
        {},
    ),
    "a division by the result": (f"(float[N,3,8,8] x) => (float[N,4,6,6] y) {{ {CONV} y = Div(c, h) }}", {"c": CHANNELS}),
    "beyond FP16": (f"(float[N,3,8,8] x) => (float[N,4,6,6] y) {{ {CONV} y = Add(h, c) }}", {"c": np.float32(1e9)}),
    "a division by zero": (f"(float[N,3,8,8] x) => (float[N,4,6,6] y) {{ {CONV} y = Div(h, c) }}", {"c": np.float32(0)}),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_cannot_be_folded_is_left_alone(name):
    text, weights = LEFT_ALONE[name]
    model = parse(text, **W, **weights)
    before = model.SerializeToString()

    assert gone(fold(model)) == 0
    assert model.SerializeToString() == before


def test_shared_weights_are_left_alone():
    text = """(float[N,3,8,8] x) => (float[N,4,6,6] y, float[N,4,6,6] z) {
      h = Conv(x, w, b) y = Mul(h, c) i = Conv(x, w, b) z = Add(i, c) }"""

    assert gone(fold(parse(text, **W, c=CHANNELS))) == 0


def test_kept_nodes_are_left_alone():
    text = (
        "(float[N,3,8,8] x) => (float[N,4,6,6] y) { [one] h = Conv(x, w, b) [two] i = Mul(h, c) [three] y = Add(i, c) }"
    )

    assert folded(parse(text, **W, c=CHANNELS), keep=KeepRules(("t?o",)))[:2] == (0, ["Conv", "Mul", "Add"])
    assert folded(parse(text, **W, c=CHANNELS), keep=KeepRules(("three",)))[:2] == (1, ["Conv", "Add"])


def test_subgraphs_and_constant_nodes():
    text = """(float[2,3,8,8] x, bool c) => (float[2,4,6,6] y) {
      y = If (c) <then_branch = t () => (float[2,4,6,6] p) { h = Conv(x, w, b) two = Constant<value_float = 2.0>() p = Mul(h, two) },
                  else_branch = e () => (float[2,4,6,6] q) { q = Conv(x, w2, b) }> }"""
    model = parse(text, **W, w2=normal(4, 3, 3, 3))
    feeds = {"x": normal(2, 3, 8, 8), "c": np.array(True)}
    (before,) = ReferenceEvaluator(model).run(None, feeds)

    assert gone(fold(model)) == 1

    (after,) = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)
    then = next(a.g for a in model.graph.node[0].attribute if a.name == "then_branch")
    assert [node.op_type for node in then.node] == ["Conv"]


def test_copies_that_subgraphs_read_and_copies_that_are_kept():
    text = """(float[2,3,8,8] x, bool c) => (float[2,4,6,6] y) {
      [first] d = Identity(b) [second] e = Identity(b)
      y = If (c) <then_branch = t () => (float[2,4,6,6] p) { p = Conv(x, w, d) },
                  else_branch = f () => (float[2,4,6,6] q) { q = Conv(x, w, e) }> }"""
    model = parse(text, **W)
    feeds = {"x": normal(2, 3, 8, 8), "c": np.array(True)}
    (before,) = ReferenceEvaluator(model).run(None, feeds)

    assert gone(fold(model, KeepRules(("second",)))) == 1

    assert np.array_equal(ReferenceEvaluator(model).run(None, feeds)[0], before)
    assert [node.name for node in model.graph.node if node.op_type == "Identity"] == ["second"]


def test_weights_in_another_file(tmp_path):
    text, weights, num_gone, _ = CASES["batch normalization"]
    model = parse(text, **weights)
    feeds = {"x": normal(2, 3, 8, 8)}
    (before,) = ReferenceEvaluator(model).run(None, feeds)
    convert_model_to_external_data(model, location="weights", size_threshold=0)
    onnx.save(model, tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)

    assert gone(fold(model, folder=tmp_path)) == num_gone

    (after,) = ReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "node",
    [
        "d = Identity()",
        "d = Reshape(b)",
        "d = Reshape(b, broken)",
        "d = Reshape(shape, shape)",
        "d = Unsqueeze(b, far)",
        "d = Transpose<perm = [3]>(b)",
    ],
)
def test_nodes_that_no_runtime_would_take_are_left_to_it(node):
    text = f"(float[N,3,8,8] x) => (float[N,4,6,6] y) {{ {node} y = Conv(x, w, d) }}"
    weights = {"shape": np.array([4]), "broken": np.float32([1.5, 2]), "far": np.array([1 << 40])}

    assert gone(fold(parse(text, **W, **weights))) == 0
