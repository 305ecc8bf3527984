"""What the graph's own structure says about its inputs' values, its outputs' shapes and its integer constants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from trtforge.graph.external_data import is_external
from trtforge.graph.flow import (
    SHAPE_KEEPING,
    SHAPE_OPERANDS,
    VALUE_KEEPING,
    Flow,
    Step,
    array,
    carries,
    flow_of,
    local_name,
)
from trtforge.graph.model_file import dtype_name, real_inputs
from trtforge.types import InputRole

_ARITHMETIC = VALUE_KEEPING | frozenset(
    [
        "Abs",
        "Add",
        "Ceil",
        "CumSum",
        "Div",
        "Floor",
        "Max",
        "Min",
        "Mod",
        "Mul",
        "Neg",
        "Pow",
        "ReduceMax",
        "ReduceMin",
        "ReduceProd",
        "ReduceSum",
        "Round",
        "Sub",
        "Sum",
        "Where",
    ]
)
_CONSTANT_MAKERS = VALUE_KEEPING | SHAPE_KEEPING
_EMBEDDINGS = {"com.microsoft.EmbedLayerNormalization": {0: 2, 1: 4, 8: 3}}
"""Operator -> {position of row indices: position of their table}.

Source: onnxruntime, docs/ContribOperators.md.
"""

_BLANKING = -1e3
"""A number at or below this, added to a score, leaves its softmax weight at zero. Exporters write -1e4, -1e9 or -inf."""

_PLACEHOLDER_MAX = 64
_MAX_CHANNELS = (1, 3, 4)
_IMAGE_RANK = 4
_INT32 = np.iinfo(np.int32)
_SENTINELS = (-(2**63), -(2**63) + 1, 2**63 - 2, 2**63 - 1)
_SLICE_BOUNDS = (1, 2)
_DATA_DEPENDENT = frozenset(
    {"NonZero", "NonMaxSuppression", "Compress", "Unique", "StringNormalizer", "StringSplit", "LoopScanUntil"}
)
_SHAPE_OF_FIRST = frozenset({"Scatter", "ScatterElements", "ScatterND"})
_SHAPE_READERS = frozenset({"Shape", "Size"})


def infer_roles(model: ModelProto, flow: Flow | None = None) -> tuple[InputRole, ...]:
    """A role for each real input of a model that `mend` and the tensor checks have passed, in graph order.

    Evidence, the first that is found: values that decide a shape, row indices of a constant table or a one-hot, a mask
    by how it is used, the name "mask", the shape of an image. Ranges are safe to feed: a token is in every table it
    indexes. Subgraphs and local functions count.
    """
    flow = flow or flow_of(model)
    return tuple(_role(value, flow) for value in real_inputs(model.graph))


def _role(value: Any, flow: Flow) -> InputRole:
    dtype = dtype_name(value.type.tensor_type.elem_type) or ""
    dims = [dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim]
    is_integer = dtype.startswith(("int", "uint"))
    if dtype in ("int32", "int64") and len(dims) <= 1 and (role := _shape_values(value.name, flow)):
        return role
    same = flow.reach(value.name, VALUE_KEEPING)
    if is_integer and (role := _token_ids(value.name, same, flow)):
        return role
    if role := _mask(value.name, flow):
        return role
    if _is_image(dtype, dims):
        high = 255 if dtype == "uint8" else 1
        return InputRole(value.name, "image", 0, high, f"{dtype} of rank 4 with a channel axis")
    if is_integer and (role := _compared_or_index(value.name, same, flow)):
        return role
    return _free(value.name, dtype)


def _shape_values(name: str, flow: Flow) -> InputRole | None:
    for step, position in _uses(flow.reach(name, _ARITHMETIC), flow):
        if position in SHAPE_OPERANDS.get(step.op, ()):
            used_by = "the trip count of a Loop" if step.op == "LoopScan" else f"an operand of {_called(step)}"
            reason = f"its values are {used_by} and decide a shape; 1 to {_PLACEHOLDER_MAX} is a placeholder"
            return InputRole(name, "shape_values", 1, _PLACEHOLDER_MAX, reason)
    return None


def _called(step: Step) -> str:
    return f"{step.op} '{step.node.name}'" if step.node else step.op


def _uses(values: Iterable[str], flow: Flow) -> Iterator[tuple[Step, int]]:
    """All uses of `values`, in the order of the graph's names, so that the same graph gives the same reasons."""
    for value in sorted(values):
        yield from flow.readers.get(value, ())


def _token_ids(name: str, same: set[str], flow: Flow) -> InputRole | None:
    """The tightest bound that any table, one-hot or comparison with 0..R-1 sets on an index."""
    bounds = [bound for step, position in _uses(same, flow) if (bound := _bound(step, position, flow))]
    if not bounds:
        return None
    rows, reason = min(bounds)
    return InputRole(name, "token_ids", 0, rows - 1, reason)


def _bound(step: Step, position: int, flow: Flow) -> tuple[int, str] | None:
    if step.op == "Gather" and position == 1:
        return _table(step.reads[0], step.attribute("axis", 0), flow)
    if (table := _EMBEDDINGS.get(step.op, {}).get(position)) is not None and table < len(step.reads):
        return _table(step.reads[table], 0, flow)
    if step.op == "OneHot" and position == 0 and len(step.reads) > 1:
        depth = _integer(step.reads[1], flow)
        if depth is not None and depth >= 1:
            return depth, f"class of the one-hot {_called(step)} of depth {depth}"
    if step.op == "Equal" and len(step.reads) > 1:
        rows = _counts_from_zero(step.reads[1 - position], flow)
        if rows:
            return rows, f"class of a one-hot: {_called(step)} compares it with 0 to {rows - 1}"
    return None


def _table(value: str, axis: int, flow: Flow) -> tuple[int, str] | None:
    tables = flow.origins(value, SHAPE_KEEPING)
    sizes = [(t.dims[axis], t.name) for t in tables if -len(t.dims) <= axis < len(t.dims) and t.dims[axis] > 0]
    if not sizes:
        return None
    rows, name = min(sizes)
    return rows, f"row index of the {rows}-row table '{name or local_name(value)}'"


def _values(value: str, flow: Flow) -> NDArray[Any] | None:
    """All values of a small constant, numbers only, flat; what moves or repeats values does not matter."""
    found = [array(tensor) for tensor in flow.origins(value, _CONSTANT_MAKERS)]
    if not found or any(values is None or values.dtype.kind not in "fiub" for values in found):
        return None
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return np.concatenate([values.ravel().astype(np.float64) for values in found if values is not None])


def _scalar(value: str, flow: Flow) -> float | None:
    """The number that all elements of a constant are."""
    values = _values(value, flow)
    return float(values[0]) if values is not None and values.size and (values == values[0]).all() else None


def _integer(value: str, flow: Flow) -> int | None:
    number = _scalar(value, flow)
    return int(number) if number is not None and number.is_integer() else None


def _counts_from_zero(value: str, flow: Flow) -> int:
    """R where the constant is 0, 1, ... R-1, at least 3 of them; else 0."""
    values = _values(value, flow)
    at_least = 3
    return (
        values.size
        if values is not None and values.size >= at_least and (values == np.arange(values.size)).all()
        else 0
    )


_MaskForm = Literal["keep", "drop", "minus"]
"""What a value made from a mask is where the input is one: 1 (keep), 0 (drop), or 0 against -1 elsewhere (minus)."""

_FLIPPED: dict[_MaskForm, _MaskForm] = {"keep": "drop", "drop": "keep"}


def _mask(name: str, flow: Flow) -> InputRole | None:
    """Ones mark what stays; a mask whose ones mark what is blanked out is no `mask` but `free`."""
    ones_stay = _ones_stay(name, flow)
    if ones_stay is False:
        return InputRole(name, "free", 0, 1, "a mask whose ones mark what is blanked out")
    if ones_stay:
        return InputRole(name, "mask", 0, 1, "zeros become a large negative number, as for masked attention")
    return InputRole(name, "mask", 0, 1, "named a mask") if "mask" in name.lower() else None


def _ones_stay(name: str, flow: Flow) -> bool | None:
    """Whether ones mark what stays, by the first place where one side turns into a large negative number."""
    todo: list[tuple[str, _MaskForm]] = [(name, "keep")]
    seen = set(todo)
    while todo:
        value, form = todo.pop(0)
        for step, position in flow.readers.get(value, ()):
            verdict = _blanks(step, position, form, flow)
            if verdict is not None:
                return verdict
            after = _form_after(step, position, form, flow)
            new = {(written, after) for written in step.writes if written} - seen if after else set()
            seen |= new
            todo += sorted(new)
    return None


def _blanks(step: Step, position: int, form: _MaskForm, flow: Flow) -> bool | None:
    """True where zeros of the input become a large negative number in this step, False where ones do."""
    if step.op == "Mul" and len(step.reads) > 1:
        factor = _scalar(step.reads[1 - position], flow)
        if factor is not None and factor <= _BLANKING and form in _FLIPPED:
            return form == "drop"
        if factor is not None and factor >= -_BLANKING and form == "minus":
            return True
    if step.op == "Where" and position == 0 and form in _FLIPPED:
        branches = [_scalar(branch, flow) for branch in step.reads[1:3]]
        large = [number is not None and number <= _BLANKING for number in branches]
        if large in ([True, False], [False, True]):
            return large[1] == (form == "keep")
    return None


def _form_after(step: Step, position: int, form: _MaskForm, flow: Flow) -> _MaskForm | None:
    if step.op in VALUE_KEEPING:
        return form if carries(step, position) else None
    if step.op == "Not":
        return _FLIPPED.get(form)
    if step.op not in ("Sub", "Equal", "Greater") or len(step.reads) <= 1:
        return None
    other = _scalar(step.reads[1 - position], flow)
    match step.op, position, other:
        case ("Sub", 1, 1.0) | ("Equal", _, 0.0):
            return _FLIPPED.get(form)
        case "Sub", 0, 1.0:
            return "minus" if form == "keep" else None
        case ("Equal", _, 1.0) | ("Greater", 0, 0.0):
            return form if form in _FLIPPED else None
    return None


def _is_image(dtype: str, dims: list[int | None]) -> bool:
    if len(dims) != _IMAGE_RANK or not (dtype == "uint8" or "float" in dtype):
        return False
    return dims[1] in _MAX_CHANNELS or dims[3] in _MAX_CHANNELS


def _compared_or_index(name: str, same: set[str], flow: Flow) -> InputRole | None:
    compared = {
        number
        for step, position in _uses(same, flow)
        if step.op == "Equal" and len(step.reads) > 1
        if (number := _integer(step.reads[1 - position], flow)) is not None and number not in (0, 1)
    }
    if compared:
        known = ", ".join(str(number) for number in sorted(compared))
        return InputRole(name, "free", min(compared), max(compared), f"the graph compares it with {known}")
    if any(step.op.startswith("Gather") and position == 1 for step, position in _uses(same, flow)):
        return InputRole(name, "free", 0, 0, "index into a computed tensor, where only 0 is known to exist")
    return None


def _free(name: str, dtype: str) -> InputRole:
    ranges = {"uint8": (0, 255), "int8": (-128, 127), "string": (0, 0)}
    low, high = ranges.get(dtype, (-1, 1) if "float" in dtype else (0, 1))
    return InputRole(name, "free", low, high, f"nothing in the graph limits it; {low} to {high} is usual for {dtype}")


def data_dependent_outputs(model: ModelProto, flow: Flow | None = None) -> tuple[str, ...]:
    """Outputs of the main graph whose shape depends on the values of the inputs, in graph order.

    The shape may depend where NonZero, NonMaxSuppression, Compress, Unique, a string operator or a Loop that ends itself has
    a say in it, sizes taken from their results included. Operators whose shape is their first input's alone stop it.
    More outputs than necessary may be named, never fewer.
    """
    flow = flow or flow_of(model)
    shapes: set[str] = set()
    sizes: set[str] = set()
    before = -1
    while len(shapes) + len(sizes) != before:
        before = len(shapes) + len(sizes)
        for step in flow.steps:
            if _shape_depends(step, shapes, sizes):
                shapes.update(step.writes)
            if _sizes_depend(step, shapes, sizes):
                sizes.update(step.writes)
        shapes.discard("")
        sizes.discard("")
    return tuple(output.name for output in model.graph.output if output.name in shapes)


def _shape_depends(step: Step, shapes: set[str], sizes: set[str]) -> bool:
    if step.op in _DATA_DEPENDENT:
        return True
    if step.op in _SHAPE_READERS:
        return False
    if step.op in _SHAPE_OF_FIRST:
        return not shapes.isdisjoint(step.reads[:1])
    operands = SHAPE_OPERANDS.get(step.op, frozenset())
    return any(name in shapes or (position in operands and name in sizes) for position, name in enumerate(step.reads))


def _sizes_depend(step: Step, shapes: set[str], sizes: set[str]) -> bool:
    if step.op in _SHAPE_READERS:
        return not shapes.isdisjoint(step.reads)
    return not sizes.isdisjoint(step.reads)


def wide_int_constants(model: ModelProto, folder: Path, flow: Flow | None = None) -> tuple[str, ...]:
    """Names of int64 constants with values that int32 cannot hold, in graph order.

    Left out are those whose only wide values mean "to the end" and that only a Slice reads as its start or end: a
    clamped one means the same. `folder` is where external data lies; it is mapped, not loaded.
    """
    flow = flow or flow_of(model)
    outputs = {output.name for output in model.graph.output}
    found: list[str] = []
    for name, tensor in flow.tensors.items():
        if tensor.data_type != TensorProto.INT64:
            continue
        values = _int64_values(tensor, folder)
        wide = values[(values < _INT32.min) | (values > _INT32.max)]
        if wide.size and not (np.isin(wide, _SENTINELS).all() and _bounds_slices(name, flow, outputs)):
            found.append(local_name(name))
    return tuple(found)


def _int64_values(tensor: TensorProto, folder: Path) -> NDArray[np.int64]:
    if not is_external(tensor):
        return (
            np.frombuffer(tensor.raw_data, "<i8") if tensor.HasField("raw_data") else np.array(tensor.int64_data, "<i8")
        )
    entries = {entry.key: entry.value for entry in tensor.external_data}
    count = int(np.prod(tensor.dims, dtype=np.int64))
    if count == 0:
        return np.zeros(0, np.int64)
    return np.memmap(folder / entries["location"], "<i8", "r", int(entries.get("offset", "0")), (count,))


def _bounds_slices(name: str, flow: Flow, outputs: set[str]) -> bool:
    movers = VALUE_KEEPING - {"Slice", "Pad"}
    reached = flow.reach(name, movers)
    ends = [
        (step, position)
        for step, position in _uses(reached, flow)
        if not (step.op in movers and carries(step, position))
    ]
    return reached.isdisjoint(outputs) and all(
        step.op == "Slice" and position in _SLICE_BOUNDS for step, position in ends
    )
