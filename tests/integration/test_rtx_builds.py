"""Real TensorRT-RTX builds, none of which needs a GPU."""

from __future__ import annotations

import hashlib
import os
import re
import resource
import struct
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper, numpy_helper

from trtforge import pipeline
from trtforge.backends import builder_log
from trtforge.backends.builder_log import explain
from trtforge.backends.protocol import load_backend
from trtforge.backends.worker.network import parser_line
from trtforge.errors import BuildError, CapabilityError, GraphError, StoreError, TrtForgeError
from trtforge.graph.ingest import ingest
from trtforge.machine import machine_facts
from trtforge.types import BuilderMessage, BuildUnit, Profile, ShapeRange

VERSION = version("tensorrt_rtx")
SETTINGS = {
    "optimization_level": 3,
    "workspace_mib": None,
    "profiling_verbosity": "layer_names_only",
    "sparse_weights": False,
    "strict_nans": False,
    "weight_streaming": False,
    "refit": False,
    "strip_weights": False,
    "version_compatible": False,
    "hardware_compatibility": "none",
    "max_aux_streams": None,
    "tactic_sources": None,
}
HEAD = '<ir_version: 10, opset_import: ["" : 21, "acme" : 1]>\n'
CONV = """g (float[N,3,8,8] x) => (float[N,4,8,8] y)
<float[4,3,1,1] w = {1,2,3,4,5,6,7,8,9,10,11,12}> { c = Conv(x, w)  y = Relu(c) }"""
RESHAPE = "g (float[N,12] x, int64[2] size) => (float[A,B] y) { y = Reshape(x, size) }"


def save(folder, text):
    path = Path(folder) / "model.onnx"
    onnx.save(onnx.parser.parse_model(HEAD + text), path)
    return path


def profile(name="p", values=None, **shapes):
    def ranges(of):
        return {key: ShapeRange(*value) for key, value in of.items()}

    return Profile(name, ranges(shapes), ranges(values or {}))


def unit(*profiles, gpu="sm86", tf32=False, **settings):
    return BuildUnit(
        identifier=f"m-fp32-{gpu}",
        backend="tensorrt_rtx",
        backend_version=VERSION,
        gpu=gpu,
        compute_capability=gpu,
        precision="fp32",
        tf32=tf32,
        settings=SETTINGS | settings,
        graph_digest="0" * 64,
        profiles=profiles,
    )


def build(graph, what, folder, on_event=print, timeout=120):
    out = Path(folder) / "out"
    out.mkdir(exist_ok=True)
    try:
        built = load_backend("tensorrt_rtx").build(what, graph, out, on_event, timeout)
    except TrtForgeError:
        assert {path.name for path in out.iterdir()} <= {"failure"}
        raise
    assert [built.path] == [path for path in out.iterdir() if path.name != "failure"]
    return built


def conv(folder):
    return ingest(save(folder, CONV), Path(folder) / "ingested")


BATCH = profile(x=((1, 3, 8, 8), (2, 3, 8, 8), (4, 3, 8, 8)))


@pytest.mark.parametrize(
    ("gpu", "mask"), [("sm75", 1), ("sm80", 2), ("sm86", 4), ("sm89", 8), ("sm120", 16), ("sm121", 32)]
)
def test_engine_is_for_the_compute_capability_asked_for(tmp_path, gpu, mask):
    built = build(conv(tmp_path), unit(BATCH, gpu=gpu), tmp_path)
    data = built.path.read_bytes()
    assert data[:4] == b"vtrt"
    assert data[32] == mask
    assert struct.unpack_from("<Q", data, 16) == (len(data),)
    assert (built.size_bytes, built.digest) == (len(data), hashlib.sha256(data).hexdigest())
    assert [str(spec) for spec in built.inputs + built.outputs] == ["x float32 (N, 3, 8, 8)", "y float32 (?, 4, 8, 8)"]
    assert built.seconds.keys() == {"start", "parse", "build", "write"}
    assert all(value > 0 for value in built.seconds.values())
    assert built.peak_memory_bytes > len(data)
    assert built.messages == ()


def test_progress_never_falls(tmp_path):
    events = []
    build(conv(tmp_path), unit(BATCH), tmp_path, events.append)
    fractions = [event.fraction for event in events]
    assert fractions == sorted(fractions)
    assert fractions[-1] > 0.5
    assert events[0].text == "Building engine"


@pytest.mark.parametrize(
    "changed",
    [
        {"profiling_verbosity": "detailed"},
        {"profiling_verbosity": "none"},
        {"weight_streaming": True},
        {"tf32": True},
    ],
    ids=str,
)
def test_setting_changes_the_engine(tmp_path, changed):
    graph = conv(tmp_path)
    plain = build(graph, unit(BATCH), tmp_path)
    assert build(graph, unit(BATCH), tmp_path).digest == plain.digest
    assert build(graph, unit(BATCH, **changed), tmp_path).digest != plain.digest


@pytest.mark.parametrize(
    "settings",
    [
        {"optimization_level": 0},
        {"optimization_level": 5},
        {"workspace_mib": 512},
        {"strict_nans": True},
        {"sparse_weights": True},
        {"max_aux_streams": 0},
        {"max_aux_streams": 3},
        {"tactic_sources": []},
        {"tactic_sources": ["jit_convolutions", "edge_mask_convolutions"]},
    ],
    ids=str,
)
def test_setting_is_taken(tmp_path, settings):
    assert build(conv(tmp_path), unit(BATCH, **settings), tmp_path).size_bytes


def test_settings_that_would_be_ignored_are_refused_together(tmp_path):
    asked = {"refit": True, "version_compatible": True, "hardware_compatibility": "ampere_plus", "made_up": 1}
    with pytest.raises(TrtForgeError) as caught:
        build(conv(tmp_path), unit(BATCH, **asked), tmp_path)
    assert {problem.exit_code for problem in caught.value.problems} == {CapabilityError.exit_code}
    assert [problem.summary.split(":")[1].strip() for problem in caught.value.problems] == [
        f"builder.{name}" for name in asked
    ]


def test_unknown_target_lists_the_known_ones(tmp_path):
    with pytest.raises(
        CapabilityError, match=r"cannot target sm90 \(it targets sm75, sm80, sm86, sm89, sm120, sm121\)"
    ):
        build(conv(tmp_path), unit(BATCH, gpu="sm90"), tmp_path)


def test_other_version_than_planned(tmp_path):
    planned = unit(BATCH)
    object.__setattr__(planned, "backend_version", "1.7.0.1")
    with pytest.raises(CapabilityError, match=f"{VERSION} was loaded, the build was planned for 1.7.0.1"):
        build(conv(tmp_path), planned, tmp_path)


@pytest.mark.parametrize(
    ("profiles", "summary"),
    [
        ([], "dynamic inputs and the build has no optimization profile"),
        ([profile(X=((1, 3, 8, 8),) * 3)], "no shapes for the dynamic input 'x'"),
        ([profile(x=((1, 3, 8, 8),) * 3, imagez=((1,),) * 3)], "names 'imagez', the network has x"),
        ([profile(x=((4, 3, 8, 8), (2, 3, 8, 8), (8, 3, 8, 8)))], "min <= opt <= max does not hold for 'x'"),
        ([profile(x=((1, 3, 8), (2, 3, 8), (8, 3, 8)))], "profile 0 gives 'x' 3 dimensions, the model has 4"),
        ([BATCH, profile(x=((1, 3, 16, 8),) * 3)], "profile 1 asks for sizes 16, 16, 16 on axis 2 of 'x'"),
        (
            [profile(x=((1, 3, 8, 8),) * 3, values={"x": ((1,),) * 3})],
            "values for 'x', which decides no tensor's shape",
        ),
    ],
)
def test_wrong_profiles(tmp_path, profiles, summary):
    with pytest.raises(TrtForgeError) as caught:
        build(conv(tmp_path), unit(*profiles), tmp_path)
    assert summary in " ".join(problem.summary for problem in caught.value.problems)


def test_shape_values(tmp_path):
    graph = ingest(save(tmp_path, RESHAPE), tmp_path)
    shapes = {"x": ((1, 12), (2, 12), (4, 12)), "size": ((2,),) * 3}
    with pytest.raises(BuildError, match="no values for 'size', whose values decide another tensor's shape"):
        build(graph, unit(profile(**shapes)), tmp_path)
    values = {"size": ((1, 12), (2, 12), (4, 12))}
    built = build(graph, unit(profile(values=values, **shapes)), tmp_path)
    assert [message.text for message in built.messages] == [
        "ModelImporter.cpp:1071: Make sure input size has Int64 binding."
    ]
    assert built.inputs[1].dtype == "int64"


def test_narrowed_types_are_refused_not_taken(tmp_path):
    graph = ingest(save(tmp_path, "g (double[2] x) => (double[2] y) { y = Neg(x) }"), tmp_path)
    with pytest.raises(TrtForgeError) as caught:
        build(graph, unit(), tmp_path)
    assert [problem.summary.split(" makes ")[1] for problem in caught.value.problems] == [
        "input 'x' float32, the model says float64",
        "output 'y' float32, the model says float64",
    ]


def test_uint8_quantization_is_not_built_as_int8(tmp_path):
    text = """g (float[4] x) => (float[4] y) <float s = {0.5}, uint8 z = {0}>
    { q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z) }"""
    with pytest.raises(BuildError, match="built another network than the graph"):
        build(ingest(save(tmp_path, text), tmp_path), unit(), tmp_path)


def test_names_that_tie_dimensions_nobody_tied(tmp_path):
    graph = ingest(save(tmp_path, "g (float[1,H,W] x) => (float[1,H,W] y) { y = Relu(x) }"), tmp_path)
    tied = onnx.load(graph.path)
    for dim in tied.graph.input[0].type.tensor_type.shape.dim[1:]:
        dim.dim_param = "?"
    onnx.save(tied, graph.path)
    with pytest.raises(GraphError, match=r"names 'x' axis 1, 'x' axis 2 all '\?'"):
        build(graph, unit(profile(x=((1, 8, 8),) * 3)), tmp_path)


def test_damaged_model_is_not_an_empty_network(tmp_path):
    graph = conv(tmp_path)
    graph.path.write_bytes(b"")
    with pytest.raises(TrtForgeError) as caught:
        build(graph, unit(), tmp_path)
    assert "the parsed network has the inputs none, the model x" in caught.value.problems[0].summary


def test_external_weights_are_found_from_anywhere(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    path = save(source, "g (float[2,4] x) => (float[2,4] y) <float[4] w = {1,2,3,4}> { y = Mul(x, w) }")
    model = onnx.load(path)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.arange(4, dtype=np.float32), "w"))
    # A node without a name makes ingest write a copy elsewhere, away from the weights.
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    graph = ingest(path, tmp_path / "work")
    assert graph.path.parent != graph.weights_dir
    for folder in (tmp_path, source, Path("/")):
        monkeypatch.chdir(folder)
        assert build(graph, unit(), tmp_path).size_bytes


def test_full_disk_leaves_nothing(tmp_path):
    graph = conv(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(
            StoreError, match=r"m-fp32-sm86\.engine: the engine of \d+ bytes could not be written: File too"
        ):
            build(graph, unit(BATCH), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_modules_in_the_current_folder_shadow_nothing(tmp_path, monkeypatch):
    for name in ("tensorrt_rtx", "json", "trtforge", "runpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    graph = conv(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert build(graph, unit(BATCH), tmp_path).size_bytes


def test_several_builds_leave_no_process_and_no_descriptor(tmp_path):
    graph = conv(tmp_path)
    build(graph, unit(BATCH), tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    build(graph, unit(BATCH), tmp_path)
    with pytest.raises(BuildError):
        build(graph, unit(), tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert Path(f"/proc/self/task/{os.getpid()}/children").read_text() == ""


REAL = {
    "silero_sequence": profile(input=((1, 576), (8, 576), (32, 576)), h=((1, 1, 128),) * 3, c=((1, 1, 128),) * 3),
    "silero_openvino": None,
    "silero_op18": profile(
        input=((1, 576), (4, 576), (8, 576)), sr=((),) * 3, state=((2, 1, 128), (2, 4, 128), (2, 8, 128))
    ),
    "magika": profile(bytes=((1, 2048), (8, 2048), (32, 2048))),
    "ocr_cls": profile(x=((1, 3, 48, 192), (4, 3, 48, 192), (8, 3, 48, 192))),
    "ocr_det": profile(x=((1, 3, 32, 32), (1, 3, 736, 736), (1, 3, 960, 960))),
    "ocr_rec": profile(x=((1, 3, 48, 48), (4, 3, 48, 320), (8, 3, 48, 640))),
}


@pytest.mark.parametrize("name", REAL)
def test_real_models_build(tmp_path, model_path, name):
    graph = ingest(model_path(name), tmp_path)
    built = build(graph, unit(*filter(None, [REAL[name]])), tmp_path)
    assert built.size_bytes > 1_000_000
    assert {message.severity for message in built.messages} <= {"warning"}


@pytest.mark.parametrize("name", ["silero", "silero_half", "silero_op15"])
def test_lstm_inside_if_is_explained(tmp_path, model_path, name):
    graph = ingest(model_path(name), tmp_path)
    shapes = {"input": ((1, 576),) * 3, "state": ((2, 1, 128),) * 3, "sr": ((),) * 3}
    shapes = {spec.name: shapes[spec.name] for spec in graph.inputs}
    with pytest.raises(BuildError, match="an LSTM, GRU or RNN stands in a branch of an If node"):
        build(graph, unit(profile(**shapes)), tmp_path)


# Each row of the table is said by the real builder. The same logger serves every build of a process.


class Said:
    def __init__(self):
        import tensorrt_rtx as trt

        class Logger(trt.ILogger):
            def __init__(self):
                trt.ILogger.__init__(self)
                self.messages = []

            def log(self, severity, text):
                if int(severity) <= int(trt.ILogger.Severity.WARNING):
                    self.messages.append(BuilderMessage(severity.name.lower(), text))

        self.trt = trt
        self.logger = Logger()

    def by(self, model, profiles=(), *, gpu="SM86", workspace=None, path="model.onnx"):
        self.logger.messages = []
        builder = self.trt.Builder(self.logger)
        network = builder.create_network(0)
        parser = self.trt.OnnxParser(network, self.logger)
        parsed = parser.parse(model, path)
        if not parsed:
            lines = [parser_line(parser.get_error(i)) for i in range(parser.num_errors)]
            return [BuilderMessage("error", line) for line in lines] + self.logger.messages
        config = builder.create_builder_config()
        config.num_compute_capabilities = 1
        assert config.set_compute_capability(getattr(self.trt.ComputeCapability, gpu), 0)
        if workspace:
            config.set_memory_pool_limit(self.trt.MemoryPoolType.WORKSPACE, workspace)
        for shapes, values in profiles:
            ranges = builder.create_optimization_profile()
            for name, value in shapes.items():
                ranges.set_shape(name, *value)
            for name, value in values.items():
                ranges.set_shape_input(name, *value)
            config.add_optimization_profile(ranges)
        assert builder.build_serialized_network(network, config) is None
        return self.logger.messages

    def on_load(self, data):
        self.logger.messages = []
        assert self.trt.Runtime(self.logger).deserialize_cuda_engine(data) is None
        return self.logger.messages


@pytest.fixture(scope="module")
def said():
    return Said()


def lstm_in_if():
    """A model whose LSTM stands in an If branch and gives its last state to the outside."""
    weights = [
        numpy_helper.from_array(np.ones((1, 16, 4), np.float32), "W"),
        numpy_helper.from_array(np.ones((1, 16, 4), np.float32), "R"),
    ]
    value = helper.make_tensor_value_info
    lstm = helper.make_node("LSTM", ["x", "W", "R"], ["", "h"], hidden_size=4)
    branches = {
        "then_branch": helper.make_graph([lstm], "then", [], [value("h", 1, None)]),
        "else_branch": helper.make_graph([helper.make_node("Abs", ["x"], ["e"])], "else", [], [value("e", 1, None)]),
    }
    graph = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], **branches)],
        "g",
        [value("x", 1, [1, 2, 4]), value("c", 9, [])],
        [value("y", 1, None)],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 16)], ir_version=8).SerializeToString()


def outside_weights():
    model = onnx.parser.parse_model(HEAD + "g (float[2] x) => (float[2] y) <float[2] w = {1,2}> { y = Add(x, w) }")
    weights = model.graph.initializer[0]
    weights.ClearField("float_data")
    weights.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": "gone.bin", "offset": "0", "length": "8"}.items():
        weights.external_data.add(key=key, value=value)
    return model.SerializeToString()


ONE_IF = """g (float[N,3] x, bool c) => (float[] y) {
  y = If (c) <then_branch = t () => (float[3] u) { a = Constant<value = int64[1] {0}>()  u = ReduceSum<keepdims = 0>(x, a) },
              else_branch = e () => (float[M,3] v) { v = Identity(x) }> }"""
IF_ON_A_SHAPE_IN_IF = """g (float[N,3] x, bool c) => (float[P,3] y) {
  y = If (c) <
    then_branch = t () => (float[Q,3] u) {
      s = Shape(x)  i = Constant<value = int64 {0}>()  n = Gather(s, i)  one = Constant<value = int64 {1}>()
      d = Equal(n, one)
      u = If (d) <then_branch = tt () => (float[2,3] a) { a = Neg(x) }, else_branch = te () => (float[2,3] b) { b = Identity(x) }> },
    else_branch = e () => (float[R,3] v) { v = Abs(x) }> }"""
FP8 = """g (float[4,32] x) => (float[4,32] y) <float s = {0.5}, float8e4m3fn z = {0}>
  { q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z) }"""
TWO = "g (float[N,4] a, float[N,4] b) => (float[N,4] y) { y = Add(a, b) }"
N3 = ((1, 3), (2, 3), (4, 3))
X = ((1, 3, 8, 8), (2, 3, 8, 8), (4, 3, 8, 8))
QDQ = "g (float[4] x) => (float[4] y) <float s = {%s}, int8 z = {%s}> { q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z) }"

SAYINGS = [
    ("operator Det (node 'd') is not supported", "g (float[3,3] x) => (float y) { [d] y = Det(x) }", {}),
    ("operator NonZero (node 'n') is not", "g (float[3] x) => (int64[1,K] y) { [n] y = NonZero(x) }", {}),
    ("operator Thing (node 't') is not a standard", "g (float[3] x) => (float[3] y) { [t] y = acme.Thing(x) }", {}),
    ("a type that TensorRT does not have", "g (string[3] x) => (string[3] y) { y = Identity(x) }", {}),
    (
        "DequantizeLinear 'd' reads Int32",
        "g (float[4] x) => (float[4] y) <int32[4] w = {1,2,3,4}, float s = {0.5}> { [d] d = DequantizeLinear(w, s)  y = Add(x, d) }",
        {},
    ),
    ("QuantizeLinear 'number 0' has a zero point", QDQ % ("0.5", "3"), {}),
    ("has a scale that is zero or negative", QDQ % ("0.0", "0"), {}),
    ("node 'a' combines Float and Half", "g (float[4] x, float16[4] w) => (float[4] y) { [a] y = Add(x, w) }", {}),
    (
        "node 'm' multiplies Float by Half",
        "g (float[4,4] x, float16[4,4] w) => (float[4,4] y) { [m] y = MatMul(x, w) }",
        {},
    ),
    ("sm86 has no hardware for fp8_e4m3", FP8, {}),
    ("needs FP32 GEMM, which", "g (float[4,4] x) => (float[4,4] y) { y = MatMul(x, x) }", {"gpu": "SM75"}),
    ("no optimization profile", CONV, {}),
    ("profile 0 says nothing about the dynamic input 'b'", TWO, {"profiles": [({"a": ((1, 4),) * 3}, {})]}),
    ("profile 0 gives 'x' 3 dimensions, the model has 4", CONV, {"profiles": [({"x": ((1, 3, 8),) * 3}, {})]}),
    (
        "sizes 9, 9, 9 on axis 2 of 'x', which the model fixes to 8",
        CONV,
        {"profiles": [({"x": ((1, 3, 9, 8),) * 3}, {})]},
    ),
    ("min <= opt <= max does not hold for 'x'", CONV, {"profiles": [({"x": (X[1], X[0], X[2])}, {})]}),
    (
        "the values of 'size' decide the shape of another tensor, and profile 0 has none",
        RESHAPE,
        {"profiles": [({"x": ((1, 12),) * 3, "size": ((2,),) * 3}, {})]},
    ),
    (
        "the OPT shapes of a profile give the dimension 'N' two sizes, 2 and 3",
        TWO,
        {"profiles": [({"a": ((1, 4), (2, 4), (4, 4)), "b": ((1, 4), (3, 4), (4, 4))}, {})]},
    ),
    (
        "the values of the Float input 's' decide the shape",
        'g (float[1,1,4,4] x, float[4] s) => (float[1,1,A,B] y) { y = Resize<mode = "nearest">(x, , s) }',
        {},
    ),
    (
        "the output shape of Reshape 'r' depends on computed numbers",
        "g (float[12] x, float[2] f) => (float[A,B] y) { s = Cast<to = 7>(f)  [r] y = Reshape(x, s) }",
        {},
    ),
    (
        "it reshapes [1,8,2] to [1,8]",
        "g (float[1,8,2] x) => (float[1,8] y) <int64[1] a = {2}> { y = Squeeze(x, a) }",
        {},
    ),
    (
        "the model uses the name 'S' for several input dimensions",
        "g (float[S,S] x) => (float[S,S] y) { y = Relu(x) }",
        {"profiles": [({"x": ((2, 4),) * 3}, {})]},
    ),
    ("the branches of If", ONE_IF, {"profiles": [({"x": N3}, {})]}),
    ("an LSTM, GRU or RNN stands in a branch of an If", lstm_in_if(), {}),
    ("the model's weights file gone.bin cannot be opened", outside_weights(), {}),
    ("the model file holds no graph", b"", {}),
    ("more scratch memory than builder.workspace_mib", CONV, {"profiles": [({"x": X}, {})], "workspace": 1 << 20}),
    ("TensorRT's compiler stopped at a check of its own", IF_ON_A_SHAPE_IN_IF, {"profiles": [({"x": N3}, {})]}),
]


def messages_of(said, model, how):
    data = onnx.parser.parse_model(HEAD + model).SerializeToString() if isinstance(model, str) else model
    return said.by(data, **how)


@pytest.mark.parametrize(("cause", "model", "how"), SAYINGS, ids=[cause for cause, _, _ in SAYINGS])
def test_what_the_builder_says_is_explained(said, cause, model, how):
    found = explain(messages_of(said, model, how))
    assert found, builder_log.error_lines(said.logger.messages)
    assert cause in found[0].cause
    assert found[0].next_step


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    return build(conv(folder), unit(BATCH), folder).path.read_bytes()


LOADS = [
    ("the file is no engine of this TensorRT", lambda data: b"ftrt" + data[4:]),
    ("it is cut short or damaged", lambda data: data[:1000]),
    ("there is no NVIDIA driver", lambda data: data),
]


@pytest.mark.skipif(bool(machine_facts().gpus), reason="with a GPU, engines load")
@pytest.mark.parametrize(("cause", "damage"), LOADS, ids=[cause for cause, _ in LOADS])
def test_what_is_said_on_loading_is_explained(said, engine, cause, damage):
    (found,) = explain(said.on_load(damage(engine)))
    assert cause in found.cause


@pytest.mark.skipif(bool(machine_facts().gpus), reason="with a GPU, engines load")
def test_no_row_of_the_table_is_dead(said, engine):
    spoken = [message.text for _, model, how in SAYINGS for message in messages_of(said, model, how)]
    spoken += [message.text for _, damage in LOADS for message in said.on_load(damage(engine))]
    dead = [row.pattern for row in builder_log._TABLE if not any(re.search(row.pattern, text) for text in spoken)]
    assert dead == []


def test_a_use_of_an_operator_that_no_row_knows_is_told_by_the_parser_s_words(tmp_path):
    text = 'g (float[4] x, int64[2,1] i, float[2] u) => (float[4] y) { [s] y = ScatterND <reduction="mul"> (x, i, u) }'
    with pytest.raises(BuildError, match=r"ScatterND \(node 's'\) is used in a way .* ScatterND with reduction is not"):
        build(ingest(save(tmp_path, text), tmp_path), unit(), tmp_path)


ATTENTION = """<ir_version: 8, opset_import: ["" : 17]>
net (float[batch, seq, 64] x, bool[batch, seq] attended) => (float[batch, seq, 64] y)
<float minus = {-inf}, float none = {0}, int64[4] heads = {0, 0, 2, 32}, int64[3] whole = {0, 0, 64}, int64[2] axes = {1, 2}>
{
    q0 = MatMul(x, wq) k0 = MatMul(x, wk) v0 = MatMul(x, wv)
    q1 = Reshape(q0, heads) k1 = Reshape(k0, heads) v1 = Reshape(v0, heads)
    q = Transpose<perm = [0, 2, 1, 3]>(q1) k = Transpose<perm = [0, 2, 3, 1]>(k1) v = Transpose<perm = [0, 2, 1, 3]>(v1)
    scores = MatMul(q, k) wide = Unsqueeze(attended, axes) mask = Where(wide, none, minus) masked = Add(scores, mask)
    p = Softmax<axis = -1>(masked) gone = IsNaN(p) guarded = Where(gone, none, p)
    heads_out = MatMul(guarded, v) o = Transpose<perm = [0, 2, 1, 3]>(heads_out) joined = Reshape(o, whole)
    y = MatMul(joined, wo)
}"""
ATTENTION_SPEC = """
version: 1
name: attention
model: {onnx: model.onnx}
inputs: {attended: {kind: mask}}
precision: {type: fp16}
profiles: [{inputs: {x: {min: [1, 8, 64], opt: [4, 32, 64], max: [8, 64, 64]}, attended: {min: [1, 8], opt: [4, 32], max: [8, 64]}}}]
targets: [{backend: tensorrt_rtx, gpus: [sm86]}]
"""


def test_attention_as_pytorch_exports_it_builds_in_fp16(tmp_path):
    """scaled_dot_product_attention guards rows that are masked away; TensorRT-RTX 1.7 stopped at a cast behind the guard."""
    model = onnx.parser.parse_model(ATTENTION)
    rng = np.random.default_rng(0)
    weights = {name: (rng.standard_normal((64, 64)) / 8).astype(np.float32) for name in ("wq", "wk", "wv", "wo")}
    model.graph.initializer.extend(numpy_helper.from_array(values, name) for name, values in weights.items())
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "attention.yaml").write_text(ATTENTION_SPEC)

    bundle = pipeline.build(tmp_path / "attention.yaml", None, lambda _event: None, store_path=tmp_path / "store")

    (artifact,) = bundle.manifest.artifacts
    assert artifact.precision == "fp16"
    kept = {decision.op for decision in bundle.manifest.lowering if decision.dtype == "float32"}
    assert "Softmax" in kept
    assert "IsNaN" not in kept
