"""TensorRT's own calibration cache, for implicit INT8 on 8.x and 10.x.

A text file: `TRT-<version>-<algorithm>`, then a line for each tensor with its name and the bits of its scale,
`images: 3c010204`. The scale is amax / 127, as a big-endian float32. Names are those of the parsed network's tensors, which are
the ONNX names.

Source: caches that TensorRT wrote, in https://github.com/NVIDIA/TensorRT/issues/2036 (`TRT-8203-EntropyCalibration2`);
onnxruntime's TensorRT provider reads a scale and sets the range to 127 times it.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from trtforge.errors import CalibrationError, CapabilityError, Problem, Where, raise_any
from trtforge.files import write_text

Algorithm = Literal["EntropyCalibration2", "MinMaxCalibration"]

_KNOWN_ALGORITHMS = ("EntropyCalibration2", "MinMaxCalibration", "EntropyCalibration", "LegacyCalibration")
_LEVELS = 127
"""Source: TensorRT: dynamic range [-amax, amax] onto INT8 -127 to 127."""

_MAX_BYTES = 64 << 20
_SMALLEST_NORMAL = 2.0**-126
_DEFAULT_PATCHES = {"8.6": "8.6.1"}
_HEADER = re.compile(r"TRT-(\d{4,6})-(\w+)")
_HEX_DIGITS = 8
_FIRST_WITHOUT = 11


@dataclass(frozen=True, slots=True)
class CacheHeader:
    """The first line of a cache.

    Attributes:
        tensorrt_version: such as `8.6.1`.
        algorithm: such as `EntropyCalibration2`.
    """

    tensorrt_version: str
    algorithm: str


def write_trt_cache(path: Path, amax: Mapping[str, float], *, tensorrt_version: str, algorithm: Algorithm) -> None:
    """Writes a calibration cache, whole or not at all.

    TensorRT takes it only if version and algorithm are those of the builder and its calibrator; else it calibrates anew.

    Args:
        path: the file, which is replaced.
        amax: tensor name -> largest magnitude that INT8 covers, above 0.
        tensorrt_version: `8.6.1`, or `10.3` for the first release of 10.3; `8.6` stands for 8.6.1.
        algorithm: of the calibrator that will read it.

    Raises:
        CapabilityError: a version that reads no cache.
        SeveralErrors: all ranges that no scale can stand for, and names that the format cannot hold.
        StoreError: the file cannot be written.
    """
    header = f"TRT-{_version_number(tensorrt_version)}-{algorithm}"
    raise_any(_range_problems(path, amax))
    lines = (f"{name}: {struct.pack('>f', value / _LEVELS).hex()}" for name, value in amax.items())
    write_text(path, "\n".join([header, *lines]) + "\n")


def read_trt_cache(path: Path) -> tuple[CacheHeader, dict[str, float]]:
    """The header of a calibration cache, and amax (127 times the scale) of each tensor in the file's order.

    Raises:
        CalibrationError: there is no such file, or it is too large or no text.
        SeveralErrors: all lines that are wrong, by number.
    """
    lines = _text(path).splitlines()
    problems = list(_header_problems(path, lines))
    amax: dict[str, float] = {}
    first: dict[str, int] = {}
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        name, colon, digits = line.rpartition(":")
        flaw = _line_flaw(name, colon, digits.strip())
        if name in first and not flaw:
            flaw = f"tensor '{name}' is there twice, first in line {first[name]}"
        if flaw:
            problems.append(_problem(path, number, flaw))
        else:
            first[name] = number
            amax[name] = _scale(digits.strip()) * _LEVELS
    if not amax and not problems:
        problems.append(_problem(path, 0, "the cache names no tensor"))
    raise_any(problems)
    found = _HEADER.fullmatch(lines[0].strip())
    assert found is not None  # noqa: S101 - _header_problems
    return CacheHeader(_dotted(int(found[1])), found[2]), amax


def algorithm_of(method: str) -> Algorithm:
    """The calibrator whose cache stands for a table of this method."""
    return "MinMaxCalibration" if method == "minmax" else "EntropyCalibration2"


def missing_tensors(amax: Mapping[str, float], needed: Collection[str]) -> str:
    """What a cache lacks, in one sentence ("1 of 3 tensors missing: 'c'"); "" if nothing."""
    missing = [name for name in needed if name not in amax]
    return f"{len(missing)} of {len(needed)} tensors missing: {', '.join(map(repr, missing))}" if missing else ""


def _version_number(version: str) -> int:
    """The number in the header: 8.6.1 is 8601, 10.3.0 is 100300.

    Source: NV_TENSORRT_VERSION in NvInferVersion.h: major * 1000 + minor * 100 + patch up to 8, and from 10 on
    major * 10000 + minor * 100 + patch.
    """
    parts = _DEFAULT_PATCHES.get(version, version).split(".")
    if not all(part.isascii() and part.isdigit() and len(part) < 3 for part in parts) or len(parts) not in (2, 3, 4):  # noqa: PLR2004
        raise CapabilityError(f"TensorRT version '{version}' is not one like 8.6 or 10.3", next_step="--tensorrt 8.6")
    major, minor, patch = [*map(int, parts), 0][:3]
    if major >= _FIRST_WITHOUT:
        raise CapabilityError(
            f"TensorRT {version} reads no calibration cache: TensorRT 11 removed calibrators, "
            "and quantization is part of the model there",
            next_step="build with precision: {type: int8}, which puts Q/DQ nodes into the model",
        )
    if major not in (8, 10):
        raise CapabilityError(
            f"no calibration cache for TensorRT {version}, only for 8.x and 10.x", next_step="--tensorrt 8.6"
        )
    return major * (1000 if major == 8 else 10000) + minor * 100 + patch  # noqa: PLR2004


def _dotted(number: int) -> str:
    thousand = 10000 if number >= 100000 else 1000  # noqa: PLR2004 - six digits from 10.0 on
    return f"{number // thousand}.{number % thousand // 100}.{number % 100}"


def _range_problems(path: Path, amax: Mapping[str, float]) -> Iterator[Problem]:
    if not amax:
        yield _problem(path, 0, "there is no tensor to write")
    for name, value in amax.items():
        if not name or name != name.strip() or len(name.splitlines()) != 1:
            yield _problem(path, 0, f"tensor name '{name}' does not fit one line of a cache")
        elif not math.isfinite(value) or not _SMALLEST_NORMAL <= value / _LEVELS <= _largest():
            yield _problem(
                path,
                0,
                f"tensor '{name}' has amax {value!r}, expected a number above 0 whose scale is a normal float32",
            )


def _largest() -> float:
    return (2 - 2.0**-23) * 2.0**127 / _LEVELS


def _text(path: Path) -> str:
    next_step = f"ls -l '{path}'"
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CalibrationError(f"calibration cache '{path}' cannot be read: {reason}", next_step=next_step) from error
    if not data:
        raise CalibrationError(f"calibration cache '{path}' is empty (0 bytes)", next_step=next_step)
    if len(data) > _MAX_BYTES:
        raise CalibrationError(f"calibration cache '{path}' is larger than {_MAX_BYTES} bytes", next_step=next_step)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise CalibrationError(f"calibration cache '{path}' is no text", next_step=f"head -c 64 '{path}'") from None


def _header_problems(path: Path, lines: list[str]) -> Iterator[Problem]:
    first = lines[0].strip() if lines else ""
    found = _HEADER.fullmatch(first)
    if not found or found[2] not in _KNOWN_ALGORITHMS:
        expected = f"TRT-8601-{get_args(Algorithm)[0]}"
        yield _problem(path, 1, f"the first line is '{first[:80]}', expected one like '{expected}'")


def _line_flaw(name: str, colon: str, digits: str) -> str:
    if not colon or not name:
        return "expected 'tensor name: eight hexadecimal digits'"
    if len(digits) != _HEX_DIGITS or not re.fullmatch(r"[0-9a-fA-F]+", digits):
        return f"tensor '{name}' has '{digits[:40]}', expected eight hexadecimal digits"
    scale = _scale(digits)
    if not math.isfinite(scale) or not _SMALLEST_NORMAL <= scale <= _largest():
        return f"tensor '{name}' has scale {scale!r} ({digits}), expected a normal float32 above 0"
    return ""


def _scale(digits: str) -> float:
    (scale,) = struct.unpack(">f", bytes.fromhex(digits))
    return float(scale)


def _problem(path: Path, line: int, summary: str) -> Problem:
    step = f"trtforge calibrate SPEC --write-trt-cache '{path}' --tensorrt 8.6"
    return Problem(summary, step, Where(path, line, int(line > 0)), (), CalibrationError.exit_code)
