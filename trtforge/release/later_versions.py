"""Which later versions of TensorRT run a version-compatible engine."""

from __future__ import annotations

import re
from typing import Final

_NEXT_MAJOR: Final = {8: 10, 10: 11}
"""Source: TensorRT documentation, "Version Compatibility": 8.6 -> 10.x, 10.x -> 11.x, forward only."""


def version_parts(version: str) -> tuple[int, ...]:
    """`8.6.1.post1` as (8, 6, 1); () of what does not begin with a number."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def last_major(built: tuple[int, ...]) -> int:
    """The last major version that runs version-compatible engines of `built`."""
    return _NEXT_MAJOR.get(built[0], built[0])


def reaches(built: tuple[int, ...], found: tuple[int, ...]) -> bool:
    """Whether version `found` runs version-compatible engines of the earlier version `built`."""
    return found > built and found[0] in (built[0], last_major(built))
