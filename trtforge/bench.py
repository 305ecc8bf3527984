"""What `trtforge bench` does: measures the engines of a bundle on the GPU at hand, and judges the figures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trtforge.errors import CommandLineError, PerformanceError, Problem, RegressionError, closest
from trtforge.events import Event, Report
from trtforge.profile_choice import profile_for
from trtforge.runtime.lane import Array
from trtforge.runtime.measure import Spread, Switches, Timings, measure, remarks, spread
from trtforge.runtime.queue import levels, most_qps, padded_cost, replay
from trtforge.runtime.regression import Slowdown, slowdown
from trtforge.runtime.session import EngineSession
from trtforge.traffic.layout import Layout, layout_of
from trtforge.traffic.read import read_traffic
from trtforge.types import Profile, Shape, TensorSpec

_GAUGES = (
    "trtforge_latency_p50_seconds",
    "trtforge_latency_p99_seconds",
    "trtforge_compute_p50_seconds",
    "trtforge_throughput_queries_per_second",
)
_ROUNDS = 15
_ROUND_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class PointFigures:
    """An engine at one set of sizes, in milliseconds.

    Attributes:
        sizes: symbol -> size; of an axis without a symbol, `input[axis]` -> size.
        opt: the same of the opt shape of the profile that ran.
        context_bytes: GPU memory that contexts and tensors take besides the engine, all that were made so far.
    """

    sizes: dict[str, int]
    profile: str
    opt: dict[str, int]
    latency: Spread
    compute: Spread
    copy_in: Spread
    copy_out: Spread
    enqueue: Spread
    throughput_qps: float
    num_queries: int
    context_bytes: int
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything measured of one engine.

    Attributes:
        slowdowns: against the engine of another bundle, in the order of `points`, if that was asked.
    """

    identifier: str
    gpu: str
    driver: str
    tensorrt: str
    cuda: str
    switches: Switches
    engine_bytes: int
    points: tuple[PointFigures, ...]
    slowdowns: tuple[Slowdown, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """What figures must hold; None is no gate.

    Attributes:
        p99_ms: of the latency, at every point.
        throughput_qps: at every point.
        max_regression: share by which the median latency may exceed that of the other bundle.
    """

    p99_ms: float | None = None
    throughput_qps: float | None = None
    max_regression: float | None = None


def bench(
    session: EngineSession,
    sizes: Mapping[str, Sequence[int]],
    switches: Switches,
    driver: str,
    report: Report,
    *,
    other: EngineSession | None = None,
) -> Figures:
    """Measures an engine at every combination of sizes, or at the opt of every profile where none are given.

    Args:
        session: the engine.
        sizes: symbol or `input[axis]` -> sizes to try.
        switches: how to measure.
        driver: version of the GPU's driver.
        report: told what happens.
        other: an engine of another bundle, to be measured by turns with this one.

    Raises:
        CommandLineError: a name in `sizes` is no open axis, no combination fits a profile, or `other` has other inputs.
        CapabilityError: the GPU stopped, or has no memory.
    """
    if other is not None and _layout(other).axes != _layout(session).axes:
        raise CommandLineError(
            f"--against: {other.artifact.identifier} has other inputs than {session.artifact.identifier}",
            next_step="name a bundle of the same model",
        )
    points, slowdowns = [], []
    wanted_sizes, outside = _combinations(session, sizes)
    for wanted in outside:
        report(Event("warning", "bench", f"{_sizes_text(wanted)} lies in no profile, and is left out"))
    for wanted in wanted_sizes:
        report(Event("step", "bench", ", ".join(f"{name}={size}" for name, size in wanted.items())))
        points.append(_point(session, wanted, switches))
        if other is not None:
            slowdowns.append(_compared(other, session, wanted, switches))
    return Figures(
        session.artifact.identifier,
        session.gpu.device_name,
        driver,
        f"{session.artifact.backend} {session.artifact.backend_version}",
        session.cuda.name,
        switches,
        session.engine_bytes,
        tuple(points),
        tuple(slowdowns),
        session.warnings,
    )


@dataclass(frozen=True, slots=True)
class QueueFigures:
    """A log of single requests, as a server with one engine and a dynamic batcher would serve it.

    Attributes:
        log_qps: rate of the log.
        latency_ms: percentile -> milliseconds from arrival to answer.
        mean_batch: mean batch size.
        busy: share of the time that the GPU computes.
        limit_qps: the rate at which the log's pattern still holds `limit_ms` at p99; None without a limit.
        num_measured: sizes that the engine was measured at; batches are padded to these.
    """

    requests: int
    log_qps: float
    window_ms: float
    max_batch: int
    latency_ms: dict[float, float]
    mean_batch: float
    busy: float
    limit_ms: float | None
    limit_qps: float | None
    num_measured: int


def serve_log(
    session: EngineSession,
    log: Path,
    switches: Switches,
    report: Report,
    *,
    window_ms: float,
    max_batch: int,
    limit_ms: float | None,
) -> QueueFigures:
    """Replays a log's arrivals through a queue in front of the engine, with the latencies that the engine has here.

    Args:
        session: the engine.
        log: of single requests with time stamps, as `trtforge profile` reads it.
        switches: how to measure; latencies are medians.
        report: told what happens.
        window_ms: how long the first request of a batch waits for others.
        max_batch: largest batch that is formed.
        limit_ms: of the p99 for which the highest rate is sought.

    Raises:
        CommandLineError: the engine has no batch axis, or a batch of the log lies in no profile.
        SpecError, SeveralErrors: the log cannot be counted.
    """
    layout = _layout(session)
    if layout.batch is None:
        raise CommandLineError(
            f"--replay: {session.artifact.identifier} has no open batch axis", next_step="leave --replay out"
        )
    traffic = read_traffic(log, layout, with_arrivals=True)
    if traffic.arrivals is None or not len(traffic.sizes):
        raise CommandLineError(f"--replay: {log} has no request that the model takes", next_step=f"head {log}")
    sizes, arrivals = traffic.sizes[traffic.arrivals.shapes], traffic.arrivals.seconds - traffic.arrivals.seconds[0]
    batch = layout.names.index(layout.batch)
    steps = levels(sizes, batch, max_batch)
    grid = np.empty([len(step) for step in steps])
    for at, wanted in zip(np.ndindex(grid.shape), itertools.product(*steps), strict=True):
        named = {name: int(size) for name, size in zip(layout.names, wanted, strict=True)}
        grid[at] = _median_ms(session, named, switches, report)
    cost = padded_cost(sizes, batch, steps, grid)
    weights = sizes[:, batch]
    played = replay(arrivals, weights, cost, window_ms=window_ms, max_batch=max_batch)
    if np.isinf(played.latency_ms[-1]):
        raise CommandLineError(
            "--replay: some batches of the log lie in no profile", next_step=f"--max-batch {max(max_batch // 2, 1)}"
        )
    limit_qps = None
    if limit_ms is not None:
        limit_qps = most_qps(arrivals, weights, cost, window_ms=window_ms, max_batch=max_batch, limit_ms=limit_ms)
    return QueueFigures(
        len(arrivals),
        len(arrivals) / max(float(arrivals[-1]), 1e-9),
        window_ms,
        max_batch,
        {share: float(np.percentile(played.latency_ms, share)) for share in (50.0, 95.0, 99.0)},
        float(np.mean(played.batch_sizes)),
        played.busy,
        limit_ms,
        limit_qps,
        int(np.isfinite(grid).sum()),
    )


def _median_ms(session: EngineSession, sizes: dict[str, int], switches: Switches, report: Report) -> float:
    """Infinity where no profile allows the sizes."""
    if profile_for(_shapes(session, sizes), session.profiles) is None:
        return math.inf
    report(Event("step", "bench", _sizes_text(sizes)))
    short = replace(switches, duration_s=_ROUND_SECONDS, warm_up_ms=50.0)
    return float(np.median(_measured(session, sizes, short)[0].latency))


def missed(figures: Figures, gates: Gates) -> tuple[Problem, ...]:
    """The gates that figures do not hold."""
    return (*_slow_points(figures, gates), *_regressions(figures, gates))


def _slow_points(figures: Figures, gates: Gates) -> Iterator[Problem]:
    for point in figures.points:
        place = f"{figures.identifier} at {_sizes_text(point.sizes)}"
        p99 = point.latency.percentiles[99.0]
        if gates.p99_ms is not None and p99 > gates.p99_ms:
            yield Problem(
                f"{place}: p99 latency is {p99:.3f} ms, and p99_ms allows {gates.p99_ms:g}",
                "try --cuda-graph, a profile whose opt is this shape, or a lower precision",
                exit_code=PerformanceError.exit_code,
            )
        if gates.throughput_qps is not None and point.throughput_qps < gates.throughput_qps:
            yield Problem(
                f"{place}: {point.throughput_qps:.1f} queries a second, and throughput_qps asks for "
                f"{gates.throughput_qps:g}",
                "try --streams 2, a larger batch, or a lower precision",
                exit_code=PerformanceError.exit_code,
            )


def _regressions(figures: Figures, gates: Gates) -> Iterator[Problem]:
    if gates.max_regression is None:
        return
    for point, found in zip(figures.points, figures.slowdowns, strict=True):
        if found.exceeds(gates.max_regression):
            yield Problem(
                f"{figures.identifier} at {_sizes_text(point.sizes)} is {found.ratio:.1%} slower than the other engine "
                f"(at least {found.low:.1%}), and max_regression allows {gates.max_regression:.1%}",
                "build again; a timing-driven build may choose other kernels",
                exit_code=RegressionError.exit_code,
            )


def latency_grid(figures: Figures) -> dict[str, Any]:
    """Median latencies by size, as `trtforge profile --latencies` reads them."""
    switches = figures.switches
    return {
        "symbols": list(figures.points[0].sizes),
        "points": [
            {**point.sizes, "ms": round(point.latency.percentiles[50.0], 5), "profile": point.profile, "opt": point.opt}
            for point in figures.points
        ],
        "gpu": figures.gpu,
        "tensorrt": figures.tensorrt,
        "engine": figures.identifier,
        "how": f"median latency, {'with' if switches.cuda_graph else 'without'} CUDA graph, "
        f"{'with' if switches.transfers else 'without'} copies, {switches.streams} streams",
    }


def prometheus(figures: Figures) -> str:
    """The figures in Prometheus' text format, for the node exporter's textfile collector."""
    lines = []
    for name in _GAUGES:
        lines.append(f"# TYPE {name} gauge")
        for point in figures.points:
            labels = {"engine": figures.identifier, "gpu": figures.gpu, "profile": point.profile}
            labels |= {"sizes": _sizes_text(point.sizes)}
            text = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
            lines.append(f"{name}{{{text}}} {_gauge(name, point):.9g}")
    return "\n".join(lines) + "\n"


def _gauge(name: str, point: PointFigures) -> float:
    if name == "trtforge_throughput_queries_per_second":
        return point.throughput_qps
    kind = point.compute if "compute" in name else point.latency
    return kind.percentiles[99.0 if "p99" in name else 50.0] / 1000


def _escaped(label: str) -> str:
    """Source: Prometheus, exposition formats, text format."""
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _sizes_text(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items()) or "its only size"


def _point(session: EngineSession, sizes: dict[str, int], switches: Switches) -> PointFigures:
    timings, profile, notes = _measured(session, sizes, switches)
    return PointFigures(
        sizes,
        profile.name,
        _opt_sizes(_layout(session), profile),
        spread(timings.latency),
        spread(timings.compute),
        spread(timings.copy_in),
        spread(timings.copy_out),
        spread(timings.enqueue),
        timings.throughput_qps,
        len(timings.compute),
        session.run_bytes,
        (*remarks(timings, switches), *notes),
    )


def _measured(
    session: EngineSession, sizes: Mapping[str, int], switches: Switches
) -> tuple[Timings, Profile, tuple[str, ...]]:
    feeds = _feeds(session, sizes)
    profile = session.profile(feeds)
    for name, values in profile.values.items():
        dtype = feeds[name].dtype
        feeds[name] = np.array(values.opt, dtype).reshape(feeds[name].shape)
    lanes = [session.lane(profile, number) for number in range(switches.streams)]
    timings = measure(lanes, session.cuda, feeds, switches)
    notes = tuple(
        f"the size of output '{name}' depends on the data; copying it is not in the latency"
        for name in lanes[0].sized_by_data
    )
    return timings, profile, notes if switches.transfers else ()


def _compared(
    reference: EngineSession, candidate: EngineSession, sizes: Mapping[str, int], switches: Switches
) -> Slowdown:
    """Short rounds by turns, the second engine first in every other one, so that what drifts hits both alike."""
    short = replace(switches, duration_s=_ROUND_SECONDS, warm_up_ms=50.0)
    medians: dict[int, list[float]] = {0: [], 1: []}
    for number in range(_ROUNDS):
        for which in (0, 1) if number % 2 else (1, 0):
            timings, _, _ = _measured((reference, candidate)[which], sizes, short)
            medians[which].append(float(np.median(timings.latency)))
    return slowdown(np.array(medians[0]), np.array(medians[1]))


def _combinations(
    session: EngineSession, sizes: Mapping[str, Sequence[int]]
) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    """The sizes to measure at, and those that lie in no profile."""
    layout = _layout(session)
    known = layout.names
    for name in sizes:
        if name not in known:
            meant = closest(name, known)
            raise CommandLineError(
                f"--shapes: '{name}' is no open axis of {session.artifact.identifier}",
                next_step=f"write {meant}=..." if meant else f"name one of: {', '.join(known) or 'none, it is static'}",
            )
    opts = [_opt_sizes(layout, profile) for profile in session.profiles]
    if not sizes:
        return list({tuple(opt.items()): opt for opt in opts}.values()), []
    rest = {name: size for name, size in opts[0].items() if name not in sizes}
    asked = [dict(zip(sizes, values, strict=True)) | rest for values in itertools.product(*sizes.values())]
    fitting = [entry for entry in asked if profile_for(_shapes(session, entry), session.profiles)]
    outside = [entry for entry in asked if entry not in fitting]
    if not fitting:
        raise CommandLineError(
            f"--shapes: none of the {len(asked)} combinations lies inside a profile of {session.artifact.identifier}",
            next_step="name sizes between min and max of a profile; they stand in the manifest",
        )
    return fitting, outside


def _layout(session: EngineSession) -> Layout:
    return layout_of(TensorSpec(one.name, one.dtype, one.shape) for one in session.artifact.inputs)


def _opt_sizes(layout: Layout, profile: Profile) -> dict[str, int]:
    return {
        dim: size
        for name, axes in layout.axes.items()
        for dim, size in zip(axes, profile.shapes[name].opt, strict=True)
        if isinstance(dim, str)
    }


def _shapes(session: EngineSession, sizes: Mapping[str, int]) -> dict[str, Shape]:
    layout = _layout(session)
    return layout.shapes(sizes[name] for name in layout.names)


def _feeds(session: EngineSession, sizes: Mapping[str, int]) -> dict[str, Array]:
    """Inputs to measure with: seeded normal numbers, and ones for integers, which index every table of two rows."""
    rng = np.random.default_rng(0)
    feeds = {}
    for tensor, (name, shape) in zip(session.artifact.inputs, _shapes(session, sizes).items(), strict=True):
        if "float" in tensor.dtype:
            feeds[name] = rng.standard_normal(math.prod(shape), np.float32).reshape(shape)
        else:
            feeds[name] = np.ones(shape, tensor.dtype)
    return feeds


def parse_sizes(words: Sequence[str]) -> dict[str, list[int]]:
    """`batch=1,8` and `seq=128` as symbol -> sizes.

    Raises:
        CommandLineError: a word is something else.
    """
    found = {}
    for word in words:
        name, _, sizes = word.rpartition("=")
        numbers = sizes.split(",")
        if not name or not all(number.isdecimal() and 0 < int(number) < 1 << 31 for number in numbers):
            raise CommandLineError(f"--shapes: found '{word}'", next_step="write --shapes NAME=SIZE,SIZE")
        found[name] = [int(number) for number in numbers]
    return found
