"""The rule by which a dynamic batcher forms batches of requests, and what it makes of an engine whose latencies are known.

`trtforge.runtime.serve` follows the same rule with a real engine and the wall clock.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Cost = Callable[[int, int], float]
"""(first, end) -> milliseconds of a batch of the requests from `first` up to, and without, `end`."""
Cell = tuple[int, ...]
"""Index of a level, for each size."""

_STEPS = 15
_RATES = (0.01, 1e6)
_FIRST_STEP = 1.25
_ALWAYS_BUSY = 0.98
_GROWTH = 2.0
_MOST_LEVELS = 8
_MOST_REQUESTS = 200_000


class Batcher:
    """Forms batches of requests in the order of their arrival.

    A batch starts once no other is under way and it is full or its first request has waited for the window; it takes what has
    arrived by then. This is what Triton's dynamic batcher does with `max_queue_delay_microseconds` and one instance.
    Nothing that has not arrived yet decides.

    Attributes:
        arrivals_ms: of each request, ascending.
    """

    def __init__(self, arrivals_s: Array, weights: Array, *, window_ms: float, max_batch: int) -> None:
        """Takes the requests.

        Args:
            arrivals_s: seconds, ascending, (requests,), at least one.
            weights: each request's own batch size, 1 or more, (requests,). One above `max_batch` is a batch of its own.
            window_ms: how long the first request waits for others.
            max_batch: largest sum of weights in a batch.
        """
        self.arrivals_ms: list[float] = (np.asarray(arrivals_s, np.float64) * 1000).tolist()
        self._before: list[int] = [0, *np.cumsum(weights).tolist()]
        self._window_ms, self._max_batch = window_ms, max_batch

    def next(self, first: int) -> tuple[float, int]:
        """When the batch that begins with `first` may start, in ms, and the end of what fits into it."""
        room = self._before[first] + self._max_batch
        most = max(bisect_right(self._before, room) - 1, first + 1)
        if self._before[most] >= room:
            full_at = self.arrivals_ms[most - 1]
        else:  # with the request that is one too many
            full_at = self.arrivals_ms[most] if most < len(self.arrivals_ms) else np.inf
        return min(self.arrivals_ms[first] + self._window_ms, full_at), most

    def arrived(self, at_ms: float, most: int) -> int:
        """The end of what has arrived at a time, `most` at most."""
        return min(bisect_right(self.arrivals_ms, at_ms, hi=most), most)

    def weight(self, first: int, end: int) -> int:
        """Sum of the batch sizes of requests."""
        return self._before[end] - self._before[first]


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """A log as it was, or would have been, served.

    Attributes:
        latency_ms: of each request from arrival to answer, float64 (requests,).
        batch_sizes: of each batch, in order, in the requests' own batch sizes.
        busy: share of the time that a batch was under way, 0 to 1.
    """

    latency_ms: Array
    batch_sizes: tuple[int, ...]
    busy: float


def replay(batcher: Batcher, cost: Cost) -> Replay:
    """Serves requests by the batcher's rule, with known costs.

    Args:
        batcher: of the requests.
        cost: of a batch; infinity where it cannot be computed, and then nothing after it is.
    """
    num_requests = len(batcher.arrivals_ms)
    ends: list[tuple[int, float]] = []
    free_at, busy, first = 0.0, 0.0, 0
    while first < num_requests:
        ready_at, most = batcher.next(first)
        start = max(free_at, ready_at)
        end = batcher.arrived(start, most)
        spent = cost(first, end)
        if spent == np.inf:
            ends.append((num_requests, spent))
            return replayed(batcher, ends, 1.0)
        free_at = start + spent
        ends.append((end, free_at))
        busy += spent
        first = end
    return replayed(batcher, ends, busy / max(free_at - batcher.arrivals_ms[0], 1e-9))


def replayed(batcher: Batcher, ends: Sequence[tuple[int, float]], busy: float) -> Replay:
    """What came of batches, of which the end and the milliseconds at which they were done are known, in order."""
    bounds = [0, *(end for end, _ in ends)]
    done = np.repeat([at for _, at in ends], np.diff(bounds))
    sizes = tuple(batcher.weight(first, end) for first, end in itertools.pairwise(bounds))
    return Replay(np.asarray(done - np.array(batcher.arrivals_ms)), sizes, min(busy, 1.0))


def keeps_up(played: Replay) -> bool:
    """Whether requests were served as fast as they came.

    They were not where a batch was always under way and latencies grew: the median of the last fifth of the requests is more
    than twice that of the first. Batches one after the other alone are no overload, since they grow with the rate.
    """
    fifth = max(len(played.latency_ms) // 5, 1)
    first, last = np.median(played.latency_ms[:fifth]), np.median(played.latency_ms[-fifth:])
    return played.busy <= _ALWAYS_BUSY or bool(last <= _GROWTH * first)


def paced(arrivals_s: Array, speed: float, seconds: float) -> tuple[Array, Array]:
    """A log played faster or slower for some time: cut where it is longer, and begun anew where it is shorter.

    Args:
        arrivals_s: seconds, ascending from 0, (requests,).
        speed: 2 is twice as fast.
        seconds: how long; 200,000 requests at most.

    Returns:
        Which requests of the log come, and at which second, (played,) each.
    """
    count = len(arrivals_s)
    gap = max(float(arrivals_s[-1]), 1e-9) / max(count - 1, 1)
    period = (float(arrivals_s[-1]) + gap) / speed
    rounds = min(int(np.ceil(seconds / period)), _MOST_REQUESTS // count + 1)
    which = np.tile(np.arange(count), rounds)
    times = (np.arange(rounds)[:, None] * period + arrivals_s / speed).reshape(-1)
    keep = min(max(int(np.searchsorted(times, seconds, side="right")), 1), _MOST_REQUESTS)
    return which[:keep], times[:keep]


def highest_rate(holds: Callable[[float], bool]) -> float:
    """The highest rate from 0.01 to 1,000,000 a second that holds, by bisection to 0.1 %; 0 where none does."""
    low, high = _RATES
    if not holds(low):
        return 0.0
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def confirmed_rate(proposed: float, holds: Callable[[float], bool], tries: int) -> float:
    """The highest rate that was seen to hold, near one that was computed; 0 where none did.

    Steps of 25 % away from the proposed rate, until one holds and one does not, then halves; each a try.

    Args:
        proposed: above 0.
        holds: a real run.
        tries: how many runs.
    """
    low, high = 0.0, float("inf")
    rate = proposed
    for _ in range(tries):
        if holds(rate):
            low = rate
        else:
            high = rate
        if np.isinf(high):
            rate = low * _FIRST_STEP
        elif low == 0.0:
            rate = high / _FIRST_STEP
        else:
            rate = (low * high) ** 0.5
    return low


def levels(sizes: Array, batch: int, max_batch: int, most: Array) -> list[Array]:
    """The sizes to measure at, so that a batch of a log that fits a profile can be padded to one that fits it too.

    Args:
        sizes: (requests, names), of a log.
        batch: column of the batch size, of which powers of 2 are taken.
        max_batch: largest batch that is formed.
        most: (profiles, names), the largest sizes of each profile.

    Returns:
        By column, ascending: what the profiles end at, as far as the log reaches; powers of 2 of the batch; of other sizes
        at most 8 more, as many requests between each two.
    """
    found = [_quantiles(column) for column in sizes.T]
    top = max(int(max_batch), int(sizes[:, batch].max()))
    found[batch] = np.array([*(1 << power for power in range(top.bit_length())), top])
    return [np.union1d(level, ends[ends < level.max()]) for level, ends in zip(found, most.T, strict=True)]


def _quantiles(column: Array) -> Array:
    values = np.unique(column)
    if len(values) <= _MOST_LEVELS:
        return values
    return np.unique(np.quantile(column, np.arange(1, _MOST_LEVELS + 1) / _MOST_LEVELS, method="higher"))


def padded(sizes: Array, batch: int, levels_of: Sequence[Array]) -> Callable[[int, int], Cell]:
    """To what a batch of the requests from `first` up to, and without, `end` is padded: the next levels.

    Batch sizes add up; of others the largest counts.

    Args:
        sizes: (requests, names).
        batch: column of the batch size.
        levels_of: by column, ascending.
    """
    places = [
        np.searchsorted(level, column).tolist() for level, column in zip(levels_of, np.transpose(sizes), strict=True)
    ]
    before: list[int] = [0, *np.cumsum(sizes[:, batch]).tolist()]
    batches: list[int] = levels_of[batch].tolist()

    def cell(first: int, end: int) -> Cell:
        found = [max(column[first:end]) for column in places]
        found[batch] = bisect_left(batches, before[end] - before[first])
        return tuple(found)

    return cell
