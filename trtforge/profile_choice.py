"""Which optimization profile a request runs in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from trtforge.types import Profile, Shape, ShapeRange

DISTANCE_DIGITS = 9
"""So that equal distances, summed in another order, stay equal."""


def profile_for(shapes: Mapping[str, Shape], profiles: Iterable[Profile]) -> Profile | None:
    """The profile that a request of these shapes runs in, None where no profile allows them.

    Of several, the one whose `max` holds the fewest elements over all inputs, since its kernels are tuned for the
    narrowest range; then the one whose `opt` is nearest, by the sum of |log(size / opt size)| over all axes, to
    `DISTANCE_DIGITS` decimals; then the first.

    Args:
        shapes: input name -> shape; inputs left out do not decide.
        profiles: in the engine's order.
    """
    fitting = [profile for profile in profiles if _allows(profile, shapes)]
    return min(fitting, key=lambda profile: (_volume(profile), _distance(profile, shapes)), default=None)


def is_inside(shape: Shape, allowed: ShapeRange) -> bool:
    """Whether a shape lies between min and max on every axis."""
    return len(shape) == len(allowed.min) and all(
        low <= size <= high for low, size, high in zip(allowed.min, shape, allowed.max, strict=True)
    )


def _allows(profile: Profile, shapes: Mapping[str, Shape]) -> bool:
    return all(name in profile.shapes and is_inside(shape, profile.shapes[name]) for name, shape in shapes.items())


def _volume(profile: Profile) -> int:
    return sum(math.prod(allowed.max) for allowed in profile.shapes.values())


def _distance(profile: Profile, shapes: Mapping[str, Shape]) -> float:
    distance = sum(
        abs(math.log(max(size, 1) / max(best, 1)))
        for name, shape in shapes.items()
        for size, best in zip(shape, profile.shapes[name].opt, strict=True)
    )
    return round(distance, DISTANCE_DIGITS)
