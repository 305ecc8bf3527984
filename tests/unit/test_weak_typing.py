"""Which tensors TensorRT 8.6 has to be told to keep in FP32."""

from __future__ import annotations

import onnx
import pytest

from trtforge.backends.weak_typing import float32_tensors

HEAD = '<ir_version: 8, opset_import: ["": 16]>\n'


def tensors(tmp_path, text):
    onnx.save(onnx.parser.parse_model(HEAD + text), tmp_path / "net.onnx")
    return float32_tensors(tmp_path / "net.onnx")


def test_an_island_between_casts(tmp_path):
    text = """
    net (float16[2, 4] x) => (float16[2, 4] y)
    {
        [low] a16 = Sqrt(x)
        [to_32] a = Cast<to = 1>(a16)
        [square] b = Mul(a, a)
        [shape] s = Shape(b)
        [to_16] b16 = Cast<to = 10>(b)
        [last] y = Reshape(b16, s)
    }
    """

    assert tensors(tmp_path, text) == {"a16": "", "a": "", "b": "square", "s": "", "b16": "", "y": ""}


def test_what_reads_quantized_tensors_takes_no_precision_also_through_moves(tmp_path):
    text = """
    net (float[4, 4] x) => (float[4, 4] y)
    <float s = {0.1}, int8 z = {0}, int8[4, 4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}>
    {
        [q] xq = QuantizeLinear(x, s, z)
        [dq] xd = DequantizeLinear(xq, s, z)
        [wdq] wd = DequantizeLinear(w, s, z)
        [turn] wt = Transpose(wd)
        [product] a = MatMul(xd, wt)
        [bias] b = Add(a, x)
        [relu] c = Relu(b)
        [mean] d = ReduceMean<axes = [-1]>(c)
        [centred] e = Sub(c, d)
        [scale] y = Mul(e, e)
    }
    """

    named = {name: node for name, node in tensors(tmp_path, text).items() if node}
    assert named == {"d": "mean", "e": "centred", "y": "scale"}


def test_branches_of_an_if(tmp_path):
    text = """
    net (bool b, float[4] x) => (float[4] y)
    {
        [choose] y = If(b) <
            then_branch = one () => (float[4] p) { [then_root] p = Sqrt(x) },
            else_branch = two () => (float[4] q) { [else_neg] q = Neg(x) }
        >
    }
    """

    assert tensors(tmp_path, text) == {"y": "choose", "p": "then_root", "q": "else_neg"}


def test_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        float32_tensors(tmp_path / "none.onnx")
