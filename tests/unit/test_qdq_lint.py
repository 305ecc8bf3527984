from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

from trtforge.errors import CommandLineError, GraphError, SeveralErrors
from trtforge.graph.names import mend as mend_names
from trtforge.graph.qdq_file import open_model, write_model
from trtforge.graph.qdq_fix import lint, mend
from trtforge.graph.qdq_lint import findings

HERE = Path()
F32 = np.float32
I8, U8 = np.int8(0), np.uint8(0)
W = np.arange(-6, 6, dtype=np.int8).reshape(4, 3)


def parse(text, opset=13, **constants):
    header = f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]>'
    model = onnx.parser.parse_model(f"{header} g {text}")
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()
    )
    mend_names(model, None)
    return model


def rules(model, severity=None):
    found = lint(model, HERE, {})
    return [(one.rule, one.node) for one in found if severity in (None, one.severity)]


def by_rule(model, rule):
    (found,) = [one for one in lint(model, HERE, {}) if one.rule == rule]
    return found


PAIR = "(float[N,4] x) => (float[N,4] y) { [q] a = QuantizeLinear(x, s, z)  [dq] b = DequantizeLinear(a, s, z)  [relu] y = Relu(b) }"
PRODUCT = """(float[N,4] x) => (float[N,3] y) {
    [q] a = QuantizeLinear(x, s, z)  [dq] b = DequantizeLinear(a, s, z)
    [dqw] v = DequantizeLinear<axis = 1>(w, ws, wz)  [fc] y = MatMul(b, v) }"""
GOOD = {"s": F32(0.1), "z": I8, "w": W, "ws": np.full(3, 0.01, F32), "wz": np.zeros(3, np.int8)}


def test_what_tensorrt_reads_has_no_findings():
    assert rules(parse(PRODUCT, **GOOD)) == []


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        (np.int8(3), [("QDQ01", "q"), ("QDQ01", "dq")]),
        (np.uint8(128), [("QDQ02", "q"), ("QDQ02", "dq")]),
        (np.uint8(0), [("QDQ02", "q"), ("QDQ02", "dq")]),
        (np.uint16(0), [("QDQ02", "q"), ("QDQ02", "dq")]),
        (I8, []),
    ],
)
def test_zero_points_and_types(zero, expected):
    assert rules(parse(PAIR, opset=21, s=F32(0.1), z=zero)) == expected


@pytest.mark.parametrize(("zero", "mendable"), [(np.int8(3), False), (np.uint8(127), False), (np.uint8(128), True)])
def test_only_a_middle_zero_point_is_mended(zero, mendable):
    assert {one.mendable for one in lint(parse(PAIR, s=F32(0.1), z=zero), HERE, {})} == {mendable}


def test_a_missing_zero_point_is_uint8_to_onnx():
    text = "(float[4] x) => (float[4] y) { [q] a = QuantizeLinear(x, s)  [dq] b = DequantizeLinear(a, s)  y = Relu(b) }"
    found = lint(parse(text, s=F32(1)), HERE, {})

    assert [(one.rule, one.node, one.mendable) for one in found] == [("QDQ02", "q", False), ("QDQ02", "dq", False)]
    assert found[0].found == "no zero point"


@pytest.mark.parametrize(
    ("scale", "found"),
    [
        (F32(0), "scale 0"),
        (F32(-0.1), "scale -0.1"),
        (F32(np.inf), "scale inf"),
        (F32(np.nan), "scale nan"),
        (F32(2.0**-130), "scale 7.34684e-40"),
        (F32(1e38), "scale 1e+38"),
    ],
)
def test_bad_scales(scale, found):
    first, second = lint(parse(PAIR, s=scale, z=I8), HERE, {})

    assert [(first.rule, first.node), (second.rule, second.node)] == [("QDQ05", "q"), ("QDQ05", "dq")]
    assert first.found == found
    assert first.severity == "error"
    assert not first.mendable


def test_half_scales_are_judged_by_their_own_range():
    text = PAIR.replace("float[", "float16[")

    assert rules(parse(text, opset=19, s=np.float16(6e-6), z=I8)) == [("QDQ05", "q"), ("QDQ05", "dq")]
    assert rules(parse(text, opset=19, s=np.float16(0.1), z=I8)) == []
    assert rules(parse(text.replace("float16", "bfloat16"), opset=19, s=ml_dtypes.bfloat16(6e-6), z=I8)) == []


def test_a_computed_scale():
    text = "(float[N,4] x, float t) => (float[N,4] y) { [q] a = QuantizeLinear(x, t, z)  [dq] b = DequantizeLinear(a, t, z)  y = Relu(b) }"

    assert rules(parse(text, z=I8)) == [("QDQ05", "q"), ("QDQ05", "dq")]


def test_wrong_number_of_scales():
    model = parse(PRODUCT, **{**GOOD, "ws": np.full(4, 0.01, F32), "wz": np.zeros(4, np.int8)})

    assert by_rule(model, "QDQ05").found == "4 scales for axis 1 of [4, 3]"


def test_per_channel_activations():
    model = parse(PAIR, s=np.full(4, 0.1, F32), z=np.zeros(4, np.int8))

    assert rules(model) == [("QDQ06", "q"), ("QDQ06", "dq")]


@pytest.mark.parametrize(
    ("op", "shape", "right"),
    [
        ("Conv", (4, 4, 1, 1), 0),
        ("ConvTranspose", (4, 4, 1, 1), 1),
        ("MatMul", (4, 4), 1),
        ("Gemm", (4, 4), 1),
        ("Gemm<transB = 1>", (4, 4), 0),
    ],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_c42_axis_of_weights(op, shape, right, axis):
    dims = "N,4,1,1" if len(shape) == 4 else "N,4"
    text = f"""(float[{dims}] x) => (float[{dims}] y) {{
        [q] a = QuantizeLinear(x, s, z)  [dq] b = DequantizeLinear(a, s, z)
        [dqw] v = DequantizeLinear<axis = {axis}>(w, ws, wz)  [op] y = {op}(b, v) }}"""
    model = parse(text, s=F32(0.1), z=I8, w=np.ones(shape, np.int8), ws=np.full(4, 0.1, F32), wz=np.zeros(4, np.int8))

    assert rules(model) == ([] if axis == right else [("QDQ07", "op")])


def test_the_axis_is_followed_through_a_transposition():
    text = PRODUCT.replace("w, ws, wz)  [fc] y = MatMul(b, v)", "w, ws, wz)  t = Transpose(v)  [fc] y = MatMul(b, t)")
    right = {**GOOD, "w": W.T, "ws": np.full(3, 0.01, F32)}

    assert rules(parse(text.replace("axis = 1", "axis = 0"), **right)) == []
    wrong = {**right, "ws": np.full(4, 0.01, F32), "wz": np.zeros(4, np.int8)}
    assert rules(parse(text, **wrong)) == [("QDQ07", "fc")]


def test_c44_int32_bias():
    text = PRODUCT.replace("[fc] y = MatMul(b, v)", "[dqb] c = DequantizeLinear(bias, bs)  [fc] y = Gemm(b, v, c)")
    model = parse(text, **GOOD, bias=np.array([1, -2, 2**30 + 1], np.int32), bs=F32(1e-3))
    found = by_rule(model, "QDQ03")

    assert (found.node, found.severity, found.mendable) == ("dqb", "error", True)
    mend(model, HERE)
    assert findings(model, HERE, {}) == ()
    (bias,) = [
        tensor for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT and tensor.name == "c"
    ]
    np.testing.assert_array_equal(numpy_helper.to_array(bias), np.array([1, -2, 2**30 + 1]).astype(F32) * F32(1e-3))


def test_a_bias_in_int8_gains_nothing():
    text = PRODUCT.replace("[fc] y = MatMul(b, v)", "[dqb] c = DequantizeLinear(bias, bs)  [fc] y = Gemm(b, v, c)")

    assert rules(parse(text, **GOOD, bias=np.ones(3, np.int8), bs=F32(1e-3))) == [("QDQ04", "fc")]


@pytest.mark.parametrize(
    ("text", "constants", "expected"),
    [
        pytest.param(
            "(float[4] x) => (uint8[4] y, float s, uint8 z) { [n] y, s, z = DynamicQuantizeLinear(x) }",
            {},
            [("QDQ09", "n")],
            id="dynamic",
        ),
        pytest.param(
            "(uint8[2,4] x) => (int32[2,3] y) { [n] y = MatMulInteger(x, w) }", {"w": W}, [("QDQ09", "n")], id="integer"
        ),
        pytest.param(
            "(float[2,4] x) => (float[2,4] y) { [n] y = com.microsoft.QAttention(x) }",
            {},
            [("QDQ09", "n")],
            id="contrib",
        ),
        pytest.param(
            "(float[2,4] x) => (float[2,4] y) { [n] y = com.microsoft.MatMulNBits(x) }",
            {},
            [("QDQ09", "n")],
            id="n-bits",
        ),
        pytest.param("(float[2,4] x) => (float[2,4] y) { [n] y = com.microsoft.Gelu(x) }", {}, [], id="not quantized"),
    ],
)
def test_quantized_operators(text, constants, expected):
    assert rules(parse(text, **constants)) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("(float[4] x) => (float[4] y) { [q] a = QuantizeLinear(x, s, z)  [c] y = Cast<to = 1>(a) }", ("QDQ10", "q")),
        ("(float[4] x) => (int8[4] y) { [q] y = QuantizeLinear(x, s, z) }", ("QDQ10", "q")),
        ("(int8[4] x) => (float[4] y) { [dq] a = DequantizeLinear(x, s, z)  y = Relu(a) }", ("QDQ11", "dq")),
        (
            "(float[4] x) => (float[4] y) { c = Cast<to = 3>(x)  [dq] a = DequantizeLinear(c, s, z)  y = Relu(a) }",
            ("QDQ11", "dq"),
        ),
    ],
)
def test_half_a_pair(body, expected):
    assert rules(parse(body, s=F32(0.1), z=I8)) == [expected]


@pytest.mark.parametrize("op", ["Reshape(a, shape)", "Transpose(a)", "Identity(a)"])
def test_operators_that_move_integers_are_seen_through(op):
    text = f"(float[2,4] x) => (float[N,M] y) {{ a = QuantizeLinear(x, s, z)  m = {op}  b = DequantizeLinear(m, s, z)  y = Relu(b) }}"

    assert rules(parse(text, s=F32(0.1), z=I8, shape=np.array([4, 2]))) == []


def test_one_quantized_operand():
    text = "(float[N,4] x) => (float[N,3] y) { [dqw] v = DequantizeLinear<axis = 1>(w, ws, wz)  [fc] y = MatMul(x, v) }"

    assert rules(parse(text, w=W, ws=GOOD["ws"], wz=GOOD["wz"])) == [("QDQ12", "fc")]
    int4 = {"w": W.astype(ml_dtypes.int4), "ws": GOOD["ws"], "wz": GOOD["wz"].astype(ml_dtypes.int4)}
    assert rules(parse(text, opset=21, **int4)) == []


SKIP = """(float[N,4] x) => (float[N,4] y) {{
    qx = QuantizeLinear(x, s, z)  dx = DequantizeLinear(qx, s, z)  dw = DequantizeLinear(w, s, z)  m = MatMul(dx, dw)
    qm = QuantizeLinear(m, s2, z)  dm = DequantizeLinear(qm, s2, z)  [add] a = Add({})  y = Relu(a) }}"""


@pytest.mark.parametrize(
    ("operands", "found"),
    [
        ("m, dx", None),
        ("dx, m", None),
        ("m, c", None),
        ("m, x", "the skip 'x' is not quantized"),
        ("dx, dm", "both operands are quantized"),
        ("dm, x", "the output of 'MatMul"),
    ],
)
def test_c45_skip_connections(operands, found):
    constants = {"s": F32(0.1), "s2": F32(0.2), "z": I8, "w": np.ones((4, 4), np.int8), "c": np.ones(4, F32)}
    told = [one.found for one in lint(parse(SKIP.format(operands), **constants), HERE, {}) if one.rule == "QDQ13"]

    assert len(told) == (found is not None)
    assert not found or told[0].startswith(found)


@pytest.mark.parametrize(("scale", "expected"), [(0.1, []), (0.2, [("QDQ14", "cat")])])
def test_c45_inputs_of_a_concat_share_a_scale(scale, expected):
    text = """(float[N,4] x) => (float[N,8] y) { q = QuantizeLinear(x, s, z)  a = DequantizeLinear(q, s, z)
        r = Relu(x)  p = QuantizeLinear(r, t, z)  b = DequantizeLinear(p, t, z)  [cat] c = Concat<axis = 1>(a, b)  y = Relu(c) }"""

    assert rules(parse(text, s=F32(0.1), t=F32(scale), z=I8)) == expected


def test_scales_around_a_maximum():
    text = """(float[N,1,4,4] x) => (float[N,1,2,2] y) { q = QuantizeLinear(x, s, z)  a = DequantizeLinear(q, s, z)
        [pool] m = MaxPool<kernel_shape = [2,2], strides = [2,2]>(a)
        p = QuantizeLinear(m, t, z)  b = DequantizeLinear(p, t, z)  y = Relu(b) }"""

    assert ("QDQ14", "pool") in rules(parse(text, s=F32(0.1), t=F32(0.2), z=I8))
    assert ("QDQ14", "pool") not in rules(parse(text, s=F32(0.1), t=F32(0.1), z=I8))


TWICE = """(float[N,4] x) => (float[N,4] y) { [q] a = QuantizeLinear(x, s, z)  [dq] b = DequantizeLinear(a, s, z)
    [q2] c = QuantizeLinear(b, t, z)  [dq2] d = DequantizeLinear(c, t, z)  y = Relu(d) }"""


def test_c51_pairs_in_a_row():
    other = by_rule(parse(TWICE, s=F32(0.1), t=F32(0.07), z=I8), "QDQ15")
    same = parse(TWICE, s=F32(0.1), t=F32(0.1), z=I8)

    assert (other.node, other.mendable) == ("q2", False)
    assert by_rule(same, "QDQ15").mendable
    mend(same, HERE)
    assert [node.op_type for node in same.graph.node] == ["QuantizeLinear", "DequantizeLinear", "Relu"]


def test_a_pair_that_is_no_inverse():
    text = PAIR.replace("DequantizeLinear(a, s, z)", "DequantizeLinear(a, t, z)")

    assert rules(parse(text, s=F32(0.1), t=F32(0.2), z=I8)) == [("QDQ16", "dq")]


def test_outputs_alone_quantized():
    text = """(float[N,4] x) => (float[N,4] y) { m = MatMul(x, w)  [q] a = QuantizeLinear(m, s, z)
        b = DequantizeLinear(a, s, z)  y = Relu(b) }"""

    assert rules(parse(text, w=np.ones((4, 4), F32), s=F32(0.1), z=I8)) == [("QDQ17", "q")]


def test_c40_the_linter_names_the_node_and_the_mended_file_is_int8():
    text = "(float[N,4] x) => (float[N,4] y) { [q] a = QuantizeLinear(x, s, z)  [dq] y = DequantizeLinear(a, s, z) }"
    model = parse(text, s=F32(0.1), z=np.uint8(128))

    assert rules(model, "error") == [("QDQ02", "q"), ("QDQ02", "dq")]
    mend(model, HERE)
    assert rules(model, "error") == []
    zeros = [tensor for tensor in model.graph.initializer if tensor.name != "s"]
    assert {(tensor.data_type, *numpy_helper.to_array(tensor).reshape(-1)) for tensor in zeros} == {
        (TensorProto.INT8, 0)
    }


def test_c15_per_channel_below_opset_13():
    text = """(float[1,3,4,4] x) => (float[1,2,4,4] y) { [q] a = QuantizeLinear(x, s, z)  [dq] b = DequantizeLinear(a, s, z)
        [dqw] v = DequantizeLinear(w, ws, wz)  c = Conv(b, v)  n = Squeeze<axes = [0]>(c)  y = Unsqueeze<axes = [0]>(n) }"""
    weights = {"w": np.ones((2, 3, 1, 1), np.int8), "ws": np.full(2, 0.1, F32), "wz": np.zeros(2, np.int8)}
    model = parse(text, opset=11, s=F32(0.1), z=I8, **weights)
    model.graph.node[2].attribute.append(helper.make_attribute("axis", 0))

    found = by_rule(model, "QDQ08")
    assert (found.node, found.mendable) == ("dqw", True)
    mend(model, HERE)
    onnx.checker.check_model(model, full_check=True)
    assert [entry.version for entry in model.opset_import if not entry.domain] == [13]
    assert rules(model) == []


@pytest.mark.parametrize(
    ("weights", "zero", "mended"),
    [
        (np.array([[0, 255]], np.uint8), np.uint8(128), [[-128, 127]]),
        (np.array([[0, 100]], np.uint8), np.uint8(0), [[0, 100]]),
        (np.array([[0, 128]], np.uint8), np.uint8(0), None),
        (np.array([[-100, 27]], np.int8), np.int8(-5), [[-95, 32]]),
        (np.array([[-100, 124]], np.int8), np.int8(-5), None),
        (np.array([[3, 9]], np.uint8), np.array([3, 1], np.uint8), [[0, 8]]),
    ],
)
def test_weights_lose_their_zero_point_where_they_fit(weights, zero, mended):
    scale = np.full(zero.shape, 0.1, F32)
    text = """(float[N,1] x) => (float[N,2] y) { q = QuantizeLinear(x, s, z)  a = DequantizeLinear(q, s, z)
        [dqw] v = DequantizeLinear<axis = 1>(w, ws, wz)  y = MatMul(a, v) }"""
    model = parse(text, s=F32(0.1), z=I8, w=weights, ws=scale, wz=zero)
    mend(model, HERE)

    assert rules(model) == ([] if mended else [("QDQ02" if weights.dtype == np.uint8 else "QDQ01", "dqw")])
    assert not mended or [t for t in model.graph.initializer if numpy_helper.to_array(t).tolist() == mended]


def test_subgraphs_are_linted_and_mended_where_they_stand():
    body = parse(
        "() => (float[4] b) { [q] a = QuantizeLinear(x, s, z)  [dq] d = DequantizeLinear(a, s, z)  b = Relu(d) }"
    )
    other = parse("() => (float[4] e) { e = Relu(x) }")
    model = parse("(float[4] x, bool c) => (float[4] y) { y = Relu(x) }", s=F32(0.1), z=np.uint8(128))
    branch = helper.make_node("If", ["c"], ["y"], name="if", then_branch=body.graph, else_branch=other.graph)
    model.graph.node[0].CopyFrom(branch)

    assert [(one.scope, one.node, one.mendable) for one in lint(model, HERE, {})] == [
        ("if/then_branch", "q", True),
        ("if/then_branch", "dq", True),
    ]
    mend(model, HERE)
    onnx.checker.check_model(model, full_check=True)
    assert findings(model, HERE, {}) == ()


def test_a_type_that_the_backend_lacks():
    model = parse(PAIR, opset=19, s=F32(0.1), z=np.zeros((), ml_dtypes.float8_e4m3fn))

    assert rules(model) == []
    assert [one.why for one in findings(model, HERE, {"float8e4m3fn": "no FP8"})] == ["no FP8"] * 2


def external(model, folder):
    onnx.save(model, folder / "in.onnx", save_as_external_data=True, location="in.bin", size_threshold=0)
    return folder / "in.onnx"


def test_external_data_is_read_and_copied(tmp_path):
    source = external(parse(PRODUCT, **{**GOOD, "s": F32(0.25), "z": np.uint8(128)}), tmp_path)
    before = source.read_bytes()
    target = tmp_path / "out" / "out.onnx"
    model = open_model(source)
    mend(model, tmp_path)
    write_model(model, source, target)

    assert source.read_bytes() == before
    (data,) = target.parent.glob("*.data")
    assert data.read_bytes() == (tmp_path / "in.bin").read_bytes()
    assert numpy_helper.to_array(onnx.load(target).graph.initializer[0]) == F32(0.25)


@pytest.mark.parametrize("name", ["in.onnx", "in.bin"])
def test_the_model_is_never_written_over(tmp_path, name):
    source = external(parse(PRODUCT, **GOOD), tmp_path)

    with pytest.raises(CommandLineError, match="write over the model"):
        write_model(open_model(source), source, tmp_path / name)


def test_nothing_stays_of_a_model_that_does_not_pass_the_checks(tmp_path):
    source = external(parse(PRODUCT, **{**GOOD, "wz": np.zeros(3, np.uint8)}), tmp_path)

    with pytest.raises(GraphError, match="does not pass ONNX's checks"):
        write_model(open_model(source), source, tmp_path / "out" / "out.onnx")
    assert list((tmp_path / "out").iterdir()) == []


def test_external_data_outside_is_refused(tmp_path):
    source = external(parse(PRODUCT, **GOOD), tmp_path)
    model = onnx.load(source, load_external_data=False)
    model.graph.initializer[0].external_data[0].value = "../in.bin"
    source.write_bytes(model.SerializeToString())

    with pytest.raises(SeveralErrors) as error:
        open_model(source)
    assert "leaves the model's folder" in error.value.problems[0].summary


@pytest.mark.parametrize("position", range(3))
def test_what_a_node_lacks_is_told_before_any_rule(tmp_path, position):
    model = parse(PAIR, s=F32(0.1), z=I8)
    del (model.graph.node[0].output if position == 2 else model.graph.node[position].input)[0 if position == 2 else 1 :]
    if position == 2:
        model.graph.node[1].input[0] = "x"
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())

    with pytest.raises(SeveralErrors) as error:
        open_model(tmp_path / "m.onnx")
    assert f"'{('q', 'dq', 'q')[position]}' " in error.value.problems[0].summary


def test_odd_parameters_are_findings():
    assert rules(parse(PAIR, s=ml_dtypes.int4(1), z=I8)) == [("QDQ05", "q"), ("QDQ05", "dq")]
    assert rules(parse(PAIR, s=np.int32(1), z=I8)) == [("QDQ05", "q"), ("QDQ05", "dq")]
    assert rules(parse(PRODUCT, **{**GOOD, "wz": np.ones(5, np.int8)})) == [("QDQ01", "dqw")]
    assert rules(parse(PRODUCT.replace("axis = 1", "axis = 7"), **GOOD))[0] == ("QDQ05", "dqw")


@pytest.mark.parametrize(("zero", "mended"), [(I8, True), (np.int16(0), False)])
def test_nodes_of_com_microsoft_become_onnx_own(zero, mended):
    text = PAIR.replace("= Quantize", "= com.microsoft.Quantize").replace("= Dequantize", "= com.microsoft.Dequantize")
    model = parse(text, s=F32(0.1), z=zero)

    assert {one.mendable for one in lint(model, HERE, {}) if one.rule == "QDQ09"} == {mended}
    mend(model, HERE)
    assert rules(model) == [] or not mended
