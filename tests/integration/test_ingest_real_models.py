"""What ingest finds in models that people publish."""

from __future__ import annotations

import onnx
import onnxruntime
import pytest

from trtforge.graph.ingest import ingest


@pytest.mark.parametrize(
    ("model", "inputs", "roles"),
    [
        ("magika", ["bytes int32 (unk__214, 2048)"], [("token_ids", 0, 256)]),
        (
            "silero",
            ["input float32 (?, ?)", "state float32 (2, ?, 128)", "sr int64 ()"],
            [("free", -1, 1), ("free", -1, 1), ("free", 16000, 16000)],
        ),
        ("ocr_cls", ["x float32 (?, 3, ?, ?)"], [("image", 0, 1)]),
        (
            "ocr_rec",
            ["x float32 (p2o.DynamicDimension.0, 3, ?, p2o.DynamicDimension.1)"],
            [("image", 0, 1)],
        ),
    ],
)
def test_inputs_and_roles(tmp_path, model_path, model, inputs, roles):
    graph = ingest(model_path(model), tmp_path)
    assert [str(spec) for spec in graph.inputs] == inputs
    assert [(role.kind, role.low, role.high) for role in graph.roles] == roles
    assert graph.data_dependent_outputs == ()
    assert graph.wide_int_constants == ()


@pytest.mark.parametrize("model", ["silero", "ocr_cls"])
def test_mended_copy_loads_and_has_the_same_values(tmp_path, model_path, model):
    source = model_path(model)
    graph = ingest(source, tmp_path)
    assert graph.path == tmp_path / "graph.onnx"
    assert onnxruntime.InferenceSession(graph.path, providers=["CPUExecutionProvider"]).get_outputs()
    outputs = [
        [output for node in onnx.load(path).graph.node for output in node.output] for path in (source, graph.path)
    ]
    assert outputs[0] == outputs[1]
    assert ingest(graph.path, tmp_path / "again").notes == ()
