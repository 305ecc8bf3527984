"""What TensorRT 8.6 said of engines that it built on an H200."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from trtforge.backends.inspection import engine_layers

DATA = Path(__file__).parents[1] / "data"
KINDS = ("int8", "implicit-int8")


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


def test_explicit_int8_fuses_as_much_as_implicit_int8():
    explicit, implicit = (
        [layer for layer in engine_layers(told(f"resnet50-{kind}")) if layer.weights] for kind in KINDS
    )

    assert {layer.weights for layer in (*explicit, *implicit)} == {"int8"}
    assert len(explicit) == len(implicit) == 53
    # Where two convolutions are added, either may take the addition in.
    assert sorted(n for one in explicit for n in one.nodes) == sorted(n for one in implicit for n in one.nodes)


@pytest.mark.parametrize("name", ["resnet50-fp16", "resnet50-int8", "resnet50-implicit-int8", "bert-base-int8"])
def test_layers_take_as_long_as_the_engine(name):
    """Asking for their times stops the GPU after each layer, which costs a small engine up to a quarter."""
    measured = json.loads(gzip.decompress((DATA / "layer_times_h200.json.gz").read_bytes()))["engines"][name]

    assert list(measured) == ["1", "8", "32"]
    for entry in measured.values():
        assert 0.95 < sum(entry["layers_ms"].values()) / entry["whole_ms"] < 1.25
