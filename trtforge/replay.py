"""A recorded log of arrivals, served by an engine in real time behind a dynamic batcher."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trtforge.errors import CommandLineError, shown_path
from trtforge.events import Event, Report
from trtforge.prometheus import Gauge
from trtforge.release.gates import sizes_text
from trtforge.runtime.lane import Array
from trtforge.runtime.measure import Switches
from trtforge.runtime.queue import (
    Batcher,
    Cell,
    Replay,
    confirmed_rate,
    highest_rate,
    keeps_up,
    levels,
    paced,
    padded,
    replay,
)
from trtforge.runtime.serve import LATE_MS, Served, Server, serve
from trtforge.runtime.session import EngineSession
from trtforge.runtime.sizes import layout
from trtforge.traffic.coverage import assignment, boxes_of
from trtforge.traffic.layout import Layout, Sizes, is_taken, profile_sizes
from trtforge.traffic.read import read_traffic
from trtforge.types import Profile

_SECONDS_A_SIZE = 0.1
_LEAST_RUNS = 10
_CONFIRM_SECONDS = 3.0
_CONFIRM_RUNS = 6
_LATE_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Play:
    """The log once.

    Attributes:
        latency_ms: percentile -> milliseconds from arrival to outputs on the host.
        mean_batch: mean batch size.
        busy: share of the time that a batch was under way.
    """

    latency_ms: dict[float, float]
    mean_batch: float
    busy: float


@dataclass(frozen=True, slots=True)
class RateLimit:
    """The highest rate, in requests a second, at which 3 seconds of the log's pattern hold a p99; 0 where none does.

    Attributes:
        limit_ms: of the p99.
        qps: that a real run held.
        simulated_qps: that the simulation proposes.
    """

    limit_ms: float
    qps: float
    simulated_qps: float


@dataclass(frozen=True, slots=True)
class ReplayFigures:
    """A log of single requests, as this process with one engine and a dynamic batcher served it.

    Attributes:
        seconds: from the first request to the last one's arrival.
        log_qps: requests a second; 0 where all come at one time.
        window_ms, max_batch: how batches were formed.
        measured: what the engine did.
        simulated: by the same rule, with the median time of each size instead of the engine.
        gpu_busy: share of the time that the GPU copied or computed.
        host_ms: mean time of a batch besides.
        late_share: share of the batches that this process began late.
        num_sizes: sizes that the engine was made ready for; batches are padded to these.
        has_own_contexts: whether each of them has an execution context of its own.
    """

    identifier: str
    requests: int
    seconds: float
    log_qps: float
    window_ms: float
    max_batch: int
    measured: Play
    simulated: Play
    gpu_busy: float
    host_ms: float
    late_share: float
    limit: RateLimit | None
    num_sizes: int
    has_own_contexts: bool
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """The part of a log that is served, and how batches are formed of it.

    Attributes:
        log: the file.
        arrivals_s: seconds from 0, ascending, float64 (requests,).
        sizes: int64 (requests, names), of the engine's open sizes.
        batch: which of the names is the batch size.
        window_ms: how long the first request of a batch waits for others.
        max_batch: largest batch that is formed.
        remarks: what was left out, one sentence each.
    """

    log: Path
    arrivals_s: Array
    sizes: Array
    batch: int
    window_ms: float
    max_batch: int
    remarks: tuple[str, ...]

    @property
    def qps(self) -> float:
        """Requests a second; 0 where all come at one time."""
        last = float(self.arrivals_s[-1])
        return (len(self.arrivals_s) - 1) / last if last else 0.0

    def at_rate(self, qps: float) -> tuple[Batcher, Array]:
        """For 3 seconds, with the log's pattern at another rate; and the sizes of what comes."""
        which, times = paced(self.arrivals_s, qps / self.qps, _CONFIRM_SECONDS)
        return self._batcher(times, self.sizes[which]), self.sizes[which]

    def as_logged(self) -> tuple[Batcher, Array]:
        """For the log as it is; and the sizes of what comes."""
        return self._batcher(self.arrivals_s, self.sizes), self.sizes

    def _batcher(self, arrivals: Array, sizes: Array) -> Batcher:
        return Batcher(arrivals, sizes[:, self.batch], window_ms=self.window_ms, max_batch=self.max_batch)


def read_requests(
    session: EngineSession, log: Path, *, window_ms: float, max_batch: int, seconds: float, limit_ms: float | None
) -> Requests:
    """The requests of a log that a profile of the engine takes.

    Args:
        session: the engine.
        log: of single requests with time stamps, as `trtforge profile` reads it.
        window_ms: how long the first request of a batch waits for others.
        max_batch: largest batch that is formed.
        seconds: a longer log is cut.
        limit_ms: of the p99 for which the highest rate will be sought, None where it will not.

    Raises:
        CommandLineError: the engine has no batch axis, no profile has room for `max_batch`, no request fits one, or
            there is a limit and no rate.
        SpecError, SeveralErrors: the log cannot be counted.
    """
    name, known = session.artifact.identifier, layout(session.artifact.inputs)
    if known.batch is None:
        raise CommandLineError(f"--replay: {name} has no open batch axis", next_step="leave --replay out")
    most = max(profile_sizes(known, profile, "max")[known.batch] for profile in session.profiles)
    if max_batch > most:
        raise CommandLineError(
            f"--max-batch: found {max_batch}, and the profiles of {name} end at a batch of {most}",
            next_step=f"--max-batch {most}",
        )
    traffic = read_traffic(log, known, with_arrivals=True)
    assert traffic.arrivals is not None  # noqa: S101 - they were asked for
    served = assignment(traffic.sizes, boxes_of(session.profiles, known), known)[traffic.arrivals.shapes] >= 0
    if not served.any():
        raise CommandLineError(
            f"--replay: no profile of {name} takes any of the {traffic.num_requests} requests of {shown_path(log)}",
            next_step=f"trtforge profile {shown_path(log)} --against MANIFEST  # shows what the profiles cover",
        )
    remarks = []
    if left_out := traffic.num_requests - int(served.sum()):
        remarks.append(f"{left_out} of {traffic.num_requests} requests of the log fit no profile, and were left out")
    arrivals, places = traffic.arrivals.seconds[served], traffic.arrivals.shapes[served]
    arrivals = arrivals - arrivals[0]
    keep = max(int(np.searchsorted(arrivals, seconds, side="right")), 1)
    if keep < len(arrivals):
        remarks.append(
            f"the log lasts {arrivals[-1]:.1f} s; served were {keep} of {len(arrivals)} requests, those of its first "
            f"{seconds:g} s (--replay-seconds)"
        )
    if limit_ms is not None and not arrivals[keep - 1]:
        raise CommandLineError(
            f"--limit-ms: what is served of {shown_path(log)} comes at one time, which has no rate",
            next_step="leave --limit-ms out",
        )
    batch = known.names.index(known.batch)
    sizes = traffic.sizes[places[:keep]]
    return Requests(log, arrivals[:keep], sizes, batch, window_ms, max_batch, tuple(remarks))


def serve_log(
    session: EngineSession, requests: Requests, switches: Switches, report: Report, *, limit_ms: float | None
) -> ReplayFigures:
    """Serves requests as they arrived, by the wall clock.

    Batches are formed by the rule of `trtforge.runtime.queue` and padded to sizes that the engine was made ready for.

    Args:
        session: the engine.
        requests: of `read_requests`, for this engine.
        switches: whether with CUDA graphs, and whether to spin.
        report: told what happens.
        limit_ms: of the p99 for which the highest rate is sought.

    Raises:
        CommandLineError: a batch lies in no profile.
        CapabilityError: the GPU has no memory for it, or stopped.
    """
    known = layout(session.artifact.inputs)
    most = np.array([list(profile_sizes(known, profile, "max").values()) for profile in session.profiles])
    steps = levels(requests.sizes, requests.batch, requests.max_batch, most)
    cells = _cells(known, session.profiles, steps)
    with closing(Server(session, cells, with_graph=switches.cuda_graph, spin=switches.spin_wait)) as server:
        costs = {cell: _cost_ms(server, cell, sizes, report) for cell, sizes in cells.items()}
        ready = _Ready(server, costs, steps, requests)
        expected = ready.simulate(*requests.as_logged())
        if np.isinf(expected.latency_ms[-1]):
            raise _in_no_profile(requests.max_batch)
        report(Event("step", "bench", f"serving {len(requests.arrivals_s)} requests of {requests.log.name}"))
        found = ready.serve(*requests.as_logged())
        limit = None if limit_ms is None else _limit(ready, limit_ms, report)
    return ReplayFigures(
        session.artifact.identifier,
        len(requests.arrivals_s),
        float(requests.arrivals_s[-1]),
        requests.qps,
        requests.window_ms,
        requests.max_batch,
        _play(found.replay),
        _play(expected),
        found.gpu_busy,
        found.host_ms,
        found.late_share,
        limit,
        len(cells),
        server.has_own_contexts,
        (*requests.remarks, *_remarks(found), *_limit_remarks(limit, requests.window_ms)),
    )


def gauges(figures: ReplayFigures, gpu: str, *, cuda_graph: bool) -> Iterator[Gauge]:
    """The figures for Prometheus."""
    labels = {"engine": figures.identifier, "gpu": gpu, "cuda_graph": str(cuda_graph).lower()}
    for share, latency in figures.measured.latency_ms.items():
        yield Gauge(f"trtforge_replay_latency_p{share:g}_seconds", labels, latency / 1000)
    yield Gauge("trtforge_replay_gpu_busy_ratio", labels, figures.gpu_busy)
    if figures.limit:
        yield Gauge("trtforge_replay_limit_queries_per_second", labels, figures.limit.qps)


@dataclass(frozen=True, slots=True)
class _Ready:
    """An engine that is ready for the cells of `costs`, in milliseconds each, which are sizes of `steps`."""

    server: Server
    costs: Mapping[Cell, float]
    steps: list[Array]
    requests: Requests

    def simulate(self, batcher: Batcher, sizes: Array) -> Replay:
        pad = padded(sizes, self.requests.batch, self.steps)
        return replay(batcher, lambda first, end: self.costs.get(pad(first, end), np.inf))

    def serve(self, batcher: Batcher, sizes: Array) -> Served:
        pad = padded(sizes, self.requests.batch, self.steps)

        def run(first: int, end: int) -> float:
            cell = pad(first, end)
            if cell not in self.costs:
                raise _in_no_profile(self.requests.max_batch)
            return self.server.run(cell)

        return serve(batcher, run)


def _cells(known: Layout, profiles: Sequence[Profile], steps: list[Array]) -> dict[Cell, Sizes]:
    """All combinations of levels that lie inside a profile."""
    cells: dict[Cell, Sizes] = {}
    for places in itertools.product(*(range(len(step)) for step in steps)):
        sizes = {name: int(step[place]) for name, step, place in zip(known.names, steps, places, strict=True)}
        if is_taken(known, sizes, profiles):
            cells[places] = sizes
    return cells


def _cost_ms(server: Server, cell: Cell, sizes: Sizes, report: Report) -> float:
    """Median milliseconds from inputs to outputs on the host, after the first runs, which make everything ready."""
    report(Event("step", "bench", sizes_text(sizes)))
    begin = time.perf_counter()
    times: list[float] = []
    while len(times) < _LEAST_RUNS or time.perf_counter() - begin < _SECONDS_A_SIZE:
        start = time.perf_counter()
        server.run(cell)
        times.append((time.perf_counter() - start) * 1000)
    return float(np.median(times[2:]))


def _in_no_profile(max_batch: int) -> CommandLineError:
    return CommandLineError(
        "--replay: some batches of the log lie in no profile, though each request does",
        next_step=f"--max-batch {max(max_batch // 2, 1)}",
    )


def _limit(ready: _Ready, limit_ms: float, report: Report) -> RateLimit:
    def is_held(played: Replay) -> bool:
        is_whole = bool(np.isfinite(played.latency_ms[-1]))
        return is_whole and _play(played).latency_ms[99.0] <= limit_ms and keeps_up(played)

    def really_holds(qps: float) -> bool:
        report(Event("step", "bench", f"serving {qps:.1f} requests a second for {_CONFIRM_SECONDS:g} s"))
        try:
            return is_held(ready.serve(*ready.requests.at_rate(qps)).replay)
        except CommandLineError:  # a batch that lies in no profile; the simulation counts that as not held, too
            return False

    proposed = highest_rate(lambda qps: is_held(ready.simulate(*ready.requests.at_rate(qps))))
    return RateLimit(limit_ms, confirmed_rate(proposed, really_holds, _CONFIRM_RUNS) if proposed else 0.0, proposed)


def _play(played: Replay) -> Play:
    latency = {share: float(np.percentile(played.latency_ms, share)) for share in (50.0, 95.0, 99.0)}
    return Play(latency, float(np.mean(played.batch_sizes)), played.busy)


def _remarks(served: Served) -> Iterator[str]:
    if served.late_share > _LATE_SHARE:
        yield (
            f"this process began {served.late_share:.0%} of the batches more than {LATE_MS:g} ms late, which is in the "
            "latencies; leave it a processor of its own"
        )
    if not keeps_up(served.replay):
        yield "requests come faster than they are served, so that latencies grow with the length of the log"


def _limit_remarks(limit: RateLimit | None, window_ms: float) -> Iterator[str]:
    if limit and not limit.simulated_qps:
        yield f"no rate holds a p99 of {limit.limit_ms:g} ms, of which waiting for others may take {window_ms:g} (--window-ms)"
    elif limit and not limit.qps:
        yield f"none of {_CONFIRM_RUNS} real runs held a p99 of {limit.limit_ms:g} ms"
