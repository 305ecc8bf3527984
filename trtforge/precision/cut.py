"""The assignment of types with the fewest casts, by a minimum cut."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

_INFINITE = 1 << 30
Value = tuple[int | None, Sequence[int], bool, int]
"""(unit that gives a value or None if it is given in FP32, units that read it, whether FP32 is wanted elsewhere too, what
a cast of it costs)."""


def high_units(num_units: int, high: Iterable[int], low: Iterable[int], values: Iterable[Value]) -> set[int]:
    """Units that should be FP32 so that casts cost least; with several such sets, the smallest.

    A value is cast once if one of its readers has another type than it was given in.

    Args:
        num_units: units are numbered from 0.
        high: units that are FP32.
        low: units that are of the lower type.
        values: who gives and reads each value.

    Source: a cast is capacity on the way from an FP32 end to a low end, shared by all readers of a value through a node
    of its own; the cheapest set of casts is a minimum cut (Ford and Fulkerson 1956).
    """
    source, sink = num_units, num_units + 1
    network = _Network(num_units + 2)
    for unit in high:
        network.add(source, unit, _INFINITE)
    for unit in low:
        network.add(unit, sink, _INFINITE)
    for giver, readers, wanted_high, cost in values:
        start = source if giver is None else giver
        down, up = network.node(), network.node()
        network.add(start, down, cost)
        network.add(up, start, cost)
        for reader in (*readers, *([source] if wanted_high else ())):
            network.add(down, reader, _INFINITE)
            network.add(reader, up, _INFINITE)
    network.saturate(source, sink)
    return {node for node in network.reached(source) if node < num_units}


class _Network:
    """A flow network; arc `i` and its reverse `i ^ 1` lie side by side."""

    def __init__(self, num_nodes: int) -> None:
        self.arcs: list[list[int]] = [[] for _ in range(num_nodes)]
        self.ends: list[int] = []
        self.room: list[int] = []

    def node(self) -> int:
        self.arcs.append([])
        return len(self.arcs) - 1

    def add(self, start: int, end: int, capacity: int) -> None:
        for tail, head, room in ((start, end, capacity), (end, start, 0)):
            self.arcs[tail].append(len(self.ends))
            self.ends.append(head)
            self.room.append(room)

    def saturate(self, source: int, sink: int) -> None:
        """Sends as much flow as the network carries, along shortest paths (Dinic 1970)."""
        while sink in (level := self.reached(source)):
            untried = [list(arcs) for arcs in self.arcs]
            while self._send(source, sink, level, untried):
                pass

    def reached(self, source: int) -> dict[int, int]:
        """Nodes with room left on a path from the source -> length of the shortest."""
        level, todo = {source: 0}, deque([source])
        while todo:
            node = todo.popleft()
            for arc in self.arcs[node]:
                end = self.ends[arc]
                if self.room[arc] and end not in level:
                    level[end] = level[node] + 1
                    todo.append(end)
        return level

    def _send(self, source: int, sink: int, level: dict[int, int], untried: list[list[int]]) -> bool:
        path: list[int] = []
        node = source
        while node != sink:
            while untried[node]:
                arc = untried[node][-1]
                end = self.ends[arc]
                if self.room[arc] and level.get(end, -1) == level[node] + 1:
                    break
                untried[node].pop()
            if untried[node]:
                path.append(untried[node][-1])
                node = self.ends[path[-1]]
            elif path:
                node = self.ends[path.pop() ^ 1]
                untried[node].pop()
            else:
                return False
        sent = min(self.room[arc] for arc in path)
        for arc in path:
            self.room[arc] -= sent
            self.room[arc ^ 1] += sent
        return True
