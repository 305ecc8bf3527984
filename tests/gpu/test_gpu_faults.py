"""What goes wrong on a GPU: no memory, a driver that is too old, outputs that are no numbers, a build that is killed.

Where there is no pytest: python tests/gpu/test_gpu_faults.py
"""

# ruff: noqa: T201 - what TensorRT and CUDA say is for reading: pytest -s
from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from unittest import SkipTest

import numpy as np
import onnx
from place import DIGITS, Place, run_all

from trtforge.cuda import open_cuda
from trtforge.errors import CapabilityError

try:
    import pytest
except ModuleNotFoundError:
    pytest = None
else:
    pytestmark = pytest.mark.gpu

SORTED = """
<ir_version: 8, opset_import: ["": 17]>
net (float[rows, 1000000] x) => (float[rows, 3000] largest, int64[rows, 3000] places)
<int64[1] k = {3000}>
{
    [topk] largest, places = TopK(x, k)
}
"""
SORTED_SPEC = """
version: 1
name: {name}
model: {{onnx: sorted.onnx}}
profiles: [{{name: only, inputs: {{x: {{min: [1, 1000000], opt: [4, 1000000], max: [4, 1000000]}}}}}}]
"""
LARGE = """
<ir_version: 8, opset_import: ["": 17]>
net (float[rows, 1024] x) => (float[rows, 1024] y)
{
    [first] a = MatMul(x, up)
    [relu] b = Relu(a)
    [second] y = MatMul(b, down)
}
"""
LARGE_SPEC = """
version: 1
name: {name}
model: {{onnx: large.onnx}}
inputs: {{x: {{range: [{low}, {high}]}}}}
profiles: [{{name: only, inputs: {{x: {{min: [1, 1024], opt: [1024, 1024], max: [1024, 1024]}}}}}}]
precision: {{type: fp16}}
"""
OLD_DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 11000; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "NVIDIA MODEL", size); return 0; }
int cuDeviceTotalMem_v2(unsigned long *bytes, int device) { *bytes = 1UL << 36; return 0; }
int cuDeviceGetAttribute(int *value, int what, int device)
{
    *value = what == 75 ? MAJOR : what == 76 ? MINOR : 100;
    return 0;
}
int cuDeviceGetUuid(char *uuid, int device) { memset(uuid, 1, 16); return 0; }
int cuGetErrorName(int code, char const **text) { *text = "CUDA_ERROR"; return 0; }
"""


def make(folder):
    place = Place(folder)
    onnx.save(onnx.parser.parse_model(SORTED), folder / "sorted.onnx")
    large = onnx.parser.parse_model(LARGE)
    down = np.full((1024, 1024), 0.001, np.float32)
    down[512:] = -0.002
    weights = {"up": np.full((1024, 1024), 10, np.float32), "down": down}
    large.graph.initializer.extend(onnx.numpy_helper.from_array(values, name) for name, values in weights.items())
    onnx.save(large, folder / "large.onnx")
    place.build("digits", DIGITS, precision="fp32")
    return place


if pytest:

    @pytest.fixture(scope="module")
    def built(tmp_path_factory):
        return make(tmp_path_factory.mktemp("gpu"))


@contextmanager
def memory_taken():
    """All of the GPU's memory, by this process."""
    with closing(open_cuda()) as cuda:
        taken = []
        try:
            while True:
                taken.append(cuda.allocate(max(cuda.memory()[0] // 2, 1 << 20)))
        except CapabilityError as full:
            print(full)
        try:
            yield
        finally:
            for pointer in taken:
                cuda.free(pointer)


def test_no_memory_while_an_engine_is_built(built):
    spec = built.spec("taken", DIGITS, precision="fp32", settings=", optimization_level: 2")
    with memory_taken():
        done = built.trtforge("build", spec)

    print(done.returncode, done.stderr[-1500:])
    assert done.returncode == 7
    assert "memory is too small or in use" in done.stderr or "CUDA error 2" in done.stderr
    assert "Traceback" not in done.stderr
    assert not built.manifest("taken").exists()


def test_a_scratch_memory_that_is_too_small(built):
    done = built.trtforge("build", built.spec("sorted", SORTED_SPEC, settings=", workspace_mib: 1"))

    print(done.returncode, done.stderr[-1500:])
    assert done.returncode == 7
    assert "builder.workspace_mib" in done.stderr


def test_no_memory_to_load_and_to_run(built):
    script = """
        import sys, numpy as np
        from pathlib import Path
        from trtforge.cuda import open_cuda
        from trtforge.errors import TrtForgeError
        from trtforge.runtime.session import EngineSession
        cuda = open_cuda()
        session = EngineSession.open(Path(sys.argv[1])) if sys.argv[2] == "run" else None
        try:
            while True:
                cuda.allocate(max(cuda.memory()[0] // 2, 1 << 20))
        except TrtForgeError as error:
            print("filled:", error)
        try:
            session = session or EngineSession.open(Path(sys.argv[1]))
            session.run({"image": np.zeros((256, 1, 8, 8), np.float32)})
        except TrtForgeError as error:
            print(type(error).__name__, error.problems[0].lines())
            sys.exit(3)
    """
    for when in ("load", "run"):
        done = built.python("-c", textwrap.dedent(script), str(built.manifest("digits")), when)
        print(when, done.returncode, done.stdout[-800:], done.stderr[-800:])
        assert done.returncode in (0, 3), done.stderr  # an engine this small may find room in what CUDA rounds up
        if done.returncode:
            assert "CapabilityError" in done.stdout
            assert "free" in done.stdout


def test_a_driver_that_is_too_old(built):
    if not shutil.which("gcc"):
        raise SkipTest("no gcc")
    name, capability = ("NVIDIA " + built.gpu, built.capability.removeprefix("sm"))
    source = OLD_DRIVER.replace("NVIDIA MODEL", name)
    source = source.replace("MAJOR", capability[:-1]).replace("MINOR", capability[-1])
    driver = built.folder / "driver"
    driver.mkdir()
    (driver / "cuda.c").write_text(source)
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "cuda.c"]
    subprocess.run(command, cwd=driver, check=True)
    old = {"LD_LIBRARY_PATH": f"{driver}{os.pathsep}{os.environ.get('LD_LIBRARY_PATH', '')}"}

    spec = built.spec("old", DIGITS, precision="fp32", settings=", optimization_level: 1")
    for words, code, text in (
        (("build", spec), 7, "older than the CUDA that this TensorRT was made for"),
        (("bench", built.manifest("digits"), "--cuda-library", "cuda-python"), 6, "cudaErrorInsufficientDriver"),
    ):
        done = built.trtforge(*words, **old)
        print(words[0], done.returncode, done.stderr[-800:])
        assert done.returncode == code, done.stderr
        assert text in done.stderr
        assert "Traceback" not in done.stderr


def test_an_engine_whose_outputs_are_no_numbers(built):
    # 1024 products of 10 and an input: at most 10240 where the engine is built, 100 million where it is judged. FP16 ends
    # at 65504, so the second product sums inf and -inf.
    small, large = (
        built.spec(name, LARGE_SPEC, low=high / 2, high=high) for name, high in (("small", 1), ("huge", 10000))
    )
    assert built.trtforge("build", small).returncode == 0

    for spec, code in ((small, 0), (large, 5)):
        done = built.trtforge("verify", built.manifest("small"), "--spec", spec)
        print(done.returncode, done.stdout[-1500:], done.stderr[-800:])
        assert done.returncode == code
    assert "NaN or infinite" in done.stdout + done.stderr


def processes():
    """Process -> its parent, of those that are more than a zombie."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            found |= {int(path.parent.name): int(parent)} if state != "Z" else {}
    return found


def test_a_build_that_is_killed_while_tensorrt_builds(built):
    spec = built.spec("killed", DIGITS, precision="fp32", settings=", optimization_level: 4")
    command = [sys.executable, "-m", "trtforge", "build", spec, "--progress", "json"]
    with subprocess.Popen(command, env=built.surroundings(), stderr=subprocess.PIPE, text=True) as build:
        for line in build.stderr:
            event = json.loads(line)
            if event["stage"].startswith("build") and event["kind"] == "step":
                break
        workers = {process for process, parent in processes().items() if parent == build.pid}
        build.send_signal(signal.SIGKILL)
    assert workers

    deadline = time.monotonic() + 20
    while workers & set(processes()):
        assert time.monotonic() < deadline, "the builder lives on"
        time.sleep(0.1)
    left = [path.name for path in built.manifest("killed").parent.glob("*")]
    assert not [name for name in left if name.endswith((".engine", ".json"))], left

    again = built.trtforge("build", spec, "--progress", "plain")
    print(again.stderr)
    assert again.returncode == 0
    assert "waiting for" not in again.stderr
    assert "cached" in again.stderr
    assert built.trtforge("verify", built.manifest("killed")).returncode == 0
    assert built.trtforge("store", "verify").returncode == 0


if __name__ == "__main__":
    sys.exit(run_all(sys.modules[__name__], make))
