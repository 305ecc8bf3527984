"""Really runs a model at the min, opt and max of every profile, before hours go into a build.

Builders only warn about a min or max at which the model cannot run, and then make an engine that is broken there.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from polygraphy.json import save_json

from trtforge.errors import GraphError, Problem, SpecError, StoreError, Where, raise_any
from trtforge.reference import ReferenceSession
from trtforge.shapes.inputs import Array, generate_inputs
from trtforge.shapes.points import PointCheck
from trtforge.spec.model import InputValues
from trtforge.types import POINTS, Graph, Point, Profile, Shape


def check_profiles(
    graph: Graph,
    profiles: tuple[Profile, ...],
    declared: Mapping[str, InputValues],
    *,
    failures_dir: Path,
    where: Callable[[str, str], Where | None],
    on_point: Callable[[str, str], None],
    seed: int = 0,
) -> tuple[PointCheck, ...]:
    """Runs the reference at every distinct point of every profile, on generated inputs.

    Guarantees: each point ran, once where points are equal, those of other profiles too (so a static model runs once).
    Outputs that are not finite are recorded, no error. The inputs of a point that did not run are left in `failures_dir` as
    `PROFILE-POINT.json`, a list of one feed, for `polygraphy run --load-inputs`.

    Args:
        graph: the model.
        profiles: as `resolve_profiles` returns them.
        declared: `inputs` of the spec.
        failures_dir: folder for inputs at which the model stopped; made when the first is written.
        where: (profile, point) -> its place in the spec.
        on_point: told (profile, point) before each run.
        seed: of the generated inputs.

    Raises:
        GraphError: onnxruntime does not load the model, or an input has a type that cannot be generated.
        SeveralErrors: of `SpecError` problems, one for each point that did not run, after all were tried.
        StoreError: `failures_dir` cannot be written.
    """
    session = ReferenceSession(graph)
    checks: list[PointCheck] = []
    known: list[tuple[_Sizes, PointCheck]] = []
    problems: list[Problem] = []
    for profile in profiles:
        failures: list[_Failure] = []
        for point in _distinct_points(profile):
            sizes = _sizes(profile, point)
            if same := next((check for other, check in known if other == sizes), None):
                checks.append(replace(same, profile=profile.name, point=point))
                continue
            on_point(profile.name, point)
            feeds = generate_inputs(graph, profile, point, declared, seed)
            try:
                checks.append(_run(session, profile, point, feeds))
                known.append((sizes, checks[-1]))
            except GraphError as error:
                failures.append(_Failure(profile, point, feeds, error.problems[0].detail[0]))
        passed = [check.point for check in checks if check.profile == profile.name]
        for failure in failures:
            path = _save(failure.feeds, failures_dir / f"{profile.name}-{failure.point}.json")
            problems.append(_problem(graph, failure, passed, path, where(profile.name, failure.point)))
    raise_any(problems)
    return tuple(checks)


_Sizes = tuple[dict[str, Shape], dict[str, Shape]]
"""Input -> its shape, and its values where those decide shapes."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """A point at which the model stopped, with onnxruntime's reason."""

    profile: Profile
    point: Point
    feeds: dict[str, Array]
    reason: str


def _sizes(profile: Profile, point: Point) -> _Sizes:
    shapes = {name: getattr(given, point) for name, given in profile.shapes.items()}
    return shapes, {name: getattr(given, point) for name, given in profile.values.items()}


def _distinct_points(profile: Profile) -> list[Point]:
    sizes = {point: _sizes(profile, point) for point in POINTS}
    return [point for place, point in enumerate(POINTS) if all(sizes[point] != sizes[one] for one in POINTS[:place])]


def _run(session: ReferenceSession, profile: Profile, point: Point, feeds: dict[str, Array]) -> PointCheck:
    start = time.perf_counter()
    outputs = session.run(feeds)
    seconds = time.perf_counter() - start
    return PointCheck(
        profile.name,
        point,
        {name: feed.shape for name, feed in feeds.items()},
        {name: output.shape for name, output in outputs.items()},
        all(_is_finite(output) for output in outputs.values()),
        seconds,
    )


def _is_finite(output: Array) -> bool:
    if output.dtype.kind in "biuOUS":
        return True
    return bool(np.isfinite(output).all())


def _save(feeds: dict[str, Array], path: Path) -> Path | None:
    """Writes feeds for polygraphy; None where it cannot read them back, as numpy's format loses bfloat16 and float8."""
    if any(feed.dtype.isbuiltin != 1 for feed in feeds.values()):
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_json([feeds], str(path))
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror}", next_step=f"ls -ld {shlex.quote(str(path.parent))}"
        ) from error
    return path


def _problem(graph: Graph, failure: _Failure, passed: list[Point], path: Path | None, where: Where | None) -> Problem:
    profile, point = failure.profile, failure.point
    detail = [f"onnxruntime: {failure.reason}", *_hint_on_values(failure.reason)]
    hint = _how_to_narrow(graph, profile, point, passed)
    return Problem(
        f"{graph.source.name} does not run at the {point} of profile '{profile.name}': {_tried(graph, profile, point)}",
        _reproduce(graph, path) if path else f"change the profile: {hint}",
        where,
        tuple([*detail, hint] if path else detail),
        SpecError.exit_code,
    )


def _tried(graph: Graph, profile: Profile, point: Point) -> str:
    shapes = [
        f"{spec.name} {list(getattr(profile.shapes[spec.name], point))}"
        for spec in graph.inputs
        if spec.is_dynamic or not _has_open_inputs(graph)
    ]
    values = [f"{name} = {list(getattr(value, point))}" for name, value in profile.values.items()]
    return ", ".join(shapes + values)


def _has_open_inputs(graph: Graph) -> bool:
    return any(spec.is_dynamic for spec in graph.inputs)


def _how_to_narrow(graph: Graph, profile: Profile, point: Point, passed: list[Point]) -> str:
    if not passed:
        axes = [
            f"axis {axis} of '{spec.name}'"
            for spec in graph.inputs
            for axis, dim in enumerate(spec.shape)
            if not isinstance(dim, int)
        ]
        return f"no point of this profile ran; sizes to change: {', '.join(axes) or 'none, the model is static'}"
    near = "opt" if "opt" in passed else passed[0]
    changes = ", ".join(_differences(profile, point, near))
    return f"{near} ran; bring {point} nearer to it: {changes}"


def _differences(profile: Profile, point: Point, near: Point) -> Iterator[str]:
    for name, given in profile.shapes.items():
        for axis, (size, good) in enumerate(zip(getattr(given, point), getattr(given, near), strict=True)):
            if size != good:
                yield f"axis {axis} of '{name}' from {size} towards {good}"
    for name, given in profile.values.items():
        for place, (value, good) in enumerate(zip(getattr(given, point), getattr(given, near), strict=True)):
            if value != good:
                yield f"value {place} of '{name}' from {value} towards {good}"


def _hint_on_values(reason: str) -> list[str]:
    """Gather and its like stop at an index beyond their table, which sizes cannot mend."""
    if "out of data bounds" not in reason:
        return []
    return ["a generated value is no row of a table: give that input's range, as inputs: {NAME: {range: [0, LAST]}}"]


def _reproduce(graph: Graph, path: Path) -> str:
    command: list[Any] = ["polygraphy", "run", graph.path, "--model-type", "onnx", "--onnxrt", "--load-inputs", path]
    if graph.external_files and graph.path.parent != graph.weights_dir:
        command += ["--external-data-dir", graph.weights_dir]
    return shlex.join(str(part) for part in command)
