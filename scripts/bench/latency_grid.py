"""Latencies of BERT-base in FP16 by batch and length, of engines that are tuned for different opts.

    python scripts/bench/latency_grid.py FOLDER RESULT.json

FOLDER is that of gpu_models.py, where bert_base.onnx lies. Each opt has an engine of its own, so that a second run goes on where
one that was stopped ended. The result is what `trtforge profile --latencies` reads; tests/data/bert_base_h200_latencies.json
is one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gpu_models import BUILDER, run
from programs import TRTFORGE

from trtforge.machine import machine_facts
from trtforge.runtime.measure import Switches, lanes_of, measure
from trtforge.runtime.session import EngineSession
from trtforge.runtime.sizes import at_sizes

OPTS = ((1, 32), (4, 128), (16, 64), (32, 128), (8, 384))
BATCHES = (1, 2, 4, 8, 16, 32)
LENGTHS = (8, 16, 32, 64, 96, 128, 192, 256, 384)
SWITCHES = Switches(cuda_graph=True, spin_wait=True, warm_up_ms=40, duration_s=0.15, iterations=40)


def build(folder: Path, opt: tuple[int, int], gpu: str) -> Path:
    """The manifest of the engine whose profile has this opt."""
    name = f"bert_base-{opt[0]}x{opt[1]}"
    sizes = {"min": [1, min(LENGTHS)], "opt": list(opt), "max": [max(BATCHES), max(LENGTHS)]}
    inputs = json.dumps(dict.fromkeys(("input_ids", "attention_mask"), sizes))
    spec = folder / f"{name}.yaml"
    spec.write_text(
        f"version: 1\nname: {name}\nmodel: {{onnx: bert_base.onnx}}\nprecision: {{type: fp16}}\noutput: {name}\n"
        f"parity: {{random_shapes: 0}}\nprofiles: [{{inputs: {inputs}}}]\ntargets: [{{backend: tensorrt, gpus: [{gpu}]}}]\n{BUILDER}\n",
        encoding="utf-8",
    )
    run(*TRTFORGE, "build", str(spec), "--store", str(folder / "store"))
    return folder / name / "manifest.json"


def points(manifest: Path, opt: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Median of copy in, compute and copy out at every size."""
    with EngineSession.open(manifest) as session:
        for batch in BATCHES:
            for length in LENGTHS:
                profile, feeds = at_sizes(session, {"batch": batch, "seq": length})
                times = measure([lanes_of(session, profile, 0, SWITCHES)], session.cuda, feeds, SWITCHES)
                milliseconds = round(float(np.median(times.latency)), 4)
                yield {"batch": batch, "seq": length, "ms": milliseconds, "opt": {"batch": opt[0], "seq": opt[1]}}


def main() -> None:
    """Builds, measures and writes."""
    folder, result = map(Path, sys.argv[1:3])
    facts = machine_facts()
    gpu = facts.gpus[0]
    if not gpu.model:
        raise SystemExit(f"error: {gpu.device_name} is no GPU that trtforge knows")
    found: list[dict[str, Any]] = []
    for opt in OPTS:
        manifest = build(folder, opt, gpu.model)
        (artifact,) = json.loads(manifest.read_text(encoding="utf-8"))["artifacts"]
        found += points(manifest, opt)
        print(
            f"{opt}: {artifact['seconds']['build']:.0f} s in the builder, {artifact['size_bytes'] / 1e6:.0f} MB",
            flush=True,
        )
    how = (
        f"BERT-base in FP16, random weights, TensorRT {facts.packages['tensorrt']}, optimization level 3. An engine for each "
        f"opt, from 1x{min(LENGTHS)} to {max(BATCHES)}x{max(LENGTHS)}. Median of copy in, compute and copy out, in a CUDA graph."
    )
    told = {"symbols": ["batch", "seq"], "gpu": gpu.device_name, "how": how}
    rows = ",\n".join(f"  {json.dumps(point)}" for point in found)
    result.write_text(f'{json.dumps(told)[:-1]}, "points": [\n{rows}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
