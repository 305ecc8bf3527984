"""`performance:` of a spec from end to end: TensorRT and the GPU are stand-ins, `trtforge bench` and its process are real."""

from __future__ import annotations

import hashlib
import shutil
import time
from dataclasses import replace

import h200
import pytest
from h200 import ENGINE, H200, SPEC
from typer.testing import CliRunner

from trtforge.cli.app import app
from trtforge.errors import exit_code_of
from trtforge.release.manifest import EngineFigures, NotRun, manifest_json, read_manifest


def build(project, performance="", events=None):
    return h200.build(project, f"performance: {performance}\n" if performance else "", events)


def refused(project, performance):
    return h200.refused(project, f"performance: {performance}\n")


def checks_of(project):
    return h200.checks_of(project, "performance")


def test_figures_are_in_the_manifest_and_taken_once(project):
    bundle = build(project, "{p99_ms: 15, throughput_qps: 1}")

    record = bundle.manifest.performance
    assert (record.p99_ms, record.throughput_qps, record.max_regression) == (15.0, 1.0, None)
    figures = record.engines[ENGINE]
    assert isinstance(figures, EngineFigures)
    assert (figures.gpu, figures.driver, figures.tensorrt) == ("NVIDIA H200", "580.1", "tensorrt 8.6.1")
    assert figures.engine_digest == bundle.manifest.artifacts[0].digest
    assert figures.switches["cuda_graph"] is False
    (point,) = figures.points
    assert (point.sizes, point.profile) == ({"rows": 3}, "default")
    # Two copies and three rows, a millisecond each, and ten more.
    assert {point.latency_ms.p50, point.latency_ms.p90, point.latency_ms.p95, point.latency_ms.p99} == {15.0}
    assert point.compute_ms.p50 == 13.0
    assert checks_of(project) == [
        ("ok", 0, f"{ENGINE}: p99 15.000 ms at rows=3 on NVIDIA H200; keeps p99_ms and throughput_qps")
    ]
    start = time.perf_counter()
    again = build(project, "{p99_ms: 15, throughput_qps: 1}")
    assert time.perf_counter() - start < 1
    assert not again.is_changed


def test_sizes_and_cuda_graph_of_the_spec(project):
    record = build(project, "{sizes: {rows: [1, 4]}, cuda_graph: true}").manifest.performance

    figures = record.engines[ENGINE]
    assert [(point.sizes, point.latency_ms.p50) for point in figures.points] == [
        ({"rows": 1}, 13.0),
        ({"rows": 4}, 16.0),
    ]
    assert figures.switches["cuda_graph"] is True


@pytest.mark.parametrize(
    ("performance", "text"),
    [
        ("{p99_ms: 14.9}", "p99 latency is 15.000 ms, and p99_ms allows 14.9"),
        ("{throughput_qps: 999999}", "queries a second, and throughput_qps asks for 999999"),
    ],
)
def test_a_missed_gate_refuses_the_bundle_and_is_measured_again(project, performance, text):
    for _ in range(2):
        (problem,) = refused(project, performance)
        assert problem.exit_code == 9
        assert problem.summary.startswith(f"{ENGINE} at rows=3: ")
        assert text in problem.summary
        assert problem.where.line == 8
    assert not (project / "out").exists()
    build(project, "{p99_ms: 15}")
    assert not (project / "trace.txt").exists()  # all with the engine that is stored


def previous_bundle(project, less_ms, **changes):
    """The bundle in `out`, with an engine that takes so much less, as `old/manifest.json`."""
    shutil.copytree(project / "out", project / "old")
    manifest = read_manifest(project / "old" / "manifest.json")
    data = b"ftrt" + bytes(59) + bytes([less_ms])
    (project / "old" / manifest.artifacts[0].file).write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    artifact = replace(manifest.artifacts[0], digest=digest, size_bytes=len(data), **changes)
    (project / "old" / "manifest.json").write_text(manifest_json(replace(manifest, artifacts=(artifact,))))


AGAINST = "{max_regression: 0.05, previous: old/manifest.json}"


def test_an_engine_as_fast_as_the_previous_one(project):
    build(project)
    previous_bundle(project, 0)

    figures = build(project, AGAINST).manifest.performance.engines[ENGINE]

    slowdown = figures.points[0].slowdown
    assert (slowdown.ratio, slowdown.low, slowdown.high) == (0, 0, 0)
    assert figures.previous.identifier == ENGINE
    assert figures.previous.digest != figures.engine_digest
    assert [verdict for verdict, _, _ in checks_of(project)] == ["ok"]


def test_a_slower_engine_than_the_previous_one_is_refused(project):
    build(project)
    previous_bundle(project, 5)

    (problem,) = refused(project, AGAINST)

    assert problem.exit_code == 14
    assert "is 50.0% slower than the previous engine (at least 50.0%)" in problem.summary  # 15 ms, 10 ms


def test_the_very_engine_of_the_previous_bundle_needs_no_comparison(project):
    build(project)

    figures = build(project, AGAINST.replace("old", "out")).manifest.performance.engines[ENGINE]

    assert figures.previous.digest == figures.engine_digest
    assert figures.points[0].slowdown is None
    assert [verdict for verdict, _, _ in checks_of(project)] == ["ok"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"backend_version": "8.6.0"}, "was built by tensorrt 8.6.0, and this one by 8.6.1"),
        ({"target_gpu": "A100"}, "has no engines by tensorrt for H200"),
        ({"settings": {"version_compatible": True}}, "is version-compatible: it brings native code"),
        ({"profiles": ()}, "has no profile for rows=3"),
    ],
)
def test_what_cannot_be_compared_is_told_and_not_passed(project, changes, reason):
    build(project)
    previous_bundle(project, 0, **changes)
    events = []

    figures = build(project, AGAINST, events).manifest.performance.engines[ENGINE]

    assert reason in figures.previous.reason
    assert any(event.kind == "warning" and reason in event.text for event in events)
    (ok, unjudged) = checks_of(project)
    assert (ok[0], unjudged[0]) == ("ok", "not_checked")
    assert reason in unjudged[2]


@pytest.mark.parametrize("target", [None, "/dev/zero", "gone"])
def test_a_damaged_previous_engine_is_an_error(project, target):
    build(project)
    previous_bundle(project, 0)
    engine = project / "old" / f"{ENGINE}.engine"
    engine.unlink()
    engine.symlink_to(target) if target else engine.write_bytes(b"ftrt")

    assert exit_code_of(refused(project, AGAINST)) == 10


def test_a_crash_ends_the_measuring_alone(project, monkeypatch):
    monkeypatch.setenv("DIES", "bench")

    (problem,) = refused(project, "{p99_ms: 15}")

    assert problem.summary == f"{ENGINE} was not measured: its process ended by SIGSEGV"
    assert problem.exit_code == 9
    assert "about to die" in problem.detail


def test_without_the_section_nothing_is_measured(project, monkeypatch):
    monkeypatch.setenv("DIES", "bench")

    assert build(project).manifest.performance == NotRun(
        reason="the spec has no performance section", next_step="trtforge bench MANIFEST"
    )


def test_a_machine_without_a_cuda_library_says_so_before_it_builds(project, monkeypatch):
    h200.machine(monkeypatch, H200, libraries=())
    shutil.rmtree(project / "store")

    (problem,) = refused(project, "{p99_ms: 15}")

    assert (problem.exit_code, problem.next_step) == (6, "pip install cuda-python")
    assert not (project / "trace.txt").exists()


def test_figures_of_a_kept_engine_are_judged_by_verify(project):
    build(project, "{p99_ms: 15}")
    path = project / "out" / "manifest.json"
    path.write_text(path.read_text().replace('"p99_ms": 15.0', '"p99_ms": 14.5'))

    assert checks_of(project) == [
        ("failed", 9, f"{ENGINE} at rows=3: p99 latency is 15.000 ms, and p99_ms allows 14.5")
    ]


def test_plan_says_what_is_measured_and_why_not(project):
    path = project / "net.yaml"
    path.write_text(SPEC + "performance: {p99_ms: 15}\n")

    lines = CliRunner().invoke(app, ["plan", str(path), "--store", str(project / "store")]).stdout.splitlines()

    assert "  performance      p99_ms 15.0" in lines
    assert "  performance      sizes opt of every profile" in lines
    assert lines.count("                   measured on NVIDIA H200") == 1
