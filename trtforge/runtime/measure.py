"""Measures an engine with trtexec's definitions.

latency = copy in + compute + copy out, between events in one stream; enqueue = host time until the GPU has the work;
throughput = queries / time from the first query's start to the last one's end, after the warm-up. Beside these,
response = the host's own time from before a query is started until its outputs are on the host.

Source: TensorRT, samples/common/sampleInference.cpp and sampleReporting.cpp.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtforge.cuda import Cuda
from trtforge.errors import CapabilityError
from trtforge.runtime.lane import Array, Lane

PERCENTILES = (50.0, 90.0, 95.0, 99.0)
_UNSTABLE = 0.025
"""Coefficient of variation above which figures are unstable. Source: trtexec."""
_DEPTH = 2
"""Queries of one stream that are under way, so that the GPU does not wait for the host.

Source: sampleInference.cpp, Iteration: 1 + overlap, and overlap is off with --exposeDMA.
"""
_ENQUEUE_BOUND = 0.8
"""Share of compute time above which the host holds the GPU up. Source: trtexec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """How to measure.

    Attributes:
        cuda_graph: replay the engine as a recorded CUDA graph.
        transfers: copy inputs and outputs in each query.
        spin_wait: keep a processor busy while waiting, which reacts sooner.
        streams: queries at once, each in a context of its own.
        one_at_a_time: a stream's next query starts once the last one has ended, so that starting it does not hide behind
            the compute before it: what a server sees that has one request. trtexec: --exposeDMA.
        warm_up_ms: queries that begin sooner are left out.
        duration_s, iterations: measured for both, whichever takes longer.
    """

    cuda_graph: bool = False
    transfers: bool = True
    spin_wait: bool = False
    streams: int = 1
    one_at_a_time: bool = False
    warm_up_ms: float = 200.0
    duration_s: float = 3.0
    iterations: int = 10


@dataclass(frozen=True, slots=True, eq=False)
class Timings:
    """Milliseconds of each query, in the order in which they began: float64 (queries,) each.

    Attributes:
        wall_s: from the first query's start to the last one's end.
    """

    copy_in: Array
    compute: Array
    copy_out: Array
    enqueue: Array
    response: Array
    wall_s: float

    @property
    def latency(self) -> Array:
        """Copy in + compute + copy out, (queries,)."""
        return np.asarray(self.copy_in + self.compute + self.copy_out)

    @property
    def throughput_qps(self) -> float:
        """Queries a second; one batch is one query."""
        return len(self.compute) / self.wall_s


def timings_of(rows: Array, wall_s: float) -> Timings:
    """Of (queries, 5): copy in, compute, copy out, enqueue, response."""
    copy_in, compute, copy_out, enqueue, response = rows.T
    return Timings(copy_in, compute, copy_out, enqueue, response, wall_s)


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one kind of time, in milliseconds.

    Attributes:
        percentiles: percent -> milliseconds, for each of `PERCENTILES`.
        variation: standard deviation over mean, 0 or more.
    """

    mean: float
    low: float
    high: float
    percentiles: dict[float, float]
    variation: float


def spread(values: Array) -> Spread:
    """Of milliseconds (queries,), at least one."""
    ordered = np.sort(values)
    mean = float(ordered.mean())
    return Spread(
        mean,
        float(ordered[0]),
        float(ordered[-1]),
        {share: percentile(ordered, share) for share in PERCENTILES},
        float(ordered.std() / mean) if mean else 0.0,
    )


def percentile(ordered: Array, share: float) -> float:
    """A percentile by trtexec's rule: the value at n - 1 - int((1 - share / 100) * n) of the sorted times, the median by halves.

    Source: sampleReporting.cpp, findPercentile and findMedian.
    """
    count = len(ordered)
    if share == 50.0:  # noqa: PLR2004 - the median has its own rule
        return float((ordered[(count - 1) // 2] + ordered[count // 2]) / 2)
    excluded = int((1 - np.float32(share) / np.float32(100)) * np.float32(count))  # trtexec counts in float32
    return float(ordered[max(count - 1 - excluded, 0)])


def remarks(timings: Timings, switches: Switches) -> tuple[str, ...]:
    """What makes figures less sure than they look, one sentence each."""
    found = []
    compute = spread(timings.compute)
    if compute.variation > _UNSTABLE:
        text = f"compute time varies by {compute.variation:.1%}; lock the clocks: nvidia-smi --lock-gpu-clocks"
        found.append(text)
    median = compute.percentiles[50.0]
    if not switches.cuda_graph and np.median(timings.enqueue) > _ENQUEUE_BOUND * median:
        found.append("the host takes as long to start a query as the GPU to run it; a CUDA graph may help")
    if switches.transfers and max(np.median(timings.copy_in), np.median(timings.copy_out)) >= median:
        found.append("copies take as long as the compute")
    if switches.streams > 1:
        found.append("several streams share the GPU, so that latency is not that of a query alone")
    return tuple(found)


@dataclass(slots=True)
class _Query:
    """Events of a query that is under way, and the host's time to start it."""

    start: Any
    copied_in: Any
    computed: Any
    end: Any
    began: float = 0.0
    enqueue_ms: float = 0.0
    is_pending: bool = False


def measure(lanes: Sequence[Lane], cuda: Cuda, feeds: Mapping[str, Array], switches: Switches) -> Timings:
    """Runs the same inputs again and again, `switches.streams` queries at once.

    Args:
        lanes: one for each stream, all in the profile that the inputs need.
        cuda: of the lanes.
        feeds: input name -> array.
        switches: how.

    Raises:
        CapabilityError: an input is not taken, or the GPU stopped.
    """
    for lane in lanes:
        lane.prepare(feeds)
        lane.run()
    graphs = [lane.graph(transfers=False) if switches.cuda_graph else None for lane in lanes]
    pairs = list(zip(lanes, graphs, strict=True)) * (1 if switches.one_at_a_time else _DEPTH)
    events: list[Any] = []
    try:
        for _ in range(4 * len(pairs)):
            events.append(cuda.event(spin=switches.spin_wait))  # noqa: PERF401 - those made before one fails count too
        slots = [(*pair, _Query(*events[4 * place : 4 * place + 4])) for place, pair in enumerate(pairs)]
        return _measured(slots, cuda, switches)
    finally:
        for event in events:
            with suppress(CapabilityError):  # what stopped the GPU was told to whoever waited for it
                cuda.free_event(event)


def _measured(slots: Sequence[tuple[Lane, Any, _Query]], cuda: Cuda, switches: Switches) -> Timings:
    rows: list[tuple[float, ...]] = []
    begin = time.perf_counter()
    warm = begin + switches.warm_up_ms / 1000
    first, last = None, begin
    while True:
        for lane, graph, query in slots:
            if query.is_pending:
                last = _finish(query, cuda, rows, warm)
            now = time.perf_counter()
            if first is not None and now - first >= switches.duration_s and len(rows) >= switches.iterations:
                continue
            first = now if first is None and now >= warm else first
            query.began = now
            _start(lane, graph, query, cuda, switches)
        if not any(query.is_pending for _, _, query in slots):
            break
    return timings_of(np.array(rows, np.float64).reshape(-1, 5), last - (first or begin))


def _start(lane: Lane, graph: Any, query: _Query, cuda: Cuda, switches: Switches) -> None:
    cuda.record(query.start, lane.stream)
    if switches.transfers:
        lane.copy_in()
    cuda.record(query.copied_in, lane.stream)
    before = time.perf_counter()
    if graph is None:
        lane.enqueue()
    else:
        cuda.launch(graph, lane.stream)
    query.enqueue_ms = (time.perf_counter() - before) * 1000
    cuda.record(query.computed, lane.stream)
    if switches.transfers:
        lane.copy_out()
    cuda.record(query.end, lane.stream)
    query.is_pending = True


def _finish(query: _Query, cuda: Cuda, rows: list[tuple[float, ...]], warm: float) -> float:
    """Waits for a query and notes its times, unless it began during the warm-up. Returns when it ended."""
    cuda.wait_for(query.end)
    ended = time.perf_counter()
    query.is_pending = False
    if query.began >= warm:
        rows.append(
            (
                cuda.elapsed_ms(query.start, query.copied_in),
                cuda.elapsed_ms(query.copied_in, query.computed),
                cuda.elapsed_ms(query.computed, query.end),
                query.enqueue_ms,
                (ended - query.began) * 1000,
            )
        )
    return ended
