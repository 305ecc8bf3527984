"""How fast trtforge hashes a file, beside `sha256sum` on the same file.

    python scripts/bench/digest.py

500 MB of random bytes in the system's file cache; medians of five, taken in turns. The target is 70 % of sha256sum.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from programs import print_table

from trtforge.digests import file_digest

NUM_BYTES = 500_000_000
NUM_ROUNDS = 5


def timed_digest(path: Path) -> tuple[float, str]:
    """Seconds and digest by trtforge, in this process."""
    start = time.perf_counter()
    digest = file_digest(path)
    return time.perf_counter() - start, digest


def timed_sha256sum(path: Path) -> tuple[float, str]:
    """Seconds and digest by sha256sum, its start included (about a millisecond)."""
    start = time.perf_counter()
    result = subprocess.run(["sha256sum", str(path)], capture_output=True, text=True, check=True)
    return time.perf_counter() - start, result.stdout.split()[0]


def main() -> None:
    """Measures and prints.

    Raises:
        SystemExit: the digests differ.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(os.urandom(NUM_BYTES))
        rounds = [(timed_digest(path), timed_sha256sum(path)) for _ in range(NUM_ROUNDS)]
    if any(ours[1] != theirs[1] for ours, theirs in rounds):
        raise SystemExit("error: the digests differ")
    ours, theirs = (statistics.median(found[who][0] for found in rounds) for who in (0, 1))
    rows = [
        [name, f"{NUM_BYTES / 1e6 / seconds:.0f}", f"{theirs / seconds:.2f}"]
        for name, seconds in {"trtforge": ours, "sha256sum": theirs}.items()
    ]
    print_table(["what", "MB/s", "of sha256sum"], rows)


if __name__ == "__main__":
    main()
