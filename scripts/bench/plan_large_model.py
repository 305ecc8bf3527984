"""How long `trtforge plan` takes for a 400 MB model, first and again, beside `polygraphy inspect model`.

    python scripts/bench/plan_large_model.py

The weights are random, once inside the ONNX file and once in a file beside it. "First" has an empty digest memo but, as
the model was just written, its bytes in the system's file cache; "again" has the memo of the run before. Medians of
three, taken in turns.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from programs import POLYGRAPHY, TRTFORGE, print_table, timed

NUM_ROUNDS = 3
WIDTH = 2048
NUM_LAYERS = 24
SETTLE_SECONDS = 3.0


def large_model() -> onnx.ModelProto:
    """A chain of 24 matrix products, x (batch, 2048) -> y (batch, 2048), with 403 MB of weights."""
    rng = np.random.default_rng(0)
    scale = np.float32(WIDTH**-0.5)  # keeps the size of the values from layer to layer
    weights = [
        numpy_helper.from_array(rng.standard_normal((WIDTH, WIDTH), np.float32) * scale, f"weight{layer}")
        for layer in range(NUM_LAYERS)
    ]
    names = ["x", *(f"hidden{layer}" for layer in range(1, NUM_LAYERS)), "y"]
    nodes = [
        helper.make_node("MatMul", [names[layer], f"weight{layer}"], [names[layer + 1]], name=f"matmul{layer}")
        for layer in range(NUM_LAYERS)
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", WIDTH]) for name in ("x", "y"))
    graph = helper.make_graph(nodes, "large", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def write_models(folder: Path) -> dict[str, Path]:
    """How the weights are stored -> the ONNX file, with its weights in the same folder."""
    paths = {"inside": folder / "inside.onnx", "beside": folder / "beside.onnx"}
    model = large_model()
    onnx.save_model(model, paths["inside"])
    onnx.save_model(model, paths["beside"], save_as_external_data=True, location="beside.data")
    return paths


def write_spec(model: Path) -> Path:
    """A spec that builds `model` with TensorRT-RTX. JSON is YAML too."""
    spec = {
        "version": 1,
        "name": model.stem,
        "model": {"onnx": model.name},
        "profiles": [{"inputs": {"x": {"min": [1, WIDTH], "opt": [4, WIDTH], "max": [16, WIDTH]}}}],
        "targets": [{"backend": "tensorrt_rtx", "gpus": ["sm86"]}],
    }
    path = model.with_suffix(".yaml")
    path.write_text(json.dumps(spec))
    return path


def measure(model: Path, spec: Path) -> dict[str, float]:
    """Median wall seconds of each command, each round with a new, empty memo."""
    rounds = []
    for _ in range(NUM_ROUNDS):
        with tempfile.TemporaryDirectory() as cache:
            plan, environment = (*TRTFORGE, "plan", str(spec)), {"XDG_CACHE_HOME": cache}
            rounds.append(
                {
                    "trtforge plan, first": timed(plan, environment),
                    "trtforge plan, again": timed(plan, environment),
                    "polygraphy inspect model": timed((*POLYGRAPHY, "inspect", "model", str(model))),
                }
            )
    return {name: statistics.median(found[name] for found in rounds) for name in rounds[0]}


def main() -> None:
    """Makes the models, measures and prints."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        models = write_models(Path(folder))
        specs = {stored: write_spec(model) for stored, model in models.items()}
        time.sleep(SETTLE_SECONDS)  # the memo takes no file that changed less than 2 s ago
        for stored, model in models.items():
            medians = measure(model, specs[stored])
            reference = medians["polygraphy inspect model"]
            rows += [[name, stored, f"{value:.2f}", f"{value / reference:.2f}"] for name, value in medians.items()]
    print_table(["command", "weights", "median s", "of polygraphy"], rows)


if __name__ == "__main__":
    main()
