"""What `verify` assumes about TensorRT-RTX engines, against engines that the installed TensorRT-RTX builds."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from trtforge.digests import file_digest
from trtforge.plan_header import RTX_COMPUTE_CAPABILITIES, read_plan_header
from trtforge.release.manifest import (
    Artifact,
    HostRecord,
    Manifest,
    ModelRecord,
    NotRun,
    SpecRecord,
    manifest_json,
)
from trtforge.release.output import publish
from trtforge.release.verify import verify

pytestmark = pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="pip install 'trtforge[rtx]'")

BUILD = """
import pathlib, sys
import onnx.parser
import tensorrt_rtx as trt

model = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 17]> g (float[1, 4] x) => (float[1, 4] y) { y = Relu(x) }'
)
logger = trt.Logger(trt.Logger.ERROR)
for name in sys.argv[2:]:
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(model.SerializeToString())
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    assert config.set_compute_capability(getattr(trt.ComputeCapability, name.upper()), 0)
    engine = builder.build_serialized_network(network, config)
    pathlib.Path(sys.argv[1], f"{name}.engine").write_bytes(engine)
"""


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("engines")
    subprocess.run([sys.executable, "-c", BUILD, str(folder), *RTX_COMPUTE_CAPABILITIES], check=True, timeout=300)
    return {name: folder / f"{name}.engine" for name in RTX_COMPUTE_CAPABILITIES}


def installed_version() -> str:
    return importlib.metadata.version("tensorrt-rtx")


@pytest.mark.parametrize("capability", RTX_COMPUTE_CAPABILITIES)
def test_the_header_says_version_size_and_compute_capability(engines, capability):
    header = read_plan_header(engines[capability])
    assert header.kind == "tensorrt_rtx"
    assert header.size_bytes == engines[capability].stat().st_size
    assert header.compute_capabilities == (capability,)
    stated = tuple(int(part) for part in installed_version().split("."))
    assert header.version[: len(stated)] == stated


def artifact(capability: str, engine: Path) -> Artifact:
    return Artifact(
        identifier=f"tiny-fp32-{capability}",
        file=f"tiny-fp32-{capability}.engine",
        size_bytes=engine.stat().st_size,
        digest=file_digest(engine),
        backend="tensorrt_rtx",
        backend_version=installed_version(),
        network_flags=(),
        builder_flags=(),
        settings={},
        tf32=False,
        precision="fp32",
        target_gpu=capability,
        compute_capability=capability,
        built_on=None,
        host="0" * 64,
        timing_cache_digest=None,
        graph_digest="0" * 64,
        unit_digest="0" * 64,
        profiles=(),
        inputs=(),
        outputs=(),
        seconds={},
        warnings=(),
        peak_memory_bytes=None,
    )


@pytest.fixture
def dist(tmp_path, engines) -> Path:
    artifacts = tuple(artifact(name, engines[name]) for name in ("sm86", "sm89"))
    manifest = Manifest(
        trtforge_version="0.1.0",
        created="2026-11-30T20:21:00Z",
        name="tiny",
        spec=SpecRecord(file="tiny.yaml", digest="0" * 64),
        model=ModelRecord(file="tiny.onnx", digest="0" * 64, size_bytes=1, opset=17, producer=""),
        calibration_digest=None,
        stages=(),
        hosts={"0" * 64: HostRecord(python="3", platform="linux", packages={}, driver=None, cuda=None, gpus=())},
        artifacts=artifacts,
        profile_checks=(),
        export=None,
        lowering=(),
        parity=(),
        accuracy=NotRun(reason="no metric"),
        engines={},
        performance=NotRun(reason="no GPU"),
        missing=(),
    )
    files = {artifact.file: engines[artifact.compute_capability] for artifact in artifacts}
    publish(tmp_path / "dist", files, manifest_json(manifest))
    return tmp_path / "dist"


def failed(dist: Path, **wanted) -> list[tuple[str, str]]:
    report = verify(dist / "manifest.json", **{"wanted_gpu": None, "wanted_tensorrt": None, "facts": None, **wanted})
    return [(check.artifact, check.name) for check in report.checks if check.verdict == "failed"]


def test_a_published_bundle_passes(dist):
    assert failed(dist) == []
    assert failed(dist, wanted_gpu="L4", wanted_tensorrt=".".join(installed_version().split(".")[:2])) == []
    assert failed(dist, wanted_gpu="sm120") == [(None, "gpu")]


def test_nothing_of_tensorrt_is_loaded(dist):
    code = (
        "import sys, pathlib; from trtforge.release.verify import verify;"
        "verify(pathlib.Path(sys.argv[1]), wanted_gpu='L4', wanted_tensorrt=None, facts=None);"
        "print([name for name in sys.modules if name.startswith(('tensorrt', 'onnx', 'numpy'))])"
    )
    command = [sys.executable, "-c", code, str(dist / "manifest.json")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"


def test_swapped_engines_do_not_pass(dist):
    a, b = dist / "tiny-fp32-sm86.engine", dist / "tiny-fp32-sm89.engine"
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    assert failed(dist) == [
        (file, check) for file in (a.name, b.name) for check in ("sha256", "header_compute_capability")
    ]


@pytest.mark.parametrize("change", [lambda size: size // 2, lambda size: size - 1])
def test_a_cut_engine_does_not_pass(dist, change):
    engine = dist / "tiny-fp32-sm86.engine"
    data = engine.read_bytes()
    engine.write_bytes(data[: change(len(data))])
    assert failed(dist) == [(engine.name, name) for name in ("size", "sha256", "header_size")]
