"""The Q/DQ linter on what quantizers write, judged by running the mended models."""

from __future__ import annotations

import importlib
import json
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
import tensorrt_rtx as trt
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from trtforge.graph.qdq_file import open_model, write_model
from trtforge.graph.qdq_fix import mend
from trtforge.graph.qdq_lint import findings

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "configs" / "models" / "digits.onnx"
F32 = np.float32


def session(path):
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run(path, feeds):
    return session(path).run(None, feeds)[0]


def net():
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 13]> g (float[N,3,8,8] x) => (float[N,5] y) {
        a = Conv<pads = [1,1,1,1]>(x, w1, b1)  r = Relu(a)  c = Conv<pads = [1,1,1,1]>(r, w2, b2)  s = Add(c, r)
        p = MaxPool<kernel_shape = [2,2], strides = [2,2]>(s)  f = Flatten(p)  m = MatMul(f, w3)  t = Add(m, b3)
        y = Gemm<transB = 1>(t, w4, b4) }""")
    rng = np.random.default_rng(0)
    shapes = {"w1": (4, 3, 3, 3), "b1": 4, "w2": (4, 4, 3, 3), "b2": 4, "w3": (64, 6), "b3": 6, "w4": (5, 6), "b4": 5}
    values = {name: (rng.standard_normal(shape) * 0.3).astype(F32) for name, shape in shapes.items()}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
    return model


class Samples(CalibrationDataReader):
    def __init__(self, *feeds):
        self.feeds = iter(feeds)

    def get_next(self):
        return next(self.feeds, None)


def images(count):
    return {"x": np.random.default_rng(count).standard_normal((count, 3, 8, 8)).astype(F32)}


def quantized(folder, quant_format, activation, weight, *, per_channel, symmetric, source=None, feeds=None):
    if source is None:
        source, feeds = folder / "float.onnx", images(16)
        onnx.save(net(), source)
    logging.disable(logging.CRITICAL)
    try:
        quantize_static(
            str(source),
            str(folder / "quantized.onnx"),
            Samples(feeds),
            quant_format=quant_format,
            activation_type=activation,
            weight_type=weight,
            per_channel=per_channel,
            extra_options={"ActivationSymmetric": symmetric},
        )
    finally:
        logging.disable(logging.NOTSET)
    return folder / "quantized.onnx"


def mended(path):
    model = open_model(path)
    mend(model, path.parent)
    target = path.with_name("mended.onnx")
    write_model(model, path, target)
    return target


def errors(path):
    return {one.rule for one in findings(open_model(path), path.parent, {}) if one.severity == "error"}


def parser_errors(path):
    """What TensorRT-RTX's parser says."""
    logger = trt.Logger(trt.Logger.ERROR)
    network = trt.Builder(logger).create_network(0)
    parser = trt.OnnxParser(network, logger)
    parser.parse_from_file(str(path))
    return [parser.get_error(index).desc() for index in range(parser.num_errors)]


INT8, UINT8 = QuantType.QInt8, QuantType.QUInt8
TYPES = [(UINT8, INT8), (UINT8, UINT8), (INT8, INT8)]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize(("activation", "weight"), TYPES)
def test_onnxruntime_qdq(tmp_path, activation, weight, per_channel, symmetric):
    path = quantized(tmp_path, QuantFormat.QDQ, activation, weight, per_channel=per_channel, symmetric=symmetric)
    target = mended(path)

    assert "QDQ03" in errors(path)
    assert "QDQ03" not in errors(target)
    np.testing.assert_array_equal(run(target, images(8)), run(path, images(8)))
    if symmetric and (weight is INT8 or activation is INT8):
        assert errors(target) == set()
        assert parser_errors(path)
        assert parser_errors(target) == []
    elif not symmetric:
        assert errors(target) <= {"QDQ01", "QDQ02"}


@pytest.mark.parametrize("per_channel", [True, False])
def test_onnxruntime_qoperator(tmp_path, per_channel):
    path = quantized(tmp_path, QuantFormat.QOperator, INT8, INT8, per_channel=per_channel, symmetric=True)
    target = mended(path)

    assert errors(path) == {"QDQ09", "QDQ10", "QDQ11"}
    assert errors(target) == set()
    (step,) = {
        float(numpy_helper.to_array(tensor))
        for tensor in onnx.load(path).graph.initializer
        if tensor.name.startswith("y") and "scale" in tensor.name and not tensor.dims
    }
    assert np.abs(run(target, images(8)) - run(path, images(8))).max() <= 1.01 * step
    assert parser_errors(path)
    assert parser_errors(target) == []


@pytest.mark.parametrize(("symmetric", "expected"), [(True, set()), (False, {"QDQ02"})])
def test_digits(tmp_path, symmetric, expected):
    with np.load(ROOT / "calib_data" / "digits" / "eval.npz", allow_pickle=False) as arrays:
        feeds = {"image": arrays["image"][:64]}
    path = quantized(
        tmp_path,
        QuantFormat.QDQ,
        UINT8,
        INT8,
        per_channel=True,
        symmetric=symmetric,
        source=DIGITS,
        feeds=feeds,
    )
    target = mended(path)

    assert errors(target) == expected
    np.testing.assert_array_equal(run(target, feeds), run(path, feeds))


CHANNELS = np.array([0.01, 0.02, 0.005, 0.03], F32)
OFFSETS = np.array([120, 128, 130, 127], np.uint8)


@pytest.mark.parametrize(
    ("dtype", "zero"), [("int8", np.zeros(4, np.int8)), ("uint8", np.full(4, 128, np.uint8)), ("uint8", OFFSETS)]
)
@pytest.mark.parametrize("op", ["QLinearConv", "QGemm"])
def test_quantized_operators_by_their_definition(tmp_path, op, dtype, zero):
    rng = np.random.default_rng(1)
    limits = np.iinfo(dtype)
    weights = rng.integers(limits.min, limits.max, (4, 6), endpoint=True).astype(dtype)
    x = rng.integers(0, 256, (5, 6)).astype(np.uint8)
    bias = rng.integers(-500, 500, 4).astype(np.int32)
    total = (x.astype(np.int64) - 128) @ (weights.astype(np.int64) - zero[:, None]).T + bias
    right = np.clip(np.rint(total * (CHANNELS.astype(np.float64) * F32(0.02) / F32(0.1))) + 128, 0, 255)
    if op == "QLinearConv":
        call, dims = "QLinearConv(x, xs, xz, w, ws, wz, ys, yz, b)", "1,1"
        weights, x, right = weights.reshape(4, 6, 1, 1), x.reshape(5, 6, 1, 1), right.reshape(5, 4, 1, 1)
    else:
        call, dims = "com.microsoft.QGemm<transB = 1>(x, xs, xz, w, ws, wz, b, ys, yz)", ""
    dims = f",{dims}" if dims else ""
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 13, "com.microsoft" : 1]> g (uint8[5,6{dims}] x) => (uint8[5,4{dims}] y) {{ y = {call} }}'
    )
    values = {"xs": F32(0.02), "xz": np.uint8(128), "w": weights, "ws": CHANNELS, "wz": zero, "ys": F32(0.1)}
    values |= {"yz": np.uint8(128), "b": bias}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in values.items())
    onnx.save(model, tmp_path / "m.onnx")

    found = run(mended(tmp_path / "m.onnx"), {"x": x}).astype(int)
    assert np.abs(found - right).max() <= 1
    assert (found == right).mean() > 0.9


OPERATORS = (
    "convinteger",
    "dequantizelinear",
    "dynamicquantizelinear",
    "matmulinteger",
    "qlinearconv",
    "qlinearmatmul",
    "quantizelinear",
)
EIGHT_BITS = {np.dtype(name) for name in ("float32", "uint8", "int8", "int32")}


def node_tests():
    """ONNX's own tests of these operators, with (inputs, outputs), of types up to 8 bits but FP8."""
    collected = importlib.import_module("onnx.backend.test.case.node")
    for operator in OPERATORS:
        importlib.import_module(f"onnx.backend.test.case.node.{operator}")
    wanted = tuple(f"test_{operator}" for operator in OPERATORS)
    cases = {case.name: (case.model, *case.data_sets[0]) for case in collected._NodeTestCases}
    return [
        pytest.param(*case, id=name)
        for name, case in sorted(cases.items())
        if name.startswith(wanted)
        and "expanded" not in name
        and {np.asarray(value).dtype for values in case[1:] for value in values} <= EIGHT_BITS
    ]


@pytest.mark.parametrize(("model", "inputs", "outputs"), node_tests())
def test_onnx_node_tests_keep_their_results(tmp_path, model, inputs, outputs):
    names = [info.name for info in model.graph.input]
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in zip(names[1:], inputs[1:], strict=True)
    )
    del model.graph.input[1:]
    onnx.save(model, tmp_path / "m.onnx")
    target = mended(tmp_path / "m.onnx")
    # onnx's evaluator knows DequantizeLinear from 19 on, onnxruntime not the newest and no ConvInteger per channel
    written = onnx.load(target)
    is_old = written.opset_import[0].version < 19 and "DequantizeLinear" in [
        node.op_type for node in written.graph.node
    ]
    runner = session(target) if is_old else ReferenceEvaluator(written)
    found = runner.run(None, {names[0]: inputs[0]})

    assert len(found) == len(outputs)
    for one, other in zip(found, outputs, strict=True):
        step = 0 if one.dtype == F32 else 1
        np.testing.assert_allclose(one.astype(np.float64), np.asarray(other).astype(np.float64), rtol=1e-6, atol=step)


def verb(*arguments):
    command = [sys.executable, "-m", "trtforge", "lint", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_verb(tmp_path):
    path = quantized(tmp_path, QuantFormat.QDQ, UINT8, INT8, per_channel=True, symmetric=True)
    told = verb(path)
    fixed = verb(path, "--fix", tmp_path / "fixed.onnx")
    as_json = verb(path, "--json", "--for", "tensorrt:8.6")

    assert told.returncode == 13
    assert f"trtforge lint {path} --fix OUT.onnx" in told.stdout
    assert (fixed.returncode, fixed.stderr) == (0, "")
    assert "24 errors" in fixed.stdout
    assert errors(tmp_path / "fixed.onnx") == set()
    result = json.loads(as_json.stdout)
    assert (result["ok"], result["exit_code"]) == (False, 13)
    assert {"rule", "severity", "node", "found", "expected", "why", "mendable"} <= set(result["findings"][0])


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["missing.onnx"], 3, "does not exist"),
        ([DIGITS, "--fix", DIGITS], 64, "write over the model"),
        ([DIGITS, "--for", "tensorr"], 64, "names no backend"),
        ([DIGITS, "--for", "tensorrt:7.0"], 6, "is not known"),
        ([DIGITS], 0, ""),
    ],
)
def test_the_verb_on_what_is_wrong(arguments, code, text):
    result = verb(*arguments)

    assert (result.returncode, text in result.stderr) == (code, True)
