"""What one pass over the data sees, against onnxruntime's own outputs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnxruntime.quantization.calibrate import HistogramCollector

from trtforge.calibration.histogram import Histogram
from trtforge.calibration.observe import observe
from trtforge.calibration.table import make_table, read_table, write_table
from trtforge.calibration.thresholds import percentile_amax
from trtforge.errors import TrtForgeError
from trtforge.graph.ingest import ingest

RECOGNISER = Path(__file__).parents[1] / "models" / "rapidocr_onnxruntime" / "ch_PP-OCRv4_rec_infer.onnx"

CHAIN = """
<ir_version: 8, opset_import: ["" : 17]>
chain (float[n, 4] x, int64[1] k) => (float[n, 4] y, int64[2] s)
<float[4, 4] w = {1,2,3,4, -1,0,0,1, 2,2,2,2, 0,1,0,1}, float[4] b = {0.5, 0, -1, 2}>
{
  h = MatMul(x, w)
  r = Relu(h)
  a = Add(r, b)
  shape = Shape(a)
  s = Add(shape, k)
  e = Exp(x)
  y = Mul(a, e)
}
"""


@dataclass
class _Sample:
    label: str
    feeds: dict


def _graph(tmp_path, text=CHAIN):
    path = tmp_path / "m.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    return ingest(path, tmp_path / "work")


def _samples(count, seed=0):
    rng = np.random.default_rng(seed)
    return [
        _Sample(
            f"d.npz[{index}]",
            {"x": rng.standard_normal((1 + index % 3, 4)).astype(np.float32), "k": np.array([index], np.int64)},
        )
        for index in range(count)
    ]


def _observe(graph, samples, tensors, memory_bytes=1 << 20):
    return observe(graph, samples, tensors, memory_bytes=memory_bytes, on_sample=lambda _: None, threads=1)


@pytest.mark.parametrize("memory_bytes", [1, 100, 1 << 30])
def test_it_sees_what_numpy_computes(tmp_path, memory_bytes):
    samples = _samples(7)
    w = np.array([[1, 2, 3, 4], [-1, 0, 0, 1], [2, 2, 2, 2], [0, 1, 0, 1]], np.float32)
    b = np.array([0.5, 0, -1, 2], np.float32)

    seen = _observe(_graph(tmp_path), samples, {"x", "r", "a"}, memory_bytes)

    x = np.concatenate([sample.feeds["x"] for sample in samples])
    expected = {"x": x, "h": x @ w, "r": np.maximum(x @ w, 0), "a": np.maximum(x @ w, 0) + b, "e": np.exp(x)}
    assert list(seen.ranges) == ["x", "h", "r", "a", "e", "y"]
    for name, values in expected.items():
        found = seen.ranges[name]
        assert (found.low, found.high) == pytest.approx((values.min(), values.max()), rel=1e-5)
        assert found.absmax == pytest.approx(np.abs(values).max(), rel=1e-5)
        assert found.finite
    assert list(seen.histograms) == ["x", "r", "a"]
    assert seen.histograms["r"].num_values == x.size
    assert seen.histograms["r"].num_zeros == (expected["r"] == 0).sum()
    assert seen.shapes == {(("x", (n, 4)), ("k", (1,))): count for n, count in ((1, 3), (2, 2), (3, 2))}
    tops = sorted(samples, key=lambda sample: -np.abs(sample.feeds["x"]).max())
    assert [label for _, label in seen.largest["x"]] == [sample.label for sample in tops[:3]]


def test_the_order_of_samples_does_not_matter(tmp_path):
    graph, samples = _graph(tmp_path), _samples(9)

    tables = []
    for order in (samples, samples[::-1]):
        seen = _observe(graph, order, {"x", "r", "a"}, 64)
        made = make_table(seen, graph, method="auto", percentile=99.9, data_digest="0" * 64, preprocessing={})
        write_table(made, tmp_path / "t.json")
        tables.append((tmp_path / "t.json").read_bytes())

    assert tables[0] == tables[1]
    assert read_table(tmp_path / "t.json").graph_digest == graph.digest


def test_all_tensors_that_are_not_finite_are_named_with_their_samples(tmp_path):
    samples = _samples(6)
    samples[4].feeds["x"][0, 0] = np.inf
    samples[2].feeds["x"][0, 0] = np.nan

    with pytest.raises(TrtForgeError) as caught:
        _observe(_graph(tmp_path), samples, {"x", "a"})

    first, second = caught.value.problems
    assert first.summary.startswith("'a' is not finite for d.npz[2]")
    assert second.summary.startswith("'x' is not finite for d.npz[2], d.npz[4]")
    assert first.exit_code == second.exit_code == 4


def test_a_value_that_is_not_quantized_may_be_infinite(tmp_path):
    samples = _samples(3)
    samples[1].feeds["x"][0, 0] = 200

    seen = _observe(_graph(tmp_path), samples, {"x"})

    assert not seen.ranges["e"].finite
    assert seen.ranges["e"].absmax == np.inf
    assert seen.ranges["x"].finite


def test_a_sample_that_the_model_cannot_take_is_named(tmp_path):
    samples = _samples(3)
    samples[1].feeds["x"] = np.zeros((2, 5), np.float32)

    with pytest.raises(TrtForgeError) as caught:
        _observe(_graph(tmp_path), samples, {"x"})

    assert caught.value.problems[0].summary.startswith("d.npz[1]: onnxruntime stopped")
    assert caught.value.problems[0].exit_code == 4


def test_tensors_that_never_come_about_are_noted(tmp_path):
    graph, samples = _graph(tmp_path), _samples(2)
    for sample in samples:
        sample.feeds["x"] = np.zeros((0, 4), np.float32)

    seen = _observe(graph, samples, {"x", "r", "nowhere"})
    made = make_table(seen, graph, method="auto", percentile=99.9, data_digest="0" * 64, preprocessing={})

    assert seen.missing == ("nowhere", "r", "x")
    assert made.tensors == ()
    assert made.notes[-1] == "no sample gave a value of 'nowhere', 'r', 'x': no range"


def test_no_samples_are_refused(tmp_path):
    with pytest.raises(TrtForgeError) as caught:
        _observe(_graph(tmp_path), [], {"x"})

    assert caught.value.problems[0].exit_code == 4


def test_weights_are_used_from_other_files_and_from_the_model(tmp_path):
    rng = np.random.default_rng(3)
    outside, inside = rng.standard_normal((2, 64, 64)).astype(np.float32)
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[n, 64] x) => (float[n, 64] y)'
        "{ h = MatMul(x, outside) y = MatMul(h, inside) }"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(outside, "outside"))
    onnx.external_data_helper.convert_model_to_external_data(model, location="m.bin", size_threshold=0)
    model.graph.initializer.append(onnx.numpy_helper.from_array(inside, "inside"))
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    x = rng.standard_normal((3, 64)).astype(np.float32)

    seen = _observe(ingest(path, tmp_path / "work"), [_Sample("a", {"x": x})], {"h", "y"})

    assert seen.histograms["h"].absmax == pytest.approx(np.abs(x @ outside).max(), rel=1e-5)
    assert seen.histograms["y"].absmax == pytest.approx(np.abs(x @ outside @ inside).max(), rel=1e-5)


@pytest.mark.skipif(not RECOGNISER.exists(), reason="run scripts/fetch_test_models.py")
def test_a_real_model_is_seen_as_onnxruntime_gives_it(tmp_path):
    graph = ingest(RECOGNISER, tmp_path)
    model = onnx.load(RECOGNISER)
    names = [node.output[0] for node in model.graph.node if node.op_type == "Conv"][::9]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.standard_normal((1, 3, 48, width)).astype(np.float32)} for width in (64, 160, 96)]

    samples = [_Sample(str(index), feed) for index, feed in enumerate(feeds)]
    seen = _observe(graph, samples, names, memory_bytes=4 << 20)

    outputs = [session.run(names, feed) for feed in feeds]
    for index, name in enumerate(names):
        values = np.concatenate([output[index].ravel() for output in outputs])
        assert seen.histograms[name].num_values == values.size
        assert (seen.ranges[name].low, seen.ranges[name].high) == pytest.approx((values.min(), values.max()), rel=1e-4)


def test_the_percentile_is_onnxruntimes_to_a_bin():
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    histogram = Histogram()
    histogram.add(values, float(values.min()), float(values.max()))
    collector = HistogramCollector("percentile", True, 2048, 128, 99.9, "same")
    collector.collect({"v": [values]})

    theirs = float(collector.compute_percentile()["v"][1])

    width = histogram.absmax / 2048
    assert percentile_amax(histogram, 99.9) == pytest.approx(theirs, abs=width + theirs * 2**-10)
