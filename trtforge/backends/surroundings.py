"""What a build uses besides its unit and its graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True)
class Recorded:
    """What an earlier build chose, to be chosen again.

    Attributes:
        timing_cache: file with the tactic of every operator.
        tactics: layer of the engine -> its tactic; empty where the engine did not tell.
    """

    timing_cache: Path
    tactics: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CalibrationBatches:
    """Inputs for TensorRT's own calibrator, each batch of the first profile's opt shapes.

    Attributes:
        algorithm: `EntropyCalibration2` or `MinMaxCalibration`.
        files: input -> file with its values batch after batch, in the network's type, in C order.
        batch_bytes: input -> bytes of a batch.
        batch_size: first size of the inputs' opt shapes.
        num_batches: in every file.
    """

    algorithm: str
    files: Mapping[str, Path]
    batch_bytes: Mapping[str, int]
    batch_size: int
    num_batches: int


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a build uses besides unit and graph. It decides nothing that the unit's key does not hold.

    Attributes:
        gpu_uuid: of the GPU to build on, "" for the only one there is.
        timing_cache: file that is read before the build and updated after it; None to keep no measurements.
        timing_record: file that takes the timing cache of this build alone, in place of `timing_cache`.
        recorded: choices that the build has to repeat; None to choose anew.
        plugins: libraries with operators of their own, loaded before the model is parsed.
        calibration_cache: scales for implicit INT8, in TensorRT's own format; with `calibration_batches`, the file that
            takes them. None for a graph that has its types.
        calibration_batches: what TensorRT's own calibrator makes the scales of; None where they are given.
        keep_fp32: globs on nodes that the user keeps in FP32, to be bound to it where types do not bind (8.6).
        rest_fp16: whether what INT8 leaves may run in FP16 where the graph cannot say it (8.6, implicit INT8).
    """

    gpu_uuid: str = ""
    timing_cache: Path | None = None
    timing_record: Path | None = None
    recorded: Recorded | None = None
    plugins: tuple[Path, ...] = ()
    calibration_cache: Path | None = None
    calibration_batches: CalibrationBatches | None = None
    rest_fp16: bool = False
    keep_fp32: tuple[str, ...] = ()


NOTHING_AROUND: Final = Surroundings()
