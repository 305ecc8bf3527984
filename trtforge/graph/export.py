"""Exports a PyTorch model to ONNX in a process of its own, reads back what came out, and runs both side by side.

torch is loaded once, in the child; the user's code and torch never enter this process.
"""

from __future__ import annotations

import linecache
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, numpy_helper

from trtforge.errors import GraphError, Problem, Where, raise_any, shown_path
from trtforge.files import commit, explained, write_aside
from trtforge.graph.external_data import is_external
from trtforge.graph.ingest import ingest
from trtforge.graph.model_file import listed, node_lists, tensors
from trtforge.reference import ReferenceSession
from trtforge.types import Graph, Shape
from trtforge.usercode.process import UserCode, user_code

Array = np.ndarray[Any, np.dtype[Any]]

INLINE_LIMIT_BYTES: Final = 3 << 29
"""Weights of this size and more go to a file beside the model: a protobuf file ends at 2 GiB, with all its text.

Source: https://protobuf.dev/programming-guides/proto-limits/
"""
_DRIVER: Final = Path(__file__).with_name("export_child.py")
# Small tensors stay in the model file: shape inference reads some of them as sizes.
# Source: onnx.external_data_helper.convert_model_to_external_data, size_threshold
_SMALLEST_EXTERNAL_BYTES: Final = 1024
# Where external data may be mapped into memory.
# Source: https://github.com/onnx/onnx/blob/main/docs/ExternalData.md, "offset ... should be multiples of 4096"
_ALIGNMENT_BYTES: Final = 4096
_RANDOM: Final = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial")


@dataclass(frozen=True, slots=True)
class ExportRun:
    """The torch model and its ONNX file, run on the same inputs at one set of shapes.

    Attributes:
        varied: symbols whose size differs from the example's.
        feeds: input name -> array.
        torch_outputs, onnx_outputs: output name -> array; onnxruntime's are with all optimisations off.
    """

    shapes: dict[str, Shape]
    varied: tuple[str, ...]
    feeds: dict[str, Array]
    torch_outputs: dict[str, Array]
    onnx_outputs: dict[str, Array]


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What became of an export.

    Attributes:
        graph: the ingested file.
        exporter: torch's `dynamo` (torch.export) or `torchscript` (tracing).
        symbols: name of a dynamic size -> its size in the example inputs.
        shapes_run: shapes at which torch and onnxruntime both ran, in order.
        traced: what the exporter froze as it was for the example, places (`file:line: why: code`) and assumed sizes. A
            difference at other shapes or values comes from one of them.
        notes: one sentence each.
        seconds: wall seconds by part: `load` (interpreter, torch, the user's module), `export`, `read`, `run`.
    """

    graph: Graph
    opset: int
    exporter: Literal["dynamo", "torchscript"]
    torch_version: str
    symbols: dict[str, int]
    shapes_run: tuple[dict[str, Shape], ...]
    traced: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: dict[str, float]


def export_torch(
    reference: str,
    base_dir: Path,
    output: Path,
    *,
    opset: int,
    work_dir: Path,
    inputs_at: Callable[[Graph, Mapping[str, Shape]], Mapping[str, Array]],
    shapes_to_check: Sequence[Mapping[str, Shape]] = (),
    on_run: Callable[[ExportRun], None] = lambda _: None,
    on_event: Callable[[str], None] = lambda _: None,
    timeout_seconds: float | None = None,
    where: Where | None = None,
    python: str = sys.executable,
    inline_limit_bytes: int = INLINE_LIMIT_BYTES,
) -> ExportReport:
    """Exports the model that the user's function returns to `output`, and runs both at several shapes.

    The function returns `(model, example inputs, dynamic axes)`, or a dict with `model`, `example_inputs`,
    `dynamic_axes` and, if wanted, `output_names`. Example inputs are a dict of input name -> tensor in the order of
    `forward`, or a tuple; dynamic axes are `{input name: {axis: symbol}}`. It is exported in eval mode.

    Guaranteed of the file: it has opset `opset`; all example inputs are inputs of it and are read; every axis asked
    dynamic is dynamic; torch and onnxruntime both run at all shapes with outputs of equal shapes; it holds no path or
    source line. Equal models give equal bytes. Nothing of an export that fails is left. Values are compared by `on_run`.

    Args:
        reference: `file.py:function` or `module:function`.
        base_dir: folder that the reference is relative to; the process works there.
        output: the ONNX file; large weights go to `<name>.data` beside it. Its folder is made.
        opset: of the standard operators.
        work_dir: see `ingest`.
        inputs_at: gives values for the graph's inputs at shapes.
        shapes_to_check: input name -> shape for all inputs, each time. Without any, the example's shapes and some
            with one symbol, and all symbols, of another size; there, sizes that the torch model itself refuses are left out with a note.
        on_run: called after each run. What it raises ends the export.
        on_event: called with what is done now.
        timeout_seconds: for loading, for the export, and for each run; None for no limit.
        where: the place in the spec that names the function.
        python: the interpreter that has torch.
        inline_limit_bytes: weights of this size and more go to a file of their own.

    Raises:
        SpecError: the reference leads to no function.
        CapabilityError: torch or another package is not installed.
        GraphError: the function or the model raised, hung, crashed or returned the wrong thing, or torch cannot export it.
        SeveralErrors: all that is wrong with what was returned, or with the file.
        StoreError: the file could not be written.
    """
    seconds: dict[str, float] = {}
    clock = time.perf_counter()

    def lap(part: str) -> None:
        nonlocal clock
        seconds[part] = time.perf_counter() - clock
        clock = time.perf_counter()

    with explained(output.parent, 0, "name another folder with --store"):
        output.parent.mkdir(parents=True, exist_ok=True)
    on_event(f"loading {reference}")
    with (
        user_code(
            reference,
            base_dir,
            timeout_seconds=timeout_seconds,
            driver=_DRIVER,
            where=where,
            python=python,
            on_phase=on_event,
        ) as code,
        tempfile.TemporaryDirectory(dir=output.parent, prefix=".trtforge-") as aside,
    ):
        lap("load")
        made = Path(aside) / "model.onnx"
        payload = {"path": str(made.absolute()), "opset": opset, "inline_limit_bytes": inline_limit_bytes}
        facts = code.ask("export", payload, timeout_seconds=timeout_seconds)
        raise_any(_reported(reference, problem, where) for problem in facts["problems"])
        lap("export")
        on_event("reading back the export")
        model = onnx.load(made, load_external_data=False)
        notes = _notes(model, facts, made.parent)
        raise_any(_file_problems(reference, model, facts, opset, where))
        written = _write(model, made.parent, output, is_large=facts["weight_bytes"] >= inline_limit_bytes)
        try:
            graph = ingest(output, work_dir, where=where)
            lap("read")
            shapes_run, left_out = _run_all(
                reference, code, graph, facts, inputs_at, shapes_to_check, on_run, where, timeout_seconds
            )
        except BaseException:
            for path in written:
                path.unlink(missing_ok=True)
            raise
        lap("run")
    return ExportReport(
        graph=graph,
        opset=graph.opset,
        exporter=facts["exporter"],
        torch_version=facts["torch"],
        symbols=_symbol_sizes(facts),
        shapes_run=tuple(shapes_run),
        traced=_traced_lines(facts),
        notes=(*notes, *left_out),
        seconds=seconds,
    )


def _reported(reference: str, problem: Mapping[str, Any], where: Where | None) -> Problem:
    places = [_place_line(file, line) for file, line in problem.get("places", ())]
    return _problem(f"{reference} {problem['summary']}", problem["next_step"], where, (*places, *problem["detail"]))


def _problem(summary: str, next_step: str, where: Where | None, detail: tuple[str, ...] = ()) -> Problem:
    return Problem(summary, next_step, where, detail, GraphError.exit_code)


# What the file says


def _file_problems(
    reference: str, model: ModelProto, facts: Mapping[str, Any], opset: int, where: Where | None
) -> list[Problem]:
    found = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    problems = []
    if found != opset:
        problems.append(
            _problem(
                f"{reference}: torch {facts['torch']} wrote opset {found}, expected {opset}",
                "pip install another version of torch, or drop the target that needs this opset",
                where,
            )
        )
    return [
        *problems,
        *_dropped(reference, model, facts, where),
        *_frozen_dims(reference, model, facts, where),
        *_active_dropout(reference, model, where),
    ]


def _dropped(reference: str, model: ModelProto, facts: Mapping[str, Any], where: Where | None) -> list[Problem]:
    read = {name for _, nodes in node_lists(model) for node in nodes for name in node.input}
    read.update(value.name for value in model.graph.output)
    present = {value.name for value in model.graph.input}
    return [
        _problem(
            f"{reference}: example input '{name}' does nothing: no output depends on it, and the exported model "
            f"{'does not read it' if name in present else 'has no such input'}",
            f"take '{name}' out of the example inputs, or use it in forward",
            where,
        )
        for name in facts["inputs"]
        if name not in present & read
    ]


def _frozen_dims(reference: str, model: ModelProto, facts: Mapping[str, Any], where: Where | None) -> list[Problem]:
    asked = {**facts["output_axes"], **facts["dynamic_axes"]}
    fixed: dict[str, list[str]] = {}
    for value in (*model.graph.input, *model.graph.output):
        dims = value.type.tensor_type.shape.dim
        for axis, symbol in asked.get(value.name, ()):
            if axis < len(dims) and dims[axis].HasField("dim_value"):
                fixed.setdefault(symbol, []).append(f"axis {axis} of '{value.name}' at {dims[axis].dim_value}")
    return [
        _problem(
            f"{reference}: '{symbol}' is asked dynamic, and the exported model fixes {', '.join(places)}",
            _UNFREEZE,
            where,
            _traced_lines(facts),
        )
        for symbol, places in fixed.items()
    ]


_UNFREEZE: Final = "take sizes from tensors (x.shape[0], -1 in reshape) in forward, and never through int() or a number"


def _active_dropout(reference: str, model: ModelProto, where: Where | None) -> list[Problem]:
    names = [
        node.name
        for _, nodes in node_lists(model)
        for node in nodes
        if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]  # noqa: PLR2004 - training_mode
    ]
    if not names:
        return []
    return [
        _problem(
            f"{reference}: dropout is active in the exported model, at {listed(names)}",
            "write F.dropout(x, p, training=self.training), or use torch.nn.Dropout",
            where,
        )
    ]


def _notes(model: ModelProto, facts: Mapping[str, Any], folder: Path) -> list[str]:
    notes = list(facts["notes"])
    if training := facts["was_training"]:
        notes.append(
            f"the model was in training mode, which changes {', '.join(training)}; it is exported in eval mode"
        )
    if unnamed := facts["unnamed_outputs"]:
        notes.append(
            f"outputs without names are called {listed(unnamed)}; output_names in the returned dict names them"
        )
    random = {node.op_type for _, nodes in node_lists(model) for node in nodes if node.op_type in _RANDOM}
    if random:
        notes.append(f"the model draws random numbers ({', '.join(sorted(random))}), so no two runs are equal")
    return [*notes, *_duplicates(model, facts, folder)]


def _duplicates(model: ModelProto, facts: Mapping[str, Any], folder: Path) -> list[str]:
    """Tied weights that are in the file more than once, as they are or transposed."""
    notes = []
    for names, shape in zip(facts["tied"], facts["tied_shapes"], strict=True):
        same = [t for t in model.graph.initializer if sorted(t.dims) == sorted(shape) and len(t.dims) > 1]
        arrays = [(tensor.name, numpy_helper.to_array(tensor, str(folder))) for tensor in same]
        for index, (name, array) in enumerate(arrays):
            copies = [other for other, its in arrays[index + 1 :] if _are_one(array, its)]
            if copies:
                size = array.nbytes * len(copies) >> 20
                notes.append(
                    f"tied weights {listed(names)} are in the file {len(copies) + 1} times, as {listed([name, *copies])} "
                    f"({size} MiB more)"
                )
                break
    return notes


def _are_one(one: Array, other: Array) -> bool:
    return np.array_equal(one, other) or (one.ndim == 2 and np.array_equal(one, other.T))  # noqa: PLR2004 - a matrix


def _traced_lines(facts: Mapping[str, Any]) -> tuple[str, ...]:
    return (*(_place_line(file, line, why) for file, line, why in facts["traced"]), *facts["narrowed"])


def _place_line(file: str, line: int, why: str = "") -> str:
    code = linecache.getline(file, line).strip()
    return ": ".join(part for part in (f"{shown_path(Path(file))}:{line}", why, code) if part)


# Writing


def _write(model: ModelProto, folder: Path, output: Path, *, is_large: bool) -> list[Path]:
    """Writes the model without places in source files, and its large weights beside it; gives the files."""
    _strip(model)
    data_path = output.with_name(f"{output.name}.data")
    # A model that the exporter has split is split here too, whatever its size.
    is_large = is_large or any(is_external(tensor) for tensor in tensors(model))
    written = []
    with explained(output.parent, 0, "name another folder with --store"):
        if is_large:
            collected = folder / "collected.data"
            with collected.open("xb") as file:
                _collect(model, folder, file, data_path.name)
                file.flush()
                os.fsync(file.fileno())
            commit(collected, data_path)
            written.append(data_path)
        data = model.SerializeToString(deterministic=True)
        commit(write_aside(output.parent, BytesIO(data))[0], output)
    return [*written, output]


def _strip(model: ModelProto) -> None:
    """Removes what tells the machine and the folder it was exported on."""
    model.doc_string = model.graph.doc_string = ""
    del model.metadata_props[:], model.graph.metadata_props[:]
    for _, nodes in node_lists(model):
        for node in nodes:
            node.doc_string = ""
            del node.metadata_props[:]
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        value.doc_string = ""
        del value.metadata_props[:]
    for tensor in tensors(model):
        tensor.doc_string = ""
        del tensor.metadata_props[:]


def _collect(model: ModelProto, folder: Path, file: BinaryIO, location: str) -> None:
    """Moves weights to the end of `file`, from the model and from the exporter's own files."""
    weights = {tensor.name for tensor in model.graph.initializer}
    for tensor in tensors(model):
        is_large = tensor.name in weights and len(tensor.raw_data) >= _SMALLEST_EXTERNAL_BYTES
        if not is_external(tensor) and not is_large:
            continue
        file.seek(-file.tell() % _ALIGNMENT_BYTES, os.SEEK_CUR)
        offset = file.tell()
        if is_external(tensor):
            _copy_external(tensor, folder, file)
        else:
            file.write(tensor.raw_data)
        length = file.tell() - offset
        tensor.ClearField("raw_data")
        del tensor.external_data[:]
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))


def _copy_external(tensor: TensorProto, folder: Path, file: BinaryIO) -> None:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    with (folder / entries["location"]).open("rb") as source:
        source.seek(int(entries.get("offset", 0)))
        if "length" not in entries:
            shutil.copyfileobj(source, file)
            return
        left = int(entries["length"])
        while left and (data := source.read(min(left, 1 << 20))):
            file.write(data)
            left -= len(data)


# Running both


def _symbol_sizes(facts: Mapping[str, Any]) -> dict[str, int]:
    return {
        symbol: facts["example_shapes"][name][axis]
        for name, axes in facts["dynamic_axes"].items()
        for axis, symbol in axes
    }


def _shapes_at(facts: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Shape]:
    shapes = {name: list(shape) for name, shape in facts["example_shapes"].items()}
    for name, axes in facts["dynamic_axes"].items():
        for axis, symbol in axes:
            shapes[name][axis] = sizes[symbol]
    return {name: tuple(shape) for name, shape in shapes.items()}


def _generated_shapes(facts: Mapping[str, Any]) -> list[dict[str, Shape]]:
    """The example's shapes, one symbol larger at a time, and all larger, halved and at 1."""
    example = _symbol_sizes(facts)
    sizes = [
        example,
        *({**example, symbol: size + 1} for symbol, size in example.items()),
        {symbol: 2 * size for symbol, size in example.items()},
        {symbol: max(size // 2, 1) for symbol, size in example.items()},
        dict.fromkeys(example, 1),
    ]
    shapes = [_shapes_at(facts, each) for each in sizes]
    return [each for index, each in enumerate(shapes) if each not in shapes[:index]]


def _varied(facts: Mapping[str, Any], shapes: Mapping[str, Shape]) -> tuple[str, ...]:
    example = _symbol_sizes(facts)
    return tuple(
        sorted(
            {
                symbol
                for name, axes in facts["dynamic_axes"].items()
                for axis, symbol in axes
                if shapes[name][axis] != example[symbol]
            }
        )
    )


def _run_all(
    reference: str,
    code: UserCode,
    graph: Graph,
    facts: Mapping[str, Any],
    inputs_at: Callable[[Graph, Mapping[str, Shape]], Mapping[str, Array]],
    asked: Sequence[Mapping[str, Shape]],
    on_run: Callable[[ExportRun], None],
    where: Where | None,
    timeout_seconds: float | None,
) -> tuple[list[dict[str, Shape]], list[str]]:
    session = ReferenceSession(graph)
    shapes_run, left_out, stopped = [], [], []
    for shapes in [dict(each) for each in asked] or _generated_shapes(facts):
        feeds = dict(inputs_at(graph, shapes))
        try:
            torch_outputs = code.ask("run", {"feeds": feeds, "shapes": _shown(shapes)}, timeout_seconds=timeout_seconds)
        except GraphError as error:
            if asked or not _varied(facts, shapes) or not code.is_alive:
                raise
            left_out.append(f"not compared at {_shown(shapes)}: {error.problems[0].summary}")
            continue
        try:
            onnx_outputs = session.run(feeds)
        except GraphError as error:
            stopped.append((shapes, error.problems[0].detail[0]))
            continue
        if difference := _shape_difference(torch_outputs, onnx_outputs):
            stopped.append((shapes, difference))
            continue
        shapes_run.append(shapes)
        on_run(ExportRun(shapes, _varied(facts, shapes), feeds, torch_outputs, onnx_outputs))
    if stopped:
        raise _frozen(reference, facts, stopped, where)
    return shapes_run, left_out


def _shown(shapes: Mapping[str, Shape]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())


def _shape_difference(torch_outputs: Mapping[str, Array], onnx_outputs: Mapping[str, Array]) -> str | None:
    for name, array in torch_outputs.items():
        if array.shape != onnx_outputs[name].shape:
            return f"output '{name}' has shape {list(onnx_outputs[name].shape)}, torch's has {list(array.shape)}"
    return None


def _frozen(
    reference: str,
    facts: Mapping[str, Any],
    stopped: Sequence[tuple[Mapping[str, Shape], str]],
    where: Where | None,
) -> GraphError:
    """The error that names the sizes that tracing made constants of."""
    groups = [_varied(facts, shapes) for shapes, _ in stopped]
    alone = sorted({group[0] for group in groups if len(group) == 1})
    symbols = alone or sorted({symbol for group in groups for symbol in group})
    sizes = _symbol_sizes(facts)
    lines = [f"at {_shown(shapes)}: {reason}" for shapes, reason in stopped[:3]]
    if not symbols or () in groups:
        return GraphError(
            f"{reference}: torch runs the model at its example inputs, onnxruntime does not run the exported one",
            where=where,
            next_step="read the reason above; replace the operator that it names",
            detail=lines,
        )
    named = " and ".join(f"'{symbol}' at {sizes[symbol]}" for symbol in symbols)
    return GraphError(
        f"{reference}: tracing froze {named}: at other sizes torch runs and the exported model does not",
        where=where,
        next_step=_UNFREEZE,
        detail=[*lines, *_traced_lines(facts)],
    )
