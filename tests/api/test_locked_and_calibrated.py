"""Builds that repeat recorded tactics, and builds that calibrate, from spec to manifest, with stand-ins for TensorRT."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import onnx
import pytest
from test_tensorrt_calls import TYPED, parsed
from test_tensorrt_pipeline import IMPLICIT, build, plain_project, project  # noqa: F401 - fixtures

from trtforge import pipeline, planning
from trtforge.digests import file_digest
from trtforge.errors import SeveralErrors, TrtForgeError
from trtforge.evidence import calibration_table
from trtforge.machine import GpuFacts
from trtforge.run import open_run

A100 = GpuFacts(0, "NVIDIA A100-SXM4-80GB", "A100", "sm80", 108, 80_000_000_000, "GPU-2")
AS_MODEL = """
version: 1
name: net
model: {onnx: net.onnx}
profiles: [{inputs: {x: {min: [1, 4], opt: [8, 4], max: [32, 4]}}}]
precision: {type: as_model}
builder: {profiling_verbosity: detailed, record_tactics: true}
targets: [{backend: tensorrt, gpus: [H200]}]
output: out
"""


@pytest.fixture
def editable(project, monkeypatch):  # noqa: F811
    """A machine with TensorRT 10.9, on which tactic 1 is the fastest of every operator."""
    facts = planning.machine_facts()
    newer = replace(facts, packages={**facts.packages, "tensorrt": "10.9.0.34"})
    monkeypatch.setattr(planning, "machine_facts", lambda: newer)
    monkeypatch.setenv("STAND_IN_VERSION", "10.9.0.34")
    save(project, TYPED)
    return project


def save(folder, text):
    model = onnx.parser.parse_model(text)
    onnx.save(model, folder / "net.onnx")
    (folder / "network.json").write_text(json.dumps(parsed(model)))


def build_locked(folder, jobs=None):
    path, store = folder / "net.yaml", folder / "store"
    return pipeline.build(path, None, lambda _event: None, store_path=store, locked=True, jobs=jobs)


def test_a_locked_build_repeats_the_published_tactics_and_is_found_again(editable, monkeypatch):
    first = build(editable, AS_MODEL).manifest.artifacts[0]
    recorded = editable / "store" / "blobs" / first.timing_cache_digest[:2] / first.timing_cache_digest
    assert file_digest(recorded) == first.timing_cache_digest
    monkeypatch.setenv("STAND_IN_TACTIC", "2")
    (editable / "trace.txt").write_text("")

    locked = build_locked(editable)

    assert locked.verdicts == {first.identifier: "stale, timing cache changed"}
    again = locked.manifest.artifacts[0]
    assert again.builder_flags == ("EDITABLE_TIMING_CACHE", "ERROR_ON_TIMING_CACHE_MISS")
    assert again.timing_cache_digest == first.timing_cache_digest
    assert "combine" not in (editable / "trace.txt").read_text()
    assert set(build_locked(editable).verdicts.values()) == {"cached"}


def test_a_changed_model_ends_a_locked_build_and_leaves_what_was_published(editable):
    build(editable, AS_MODEL)
    before = (editable / "out" / "manifest.json").read_bytes()
    save(editable, TYPED.replace("[second]", "[third]"))

    with pytest.raises(SeveralErrors) as caught:
        build_locked(editable)

    (problem,) = caught.value.problems
    assert problem.exit_code == 7
    assert problem.summary.startswith("net-fp16-h200-trt10.9.0: the build does not follow the recorded timing cache")
    assert problem.detail[0].startswith("no tactic of 'third_shuffle' (key 0x")
    assert (editable / "out" / "manifest.json").read_bytes() == before


def test_targets_of_other_machines_are_no_hindrance_to_a_locked_build(editable):
    build(editable, AS_MODEL.replace("[H200]", "[H200, A100], when_missing: skip"))

    bundle = build_locked(editable, jobs=2)

    assert [artifact.target_gpu for artifact in bundle.manifest.artifacts] == ["H200"]
    assert [missing.gpu for missing in bundle.missing] == ["A100"]


def test_a_locked_engine_stays_in_the_folder_when_another_machine_builds_into_it(editable, monkeypatch):
    text = AS_MODEL.replace("[H200]", "[H200, A100], when_missing: skip")
    build(editable, text)
    (locked,) = build_locked(editable).manifest.artifacts
    other = replace(planning.machine_facts(), gpus=(A100,))
    monkeypatch.setattr(planning, "machine_facts", lambda: other)

    found = {artifact.target_gpu: artifact for artifact in build(editable, text).manifest.artifacts}

    assert found.keys() == {"H200", "A100"}
    assert found["H200"] == locked


@pytest.mark.parametrize("change", [("detailed", "none"), (", record_tactics: true", "")])
def test_a_spec_that_changed_is_locked_where_its_tactics_are_the_same(editable, change):
    build(editable, AS_MODEL)
    (editable / "net.yaml").write_text(AS_MODEL.replace(*change))

    (artifact,) = build_locked(editable).manifest.artifacts

    assert artifact.builder_flags == ("EDITABLE_TIMING_CACHE", "ERROR_ON_TIMING_CACHE_MISS")


def test_layers_are_compared_with_those_of_the_recorded_engine(editable):
    build(editable, AS_MODEL)
    (record,) = (editable / "store" / "records" / "build").glob("*.json")
    assert ["first", "kernel_1"] in json.loads(record.read_text())["record"]["result"]["engine"]["tactics"]


def refused_lock(folder):
    with pytest.raises(TrtForgeError) as caught:
        build_locked(folder)
    (problem,) = caught.value.problems
    assert problem.exit_code == 6
    return problem


def test_without_a_published_bundle_nothing_is_locked(editable):
    (editable / "net.yaml").write_text(AS_MODEL)

    problem = refused_lock(editable)

    assert problem.summary.endswith("out/manifest.json records no tactics of it")
    assert problem.next_step == "write builder: {record_tactics: true}, and build without --locked"
    assert not (editable / "out").exists()


def test_tactics_in_another_store_are_named(editable):
    artifact = build(editable, AS_MODEL).manifest.artifacts[0]
    blobs = editable / "store" / "blobs" / artifact.timing_cache_digest[:2]
    (blobs / artifact.timing_cache_digest).unlink()

    problem = refused_lock(editable)

    assert f"(sha256 {artifact.timing_cache_digest[:12]}) is not in the store" in problem.summary
    assert "--store" in problem.next_step


def test_a_manifest_that_names_another_blob_ends_a_locked_build(editable):
    artifact = build(editable, AS_MODEL).manifest.artifacts[0]
    path = editable / "out" / "manifest.json"
    path.write_text(path.read_text().replace(artifact.timing_cache_digest, artifact.digest))

    assert "tensorrt 10.9.0.34 does not take the recorded timing cache" in refused_lock(editable).summary


def test_a_build_that_recorded_nothing_cannot_be_repeated(editable):
    build(editable, AS_MODEL.replace(", record_tactics: true", ""))

    assert refused_lock(editable).summary.endswith("out/manifest.json records no tactics of it")


def test_8_6_locks_nothing(plain_project):  # noqa: F811
    build(plain_project, AS_MODEL.replace(", record_tactics: true", ""))

    problem = refused_lock(plain_project)

    assert (
        "cannot be locked: TensorRT has timing caches that hold the choice for each operator from 10.8"
        in problem.summary
    )
    assert problem.next_step == "leave out --locked"


STREAMED = IMPLICIT.replace("method: minmax", "method: tensorrt_minmax")


@pytest.fixture
def streamed(plain_project, monkeypatch):  # noqa: F811
    """19 samples: two batches of 8, and three that fill none."""
    monkeypatch.setenv("STAND_IN_BATCH_SIZES", "32")
    np.savez(plain_project / "x.npz", x=np.arange(19 * 4, dtype=np.float32).reshape(19, 4))
    return plain_project


def batches(folder):
    return [line for line in (folder / "trace.txt").read_text().splitlines() if line.startswith("batch of")]


def planned(folder):
    with open_run(folder / "net.yaml", folder / "store", lambda _event: None) as run:
        return planning.explain(planning.make_plan(folder / "net.yaml", run), run)


def test_the_builders_calibrator_gets_the_samples_and_the_store_keeps_its_scales(streamed):
    events = []

    bundle = build(streamed, STREAMED, events)

    assert planned(streamed)["calibrate"] == "cached"
    assert batches(streamed) == [f"batch of ['x']: [{[float(i) for i in range(at, at + 32)]}]" for at in (0, 32)]
    assert bundle.manifest.artifacts[0].builder_flags == ("FP16", "INT8")
    made = bundle.manifest.calibration
    assert (made.method, made.num_samples, made.num_tensors) == ("tensorrt_minmax", 16, 1)
    assert "3 samples fill no batch of 8, and were left aside" in made.notes
    digest = bundle.manifest.calibration_digest
    cache = streamed / "store" / "blobs" / digest[:2] / digest
    assert cache.read_text().startswith("TRT-8601-")
    assert "calibration, batch 2 of 2" in [event.text for event in events]
    assert set(build(streamed, STREAMED).verdicts.values()) == {"cached"}


def test_another_build_of_the_same_model_does_not_calibrate_again(streamed):
    first = build(streamed, STREAMED)
    (streamed / "trace.txt").write_text("")

    again = build(streamed, STREAMED + "builder: {optimization_level: 1}\n")

    assert set(again.verdicts.values()) != {"cached"}
    assert not batches(streamed)
    assert again.manifest.calibration_digest == first.manifest.calibration_digest
    assert again.manifest.calibration == first.manifest.calibration


def test_two_builds_at_once_calibrate_once(streamed):
    def build_at(level):
        path = streamed / f"{level}.yaml"
        path.write_text(
            STREAMED.replace("output: out", f"output: out{level}\nbuilder: {{optimization_level: {level}}}")
        )
        return pipeline.build(path, None, lambda _event: None, store_path=streamed / "store")

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(build_at, (1, 2))

    assert len(batches(streamed)) == 2
    assert first.manifest.calibration_digest == second.manifest.calibration_digest


def test_scales_of_a_model_that_changed_meanwhile_are_not_kept(streamed):
    def change(event):
        if event.text.startswith("calibration, batch"):
            save(streamed, WIDE)

    (streamed / "net.yaml").write_text(STREAMED)
    with pytest.raises(TrtForgeError) as caught:
        pipeline.build(streamed / "net.yaml", None, change, store_path=streamed / "store")

    assert "net.onnx" in caught.value.problems[0].summary
    assert not list((streamed / "store" / "records").glob("calibrate*/*"))


@pytest.mark.parametrize(
    "change", [("tensorrt_minmax", "tensorrt_entropy"), ("opt: [8, 4]", "opt: [4, 4]"), ("x.npz", "other.npz")]
)
def test_what_decides_scales_calibrates_again(streamed, change, monkeypatch):
    monkeypatch.setenv("STAND_IN_BATCH_SIZES", "16")
    np.savez(streamed / "other.npz", x=np.ones((19, 4), np.float32))
    build(streamed, STREAMED)
    (streamed / "trace.txt").write_text("")

    build(streamed, STREAMED.replace(*change))

    assert batches(streamed)


def problems(folder, spec):
    with pytest.raises(TrtForgeError) as caught:
        build(folder, spec)
    return caught.value.problems


def test_too_few_samples_for_a_batch(streamed):
    np.savez(streamed / "x.npz", x=np.ones((3, 4), np.float32))

    (problem,) = problems(streamed, STREAMED)

    assert problem.exit_code == 4
    assert "the calibration data hold 3 samples, expected a batch of 8, the opt of profile 'default'" in problem.summary
    assert problem.next_step.startswith("add 5 or more samples")


def test_samples_of_other_sizes_than_opt(streamed):
    save(streamed, WIDE)
    spec = STREAMED.replace("min: [1, 4], opt: [8, 4], max: [32, 4]", "min: [1, 2], opt: [8, 6], max: [32, 8]")

    found = problems(streamed, spec)

    assert found[0].exit_code == 4
    assert (
        "x.npz[0]: 'x' is [1, 4], and TensorRT calibrates at the opt of profile 'default', [8, 6]" in found[0].summary
    )
    assert found[0].where.line == 7
    assert len(found) == 19


WIDE = """
<ir_version: 8, opset_import: ["": 13]>
net (float[batch, width] x) => (float[batch, width] y)
{
    [root] y = Relu(x)
}
"""


@pytest.mark.parametrize(
    ("spec", "exit_code", "summary"),
    [
        (STREAMED.replace(", quantization: implicit", ""), 2, "which only quantization: implicit uses"),
        (STREAMED.replace("data: x.npz", "table: x.json"), 2, "makes scales of samples, and the spec names a table"),
    ],
)
def test_where_the_builders_calibrator_has_no_place(streamed, spec, exit_code, summary):
    found = problems(streamed, spec)

    assert [problem.exit_code for problem in found] == [exit_code]
    assert summary in found[0].summary


def test_calibrate_says_where_the_builders_calibrator_runs(streamed):
    (streamed / "net.yaml").write_text(STREAMED)

    with (
        open_run(streamed / "net.yaml", streamed / "store", lambda _event: None) as run,
        pytest.raises(TrtForgeError, match="runs while an engine is built"),
    ):
        calibration_table(streamed / "net.yaml", run)
