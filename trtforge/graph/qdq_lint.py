"""What would make TensorRT refuse, misread or waste the Q/DQ nodes and quantized operators of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from trtforge.graph.model_file import domain_of
from trtforge.graph.quantized import (
    DEQUANTIZE,
    MOVING,
    QUANTIZE,
    WEIGHTED,
    Params,
    bias_position,
    dequantizer,
    is_weight,
    params_of,
    source_of,
)
from trtforge.graph.sites import Site, Value, constant_of, sites_of

FIRST_PER_CHANNEL_OPSET = 13
"""Source: ONNX QuantizeLinear-13, which adds `axis`."""

_TYPES = frozenset({"int8", "int4", "float8e4m3fn", "float4e2m1"})
_RANGES = {"int8": 127, "int4": 7, "float8e4m3fn": 448, "float4e2m1": 6}
"""Largest quantized magnitude.

Source: TensorRT 11.1 documentation, quantized types: INT8 [-128, 127], FP8 [-448, 448], INT4 [-8, 7], FP4 [-6, 6].
"""

_SCALE_TYPES = frozenset({"float32", "float16", "bfloat16", "float8_e8m0fnu"})
_QUANTIZED_OPERATORS = frozenset(
    {"ConvInteger", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv", "QLinearMatMul"}
)
_QUANTIZED_PREFIXES = (
    "QLinear",
    "QAttention",
    "QEmbed",
    "QGemm",
    "QMoE",
    "QOrdered",
    "DynamicQuantize",
    "MatMulInteger",
)
_QUANTIZED_CONTRIB = frozenset(
    {"ConvIntegerToFloat", "DequantizeBFP", "GatherBlockQuantized", "MatMulBnb4", "MatMulFpQ4", "MatMulNBits"}
    | {"QuantizeBFP", "QuickQuantize", "QuantizeWithOrder", "DequantizeWithOrder"}
)

_PLACE_AGAIN = "quantize the float model with precision: {type: int8} in a build spec, which places Q/DQ by these rules"
_REQUANTIZE = (
    "quantize again with symmetric int8 (onnxruntime: activation_type=weight_type=QInt8, "
    "extra_options={'ActivationSymmetric': True, 'WeightSymmetric': True, 'QuantizeBias': False})"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing a rule found.

    Attributes:
        rule: such as `QDQ01`; see `RULES`.
        severity: an error stops TensorRT, or changes numbers in silence; a warning costs speed or accuracy.
        scope: "" for the main graph, else the path of control-flow nodes, such as `n3/then_branch`.
        node, op: name and operator of the node.
        found, expected: what the node says, and what it should.
        why: what comes of it, in one clause.
        next_step: what to do where `mendable` is no.
        mendable: whether `mend` takes it away.
    """

    rule: str
    severity: Literal["error", "warning"]
    scope: str
    node: str
    op: str
    found: str
    expected: str
    why: str
    next_step: str
    mendable: bool = False


@dataclass(frozen=True, slots=True)
class _Model:
    opset: int
    folder: Path
    refused_types: Mapping[str, str]
    known: dict[Site, Params] = field(default_factory=dict)

    def params(self, site: Site) -> Params:
        """The parameters of a Q or DQ node, read once."""
        if site not in self.known:
            self.known[site] = params_of(site, self.folder)
        return self.known[site]


_Told = Iterator[Finding]


def _finding(
    rule: str,
    severity: Literal["error", "warning"],
    site: Site,
    found: str,
    expected: str,
    why: str,
    next_step: str = _PLACE_AGAIN,
) -> Finding:
    return Finding(rule, severity, site.scope, site.node.name, site.op, found, expected, why, next_step)


def findings(model: ModelProto, folder: Path, refused_types: Mapping[str, str]) -> tuple[Finding, ...]:
    """Everything that the rules find, in graph order, subgraphs after the node that holds them.

    Args:
        model: sorted, with unique node names and without local functions (`qdq_file.open_model`). Not changed.
        folder: where its external data lies.
        refused_types: quantized element type ("float8e4m3fn") -> why the backend in question does not take it.
    """
    opset = next((entry.version for entry in model.opset_import if not domain_of(entry.domain)), 0)
    about = _Model(opset, folder, refused_types)
    return tuple(found for site in sites_of(model) for rule in RULES for found in rule(site, about))


def _is_qdq(site: Site) -> bool:
    return site.op in QUANTIZE or site.op in DEQUANTIZE


def _zero_point(site: Site, about: _Model) -> _Told:
    """QDQ01. Source: TensorRT explicit quantization, "zero point must be all zeros"."""
    if not _is_qdq(site):
        return
    params = about.params(site)
    if params.zero_point is None:
        yield _finding(
            "QDQ01",
            "error",
            site,
            "a computed zero point",
            "a constant 0",
            "TensorRT reads constants here",
            _REQUANTIZE,
        )
    elif params.dtype in ("uint8", "uint16"):
        return  # QDQ02 says what there is to say
    elif (nonzero := np.flatnonzero(params.zero_point.astype(np.float32))).size:
        value = params.zero_point.reshape(-1)[nonzero[0]]
        what = "weights" if is_weight(site) else "activations"
        yield _finding(
            "QDQ01",
            "error",
            site,
            f"zero point {value} on {what}",
            "0",
            "TensorRT has symmetric quantization alone and refuses it",
            _REQUANTIZE,
        )


def _element_type(site: Site, about: _Model) -> _Told:
    """QDQ02. Source: onnx-tensorrt's QuantizeLinear importer; RTX 1.7 was seen to take uint8 as int8."""
    if not _is_qdq(site):
        return
    params = about.params(site)
    if params.dtype in about.refused_types:
        why = about.refused_types[params.dtype]
        yield _finding("QDQ02", "error", site, params.dtype, "a type the backend has", why, _REQUANTIZE)
    elif params.dtype == "uint8" and not params.has_zero_point and site.op in QUANTIZE:
        why = "ONNX reads that as uint8, TensorRT as int8"
        yield _finding("QDQ02", "error", site, "no zero point", "an int8 zero point of 0", why, _REQUANTIZE)
    elif params.dtype == "uint8":
        zero = params.zero_point
        shown = f"uint8 with zero point {zero.reshape(-1)[0]}" if zero is not None and zero.size else "uint8"
        why = "TensorRT has no unsigned quantized type: it refuses zero points other than 0 and takes 0 for int8"
        yield _finding("QDQ02", "error", site, shown, "int8 with zero point 0", why, _REQUANTIZE)
    elif params.dtype and params.dtype not in _TYPES | {"int32"}:
        why = "TensorRT quantizes to INT8, FP8 (E4M3), INT4 and FP4"
        yield _finding("QDQ02", "error", site, params.dtype, "int8", why, _REQUANTIZE)


def _bias(site: Site, about: _Model) -> _Told:
    """QDQ03 and QDQ04. Source: TensorRT, "input has type Int32 but must have type FP8, FP4, Int4, Int8, or UInt8"."""
    if site.op in DEQUANTIZE and about.params(site).dtype == "int32":
        yield _finding(
            "QDQ03",
            "error",
            site,
            "int32 input",
            "a bias left in floating point",
            "TensorRT refuses INT32 here, which is what onnxruntime makes of every bias",
            _REQUANTIZE,
        )
    position = bias_position(site)
    source = dequantizer(site.read(position)) if position else None
    if source and about.params(source).dtype != "int32":
        found = f"bias quantized by '{source.node.name}'"
        yield _finding(
            "QDQ04", "warning", site, found, "a bias in floating point", "the sum is INT32, so it gains nothing"
        )


def _scale(site: Site, about: _Model) -> _Told:
    """QDQ05. Source: TensorRT, "Scale coefficients must all be positive"; inf and 1e-30 were seen to pass."""
    if not _is_qdq(site):
        return
    params = about.params(site)
    if params.scale is None:
        yield _finding(
            "QDQ05", "error", site, "a computed scale", "a constant", "TensorRT reads scales while it parses"
        )
        return
    if params.scale.dtype.name not in _SCALE_TYPES:
        why = "ONNX forbids it"
        yield _finding("QDQ05", "error", site, f"a scale of type {params.scale.dtype}", "floating point", why)
        return
    for flaw in (*_scale_flaws(params), *_length_flaws(site, params)):
        yield _finding("QDQ05", "error", site, *flaw)


def _scale_flaws(params: Params) -> Iterator[tuple[str, str, str]]:
    """(found, expected, why) for the first bad entry of each kind."""
    assert params.scale is not None  # noqa: S101 - the caller looked
    scale = params.scale.reshape(-1)
    limits: Any = ml_dtypes.finfo(scale.dtype)  # type: ignore[no-untyped-call]
    smallest = float(limits.tiny)
    wide = scale.astype(np.float64)
    largest = float(limits.max) / _RANGES.get(params.dtype, 1)
    kinds = (
        (~np.isfinite(wide), "a finite scale", "every quantized value becomes 0 or NaN"),
        (wide == 0, "a scale above 0", "it divides by zero"),
        (wide < 0, "a scale above 0", "TensorRT refuses it"),
        ((wide > 0) & (wide < smallest), f"{smallest:.3g} or more", "a denormal is flushed to 0 on the GPU"),
        (np.isfinite(wide) & (wide > largest), f"{largest:.3g} or less", "the largest quantized value overflows"),
    )
    for bad, expected, why in kinds:
        if bad.any():
            index = int(np.argmax(bad))
            place = f" for channel {index}" if scale.size > 1 else ""
            yield f"scale {wide[index]:.6g}{place}", expected, why


def _length_flaws(site: Site, params: Params) -> Iterator[tuple[str, str, str]]:
    tensor = constant_of(site.read(0))
    if params.blocked or not params.per_channel or params.scale is None or tensor is None:
        return
    rank = len(tensor.dims)
    if params.scale.ndim != 1:
        yield f"scale of shape {list(params.scale.shape)}", "one number, or one for each channel", "ONNX forbids it"
    elif not -rank <= params.axis < rank:
        yield f"axis {params.axis}", f"an axis of {list(tensor.dims)}", "there is no such axis"
    elif (channels := tensor.dims[params.axis]) != params.scale.size:
        found = f"{params.scale.size} scales for axis {params.axis} of {list(tensor.dims)}"
        yield found, f"{channels} scales", "there must be one for each channel"


def _per_channel_activation(site: Site, about: _Model) -> _Told:
    """QDQ06. Source: TensorRT explicit quantization, "per-channel quantization is for weights"; RTX 1.7 accepts it."""
    if _is_qdq(site) and not is_weight(site) and (params := about.params(site)).per_channel and not params.blocked:
        count = params.scale.size if params.scale is not None else 0
        why = "TensorRT takes it in silence though INT8 layers have one scale for their input"
        yield _finding("QDQ06", "error", site, f"{count} scales for an activation", "one", why)


def _weight_axis(site: Site, about: _Model) -> _Told:
    """QDQ07. Source: TensorRT explicit quantization: output channels, which ConvTranspose has at axis 1."""
    if site.op not in WEIGHTED:
        return
    for position in WEIGHTED[site.op]:
        source, perms = _weight_behind(site.read(position))
        if source is None:
            continue
        params = about.params(source)
        rank = _rank(source)
        expected = _channel_axis(site, position, rank)
        if params.blocked or not params.per_channel or not rank or expected is None:
            continue
        found = _axis_after(params.axis % rank, rank, perms)
        if found != expected:
            yield _finding(
                "QDQ07",
                "error",
                site,
                f"weights scaled along axis {found} by '{source.node.name}'",
                f"axis {expected}",
                "scales that differ within one output channel cannot be taken out of its sum",
            )


def _weight_behind(value: Value | None) -> tuple[Site | None, list[list[int]]]:
    """The DQ node of constant weights before `value` and the transpositions after it; none past other operators."""
    perms: list[list[int]] = []
    while value and value.writer and value.writer.op in ("Transpose", "Identity"):
        if value.writer.op == "Transpose":
            perms.insert(0, list(value.writer.attribute("perm", [])))
        value = value.writer.read(0)
    writer = value.writer if value else None
    return (writer, perms) if writer and writer.op in DEQUANTIZE and is_weight(writer) else (None, perms)


def _axis_after(axis: int, rank: int, perms: Iterable[list[int]]) -> int:
    """Where `axis` is after `perms`, applied one after the other. Source: ONNX Transpose: without one, all axes turn."""
    for perm in perms:
        axis = rank - 1 - axis if not perm else perm.index(axis) if axis in perm else axis
    return axis


def _rank(source: Site) -> int:
    value = source_of(source.read(0))
    if value and value.writer and value.writer.op in QUANTIZE:
        value = source_of(value.writer.read(0))
    tensor = constant_of(value)
    return len(tensor.dims) if tensor is not None else 0


def _channel_axis(site: Site, position: int, rank: int) -> int | None:
    if site.op in ("Conv", "ConvTranspose"):
        return (0 if site.op == "Conv" else 1) if position == 1 else None
    if site.op == "Gemm":
        transposed = bool(site.attribute("transB" if position else "transA", 0))
        return int(transposed != bool(position))
    return rank - 1 if position else rank - 2


def _opset(site: Site, about: _Model) -> _Told:
    """QDQ08."""
    if not _is_qdq(site) or about.opset >= FIRST_PER_CHANNEL_OPSET:
        return
    has_axis = any(attribute.name == "axis" for attribute in site.node.attribute)
    if has_axis or about.params(site).per_channel:
        yield _finding(
            "QDQ08",
            "error",
            site,
            f"per-channel scales at opset {about.opset}",
            f"opset {FIRST_PER_CHANNEL_OPSET} or later",
            "the axis has no meaning before, and checkers and runtimes refuse the file",
            "export the model at opset 13 or later and quantize it again",
        )


def _quantized_operator(site: Site, _about: _Model) -> _Told:
    """QDQ09. Source: onnx-tensorrt operators.md; onnxruntime ContribOperators.md."""
    domain, name = domain_of(site.node.domain), site.node.op_type
    standard = domain == "" and name in _QUANTIZED_OPERATORS
    contributed = domain.startswith("com.microsoft") and (
        name.startswith(_QUANTIZED_PREFIXES)
        or name in _QUANTIZED_CONTRIB
        or f"{domain}.{name}" in (*QUANTIZE, *DEQUANTIZE)
    )
    if standard or contributed:
        yield _finding(
            "QDQ09",
            "error",
            site,
            site.op,
            "QuantizeLinear and DequantizeLinear around a float operator",
            "TensorRT reads no operators that compute on quantized tensors",
            "quantize again with explicit nodes (onnxruntime: quant_format=QuantFormat.QDQ)",
        )


def _lonely_quantize(site: Site, _about: _Model) -> _Told:
    """QDQ10."""
    if site.op not in QUANTIZE:
        return
    readers = list(_end_readers(site.writes[0]))
    others = [reader for reader, _ in readers if reader.op not in DEQUANTIZE and not reader.op.startswith("QLinear")]
    if others:
        found = f"integers read by '{others[0].node.name}' ({others[0].op})"
        why = "TensorRT fuses pairs; integers that anything else reads stop the build or compute in INT32"
        yield _finding("QDQ10", "error", site, found, "a DequantizeLinear behind it", why)
    elif not readers:
        why = "the engine gives or drops integers that mean nothing without their scale"
        yield _finding("QDQ10", "warning", site, "no DequantizeLinear behind it", "one", why)


def _end_readers(value: Value) -> Iterator[tuple[Site, int]]:
    """Who reads `value`, past operators that only move numbers."""
    for reader, position in value.readers:
        if reader.op in MOVING and position == 0:
            yield from _end_readers(reader.writes[0])
        else:
            yield reader, position


def _lonely_dequantize(site: Site, about: _Model) -> _Told:
    """QDQ11. A DQ of constants is a weight, or a bias that QDQ03 tells of."""
    source = source_of(site.read(0))
    if site.op not in DEQUANTIZE or source is None or constant_of(source) is not None:
        return
    if source.writer is None:
        why = "whoever calls the engine must quantize with the same scale"
        yield _finding(
            "QDQ11", "warning", site, f"integers from input '{source.name}'", "a QuantizeLinear before it", why
        )
    elif (
        source.writer.op not in QUANTIZE
        and not source.writer.op.startswith("QLinear")
        and about.params(site).dtype != "int32"
    ):
        found = f"integers from '{source.writer.node.name}' ({source.writer.op})"
        why = "TensorRT makes INT8 tensors in QuantizeLinear alone"
        yield _finding("QDQ11", "error", site, found, "a QuantizeLinear before it", why)


def _one_operand(site: Site, about: _Model) -> _Told:
    """QDQ12. Source: TensorRT explicit quantization, "quantize all inputs of weighted operations"."""
    if site.op not in WEIGHTED:
        return
    sources = [dequantizer(site.read(position)) for position in WEIGHTED[site.op]]
    found = [source for source in sources if source]
    if len(found) == 1 and about.params(found[0]).dtype not in ("int4", "float4e2m1"):
        missing = site.read(WEIGHTED[site.op][sources.index(None)])
        yield _finding(
            "QDQ12",
            "warning",
            site,
            f"'{missing.name if missing else ''}' is not quantized, the other operand is",
            "both operands quantized, or none",
            "the layer computes in floating point and only loses accuracy",
        )


def _residual(site: Site, _about: _Model) -> _Told:
    """QDQ13. Source: TensorRT explicit quantization, "quantize the residual input in skip connections"."""
    if site.op != "Add":
        return
    for own, other in ((0, 1), (1, 0)):
        branch, skip = site.read(own), site.read(other)
        layer = source_of(branch)
        behind = dequantizer(branch)
        if behind and (pair := source_of(behind.read(0))) and pair.writer and pair.writer.op in QUANTIZE:
            layer = pair.writer.read(0)
        if not _is_quantized_layer(layer) or constant_of(skip) is not None or _is_quantized_layer(source_of(skip)):
            continue
        if behind and not dequantizer(skip):
            found = f"the output of '{_writer_name(layer)}' is quantized, the skip '{skip.name if skip else ''}' is not"
        elif behind:
            found = "both operands are quantized"
        elif not dequantizer(skip):
            found = f"the skip '{skip.name if skip else ''}' is not quantized"
        else:
            return
        expected = "the skip alone quantized"
        yield _finding("QDQ13", "warning", site, found, expected, "the addition is not fused into the layer before it")
        return


def _writer_name(value: Value | None) -> str:
    return value.writer.node.name if value and value.writer else ""


def _is_quantized_layer(value: Value | None) -> bool:
    writer = value.writer if value else None
    return bool(writer and writer.op in WEIGHTED and all(dequantizer(writer.read(p)) for p in WEIGHTED[writer.op]))


def _mixed_scales(site: Site, about: _Model) -> _Told:
    """QDQ14. Source: TensorRT explicit quantization, Q/DQ propagation: an operator commutes if Q(op(x)) is op(Q(x))."""
    if site.op == "Concat":
        sources = [dequantizer(value) for value in site.reads]
        params = [about.params(source) for source in sources if source]
        if params and None in sources:
            yield _finding(
                *("QDQ14", "warning", site, f"{len(params)} of {len(sources)} inputs are quantized"),
                *("all or none", "they are converted back to floating point before they are joined"),
            )
        elif params and any(not params[0].same_as(other) for other in params[1:]):
            found = f"inputs with scales {_shown([one.scale for one in params])}"
            yield _finding(
                "QDQ14", "warning", site, found, "one scale", "each input is scaled again before it is joined"
            )
    elif site.op == "MaxPool" and (source := dequantizer(site.read(0))):
        after = [reader for reader, _ in site.writes[0].readers if reader.op in QUANTIZE]
        params = [about.params(source), *(about.params(reader) for reader in after)]
        if any(not params[0].same_as(other) for other in params[1:]):
            found = f"scales {_shown([one.scale for one in params])} before and after"
            yield _finding(
                "QDQ14", "warning", site, found, "one scale", "the maximum is one of its inputs, scaled twice"
            )


def _shown(scales: Iterable[NDArray[Any] | None]) -> str:
    parts = [f"{scale.reshape(-1)[0]:.6g}" for scale in scales if scale is not None and scale.size]
    return ", ".join(dict.fromkeys(parts))


def _before(site: Site) -> Site | None:
    """The node whose numbers `site` reads, past operators that only move them."""
    source = source_of(site.read(0))
    return source.writer if source else None


def _quantized_twice(site: Site, about: _Model) -> _Told:
    """QDQ15."""
    before = _before(site)
    if site.op not in QUANTIZE or before is None or before.op not in DEQUANTIZE:
        return
    given, own = about.params(before), about.params(site)
    if given.dtype == "int32":
        return
    if given.same_as(own):
        found, why = f"'{before.node.name}' before it", "the pair changes nothing"
    else:
        found = f"'{before.node.name}' before it, scales {_shown([given.scale, own.scale])}"
        why = "values are rounded twice, and runtimes that drop one of the pairs round otherwise"
    yield _finding("QDQ15", "warning", site, found, "one QuantizeLinear for a tensor", why)


def _no_inverse(site: Site, about: _Model) -> _Told:
    """QDQ16."""
    before = _before(site)
    if site.op not in DEQUANTIZE or before is None or before.op not in QUANTIZE:
        return
    given, own = about.params(before), about.params(site)
    computed = any(part is None for one in (given, own) for part in (one.scale, one.zero_point))
    if not computed and not given.same_as(own):
        found = f"scales {_shown([given.scale, own.scale])}, zero points {_shown([given.zero_point, own.zero_point])}"
        expected = f"what '{before.node.name}' has"
        yield _finding("QDQ16", "error", site, found, expected, "every value is changed between the two")


def _output_only(site: Site, _about: _Model) -> _Told:
    """QDQ17. Source: TensorRT explicit quantization, "by default, do not quantize the outputs of weighted operations"."""
    if site.op not in QUANTIZE:
        return
    value = site.read(0)
    writer = value.writer if value else None
    if writer and writer.op in WEIGHTED and not any(dequantizer(writer.read(p)) for p in WEIGHTED[writer.op]):
        found = f"the output of '{writer.node.name}' ({writer.op}), whose inputs are not quantized"
        yield _finding(
            "QDQ17", "warning", site, found, "its inputs quantized", "the layer itself stays in floating point"
        )
    elif any(
        out.is_output for reader, _ in _end_readers(site.writes[0]) if reader.op in DEQUANTIZE for out in reader.writes
    ):
        why = "the result is rounded to 8 bits and nothing computes with it"
        yield _finding("QDQ17", "warning", site, "a quantized output of the model", "outputs left alone", why)


RULES: tuple[Callable[[Site, _Model], _Told], ...] = (
    _zero_point,
    _element_type,
    _bias,
    _scale,
    _per_channel_activation,
    _weight_axis,
    _opset,
    _quantized_operator,
    _lonely_quantize,
    _lonely_dequantize,
    _one_operand,
    _residual,
    _mixed_scales,
    _quantized_twice,
    _no_inverse,
    _output_only,
)
