"""What a build uses besides its unit and its graph."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a build uses besides unit and graph. It decides nothing that the unit's key does not hold.

    Attributes:
        gpu_uuid: of the GPU to build on, "" for the only one there is.
        timing_cache: file that is read before the build and updated after it; None to keep no measurements.
        plugins: libraries with operators of their own, loaded before the model is parsed.
        calibration_cache: scales for implicit INT8, in TensorRT's own format; None for a graph that has its types.
        keep_fp32: globs on nodes that the user keeps in FP32, to be bound to it where types do not bind (8.6).
        rest_fp16: whether what INT8 leaves may run in FP16 where the graph cannot say it (8.6, implicit INT8).
    """

    gpu_uuid: str = ""
    timing_cache: Path | None = None
    plugins: tuple[Path, ...] = ()
    calibration_cache: Path | None = None
    rest_fp16: bool = False
    keep_fp32: tuple[str, ...] = ()


NOTHING_AROUND: Final = Surroundings()
