"""Which value is which, what counts as a difference inside a model, and the keep lines."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx.parser
import pytest

from trtforge.errors import GraphError, SeveralErrors
from trtforge.parity.bisect import BisectReport, Culprit, keep_lines, lines
from trtforge.parity.lockstep import measure
from trtforge.parity.mapping import map_values
from trtforge.parity.metrics import compare
from trtforge.parity.tolerances import PRESETS, Tolerance, judge
from trtforge.wiring import wire

TIGHT = Tolerance(atol=1e-5, rtol=1e-5)


def model(body, inputs="float[N] x", outputs="float[N] y"):
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => ({outputs}) {{ {body} }}')


def paired(body, other, mapping=None):
    pairs = map_values(wire(model(body)), wire(model(other)), mapping or {})
    return {name: value for name, value in pairs.values.items() if name not in "xy"}


LOWERED = (
    "a = Relu (x) a_float16 = Cast <to = 10> (a) b_float16 = Exp (a_float16) "
    "c = Neg (b_float16) d = Cast <to = 1> (c) y = Abs (d)"
)
QUANTIZED = (
    "a = Relu (x) b = Exp (a) s = Constant <value_float = 0.1> () "
    "q = QuantizeLinear (b, s) b_DequantizeLinear_Output = DequantizeLinear (q, s) "
    "c = Neg (b_DequantizeLinear_Output) y = Abs (c)"
)
BODY = "a = Relu (x) b = Exp (a) c = Neg (b) y = Abs (c)"


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (BODY, {"a": "a", "b": "b", "c": "c"}),
        ("p = Relu (x) q = Exp (p) r = Neg (q) y = Abs (r)", {"a": "p", "b": "q", "c": "r"}),
        # An operator inserted before numbered names: b is Relu's and c is Exp's now.
        ("a = Identity (x) b = Relu (a) c = Exp (b) d = Neg (c) y = Abs (d)", {"a": "b", "b": "c", "c": "d"}),
        # One swapped among renamed ones is found from behind.
        ("p = Relu (x) q = Sin (p) r = Neg (q) y = Abs (r)", {"a": "p", "b": "q", "c": "r"}),
        # Something inserted behind a node keeps the node's name.
        ("a = Relu (x) b1 = Exp (a) b = Sin (b1) c = Neg (b) y = Abs (c)", {"a": "a", "b": "b", "c": "c"}),
        ("a = Relu (x) c = Neg (a) y = Abs (c)", {"a": "a", "c": "c"}),
        (
            LOWERED,
            {"a": "a", "b": "b_float16", "c": "c"},
        ),
        (
            QUANTIZED,
            {"a": "a", "b": "b", "c": "c"},
        ),
    ],
    ids=["same", "renamed", "shifted", "swapped", "inserted", "dropped", "lowered", "quantized"],
)
def test_pairs(other, expected):
    assert paired(BODY, other) == expected


def test_given_pairs_come_first():
    assert paired(
        "a = Relu (x) b = Relu (x) y = Add (a, b)", "p = Relu (x) q = Relu (x) y = Add (p, q)", {"a": "q"}
    ) == {
        "a": "q",
        "b": "p",
    }


def test_all_unknown_names_of_a_mapping_are_told():
    with pytest.raises(SeveralErrors) as caught:
        paired(BODY, BODY, {"aa": "b", "b": "zz"})
    assert [problem.summary for problem in caught.value.problems] == [
        "'aa' is no value of g",
        "'zz' is no value of g",
    ]


def test_twins_are_told_apart_by_their_constants():
    first = model(
        "k = Constant <value = float[1] {1.0}> () l = Constant <value = float[1] {2.0}> () a = Add (x, k) b = Add (x, l) y = Sub (a, b)"
    )
    other = model(
        "m = Constant <value = float[1] {2.0}> () n = Constant <value = float[1] {1.0}> () p = Add (x, m) q = Add (x, n) y = Sub (q, p)"
    )
    pairs = map_values(wire(first), wire(other), {})
    assert (pairs.values["a"], pairs.values["b"]) == ("q", "p")


def test_unsorted_nodes_are_refused():
    unsorted = model("a = Relu (x) y = Abs (a)")
    unsorted.graph.node.reverse()
    with pytest.raises(GraphError, match="reads 'a', which nothing before it gives"):
        wire(unsorted)


def array(*values, dtype=np.float32):
    return np.array(values, dtype)


LOWEST = np.finfo(np.float32).min


@pytest.mark.parametrize(
    ("reference", "candidate", "is_outside"),
    [
        (array(1, 2), array(1, 2), False),
        (array(1, 2), array(1, 2.1), True),
        (array(1, 2), array(1, 2, dtype=np.float64), False),
        (array(1, 2), array(1, 2, dtype=ml_dtypes.bfloat16), False),
        (array(1, 2), array([1, 2]), True),
        (array(1, 2), array(1, 2, dtype=np.int64), True),
        (array(1, 2, dtype=np.int64), array(1, 2, dtype=np.int32), False),
        (array(1, 2, dtype=np.int64), array(1, 3, dtype=np.int64), True),
        (array(True, False, dtype=bool), array(True, True, dtype=bool), True),
        (array(np.nan, 1), array(np.nan, 1.000001), False),
        (array(np.nan, 1), array(np.nan, 1.1), True),
        (array(np.nan, 1), array(0, 1), True),
        (array(-np.inf, 1), array(-np.inf, 1.000001), False),
        (array(-np.inf, 1), array(np.inf, 1), True),
        (array(1, 2), array(1, np.nan), True),
        # A mask's lowest value sets no scale, and the largest value of a narrow type stands for it.
        (array(LOWEST, 1), array(LOWEST, 1.1), True),
        (array(LOWEST, 1), array(-65504, 1, dtype=np.float16), False),
        (array(LOWEST, 1), array(65504, 1, dtype=np.float16), True),
        (array(-100000, 1), array(-np.inf, 1), True),
        (array(1e5, 1), array(1e5, 1.000001), False),
    ],
)
def test_measure(reference, candidate, is_outside):
    assert measure(reference, candidate, TIGHT).is_outside is is_outside


@pytest.mark.parametrize("tolerance", [*PRESETS["engine"].values()])
@pytest.mark.parametrize("spread", [1e-7, 1e-4, 1e-2, 0.5])
def test_measure_agrees_with_compare(tolerance, spread):
    rng = np.random.default_rng(1)
    reference = rng.standard_normal((300, 400), np.float32)
    candidate = reference + spread * rng.standard_normal((300, 400), np.float32) * (rng.random((300, 400)) < 0.5)
    seen = measure(reference, candidate.astype(np.float32), tolerance)
    whole = compare(reference, candidate.astype(np.float32))
    assert seen.is_outside is not judge(whole, tolerance).passed
    assert seen.metrics.worst.index == whole.worst.index


def report(at_fault, others):
    culprits = [
        Culprit(name, "MatMul", (), (), "", None, also=(), readers=(), feeds=("a",), reaches=("y",))
        for name in at_fault
    ]
    return BisectReport(tuple(culprits), (), (), (), ("y",), 9, 9, (), ("a",), (*at_fault, *others))


@pytest.mark.parametrize(
    ("at_fault", "others", "expected"),
    [
        ([], ["/a/MatMul"], ()),
        (["/a/MatMul"], ["/a/Add"], ("/a/MatMul",)),
        (["/layer.0/MatMul", "/layer.1/MatMul"], ["/layer.0/Add"], ("/layer.*/MatMul",)),
        (["/layer.0/MatMul", "/layer.1/MatMul"], ["/layer.2/MatMul"], ("/layer.0/MatMul", "/layer.1/MatMul")),
        (["/head/MatMul", "/head/Add"], ["/body/Add"], ("/head/*",)),
        (["/head/MatMul", "/head/Add"], ["/head/Mul"], ("/head/MatMul", "/head/Add")),
        (["/a[0]/MatMul", "/a[0]/Add"], ["/a0/Add"], ("/a[[]0]/*",)),
        (["n_1_0", "n_1_1", "other"], ["n_2_0"], ("n_1_*", "other")),
    ],
)
def test_keep_lines(at_fault, others, expected):
    assert keep_lines(report(at_fault, others)) == expected


def test_names_are_escaped():
    assert all("\x1b" not in line for line in lines(report(["\x1b[2Jevil"], [])))
