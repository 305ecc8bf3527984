"""What a request costs: milliseconds at its sizes, in a profile whose kernels are tuned for other sizes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from trtforge.errors import Problem, SpecError, StoreError, Where, raise_any, shown_path
from trtforge.traffic.histogram import Floats, Ints

Cost = Callable[[Ints, Ints], Floats]
"""(shapes, names) sizes, and one opt (names,) or one for each (shapes, names) -> (shapes,) milliseconds."""

FLOPS_PER_MS = 1e11
BYTES_PER_MS = 1e9
"""A nominal GPU of 100 TFLOP/s and 1 TB/s: only the ratio decides between profiles, and it is of the order of T4 (200),
A100 (200) and L4 (400) in FP16."""
DISTANCE_PENALTY = 0.05
"""Share by which a shape costs more for each doubling between it and opt. An assumption; measure it with --latencies."""
MAX_DEGREE = 2
"""Attention is quadratic in a length; nothing common is more than quadratic in one size."""
MAX_LATENCIES_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Counted:
    """The work of one run of a model: operations (a multiply-add as two), bytes read and written, bytes held at once."""

    flops: float
    moved_bytes: float
    held_bytes: float


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """The work of a model as polynomials of its open sizes.

    Attributes:
        scale: (names,) unit of each size.
        exponents: (terms, names).
        coefficients: (terms, 3) of operations, bytes moved and bytes held.
    """

    scale: Floats
    exponents: Ints
    coefficients: Floats

    def at(self, sizes: Ints) -> Floats:
        """(shapes, 3) operations, bytes moved and bytes held at (shapes, names) sizes; none below 0."""
        terms = _terms(sizes / self.scale, self.exponents)
        return np.maximum(terms @ self.coefficients, 0)


def fit_work(points: Sequence[Sequence[int]], count: Callable[[Sequence[int]], Counted]) -> Work:
    """The polynomial through the work at every combination of sizes, of degree `len(points[i]) - 1` in each size.

    It is exact where the model's work is such a polynomial: matrix products, convolutions and attention at sizes that
    their strides divide.

    Args:
        points: for each open size, different sizes to count at, `MAX_DEGREE` + 1 at most.
        count: the work at one combination.
    """
    combinations = np.array(list(itertools.product(*points)), np.int64).reshape(-1, len(points))
    counted = [count(row) for row in combinations.tolist()]
    values = np.array([(one.flops, one.moved_bytes, one.held_bytes) for one in counted])
    scale = combinations.max(axis=0).astype(np.float64) if len(points) else np.ones(0)
    exponents = np.array(list(itertools.product(*(range(len(sizes)) for sizes in points))), np.int64)
    exponents = exponents.reshape(-1, len(points))
    return Work(scale, exponents, np.linalg.solve(_terms(combinations / scale, exponents), values))


def _terms(scaled: Floats, exponents: Ints) -> Floats:
    terms = np.ones((len(scaled), len(exponents)))
    for axis in range(scaled.shape[1]):
        terms *= scaled[:, axis, None] ** exponents[:, axis]
    return terms


def modelled(work: Work) -> Cost:
    """Cost from counted work: the slower of arithmetic and memory, times a penalty for each doubling away from opt.

    Source: Williams, Waterman and Patterson, Roofline, CACM 52(4), 2009, for the first part.
    """

    def at_best(sizes: Ints) -> Floats:
        flops, moved, _ = work.at(sizes).T
        milliseconds: Floats = np.maximum(flops / FLOPS_PER_MS, moved / BYTES_PER_MS)
        return milliseconds

    known = _remembering(at_best)
    return lambda sizes, opt: known(sizes) * _penalty(sizes, opt)


def _remembering(compute: Callable[[Ints], Floats]) -> Callable[[Ints], Floats]:
    """`compute`, done once for calls in a row with the same array: a choice asks for many opts of the same shapes."""
    last: list[tuple[Ints, Floats]] = []

    def known(sizes: Ints) -> Floats:
        if not last or last[0][0] is not sizes:
            last[:] = [(sizes, compute(sizes))]
        return last[0][1]

    return known


def _penalty(sizes: Ints, opt: Ints) -> Floats:
    distance: Floats = np.abs(np.log2(sizes / opt)).sum(axis=1)
    return 1 + DISTANCE_PENALTY * distance


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Latencies at every combination of some sizes.

    Attributes:
        opt: (names,) sizes that the engine was tuned for; None where each point had an engine of its own.
        axes: for each name the sizes, ascending.
        log_ms: natural logarithm of milliseconds, one axis a name.
    """

    opt: Ints | None
    axes: tuple[Floats, ...]
    log_ms: Floats

    def at(self, sizes: Ints) -> Floats:
        """(shapes,) milliseconds, linear in the logarithms between points and beyond the outermost two."""
        corners = []
        for axis, points in enumerate(self.axes):
            wanted = np.log(sizes[:, axis])
            if len(points) == 1:
                corners.append(((np.zeros(len(sizes), np.int64), np.ones(len(sizes))),))
                continue
            low = np.clip(np.searchsorted(points, sizes[:, axis], side="right") - 1, 0, len(points) - 2)
            left, right = np.log(points[low]), np.log(points[low + 1])
            share = (wanted - left) / (right - left)
            corners.append(((low, 1 - share), (low + 1, share)))  # type: ignore[arg-type]
        log_ms = np.zeros(len(sizes))
        for corner in itertools.product(*corners):
            weight = np.prod([share for _, share in corner], axis=0)
            log_ms += weight * self.log_ms[tuple(place for place, _ in corner)]
        return np.exp(log_ms)


@with_config(ConfigDict(extra="forbid", allow_inf_nan=False))
@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyFile:
    """Measured latencies as they are written.

    Attributes:
        symbols: names of the open sizes.
        points: each with a size for every symbol, `ms`, and `opt` (a size for every symbol) where the engine was tuned
            for other sizes than the point's own.
        gpu, how: for people.
    """

    symbols: Annotated[tuple[str, ...], Field(min_length=1)]
    points: Annotated[tuple[dict[str, Any], ...], Field(min_length=1)]
    gpu: str = ""
    how: str = ""


def read_latencies(path: Path, names: tuple[str, ...]) -> tuple[Grid, ...]:
    """The measured grids in a JSON file, one for each opt.

    Args:
        path: the file; see `LatencyFile`.
        names: the model's open sizes, in the order that the grids shall have.

    Raises:
        StoreError: it cannot be read.
        SpecError, SeveralErrors: it is no such file, its symbols are not `names`, or a grid has a gap.
    """
    try:
        if path.stat().st_size > MAX_LATENCIES_BYTES:
            raise SpecError(
                f"{shown_path(path)} is larger than {MAX_LATENCIES_BYTES} bytes", next_step="write fewer points"
            )
        file: LatencyFile = TypeAdapter(LatencyFile).validate_json(path.read_bytes())
    except OSError as error:
        raise StoreError(f"{shown_path(path)}: {error.strerror}", next_step=f"ls -l {path}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise SpecError(
            f"{shown_path(path)} holds no latencies: {place}: {first['msg']}",
            next_step='write {"symbols": ["batch"], "points": [{"batch": 1, "ms": 0.9}, {"batch": 8, "ms": 3.1}]}',
        ) from None
    if set(file.symbols) != set(names):
        raise SpecError(
            f"{shown_path(path)} measures {', '.join(file.symbols)}; the model's open sizes are {', '.join(names)}",
            next_step=f'name them so in it: "symbols": {json.dumps(list(names))}',
        )
    tuned: dict[tuple[int, ...] | None, dict[tuple[int, ...], float]] = {}
    problems = []
    for number, point in enumerate(file.points):
        try:
            at, opt, ms = _point(point, names)
        except ValueError as error:
            problems.append(
                Problem(f"points[{number}]: {error}", "mend that point", Where(path), exit_code=SpecError.exit_code)
            )
            continue
        tuned.setdefault(opt, {})[at] = ms
    raise_any(problems[:20])
    grids = [_grid(path, names, opt, points) for opt, points in tuned.items()]
    if None in tuned and len(tuned) > 1:
        raise SpecError(
            f"{shown_path(path)} has an opt at some points only", next_step="give each point its opt, or none"
        )
    return tuple(grids)


def _point(point: Mapping[str, Any], names: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[int, ...] | None, float]:
    extra = set(point) - {*names, "ms", "opt"}
    if extra:
        raise ValueError(f"found the key '{min(extra)}', expected {', '.join(names)}, ms and opt")
    ms = point.get("ms")
    if isinstance(ms, bool) or not isinstance(ms, int | float) or not 0 < ms < float("inf"):
        raise ValueError(f"ms is {ms!r}, expected a number above 0")
    opt = point.get("opt")
    if opt is not None and not isinstance(opt, dict):
        raise ValueError("opt is no object of sizes")
    return _sizes(point, names), None if opt is None else _sizes(opt, names), float(ms)


def _sizes(values: Mapping[str, Any], names: tuple[str, ...]) -> tuple[int, ...]:
    for name in names:
        size = values.get(name)
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size < 2**31:
            raise ValueError(f"'{name}' is {size!r}, expected a whole number of 1 or more")
    return tuple(values[name] for name in names)


def _grid(path: Path, names: tuple[str, ...], opt: Any, points: Mapping[tuple[int, ...], float]) -> Grid:
    axes = [sorted({at[axis] for at in points}) for axis in range(len(names))]
    lacking = [at for at in itertools.islice(itertools.product(*axes), len(points) + 1) if at not in points]
    if lacking:
        sizes = ", ".join(f"{name} {size}" for name, size in zip(names, lacking[0], strict=True))
        tuned = "" if opt is None else f" tuned for {'x'.join(map(str, opt))}"
        raise SpecError(
            f"{shown_path(path)} has a gap: no latency{tuned} at {sizes}",
            next_step="measure every combination of the sizes",
        )
    log_ms = np.log([points[at] for at in itertools.product(*axes)]).reshape([len(axis) for axis in axes])
    return Grid(
        None if opt is None else np.array(opt, np.int64), tuple(np.array(axis, np.float64) for axis in axes), log_ms
    )


def measured(grids: Iterable[Grid]) -> Cost:
    """Cost from measured latencies.

    Between and beyond the measured opts, the latency at a shape is that of the measured opts weighted by how near they
    are to the wanted one, by the inverse square of the distance in doublings (Shepard, 1968); at a measured opt it is
    that opt's own. Where no opts were measured, the penalty of `modelled` stands for them.

    Source: of five opts of BERT-base measured on H200 (tests/data/bert_base_h200_latencies.json), each guessed from the
    other four is 15 % off on average; the nearest opt in its place is 18 % off, the geometric mean of all 17 %.
    """
    grids = tuple(grids)
    if grids[0].opt is None:
        known = _remembering(grids[0].at)
        return lambda sizes, opt: known(sizes) * _penalty(sizes, opt)
    log_ms = _remembering(lambda sizes: np.stack([np.log(grid.at(sizes)) for grid in grids]))
    opts = np.log2(np.array([grid.opt for grid in grids], np.float64))

    def cost(sizes: Ints, opt: Ints) -> Floats:
        squared = ((opts[:, None] - np.log2(opt)) ** 2).sum(axis=2)
        # So small a floor leaves nothing but a measured opt itself.
        weights = 1 / np.maximum(squared, 1e-18)
        milliseconds: Floats = np.exp((weights / weights.sum(axis=0) * log_ms(sizes)).sum(axis=0))
        return milliseconds

    return cost
