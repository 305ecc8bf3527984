"""A recorded log of arrivals, served by an engine in real time behind a dynamic batcher."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trtforge.errors import CommandLineError
from trtforge.events import Event, Report
from trtforge.profile_choice import profile_for
from trtforge.prometheus import Gauge
from trtforge.runtime.lane import Array
from trtforge.runtime.measure import Switches
from trtforge.runtime.queue import Batcher, Cell, Replay, confirmed_speed, highest_speed, levels, paced, padded, replay
from trtforge.runtime.serve import LATE_MS, Served, Server, serve
from trtforge.runtime.session import EngineSession
from trtforge.runtime.sizes import Sizes, layout, shapes, sizes_text
from trtforge.traffic.read import read_traffic

_SECONDS_A_SIZE = 0.1
_LEAST_RUNS = 10
_CONFIRM_SECONDS = 3.0
_CONFIRM_RUNS = 6
_LATE_SHARE = 0.01
_OVERLOADED = 0.98


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
    """The highest rate, in requests a second, at which the log's pattern holds a p99; 0 where none does.

    Attributes:
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
        log_qps: rate of the log.
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
class _Requests:
    """Arrivals from 0, (requests,), and sizes, (requests, names), of the part of a log that is served."""

    arrivals_s: Array
    sizes: Array
    batch: int
    names: tuple[str, ...]
    window_ms: float
    max_batch: int

    def batcher(self, speed: float) -> tuple[Batcher, Array]:
        """For some seconds of the log at another speed; and the sizes of what comes."""
        which, times = paced(self.arrivals_s, speed, _CONFIRM_SECONDS)
        return self._batcher(times, self.sizes[which]), self.sizes[which]

    def as_logged(self) -> Batcher:
        """For the log as it is."""
        return self._batcher(self.arrivals_s, self.sizes)

    def _batcher(self, arrivals: Array, sizes: Array) -> Batcher:
        return Batcher(arrivals, sizes[:, self.batch], window_ms=self.window_ms, max_batch=self.max_batch)


def serve_log(
    session: EngineSession,
    log: Path,
    switches: Switches,
    report: Report,
    *,
    window_ms: float,
    max_batch: int,
    seconds: float,
    limit_ms: float | None,
) -> ReplayFigures:
    """Serves a log's requests as they arrived, by the wall clock.

    Batches are formed by the rule of `trtforge.runtime.queue` and padded to sizes that the engine was made ready for.

    Args:
        session: the engine.
        log: of single requests with time stamps, as `trtforge profile` reads it.
        switches: whether with CUDA graphs, and whether to spin.
        report: told what happens.
        window_ms: how long the first request of a batch waits for others.
        max_batch: largest batch that is formed.
        seconds: a longer log is cut.
        limit_ms: of the p99 for which the highest rate is sought.

    Raises:
        CommandLineError: the engine has no batch axis, or a batch of the log lies in no profile.
        SpecError, SeveralErrors: the log cannot be counted.
        CapabilityError: the GPU has no memory for it, or stopped.
    """
    requests, remarks = _read(session, log, window_ms, max_batch, seconds)
    if limit_ms is not None and not requests.arrivals_s[-1]:
        raise CommandLineError(
            f"--limit-ms: the {len(requests.arrivals_s)} requests of {log} come at one time, which has no rate",
            next_step="leave --limit-ms out",
        )
    steps = levels(requests.sizes, requests.batch, max_batch)
    cells = _cells(session, requests.names, steps)
    with closing(Server(session, cells, with_graph=switches.cuda_graph, spin=switches.spin_wait)) as server:
        costs = {cell: _cost_ms(server, cell, sizes, report) for cell, sizes in cells.items()}

        def simulated(batcher: Batcher, sizes: Array) -> Replay:
            pad = padded(sizes, requests.batch, steps)
            return replay(batcher, lambda first, end: costs.get(pad(first, end), np.inf))

        def served(batcher: Batcher, sizes: Array) -> Served:
            return serve(batcher, _runner(server, cells, padded(sizes, requests.batch, steps), max_batch))

        expected = simulated(requests.as_logged(), requests.sizes)
        if np.isinf(expected.latency_ms[-1]):
            raise _in_no_profile(max_batch)
        report(Event("step", "bench", f"serving {len(requests.arrivals_s)} requests of {log.name}"))
        found = served(requests.as_logged(), requests.sizes)
        limit = None
        if limit_ms is not None:
            limit = _limit(requests, limit_ms, simulated, served, report)
        return ReplayFigures(
            session.artifact.identifier,
            len(requests.arrivals_s),
            float(requests.arrivals_s[-1]),
            _rate(requests.arrivals_s),
            window_ms,
            max_batch,
            _play(found.replay),
            _play(expected),
            found.gpu_busy,
            found.host_ms,
            found.late_share,
            limit,
            len(cells),
            server.has_own_contexts,
            (*remarks, *_remarks(found)),
        )


def gauges(figures: ReplayFigures, gpu: str) -> Iterator[Gauge]:
    """The figures for Prometheus."""
    labels = {"engine": figures.identifier, "gpu": gpu}
    for share, latency in figures.measured.latency_ms.items():
        yield Gauge(f"trtforge_replay_latency_p{share:g}_seconds", labels, latency / 1000)
    yield Gauge("trtforge_replay_gpu_busy_ratio", labels, figures.gpu_busy)
    if figures.limit:
        yield Gauge("trtforge_replay_limit_queries_per_second", labels, figures.limit.qps)


def _read(
    session: EngineSession, log: Path, window_ms: float, max_batch: int, seconds: float
) -> tuple[_Requests, tuple[str, ...]]:
    known = layout(session.artifact.inputs)
    if known.batch is None:
        raise CommandLineError(
            f"--replay: {session.artifact.identifier} has no open batch axis", next_step="leave --replay out"
        )
    traffic = read_traffic(log, known, with_arrivals=True)
    if traffic.arrivals is None or not len(traffic.sizes):
        raise CommandLineError(f"--replay: {log} has no request that the model takes", next_step=f"head {log}")
    arrivals = traffic.arrivals.seconds - traffic.arrivals.seconds[0]
    keep = max(int(np.searchsorted(arrivals, seconds, side="right")), 1)
    remarks = []
    if keep < len(arrivals):
        remarks.append(
            f"the log lasts {arrivals[-1]:.1f} s; served were {keep} of {len(arrivals)} requests, those of its first "
            f"{seconds:g} s (--replay-seconds)"
        )
    sizes = traffic.sizes[traffic.arrivals.shapes[:keep]]
    batch = known.names.index(known.batch)
    return _Requests(arrivals[:keep], sizes, batch, known.names, window_ms, max_batch), tuple(remarks)


def _cells(session: EngineSession, names: tuple[str, ...], steps: list[Array]) -> dict[Cell, Sizes]:
    """All combinations of levels that lie inside a profile."""
    cells: dict[Cell, Sizes] = {}
    for places in itertools.product(*(range(len(step)) for step in steps)):
        sizes = {name: int(step[place]) for name, step, place in zip(names, steps, places, strict=True)}
        if profile_for(shapes(session.artifact.inputs, sizes), session.profiles):
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


def _runner(
    server: Server, cells: Mapping[Cell, Sizes], pad: Callable[[int, int], Cell], max_batch: int
) -> Callable[[int, int], float]:
    def run(first: int, end: int) -> float:
        cell = pad(first, end)
        if cell not in cells:
            raise _in_no_profile(max_batch)
        return server.run(cell)

    return run


def _in_no_profile(max_batch: int) -> CommandLineError:
    return CommandLineError(
        "--replay: some batches of the log lie in no profile", next_step=f"--max-batch {max(max_batch // 2, 1)}"
    )


def _limit(
    requests: _Requests,
    limit_ms: float,
    simulated: Callable[[Batcher, Array], Replay],
    served: Callable[[Batcher, Array], Served],
    report: Report,
) -> RateLimit:
    rate = _rate(requests.arrivals_s)

    def is_held(played: Replay) -> bool:
        return bool(np.isfinite(played.latency_ms[-1])) and _play(played).latency_ms[99.0] <= limit_ms

    def really_holds(speed: float) -> bool:
        report(Event("step", "bench", f"serving {speed * rate:.1f} requests a second for {_CONFIRM_SECONDS:g} s"))
        return is_held(served(*requests.batcher(speed)).replay)

    proposed = highest_speed(lambda speed: is_held(simulated(*requests.batcher(speed))))
    held = confirmed_speed(proposed, really_holds, _CONFIRM_RUNS) if proposed else 0.0
    return RateLimit(limit_ms, rate * held, rate * proposed)


def _rate(arrivals_s: Array) -> float:
    """Requests a second; 0 where all come at one time."""
    return (len(arrivals_s) - 1) / float(arrivals_s[-1]) if arrivals_s[-1] else 0.0


def _play(played: Replay) -> Play:
    latency = {share: float(np.percentile(played.latency_ms, share)) for share in (50.0, 95.0, 99.0)}
    return Play(latency, float(np.mean(played.batch_sizes)), played.busy)


def _remarks(served: Served) -> Iterator[str]:
    if served.late_share > _LATE_SHARE:
        yield (
            f"this process began {served.late_share:.0%} of the batches more than {LATE_MS:g} ms late, which is in the "
            "latencies; leave it a processor of its own"
        )
    if served.replay.busy > _OVERLOADED:
        yield "requests come faster than they are served, so that latencies grow with the length of the log"
