"""What changing lengths cost an engine: p99 over a mixed-length trace beside p99 at the trace's longest length.

    python scripts/bench/mixed_lengths.py MANIFEST AXIS LONGEST [BATCH]

AXIS is the index of the axis that varies in every input, such as 1 for (batch, seq). Lengths are lognormal, in steps of 8.
Times are those of a caller: wall milliseconds from the arrays to the outputs, inputs and outputs copied.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from programs import print_table

from trtforge.runtime.lane import Array
from trtforge.runtime.session import EngineSession

REQUESTS = 3000
WARM_UP = 300
MOST_SLOWER = 0.1


def lengths(longest: int) -> list[int]:
    """Of the requests, the longest among them."""
    drawn = np.random.default_rng(0).lognormal(np.log(longest / 4), 0.8, WARM_UP + REQUESTS)
    return [int(size) for size in np.clip(np.ceil(drawn / 8) * 8, 8, longest)]


def feeds(session: EngineSession, axis: int, length: int, batch: int) -> dict[str, Array]:
    """Ones; axis 0 is the batch."""
    shapes = {
        one.name: [batch, *(dim if isinstance(dim, int) else 1 for dim in one.shape[1:])]
        for one in session.artifact.inputs
    }
    for shape in shapes.values():
        shape[axis] = length
    return {one.name: np.ones(shapes[one.name], one.dtype) for one in session.artifact.inputs}


def times(session: EngineSession, axis: int, sizes: Iterable[int], batch: int) -> Array:
    """Wall milliseconds of each request after the warm-up."""
    made = {size: feeds(session, axis, size, batch) for size in dict.fromkeys(sizes)}
    found = []
    for size in sizes:
        start = time.perf_counter()
        session.run(made[size])
        found.append((time.perf_counter() - start) * 1000)
    return np.array(found[WARM_UP:])


def main() -> None:
    """Measures and prints; ends with 1 where the mixture is more than a tenth slower."""
    path, axis, longest = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    batch = int(sys.argv[4]) if len(sys.argv) > 4 else 1  # noqa: PLR2004 - the optional argument
    mixture = lengths(longest)
    with EngineSession.open(path) as session:
        p99 = {
            f"{len(set(sizes))} lengths up to {longest}": np.percentile(times(session, axis, sizes, batch), (50, 99))
            for sizes in (mixture, [longest] * len(mixture))
        }
        print(f"{session.artifact.identifier} on {session.gpu.device_name}, batch {batch}")
    print_table(
        ["trace", "p50 ms", "p99 ms"], [[name, *(f"{value:.3f}" for value in row)] for name, row in p99.items()]
    )
    mixed, fixed = (row[1] for row in p99.values())
    if mixed > fixed * (1 + MOST_SLOWER):
        sys.exit(1)


if __name__ == "__main__":
    main()
