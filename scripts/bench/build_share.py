"""How much of `trtforge build` is trtforge's own time, and how a build compares with `polygraphy convert`.

    python scripts/bench/build_share.py

Builds the quickstart for its three compute capabilities by both, from an empty store, three times in turns; medians
by wall time. "Builder" is the time inside TensorRT-RTX's build call, summed over the engines as the manifest records
it; the rest of the wall time (interpreter, checks, reference runs, library load, parsing, writing) is "our share".
Engines built side by side would make the share look smaller than it is. Polygraphy starts one process per capability
and checks nothing.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from programs import POLYGRAPHY, ROOT, TRTFORGE, print_table, timed

NUM_ROUNDS = 3
SPEC = ROOT / "configs" / "digits.yaml"
MODEL = ROOT / "configs" / "models" / "digits.onnx"
CAPABILITIES = ("8.6", "8.9", "12.0")
PARTS = ("start", "parse", "build", "write")


def build(folder: Path) -> dict[str, float]:
    """Wall seconds of one `trtforge build` into `folder`, and its engines' seconds by part, summed.

    Raises:
        SystemExit: the manifest lists another number of engines than capabilities.
    """
    environment = {"XDG_CACHE_HOME": str(folder / "cache")}
    wall = timed((*TRTFORGE, "build", str(SPEC), "--output", str(folder / "out"), "--json"), environment)
    artifacts = json.loads((folder / "out" / "manifest.json").read_text())["artifacts"]
    if len(artifacts) != len(CAPABILITIES):
        raise SystemExit(f"error: found {len(artifacts)} engines in the manifest, expected {len(CAPABILITIES)}")
    return {"wall": wall} | {part: sum(artifact["seconds"][part] for artifact in artifacts) for part in PARTS}


def convert(folder: Path) -> float:
    """Wall seconds of `polygraphy convert` with the same profile, once per capability."""
    shapes = [
        word
        for point, batch in (("min", 1), ("opt", 16), ("max", 64))
        for word in (f"--trt-{point}-shapes", f"image:[{batch},1,8,8]")
    ]
    command = (*POLYGRAPHY, "convert", str(MODEL), "--convert-to", "trt", *shapes)
    return sum(
        timed(
            (*command, "--compute-capabilities", capability, "--output", str(folder / f"{capability}.engine")),
            {"POLYGRAPHY_USE_TENSORRT_RTX": "1"},
        )
        for capability in CAPABILITIES
    )


def measure() -> tuple[dict[str, float], float]:
    """Seconds of `build` by part, from the round with the median wall time, and median seconds of `convert`."""
    builds, conversions = [], []
    for _ in range(NUM_ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            builds.append(build(Path(folder)))
            conversions.append(convert(Path(folder)))
    return sorted(builds, key=lambda found: found["wall"])[NUM_ROUNDS // 2], statistics.median(conversions)


def main() -> None:
    """Measures and prints."""
    ours, polygraphy = measure()
    labels = {
        "trtforge build, wall": ours["wall"],
        "  builder": ours["build"],
        "  our share": ours["wall"] - ours["build"],
        "    of it, library load": ours["start"],
        "    of it, parse": ours["parse"],
        "    of it, write": ours["write"],
        "polygraphy convert, 3 runs": polygraphy,
    }
    rows = [
        [label, f"{seconds:.2f}", f"{seconds / ours['wall']:.0%}", f"{seconds / polygraphy:.2f}"]
        for label, seconds in labels.items()
    ]
    print_table(["what", "seconds", "of our wall", "of polygraphy"], rows)


if __name__ == "__main__":
    main()
