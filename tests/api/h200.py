"""A project for an H200 with TensorRT 8.6.1, which are stand-ins, in this process and in those that trtforge starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from test_tensorrt_calls import parsed

from trtforge import pipeline, planning
from trtforge.errors import TrtForgeError
from trtforge.machine import GpuFacts, machine_facts
from trtforge.release.verify import verify

HERE = Path(__file__).parent
H200 = GpuFacts(0, "NVIDIA H200", "H200", "sm90", 132, 150_000_000_000, "GPU-1")
ENGINE = "net-fp32-h200-trt8.6.1"
MODEL = """
<ir_version: 8, opset_import: ["": 13]>
net (float[rows, 8] x) => (float[rows, 8] y) { [add] y = Add(x, x) }
"""
SPEC = """
version: 1
name: net
model: {onnx: net.onnx}
profiles: [{inputs: {x: {min: [1, 8], opt: [3, 8], max: [32, 8]}}}]
targets: [{backend: tensorrt, gpus: [H200, A100], when_missing: skip}]
output: out
"""


def enter(folder, monkeypatch):
    """Makes `folder` the project, and this machine the one with the GPU."""
    model = onnx.parser.parse_model(MODEL)
    onnx.save(model, folder / "net.onnx")
    (folder / "network.json").write_text(json.dumps(parsed(model)))
    machine(monkeypatch, H200)
    for path in (HERE, HERE / "site_bench", HERE / "site"):  # the builder's process sees the last alone
        monkeypatch.syspath_prepend(path)
    for name, value in {
        "PYTHONPATH": f"{HERE / 'site'}:{HERE}",
        "STAND_IN_VERSION": "8.6.1",
        "STAND_IN_TRACE": str(folder / "trace.txt"),
        "STAND_IN_NETWORK": str(folder / "network.json"),
        "XDG_CACHE_HOME": str(folder / "xdg"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)


def machine(monkeypatch, *gpus, libraries=("pycuda",)):
    facts = machine_facts()
    packages = {name: version for name, version in facts.packages.items() if name not in ("pycuda", "cuda-python")}
    packages |= {"tensorrt": "8.6.1", **dict.fromkeys(libraries, "1.0")}
    here = replace(facts, gpus=gpus, packages=packages, cuda_driver_version="580.1", cuda_version="13.0")
    monkeypatch.setattr(planning, "machine_facts", lambda: here)


def build(project, more="", events=None, spec=SPEC):
    path = project / "net.yaml"
    path.write_text(spec + more)
    told = events if events is not None else []
    return pipeline.build(path, None, told.append, store_path=project / "store")


def refused(project, more="", spec=SPEC):
    with pytest.raises(TrtForgeError) as caught:
        build(project, more, spec=spec)
    return caught.value.problems


def checks_of(project, name):
    report = verify(project / "out" / "manifest.json", wanted_gpu="H200", wanted_tensorrt="8.6", facts=None)
    return [(check.verdict, check.exit_code, check.text) for check in report.checks if check.name == name]
