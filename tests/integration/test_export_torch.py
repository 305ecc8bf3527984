"""Exports of real torch models, compared with torch at several shapes, and everything tracing can do to them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnx
import pytest

from trtforge.errors import GraphError, SeveralErrors
from trtforge.graph.export import export_torch
from trtforge.graph.ingest import ingest
from trtforge.shapes.inputs import generate_at

pytest.importorskip("torch")

FOLDER = Path(__file__).parent / "exports"
CONFIGS = Path(__file__).parents[2] / "configs"


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.fixture
def export(tmp_path):
    """Exports, and gives the report and the runs."""

    def of(reference, folder=FOLDER, name="model.onnx", opset=17, **options):
        runs = []
        report = export_torch(
            reference,
            folder,
            tmp_path / name,
            opset=opset,
            work_dir=tmp_path / "work",
            inputs_at=lambda graph, shapes: generate_at(graph, shapes, {}, {}, 0),
            on_run=runs.append,
            timeout_seconds=300,
            **options,
        )
        return report, runs

    return of


def assert_equal(runs, tolerance=1e-5):
    for run in runs:
        for name, expected in run.torch_outputs.items():
            scale = np.abs(expected).max()
            np.testing.assert_allclose(run.onnx_outputs[name], expected, rtol=0, atol=tolerance * (1 + scale))


def differs_at(runs):
    return [
        run.varied
        for run in runs
        if any(not np.allclose(run.onnx_outputs[name], array, atol=1e-5) for name, array in run.torch_outputs.items())
    ]


@needs("transformers")
def test_bert_intent_is_torch_to_1e_5_at_all_shapes(export):
    shapes = [(1, 1), (8, 32), (3, 17), (2, 128), (1, 256)]
    asked = [dict.fromkeys(("input_ids", "attention_mask"), shape) for shape in shapes]

    report, runs = export("exports/bert_intent.py:build", CONFIGS, shapes_to_check=asked)

    assert (report.opset, report.exporter) == (17, "torchscript")
    assert "torch's dynamo exporter begins at opset 18, so TorchScript made opset 17" in report.notes
    assert [str(spec) for spec in (*report.graph.inputs, *report.graph.outputs)] == [
        "input_ids int64 (batch, sequence)",
        "attention_mask int64 (batch, sequence)",
        "intent_logits float32 (batch, 24)",
        "slot_logits float32 (batch, sequence, 31)",
    ]
    assert [run.shapes for run in runs] == asked
    assert_equal(runs)


@pytest.mark.slow
@needs("transformers")
def test_bert_intent_reaches_a_later_opset_with_the_newer_exporter(export):
    report, runs = export("exports/bert_intent.py:build", CONFIGS, opset=20)

    assert (report.graph.opset, report.exporter) == (20, "dynamo")
    assert_equal(runs)


@pytest.mark.slow
@needs("transformers")
def test_minilm_with_its_real_weights_is_torch_to_1e_5(export, tmp_path):
    report, runs = export("minilm.py:build")

    assert len(runs) > 4
    assert_equal(runs)
    assert ingest(tmp_path / "model.onnx", tmp_path / "again") == report.graph
    # The last row of a batch is all padding; every other is a unit vector.
    lengths = np.linalg.norm(runs[0].onnx_outputs["embedding"], axis=-1)
    np.testing.assert_allclose(lengths, [1, 0], atol=1e-6)


def test_a_tuple_of_inputs_takes_the_names_of_forward(export):
    report, runs = export("sound.py:tagger_by_place")

    assert [spec.name for spec in report.graph.inputs] == ["ids", "mask"]
    assert_equal(runs)


@pytest.mark.parametrize("opset", [17, 20])
def test_one_tensor_that_is_given_for_two_inputs_makes_two(export, opset):
    report, runs = export("sound.py:difference", opset=opset)

    assert [spec.name for spec in report.graph.inputs] == ["one", "other"]
    assert_equal(runs)


def test_a_model_in_training_mode_is_exported_in_eval_mode_and_told(export):
    report, runs = export("sound.py:tagger")

    assert "the model was in training mode, which changes Dropout; it is exported in eval mode" in report.notes
    assert any("outputs without names are called 'output_0', 'output_1'" in note for note in report.notes)
    assert report.symbols == {"batch": 2, "sequence": 5}
    assert {run.varied for run in runs} == {(), ("batch",), ("sequence",), ("batch", "sequence")}
    assert_equal(runs)


def test_equal_models_give_equal_bytes_without_places(export, tmp_path):
    report, _ = export("sound.py:tagger_named", name="a.onnx")
    export("sound.py:tagger_named", name="b.onnx")

    data = (tmp_path / "a.onnx").read_bytes()
    assert data == (tmp_path / "b.onnx").read_bytes()
    assert str(FOLDER).encode() not in data
    assert b".py" not in data
    assert [spec.name for spec in report.graph.outputs] == ["logits", "mean"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.onnx", "b.onnx"]


def test_tied_weights_that_became_two_are_told(export):
    report, runs = export("sound.py:tied")

    assert any(
        "tied weights 'embedding.weight', 'head.weight' are in the file 2 times" in note for note in report.notes
    )
    assert_equal(runs)


@pytest.mark.parametrize("opset", [17, pytest.param(18, marks=pytest.mark.slow)])
def test_a_parameter_between_inputs_keeps_its_default(export, opset):
    report, runs = export("sound.py:skips", opset=opset)

    assert [str(spec) for spec in report.graph.inputs] == ["first float32 (n, 3)", "second float32 (n, 3)"]
    assert_equal(runs)


def test_sizes_that_the_torch_model_refuses_are_left_out_with_a_note(export):
    report, runs = export("sound.py:halves")

    assert {run.shapes["x"] for run in runs} == {(2, 8), (3, 8), (4, 16), (1, 4)}
    assert any("not compared at x [2, 9]" in note for note in report.notes)


def test_a_size_the_user_asked_for_and_the_torch_model_refuses_is_an_error(export, tmp_path):
    with pytest.raises(GraphError, match=r"while running the torch model at x \[2, 9\]"):
        export("sound.py:halves", shapes_to_check=[{"x": (2, 8)}, {"x": (2, 9)}])

    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.parametrize("opset", [17, pytest.param(18, marks=pytest.mark.slow)])
def test_large_weights_go_to_a_file_beside_the_model(export, tmp_path, opset):
    report, runs = export("sound.py:large", inline_limit_bytes=50_000, opset=opset)

    assert [file.location for file in report.graph.external_files] == ["model.onnx.data"]
    assert (tmp_path / "model.onnx").stat().st_size < 5_000
    assert (tmp_path / "model.onnx.data").stat().st_size >= 80_000
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
    assert_equal(runs)


@pytest.mark.parametrize("opset", [17, pytest.param(18, marks=pytest.mark.slow)])
def test_an_argument_that_the_tracer_drops_is_named(export, tmp_path, opset):
    with pytest.raises(SeveralErrors) as caught:
        export("broken.py:drops_an_argument", opset=opset)

    (problem,) = caught.value.problems
    assert "broken.py:drops_an_argument: example input 'mask' does nothing" in problem.summary
    assert "take 'mask' out of the example inputs" in problem.next_step
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "symbol", "other"), [("freezes_batch", "batch", "sequence"), ("freezes_length", "sequence", "batch")]
)
def test_a_size_that_tracing_froze_is_named_with_the_line(export, tmp_path, name, symbol, other):
    with pytest.raises(GraphError) as caught:
        export(f"broken.py:{name}")

    (problem,) = caught.value.problems
    assert f"tracing froze '{symbol}' at" in problem.summary
    assert f"'{other}'" not in problem.summary
    assert any(
        "broken.py:" in line and f"int(ids.shape[{int(name == 'freezes_length')}])" in line for line in problem.detail
    )
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.slow
def test_a_size_that_the_newer_exporter_froze_is_named_with_its_axes(export):
    with pytest.raises(SeveralErrors) as caught:
        export("broken.py:freezes_batch", opset=18)

    (problem,) = caught.value.problems
    assert "'batch' is asked dynamic" in problem.summary
    assert "axis 0 of 'ids' at 2, axis 0 of 'mask' at 2, axis 0 of 'output' at 2" in problem.summary


@pytest.mark.parametrize(
    ("name", "code"), [("branches_on_length", "if ids.shape[1] > 7:"), ("branches_on_data", "if mask.sum() < 10:")]
)
def test_control_flow_that_tracing_froze_is_named_and_differs(export, name, code):
    report, runs = export(f"broken.py:{name}")

    (place,) = report.traced
    assert "broken.py:" in place
    assert "Python boolean" in place
    assert code in place
    assert differs_at(runs)


@pytest.mark.slow
def test_control_flow_that_the_newer_exporter_froze_is_named(export):
    report, runs = export("broken.py:branches_on_length", opset=18)

    assert report.traced == ("the exporter took 'sequence' to be at least 0, at most 7: the model branches on it",)
    assert differs_at(runs) == [("batch", "sequence")]
    with pytest.raises(SeveralErrors) as caught:
        export("broken.py:branches_on_data", opset=18)
    (problem,) = caught.value.problems
    assert "takes a branch that depends on the values of a tensor" in problem.summary
    assert "if mask.sum() < 10:" in problem.detail[0]


def test_dropout_that_stays_active_is_named(export):
    with pytest.raises(SeveralErrors) as caught:
        export("broken.py:always_drops")

    assert "dropout is active in the exported model, at '/Dropout'" in caught.value.problems[0].summary


def test_a_model_that_raises_is_told_by_its_own_line(export):
    with pytest.raises(GraphError, match=r"raised RuntimeError: .* while running the model at its example") as caught:
        export("broken.py:model_raises")

    assert "in forward: return self.head(ids)" in caught.value.problems[0].detail[0]


@pytest.mark.slow
def test_an_operator_beyond_onnx_is_named_with_both_exporters_reasons(export):
    with pytest.raises(SeveralErrors) as caught:
        export("broken.py:beyond_onnx")

    (problem,) = caught.value.problems
    assert "is exported to opset 17 by none of torch" in problem.summary
    assert "aten::linalg_eigvalsh" in problem.detail[0]
    assert "dynamo exporter stopped" in problem.detail[1]


@pytest.mark.slow
def test_a_callable_that_hangs_ends_at_the_limit(tmp_path):
    with pytest.raises(GraphError, match="while making the model") as caught:
        export_torch(
            "broken.py:loops",
            FOLDER,
            tmp_path / "model.onnx",
            opset=17,
            work_dir=tmp_path,
            inputs_at=lambda graph, shapes: {},
            timeout_seconds=30,
        )

    assert "gave no answer within 30 s" in caught.value.problems[0].summary
    assert not list(tmp_path.iterdir())
