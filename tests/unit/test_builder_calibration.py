"""Samples as batches for TensorRT's own calibrator: what lies in the files, and which samples are refused."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from onnx import parser, save

from trtforge import builder_calibration
from trtforge.builder_calibration import scales_key, write_batches
from trtforge.digests import file_digest
from trtforge.errors import CapabilityError, SeveralErrors, StoreError
from trtforge.graph.ingest import ingest
from trtforge.spec.load import load_spec
from trtforge.types import BuildUnit, Profile, ShapeRange

SPEC = """\
version: 1
name: net
model: {onnx: m.onnx}
precision: {type: int8, quantization: implicit}
calibration: {data: s.npz, method: tensorrt_entropy}
targets:
  - {backend: tensorrt, gpus: [H200]}
"""
TWO = """
<ir_version: 8, opset_import: ["": 13]>
net (int64[batch, seq] ids, float[batch, seq] mask) => (float[batch, seq] y)
{
    a = Cast<to = 1>(ids)
    y = Mul(a, mask)
}
"""
FIXED = """
<ir_version: 8, opset_import: ["": 13]>
net (float[3, 2] x, float s) => (float[3, 2] y)
{
    y = Mul(x, s)
}
"""
ONE = """
<ir_version: 8, opset_import: ["": 13]>
net (float[batch, 1000] x) => (float[batch, 1000] y)
{
    y = Relu(x)
}
"""
GROWS = """
<ir_version: 8, opset_import: ["": 13]>
net (float[1, 4] x, int64[2] size) => (float[rows, columns] y)
{
    y = Expand(x, size)
}
"""


@pytest.fixture
def prepared(tmp_path):
    """Saves a model and arrays; what it gives writes the batches."""

    def prepare(model, arrays, opt, version="8.6.1"):
        save(parser.parse_model(model), tmp_path / "m.onnx")
        np.savez(tmp_path / "s.npz", **arrays)
        (tmp_path / "net.yaml").write_text(SPEC)
        (tmp_path / "ingest").mkdir()
        graph = ingest(tmp_path / "m.onnx", tmp_path / "ingest")
        profiles = (
            (Profile("chat", {name: ShapeRange(shape, shape, shape) for name, shape in opt.items()}),) if opt else ()
        )
        what = BuildUnit("net", "tensorrt", version, "H200", "sm90", "int8", False, {}, "0" * 64, profiles)
        stages = SimpleNamespace(tell=lambda _event: None)
        spec_file = load_spec(tmp_path / "net.yaml")
        return lambda: write_batches(spec_file, graph, profiles, what, tmp_path, stages, file_digest)

    return prepare


@pytest.fixture
def written(prepared):
    return lambda *arguments: prepared(*arguments)()


@pytest.mark.parametrize(("version", "dtype"), [("8.6.1", "<i4"), ("10.0.1", "<i8")])
def test_rows_become_batches_in_the_type_that_the_network_reads(written, version, dtype):
    ids = np.arange(5 * 3).reshape(5, 3)
    mask = np.linspace(0, 1, 15, dtype=np.float32).reshape(5, 3)

    found = written(TWO, {"mask": mask, "ids": ids}, {"ids": (2, 3), "mask": (2, 3)}, version)

    batches = found.batches
    assert (batches.batch_size, batches.num_batches, found.num_samples) == (2, 2, 4)
    assert batches.batch_bytes == {"ids": 6 * np.dtype(dtype).itemsize, "mask": 24}
    assert np.fromfile(batches.files["ids"], dtype)[:12].tolist() == list(range(12))
    assert np.array_equal(np.fromfile(batches.files["mask"], "<f4")[:12], mask.ravel()[:12])
    assert found.notes[-1] == "1 samples fill no batch of 2, and were left aside"


def test_inputs_without_a_size_in_common_take_whole_samples(written):
    x = np.arange(12, dtype=np.float32).reshape(2, 3, 2)

    found = written(FIXED, {"x": x, "s": np.array([5, 7], np.float32)}, None)

    assert (found.batches.batch_size, found.batches.num_batches) == (1, 2)
    assert found.batches.batch_bytes == {"x": 24, "s": 4}
    assert np.fromfile(found.batches.files["x"], "<f4").tolist() == list(range(12))
    assert np.fromfile(found.batches.files["s"], "<f4").tolist() == [5, 7]


def test_values_that_int32_does_not_hold_are_refused(written):
    ids = np.array([[1, 2, 3], [4, 2**31, 6]])
    mask = np.ones((2, 3), np.float32)

    with pytest.raises(SeveralErrors) as caught:
        written(TWO, {"ids": ids, "mask": mask}, {"ids": (1, 3), "mask": (1, 3)})

    (problem,) = caught.value.problems
    assert problem.exit_code == 4
    assert problem.summary.startswith(
        "s.npz[1]: 'ids' holds values from 4 to 2147483648, and this TensorRT reads int32"
    )


def test_samples_that_the_disk_has_no_room_for_are_refused_before_they_are_written(prepared, tmp_path, monkeypatch):
    write = prepared(ONE, {"x": np.ones((20, 1000), np.float32)}, {"x": (8, 1000)})
    monkeypatch.setattr(builder_calibration, "free_bytes", lambda _folder: 79_999)

    with pytest.raises(StoreError, match=r"calibration batches: 80000 bytes needed, 79999 bytes free"):
        write()

    assert not list(tmp_path.glob("*.batches"))


def test_values_that_decide_shapes_are_not_for_tensorrts_calibrator(prepared, tmp_path):
    prepared(GROWS, {"x": np.ones((2, 4), np.float32), "size": np.ones((2, 2), np.int64)}, None)
    graph = ingest(tmp_path / "m.onnx", tmp_path / "ingest")

    with pytest.raises(CapabilityError, match="the values of 'size' decide a tensor's shape"):
        scales_key(load_spec(tmp_path / "net.yaml"), graph, (), None, file_digest)


def test_memory_does_not_grow_with_the_number_of_samples(prepared):
    write = prepared(ONE, {"x": np.ones((4000, 1000), np.float32)}, {"x": (8, 1000)})  # 16 MB

    tracemalloc.start()
    write()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 2 << 20
