"""Whether a row fits the model: names, element types, rank and fixed sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from trtforge.errors import Problem, closest
from trtforge.samples.source import Row, problem
from trtforge.types import Graph, TensorSpec

Array = np.ndarray[Any, np.dtype[Any]]

NARROW = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
_INTEGER_KINDS = "iu"
_BELOW_A_BYTE = ("int4", "uint4", "int2", "uint2")
_IMAGE_RANK = 4


def fitted(row: Row, graph: Graph) -> Row | list[Problem]:
    """The row with inputs in graph order, each in its own type, byte order and memory order, or what is wrong.

    Element types are equal, or both are integers and the input's holds every value of the array's type (int32 ->
    int64). The batch axis of a row that joins others is not compared.
    """
    problems = list(missing(row.label, graph, row.feeds, row.extra))
    problems += [
        misfit(f"{row.label}: '{spec.name}'", array, spec, f"{spec}")
        for spec in graph.inputs
        if (array := row.feeds.get(spec.name)) is not None
        if not fits(array.shape, array.dtype, spec, skip_batch=row.joins)
    ]
    if problems:
        return problems
    feeds = {spec.name: _native(row.feeds[spec.name], spec) for spec in graph.inputs}
    return Row(row.label, feeds, row.extra, row.joins)


def fits(shape: tuple[int, ...], dtype: np.dtype[Any], spec: TensorSpec, *, skip_batch: bool = False) -> bool:
    """Whether an array of this shape and type can be fed; `skip_batch` leaves the first size open."""
    if not has_type(dtype, spec) or len(shape) != len(spec.shape):
        return False
    pairs = list(zip(spec.shape, shape, strict=True))[skip_batch:]
    return all(not isinstance(dim, int) or dim == size for dim, size in pairs)


def has_type(dtype: np.dtype[Any], spec: TensorSpec) -> bool:
    """Whether values of `dtype` can be fed without loss."""
    if narrow := NARROW.get(spec.dtype):
        return dtype == narrow or dtype == np.dtype(f"V{narrow.itemsize}")
    if dtype.name == spec.dtype:
        return True
    is_whole = spec.dtype.startswith(("int", "uint")) and dtype.kind in _INTEGER_KINDS
    return is_whole and spec.dtype not in _BELOW_A_BYTE and np.can_cast(dtype, spec.dtype, "safe")


def missing(label: str, graph: Graph, given: Mapping[str, Any], extra: Iterable[str]) -> Iterator[Problem]:
    """A problem for each input without an array, with the name it may have been given."""
    extra = list(extra)
    for spec in graph.inputs:
        if spec.name not in given:
            meant = closest(spec.name, extra)
            step = f"rename '{meant}' to '{spec.name}'" if meant else f"add an array named '{spec.name}'"
            yield problem(f"{label} has no array for the input {spec}", step)


def misfit(place: str, array: Array, spec: TensorSpec, expected: str) -> Problem:
    """An array that cannot be fed, with what most likely happened to it."""
    return described_misfit(place, array.shape, array.dtype, spec, expected)


def described_misfit(
    place: str, shape: tuple[int, ...], dtype: np.dtype[Any], spec: TensorSpec, expected: str
) -> Problem:
    """`misfit` of an array that has not been read."""
    return problem(f"{place} is {dtype.name} {list(shape)}, expected {expected}", _remedy(shape, dtype, spec))


def _remedy(shape: tuple[int, ...], dtype: np.dtype[Any], spec: TensorSpec) -> str:
    if not has_type(dtype, spec):
        if dtype == np.uint8 and "float" in spec.dtype:
            return f"scale it as in training where it is saved, such as (array / 255).astype('{spec.dtype}')"
        if spec.dtype not in NARROW:
            return f"convert it where it is saved: array.astype('{spec.dtype}')"
    for axes in ((0, 3, 1, 2), (0, 2, 3, 1)):
        if len(shape) == len(spec.shape) == _IMAGE_RANK and fits(tuple(shape[axis] for axis in axes), dtype, spec):
            return f"move its channels where it is saved: array.transpose{axes}"
    return "convert it where it is saved: numpy.asarray(values, dtype).reshape(shape)"


def _native(array: Array, spec: TensorSpec) -> Array:
    contiguous = np.asarray(array, order="C")
    if narrow := NARROW.get(spec.dtype):
        return contiguous.view(narrow)
    return contiguous.astype(spec.dtype, copy=False)
