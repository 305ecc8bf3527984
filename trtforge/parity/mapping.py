"""Which value of one model is which value of another that was made from it."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from onnx import NodeProto, TensorProto

from trtforge.errors import Problem, SpecError, closest, raise_any
from trtforge.wiring import Wiring

_PASSING = frozenset({"Cast", "DequantizeLinear", "Identity", "QuantizeLinear"})
"""Operators that give what they read, but for its type or rounding."""
_PREFIXES = ("InsertedPrecisionFreeCast_",)
_SUFFIXES = (
    "_DequantizeLinear_Output",
    "_QuantizeLinear_Input",
    "_bfloat16",
    "_cast_to_fp16",
    "_cast_to_fp32",
    "_cast",
    "_float16",
    "_float32",
    "_fp16",
    "_fp32",
    ":exact",
)
"""What transformations put around the name of a value that they keep.

Source: trtforge's own lowering (`_float16`, `_bfloat16`, `_float32`, `:exact`); onnxruntime.quantization
(`_DequantizeLinear_Output`, `_QuantizeLinear_Input`) and onnxruntime.transformers.float16
(`InsertedPrecisionFreeCast_`); NVIDIA ModelOpt AutoCast (`_cast_to_fp16`, `_cast_to_fp32`).
"""
_LEAST_TRUSTED = 0.5


@dataclass(slots=True)
class Pairs:
    """Values and nodes of two models that belong together, one to one.

    Attributes:
        values: value of the reference -> value of the candidate. Inputs and values that nodes give; of the candidate
            also constants.
        taken: the values of `values`.
        nodes: position in the reference -> position in the candidate.
    """

    values: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    nodes: dict[int, int] = field(default_factory=dict)

    def add(self, value: str, other: str) -> bool:
        """Notes a pair unless one of the two has a partner; says whether it did."""
        if value in self.values or other in self.taken:
            return False
        self.values[value] = other
        self.taken.add(other)
        return True


def map_values(reference: Wiring, candidate: Wiring, given: Mapping[str, str]) -> Pairs:
    """Pairs the values of two models.

    In this order: `given`; inputs and outputs, by name, then by place; equal names, unless names mean something else in
    the candidate, as numbered ones do after an insertion; names that a transformation put something around; then, until
    nothing is added, results of equal operators with paired operands, and operands of equal operators with paired
    results.

    Args:
        reference: the model before.
        candidate: the model after.
        given: value of the reference -> value of the candidate, where someone knows better.

    Raises:
        SeveralErrors: of `SpecError` problems, one for each name in `given` that the models lack.
    """
    raise_any([*_unknown(given, reference), *_unknown(given.values(), candidate)])
    pairs = Pairs()
    for value, other in given.items():
        pairs.add(value, other)
    for names, others in ((reference.inputs, candidate.inputs), (reference.outputs, candidate.outputs)):
        _pair_ends(names, others, pairs)
    _pair_equal_names(reference, candidate, pairs)
    _pair_decorated_names(reference, candidate, pairs)
    _pair_alike(reference, candidate, pairs)
    _pair_nodes(reference, candidate, pairs)
    return pairs


def _unknown(names: Iterable[str], wiring: Wiring) -> Iterator[Problem]:
    known = {*wiring.inputs, *wiring.producer, *wiring.constants}
    for name in names:
        if name not in known:
            meant = closest(name, known)
            yield Problem(
                f"'{name}' is no value of {wiring.label}",
                f"rename it to '{meant}'" if meant else f"remove '{name}' from the mapping",
                exit_code=SpecError.exit_code,
            )


def _pair_ends(names: tuple[str, ...], others: tuple[str, ...], pairs: Pairs) -> None:
    for name in names:
        if name in others:
            pairs.add(name, name)
    if len(names) == len(others):
        for name, other in zip(names, others, strict=True):
            pairs.add(name, other)


def seen_through(wiring: Wiring, value: str) -> str:
    """The value that `value` is a cast, quantized or plain copy of."""
    while value in wiring.producer:
        node = wiring.nodes[wiring.producer[value]]
        if node.op_type not in _PASSING or node.domain not in ("", "ai.onnx"):
            break
        value = node.input[0]
    return value


def _maker(wiring: Wiring, value: str, op_type: str) -> int | None:
    """The node that gives a value: itself, or behind casts and copies unless it is one of these that is looked for."""
    place = wiring.producer.get(value)
    if place is None or wiring.nodes[place].op_type == op_type:
        return place
    return wiring.producer.get(seen_through(wiring, value), place)


def _pair_equal_names(reference: Wiring, candidate: Wiring, pairs: Pairs) -> None:
    names = [name for name in reference.producer if name in candidate.producer and name not in pairs.values]
    alike = [name for name in names if _is_alike(reference, candidate, name)]
    folded = [name for name in reference.producer if name in candidate.constants]
    if len(alike) < _LEAST_TRUSTED * len(names):
        return
    for name in (*alike, *folded):
        pairs.add(name, name)


def _is_alike(reference: Wiring, candidate: Wiring, name: str) -> bool:
    """Whether a name means the same in both: given by one operator, or made into the same values."""
    node = reference.nodes[reference.producer[name]]
    place = _maker(candidate, name, node.op_type)
    assert place is not None  # noqa: S101 - the name is one of the candidate's own
    if node.op_type == candidate.nodes[place].op_type:
        return True
    return _readers(reference, name) == _readers(candidate, name) != []


def _readers(wiring: Wiring, name: str) -> list[tuple[str, ...]]:
    nodes = [wiring.nodes[place] for place in wiring.readers.get(name, ())]
    return [(node.op_type, *node.input, "", *node.output) for node in nodes]


def _pair_decorated_names(reference: Wiring, candidate: Wiring, pairs: Pairs) -> None:
    mine, theirs = defaultdict(list), defaultdict(list)
    for name in reference.producer:
        if name not in pairs.values:
            mine[_stem(name)].append(name)
    for name in candidate.producer:
        if name not in pairs.taken:
            theirs[_stem(name)].append(name)
    for stem, names in mine.items():
        if len(names) == len(theirs.get(stem, ())) == 1 and names != theirs[stem]:
            node = reference.nodes[reference.producer[names[0]]]
            place = _maker(candidate, theirs[stem][0], node.op_type)
            if place is not None and candidate.nodes[place].op_type == node.op_type:
                pairs.add(names[0], theirs[stem][0])


def _stem(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    for suffix in _SUFFIXES:
        if name.endswith(suffix) and name != suffix:
            return name.removesuffix(suffix)
    return name


@dataclass(frozen=True, slots=True, eq=False)
class _Operands:
    """Names of operands that are equal wherever the operands are. Constants of one shape count as equal."""

    reference: Wiring
    candidate: Wiring
    pairs: Pairs
    digests: dict[tuple[bool, str], bytes] = field(default_factory=dict)

    def of_reference(self, node: NodeProto) -> tuple[str, ...] | None:
        """None while an operand has no partner."""
        found = []
        for name in node.input:
            if name in self.reference.constants:
                found.append(_constant_name(self.reference.constants[name]))
            elif not name or name in self.pairs.values:
                found.append(self.pairs.values.get(name, name))
            else:
                return None
        return tuple(found)

    def of_candidate(self, node: NodeProto) -> tuple[str, ...]:
        """Values that casts and copies are made of stand for these, unless they have a partner themselves."""
        return tuple(self._of_candidate(name) for name in node.input)

    def _of_candidate(self, name: str) -> str:
        if name in self.pairs.taken:
            return name
        if name in self.candidate.constants:
            return _constant_name(self.candidate.constants[name])
        return self.behind(name)

    def behind(self, name: str) -> str:
        """The paired value that `name` of the candidate is, or is a cast or copy of."""
        return name if name in self.pairs.taken else seen_through(self.candidate, name)

    def num_other_constants(self, node: NodeProto, other: NodeProto) -> int:
        """In how many places the two read constants of other values."""
        return sum(
            self._digest(name, is_mine=True) != self._digest(theirs, is_mine=False)
            for name, theirs in zip(node.input, other.input, strict=True)
            if name in self.reference.constants and theirs in self.candidate.constants
        )

    def _digest(self, name: str, *, is_mine: bool) -> bytes:
        key = (is_mine, name)
        if key not in self.digests:
            wiring = self.reference if is_mine else self.candidate
            plain = TensorProto()
            plain.CopyFrom(wiring.constants[name])
            plain.name = plain.doc_string = ""
            self.digests[key] = hashlib.sha256(plain.SerializeToString(deterministic=True)).digest()
        return self.digests[key]


def _constant_name(tensor: TensorProto) -> str:
    return f"constant {list(tensor.dims)}"


def _pair_alike(reference: Wiring, candidate: Wiring, pairs: Pairs) -> None:
    operands = _Operands(reference, candidate, pairs)
    num_before = -1
    while len(pairs.values) > num_before and any(name not in pairs.values for name in reference.producer):
        num_before = len(pairs.values)
        _pair_forwards(operands)
        _pair_backwards(operands)


def _pair_forwards(operands: _Operands) -> None:
    """Pairs results of nodes with one operator and paired operands; with several, those most like it."""
    candidate, pairs = operands.candidate, operands.pairs
    for node in operands.reference.nodes:
        found = operands.of_reference(node)
        if found is None or all(name in pairs.values for name in node.output if name):
            continue
        others = [
            other
            for other in _readers_of(candidate, found, node)
            if operands.of_candidate(other) == found and pairs.taken.isdisjoint(other.output)
        ]
        if len(others) > 1:
            attributes = attributes_of(node)
            others.sort(
                key=lambda other: (operands.num_other_constants(node, other), attributes_of(other) != attributes)
            )
        if others:
            _pair_results(node, others[0], pairs)


def _readers_of(candidate: Wiring, found: tuple[str, ...], node: NodeProto) -> list[NodeProto]:
    """Nodes of the operator that read the first paired value, at first hand or through casts and copies."""
    start = next((name for name in found if name in candidate.readers or name in candidate.inputs), None)
    if start is None:
        return []
    todo, places = [start], dict[int, None]()
    while todo:
        for place in candidate.readers.get(todo.pop(), ()):
            if place not in places:
                places[place] = None
                if candidate.nodes[place].op_type in _PASSING:
                    todo += candidate.nodes[place].output
    nodes = [candidate.nodes[place] for place in sorted(places)]
    return [other for other in nodes if (other.op_type, other.domain) == (node.op_type, node.domain)]


def _pair_results(node: NodeProto, other: NodeProto, pairs: Pairs) -> None:
    for name, theirs in zip(node.output, other.output, strict=False):
        if name and theirs:
            pairs.add(name, theirs)


def _pair_backwards(operands: _Operands) -> None:
    """Pairs operands of nodes with one operator and paired results, in each place where both read a computed value."""
    reference, candidate, pairs = operands.reference, operands.candidate, operands.pairs
    for node in reversed(reference.nodes):
        result = next((name for name in node.output if name in pairs.values), None)
        place = None if result is None else _maker(candidate, pairs.values[result], node.op_type)
        if place is None or candidate.nodes[place].op_type != node.op_type:
            continue
        other = candidate.nodes[place]
        if len(other.input) != len(node.input):
            continue
        for name, theirs in zip(node.input, other.input, strict=True):
            behind = operands.behind(theirs)
            if name in reference.producer and behind in candidate.producer and behind not in pairs.taken:
                made, making = reference.nodes[reference.producer[name]], candidate.nodes[candidate.producer[behind]]
                if made.op_type == making.op_type or len(made.input) == len(making.input):
                    pairs.add(name, behind)


def attributes_of(node: NodeProto) -> dict[str, bytes]:
    """Attribute -> its content; the order of attributes means nothing."""
    return {attribute.name: attribute.SerializeToString(deterministic=True) for attribute in node.attribute}


def _pair_nodes(reference: Wiring, candidate: Wiring, pairs: Pairs) -> None:
    """Each node of the reference with the one that gives the same values, the most of them if there are several."""
    for place, node in enumerate(reference.nodes):
        others = [_maker(candidate, pairs.values[name], node.op_type) for name in node.output if name in pairs.values]
        found = Counter(other for other in others if other is not None).most_common(1)
        if found:
            pairs.nodes[place] = found[0][0]
