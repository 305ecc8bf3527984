"""What changing lengths cost an engine: p99 over a mixed-length trace beside p99 at the trace's longest length.

    python scripts/bench/mixed_lengths.py MANIFEST SYMBOL LONGEST [BATCH]

SYMBOL is the open axis that varies, such as seq. Lengths are lognormal in steps of 8, and one request in 25 has the
longest. Times are those of a caller: wall milliseconds from host arrays to outputs in host arrays, both copied. The mixed
trace and the longest length take turns, so that clocks and temperature hit both alike.

Three ways to serve it are shown:
- a context for each length, and the same with CUDA graphs, as `trtforge bench --replay` does (`trtforge.runtime.serve`).
  What makes their p99 hold: all memory is taken, all shapes are set and each length has run before the first request
  counts, so that serving takes no memory and changes neither shapes nor profile of a context.
- one context for each profile, whose shapes are set when the length changes, as `EngineSession.run` does. It takes the
  least memory; what setting shapes costs shows as its difference.

Ends with 1 where the first two are more than a tenth slower over the mixture than at its longest length.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from programs import print_table

from trtforge.runtime.lane import Array
from trtforge.runtime.queue import Cell
from trtforge.runtime.serve import Server
from trtforge.runtime.session import EngineSession
from trtforge.runtime.sizes import at_sizes, layout
from trtforge.traffic.layout import Sizes

ROUNDS = 10
REQUESTS_A_ROUND = 400
MOST_SLOWER = 0.1


def lengths(longest: int) -> list[int]:
    """Of the requests of a round."""
    drawn = np.random.default_rng(0).lognormal(np.log(longest / 4), 0.8, REQUESTS_A_ROUND)
    return [int(size) for size in np.clip(np.ceil(drawn / 8) * 8, 8, longest)]


def p99s(run: Callable[[int], object], mixture: list[int]) -> tuple[Array, Array]:
    """Milliseconds at the 50th and 99th percentile, (2,) each, of the mixture and of its longest length."""
    times: tuple[list[float], list[float]] = ([], [])
    for size in dict.fromkeys(mixture):
        for _ in range(20):
            run(size)
    gc.disable()
    for number in range(ROUNDS):
        for which in (0, 1) if number % 2 else (1, 0):
            for size in mixture:
                wanted = size if which == 0 else max(mixture)
                start = time.perf_counter()
                run(wanted)
                times[which].append((time.perf_counter() - start) * 1000)
    gc.enable()
    return np.percentile(times[0], (50, 99)), np.percentile(times[1], (50, 99))


def served_by(server: Server) -> Callable[[int], object]:
    """Runs one length."""
    return lambda size: server.run((size,))


def main() -> None:
    """Measures and prints."""
    path, symbol, longest = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    batch = int(sys.argv[4]) if len(sys.argv) > 4 else 1  # noqa: PLR2004 - the optional argument
    mixture = lengths(longest)
    rows, worst = [], 0.0
    with EngineSession.open(path) as session:
        names = layout(session.artifact.inputs).names
        cells: dict[Cell, Sizes] = {
            (size,): {name: size if name == symbol else batch for name in names} for size in sorted(set(mixture))
        }
        feeds = {size: at_sizes(session, sizes)[1] for (size, *_), sizes in cells.items()}
        runs: dict[str, Callable[[int], object]] = {"a context for each profile": lambda size: session.run(feeds[size])}
        for name, with_graph in (("a context for each length", False), ("a CUDA graph for each length", True)):
            server = Server(session, cells, with_graph=with_graph, spin=True)
            runs[name] = served_by(server)
        for name, run in runs.items():
            mixed, fixed = p99s(run, mixture)
            slower = mixed[1] / fixed[1] - 1
            worst = max(worst, slower if "length" in name else 0.0)
            rows.append([name, *(f"{value:.3f}" for value in (*mixed, *fixed)), f"{slower:+.1%}"])
        print(
            f"{session.artifact.identifier} on {session.gpu.device_name}, batch {batch}, {len(cells)} lengths up to {longest}"
        )
    print_table(["served by", "p50 mixed", "p99 mixed", "p50 longest", "p99 longest", "p99"], rows)
    sys.exit(worst > MOST_SLOWER)


if __name__ == "__main__":
    main()
