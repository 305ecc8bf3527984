"""Scales, and weights as symmetric INT8 with a scale for each channel; large ones are taken in slices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from trtforge.precision.weights import LARGEST, NUMPY_TYPES, values_of

LEVELS = 127
"""Steps from zero to the largest magnitude; -128 is not used, so that the range is symmetric. Source: TensorRT."""

_NO_MAGNITUDE = 2.0**-119
"""A tensor or channel below it counts as zero: its scale would leave FP32's normal range, which ends at 2^-126."""

_NORMAL_FLOAT16 = 2.0**-14
_SATURATION = 127.5
_SLICE = 1 << 20


@dataclass(frozen=True, slots=True)
class Int8Weights:
    """Weights of one node.

    Attributes:
        values: integers from -127 to 127, of the weights' shape.
        scales: one for each channel, FP32 numbers that the type asked for holds exactly; none is zero or infinite.
        num_dead: channels of zeros.
        num_coarse: channels of which more than half of the weights that are not zero become zero.
        absmax: largest magnitude of the weights.
        loss: L2 norm of the rounding errors over that of the weights; 0 for zeros.
    """

    values: NDArray[np.int8]
    scales: NDArray[np.float32]
    num_dead: int
    num_coarse: int
    absmax: float
    loss: float


def scale_of(amax: float, dtype: str) -> float:
    """The scale of an activation that reaches `amax`, a number that `dtype` holds if values of that size suit it.

    A tensor of zeros, or of hardly more, takes scale 1: whatever the scale, its zeros stay zeros.

    Args:
        amax: largest magnitude to represent, finite and not negative.
        dtype: float16, bfloat16 or float32.
    """
    return 1.0 if amax < _NO_MAGNITUDE else float(_held(np.array([amax / LEVELS]), _scale_type(amax, dtype))[0])


def _scale_type(amax: float, dtype: str) -> str:
    """FP32 for what FP16 cannot compute with, as it stays FP32 anyway; small scales of larger values lose nothing in FP16."""
    return "float32" if dtype == "float16" and not _NORMAL_FLOAT16 <= amax <= LARGEST["float16"] else dtype


def int8_weights(tensor: TensorProto, axis: int, dtype: str, folder: Path | None) -> Int8Weights | None:
    """`tensor` in INT8 with a scale for each index of `axis`, the largest magnitude over 127; None if it is not finite.

    A channel of zeros, or of hardly more, takes the largest scale of all channels, or 1.

    Args:
        tensor: FP32.
        axis: of the channels.
        dtype: of the scales: float16, bfloat16 or float32. Weights beyond what float16 holds, or below, get FP32 scales.
        folder: of external data.
    """
    weights = values_of(tensor, folder).reshape(tuple(tensor.dims))
    others = tuple(other for other in range(weights.ndim) if other != axis)
    amax = np.maximum(weights.max(axis=others), -weights.min(axis=others)).astype(np.float64)
    absmax = float(amax.max())
    if not math.isfinite(absmax):
        return None
    dead = amax < _NO_MAGNITUDE
    scales = _held(np.where(dead, 1, amax) / LEVELS, _scale_type(absmax, dtype))
    scales[dead] = 1 if dead.all() else scales[~dead].max()
    values = np.empty(weights.shape, np.int8)
    nonzero, left = np.zeros((2, weights.shape[axis]), np.int64)
    error = norm = 0.0
    spread = scales.reshape([-1 if other == axis else 1 for other in range(weights.ndim)])
    for part in _slices(weights.shape):
        factor = spread[part] if axis == 0 else spread
        rounded = np.clip(np.rint(weights[part] / factor), -LEVELS, LEVELS)
        values[part] = rounded
        channels = part if axis == 0 else slice(None)
        nonzero[channels] += np.count_nonzero(weights[part], axis=others)
        left[channels] += np.count_nonzero(rounded, axis=others)
        wrong = (rounded * factor - weights[part]).ravel()
        error += float(wrong @ wrong)
        norm += float(np.vdot(weights[part], weights[part]))
    return Int8Weights(
        values=values,
        scales=scales,
        num_dead=int(dead.sum()),
        num_coarse=int((~dead & (left < nonzero / 2)).sum()),
        absmax=absmax,
        loss=math.sqrt(error / norm) if norm else 0.0,
    )


def _held(scales: NDArray[np.float64], dtype: str) -> NDArray[np.float32]:
    """The scales in `dtype`: the nearest, or the next one up where the largest value would saturate."""
    if dtype == "float32":
        return scales.astype(np.float32)
    numpy_type: np.dtype[Any] = NUMPY_TYPES[dtype]
    near = scales.astype(numpy_type)
    bits = near.view(np.uint16)
    saturates = scales * LEVELS > near.astype(np.float64) * _SATURATION
    return (bits + saturates).astype(np.uint16).view(numpy_type).astype(np.float32)


def _slices(shape: tuple[int, ...]) -> Iterator[slice]:
    """Ranges of the first axis that hold about a million values each."""
    rows = max(1, _SLICE // max(1, math.prod(shape[1:])))
    yield from (slice(start, start + rows) for start in range(0, shape[0], rows))
