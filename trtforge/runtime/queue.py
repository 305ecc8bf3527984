"""What a server with a dynamic batcher would make of an engine: requests wait for a batch, batches wait for the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Cost = Callable[[int, int], float]
"""(first, end) -> milliseconds of a batch of the requests from `first` up to, and without, `end`."""

_STEPS = 24
_MOST_LEVELS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """A log as it would have been served.

    Attributes:
        latency_ms: of each request from arrival to answer, float64 (requests,).
        batch_sizes: of each batch, in order, in the requests' own batch sizes.
        busy: share of the time that the GPU computed, 0 to 1.
    """

    latency_ms: Array
    batch_sizes: tuple[int, ...]
    busy: float


def replay(arrivals_s: Array, weights: Array, cost: Cost, *, window_ms: float, max_batch: int) -> Replay:
    """Serves requests in the order of their arrival.

    A batch starts once the GPU is free and it is full or its first request has waited for `window_ms`; it takes what has
    arrived by then. This is what Triton's dynamic batcher does with `max_queue_delay_microseconds` and one instance.

    Args:
        arrivals_s: seconds, ascending, (requests,), at least one.
        weights: each request's own batch size, 1 or more, (requests,). One above `max_batch` is a batch of its own.
        cost: of a batch; infinity where it cannot be computed, and then nothing after it is.
        window_ms: how long the first request waits for others.
        max_batch: largest sum of weights in a batch.
    """
    arrivals = np.asarray(arrivals_s, np.float64) * 1000
    before = np.concatenate([[0], np.cumsum(weights)])
    latency = np.empty_like(arrivals)
    sizes: list[int] = []
    free_at, busy, first = 0.0, 0.0, 0
    while first < len(arrivals):
        room = before[first] + max_batch
        most = max(int(np.searchsorted(before, room, side="right")) - 1, first + 1)
        start = max(free_at, min(arrivals[first] + window_ms, _full_at(arrivals, most, is_full=before[most] >= room)))
        end = min(int(np.searchsorted(arrivals, start, side="right")), most)
        spent = cost(first, end)
        if np.isinf(spent):
            latency[first:] = np.inf
            return Replay(latency, tuple(sizes), 1.0)
        free_at = start + spent
        latency[first:end] = free_at - arrivals[first:end]
        sizes.append(int(before[end] - before[first]))
        busy += spent
        first = end
    return Replay(latency, tuple(sizes), min(busy / max(free_at - arrivals[0], 1e-9), 1.0))


def _full_at(arrivals: Array, most: int, *, is_full: bool) -> float:
    """When a batch that can take the requests before `most` is full: with its last one, or with one too many."""
    if is_full:
        return float(arrivals[most - 1])
    return float(arrivals[most]) if most < len(arrivals) else np.inf


def most_qps(
    arrivals_s: Array,
    weights: Array,
    cost: Cost,
    *,
    window_ms: float,
    max_batch: int,
    limit_ms: float,
    percentile: float = 99.0,
) -> float:
    """Requests a second at which the log's pattern still holds the limit: the log is played faster or slower.

    Returns:
        The rate, by bisection to 1 %; 0 where even a log played a thousand times slower misses the limit.
    """
    arrivals = np.asarray(arrivals_s, np.float64)
    arrivals = arrivals - arrivals[0]
    span = max(float(arrivals[-1]), 1e-9)

    def holds(speed: float) -> bool:
        played = replay(arrivals / speed, weights, cost, window_ms=window_ms, max_batch=max_batch)
        is_served = bool(np.isfinite(played.latency_ms[-1]))
        return is_served and float(np.percentile(played.latency_ms, percentile)) <= limit_ms

    low, high = 1e-3, 1e4
    if not holds(low):
        return 0.0
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return len(arrivals) / span * low


def levels(sizes: Array, batch: int, max_batch: int) -> list[Array]:
    """The sizes to measure at, so that every batch of a log can be padded to one of them.

    Args:
        sizes: (requests, names), of a log.
        batch: column of the batch size, of which powers of 2 are taken.
        max_batch: largest batch that is formed.

    Returns:
        By column, ascending; of other sizes than the batch at most 8, as many requests between each two.
    """
    found = [_quantiles(column) for column in sizes.T]
    top = max(int(max_batch), int(sizes[:, batch].max()))
    found[batch] = np.array(sorted({*(1 << power for power in range(top.bit_length())), top}))
    return found


def _quantiles(column: Array) -> Array:
    values = np.unique(column)
    if len(values) <= _MOST_LEVELS:
        return values
    return np.unique(np.quantile(column, np.arange(1, _MOST_LEVELS + 1) / _MOST_LEVELS, method="higher"))


def padded_cost(sizes: Array, batch: int, levels_of: Sequence[Array], grid_ms: Array) -> Cost:
    """Cost of batches that are padded to the next measured size: batch sizes add up, of others the largest counts.

    Args:
        sizes: (requests, names).
        batch: column of the batch size.
        levels_of: by column, ascending.
        grid_ms: measured milliseconds, one axis for each column.
    """

    def cost(first: int, end: int) -> float:
        needed = sizes[first:end].max(axis=0)
        needed[batch] = sizes[first:end, batch].sum()
        at = tuple(int(np.searchsorted(level, size)) for level, size in zip(levels_of, needed, strict=True))
        return float(grid_ms[at])

    return cost
