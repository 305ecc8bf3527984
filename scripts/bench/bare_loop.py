"""Whether `trtforge bench` measures what a bare loop over TensorRT does: medians of compute time, by turns.

    python scripts/bench/bare_loop.py MANIFEST batch=1,32

Two loops over execute_async_v3 with an event before and after it, inputs on the GPU, on an execution context of the engine:
- one that waits for each query before it starts the next, beside `--no-transfers --one-at-a-time`;
- one that starts a query while the one before it runs, beside `--no-transfers`.

Ends with 1 where a median is more than 3 % off the loop's.
"""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path

import numpy as np
from programs import print_table

from trtforge.bench import parse_sizes
from trtforge.cuda import Cuda
from trtforge.runtime.lane import Lane
from trtforge.runtime.measure import Switches, lanes_of, measure
from trtforge.runtime.session import EngineSession
from trtforge.runtime.sizes import at_sizes, layout
from trtforge.traffic.layout import Sizes, combinations

ROUNDS = 7
SECONDS = 0.5
WARM_UP = 50
MOST_OFF = 0.03


def looped(lane: Lane, cuda: Cuda, queries: int, ahead: int) -> float:
    """Median compute time in ms of a loop in which up to `ahead` queries are started and not waited for."""
    pairs = [(cuda.event(spin=True), cuda.event(spin=True)) for _ in range(ahead + 1)]
    pending: deque[int] = deque()
    times = []
    for number in range(queries):
        start, end = pairs[number % len(pairs)]
        cuda.record(start, lane.stream)
        lane.enqueue()
        cuda.record(end, lane.stream)
        pending.append(number)
        if len(pending) > ahead:
            first = pairs[pending.popleft() % len(pairs)]
            cuda.wait_for(first[1])
            times.append(cuda.elapsed_ms(*first))
    cuda.synchronize(lane.stream)
    for pair in pairs:
        for event in pair:
            cuda.free_event(event)
    return float(np.median(times[WARM_UP:]))


def rows(session: EngineSession, sizes: Sizes) -> list[list[str]]:
    """Both loops at some sizes."""
    profile, feeds = at_sizes(session, sizes)
    found = []
    for name, ahead in (("waits for each query", 0), ("one query ahead", 1)):
        switches = Switches(duration_s=SECONDS, spin_wait=True, transfers=False, one_at_a_time=not ahead)
        lanes = lanes_of(session, profile, name, switches)
        lanes[0].prepare(feeds)
        lanes[0].run()
        medians = []
        for _ in range(ROUNDS):
            times = measure([lanes], session.cuda, feeds, switches).compute
            medians.append((looped(lanes[0], session.cuda, len(times) + WARM_UP, ahead), float(np.median(times))))
        bare, ours = np.median(medians, axis=0)
        off = float(np.median([of_ours / of_bare - 1 for of_bare, of_ours in medians]))
        shown = " ".join(f"{key}={size}" for key, size in sizes.items())
        found.append([shown, name, f"{bare:.4f}", f"{ours:.4f}", f"{off:+.1%}"])
    return found


def main() -> None:
    """Measures and prints."""
    with EngineSession.open(Path(sys.argv[1])) as session:
        wanted, _ = combinations(layout(session.artifact.inputs), session.profiles, parse_sizes(sys.argv[2:]))
        print(f"{session.artifact.identifier} on {session.gpu.device_name}")
        table = [row for sizes in wanted for row in rows(session, sizes)]
    print_table(["sizes", "loop", "bare ms", "bench ms", "off"], table)
    sys.exit(any(abs(float(row[-1][:-1])) > MOST_OFF * 100 for row in table))


if __name__ == "__main__":
    main()
