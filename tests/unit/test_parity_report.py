"""Reports: their verdicts, JSON, judging again, and the text for people."""

from __future__ import annotations

import json

import numpy as np
import pytest

from trtforge.parity.metrics import compare
from trtforge.parity.report import (
    OutputResult,
    ParityReport,
    PointResult,
    RunnerFacts,
    concluded,
    first_broken,
    lines,
    not_run,
    rejudge,
)
from trtforge.parity.tolerances import NEVER, Check, Tolerance, judge, verdict_of
from trtforge.plain import from_plain, to_plain

SIDES = (RunnerFacts("ort", {"graph_optimization": "ORT_DISABLE_ALL"}), RunnerFacts("engine", {}))
STRICT, LOOSE = Tolerance(atol=1e-3), Tolerance(atol=1.0)


def output_of(error, tolerance=STRICT, name="logits"):
    reference = np.float32([[1, 2, 3]])
    metrics = compare(reference, reference + np.float32([0, 0, error]))
    return OutputResult(name, metrics, judge(metrics, tolerance))


def point_of(*outputs, label="profile 'p' opt", size=8, seed=3, **rest):
    return PointResult(label, {"x": (1, size)}, {}, seed, outputs, **rest)


def report_of(*points, tolerances=None):
    return concluded("engine", *SIDES, points, tolerances or {"logits": STRICT})


def test_a_report_passes_only_if_something_was_compared_and_nothing_is_wrong():
    skipped = point_of(not_run="ort stopped: no")

    assert report_of(point_of(output_of(0)), skipped).verdict == "passed"
    assert report_of(point_of(output_of(0)), point_of(output_of(0.1))).verdict == "failed"
    assert report_of(point_of(output_of(0), problems=("order",))).verdict == "failed"
    assert report_of(skipped).verdict == "not_run"
    assert report_of().verdict == "not_run"
    assert not_run("engine", "no GPU").verdict == "not_run"


def test_reports_survive_json():
    outputs = output_of(0.1), OutputResult("gone", None, verdict_of([Check("name", "missing", "present", NEVER)]))
    report = report_of(point_of(*outputs), point_of(output_of(0), seed=None), point_of(not_run="stopped"))
    text = json.dumps(to_plain(ParityReport, report), allow_nan=False)

    assert from_plain(ParityReport, json.loads(text)) == report


def test_judging_again_needs_no_run():
    report = report_of(point_of(output_of(0.1)))
    loosened = rejudge(report, {"logits": LOOSE})

    assert (report.verdict, loosened.verdict) == ("failed", "passed")
    assert loosened.tolerances == {"logits": LOOSE}
    assert rejudge(loosened, {"logits": STRICT}) == report
    with pytest.raises(KeyError, match="logits"):
        rejudge(report, {})


def test_judging_again_excuses_nothing_but_the_figures():
    missing = OutputResult("gone", None, verdict_of([Check("name", "missing", "present", NEVER)]))

    for point in (point_of(missing), point_of(output_of(0), problems=("engine stopped",))):
        assert rejudge(report_of(point), {"logits": LOOSE}).verdict == "failed"
    assert rejudge(not_run("engine", "no GPU"), {"logits": LOOSE}).verdict == "not_run"
    assert rejudge(report_of(point_of(output_of(0.1))), {"logits": Tolerance(min_top1=0.5)}).verdict == "failed"


@pytest.mark.parametrize(
    ("verdicts", "broken"),
    [
        ({}, None),
        ({"onnx": "passed", "mended": "passed", "engine": "not_run"}, None),
        ({"engine": "failed", "lowered": "failed", "onnx": "passed"}, "lowered"),
        ({"engine": "failed", "lowered": "not_run"}, "engine"),
    ],
)
def test_the_first_broken_stage_is_the_earliest_that_failed(verdicts, broken):
    reports = [ParityReport(stage, None, None, (), {}, verdict, "") for stage, verdict in verdicts.items()]

    assert first_broken(reports) == broken
    assert first_broken(reversed(reports)) == broken


def test_the_worst_output_and_point_come_first():
    report = report_of(
        point_of(output_of(0.1), output_of(0, name="slots")),
        point_of(output_of(0.5), output_of(0.002, name="slots"), size=37, label="profile 'p' random 0", seed=7),
    )

    assert lines(report) == [
        "engine, ort against engine: failed: beyond tolerance at 2 of 2 points (logits, slots)",
        "  output  point                                    at                 found               allowed",
        "  logits  profile 'p' random 0: x [1, 37], seed 7  [0, 2] 3 -> 3.5    max_abs_diff 0.5    at most 0.001",
        "  logits  profile 'p' opt: x [1, 8], seed 3        [0, 2] 3 -> 3.1    max_abs_diff 0.1    at most 0.001",
        "  slots   profile 'p' random 0: x [1, 37], seed 7  [0, 2] 3 -> 3.002  max_abs_diff 0.002  at most 0.001",
    ]


def test_a_pass_shows_how_close_each_output_came():
    report = report_of(point_of(output_of(0.0005), output_of(0, name="slots")), point_of(output_of(0.0001), size=9))
    text = lines(report)

    assert text[0] == "engine, ort against engine: passed: within tolerance at 2 points"
    assert [line.split()[0] for line in text[1:]] == ["output", "logits", "slots"]
    assert "x [1, 8]" in text[2]


def test_what_was_not_compared_is_said():
    report = report_of(point_of(output_of(0)), point_of(not_run="ort stopped: sizes differ", size=37))

    assert lines(report)[-1] == "  note: not compared, profile 'p' opt: x [1, 37], seed 3: ort stopped: sizes differ"
    assert "; 1 drawn where the reference stops" in lines(report)[0]
    assert lines(not_run("engine", "this machine has no GPU")) == ["engine: not run: this machine has no GPU"]


def test_many_rows_are_counted_and_problems_lead():
    points = [point_of(output_of(0.1), size=size) for size in range(1, 13)]
    text = lines(report_of(*points, point_of(problems=("engine stopped: signal 11",), size=99)))

    assert "engine stopped: signal 11" in text[2]
    assert text[-1] == "  and 3 more"
    assert len(text) == 13


def test_names_cannot_move_the_cursor():
    text = lines(report_of(point_of(output_of(0.1, name="a\x1b[2J\nb"))))

    assert all(line.isprintable() for line in text)
    assert "a\\x1b[2J\\nb" in text[2]
