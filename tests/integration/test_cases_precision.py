"""Reported failures under FP16 and INT8, each from a model file to what the lowered graph computes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from trtforge.errors import CalibrationError, GraphError, SeveralErrors, TrtForgeError
from trtforge.graph.ingest import ingest
from trtforge.graph.qdq_lint import findings
from trtforge.precision.emulate import emulated
from trtforge.precision.lower import check, lower
from trtforge.precision.placement import KeepRules, place
from trtforge.precision.quantize import lower_int8
from trtforge.precision.ranges import observe_ranges

F32 = np.float32


def parse(text, opset=17, **constants):
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> g {text}')
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()
    )
    return model


def ingested(model, folder):
    """The graph and the parsed model, as a build has them."""
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    graph = ingest(path, folder / "work")
    return graph, onnx.load(graph.path)


def run(model, feeds):
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, feeds)


def half(model, folder, feeds, rounded=True):
    """The FP16 model by ranges of `feeds`, and what it gives when every value is rounded to FP16."""
    graph, parsed = ingested(model, folder)
    lowered = lower(parsed, dtype="float16", ranges=observe_ranges(graph, [feeds], threads=1))
    onnx.checker.check_model(lowered.model, full_check=True)
    return lowered, run(emulated(lowered.model) if rounded else lowered.model, feeds)


def kept(lowered):
    return {row.op for row in lowered.decisions if row.dtype == "float32"}


def group_norm(opset, length):
    text = "(float[N,4,2] x) => (float[N,4,2] y) { y = GroupNormalization<num_groups = 2>(x, s, b) }"
    return parse(text, opset, s=np.ones(length, F32), b=np.zeros(length, F32))


def test_c15_group_normalization(tmp_path):
    x = np.random.default_rng(0).standard_normal((3, 4, 2)).astype(F32) * 300
    groups = x.reshape(3, 2, 4).astype(np.float64)
    right = (groups - groups.mean(2, keepdims=True)) / np.sqrt(groups.var(2, keepdims=True) + 1e-5)
    _, (found,) = half(group_norm(21, 4), tmp_path, {"x": x})

    np.testing.assert_allclose(found, right.reshape(x.shape), atol=2e-3)


def test_c15_group_normalization_of_opset_18(tmp_path):
    _, parsed = ingested(group_norm(18, 2), tmp_path)

    assert "GroupNormalization" in [node.op_type for node in lower(parsed, dtype="float16").model.graph.node]


def test_c15_what_follows_a_deprecated_operator_is_checked():
    model = group_norm(18, 2)
    model.graph.node[0].output[0] = "a"
    model.graph.node.append(onnx.helper.make_node("NoSuchOp", ["a"], ["y"]))

    with pytest.raises(TrtForgeError) as caught:
        check(model)

    assert "NoSuchOp" in caught.value.problems[0].detail[0]


def test_c22_every_decision_has_a_node_of_its_own(tmp_path):
    model = parse("(float[2] x) => (float[2] y) { [n] a = Relu(x)  [n] b = Relu(a)  c = Relu(b)  y = Neg(c) }")
    lowered, (found,) = half(model, tmp_path, {"x": np.array([1.5, -2], F32)})

    assert Counter(row.node for row in lowered.decisions).most_common(1)[0][1] == 1
    np.testing.assert_array_equal(found, [-1.5, 0])


def test_c24_nodes_out_of_order(tmp_path):
    model = parse("(float[2] x) => (float[2] y) { h = Relu(x)  y = Neg(h) }")
    model.graph.node.extend([model.graph.node[1], model.graph.node[0]])
    del model.graph.node[:2]
    lowered, (found,) = half(model, tmp_path, {"x": np.array([1.5, -2], F32)})

    outputs = [name for node in lowered.model.graph.node for name in node.output]
    assert len(outputs) == len(set(outputs))
    np.testing.assert_array_equal(found, [-1.5, 0])


def test_c24_an_input_that_feeds_two_nodes_is_cast_once(tmp_path):
    model = parse(
        "(float[N,4] x) => (float[N,4] y) { a = MatMul(x, w)  b = Neg(x)  y = Add(a, b) }", w=np.eye(4, dtype=F32)
    )
    lowered, _ = half(model, tmp_path, {"x": np.ones((2, 4), F32)})

    assert [node.op_type for node in lowered.model.graph.node].count("Cast") == 2


MASKED = "(float[N,4] score, float[N,4] mask) => (float[N,4] y) { inv = Sub(one, mask)  bias = Mul(inv, big)  z = Add(score, bias)  y = Softmax<axis = -1>(z) }"


@pytest.mark.parametrize("big", [-1e9, np.finfo(F32).min])
def test_c25_masks(tmp_path, big):
    feeds = {"score": np.array([[1, 2, 3, 4]] * 2, F32), "mask": np.array([[1, 1, 0, 0], [0, 0, 0, 0]], F32)}
    _, (found,) = half(parse(MASKED, one=F32(1), big=F32(big)), tmp_path, feeds)

    partly = np.exp([-1, 0]) / np.exp([-1, 0]).sum()
    np.testing.assert_allclose(found[0], [*partly, 0, 0], atol=1e-3)
    if big == F32(-1e9):
        np.testing.assert_allclose(found[1], [0.25] * 4, atol=1e-3)
    else:
        np.testing.assert_allclose(found[1], run(parse(MASKED, one=F32(1), big=F32(big)), feeds)[0][1], atol=1e-3)


def test_c25_infinity_is_no_number_before_either(tmp_path):
    feeds = {"score": np.array([[1, 2, 3, 4]], F32), "mask": np.array([[1, 1, 0, 0]], F32)}
    model = parse(MASKED, one=F32(1), big=F32(-np.inf))
    assert np.isnan(run(model, feeds)[0]).all()
    _, (found,) = half(model, tmp_path, feeds)

    assert np.isnan(found).all()


NORM = """(float[N,8] x) => (float[N,8] y) { mu = ReduceMean<axes = [-1]>(x)  d = Sub(x, mu)  sq = Pow(d, two)
    var = ReduceMean<axes = [-1]>(sq)  ve = Add(var, eps)  sd = Sqrt(ve)  y = Div(d, sd) }"""


def test_c26_squares_beyond_fp16(tmp_path):
    x = np.array([[0] * 7 + [800]], F32)
    lowered, (found,) = half(parse(NORM, two=F32(2), eps=F32(1e-5)), tmp_path, {"x": x})

    np.testing.assert_allclose(found, [[-0.378] * 7 + [2.646]], atol=1e-3)
    assert {"Pow", "Sqrt"} <= kept(lowered)


RESIZE = '[resize] {} = Resize<mode = "nearest">({}, , sc)'


def test_c27_resize_scales(tmp_path):
    model = parse(
        f"(float[1,1,2,2] x) => (float[1,1,4,4] y) {{ {RESIZE.format('y', 'x')} }}", sc=np.array([1, 1, 2, 2], F32)
    )
    x = np.arange(4, dtype=F32).reshape(1, 1, 2, 2)
    lowered, (found,) = half(model, tmp_path, {"x": x}, rounded=False)

    np.testing.assert_array_equal(found, x.repeat(2, 2).repeat(2, 3))
    assert (
        next(tensor for tensor in lowered.model.graph.initializer if tensor.name == "sc").data_type == TensorProto.FLOAT
    )


def test_c27_resize_in_a_loop(tmp_path):
    body = parse(
        f"(int64 i, bool c, float[1,1,2,2] h) => (bool d, float[1,1,2,2] k) {{ d = Identity(c)  {RESIZE.format('large', 'h')}  k = MaxPool<kernel_shape = [2,2], strides = [2,2]>(large) }}"
    )
    model = parse(
        "(float[1,1,2,2] x) => (float[1,1,2,2] y) { y = Relu(x) }",
        sc=np.array([1, 1, 2, 2], F32),
        m=np.array(3),
        t=np.array(True),
    )
    model.graph.node[0].CopyFrom(helper.make_node("Loop", ["m", "t", "x"], ["y"], body=body.graph))
    x = np.arange(4, dtype=F32).reshape(1, 1, 2, 2)
    _, (found,) = half(model, tmp_path, {"x": x}, rounded=False)

    np.testing.assert_array_equal(found, x)


CONV = "(float[N,{0},8,8] x) => (float[N,{1},8,8] y) {{ [conv] c = Conv<pads = [1,1,1,1]>(x, w, b)  y = Relu(c) }}"


def weights(*shape, seed=1, size=0.1):
    return (np.random.default_rng(seed).standard_normal(shape) * size).astype(F32)


def test_c44_weights_that_would_vanish(tmp_path):
    bias = np.array([5, -4.5, 0, 1], F32)
    model = parse(CONV.format(3, 4), w=weights(4, 3, 3, 3, size=1e-10), b=bias)
    x = weights(2, 3, 8, 8, seed=2, size=1e9)
    lowered, (found,) = half(model, tmp_path, {"x": x})

    np.testing.assert_allclose(found, run(model, {"x": x})[0], atol=5e-3)
    assert "Conv" in kept(lowered)


def int8(model, folder, feeds, *, keep=(), rest="float32", max_opset=21, placed=None):
    """The INT8 model with the ranges of `feeds`, and what it gives."""
    graph, parsed = ingested(model, folder)
    placement = placed or place(parsed, keep=KeepRules(tuple(keep)))
    ranges = observe_ranges(graph, [feeds], threads=1)
    amax = {name: ranges[name].absmax for name in placement.tensors}
    lowered = lower_int8(parsed, placement, amax, rest=rest, max_opset=max_opset, ranges=ranges)
    onnx.checker.check_model(lowered.model, full_check=True)
    assert [one for one in findings(lowered.model, folder, {}) if one.severity == "error"] == []
    return lowered, run(emulated(lowered.model), feeds)[0]


def tensors(model):
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def quantizers(model):
    return [node for node in model.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]


@pytest.mark.parametrize("rest", ["float32", "float16"])
def test_c15_per_channel_needs_opset_13(tmp_path, rest):
    text = "(float[N,32,4,4] x) => (float[N,32,4,4] y) { [conv] y = Conv(x, w) }"
    x = weights(2, 32, 4, 4, seed=2, size=1)
    model = parse(text, opset=11, w=weights(32, 32, 1, 1))
    lowered, found = int8(model, tmp_path, {"x": x}, rest=rest)

    assert next(entry.version for entry in lowered.model.opset_import if not entry.domain) >= 13
    right = run(model, {"x": x})[0]
    assert np.linalg.norm(found - right) / np.linalg.norm(right) < 0.02


@pytest.mark.parametrize("zero", [np.uint8(128), np.int8(3)])
def test_c22_c40_a_quantized_file_is_not_quantized_again(tmp_path, zero):
    text = "(float[N,4] x) => (float[N,4] y) { [q] a = QuantizeLinear(x, s, z)  [dq] y = DequantizeLinear(a, s, z) }"
    _, parsed = ingested(parse(text, s=F32(0.1), z=zero), tmp_path)

    with pytest.raises(GraphError, match=r"quantized already: .*'dq'"):
        place(parsed)


@pytest.mark.parametrize("rest", ["float32", "float16"])
def test_c40_only_int8_with_zero_point_0(tmp_path, rest):
    model = parse(CONV.format(32, 32), w=weights(32, 32, 3, 3), b=weights(32, seed=4))
    lowered, _ = int8(model, tmp_path, {"x": np.abs(weights(2, 32, 8, 8, seed=3, size=1))}, rest=rest)

    values = tensors(lowered.model)
    # a DequantizeLinear without a zero point has 0, a QuantizeLinear without one would be uint8
    assert all(len(node.input) == 3 for node in quantizers(lowered.model) if node.op_type == "QuantizeLinear")
    zeros = [values[node.input[2]] for node in quantizers(lowered.model) if len(node.input) == 3]
    assert zeros
    assert {zero.dtype for zero in zeros} == {np.dtype(np.int8)}
    assert not any(zero.any() for zero in zeros)


@pytest.mark.parametrize("size", [32, 64])
def test_c42_gemm_by_its_attribute(tmp_path, size):
    sizes = np.array([1, 0.01, 10, 0.1, 1] * size, F32)[:size]
    w, x = weights(size, 32, seed=3, size=1) * sizes[:, None], weights(64, 32, seed=5, size=1)
    found = {}
    for transposed in (0, 1):
        text = f"(float[N,32] x) => (float[N,{size}] y) {{ [fc] y = Gemm<transB = {transposed}>(x, w, b) }}"
        folder = tmp_path / str(transposed)
        folder.mkdir()
        model = parse(text, w=w if transposed else w.T, b=np.zeros(size, F32))
        lowered, result = int8(model, folder, {"x": x})
        (of_weights,) = [node for node in quantizers(lowered.model) if any(a.name == "axis" for a in node.attribute)]
        found[transposed] = (of_weights.attribute[0].i, tensors(lowered.model)[of_weights.input[1]], result)

    assert (found[0][0], found[1][0]) == (1, 0)
    np.testing.assert_array_equal(found[0][1], found[1][1])
    np.testing.assert_allclose(found[0][2], found[1][2], rtol=1e-6, atol=1e-6 * np.abs(found[0][2]).max())
    error = np.linalg.norm(found[1][2] - x @ w.T, axis=0) / np.linalg.norm(x @ w.T, axis=0)
    assert error.max() < 0.02


def test_c42_excluding_by_name(tmp_path):
    model = parse(
        "(float[N,32] x) => (float[N,32] y) { [fc] y = Gemm(x, w, b) }", w=weights(32, 32), b=np.zeros(32, F32)
    )
    _, parsed = ingested(model, tmp_path)

    assert [node.node for node in place(parsed).nodes] == ["fc"]
    assert place(parsed, keep=KeepRules(("fc",))).nodes == ()
    with pytest.raises(SeveralErrors) as error:
        place(parsed, keep=KeepRules(("fcc",)))
    assert "fcc" in error.value.problems[0].summary


@pytest.mark.parametrize("rest", ["float32", "float16"])
def test_c44_a_bias_is_left_alone(tmp_path, rest):
    bias = np.resize(np.array([5, -4.5, 0, 1], F32), 32)
    model = parse(CONV.format(32, 32), w=weights(32, 32, 3, 3, size=1e-9), b=bias)
    x = weights(2, 32, 8, 8, seed=2, size=1)
    lowered, found = int8(model, tmp_path, {"x": x}, rest=rest)

    assert not any(tensor.data_type == TensorProto.INT32 for tensor in lowered.model.graph.initializer)
    np.testing.assert_allclose(found, run(model, {"x": x})[0], atol=5e-3)


SKIP = """(float[N,32,8,8] x) => (float[N,32,8,8] y) {
    [c1] a = Conv<pads = [1,1,1,1]>(x, w1)  [c2] b = Conv<pads = [1,1,1,1]>(a, w2)  [res] s = Add(b, x)
    [act] r = Relu(s)  [cat] k = Concat<axis = 1>(r, a)  [c3] y = Conv(k, w3) }"""


def test_c45_skip_and_concat(tmp_path):
    model = parse(
        SKIP,
        w1=weights(32, 32, 3, 3, size=1),
        w2=weights(32, 32, 3, 3, seed=2, size=0.01),
        w3=weights(32, 64, 1, 1, seed=3),
    )
    x = weights(2, 32, 8, 8, seed=4, size=1)
    lowered, found = int8(model, tmp_path, {"x": x})
    writers = {name: node for node in lowered.model.graph.node for name in node.output}
    (add,) = [node for node in lowered.model.graph.node if node.op_type == "Add"]

    assert [writers[name].op_type if name in writers else "" for name in add.input] == ["Conv", "DequantizeLinear"]
    assert writers[writers[add.input[1]].input[0]].input[0] == "x"
    assert [one.rule for one in findings(lowered.model, tmp_path, {})] == []
    right = run(model, {"x": x})[0]
    assert np.linalg.norm(found - right) / np.linalg.norm(right) < 0.05


TWICE = """(float[N,4] x) => (float[N,4] y) { q = QuantizeLinear(x, s, z)  b = DequantizeLinear(q, s, z)
    p = QuantizeLinear(b, t, z)  y = DequantizeLinear(p, t, z) }"""


def test_c51_quantization_that_is_there_stays_as_it_is(tmp_path):
    x = np.array([[0.33, -1.27, 5, 20]], F32)
    _, (found,) = half(parse(TWICE, s=F32(0.1), t=F32(0.07), z=np.int8(0)), tmp_path, {"x": x})

    np.testing.assert_allclose(found, [[0.28, -1.33, 4.97, 8.89]], atol=1e-5 * 8.89 + 4e-3)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.inf, np.nan])
def test_c32_a_range_that_is_none_gives_no_scale(tmp_path, bad):
    model = parse(
        "(float[N,32] x) => (float[N,32] y) { [fc] y = Gemm(x, w, b) }", w=weights(32, 32), b=np.zeros(32, F32)
    )
    _, parsed = ingested(model, tmp_path)
    placement = place(parsed)
    if bad == 0:
        lowered = lower_int8(parsed, placement, {"x": bad}, rest="float32", max_opset=17)
        scales = [tensors(lowered.model)[node.input[1]] for node in quantizers(lowered.model)]
        assert all((scale >= np.finfo(F32).tiny).all() and np.isfinite(scale).all() for scale in scales)
    else:
        with pytest.raises(TrtForgeError):
            lower_int8(parsed, placement, {"x": bad}, rest="float32", max_opset=17)


def test_c30_a_tensor_without_a_range_is_named(tmp_path):
    model = parse(
        "(float[N,32] x) => (float[N,32] y) { [fc] y = Gemm(x, w, b) }", w=weights(32, 32), b=np.zeros(32, F32)
    )
    _, parsed = ingested(model, tmp_path)

    with pytest.raises((SeveralErrors, CalibrationError)) as error:
        lower_int8(parsed, place(parsed), {}, rest="float32", max_opset=17)
    assert "'x'" in error.value.problems[0].summary
