"""The checks of `doctor --for SPEC`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trtforge.backends.compatibility import REQUIREMENTS, compatibility
from trtforge.machine import GpuFacts, MachineFacts
from trtforge.spec.load import load_spec
from trtforge.types import Graph

GRAPH = Graph(
    source=Path("m.onnx"),
    path=Path("m.onnx"),
    weights_dir=Path(),
    digest="",
    ir_version=8,
    opsets=(("", 17),),
    producer="",
    inputs=(),
    outputs=(),
    roles=(),
    data_dependent_outputs=(),
    operators=(),
    element_types=("float32",),
    has_qdq=False,
    wide_int_constants=(),
    num_nodes=1,
    weight_bytes=0,
)
H200 = GpuFacts(0, "NVIDIA H200", "H200", "sm90", 132, 150_000_000_000, "")
MACHINE = MachineFacts(
    python_version="3.11.7",
    platform="linux",
    os="Ubuntu 22.04",
    glibc="2.35",
    cpu="x86_64",
    packages={"tensorrt": "11.4.0.106", "tensorrt_rtx": "1.7.1.116", "onnx": "1.23.2", "onnxruntime": "1.32.0"},
    cuda_driver_version="580.159.03",
    cuda_version="13.0",
    cuda_error="",
    gpus=(H200,),
)
LAPTOP = replace(
    MACHINE,
    packages={"tensorrt_rtx": "1.7.1.116", "onnxruntime": "1.32.0"},
    cuda_driver_version="",
    cuda_version="",
    cuda_error="no CUDA driver on this machine",
    gpus=(),
)
RTX = "{backend: tensorrt_rtx, gpus: [sm86]}"
TENSORRT = "{backend: tensorrt, gpus: [H200]}"


@pytest.fixture
def checks(tmp_path):
    def checks_of(targets, facts, graph=GRAPH):
        path = tmp_path / "spec.yaml"
        path.write_text(f"version: 1\nname: net\nmodel: {{onnx: m.onnx}}\ntargets: [{targets}]\n")
        found = compatibility(load_spec(path), graph, facts)
        assert all(check.source and check.found and check.expected for check in found)
        assert all(bool(check.next_step) == (check.verdict == "mismatch") for check in found)
        return {check.name: check for check in found}

    return checks_of


def mismatches(checks):
    return [name for name, check in checks.items() if check.verdict == "mismatch"]


@pytest.mark.parametrize(("targets", "facts"), [(RTX, LAPTOP), (f"{RTX}, {TENSORRT}", MACHINE)])
def test_machine_that_fits(checks, targets, facts):
    assert not mismatches(checks(targets, facts))


def test_rtx_needs_no_driver_to_build(checks):
    assert not [name for name in checks(RTX, LAPTOP) if "driver" in name or "GPU" in name]


def test_laptop_cannot_build_a_tensorrt_engine(checks):
    found = checks(TENSORRT, LAPTOP)
    assert mismatches(found) == ["targets[0]: tensorrt version", "targets[0]: GPU H200"]
    assert found["targets[0]: tensorrt version"].next_step == "pip install 'tensorrt'"
    assert not mismatches(checks(TENSORRT.replace("}", ", when_missing: skip}"), LAPTOP))


@pytest.mark.parametrize(
    ("version", "installed", "fits"),
    [
        ("11.4", "11.4.0.106", True),
        ("10.1", "10.10.0.31", False),
        ("10.10", "10.10.0.31", True),
        ("11.3", "11.4.0.106", False),
        ("11.4.0.106", "11.4.0.106", True),
    ],
)
def test_version(checks, version, installed, fits):
    """C53: versions compare part by part, as numbers."""
    facts = replace(MACHINE, packages=MACHINE.packages | {"tensorrt": installed})
    found = checks(TENSORRT.replace("}", f", version: '{version}'}}"), facts)
    assert (found["targets[0]: tensorrt version"].verdict == "ok") == fits


def test_version_that_trtforge_does_not_know(checks):
    found = checks(TENSORRT, replace(MACHINE, packages=MACHINE.packages | {"tensorrt": "9.3.0"}))
    assert mismatches(found) == ["targets[0]: tensorrt version"]


@pytest.mark.parametrize(
    ("change", "installed", "name", "verdict"),
    [
        ({"cuda_driver_version": "470.82.01"}, "11.4.0", "CUDA driver", "mismatch"),
        ({"cuda_driver_version": "525.60.13"}, "10.14.1", "CUDA driver", "ok"),
        ({"cuda_driver_version": "525.60.13"}, "11.0.0", "CUDA driver", "mismatch"),
        ({"cuda_driver_version": ""}, "11.0.0", "CUDA driver", "unknown"),
        ({"python_version": "3.12.3"}, "8.6.1", "Python", "mismatch"),
        ({"python_version": "3.12.3"}, "10.0.1", "Python", "ok"),
        ({"python_version": "3.15.0"}, "11.4.0", "Python", "mismatch"),
        ({"python_version": "3.11.7"}, "10.9.0", "Python", "unknown"),
        ({"glibc": "2.27"}, "10.8.0", "glibc", "mismatch"),
        ({"glibc": "2.27"}, "10.7.0", "glibc", "ok"),
        ({"glibc": ""}, "10.8.0", "glibc", "unknown"),
    ],
)
def test_requirements_of_the_installed_version(checks, change, installed, name, verdict):
    facts = replace(MACHINE, packages=MACHINE.packages | {"tensorrt": installed}, **change)
    assert checks(TENSORRT, facts)[f"targets[0]: tensorrt: {name}"].verdict == verdict


def test_other_gpu_of_the_same_capability(checks):
    """C54."""
    found = checks("{backend: tensorrt, gpus: [H100]}", MACHINE)
    assert mismatches(found) == ["targets[0]: GPU H100"]
    assert found["targets[0]: GPU H100"].found == "H200"


@pytest.mark.parametrize(
    ("onnxruntime", "opset", "verdict"),
    [
        ("1.32.0", 28, "ok"),
        ("1.20.1", 22, "mismatch"),
        ("1.20.1", 21, "ok"),
        ("1.21.0", 21, "ok"),
        ("1.21.0", 22, "unknown"),
        ("1.40.0", 29, "unknown"),
        (None, 17, "mismatch"),
    ],
)
def test_onnxruntime_opset(checks, onnxruntime, opset, verdict):
    packages = {name: version for name, version in MACHINE.packages.items() if name != "onnxruntime"}
    facts = replace(MACHINE, packages=packages | ({"onnxruntime": onnxruntime} if onnxruntime else {}))
    assert checks(RTX, facts, replace(GRAPH, opsets=(("", opset),)))["onnxruntime: opset"].verdict == verdict


def test_without_a_model_nothing_is_said_about_opsets(checks):
    assert "onnxruntime: opset" not in checks(RTX, MACHINE, None)


def test_every_requirement_has_a_source():
    assert all(row.source and row.cuda_majors for row in REQUIREMENTS)
