"""A spec for TensorRT from end to end, on a machine that only looks as if it had an H200 and TensorRT 8.6.1."""

from __future__ import annotations

import _ctypes
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from test_tensorrt_calls import DYNAMIC, parsed

from trtforge import pipeline, planning
from trtforge.calibration.table import write_table
from trtforge.digests import file_digest
from trtforge.errors import SeveralErrors, TrtForgeError
from trtforge.evidence import calibration_table
from trtforge.machine import GpuFacts, machine_facts
from trtforge.run import open_run

MODEL = DYNAMIC
H200 = GpuFacts(0, "NVIDIA H200", "H200", "sm90", 132, 150_000_000_000, "GPU-1")
SPEC = """
version: 1
name: net
model: {onnx: net.onnx}
profiles:
  - inputs:
      x: {min: [1, 4], opt: [8, 4], max: [32, 4]}
      size: {values: {min: [1, 4], opt: [8, 4], max: [32, 4]}}
targets:
  - {backend: tensorrt, gpus: [H200, A100], when_missing: skip}
output: out
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    here = Path(__file__).parent
    model = onnx.parser.parse_model(MODEL)
    onnx.save(model, tmp_path / "net.onnx")
    (tmp_path / "network.json").write_text(json.dumps(parsed(model)))
    facts = machine_facts()
    packages = {**facts.packages, "tensorrt": "8.6.1"}
    here_now = replace(facts, gpus=(H200,), packages=packages, cuda_driver_version="580.1", cuda_version="13.0")
    monkeypatch.setattr(planning, "machine_facts", lambda: here_now)
    for name, value in {
        "PYTHONPATH": f"{here / 'site'}:{here}",
        "STAND_IN_VERSION": "8.6.1",
        "STAND_IN_TRACE": str(tmp_path / "trace.txt"),
        "STAND_IN_NETWORK": str(tmp_path / "network.json"),
        "XDG_CACHE_HOME": str(tmp_path / "xdg"),
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def build(project, spec, events=None):
    path = project / "net.yaml"
    path.write_text(spec)
    return pipeline.build(path, None, (events if events is not None else []).append, store_path=project / "store")


def test_one_gpu_is_built_the_other_is_skipped_with_a_reason(project):
    bundle = build(project, SPEC)

    (artifact,) = bundle.manifest.artifacts
    assert (artifact.identifier, artifact.target_gpu) == ("net-fp32-h200-trt8.6.1", "H200")
    assert (artifact.built_on.device_name, artifact.built_on.num_sms) == ("NVIDIA H200", 132)
    assert artifact.network_flags == ("EXPLICIT_BATCH",)
    assert artifact.trtexec.startswith("trtexec --onnx=")
    assert [tensor.dtype for tensor in artifact.inputs] == ["float32", "int32"]  # 8.6 has no int64
    (missing,) = bundle.missing
    assert missing.skipped
    assert missing.problem.summary == (
        "the target is for A100, and this machine has NVIDIA H200; TensorRT builds on the GPU model that an engine is for"
    )
    (timing,) = (project / "store" / "timing").glob("*.cache")
    assert timing.name == "tensorrt-8.6.1-cuda13.0-H200.cache"
    assert artifact.timing_cache_digest == file_digest(timing)


def test_nothing_is_built_twice_and_the_timing_cache_has_no_say(project):
    build(project, SPEC)
    for path in (project / "store" / "timing").glob("*.cache"):
        path.write_bytes(b"other")

    again = build(project, SPEC)

    assert set(again.verdicts.values()) == {"cached"}
    assert not again.is_changed


def test_a_wrong_gpu_alone_is_an_error(project):
    with pytest.raises(SeveralErrors) as caught:
        build(project, SPEC.replace("[H200, A100], when_missing: skip", "[A100]"))

    (problem,) = caught.value.problems
    assert problem.exit_code == 6
    assert "the target is for A100, and this machine has NVIDIA H200" in problem.summary


def test_a_plugin_is_in_manifest_and_key(project):
    library = project / "libown.so"
    shutil.copyfile(_ctypes.__file__, library)
    spec = SPEC + "plugins: [libown.so]\n"

    first = build(project, spec)
    assert first.manifest.artifacts[0].plugins == (file_digest(library),)

    with library.open("ab") as file:
        file.write(b"\0")
    assert "cached" not in build(project, spec).verdicts.values()


def test_a_plugin_that_is_none_is_refused_at_its_place(project):
    (project / "libtext.so").write_text("int x;")

    with pytest.raises(SeveralErrors) as caught:
        build(project, SPEC + "plugins: [libtext.so, libgone.so]\n")

    assert [problem.summary.partition(": ")[2] for problem in caught.value.problems] == [
        "expected a 64-bit ELF shared library (.so)",
        "No such file or directory",
    ]
    assert [problem.where.line for problem in caught.value.problems] == [12, 12]


PLAIN = """
<ir_version: 8, opset_import: ["": 13]>
net (float[batch, 4] x) => (float[batch, 4] y)
<float[4, 4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}>
{
    [first] a = MatMul(x, w)
    [mask] m = Greater(a, x)
    [root] b = Relu(a)
    [last] y = Where(m, a, b)
}
"""
IMPLICIT = """
version: 1
name: net
model: {onnx: net.onnx}
profiles: [{inputs: {x: {min: [1, 4], opt: [8, 4], max: [32, 4]}}}]
precision: {type: int8, quantization: implicit}
calibration: {data: x.npz, method: minmax}
targets: [{backend: tensorrt, gpus: [H200]}]
output: out
"""


@pytest.fixture
def plain_project(project):
    model = onnx.parser.parse_model(PLAIN)
    onnx.save(model, project / "net.onnx")
    (project / "network.json").write_text(json.dumps(parsed(model)))
    x = np.zeros((8, 4), np.float32)
    x[3, 1] = -127
    np.savez(project / "x.npz", x=x)
    return project


def test_implicit_int8_hands_over_a_scale_for_every_float_value(plain_project):
    bundle = build(plain_project, IMPLICIT)

    (artifact,) = bundle.manifest.artifacts
    assert artifact.identifier == "net-int8-implicit-h200-trt8.6.1"
    assert (artifact.network_flags, artifact.builder_flags) == (("EXPLICIT_BATCH",), ("FP16", "INT8"))
    (line,) = (line for line in (plain_project / "trace.txt").read_text().splitlines() if "cache read" in line)
    # The largest magnitude of x and of a is 127: a scale of 1, which is 3f800000. Relu leaves 0 of it, Where the rest.
    assert "TRT-8601-MinMaxCalibration\\nx: 3f800000\\na: 3f800000\\nb: " in line
    assert "y: " in line
    assert "m: " not in line


def test_implicit_int8_without_fp16(plain_project):
    (artifact,) = build(plain_project, IMPLICIT.replace("implicit}", "implicit, rest: fp32}")).manifest.artifacts

    assert artifact.builder_flags == ("INT8",)


def test_other_calibration_data_builds_anew(plain_project):
    build(plain_project, IMPLICIT)
    assert set(build(plain_project, IMPLICIT).verdicts.values()) == {"cached"}

    np.savez(plain_project / "x.npz", x=np.ones((8, 4), np.float32))

    assert set(build(plain_project, IMPLICIT).verdicts.values()) != {"cached"}


def test_a_table_for_implicit_int8_has_every_tensor(plain_project):
    spec_path, table_path = plain_project / "net.yaml", plain_project / "net.table.json"
    spec_path.write_text(IMPLICIT)
    with open_run(spec_path, plain_project / "store", lambda _event: None) as run:
        table = calibration_table(spec_path, run)
    write_table(table, table_path)
    spec = IMPLICIT.replace("data: x.npz, method: minmax", "table: net.table.json")
    assert build(plain_project, spec).manifest.artifacts

    write_table(replace(table, tensors=table.tensors[:2]), table_path)
    with pytest.raises(TrtForgeError) as caught:
        build(plain_project, spec)

    (problem,) = caught.value.problems
    assert problem.exit_code == 4
    assert "quantization: implicit needs: 2 of 4 tensors missing: 'b', 'y'" in problem.summary
