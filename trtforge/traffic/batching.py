"""The batches that a server's queue makes of single requests."""

from __future__ import annotations

import numpy as np

from trtforge.traffic.histogram import Floats, Ints, Traffic, distinct

_BLOCK = 1 << 18


def formed_batches(traffic: Traffic, batch: str, window_seconds: float, max_batch: int) -> Traffic:
    """What the model sees where a server queues requests: batches in place of requests.

    The first request opens a window; a batch leaves when the window closes, or before the request that would make it
    larger than `max_batch`, which then opens the next. Its batch size is the sum of its requests' own, every other size
    their largest, since the server pads to it. A request above `max_batch` is a batch of its own.

    Source: the delayed batches of Triton's dynamic batcher,
    https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/user_guide/batcher.html.

    Args:
        traffic: with arrivals.
        batch: name of the batch size, one of `traffic.names`.
        window_seconds: longest wait of the first request of a batch, 0 or more.
        max_batch: 1 or more.

    Returns:
        Traffic of batches, in which `counts` are batches and misfits are as before.
    """
    arrivals = traffic.arrivals
    assert arrivals is not None  # noqa: S101 - asked of the caller
    if not arrivals.seconds.size:
        return traffic
    at = traffic.names.index(batch)
    parts = []
    start = 0
    while start < len(arrivals.seconds):
        # A batch holds max_batch requests at most, so this many suffice for every one that starts in the block.
        block = slice(start, start + _BLOCK + max_batch)
        sizes = traffic.sizes[arrivals.shapes[block]]
        starts, length = _starts(arrivals.seconds[block], sizes[:, at], window_seconds, max_batch)
        formed = np.maximum.reduceat(sizes[:length], starts, axis=0)
        formed[:, at] = np.add.reduceat(sizes[:length, at], starts)
        parts.append(distinct(formed, np.ones(len(formed), np.int64)))
        start += length
    found, counts = distinct(np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]))
    return Traffic(traffic.names, found, counts, traffic.misfits)


def _starts(seconds: Floats, own: Ints, window_seconds: float, max_batch: int) -> tuple[Ints, int]:
    """Index of the first request of each batch that starts in the block, and how many requests they hold together."""
    before = np.concatenate([[0], np.cumsum(own)])  # sum of the sizes of all requests before each
    by_time = np.searchsorted(seconds, seconds + window_seconds, side="right")
    by_size = np.searchsorted(before, before[:-1] + max_batch, side="right") - 1
    following = np.maximum(np.minimum(by_time, by_size), np.arange(1, len(own) + 1)).tolist()
    starts = []
    start = 0
    # Where a batch starts depends on the one before it; only this walk is a loop.
    while start < min(_BLOCK, len(own)):
        starts.append(start)
        start = following[start]
    return np.array(starts, np.int64), start
