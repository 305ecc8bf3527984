"""Serves requests that arrive in real time with an engine, behind a dynamic batcher.

Everything that a batch needs is made beforehand: for each set of sizes an execution context with its shapes set, its
tensors' memory, and with CUDA graphs the recorded graph. Serving a batch is then a copy into page-locked memory, one
launch, and a wait: no memory is taken, and no context changes its profile or shapes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from trtforge.errors import CapabilityError
from trtforge.runtime.lane import Array, Lane, context_bytes
from trtforge.runtime.queue import Batcher, Cell, Replay, replayed
from trtforge.runtime.session import EngineSession
from trtforge.runtime.sizes import at_sizes
from trtforge.traffic.layout import Sizes

RunBatch = Callable[[int, int], float]
"""(first, end) -> GPU milliseconds of the batch; the outputs are on the host when it returns."""

_MOST_OF_MEMORY = 0.5
"""Share of the free GPU memory that contexts of their own may take."""
_SPIN_S = 0.0005
"""Before something is due, the clock is watched instead of sleeping, since Linux wakes a sleeper 0.05 to 0.2 ms late."""
LATE_MS = 0.2
"""A batch that begins later than this after it could have is late by fault of this process."""


class Server:
    """An engine that is ready for batches of certain sizes. Not for several threads.

    Attributes:
        has_own_contexts: whether every set of sizes has a context of its own. Where GPU memory does not allow it, one
            context for each profile serves all, and its shapes are set anew when they change.
    """

    def __init__(self, session: EngineSession, cells: Mapping[Cell, Sizes], *, with_graph: bool, spin: bool) -> None:
        """Makes the contexts; their memory and graphs come with the first run of each cell.

        Args:
            session: the engine.
            cells: the sizes that will be asked for, each inside a profile.
            with_graph: whether to replay CUDA graphs.
            spin: whether to keep a processor busy while the GPU works.

        Raises:
            CapabilityError: the GPU has no memory for it.
        """
        self._cuda, self._with_graph = session.cuda, with_graph
        free, _ = session.cuda.memory()
        needed = len(cells) * context_bytes(session.engine)
        self.has_own_contexts = with_graph or needed <= _MOST_OF_MEMORY * free
        self._ready: dict[Cell, tuple[Lane, dict[str, Array]]] = {}
        for cell, sizes in cells.items():
            profile, feeds = at_sizes(session, sizes)
            lane = session.lane(profile, ("serve", cell) if self.has_own_contexts else 0)
            self._ready[cell] = lane, {name: feeds[name].astype(lane.dtype(name)) for name in lane.input_names}
        self._start, self._end = (session.cuda.event(spin=spin) for _ in range(2))

    def run(self, cell: Cell) -> float:
        """Inputs from host arrays to outputs in host arrays; gives the milliseconds between events on the GPU."""
        lane, feeds = self._ready[cell]
        lane.prepare(feeds)
        graph = lane.graph(transfers=True) if self._with_graph else None
        self._cuda.record(self._start, lane.stream)
        if graph is not None:
            self._cuda.launch(graph, lane.stream)
        else:
            lane.copy_in()
            lane.enqueue()
            lane.copy_out()
        self._cuda.record(self._end, lane.stream)
        self._cuda.wait_for(self._end)
        lane.outputs()
        return self._cuda.elapsed_ms(self._start, self._end)

    def close(self) -> None:
        """Gives the events back; contexts are the session's."""
        for event in (self._start, self._end):
            with suppress(CapabilityError):  # what stopped the GPU was told to whoever waited for it
                self._cuda.free_event(event)


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """What happened.

    Attributes:
        replay: latencies by the wall clock, from arrival to outputs on the host.
        gpu_busy: share of the time that the GPU copied or computed, 0 to 1.
        host_ms: what a batch takes besides, on average: forming, filling, launching, waking up, reading.
        late_share: share of the batches that began more than 0.2 ms after they could have.
    """

    replay: Replay
    gpu_busy: float
    host_ms: float
    late_share: float


def serve(batcher: Batcher, run_batch: RunBatch) -> Served:
    """Lets requests arrive by the wall clock, and runs each batch when the batcher's rule says so.

    Raises:
        CapabilityError: the GPU stopped.
    """
    arrivals = batcher.arrivals_ms
    ends: list[tuple[int, float]] = []
    gpu_ms = host_ms = 0.0
    num_late = first = 0
    gc.collect()
    gc.disable()  # a collection of all objects takes as long as many batches
    try:
        begin = time.perf_counter()
        free_at = 0.0
        while first < len(arrivals):
            ready_at, most = batcher.next(first)
            if ready_at > free_at:
                _wait_until(begin + ready_at / 1000)
            # Rounding may put it a little before the arrival that was waited for.
            start = max((time.perf_counter() - begin) * 1000, ready_at)
            num_late += start - max(ready_at, free_at) > LATE_MS
            end = batcher.arrived(start, most)
            spent = run_batch(first, end)
            done = (time.perf_counter() - begin) * 1000
            host_ms += done - max(ready_at, free_at) - spent
            gpu_ms += spent
            ends.append((end, done))
            free_at, first = done, end
    finally:
        gc.enable()
    span = max(free_at - arrivals[0], 1e-9)
    return Served(
        replayed(batcher, ends, (gpu_ms + host_ms) / span),
        min(gpu_ms / span, 1.0),
        host_ms / len(ends),
        num_late / len(ends),
    )


def _wait_until(due: float) -> None:
    left = due - time.perf_counter() - _SPIN_S
    if left > 0:
        time.sleep(left)
    while time.perf_counter() < due:
        pass
