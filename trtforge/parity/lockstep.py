"""Runs two models side by side, piece by piece, and compares every pair of values as soon as both are there."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from trtforge.errors import TrtForgeError
from trtforge.parity.mapping import Pairs
from trtforge.parity.metrics import Element, Metrics, compare
from trtforge.parity.tolerances import Tolerance, judge
from trtforge.reference import HeldValue, PieceSession, held
from trtforge.wiring import SMALL_SIZE, Wiring, constants_of, is_large, needed, piece

Array = np.ndarray[Any, np.dtype[Any]]

_CHUNK = 1 << 16
# Types that onnxruntime takes in no array.
_SUB_BYTE = frozenset({"int2", "uint2", "int4", "uint4", "float4_e2m1fn"})
# Sums of squares outside these bounds have lost precision to denormals, or are about to overflow.
_SQUARES = (1e-280, 1e280)
_LARGEST_FLOAT16 = 65504.0
_LARGEST = (_LARGEST_FLOAT16, float.fromhex("0x1.fep127"))
"""Of float16 and bfloat16. Source: IEEE 754-2019 binary16; bfloat16 has binary32's exponent and 7 fraction bits."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the comparison of one pair of values gave.

    Attributes:
        is_same: equal bit for bit.
        excess: found error over allowed error; above 1 the value is outside its tolerance.
        metrics: None for equal values. Figures that the tolerance does not need may be missing.
        reason: the bound that does not hold, "" if all do.
        has_own_type: whether both have one element type.
    """

    is_same: bool
    excess: float
    metrics: Metrics | None
    reason: str
    has_own_type: bool

    @property
    def is_outside(self) -> bool:
        """Whether the value left its tolerance."""
        return self.excess > 1


@dataclass(frozen=True, slots=True)
class Steps:
    """One run of both models.

    Attributes:
        seen: value of the reference -> comparison, for tensors.
        missing: values of the reference whose counterparts the candidate did not come to.
        stopped: node of the candidate -> why the runtime stopped there.
    """

    seen: dict[str, Seen]
    missing: frozenset[str]
    stopped: dict[int, str]


@dataclass(slots=True, eq=False)
class _Side:
    """One of the two models while it runs."""

    wiring: Wiring
    kept: Collection[str]
    values: dict[str, HeldValue] = field(default_factory=dict)
    stopped: dict[int, str] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Stretch:
    """Nodes of both models that run between two comparisons, with the sessions that run them again."""

    reference: tuple[int, ...]
    candidate: tuple[int, ...]
    sessions: dict[int, PieceSession] = field(default_factory=dict)


class Lockstep:
    """Two models, ready to run side by side.

    Guarantees: each node runs once for each set of inputs, whatever the size of the model; of the compared values only
    those of one stretch of nodes are held, `max_bytes` of both models together, unless one node gives more. Stretches are
    laid for the first inputs, so those of the largest sizes come first. Values that a later stretch reads are held besides.

    Args:
        reference: the model before.
        candidate: the model after.
        pairs: which value is which.
        tolerance: for every value.
        max_bytes: see above.
        runs_again: whether there is more than one set of inputs, so that sessions are worth their memory.
    """

    def __init__(
        self,
        reference: Wiring,
        candidate: Wiring,
        pairs: Pairs,
        tolerance: Tolerance,
        max_bytes: int,
        *,
        runs_again: bool,
    ) -> None:
        self._reference = reference
        self._candidate = candidate
        self._pairs = {mine: theirs for mine, theirs in pairs.values.items() if mine in reference.producer}
        self._tolerance = tolerance
        self._max_bytes = max_bytes
        self._runs_again = runs_again
        self._stretches: list[_Stretch] = []
        self._is_laid = False

    def run(
        self, feeds: Mapping[str, Array], candidate_feeds: Mapping[str, Array], on_nodes: Callable[[int], None]
    ) -> Steps:
        """Runs both models.

        Args:
            feeds: input name -> array, of the reference.
            candidate_feeds: of the candidate.
            on_nodes: told how many nodes of the reference ran since the last call.

        Raises:
            GraphError: onnxruntime stopped in the reference.
        """
        mine = _Side(self._reference, set(self._pairs), {name: held(feed) for name, feed in feeds.items()})
        theirs = _Side(
            self._candidate,
            set(self._pairs.values()),
            {name: held(feed) for name, feed in candidate_feeds.items()},
        )
        seen: dict[str, Seen] = {}
        missing: set[str] = set()
        waiting = dict(self._pairs)
        with ThreadPoolExecutor() as executor:
            for stretch in self._laid(mine, theirs):
                self._run_reference(mine, stretch)
                _run_candidate(theirs, stretch)
                for name, found in self._compared(mine, theirs, waiting, executor):
                    if found is None:
                        missing.add(name)
                    else:
                        seen[name] = found
                if not self._runs_again:
                    stretch.sessions.clear()
                on_nodes(len(stretch.reference))
        self._is_laid = True
        return Steps(seen, frozenset(missing), theirs.stopped)

    def _laid(self, mine: _Side, theirs: _Side) -> Iterator[_Stretch]:
        """The stretches; the first time they are laid as the sizes of values become known."""
        if self._is_laid:
            yield from self._stretches
            return
        self._stretches = []
        start = 0
        sizes: dict[str, int] = {}
        while start < len(self._reference.nodes):
            if not all(name in sizes for name in filter(None, self._reference.nodes[start].output)):
                sizes = _sizes(self._reference, range(start, len(self._reference.nodes)), mine.values)
            stop = self._stop(start, sizes)
            self._stretches.append(_Stretch(tuple(range(start, stop)), tuple(self._candidate_nodes(stop, theirs.done))))
            yield self._stretches[-1]
            start = stop

    def _stop(self, start: int, sizes: Mapping[str, int]) -> int:
        """The end of the stretch that begins at `start`: a node whose size is not known, or as much as fits."""
        total = 0
        for place in range(start, len(self._reference.nodes)):
            outputs = [name for name in self._reference.nodes[place].output if name]
            if not all(name in sizes for name in outputs):
                return max(place, start + 1)
            # Twice, as the candidate's counterparts are about as large.
            total += 2 * sum(sizes[name] for name in outputs)
            if total > self._max_bytes:
                return max(place, start + 1)
        return len(self._reference.nodes)

    def _candidate_nodes(self, stop: int, ran: Collection[int]) -> Iterator[int]:
        """Nodes of the candidate that can run now and whose counterparts have run; in the end all others."""
        is_last = stop == len(self._reference.nodes)
        partners = {theirs: mine for mine, theirs in self._pairs.items()}
        late = set[str]()
        for place, node in enumerate(self._candidate.nodes):
            if place in ran:
                continue
            mine = [partners[name] for name in node.output if name in partners]
            is_early = any(self._reference.producer[name] >= stop for name in mine)
            if not is_last and (is_early or not late.isdisjoint(self._candidate.reads[place])):
                late.update(node.output)
            else:
                yield place

    def _run_reference(self, side: _Side, stretch: _Stretch) -> None:
        places = stretch.reference
        if 0 not in stretch.sessions:
            stretch.sessions[0] = _session(side, places)
        _run(side, places, stretch.sessions[0])

    def _compared(
        self, mine: _Side, theirs: _Side, waiting: dict[str, str], executor: Executor
    ) -> Iterator[tuple[str, Seen | None]]:
        """Compares what both sides have by now, and lets go of what nobody needs any more. None for what is missing."""
        found = []
        for name in [name for name in waiting if name in mine.values]:
            value, other = mine.values[name], waiting[name]
            if self._candidate.producer.get(other, -1) not in theirs.done and other not in self._candidate.constants:
                continue
            del waiting[name]
            if other not in theirs.values and other not in self._candidate.constants:
                yield name, None
            elif value.is_tensor and (other not in theirs.values or theirs.values[other].is_tensor):
                found.append((name, value, other))
        yield from executor.map(lambda pair: (pair[0], self._measured(pair[1], theirs, pair[2])), found)
        _let_go(mine, waiting)
        _let_go(theirs, set(waiting.values()))

    def _measured(self, value: HeldValue, theirs: _Side, other: str) -> Seen:
        if other in self._candidate.constants:
            return measure(value.array, self._candidate.constant(other), self._tolerance)
        return measure(value.array, theirs.values[other].array, self._tolerance)


def _run_candidate(side: _Side, stretch: _Stretch) -> None:
    """Runs all nodes that can run. Where the runtime stops, halves lead to the node at which it does."""
    todo = [stretch.candidate]
    while todo:
        places = _runnable(side, todo.pop())
        if not places:
            continue
        is_whole = places == stretch.candidate
        session = stretch.sessions.get(1) if is_whole else None
        try:
            session = session or _session(side, places)
            _run(side, places, session)
        except TrtForgeError as error:
            if len(places) == 1:
                side.stopped[places[0]] = error.problems[0].detail[0]
                side.done.update(places)
            else:
                middle = len(places) // 2
                todo += [places[middle:], places[:middle]]
        else:
            if is_whole:
                stretch.sessions[1] = session


def _runnable(side: _Side, places: tuple[int, ...]) -> tuple[int, ...]:
    """Those of the nodes whose operands are there; the others count as done, as they will never run."""
    given = {*side.values, *side.wiring.constants}
    found = []
    for place in places:
        if given.issuperset(side.wiring.reads[place]):
            given.update(side.wiring.nodes[place].output)
            found.append(place)
        else:
            side.done.add(place)
    return tuple(found)


def _session(side: _Side, places: tuple[int, ...]) -> PieceSession:
    wiring, own = side.wiring, set(places)
    outputs = [
        name
        for place in places
        for name in wiring.nodes[place].output
        if name in side.kept or not own.issuperset(wiring.readers.get(name, ()))
    ]
    return session_of(wiring, places, side.values, outputs)


def session_of(
    wiring: Wiring, places: tuple[int, ...], values: Mapping[str, HeldValue], outputs: Iterable[str]
) -> PieceSession:
    """Some nodes of a model, loaded to run on their own.

    Args:
        wiring: where they are from.
        places: their positions, in order.
        values: what they read; sizes may be others when they run.
        outputs: what to give out.

    Raises:
        GraphError: onnxruntime does not load them.
    """
    given = {name: values[name].type_proto(with_shape=False) for name in needed(wiring, places)}
    model = piece(wiring, places, given, outputs)
    weights = {}
    for tensor in filter(is_large, constants_of(wiring, places)):
        array = wiring.constant(tensor.name)
        if array.dtype.kind == "O" or array.dtype.name in _SUB_BYTE:
            model.graph.initializer.append(numpy_helper.from_array(array, tensor.name))
        else:
            weights[tensor.name] = np.ascontiguousarray(array).reshape(array.shape)
            stub = model.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
            stub.data_location = TensorProto.EXTERNAL
            stub.external_data.add(key="location", value="weights")
    return PieceSession(model, weights, wiring.label)


def _run(side: _Side, places: tuple[int, ...], session: PieceSession) -> None:
    side.values |= session.run({name: side.values[name] for name in needed(side.wiring, places)})
    side.done.update(places)


def _let_go(side: _Side, waiting: Collection[str]) -> None:
    for name in list(side.values):
        if name not in waiting and side.done.issuperset(side.wiring.readers.get(name, ())):
            del side.values[name]


def _sizes(wiring: Wiring, places: Sequence[int], values: Mapping[str, HeldValue]) -> dict[str, int]:
    """Bytes of the values that the nodes give, as far as ONNX infers them from the actual sizes of `values`.

    Whole numbers among these are given to the inference as constants, since they most often are sizes.
    """
    found = [name for name in needed(wiring, places) if name in values and values[name].is_tensor]
    known = [name for name in found if values[name].num_elements <= SMALL_SIZE and values[name].array.dtype.kind == "i"]
    given = {name: values[name].type_proto(with_shape=True) for name in found if name not in known}
    model = piece(wiring, places, given, ())
    large = filter(is_large, constants_of(wiring, places))
    model.graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in large)
    model.graph.initializer.extend(numpy_helper.from_array(values[name].array, name) for name in known)
    try:
        infos = onnx.shape_inference.infer_shapes(model, data_prop=True).graph.value_info
    except Exception:  # noqa: BLE001 - onnx throws many types; what is not known runs by itself
        return {}
    return {info.name: size for info in infos if (size := _size(info.type.tensor_type)) is not None}


def _size(type_: onnx.TypeProto.Tensor) -> int | None:
    if not type_.elem_type or not type_.HasField("shape"):
        return None
    if not all(dim.HasField("dim_value") for dim in type_.shape.dim):
        return None
    return int(helper.tensor_dtype_to_np_dtype(type_.elem_type).itemsize) * int(
        math.prod(dim.dim_value for dim in type_.shape.dim)
    )


def measure(reference: Array, candidate: Array, tolerance: Tolerance) -> Seen:
    """Compares one pair of values that need not be outputs: in one pass, with no more figures than the tolerance needs.

    Values that no narrower type holds set no scale where both sides agree on them (the -3.4e38 and -inf of masks), and a
    candidate that has the largest value of float16 or bfloat16 in their place agrees.

    Args:
        reference: any tensor.
        candidate: any tensor. Another type is no difference as long as both are real, or both whole.
        tolerance: bounds on figures of logits are left out.
    """
    has_own_type = reference.dtype == candidate.dtype
    if has_own_type and _is_same(reference, candidate):
        return Seen(is_same=True, excess=0.0, metrics=None, reason="", has_own_type=True)
    bounds = replace(tolerance, dtype=candidate.dtype.name, min_top1=None, min_topk=None, max_kl=None)
    metrics = _measured(reference, candidate, bounds)
    verdict = judge(metrics, bounds)
    reason = str(verdict.reasons[0]) if verdict.reasons else ""
    return Seen(False, verdict.closest.excess if verdict.closest else 0.0, metrics, reason, has_own_type)


def _is_same(reference: Array, candidate: Array) -> bool:
    if reference.shape != candidate.shape:
        return False
    if reference.dtype.kind == "O":
        return bool(np.array_equal(reference, candidate))
    first, second = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (reference, candidate))
    step = 8 * _CHUNK
    return all(
        np.array_equal(first[start : start + step], second[start : start + step])
        for start in range(0, first.size, step)
    )


def _measured(reference: Array, candidate: Array, bounds: Tolerance) -> Metrics:
    if reference.shape != candidate.shape or not (_is_real(reference) and _is_real(candidate)):
        return compare(reference, candidate)
    needs_norms = (bounds.min_cosine, bounds.max_norm_relative, bounds.min_sqnr_db) != (None, None, None)
    metrics = _quick(reference, candidate, needs_norms=needs_norms)
    if metrics is None or (metrics.max_abs_reference or 0.0) >= _LARGEST_FLOAT16:
        reference, candidate = _level(reference, candidate)
        metrics = _quick(reference, candidate, needs_norms=needs_norms)
    if metrics is None:
        return compare(reference, candidate)
    allowed = (bounds.atol or 0.0) + (bounds.rtol or 0.0) * (metrics.max_abs_reference or 0.0)
    needs_percentile = bounds.error_at != "max" and not (metrics.max_abs_diff or 0.0) <= allowed
    return compare(reference, candidate) if needs_percentile else metrics


def _is_real(array: Array) -> bool:
    return array.dtype.kind == "f" or array.dtype.name.startswith(("bfloat", "float"))


def _level(reference: Array, candidate: Array) -> tuple[Array, Array]:
    """Both with zeros where they agree on a value that float16 lacks, or the candidate has a type's largest for it."""
    level, other = reference.copy(), candidate.copy()
    for first, second in zip(_chunks(level), _chunks(other), strict=True):
        mine, theirs = _wide(first), _wide(second)
        agree = (mine == theirs) | (np.isnan(mine) & np.isnan(theirs))
        for largest in _LARGEST:
            agree |= (np.abs(theirs) == largest) & (np.abs(mine) >= largest) & (np.sign(mine) == np.sign(theirs))
        is_flat = agree & ~(np.abs(mine) < _LARGEST_FLOAT16)
        first[is_flat] = 0
        second[is_flat] = 0
    return level, other


def _chunks(array: Array) -> Iterator[Array]:
    """Parts of the flattened array that a core's cache holds."""
    flat = np.ascontiguousarray(array).reshape(-1)
    yield from (flat[start : start + _CHUNK] for start in range(0, flat.size, _CHUNK))


def _wide(array: Array) -> Array:
    """In float64 if it is that, else in float32, which holds all narrower values."""
    return array.astype(np.float64 if array.dtype == np.float64 else np.float32, copy=False)


def _quick(reference: Array, candidate: Array, *, needs_norms: bool) -> Metrics | None:
    """The figures that bounds on the largest error and on norms need; None where `compare` must look."""
    largest = peak = 0.0
    num_different = position = 0
    for place, (first, second) in enumerate(zip(_chunks(reference), _chunks(candidate), strict=True)):
        mine, theirs = _wide(first), _wide(second)
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.subtract(mine, theirs)
        np.abs(error, out=error)
        worst = float(error.max())
        if not math.isfinite(worst):
            return None
        if worst > largest:
            largest, position = worst, place * _CHUNK + int(error.argmax())
        num_different += int(np.count_nonzero(error != 0))
        peak = max(peak, float(mine.max()), -float(mine.min()))
    metrics = Metrics(
        reference.shape,
        candidate.shape,
        reference.dtype.name,
        candidate.dtype.name,
        num_elements=reference.size,
        num_different=num_different,
        max_abs_diff=largest,
        max_abs_reference=peak,
    )
    if num_different:
        index = tuple(int(place) for place in np.unravel_index(position, reference.shape))
        metrics = replace(metrics, worst=Element(index, float(reference[index]), float(candidate[index])))
    return _with_norms(metrics, reference, candidate) if needs_norms and peak else metrics


def _with_norms(metrics: Metrics, reference: Array, candidate: Array) -> Metrics | None:
    square = other_square = square_error = product = 0.0
    for first, second in zip(_chunks(reference), _chunks(candidate), strict=True):
        mine, theirs = first.astype(np.float64), second.astype(np.float64)
        error = mine - theirs
        square += _dot(mine, mine)
        other_square += _dot(theirs, theirs)
        square_error += _dot(error, error)
        product += _dot(mine, theirs)
    if not all(_SQUARES[0] < value < _SQUARES[1] for value in (square, other_square, square_error) if value):
        return None
    norm_relative = math.sqrt(square_error / square)
    lengths = math.sqrt(square) * math.sqrt(other_square)
    return replace(
        metrics,
        norm_relative=norm_relative,
        cosine_similarity=max(-1.0, min(1.0, product / lengths)) if lengths else 0.0,
        sqnr_db=-20 * math.log10(norm_relative) if norm_relative else None,
    )


def _dot(first: Array, second: Array) -> float:
    """Not `@`: OpenBLAS would start threads for each chunk, and wait for cores that onnxruntime's have."""
    return float(np.einsum("i,i->", first, second))
