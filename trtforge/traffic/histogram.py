"""Requests counted by shape: all that the choice of profiles needs of a log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trtforge.errors import SpecError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MAX_SHAPES = 1_000_000
"""Different shapes of one log. Each takes about 200 bytes while a log is read."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """Requests that no profile of the model can take.

    Attributes:
        reason: such as `'x' has 3 sizes, the model's has 4`.
        count: how many.
        line: the first of them; 0 where the log has no lines.
    """

    reason: str
    count: int
    line: int


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals:
    """Every request that fits the model, in order of arrival.

    Attributes:
        seconds: (requests,) times of arrival, never falling.
        shapes: (requests,) row in `Traffic.sizes`.
    """

    seconds: Floats
    shapes: NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """Requests by shape.

    Attributes:
        names: of the open sizes.
        sizes: (shapes, names) all different, each 1 or more.
        counts: (shapes,) requests of each shape, each 1 or more.
        misfits: requests that the model can never take.
        arrivals: None where times were not asked for.
    """

    names: tuple[str, ...]
    sizes: Ints
    counts: Ints
    misfits: tuple[Misfit, ...] = ()
    arrivals: Arrivals | None = None

    @property
    def num_requests(self) -> int:
        """All requests, misfits included."""
        return int(self.counts.sum()) + sum(misfit.count for misfit in self.misfits)


def distinct(sizes: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Equal rows of `sizes` (rows, names) as one, in ascending order, with the sum of their counts."""
    order = np.lexsort(sizes.T[::-1])
    ordered = sizes[order]
    is_first = np.ones(len(ordered), bool)
    is_first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    starts = np.flatnonzero(is_first)
    return ordered[starts], np.add.reduceat(counts[order], starts)


@dataclass(slots=True)
class Tally:
    """Counts shapes while a log is read; whoever reads it adds to the counts.

    Attributes:
        ids: sizes -> row.
        counts: by row.
        misfits: reason -> (its place in `misfit_counts`, first line).
    """

    names: tuple[str, ...]
    ids: dict[tuple[int, ...], int] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)
    misfits: dict[str, tuple[int, int]] = field(default_factory=dict)
    misfit_counts: list[int] = field(default_factory=list)

    def id_of(self, sizes: tuple[int, ...]) -> int:
        """The row of a shape.

        Raises:
            SpecError: there are more than `MAX_SHAPES`.
        """
        found = self.ids.get(sizes)
        if found is None:
            found = self.ids[sizes] = len(self.counts)
            self.counts.append(0)
            if found >= MAX_SHAPES:
                raise SpecError(
                    f"the log has more than {MAX_SHAPES} different shapes of {', '.join(self.names)}",
                    next_step="round sizes up to multiples, as the server will have to, before they are logged",
                )
        return found

    def misfit_id(self, reason: str, line: int) -> int:
        """The place in `misfit_counts` of a reason why the model can never take a request."""
        if reason not in self.misfits:
            self.misfits[reason] = (len(self.misfit_counts), line)
            self.misfit_counts.append(0)
        return self.misfits[reason][0]

    def traffic(self, arrivals: Arrivals | None) -> Traffic:
        """What was counted."""
        sizes = np.array(list(self.ids), np.int64).reshape(len(self.ids), len(self.names))
        misfits = tuple(
            Misfit(reason, self.misfit_counts[place], line) for reason, (place, line) in self.misfits.items()
        )
        return Traffic(self.names, sizes, np.array(self.counts, np.int64), misfits, arrivals)


def joined_arrivals(seconds: Iterable[Floats], shapes: Iterable[NDArray[np.int32]]) -> Arrivals:
    """Blocks of arrivals end to end."""
    return Arrivals(
        np.concatenate([np.zeros(0, np.float64), *seconds]), np.concatenate([np.zeros(0, np.int32), *shapes])
    )
