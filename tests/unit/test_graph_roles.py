from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from trtforge.graph.roles import data_dependent_outputs, infer_roles, wide_int_constants
from trtforge.types import InputRole

FN = '<domain: "f", opset_import: ["": 17]> fn (p, q) => (r) { r = Gather (p, q) }'


def parse(signature: str, body: str, constants: dict[str, np.ndarray] | None = None) -> onnx.ModelProto:
    head = '<ir_version: 8, opset_import: ["": 17, "f": 1, "com.microsoft": 1]>'
    model = onnx.parser.parse_model(f"{head} g {signature} {{ {body} }} {FN}")
    model.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in (constants or {}).items())
    return model


def role(signature: str, body: str, constants: dict[str, np.ndarray] | None = None) -> InputRole:
    """The role of the first input."""
    return infer_roles(parse(signature, body, constants))[0]


TABLE = np.zeros((30522, 2), np.float32)
SMALL = np.zeros((2, 2), np.float32)
ONE, ZERO, BIG = np.float32([1]), np.float32([0]), np.float32([-1e9])


@pytest.mark.parametrize(
    "body",
    [
        "y = Gather (w, x)",
        "a = Identity (x) b = Cast <to = 7> (a) d = Unsqueeze (b, axes) y = Gather (w, d)",
        "h = Cast <to = 10> (w) z = Gather (h, x) y = Cast <to = 1> (z)",
        "y = If (c) <then_branch = t () => (float[N, 2] p) { p = Gather (w, x) }, else_branch = e () => (float[N, 2] q) { q = Gather (w, x) }>",
        "y = f.fn (w, x)",
        "y = com.microsoft.EmbedLayerNormalization (x, x, w, w)",
    ],
)
def test_rows_of_a_constant_table_bound_token_ids(body):
    found = role("(int64[N] x, bool c) => (float[N, 2] y)", body, {"w": TABLE, "axes": np.int64([0])})
    assert (found.kind, found.low, found.high) == ("token_ids", 0, 30521)
    assert found.reason == "row index of the 30522-row table 'w'"


def test_smallest_table_and_the_gathered_axis_count():
    body = "a = Gather (w, x) b = Gather <axis = 1> (v, x) y = Identity (a)"
    found = role("(int32[N] x) => (float[N, 2] y)", body, {"w": TABLE, "v": np.zeros((9000, 77), np.float32)})
    assert (found.kind, found.high) == ("token_ids", 76)


def test_one_hot_depth_and_comparison_with_a_count_bound_classes():
    signature = "(int32[N, 1] x) => (float[N, 2] y)"
    depth = role(signature, "y = OneHot (x, depth, v)", {"depth": np.int64(10), "v": np.float32([0, 1])})
    assert (depth.kind, depth.low, depth.high) == ("token_ids", 0, 9)
    iota = role(signature, "e = Equal (x, k) y = Cast <to = 1> (e)", {"k": np.arange(257, dtype=np.int32)[None]})
    assert (iota.kind, iota.low, iota.high) == ("token_ids", 0, 256)


def test_minilm_like_inputs():
    body = """
        a = Gather (words, input_ids) b = Gather (types, token_type_ids) e = Add (a, b)
        m = Unsqueeze (attention_mask, axes) f = Cast <to = 1> (m) i = Sub (one, f) k = Mul (i, big)
        y = Add (e, k)
    """
    signature = "(int64[B, S] input_ids, int64[B, S] attention_mask, int64[B, S] token_type_ids) => (float[B, S, 2] y)"
    constants = {"words": TABLE, "types": SMALL, "one": ONE, "big": BIG, "axes": np.int64([2])}
    found = infer_roles(parse(signature, body, constants))
    assert [(r.name, r.kind, r.low, r.high) for r in found] == [
        ("input_ids", "token_ids", 0, 30521),
        ("attention_mask", "mask", 0, 1),
        ("token_type_ids", "token_ids", 0, 1),
    ]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("i = Sub (one, x) y = Mul (i, big)", "mask"),
        ("i = Sub (x, one) y = Mul (i, huge)", "mask"),
        ("b = Cast <to = 9> (x) y = Where (b, s, big)", "mask"),
        ("b = Equal (x, zero) y = Where (b, big, s)", "mask"),
        ("b = Cast <to = 9> (x) n = Not (b) y = Where (n, big, s)", "mask"),
        ("i = Sub (one, x) b = Cast <to = 9> (i) y = Where (b, big, s)", "mask"),
        ("y = Mul (x, big)", "free"),
        ("b = Cast <to = 9> (x) y = Where (b, big, s)", "free"),
        ("y = Mul (x, one)", "free"),
    ],
)
def test_masks_are_known_by_what_becomes_a_large_negative_number(body, kind):
    constants = {"one": ONE, "zero": ZERO, "big": BIG, "huge": -BIG}
    assert role("(float[N] x, float[N] s) => (float[N] y)", body, constants).kind == kind


def test_mask_whose_ones_blank_out_is_free_even_if_named_a_mask():
    body = "y = Where (padding_mask, big, s)"
    found = role("(bool[N] padding_mask, float[N] s) => (float[N] y)", body, {"big": BIG})
    assert (found.kind, found.reason) == ("free", "a mask whose ones mark what is blanked out")


def test_name_alone_makes_a_mask():
    found = role("(float[N] My_Mask) => (float[N] y)", "y = Relu (My_Mask)")
    assert (found.kind, found.reason) == ("mask", "named a mask")


@pytest.mark.parametrize(
    "body",
    [
        "y = Reshape (d, x)",
        "a = Add (x, x) b = Cast <to = 7> (a) e = Concat <axis = 0> (b, k) y = Expand (d, e)",
        "y = Slice (d, k, x)",
        "a = Gather (x, k) y = Range (k, a, k)",
        "a = ReduceMax <keepdims = 0> (x) y = ConstantOfShape (a)",
        "y = Resize (d, , , x)",
        (
            "s = Loop (k, , x) <body = b (int64 i, bool p, int64[1] v) => (bool q, int64[1] w) { q = Identity (p) w = Add (v, v) }>"
            " y = Reshape (d, s)"
        ),
        "m = Equal (x, k) w = Where (m, k, x) y = Expand (d, w)",
        "y = If (c) <then_branch = t () => (float[?] p) { p = Reshape (d, x) }, else_branch = e () => (float[?] q) { q = Relu (d) }>",
    ],
)
def test_c06_values_that_reach_a_shape_operand(body):
    found = role("(int64[1] x, float[N] d, bool c) => (float[?] y)", body, {"k": np.int64([1])})
    assert found.kind == "shape_values"
    assert (found.low, found.high) == (1, 64)
    assert "placeholder" in found.reason


@pytest.mark.parametrize(
    ("signature", "body"),
    [
        ("(int64[N] x, float[M] d) => (float[?] y)", "s = Shape (x) y = Expand (d, s)"),
        ("(int64[2, 2] x, float[M] d) => (float[?] y)", "y = Expand (d, x)"),
        ("(float[1] x, float[M] d) => (float[?] y)", "y = Expand (d, x)"),
        ("(int64[1] x, float[M] d) => (float[?] y)", "a = Gather (d, x) b = Shape (a) y = Expand (d, b)"),
    ],
)
def test_sizes_ranks_above_1_and_floats_are_no_shape_values(signature, body):
    assert role(signature, body).kind != "shape_values"


def test_trip_count_of_a_loop_with_scan_output_decides_a_shape():
    body = """
        y = Loop (x, ) <body = b (int64 i, bool k) => (bool k2, float[1] s) { k2 = Identity (k) s = Neg (d) }>
    """
    found = role("(int64 x, float[1] d) => (float[?, 1] y)", body)
    assert (found.kind, found.reason.split(" and")[0]) == ("shape_values", "its values are the trip count of a Loop")


@pytest.mark.parametrize(
    ("dtype", "shape", "kind", "low", "high"),
    [
        ("float", "[N, 3, 8, 8]", "image", 0, 1),
        ("float16", "[N, 8, 8, 1]", "image", 0, 1),
        ("uint8", "[N, H, W, 4]", "image", 0, 255),
        ("float", "[N, 5, 8, 8]", "free", -1, 1),
        ("float", "[N, C, H, W]", "free", -1, 1),
        ("float", "[3, 8, 8]", "free", -1, 1),
        ("uint8", "[N]", "free", 0, 255),
        ("int8", "[N]", "free", -128, 127),
        ("int32", "[N, 3, 8, 8]", "free", 0, 1),
        ("bool", "[N]", "free", 0, 1),
        ("double", "[]", "free", -1, 1),
    ],
)
def test_images_and_free_inputs(dtype, shape, kind, low, high):
    found = role(f"({dtype}{shape} x) => ({dtype}{shape} y)", "y = Identity (x)")
    assert (found.kind, found.low, found.high) == (kind, low, high)


def test_compared_number_is_what_the_graph_knows():
    found = role("(int64 sr) => (bool y)", "y = Equal (sr, k)", {"k": np.int64(16000)})
    assert (found.kind, found.low, found.high, found.reason) == (
        "free",
        16000,
        16000,
        "the graph compares it with 16000",
    )


def test_index_into_a_computed_tensor_is_zero():
    found = role("(int64[N] x, float[M] d) => (float[N] y)", "y = Gather (d, x)")
    assert (found.kind, found.low, found.high) == ("free", 0, 0)


def test_initializers_have_no_role():
    model = parse("(float[2] x, float[2] w) => (float[2] y)", "y = Add (x, w)", {"w": np.float32([1, 2])})
    assert [found.name for found in infer_roles(model)] == ["x"]


LOOP = """
    y = Loop (trips, ) <body = b (int64 i, bool k) => (bool k2, float[1] s) {{ {condition} s = Neg (one) }}>
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("n = NonZero (x) y = Cast <to = 1> (n)", True),
        ("m = Greater (x, one) y = Compress (x, m)", True),
        ("n = NonZero (x) s = Shape (n) y = ConstantOfShape (s)", True),
        ("n = NonZero (x) s = Size (n) y = Cast <to = 1> (s)", False),
        ("n = NonZero (x) t = Transpose (n) y = ScatterND (x, t, x)", False),
        ("s = Shape (x) y = ConstantOfShape (s)", False),
        ("y = Relu (x)", False),
        (LOOP.format(condition="k2 = Identity (k)"), False),
        (LOOP.format(condition="z = Less (one, x) k2 = Reshape (z, none)"), True),
        (
            (
                "c = Cast <to = 9> (zero) y = If (c) <then_branch = t () => (float[?] p) { n = NonZero (x) p = Cast <to = 1> (n) },"
                " else_branch = e () => (float[?] q) { q = Relu (x) }>"
            ),
            True,
        ),
    ],
)
def test_c11_outputs_whose_shape_depends_on_data(body, expected):
    constants = {"one": ONE, "zero": np.float32(0), "trips": np.int64(3), "none": np.zeros(0, np.int64)}
    model = parse("(float[N] x) => (float[?] y, float[N] z)", body + " z = Neg (x)", constants)
    assert data_dependent_outputs(model) == (("y",) if expected else ())


MAX = 2**63 - 1


@pytest.mark.parametrize(
    ("body", "value", "expected"),
    [
        ("y = Add (x, k)", 2**40, ("k",)),
        ("y = Add (x, k)", MAX, ("k",)),
        ("y = Add (x, k)", 2**31 - 1, ()),
        ("y = Add (x, k)", -(2**31) - 1, ("k",)),
        ("y = Slice (x, zero, k)", MAX, ()),
        ("y = Slice (x, k, zero)", -MAX - 1, ()),
        ("y = Slice (x, zero, k)", 2**40, ("k",)),
        ("y = Slice (x, zero, zero, zero, k)", MAX, ("k",)),
        ("e = Unsqueeze (k, zero) f = Squeeze (e, zero) y = Slice (x, zero, f)", MAX, ()),
        ("s = Slice (x, zero, k) y = Add (s, k)", MAX, ("k",)),
        ("c = Constant <value_ints = [1099511627776]> () y = Add (x, c)", 0, ("c",)),
        ("c = Constant <value = int64[1] {9223372036854775807}> () y = Slice (x, zero, c)", 0, ()),
    ],
)
def test_c13_only_wide_values_that_matter_are_named(body, value, expected):
    constants = {"k": np.int64([value]), "zero": np.int64([0])}
    model = parse("(int64[N] x) => (int64[?] y)", body, constants)
    assert wide_int_constants(model, Path()) == expected


def test_wide_external_constant_is_found(tmp_path):
    model = parse("(int64[N] x) => (int64[N] y)", "y = Add (x, k)", {"k": np.int64([1, 2**40])})
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="k.bin", size_threshold=0)
    model = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    assert wide_int_constants(model, tmp_path) == ("k",)
