"""Recorded figures and runs against gates, and what stays of them when bundles are merged and verified."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_manifest import digest, manifest, rtx_artifact, tensorrt_artifact

from trtforge.release.gates import missed_gates, misses_of_kept, not_judged, silently_wider
from trtforge.release.manifest import (
    AccuracyRecord,
    EngineFigures,
    EngineRecord,
    NotRun,
    ParityRecord,
    PercentilesRecord,
    PerformanceRecord,
    PointRecord,
    PreviousRecord,
    SlowdownRecord,
    manifest_json,
    merge,
    read_manifest,
)
from trtforge.release.verify import verify

ASKED = PerformanceRecord(
    p99_ms=2.0, throughput_qps=100.0, max_regression=0.02, sizes={"N": (1, 8)}, cuda_graph=False, engines={}
)
NAN = float("nan")
PREVIOUS = PreviousRecord(identifier="old", digest=digest("d"))
T4, RTX = tensorrt_artifact("T4", "sm75"), rtx_artifact()
PLANNED = {engine.unit_digest: engine.identifier for engine in (T4, RTX)}
JUDGED_BY = digest("3")


def point(p99=2.0, qps=100.0, low=0.02, **changes):
    times = PercentilesRecord(p50=1.0, p90=1.1, p95=1.2, p99=p99)
    base = PointRecord(
        sizes={"N": 8},
        profile="default",
        latency_ms=times,
        compute_ms=times,
        throughput_qps=qps,
        num_queries=10,
        context_bytes=1,
        slowdown=SlowdownRecord(ratio=0.03, low=low, high=0.04),
        remarks=(),
    )
    return replace(base, **changes)


def figures(*points, engine=T4, **changes):
    base = EngineFigures(
        engine_digest=engine.digest,
        gpu="NVIDIA T4",
        driver="580",
        tensorrt="tensorrt 10.9",
        cuda="pycuda",
        switches={"cuda_graph": False, "streams": 1, "duration_s": 3.0},
        engine_bytes=1,
        points=points or (point(), point(sizes={"N": 1})),
        previous=PREVIOUS,
        warnings=(),
    )
    return replace(base, **changes)


@pytest.mark.parametrize(
    ("found", "codes"),
    [
        (point(), []),  # every gate is met exactly
        (point(p99=2.0001), [9]),
        (point(qps=99.9), [9]),
        (point(low=0.021), [14]),
        (point(p99=3.0, qps=1.0, low=1.0), [9, 9, 14]),
        (point(slowdown=None), []),
        (point(p99=NAN, qps=NAN, low=NAN), [9, 9, 14]),  # no figure keeps no gate
    ],
)
def test_each_gate(found, codes):
    problems = tuple(missed_gates("net", figures(found), ASKED))

    assert [problem.exit_code for problem in problems] == codes
    assert all(problem.summary.startswith("net at N=8") for problem in problems)


def test_every_size_is_judged_and_no_gate_judges_nothing():
    both = figures(point(p99=3.0), point(p99=1.0), point(p99=4.0, sizes={}))
    none = replace(ASKED, p99_ms=None, throughput_qps=None, max_regression=None)

    assert [problem.summary.partition(":")[0] for problem in missed_gates("net", both, ASKED)] == [
        "net at N=8",
        "net at its only size",
    ]
    assert not tuple(missed_gates("net", both, none))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"previous": NotRun(reason="other GPU")}, "other GPU"),
        ({"previous": None}, "it was not measured against a previous engine"),
        ({"points": (point(slowdown=None),)}, "it was not measured against a previous engine"),
        ({"points": (point(slowdown=None),), "previous": replace(PREVIOUS, digest=T4.digest)}, None),
    ],
)
def test_a_regression_that_was_not_looked_for_is_not_passed(changes, reason):
    unjudged = not_judged(figures(**changes), ASKED)

    assert (unjudged.reason if unjudged else None) == reason
    assert not_judged(figures(**changes), replace(ASKED, max_regression=None)) is None


def with_figures(record, *artifacts):
    return manifest(*artifacts, performance=record)


def test_a_manifest_with_figures_is_read_back(tmp_path):
    written = with_figures(replace(ASKED, engines={T4.identifier: figures(), "x": NotRun(reason="-")}), T4)
    (tmp_path / "manifest.json").write_text(manifest_json(written))

    assert read_manifest(tmp_path / "manifest.json").performance == written.performance


@pytest.mark.parametrize(
    ("earlier", "kept"),
    [
        (ASKED, True),
        (replace(ASKED, p99_ms=9.0, max_regression=None), True),  # gates do not change figures
        (replace(ASKED, sizes={}), False),
        (replace(ASKED, cuda_graph=True), False),
    ],
)
def test_merging_keeps_figures_that_were_taken_the_same_way(earlier, kept):
    measured = figures()
    old = with_figures(replace(earlier, engines={T4.identifier: measured}), T4)
    new = with_figures(replace(ASKED, engines={RTX.identifier: NotRun(reason="no GPU")}), RTX)

    merged = merge(old, new, PLANNED, JUDGED_BY).performance

    assert (merged.p99_ms, merged.max_regression) == (2.0, 0.02)
    assert merged.engines[RTX.identifier] == NotRun(reason="no GPU")
    assert (merged.engines[T4.identifier] == measured) == kept
    assert set(merged.engines) == {T4.identifier, RTX.identifier}


@pytest.mark.parametrize(("same_bytes", "kept"), [(True, True), (False, False)])
def test_a_build_without_the_gpu_loses_no_figures_of_the_same_engine(same_bytes, kept):
    old = with_figures(replace(ASKED, engines={RTX.identifier: figures(engine=RTX)}), RTX)
    again = RTX if same_bytes else replace(RTX, digest=digest("9"))
    new = with_figures(replace(ASKED, engines={RTX.identifier: NotRun(reason="no GPU")}), again)

    merged = merge(old, new, PLANNED, JUDGED_BY).performance

    assert isinstance(merged.engines[RTX.identifier], EngineFigures) == kept


def test_a_spec_that_asks_no_more_drops_figures():
    old = with_figures(replace(ASKED, engines={T4.identifier: figures()}), T4)

    assert merge(old, manifest(RTX), PLANNED, JUDGED_BY).performance == NotRun(reason="no GPU")


def test_a_kept_engine_that_misses_a_new_gate_is_found():
    found = with_figures(replace(ASKED, p99_ms=1.0, engines={T4.identifier: figures(point())}), T4)

    assert len(tuple(misses_of_kept(found, {RTX.identifier}))) == 1
    assert not tuple(misses_of_kept(found, {T4.identifier}))


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ({T4.identifier: figures()}, [("ok", 0)]),
        ({T4.identifier: figures(point(p99=3.0, low=1.0), point(sizes={"N": 1}))}, [("failed", 9), ("failed", 14)]),
        ({T4.identifier: figures(point())}, [("failed", 10), ("ok", 0)]),  # nothing at N=1
        ({T4.identifier: figures(gpu="NVIDIA A100-SXM4-80GB")}, [("failed", 10)]),
        ({T4.identifier: figures(previous=NotRun(reason="other"))}, [("ok", 0), ("not_checked", 0)]),
        ({T4.identifier: NotRun(reason="no T4")}, [("not_checked", 0)]),
        ({}, [("not_checked", 0)]),
        ({T4.identifier: figures(engine_digest=digest("9"))}, [("failed", 10)]),
    ],
)
def test_verify_judges_what_is_recorded(tmp_path, engines, expected):
    (tmp_path / "manifest.json").write_text(manifest_json(with_figures(replace(ASKED, engines=engines), T4)))

    report = verify(tmp_path / "manifest.json", wanted_gpu=None, wanted_tensorrt=None, facts=None)

    found = [(check.verdict, check.exit_code) for check in report.checks if check.name == "performance"]
    assert found == expected


def run_of(engine=T4, **changes):
    parity = ParityRecord(
        stage="engine",
        verdict="passed",
        reason="within tolerance at 6 points",
        reference="onnxruntime, FP32",
        candidate=engine.identifier,
        num_points=6,
        outputs={"y": "max_abs_diff is 0, allowed at most 0.001, at profile 'default' max"},
    )
    base = EngineRecord(
        engine_digest=engine.digest,
        gpu="NVIDIA T4",
        driver="580",
        tensorrt="tensorrt 10.9",
        cuda="pycuda",
        parity=parity,
        accuracy=NotRun(reason="no metric"),
        judged_by=JUDGED_BY,
        layer_types={"float16": 1, "float32": 9},
        engine_bytes=1,
        run_bytes=2,
    )
    return replace(base, **changes)


ACCURACY = AccuracyRecord(
    metric="m.py:f",
    data_digest=digest("5"),
    num_samples=100,
    reference=0.9,
    candidate=0.89,
    drop_at_most=0.03,
    confidence=0.95,
    allowed=0.05,
)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (run_of(), [("parity", "ok", 0)]),
        (run_of(accuracy=ACCURACY), [("parity", "ok", 0), ("accuracy", "ok", 0)]),
        (run_of(accuracy=replace(ACCURACY, allowed=0.02)), [("parity", "ok", 0), ("accuracy", "failed", 5)]),
        (run_of(accuracy=replace(ACCURACY, candidate=0.5)), [("parity", "ok", 0), ("accuracy", "failed", 5)]),
        (run_of(gpu="NVIDIA A100-SXM4-80GB"), [("parity", "failed", 10)]),
        (run_of(layer_types={"float32": 10, "unknown": 3}), [("parity", "ok", 0), ("precision", "warning", 0)]),
        (NotRun(reason="no T4"), [("parity", "not_checked", 0)]),
        (None, [("parity", "not_checked", 0)]),
        (run_of(engine_digest=digest("9")), [("parity", "failed", 10)]),
    ],
)
def test_verify_judges_a_recorded_run(tmp_path, record, expected):
    engine = replace(T4, precision="fp16")
    written = manifest(engine, engines={engine.identifier: record} if record else {})
    (tmp_path / "manifest.json").write_text(manifest_json(written))

    report = verify(tmp_path / "manifest.json", wanted_gpu=None, wanted_tensorrt=None, facts=None)

    names = ("parity", "accuracy", "precision")
    found = [(one.name, one.verdict, one.exit_code) for one in report.checks if one.artifact and one.name in names]
    assert found == expected


@pytest.mark.parametrize(
    ("found", "changes", "judged_by", "kept"),
    [
        (NotRun(reason="no GPU"), {}, JUDGED_BY, True),
        (NotRun(reason="no GPU"), {"digest": digest("9")}, JUDGED_BY, False),
        (NotRun(reason="no GPU"), {}, digest("8"), False),  # by other bounds, or another metric
        (None, {}, JUDGED_BY, True),
        (None, {}, digest("8"), False),
    ],
)
def test_a_build_without_the_gpu_keeps_the_run_of_the_same_bytes_by_the_same_bounds(found, changes, judged_by, kept):
    engine = replace(T4, **changes)
    new = manifest(engine, engines={T4.identifier: found}) if found else manifest(RTX)

    merged = merge(manifest(T4, engines={T4.identifier: run_of()}), new, PLANNED, judged_by)

    assert isinstance(merged.engines[T4.identifier], EngineRecord) == kept


@pytest.mark.parametrize(
    ("precision", "types", "is_silent"),
    [
        ("fp16", {"float32": 3}, True),
        ("int8-implicit", {"float32": 3, "unknown": 2, "int32": 1}, True),
        ("fp16", {"float32": 30, "float16": 1}, False),
        ("int8", {"float32": 3, "int8": 1}, False),
        ("bf16", {"bfloat16": 1}, False),
        ("fp16", {"unknown": 9}, False),
        ("fp32", {"float32": 3}, False),
        ("int8-implicit", {"float16": 151, "int8": 2, "float32": 1}, True),
        ("int8-implicit", {"int8": 53, "float16": 3, "unknown": 1}, False),
        ("int8-implicit", {"unknown": 4, "int32": 2}, False),
        ("int8", {"float16": 3, "float32": 2}, False),
    ],
)
def test_an_engine_that_computes_in_a_wider_type(precision, types, is_silent):
    assert bool(silently_wider(precision, types)) == is_silent
