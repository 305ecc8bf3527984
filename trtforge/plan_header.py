"""The first 64 bytes of an engine: which TensorRT wrote it, and for TensorRT-RTX its size and compute capabilities.

The layout is not documented by NVIDIA, so it is a hint for a good message and never proof that an engine loads.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pathlib import Path

HEADER_BYTES = 64
_TENSORRT_MAGIC = b"ftrt"
_RTX_MAGIC = b"vtrt"
_VERSION = slice(24, 28)
_MASK_AT = 32
# Observed on engines that tensorrt_rtx 1.7.1.116 built for each compute capability alone. Bit 0x40 is also set in the
# builder's default mask (0x7e); what it stands for is not known.
RTX_COMPUTE_CAPABILITIES = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")
"""By bit of the mask, from the lowest."""


@dataclass(frozen=True, slots=True)
class PlanHeader:
    """What an engine's first bytes say.

    Attributes:
        kind: the backend whose mark the file begins with.
        version: major, minor, patch and build; one byte each in the file, so each is known modulo 256.
        size_bytes: size of the whole file, None for `tensorrt`.
        compute_capabilities: those of the mask (`sm86`; `bit 0x40` where its meaning is not known), None for
            `tensorrt`.
    """

    kind: Literal["tensorrt", "tensorrt_rtx"]
    version: tuple[int, ...]
    size_bytes: int | None = None
    compute_capabilities: tuple[str, ...] | None = None


def read_plan_header(path: Path) -> PlanHeader | None:
    """The header of the engine at `path`, or None where no known one is there. Reads at most 64 bytes.

    Source: TensorRT: `printPlanVersion` in `samples/common/sampleEngines.cpp` of the open-source TensorRT repository
    (engines of 8.6 and later: `ftrt`, a zero word, the version in bytes 24 to 27). TensorRT-RTX: observed on engines
    of 1.7.1.116 (`vtrt`, little-endian file size at byte 16, version in bytes 24 to 27, mask in byte 32).

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    if len(head) < HEADER_BYTES:
        return None
    major, minor, patch, build = head[_VERSION]
    version = (major, minor, patch, build)
    if head.startswith(_TENSORRT_MAGIC) and head[4:8] == bytes(4):
        return PlanHeader("tensorrt", version)
    if head.startswith(_RTX_MAGIC):
        (size_bytes,) = struct.unpack_from("<Q", head, 16)
        return PlanHeader("tensorrt_rtx", version, size_bytes, _named_bits(head[_MASK_AT]))
    return None


def _named_bits(mask: int) -> tuple[str, ...]:
    names = dict(enumerate(RTX_COMPUTE_CAPABILITIES))
    return tuple(names.get(bit, f"bit {1 << bit:#x}") for bit in range(8) if mask & 1 << bit)
