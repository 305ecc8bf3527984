from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, numpy_helper

from trtforge.errors import TrtForgeError
from trtforge.precision.lower import KeepRules, lower
from trtforge.types import Range

F32, F16, BF16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
W = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)


def parse(text, opset=17, **weights):
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}, "f" : 1, "acme" : 1]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items())
    return model


def lowered(text, opset=17, dtype="float16", keep=(), ranges=None, keep_io=True, **weights):
    return lower(
        parse(text, opset, **weights), dtype=dtype, keep=KeepRules(tuple(keep)), ranges=ranges, keep_io=keep_io
    )


def types(model):
    typed = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    infos = (*typed.graph.value_info, *typed.graph.input, *typed.graph.output)
    found = {info.name: info.type.tensor_type.elem_type for info in infos}
    return found | {tensor.name: tensor.data_type for tensor in model.graph.initializer}


def ops(graph):
    return [node.op_type for node in graph.node]


def chosen(result):
    return {row.node: row.dtype for row in result.decisions}


def reason(result, node):
    (row,) = [row for row in result.decisions if row.node == node]
    assert row.dtype == "float32", row
    return row.reason


def test_one_cast_for_two_readers_and_weights_converted_in_place():
    result = lowered("g (float[2,4] x) => (float[2,4] y) { a = MatMul(x, w)  b = MatMul(x, w)  y = Add(a, b) }", w=W)

    assert ops(result.model.graph) == ["Cast", "MatMul", "MatMul", "Add", "Cast"]
    assert result.num_casts == 2
    (weight,) = result.model.graph.initializer
    assert (weight.name, weight.data_type) == ("w", F16)
    np.testing.assert_array_equal(numpy_helper.to_array(weight), W.astype(np.float16))


def test_a_weight_that_both_types_need_is_there_in_both():
    result = lowered(
        "g (float[2,4] x) => (float[2,4] y) { a = MatMul(x, w)  s = Softmax(w)  b = MatMul(a, s)  y = MatMul(b, w) }",
        w=W,
    )

    assert {tensor.name: tensor.data_type for tensor in result.model.graph.initializer} == {"w": F32, "w_float16": F16}


def test_the_model_given_is_not_changed():
    model = parse("g (float[2,4] x) => (float[2,4] y) { y = MatMul(x, w) }", w=W)
    before = model.SerializeToString()

    lower(model, dtype="float16")

    assert model.SerializeToString() == before


@pytest.mark.parametrize(("keep_io", "io", "casts"), [(True, F32, 2), (False, F16, 0)])
def test_types_of_inputs_and_outputs(keep_io, io, casts):
    result = lowered("g (float[2,4] x) => (float[2,4] y) { y = MatMul(x, w) }", keep_io=keep_io, w=W)

    found = types(result.model)
    assert (found["x"], found["y"], result.num_casts) == (io, io, casts)


def test_an_input_beyond_the_type_stays():
    ranges = {"x": Range(0, 1e6, 1e6, finite=True)}
    result = lowered("g (float[2,4] x) => (float[2,4] y) { [m] y = MatMul(x, w) }", keep_io=False, ranges=ranges, w=W)

    assert types(result.model)["x"] == F32
    assert "1e+06" in reason(result, "m")


def test_an_output_that_is_read_inside_too():
    text = "g (float[2,4] x) => (float[2,4] y, float[2,4] z) { y = MatMul(x, w)  z = MatMul(y, w) }"
    result = lowered(text, w=W)

    found = types(result.model)
    assert (found["y"], found["z"], result.num_casts) == (F32, F32, 3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_round_to_nearest_even(dtype):
    result = lowered(
        "g (float[2,4] x) => (float[2,4] y) { y = MatMul(x, w) }", opset=22, dtype=dtype, w=W * np.float32(1.2345)
    )
    expected = (W * np.float32(1.2345)).astype(np.float16 if dtype == "float16" else ml_dtypes.bfloat16)

    np.testing.assert_array_equal(numpy_helper.to_array(result.model.graph.initializer[0]), expected)


MASK = """g (float[N,4] score, float[N,4] mask) => (float[N,4] y) {
  [inv] inv = Sub(one, mask) [mul] bias = Mul(inv, big) [add] z = Add(score, bias) [soft] y = Softmax<axis = -1>(z) }"""


@pytest.mark.parametrize("big", [-1e9, -np.inf, np.finfo(np.float32).min], ids=["-1e9", "-inf", "lowest"])
def test_c25_masks_stay_fp32_up_to_the_softmax(big):
    text = MASK.replace("float[N,4] score", "float[N,4] x").replace("{", "{ score = MatMul(x, w)", 1)
    result = lowered(text, one=np.float32(1), big=np.float32(big), w=W)

    assert "a constant as large as" in reason(result, "mul")
    assert "a constant as large as" in reason(result, "add")
    assert "Softmax" in reason(result, "soft")
    assert numpy_helper.to_array(next(t for t in result.model.graph.initializer if t.name == "big")) == np.float32(big)


def test_a_mask_seen_small_in_data_is_still_a_mask():
    ranges = {name: Range(0, 0, 0, finite=True) for name in ("inv", "bias", "z")}
    result = lowered(MASK, one=np.float32(1), big=np.float32(-1e9), ranges=ranges)

    assert "-1e+09" in reason(result, "mul")


NORM = """g (float[N,8] x) => (float[N,8] y) { h = MatMul(x, w)
  [mean] mu = ReduceMean<axes = [-1]>(h) [sub] d = Sub(h, mu) [sq] s = %s [var] v = ReduceMean<axes = [-1]>(s)
  [eps] ve = Add(v, e) [root] sd = Sqrt(ve) [div] n = Div(d, sd) [out] y = MatMul(n, w) }"""


@pytest.mark.parametrize("square", ["Pow(d, two)", "Mul(d, d)"])
def test_c26_a_norm_written_out_stays_fp32_as_a_whole(square):
    weights = {"w": np.eye(8, dtype=np.float32), "e": np.float32(1e-5)} | (
        {"two": np.float32(2)} if "two" in square else {}
    )
    result = lowered(NORM % square, **weights)

    kept = {node for node, dtype in chosen(result).items() if dtype == "float32"}
    assert kept == {"mean", "sub", "sq", "var", "eps", "root", "div"}
    assert chosen(result)["out"] == "float16"


def test_rms_norm_written_out_stays_fp32():
    text = """g (float[N,8] x) => (float[N,8] y) { h = MatMul(x, w) [sq] s = Mul(h, h) [mean] v = ReduceMean<axes = [-1]>(s)
      [eps] ve = Add(v, e) [root] sd = Sqrt(ve) [inv] r = Reciprocal(sd) [mul] n = Mul(h, r) y = MatMul(n, w) }"""
    result = lowered(text, w=np.eye(8, dtype=np.float32), e=np.float32(1e-6))

    assert {n for n, dtype in chosen(result).items() if dtype == "float32"} == {
        "sq",
        "mean",
        "eps",
        "root",
        "inv",
        "mul",
    }


def test_an_epsilon_below_the_normal_range_keeps_its_division():
    text = "g (float[2,4] x) => (float[2,4] y) { h = MatMul(x, w) [eps] b = Add(h, e) c = Div(h, b) y = MatMul(c, w) }"
    assert "1e-05" in reason(lowered(text, w=W, e=np.float32(1e-5)), "eps")
    assert chosen(lowered(text, w=W, e=np.float32(1e-3)))["eps"] == "float16"


def test_c44_weights_that_would_vanish_stay_fp32():
    text = "g (float[2,4] x) => (float[2,4] y) { [fc] y = MatMul(x, w) }"

    assert "norm in float16" in reason(lowered(text, w=W * np.float32(1e-9)), "fc")


RESIZE = 'Resize<mode = "nearest">(%s, , s)'


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_c27_resize_scales_stay_fp32(dtype):
    text = "g (float[1,1,2,2] x) => (float[1,1,4,4] y) { [up] y = " + RESIZE % "x" + " }"
    result = lowered(text, dtype=dtype, keep_io=False, s=np.float32([1, 1, 2, 2]))

    assert chosen(result)["up"] == dtype
    assert types(result.model)["s"] == F32


def test_c27_resize_in_a_loop_body():
    text = """g (float[1,1,2,2] x, int64 m, bool c) => (float[1,1,A,B] y) {
      h = Conv(x, w)
      z = Loop (m, c, h) <body = b (int64 i, bool ci, float[1,1,P,Q] v) => (bool co, float[1,1,P,Q] o) {
        co = Identity(ci) [up] u = Resize<mode = "nearest">(v, , s) o = Conv(u, w) }>
      y = Conv(z, w) }"""
    result = lowered(text, w=np.ones((1, 1, 1, 1), np.float32), s=np.float32([1, 1, 1, 1]))

    assert chosen(result)["up"] == "float16"
    assert result.num_casts == 2
    assert types(result.model)["s"] == F32
    loop = next(node for node in result.model.graph.node if node.op_type == "Loop")
    body = loop.attribute[0].g
    assert [value.type.tensor_type.elem_type for value in (body.input[2], body.output[1])] == [F16, F16]


def test_c17_what_a_loop_turns_by_stays_fp32():
    text = """g (float[2] x) => (float[2] y, int64 n) { s0 = ReduceSum<keepdims = 0>(x) c0 = Less(s0, ten)
      y, n = Loop (m, c0, x, zero) <body = b (int64 i, bool ci, float[2] v, int64 k) => (bool co, float[2] o, int64 ko) {
        o = Add(v, one) ko = Add(k, step) s = ReduceSum<keepdims = 0>(o) co = Less(s, ten) }> }"""
    weights = {
        "m": np.int64(1000),
        "zero": np.int64(0),
        "ten": np.float32(10),
        "one": np.float32(1),
        "step": np.int64(1),
    }
    result = lowered(text, keep_io=False, **weights)

    inner = [row for row in result.decisions if row.op not in ("input", "output")]
    assert {row.dtype for row in inner} == {"float32"}


def test_an_if_gives_one_type_from_both_branches():
    text = """g (float[2,4] x, bool c) => (float[2,4] y) {
      z = If (c) <then_branch = t () => (float[2,4] p) { p = MatMul(x, w) },
                  else_branch = e () => (float[2,4] q) { q = Softmax(x) }>
      y = MatMul(z, w) }"""
    result = lowered(text, w=W)

    branches = {
        attribute.name: attribute.g
        for node in result.model.graph.node
        for attribute in node.attribute
        if attribute.g.node
    }
    assert {graph.output[0].type.tensor_type.elem_type for graph in branches.values()} == {F16}
    assert ops(branches["else_branch"]) == ["Softmax", "Cast"]
    assert "Cast" not in ops(branches["then_branch"])


def test_a_scan_carries_one_type():
    text = """g (float[4] s, float[5,4] x) => (float[4] t, float[5,4] y) {
      t, y = Scan <num_scan_inputs = 1, body = b (float[4] si, float[4] xi) => (float[4] so, float[4] yo) {
        m = MatMul(xi, w) u = Add(si, m) so = MatMul(u, w) yo = Identity(so) }> (s, x) }"""
    result = lowered(text, w=W)

    types(result.model)
    assert {row.dtype for row in result.decisions} == {"float16"}
    assert result.num_casts == 4


def test_local_functions_are_opened():
    function = '<domain: "f", opset_import: ["" : 17]> twice (p, q) => (r) { s = MatMul(p, q) r = MatMul(s, q) }'
    result = lowered("g (float[2,4] x) => (float[2,4] y) { a = f.twice(x, w) y = f.twice(a, w) } " + function, w=W)

    assert ops(result.model.graph) == ["Cast", "MatMul", "MatMul", "MatMul", "MatMul", "Cast"]
    assert not result.model.functions


def test_constant_nodes_are_converted_where_they_stand():
    result = lowered(
        "g (float[2,4] x) => (float[2,4] y) { c = Constant<value_float = 0.5>() a = MatMul(x, w) y = Mul(a, c) }", w=W
    )

    assert ops(result.model.graph) == ["Cast", "Constant", "MatMul", "Mul", "Cast"]


def test_clip_bounds_saturate():
    result = lowered(
        "g (float[2,4] x) => (float[2,4] y) { a = MatMul(x, w) [clip] y = Clip(a, lo) }", w=W, lo=np.float32(-3e38)
    )

    assert chosen(result)["clip"] == "float16"
    assert numpy_helper.to_array(next(t for t in result.model.graph.initializer if t.name == "lo")) == -65504


def test_positions_and_sizes_stay_fp32():
    text = """g (float[N,4] x, int64[4] p, bool[4] m) => (float[N,4] y) {
      [pos] f = Cast<to = 1>(p) [flag] b = Cast<to = 1>(m) h = MatMul(x, w) i = Mul(h, f) j = Mul(i, b) y = MatMul(j, w)
      s = Shape(x) [size] k = Cast<to = 1>(s) }"""
    result = lowered(text, w=W)

    assert "integers of unknown size" in reason(result, "pos")
    assert chosen(result)["flag"] == "float16"
    assert "sizes of tensors" in reason(result, "size")


def test_numbers_that_become_integers_stay_fp32():
    text = """g (float[2,4] x) => (float[2,4] y) { a = MatMul(x, w) [scale] b = Mul(a, k) [floor] c = Floor(b)
      [cast] i = Cast<to = 7>(c) d = Gather(w, j) [again] e = Cast<to = 1>(i) f = Mul(a, e) y = MatMul(f, w) }"""
    result = lowered(text, w=W, k=np.float32(3), j=np.int64([0, 1]))

    assert "makes integers" in reason(result, "scale")
    assert "makes integers" in reason(result, "floor")


def test_ranges_decide():
    text = "g (float[2,4] x) => (float[2,4] y) { [a] a = MatMul(x, w) [b] b = Relu(a) [c] c = MatMul(b, w) [d] y = MatMul(c, w) }"
    ranges = {
        "a": Range(-1e5, 2e5, 2e5, finite=True),
        "b": Range(0, 2e5, 2e5, finite=True),
        "c": Range(0, 1, 1, finite=True),
    }
    result = lowered(text, w=W, ranges=ranges)

    assert chosen(result) == {"a": "float32", "b": "float32", "c": "float32", "d": "float16"}
    assert "'a' reaches 2e+05" in reason(result, "a")
    assert next(row.range for row in result.decisions if row.node == "a") == ranges["a"]
    assert set(chosen(lowered(text, opset=22, dtype="bfloat16", w=W, ranges=ranges)).values()) == {"bfloat16"}


def test_a_guard_of_what_a_softmax_masks_away_is_lowered():
    text = """g (float[2,4] x) => (float[2,4] y)
      { [s] p = Softmax(x) [isnan] n = IsNaN(p) [where] a = Where(n, zero, p) [m] y = MatMul(a, w) }"""
    masked = Range(0, 1, float("inf"), finite=False)
    ranges = {"x": Range(-2, 2, 2, finite=True), "p": masked, "a": Range(0, 1, 1, finite=True)}

    result = lowered(text, w=W, zero=np.float32(0), ranges=ranges)

    assert chosen(result) == {"s": "float32", "isnan": "float16", "where": "float16", "m": "float16"}
    guarded = lowered(text.replace("Softmax", "Relu"), w=W, zero=np.float32(0), ranges=ranges)
    assert reason(guarded, "where") == "'p' is not finite in the data"


def test_keep_globs():
    text = "g (float[2,4] x) => (float[2,4] y) { [enc_0_fc] a = MatMul(x, w) [enc_1_fc] b = MatMul(a, w) [head] y = MatMul(b, w) }"

    assert reason(lowered(text, keep=["enc_*"], w=W), "enc_1_fc") == "keep 'enc_*'"
    with pytest.raises(TrtForgeError) as caught:
        lowered(text, keep=["haed", "dec.*"], w=W)
    first, second = caught.value.problems
    assert (first.exit_code, first.summary) == (2, "keep 'haed' matches none of the 3 nodes")
    assert "'head'" in first.next_step
    assert "dec.*" in second.summary


def test_unknown_operators_stay_fp32():
    result = lowered(
        "g (float[2,4] x) => (float[2,4] y) { a = MatMul(x, w) [odd] b = acme.Odd(a) y = MatMul(b, w) }", w=W
    )

    assert "acme.Odd is not an operator of ONNX" in reason(result, "odd")


BF16_OLD = """g (float[1,2,4,4] x) => (float[1,2,4] y) { [conv] a = Conv(x, k) b = Unsqueeze<axes = [0]>(a) c = Squeeze<axes = [0]>(b)
  [soft] d = Softmax<axis = 1>(c) e, f = Split<axis = 1, split = [1, 1]>(d) g = Concat<axis = 1>(e, f) y = ReduceMean<axes = [3], keepdims = 0>(g) }"""


def test_bf16_raises_the_opset():
    result = lowered(BF16_OLD, opset=11, dtype="bfloat16", k=np.ones((2, 2, 1, 1), np.float32))

    assert result.notes == ("raised the opset from 11 to 22, which bfloat16 needs",)
    assert result.model.opset_import[0].version == 22
    assert chosen(result)["conv"] == "bfloat16"
    types(result.model)


def test_bf16_does_not_raise_what_it_cannot_rewrite():
    text = "g (float[1,2,4,4] x) => (float[1,2,4,4] y) { [conv] a = Conv(x, k) [clip] y = Clip<min = 0.0>(a) }"
    result = lowered(text, opset=9, dtype="bfloat16", k=np.ones((2, 2, 1, 1), np.float32))

    assert "'clip' (Clip)" in result.notes[0]
    assert "no bfloat16 in ONNX opset 9" in reason(result, "conv")


def test_external_weights_are_taken_in(tmp_path):
    model = parse("g (float[2,4] x) => (float[2,4] y) { y = MatMul(x, w) }", w=W)
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    model = onnx.load(tmp_path / "m.onnx", load_external_data=False)

    result = lower(model, dtype="float16", weights_dir=tmp_path)

    np.testing.assert_array_equal(numpy_helper.to_array(result.model.graph.initializer[0]), W.astype(np.float16))


def test_already_half_models_are_left_alone():
    text = "g (float16[2,4] x) => (float16[2,4] y) { y = MatMul(x, w) }"
    result = lowered(text, w=W.astype(np.float16))

    assert result.decisions == ()
    assert result.num_casts == 0


def test_names_already_taken():
    text = "g (float[2,4] x, float[2,4] x_float16) => (float[2,4] y) { a = MatMul(x, w) b = MatMul(x_float16, w) y = Add(a, b) }"
    result = lowered(text, w=W)

    names = [name for node in result.model.graph.node for name in node.output]
    assert len(names) == len(set(names))
    types(result.model)


@pytest.mark.parametrize(("rows", "dtype"), [(100, "float32"), (40_000, "float16")])
def test_large_tables_are_halved_even_if_that_takes_a_cast(rows, dtype):
    text = "g (int64[3] i) => (float[3,2] y) { [words] a = Gather(t, i) [soft] y = Softmax(a) }"
    result = lowered(text, t=np.ones((rows, 2), np.float32))

    assert chosen(result) == {"words": dtype, "soft": "float32"}
