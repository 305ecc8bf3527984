"""The quickstart's model and spec: it reads digits, it is small, and it tells nothing of the machine that made it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from trtforge.spec.load import load_spec

ROOT = Path(__file__).resolve().parents[2]
SPEC = ROOT / "configs" / "digits.yaml"
MODEL = ROOT / "configs" / "models" / "digits.onnx"
MAX_MODEL_BYTES = 300_000


@pytest.fixture(scope="module")
def model():
    return onnx.load(MODEL)


@pytest.fixture(scope="module")
def spec():
    return load_spec(SPEC).spec


@pytest.fixture(scope="module")
def held_out():
    with np.load(ROOT / "calib_data" / "digits" / "eval.npz", allow_pickle=False) as arrays:
        return arrays["image"], arrays["label"]


@pytest.fixture(scope="module")
def session():
    return ort.InferenceSession(MODEL, providers=["CPUExecutionProvider"])


def signature(value):
    tensor = value.type.tensor_type
    return value.name, tensor.elem_type, [dim.dim_param or dim.dim_value for dim in tensor.shape.dim]


def test_held_out_accuracy_is_above_97_percent(session, held_out):
    image, label = held_out
    (logits,) = session.run(["logits"], {"image": image})
    assert np.mean(logits.argmax(axis=1) == label) > 0.97


def test_batches_do_not_change_the_answer(session, held_out):
    image, _ = held_out
    (together,) = session.run(["logits"], {"image": image[:64]})
    alone = np.concatenate([session.run(["logits"], {"image": image[i : i + 1]})[0] for i in range(64)])
    np.testing.assert_allclose(alone, together, rtol=1e-4, atol=1e-4)


def test_inputs_and_outputs(model):
    assert [signature(value) for value in model.graph.input] == [("image", onnx.TensorProto.FLOAT, ["batch", 1, 8, 8])]
    assert [signature(value) for value in model.graph.output] == [("logits", onnx.TensorProto.FLOAT, ["batch", 10])]
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 17)]


def test_it_has_the_structure_that_quantization_has_to_cope_with(model):
    onnx.checker.check_model(model, full_check=True)
    channels = {weight.name: weight.dims[0] for weight in model.graph.initializer}
    convs = [node for node in model.graph.node if node.op_type == "Conv"]
    assert len(convs) >= 3
    assert min(channels[conv.input[1]] for conv in convs) >= 16
    producers = {output: node for node in model.graph.node for output in node.output}
    additions = [node for node in model.graph.node if node.op_type == "Add"]
    assert any(all(name in producers for name in node.input) for node in additions), "expected a residual add"


def test_it_tells_nothing_of_the_machine_that_made_it(model):
    texts = [model.doc_string, model.graph.doc_string, *(node.doc_string for node in model.graph.node)]
    assert not any(texts)
    assert not model.metadata_props
    content = MODEL.read_bytes()
    assert not [trace for trace in (b".py", b"/home/", b"/tmp/", b"/usr/", b"site-packages") if trace in content]


def test_it_is_small():
    assert MODEL.stat().st_size < MAX_MODEL_BYTES


def test_spec_names_what_is_there(spec, model):
    assert (SPEC.parent / spec.model.onnx).resolve() == MODEL
    assert set(spec.profiles[0].inputs) == set(spec.inputs) == {value.name for value in model.graph.input}


def test_spec_output_is_ignored_by_git(spec):
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert (SPEC.parent / spec.output).is_relative_to(ROOT / "configs" / "dist")
    assert "/configs/dist/" in ignored


def test_spec_profile_and_targets(spec):
    (profile,) = spec.profiles
    image = profile.inputs["image"]
    assert [image.min, image.opt, image.max] == [(batch, 1, 8, 8) for batch in (1, 16, 64)]
    assert [(target.backend, target.gpus) for target in spec.targets] == [("tensorrt_rtx", ("sm86", "sm89", "sm120"))]
