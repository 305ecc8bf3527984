"""What a model's QuantizeLinear and DequantizeLinear nodes say: scale, zero point, axis and element type."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from trtforge.graph.model_file import dtype_name
from trtforge.graph.sites import Site, Value, array_of, constant_of

QUANTIZE = ("QuantizeLinear", "com.microsoft.QuantizeLinear")
DEQUANTIZE = ("DequantizeLinear", "com.microsoft.DequantizeLinear")
MOVING = frozenset({"Identity", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Slice", "MaxPool"})
"""Operators that give each value of their first input as it is, move it, or leave it out: Q(op(x)) is op(Q(x))."""

WEIGHTED = {"Conv": (0, 1), "ConvTranspose": (0, 1), "Gemm": (0, 1), "MatMul": (0, 1)}
"""Operators that TensorRT runs in INT8 when the inputs at these positions are quantized."""


@dataclass(frozen=True, slots=True)
class Params:
    """How one Q or DQ node scales.

    Attributes:
        scale: any shape; None if it is not constant.
        zero_point: zero where it is left out; None if it is not constant.
        axis: as written; 1 where it is not.
        dtype: element type of the quantized side ("int8"); "" where the file does not say.
        has_zero_point: whether the node names a zero point.
        blocked: whether one scale serves a block of values along the axis.
    """

    scale: NDArray[Any] | None
    zero_point: NDArray[Any] | None
    axis: int
    dtype: str
    has_zero_point: bool
    blocked: bool

    @property
    def per_channel(self) -> bool:
        """Whether there is more than one scale."""
        return self.scale is not None and self.scale.size > 1

    def same_as(self, other: Params) -> bool:
        """Whether both map the same real values to the same integers."""
        if self.scale is None or other.scale is None or self.zero_point is None or other.zero_point is None:
            return False
        return (
            self.dtype == other.dtype
            and np.array_equal(self.scale, other.scale, equal_nan=True)
            and np.array_equal(self.zero_point, other.zero_point)
            and (not self.per_channel or self.axis == other.axis)
        )


def params_of(site: Site, folder: Path) -> Params:
    """The parameters of a Q or DQ node."""
    scale, zero = constant_of(site.read(1)), constant_of(site.read(2))
    named = site.read(2) is not None
    return Params(
        scale=None if scale is None else array_of(scale, folder),
        zero_point=(array_of(zero, folder) if zero is not None else None) if named else np.zeros((), np.int32),
        axis=site.attribute("axis", 1),
        dtype=_dtype(site, zero),
        has_zero_point=named,
        blocked=bool(site.attribute("block_size", 0)),
    )


def _dtype(site: Site, zero: TensorProto | None) -> str:
    """Source: ONNX QuantizeLinear-21: the zero point's type, else `output_dtype`, else uint8; DequantizeLinear: x's."""
    if zero is not None:
        return dtype_name(zero.data_type) or ""
    if site.op in QUANTIZE:
        return dtype_name(site.attribute("output_dtype", 0) or TensorProto.UINT8) or ""
    source = source_of(site.read(0))
    if source is None:
        return ""
    if source.tensor is not None:
        return dtype_name(source.tensor.data_type) or ""
    if source.writer and source.writer.op in QUANTIZE:
        return _dtype(source.writer, constant_of(source.writer.read(2)))
    return dtype_name(source.elem_type) or ""


def source_of(value: Value | None) -> Value | None:
    """Where the numbers of `value` come from, past operators that only move them."""
    while value and value.writer and value.writer.op in MOVING:
        value = value.writer.read(0)
    return value


def dequantizer(value: Value | None) -> Site | None:
    """The DQ node that gives `value`, past operators that only move numbers."""
    source = source_of(value)
    return source.writer if source and source.writer and source.writer.op in DEQUANTIZE else None


def is_weight(site: Site) -> bool:
    """Whether a Q or DQ node works on a constant, quantized in the file or by the nodes themselves."""
    source = source_of(site.read(0))
    if source and source.writer and source.writer.op in QUANTIZE and site.op in DEQUANTIZE:
        source = source_of(source.writer.read(0))
    return constant_of(source) is not None


def bias_position(site: Site) -> int | None:
    """Position of the bias among the inputs of a weighted operator."""
    return 2 if site.op in ("Conv", "ConvTranspose", "Gemm") else None
