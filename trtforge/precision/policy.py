"""Which nodes stay FP32, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from onnx import TensorProto, numpy_helper

from trtforge.errors import Problem, SpecError, closest, raise_any
from trtforge.precision.network import FLOAT, Network, Unit, Value, attribute
from trtforge.precision.weights import LARGEST, Constant, LowType, describe
from trtforge.types import Range

WEIGHTED = frozenset(
    ["Attention", "Conv", "ConvTranspose", "DeformConv", "Einsum", "GRU", "Gemm", "LSTM", "MatMul", "RNN"]
)
"""Operators whose work a lower type is asked for; they never stay FP32 to save a cast."""

QDQ = frozenset({"DequantizeLinear", "QuantizeLinear"})

SMALLEST_NORMAL: dict[LowType, float] = {"float16": 2.0**-14, "bfloat16": 2.0**-126}
"""Below it precision is lost bit by bit; float16 has nothing but zero below 2^-25.

Source: IEEE 754-2019 binary16; bfloat16 has binary32's exponent and 7 fraction bits.
"""

_MARGIN = 4.0
"""Data seen in calibration may be this many times larger in use."""

_MOST_LOSS: dict[LowType, float] = {"float16": 1e-3, "bfloat16": 8e-3}
"""Weights that lose more than this share of their norm have sunk below the normal range.

Rounding alone loses at most 2^-11 (float16) or 2^-8 (bfloat16).
"""

_LONGEST_AXIS = 1024
"""More terms than this in a sum or mean, and FP32 holds it. float16 counts exactly to 2048; half of it leaves a bit."""

_MOST_EXACT_INTEGER: dict[LowType, int] = {"float16": 2048, "bfloat16": 256}
"""Integers up to it are exact. Source: 2 to the number of significant bits, 11 and 8."""

_NORMS = frozenset(
    [
        "GroupNormalization",
        "InstanceNormalization",
        "LRN",
        "LayerNormalization",
        "LpNormalization",
        "MeanVarianceNormalization",
        "RMSNormalization",
        "ReduceL2",
        "ReduceSumSquare",
    ]
)
_SUMS = frozenset(["GlobalLpPool", "LpPool", "Mean", "ReduceL1", "ReduceMean", "ReduceSum", "Sum"])
_POLICY = {
    **dict.fromkeys(_NORMS, "sums squares"),
    **dict.fromkeys(["Softmax", "LogSoftmax", "ReduceLogSum", "ReduceLogSumExp"], "sums exponentials"),
    **dict.fromkeys(["CumSum", "CumProd", "ReduceProd"], "accumulates over an axis"),
    **dict.fromkeys(["Exp", "Log", "Reciprocal", "Tan", "Sinh", "Cosh"], "magnifies rounding errors"),
    **dict.fromkeys(["Sin", "Cos"], "reads angles, often positions that float16 does not tell apart"),
    **dict.fromkeys(["Det", "DFT", "STFT", "MelWeightMatrix"], "magnifies rounding errors"),
    **dict.fromkeys(
        ["NonMaxSuppression", "RoiAlign", "MaxRoiPool", "GridSample", "AffineGrid"], "works on coordinates"
    ),
    **dict.fromkeys(["Range"], "counts"),
    **dict.fromkeys(["Bernoulli", "Multinomial", "RandomNormalLike", "RandomUniformLike"], "draws at random"),
}
"""Operator -> what makes a lower type risky.

Source: TensorRT's warning "Running layernorm after self-attention in FP16 may cause overflow"; NVIDIA ModelOpt AutoCast;
PyTorch autocast's list of operators that run in float32.
"""

_UNBUILDABLE: dict[LowType, frozenset[str]] = {"bfloat16": frozenset({"ConvTranspose"})}
"""Source: TensorRT-RTX 1.7 stops at each ("Could not infer output types for operation: deconv")."""

_MOVERS = frozenset(
    [
        "Cast",
        "Clip",
        "Compress",
        "Concat",
        "DepthToSpace",
        "Dropout",
        "Expand",
        "Flatten",
        "Gather",
        "GatherElements",
        "GatherND",
        "Identity",
        "If",
        "Loop",
        "Pad",
        "Reshape",
        "Resize",
        "ReverseSequence",
        "Scan",
        "ScatterElements",
        "ScatterND",
        "Slice",
        "SpaceToDepth",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Trilu",
        "Unsqueeze",
        "Upsample",
        "Where",
    ]
)
_ARITHMETIC = frozenset(["Abs", "Add", "Div", "Max", "Mean", "Min", "Mod", "Mul", "Neg", "Sub", "Sum"])
_FUNCTIONS = frozenset(["Ceil", "Exp", "Floor", "Log", "Pow", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sqrt"])
_COMPARISONS = frozenset(
    ["And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or", "Xor"]
)
_REDUCTIONS = frozenset(
    ["GlobalAveragePool", "ReduceL1", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"]
)
_UNTIL_ROOT = _MOVERS | _ARITHMETIC | _REDUCTIONS | {"GlobalAveragePool"}
_TO_INTEGERS = _MOVERS | _ARITHMETIC | _FUNCTIONS | {"Range"}
_TO_CONDITIONS = _TO_INTEGERS | _COMPARISONS | _REDUCTIONS
_ADDITIVE = {
    "Add": frozenset({0, 1}),
    "Clip": frozenset({1, 2}),
    "Max": frozenset({0, 1}),
    "Min": frozenset({0, 1}),
    "BatchNormalization": frozenset({2, 3, 4}),
    "Conv": frozenset({2}),
    "ConvTranspose": frozenset({2}),
    "GRU": frozenset({3, 5}),
    "Gemm": frozenset({2}),
    "LSTM": frozenset({3, 5, 6, 7}),
    "RNN": frozenset({3, 5}),
    "Sub": frozenset({0, 1}),
}
"""Operands that are added to something larger, so that small values in them may vanish."""

_FRACTIONAL = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
_BOOL = TensorProto.BOOL
_BYTES = (TensorProto.UINT8, TensorProto.INT8)

_WITHIN_ONE = frozenset(["Sigmoid", "Softmax", "Tanh"])
"""Operators whose results are from -1 to 1, or NaN."""

_GUARDED = frozenset(["Add", "Clip", "Max", "Sub"])
"""Operators that keep a number away from zero."""

_SATURATING = {"Clip": frozenset({1, 2})}
"""Bounds that may become the largest value: what they let through is the same."""

Reasons = dict[Unit, str]


@dataclass(frozen=True, slots=True)
class KeepRules:
    """Globs on node names of what stays FP32, as in the spec's `keep`."""

    patterns: tuple[str, ...] = ()


def reasons_for_float(
    network: Network,
    dtype: LowType,
    keep: KeepRules,
    ranges: Mapping[str, Range],
    folder: Path | None = None,
    boundary: Iterable[Unit] = (),
) -> Reasons:
    """Unit -> why it stays FP32, for all units that must.

    Args:
        network: the model.
        dtype: the lower type.
        keep: globs on node names.
        ranges: value name -> range seen in data; values without one are judged by structure alone.
        folder: where external weights lie.
        boundary: further units that only ranges are asked about.

    Raises:
        SeveralErrors: globs that match no node, each with the closest name.
    """
    units = [unit for unit in network.units if unit.concerns_floats]
    constants = _Constants(dtype, folder)
    rules: tuple[Callable[[], Iterable[tuple[Unit, str]]], ...] = (
        lambda: kept(network, keep),
        lambda: ((unit, unit.obstacle) for unit in units if unit.obstacle),
        lambda: ((unit, reason) for unit in units if (reason := _policy(unit, dtype))),
        lambda: _norm_chains(network, constants),
        lambda: _softmax_chains(units),
        lambda: _exact_results(network),
        lambda: _masks(units, constants),
        lambda: ((unit, reason) for unit in units if (reason := _constant_reason(unit, dtype, constants))),
        lambda: ((unit, reason) for unit in (*units, *boundary) if (reason := _range_reason(unit, dtype, ranges))),
        lambda: ((unit, reason) for unit in units if (reason := _integer_reason(unit, dtype, ranges))),
    )
    found: Reasons = {}
    for rule in rules:
        for unit, reason in rule():
            if unit.concerns_floats:
                found.setdefault(unit, reason)
    return found


class _Constants:
    """Descriptions of constants, each made once."""

    def __init__(self, dtype: LowType, folder: Path | None) -> None:
        self._dtype: LowType = dtype
        self._folder = folder
        self._known: dict[Value, Constant] = {}

    def of(self, value: Value | None) -> Constant | None:
        """The description of an FP32 constant, None for other values."""
        if value is None or value.tensor is None or value.element_type != FLOAT:
            return None
        if value not in self._known:
            self._known[value] = describe(value.tensor, self._dtype, self._folder)
        return self._known[value]

    def scalar(self, value: Value | None) -> float | None:
        """The number that a constant of one element is."""
        constant = self.of(value)
        return constant.low if constant and constant.size == 1 else None

    def repeated(self, unit: Unit) -> Constant | None:
        """The description of the number that a ConstantOfShape repeats."""
        fill = attribute(unit.node, "value") if unit.op == "ConstantOfShape" and unit.writes and unit.node else None
        return describe(fill.t, self._dtype, self._folder) if fill else None


def kept(network: Network, keep: KeepRules) -> Iterator[tuple[Unit, str]]:
    """Units whose nodes a glob names, each with that glob; Q/DQ nodes, which are ours, bear names made of others'.

    Raises:
        SeveralErrors: globs that match no node, each with the closest name.
    """
    nodes = [unit for unit in network.units if unit.node and unit.op not in QDQ]
    names = {unit.name for unit in nodes}
    problems = []
    for pattern in keep.patterns:
        matching = {name for name in names if name == pattern or fnmatchcase(name, pattern)}
        if not matching:
            problems.append(_unmatched(pattern, names))
        reason = f"keep '{pattern}'"
        yield from ((unit, reason) for unit in nodes if unit.name in matching)
    raise_any(problems)


def _unmatched(pattern: str, names: Iterable[str]) -> Problem:
    names = sorted(names)
    near = closest(pattern, names) or closest(pattern.strip("*"), names)
    return Problem(
        f"keep '{pattern}' matches none of the {len(names)} nodes",
        f"write '{near}', or a glob that matches it" if near else f"write a node's name, such as '{names[0]}'",
        exit_code=SpecError.exit_code,
    )


def _policy(unit: Unit, dtype: LowType) -> str:
    if unit.op in _UNBUILDABLE.get(dtype, ()):
        return f"{unit.op} cannot be built in {dtype}"
    if unit.op in _POLICY:
        return f"{unit.op} {_POLICY[unit.op]}"
    if unit.op in _SUMS and unit.op.startswith("Reduce"):
        terms = _num_terms(unit)
        if terms is None or terms > _LONGEST_AXIS:
            return f"{unit.op} adds up {terms or 'an unknown number of'} values"
    return ""


def _num_terms(unit: Unit) -> int | None:
    """How many values a reduction makes one of; None where an axis is open or the axes are computed."""
    dims = unit.reads[0].dims if unit.reads else None
    axes = _axes(unit)
    if dims is None or axes is None:
        return None
    sizes = [dims[axis] for axis in axes] if axes else list(dims)
    return None if None in sizes else math.prod(size for size in sizes if size is not None)


def _axes(unit: Unit) -> list[int] | None:
    """Axes of a reduction, an attribute or a constant operand; empty for all."""
    if unit.node is None:
        return None
    if found := attribute(unit.node, "axes"):
        return list(found.ints)
    operand = unit.operands[1] if len(unit.operands) > 1 else None
    if operand is None:
        return []
    return None if operand.tensor is None else [int(axis) for axis in numpy_helper.to_array(operand.tensor).reshape(-1)]


def _norm_chains(network: Network, constants: _Constants) -> Iterator[tuple[Unit, str]]:
    """Squares that are summed and rooted, from the subtraction of the mean to the division.

    Pow(x, 2) or Mul(x, x) -> ReduceMean -> Add(eps) -> Sqrt -> Div or Reciprocal -> Mul: LayerNorm, RMSNorm and
    magnitudes as exporters write them out. 256 squared is beyond float16, 0.0002 squared is zero in it.
    """
    for square in network.units:
        if not _is_square(square, constants):
            continue
        chain = _paths_to_root(square, constants)
        if not chain:
            continue
        reason = f"squares of a norm, from '{square.name}' on" if square.node else "squares of a norm"
        yield square, reason
        for unit in (*_before(square), *(part for link in chain for part in (link, *_before(link)))):
            yield unit, reason
        for root in chain:
            if root.op in ("Sqrt", "Pow"):
                yield from ((unit, reason) for unit in _after_root(root))


def _is_square(unit: Unit, constants: _Constants) -> bool:
    if unit.op == "Mul":
        return len(unit.operands) > 1 and unit.operands[0] is unit.operands[1]
    return unit.op == "Pow" and constants.scalar(unit.operands[1]) == 2  # noqa: PLR2004 - a square


def _paths_to_root(square: Unit, constants: _Constants) -> list[Unit]:
    """Units on the ways from a square to roots, the roots included; none if there is no root."""
    parents: dict[Unit, Unit | None] = {}
    found: dict[Unit, None] = {}
    todo: list[tuple[Unit, Unit | None]] = [(reader, None) for value in square.writes for reader in value.readers]
    while todo:
        unit, parent = todo.pop()
        if unit in parents:
            continue
        parents[unit] = parent
        if _is_root(unit, constants):
            step: Unit | None = unit
            while step is not None:
                found[step] = None
                step = parents[step]
        elif unit.op in _UNTIL_ROOT:
            todo += [(reader, unit) for value in unit.writes for reader in value.readers]
    return list(found)


def _is_root(unit: Unit, constants: _Constants) -> bool:
    return unit.op == "Sqrt" or (unit.op == "Pow" and constants.scalar(unit.operands[1]) in (0.5, -0.5))


def _before(unit: Unit) -> Iterator[Unit]:
    """The subtraction of the mean that `unit` reads, and the mean."""
    todo = [value.producer for value in unit.reads if value.producer]
    seen: set[Unit] = set()
    while todo:
        before = todo.pop()
        if before in seen or before.op not in ("Sub", *_REDUCTIONS):
            continue
        seen.add(before)
        yield before
        if before.op == "Sub":
            todo += [value.producer for value in before.reads if value.producer]


def _after_root(root: Unit) -> Iterator[Unit]:
    for reader in (reader for value in root.writes for reader in value.readers):
        if reader.op == "Div":
            yield reader
        elif reader.op == "Reciprocal":
            yield reader
            yield from (last for value in reader.writes for last in value.readers if last.op == "Mul")
    if root.op == "Pow":
        yield from (last for value in root.writes for last in value.readers if last.op == "Mul")


def _softmax_chains(units: Iterable[Unit]) -> Iterator[tuple[Unit, str]]:
    """Softmax as exporters write it out: Sub(ReduceMax) -> Exp -> ReduceSum -> Div."""
    for unit in units:
        if unit.op != "Exp":
            continue
        sums = [reader for value in unit.writes for reader in value.readers if reader.op == "ReduceSum"]
        if sums:
            divisions = [last for each in sums for value in each.writes for last in value.readers if last.op == "Div"]
            yield from ((part, f"softmax around '{unit.name}'") for part in (*_before(unit), *sums, *divisions))


def _exact_results(network: Network) -> Iterator[tuple[Unit, str]]:
    """What integers, sizes, coordinates and the turns of loops are computed from."""
    for unit in network.units:
        if unit.op == "Cast" and unit.results and unit.results[0].element_type not in (*_FRACTIONAL, _BOOL, 0):
            yield from _upstream(unit.operands[:1], _TO_INTEGERS, f"'{unit.name}' makes integers of it")
        elif unit.op == "Range":
            yield from _upstream(unit.operands, _TO_INTEGERS, f"'{unit.name}' counts with it")
        elif unit.op in ("Resize", "Upsample"):
            yield from _upstream(unit.operands[1:], _TO_INTEGERS, f"'{unit.name}' takes sizes from it")
        elif unit.op == "NonMaxSuppression":
            yield from _upstream(unit.operands, _TO_INTEGERS, f"'{unit.name}' compares boxes made from it")
    for owner, condition in network.conditions:
        yield from _upstream([condition], _TO_CONDITIONS, f"'{owner}' decides by it what it does")


def _upstream(values: Iterable[Value | None], through: frozenset[str], reason: str) -> Iterator[tuple[Unit, str]]:
    todo = [value for value in values if value]
    seen = set(todo)
    while todo:
        unit = todo.pop().producer
        if unit is None or unit.op not in through:
            continue
        yield unit, reason
        new = {value for value in unit.operands if value} - seen
        seen |= new
        todo += new


def _masks(units: Iterable[Unit], constants: _Constants) -> Iterator[tuple[Unit, str]]:
    """Readers of constants beyond the type, and of what these make, up to the function that bounds it."""
    todo: list[tuple[Unit, str]] = []
    for unit in units:
        found = [constant for _, constant in _judged(unit, constants, _SATURATING)]
        constant = next((c for c in (*found, constants.repeated(unit)) if c and c.overflows), None)
        if constant is not None:
            worst = constant.low if abs(constant.low) >= abs(constant.high) else constant.high
            todo.append((unit, f"a constant as large as {worst:.3g}"))
    seen: set[Unit] = set()
    while todo:
        unit, reason = todo.pop()
        if unit in seen:
            continue
        seen.add(unit)
        yield unit, reason
        if unit.op in _MOVERS | _ARITHMETIC | {"ConstantOfShape"}:
            further = reason if reason.endswith("before it") else f"{reason} before it"
            todo += [(reader, further) for value in unit.writes for reader in value.readers]


def _judged(unit: Unit, constants: _Constants, besides: Mapping[str, frozenset[int]]) -> Iterator[tuple[int, Constant]]:
    skipped = besides.get(unit.op, frozenset())
    for position in sorted(unit.typed - skipped):
        constant = constants.of(unit.operands[position])
        if constant:
            yield position, constant


def _constant_reason(unit: Unit, dtype: LowType, constants: _Constants) -> str:
    for position, constant in _judged(unit, constants, {}):
        if constant.overflows:
            continue  # a mask, judged before, or a bound that may saturate
        is_tiny = 0 < constant.absmax < SMALLEST_NORMAL[dtype]
        if (
            is_tiny
            and unit.op in _GUARDED
            and any(_is_guard(reader) for value in unit.writes for reader in value.readers)
        ):
            return f"the constant {constant.absmax:.3g} keeps from a division by zero, below {dtype}'s normal range"
        # The scales of quantized tensors lie in the lower type already, so that small ones lose nothing.
        vanishes = (is_tiny and unit.op not in QDQ) or constant.loss > _MOST_LOSS[dtype]
        if vanishes and position not in _ADDITIVE.get(unit.op, ()):
            what = f"constant {constant.low:.3g}" if constant.size == 1 else f"weights '{_name(unit, position)}'"
            return f"the {what} would lose {constant.loss:.2g} of its norm in {dtype}"
    return ""


def _is_guard(unit: Unit) -> bool:
    return unit.op in ("Sqrt", "Log", "Reciprocal", "Div", "Pow")


def _name(unit: Unit, position: int) -> str:
    value = unit.operands[position]
    return value.name if value else ""


def _range_reason(unit: Unit, dtype: LowType, ranges: Mapping[str, Range]) -> str:
    limit = LARGEST[dtype] / _MARGIN
    for value in (*unit.reads, *unit.writes):
        seen = ranges.get(value.name) if value.tensor is None else None
        if seen is None:
            continue
        if not seen.finite and value.producer and value.producer.op in _WITHIN_ONE:
            continue  # NaN, as where a mask leaves nothing to attend to, and every type has it
        if not seen.finite:
            return f"'{value.name}' is not finite in the data"
        if seen.absmax > limit:
            return (
                f"'{value.name}' reaches {seen.absmax:.4g}; {dtype} holds {LARGEST[dtype]:.4g}, a quarter of it is safe"
            )
        if 0 < seen.absmax < SMALLEST_NORMAL[dtype]:
            return f"'{value.name}' stays within {seen.absmax:.3g}, below {dtype}'s normal range"
    return ""


def _integer_reason(unit: Unit, dtype: LowType, ranges: Mapping[str, Range]) -> str:
    """A Cast makes floats of integers: masks and bytes may be lowered, positions and sizes may not."""
    if unit.op != "Cast" or not unit.writes or unit.operands[0] is None:
        return ""
    source = unit.operands[0]
    if source.element_type in (*_FRACTIONAL, _BOOL, *_BYTES):
        return ""
    most = _MOST_EXACT_INTEGER[dtype]
    if any(before.op in ("Shape", "Size") for before, _ in _upstream([source], _TO_INTEGERS | {"Shape", "Size"}, "")):
        return f"sizes of tensors; {dtype} counts exactly to {most}"
    seen = ranges.get(unit.results[0].name)
    if seen is None:
        return f"integers of unknown size; {dtype} counts exactly to {most}"
    return "" if seen.absmax <= most else f"integers up to {seen.absmax:.6g}; {dtype} counts exactly to {most}"
