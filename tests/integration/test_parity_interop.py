"""Polygraphy goes on from what this project saved, and the reverse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import parser, save

from trtforge.graph.ingest import ingest
from trtforge.parity.interop import save_inputs, save_outputs
from trtforge.reference import ReferenceSession
from trtforge.samples.opening import open_samples
from trtforge.samples.polygraphy_files import load_inputs, load_outputs

MODEL = """
<ir_version: 8, opset_import: ["": 17]>
g (float[batch, 4] x, int64[batch] n, bool[batch] flag) => (float[batch, 4] y, int64[batch] m, bool[batch] neither) {
    y = Softmax <axis = -1> (x)
    m = Add (n, n)
    neither = Not (flag)
}
"""


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save(parser.parse_model(MODEL), folder / "m.onnx")
    return ingest(folder / "m.onnx", folder)


@pytest.fixture(scope="module")
def feeds():
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.normal(size=(batch, 4)).astype(np.float32),
            "n": rng.integers(-(2**60), 2**60, batch),
            "flag": rng.random(batch) < 0.5,
        }
        for batch in (1, 3, 2)
    ]


def polygraphy(graph, *arguments):
    program = Path(sys.executable).with_name("polygraphy")
    command = [program, "run", graph.path, "--onnxrt", *arguments]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)


def run_all(graph, feeds):
    session = ReferenceSession(graph)
    return [session.run(feed) for feed in feeds]


def test_polygraphy_runs_our_inputs_and_agrees_with_our_outputs(graph, feeds, tmp_path):
    save_inputs(tmp_path / "in.json", feeds)
    save_outputs(tmp_path / "out.json", "trtforge", run_all(graph, feeds))
    done = polygraphy(graph, "--load-inputs", tmp_path / "in.json", "--load-outputs", tmp_path / "out.json")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "trtforge" in done.stdout


def test_polygraphy_sees_one_wrong_value_in_our_outputs(graph, feeds, tmp_path):
    outputs = run_all(graph, feeds)
    outputs[1]["y"][2, 3] += 0.01
    save_inputs(tmp_path / "in.json", feeds)
    save_outputs(tmp_path / "out.json", "trtforge", outputs)
    done = polygraphy(graph, "--load-inputs", tmp_path / "in.json", "--load-outputs", tmp_path / "out.json")

    assert done.returncode != 0
    assert "'y'" in done.stdout + done.stderr


@pytest.mark.parametrize("ending", [".json", ""], ids=["file", "folder"])
def test_we_go_on_from_what_polygraphy_saved(graph, feeds, tmp_path, ending):
    save_inputs(tmp_path / "ours.json", feeds)
    inputs, outputs = tmp_path / f"in{ending}", tmp_path / f"out{ending}"
    load = ("--load-inputs", tmp_path / "ours.json")
    done = polygraphy(graph, *load, "--save-inputs", inputs, "--save-outputs", outputs)
    if ending == "" and inputs.is_file():
        pytest.skip("this Polygraphy saves single files only")

    assert done.returncode == 0, done.stdout + done.stderr
    np.testing.assert_equal(list(load_inputs(inputs)), feeds)
    assert [sample.feeds["x"].shape[0] for sample in open_samples(inputs, graph)] == [1, 3, 2]
    ((runner, runs),) = load_outputs(outputs).items()
    assert "onnxrt" in runner
    for found, expected in zip(runs, run_all(graph, feeds), strict=True):
        np.testing.assert_equal(found | {"y": None}, expected | {"y": None})
        np.testing.assert_allclose(found["y"], expected["y"], rtol=1e-6)


def test_what_polygraphy_generates_is_a_sample(graph, tmp_path):
    shapes = ["--input-shapes", "x:[2,4]", "n:[2]", "flag:[2]"]
    done = polygraphy(graph, *shapes, "--save-inputs", tmp_path / "in.json", "--iterations", "2")

    assert done.returncode == 0, done.stdout + done.stderr
    samples = open_samples(tmp_path / "in.json", graph)
    assert [(sample.label, sample.feeds["n"].dtype) for sample in samples] == [
        ("in.json[0]", np.int64),
        ("in.json[1]", np.int64),
    ]
