"""The record of one parity check: everything that was compared, so that it can be judged again without running."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from trtforge.errors import printable
from trtforge.parity.metrics import Metrics
from trtforge.parity.tolerances import STAGES, Check, Stage, Tolerance, Verdict, judge
from trtforge.types import Shape

Outcome = Literal["passed", "failed", "not_run"]

_MOST_ROWS = 10
_MOST_NOTES = 5


@dataclass(frozen=True, slots=True)
class RunnerFacts:
    """What ran one side: its name, and facts such as provider, versions and optimisation level."""

    name: str
    facts: dict[str, str]


@dataclass(frozen=True, slots=True)
class OutputResult:
    """One output at one point. `metrics` is None for an output that one side lacks."""

    name: str
    metrics: Metrics | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class PointResult:
    """One set of inputs.

    Attributes:
        label: for people: `profile 'chat' max` or `samples.npz[3]`.
        shapes: of the inputs, by name.
        values: of the inputs that decide shapes.
        seed: of generated inputs; None for a sample of the user's.
        outputs: those of both sides in the reference's order, then those that one side lacks.
        problems: what is wrong with the candidate whatever the tolerances are: it stopped, or its outputs stand in
            another order.
        not_run: why nothing was compared, for sizes drawn inside a profile at which the reference itself stops.
    """

    label: str
    shapes: dict[str, Shape]
    values: dict[str, Shape]
    seed: int | None
    outputs: tuple[OutputResult, ...]
    problems: tuple[str, ...] = ()
    not_run: str | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing that was compared is wrong."""
        return not self.problems and all(output.verdict.passed for output in self.outputs)


@dataclass(frozen=True, slots=True)
class ParityReport:
    """One stage's result compared with the result of the stage before it.

    Attributes:
        stage: whose result the candidate is.
        reference, candidate: what ran.
        points: in the order in which they ran.
        tolerances: by output.
        verdict: `passed` only if at least one point was compared and nothing is wrong at any.
        reason: why it was not run; what is wrong in one sentence; or how much was compared.
    """

    stage: Stage
    reference: RunnerFacts | None
    candidate: RunnerFacts | None
    points: tuple[PointResult, ...]
    tolerances: dict[str, Tolerance]
    verdict: Outcome
    reason: str


def not_run(stage: Stage, reason: str) -> ParityReport:
    """The record of a stage that cannot be checked here. It is no pass."""
    return ParityReport(stage, None, None, (), {}, "not_run", reason)


def concluded(
    stage: Stage,
    reference: RunnerFacts,
    candidate: RunnerFacts,
    points: Iterable[PointResult],
    tolerances: Mapping[str, Tolerance],
) -> ParityReport:
    """A report with its verdict drawn from its points."""
    points = tuple(points)
    compared = [point for point in points if point.not_run is None]
    broken = [point for point in compared if not point.passed]
    verdict: Outcome = "failed" if broken else "passed" if compared else "not_run"
    reason = _reason(points, compared, broken)
    return ParityReport(stage, reference, candidate, points, dict(tolerances), verdict, reason)


def _reason(points: tuple[PointResult, ...], compared: list[PointResult], broken: list[PointResult]) -> str:
    if broken:
        names = dict.fromkeys(output.name for point in broken for output in point.outputs if not output.verdict.passed)
        which = f" ({', '.join(names)})" if names else ""
        return f"beyond tolerance at {len(broken)} of {_counted(len(compared), 'point')}{which}"
    if not points:
        return "there were no inputs to compare on"
    if not compared:
        return f"the reference ran at none of {_counted(len(points), 'point')}"
    skipped = f"; {len(points) - len(compared)} drawn where the reference stops" if len(points) > len(compared) else ""
    return f"within tolerance at {_counted(len(compared), 'point')}{skipped}"


def rejudge(report: ParityReport, tolerances: Mapping[str, Tolerance]) -> ParityReport:
    """The report under other tolerances, nothing run again.

    Guarantees: figures and problems stay as they were measured; what a tolerance names and was not measured (figures of
    logits that were not declared) does not pass. A report that was not run stays so.

    Args:
        report: as saved.
        tolerances: one for every output that was compared; `resolve_tolerances` makes them.

    Raises:
        KeyError: an output has no tolerance.
    """
    if report.reference is None or report.candidate is None:
        return report
    points = [
        replace(point, outputs=tuple(_rejudged(output, tolerances) for output in point.outputs))
        for point in report.points
    ]
    return concluded(report.stage, report.reference, report.candidate, points, tolerances)


def _rejudged(output: OutputResult, tolerances: Mapping[str, Tolerance]) -> OutputResult:
    if output.metrics is None:
        return output
    return replace(output, verdict=judge(output.metrics, tolerances[output.name]))


def first_broken(reports: Iterable[ParityReport]) -> Stage | None:
    """The earliest stage of which a report failed; None if none did. One that was not run accuses nobody."""
    broken = {report.stage for report in reports if report.verdict == "failed"}
    return next((stage for stage in STAGES if stage in broken), None)


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of the table, with what it is sorted by."""

    excess: float
    cells: tuple[str, str, str, str, str]


def lines(report: ParityReport) -> list[str]:
    """The report as plain text: a headline, then a table with the worst first.

    A failed report lists the bounds that do not hold, each output and point; a passed one the bound that each output
    came closest to. Names are escaped. Every line fits what it says; none is cut.
    """
    sides = (
        f", {report.reference.name} against {report.candidate.name}" if report.reference and report.candidate else ""
    )
    word = report.verdict.replace("_", " ")
    text = [f"{report.stage}{sides}: {word}: {report.reason}"]
    broken = report.verdict == "failed"
    rows = sorted(_broken_rows(report) if broken else _closest_rows(report), key=lambda row: -row.excess)
    text += _table(rows[:_MOST_ROWS])
    if len(rows) > _MOST_ROWS:
        text.append(f"  and {len(rows) - _MOST_ROWS} more")
    notes = list(dict.fromkeys(_notes(report)))
    text += [f"  note: {note}" for note in notes[:_MOST_NOTES]]
    if len(notes) > _MOST_NOTES:
        text.append(f"  and {len(notes) - _MOST_NOTES} more notes")
    return [printable(line) for line in text]


def _broken_rows(report: ParityReport) -> Iterator[_Row]:
    for point in report.points:
        for problem in point.problems:
            yield _Row(float("inf"), ("-", _place(point), "-", problem, "-"))
        for output in point.outputs:
            for check in output.verdict.reasons[:1]:
                yield _row(point, output, check)


def _closest_rows(report: ParityReport) -> Iterator[_Row]:
    closest: dict[str, _Row] = {}
    for point in report.points:
        for output in point.outputs:
            if output.verdict.closest is None:
                continue
            row = _row(point, output, output.verdict.closest)
            if output.name not in closest or row.excess > closest[output.name].excess:
                closest[output.name] = row
    yield from closest.values()


def _row(point: PointResult, output: OutputResult, check: Check) -> _Row:
    at = "-"
    if check.at is not None:
        at = f"{list(check.at.index)} {_shown(check.at.reference)} -> {_shown(check.at.candidate)}"
    return _Row(check.excess, (output.name, _place(point), at, f"{check.metric} {check.found}", check.allowed))


def _shown(value: float | str) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _place(point: PointResult) -> str:
    shapes = ", ".join(f"{name} {list(shape)}" for name, shape in point.shapes.items())
    values = "".join(f", {name} = {list(value)}" for name, value in point.values.items())
    seed = "" if point.seed is None else f", seed {point.seed}"
    return f"{point.label}: {shapes}{values}{seed}"


def _notes(report: ParityReport) -> Iterator[str]:
    for point in report.points:
        if point.not_run is not None:
            yield f"not compared, {_place(point)}: {point.not_run}"
        for output in point.outputs:
            for note in output.verdict.notes:
                yield f"{output.name}: {note}"


def _table(rows: list[_Row]) -> list[str]:
    if not rows:
        return []
    titles = ("output", "point", "at", "found", "allowed")
    cells = [titles, *([printable(cell) for cell in row.cells] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    ]


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
