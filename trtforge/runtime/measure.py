"""Measures an engine with trtexec's definitions.

latency = copy in + compute + copy out, each between two events; enqueue = host time until the GPU has the work;
throughput = queries / time from the first query's start to the last one's end, after the warm-up. Copies of a query
overlap the compute of the one before, in streams of their own. Beside these, response = the host's own time from before
a query is started until its outputs are on the host.

Source: TensorRT, samples/common/sampleInference.cpp and sampleReporting.cpp.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtforge.cuda import Cuda
from trtforge.errors import CapabilityError
from trtforge.runtime.lane import Array, Lane
from trtforge.runtime.session import EngineSession
from trtforge.types import Profile

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
    """A query that is under way, with the host's time to start it.

    Attributes:
        into, out: streams in which it is copied.
        events: around copy in, compute and copy out, in this order.
    """

    lane: Lane
    graph: Any
    into: int
    out: int
    events: Sequence[Any]
    began: float = 0.0
    enqueue_ms: float = 0.0
    is_pending: bool = False


def lanes_of(session: EngineSession, profile: Profile, which: Hashable, switches: Switches) -> tuple[Lane, ...]:
    """What one stream of `measure` needs: a lane for each query that is under way, whose copies overlap.

    Without copies, or one query at a time, one lane does.

    Raises:
        CapabilityError: the GPU has no memory for it.
    """
    first = session.lane(profile, which)
    if switches.one_at_a_time:
        return (first,)
    if not switches.transfers:
        return (first,) * _DEPTH
    return (first, *(session.lane(profile, (which, number), beside=first) for number in range(1, _DEPTH)))


def measure(lanes: Sequence[Sequence[Lane]], cuda: Cuda, feeds: Mapping[str, Array], switches: Switches) -> Timings:
    """Runs the same inputs again and again, `switches.streams` queries at once.

    Args:
        lanes: `lanes_of` each stream, all in the profile that the inputs need.
        cuda: of the lanes.
        feeds: input name -> array.
        switches: how.

    Raises:
        CapabilityError: an input is not taken, or the GPU stopped.
    """
    by_turns = [lane for place in zip(*lanes, strict=True) for lane in place]
    different = list(dict.fromkeys(by_turns))
    for lane in different:
        lane.prepare(feeds)
        lane.run()
    graphs = {lane: lane.graph(transfers=False) if switches.cuda_graph else None for lane in different}
    with ExitStack() as made:
        queries = []
        for lane in by_turns:
            into, out = _copy_streams(lane, cuda, switches, made)
            events = _events(cuda, switches, made, in_one_stream=into == out)
            queries.append(_Query(lane, graphs[lane], into, out, events))
        return _measured(queries, cuda, switches)


def _copy_streams(lane: Lane, cuda: Cuda, switches: Switches, made: ExitStack) -> tuple[int, int]:
    if switches.one_at_a_time or not switches.transfers:
        return lane.stream, lane.stream
    streams = []
    for _ in range(2):
        streams.append(cuda.stream())
        made.callback(_free, cuda.free_stream, streams[-1])
    return streams[0], streams[1]


def _events(cuda: Cuda, switches: Switches, made: ExitStack, *, in_one_stream: bool) -> list[Any]:
    """Before and after copy in, compute and copy out; in one stream, each part begins where the last one ends."""
    events: list[Any] = []
    for _ in range(4 if in_one_stream else 6):
        events.append(cuda.event(spin=switches.spin_wait))
        made.callback(_free, cuda.free_event, events[-1])
    return [events[place] for place in (0, 1, 1, 2, 2, 3)] if in_one_stream else events


def _free(free: Callable[[Any], None], thing: Any) -> None:
    with suppress(CapabilityError):  # what stopped the GPU was told to whoever waited for it
        free(thing)


def _measured(queries: Sequence[_Query], cuda: Cuda, switches: Switches) -> Timings:
    rows: list[tuple[float, ...]] = []
    begin = time.perf_counter()
    warm = begin + switches.warm_up_ms / 1000
    first, last = None, begin
    while True:
        for query in queries:
            if query.is_pending:
                last = _finish(query, cuda, rows, warm)
            now = time.perf_counter()
            if first is not None and now - first >= switches.duration_s and len(rows) >= switches.iterations:
                continue
            first = now if first is None and now >= warm else first
            query.began = now
            _start(query, cuda, transfers=switches.transfers)
        if not any(query.is_pending for query in queries):
            break
    return timings_of(np.array(rows, np.float64).reshape(-1, 5), last - (first or begin))


def _start(query: _Query, cuda: Cuda, *, transfers: bool) -> None:
    lane = query.lane
    copy, copied, start, computed, copy_back, end = query.events
    cuda.record(copy, query.into)
    if transfers:
        lane.copy_in(query.into)
    cuda.record(copied, query.into)
    if query.into != lane.stream:
        cuda.hold(lane.stream, copied)
        cuda.record(start, lane.stream)
    before = time.perf_counter()
    if query.graph is None:
        lane.enqueue()
    else:
        cuda.launch(query.graph, lane.stream)
    query.enqueue_ms = (time.perf_counter() - before) * 1000
    cuda.record(computed, lane.stream)
    if query.out != lane.stream:
        cuda.hold(query.out, computed)
        cuda.record(copy_back, query.out)
    if transfers:
        lane.copy_out(query.out)
    cuda.record(end, query.out)
    query.is_pending = True


def _finish(query: _Query, cuda: Cuda, rows: list[tuple[float, ...]], warm: float) -> float:
    """Waits for a query and notes its times, unless it began during the warm-up. Returns when it ended."""
    copy, copied, start, computed, copy_back, end = query.events
    cuda.wait_for(end)
    ended = time.perf_counter()
    query.is_pending = False
    if query.began >= warm:
        parts = (cuda.elapsed_ms(*pair) for pair in ((copy, copied), (start, computed), (copy_back, end)))
        rows.append((*parts, query.enqueue_ms, (ended - query.began) * 1000))
    return ended
