"""What TensorRT 8.6 said of engines that it built on an H200."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from trtforge.backends.inspection import engine_layers

DATA = Path(__file__).parents[1] / "data"


def told(name):
    """The text holds control characters, which JSON does not allow."""
    return gzip.decompress((DATA / f"inspector-trt8.6-h200-{name}.json.gz").read_bytes()).decode()


@pytest.mark.parametrize(("name", "weights"), [("resnet50-fp32", "float32"), ("resnet50-fp16", "float16")])
def test_the_weights_tell_what_dynamic_shapes_hide(name, weights):
    layers = engine_layers(told(name))
    convolutions = [layer for layer in layers if "Convolution" in layer.kind]

    assert len(convolutions) == 54  # 53 convolutions and the classifier
    assert {layer.weights for layer in convolutions} == {weights}
    assert {element_type for layer in layers for element_type in layer.outputs.values()} == {""}
    assert "/conv1/Conv" in {node for layer in convolutions for node in layer.nodes}


@pytest.mark.parametrize("name", ["bert-base-fp32", "bert-base-fp16"])
def test_an_encoder_is_one_layer_that_tells_no_types(name):
    (fused, *copies) = sorted(engine_layers(told(name)), key=lambda layer: layer.kind != "Myelin")

    assert "{ForeignNode[/bert/" in fused.name
    assert {layer.weights for layer in (fused, *copies)} == {""}
    assert {kind for layer in (fused, *copies) for kind in layer.outputs.values()} == {""}
