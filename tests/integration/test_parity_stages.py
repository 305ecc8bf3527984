"""Stages compared on the real onnxruntime: known cases, seeded faults, and no false alarms."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper, parser

from trtforge.graph.ingest import ingest
from trtforge.parity.report import ParityReport, first_broken, lines, rejudge
from trtforge.parity.staged import OnnxRunner, ParityInput, compare_stage, parity_inputs
from trtforge.parity.tolerances import PRESETS, Tolerance, resolve_tolerances
from trtforge.plain import from_plain, to_plain
from trtforge.reference import ReferenceSession
from trtforge.samples.source import Sample
from trtforge.types import Profile, ShapeRange

LOOSE = Tolerance(atol=10.0, min_match=1.0)


@pytest.fixture
def runner(tmp_path):
    """A model, as text or proto, in the reference session."""

    def load(name, model):
        if isinstance(model, str):
            model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {model}')
        folder = tmp_path / name
        folder.mkdir()
        onnx.save(model, folder / "m.onnx")
        graph = ingest(folder / "m.onnx", folder)
        return OnnxRunner(name, ReferenceSession(graph))

    return load


class Optimised:
    """Onnxruntime as people use it: fused and reordered, so a second implementation of the same model."""

    name = "onnxruntime, all optimisations"

    def __init__(self, path):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.facts = {"graph_optimization": "ORT_ENABLE_ALL"}

    def run(self, feeds):
        names = [output.name for output in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, dict(feeds)), strict=True))


def given(**feeds):
    arrays = {name: np.asarray(feed) for name, feed in feeds.items()}
    return [ParityInput("sample 0", arrays, {}, None, is_drawn=False)]


def compared(reference, candidate, inputs, tolerance=LOOSE, stage="engine"):
    outputs = [output.name for output in reference.session._graph.outputs]
    return compare_stage(
        reference, candidate, inputs, resolve_tolerances(outputs, tolerance, {}), stage, lambda label: None
    )


def reasons(report):
    return [
        (output.name, check.metric, check.found, check.allowed)
        for point in report.points
        for output in point.outputs
        for check in output.verdict.reasons
    ]


LOOP = """
g (float[2] x) => (float[2] y, int64 n)
<int64 most = {1000}, int64 none = {0}, float limit = {LIMIT}, float one = {1}, int64 step = {1}> {
    sum = ReduceSum <keepdims = 0> (x)
    start = Less (sum, limit)
    y, n = Loop (most, start, x, none) <body = body (int64 i, bool c, float[2] a, int64 k)
            => (bool again, float[2] b, int64 l) {
        b = Add (a, one)
        l = Add (k, step)
        total = ReduceSum <keepdims = 0> (b)
        again = Less (total, limit)
    }>
}
"""


def test_c17_a_loop_that_runs_once_too_often_fails_whatever_the_tolerance(runner):
    right, wrong = runner("right", LOOP.replace("LIMIT", "10")), runner("wrong", LOOP.replace("LIMIT", "12"))
    inputs = given(x=np.float32([2.2, 3.3]))

    assert right.run(inputs[0].feeds)["n"] == 3
    assert compared(right, right, inputs).verdict == "passed"
    assert reasons(compared(right, wrong, inputs)) == [("n", "match", "1 of 1 different", "all equal")]


def test_c13_a_clamped_int64_fails(runner):
    text = "g (int64[2] x) => (int64[2] y) <int64[2] k = {VALUE, 1}> { y = Add (x, k) }"
    right, wrong = (runner(name, text.replace("VALUE", str(value))) for name, value in (("r", 2**40), ("w", 2**31 - 1)))
    report = compared(right, wrong, given(x=np.zeros(2, np.int64)))

    assert reasons(report) == [("y", "match", "1 of 2 different", "all equal")]
    worst = report.points[0].outputs[0].metrics.worst
    assert (worst.index, worst.reference, worst.candidate) == ((0,), 1099511627776, 2147483647)


def test_c11_lengths_that_depend_on_the_data_are_compared_first(runner):
    text = "g (float[2, 3] x) => (int64[2, n] y) <float bias = {BIAS}> { z = Add (x, bias) y = NonZero (z) }"
    right, wrong = runner("right", text.replace("BIAS", "0")), runner("wrong", text.replace("BIAS", "1"))
    mixed, zeros = np.float32([[0, 1, 0], [0, 0, 1]]), np.zeros((2, 3), np.float32)

    assert compared(right, right, [*given(x=mixed), *given(x=zeros)]).verdict == "passed"
    assert reasons(compared(right, wrong, given(x=mixed))) == [("y", "length", "[2, 6]", "[2, 2]")]
    assert reasons(compared(right, wrong, given(x=zeros))) == [("y", "length", "[2, 6]", "[2, 0]")]


def test_c51_the_report_says_that_optimisations_were_off(runner):
    report = compared(*[runner(name, "g (float[2] x) => (float[2] y) { y = Relu (x) }") for name in "ab"], [])

    for side in (report.reference, report.candidate):
        assert side.facts["graph_optimization"] == "ORT_DISABLE_ALL"
        assert side.facts["provider"] == "CPUExecutionProvider"


MASKED = """
g (float[n, 4] score, float[n, 4] mask) => (float[n, 4] y) <float one = {1}, float big = {BIG}> {
    inverse = Sub (one, mask)
    bias = Mul (inverse, big)
    z = Add (score, bias)
    y = Softmax <axis = -1> (z)
}
"""


def test_c25_a_mask_that_shrank_is_found_in_the_row_that_is_masked_whole(runner):
    right, wrong = runner("right", MASKED.replace("BIG", "-1e9")), runner("wrong", MASKED.replace("BIG", "-1e4"))
    score, part, whole = np.float32([[1, 2, 3, 4]]), np.float32([[1, 1, 0, 0]]), np.zeros((1, 4), np.float32)
    fp16 = PRESETS["lowered"]["fp16"]

    assert compared(right, wrong, given(score=score, mask=part), fp16, "lowered").verdict == "passed"
    assert compared(right, wrong, given(score=score, mask=whole), fp16, "lowered").verdict == "failed"


def test_a_mask_of_infinities_is_no_pass(runner):
    model = runner("m", "g (float[2] x, float[2] k) => (float[2] y) { y = Div (x, k) }")
    report = compared(model, model, given(x=np.float32([1, 1]), k=np.float32([0, 1])))

    assert reasons(report) == [("y", "finite", "a reference with 1 NaN or infinite value", "a finite reference")]


def profile_of(**shapes):
    return Profile("p", {name: ShapeRange(*shape) for name, shape in shapes.items()})


REAL = {
    "ocr_rec": profile_of(x=((1, 3, 48, 32), (1, 3, 48, 64), (1, 3, 48, 100))),
    "ocr_det": profile_of(x=((1, 3, 32, 32), (1, 3, 64, 64), (1, 3, 96, 160))),
    "ocr_cls": profile_of(x=((1, 3, 48, 192), (2, 3, 48, 192), (6, 3, 48, 192))),
    "magika": profile_of(bytes=((1, 2048), (1, 2048), (2, 2048))),
}


@pytest.fixture(scope="module")
def graphs(model_path, tmp_path_factory):
    return {name: ingest(model_path(name), tmp_path_factory.mktemp(name)) for name in REAL}


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("seed", [0, 100])
def test_correct_models_raise_no_alarm(graphs, name, seed):
    graph = graphs[name]
    inputs = parity_inputs(graph, [REAL[name]], {}, [], num_random=4, seed=seed)
    report = compared(
        OnnxRunner("reference", ReferenceSession(graph)), Optimised(graph.path), inputs, PRESETS["engine"]["fp32"]
    )

    assert report.verdict == "passed", lines(report)
    assert len([point for point in report.points if point.not_run is None]) >= 4
    again = rejudge(report, resolve_tolerances(report.tolerances, PRESETS["onnx"]["fp32"], {}))
    assert again.verdict == "passed", lines(again)
    assert from_plain(ParityReport, json.loads(json.dumps(to_plain(ParityReport, report), allow_nan=False))) == report


def _changed(model, change):
    """A copy with one weight of two or more axes changed, the largest."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    tensors = [tensor for tensor in copy.graph.initializer if len(tensor.dims) > 1] or [
        attribute.t for node in copy.graph.node for attribute in node.attribute if len(attribute.t.dims) > 1
    ]
    tensor = max(tensors, key=lambda tensor: int(np.prod(tensor.dims)))
    tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor).copy()), tensor.name))
    return copy


def _one_percent_off(weights):
    return weights * np.float32(1.01)


def _rows_swapped(weights):
    return np.ascontiguousarray(np.roll(weights, 1, axis=0))


def _one_corrupt(weights):
    weights.flat[weights.size // 2] += 10 * np.abs(weights).max()
    return weights


@pytest.mark.parametrize("change", [_one_percent_off, _rows_swapped, _one_corrupt])
@pytest.mark.parametrize("name", ["ocr_rec", "magika"])
def test_a_fault_is_attributed_to_its_stage(graphs, runner, name, change):
    graph = graphs[name]
    faulty = runner("faulty", _changed(onnx.load(graph.path), change))
    right = OnnxRunner("right", ReferenceSession(graph))
    stages = {"onnx": (right, right), "mended": (right, faulty), "engine": (faulty, faulty)}
    reports = [
        compared(
            before,
            after,
            parity_inputs(graph, [REAL[name]], {}, [], num_random=1, seed=0),
            PRESETS[stage]["fp32"],
            stage,
        )
        for stage, (before, after) in stages.items()
    ]

    assert first_broken(reports) == "mended", [lines(report) for report in reports]


def test_samples_and_points_run_through_a_real_model(graphs):
    graph = graphs["ocr_rec"]
    sample = Sample("page.npz[0]", {"x": np.zeros((1, 3, 48, 77), np.float32)})
    session = OnnxRunner("right", ReferenceSession(graph))
    inputs = parity_inputs(graph, [REAL["ocr_rec"]], {}, [sample], num_random=1, seed=0)
    report = compared(session, session, inputs, PRESETS["mended"]["fp32"], "mended")

    assert report.points[0].label == "page.npz[0]"
    assert report.reason == "within tolerance at 5 points"
