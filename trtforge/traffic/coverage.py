"""Which requests a set of profiles covers, and which it leaves out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from trtforge.errors import CoverageError, Where
from trtforge.profile_choice import DISTANCE_DIGITS
from trtforge.traffic.choose import Box
from trtforge.traffic.histogram import Ints, Misfit, Traffic
from trtforge.traffic.layout import Layout
from trtforge.types import POINTS, Profile, ShapeRange

OUTLIER_QUANTILE = 0.999
OUTLIER_FACTOR = 2
MAX_LISTED = 10


@dataclass(frozen=True, slots=True)
class Uncovered:
    """Requests of one shape that no profile takes."""

    sizes: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many of the requests some profile takes.

    Attributes:
        num_requests: all, misfits included.
        num_covered: of them inside a profile.
        uncovered: the shapes outside, commonest first.
        misfits: requests that the model can never take.
        by_profile: requests that run in each profile, by `profile_for`'s rule.
    """

    num_requests: int
    num_covered: int
    uncovered: tuple[Uncovered, ...]
    misfits: tuple[Misfit, ...]
    by_profile: tuple[int, ...]

    @property
    def share(self) -> float:
        """Covered requests of all, 0 to 1."""
        return self.num_covered / self.num_requests


@dataclass(frozen=True, slots=True)
class Outlier:
    """Requests far beyond the others in one size: above `OUTLIER_FACTOR` times what `OUTLIER_QUANTILE` of them need."""

    name: str
    largest: int
    count: int
    usual: int


def boxes_of(profiles: Iterable[Profile], layout: Layout) -> tuple[Box, ...]:
    """The open sizes of profiles."""
    places = {
        name: next((input_, axes.index(name)) for input_, axes in layout.axes.items() if name in axes)
        for name in layout.names
    }
    return tuple(
        Box(
            *(
                np.array([getattr(profile.shapes[input_], point)[axis] for input_, axis in places.values()], np.int64)
                for point in POINTS
            )
        )
        for profile in profiles
    )


def profiles_of(boxes: Iterable[Box], layout: Layout) -> tuple[Profile, ...]:
    """Profiles for boxes, each named by its place and its opt, such as `p1-8x64`."""
    profiles = []
    for number, box in enumerate(boxes, start=1):
        low, opt, high = (layout.shapes(sizes) for sizes in (box.min, box.opt, box.max))
        shapes = {name: ShapeRange(low[name], opt[name], high[name]) for name in layout.axes}
        profiles.append(Profile(f"p{number}-{'x'.join(map(str, box.opt))}", shapes))
    return tuple(profiles)


def volumes(highs: Ints, layout: Layout) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """(boxes,) elements over all inputs at (boxes, names) sizes: what `profile_for` compares."""
    columns = dict(zip(layout.names, highs.T.astype(np.float64), strict=True))
    total = np.zeros(len(highs))
    for axes in layout.axes.values():
        total += np.prod(
            [columns[axis] if isinstance(axis, str) else np.full(len(highs), float(axis)) for axis in axes], 0
        )
    return total


def assignment(sizes: Ints, boxes: Sequence[Box], layout: Layout) -> Ints:
    """(shapes,) the box that each shape runs in, -1 for none: `profile_for` for many shapes at once."""
    found = np.full(len(sizes), -1)
    repeats = np.array([sum(axes.count(name) for axes in layout.axes.values()) for name in layout.names])
    highs = np.array([box.max for box in boxes]).reshape(len(boxes), len(layout.names))
    best = np.full((len(sizes), 2), np.inf)
    for place, (box, volume) in enumerate(zip(boxes, volumes(highs, layout), strict=True)):
        distance = np.round(np.abs(np.log(sizes / box.opt)) @ repeats, DISTANCE_DIGITS)
        nearer = (volume < best[:, 0]) | ((volume == best[:, 0]) & (distance < best[:, 1]))
        takes = ((box.min <= sizes) & (sizes <= box.max)).all(axis=1) & nearer
        found[takes] = place
        best[takes, 0], best[takes, 1] = volume, distance[takes]
    return found


def coverage_of(traffic: Traffic, boxes: Sequence[Box], layout: Layout) -> Coverage:
    """What `boxes` cover of `traffic`."""
    found = assignment(traffic.sizes, boxes, layout)
    outside = np.flatnonzero(found < 0)
    ordered = outside[np.argsort(-traffic.counts[outside], kind="stable")]
    by_profile = np.bincount(found[found >= 0], traffic.counts[found >= 0], len(boxes))
    return Coverage(
        traffic.num_requests,
        int(by_profile.sum()),
        tuple(Uncovered(tuple(traffic.sizes[at].tolist()), int(traffic.counts[at])) for at in ordered),
        traffic.misfits,
        tuple(by_profile.astype(int).tolist()),
    )


def outliers(traffic: Traffic) -> tuple[Outlier, ...]:
    """The requests that would set a max far beyond what the others need, for each open size."""
    found = []
    for name, column in zip(traffic.names, traffic.sizes.T, strict=True):
        order = np.argsort(column)
        share = np.cumsum(traffic.counts[order]) / traffic.counts.sum()
        usual = int(column[order[min(int(np.searchsorted(share, OUTLIER_QUANTILE)), len(order) - 1)]])
        beyond = column > OUTLIER_FACTOR * usual
        if beyond.any():
            found.append(Outlier(name, int(column.max()), int(traffic.counts[beyond].sum()), usual))
    return tuple(found)


def refuse_low(
    coverage: Coverage, wanted: float, names: Sequence[str], what: str, next_step: str, where: Where | None
) -> None:
    """Stops where too few requests are covered.

    Raises:
        CoverageError: fewer than `wanted` of all are.
    """
    if coverage.share >= wanted - 1e-12:
        return
    raise CoverageError(
        f"{what} {shown_share(coverage.num_covered, coverage.num_requests)} of {coverage.num_requests} requests, "
        f"expected {wanted * 100:g} % or more",
        detail=left_out(coverage, names),
        next_step=next_step,
        where=where,
    )


def shown_share(part: int, whole: int) -> str:
    """A share in percent, cut and not rounded, so that 100 % means all."""
    return f"{part * 10_000 // whole / 100:.2f} %"


def left_out(coverage: Coverage, names: Sequence[str]) -> tuple[str, ...]:
    """One line for each uncovered shape and each reason of misfits, the commonest first."""
    lines = [
        f"{_requests(misfit.count)} can never fit: {misfit.reason}" + (f" (line {misfit.line})" if misfit.line else "")
        for misfit in sorted(coverage.misfits, key=lambda misfit: -misfit.count)
    ]
    lines += [
        f"{_requests(one.count)} outside: {', '.join(f'{n} {size}' for n, size in zip(names, one.sizes, strict=True))}"
        for one in coverage.uncovered[:MAX_LISTED]
    ]
    rest = coverage.uncovered[MAX_LISTED:]
    if rest:
        lines.append(f"{_requests(sum(one.count for one in rest))} outside, of {len(rest)} more shapes")
    return tuple(lines)


def _requests(count: int) -> str:
    return f"{count} request" + ("" if count == 1 else "s")
