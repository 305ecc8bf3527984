"""The inspector's JSON in both forms, and FP32 parts that an engine has swallowed."""

from __future__ import annotations

import json

import pytest

from trtforge.backends.inspection import engine_layers, islands, layer_tactics

OLD = {
    "Layers": [
        {
            "Name": "first + to_32",
            "LayerType": "gemm",
            "Inputs": [{"Name": "x", "Location": "Device", "Dimensions": [8, 4], "Format/Datatype": "Row major linear FP16 format"}],
            "Outputs": [{"Name": "a", "Location": "Device", "Dimensions": [8, 4], "Format/Datatype": "Row major linear FP32"}],
            "Metadata": "[ONNX Layer: first][ONNX Layer: to_32]",
        },
        {
            "Name": "{ForeignNode[ln/pow...ln/div]}",
            "LayerType": "Myelin",
            "Inputs": [{"Name": "a", "Format/Datatype": "Row major linear FP32"}],
            "Outputs": [{"Name": "b16", "Format/Datatype": "Channel major FP16 format where channel % 8 == 0"}],
        },
        {
            "Name": "q",
            "LayerType": "Reformat",
            "Inputs": [{"Name": "b16", "Format/Datatype": "Row major linear FP16 format"}],
            "Outputs": [{"Name": "c", "Format/Datatype": "Thirty-two wide channel vectorized row major Int8 format"}],
        },
    ],
    "Bindings": ["x", "c"],
}  # fmt: skip
NEW = {
    "Layers": [
        {
            "Name": "first + to_32",
            "LayerType": "gemm",
            "Inputs": [{"Name": "x", "Format": "Row major linear", "Datatype": "Half", "Strides": [4, 1]}],
            "Outputs": [{"Name": "a", "Format": "Row major linear", "DataType": "Float"}],
            "Metadata": "[ONNX Layer: first]\u001e[ONNX Layer: to_32]",
        },
        {
            "Name": "{ForeignNode[ln/pow...ln/div]}",
            "LayerType": "kgen",
            "Inputs": [{"Name": "a", "Format": "Row major linear", "Datatype": "Float"}],
            "Outputs": [{"Name": "b16", "Format": "Channel major, channel % 8 == 0", "Datatype": "Half"}],
        },
        {
            "Name": "q",
            "LayerType": "Reformat",
            "Inputs": [{"Name": "b16", "Format": "Row major linear", "Datatype": "Half"}],
            "Outputs": [{"Name": "c", "Format": "Row major linear", "Datatype": "Int8"}],
        },
    ],
    "I/O Tensors": [{"Name": "x", "IOMode": "Input", "DataType": "Half"}],
}


@pytest.mark.parametrize("text", [json.dumps(OLD), json.dumps(NEW)], ids=["8-10", "11"])
def test_both_forms_say_the_same(text):
    first, block, last = engine_layers(text)

    assert (first.name, first.kind, first.nodes) == ("first + to_32", "gemm", ("first", "to_32"))
    assert (first.inputs, first.outputs) == ({"x": "float16"}, {"a": "float32"})
    assert (block.inputs, block.outputs) == ({"a": "float32"}, {"b16": "float16"})
    assert last.outputs == {"c": "int8"}


@pytest.mark.parametrize(
    ("text", "element_type"),
    [
        ("Row major linear FP32", "float32"),
        ("Row major linear FP16 format", "float16"),
        ("Row major linear BF16 format", "bfloat16"),
        ("Row major Int32 format", "int32"),
        ("Row major linear INT64 format", "int64"),
        ("Row major Bool format", "bool"),
        ("Row major linear FP8 format", "float8e4m3fn"),
        ("Two wide channel vectorized row major FP16 format", "float16"),
        ("N/A due to dynamic shapes", ""),
    ],
)
def test_types_in_words(text, element_type):
    layer = {"Name": "l", "LayerType": "x", "Inputs": [], "Outputs": [{"Name": "t", "Format/Datatype": text}]}

    assert engine_layers(json.dumps({"Layers": [layer]}))[0].outputs == {"t": element_type}


def test_control_characters_stand_in_the_text_as_they_are():
    """As TensorRT 8.6 writes them between the nodes of a layer."""
    text = '{"Layers": [{"Name": "a + b", "Metadata": "[ONNX Layer: a]\x1e[ONNX Layer: b]"}]}'

    assert engine_layers(text)[0].nodes == ("a", "b")


def test_names_only():
    (layer,) = engine_layers('{"Layers": ["conv1 + relu1"], "Bindings": ["x"]}')

    assert (layer.name, layer.outputs) == ("conv1 + relu1", {})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"Layers": 1}'])
def test_what_is_no_inspectors_json(text):
    with pytest.raises(ValueError, match=r"Expecting value|no 'Layers'"):
        engine_layers(text)


def test_what_became_of_each_island():
    float32 = {"a": "kept", "b16": "swallowed", "inner": "ln/pow", "outer": "ln/pow"}

    found = islands(engine_layers(json.dumps(OLD)), float32)

    assert found.kept == ("kept",)
    assert found.swallowed == {"swallowed": "'b16' is float16 in '{ForeignNode[ln/pow...ln/div]}'"}
    assert found.hidden == ("ln/pow",)


def test_a_layer_may_read_a_copy_in_a_lower_type_of_what_was_computed_in_fp32():
    def layer(name, inputs, outputs):
        sides = [[{"Name": n, "Format/Datatype": t} for n, t in side.items()] for side in (inputs, outputs)]
        return {"Name": name, "LayerType": "x", "Inputs": sides[0], "Outputs": sides[1]}

    text = json.dumps({"Layers": [layer("reads", {"a": "Half"}, {}), layer("writes", {}, {"a": "Float"})]})

    assert islands(engine_layers(text), {"a": "node"}).kept == ("node",)


def test_tactics_are_names_else_numbers_and_those_of_layers_that_tell_one():
    layers = [
        {"Name": "a", "TacticName": "sm80_xmma_gemm", "TacticValue": "0x1"},
        {"Name": "b", "TacticName": "", "TacticValue": "0x00000000000003e8"},
        {"Name": "c"},
        "with names only",
    ]

    assert layer_tactics(json.dumps({"Layers": layers})) == {"a": "sm80_xmma_gemm", "b": "0x00000000000003e8"}


@pytest.mark.parametrize(
    ("told", "weights", "swallowed"), [("N/A", "Half", True), ("N/A", "Float", False), ("Float", "Half", False)]
)
def test_weights_tell_of_a_fused_node_where_its_tensors_do_not(told, weights, swallowed):
    layer = {
        "Name": "conv + relu",
        "LayerType": "x",
        "Inputs": [],
        "Outputs": [{"Name": "y", "Format/Datatype": told}],
        "Weights": {"Type": weights},
        "Metadata": "[ONNX Layer: conv]\x1e[ONNX Layer: relu]",
    }

    found = islands(engine_layers(json.dumps({"Layers": [layer]})), {"y": "relu", "z": "elsewhere"})

    assert found.swallowed == ({"relu": "weights are float16 in 'conv + relu'"} if swallowed else {})
    assert "elsewhere" in found.hidden


@pytest.mark.parametrize(("weights", "swallowed"), [("Half", True), ("Float", False)])
@pytest.mark.parametrize("output", ["y", "Reformatted Output Tensor 0 to conv"])
def test_an_output_in_fp32_does_not_hide_the_lower_weights_of_its_node(output, weights, swallowed):
    """The layer writes it in FP32, or writes FP16 that another copies."""
    layers = [
        {
            "Name": "conv",
            "LayerType": "x",
            "Inputs": [],
            "Outputs": [{"Name": output, "Format/Datatype": "Float" if output == "y" else "Half"}],
            "Weights": {"Type": weights},
            "Metadata": "[ONNX Layer: conv]",
        },
        {"Name": "copy", "LayerType": "Reformat", "Outputs": [{"Name": "y", "Format/Datatype": "Float"}]},
    ]

    found = islands(engine_layers(json.dumps({"Layers": layers})), {"y": "conv"})

    assert found.kept == (() if swallowed else ("conv",))
    assert found.swallowed == ({"conv": "weights are float16 in 'conv'"} if swallowed else {})
