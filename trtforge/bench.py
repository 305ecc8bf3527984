"""Measures the engines of a bundle on the GPU at hand, and judges the figures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trtforge.errors import CommandLineError, Problem, closest
from trtforge.events import Event, Report
from trtforge.prometheus import Gauge
from trtforge.release.gates import sizes_text, slow, slower
from trtforge.runtime.lane import Array, Lane
from trtforge.runtime.measure import Spread, Switches, lanes_of, measure, remarks, spread
from trtforge.runtime.regression import Slowdown, slowdown
from trtforge.runtime.session import EngineSession
from trtforge.runtime.sizes import at_sizes, layout
from trtforge.traffic.layout import Sizes, combinations, is_taken, profile_sizes
from trtforge.types import Profile

_ROUNDS = 15
_ROUND_SECONDS = 0.3
_WIDTHS = {"int8": 1, "fp8": 1, "fp16": 2, "bf16": 2, "fp32": 4}
"""Bytes of a number, by the type that an engine was asked to compute in."""
_SIZE = re.compile(r"[1-9][0-9]{0,9}")


@dataclass(frozen=True, slots=True)
class PointFigures:
    """An engine at one set of sizes, in milliseconds.

    Attributes:
        sizes: symbol -> size; of an axis without a symbol, `input[axis]` -> size.
        opt: the same of the opt shape of the profile that ran.
        latency, compute, copy_in, copy_out, enqueue, response: see `trtforge.runtime.measure`.
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
    response: Spread
    throughput_qps: float
    num_queries: int
    context_bytes: int
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OtherEngine:
    """The engine of another bundle."""

    identifier: str
    precision: str


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything measured of one engine.

    Attributes:
        engine_bytes: GPU memory that loading it took.
        other: what it was compared with, if that was asked.
        slowdowns: against `other`, in the order of `points`.
    """

    identifier: str
    precision: str
    gpu: str
    driver: str
    tensorrt: str
    cuda: str
    switches: Switches
    engine_bytes: int
    points: tuple[PointFigures, ...]
    other: OtherEngine | None
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
        CommandLineError: a name in `sizes` is no open axis, no combination fits a profile, or `other` has other inputs or
            no profile for one.
        CapabilityError: the GPU stopped, or has no memory.
    """
    report(Event("started", "bench"))
    points: list[PointFigures] = []
    slowdowns: list[Slowdown] = []
    wanted_sizes, outside = _combinations(session, sizes)
    if other is not None:
        _refuse_unlike(session, other, wanted_sizes)
    for wanted in outside:
        report(Event("warning", "bench", f"{sizes_text(wanted)} lies in no profile, and is left out"))
    for wanted in wanted_sizes:
        report(Event("step", "bench", sizes_text(wanted)))
        points.append(_point(session, wanted, switches, points[-1].context_bytes if points else 0))
        if other is not None:
            report(Event("step", "bench", f"{sizes_text(wanted)}, by turns with {other.artifact.identifier}"))
            slowdowns.append(_compared(other, session, wanted, switches))
    return Figures(
        session.artifact.identifier,
        session.artifact.precision,
        session.gpu.device_name,
        driver,
        session.tensorrt,
        session.cuda.name,
        switches,
        session.engine_bytes,
        tuple(points),
        OtherEngine(other.artifact.identifier, other.artifact.precision) if other else None,
        tuple(slowdowns),
        (*session.warnings, *(_without_gain(session, other, points, slowdowns) if other else ())),
    )


def _refuse_unlike(session: EngineSession, other: EngineSession, wanted_sizes: Sequence[Sizes]) -> None:
    name, axes = other.artifact.identifier, layout(other.artifact.inputs)
    if axes.axes != layout(session.artifact.inputs).axes:
        raise CommandLineError(
            f"--against: {name} has other inputs than {session.artifact.identifier}",
            next_step="name a bundle of the same model",
        )
    for wanted in wanted_sizes:
        if not is_taken(axes, wanted, other.profiles):
            raise CommandLineError(
                f"--against: {name} has no profile for {sizes_text(wanted)}",
                next_step="name sizes that both engines take: --shapes NAME=SIZE",
            )


def _is_narrower(precision: str, other: str) -> bool:
    """Whether a type has fewer bytes than another. Nobody knows of a mixture that the model brings."""
    asked, before = (_WIDTHS.get(one.partition("-")[0]) for one in (precision, other))
    return asked is not None and before is not None and asked < before


def _without_gain(
    session: EngineSession, other: EngineSession, points: Sequence[PointFigures], slowdowns: Sequence[Slowdown]
) -> Iterator[str]:
    """Where a narrower type than that of the other engine was not seen to be faster."""
    asked, before = session.artifact.precision, other.artifact.precision
    if not _is_narrower(asked, before):
        return
    for point, found in zip(points, slowdowns, strict=True):
        if found.high >= 0:
            yield (
                f"{asked} does not pay on {session.gpu.device_name} at {sizes_text(point.sizes)}: {found.ratio:+.1%} "
                f"({found.low:+.1%} to {found.high:+.1%}) against {before}"
            )


def missed(figures: Figures, gates: Gates) -> tuple[Problem, ...]:
    """The gates that figures do not hold."""
    return tuple(_misses(figures, gates))


def _misses(figures: Figures, gates: Gates) -> Iterator[Problem]:
    steps = (
        "try --cuda-graph, a profile whose opt is this shape, or a lower precision",
        "try --streams 2, a larger batch, or a lower precision",
    )
    for point in figures.points:
        place = f"{figures.identifier} at {sizes_text(point.sizes)}"
        yield from slow(place, point.latency.percentiles[99.0], point.throughput_qps, gates, steps=steps)
    if other := figures.other:
        step = _faster_step(figures.precision, other)
        for point, found in zip(figures.points, figures.slowdowns, strict=True):
            place = f"{figures.identifier} at {sizes_text(point.sizes)}"
            yield from slower(place, other.identifier, found.ratio, found.low, gates, step=step)


def _faster_step(precision: str, other: OtherEngine) -> str:
    """What may help an engine that is slower than another one."""
    if precision == other.precision:
        return "trtforge build SPEC --store NEW  # an empty store: kernels are chosen by measured times, and may differ"
    if _is_narrower(precision, other.precision):
        return f"trtforge plan SPEC --decisions  # shows what did not become {precision}; or release {other.identifier}"
    return f"name a bundle in {precision} with --against: {other.identifier} is in {other.precision}"


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


def gauges(figures: Figures) -> Iterator[Gauge]:
    """The figures for Prometheus."""
    for point in figures.points:
        labels = {"engine": figures.identifier, "gpu": figures.gpu, "profile": point.profile}
        labels |= {"sizes": sizes_text(point.sizes), **_switch_labels(figures.switches)}
        for kind in ("latency", "compute", "response"):
            times: Spread = getattr(point, kind)
            for share in (50, 99):
                yield Gauge(f"trtforge_{kind}_p{share}_seconds", labels, times.percentiles[share] / 1000)
        yield Gauge("trtforge_throughput_queries_per_second", labels, point.throughput_qps)


def _switch_labels(switches: Switches) -> dict[str, str]:
    """Without these, figures of two runs would be one series."""
    names = ("cuda_graph", "transfers", "one_at_a_time")
    return {name: str(getattr(switches, name)).lower() for name in names} | {"streams": str(switches.streams)}


def _point(session: EngineSession, sizes: dict[str, int], switches: Switches, taken_before: int) -> PointFigures:
    free_before = session.cuda.memory()[0]  # of which another engine that is open has taken its own
    profile, lanes, feeds = _ready(session, sizes, switches)
    timings = measure(lanes, session.cuda, feeds, switches)
    notes = [
        f"the size of output '{name}' depends on the data; copying it is not in the latency"
        for name in lanes[0][0].sized_by_data
        if switches.transfers
    ]
    return PointFigures(
        sizes,
        profile.name,
        profile_sizes(layout(session.artifact.inputs), profile, "opt"),
        spread(timings.latency),
        spread(timings.compute),
        spread(timings.copy_in),
        spread(timings.copy_out),
        spread(timings.enqueue),
        spread(timings.response),
        timings.throughput_qps,
        len(timings.compute),
        taken_before + max(free_before - session.cuda.memory()[0], 0),
        (*remarks(timings, switches), *notes),
    )


def _ready(
    session: EngineSession, sizes: Sizes, switches: Switches
) -> tuple[Profile, list[tuple[Lane, ...]], dict[str, Array]]:
    profile, feeds = at_sizes(session, sizes)
    return profile, [lanes_of(session, profile, number, switches) for number in range(switches.streams)], feeds


def _compared(reference: EngineSession, candidate: EngineSession, sizes: Sizes, switches: Switches) -> Slowdown:
    """Short rounds by turns, the second engine first in every other one, so that what drifts hits both alike."""
    short = replace(switches, duration_s=_ROUND_SECONDS, warm_up_ms=50.0)
    ready = [(session.cuda, *_ready(session, sizes, switches)[1:]) for session in (reference, candidate)]
    medians: tuple[list[float], list[float]] = ([], [])
    for number in range(_ROUNDS):
        for which in (0, 1) if number % 2 else (1, 0):
            cuda, lanes, feeds = ready[which]
            medians[which].append(float(np.median(measure(lanes, cuda, feeds, short).latency)))
    return slowdown(np.array(medians[0]), np.array(medians[1]))


def _combinations(
    session: EngineSession, sizes: Mapping[str, Sequence[int]]
) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    """The sizes to measure at, and those that lie in no profile."""
    axes = layout(session.artifact.inputs)
    known = axes.names
    for name in sizes:
        if name not in known:
            meant = closest(name, known)
            raise CommandLineError(
                f"--shapes: '{name}' is no open axis of {session.artifact.identifier}",
                next_step=f"write {meant}=..." if meant else f"name one of: {', '.join(known) or 'none, it is static'}",
            )
    fitting, outside = combinations(axes, session.profiles, sizes)
    if outside and not fitting:
        raise CommandLineError(
            f"--shapes: none of the {len(outside)} combinations lies inside a profile of {session.artifact.identifier}",
            next_step="name sizes between min and max of a profile; they stand in the manifest",
        )
    return fitting, outside


def parse_sizes(words: Sequence[str]) -> dict[str, list[int]]:
    """`batch=1,8` and `seq=128` as symbol -> sizes; a name that comes twice has the sizes of both.

    Raises:
        CommandLineError: a word is something else.
    """
    found: dict[str, list[int]] = {}
    for word in words:
        name, _, sizes = word.rpartition("=")
        numbers = sizes.split(",")
        if not name or not all(_SIZE.fullmatch(number) and int(number) < 1 << 31 for number in numbers):
            raise CommandLineError(f"--shapes: found '{word}'", next_step="write --shapes NAME=SIZE,SIZE")
        found[name] = list(dict.fromkeys([*found.get(name, []), *map(int, numbers)]))
    return found
