"""Checks every tensor's bytes against its type and shape, inside the file and in files beside it, without reading them."""

from __future__ import annotations

import stat
from pathlib import Path, PurePosixPath, PureWindowsPath

from onnx import ModelProto, TensorProto
from onnx.helper import tensor_dtype_to_field

from trtforge.errors import Problem, Where
from trtforge.graph.model_file import dtype_name, graph_problem, listed, size_bytes, tensors

_EXPORT_AGAIN = "export the model again, with its external data in the model's own folder"


def is_external(tensor: TensorProto) -> bool:
    """Whether the tensor's values lie in another file."""
    return tensor.data_location == TensorProto.EXTERNAL


def weight_bytes(model: ModelProto) -> int:
    """Bytes of all tensors with values, by type and shape; strings count nothing."""
    return sum(size_bytes(dtype_name(t.data_type) or "string", t.dims) or 0 for t in tensors(model))


def external_locations(model: ModelProto) -> tuple[str, ...]:
    """The distinct locations of external data, sorted, as the model writes them."""
    return tuple(sorted({_entries(tensor).get("location", "") for tensor in tensors(model) if is_external(tensor)}))


def tensor_problems(model: ModelProto, folder: Path, at: Where) -> list[Problem]:
    """Everything that is wrong with the model's tensors; none is left out.

    An external location must be relative, must stay inside `folder` with all links resolved, and must be a regular
    file that has the tensor's bytes at its offset. `folder` is the model's own, whatever the working directory is.
    """
    problems: list[Problem] = []
    files: dict[str, int | Problem] = {}
    for tensor in tensors(model):
        if flaw := _shape_flaw(tensor):
            problems.append(_problem(tensor, flaw, at))
        elif is_external(tensor):
            problems += _external_problems(tensor, folder, files, at)
        elif flaw := _inline_flaw(tensor):
            problems.append(_problem(tensor, flaw, at))
    return [*problems, *(found for found in files.values() if isinstance(found, Problem))]


def _problem(tensor: TensorProto, flaw: str, at: Where) -> Problem:
    return graph_problem(f"tensor '{tensor.name}' {flaw}", _EXPORT_AGAIN, at)


def _shape_flaw(tensor: TensorProto) -> str | None:
    if dtype_name(tensor.data_type) is None:
        return f"has element type {tensor.data_type}, which ONNX does not define"
    if any(dim < 0 for dim in tensor.dims):
        return f"has shape {list(tensor.dims)}, expected sizes of 0 or more"
    return None


def _inline_flaw(tensor: TensorProto) -> str | None:
    expected = size_bytes(dtype_name(tensor.data_type) or "", tensor.dims)
    shape = f"{dtype_name(tensor.data_type)} {list(tensor.dims)}"
    if tensor.HasField("raw_data"):
        found = len(tensor.raw_data)
        return f"holds {found} bytes, {shape} needs {expected}" if found != expected else None
    stored = len(getattr(tensor, tensor_dtype_to_field(tensor.data_type)))
    count = size_bytes("uint8", tensor.dims) or 0
    one_each = dtype_name(tensor.data_type) in ONE_ENTRY_TYPES
    # complex numbers take two entries each and types under 8 bits share one, so only their absence is certain
    wrong = stored != count if one_each else stored == 0 < count
    return f"holds {stored} values, {shape} needs {count}" if wrong else None


ONE_ENTRY_TYPES = frozenset(
    [
        "float32",
        "float64",
        "float16",
        "bfloat16",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "bool",
        "string",
    ]
)
"""Element types that a tensor without `raw_data` stores as one entry for each element."""


def _entries(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def _external_problems(tensor: TensorProto, folder: Path, files: dict[str, int | Problem], at: Where) -> list[Problem]:
    """Problems of one tensor; those of its file go to `files`, so that each file is named once."""
    entries = _entries(tensor)
    expected = size_bytes(dtype_name(tensor.data_type) or "", tensor.dims)
    if flaw := _entry_flaw(tensor, entries, expected):
        return [_problem(tensor, flaw, at)]
    location = entries["location"]
    if location not in files:
        files[location] = _file_size(location, folder, at)
    size = files[location]
    if isinstance(size, Problem):
        return []
    offset = int(entries.get("offset", "0"))
    end = offset + (expected or 0)
    if end > size:
        flaw = f"needs bytes {offset} to {end} of external file '{location}', which has {size}"
        return [_problem(tensor, flaw, at)]
    return []


def _entry_flaw(tensor: TensorProto, entries: dict[str, str], expected: int | None) -> str | None:
    if len(entries) != len(tensor.external_data):
        return f"writes an external-data key twice: {listed(entry.key for entry in tensor.external_data)}"
    if not entries.get("location"):
        return "is external but names no location"
    if expected is None:
        return "holds strings, which cannot be external"
    for key in ("offset", "length"):
        text = entries.get(key, "0")
        if not (text.isascii() and text.isdigit() and len(text) < len(str(1 << 64))):
            return f"has external {key} '{text}', expected a whole number of bytes"
    dtype = dtype_name(tensor.data_type)
    if "length" in entries and int(entries["length"]) != expected:
        return f"has external length {entries['length']}, {dtype} {list(tensor.dims)} needs {expected}"
    return None


def _file_size(location: str, folder: Path, at: Where) -> int | Problem:
    """Size in bytes of the file at `location`, or what is wrong with it."""
    posix, windows = PurePosixPath(location), PureWindowsPath(location)
    if posix.is_absolute() or windows.drive or windows.root:
        return graph_problem(f"external data location '{location}' is absolute, expected relative", _EXPORT_AGAIN, at)
    if ".." in posix.parts or ".." in windows.parts:
        return graph_problem(f"external data location '{location}' leaves the model's folder", _EXPORT_AGAIN, at)
    path = folder / location
    try:
        real = path.resolve()
        if not real.is_relative_to(folder.resolve()):
            return graph_problem(
                f"external data file '{location}' is a link that leaves the model's folder, to {real}",
                f"cp --remove-destination '{real}' '{path}'",
                at,
            )
        status = real.stat()
    except FileNotFoundError:
        return graph_problem(
            f"external data file '{location}' is missing; looked for {path.absolute()}",
            f"put '{location}' beside the model, in {folder.resolve()}",
            at,
        )
    except (OSError, ValueError, RuntimeError) as error:  # a NUL in the name is a ValueError, a loop of links either
        reason = getattr(error, "strerror", None) or error
        return graph_problem(f"external data file '{location}' cannot be read: {reason}", _EXPORT_AGAIN, at)
    if not stat.S_ISREG(status.st_mode):
        return graph_problem(f"external data location '{location}' is not a regular file", _EXPORT_AGAIN, at)
    return status.st_size
