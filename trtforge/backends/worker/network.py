"""From the model's bytes to TensorRT's network: parsed, compared with the graph that was checked, and bound to types."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtforge.backends.worker.answers import LONGEST_TEXT, Json, Refused, problem

_DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT8": "int8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
    "UINT8": "uint8",
    "FP8": "float8e4m3fn",
    "INT4": "int4",
    "FP4": "float4e2m1",
    "E8M0": "float8e8m0",
}
"""TensorRT's DataType -> the name that `TensorSpec` uses."""

_OWN_TYPE = frozenset(
    (
        *("CAST", "CONSTANT", "QUANTIZE", "DEQUANTIZE", "SHAPE", "ASSERTION", "FILL", "NON_ZERO"),
        *("TRIP_LIMIT", "ITERATOR", "RECURRENCE", "LOOP_OUTPUT"),
        *("CONDITION", "CONDITIONAL_INPUT", "CONDITIONAL_OUTPUT", "PLUGIN", "PLUGIN_V2"),
    )
)
"""LayerType of layers whose types are not the builder's to choose, or that take no precision."""

_WEIGHTED = ("CONVOLUTION", "DECONVOLUTION", "EINSUM", "MATRIX_MULTIPLY")
"""LayerType of the layers that do most of the work."""


def parse(parser: Any, request: Json) -> None:
    """Fills the parser's network.

    Raises:
        Refused: the parser does not take the model, with all of its reasons.
    """
    data = Path(request["model_path"]).read_bytes()
    # The path is not opened: its folder is the one that external data locations are relative to.
    parsed = parser.parse(data, request["parse_path"])
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    if errors or not parsed:
        raise Refused({"kind": "no_engine", "stage": "parse", "lines": [parser_line(error) for error in errors]})


def parser_line(error: Any) -> str:
    """One reason of the parser, with the node that it is about."""
    if not hasattr(error, "node_name"):  # before TensorRT 10
        return f"{_code(error)} in node number {error.node()}: {error.desc()}"[:LONGEST_TEXT]
    node = error.node_name() or f"number {error.node()}"
    operator = error.node_operator() or "the graph"
    stack = "".join(f", in function {name}" for name in error.local_function_stack())
    return f"{_code(error)} in {operator} '{node}'{stack}: {error.desc()}"[:LONGEST_TEXT]


def _code(error: Any) -> str:
    """Name of a parser error's code; 8.6 has a method where later versions have the name."""
    return str(error.code()).rpartition(".")[2]


def tensor_record(tensor: Any) -> Json:
    """Name, type and shape of an input or output; an axis that moves has its name, or None."""
    shape = [size if size >= 0 else tensor.get_dimension_name(axis) or None for axis, size in enumerate(tensor.shape)]
    return {"name": tensor.name, "dtype": _DTYPES.get(tensor.dtype.name, tensor.dtype.name), "shape": shape}


def network_problems(network: Any, request: Json) -> list[Json]:
    """Where the parsed network is not the graph that was checked before: the parser changes types without a word."""
    inputs = {network.get_input(i).name: network.get_input(i) for i in range(network.num_inputs)}
    outputs = {network.get_output(i).name: network.get_output(i) for i in range(network.num_outputs)}
    problems = []
    for kind, expected, found in (("input", request["inputs"], inputs), ("output", request["outputs"], outputs)):
        names = [spec["name"] for spec in expected]
        if set(names) != set(found):
            summary = f"the parsed network has the {kind}s {', '.join(found) or 'none'}, the model {', '.join(names)}"
            problems.append(problem("GraphError", summary, "export the model again; its file is damaged"))
        for spec in expected:
            if spec["name"] in found:
                problems += _dtype_problems(kind, spec, tensor_record(found[spec["name"]]), request)
    problems += _tie_problems(inputs, request)
    for name, tensor in inputs.items():
        problems += _profile_problems(name, tensor, request)
    for profile in request["profiles"]:
        # The builder takes ranges for inputs that do not exist without a word.
        for name in {**profile["shapes"], **profile["values"]}.keys() - inputs.keys():
            summary = f"profile '{profile['name']}' names '{name}', the network has {', '.join(inputs)}"
            problems.append(problem("BuildError", summary, f"remove '{name}' from the profile"))
    return problems


def _dtype_problems(kind: str, spec: Json, parsed: Json, request: Json) -> list[Json]:
    if parsed["dtype"] == spec["dtype"]:
        return []
    summary = (
        f"{request['module']} {request['version']} makes {kind} '{spec['name']}' {parsed['dtype']}, "
        f"the model says {spec['dtype']}"
    )
    return [problem("CapabilityError", summary, f"cast '{spec['name']}' to {parsed['dtype']} in the model")]


def _tie_problems(inputs: Mapping[str, Any], request: Json) -> list[Json]:
    """TensorRT takes dimensions of one name to be equal; names that mean nothing would forbid sizes in silence."""
    meant = {spec["name"]: spec["shape"] for spec in request["inputs"]}
    places: dict[str, list[tuple[str, int]]] = {}
    for name, tensor in inputs.items():
        for axis, dim in enumerate(tensor_record(tensor)["shape"]):
            if isinstance(dim, str):
                places.setdefault(dim, []).append((name, axis))
    problems = []
    for dim, where in places.items():
        if len(where) > 1 and any(meant.get(name, [])[axis : axis + 1] != [dim] for name, axis in where):
            axes = ", ".join(f"'{name}' axis {axis}" for name, axis in where)
            summary = f"the model names {axes} all '{dim}', so TensorRT takes their sizes to be equal"
            step = f"give each of these dimensions a name of its own, or none, in place of '{dim}'"
            problems.append(problem("GraphError", summary, step))
    return problems


def _profile_problems(name: str, tensor: Any, request: Json) -> list[Json]:
    role = {spec["name"]: spec["role"] for spec in request["inputs"]}.get(name, "")
    problems = []
    for profile in request["profiles"]:
        if -1 in tensor.shape and name not in profile["shapes"]:
            summary = f"profile '{profile['name']}' has no shapes for the dynamic input '{name}'"
            problems.append(problem("BuildError", summary, f"add '{name}' with min, opt and max"))
        if tensor.is_shape_tensor and name not in profile["values"]:
            summary = (
                f"profile '{profile['name']}' has no values for '{name}', whose values decide another tensor's shape"
            )
            step = f"add values: {{min: [...], opt: [...], max: [...]}} for '{name}'"
            problems.append(problem("BuildError", summary, step, f"the graph check took it for: {role}"))
        if not tensor.is_shape_tensor and name in profile["values"] and role != "shape_values":
            summary = f"profile '{profile['name']}' has values for '{name}', which decides no tensor's shape"
            problems.append(problem("BuildError", summary, f"remove values: of '{name}'"))
    return problems


def keep_float32(trt: Any, network: Any, request: Json) -> None:
    """Binds what the graph computes in FP32, which a weakly typed network is free to run in a lower type.

    The parser makes several layers of some nodes; the tensors between them have names of its own and take the type of
    the layer that reads them, so layers are looked at from the last to the first.
    """
    bound = dict(request["bound_tensors"])
    for index in reversed(range(network.num_layers if bound else 0)):
        layer = network.get_layer(index)
        outputs = [layer.get_output(place) for place in range(layer.num_outputs)]
        is_bound = any(tensor is not None and bound.get(tensor.name, False) for tensor in outputs)
        if not is_bound or layer.type.name in _OWN_TYPE:
            continue
        for tensor in filter(None, (layer.get_input(place) for place in range(layer.num_inputs))):
            bound.setdefault(tensor.name, True)
        layer.precision = trt.DataType.FLOAT
        for place, tensor in enumerate(outputs):
            if tensor is not None and tensor.dtype.name in ("FLOAT", "HALF"):
                layer.set_output_type(place, trt.DataType.FLOAT)


def is_strongly_typed(request: Json) -> bool:
    """Whether the builder keeps the types of the parsed network."""
    is_always = request["module"] == "tensorrt_rtx" or int(request["version"].split(".")[0]) >= 11  # noqa: PLR2004
    return is_always or "STRONGLY_TYPED" in request["network_flags"]


def weighted_layers(network: Any) -> list[Json]:
    """The layers that do most of the work, by kind and type."""
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    quantized: dict[str, str] = {}
    for layer in layers:
        if layer.type.name == "DEQUANTIZE":
            quantized[layer.get_output(0).name] = layer.get_input(0).dtype.name
        elif layer.type.name == "SHUFFLE" and layer.get_input(0).name in quantized:
            # The parser gives weights of fewer dimensions than the other operand more of them.
            quantized[layer.get_output(0).name] = quantized[layer.get_input(0).name]
    groups: dict[tuple[str, str], list[str]] = {}
    for layer in layers:
        if layer.type.name in _WEIGHTED:
            dtype = _computed_dtype(layer, quantized)
            groups.setdefault((layer.type.name, _DTYPES.get(dtype, dtype)), []).append(layer.name)
    return [{"kind": kind, "dtype": dtype, "names": names} for (kind, dtype), names in sorted(groups.items())]


def _computed_dtype(layer: Any, quantized: Mapping[str, str]) -> str:
    """That of the quantized values where both operands are dequantized right before the layer; a bias does not count."""
    operands = [tensor.name for i in range(min(layer.num_inputs, 2)) if (tensor := layer.get_input(i)) is not None]
    is_quantized = len(operands) > 1 and all(name in quantized for name in operands)
    found: str = quantized[operands[0]] if is_quantized else layer.get_output(0).dtype.name
    return found
