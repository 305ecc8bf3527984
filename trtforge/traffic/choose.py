"""Chooses optimization profiles for counted requests: the fewest whose mean cost is near the least."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trtforge.traffic.cost import Cost
from trtforge.traffic.histogram import Floats, Ints, Traffic, distinct

MIN_GAIN = 0.02
"""A profile costs memory, build time and engine size: as many are taken as bring the mean cost this near to the least."""
_CELLS = (128, 12, 5, 3)
"""Parts an axis is cut into, where 1, 2, 3 or 4 sizes vary; up to so many different sizes the grid is exact."""
MAX_OPEN_SIZES = len(_CELLS)
_MAX_CORNERS = 64
_MAX_SWEEPS = 20

Volume = Callable[[Ints], Floats]
"""(boxes, names) sizes at max -> (boxes,) elements over all inputs, by which `profile_for` prefers profiles."""
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """The sizes of one profile, (names,) each."""

    min: Ints
    opt: Ints
    max: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """So many profiles, and what a request costs in them on average, in milliseconds."""

    boxes: tuple[Box, ...]
    mean_ms: float


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a choice has to keep to.

    Attributes:
        coverage: share of all requests, misfits included, that profiles must cover; more are left out only above it.
        max_profiles: 1 or more.
        multiples: for each open size what the server pads it to multiples of; so are min, opt and max.
        is_allowed: (shapes, names) sizes -> which a profile may reach, falling in every size.
        padded: whether the server pads every request to its profile's max.
        by_cost: whether opt is the shape with the highest share of the cost, in place of the commonest.
    """

    coverage: float
    max_profiles: int
    multiples: tuple[int, ...]
    is_allowed: Callable[[Ints], Bools]
    padded: bool = False
    by_cost: bool = False


def choose(traffic: Traffic, wishes: Wishes, cost: Cost, volume: Volume) -> tuple[Option, ...]:
    """The best set found of 1, 2, ... `max_profiles` profiles, each over the same range, without gaps.

    The range is the cheapest box from the smallest sizes that holds the wished coverage, or the largest share there is.
    On a grid of sizes, the best division into boxes by successive cuts is found exactly by dynamic programming (for one
    open size that is every division into intervals), and so is the best pair of boxes, nested ones too; from there, and
    from the set before with one more, single boxes are replaced by any other as long as that helps. A request goes to the profile that `profile_for` takes. `opt` is the commonest shape of a box.

    Returns:
        Options by number of profiles; empty where no request may be covered.
    """
    rounded = round_up(traffic.sizes, wishes.multiples)
    corner = _corner(rounded, traffic, wishes, cost)
    if corner is None:
        return ()
    inside = (rounded <= corner).all(axis=1)
    sizes, counts = distinct(rounded[inside], traffic.counts[inside])
    grid = _grid(sizes, counts, wishes, cost, volume)
    total = counts.sum()
    options: list[Option] = []
    found: list[int] = []
    for divided in _divisions(grid, wishes.max_profiles):
        starts = [divided]
        if len(found) == 1:
            starts.append(_best_pair(grid))
        elif found:
            starts.append([*found, _best_addition(grid, found)])
        found = min((_improved(grid, start) for start in starts), key=lambda boxes: _total(grid, boxes))
        ordered = sorted(dict.fromkeys(found), key=lambda box: (grid.volumes[box], *grid.high[box]))
        boxes = tuple(Box(grid.low[box], grid.opt[box], grid.high[box]) for box in ordered)
        options.append(Option(boxes, float(_total(grid, found) / total)))
    return tuple(options)


def fewest(options: Sequence[Option]) -> Option:
    """The first option within `MIN_GAIN` of the cheapest."""
    least = min(option.mean_ms for option in options)
    return next(option for option in options if option.mean_ms <= least * (1 + MIN_GAIN))


def round_up(sizes: Ints, multiples: Sequence[int]) -> Ints:
    """(rows, names) sizes, each the next multiple."""
    unit = np.array(multiples, np.int64)
    rounded: Ints = -(-sizes // unit) * unit
    return rounded


def _corner(rounded: Ints, traffic: Traffic, wishes: Wishes, cost: Cost) -> Ints | None:
    """The largest sizes of the range."""
    # Less than 1 request is tolerance for the product's rounding.
    needed = int(np.ceil(wishes.coverage * traffic.num_requests - 1e-6))
    candidates = [_thinned(np.unique(column)) for column in rounded.T]
    if wishes.is_allowed(rounded).all():
        candidates = [_thinned(_large_enough(column, traffic.counts, needed)) for column in rounded.T]
    corners = np.array(list(itertools.product(*candidates)), np.int64)
    corners = corners[wishes.is_allowed(corners)]
    if not len(corners):
        return None
    covered = _counts_within(rounded, traffic.counts, candidates, corners)
    if not covered.any():
        return None
    enough = covered >= min(needed, covered.max())
    corners, covered = corners[enough], covered[enough]
    corner: Ints = corners[np.lexsort((-covered, cost(corners, corners)))[0]]
    return corner


def _large_enough(column: Ints, counts: Ints, needed: int) -> Ints:
    """The sizes of one axis at or below which lie enough requests."""
    order = np.argsort(column)
    first = min(int(np.searchsorted(np.cumsum(counts[order]), needed)), len(order) - 1)
    return np.unique(column[order[first:]])


def _thinned(values: Ints) -> Ints:
    if len(values) <= _MAX_CORNERS:
        return values
    return values[np.unique(np.linspace(0, len(values) - 1, _MAX_CORNERS).round().astype(np.int64))]


def _counts_within(rounded: Ints, counts: Ints, candidates: Sequence[Ints], corners: Ints) -> Ints:
    """Requests at or below each corner, by sums over the grid of candidates."""
    places = [np.searchsorted(values, column) for values, column in zip(candidates, rounded.T, strict=True)]
    sums = np.zeros([len(values) + 1 for values in candidates], np.int64)
    np.add.at(sums, tuple(places), counts)
    for axis in range(sums.ndim):
        sums = sums.cumsum(axis=axis)
    at = [np.searchsorted(values, column) for values, column in zip(candidates, corners.T, strict=True)]
    found: Ints = sums[tuple(at)]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Grid:
    """All boxes of cells, and the cost of every cell in each of them.

    Attributes:
        num_cells: along each axis.
        first, last: (boxes, names) cells of each box.
        low, high, opt: (boxes, names) sizes.
        volumes: (boxes,).
        costs: (boxes, cells) milliseconds of all requests of a cell, infinite where the box does not hold the cell.
    """

    num_cells: tuple[int, ...]
    first: Ints
    last: Ints
    low: Ints
    high: Ints
    opt: Ints
    volumes: Floats
    costs: Floats


def _grid(sizes: Ints, counts: Ints, wishes: Wishes, cost: Cost, volume: Volume) -> _Grid:
    num_varying = int((sizes != sizes[0]).any(axis=0).sum())
    edges = [_edges(column, counts, _CELLS[max(num_varying, 1) - 1]) for column in sizes.T]
    num_cells = tuple(map(len, edges))
    cell_of = np.ravel_multi_index(
        [np.searchsorted(high, column) for high, column in zip(edges, sizes.T, strict=True)], num_cells
    )
    popularity = counts.astype(np.float64)
    if wishes.by_cost:
        popularity *= cost(sizes, sizes)
    tops = _top_shapes(cell_of, popularity)
    first, last = _all_boxes(num_cells)
    lows = [
        np.concatenate([[column.min()], high[:-1] + multiple])
        for column, high, multiple in zip(sizes.T, edges, wishes.multiples, strict=True)
    ]
    low = np.stack([lows[axis][first[:, axis]] for axis in range(len(edges))], 1)
    high = np.stack([edges[axis][last[:, axis]] for axis in range(len(edges))], 1)
    cells = np.stack(np.unravel_index(np.arange(np.prod(num_cells)), num_cells), 1)
    holds: Bools = np.asarray(((first[:, None] <= cells) & (cells <= last[:, None])).all(axis=2))
    filled = np.fromiter(tops, np.int64)
    top = np.fromiter(tops.values(), np.int64)
    best = np.where(holds[:, filled], popularity[top], -1.0).argmax(axis=1)
    if wishes.padded:
        per_cell = np.bincount(cell_of, counts, len(cells))
        opt = high
        costs = cost(high, high)[:, None] * per_cell
    else:
        by_opt = [np.bincount(cell_of, counts * cost(sizes, sizes[shape]), len(cells)) for shape in top]
        # A box without requests is tuned for its largest sizes; it costs nothing.
        is_empty: Bools = np.asarray(~holds[:, filled].any(axis=1))
        opt = np.where(is_empty[:, None], high, sizes[top[best]])
        costs = np.array(by_opt)[best]
    return _Grid(num_cells, first, last, low, high, opt, volume(high), np.where(holds, costs, np.inf))


def _edges(column: Ints, counts: Ints, most: int) -> Ints:
    """Upper edges of at most `most` cells: every size, or half of them by requests and half evenly in the logarithm."""
    values, inverse = np.unique(column, return_inverse=True)
    if len(values) <= most:
        return values
    share = np.cumsum(np.bincount(inverse, counts)) / counts.sum()
    places = np.searchsorted(share, np.linspace(0, 1, most // 2 + 1)[1:-1])
    even = np.searchsorted(values, np.geomspace(values[0], values[-1], most - most // 2))
    places = np.concatenate([places, even, [len(values) - 1]]).clip(0, len(values) - 1)
    edges: Ints = values[np.unique(places)]
    return edges


def _top_shapes(cell_of: Ints, popularity: Floats) -> dict[int, int]:
    """Cell -> the most popular shape in it; of equal ones the smallest."""
    order = np.lexsort((np.arange(len(cell_of)), -popularity))
    tops: dict[int, int] = {}
    for shape in order.tolist():
        tops.setdefault(int(cell_of[shape]), shape)
    return tops


def _all_boxes(num_cells: tuple[int, ...]) -> tuple[Ints, Ints]:
    """First and last cell of every box, (boxes, names), in the order that `_divisions` counts on."""
    spans = [np.array([(low, high) for low in range(num) for high in range(low, num)]) for num in num_cells]
    picks = np.stack(np.unravel_index(np.arange(np.prod([len(span) for span in spans])), [len(s) for s in spans]), 1)
    first = np.stack([span[picks[:, axis], 0] for axis, span in enumerate(spans)], 1)
    last = np.stack([span[picks[:, axis], 1] for axis, span in enumerate(spans)], 1)
    return first, last


def _divisions(grid: _Grid, most: int) -> list[list[int]]:
    """For 1 to `most` profiles, the boxes of the cheapest division of the whole grid by successive cuts.

    least[k][box] = min over cuts of the box into two, and over j, of least[j][one] + least[k - j][other]: every box is
    solved once for each k.
    """
    tables, strides = _span_numbers(grid.num_cells)
    whole = int(
        np.flatnonzero((grid.first == 0).all(axis=1) & (grid.last == np.array(grid.num_cells) - 1).all(axis=1))[0]
    )
    single = np.where(np.isfinite(grid.costs), grid.costs, 0).sum(axis=1)
    least, cuts = [single], [np.full((len(single), 3), -1)]
    for count in range(2, most + 1):
        values, choice = least[-1].copy(), np.full((len(single), 3), -1)
        for axis, cut in ((axis, cut) for axis, num in enumerate(grid.num_cells) for cut in range(num - 1)):
            boxes = np.flatnonzero((grid.first[:, axis] <= cut) & (cut < grid.last[:, axis]))
            low, high = grid.first[boxes, axis], grid.last[boxes, axis]
            one = boxes + (tables[axis][low, cut] - tables[axis][low, high]) * strides[axis]
            other = boxes + (tables[axis][cut + 1, high] - tables[axis][low, high]) * strides[axis]
            for part in range(1, count):
                found = least[part - 1][one] + least[count - part - 1][other]
                better = found < values[boxes]
                values[boxes[better]] = found[better]
                choice[boxes[better]] = (axis, cut, part)
        least.append(values)
        cuts.append(choice)

    def parts(box: int, count: int) -> list[int]:
        axis, cut, part = cuts[count - 1][box].tolist()
        if axis < 0:
            return [box] if count == 1 else parts(box, count - 1)
        low, high = grid.first[box, axis], grid.last[box, axis]
        table, stride = tables[axis], strides[axis]
        one = int(box + (table[low, cut] - table[low, high]) * stride)
        other = int(box + (table[cut + 1, high] - table[low, high]) * stride)
        return parts(one, part) + parts(other, count - part)

    return [parts(whole, count) for count in range(1, most + 1)]


def _span_numbers(num_cells: tuple[int, ...]) -> tuple[list[Ints], list[int]]:
    """For each axis (first, last) -> number of the span, and how far apart boxes with neighbouring spans are."""
    tables, totals = [], [num * (num + 1) // 2 for num in num_cells]
    for num in num_cells:
        table = np.zeros((num, num), np.int64)
        table[np.triu_indices(num)] = np.arange(num * (num + 1) // 2)
        tables.append(table)
    return tables, [int(np.prod(totals[axis + 1 :])) for axis in range(len(num_cells))]


def _assigned(grid: _Grid, boxes: Sequence[int]) -> tuple[Floats, Floats]:
    """(cells,) cost of each cell in the box of least volume that holds it, and that volume."""
    costs = np.full(grid.costs.shape[1], np.inf)
    volumes = np.full(grid.costs.shape[1], np.inf)
    for box in boxes:
        takes = np.isfinite(grid.costs[box]) & (grid.volumes[box] < volumes)
        costs[takes], volumes[takes] = grid.costs[box][takes], grid.volumes[box]
    return costs, volumes


def _total(grid: _Grid, boxes: Sequence[int]) -> float:
    return float(_assigned(grid, boxes)[0].sum())


def _best_addition(grid: _Grid, boxes: Sequence[int]) -> int:
    """The box that, added to `boxes`, makes the cells cheapest."""
    costs, volumes = _assigned(grid, boxes)
    takes = np.isfinite(grid.costs) & (grid.volumes[:, None] < volumes)
    return int(np.where(takes, grid.costs, costs).sum(axis=1).argmin())


def _best_pair(grid: _Grid) -> list[int]:
    """The best two boxes of all: one of them has to hold the largest sizes, and for each such box the best other is found."""
    holders = np.flatnonzero((grid.last == np.array(grid.num_cells) - 1).all(axis=1)).tolist()
    pairs = [[box, _best_addition(grid, [box])] for box in holders]
    return min(pairs, key=lambda pair: _total(grid, pair))


def _improved(grid: _Grid, boxes: Sequence[int]) -> list[int]:
    """`boxes` after replacing one at a time by the best other, until none helps."""
    found = list(boxes)
    total = _total(grid, found)
    for _ in range(_MAX_SWEEPS):
        before = total
        for place in range(len(found)):
            others = found[:place] + found[place + 1 :]
            trial = [*others, _best_addition(grid, others)]
            if (cost := _total(grid, trial)) < total * (1 - 1e-9):
                found, total = trial, cost
        if total == before:
            break
    return found
