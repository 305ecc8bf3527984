"""Bisecting models of every kind, piece by piece, and cutting out what reproduces a fault."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from trtforge.errors import GraphError, SeveralErrors
from trtforge.graph.ingest import ingest
from trtforge.parity.bisect import bisect, keep_lines, lines
from trtforge.parity.subgraph import extract, write
from trtforge.parity.tolerances import PRESETS, Tolerance
from trtforge.precision.emulate import emulated
from trtforge.precision.lower import lower
from trtforge.precision.policy import KeepRules
from trtforge.reference import ReferenceSession
from trtforge.samples.polygraphy_files import load_inputs

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "bench"))
from seeded_faults import encoder

TIGHT = Tolerance(atol=1e-5, rtol=1e-5)
X = {"x": np.array([1, 2, 3, 4], np.float32)}


def model(body, inputs="float[N] x", outputs="float[M] y"):
    parsed = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => ({outputs}) {{ {body} }}'
    )
    for node in parsed.graph.node:
        node.name = node.name or f"{node.op_type}_{node.output[0]}"
    return parsed


def report_of(body, other, feeds=X, tolerance=TIGHT, **options):
    return bisect(model(body), model(other), {"feeds": feeds}, tolerance=tolerance, **options)


def named(report):
    return [culprit.node for culprit in report.culprits]


def test_the_culprit_is_named_and_not_its_victims():
    report = report_of("a = Relu (x) b = Exp (a) y = Neg (b)", "a = Relu (x) b = Sin (a) y = Neg (b)")
    assert named(report) == ["Exp_b"]
    assert report.first.changes == ("is Sin, expected Exp",)
    assert report.first.reaches == ("y",)
    assert [found.value for found in report.worst] == ["b", "y"]
    assert report.worst[0].metrics.worst.index == (3,)


def test_independent_culprits_are_all_named():
    report = report_of("a = Relu (x) b = Exp (x) y = Add (a, b)", "a = Neg (x) b = Sin (x) y = Add (a, b)")
    assert named(report) == ["Relu_a", "Exp_b"]


def test_a_difference_that_dies_away_is_harmless():
    report = report_of("a = Exp (x) b = Relu (a) y = Sign (b)", "a = Cosh (x) b = Relu (a) y = Sign (b)")
    assert (named(report), [culprit.node for culprit in report.harmless]) == ([], ["Exp_a"])
    assert report.wrong_outputs == ()


def test_a_node_that_only_enlarges_a_small_error_is_not_blamed():
    body = "k = Constant <value_float = {}> () a = Mul (x, k) b = Abs (a) l = Constant <value_float = 40.0> () c = Mul (b, l) y = Exp (c)"
    report = report_of(body.replace("{}", "1.0"), body.replace("{}", "1.000004"))
    assert named(report) == ["Mul_a"]
    assert report.first.difference.value != "a"
    assert "constant 'k' differs" in report.first.changes[0]


def test_a_renamed_candidate():
    report = report_of("a = Relu (x) b = Exp (a) y = Neg (b)", "p = Relu (x) q = Sin (p) y = Neg (q)")
    assert named(report) == ["Exp_b"]


def test_a_dropped_node_is_named():
    report = report_of(
        "k = Constant <value_float = 2.0> () a = Relu (x) b = Add (a, k) y = Neg (b)", "a = Relu (x) y = Neg (a)"
    )
    assert named(report) == ["Add_b"]
    assert report.first.changes == ("nothing computes its counterpart",)
    assert report.unpaired == ("b",)


def test_a_wrong_node_put_in_between_shows_as_the_node_that_reads_it():
    report = report_of("a = Exp (x) y = Softmax <axis = 0> (a)", "a = Exp (x) t = Neg (a) y = Softmax <axis = 0> (t)")
    assert named(report) == ["Softmax_y"]
    assert report.first.candidate_nodes == ("Neg_t", "Softmax_y")


def test_a_candidate_that_stops():
    body = "k = Constant <value_ints = [{}]> () a = Relu (x) b = Reshape (a, k) c = Exp (b) y = Neg (c)"
    report = report_of(body.replace("{}", "2, 2"), body.replace("{}", "3"))
    assert named(report) == ["Reshape_b"]
    assert report.first.stops
    assert report.first.reaches == ("y",)
    assert any("stops" in line for line in lines(report))


def test_a_fault_inside_a_body_is_the_control_flow_nodes():
    body = (
        "s = ReduceSum <keepdims = 0> (x) z = Constant <value_float = 0.0> () c = Greater (s, z) "
        "a = If (c) <then_branch = t () => (float[N] u) { u = %s (x) }, else_branch = e () => (float[N] v) { v = Neg (x) }> "
        "y = Exp (a)"
    )
    report = report_of(body % "Relu", body % "Sin")
    assert named(report) == ["If_a"]
    assert report.first.changes == ("node 'Relu' inside: is Sin, expected Relu",)


@pytest.mark.parametrize("max_bytes", [1, 64, 1 << 20])
def test_pieces_of_any_size_give_the_same(max_bytes):
    body = (
        "n = NonZero (x) t = Transpose (n) a = Cast <to = 1> (t) b = {} (a) q = SequenceConstruct (b, b) "
        "i = Constant <value_int = 1> () c = SequenceAt (q, i) d = Exp (c) y = Reshape (d, m) "
    )
    head = "m = Constant <value_ints = [-1]> () "
    feeds = {"x": np.array([0, 2, 0, 3, 4, 5], np.float32)}
    done = []
    report = report_of(
        head + body.replace("{}", "Neg"),
        head + body.replace("{}", "Sin"),
        feeds,
        max_bytes=max_bytes,
        on_progress=lambda *numbers: done.append(numbers),
    )
    assert named(report) == ["Neg_b"]
    assert (report.num_values, report.num_compared) == (8, 7)
    assert done[-1] == (8, 8)
    assert max_bytes > 64 or len(done) > 3


def test_stretches_follow_the_budget():
    body = " ".join(f"a{number + 1} = Relu (a{number})" for number in range(9)).replace("(a0)", "(x)") + " y = Neg (a9)"
    counts = {}
    for max_bytes in (1, 4 * 32, 1 << 20):
        done = []
        report_of(body, body, max_bytes=max_bytes, on_progress=lambda now, total: done.append(now))  # noqa: B023
        counts[max_bytes] = len(done)
    assert counts == {1: 10, 128: 3, 1 << 20: 1}


def test_sizes_differ_from_feed_to_feed():
    body = "a = Exp (x) y = {} (a)"
    feeds = {f"size {size}": {"x": np.linspace(0, 1, size, dtype=np.float32)} for size in (2, 5, 3)}
    report = bisect(model(body.replace("{}", "Neg")), model(body.replace("{}", "Sin")), feeds, tolerance=TIGHT)
    assert report.feeds == ("size 2", "size 5", "size 3")
    assert report.first.feeds == report.feeds


def test_an_input_without_counterpart_is_refused():
    with pytest.raises(SeveralErrors) as caught:
        bisect(
            model("y = Exp (x)"),
            model("y = Add (x, z)", inputs="float[N] x, float[N] z"),
            {"feeds": X},
            tolerance=TIGHT,
        )
    assert caught.value.problems[0].summary == "input 'z' of g has no counterpart; inputs of g: x"


def test_weights_in_another_file(tmp_path):
    paths = []
    for name, scale in (("a", 1.0), ("b", 1.01)):
        built = encoder(1, 32, 2, 50, seed=1)
        bias = next(tensor for tensor in built.graph.initializer if tensor.name == "/layer.0/wide.weight")
        bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias) * np.float32(scale), bias.name))
        (tmp_path / name).mkdir()
        paths.append(tmp_path / name / "model.onnx")
        onnx.save(built, paths[-1], save_as_external_data=True, location="weights", size_threshold=64)
    feeds = {"input_ids": np.ones((2, 7), np.int64), "attention_mask": np.ones((2, 7), np.int64)}
    report = bisect(paths[0], paths[1], {"feeds": feeds}, tolerance=TIGHT)
    assert named(report) == ["/layer.0/wide/MatMul"]
    assert [constant.value for constant in report.constants] == ["/layer.0/wide.weight"]


def overflowing():
    """An encoder whose second layer leaves float16."""
    built = encoder(2, 64, 4, 100, seed=1)
    for tensor in built.graph.initializer:
        factor = {"/layer.1/wide.weight": 50000, "/layer.1/narrow.weight": 0.002}.get(tensor.name)
        if factor:
            values = onnx.numpy_helper.to_array(tensor) * np.float32(factor)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    return built


def test_keep_lines_mend_a_lowered_model_step_by_step():
    built = overflowing()
    rng = np.random.default_rng(0)
    mask = (np.arange(16) < np.array([[16], [9]])).astype(np.int64)
    feeds = {"feeds": {"input_ids": rng.integers(0, 100, (2, 16)), "attention_mask": mask}}
    keep = ()
    for _ in range(6):
        lowered = emulated(lower(built, dtype="float16", keep=KeepRules(keep)).model)
        report = bisect(built, lowered, feeds, tolerance=PRESETS["lowered"]["fp16"])
        if not report.wrong_outputs:
            break
        assert all("/layer.1/" in name for name in named(report))
        assert keep_lines(report)
        keep += keep_lines(report)
    assert keep
    assert not report.wrong_outputs


def test_extract_and_write(tmp_path):
    built = encoder(2, 32, 2, 50, seed=1)
    feeds = {"input_ids": np.arange(6).reshape(2, 3), "attention_mask": np.ones((2, 3), np.int64)}
    cut, values = extract(built, "/layer.1/query/MatMul", feeds)
    assert [node.name for node in cut.graph.node] == ["/layer.1/query/MatMul"]
    assert [(name, value.shape) for name, value in values.items()] == [("/layer.0/norm_output", (2, 3, 32))]
    path, inputs = write(tmp_path, "broken", cut, values)
    assert (path.name, inputs.name) == ("broken.onnx", "broken.inputs.json")
    run = ReferenceSession(ingest(path, tmp_path / "work")).run(next(load_inputs(inputs)))
    weight = next(tensor for tensor in built.graph.initializer if tensor.name == "/layer.1/query.weight")
    expected = values["/layer.0/norm_output"] @ onnx.numpy_helper.to_array(weight)
    np.testing.assert_allclose(run["/layer.1/query/MatMul_output"], expected, atol=1e-5)


def test_extract_with_neighbours():
    built = encoder(1, 32, 2, 50, seed=1)
    feeds = {"input_ids": np.arange(6).reshape(2, 3), "attention_mask": np.ones((2, 3), np.int64)}
    cut, _ = extract(built, "/layer.0/Softmax", feeds, radius=1)
    assert [node.op_type for node in cut.graph.node] == ["Add", "Softmax", "MatMul"]
    assert [output.name for output in cut.graph.output] == ["/layer.0/Softmax_output", "/layer.0/MatMul_1_output"]


def test_extract_of_a_node_that_stops():
    body = "k = Constant <value_ints = [3]> () a = Relu (x) y = Reshape (a, k)"
    cut, values = extract(model(body), "Reshape_y", X)
    assert list(values) == ["a"]
    assert [node.op_type for node in cut.graph.node] == ["Reshape"]


def test_extract_of_an_unknown_node():
    with pytest.raises(GraphError, match="g has no node 'Rel_a' in its main graph"):
        extract(model("a = Relu (x) y = Neg (a)"), "Rel_a", X)
