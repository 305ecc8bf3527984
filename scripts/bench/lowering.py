"""Counts casts and FP32 islands of our FP16 lowering, of onnxruntime's converter and of ModelOpt AutoCast, in one run.

    python scripts/bench/lowering.py [--modelopt-python PYTHON] [MODEL.onnx ...]

AutoCast runs in the environment of PYTHON, which has nvidia-modelopt[onnx]; without one it is left out. It reads a model
from a file and is timed without the start of its interpreter. Without models the table takes the quickstart's model and the real models under tests/models/. An island is a set of connected
nodes that compute in FP32, in the model or one of its subgraphs. Ours is judged by structure alone, without ranges.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto
from onnxruntime.transformers.float16 import convert_float_to_float16

from trtforge.precision.audit import audit, share
from trtforge.precision.fold import fold
from trtforge.precision.lower import lower
from trtforge.precision.network import all_graphs

ROOT = Path(__file__).resolve().parents[2]
MODELS = [ROOT / "configs" / "models" / "digits.onnx", *sorted((ROOT / "tests" / "models").rglob("*.onnx"))]
HEAD = f"{'model':34} {'by':12} {'seconds':>7} {'casts':>6} {'islands':>8} {'FP32 nodes':>11} {'layers in FP16':>15} checks"


AUTOCAST = """\
import sys, time
import onnx
from modelopt.onnx.autocast import convert_to_mixed_precision
start = time.perf_counter()
result = convert_to_mixed_precision(sys.argv[1], low_precision_type="fp16", keep_io_types=True)
print("seconds", time.perf_counter() - start)
onnx.save(result, sys.argv[2])
"""
Converted = tuple[ModelProto, float]


def ours(path: Path) -> Converted:
    """Our lowering, with what goes before it."""
    model = onnx.load(path)
    start = time.perf_counter()
    fold(model)
    return lower(model, dtype="float16").model, time.perf_counter() - start


def peer(path: Path) -> Converted:
    """The converter of onnxruntime, which changes the model that it is given."""
    model = onnx.load(path)
    start = time.perf_counter()
    converted: ModelProto = convert_float_to_float16(model, keep_io_types=True)
    return converted, time.perf_counter() - start


def autocast(path: Path, python: Path) -> Converted:
    """ModelOpt AutoCast, by the rules it has without data."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.onnx"
        done = subprocess.run([python, "-c", AUTOCAST, path, result], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["no reason given"])[-1])
        seconds = next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("seconds "))
        return onnx.load(result), float(seconds)


def casts(model: ModelProto) -> int:
    """Number of Cast nodes, subgraphs included."""
    return sum(node.op_type == "Cast" for graph in all_graphs(model.graph) for node in graph.node)


def islands(model: ModelProto) -> list[int]:
    """Number of nodes of each FP32 island."""
    typed = onnx.shape_inference.infer_shapes(model)
    return [size for graph in all_graphs(typed.graph) for size in _islands(graph)]


def _islands(graph: GraphProto) -> Iterator[int]:
    infos = (*graph.value_info, *graph.input, *graph.output)
    high = {info.name for info in infos if info.type.tensor_type.elem_type == TensorProto.FLOAT}
    root: dict[str, str] = {}

    def find(name: str) -> str:
        while root.setdefault(name, name) != name:
            name = root[name]
        return name

    nodes = [node for node in graph.node if _computes(node) and high.intersection(node.output)]
    for node in nodes:
        for name in high.intersection([*node.input, *node.output]):
            root[find(name)] = find(node.output[0])
    yield from Counter(find(node.output[0]) for node in nodes).values()


def _computes(node: NodeProto) -> bool:
    return node.op_type not in ("Cast", "Constant", "ConstantOfShape", "If", "Loop", "Scan")


def checked(model: ModelProto) -> str:
    """What ONNX's checker says, in a word or two."""
    try:
        onnx.checker.check_model(model)
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
        return " ".join(str(error).split())[:60]
    return "passed"


def row(path: Path, name: str, convert: Callable[[Path], Converted]) -> str:
    """One line of the table."""
    before = casts(onnx.load(path))
    try:
        result, seconds = convert(path)
        sizes = islands(result)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
        return f"{path.stem:34} {name:12} {' '.join(str(error).split())[:90]}"
    part = share(audit(result, {}), "float16").layers
    numbers = f"{seconds:7.2f} {casts(result) - before:6} {len(sizes):8} {sum(sizes):11} {part:15.0%}"
    return f"{path.stem:34} {name:12} {numbers} {checked(result)}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modelopt-python", type=Path)
    parser.add_argument("models", type=Path, nargs="*")
    given = parser.parse_args()
    print(HEAD)
    for path in given.models or MODELS:
        print(row(path, "trtforge", ours))
        print(row(path, "onnxruntime", peer))
        if given.modelopt_python:
            print(row(path, "AutoCast", lambda model: autocast(model, given.modelopt_python)), flush=True)


if __name__ == "__main__":
    main()
