"""The commented spec that `trtforge init` writes for a model."""

from __future__ import annotations

import math
import re

from trtforge.errors import printable
from trtforge.spec.model import BLANK
from trtforge.types import Dim, Graph, RoleKind, TensorSpec

_MAX_VALUES = 64
"""Elements of a shape tensor. Source: TensorRT, ITensor::isShapeTensor."""
_MAX_SIMPLE_KEY = 1000
"""YAML wants a longer key written with '?'; 1024 characters, quotes and escapes included. Source: YAML 1.2.2, 8.2.2."""
_BATCH = (1, 8, 32)
_BATCH_SYMBOL = re.compile(r"n|b|bs|.*batch.*", re.IGNORECASE)
_BATCHED = ("image", "token_ids", "mask")
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")


def yaml_key(name: str) -> str:
    """`name` as a YAML key: as it is where that is plain, else quoted. Names come from models, so from other people."""
    is_plain = _PLAIN_KEY.fullmatch(name) and name.lower() not in ("null", "true", "false")
    return name if is_plain else _quoted(name)


def _quoted(text: str) -> str:
    """`text` in YAML's double quotes. JSON's quoting will not do: YAML does not join its surrogate pairs."""
    shown = {'"': '\\"', "\\": "\\\\"}
    return '"' + "".join(shown.get(c, c if c.isprintable() else f"\\U{ord(c):08x}") for c in text) + '"'


def _pair(name: str, value: str) -> list[str]:
    key = yaml_key(name)
    lines = [f"{key}: {value}"] if len(key) <= _MAX_SIMPLE_KEY else [f"? {key}", f": {value}"]
    return [f"      {line}" for line in lines]


def starter_spec(graph: Graph, *, name: str, onnx: str) -> str:
    """A spec for `graph` with every choice explained, and the word FILL_IN where only the user knows the size.

    A first axis that is a batch gets 1, 8 and 32; any other open size, and every value that decides a shape, is left
    blank, so that `trtforge plan` points at it.

    Args:
        graph: the model.
        name: begins the engines' file names.
        onnx: the model's path as it shall stand in the spec.
    """
    lines = [
        "version: 1",
        f"name: {yaml_key(name)}",
        "",
        "model:",
        f"  onnx: {_quoted(onnx)}   # opset {graph.opset}, {graph.num_nodes} nodes",
        "",
        *_profiles(graph),
        *_inputs(graph),
        "precision:",
        "  type: fp32        # as_model builds the types that the model file has",
        "  tf32: false       # true lets FP32 matrix products round their inputs to TF32",
        "",
        "targets:",
        "  # Built ahead of time, on any machine, for compute capabilities (T4 sm75, A100 sm80, A10 sm86, L4 sm89, RTX 50 sm120).",
        "  - {backend: tensorrt_rtx, gpus: [sm86, sm89, sm120]}",
        "  # Built on the GPU model itself; where this machine has none, it is skipped and listed.",
        "  # - {backend: tensorrt, gpus: [T4, A100], when_missing: skip}",
        "",
        "output: dist/",
    ]
    return "\n".join(lines) + "\n"


def _profiles(graph: Graph) -> list[str]:
    entries = [entry for tensor in graph.inputs if (entry := _profile_entry(graph, tensor))]
    if not entries:
        return ["# Every input has a fixed shape, so no optimization profile is needed.", ""]
    header = ["profiles:", "  # Kernels are tuned for opt and valid from min to max: make opt the commonest size."]
    if any(BLANK in line for entry in entries for line in entry):
        header.append(
            f"  # {BLANK}: the model leaves this size open and nothing in it tells; write the sizes you serve."
        )
    return [*header, "  - name: default", "    inputs:", *(line for entry in entries for line in entry), ""]


def _profile_entry(graph: Graph, tensor: TensorSpec) -> list[str]:
    dims = ", ".join("?" if dim is None else printable(str(dim)) for dim in tensor.shape)
    comment = f"      # {tensor.dtype} ({dims})"
    if graph.role(tensor.name).kind == "shape_values":
        num_values = tensor.shape[0] if tensor.shape and isinstance(tensor.shape[0], int) else 1
        blanks = f"[{', '.join([BLANK] * min(num_values, _MAX_VALUES))}]"
        values = f"{{values: {{min: {blanks}, opt: {blanks}, max: {blanks}}}}}"
        return [f"{comment}: its values decide a shape", *_pair(tensor.name, values)]
    if not tensor.is_dynamic:
        return []
    kind = graph.role(tensor.name).kind
    shapes = [[_size(dim, axis, place, kind) for axis, dim in enumerate(tensor.shape)] for place in range(3)]
    low, opt, high = (f"[{', '.join(shape)}]" for shape in shapes)
    return [comment, *_pair(tensor.name, f"{{min: {low}, opt: {opt}, max: {high}}}")]


def _size(dim: Dim, axis: int, place: int, kind: RoleKind) -> str:
    if isinstance(dim, int):
        return str(dim)
    is_batch = axis == 0 and (kind in _BATCHED or dim is None or bool(_BATCH_SYMBOL.fullmatch(dim)))
    return str(_BATCH[place]) if is_batch else BLANK


def _inputs(graph: Graph) -> list[str]:
    lines = [
        "# What valid values are, where trtforge makes inputs itself. Seen in the model; uncomment to correct.",
        "# inputs:",
    ]
    for role in graph.roles:
        if role.kind != "shape_values":
            values = f"{{kind: {role.kind}, range: [{_number(role.low)}, {_number(role.high)}]}}"
            lines.append(f"#   {yaml_key(role.name)}: {values}   # {printable(role.reason)}")
    return [*lines, ""] if len(lines) > 2 else []  # noqa: PLR2004 - the two header lines


def _number(value: float) -> str:
    return str(int(value)) if math.isfinite(value) and value == int(value) else str(value)
