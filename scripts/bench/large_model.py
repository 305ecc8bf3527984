"""Makes a model of 3 GiB with external data, lowers it, and prints the peak memory of that over the model's size.

    python scripts/bench/large_model.py FOLDER [--width 8192] [--layers 12] [--type fp16]

The model is a row of MatMul and Relu with seeded random weights, written layer by layer. What is measured is all that a
build does between the ONNX file and the builder: digests, ranges, types, writing, reading again; then, apart, the
comparison of the emulated lowered model with FP32. FOLDER needs room for twice the model.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnx.external_data_helper import set_external_data

from trtforge.graph.ingest import ingest
from trtforge.lowering import lower_graph
from trtforge.quality import compare_lowered
from trtforge.shapes.profiles import resolve_profiles
from trtforge.spec.load import load_spec
from trtforge.stages import Stages
from trtforge.store import open_store

SPEC = """\
version: 1
name: large
model: {{onnx: large.onnx}}
profiles:
  - name: p
    inputs: {{x: {{min: [1, {width}], opt: [2, {width}], max: [4, {width}]}}}}
precision: {{type: {type}}}
parity: {{random_shapes: 0}}
targets:
  - {{backend: tensorrt_rtx, gpus: [sm86]}}
output: dist/
"""


def make(folder: Path, width: int, num_layers: int) -> None:
    """Writes `large.onnx` and `large.weights`, one layer in memory at a time."""
    rng = np.random.default_rng(0)
    nodes, tensors = [], []
    with (folder / "large.weights").open("wb") as file:
        for layer in range(num_layers):
            weights = rng.standard_normal((width, width), np.float32) * np.float32((2 / width) ** 0.5)
            tensor = TensorProto(name=f"w{layer}", data_type=TensorProto.FLOAT, dims=weights.shape, raw_data=b"")
            set_external_data(tensor, "large.weights", file.tell(), file.write(weights.tobytes()))
            tensor.ClearField("raw_data")
            tensors.append(tensor)
            nodes.append(helper.make_node("MatMul", [f"a{layer}", f"w{layer}"], [f"h{layer}"], name=f"matmul{layer}"))
            nodes.append(helper.make_node("Relu", [f"h{layer}"], [f"a{layer + 1}"], name=f"relu{layer}"))
    nodes[0].input[0], nodes[-1].output[0] = "x", "y"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", width]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "large", ends[:1], ends[1:], tensors)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "large.onnx"
    )


def peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def measure(folder: Path, dtype: str) -> None:
    """Lowers the model and compares; prints the peak after each."""
    spec_file = load_spec(folder / f"{dtype}.yaml")
    start = time.perf_counter()
    graph = ingest(folder / "large.onnx", folder)
    size = graph.weight_bytes
    profiles = resolve_profiles(spec_file, graph)
    with open_store(folder / "store", print) as store:
        stages = Stages(store, lambda _: None, "large")
        result = store.new_folder("lowered")
        lowered = lower_graph(spec_file, graph, profiles, result, stages, max_opset=17)
        print(
            f"lowered to {dtype} in {time.perf_counter() - start:.0f} s: peak {peak_bytes() / size:.2f}x of {size} bytes"
        )
        print(f"  {lowered.graph.weight_bytes} bytes in {[file.location for file in lowered.graph.external_files]}")
        print("  " + "; ".join(lowered.notes), flush=True)
        report = compare_lowered(spec_file, graph, lowered.graph, profiles, result, stages)
        print(
            f"compared, {report.verdict}: peak {peak_bytes() / size:.2f}x, {time.perf_counter() - start:.0f} s in all"
        )


def main() -> None:
    """Makes the model here, and measures in a fresh process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--type", default="fp16", choices=["fp16", "bf16"])
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(given.folder, given.type)
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    (given.folder / f"{given.type}.yaml").write_text(SPEC.format(width=given.width, type=given.type), encoding="utf-8")
    if not (given.folder / "large.onnx").exists():
        make(given.folder, given.width, given.layers)
    subprocess.run([sys.executable, __file__, *sys.argv[1:], "--measure"], check=True)


if __name__ == "__main__":
    main()
