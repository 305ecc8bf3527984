"""The TensorRT adapter against stand-ins of every version: which calls it makes, and that each is one the version has.

The traces in golden/ are for reading. UPDATE_EXPECTED=1 writes them anew.
"""

from __future__ import annotations

import _ctypes
import json
import os
from dataclasses import replace
from hashlib import md5, sha256
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from stand_in import VERSIONS, StandIn

from trtforge.backends import tensorrt
from trtforge.backends.capabilities import capability
from trtforge.backends.surroundings import CalibrationBatches, Recorded, Surroundings
from trtforge.errors import BuildError, CalibrationError, CapabilityError, TrtForgeError
from trtforge.graph.ingest import ingest
from trtforge.types import BuildUnit, Profile, ShapeRange

GOLDEN = Path(__file__).parent / "golden"
DYNAMIC = """
<ir_version: 8, opset_import: ["": 13]>
net (float[batch, 4] x, int64[2] size) => (float[rows, columns] y)
{
    [scale] a = Sqrt(x)
    [grow] y = Expand(a, size)
}
"""
TYPED = """
<ir_version: 8, opset_import: ["": 13]>
net (float[batch, 4] x) => (float[batch, 4] y)
<float16[4, 4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}, float[4, 4] v = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}>
{
    [to_16] x16 = Cast<to = 10>(x)
    [first] a16 = MatMul(x16, w)
    [to_32] a = Cast<to = 1>(a16)
    [island_square] b = Mul(a, a)
    [island_product] c = MatMul(b, v)
    [back_to_16] c16 = Cast<to = 10>(c)
    [second] y16 = MatMul(c16, w)
    [out_32] y = Cast<to = 1>(y16)
}
"""
QUANTIZED = """
<ir_version: 8, opset_import: ["": 13]>
net (float[batch, 4] x) => (float[batch, 4] y)
<float s = {0.1}, int8 z = {0}, float[4, 4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}>
{
    [q] xq = QuantizeLinear(x, s, z)
    [dq] xd = DequantizeLinear(xq, s, z)
    [product] a = MatMul(xd, w)
    [root] y = Sqrt(a)
}
"""
TWO_INPUTS = """
<ir_version: 8, opset_import: ["": 13]>
net (int64[batch, 3] ids, float[batch, 3] mask) => (float[batch, 3] y)
{
    [cast] a = Cast<to = 1>(ids)
    [product] y = Mul(a, mask)
}
"""
_QUESTIONS = ("INetworkDefinition.get_", "ITensor.get_", "ILayer.get_")
ALL_SETTINGS = {
    "optimization_level": 4,
    "workspace_mib": 512,
    "profiling_verbosity": "none",
    "sparse_weights": True,
    "strict_nans": True,
    "weight_streaming": True,
    "refit": True,
    "strip_weights": True,
    "version_compatible": True,
    "hardware_compatibility": "ampere_plus",
    "max_aux_streams": 2,
    "avg_timing_iterations": 2,
    "tactic_sources": ("edge_mask_convolutions", "jit_convolutions"),
}
PLAIN = {"optimization_level": 3, "profiling_verbosity": "detailed"}
X = {"x": ShapeRange((1, 4), (8, 4), (32, 4))}
TYPED_PROFILE = (Profile("default", X),)
DYNAMIC_PROFILES = tuple(
    Profile(
        name,
        {"x": ShapeRange((1, 4), (low, 4), (64, 4)), "size": ShapeRange((2,), (2,), (2,))},
        {"size": ShapeRange((1, 4), (low, 4), (64, 4))},
    )
    for name, low in (("small", 8), ("large", 32))
)


def unit(version, profiles, settings=PLAIN, precision="fp32"):
    settings = {name: value for name, value in settings.items() if name not in capability("tensorrt", version).settings}
    return BuildUnit(
        "net-h200", "tensorrt", version, "H200", "sm90", precision, tf32=False, settings=settings, graph_digest="0" * 64,
        profiles=profiles,
    )  # fmt: skip


_TYPES = {
    TensorProto.FLOAT: "FLOAT",
    TensorProto.FLOAT16: "HALF",
    TensorProto.INT64: "INT64",
    TensorProto.INT8: "INT8",
    TensorProto.BOOL: "BOOL",
}
_LAYERS = {
    "MatMul": "MATRIX_MULTIPLY",
    "Cast": "CAST",
    "QuantizeLinear": "QUANTIZE",
    "DequantizeLinear": "DEQUANTIZE",
    "Sqrt": "UNARY",
    "Expand": "SLICE",
}


def parsed(model):
    """What the stand-in's parser finds in `model`: a layer a node, and a shuffle of the parser's own before a MatMul."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    shape_inputs = {node.input[1] for node in graph.node if node.op_type == "Expand"}
    tensors = {tensor.name: _tensor(tensor.name, _TYPES[tensor.data_type], tensor.dims) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        dims = value.type.tensor_type.shape.dim
        shape = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in dims]
        axes = [dim.dim_param for dim in dims]
        dtype = _TYPES[value.type.tensor_type.elem_type]
        tensors[value.name] = _tensor(value.name, dtype, shape, axes, is_shape=value.name in shape_inputs)
    layers = []
    for node in graph.node:
        inputs = list(node.input)
        if node.op_type == "MatMul":
            inputs[0] = f"(Unnamed Layer* {len(layers)}) [Shuffle]_output"
            tensors[inputs[0]] = _tensor(inputs[0], "FLOAT", [])
            layers.append(_layer(f"{node.name}_shuffle", "SHUFFLE", node.input[:1], inputs[:1]))
        layers.append(_layer(node.name, _LAYERS.get(node.op_type, "ELEMENTWISE"), inputs, node.output))
    ends = {"inputs": [value.name for value in graph.input], "outputs": [value.name for value in graph.output]}
    return {"tensors": tensors, "layers": layers, **ends}


def _tensor(name, dtype, shape, axes=(), *, is_shape=False):
    return {"name": name, "dtype": dtype, "shape": list(shape), "axes": list(axes), "is_shape_tensor": is_shape}


def _layer(name, kind, inputs, outputs):
    return {"name": name, "type": kind, "inputs": list(inputs), "outputs": list(outputs)}


class Bench:
    """Builds with a stand-in, in a process of its own as in earnest, and reads the trace."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.trace_path = folder / "trace.txt"
        here = Path(__file__).parent
        monkeypatch.setenv("PYTHONPATH", f"{here / 'site'}:{here}")
        monkeypatch.setenv("STAND_IN_TRACE", str(self.trace_path))
        self.network_path = folder / "network.json"
        monkeypatch.setenv("STAND_IN_NETWORK", str(self.network_path))
        self.set = monkeypatch.setenv

    def build(self, text, what, around=Surroundings(), on_event=lambda _event: None):  # noqa: B008 - frozen
        self.set("STAND_IN_VERSION", what.backend_version)
        path = self.folder / "net.onnx"
        model = onnx.parser.parse_model(text)
        onnx.save(model, path)
        self.network_path.write_text(json.dumps(parsed(model)))
        self.trace_path.write_text("")
        work_dir = self.folder / "work"
        work_dir.mkdir(exist_ok=True)
        graph = ingest(path, self.folder / "ingest")
        return tensorrt.build(what, graph, work_dir, on_event, 60, around)

    def trace(self):
        """The calls, without those that only ask what the parser found."""
        lines = self.trace_path.read_text().replace(str(self.folder), "FOLDER").splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith(_QUESTIONS))


@pytest.fixture
def bench(tmp_path, monkeypatch):
    (tmp_path / "ingest").mkdir()
    return Bench(tmp_path, monkeypatch)


def matches(name, text):
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_EXPECTED"):
        path.write_text(text)
    return path.read_text() == text


@pytest.mark.parametrize("version", VERSIONS)
def test_every_setting_of_every_version(bench, version):
    around = Surroundings(timing_cache=bench.folder / "timing" / "h200.cache")

    engine = bench.build(DYNAMIC, unit(version, DYNAMIC_PROFILES, ALL_SETTINGS), around)

    assert matches(f"all-settings-{version}", f"{bench.trace()}\n{engine.trtexec}\n")


@pytest.mark.parametrize("version", VERSIONS)
def test_typed_graph(bench, version):
    engine = bench.build(TYPED, unit(version, TYPED_PROFILE), Surroundings(keep_fp32=("*",)))
    trace = bench.trace()

    assert matches(f"typed-{version}", f"{trace}\n{engine.trtexec}\n" + "".join(f"{note}\n" for note in engine.notes))
    is_weak = version.startswith("8.")
    assert engine.builder_flags == (("FP16", "OBEY_PRECISION_CONSTRAINTS") if is_weak else ())
    # The two layers of each of the island's nodes, with the shuffle that the parser puts before a MatMul.
    assert trace.count("ILayer.precision = DataType.FLOAT") == (3 if is_weak else 0)


@pytest.mark.parametrize("keep_fp32", [(), ("nothing*",)])
def test_what_nobody_asked_to_keep_is_not_bound(bench, keep_fp32):
    engine = bench.build(TYPED, unit("8.6.1", TYPED_PROFILE), Surroundings(keep_fp32=keep_fp32))

    assert engine.builder_flags == ("FP16",)
    assert "precision" not in bench.trace()
    (note,) = engine.notes
    assert note.endswith(
        "run in a lower type, as types do not bind in TensorRT 8.6.1: 'island_square', 'island_product'"
    )


@pytest.mark.parametrize("version", ["8.6.1", "10.0.1", "10.16.1.11"])
@pytest.mark.parametrize("algorithm", ["EntropyCalibration2", "MinMaxCalibration"])
def test_implicit_int8(bench, version, algorithm):
    cache = bench.folder / "net.calibration"
    cache.write_text(f"TRT-8601-{algorithm}\nx: 3c010204\n")
    around = Surroundings(calibration_cache=cache, rest_fp16=True)

    engine = bench.build(DYNAMIC, unit(version, DYNAMIC_PROFILES, precision="int8"), around)

    assert engine.builder_flags == ("FP16", "INT8")
    assert matches(f"implicit-{algorithm}-{version}", f"{bench.trace()}\n{engine.trtexec}\n")


def test_scales_of_another_version_are_told(bench):
    cache = bench.folder / "net.calibration"
    cache.write_text("TRT-7000-EntropyCalibration2\nx: 3c010204\n")

    with pytest.raises(BuildError, match="TensorRT did not take the calibration cache"):
        bench.build(DYNAMIC, unit("8.6.1", DYNAMIC_PROFILES), Surroundings(calibration_cache=cache))


def test_implicit_int8_is_gone_in_11(bench):
    cache = bench.folder / "net.calibration"
    cache.write_text("TRT-8601-EntropyCalibration2\n")

    with pytest.raises(CapabilityError, match="TensorRT 11 removed calibrators"):
        bench.build(DYNAMIC, unit("11.0.0.114", DYNAMIC_PROFILES), Surroundings(calibration_cache=cache))


@pytest.mark.parametrize("first_line", ["", "TRT-8601-LegacyCalibration", "x: 3c010204"])
def test_what_is_no_calibration_cache_is_refused(bench, first_line):
    cache = bench.folder / "net.calibration"
    cache.write_text(first_line + "\n")

    with pytest.raises(CapabilityError, match="expected a calibration cache of EntropyCalibration2 or MinMax"):
        bench.build(DYNAMIC, unit("8.6.1", DYNAMIC_PROFILES), Surroundings(calibration_cache=cache))


@pytest.mark.parametrize(("rest_fp16", "flags"), [(True, ("FP16", "INT8")), (False, ("INT8",))])
def test_flags_of_a_quantized_graph_on_8_6(bench, rest_fp16, flags):
    engine = bench.build(QUANTIZED, unit("8.6.1", TYPED_PROFILE, precision="int8"), Surroundings(rest_fp16=rest_fp16))

    assert engine.builder_flags == flags
    assert "ILayer.precision" not in bench.trace()


def test_a_swallowed_island_fails_with_its_name(bench):
    bench.set("STAND_IN_SWALLOW", "island_square")

    with pytest.raises(BuildError, match="runs node 'island_square' in a lower type") as caught:
        bench.build(TYPED, unit("8.6.1", TYPED_PROFILE), Surroundings(keep_fp32=("island*",)))

    assert caught.value.problems[0].detail[0] == "node 'island_square': 'b' is float16 in 'island_square'"
    assert not list((bench.folder / "work").glob("*.engine"))


def test_a_timing_cache_that_does_not_join_is_told(bench):
    path = bench.folder / "timing" / "h200.cache"
    what, around = unit("8.6.1", DYNAMIC_PROFILES), Surroundings(timing_cache=path)
    bench.build(DYNAMIC, what, around)
    bench.set("STAND_IN_JOINS_NOTHING", "1")

    (message,) = bench.build(DYNAMIC, what, around).messages

    assert message.text == f"timing cache {path} could not be joined with this build's, which takes its place"
    assert path.read_bytes() == b"timing of 8.6.1"


def test_timing_cache_is_begun_joined_and_begun_again_where_it_is_damaged(bench):
    path = bench.folder / "timing" / "h200.cache"
    what, around = unit("8.6.1", DYNAMIC_PROFILES), Surroundings(timing_cache=path)

    first = bench.build(DYNAMIC, what, around)
    assert "IBuilderConfig.create_timing_cache(<0 bytes>)" in bench.trace()
    assert path.read_bytes() == b"timing of 8.6.1"

    second = bench.build(DYNAMIC, what, around)
    assert "ITimingCache.combine(<ITimingCache>, False)" in bench.trace()
    assert second.timing_cache_digest == first.timing_cache_digest != None  # noqa: E711 - a chain
    assert not second.messages

    path.write_bytes(os.urandom(100))
    third = bench.build(DYNAMIC, what, around)
    assert [message.text for message in third.messages] == [f"timing cache {path} does not fit; a fresh one is begun"]
    assert path.read_bytes() == b"timing of 8.6.1"


def test_a_timing_cache_that_cannot_be_kept_costs_a_warning_only(bench):
    (bench.folder / "file").write_text("")
    path = bench.folder / "file" / "h200.cache"

    engine = bench.build(DYNAMIC, unit("8.6.1", DYNAMIC_PROFILES), Surroundings(timing_cache=path))

    assert engine.timing_cache_digest == sha256(b"timing of 8.6.1").hexdigest()
    assert [message.text.partition(": ")[0] for message in engine.messages] == [f"timing cache {path} is not kept"]


def test_measurements_that_tensorrt_cannot_read_back_are_not_kept(bench):
    path = bench.folder / "timing" / "h200.cache"
    what, around = unit("8.6.1", DYNAMIC_PROFILES), Surroundings(timing_cache=path)
    bench.build(DYNAMIC, what, around)
    before = path.read_bytes()
    bench.set("STAND_IN_MYELIN", "1")

    engine = bench.build(DYNAMIC, what, around)

    assert not engine.messages
    assert path.read_bytes() == before


def test_a_timing_cache_that_8_6_drops_in_its_log_alone_is_begun_anew(bench):
    path = bench.folder / "h200.cache"
    path.write_bytes(b"timing of 8.6.1 with Myelin")

    engine = bench.build(DYNAMIC, unit("8.6.1", DYNAMIC_PROFILES), Surroundings(timing_cache=path))

    assert [message.text for message in engine.messages] == [f"timing cache {path} does not fit; a fresh one is begun"]
    assert path.read_bytes() == b"timing of 8.6.1"


EDITABLE = [version for version in VERSIONS if "record_tactics" not in capability("tensorrt", version).settings]
RECORDED = {**PLAIN, "record_tactics": True}
DETAILED = {**RECORDED, "profiling_verbosity": "detailed"}


def test_tactics_can_be_recorded_where_timing_caches_are_editable():
    flags = {version: StandIn(version, lambda _line: None, {}).names["BuilderFlag"].__members__ for version in VERSIONS}

    assert [version for version in VERSIONS if "EDITABLE_TIMING_CACHE" in flags[version]] == EDITABLE
    assert all("ERROR_ON_TIMING_CACHE_MISS" in flags[version] for version in EDITABLE)


def recorded_build(bench, version, settings=RECORDED):
    """A first build, in which tactic 1 was the fastest of each operator; it holds nothing that others measured."""
    shared, record = bench.folder / "timing" / "h200.cache", bench.folder / "record.timing"
    shared.parent.mkdir()
    shared.write_bytes(f'timing of {version}{{"0xab": 3}}'.encode())
    around = Surroundings(timing_cache=shared, timing_record=record)
    engine = bench.build(TYPED, unit(version, TYPED_PROFILE, settings), around)
    assert engine.timing_cache_digest == sha256(record.read_bytes()).hexdigest()
    assert b"0xab" not in record.read_bytes()
    assert shared.read_bytes() == f'timing of {version}{{"0xab": 3}}'.encode()
    bench.set("STAND_IN_TACTIC", "2")
    return engine, Surroundings(recorded=Recorded(record, dict(engine.tactics)))


@pytest.mark.parametrize("version", EDITABLE)
def test_a_locked_build_takes_the_recorded_tactics(bench, version):
    first, locked = recorded_build(bench, version, DETAILED)
    assert first.builder_flags == ("EDITABLE_TIMING_CACHE",)

    again = bench.build(TYPED, unit(version, TYPED_PROFILE, DETAILED), locked)

    assert matches(f"locked-{version}", f"{bench.trace()}\n{again.trtexec}\n")
    assert again.builder_flags == ("EDITABLE_TIMING_CACHE", "ERROR_ON_TIMING_CACHE_MISS")
    assert again.tactics == first.tactics
    assert set(dict(again.tactics).values()) == {"kernel_1"}
    assert again.timing_cache_digest == first.timing_cache_digest


@pytest.mark.parametrize("passes", [False, True])
def test_a_tactic_that_was_not_recorded_ends_a_locked_build(bench, passes):
    _, locked = recorded_build(bench, "10.9.0.34")
    if passes:
        bench.set("STAND_IN_LETS_MISSES_PASS", "1")

    with pytest.raises(BuildError) as caught:
        bench.build(TYPED.replace("[second]", "[third]"), unit("10.9.0.34", TYPED_PROFILE), locked)

    (problem,) = caught.value.problems
    names = ["third_shuffle", "third"][: 2 if passes else 1]
    found = [f"no tactic of '{name}' (key 0x{md5(name.encode()).hexdigest()})" for name in names]  # noqa: S324
    assert problem.detail == tuple(found)
    assert f"does not follow the recorded timing cache: {len(found)} of its tactics differ" in problem.summary
    assert "without --locked" in problem.next_step
    assert not list((bench.folder / "work").glob("*.engine"))


def test_another_tactic_than_the_recorded_ends_a_locked_build(bench):
    _, locked = recorded_build(bench, "11.0.0.114")
    bench.set("STAND_IN_FORGETS", "1")
    bench.set("STAND_IN_LETS_MISSES_PASS", "1")

    with pytest.raises(BuildError) as caught:
        bench.build(TYPED, unit("11.0.0.114", TYPED_PROFILE), locked)

    assert caught.value.problems[0].detail[0].startswith("another tactic of 'to_16' (key 0x")
    assert caught.value.problems[0].detail[0].endswith(": 0x2, recorded 0x1")


def test_an_engine_that_tells_another_tactic_than_the_recorded_one_ends_a_locked_build(bench):
    _, locked = recorded_build(bench, "10.9.0.34", DETAILED)
    told = {**locked.recorded.tactics, "first": "kernel_7"}
    locked = replace(locked, recorded=replace(locked.recorded, tactics=told))

    with pytest.raises(BuildError, match=f"1 of {len(told)} layers have another tactic") as caught:
        bench.build(TYPED, unit("10.9.0.34", TYPED_PROFILE, DETAILED), locked)

    assert caught.value.problems[0].detail == ("layer 'first': kernel_1, recorded kernel_7",)


def test_a_recorded_timing_cache_of_another_version_is_refused(bench):
    _, locked = recorded_build(bench, "10.9.0.34")
    locked.recorded.timing_cache.write_bytes(b"timing of 10.13.3.9")

    with pytest.raises(CapabilityError, match=r"tensorrt 10\.9\.0\.34 does not take the recorded timing cache"):
        bench.build(TYPED, unit("10.9.0.34", TYPED_PROFILE), locked)


def test_a_recorded_timing_cache_without_tactics_is_refused(bench):
    _, locked = recorded_build(bench, "11.4.0.106")
    locked.recorded.timing_cache.write_bytes(b"timing of 11.4.0.106")

    with pytest.raises(CapabilityError, match="the recorded timing cache holds no tactics"):
        bench.build(TYPED, unit("11.4.0.106", TYPED_PROFILE), locked)


@pytest.mark.parametrize("version", [version for version in VERSIONS if version not in EDITABLE])
def test_older_versions_lock_nothing(bench, version):
    (bench.folder / "record.timing").write_bytes(b"")
    locked = Surroundings(recorded=Recorded(bench.folder / "record.timing"))

    with pytest.raises(CapabilityError, match=r"no locked build: TensorRT has timing caches .* from 10\.8 on"):
        bench.build(TYPED, unit(version, TYPED_PROFILE), locked)

    assert bench.trace() == ""


def batches(bench, values, num_batches=3):
    """Batches of 8 rows of `x`."""
    path = bench.folder / "x.raw"
    path.write_bytes(values.astype("<f4").tobytes())
    bench.set("STAND_IN_BATCH_SIZES", "32")
    return CalibrationBatches("EntropyCalibration2", {"x": path}, {"x": 8 * 4 * 4}, 8, num_batches)


STREAMED = [version for version in VERSIONS if not capability("tensorrt", version).implicit_quantization]


@pytest.mark.parametrize("version", STREAMED)
@pytest.mark.parametrize("algorithm", ["EntropyCalibration2", "MinMaxCalibration"])
def test_a_calibrator_of_the_builder_gets_every_batch_once(bench, version, algorithm):
    cache = bench.folder / "net.calibration"
    given = replace(batches(bench, np.arange(96)), algorithm=algorithm)
    around = Surroundings(calibration_cache=cache, calibration_batches=given)

    bench.build(TYPED, unit(version, TYPED_PROFILE, precision="int8"), around)

    trace = bench.trace()
    told = [line for line in trace.splitlines() if line.startswith("batch")]
    values = [f"batch of ['x']: [{[float(i) for i in range(start, start + 32)]}]" for start in (0, 32, 64)]
    assert told == ["batch size 8", *values]
    assert cache.read_text() == f"TRT-8601-{algorithm}\nx: 3c010204\n"
    if version in ("8.6.1", "10.16.1.11"):
        assert matches(f"calibrated-{algorithm}-{version}", trace)


def test_each_input_gets_its_own_values(bench):
    """The network has `ids` first, and 8.6 reads them as int32."""
    files = {name: bench.folder / f"{name}.raw" for name in ("mask", "ids")}
    files["ids"].write_bytes(np.arange(12, dtype="<i4").tobytes())
    files["mask"].write_bytes((np.arange(12, dtype="<f4") / 4).tobytes())
    given = CalibrationBatches("MinMaxCalibration", files, dict.fromkeys(files, 24), 2, 2)
    bench.set("STAND_IN_BATCH_SIZES", "6,6")
    shapes = {name: ShapeRange((1, 3), (2, 3), (4, 3)) for name in files}

    around = Surroundings(calibration_cache=bench.folder / "net.calibration", calibration_batches=given)
    bench.build(TWO_INPUTS, unit("8.6.1", (Profile("default", shapes),), precision="int8"), around)

    told = [line for line in bench.trace().splitlines() if line.startswith("batch of")]
    assert told == [
        "batch of ['ids', 'mask']: [[0, 1, 2, 3, 4, 5], [0.0, 0.25, 0.5, 0.75, 1.0, 1.25]]",
        "batch of ['ids', 'mask']: [[6, 7, 8, 9, 10, 11], [1.5, 1.75, 2.0, 2.25, 2.5, 2.75]]",
    ]


def test_batches_are_events(bench):
    given = batches(bench, np.arange(96))
    events = []
    around = Surroundings(calibration_cache=bench.folder / "net.calibration", calibration_batches=given)

    bench.build(TYPED, unit("8.6.1", TYPED_PROFILE), around, events.append)

    told = [event.text for event in events if event.text.startswith("calibration")]
    assert (told[0], told[-1]) == ("calibration, batch 1 of 3", "calibration, batch 3 of 3")


def failing_calibration(bench, error, given):
    cache = bench.folder / "net.calibration"
    with pytest.raises(error) as caught:
        bench.build(
            TYPED, unit("8.6.1", TYPED_PROFILE), Surroundings(calibration_cache=cache, calibration_batches=given)
        )
    assert not cache.exists()
    assert not list((bench.folder / "work").glob("*.engine"))
    assert "calibration cache read" not in bench.trace(), "the build went on"
    return caught.value.problems[0]


def test_batches_that_end_early_end_the_build(bench):
    problem = failing_calibration(bench, CalibrationError, batches(bench, np.arange(95)))

    assert "calibration stopped at batch 3 of 3: the file of batches of 'x' ended after 124 of 128" in problem.summary


def test_an_exception_in_the_calibrator_is_the_error_of_the_build(bench):
    given = batches(bench, np.arange(96))
    given.files["x"].unlink()

    problem = failing_calibration(bench, BuildError, given)

    assert "calibration stopped at batch 1 of 3: FileNotFoundError: " in problem.summary
    assert any("next_batch" in line or "Feed" in line for line in problem.detail)


def test_a_gpu_that_is_full_is_named(bench):
    bench.set("STAND_IN_CUDA_FREE", "100")

    problem = failing_calibration(bench, CapabilityError, batches(bench, np.arange(96)))

    assert "calibration stopped at batch 1 of 3: 0.0 MiB of GPU memory are needed" in problem.summary


def test_plugins_are_loaded_before_the_model_is_parsed(bench, tmp_path):
    library, missing = Path(_ctypes.__file__), tmp_path / "libmissing.so"

    bench.build(DYNAMIC, unit("10.9.0.34", DYNAMIC_PROFILES), Surroundings(plugins=(library,)))
    assert bench.trace().startswith("ILogger()\ninit_libnvinfer_plugins(")

    with pytest.raises(CapabilityError, match=r"plugin library .*libmissing.so cannot be loaded"):
        bench.build(DYNAMIC, unit("10.9.0.34", DYNAMIC_PROFILES), Surroundings(plugins=(missing,)))


@pytest.mark.parametrize(
    ("version", "setting"),
    [
        ("8.6.1", {"weight_streaming": True}),
        ("8.6.1", {"strip_weights": True}),
        ("10.3.0", {"strict_nans": True}),
        ("10.7.0", {"hardware_compatibility": "same_compute_capability"}),
        ("11.4.0.106", {"tactic_sources": ("cublas",)}),
    ],
)
def test_what_a_version_lacks_is_refused_before_it_is_asked(bench, version, setting):
    what = unit(version, DYNAMIC_PROFILES)

    with pytest.raises(TrtForgeError) as caught:
        bench.build(DYNAMIC, replace(what, settings={**PLAIN, **setting}))

    assert [problem.exit_code for problem in caught.value.problems] == [6]
    assert next(iter(setting)) in caught.value.problems[0].summary
    assert bench.trace() == ""


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (
            "CUDA initialization failure with error: 35. Please check your CUDA installation",
            "there is no NVIDIA driver",
        ),
        ("CUDA initialization failure with error: 100", "CUDA does not start here (CUDA error 100)"),
    ],
)
def test_without_a_driver(bench, line, cause):
    bench.set("STAND_IN_FAILS_TO_START", line)

    with pytest.raises(BuildError) as caught:
        bench.build(DYNAMIC, unit("8.6.1", DYNAMIC_PROFILES))

    assert caught.value.problems[0].summary.startswith(f"net-h200: {cause}")


def test_an_engine_of_another_version_is_no_engine(bench, monkeypatch):
    read = tensorrt.read_plan_header
    monkeypatch.setattr(tensorrt, "read_plan_header", lambda path: replace(read(path), version=(10, 0, 1, 0)))

    with pytest.raises(BuildError, match=r"the engine is not one of tensorrt 8\.6\.1"):
        bench.build(DYNAMIC, unit("8.6.1", DYNAMIC_PROFILES))


@pytest.mark.parametrize(
    ("version", "kind", "member"),
    [
        ("8.6.1", "BuilderFlag", "STRIP_PLAN"),
        ("10.0.1", "BuilderFlag", "STRICT_NANS"),
        ("11.0.0.114", "BuilderFlag", "FP16"),
        ("11.0.0.114", "NetworkDefinitionCreationFlag", "EXPLICIT_BATCH"),
        ("11.4.0.106", "TacticSource", "CUDNN"),
        ("10.7.0", "HardwareCompatibilityLevel", "SAME_COMPUTE_CAPABILITY"),
    ],
)
def test_stand_ins_have_no_name_that_the_version_lacks(version, kind, member):
    names = StandIn(version, lambda _line: None, {}).names

    with pytest.raises(AttributeError):
        getattr(names[kind], member)


def test_stand_ins_refuse_other_members_and_arguments():
    old, new = (StandIn(version, lambda _line: None, {}) for version in ("8.6.1", "11.0.0.114"))

    assert "IProgressMonitor" not in old.names
    assert "IInt8EntropyCalibrator2" not in new.names
    config = new.make("IBuilderConfig")
    with pytest.raises(AttributeError, match=r"IBuilderConfig\.int8_calibrator"):
        config.int8_calibrator = None
    with pytest.raises(AttributeError, match="progress_monitor"):
        old.make("IBuilderConfig").progress_monitor = None
    with pytest.raises(TypeError):
        config.set_flag()
