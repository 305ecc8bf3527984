"""Whether an engine keeps what the spec asks for. Judged alike when a bundle is built and when it is verified."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from trtforge.errors import PerformanceError, Problem, RegressionError
from trtforge.release.manifest import EngineFigures, Manifest, NotRun, PerformanceRecord


def missed_gates(identifier: str, figures: EngineFigures, asked: PerformanceRecord) -> Iterator[Problem]:
    """One problem for each gate and size that an engine misses.

    A regression is found where the whole confidence interval of the slowdown lies above `max_regression`.
    """
    for point in figures.points:
        place = f"{identifier} at {sizes_text(point.sizes)}"
        if asked.p99_ms is not None and not point.latency_ms.p99 <= asked.p99_ms:  # NaN misses it
            yield Problem(
                f"{place}: p99 latency is {point.latency_ms.p99:.3f} ms, and p99_ms allows {asked.p99_ms:g}",
                "try cuda_graph: true, a profile whose opt is this shape, or a lower precision",
                exit_code=PerformanceError.exit_code,
            )
        if asked.throughput_qps is not None and not point.throughput_qps >= asked.throughput_qps:
            yield Problem(
                f"{place}: {point.throughput_qps:.1f} queries a second, and throughput_qps asks for "
                f"{asked.throughput_qps:g}",
                "try a lower precision, or a smaller batch; one batch is one query",
                exit_code=PerformanceError.exit_code,
            )
        slowdown = point.slowdown
        if asked.max_regression is not None and slowdown and not slowdown.low <= asked.max_regression:
            yield Problem(
                f"{place} is {slowdown.ratio:.1%} slower than the previous engine (at least {slowdown.low:.1%}), "
                f"and max_regression allows {asked.max_regression:.1%}",
                "build into an empty store: trtforge build SPEC --store NEW; a timing-driven build may choose other kernels",
                exit_code=RegressionError.exit_code,
            )


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


def silently_fp32(precision: str, layer_types: Mapping[str, int]) -> str:
    """What to warn of where an engine in a lower type computes in FP32; empty where it does not, or tells no type.

    Args:
        precision: of the engine, as its artifact names it.
        layer_types: element type -> number of layers. Whole numbers are sizes and indices, and say nothing.
    """
    known = {name for name in layer_types if name.startswith(("float", "bfloat", "int8"))}
    if precision.startswith("fp32") or known != {"float32"}:
        return ""
    return f"the spec asks for {precision}, and all {layer_types['float32']} layers of a known type are float32"


def sizes_text(sizes: Mapping[str, int]) -> str:
    """As `trtforge bench` takes them."""
    return ",".join(f"{name}={size}" for name, size in sizes.items()) or "its only size"
