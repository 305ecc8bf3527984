"""What a finished engine says about its layers, in both forms of the inspector's JSON (TensorRT 8 to 10, and 11)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

_TYPES: Final = (
    (re.compile(r"\b(BF16|BFloat16)\b", re.IGNORECASE), "bfloat16"),
    (re.compile(r"\b(FP16|Half|Float16)\b", re.IGNORECASE), "float16"),
    (re.compile(r"\b(FP32|Float|Float32)\b", re.IGNORECASE), "float32"),
    (re.compile(r"\b(FP8\w*)\b", re.IGNORECASE), "float8e4m3fn"),
    (re.compile(r"\b(Int8)\b", re.IGNORECASE), "int8"),
    (re.compile(r"\b(Int32)\b", re.IGNORECASE), "int32"),
    (re.compile(r"\b(Int64)\b", re.IGNORECASE), "int64"),
    (re.compile(r"\b(Bool)\b", re.IGNORECASE), "bool"),
)
_TYPE_KEYS: Final = ("Format/Datatype", "Datatype", "DataType", "Format")
"""Source: TensorRT 8.6 and 10 write one text; TensorRT 11 writes Format and Datatype (trtexec also DataType) apart."""
_ONNX_NODE: Final = re.compile(r"\[ONNX Layer: ([^\]]+)\]")


@dataclass(frozen=True, slots=True)
class EngineLayer:
    """One layer of an engine, most often several nodes fused.

    Attributes:
        name: TensorRT's, made of the names of what was fused.
        kind: LayerType.
        nodes: names of the ONNX nodes in it, where the engine tells.
        inputs, outputs: tensor name -> element type, "" where the engine tells none, as of dynamic shapes in 8.6.
        weights: element type of its weights, "" where it has none or tells none.
    """

    name: str
    kind: str
    nodes: tuple[str, ...]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    weights: str = ""


def engine_layers(text: str) -> tuple[EngineLayer, ...]:
    """The layers in the inspector's JSON. With less than detailed verbosity they have names only.

    Raises:
        ValueError: it is no JSON of the inspector.
    """
    return tuple(_layer(entry) for entry in _entries(text))


def _entries(text: str) -> list[Any]:
    value = json.loads(text, strict=False)  # TensorRT 8.6 writes control characters into names as they are
    if not isinstance(value, dict) or not isinstance(value.get("Layers"), list):
        raise ValueError("no 'Layers' in the inspector's JSON")  # noqa: TRY004 - it is the text that is wrong
    return list(value["Layers"])


def layer_tactics(text: str) -> dict[str, str]:
    """Layer -> the tactic that computes it, of the layers in the inspector's JSON that tell theirs.

    They do with detailed verbosity only. A name is preferred to a number.

    Raises:
        ValueError: it is no JSON of the inspector.
    """
    tactics = {}
    for entry in _entries(text):
        if isinstance(entry, dict) and (tactic := entry.get("TacticName") or entry.get("TacticValue")):
            tactics[str(entry.get("Name", ""))] = str(tactic)
    return tactics


def _layer(entry: Any) -> EngineLayer:
    if isinstance(entry, str):
        return EngineLayer(entry, "", (), {}, {})
    nodes = tuple(dict.fromkeys(_ONNX_NODE.findall(str(entry.get("Metadata", "")))))
    inputs, outputs = (_types(entry.get(key, ())) for key in ("Inputs", "Outputs"))
    weights = entry.get("Weights")
    return EngineLayer(
        str(entry.get("Name", "")),
        str(entry.get("LayerType", "")),
        nodes,
        inputs,
        outputs,
        _named_type(str(weights.get("Type", ""))) if isinstance(weights, dict) else "",
    )


def _types(tensors: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    return {str(tensor.get("Name", "")): _element_type(tensor) for tensor in tensors}


def _element_type(tensor: Mapping[str, Any]) -> str:
    text = next((str(tensor[key]) for key in _TYPE_KEYS if key in tensor), "")
    return _named_type(text)


def _named_type(text: str) -> str:
    return next((name for pattern, name in _TYPES if pattern.search(text)), "")


@dataclass(frozen=True, slots=True)
class Islands:
    """What became of the FP32 parts of a graph.

    Attributes:
        kept: nodes with a tensor that the engine has in FP32, and none in a lower type.
        swallowed: node -> the engine's layer and type that says so.
        hidden: nodes of which the engine tells no type.
    """

    kept: tuple[str, ...]
    swallowed: Mapping[str, str]
    hidden: tuple[str, ...]


def islands(layers: Iterable[EngineLayer], float32: Mapping[str, str]) -> Islands:
    """Compares an engine's layers with the graph.

    Args:
        layers: of the engine.
        float32: tensor -> the node that computes it, for all that the graph has in FP32.
    """
    found: dict[str, tuple[str, str]] = {}
    weights: dict[str, str] = {}
    owners: set[str] = set()
    for layer in layers:
        if layer.weights not in ("", "float32"):
            weights |= dict.fromkeys(layer.nodes, f"weights are {layer.weights} in '{layer.name}'")
            owners.update(layer.nodes[:1])  # theirs are the weights, and FP32 after them is but a copy
        for name, element_type in (*layer.inputs.items(), *layer.outputs.items()):
            if name in float32 and element_type:
                # A layer may read a copy in another type of a tensor that was computed in FP32.
                written = name in layer.outputs
                if written or name not in found:
                    found[name] = (element_type, layer.name)
    swallowed = {
        float32[name]: f"'{name}' is {element_type} in '{layer}'"
        for name, (element_type, layer) in found.items()
        if element_type != "float32"
    }
    nodes = dict.fromkeys(float32.values())
    told = {float32[name] for name in found}
    swallowed |= {node: weights[node] for node in nodes if node in weights and (node not in told or node in owners)}
    seen = told - swallowed.keys()
    return Islands(
        tuple(node for node in nodes if node in seen),
        swallowed,
        tuple(node for node in nodes if node not in seen and node not in swallowed),
    )
