"""BERT-base, bert-intent and ResNet-50 on this machine's GPU: README's table of engines, beside PyTorch.

    python scripts/bench/gpu_models.py FOLDER --torch-python PYTHON [--models resnet50] [--precisions fp16,implicit]

PYTHON has torch, transformers and torchvision; this interpreter has trtforge and TensorRT. Models, engines and the store go
to FOLDER, so that a second run measures without building. Weights, inputs and calibration data are random.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from programs import TRTFORGE, print_table

from trtforge.machine import machine_facts

PEER = Path(__file__).with_name("torch_peer.py")
BATCHES = (1, 8, 32)
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "resnet50": {"image": (3, 224, 224)},
    "bert_base": {"input_ids": (128,), "attention_mask": (128,)},
    "bert_intent": {"input_ids": (128,), "attention_mask": (128,)},
}
"""Model -> input -> shape of one row."""
PRECISIONS = {
    "fp32": "{type: fp32}",
    "fp16": "{type: fp16}",
    "int8": "{type: int8}",
    "implicit": "{type: int8, quantization: implicit}",
}
CALIBRATION_ROWS = 64
"""Enough for the scales of random data; real data take 1,000."""
BUILDER = "builder: {optimization_level: 3, tactic_sources: [edge_mask_convolutions, jit_convolutions]}"
HEADER = ("model", "builder s", "MB", "p50 at 1 / 8 / 32, ms", "p99", "queries/s", "CUDA graph, p50", "p99", "GPU MiB")


def write_specs(folder: Path, model: str, precisions: Sequence[str], gpu: str) -> dict[str, Path]:
    """Precision -> spec of an ONNX file, and `torch` -> spec of the PyTorch model."""
    sizes = {
        name: {point: [batch, *row] for point, batch in zip(("min", "opt", "max"), BATCHES, strict=True)}
        for name, row in SHAPES[model].items()
    }
    rest = f"profiles: [{{inputs: {json.dumps(sizes)}}}]\ntargets: [{{backend: tensorrt, gpus: [{gpu}]}}]\n{BUILDER}\n"
    write_calibration(folder / f"{model}.npz", model)
    texts = {
        precision: f"model: {{onnx: {model}.onnx}}\nprecision: {PRECISIONS[precision]}\noutput: {model}-{precision}\n"
        + (f"calibration: {{data: {model}.npz}}\n" if "int8" in PRECISIONS[precision] else "")
        for precision in precisions
    }
    texts["torch"] = f'model: {{torch: {{callable: "{PEER}:{model}"}}}}\n'
    paths = {kind: folder / f"{model}-{kind}.yaml" for kind in texts}
    for kind, text in texts.items():
        paths[kind].write_text(f"version: 1\nname: {model}\n{text}{rest}", encoding="utf-8")
    return paths


def write_calibration(path: Path, model: str) -> None:
    """Normal pixels; token ids of the smallest vocabulary, all of them read."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for name, row in SHAPES[model].items():
        shape = (CALIBRATION_ROWS, *row)
        arrays[name] = rng.integers(0, 8000, shape) if name == "input_ids" else np.ones(shape, np.int64)
        if name == "image":
            arrays[name] = rng.standard_normal(shape, np.float32)
    np.savez(path, **arrays)


def run(*words: str) -> str:
    """What a program prints.

    Raises:
        SystemExit: it ended with another exit code than 0.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def bench(manifest: Path, *words: str) -> Any:
    """The JSON of `trtforge bench`."""
    shapes = ("--shapes", f"batch={','.join(map(str, BATCHES))}")
    return json.loads(run(*TRTFORGE, "bench", str(manifest), *shapes, "--spin-wait", "--json", *words))


def joined(values: Iterator[float]) -> str:
    """Of the batches, in milliseconds or queries a second."""
    return " / ".join(f"{value:.4g}" for value in values)


def engine_row(folder: Path, model: str, precision: str, spec: Path) -> list[str]:
    """Builds an engine and measures it, plain and as a CUDA graph."""
    run(*TRTFORGE, "build", str(spec), "--store", str(folder / "store"))
    manifest = folder / f"{model}-{precision}" / "manifest.json"
    (artifact,) = json.loads(manifest.read_text(encoding="utf-8"))["artifacts"]
    plain, graph = (bench(manifest, *words)["figures"] for words in ((), ("--cuda-graph",)))
    points = plain["points"]
    return [
        f"{model}, {precision}",
        f"{artifact['seconds']['build']:.0f}",
        f"{artifact['size_bytes'] / 1e6:.0f}",
        joined(point["latency"]["percentiles"]["50.0"] for point in points),
        joined(point["latency"]["percentiles"]["99.0"] for point in points),
        joined(point["throughput_qps"] for point in points),
        joined(point["latency"]["percentiles"]["50.0"] for point in graph["points"]),
        joined(point["latency"]["percentiles"]["99.0"] for point in graph["points"]),
        f"{(plain['engine_bytes'] + points[-1]['context_bytes']) / 2**20:.0f}",
    ]


def peer_rows(manifest: Path, spec: Path, model: str, python: str, names: Sequence[str]) -> Iterator[list[str]]:
    """PyTorch at the same sizes; a peer that did not run says why."""
    words = [word for name in names for word in ("--peer", name)]
    found = bench(manifest, "--spec", str(spec), "--peer-python", python, *words)["peers"]
    for name in names:
        points = [point for point in found if point["peer"] == name]
        reasons = {point["reason"] for point in points if point["times"] is None}
        times = [point["times"] for point in points if point["times"] is not None]
        p50 = joined(one["latency"]["percentiles"]["50.0"] for one in times)
        p99 = joined(one["latency"]["percentiles"]["99.0"] for one in times)
        qps = joined(one["throughput_qps"] for one in times)
        yield [f"{model}, PyTorch {name}", "", "", "; ".join([p50, *sorted(reasons)]).strip("; "), p99, qps, "", "", ""]


def main() -> None:
    """Exports, builds, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch-python", required=True)
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--precisions", default="fp32,fp16,int8", help=f"of {', '.join(PRECISIONS)}")
    parser.add_argument("--peers", default="eager-fp32,eager-fp16,compile-fp16", help="none if empty")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    facts = machine_facts()
    if not facts.gpus or not facts.gpus[0].model:
        raise SystemExit(f"error: no GPU that trtforge knows: {facts.cuda_error or facts.gpus}")
    print(f"{facts.gpus[0].device_name}, driver {facts.cuda_driver_version}, TensorRT {facts.packages.get('tensorrt')}")
    rows = []
    for model in asked.models.split(","):
        onnx = asked.folder / f"{model}.onnx"
        if not onnx.exists():
            run(asked.torch_python, str(PEER), model, str(onnx))
        precisions = asked.precisions.split(",")
        specs = write_specs(asked.folder, model, precisions, facts.gpus[0].model)
        rows += [engine_row(asked.folder, model, precision, specs[precision]) for precision in precisions]
        manifest = asked.folder / f"{model}-{precisions[-1]}" / "manifest.json"
        if asked.peers:
            rows += peer_rows(manifest, specs["torch"], model, asked.torch_python, asked.peers.split(","))
    print_table(HEADER, rows)


if __name__ == "__main__":
    main()
