"""Runs two versions of a model on the same inputs, over the whole profile, and records where they part."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trtforge.errors import GraphError, Problem, SpecError, TrtForgeError, raise_any
from trtforge.parity.metrics import compare
from trtforge.parity.report import OutputResult, ParityReport, PointResult, RunnerFacts, concluded
from trtforge.parity.tolerances import NEVER, Check, Stage, Tolerance, judge, verdict_of
from trtforge.reference import ReferenceSession
from trtforge.samples.source import Sample
from trtforge.shapes.inputs import generate_at
from trtforge.spec.model import InputValues
from trtforge.types import POINTS, Graph, Profile, Shape

Array = np.ndarray[Any, np.dtype[Any]]

_MOST_DRAWS = 20


class Runner(Protocol):
    """One version of a model, ready to run.

    `run` takes input name -> array and gives output name -> array in the model's order. It raises a `TrtForgeError`
    where the model stops. The arrays it gives stay as they are until its next run.
    """

    @property
    def name(self) -> str:
        """For people, such as `onnxruntime, as exported`."""

    @property
    def facts(self) -> dict[str, str]:
        """What ran: provider, versions, optimisation level."""

    def run(self, feeds: Mapping[str, Array], /) -> Mapping[str, Array]:
        """Runs the model once."""


@dataclass(frozen=True, slots=True)
class OnnxRunner:
    """A graph in the reference session: onnxruntime on the CPU, every optimisation off."""

    name: str
    session: ReferenceSession

    @property
    def facts(self) -> dict[str, str]:
        """Those of the session."""
        return self.session.facts

    def run(self, feeds: Mapping[str, Array], /) -> Mapping[str, Array]:
        """Runs the graph once.

        Raises:
            GraphError: onnxruntime stopped.
        """
        return self.session.run(feeds)


@dataclass(frozen=True, slots=True, eq=False)
class ParityInput:
    """One set of inputs to compare on.

    Attributes:
        label: `profile 'chat' max`, or a sample's own.
        values: of the inputs that decide shapes.
        seed: of generated values; None for a sample.
        is_drawn: whether its sizes were drawn at random, so that it is no fault of the candidate's if even the
            reference cannot run at them.
    """

    label: str
    feeds: dict[str, Array]
    values: dict[str, Shape]
    seed: int | None
    is_drawn: bool


@dataclass(frozen=True, slots=True)
class IndexedScores:
    """The output that an output of indices points into, with the axis of its classes."""

    output: str
    axis: int = -1


def parity_inputs(
    graph: Graph,
    profiles: Iterable[Profile],
    declared: Mapping[str, InputValues],
    samples: Iterable[Sample],
    *,
    num_random: int,
    seed: int,
) -> Iterator[ParityInput]:
    """Inputs to compare on, made one at a time: the samples, then each profile at min, opt, max and sizes in between.

    Guarantees: the same inputs again for the same arguments. Sizes of min, opt and max occur once where several are
    equal. A profile has `num_random` drawn points, of sizes that did not occur as long as some are left (or nearly),
    and of other values in any case. Each generated point has a seed of its own, counted up from `seed`: from two
    points on, a mask with a single row is all `low` in one of them.

    Sizes are drawn evenly between min and max, both included. Axes of one ONNX symbol get one size, as do unnamed axes
    with the same min, opt and max, which most often are one axis too. Every other draw keeps to steps of the
    greatest common divisor of the profile's own steps, at which networks that halve their input run.

    Args:
        graph: the model.
        profiles: as `resolve_profiles` returns them.
        declared: `inputs` of the spec.
        samples: the user's own, `open_samples`.
        num_random: drawn points for each profile, 0 or more.
        seed: 0 or more.

    Raises:
        SeveralErrors: of `SpecError` problems: a sample does not fit into any profile; of `GraphError` problems: an
            input has a type that cannot be generated.
    """
    profiles = tuple(profiles)
    for sample in samples:
        raise_any(_outside(graph, profiles, sample))
        values = {name: _whole_values(sample.feeds[name]) for profile in profiles for name in profile.values}
        yield ParityInput(sample.label, sample.feeds, values, None, is_drawn=False)
    for number, (label, shapes, values, is_drawn) in enumerate(_points(graph, profiles, num_random, seed)):
        feeds = generate_at(graph, shapes, values, declared, seed + number)
        yield ParityInput(label, feeds, values, seed + number, is_drawn)


_Point = tuple[str, dict[str, Shape], dict[str, Shape], bool]


def _points(graph: Graph, profiles: tuple[Profile, ...], num_random: int, seed: int) -> Iterator[_Point]:
    seen: list[tuple[dict[str, Shape], dict[str, Shape]]] = []
    for profile in profiles:
        for point in POINTS:
            shapes = {name: getattr(given, point) for name, given in profile.shapes.items()}
            values = {name: getattr(given, point) for name, given in profile.values.items()}
            if (shapes, values) not in seen:
                seen.append((shapes, values))
                yield f"profile '{profile.name}' {point}", shapes, values, False
    for profile in profiles:
        rng = _stream(seed, profile.name)
        for number in range(num_random):
            shapes, values = _unseen(graph, profile, rng, seen, on_grid=number % 2 == 1)
            seen.append((shapes, values))
            yield f"profile '{profile.name}' random {number}", shapes, values, True


def _stream(seed: int, name: str) -> np.random.Generator:
    digest = hashlib.sha256(f"sizes of {name}".encode()).digest()
    return np.random.default_rng([seed, int.from_bytes(digest[:16], "little")])


def _unseen(
    graph: Graph,
    profile: Profile,
    rng: np.random.Generator,
    seen: list[tuple[dict[str, Shape], dict[str, Shape]]],
    *,
    on_grid: bool,
) -> tuple[dict[str, Shape], dict[str, Shape]]:
    drawn = _draw(graph, profile, rng, on_grid=on_grid)
    for _ in range(_MOST_DRAWS):
        if drawn not in seen:
            return drawn
        drawn = _draw(graph, profile, rng, on_grid=on_grid)
    return drawn


def _draw(
    graph: Graph, profile: Profile, rng: np.random.Generator, *, on_grid: bool
) -> tuple[dict[str, Shape], dict[str, Shape]]:
    sizes: dict[Any, int] = {}
    shapes = {}
    for spec in graph.inputs:
        given = profile.shapes[spec.name]
        axes = zip(spec.shape, zip(given.min, given.opt, given.max, strict=True), strict=True)
        shapes[spec.name] = tuple(_size(dim, limits, sizes, rng, on_grid=on_grid) for dim, limits in axes)
    values = {
        name: tuple(
            _between(limits, rng, on_grid=on_grid) for limits in zip(given.min, given.opt, given.max, strict=True)
        )
        for name, given in profile.values.items()
    }
    return shapes, values


def _size(
    dim: int | str | None,
    limits: tuple[int, int, int],
    sizes: dict[Any, int],
    rng: np.random.Generator,
    *,
    on_grid: bool,
) -> int:
    key = dim if isinstance(dim, str) else limits
    if key not in sizes:
        sizes[key] = _between(limits, rng, on_grid=on_grid)
    return sizes[key]


def _between(limits: tuple[int, int, int], rng: np.random.Generator, *, on_grid: bool) -> int:
    low, usual, high = limits
    step = max(math.gcd(usual - low, high - low), 1) if on_grid else 1
    return low + step * int(rng.integers(0, (high - low) // step, endpoint=True))


def _whole_values(array: Array) -> Shape:
    return tuple(int(value) for value in array.reshape(-1))


def _outside(graph: Graph, profiles: tuple[Profile, ...], sample: Sample) -> Iterator[Problem]:
    """A problem if the sample fits none of the profiles; there may be none of them, before any is needed."""
    if not profiles or any(_is_inside(profile, sample) for profile in profiles):
        return
    found = ", ".join(f"{spec.name} {list(sample.feeds[spec.name].shape)}" for spec in graph.inputs)
    ranges = [
        f"profile '{profile.name}': "
        + ", ".join(f"{name} {list(given.min)} to {list(given.max)}" for name, given in profile.shapes.items())
        + "".join(f", {name} = {list(given.min)} to {list(given.max)}" for name, given in profile.values.items())
        for profile in profiles
    ]
    yield Problem(
        f"{sample.label} fits no optimization profile: found {found}",
        "widen min or max of a profile in the spec, or leave that sample out",
        detail=tuple(ranges),
        exit_code=SpecError.exit_code,
    )


def _is_inside(profile: Profile, sample: Sample) -> bool:
    sizes = [(sample.feeds[name].shape, given) for name, given in profile.shapes.items()]
    values = [(_whole_values(sample.feeds[name]), given) for name, given in profile.values.items()]
    return all(
        len(found) == len(given.min)
        and all(low <= size <= high for low, size, high in zip(given.min, found, given.max, strict=True))
        for found, given in sizes + values
    )


def compare_stage(
    reference: Runner,
    candidate: Runner,
    inputs: Iterable[ParityInput],
    tolerances: Mapping[str, Tolerance],
    stage: Stage,
    on_point: Callable[[str], None],
    *,
    logits: Collection[str] = (),
    scores: Mapping[str, IndexedScores] | None = None,
) -> ParityReport:
    """Compares every output at every point, matched by name.

    Guarantees: outputs of one point are held at a time. Nothing passes unseen: an output that is missing, renamed, added
    or in another place, of another type or length, a candidate that stops where the reference runs, and values that
    are not finite are each a failure of their own. A point whose sizes were drawn and at which the reference stops is
    recorded as not compared; without any other, the report says `not_run`.

    Args:
        reference: the version before.
        candidate: the version after.
        inputs: `parity_inputs`.
        tolerances: one for every output of the reference; `resolve_tolerances` makes them.
        stage: whose result the candidate is.
        on_point: told the label of each point before it runs.
        logits: outputs whose figures as logits are measured though no tolerance needs them now.
        scores: output of indices -> the output they point into, so that a tie is no difference.

    Raises:
        GraphError: the reference stops on a sample, or at the min, opt or max of a profile.
        KeyError: an output has no tolerance, or `scores` names none.
    """
    measured = {name for name, tolerance in tolerances.items() if tolerance.needs_logits} | set(logits)
    points = []
    for given in inputs:
        on_point(given.label)
        points.append(_point_result(reference, candidate, given, tolerances, measured, scores or {}))
    return concluded(stage, _facts(reference), _facts(candidate), points, tolerances)


def _facts(runner: Runner) -> RunnerFacts:
    return RunnerFacts(runner.name, dict(runner.facts))


def _point_result(
    reference: Runner,
    candidate: Runner,
    given: ParityInput,
    tolerances: Mapping[str, Tolerance],
    logits: Collection[str],
    scores: Mapping[str, IndexedScores],
) -> PointResult:
    shapes = {name: feed.shape for name, feed in given.feeds.items()}
    place = (given.label, shapes, given.values, given.seed)
    try:
        expected = reference.run(given.feeds)
    except TrtForgeError as error:
        if given.is_drawn:
            return PointResult(*place, (), not_run=f"{reference.name} stopped: {_reason(error)}")
        raise _reference_error(reference, given, error) from error
    try:
        found = candidate.run(given.feeds)
    except TrtForgeError as error:
        return PointResult(*place, (), problems=(f"{candidate.name} stopped: {_reason(error)}",))
    results = [
        _output_result(name, expected, found, tolerances[name], scores.get(name), is_logits=name in logits)
        for name in expected
        if name in found
    ]
    return PointResult(*place, (*results, *_name_results(list(expected), list(found))), _order(expected, found))


def _output_result(
    name: str,
    expected: Mapping[str, Array],
    found: Mapping[str, Array],
    tolerance: Tolerance,
    indexed: IndexedScores | None,
    *,
    is_logits: bool,
) -> OutputResult:
    if indexed is None:
        metrics = compare(expected[name], found[name], logits=is_logits)
    else:
        table = expected[indexed.output]
        metrics = compare(expected[name], found[name], logits=is_logits, scores=table, axis=indexed.axis)
    return OutputResult(name, metrics, judge(metrics, tolerance))


def _name_results(expected: list[str], found: list[str]) -> Iterator[OutputResult]:
    """One for each output that only one side has; a missing one and one added in its place are a renamed one."""
    added = [name for name in found if name not in expected]
    for place, name in enumerate(expected):
        if name in found:
            continue
        instead = found[place] if place < len(found) and found[place] in added else None
        if instead is None:
            yield _name_result(name, "missing", "present")
        else:
            added.remove(instead)
            yield _name_result(name, f"renamed to '{instead}'", f"'{name}'")
    for name in added:
        yield _name_result(name, "added", "none of this name")


def _name_result(name: str, found: str, allowed: str) -> OutputResult:
    return OutputResult(name, None, verdict_of([Check("name", found, allowed, NEVER)]))


def _order(expected: Mapping[str, Array], found: Mapping[str, Array]) -> tuple[str, ...]:
    """What is wrong with the order of the outputs that both have."""
    before = [name for name in expected if name in found]
    after = [name for name in found if name in expected]
    if before == after:
        return ()
    return (f"outputs stand in the order {', '.join(after)}, expected {', '.join(before)}",)


def _reason(error: TrtForgeError) -> str:
    problem = error.problems[0]
    return problem.detail[0] if problem.detail else problem.summary


def _reference_error(reference: Runner, given: ParityInput, error: TrtForgeError) -> GraphError:
    shapes = ", ".join(f"{name} {list(feed.shape)}" for name, feed in given.feeds.items())
    step = "narrow the profile, or give that input's range in the spec, as inputs: {NAME: {range: [LOW, HIGH]}}"
    return GraphError(
        f"{reference.name} does not run on {given.label}: {shapes}",
        detail=[_reason(error)],
        next_step="mend that sample, or leave it out" if given.seed is None else step,
    )
