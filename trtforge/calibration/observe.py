"""One pass over calibration data: the range of every float value of a model, and magnitudes of those to be quantized.

The model runs in pieces, so that the values that leave onnxruntime at once stay under a budget. Every node runs once
for each sample.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from trtforge.calibration.histogram import Histogram, as_float32
from trtforge.errors import CalibrationError, GraphError, Problem, raise_any
from trtforge.reference import HeldValue, PieceSession, held, onnxruntime_version
from trtforge.types import Graph, Range, Shape
from trtforge.wiring import Wiring, constants_of, is_large, needed, piece, wire

Array = NDArray[Any]
InputShapes = tuple[tuple[str, Shape], ...]

NUM_LABELS = 3
"""Samples that are named for a tensor."""

_FIRST_PIECE_NODES = 32
"""Nodes of a piece while no sizes are known."""
_GROWTH = 1.25
"""Pieces are laid anew when the values grew by more than this."""
_MOST_PREPACKED_BYTES = 256 << 20
"""Weights beyond this are not copied into the order that onnxruntime's matrix products like best."""
_MOST_PROBLEMS = 20
_SUB_BYTE = frozenset({"int2", "uint2", "int4", "uint4", "float4_e2m1fn"})


class Sample(Protocol):
    """One set of inputs, with the place that it came from."""

    @property
    def label(self) -> str:
        """For messages, one of its own for each sample."""

    @property
    def feeds(self) -> Mapping[str, Array]:
        """Input name -> array."""


@dataclass(frozen=True, slots=True, eq=False)
class Observations:
    """What was seen over all samples. Nothing in it depends on their order.

    Attributes:
        histograms: for each tensor asked for that came about with at least one value, in graph order.
        missing: the other tensors asked for, sorted.
        ranges: the same for every float value of the main graph, constants left out.
        largest: tensor asked for -> largest magnitude and sample label of up to `NUM_LABELS` samples, largest first.
        shapes: input shapes, in graph order -> number of samples.
        num_samples: 1 or more.
        onnxruntime: version that ran the model.
    """

    histograms: dict[str, Histogram]
    missing: tuple[str, ...]
    ranges: dict[str, Range]
    largest: dict[str, tuple[tuple[float, str], ...]]
    shapes: dict[InputShapes, int]
    num_samples: int
    onnxruntime: str


def observe(
    graph: Graph,
    samples: Iterable[Sample],
    tensors: Collection[str],
    *,
    memory_bytes: int,
    on_sample: Callable[[int], None],
    threads: int | None = None,
) -> Observations:
    """Runs the model on each sample once, in FP32 on the CPU as it is written, and looks at its values.

    Args:
        graph: the model; values inside the bodies of If, Loop and Scan are not looked at.
        samples: taken one after the other; sizes may differ between them.
        tensors: values of the main graph, inputs too, whose magnitudes are counted.
        memory_bytes: of the values that leave onnxruntime at once. A single node may give more, and so may the first
            sample of a size. Values that are read later are held besides.
        on_sample: told the number of samples done after each.
        threads: of onnxruntime, all cores if None.

    Raises:
        GraphError: onnxruntime does not load the model.
        CalibrationError: it stopped at a sample; a value of `tensors` is not finite; there are no samples.
    """
    wiring = wire(graph)
    seen = _Seen(frozenset(tensors))
    run = _Pieces(wiring, memory_bytes, threads, prepacks=graph.weight_bytes <= _MOST_PREPACKED_BYTES)
    shapes: Counter[InputShapes] = Counter()
    num_samples = 0
    for sample in samples:
        run.run(sample, seen)
        shapes[tuple((name, sample.feeds[name].shape) for name in wiring.inputs)] += 1
        num_samples += 1
        on_sample(num_samples)
    if not num_samples:
        raise CalibrationError(
            f"no samples to calibrate {wiring.label} with", next_step="name data with at least one sample"
        )
    raise_any(seen.problems())
    order = [*wiring.inputs, *wiring.producer]
    return Observations(
        histograms={name: seen.histograms[name] for name in order if name in seen.histograms},
        missing=tuple(sorted(seen.tensors - seen.histograms.keys())),
        ranges={name: seen.ranges[name] for name in order if name in seen.ranges},
        largest={name: tuple(seen.largest[name]) for name in order if name in seen.largest},
        shapes=dict(sorted(shapes.items())),
        num_samples=num_samples,
        onnxruntime=onnxruntime_version(),
    )


@dataclass(slots=True, eq=False)
class _Seen:
    """What was seen so far."""

    tensors: frozenset[str]
    histograms: dict[str, Histogram] = field(default_factory=dict)
    ranges: dict[str, Range] = field(default_factory=dict)
    largest: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    odd: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, array: Array, label: str) -> None:
        """Looks at one value of one sample."""
        if not array.size:
            return
        values = as_float32(array)
        low, high = float(values.min()), float(values.max())
        found = _range(low, high)
        self.ranges[name] = _joined(self.ranges[name], found) if name in self.ranges else found
        if name not in self.tensors:
            return
        if not found.finite:
            self.odd.setdefault(name, []).append(label)
            return
        self.histograms.setdefault(name, Histogram()).add(values, low, high)
        candidates = [*self.largest.get(name, ()), (found.absmax, label)]
        self.largest[name] = heapq.nsmallest(NUM_LABELS, candidates, key=lambda pair: (-pair[0], pair[1]))

    def problems(self) -> Iterator[Problem]:
        """The tensors that cannot be quantized."""
        names = sorted(self.odd)
        for name in names[:_MOST_PROBLEMS]:
            labels = sorted(self.odd[name])
            shown = ", ".join(labels[:NUM_LABELS])
            more = f" and {len(labels) - NUM_LABELS} more" if len(labels) > NUM_LABELS else ""
            yield Problem(
                f"'{name}' is not finite for {shown}{more}, expected finite values to calibrate with",
                f"look at these samples, or keep the nodes that read '{name}' out of INT8 with precision.keep",
                exit_code=CalibrationError.exit_code,
            )
        if len(names) > _MOST_PROBLEMS:
            yield Problem(
                f"and {len(names) - _MOST_PROBLEMS} more tensors that are not finite",
                "mend the ones above first",
                exit_code=CalibrationError.exit_code,
            )


def _range(low: float, high: float) -> Range:
    if np.isfinite(low) and np.isfinite(high):
        return Range(low, high, max(abs(low), abs(high)), finite=True)
    return Range(low, high, float("inf"), finite=False)


def _joined(one: Range, two: Range) -> Range:
    # numpy's minimum, unlike min(), keeps NaN.
    low, high = float(np.minimum(one.low, two.low)), float(np.maximum(one.high, two.high))
    return Range(low, high, max(one.absmax, two.absmax), finite=one.finite and two.finite)


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Neighbouring nodes, loaded to run on their own; with the values that nothing after them reads."""

    session: PieceSession
    reads: tuple[str, ...]
    read_last: tuple[str, ...]


class _Pieces:
    """A model in pieces: each gives out all its values."""

    def __init__(self, wiring: Wiring, memory_bytes: int, threads: int | None, *, prepacks: bool) -> None:
        self._wiring = wiring
        self._memory_bytes = memory_bytes
        self._threads = threads
        self._prepacks = prepacks
        self._weights: dict[str, Array] = {}
        self._sizes: dict[str, int] = {}
        self._laid_for = 0
        self._places = _equal_runs(len(wiring.nodes))
        self._pieces: list[_Piece] = []

    def run(self, sample: Sample, seen: _Seen) -> None:
        """Runs one sample and shows `seen` each float value as soon as it is there."""
        values = {name: held(sample.feeds[name]) for name in self._wiring.inputs}
        self._show(values, sample.label, seen)
        for index in range(len(self._places)):
            if index == len(self._pieces):
                self._pieces.append(self._load(index, values))
            part = self._pieces[index]
            try:
                given = part.session.run({name: values[name] for name in part.reads})
            except GraphError as error:
                reason = error.problems[0]
                summary = f"{sample.label}: {reason.summary}"
                raise CalibrationError(summary, detail=reason.detail, next_step="take this sample out") from error
            self._show(given, sample.label, seen)
            values |= given
            del given
            for name in part.read_last:
                del values[name]
        self._lay_anew()

    def _show(self, values: Mapping[str, HeldValue], label: str, seen: _Seen) -> None:
        for name, value in values.items():
            if not value.is_float:
                continue
            array = value.array
            self._sizes[name] = max(self._sizes.get(name, 0), array.nbytes)
            seen.add(name, array, label)

    def _lay_anew(self) -> None:
        """Cuts the model by the sizes seen, if they outgrew those that it was cut for."""
        total = sum(self._sizes.values())
        if total <= self._laid_for * _GROWTH:
            return
        self._laid_for = total
        places = list(self._runs_within_budget())
        if places != self._places:
            self._places, self._pieces = places, []

    def _runs_within_budget(self) -> Iterator[range]:
        start, held_bytes = 0, 0
        for place, node in enumerate(self._wiring.nodes):
            own = sum(self._sizes.get(name, 0) for name in node.output)
            if place > start and held_bytes + own > self._memory_bytes:
                yield range(start, place)
                start, held_bytes = place, 0
            held_bytes += own
        if self._wiring.nodes:
            yield range(start, len(self._wiring.nodes))

    def _load(self, index: int, values: Mapping[str, HeldValue]) -> _Piece:
        wiring, places = self._wiring, self._places[index]
        reads = tuple(needed(wiring, places))
        given = [name for place in places for name in wiring.nodes[place].output if name]
        last_reads = {name: max(wiring.readers.get(name, (-1,))) for name in (*values, *given)}
        model = piece(wiring, places, {name: values[name].type_proto(with_shape=False) for name in reads}, given)
        weights = self._use_weights(model.graph.initializer, places)
        session = PieceSession(
            model,
            weights,
            wiring.label,
            weights_dir=wiring.weights_dir,
            threads=self._threads,
            prepacks=self._prepacks,
        )
        return _Piece(session, reads, tuple(name for name, last in last_reads.items() if last < places.stop))

    def _use_weights(self, initializers: Any, places: range) -> dict[str, Array]:
        """The large weights of a piece that are inside the model, held once for all pieces; the others it names.

        Those in other files stay there, and those of less than a byte go into the piece.
        """
        used = {}
        for tensor in filter(is_large, constants_of(self._wiring, places)):
            name = tensor.name
            if tensor.data_location == TensorProto.EXTERNAL:
                initializers.append(tensor)
                continue
            if name not in self._weights:
                array = self._wiring.constant(name)
                self._weights[name] = np.ascontiguousarray(array).reshape(array.shape)
                tensor.ClearField("raw_data")
            array = self._weights[name]
            if array.dtype.kind == "O" or array.dtype.name in _SUB_BYTE:
                initializers.append(numpy_helper.from_array(array, name))
                continue
            used[name] = array
            stub = initializers.add(name=name, data_type=tensor.data_type, dims=tensor.dims)
            stub.data_location = TensorProto.EXTERNAL
            stub.external_data.add(key="location", value="weights")
        return used


def _equal_runs(num_nodes: int) -> list[range]:
    step = _FIRST_PIECE_NODES
    return [range(start, min(start + step, num_nodes)) for start in range(0, num_nodes, step)]
