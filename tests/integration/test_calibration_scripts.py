"""Calibration data that the user's own Python makes: streamed from a process of its own, with its faults in words."""

from __future__ import annotations

import json
import os
import time

import numpy as np
import pytest
from onnx import parser, save

from trtforge.errors import CalibrationError, CapabilityError, SpecError, TrtForgeError
from trtforge.graph.ingest import ingest
from trtforge.samples.calibration import open_calibration
from trtforge.spec.load import load_spec

MODEL = """
<ir_version: 8, opset_import: ["": 17]>
g (float[batch, 4] x, int64[batch] n) => (float[batch, 4] y, int64[batch] m) { y = Relu (x)  m = Identity (n) }
"""
SPEC = """\
version: 1
name: net
model: {onnx: m.onnx}
targets:
  - {backend: tensorrt_rtx, gpus: [sm86]}
"""
HEAD = """
import os, sys, time
import numpy as np
from pathlib import Path

def feeds(i, **changes):
    return {"x": np.full((1, 4), i, np.float32), "n": np.array([i])} | changes
"""


@pytest.fixture
def opened(tmp_path):
    """Opens calibration data from a script's text; the function is `load_data`."""
    save(parser.parse_model(MODEL), tmp_path / "m.onnx")
    graph = ingest(tmp_path / "m.onnx", tmp_path)

    def open_it(code, *, data=False, **calibration):
        (tmp_path / "load.py").write_text(HEAD + code)
        named = {"data": "load.py"} if data else {"callable": "load.py:load_data"}
        (tmp_path / "spec.yaml").write_text(f"{SPEC}calibration: {json.dumps(named | calibration)}\n")
        return open_calibration(load_spec(tmp_path / "spec.yaml"), graph)

    return open_it


def failure_of(data):
    with pytest.raises(TrtForgeError) as caught:
        list(data)
    return caught.value


@pytest.mark.parametrize("data", [True, False], ids=["Polygraphy's script", "callable"])
def test_samples_come_one_at_a_time_and_again(opened, data):
    samples = opened("def load_data():\n    for i in range(3):\n        yield feeds(i, spare=np.ones(1))\n", data=data)

    for _ in range(2):
        assert [sample.feeds["n"].tolist() for sample in samples] == [[0], [1], [2]]
    assert [sample.label for sample in samples] == [f"load.py:load_data[{i}]" for i in range(3)]
    assert samples.num_samples == 3
    assert samples.notes[:2] == (
        "what load.py:load_data reads besides its own file is not known, and changes of it are not seen",
        "load.py:load_data: 'spare' is no input of the model and was left aside",
    )


def test_lists_and_tensors_of_other_libraries_become_arrays(opened):
    code = """
class Tensor:
    def __array__(self, dtype=None, copy=None):
        return np.ones((1, 4), np.float32)

def load_data():
    return [feeds(0, x=Tensor()), feeds(1)]
"""
    assert [sample.feeds["x"].tolist() for sample in opened(code)] == [[[1.0] * 4], [[1.0] * 4]]


def test_code_that_never_ends_is_asked_for_no_more_than_wanted(opened, tmp_path):
    code = """
def load_data():
    i = 0
    while True:
        Path("made").write_text(f"{i} {os.getpid()}")
        yield feeds(i)
        i += 1
"""
    assert len(list(opened(code, samples=3))) == 3
    made, process = (tmp_path / "made").read_text().split()
    assert made == "2"
    with pytest.raises(ProcessLookupError):
        os.kill(int(process), 0)

    first = iter(opened(code))
    next(first)
    assert (tmp_path / "made").read_text().startswith("0 ")
    first.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "made").read_text().split()[1]), 0)


def test_code_whose_samples_are_all_wrong_is_not_asked_for_ever(opened):
    error = failure_of(opened("def load_data():\n    while True:\n        yield feeds(0, x=np.ones(4))\n"))

    assert len(error.problems) == 20
    assert error.problems[0].summary.startswith("load.py:load_data[0]: 'x' is float64 [4], expected x float32")


def test_values_are_checked_as_in_files(opened):  # C32
    error = failure_of(opened("def load_data():\n    yield feeds(0)\n    yield feeds(np.nan, n=np.array([1]))\n"))

    assert error.problems[0].summary == "load.py:load_data[1]: 'x' holds nan at [0, 0], not finite; 4 of 4 values are"
    assert error.problems[0].exit_code == CalibrationError.exit_code


@pytest.mark.parametrize(
    ("code", "summary", "next_step"),
    [
        (
            "def load_data():\n    yield feeds(0)\n    raise KeyError('intent')\n",
            "load.py:load_data raised KeyError: 'intent', while making sample 1",
            "look at load.py:10",
        ),
        (
            "def load_data():\n    yield [1, 2]\n",
            "load.py:load_data[0]: load.py:load_data yielded an object of type list, expected a dict of input name",
            "yield {'x': array, 'n': array} from it",
        ),
        (
            "def load_data():\n    return feeds(0)\n",
            "load.py:load_data[0]: load.py:load_data returned an object of type dict, expected a generator",
            "yield {'x': array, 'n': array} from it",
        ),
        ("def load_data():\n    os._exit(3)\n    yield\n", "ended its process with status 3", "os._exit"),
        ("def load_data():\n    yield {'x': object()}\n", "returned an array of object", "return numbers"),
        ("def load_data():\n    yield from ()\n", "load.py:load_data holds no samples", "add 1 or more"),
        ("raise RuntimeError('at import')\n", "raised RuntimeError: at import", "look at load.py:8"),
    ],
    ids=["raises", "yields a list", "returns a dict", "exits", "objects", "nothing", "import"],
)
def test_faults_of_the_code_are_told_in_its_own_words(opened, monkeypatch, tmp_path, code, summary, next_step):
    monkeypatch.chdir(tmp_path)
    problem = failure_of(opened(code)).problems[0]

    assert summary in problem.summary
    assert next_step in problem.next_step
    assert problem.exit_code == CalibrationError.exit_code
    assert problem.where.line == 6


def test_a_sample_that_takes_too_long_ends_the_run(opened):
    code = "def load_data():\n    yield feeds(0)\n    time.sleep(60)\n    yield feeds(1)\n"
    begun = time.monotonic()
    problem = failure_of(opened(code, timeout=3)).problems[0]

    assert "gave no answer within 3 s, the limit, while making sample 1" in problem.summary
    assert any("in load_data" in line for line in problem.detail)
    assert time.monotonic() - begun < 30


def test_a_package_or_a_function_that_lacks_is_not_a_fault_of_the_data(opened):
    missing = failure_of(opened("import no_such_package\n"))
    assert isinstance(missing, CapabilityError)
    unnamed = failure_of(opened("def lod_data(): pass\n"))
    assert isinstance(unnamed, SpecError)
    assert unnamed.problems[0].next_step == "write load.py:lod_data"


def test_the_digest_is_of_the_code(opened):
    code = "def load_data():\n    yield feeds(0)\n"

    assert opened(code).digest == opened(code).digest
    assert opened(code).digest != opened(code + "# changed\n").digest


def test_images_do_not_apply_to_code(opened):
    with pytest.raises(SpecError, match="images is for image files") as caught:
        opened("", images={"layout": "NCHW"})
    assert caught.value.problems[0].next_step == "remove images, and normalise in load.py:load_data"


def test_large_samples_cross_bit_by_bit(opened):
    code = "def load_data():\n    yield feeds(0, x=np.random.default_rng(0).random((50000, 4), np.float32), n=np.arange(50000))\n"
    (sample,) = opened(code)

    np.testing.assert_array_equal(sample.feeds["x"], np.random.default_rng(0).random((50000, 4), np.float32))
