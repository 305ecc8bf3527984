"""Finds the nodes at which two models part."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from trtforge.errors import GraphError, Problem, printable, raise_any
from trtforge.parity.lockstep import Lockstep, Seen, Steps, measure
from trtforge.parity.mapping import Pairs, attributes_of, map_values, seen_through
from trtforge.parity.metrics import Metrics
from trtforge.parity.tolerances import NEVER, Tolerance
from trtforge.wiring import Source, Wiring, bodies, wire

Array = np.ndarray[Any, np.dtype[Any]]

MAX_BYTES = 64 << 20
"""Compared values that are in memory at once, of both models together.

On MiniLM at (16, 128), 64 MiB take less time than 256 MiB do, as memory is used again rather than asked for.
"""
_MOST_WORST = 10
_LARGEST_FLOAT16 = 65504.0
_TO_WIDE = (TensorProto.FLOAT, TensorProto.DOUBLE)


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that left its tolerance, at the inputs where it did so most.

    Attributes:
        value: in the reference.
        counterpart: in the candidate.
        node, op: what gives it in the reference.
        feed: label of the inputs.
        excess: found error over allowed error.
        reason: the bound that does not hold, with what was found.
        metrics: not all figures are measured.
    """

    value: str
    counterpart: str
    node: str
    op: str
    feed: str
    excess: float
    reason: str
    metrics: Metrics | None


@dataclass(frozen=True, slots=True)
class ConstantDifference:
    """A constant that has other values in the candidate, beyond the rounding to its type there.

    Attributes:
        value, counterpart: names of the initializer or of what the Constant node gives.
        readers: nodes of the reference.
        summary: by how much it differs.
        excess: found error over allowed error.
    """

    value: str
    counterpart: str
    readers: tuple[str, ...]
    summary: str
    excess: float


@dataclass(frozen=True, slots=True)
class Culprit:
    """A node at which the models part.

    Attributes:
        node, op: in the reference.
        candidate_nodes: what computes its counterpart from the values before it; empty if nothing does.
        changes: how these are not what the reference has; empty if there is nothing to see.
        stops: why the runtime stops there in the candidate, "" if it does not.
        difference: the first value behind the node to leave its tolerance. Most often the node's own; a small error
            may have grown on its way through nodes that did not change. None where the candidate stops.
        also: nodes of the reference that the comparison cannot tell from it, since nothing between them is paired.
        readers: nodes that read what it gives, if that is more than float16 holds.
        feeds: labels of the inputs at which it parts.
        reaches: outputs of the model that are wrong because of it. Empty if the difference dies away.
    """

    node: str
    op: str
    candidate_nodes: tuple[str, ...]
    changes: tuple[str, ...]
    stops: str
    difference: Difference | None
    also: tuple[str, ...]
    readers: tuple[str, ...]
    feeds: tuple[str, ...]
    reaches: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BisectReport:
    """Where two models part.

    Attributes:
        culprits: nodes that make an output wrong, in topological order. A node behind another one is found when that
            one is mended.
        harmless: nodes whose difference reaches no output beyond tolerance.
        worst: the ten values furthest outside, worst first; most are victims.
        constants: those that differ by more than the tolerance allows.
        wrong_outputs: outputs of the reference that left their tolerance, or that the candidate did not come to.
        num_values: that nodes of the reference give.
        num_compared: of them.
        unpaired: values of the reference without a counterpart.
        feeds: labels of the inputs, in the order in which they ran.
        node_names: all of the reference.
    """

    culprits: tuple[Culprit, ...]
    harmless: tuple[Culprit, ...]
    worst: tuple[Difference, ...]
    constants: tuple[ConstantDifference, ...]
    wrong_outputs: tuple[str, ...]
    num_values: int
    num_compared: int
    unpaired: tuple[str, ...]
    feeds: tuple[str, ...]
    node_names: tuple[str, ...]

    @property
    def first(self) -> Culprit | None:
        """The first node that makes an output wrong."""
        return self.culprits[0] if self.culprits else None

    @property
    def share_compared(self) -> float:
        """Of the values that nodes of the reference give, 0 to 1."""
        return self.num_compared / self.num_values if self.num_values else 1.0


def bisect(
    reference: Source,
    candidate: Source,
    feeds: Mapping[str, Mapping[str, Array]],
    *,
    tolerance: Tolerance,
    max_bytes: int = MAX_BYTES,
    mapping: Mapping[str, str] | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,  # noqa: ARG005
) -> BisectReport:
    """Compares all paired values of two models and names the nodes at which they part.

    A node is a culprit if what it gives leaves the tolerance while what it reads is inside, or if the candidate stops there.
    One that is the same in both models only enlarges what it reads; then the changed nodes before it are the culprits. What
    comes after a culprit is judged by nothing: mend it and look again.

    Guarantees: each model runs once for each set of inputs; figures are kept, values are not (see `Lockstep`). Models that
    are equal give no culprit, unless they draw random numbers.

    Args:
        reference: the model before.
        candidate: the model after. Its inputs are those of the reference, by name or else by place; types may differ.
        feeds: label -> input name -> array. A fault at one length is found at that length.
        tolerance: for every value; it needs a bound that applies to real ones. Bounds on logits are left out.
        max_bytes: of compared values in memory at once.
        mapping: value of the reference -> value of the candidate, where names and structure do not tell.
        on_progress: told how many of how many nodes ran.

    Raises:
        GraphError: a model cannot be taken apart, or the reference does not run.
        SeveralErrors: of `SpecError` problems, for names in `mapping` that the models lack; of `GraphError` problems, for
            inputs of the candidate without a counterpart.
    """
    mine, theirs = wire(reference), wire(candidate)
    pairs = map_values(mine, theirs, mapping or {})
    raise_any(_without_counterpart(mine, theirs, pairs))
    lockstep = Lockstep(mine, theirs, pairs, tolerance, max_bytes, runs_again=len(feeds) > 1)
    runs: dict[str, Steps] = {}
    num_done, num_total = 0, len(mine.nodes) * len(feeds)

    def on_nodes(num_nodes: int) -> None:
        nonlocal num_done
        num_done += num_nodes
        on_progress(num_done, num_total)

    for label in sorted(feeds, key=lambda label: -sum(feed.nbytes for feed in feeds[label].values())):
        runs[label] = lockstep.run(feeds[label], _translated(feeds[label], theirs, pairs), on_nodes)
    models = _Models(mine, theirs, pairs, _constant_differences(mine, theirs, pairs, tolerance))
    return _report(models, {label: runs[label] for label in feeds})


def _without_counterpart(mine: Wiring, theirs: Wiring, pairs: Pairs) -> Iterator[Problem]:
    for name in theirs.inputs:
        if name not in pairs.taken:
            yield Problem(
                f"input '{name}' of {theirs.label} has no counterpart; inputs of {mine.label}: {', '.join(mine.inputs)}",
                f"name the input of {mine.label} that '{name}' was made from",
                exit_code=GraphError.exit_code,
            )


def _translated(feeds: Mapping[str, Array], theirs: Wiring, pairs: Pairs) -> dict[str, Array]:
    """The candidate's feeds, in its own types."""
    types = {info.name: info.type.tensor_type.elem_type for info in theirs.model.graph.input}
    names = {name: pairs.values[name] for name in feeds if pairs.values.get(name) in theirs.inputs}
    return {
        other: np.asarray(feeds[name]).astype(helper.tensor_dtype_to_np_dtype(types[other]), copy=False)
        for name, other in names.items()
    }


@dataclass(frozen=True, slots=True, eq=False)
class _Models:
    """Both models with all that is known about them before they run.

    Attributes:
        constants: (constant of the reference, of the candidate) -> how they differ, for those that do.
    """

    reference: Wiring
    candidate: Wiring
    pairs: Pairs
    constants: dict[tuple[str, str], ConstantDifference]


def _constant_differences(
    mine: Wiring, theirs: Wiring, pairs: Pairs, tolerance: Tolerance
) -> dict[tuple[str, str], ConstantDifference]:
    found = {}
    for name, other in _constant_pairs(mine, theirs, pairs):
        if not _is_stored_alike(mine.constants[name], theirs.constants[other]):
            summary, excess = _constant_difference(mine.constant(name), theirs.constant(other), tolerance)
            readers = tuple(mine.names[place] for place in mine.readers.get(name, ()))
            if summary:
                text = f"constant '{name}' {summary}"
                found[name, other] = ConstantDifference(name, other, readers, text, excess)
    return found


def _constant_pairs(mine: Wiring, theirs: Wiring, pairs: Pairs) -> Iterable[tuple[str, str]]:
    """Constants in the same place of paired nodes, and others of one name."""
    found: dict[tuple[str, str], None] = {}
    for place, other in pairs.nodes.items():
        for name, given in zip(mine.nodes[place].input, theirs.nodes[other].input, strict=False):
            constant = _before_lossless(theirs, given)
            if name in mine.constants and constant in theirs.constants:
                found[name, constant] = None
    names = {name for name, _ in found}
    return [*found, *((name, name) for name in mine.constants if name in theirs.constants and name not in names)]


def _is_stored_alike(tensor: TensorProto, other: TensorProto) -> bool:
    return (
        tensor.HasField("raw_data")
        and (tensor.data_type, tensor.dims) == (other.data_type, other.dims)
        and tensor.raw_data == other.raw_data
    )


def _constant_difference(mine: Array, theirs: Array, tolerance: Tolerance) -> tuple[str, float]:
    """In words, and found error over allowed error; no words if the candidate's is the reference's, rounded to its type."""
    if mine.shape != theirs.shape:
        return f"has shape {list(theirs.shape)}, expected {list(mine.shape)}", NEVER
    with np.errstate(all="ignore"):
        rounded = mine.astype(theirs.dtype, copy=False) if mine.dtype.kind != "O" else mine
    seen = measure(rounded, theirs, tolerance)
    metrics = seen.metrics
    if metrics is None or metrics.num_different == 0:
        return "", 0.0
    if metrics.max_abs_diff is None:
        return f"differs: {seen.reason}", seen.excess
    count = f"{metrics.num_different} of {metrics.num_elements} values"
    share = (
        f", {metrics.max_abs_diff / metrics.max_abs_reference:.2g} of its largest" if metrics.max_abs_reference else ""
    )
    return f"differs in {count} by up to {metrics.max_abs_diff:.4g}{share}", seen.excess


def _before_lossless(wiring: Wiring, value: str) -> str:
    """The value that `value` is an exact copy of: casts to FP32 and copies seen through."""
    while value in wiring.producer:
        node = wiring.nodes[wiring.producer[value]]
        to = next((attribute.i for attribute in node.attribute if attribute.name == "to"), 0)
        if node.op_type != "Identity" and not (node.op_type == "Cast" and to in _TO_WIDE):
            break
        value = node.input[0]
    return value


def _changes(models: _Models, place: int) -> list[str]:
    """How the counterpart of a node is not what the reference has, as far as the two can be laid side by side."""
    if place not in models.pairs.nodes:
        return []
    node, other = models.reference.nodes[place], models.candidate.nodes[models.pairs.nodes[place]]
    found = list(_node_changes(node, other))
    if len(node.input) != len(other.input):
        found.append(f"reads {len(other.input)} operands, expected {len(node.input)}")
    for name, given in zip(node.input, other.input, strict=False):
        found += _operand_changes(models, name, given)
    for name in node.output:
        passed = models.pairs.values.get(name)
        if passed is not None and passed not in other.output and passed in models.candidate.producer:
            found.append(f"what it gives comes through {_last_node(models.candidate, passed)}")
    return found


def _node_changes(node: NodeProto, other: NodeProto) -> Iterator[str]:
    if (node.domain, node.op_type) != (other.domain, other.op_type):
        yield f"is {other.op_type}, expected {node.op_type}"
        return
    mine, theirs = attributes_of(node), attributes_of(other)
    for name in sorted({*mine, *theirs}):
        if mine.get(name) != theirs.get(name):
            inside = [
                change for pair in zip(bodies(node), bodies(other), strict=False) for change in _body_changes(*pair)
            ]
            yield from inside or [f"{name} is {_attribute_text(other, name)}, expected {_attribute_text(node, name)}"]


def _body_changes(body: Any, other: Any) -> Iterator[str]:
    """Of the nodes of two bodies that stand in one place."""
    for mine, theirs in zip(body.initializer, other.initializer, strict=False):
        if mine.SerializeToString(deterministic=True) != theirs.SerializeToString(deterministic=True):
            yield f"constant '{mine.name}' inside differs"
    for mine, theirs in zip(body.node, other.node, strict=False):
        changes = [*_node_changes(mine, theirs)]
        if list(mine.input) != list(theirs.input):
            changes.append(f"reads {', '.join(theirs.input)}, expected {', '.join(mine.input)}")
        yield from (f"node '{mine.name or mine.op_type}' inside: {change}" for change in changes)


def _attribute_text(node: NodeProto, name: str) -> str:
    attribute = next((attribute for attribute in node.attribute if attribute.name == name), None)
    if attribute is None:
        return "not given"
    if attribute.HasField("t") or attribute.HasField("g"):
        return "another one"
    return str(helper.get_attribute_value(attribute))[:100]


def _operand_changes(models: _Models, name: str, given: str) -> Iterator[str]:
    """Of one operand of the reference and what stands in its place."""
    wiring, candidate, expected = models.reference, models.candidate, models.pairs.values.get(name)
    source = given if given == expected else _before_lossless(candidate, given)
    if name in wiring.constants:
        if (name, source) in models.constants:
            yield models.constants[name, source].summary
        elif source in candidate.constants:
            mine, theirs = wiring.constants[name].data_type, candidate.constants[source].data_type
            if mine != theirs:
                yield f"constant '{name}' is {TensorProto.DataType.Name(theirs).lower()}"
        else:
            yield f"constant '{name}' comes through {_last_node(candidate, source)}"
    elif expected is not None and source != expected:
        is_behind = seen_through(candidate, source) == seen_through(candidate, expected)
        yield (
            f"reads '{name}' through {_last_node(candidate, source)}" if is_behind else f"reads '{given}' for '{name}'"
        )


def _last_node(wiring: Wiring, value: str) -> str:
    if value not in wiring.producer:
        return f"'{value}'"
    place = wiring.producer[value]
    return f"{wiring.nodes[place].op_type} '{wiring.names[place]}'"


@dataclass(slots=True, eq=False)
class _Parting:
    """A node at fault, and where its difference was seen.

    Attributes:
        seen_at: the node whose result left the tolerance.
        also: nodes that may be at fault as well.
        stops: why the candidate stops.
        reaches: wrong outputs.
    """

    node: int
    seen_at: int
    also: tuple[int, ...]
    stops: str
    reaches: frozenset[str]


class _Run:
    """The verdict on one run of both models."""

    def __init__(self, models: _Models, steps: Steps) -> None:
        self.models = models
        self.steps = steps
        self.wiring = models.reference

    def is_wrong(self, name: str) -> bool:
        """Whether a value left its tolerance or is missing."""
        return name in self.steps.missing or (name in self.steps.seen and self.steps.seen[name].is_outside)

    def is_compared(self, name: str) -> bool:
        """Whether a value has a counterpart that could be compared."""
        return name in self.steps.seen or name in self.steps.missing

    def partings(self) -> Iterator[_Parting]:
        """Every node that goes wrong though nothing before it is."""
        for place, node in enumerate(self.wiring.nodes):
            wrong = [name for name in node.output if self.is_wrong(name)]
            if not wrong:
                continue
            before, between = self._before(place)
            if any(self.is_wrong(name) for name in before):
                continue
            is_missing = all(name in self.steps.missing for name in wrong)
            stops = self._stop(wrong[0]) if is_missing else ""
            reaches = self._reached(place)
            for at_fault in sorted(self._at_fault(place)):
                also = [other for other in between if other != at_fault]
                yield _Parting(at_fault, place, tuple(sorted(also)), stops, reaches)

    def _before(self, place: int) -> tuple[list[str], set[int]]:
        """The nearest compared values before a node, and the nodes between these and it."""
        todo, before, between = list(self.wiring.reads[place]), dict[str, None](), set[int]()
        while todo:
            name = todo.pop()
            if self.is_compared(name):
                before[name] = None
            elif name in self.wiring.producer and self.wiring.producer[name] not in between:
                between.add(self.wiring.producer[name])
                todo += self.wiring.reads[self.wiring.producer[name]]
        return list(before), between

    def _at_fault(self, place: int) -> set[int]:
        """A node that differs itself, or, if it only passes on a difference, those that it has it from."""
        todo, looked_at, found = [place], set[int](), set[int]()
        while todo:
            place = todo.pop()
            looked_at.add(place)
            before, between = self._before(place)
            different = [name for name in before if name in self.steps.seen and not self.steps.seen[name].is_same]
            if self.changes(place):
                found.add(place)
            elif between:
                found.add(max(between))
            elif different:
                todo += {self.wiring.producer[name] for name in different} - looked_at
            else:
                found.add(place)
        return found

    def _other_types(self, place: int) -> list[str]:
        """Types of what the counterpart gives, where they are others."""
        found = [self.steps.seen.get(name) for name in self.wiring.nodes[place].output]
        return [seen.metrics.candidate_dtype for seen in found if seen and seen.metrics and not seen.has_own_type]

    def _stop(self, name: str) -> str:
        """Why the candidate does not come to a value."""
        places = self.candidate_nodes([name])
        return next((self.steps.stopped[place] for place in places if place in self.steps.stopped), "it is never run")

    def candidate_nodes(self, names: Iterable[str]) -> list[int]:
        """Nodes of the candidate that compute the counterparts of values from other values with a counterpart."""
        pairs, wiring = self.models.pairs, self.models.candidate
        todo, found = [pairs.values[name] for name in names if name in pairs.values], set[int]()
        while todo:
            place = wiring.producer.get(todo.pop())
            if place is not None and place not in found:
                found.add(place)
                todo += [name for name in wiring.reads[place] if name not in pairs.taken]
        return sorted(found)

    def _reached(self, place: int) -> frozenset[str]:
        """Wrong outputs of the model that a node's wrong values lead to."""
        todo, seen, reached = [place], {place}, set[str]()
        while todo:
            for name in self.wiring.nodes[todo.pop()].output:
                if self.is_compared(name) and not self.is_wrong(name):
                    continue
                if name in self.wiring.outputs and self.is_wrong(name):
                    reached.add(name)
                todo += [reader for reader in self.wiring.readers.get(name, ()) if reader not in seen]
                seen.update(self.wiring.readers.get(name, ()))
        return frozenset(reached)

    def changes(self, place: int) -> tuple[str, ...]:
        """How the counterpart of a node is not what the reference has."""
        types = dict.fromkeys(f"gives {dtype}" for dtype in self._other_types(place))
        return (*_changes(self.models, place), *types)


def _report(models: _Models, runs: Mapping[str, Steps]) -> BisectReport:
    wiring = models.reference
    culprits = _culprits(models, runs)
    values = [name for name in wiring.producer if name]
    compared = {name for steps in runs.values() for name in steps.seen}
    wrong = {name for steps in runs.values() for name in wiring.outputs if _Run(models, steps).is_wrong(name)}
    return BisectReport(
        culprits=tuple(culprit for culprit in culprits if culprit.reaches),
        harmless=tuple(culprit for culprit in culprits if not culprit.reaches),
        worst=tuple(sorted(_outside(models, runs), key=lambda found: -found.excess)[:_MOST_WORST]),
        constants=tuple(constant for constant in models.constants.values() if constant.excess > 1),
        wrong_outputs=tuple(name for name in wiring.outputs if name in wrong),
        num_values=len(values),
        num_compared=len(compared),
        unpaired=tuple(name for name in values if name not in models.pairs.values),
        feeds=tuple(runs),
        node_names=wiring.names,
    )


def _outside(models: _Models, runs: Mapping[str, Steps]) -> Iterator[Difference]:
    """Each value that is outside its tolerance at some inputs, in topological order."""
    for name in models.reference.producer:
        found = _worst_of(models, runs, [name])
        if found is not None:
            yield found


def _worst_of(models: _Models, runs: Mapping[str, Steps], names: Iterable[str]) -> Difference | None:
    seen = [(steps.seen[name], name, feed) for feed, steps in runs.items() for name in names if name in steps.seen]
    outside = [found for found in seen if found[0].is_outside]
    if not outside:
        return None
    worst, name, feed = max(outside, key=lambda found: found[0].excess)
    place = models.reference.producer[name]
    return Difference(
        value=name,
        counterpart=models.pairs.values[name],
        node=models.reference.names[place],
        op=models.reference.nodes[place].op_type,
        feed=feed,
        excess=worst.excess,
        reason=worst.reason,
        metrics=worst.metrics,
    )


def _culprits(models: _Models, runs: Mapping[str, Steps]) -> list[Culprit]:
    """One for each node, over all inputs."""
    found: dict[int, dict[str, list[_Parting]]] = {}
    for feed, steps in runs.items():
        for parting in _Run(models, steps).partings():
            found.setdefault(parting.node, {}).setdefault(feed, []).append(parting)
    return [_culprit(models, runs, place, found[place]) for place in sorted(found)]


def _culprit(models: _Models, runs: Mapping[str, Steps], place: int, by_feed: dict[str, list[_Parting]]) -> Culprit:
    wiring = models.reference
    partings = [parting for parts in by_feed.values() for parting in parts]
    first = min(partings, key=lambda parting: parting.seen_at)
    run = _Run(models, runs[next(feed for feed, parts in by_feed.items() if first in parts)])
    difference = _worst_of(models, {feed: runs[feed] for feed in by_feed}, wiring.nodes[first.seen_at].output)
    node = wiring.nodes[place]
    reached = {name for parting in partings for name in parting.reaches}
    own = place in models.pairs.nodes
    names = node.output if own else wiring.nodes[first.seen_at].output
    others = [other for other in run.candidate_nodes(names) if own or other != models.pairs.nodes.get(first.seen_at)]
    is_large = any(_is_beyond_float16(run.steps.seen.get(name)) for name in node.output)
    readers = sorted({reader for name in node.output for reader in wiring.readers.get(name, ())}) if is_large else []
    return Culprit(
        node=wiring.names[place],
        op=node.op_type,
        candidate_nodes=tuple(models.candidate.names[other] for other in others),
        changes=run.changes(place) if own else ("nothing computes its counterpart",),
        stops=next((parting.stops for parting in partings if parting.stops), ""),
        difference=difference,
        also=tuple(wiring.names[other] for other in first.also),
        readers=tuple(wiring.names[reader] for reader in readers),
        feeds=tuple(by_feed),
        reaches=tuple(name for name in wiring.outputs if name in reached),
    )


def _is_beyond_float16(seen: Seen | None) -> bool:
    if seen is None or seen.metrics is None:
        return False
    return seen.metrics.num_candidate_not_finite > 0 or (seen.metrics.max_abs_reference or 0.0) > _LARGEST_FLOAT16


def keep_lines(report: BisectReport) -> tuple[str, ...]:
    """Entries for the spec's `precision: {keep: {fp32: [...]}}` that keep the nodes at fault as they were.

    Globs stand for several names where they match no node that is not at fault.

    Args:
        report: of a lowered model against the one it was lowered from.
    """
    culprits = report.culprits
    names = dict.fromkeys(name for c in culprits for name in (*c.also, c.node, *c.readers))
    left, globs = list(names), []
    while left:
        covered = {glob: [name for name in left if fnmatchcase(name, glob)] for glob in _globs(left)}
        exact = {glob: found for glob, found in covered.items() if _matches_only(glob, names, report.node_names)}
        best = max(exact, key=lambda glob: len(exact[glob]), default="")
        taken = exact.get(best, ())
        if len(taken) > 1:
            globs.append(best)
            left = [name for name in left if name not in taken]
        else:
            globs += left
            left = []
    return tuple(globs)


def _globs(names: Iterable[str]) -> Iterable[str]:
    """Globs that may match several of the names: those with any number in a number's place, and all below a prefix."""
    found: dict[str, None] = {}
    for name in names:
        parts = re.split(r"(\d+)", name)
        for place in range(1, len(parts), 2):
            found["".join("*" if place == other else _literal(part) for other, part in enumerate(parts))] = None
        found["".join("*" if other % 2 else _literal(part) for other, part in enumerate(parts))] = None
        for match in re.finditer(r"[/.]", name):
            found[f"{_literal(name[: match.end()])}*"] = None
    return found


def _literal(text: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", text)


def _matches_only(glob: str, names: Collection[str], all_names: Sequence[str]) -> bool:
    return all(name in names for name in all_names if fnmatchcase(name, glob))


def lines(report: BisectReport) -> list[str]:
    """The report as plain text: what is at fault and why, then the values furthest outside. Names are escaped."""
    text = [_headline(report)]
    text += [line for culprit in report.culprits for line in _culprit_lines(culprit, "at fault")]
    for culprit in report.harmless[:_MOST_WORST]:
        text += _culprit_lines(culprit, "differs, reaches no output")
    text += [f"  {constant.summary}; read by {', '.join(constant.readers)}" for constant in report.constants]
    if report.worst:
        text.append("  furthest outside:")
    for found in report.worst:
        text.append(f"    {found.value} ({found.op} '{found.node}'), {found.feed}: {found.reason}")
    if report.unpaired:
        shown = ", ".join(report.unpaired[:_MOST_WORST])
        more = f" and {len(report.unpaired) - _MOST_WORST} more" if len(report.unpaired) > _MOST_WORST else ""
        text.append(f"  not compared, without a counterpart: {shown}{more}")
    return [printable(line) for line in text]


def _headline(report: BisectReport) -> str:
    where = f"{report.num_compared} of {report.num_values} values compared at {len(report.feeds)} inputs"
    if not report.wrong_outputs:
        return f"every output is within tolerance; {where}"
    count = len(report.culprits)
    return f"{', '.join(report.wrong_outputs)} left tolerance at {count} node{'' if count == 1 else 's'}; {where}"


def _culprit_lines(culprit: Culprit, word: str) -> Iterator[str]:
    yield f"  {word}: {culprit.op} '{culprit.node}' at {', '.join(culprit.feeds)}"
    yield from (f"    {change}" for change in culprit.changes)
    if culprit.stops:
        yield f"    the candidate stops: {culprit.stops}"
    if culprit.difference:
        yield f"    {culprit.difference.value}: {culprit.difference.reason}"
    if culprit.also:
        yield f"    or, as nothing between is paired: {', '.join(culprit.also)}"
