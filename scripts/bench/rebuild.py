"""How long `trtforge build` takes when nothing has changed, beside the fresh build and `polygraphy convert`.

    python scripts/bench/rebuild.py

The OCR recogniser for one compute capability: a fresh build into an empty store, then the median of ten rebuilds, each
a fresh process. Polygraphy has no store, so each of its runs builds; median of three.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from ocr import MODEL, SHAPES, write_spec
from programs import POLYGRAPHY, TRTFORGE, print_table, timed

NUM_REBUILDS = 10
NUM_CONVERSIONS = 3
SETTLE_SECONDS = 3.0


def convert(folder: Path) -> float:
    """Wall seconds of `polygraphy convert` of the same."""
    command = [*POLYGRAPHY, "convert", str(MODEL), "--convert-to", "trt", "--compute-capabilities", "8.6"]
    for point, shape in SHAPES.items():
        command += [f"--trt-{point}-shapes", f"x:[{','.join(map(str, shape))}]"]
    return timed((*command, "--output", str(folder / "p.engine")), {"POLYGRAPHY_USE_TENSORRT_RTX": "1"})


def measure(folder: Path) -> dict[str, float]:
    """Seconds by name; medians of what ran several times.

    Raises:
        SystemExit: a rebuild wrote a manifest, so it did not find everything in the store.
    """
    command = (*TRTFORGE, "build", str(write_spec(folder)), "--store", str(folder / "store"))
    environment = {"XDG_CACHE_HOME": str(folder / "cache")}
    manifest = folder / "out" / "manifest.json"
    fresh = timed(command, environment)
    written = manifest.stat().st_mtime_ns
    time.sleep(SETTLE_SECONDS)  # the memo takes no file that changed less than 2 s ago
    rebuilds = [timed(command, environment) for _ in range(NUM_REBUILDS)]
    if manifest.stat().st_mtime_ns != written:
        raise SystemExit(f"error: a rebuild wrote {manifest.name}, expected that everything is in the store")
    return {
        "trtforge build, fresh": fresh,
        "trtforge build, unchanged": statistics.median(rebuilds),
        "polygraphy convert": statistics.median(convert(folder) for _ in range(NUM_CONVERSIONS)),
    }


def main() -> None:
    """Measures and prints."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = measure(Path(folder))
    fresh, polygraphy = seconds["trtforge build, fresh"], seconds["polygraphy convert"]
    rows = [
        [name, f"{value:.2f}", f"{value / fresh:.3f}", f"{value / polygraphy:.3f}"] for name, value in seconds.items()
    ]
    print_table(["command", "seconds", "of fresh", "of polygraphy"], rows)


if __name__ == "__main__":
    main()
