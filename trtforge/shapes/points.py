"""What a run of the model at one point of a profile gave."""

from __future__ import annotations

from dataclasses import dataclass

from trtforge.types import Point, Shape


@dataclass(frozen=True, slots=True)
class PointCheck:
    """One run of the model that worked.

    Attributes:
        profile: the profile's name.
        point: `min`, `opt` or `max`; the first of those that are equal.
        input_shapes, output_shapes: what went in and came out, by tensor name in graph order.
        finite: whether all outputs are free of NaN and infinity.
        seconds: wall seconds of the run, model load left out.
    """

    profile: str
    point: Point
    input_shapes: dict[str, Shape]
    output_shapes: dict[str, Shape]
    finite: bool
    seconds: float
