"""The table that calibration writes: what it says, how it reads back, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from trtforge.calibration.histogram import Histogram
from trtforge.calibration.observe import Observations
from trtforge.calibration.table import make_table, read_table, stale_reasons, write_table
from trtforge.errors import TrtForgeError
from trtforge.types import Graph, InputRole, Profile, ShapeRange, TensorSpec

PREPROCESSING = {"batch": 1, "scale": [0.1, 0.25], "layout": "nchw"}


@pytest.fixture
def graph(tmp_path):
    return Graph(
        source=tmp_path / "m.onnx",
        path=tmp_path / "m.onnx",
        weights_dir=tmp_path,
        digest="a" * 64,
        ir_version=9,
        opsets=(("", 17),),
        producer="",
        inputs=(TensorSpec("x", "float32", ("n", 3)),),
        outputs=(),
        roles=(InputRole("x", "free", -1, 1, ""),),
        data_dependent_outputs=(),
        operators=(),
        element_types=(),
        has_qdq=False,
        wide_int_constants=(),
        num_nodes=1,
        weight_bytes=0,
    )


@pytest.fixture
def table(graph):
    rng = np.random.default_rng(0)
    tensors = {
        "conv.1": rng.standard_normal(50_000).astype(np.float32),
        "a spike\x1b": np.append(rng.standard_normal(50_000), -500).astype(np.float32),
        "dead": np.zeros(10, np.float32),
    }
    histograms = {}
    for name, values in tensors.items():
        histograms[name] = Histogram()
        histograms[name].add(values, float(values.min()), float(values.max()))
    seen = Observations(
        histograms=histograms,
        ranges={},
        missing=(),
        largest=dict.fromkeys(tensors, ((500.0, "d.npz[7]"), (4.0, "d.npz[1]"))),
        shapes={(("x", (1, 3)),): 2, (("x", (5, 3)),): 3, (("x", (9, 3)),): 1},
        num_samples=6,
        onnxruntime="1.2.3",
    )
    return make_table(
        seen,
        graph,
        method="auto",
        percentile=99.99,
        data_digest="b" * 64,
        preprocessing=PREPROCESSING,
        profiles=[
            Profile("small", {"x": ShapeRange((1, 3), (4, 3), (5, 3))}),
            Profile("large", {"x": ShapeRange((16, 3), (16, 3), (32, 3))}),
        ],
    )


def test_it_says_what_was_seen(table):
    spike, dead = table.tensors[1:]

    assert [tensor.name for tensor in table.tensors] == ["conv.1", "a spike\x1b", "dead"]
    assert table.tensors[0].outliers == ()
    assert spike.outliers == ("d.npz[7]", "d.npz[1]")
    assert spike.amaxes["minmax"] == 500
    assert spike.amaxes["percentile"] < 5
    assert table.amax["dead"] == 1
    assert dead.num_zeros == dead.num_values == 10


def test_it_states_the_sizes_covered(table):
    (axis,) = table.coverage

    assert (axis.input, axis.axis, axis.min, axis.median, axis.max) == ("x", 0, 1, 5, 9)
    assert table.profiles == {"small": 5, "large": 0}
    assert any("'large'" in note for note in table.notes)
    assert any("'dead'" in note for note in table.notes)


def test_it_reads_back_the_same(table, tmp_path):
    path = tmp_path / "t.json"

    write_table(table, path)

    assert read_table(path) == table
    lines = path.read_text().splitlines()
    assert sum('"amaxes"' in line for line in lines) == len(table.tensors)
    assert "\x1b" not in path.read_text()


def test_writing_twice_gives_the_same_bytes(table, tmp_path):
    write_table(table, tmp_path / "a.json")
    write_table(read_table(tmp_path / "a.json"), tmp_path / "b.json")

    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_an_edited_amax_is_used_and_noted(table, tmp_path):
    path = tmp_path / "t.json"
    write_table(table, path)
    data = json.loads(path.read_text())
    data["tensors"][0]["amax"] = 2.5
    path.write_text(json.dumps(data))

    read = read_table(path)

    assert read.amax["conv.1"] == 2.5
    assert read.tensors[0].scale == 2.5 / 127
    assert read.notes == (*table.notes, "the tensors were edited after the table was written")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d["tensors"][0].update(amax=0.0), "tensors[0].amax"),
        (lambda d: d["tensors"][1].update(amax=1e-42), "tensors[1].amax"),
        (lambda d: d["tensors"][0].update(amax=1e39), "tensors[0].amax"),
        (lambda d: d["tensors"][0].update(amax="3"), "tensors[0].amax"),
        (lambda d: d["tensors"][0].update(low=7.0, high=1.0), "tensors[0].low"),
        (lambda d: d["tensors"][0].update(surprise=1), "tensors[0].surprise"),
        (lambda d: d["tensors"][0].update(method="best"), "tensors[0].method"),
        (lambda d: d["tensors"][0]["amaxes"].pop("mse"), "tensors[0].amaxes"),
        (lambda d: d["tensors"][1].update(name="conv.1"), "'conv.1' occurs more than once"),
        (lambda d: d.update(num_samples=0), "num_samples"),
        (lambda d: d.update(graph_digest="../x"), "graph_digest"),
        (lambda d: d.pop("tensors"), "tensors"),
        (lambda d: d.update(version=2), "version 2"),
    ],
)
def test_a_wrong_value_is_named(table, tmp_path, edit, words):
    path = tmp_path / "t.json"
    write_table(table, path)
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))

    with pytest.raises(TrtForgeError) as caught:
        read_table(path)

    problem = caught.value.problems[0]
    assert words in problem.summary
    assert problem.where.path == path
    assert problem.exit_code == 4


@pytest.mark.parametrize(
    ("edit", "summary"),
    [
        (lambda d: d.pop("method"), "method is missing"),
        (lambda d: d.update(surprise=1), "surprise is no key of a calibration table"),
        (lambda d: d.update(method="best"), "'minmax', 'percentile', 'entropy' or 'mse'"),
        (lambda d: d.update(percentile=3.0), "percentile: found 3.0, expected more than 50"),
        (lambda d: d.update(percentile="9"), "percentile: found '9', expected a number"),
        (lambda d: d.update(notes={}), "notes: found {}, expected a list"),
        (lambda d: d.update(data_digest="x"), "data_digest: found 'x', expected a SHA-256 in 64 hexadecimal digits"),
        (lambda d: d["tensors"][0].update(amax=-1.0), "tensors[0].amax: found -1.0, expected a number above 0"),
        (lambda d: d["tensors"][0].update(amax=1e39), "tensors[0].amax: found 1e+39, expected 3.4e+38 or less"),
        (lambda d: d["tensors"][0].update(saturated=2.0), "tensors[0].saturated: found 2.0, expected 1 or less"),
        (lambda d: d["tensors"][0].update(num_zeros=1.5), "tensors[0].num_zeros: found 1.5, expected a whole number"),
        (lambda d: d["tensors"][0].update(name=""), "tensors[0].name: found '', expected a name"),
    ],
)
def test_a_wrong_value_is_told_in_plain_words(table, tmp_path, edit, summary):
    path = tmp_path / "t.json"
    write_table(table, path)
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))

    with pytest.raises(TrtForgeError) as caught:
        read_table(path)

    assert caught.value.problems[0].summary.endswith(summary)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"version": 1, "version": 1}', "twice"),
        ('{"version": 1, "percentile": NaN}', "NaN"),
        ('{"version": 1, "percentile": 1e999}', "1e999"),
        ("[" * 100_000, "nested"),
        ("[]", "version None"),
        ("{", "not JSON"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, text, words):
    path = tmp_path / "t.json"
    path.write_text(text)

    with pytest.raises(TrtForgeError) as caught:
        read_table(path)

    assert words in caught.value.problems[0].summary
    assert caught.value.problems[0].exit_code == 4


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_place_without_a_file_is_told(tmp_path, name):
    with pytest.raises(TrtForgeError) as caught:
        read_table(tmp_path / name)

    assert caught.value.problems[0].exit_code == 8


def test_a_stale_table_says_why(table):
    same = {"graph_digest": "a" * 64, "data_digest": "b" * 64, "preprocessing": PREPROCESSING}

    assert stale_reasons(table, **same) == ()
    assert stale_reasons(table, graph_digest="a" * 64) == ()
    assert "model" in stale_reasons(table, **{**same, "graph_digest": "c" * 64})[0]
    assert "data" in stale_reasons(table, **{**same, "data_digest": "c" * 64})[0]
    (reason,) = stale_reasons(table, **{**same, "preprocessing": {**PREPROCESSING, "batch": 4}})
    assert reason == "preprocessing changed: batch was 1, is 4"


@pytest.mark.parametrize("method", ["minmax", "percentile", "entropy", "mse"])
def test_a_method_that_was_asked_for_is_used(graph, method):
    histogram = Histogram()
    values = np.random.default_rng(1).standard_normal(10_000).astype(np.float32)
    histogram.add(values, float(values.min()), float(values.max()))
    seen = Observations({"v": histogram}, (), {}, {"v": ((3.0, "s"),)}, {(("x", (1, 3)),): 1}, 1, "1.2.3")

    made = make_table(seen, graph, method=method, percentile=99.0, data_digest="b" * 64, preprocessing={})

    (tensor,) = made.tensors
    assert tensor.method == method
    assert tensor.amax == tensor.amaxes[method]
    assert tensor.saturated == pytest.approx(np.mean(np.abs(values) > tensor.amax), abs=2e-3)
    assert replace(made, method="auto").method == "auto"
