"""Inputs for models nobody gave data for: plausible values, seeded, the same on every machine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from trtforge.errors import GraphError, Problem, raise_any
from trtforge.shapes.ranges import BOUNDS
from trtforge.spec.model import InputValues
from trtforge.types import Graph, Point, Profile, Shape, TensorSpec

Array = np.ndarray[Any, np.dtype[Any]]

_DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name) for name in ("float16", "float32", "float64", "bool")},
    **{name: np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")},
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


def generate_inputs(
    graph: Graph, profile: Profile, point: Point, declared: Mapping[str, InputValues], seed: int
) -> dict[str, Array]:
    """Generates one set of inputs at the min, opt or max of a profile. See `generate_at`."""
    shapes = {name: getattr(shape, point) for name, shape in profile.shapes.items()}
    values = {name: getattr(value, point) for name, value in profile.values.items()}
    return generate_at(graph, shapes, values, declared, seed)


def generate_at(
    graph: Graph,
    shapes: Mapping[str, Shape],
    values: Mapping[str, Shape],
    declared: Mapping[str, InputValues],
    seed: int,
) -> dict[str, Array]:
    """Generates one set of inputs at given shapes.

    Guarantees for every input, in graph order: its own dtype, the shape asked for, finite values inside the inclusive
    range of `declared` or else of its role (narrowed to what the dtype holds, rounded as it rounds), and the same values for the same
    seed, name, dtype, shape and range whatever the other inputs are.

    Masks hold a run of `high` (valid) then `low` along the last axis, of random length for each row. With two rows or
    more the last row is all `low`; a single row is all `low` for odd seeds only. Token ids, and integers of any
    kind, are whole numbers drawn uniformly with both bounds included; other numbers are uniform.

    Args:
        graph: the model.
        shapes: a shape, every size at least 1, for every input.
        values: the values of those inputs that decide shapes; they are passed on as they are.
        declared: `inputs` of the spec. `kind` overrides the role's, `range` the role's bounds (0 and 1 for an input
            declared a mask).
        seed: 0 or more.

    Raises:
        GraphError: inputs have a type that cannot be generated (strings, sub-byte integers); all are named at once.
    """
    raise_any(_ungenerated(spec) for spec in graph.inputs if spec.dtype not in _DTYPES)
    return {
        spec.name: np.array(values[spec.name], _DTYPES[spec.dtype]).reshape(shapes[spec.name])
        if spec.name in values
        else _generate(graph, spec, shapes[spec.name], declared.get(spec.name, InputValues()), seed)
        for spec in graph.inputs
    }


def _ungenerated(spec: TensorSpec) -> Problem:
    return Problem(
        f"input '{spec.name}' is {spec.dtype}; values can be generated for {', '.join(_DTYPES)}",
        "move the conversion of that input out of the model, so that it takes one of these types",
        exit_code=GraphError.exit_code,
    )


def _generate(graph: Graph, spec: TensorSpec, shape: Shape, declared: InputValues, seed: int) -> Array:
    role, dtype = graph.role(spec.name), _DTYPES[spec.dtype]
    kind = declared.kind or role.kind
    low, high = declared.range or ((0, 1) if declared.kind == "mask" else (role.low, role.high))
    lowest, highest = BOUNDS[spec.dtype]
    low, high = max(low, lowest), min(high, highest)
    rng = _stream(seed, spec.name)
    if kind == "mask":
        return _mask(rng, shape, seed, np.array(low).astype(dtype), np.array(high).astype(dtype))
    if kind == "token_ids" or _is_whole(dtype):
        return _whole_numbers(rng, shape, low, high).astype(dtype)
    return _uniform(rng, shape, low, high, dtype)


def _stream(seed: int, name: str) -> np.random.Generator:
    """A generator of its own for each input name, so that adding an input changes no other's data."""
    digest = hashlib.sha256(name.encode()).digest()
    return np.random.default_rng([seed, int.from_bytes(digest[:16], "little")])


def _is_whole(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "iub"


def _mask(rng: np.random.Generator, shape: Shape, seed: int, low: Array, high: Array) -> Array:
    length = shape[-1] if shape else 1
    num_rows = math.prod(shape[:-1])
    num_valid = rng.integers(1, length, size=num_rows, endpoint=True)
    if num_rows > 1 or seed % 2:
        num_valid[-1] = 0
    is_valid = np.arange(length) < num_valid[:, np.newaxis]
    return np.where(is_valid, high, low).reshape(shape)


def _whole_numbers(rng: np.random.Generator, shape: Shape, low: float, high: float) -> Array:
    first, last = max(math.ceil(low), -(2**63)), min(math.floor(high), 2**64 - 1)
    if first < 0:
        return rng.integers(first, min(last, 2**63 - 1), size=shape, endpoint=True, dtype=np.int64)
    return rng.integers(first, last, size=shape, endpoint=True, dtype=np.uint64)


def _uniform(rng: np.random.Generator, shape: Shape, low: float, high: float, dtype: np.dtype[Any]) -> Array:
    working: Any = np.float64 if dtype == np.float64 else np.float32
    share = rng.random(shape, dtype=working)
    # Not low + (high - low) * share: the difference of two large bounds overflows.
    mixed = working(low) * (1 - share) + working(high) * share
    return np.asarray(np.clip(mixed, working(low), working(high))).astype(dtype)
