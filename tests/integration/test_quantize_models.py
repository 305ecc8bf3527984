"""INT8 with the rest in FP16, BF16 or FP32, judged by running: real models, exact integers, TensorRT-RTX builds."""

from __future__ import annotations

import importlib.metadata

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from test_precision_models import DIGITS, FEEDS, ROOT, SHAPES, parse, relative_error, run

from trtforge.backends.protocol import load_backend
from trtforge.graph.ingest import ingest
from trtforge.precision.audit import audit, share
from trtforge.precision.emulate import emulated
from trtforge.precision.fold import fold
from trtforge.precision.placement import place
from trtforge.precision.quantize import lower_int8
from trtforge.types import BuildUnit, Profile, ShapeRange

RESTS = ("float16", "bfloat16", "float32")
RNG = np.random.default_rng(0)


def minmax(model, tensors, feeds):
    """Largest magnitudes of `tensors` in one run."""
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    made = {name for node in model.graph.node for name in node.output} - {info.name for info in model.graph.output}
    watched.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in tensors if name in made)
    names = [info.name for info in watched.graph.output]
    values = dict(zip(names, run(watched, feeds), strict=True)) | feeds
    return {name: float(np.abs(values[name]).max()) for name in tensors}


def int8(model, feeds, rest, max_opset=24):
    placement = place(model)
    return lower_int8(model, placement, minmax(model, placement.tensors, feeds), rest=rest, max_opset=max_opset)


@pytest.fixture
def folded(model_path, tmp_path):
    def of(name):
        model = onnx.load(ingest(DIGITS if name == "digits" else model_path(name), tmp_path).path)
        fold(model)
        return model

    return of


def digits(part):
    with np.load(ROOT / "calib_data" / "digits" / f"{part}.npz", allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


@pytest.mark.parametrize("rest", RESTS)
def test_digits_stay_as_accurate(folded, rest):
    model = folded("digits")
    result = int8(model, {"image": digits("train")["image"]}, rest)
    data = digits("eval")

    def accuracy(candidate):
        (logits,) = run(candidate, {"image": data["image"]})
        return float((logits.argmax(1) == data["label"]).mean())

    assert accuracy(emulated(result.model)) >= accuracy(model) - 0.005
    assert share(audit(result.model, {"image": (1, 1, 8, 8)}), "int8").flops >= 0.9


# Ranges are the plain extremes here; what is left of the answers shows that scales, axes and integers belong together.
MOST_ERROR = {"magika": 2e-3, "ocr_cls": 5e-2, "ocr_rec": 0.4, "ocr_det": 0.3}


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("name", MOST_ERROR)
def test_real_models_keep_their_answers(folded, name, rest):
    model, feeds = folded(name), FEEDS[name]()
    (reference,) = run(model, feeds)
    result = int8(model, feeds, rest)

    (got,) = run(emulated(result.model), feeds)

    assert relative_error(got, reference) <= MOST_ERROR[name]
    if name != "ocr_det":
        assert (got.argmax(-1) == reference.argmax(-1)).mean() >= 0.95
    makers = {name: node for node in result.model.graph.node for name in node.output}
    casts = [makers.get(node.input[0]) for node in result.model.graph.node if node.op_type == "Cast"]
    assert not [node for node in casts if node and node.op_type == "DequantizeLinear"]
    assert "int8" in {row.dtype for row in result.decisions}
    names = [row.node for row in result.decisions]
    assert len(names) == len(set(names))
    if rest != "bfloat16":
        run(result.model, feeds)  # onnxruntime loads and runs it


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize(
    "text",
    [
        "g (float[N,16,8,8] x) => (float[N,32,6,6] y) { [c] y = Conv(x, w) }",
        "g (float[N,16,8,32] x) => (float[N,16,8,16] y) { [c] y = MatMul(x, m) }",
    ],
)
def test_the_emulation_multiplies_integers(text, rest):
    weights = {"w": RNG.standard_normal((32, 16, 3, 3)), "m": RNG.standard_normal((32, 16))}
    shape = (2, 16, 8, 8) if "Conv" in text else (2, 16, 8, 32)
    model = parse(text, **{name: array.astype(np.float32) for name, array in weights.items()})
    x = RNG.standard_normal(shape).astype(np.float32)
    result = int8(model, {"x": x}, rest).model

    (got,) = run(emulated(result), {"x": x})

    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in result.graph.initializer}
    name = "w" if "Conv" in text else "m"
    low = next(array for key, array in constants.items() if key.startswith("x_scale"))
    scales = next(array for key, array in constants.items() if key.startswith(f"{name}_scales")).astype(np.float64)
    rounded = x.astype(low.dtype).astype(np.float32)
    integers = np.clip(np.rint(rounded / np.float32(low)), -128, 127).astype(np.int64)
    kernel = constants[f"{name}_int8"].astype(np.int64)
    if "Conv" in text:
        windows = np.lib.stride_tricks.sliding_window_view(integers, (3, 3), axis=(2, 3))
        exact = np.einsum("nchwij,ocij->nohw", windows, kernel) * scales[:, None, None] * float(low)
    else:
        exact = (integers @ kernel) * scales * float(low)
    np.testing.assert_allclose(
        got, exact, rtol={"float32": 2e-6, "float16": 2**-11, "bfloat16": 2**-8}[rest], atol=1e-4
    )


@pytest.mark.parametrize("opset", [11, 17])
def test_raising_the_opset_changes_nothing(opset):
    axes = "<axes = [1]>(b)" if opset < 13 else "(b, one)"
    text = f"g (float[N,16,8,8] x) => (float[N,1,16,6,6] y) {{ a = Conv(x, w) b = Softmax(a) y = Unsqueeze{axes} }}"
    w = 0.1 * RNG.standard_normal((16, 16, 3, 3)).astype(np.float32)
    model = parse(text, opset, w=w, **({} if opset < 13 else {"one": np.int64([1])}))
    feeds = {"x": RNG.standard_normal((2, 16, 8, 8)).astype(np.float32)}
    raised = int8(model, feeds, "float16")
    (before,), (after,) = run(int8(model, feeds, "float32").model, feeds), run(emulated(raised.model), feeds)

    assert raised.model.opset_import[0].version == 19
    assert relative_error(after, before) < 1e-2  # logits of 10 are rounded by 2^-8 at most


def build(model, shapes, gpu, folder):
    path = folder / "lowered.onnx"
    onnx.save(model, path)
    graph = ingest(path, folder / "again")
    shapes = {spec.name: (spec.shape,) * 3 for spec in graph.inputs} | shapes
    unit = BuildUnit(
        identifier="int8",
        backend="tensorrt_rtx",
        backend_version=importlib.metadata.version("tensorrt-rtx"),
        gpu=gpu,
        compute_capability=gpu,
        precision="int8",
        tf32=False,
        settings={"optimization_level": 0, "profiling_verbosity": "none"},
        graph_digest="0" * 64,
        profiles=(Profile("p", {key: ShapeRange(*value) for key, value in shapes.items()}),),
    )
    return load_backend("tensorrt_rtx").build(unit, graph, folder, lambda _: None, 300)


SIZES = SHAPES | {"ocr_cls": {"x": ((1, 3, 48, 192), (2, 3, 48, 192), (8, 3, 48, 192))}}


@pytest.mark.parametrize(
    ("name", "rest", "gpu"),
    [
        *(("digits", rest, gpu) for rest in RESTS for gpu in ("sm86", "sm89")),
        ("digits", "float16", "sm75"),
        *((name, "float16", "sm86") for name in MOST_ERROR),
        ("ocr_rec", "bfloat16", "sm89"),
        ("ocr_det", "bfloat16", "sm86"),
        ("magika", "float32", "sm86"),
    ],
)
def test_tensorrt_rtx_builds_them(folded, tmp_path, name, rest, gpu):
    model = folded(name)

    built = build(int8(model, FEEDS[name](), rest).model, SIZES[name], gpu, tmp_path)

    assert built.size_bytes > 0


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("g (float[1,64,8,8] x) => (float[1,64,9,9] y) { y = ConvTranspose<group = 2>(x, w) }", (64, 32, 2, 2)),
        ("g (float[1,32,8,8] x) => (float[1,32,7,7] y) { y = Conv<group = 2>(x, w) }", (32, 16, 2, 2)),
        ("g (float[1,32,64] x) => (float[1,32,62] y) { y = Conv(x, w) }", (32, 32, 3)),
        ("g (float[1,32,8,8,8] x) => (float[1,32,6,6,6] y) { y = Conv(x, w) }", (32, 32, 3, 3, 3)),
        ("g (float[8,32] x) => (float[8,16] y) { y = Gemm<transB = 1, alpha = 0.5>(x, w) }", (16, 32)),
    ],
)
def test_tensorrt_rtx_builds_every_kind_of_layer(tmp_path, text, shape):
    model = parse(text, w=RNG.standard_normal(shape).astype(np.float32))
    placement = place(model)
    assert len(placement.nodes) == 1

    result = lower_int8(model, placement, {"x": 3.0}, rest="float16", max_opset=24)

    assert build(result.model, {}, "sm86", tmp_path).size_bytes > 0
