"""Reads one ONNX file and walks what it holds. Weights in other files are never read."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Iterator
from os import stat_result
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from trtforge.errors import GraphError, Problem, Where, closest

INLINE_LIMIT_BYTES = 2_147_483_647
"""Largest protobuf message, 2 GiB minus one byte.

Source: `onnx.checker.MAXIMUM_PROTOBUF`.
"""

_HEAD_BYTES = 512
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_IR_VERSION_TAG = 0x08
_FOREIGN = (
    (b"PK\x03\x04", "a ZIP archive, as PyTorch checkpoints are", "export it with torch.onnx.export, or unzip it"),
    (b"\x1f\x8b", "a gzip archive", "gunzip it"),
    (b"ftrt", "a TensorRT engine", "give the ONNX file that it was built from"),
    (b"vtrt", "a TensorRT-RTX engine", "give the ONNX file that it was built from"),
)
_MAX_SHOWN = 5


def graph_problem(summary: str, next_step: str, at: Where, detail: Iterable[str] = ()) -> Problem:
    """A `Problem` with the exit code of `GraphError`."""
    return Problem(summary, next_step, at, tuple(detail), GraphError.exit_code)


def listed(names: Iterable[str]) -> str:
    """`names` quoted and joined, the first few where there are many."""
    names = list(names)
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return ", ".join(f"'{name}'" for name in names[:_MAX_SHOWN]) + more


def read_model(source: Path, at: Where) -> ModelProto:
    """The model in `source`, with at least one node and one opset import, and all its strings UTF-8.

    Raises:
        GraphError: there is no such file, or it is not a complete ONNX model; one message for each way.
    """
    try:
        _refuse_odd_file(source, source.stat(), at)
        with source.open("rb") as file:
            _refuse_other_format(source, file.read(_HEAD_BYTES), at)
        model = _parse(source, source.read_bytes(), at)
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(source, at) from None
    except (OSError, ValueError) as error:
        raise GraphError(
            f"model file {_shown(source)} cannot be read: {getattr(error, 'strerror', None) or error}",
            where=at,
            next_step=f"ls -l '{source}'",
        ) from error
    _refuse_hollow(source, model, at)
    return model


def _shown(source: Path) -> str:
    resolved = str(source.resolve())
    return f"'{source}'" if resolved == str(source) else f"'{source}' ({resolved})"


def _missing(source: Path, at: Where) -> GraphError:
    near = closest(source.name, (path.name for path in source.parent.glob("*.onnx")))
    return GraphError(
        f"model file {_shown(source)} does not exist",
        where=at,
        next_step=f"write '{near}' instead of '{source.name}'" if near else f"ls '{source.parent.resolve()}'",
    )


def _refuse_odd_file(source: Path, status: stat_result, at: Where) -> None:
    if stat.S_ISDIR(status.st_mode):
        found = sorted(path.name for path in source.glob("*.onnx"))
        raise GraphError(
            f"model {_shown(source)} is a folder, expected an ONNX file",
            where=at,
            next_step=f"name a file in it: {listed(found)}" if found else "name the .onnx file",
        )
    if not stat.S_ISREG(status.st_mode):
        raise GraphError(f"model {_shown(source)} is not a regular file", where=at, next_step="name the .onnx file")
    if status.st_size == 0:
        raise GraphError(
            f"model file {_shown(source)} is empty (0 bytes)",
            where=at,
            next_step="export or download it again; an earlier write was cut off",
        )
    if status.st_size > INLINE_LIMIT_BYTES:
        raise GraphError(
            f"model file {_shown(source)} has {status.st_size} bytes, a protobuf file can have {INLINE_LIMIT_BYTES}",
            where=at,
            next_step="export it with external data (torch.onnx.export(..., external_data=True))",
        )


def _refuse_other_format(source: Path, head: bytes, at: Where) -> None:
    name = _shown(source)
    if head.startswith(_LFS_POINTER):
        raise GraphError(f"model file {name} is a Git LFS pointer, not the model", where=at, next_step="git lfs pull")
    for magic, what, next_step in _FOREIGN:
        if head.startswith(magic):
            raise GraphError(f"model file {name} is {what}, expected ONNX", where=at, next_step=next_step)
    if head[0] == 0:
        raise GraphError(
            f"model file {name} begins with zero bytes, expected ONNX",
            where=at,
            next_step="export or download it again; an earlier write was cut off",
        )
    if text := _text_kind(head):
        raise GraphError(
            f"model file {name} is {text}, expected ONNX",
            where=at,
            next_step=f"head -n 3 '{source}'  # often a web page or an error message saved by a download",
        )


def _text_kind(head: bytes) -> str | None:
    """What kind of text `head` is; None for binary data, which every ONNX file shows within its first bytes."""
    text = head.decode("utf-8", errors="ignore")
    binary = len(text.encode()) < len(head) - 3 or any(not (c.isprintable() or c in "\t\r\n\f\ufeff") for c in text)
    if binary:
        return None
    start = text.lstrip("\ufeff \t\r\n")
    if start.startswith("<"):
        return "HTML or XML text"
    return "JSON text" if start.startswith(("{", "[")) else "text"


def _parse(source: Path, data: bytes, at: Where) -> ModelProto:
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except (DecodeError, ValueError, RecursionError) as error:
        begins_well = data[0] == _IR_VERSION_TAG
        raise GraphError(
            f"model file {_shown(source)} "
            + ("begins like an ONNX model but is truncated or damaged" if begins_well else "is not an ONNX model"),
            where=at,
            detail=[f"protobuf: {error}", f"{len(data)} bytes"],
            next_step="export or download it again and compare its size",
        ) from None
    return model


def _refuse_hollow(source: Path, model: ModelProto, at: Where) -> None:
    name = _shown(source)
    if field := next(_undecodable(model), None):
        raise GraphError(
            f"model file {name} is damaged: {field} is not UTF-8 text",
            where=at,
            next_step="export or download it again",
        )
    if not model.graph.node:
        raise GraphError(
            f"model file {name} holds no nodes, expected an ONNX model",
            where=at,
            next_step="export it again; this is another protobuf message or an empty graph",
        )
    if not model.opset_import:
        raise GraphError(
            f"model file {name} imports no operator set, so its operators have no meaning",
            where=at,
            next_step="export it again with a current exporter (opset 17 or later)",
        )


def _undecodable(message: Message) -> Iterator[str]:
    """Fields that hold bytes where the format says text: the C parser leaves such strings unchecked."""
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_STRING:
            if any(isinstance(text, bytes) for text in ((value,) if isinstance(value, (str, bytes)) else value)):
                yield field.full_name
        elif isinstance(message, TensorProto) and field.name != "external_data":
            continue
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            for child in (value,) if isinstance(value, Message) else value:
                yield from _undecodable(child)


def domain_of(name: str) -> str:
    """The domain's usual name: "" for the standard operators, which may also be written "ai.onnx"."""
    return "" if name == "ai.onnx" else name


def label(node: NodeProto) -> str:
    """How a message names a node, whether or not it has a name of its own."""
    if node.name:
        return f"'{node.name}' ({node.op_type})"
    return f"{node.op_type} that gives {listed(node.output)}"


def subgraphs(node: NodeProto) -> Iterator[tuple[str, GraphProto]]:
    """(attribute, graph) for each graph that `node` carries."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.name, attribute.g
        for index, graph in enumerate(attribute.graphs):
            yield f"{attribute.name}[{index}]", graph


def node_lists(model: ModelProto) -> Iterator[tuple[str, Any]]:
    """(scope, nodes) of the main graph, of every graph inside it, and of each local function, owners first."""
    yield from _nested("", model.graph.node)
    for function in model.functions:
        yield from _nested(f"function {function.name}", function.node)


def _nested(scope: str, nodes: Any) -> Iterator[tuple[str, Any]]:
    yield scope, nodes
    for node in nodes:
        for attribute, graph in subgraphs(node):
            yield from _nested(f"{scope}/{node.name}/{attribute}".lstrip("/"), graph.node)


def graphs(model: ModelProto) -> Iterator[GraphProto]:
    """The main graph and every graph inside it or inside a function."""
    yield model.graph
    for _, nodes in node_lists(model):
        for node in nodes:
            for _, graph in subgraphs(node):
                yield graph


def initializer_names(graph: GraphProto) -> Iterator[str]:
    """Names of all initializers, dense and sparse."""
    yield from (tensor.name for tensor in graph.initializer)
    yield from (sparse.values.name for sparse in graph.sparse_initializer)


def real_inputs(graph: GraphProto) -> list[ValueInfoProto]:
    """Graph inputs that a caller must give, in order: those that no initializer gives a value."""
    constants = set(initializer_names(graph))
    return [value for value in graph.input if value.name not in constants]


def tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Every tensor with values: initializers (the two parts of sparse ones too) and node attributes, wherever they are."""
    for graph in graphs(model):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
    for _, nodes in node_lists(model):
        for node in nodes:
            for attribute in node.attribute:
                yield from _attribute_tensors(attribute)


def _attribute_tensors(attribute: AttributeProto) -> Iterator[TensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    sparse = [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
    for tensor in (*sparse, *attribute.sparse_tensors):
        yield from (tensor.values, tensor.indices)


def dtype_name(data_type: int) -> str | None:
    """The numpy name of an element type, ONNX's own in lower case where there is none; None for an unknown type."""
    if data_type in (TensorProto.FLOAT, TensorProto.DOUBLE):
        return "float32" if data_type == TensorProto.FLOAT else "float64"
    known = data_type in TensorProto.DataType.values() and data_type != TensorProto.UNDEFINED
    return str(TensorProto.DataType.Name(data_type)).lower() if known else None


def size_bytes(dtype: str, dims: Iterable[int]) -> int | None:
    """Bytes of a dense tensor, elements under 8 bits packed; None for strings, which have no fixed size.

    Source: ONNX IR, TensorProto.raw_data; the first number in a type's name is its width in bits.
    """
    count = 1
    for dim in dims:
        count *= dim
    if dtype == "string":
        return None
    width = re.search(r"\d+", dtype)
    bits = int(width[0]) if width else 8
    return (count * bits + 7) // 8
