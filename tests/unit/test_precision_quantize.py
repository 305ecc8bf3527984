"""Where Q/DQ goes, what the scales and integers are, and how the rest is lowered around them."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator

from trtforge.errors import GraphError, TrtForgeError
from trtforge.precision.audit import audit, share
from trtforge.precision.int8_weights import int8_weights, scale_of
from trtforge.precision.placement import place
from trtforge.precision.policy import KeepRules
from trtforge.precision.quantize import lower_int8, quantize
from trtforge.types import Range

F32, F16, BF16, INT8 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT8
RNG = np.random.default_rng(0)
TYPES = {"float32": F32, "float16": F16, "bfloat16": BF16}


def weights(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def parse(text, opset=17, **constants):
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]> {text}')
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()
    )
    return model


def placed(text, keep=(), **constants):
    return place(parse(text, **constants), keep=KeepRules(tuple(keep)))


def layers(placement):
    return {node.node: dict(node.activations) for node in placement.nodes}


def constant(model, name):
    return numpy_helper.to_array(next(tensor for tensor in model.graph.initializer if tensor.name == name))


def giver(model, name):
    return next((node for node in model.graph.node if name in node.output), None)


def scales_of(model, node_name, position):
    """(scale of a dequantized operand, type of that scale)."""
    node = next(node for node in model.graph.node if node.name == node_name)
    dequantize = giver(model, node.input[position])
    assert dequantize.op_type == "DequantizeLinear"
    scale = next(tensor for tensor in model.graph.initializer if tensor.name == dequantize.input[1])
    return numpy_helper.to_array(scale), scale.data_type


CONV = "g (float[N,32,8,8] x) => (float[N,32,6,6] y) { [c] y = Conv(x, w, b) }"


@pytest.mark.parametrize(
    ("text", "shape", "axis"),
    [
        (CONV, (32, 32, 3, 3), 0),
        ("g (float[N,32,8,8] x) => (float[N,32,A,B] y) { [c] y = ConvTranspose(x, w) }", (32, 32, 2, 2), 1),
        ("g (float[N,64,8,8] x) => (float[N,64,A,B] y) { [c] y = ConvTranspose<group = 2>(x, w) }", (64, 32, 2, 2), 1),
        ("g (float[N,32] x) => (float[N,32] y) { [c] y = Gemm(x, w) }", (32, 32), 1),
        ("g (float[N,32] x) => (float[N,32] y) { [c] y = Gemm<transB = 1>(x, w) }", (32, 32), 0),
        ("g (float[N,S,32] x) => (float[N,S,32] y) { [c] y = MatMul(x, w) }", (32, 32), 1),
        ("g (float[N,S,32] x) => (float[N,S,32] y) { [c] y = MatMul(x, w) }", (1, 32, 32), 2),
    ],
)
@pytest.mark.parametrize("rest", TYPES)
def test_weights_have_a_scale_for_each_channel(text, shape, axis, rest):
    w = weights(*shape) * np.logspace(-3, 1, shape[axis]).reshape([-1 if a == axis else 1 for a in range(len(shape))])
    w = w.astype(np.float32)
    model = parse(text, w=w, **({"b": weights(32)} if "b)" in text else {}))
    placement = place(model)

    assert layers(placement) == {"c": {0: "x"}}
    assert placement.tensors == ("x",)
    assert placement.nodes[0].weights.axis == axis
    result = lower_int8(model, placement, {"x": 3.0}, rest=rest, max_opset=24).model

    scale, type_ = scales_of(result, "c", 1)
    assert type_ == TYPES[rest] or (rest == "bfloat16" and "ConvTranspose" in text)  # which has no BF16 kernel
    amax = np.abs(w).max(axis=tuple(a for a in range(w.ndim) if a != axis))
    np.testing.assert_allclose(scale.astype(np.float64), amax / 127, rtol=2**-8)
    spread = scale.astype(np.float32).reshape([-1 if a == axis else 1 for a in range(w.ndim)])
    integers = constant(result, "w_int8")
    np.testing.assert_array_equal(integers, np.clip(np.rint(w / spread), -127, 127))
    assert np.abs(integers).max() == 127
    quantizers = [node for node in result.graph.node if node.op_type == "QuantizeLinear"]
    assert [constant(result, node.input[2]).dtype for node in quantizers] == [np.int8]
    assert constant(result, quantizers[0].input[2]) == 0
    assert "w" not in {tensor.name for tensor in result.graph.initializer}


def test_c42_a_gemm_gives_the_same_scales_whichever_way_its_weights_lie():
    w = weights(20, 32) * np.logspace(-2, 1, 20, dtype=np.float32)[:, None]
    text = "g (float[N,32] x) => (float[N,20] y) {{ [fc] y = Gemm<transB = {}>(x, w) }}"
    one, other = parse(text.format(1), w=w), parse(text.format(0), w=np.ascontiguousarray(w.T))

    results = [lower_int8(m, place(m), {"x": 1.0}, rest="float16", max_opset=24).model for m in (one, other)]

    np.testing.assert_array_equal(*[scales_of(result, "fc", 1)[0] for result in results])
    np.testing.assert_array_equal(constant(results[0], "w_int8"), constant(results[1], "w_int8").T)
    assert placed(text.format(1), keep=["fc"], w=w).reasons == {"fc": "keep 'fc'"}
    with pytest.raises(TrtForgeError) as raised:
        placed(text.format(1), keep=["fcc"], w=w)
    assert raised.value.problems[0].summary == "keep 'fcc' matches none of the 1 nodes"


def test_c45_residual_and_concat():
    text = """g (float[N,32,8,8] x) => (float[N,32,8,8] y) { [c1] a = Conv<pads = [1,1,1,1]>(x, w1)
      [c2] b = Conv<pads = [1,1,1,1]>(a, w2)  [res] s = Add(b, x)  [act] r = Relu(s)  [cat] k = Concat<axis = 1>(r, a)
      [c3] y = Conv(k, w3) }"""
    shapes = {"w1": (32, 32, 3, 3), "w2": (32, 32, 3, 3), "w3": (32, 32, 1, 1)}
    model = parse(text, **{name: weights(*shape) for name, shape in shapes.items()})
    placement = place(model)

    assert layers(placement) == {"c1": {0: "x"}, "c2": {0: "a"}, "res": {1: "x"}, "c3": {0: "k"}}
    assert placement.groups == (("a", "k"),)
    result = lower_int8(model, placement, {"x": 4.0, "a": 10.0, "k": 12.7}, rest="float32", max_opset=17).model

    assert scales_of(result, "c2", 0)[0] == scales_of(result, "c3", 0)[0] == np.float32(0.1)
    assert scales_of(result, "res", 1)[0] == scales_of(result, "c1", 0)[0] == np.float32(4 / 127)
    quantizers = [node.input[0] for node in result.graph.node if node.op_type == "QuantizeLinear"]
    assert sorted(quantizers) == ["a", "k", "x"]  # one each, although two nodes read x


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("[p] a = Conv(x, w) [q] b = Conv(x, v) [r] y = Add(a, b)", {0: "a"}),  # the later one takes the addition in
        ("[p] a = Conv(x, w) [r] y = Add(a, bias)", None),
        ("[p] a = Conv(x, w) c = Relu(a) [r] y = Add(c, x)", None),  # no fusion through Relu
        ("[p] a = Conv(x, w) [r] d = Add(a, x) y = Mul(d, a)", None),  # two readers
        ("[p] a = Conv(x, w) g = GlobalAveragePool(a) c = Conv(x, v) [r] y = Add(c, g)", None),  # it is broadcast
        ("c = MatMul(x, m) [r] y = Add(c, x)", None),
    ],
)
def test_residual_inputs(nodes, expected):
    text = f"g (float[N,32,32,32] x) => (float[N,32,32,32] y) {{ {nodes} }}"
    found = placed(text, w=weights(32, 32, 1, 1), v=weights(32, 32, 1, 1), m=weights(32, 32), bias=weights(32, 1, 1))

    assert layers(found).get("r") == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("g (float[N,4,8,32] x) => (float[N,4,8,8] y) { t = Transpose<perm = [0,1,3,2]>(x) [c] y = MatMul(x, t) }",
         "both operands are activations"),
        ("g (float[N,32] x) => (float[N,4] y) { [c] y = MatMul(x, narrow) }", "its weights of 32 x 4 are narrower than 16"),
        ("g (float[N,32] x) => (float[N] y) { [c] y = MatMul(x, vector) }", "its weights are no matrix"),
        ("g (float[32,32] x) => (float[32,32] y) { [c] y = MatMul(w, x) }", "its weights are the first operand"),
        ("g (float[N,32,8,8] x) => (float[N,3,8,8] y) { [c] y = Conv(x, rgb) }",
         "its 32 channels to 3 are narrower than 16"),
        ("g (float[N,1,999] x) => (float[N,32,9] y) { [c] y = Conv(x, wave) }",
         "its 1 channels to 32 are narrower than 16"),
        ("g (float[N,24,8,8] x) => (float[N,24,8,8] y) { [c] y = Conv<group = 2>(x, halves) }",
         "its 12 channels to 12 are narrower than 16"),
        ("g (float[N,32,8,8] x) => (float[N,32,6,6] y) { [c] y = Conv<group = 32>(x, deep) }", "depthwise: "),
        ("g (float[N,16,8,8] x) => (float[N,32,8,8] y) { [c] y = Conv(x, few) }", "it adds up 16 products, fewer than 32"),
        ("g (float[N,20] x) => (float[N,32] y) { [c] y = Gemm<transB = 1>(x, short) }",
         "it adds up 20 products, fewer than 32"),
        ("g (float[N,32,8,8] x) => (float[N,32,1,1] y) { g = GlobalAveragePool(x) [c] y = Conv(g, dot) }",
         "it sees a single pixel"),
        ("""g (float[N,32] x, bool t) => (float[N,32] y) { y = If (t) <then_branch = a () => (float[N,32] p)
            { [c] p = MatMul(x, w) }, else_branch = b () => (float[N,32] q) { q = Identity(x) }> }""",
         "it is in a subgraph"),
    ],
)  # fmt: skip
def test_what_is_not_quantized(text, reason):
    found = placed(
        text, w=weights(32, 32), narrow=weights(32, 4), vector=weights(32), rgb=weights(3, 32, 1, 1),
        halves=weights(24, 12, 3, 3), wave=weights(32, 1, 64),
        deep=weights(32, 1, 3, 3), dot=weights(32, 32, 1, 1), few=weights(32, 16, 1, 1), short=weights(32, 20),
    )  # fmt: skip

    assert found.nodes == found.tensors == ()
    assert found.reasons["c"].startswith(reason)


def test_an_embedding_a_bias_and_outputs_stay_as_they_are():
    text = """g (int64[N,S] ids) => (float[N,S,32] y) { [e] h = Gather(table, ids) [m] z = MatMul(h, w) [a] s = Add(z, b)
      [n] y = MatMul(s, v) }"""
    table, b = weights(32, 32), weights(32)
    model = parse(text, table=table, w=weights(32, 32), v=weights(32, 32), b=b)
    result = lower_int8(model, place(model), {"h": 3.0, "s": 30.0}, rest="float32", max_opset=17).model

    assert layers(place(model)) == {"m": {0: "h"}, "n": {0: "s"}}
    np.testing.assert_array_equal(constant(result, "table"), table)
    np.testing.assert_array_equal(constant(result, "b"), b)
    assert giver(result, "y").op_type == "MatMul"


def test_average_pooling_only_between_quantized_layers():
    text = """g (float[N,32,8,8] x) => (float[N,32,4,4] y, float[N,32,4,4] z) { [c] a = Conv(x, w) [d] s = Conv(a, w)
      [p] b = AveragePool<kernel_shape = [2,2], strides = [2,2]>(a) [e] y = Conv(b, w)
      [q] z = AveragePool<kernel_shape = [2,2], strides = [2,2]>(s) }"""
    found = placed(text, w=weights(32, 32, 1, 1))

    assert layers(found)["p"] == {0: "a"}
    assert found.groups == ()  # an average is another range
    assert found.reasons == {"q": "it does not stand between quantized layers"}


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("r = Relu(a) [p] g = GlobalAveragePool(r) f = Flatten(g) y = Gemm(f, v)", {0: "r"}),
        ("[p] g = GlobalAveragePool(a) f = Flatten(g) h = Relu(f) y = Gemm(h, v)", None),
        ("r = Sigmoid(a) [p] g = GlobalAveragePool(r) f = Flatten(g) y = Gemm(f, v)", None),
        ("[p] g = GlobalAveragePool(a) f = Flatten(g) h = Gemm(f, v) s = Add(a, a) y = Identity(h)", None),
    ],
)
def test_average_pooling_after_a_layer_and_before_one(nodes, expected):
    text = f"g (float[N,32,8,8] x) => (float[N,32] y) {{ [c] a = Conv(x, w) {nodes} }}"

    assert layers(placed(text, w=weights(32, 32, 1, 1), v=weights(32, 32))).get("p") == expected


def test_a_first_convolution_with_a_wide_kernel():
    text = "g (float[N,3,32,32] x) => (float[N,64,26,26] y) { [c] y = Conv(x, w) }"

    assert layers(placed(text, w=weights(64, 3, 7, 7))) == {"c": {0: "x"}}


def test_max_pooling_shares_a_scale_without_nodes_of_its_own():
    text = """g (float[N,32,8,8] x) => (float[N,32,4,4] y, float[N,32,8,8] z) { [c] z = Conv(x, w)
      [p] b = MaxPool<kernel_shape = [2,2], strides = [2,2]>(x) [e] y = Conv(b, w) }"""
    found = placed(text, w=weights(32, 32, 1, 1))

    assert layers(found) == {"c": {0: "x"}, "e": {0: "b"}}
    assert found.groups == (("x", "b"),)


@pytest.mark.parametrize(("max_opset", "num_int8", "num_float"), [(22, 2, 0), (17, 0, 1)])
def test_shared_weights_have_the_axis_of_each_reader(max_opset, num_int8, num_float):
    text = """g (float[N,32] x) => (float[N,32] y, float[N,32] z, float[N,32] v) { [m] y = MatMul(x, w)
      [n] z = Gemm<transB = 1>(x, w) [o] v = MatMul(x, w) }"""
    w = weights(32, 32)
    model = parse(text, w=w)
    result = lower_int8(model, place(model), {"x": 1.0}, rest="float32", max_opset=max_opset).model

    np.testing.assert_allclose(scales_of(result, "m", 1)[0], np.abs(w).max(0) / 127, rtol=1e-6)
    np.testing.assert_allclose(scales_of(result, "n", 1)[0], np.abs(w).max(1) / 127, rtol=1e-6)
    matrices = [tensor.data_type for tensor in result.graph.initializer if len(tensor.dims) == 2]
    assert sorted(matrices) == [F32] * num_float + [INT8] * num_int8
    readers = [node.output[0] for node in result.graph.node if node.op_type == "DequantizeLinear"]
    assert len(readers) == 6  # one for each operand of each node


def test_weights_of_matrices_are_quantized_in_the_graph_for_tensorrt_8():
    text = """g (float[N,32] x) => (float[N,32] y, float[N,32] z) { [m] a = MatMul(x, w) [n] y = Gemm(a, v)
      r = ReduceSum(w, axes) z = Add(a, r) }"""
    # The reference evaluator knows DequantizeLinear from opset 19 on.
    model = parse(text, opset=19, w=weights(32, 32), v=weights(32, 32), axes=np.array([0], np.int64))
    amax = {"x": 3.0, "a": 30.0}
    older, newer = (lower_int8(model, place(model), amax, rest="float32", max_opset=opset).model for opset in (17, 22))

    writers = {node.output[0]: node for node in older.graph.node}
    for name in "mn":
        (layer,) = (node for node in older.graph.node if node.name == name)
        quantizer = writers[writers[layer.input[1]].input[0]]
        assert (quantizer.op_type, quantizer.input[0]) == ("QuantizeLinear", {"m": "w", "n": "v"}[name])
    assert onnx.checker.check_model(older, full_check=True) is None
    feeds = {"x": np.random.default_rng(0).standard_normal((64, 32), np.float32)}
    for one, other in zip(*(ReferenceEvaluator(model).run(None, feeds) for model in (older, newer)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_weights_that_something_else_reads_stay():
    text = "g (float[N,32] x) => (float[N,32] y) { [m] a = MatMul(x, w) r = ReduceSum(w, axes) y = Add(a, r) }"
    w = weights(32, 32)
    model = parse(text, w=w, axes=np.int64([0]))
    result = lower_int8(model, place(model), {"x": 1.0}, rest="float32", max_opset=17).model

    np.testing.assert_array_equal(constant(result, "w"), w)


@pytest.mark.parametrize("rest", TYPES)
def test_dead_channels_and_zeros_have_scales(rest):
    w = weights(32, 32)
    w[3], w[5], w[7] = 0, 1e-40, 1e-6
    found = int8_weights(numpy_helper.from_array(w), 0, rest, None)

    assert found.num_dead == 2
    assert found.scales[3] == found.scales[5] == found.scales.max()
    assert not found.values[3].any()
    assert not found.values[5].any()
    assert 0 < found.scales[7] <= 1e-6 / 127 * 8  # float16 has 2^-24 and its multiples there
    zeros = int8_weights(numpy_helper.from_array(np.zeros((32, 32), np.float32)), 1, rest, None)
    assert (zeros.scales == 1).all()
    assert zeros.loss == 0
    assert scale_of(0, rest) == scale_of(1e-40, rest) == 1


@pytest.mark.parametrize("rest", TYPES)
@pytest.mark.parametrize("amax", [2e-36, 1e-9, 6.2e-5, 1e-3, 0.5, 1.0, 65504.0, 1e6, 3e38])
def test_no_scale_saturates_its_own_range_or_leaves_fp32(amax, rest):
    scale = np.float32(scale_of(amax, rest))

    assert np.isfinite(scale)
    assert scale >= np.finfo(np.float32).tiny
    assert amax / float(scale) <= 127.5
    assert amax / float(scale) >= 127 * (1 - 2**-3 if amax < 1e-2 else 1 - 2**-8)


def test_c44_tiny_weights_keep_their_bias_and_fp32_scales():
    model = parse(CONV, w=weights(32, 32, 3, 3) * np.float32(1e-9), b=np.full(32, 5, np.float32))
    result = lower_int8(model, place(model), {"x": 3.0}, rest="float16", max_opset=24)

    (row,) = [row for row in result.decisions if row.node == "c"]
    assert row.dtype == "int8"
    assert "float32 around it" in row.reason
    scale, type_ = scales_of(result.model, "c", 1)
    assert type_ == F32
    assert ((scale > 1e-12) & (scale < 1e-10)).all()
    assert (constant(result.model, "b") == 5).all()
    assert not [tensor for tensor in result.model.graph.initializer if tensor.data_type == TensorProto.INT32]


@pytest.mark.parametrize(
    "node",
    [
        "q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z)",
        "y = com.microsoft.QLinearAdd(x, s, z, x, s, z, s, z)",
        "q = QuantizeLinear(x, s, z) y = Cast<to = 1>(q)",
        "q = com.microsoft.QuantizeLinear(x, s, z) y = Cast<to = 1>(q)",
        "y = com.microsoft.QAttention(x, s)",
        "y = com.microsoft.MatMulIntegerToFloat(x, x, s, s)",
        "i, p, o = DynamicQuantizeLinear(x) y = Cast<to = 1>(i)",
    ],
)
def test_c22_a_quantized_model_is_refused(node):
    with pytest.raises(GraphError) as raised:
        placed(f"g (float[N,4] x) => (float[N,4] y) {{ {node} }}", s=np.float32(0.1), z=np.int8(0))

    assert "the model is quantized already" in raised.value.problems[0].summary
    assert "as_model" in raised.value.problems[0].next_step


@pytest.mark.parametrize("opset", [11, 13, 18, 21, 23])
@pytest.mark.parametrize("rest", TYPES)
def test_c15_every_opset_gives_a_sound_model(opset, rest):
    text = (
        "g (float[N,32,8,8] x) => (float[N,1,32,6,6] y) { [c] a = Conv(x, w) [s] b = Softmax(a) y = Unsqueeze{axes} }"
    )
    text = text.replace("{axes}", "<axes = [1]>(b)" if opset < 13 else "(b, one)")
    constants = {} if opset < 13 else {"one": np.int64([1])}
    model = parse(text, opset, w=weights(32, 32, 3, 3), **constants)
    result = lower_int8(model, place(model), {"x": 2.0}, rest=rest, max_opset=24).model

    onnx.checker.check_model(result, full_check=True)
    assert result.opset_import[0].version >= (13 if rest == "float32" else 19)
    assert scales_of(result, "c", 0)[1] == TYPES[rest]
    assert share(audit(result, {}), "int8").layers == 1


@pytest.mark.parametrize("rest", ["float16", "bfloat16"])
def test_the_rest_is_lowered_without_casts_before_a_layer(rest):
    text = """g (float[N,32,8,8] x) => (float[N,32,8,8] y) { [c] a = Conv(x, w, b) [r] h = Relu(a) [n] z = Softmax(h)
      [d] y = Conv(z, v) }"""
    model = parse(text, w=weights(32, 32, 1, 1), v=weights(32, 32, 1, 1), b=weights(32))
    result = lower_int8(model, place(model), {"x": 2.0, "z": 1.0}, rest=rest, max_opset=24)

    ops = [node.op_type for node in result.model.graph.node if node.op_type != "DequantizeLinear"]
    # The softmax is FP32 and quantized as it is.
    assert ops == ["QuantizeLinear", "Conv", "Relu", "Cast", "Softmax", "QuantizeLinear", "Conv", "Cast"]
    assert result.num_casts == 2
    assert {row.node: row.dtype for row in result.decisions} == {"c": "int8", "r": rest, "n": "float32", "d": "int8"}
    assert next(t.data_type for t in result.model.graph.initializer if t.name == "b") == TYPES[rest]


def test_what_exceeds_fp16_is_fp32_around_int8():
    text = "g (float[N,32] x) => (float[N,32] y) { [m] a = MatMul(x, w) [r] h = Relu(a) [n] y = MatMul(h, v) }"
    model = parse(text, w=weights(32, 32), v=weights(32, 32))
    ranges = {"a": Range(-1e6, 1e6, 1e6, finite=True), "h": Range(0, 1e6, 1e6, finite=True)}
    result = lower_int8(model, place(model), {"x": 1.0, "h": 1e6}, rest="float16", max_opset=24, ranges=ranges)

    assert scales_of(result.model, "n", 0)[1] == F32
    assert scales_of(result.model, "m", 0)[1] == F32
    (row,) = [row for row in result.decisions if row.node == "n"]
    assert row.dtype == "int8"
    assert "float32 around it: 'h_dequantized' reaches 1." in row.reason


def test_tensorrt_8_6_gets_an_fp32_graph():
    model = parse(CONV, w=weights(32, 32, 3, 3), b=weights(32))
    result = lower_int8(model, place(model), {"x": 2.0}, rest="float16", max_opset=17)

    assert {tensor.data_type for tensor in result.model.graph.initializer} == {F32, INT8}
    assert result.model.opset_import[0].version == 17
    assert "left to the builder's flag" in result.notes[-1]
    assert [(row.node, row.dtype) for row in result.decisions] == [("c", "int8")]


def test_all_bad_ranges_are_named_together():
    text = "g (float[N,32] x) => (float[N,32] y) { a = MatMul(x, w) b = MatMul(a, w) y = MatMul(b, w) }"
    model = parse(text, w=weights(32, 32))
    with pytest.raises(TrtForgeError) as raised:
        quantize(model, place(model), {"a": float("nan"), "b": -1.0}, max_opset=17, rest="float32")

    assert [problem.summary for problem in raised.value.problems] == [
        "tensor 'x' has no range",
        "tensor 'a' has the range nan, expected a finite number from 0 on",
        "tensor 'b' has the range -1.0, expected a finite number from 0 on",
    ]
    assert {problem.exit_code for problem in raised.value.problems} == {4}


def test_weights_that_are_not_finite_are_refused():
    model = parse(CONV, w=np.full((32, 32, 3, 3), np.inf, np.float32), b=weights(32))
    with pytest.raises(GraphError, match="weights 'w' of 'c' hold values that are not finite"):
        quantize(model, place(model), {"x": 1.0}, max_opset=17, rest="float32")


def test_an_outlier_that_takes_all_levels_is_noted():
    w = weights(32, 32, 3, 3)
    w[2, 0, 0, 0] = 1e4
    model = parse(CONV, w=w, b=weights(32))
    (note,) = quantize(model, place(model), {"x": 1.0}, max_opset=17, rest="float32").notes

    assert note.startswith("in 1 of 32 channels of 'w' ('c') a few weights are so much larger")


def test_external_weights_are_taken_one_by_one(tmp_path):
    w = weights(256, 256)
    text = "g (float[N,256] x) => (float[N,256] y) { a = Add(x, big) [m] y = MatMul(a, w) }"
    model = parse(text, w=w, big=weights(1, 256))
    path = tmp_path / "model.onnx"
    onnx.save(copy.deepcopy(model), path, save_as_external_data=True, location="data.bin", size_threshold=0)
    external = onnx.load(path, load_external_data=False)

    for rest in TYPES:
        result = lower_int8(external, place(external), {"a": 4.0}, rest=rest, max_opset=24, weights_dir=tmp_path).model
        inside = lower_int8(model, place(model), {"a": 4.0}, rest=rest, max_opset=24).model
        assert not [t for t in result.graph.initializer if t.data_location == TensorProto.EXTERNAL]
        for name in ("w_int8", "big"):
            np.testing.assert_array_equal(constant(result, name), constant(inside, name))
