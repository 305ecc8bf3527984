"""An operator of one's own, from CUDA source to an engine: plugin/square.cu.

Needs nvcc, and TENSORRT_INCLUDE, the folder with NvInfer.h. Without pytest: python tests/gpu/test_gpu_plugin.py
"""

# ruff: noqa: T201 - what the builder says is for reading: pytest -s
from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
from place import Place, raises, run_all

from trtforge.errors import CapabilityError
from trtforge.machine import machine_facts
from trtforge.runtime.session import EngineSession

try:
    import pytest
except ModuleNotFoundError:
    pytest = None
else:
    pytestmark = pytest.mark.gpu

SOURCE = Path(__file__).with_name("plugin") / "square.cu"
INCLUDE = os.environ.get("TENSORRT_INCLUDE", "/usr/include/x86_64-linux-gnu")
# The function is what onnxruntime runs in place of the plugin.
MODEL = """
<ir_version: 8, opset_import: ["": 17, "trtforge.example": 1]>
net (float[rows, 64] x) => (float[rows, 64] y)
{
    [first] a = Relu(x)
    [own] y = trtforge.example.SquarePlus <shift: float = 1.5> (a)
}
<domain: "trtforge.example", opset_import: ["": 17]>
SquarePlus <shift> (a) => (c)
{
    [square] aa = Mul(a, a)
    [shift] s = Constant <value_float: float = @shift> ()
    [plus] c = Add(aa, s)
}
"""
SPEC = """
version: 1
name: {name}
model: {{onnx: square.onnx}}
inputs: {{x: {{range: [-2, 2]}}}}
profiles: [{{name: only, inputs: {{x: {{min: [1, 64], opt: [8, 64], max: [32, 64]}}}}}}]
"""


def missing():
    """What there is not for compiling the plugin."""
    header = Path(INCLUDE) / "NvInfer.h"
    return "no nvcc" if not shutil.which("nvcc") else "" if header.exists() else f"no {header}"


def compiled(folder):
    """The plugin library, for the TensorRT at hand."""
    name = f"libnvinfer.so.{machine_facts().packages['tensorrt'].partition('.')[0]}"
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    wheel = importlib.util.find_spec("tensorrt_libs")
    folders += wheel.submodule_search_locations if wheel else ()
    places = [f"-L{path}" for path in folders if (Path(path) / name).exists()]
    library = folder / "libsquare.so"
    command = ["nvcc", "-O2", "-shared", "-Xcompiler", "-fPIC", "-w", "-I", INCLUDE, "-o", library, SOURCE]
    subprocess.run([*command, *places, f"-l:{name}"], check=True)
    return library


def make(folder):
    place = Place(folder)
    onnx.save(onnx.parser.parse_model(MODEL), folder / "square.onnx")
    place.plugin = compiled(folder)
    place.build("square", SPEC + f"plugins: [{place.plugin}]\n")
    return place


if pytest:

    @pytest.fixture(scope="module")
    def built(tmp_path_factory):
        if missing():
            pytest.skip(missing())
        return make(tmp_path_factory.mktemp("gpu"))


def test_the_engine_computes_what_the_operator_is(built):
    with EngineSession.open(built.manifest("square"), plugins=[built.plugin]) as session:
        for rows in (1, 8, 32):
            x = np.random.default_rng(rows).uniform(-2, 2, (rows, 64)).astype(np.float32)
            assert np.allclose(session.run({"x": x})["y"], np.maximum(x, 0) ** 2 + 1.5, rtol=1e-6)


def test_the_manifest_names_the_library(built):
    (artifact,) = json.loads(built.manifest("square").read_text())["artifacts"]

    assert artifact["plugins"] == [hashlib.sha256(built.plugin.read_bytes()).hexdigest()]


def test_verify_and_bench_take_it(built):
    for words in (("verify", "--spec", built.folder / "square.yaml"), ("bench", "--plugin", built.plugin)):
        done = built.trtforge(words[0], built.manifest("square"), *words[1:])
        print(done.stdout)
        assert done.returncode == 0, done.stdout + done.stderr


def test_without_the_library_nothing_is_loaded(built):
    with raises(CapabilityError, "needs 1 plugin libraries that were not given"):
        EngineSession.open(built.manifest("square"))


def test_another_library_never_runs(built):
    changed = built.folder / "changed.so"
    changed.write_bytes(built.plugin.read_bytes() + b"\0")

    with raises(CapabilityError, "needs 1 plugin libraries that were not given"):
        EngineSession.open(built.manifest("square"), plugins=[changed])
    assert "changed.so" not in Path("/proc/self/maps").read_text()


if __name__ == "__main__":
    sys.exit(missing() or run_all(sys.modules[__name__], make))
