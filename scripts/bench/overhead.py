"""What store and worker add to a fresh build, against a bare script that builds the same engine.

    python scripts/bench/overhead.py

The OCR recogniser for sm86, five times by each in turns, from an empty store; medians. The bare script loads
TensorRT-RTX in a fresh process, parses, builds, and writes the engine. trtforge's figure is its build stage: lock,
worker process, the same work in it, hashing, and moving engine and record into the store. Reading the spec, checking
the model and running the reference at each profile point are other stages and not counted. The target is an overhead
of at most 3 % of builder time or 300 ms, whichever is more.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from ocr import MODEL, SHAPES, write_spec
from programs import PYTHON, TRTFORGE, print_table, timed

NUM_ROUNDS = 5
MOST_MS = 300
MOST_SHARE = 0.03

BARE = f"""
import sys
import tensorrt_rtx as trt

logger = trt.Logger(trt.Logger.ERROR)
builder = trt.Builder(logger)
network = builder.create_network(0)
parser = trt.OnnxParser(network, logger)
assert parser.parse_from_file({str(MODEL)!r})
config = builder.create_builder_config()
config.clear_flag(trt.BuilderFlag.TF32)
config.num_compute_capabilities = 1
assert config.set_compute_capability(trt.ComputeCapability.SM86, 0)
profile = builder.create_optimization_profile()
profile.set_shape("x", {SHAPES["min"]}, {SHAPES["opt"]}, {SHAPES["max"]})
config.add_optimization_profile(profile)
engine = builder.build_serialized_network(network, config)
with open(sys.argv[1], "wb") as file:
    file.write(engine)
"""


def build(folder: Path) -> tuple[float, float]:
    """Seconds of the build stage of one `trtforge build`, and of the builder in it (load, parse, build)."""
    command = (*TRTFORGE, "build", str(write_spec(folder)), "--store", str(folder / "store"))
    timed(command, {"XDG_CACHE_HOME": str(folder / "cache")})
    manifest = json.loads((folder / "out" / "manifest.json").read_text())
    (stage,) = (stage["seconds"] for stage in manifest["stages"] if stage["name"].startswith("build"))
    (artifact,) = manifest["artifacts"]
    return stage, sum(artifact["seconds"][part] for part in ("start", "parse", "build"))


def measure() -> tuple[float, float, float]:
    """Median seconds of the bare script, of the build stage, and of the builder in it."""
    rounds = []
    for _ in range(NUM_ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            bare = timed((*PYTHON, BARE, str(Path(folder) / "bare.engine")))
            rounds.append((bare, *build(Path(folder))))
    bare, stage, builder = (statistics.median(column) for column in zip(*rounds, strict=True))
    return bare, stage, builder


def main() -> None:
    """Measures and prints; ends with 1 if the overhead is over the target."""
    bare, stage, builder = measure()
    overhead = stage - bare
    rows = [
        [name, f"{seconds * 1000:.0f}", f"{seconds / builder:.1%}", f"{seconds / bare:.3f}"]
        for name, seconds in {
            "bare script": bare,
            "trtforge's build stage": stage,
            "  of it, builder": builder,
            "overhead of store and worker": overhead,
        }.items()
    ]
    print_table(["what", "ms", "of builder", "of bare script"], rows)
    if overhead * 1000 > max(MOST_MS, MOST_SHARE * builder * 1000):
        sys.exit(1)


if __name__ == "__main__":
    main()
