"""Models whose weights lie in a file of their own before and after lowering; the limit for that is lowered here."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from trtforge.errors import GraphError, StoreError
from trtforge.graph.ingest import ingest
from trtforge.lowering import lower_graph
from trtforge.quality import compare_lowered, emulation_of
from trtforge.shapes.profiles import resolve_profiles
from trtforge.spec.load import load_spec
from trtforge.stages import Stages
from trtforge.store import open_store

WIDTH = 256
SPEC = f"""\
version: 1
name: large
model: {{{{onnx: model.onnx}}}}
profiles: [{{{{name: p, inputs: {{{{x: {{{{min: [1, {WIDTH}], opt: [2, {WIDTH}], max: [4, {WIDTH}]}}}}}}}}}}}}]
precision: {{type}}
targets: [{{{{backend: tensorrt_rtx, gpus: [sm86]}}}}]
"""


def weights(count):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((WIDTH, WIDTH), np.float32) * np.float32((2 / WIDTH) ** 0.5) for _ in range(count)]


def write_model(folder, count=3):
    """A row of MatMul, multiplication by two, and Relu, with external weights."""
    nodes = []
    for layer in range(count):
        nodes.append(helper.make_node("MatMul", [f"a{layer}", f"w{layer}"], [f"h{layer}"], name=f"matmul{layer}"))
        nodes.append(helper.make_node("Mul", [f"h{layer}", "two"], [f"m{layer}"], name=f"double{layer}"))
        nodes.append(helper.make_node("Relu", [f"m{layer}"], [f"a{layer + 1}"], name=f"relu{layer}"))
    nodes[0].input[0], nodes[-1].output[0] = "x", "y"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", WIDTH]) for name in ("x", "y")]
    tensors = [numpy_helper.from_array(array, f"w{layer}") for layer, array in enumerate(weights(count))]
    graph = helper.make_graph(
        nodes, "large", ends[:1], ends[1:], [*tensors, numpy_helper.from_array(np.float32(2), "two")]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="model.weights")


@pytest.fixture
def lowering(tmp_path):
    """lowering(precision) -> (spec file, graph, profiles, stages, function that lowers)."""
    with open_store(tmp_path / "store", print) as store:

        def of(precision):
            write_model(tmp_path)
            (tmp_path / "spec.yaml").write_text(SPEC.format(type=precision), encoding="utf-8")
            spec_file = load_spec(tmp_path / "spec.yaml")
            graph = ingest(tmp_path / "model.onnx", tmp_path)
            profiles = resolve_profiles(spec_file, graph)
            stages = Stages(store, lambda _: None, "large")
            folder = store.new_folder("lowered")
            return spec_file, graph, profiles, stages, folder

        yield of


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_weights_go_to_a_file_and_are_right(lowering, precision, dtype):
    spec_file, graph, profiles, stages, folder = lowering(f"{{type: {precision}}}")

    lowered = lower_graph(spec_file, graph, profiles, folder, stages, max_opset=17, external_above=1000)

    (external,) = lowered.graph.external_files
    assert external.location == "lowered.weights"
    assert lowered.graph.weights_dir == folder
    assert lowered.graph.weight_bytes == 3 * WIDTH * WIDTH * 2 == external.size_bytes
    assert lowered.graph.path.stat().st_size < 5000
    assert sorted(path.name for path in folder.iterdir()) == ["folded.onnx", "lowered.onnx", "lowered.weights"]
    loaded = onnx.load(lowered.graph.path)
    for tensor, array in zip(loaded.graph.initializer, weights(3), strict=True):
        expected = (2 * array).astype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), expected)
    report = compare_lowered(spec_file, graph, lowered.graph, profiles, folder, stages)
    assert report.verdict == "passed"
    assert dtype in lowered.notes[0]


def test_the_emulation_is_that_of_weights_inside(lowering):
    spec_file, graph, profiles, stages, folder = lowering("{type: fp16}")
    feeds = {"x": np.random.default_rng(1).standard_normal((2, WIDTH)).astype(np.float32)}
    outputs = []
    for name, limit in (("outside", 1000), ("inside", 1 << 30)):
        (folder / name).mkdir()
        lowered = lower_graph(spec_file, graph, profiles, folder / name, stages, max_opset=17, external_above=limit)
        assert bool(lowered.graph.external_files) == (name == "outside")
        runner, _ = emulation_of(lowered.graph, folder / name)
        outputs.append(runner.run(feeds)["y"])

    np.testing.assert_array_equal(*outputs)


def test_too_little_of_the_work_in_the_asked_type(lowering):
    spec_file, graph, profiles, stages, folder = lowering("{type: fp16, min_share: 0.9, keep: {fp32: ['matmul1']}}")

    with pytest.raises(GraphError) as caught:
        lower_graph(spec_file, graph, profiles, folder, stages, max_opset=17)

    (problem,) = caught.value.problems
    assert problem.summary.startswith("66.7% of the work (FLOPs) of Conv, MatMul and their like would be in float16")
    assert "asks for 90.0%" in problem.summary
    assert problem.detail == ("1 MatMul in float, 33.3% of the work: 'matmul1'", "'matmul1': keep 'matmul1'")
    assert "min_share: 0.66" in problem.next_step


def test_a_weights_file_that_cannot_be_written(lowering):
    spec_file, graph, profiles, stages, folder = lowering("{type: fp16}")
    (folder / "lowered.weights").mkdir()

    with pytest.raises(StoreError):
        lower_graph(spec_file, graph, profiles, folder, stages, max_opset=17, external_above=1000)

    assert not list(folder.glob(".trtforge-*"))
