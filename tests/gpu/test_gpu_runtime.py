"""Engines on a real GPU with a real TensorRT: built, verified, run, measured, and what goes wrong with them.

Where there is no pytest: python tests/gpu/test_gpu_runtime.py
"""

# ruff: noqa: T201 - figures are for reading: pytest -s
from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import traceback
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from trtforge.bench import bench
from trtforge.errors import CapabilityError, GraphError, IntegrityError, TrtForgeError
from trtforge.graph.ingest import ingest
from trtforge.machine import machine_facts
from trtforge.reference import ReferenceSession
from trtforge.runtime.lane import Lane
from trtforge.runtime.measure import Switches, measure
from trtforge.runtime.session import EngineSession

try:
    import pytest
except ModuleNotFoundError:
    pytest = None
else:
    pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
LIBRARIES = ("cuda-python", "pycuda")
QUICK = Switches(duration_s=0.3, warm_up_ms=100.0, spin_wait=True)
ROWS = """
<ir_version: 8, opset_import: ["": 17]>
net (float[rows, 8] x) => (float[rows, 8] root, int64[2, found] places)
{
    [sqrt] root = Sqrt(x)
    [nonzero] places = NonZero(x)
}
"""
DIGITS = """
version: 1
name: digits-{precision}
model: {{onnx: {root}/configs/models/digits.onnx}}
inputs: {{image: {{kind: image, range: [0, 1]}}}}
profiles:
  - {{name: small, inputs: {{image: {{min: [1, 1, 8, 8], opt: [16, 1, 8, 8], max: [64, 1, 8, 8]}}}}}}
  - {{name: large, inputs: {{image: {{min: [64, 1, 8, 8], opt: [128, 1, 8, 8], max: [256, 1, 8, 8]}}}}}}
builder: {{tactic_sources: [edge_mask_convolutions, jit_convolutions], profiling_verbosity: detailed}}
precision: {{type: {precision}}}
targets: [{{backend: tensorrt, gpus: [{gpu}]}}]
output: {folder}/digits-{precision}
"""
ROWS_SPEC = """
version: 1
name: rows
model: {{onnx: {folder}/rows.onnx}}
inputs: {{x: {{range: [0, 1]}}}}
profiles: [{{name: only, inputs: {{x: {{min: [1, 8], opt: [4, 8], max: [16, 8]}}}}}}]
builder: {{tactic_sources: [edge_mask_convolutions, jit_convolutions]}}
targets: [{{backend: tensorrt, gpus: [{gpu}]}}]
output: {folder}/rows
"""


class Built:
    """Engines of three specs, in a folder."""

    def __init__(self, folder):
        self.folder = folder
        self.gpu = machine_facts().gpus[0].model
        onnx.save(onnx.parser.parse_model(ROWS), folder / "rows.onnx")
        (folder / "ingest").mkdir()
        self.reference = ReferenceSession(ingest(ROOT / "configs/models/digits.onnx", folder / "ingest"))
        for name, text in {
            "digits-fp32": DIGITS.format(root=ROOT, gpu=self.gpu, folder=folder, precision="fp32"),
            "digits-fp16": DIGITS.format(root=ROOT, gpu=self.gpu, folder=folder, precision="fp16"),
            "rows": ROWS_SPEC.format(gpu=self.gpu, folder=folder),
        }.items():
            (folder / f"{name}.yaml").write_text(text)
            done = self.trtforge("build", folder / f"{name}.yaml")
            assert done.returncode == 0, done.stderr

    def manifest(self, name):
        return self.folder / name / "manifest.json"

    def copy(self, name, change):
        """A bundle beside it, whose manifest went through `change`."""
        target = Path(tempfile.mkdtemp(dir=self.folder))
        data = json.loads(self.manifest(name).read_text())
        (artifact,) = data["artifacts"]
        change(artifact)
        (target / artifact["file"]).write_bytes((self.folder / name / artifact["file"]).read_bytes())
        (target / "manifest.json").write_text(json.dumps(data))
        return target / "manifest.json", target / artifact["file"]

    def trtforge(self, *words):
        return self.python("-m", "trtforge", *map(str, words))

    def python(self, *words):
        surroundings = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
        }
        return subprocess.run(
            [sys.executable, *words], env=surroundings, capture_output=True, text=True, timeout=300, check=False
        )


if pytest:

    @pytest.fixture(scope="module")
    def built(tmp_path_factory):
        return Built(tmp_path_factory.mktemp("gpu"))


@contextmanager
def raises(error, text):
    """What pytest.raises does, of the problems of a TrtForgeError."""
    try:
        yield
    except TrtForgeError as caught:
        problem = caught.problems[0]
        assert text in problem.summary, problem
        assert problem.exit_code == error.exit_code, problem
    else:
        raise AssertionError(f"no {error.__name__}")


def images(count):
    return np.random.default_rng(count).random((count, 1, 8, 8), np.float32)


def cosine(one, other):
    one, other = (np.ravel(array).astype(np.float64) for array in (one, other))
    return one @ other / np.linalg.norm(one) / np.linalg.norm(other)


def test_verify_runs_the_engine_on_the_samples_and_over_all_profiles(built):
    for name in ("digits-fp32", "digits-fp16"):
        done = built.trtforge("verify", built.manifest(name), "--spec", built.folder / f"{name}.yaml")
        print(done.stdout)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "layers by output type: " in done.stdout


def test_outputs_are_those_of_onnxruntime_through_both_libraries(built):
    for library in LIBRARIES:
        for name, least in (("digits-fp32", 0.99999), ("digits-fp16", 0.9999)):
            with EngineSession.open(built.manifest(name), cuda_library=library) as session:
                for count in (1, 16, 63, 64, 65, 256, 1):
                    found = session.run({"image": images(count)})
                    expected = built.reference.run({"image": images(count)})
                    floats = [key for key, value in expected.items() if value.dtype.kind == "f"]
                    assert floats
                    for key in floats:
                        assert cosine(found[key], expected[key]) > least, (library, name, count, key)


def test_a_graph_gives_what_plain_runs_give(built):
    with EngineSession.open(built.manifest("digits-fp32"), cuda_library="cuda-python") as session:
        for count in (1, 16, 1, 100, 16):
            plain = session.run({"image": images(count)})
            with_graph = session.run({"image": images(count)}, with_graph=True)
            assert all(np.array_equal(plain[key], with_graph[key]) for key in plain)


def test_outputs_that_are_no_numbers_and_outputs_sized_by_the_data(built):
    for library in LIBRARIES:
        with EngineSession.open(built.manifest("rows"), cuda_library=library) as session:
            for x in (np.full((2, 8), -1.0), np.zeros((4, 8)), np.eye(16)[:, :8], np.ones((16, 8)), np.eye(8)[:3]):
                found = session.run({"x": x})
                assert np.array_equal(found["places"], np.array(np.nonzero(x)))
                assert np.array_equal(np.isnan(found["root"]), x < 0)
            with raises(CapabilityError, "depends on the data"):
                session.run({"x": np.ones((2, 8))}, with_graph=True)


def test_shapes_outside_every_profile(built):
    with EngineSession.open(built.manifest("digits-fp32")) as session, raises(GraphError, "no profile of digits-fp32"):
        session.run({"image": images(257)})


def test_a_damaged_engine_and_one_that_tensorrt_does_not_take(built):
    path, engine = built.copy("digits-fp32", lambda _artifact: None)
    data = engine.read_bytes()
    engine.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with raises(IntegrityError, "is not the engine of the manifest"):
        EngineSession.open(path)

    for length in (64, 1000, 100_000):  # a header alone, a part; with a digest that fits
        data = (built.folder / "digits-fp32" / engine.name).read_bytes()[:length]
        fits = {"digest": hashlib.sha256(data).hexdigest(), "size_bytes": length}
        path, engine = built.copy("digits-fp32", lambda artifact, fits=fits: artifact.update(fits))
        engine.write_bytes(data)
        done = built.trtforge("bench", path)
        print(length, done.returncode, done.stderr[-600:])
        assert done.returncode in (10, -11), done.stderr  # TensorRT itself may not survive bytes that lie


def test_an_engine_of_another_version_or_gpu(built):
    for change, text in (
        ({"backend_version": "8.5.3"}, "is for tensorrt 8.5.3"),
        ({"compute_capability": "sm89"}, "is for sm89"),
    ):
        path, _ = built.copy("digits-fp32", lambda artifact, change=change: artifact.update(change))
        identifier = json.loads(path.read_text())["artifacts"][0]["identifier"]
        with raises(CapabilityError, text):
            EngineSession.open(path, identifier=identifier)


def test_two_streams_through_both_libraries(built):
    for library in LIBRARIES:
        words = ("--streams", 2, "--duration", 0.3, "--cuda-library", library, "--shapes", "batch=16,200", "--json")
        done = built.trtforge("bench", built.manifest("digits-fp16"), *words)
        assert done.returncode == 0, done.stdout + done.stderr
        points = json.loads(done.stdout)["figures"]["points"]
        print(library, [(point["sizes"], round(point["throughput_qps"])) for point in points])


def test_an_engine_is_not_slower_than_itself(built):
    with (
        EngineSession.open(built.manifest("digits-fp16")) as one,
        EngineSession.open(built.manifest("digits-fp16")) as other,
    ):
        found = bench(one, {"batch": [16]}, QUICK, "", lambda _event: None, other=other)
    print(found.slowdowns)
    assert not found.slowdowns[0].exceeds(0.02)


def test_the_median_is_that_of_a_bare_loop(built):
    with EngineSession.open(built.manifest("digits-fp32")) as session:
        feeds = {"image": images(256)}
        lane = session.lane(session.profile(feeds))
        lane.prepare(feeds)
        bare = bare_median(lane, session.cuda)
        ours = np.median(measure([lane], session.cuda, feeds, QUICK).compute)
    print(f"bare loop {bare:.4f} ms, measured {ours:.4f} ms")
    assert abs(ours / bare - 1) < 0.1  # an engine this small spends most of it on being started


def bare_median(lane: Lane, cuda) -> float:
    start, end = cuda.event(spin=True), cuda.event(spin=True)
    times = []
    for _ in range(500):
        cuda.record(start, lane.stream)
        lane.enqueue()
        cuda.record(end, lane.stream)
        cuda.wait_for(end)
        times.append(cuda.elapsed_ms(start, end))
    return float(np.median(times[100:]))


def test_a_log_is_served(built):
    log = built.folder / "log.jsonl"
    seconds = np.cumsum(np.random.default_rng(0).exponential(0.0005, 2000))
    log.write_text("".join(json.dumps({"batch": 1, "timestamp": second}) + "\n" for second in seconds))
    words = ("--replay", log, "--window-ms", 1, "--max-batch", 16, "--limit-ms", 5, "--duration", 0.2)

    done = built.trtforge("bench", built.manifest("digits-fp16"), *words)

    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "p99 stays within 5 ms up to" in done.stdout


def test_memory_comes_back(built):
    free = []
    for number in range(12):
        with EngineSession.open(built.manifest("digits-fp32"), cuda_library=LIBRARIES[0]) as session:
            session.run({"image": images(64)}, with_graph=True)
            session.run({"image": images(256)})
            cuda = session.cuda
        free.append(cuda.memory()[0])
        print(number, free[-1] >> 20, "MiB free")
    assert min(free[2:]) >= free[1] - (4 << 20)


def test_no_memory_is_told_with_needed_and_free(built):
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
            print(type(error).__name__, error.problems[0].lines() if hasattr(error.problems[0], "lines") else error)
            sys.exit(3)
    """
    for when in ("load", "run"):
        done = built.python("-c", textwrap.dedent(script), str(built.manifest("digits-fp32")), when)
        print(when, done.returncode, done.stdout[-800:], done.stderr[-800:])
        assert done.returncode in (0, 3), done.stderr
        if done.returncode:
            assert "CapabilityError" in done.stdout
            assert "free" in done.stdout


def main() -> int:
    """All tests without pytest; the number of those that fail."""
    failed = []
    if not machine_facts().gpus:
        sys.exit(machine_facts().cuda_error)
    with tempfile.TemporaryDirectory() as folder:
        built = Built(Path(folder))
        for name, test in [(name, partial(value, built)) for name, value in globals().items() if name[:5] == "test_"]:
            print(f"== {name}", flush=True)
            try:
                test()
            except Exception:  # noqa: BLE001 - the others are of interest too
                traceback.print_exc(file=sys.stdout)
                failed.append(name)
    print(f"{len(failed)} failed: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
