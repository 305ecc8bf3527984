"""FP16 in the graph against the FP16 flag on the FP32 graph, which only a weakly typed TensorRT (8.6) knows.

    python scripts/bench/fp16_flag.py FOLDER MODEL

FOLDER and MODEL are those of gpu_models.py, which built MODEL's FP16 engine there. TensorRT
itself builds the other engine from the FP32 file, with the same profile, level, tactic sources and timing iterations. Both
are then measured by turns, plain and as CUDA graphs. Ends with 1 where FP16 in the graph is slower by more than 3 %.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import tensorrt as trt
from gpu_models import BATCHES, SHAPES, bench
from programs import print_table

from trtforge.digests import file_digest

MOST_SLOWER = 0.03


def build(onnx: Path, model: str, settings: dict[str, Any]) -> bytes:
    """The engine of the FP32 graph with the FP16 flag.

    Raises:
        SystemExit: TensorRT does not parse or build it.
    """
    log = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(onnx)):
        raise SystemExit(f"error: TensorRT does not parse {onnx}: {parser.get_error(0)}")
    config = builder.create_builder_config()
    config.set_flag(trt.BuilderFlag.FP16)
    config.clear_flag(trt.BuilderFlag.TF32)
    config.builder_optimization_level = settings["optimization_level"]
    config.avg_timing_iterations = settings["avg_timing_iterations"]
    config.set_preview_feature(trt.PreviewFeature.PROFILE_SHARING_0806, True)
    sources = [getattr(trt.TacticSource, name.upper()) for name in settings["tactic_sources"]]
    config.set_tactic_sources(sum(1 << int(source) for source in sources))
    profile = builder.create_optimization_profile()
    for name, row in SHAPES[model].items():
        profile.set_shape(name, *((batch, *row) for batch in BATCHES))
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise SystemExit(f"error: TensorRT builds no engine of {onnx}")
    return bytes(plan)


def write_bundle(folder: Path, model: str) -> tuple[Path, Path]:
    """Manifests of the FP16 engine, and of the other one beside it."""
    explicit = folder / f"{model}-fp16" / "manifest.json"
    manifest = json.loads(explicit.read_text(encoding="utf-8"))
    (artifact,) = manifest["artifacts"]
    flagged = folder / f"{model}-flag" / "manifest.json"
    flagged.parent.mkdir(exist_ok=True)
    engine = flagged.with_name(artifact["file"])
    start = time.monotonic()
    engine.write_bytes(build(folder / f"{model}.onnx", model, artifact["settings"]))
    print(f"{time.monotonic() - start:.0f} s, {engine.stat().st_size / 1e6:.0f} MB with the flag")
    artifact |= {"digest": file_digest(engine), "size_bytes": engine.stat().st_size}
    flagged.write_text(json.dumps(manifest), encoding="utf-8")
    return explicit, flagged


def main() -> None:
    """Builds, measures and prints."""
    explicit, flagged = write_bundle(Path(sys.argv[1]), sys.argv[2])
    rows, worst = [], 0.0
    for words in ((), ("--cuda-graph",)):
        against = ("--against", str(flagged), "--max-regression", "9", "--duration", "0.3", *words)
        figures = bench(explicit, *against)["figures"]
        for point, slower in zip(figures["points"], figures["slowdowns"], strict=True):
            interval = f"{slower['low']:+.1%} to {slower['high']:+.1%}"
            rows.append([f"{point['sizes']} {' '.join(words)}", f"{slower['ratio']:+.1%}", interval])
            worst = max(worst, slower["ratio"])
    print_table(["FP16 in the graph", "against the flag", "95 %"], rows)
    sys.exit(worst > MOST_SLOWER)


if __name__ == "__main__":
    main()
