"""Whether an engine keeps what is asked of it. Judged alike when it is built, verified and measured by hand."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

from trtforge.errors import PerformanceError, Problem, RegressionError
from trtforge.release.manifest import EngineFigures, Manifest, NotRun, PerformanceRecord

_LEAST_IMPLICIT = 0.1
"""Share of layers in INT8 below which it hardly is. Seen on an H200: 0.93 of ResNet-50's, and 0.01 where biases were copies."""


class Limits(Protocol):
    """What figures have to hold, at every size; None is no gate.

    Attributes:
        p99_ms: of the latency.
        throughput_qps: queries a second; one batch is one query.
        max_regression: share by which the median latency may exceed that of another engine.
    """

    @property
    def p99_ms(self) -> float | None: ...  # noqa: D102 - see the class
    @property
    def throughput_qps(self) -> float | None: ...  # noqa: D102
    @property
    def max_regression(self) -> float | None: ...  # noqa: D102


def slow(place: str, p99_ms: float, qps: float, limits: Limits, *, steps: tuple[str, str]) -> Iterator[Problem]:
    """One problem for each limit that figures miss, as NaN does. `steps` are what to do about p99 and about throughput."""
    if limits.p99_ms is not None and not p99_ms <= limits.p99_ms:
        yield Problem(
            f"{place}: p99 latency is {p99_ms:.3f} ms, and p99_ms allows {limits.p99_ms:g}",
            steps[0],
            exit_code=PerformanceError.exit_code,
        )
    if limits.throughput_qps is not None and not qps >= limits.throughput_qps:
        yield Problem(
            f"{place}: {qps:.1f} queries a second, and throughput_qps asks for {limits.throughput_qps:g}",
            steps[1],
            exit_code=PerformanceError.exit_code,
        )


def slower(place: str, than: str, ratio: float, low: float, limits: Limits, *, step: str) -> Iterator[Problem]:
    """A problem where the whole confidence interval of a slowdown, which begins at `low`, lies above `max_regression`."""
    if limits.max_regression is not None and not low <= limits.max_regression:
        yield Problem(
            f"{place} is {ratio:.1%} slower than {than} (at least {low:.1%}), "
            f"and max_regression allows {limits.max_regression:.1%}",
            step,
            exit_code=RegressionError.exit_code,
        )


def missed_gates(identifier: str, figures: EngineFigures, asked: PerformanceRecord) -> Iterator[Problem]:
    """One problem for each gate of a spec and each size at which an engine misses it."""
    steps = (
        "try cuda_graph: true, a profile whose opt is this shape, or a lower precision",
        "try a lower precision, or a smaller batch; one batch is one query",
    )
    anew = "build into an empty store: trtforge build SPEC --store NEW; a timing-driven build may choose other kernels"
    for point in figures.points:
        place = f"{identifier} at {sizes_text(point.sizes)}"
        yield from slow(place, point.latency_ms.p99, point.throughput_qps, asked, steps=steps)
        if found := point.slowdown:
            yield from slower(place, "the previous engine", found.ratio, found.low, asked, step=anew)


def misses_of_kept(manifest: Manifest, built: Collection[str]) -> Iterator[Problem]:
    """Gates missed by engines that an earlier build measured, which a build of others neither judges nor removes."""
    asked = manifest.performance
    if isinstance(asked, PerformanceRecord):
        for name, figures in asked.engines.items():
            if name not in built and isinstance(figures, EngineFigures):
                yield from missed_gates(name, figures, asked)


def not_judged(figures: EngineFigures, asked: PerformanceRecord) -> NotRun | None:
    """Why `max_regression` is not judged; None if it is, or is not asked for."""
    if asked.max_regression is None:
        return None
    if isinstance(figures.previous, NotRun):
        return figures.previous
    is_compared = figures.previous is not None and (
        figures.previous.digest == figures.engine_digest or all(point.slowdown for point in figures.points)
    )
    return None if is_compared else NotRun(reason="it was not measured against a previous engine")


def silently_wider(precision: str, layer_types: Mapping[str, int]) -> str:
    """What to warn of where an engine computes in a wider type than it was asked to; empty where it does not, or tells none.

    TensorRT's own calibration leaves layers in FP16 where no INT8 kernel is faster, or none fits. Of explicit INT8 that says
    nothing: blocks that are fused tell the type of their outputs alone.

    Args:
        precision: of the engine, as its artifact names it.
        layer_types: element type -> number of layers. Whole numbers are sizes and indices, and say nothing.
    """
    known = {name: count for name, count in layer_types.items() if name.startswith(("float", "bfloat", "int8"))}
    num_known = sum(known.values())
    if not precision.startswith("fp32") and set(known) == {"float32"}:
        return f"the spec asks for {precision}, and all {num_known} layers of a known type are float32"
    if precision == "int8-implicit" and known.get("int8", 0) < _LEAST_IMPLICIT * num_known:
        return (
            f"the spec asks for {precision}, and {known.get('int8', 0)} of {num_known} layers of a known type are int8"
        )
    return ""


def sizes_text(sizes: Mapping[str, int]) -> str:
    """As `trtforge bench` takes them."""
    return ",".join(f"{name}={size}" for name, size in sizes.items()) or "its only size"
