"""Engines on a real GPU with a real TensorRT: built, verified, run, measured, and what goes wrong with them.

Where there is no pytest: python tests/gpu/test_gpu_runtime.py
"""

# ruff: noqa: T201 - figures are for reading: pytest -s
from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace

import numpy as np
import onnx
from place import DIGITS, Place, cosine, images, raises, run_all

from trtforge.bench import bench
from trtforge.errors import CapabilityError, GraphError, IntegrityError
from trtforge.runtime.measure import Switches, lanes_of, measure
from trtforge.runtime.session import EngineSession

try:
    import pytest
except ModuleNotFoundError:
    pytest = None
else:
    pytestmark = pytest.mark.gpu

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
ROWS_SPEC = """
version: 1
name: rows
model: {{onnx: rows.onnx}}
inputs: {{x: {{range: [0, 1]}}}}
profiles: [{{name: only, inputs: {{x: {{min: [1, 8], opt: [4, 8], max: [16, 8]}}}}}}]
"""


def make(folder):
    """Two bundles in a folder."""
    place = Place(folder)
    onnx.save(onnx.parser.parse_model(ROWS), folder / "rows.onnx")
    for precision in ("fp32", "fp16"):
        place.build(f"digits-{precision}", DIGITS, precision=precision, settings=", profiling_verbosity: detailed")
    return place


if pytest:

    @pytest.fixture(scope="module")
    def built(tmp_path_factory):
        return make(tmp_path_factory.mktemp("gpu"))


def test_verify_runs_the_engine_on_the_samples_and_over_all_profiles(built):
    for name in ("digits-fp32", "digits-fp16"):
        done = built.trtforge("verify", built.manifest(name), "--spec", built.folder / f"{name}.yaml")
        print(done.stdout)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "layers by type: " in done.stdout


def test_nodes_that_stay_in_fp32_are_told_by_their_types(built):
    kept = "precision: {{type: fp16, keep: {{fp32: ['/stem/stem.0/*']}}}}"
    text = DIGITS.replace("precision: {{type: {precision}}}", kept)

    path = built.build("kept", text, settings=", profiling_verbosity: detailed")

    (artifact,) = json.loads(path.read_text())["artifacts"]
    if "STRONGLY_TYPED" not in artifact["network_flags"]:
        (note,) = (note for note in artifact["notes"] if "bound to FP32 the engine shows" in note)
        print(note)
        assert "shows 0 in FP32" not in note


def test_outputs_are_those_of_onnxruntime_through_both_libraries(built):
    reference = built.digits()
    for library in LIBRARIES:
        for name, least in (("digits-fp32", 0.99999), ("digits-fp16", 0.9999)):
            with EngineSession.open(built.manifest(name), cuda_library=library) as session:
                for count in (1, 16, 63, 64, 65, 256, 1):
                    found = session.run({"image": images(count)})
                    expected = reference.run({"image": images(count)})
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


def test_many_requests_that_overlap_give_what_each_gives_alone(built):
    for library in LIBRARIES:
        with EngineSession.open(built.manifest("digits-fp32"), cuda_library=library) as session:
            requests = [{"image": images(count)} for count in (1, 16, 256, 256, 3, 100, 1, 256)]
            alone = [session.run(feeds) for feeds in requests]
            for one, other in zip(alone, session.run_each(requests), strict=True):
                assert all(np.array_equal(one[key], other[key]) for key in one)


def test_outputs_that_are_no_numbers_and_outputs_sized_by_the_data(built):
    manifest = built.build("rows", ROWS_SPEC)
    for library in LIBRARIES:
        with EngineSession.open(manifest, cuda_library=library) as session:
            grows = (np.ones((1, 8)), np.ones((4, 8)), np.ones((16, 8)))
            for x in (
                *grows,
                np.full((2, 8), -1.0),
                np.zeros((4, 8)),
                np.eye(16)[:, :8],
                np.ones((16, 8)),
                np.eye(8)[:3],
            ):
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
        assert done.returncode in (10, -6, -11), done.stderr  # TensorRT itself may not survive bytes that lie


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
    assert found.slowdowns[0].low <= 0.02


def test_the_median_is_that_of_a_bare_loop(built):
    alone = replace(QUICK, transfers=False, one_at_a_time=True)
    with EngineSession.open(built.manifest("digits-fp32")) as session:
        feeds = {"image": images(256)}
        lanes = lanes_of(session, session.profile(feeds), 0, alone)
        ours = np.median(measure([lanes], session.cuda, feeds, alone).compute)
        bare = bare_median(lanes[0], session.cuda)
    print(f"bare loop {bare:.4f} ms, measured {ours:.4f} ms")
    assert abs(ours / bare - 1) < 0.1  # an engine this small spends most of it on being started


def bare_median(lane, cuda):
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


if __name__ == "__main__":
    sys.exit(run_all(sys.modules[__name__], make))
