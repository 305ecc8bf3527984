"""What the element types hold, for ranges that a spec declares."""

from __future__ import annotations

import math
import sys

from trtforge.types import TensorSpec

BOUNDS: dict[str, tuple[float, float]] = {
    "bool": (0, 1),
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
    "float16": (-65504.0, 65504.0),
    "bfloat16": (-3.3895313892515355e38, 3.3895313892515355e38),
    "float32": (-3.4028234663852886e38, 3.4028234663852886e38),
    "float64": (-sys.float_info.max, sys.float_info.max),
    "float8e4m3fn": (-448.0, 448.0),
    "float8e5m2": (-57344.0, 57344.0),
}
"""Lowest and highest finite value by element type; whole numbers for whole types.

Source: IEEE 754-2019 table 3.5, ONNX "Float stored in 8 bits"; a test compares it with numpy and ml_dtypes.
"""


def range_problem(spec: TensorSpec, low: float, high: float) -> str | None:
    """What is wrong with a declared inclusive range for an input, or None: nothing inside it, or beyond the dtype."""
    if spec.dtype not in BOUNDS:
        return None
    lowest, highest = BOUNDS[spec.dtype]
    if low < lowest or high > highest:
        return f"{spec.dtype} holds {lowest:g} to {highest:g}"
    if isinstance(lowest, int) and math.ceil(low) > math.floor(high):
        return f"no {spec.dtype} value lies between them"
    return None
