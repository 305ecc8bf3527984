"""Reads a model to be linted, and writes a mended one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path

import onnx
import onnx.inliner
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]
from onnx import ModelProto

from trtforge.errors import CommandLineError, GraphError, Problem, Where, raise_any
from trtforge.files import commit, explained, write_aside
from trtforge.graph.external_data import external_locations, is_external, tensor_problems
from trtforge.graph.model_file import domain_of, graph_problem, label, node_lists, read_model, tensors
from trtforge.graph.names import mend


def open_model(source: Path) -> ModelProto:
    """The model in `source`, sorted, with unique node names, without local functions; external weights stay where they are.

    Raises:
        GraphError: the file is missing or no complete ONNX model.
        SeveralErrors: all that is wrong with its tensors and names.
    """
    at = Where(source)
    model = read_model(source, at)
    problems = tensor_problems(model, source.absolute().parent, at)
    problems += mend(model, at)[1]
    raise_any(problems)
    raise_any(_operand_problems(model, at))
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
        raise_any(mend(model, at)[1])
    return model


def _operand_problems(model: ModelProto, at: Where) -> Iterator[Problem]:
    """Nodes that lack inputs or outputs, which no rule then has to look for."""
    opset = next((entry.version for entry in model.opset_import if not domain_of(entry.domain)), 0)
    for node in (node for _, nodes in node_lists(model) for node in nodes):
        least = (0, 1)
        if not domain_of(node.domain) and onnx.defs.has(node.op_type, opset, ""):
            schema = onnx.defs.get_schema(node.op_type, opset, "")
            least = (schema.min_input, schema.min_output)
        found = (len(node.input), len(node.output))
        if any(one < other for one, other in zip(found, least, strict=True)):
            yield graph_problem(
                f"node {label(node)} has {found[0]} inputs and {found[1]} outputs, expected {least[0]} and {least[1]} or more",
                "export the model again",
                at,
            )


def write_model(model: ModelProto, source: Path, target: Path) -> None:
    """Writes `model` to `target` whole or not at all, after ONNX's own checks. External data is copied beside it.

    Each external file becomes `<name of target>-<its digest>.data`, so that no other model's data is written over.

    Args:
        model: as `open_model(source)` gave it, changed or not; its external locations are rewritten.
        source: the file that it was read from.
        target: the file to write, which may exist.

    Raises:
        CommandLineError: `target` is the source or one of its data files.
        GraphError: the model does not pass the checks, or is too large for one file.
        StoreError: a file could not be written.
    """
    folder = source.absolute().parent
    locations = external_locations(model)
    if target.resolve() in {source.resolve(), *((folder / location).resolve() for location in locations)}:
        raise CommandLineError(
            f"--fix '{target}' would write over the model that is read",
            next_step=f"name another file: --fix '{target.with_name(target.stem + '-fixed.onnx')}'",
        )
    with explained(target.absolute().parent, 0, "name another file with --fix"), ExitStack() as stack:
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy_data(model, folder, target, locations, stack)
        aside = write_aside(target.parent, BytesIO(_serialised(model, target)))[0]
        stack.callback(aside.unlink, missing_ok=True)
        _check(aside, target)
        commit(aside, target)
        stack.pop_all()


def _copy_data(model: ModelProto, folder: Path, target: Path, locations: tuple[str, ...], stack: ExitStack) -> None:
    """Copies external files beside `target`; `stack` takes away those that were not there before."""
    copies = {}
    for location in locations:
        with (folder / location).open("rb") as reader:
            aside, digest = write_aside(target.parent, reader)
        copies[location] = f"{target.stem}-{digest[:16]}.data"
        copy = target.parent / copies[location]
        if not copy.exists():
            stack.callback(copy.unlink, missing_ok=True)
        commit(aside, copy)
    for tensor in tensors(model):
        for entry in tensor.external_data if is_external(tensor) else ():
            if entry.key == "location":
                entry.value = copies[entry.value]


def _serialised(model: ModelProto, target: Path) -> bytes:
    try:
        data: bytes = model.SerializeToString()
    except (EncodeError, ValueError) as error:
        raise GraphError(
            f"the mended model does not fit one file: {error}",
            where=Where(target),
            next_step="export the model with external data, then lint it again",
        ) from error
    return data


def _check(path: Path, target: Path) -> None:
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # onnx throws many types
        raise GraphError(
            "the mended model does not pass ONNX's checks; nothing was written",
            where=Where(target),
            detail=str(error).splitlines()[:5],
            next_step="lint the model without --fix, and quantize it again",
        ) from error
