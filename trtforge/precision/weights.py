"""Constants in numpy: what a lower type would make of them, and the conversion. Large ones are taken in slices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, external_data_helper, numpy_helper

LowType = Literal["float16", "bfloat16"]
NUMPY_TYPES: dict[str, np.dtype[Any]] = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
ONNX_TYPES: dict[str, int] = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}

LARGEST: dict[LowType, float] = {"float16": 65504.0, "bfloat16": float.fromhex("0x1.fep127")}
"""Largest finite value. Source: IEEE 754-2019 binary16; bfloat16 has binary32's exponent and 7 fraction bits."""

_INFINITY: dict[LowType, int] = {"float16": 0x7C00, "bfloat16": 0x7F80}
"""Bits of infinity."""

_SMALLEST: dict[LowType, float] = {"float16": 2.0**-24, "bfloat16": 2.0**-133}
"""Smallest number that is not zero; below the normal range, rounding errs by up to half of it."""

_NEGLIGIBLE = 1e-4
_ALIGNMENT = 4096
"""Of external data, so that it can be mapped. Source: ONNX's external data format, offset."""

_SLICE = 1 << 20


@dataclass(frozen=True, slots=True)
class Constant:
    """What a lower type would make of a constant.

    Attributes:
        low, high: smallest and largest value.
        absmax: largest magnitude, inf where a value is not finite.
        overflows: whether a value that is finite in FP32 is not in the lower type, or one is not finite at all.
        loss: L2 norm of the rounding errors over that of the values; inf where a value overflows. Not looked at closely
            where hardly anything can lie below the normal range.
    """

    size: int
    low: float
    high: float
    absmax: float
    overflows: bool
    loss: float


def values_of(tensor: TensorProto, folder: Path | None) -> NDArray[np.float32]:
    """The values of an FP32 tensor, flat; external ones are read from below `folder`."""
    if tensor.data_location == TensorProto.EXTERNAL:
        return _mapped(tensor, folder)
    if tensor.HasField("raw_data"):
        return np.frombuffer(tensor.raw_data, "<f4")
    return np.asarray(numpy_helper.to_array(tensor), np.float32).reshape(-1)


def _mapped(tensor: TensorProto, folder: Path | None) -> NDArray[np.float32]:
    """External values where they lie, so that memory need not hold all of a tensor."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    size = math.prod(tensor.dims)
    if size == 0:
        return np.empty(0, np.float32)
    path, offset = (folder or Path.cwd()) / entries["location"], int(entries.get("offset", 0))
    return np.asarray(np.memmap(path, "<f4", "r", offset, (size,)))


def _loaded(tensor: TensorProto, folder: Path | None) -> TensorProto:
    copy = TensorProto()
    copy.CopyFrom(tensor)
    external_data_helper.load_external_data_for_tensor(copy, str(folder or Path.cwd()))
    return copy


def describe(tensor: TensorProto, dtype: LowType, folder: Path | None) -> Constant:
    """What `dtype` would make of the FP32 constant `tensor`."""
    values = values_of(tensor, folder)
    if not values.size:
        return Constant(0, 0, 0, 0, overflows=False, loss=0)
    low, high = float(values.min()), float(values.max())
    if not (np.isfinite(low) and np.isfinite(high)):
        return Constant(values.size, low, high, float("inf"), overflows=True, loss=float("inf"))
    absmax = max(abs(low), abs(high))
    with np.errstate(over="ignore"):
        overflows = not np.isfinite(np.float32(absmax).astype(NUMPY_TYPES[dtype]).astype(np.float32))
    loss = float("inf") if overflows else _loss(values, dtype)
    return Constant(values.size, low, high, absmax, overflows=overflows, loss=loss)


def _loss(values: NDArray[np.float32], dtype: LowType) -> float:
    """Norm of the rounding errors over that of the values.

    Where hardly anything can lie below the normal range, it is that of rounding alone, and nothing is converted.
    """
    with np.errstate(over="ignore"):
        norm = math.sqrt(sum(float(part @ part) for part in _slices(values)))
    if norm == 0:
        return float(values.any())
    if math.sqrt(values.size) * _SMALLEST[dtype] / 2 < _NEGLIGIBLE * norm:
        return _NEGLIGIBLE
    error = 0.0
    for part in _slices(values):
        wrong = part.astype(NUMPY_TYPES[dtype]).astype(np.float64) - part
        error += float(wrong @ wrong)
    return math.sqrt(error) / norm


def _slices(values: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    for start in range(0, values.size, _SLICE):
        yield values[start : start + _SLICE]


def write_converted(source: TensorProto, target: TensorProto, dtype: LowType, folder: Path | None) -> None:
    """Makes `target` the FP32 constant `source` in `dtype`; finite values too large for it become its largest."""
    values = values_of(source, folder)
    converted = np.empty(values.size, NUMPY_TYPES[dtype])
    with np.errstate(over="ignore"):
        for start in range(0, values.size, _SLICE):
            part, low = values[start : start + _SLICE], converted[start : start + _SLICE]
            low[:] = part
            infinite = (low.view(np.uint16) & 0x7FFF) == _INFINITY[dtype]
            if infinite.any():
                low[infinite] = np.where(np.isinf(part), part, np.copysign(LARGEST[dtype], part))[infinite]
    target.name = source.name
    target.data_type = ONNX_TYPES[dtype]
    target.dims.extend(source.dims)
    target.raw_data = converted.view(np.uint16).astype("<u2", copy=False).tobytes()


def write_same(source: TensorProto, target: TensorProto, folder: Path | None) -> None:
    """Makes `target` equal to `source`, with external data taken in where `folder` is given."""
    if source.data_location == TensorProto.EXTERNAL and folder is not None:
        source = _loaded(source, folder)
        source.data_location = TensorProto.DEFAULT
    target.CopyFrom(source)


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A file beside a model that takes the values of its large tensors, one after the other.

    Attributes:
        location: its name, as the model's tensors give it.
        file: open for writing, at the end of what it holds.
    """

    location: str
    file: BinaryIO

    def take(self, tensor: TensorProto) -> None:
        """Moves the values of `tensor` into the file.

        Raises:
            OSError: no space.
        """
        offset = -(-self.file.tell() // _ALIGNMENT) * _ALIGNMENT
        self.file.write(b"\0" * (offset - self.file.tell()))
        num_bytes = self.file.write(tensor.raw_data)
        external_data_helper.set_external_data(tensor, self.location, offset, num_bytes)
        tensor.ClearField("raw_data")
