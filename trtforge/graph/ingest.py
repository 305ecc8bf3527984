"""Reads a model, checks all of it that a build depends on, mends what can be mended, and describes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]
from onnx import ModelProto

from trtforge.digests import file_digest, model_digest
from trtforge.errors import GraphError, Problem, Where, closest, raise_any
from trtforge.files import commit, explained, write_aside
from trtforge.graph.external_data import external_locations, tensor_problems, weight_bytes
from trtforge.graph.flow import flow_of
from trtforge.graph.model_file import (
    INLINE_LIMIT_BYTES,
    domain_of,
    dtype_name,
    graph_problem,
    label,
    listed,
    node_lists,
    read_model,
    real_inputs,
    tensors,
)
from trtforge.graph.names import mend
from trtforge.graph.roles import data_dependent_outputs, infer_roles, wide_int_constants
from trtforge.memo import DigestMemo
from trtforge.types import Dim, ExternalFile, Graph, OperatorUse, TensorSpec

_QDQ = ("QuantizeLinear", "DequantizeLinear")


def ingest(source: Path, work_dir: Path, *, memo: DigestMemo | None = None, where: Where | None = None) -> Graph:
    """The checked graph of the ONNX file `source`.

    Every node of it has a unique name and comes after what it reads; every input has an element type and a rank; every
    weight has the bytes that its shape needs, in the file or within the file's folder; every standard operator exists at
    the model's opset. Where names or order needed mending, a rewritten copy goes to `work_dir/graph.onnx`; values keep
    their names. Weights in other files are hashed, not loaded. Operators of custom domains are left to the backends.

    Args:
        source: the ONNX file.
        work_dir: folder for a rewritten copy, made when needed.
        memo: digests of files read before.
        where: the place in the spec that names the model, for messages.

    Raises:
        GraphError: the file is missing or no complete ONNX model.
        SeveralErrors: all problems of a model that could be read.
        StoreError: the rewritten copy could not be written.
    """
    at = where or Where(source)
    model = read_model(source, at)
    source = source.absolute()
    folder = source.parent
    opsets, problems = _opsets(model.opset_import, "", at)
    problems += tensor_problems(model, folder, at)
    notes, order_problems = mend(model, at)
    inputs, input_problems = _specs(real_inputs(model.graph), "input", at)
    outputs, output_problems = _specs(_with_shapes(model), "output", at)
    operators, operator_problems = _operators(model, opsets, at)
    raise_any([*problems, *order_problems, *input_problems, *output_problems, *operator_problems])
    digest, external_files = _digests(source, model, memo, at)
    flow = flow_of(model)
    return Graph(
        source=source,
        path=_write(model, work_dir / "graph.onnx", at) if notes else source,
        weights_dir=folder,
        digest=digest,
        ir_version=model.ir_version,
        opsets=tuple(sorted(opsets.items())),
        producer=f"{model.producer_name} {model.producer_version}".strip(),
        inputs=inputs,
        outputs=outputs,
        roles=infer_roles(model, flow),
        data_dependent_outputs=data_dependent_outputs(model, flow),
        operators=operators,
        element_types=_element_types(model, (*inputs, *outputs)),
        has_qdq=any(use.op_type in _QDQ for use in operators),
        wide_int_constants=wide_int_constants(model, folder, flow),
        num_nodes=sum(len(nodes) for _, nodes in node_lists(model)),
        weight_bytes=weight_bytes(model),
        external_files=external_files,
        notes=(*notes, *_remarks(model, operators)),
    )


def _opsets(imports: Any, scope: str, at: Where) -> tuple[dict[str, int], list[Problem]]:
    inside = f" in {scope}" if scope else ""
    opsets: dict[str, int] = {}
    problems = []
    for entry in imports:
        domain = domain_of(entry.domain)
        if opsets.setdefault(domain, entry.version) != entry.version:
            problems.append(
                graph_problem(
                    f"operator set '{domain or 'ai.onnx'}' is imported twice{inside}, at {opsets[domain]} and {entry.version}",
                    "export the model again with one opset_version",
                    at,
                )
            )
    known = onnx.defs.onnx_opset_version()
    if (found := opsets.get("", 1)) > known or found < 1:
        summary = f"opset {found}{inside} is not one that onnx {onnx.__version__} knows (1 to {known})"
        next_step = "pip install --upgrade onnx" if found > known else "export the model again with opset_version=17"
        problems.append(graph_problem(summary, next_step, at))
    return opsets, problems


def _with_shapes(model: ModelProto) -> list[Any]:
    """The graph's outputs; from shape inference where the file leaves a rank or an element type open."""
    outputs = list(model.graph.output)
    tensor_types = [
        value.type.tensor_type for value in outputs if value.type.WhichOneof("value") in (None, "tensor_type")
    ]
    if all(tensor_type.HasField("shape") and tensor_type.elem_type for tensor_type in tensor_types):
        return outputs
    try:
        inferred = onnx.shape_inference.infer_shapes(model).graph.output
    except Exception:  # noqa: BLE001 - onnx throws many types; without a shape, the output is reported by name
        return outputs
    return list(inferred)


def _specs(values: list[Any], what: str, at: Where) -> tuple[tuple[TensorSpec, ...], list[Problem]]:
    if not values:
        return (), [graph_problem(f"the model has no {what}s", f"export it with at least one {what}", at)]
    problems = [problem for value in values for problem in _value_problems(value, what, at)]
    if problems:
        return (), problems
    return tuple(_spec(value) for value in values), []


def _value_problems(value: Any, what: str, at: Where) -> Iterator[Problem]:
    name, kind = f"{what} '{value.name}'", value.type.WhichOneof("value")
    tensor_type = value.type.tensor_type
    if kind != "tensor_type":
        found = f"is of {kind.removesuffix('_type').replace('_', ' ')} type" if kind else "has no type"
        zipmap = "; for scikit-learn, convert with options={'zipmap': False}" if what == "output" else ""
        yield graph_problem(
            f"{name} {found}, TensorRT takes dense tensors", f"export the model with tensor {what}s only{zipmap}", at
        )
        return
    if dtype_name(tensor_type.elem_type) is None:
        yield graph_problem(f"{name} has no known element type (ONNX type {tensor_type.elem_type})", _SHAPES, at)
    if not tensor_type.HasField("shape"):
        yield graph_problem(f"{name} has no shape, not even a rank", _SHAPES, at)
    for axis, dim in enumerate(tensor_type.shape.dim):
        if what == "input" and dim.HasField("dim_value") and dim.dim_value == 0:
            yield graph_problem(
                f"{name} has size 0 on axis {axis}; did you mean a symbol?",
                f"write a symbol such as 'batch' there: export with dynamic_axes={{'{value.name}': {{{axis}: 'batch'}}}}",
                at,
            )


_SHAPES = "declare it in the exporter, with a symbol for each dynamic dimension"


def _spec(value: Any) -> TensorSpec:
    tensor_type = value.type.tensor_type
    return TensorSpec(
        value.name, dtype_name(tensor_type.elem_type) or "", tuple(_dim(dim) for dim in tensor_type.shape.dim)
    )


def _dim(dim: Any) -> Dim:
    if dim.HasField("dim_value"):
        return int(dim.dim_value) if dim.dim_value >= 0 else None
    return str(dim.dim_param) or None


def _operators(
    model: ModelProto, opsets: Mapping[str, int], at: Where
) -> tuple[tuple[OperatorUse, ...], list[Problem]]:
    problems: list[Problem] = []
    function_opsets: dict[str, Mapping[str, int]] = {}
    for function in model.functions:
        scope = f"function {function.name}"
        function_opsets[scope], found = _opsets(function.opset_import, scope, at)
        problems += found
    local = {(domain_of(function.domain), function.name) for function in model.functions}
    uses: dict[tuple[str, str, str], list[Any]] = {}
    for scope, nodes in node_lists(model):
        for node in nodes:
            uses.setdefault((domain_of(node.domain), node.op_type, scope), []).append(node)
    operators = []
    for (domain, op_type, scope), nodes in uses.items():
        versions = function_opsets.get(scope.split("/", 1)[0], opsets) if scope.startswith("function ") else opsets
        since = max(versions.get(domain, 1), 1) if (domain, op_type) in local else _since(domain, op_type, versions)
        if since == 0 and domain == "":
            problems.append(_unknown_operator(op_type, scope, nodes, versions, at))
        operators.append(OperatorUse(domain, op_type, scope, tuple(node.name for node in nodes), since))
    return tuple(operators), problems


def _since(domain: str, op_type: str, versions: Mapping[str, int]) -> int:
    """The opset version that defines the operator, 0 where none up to the imported one does."""
    try:
        return onnx.defs.get_schema(op_type, max_inclusive_version=versions[domain], domain=domain).since_version
    except (KeyError, TypeError, onnx.defs.SchemaError):
        return 0


def _unknown_operator(op_type: str, scope: str, nodes: list[Any], versions: Mapping[str, int], at: Where) -> Problem:
    inside = f" in {scope}" if scope else ""
    names = [f"node{'s' * (len(nodes) != 1)}: {listed(node.name or label(node) for node in nodes)}"]
    if "" not in versions:
        summary = f"standard operator {op_type}{inside} is used, but the standard operator set is not imported"
        return graph_problem(summary, "export the model again with opset_version=17", at, names)
    if onnx.defs.has(op_type, ""):
        first = min(
            s.since_version for s in onnx.defs.get_all_schemas_with_history() if (s.domain, s.name) == ("", op_type)
        )
        summary = f"operator {op_type}{inside} begins at opset {first}, the model imports opset {versions['']}"
        return graph_problem(summary, f"export the model again with opset_version={first}", at, names)
    near = closest(op_type, (schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""))
    summary = f"operator {op_type}{inside} is not in the standard operator set (opset {versions['']})"
    hint = f"write {near} if that was meant; " if near else ""
    return graph_problem(summary, f"{hint}give a plugin's node a domain of its own, such as domain='acme'", at, names)


def _element_types(model: ModelProto, specs: tuple[TensorSpec, ...]) -> tuple[str, ...]:
    found = {spec.dtype for spec in specs} | {dtype_name(tensor.data_type) for tensor in tensors(model)}
    for _, nodes in node_lists(model):
        for node in nodes:
            for attribute in node.attribute:
                if (node.op_type, attribute.name) in _TYPE_ATTRIBUTES and not attribute.ref_attr_name:
                    found.add(dtype_name(attribute.i))
                elif node.op_type == "Constant":
                    found.add(_CONSTANT_TYPES.get(attribute.name))
    return tuple(sorted(name for name in found if name))


_TYPE_ATTRIBUTES = (("Cast", "to"), ("QuantizeLinear", "output_dtype"), ("DequantizeLinear", "output_dtype"))
_CONSTANT_TYPES = {
    "value_float": "float32",
    "value_floats": "float32",
    "value_int": "int64",
    "value_ints": "int64",
    "value_string": "string",
    "value_strings": "string",
}


def _digests(
    source: Path, model: ModelProto, memo: DigestMemo | None, at: Where
) -> tuple[str, tuple[ExternalFile, ...]]:
    digest_of = memo.digest if memo else file_digest
    try:
        source_digest = digest_of(source)
        files = []
        for location in external_locations(model):
            path = source.parent / location
            files.append(ExternalFile(location, path.stat().st_size, digest_of(path)))
    except OSError as error:
        raise GraphError(
            f"'{error.filename or source}' cannot be read: {error.strerror}",
            where=at,
            next_step=f"ls -l '{source.parent}'",
        ) from error
    return model_digest(source_digest, ((file.location, file.digest) for file in files)), tuple(files)


def _write(model: ModelProto, path: Path, at: Where) -> Path:
    try:
        data = model.SerializeToString()
    except (EncodeError, ValueError):
        raise GraphError(
            f"the model with its node names mended is larger than {INLINE_LIMIT_BYTES} bytes",
            where=at,
            next_step="export it with external data (torch.onnx.export(..., external_data=True))",
        ) from None
    with explained(path.parent, len(data), "name another folder with --store"):
        path.parent.mkdir(parents=True, exist_ok=True)
        commit(write_aside(path.parent, BytesIO(data))[0], path)
    return path.absolute()


def _remarks(model: ModelProto, operators: tuple[OperatorUse, ...]) -> Iterator[str]:
    """Things that are legal but seldom meant."""
    read = {name for _, nodes in node_lists(model) for node in nodes for name in node.input}
    read.update(output.name for output in model.graph.output)
    if unused := [value.name for value in real_inputs(model.graph) if value.name not in read]:
        yield f"no node reads input{'s' * (len(unused) != 1)} {listed(unused)}"
    deprecated = {
        f"{use.op_type}-{use.since_version}"
        for use in operators
        if use.since_version and onnx.defs.has(use.op_type, use.domain) and _schema(use).deprecated
    }
    if deprecated:
        yield f"deprecated in ONNX: {', '.join(sorted(deprecated))}"


def _schema(use: OperatorUse) -> Any:
    return onnx.defs.get_schema(use.op_type, max_inclusive_version=use.since_version, domain=use.domain)
