"""A step that broke the model ends the run, with the worst of what was found."""

from __future__ import annotations

from trtforge.errors import ParityError
from trtforge.parity.report import ParityReport, lines
from trtforge.spec.load import SpecFile


def refuse_broken(report: ParityReport, spec_file: SpecFile, hints: tuple[str, ...] = ()) -> None:
    """Ends the run at a step that broke the model.

    Raises:
        ParityError: with the worst outputs.
    """
    if report.verdict != "failed":
        return
    raise ParityError(
        f"parity broke at '{report.stage}': {report.reason}",
        where=spec_file.where("parity", report.stage),
        detail=[*lines(report)[:12], *hints],
        next_step=f"trtforge parity {spec_file.path} --per-layer",
    )
