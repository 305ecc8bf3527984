"""What still counts as the same: bounds for each stage and precision, and the verdict on a comparison."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from trtforge.errors import Problem, SpecError, closest, raise_any
from trtforge.parity.metrics import Element, Metrics

Stage = Literal["torch", "onnx", "mended", "lowered", "engine"]
STAGES: tuple[Stage, ...] = ("torch", "onnx", "mended", "lowered", "engine")
"""In order. A report is named after the stage whose result was compared with the one before it."""
Precision = Literal["fp32", "tf32", "fp16", "bf16", "int8", "fp8"]
Statistic = Literal["max", "p99.9", "p99", "p50"]

_FIELDS = {"max": "max_abs_diff", "p99.9": "p99_9_abs_diff", "p99": "p99_abs_diff", "p50": "p50_abs_diff"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Bounds on one output. Those given must all hold; None bounds nothing.

    Real outputs: `error_at` of |reference - candidate| <= atol + rtol * max|reference|, the maximum over the whole
    tensor. Relative to the tensor and not to each element, because elements near zero have any relative error at all
    in a correct engine: 7694 was seen where every absolute difference was below 0.1.
    Source: https://github.com/NVIDIA/TensorRT/issues/2823 (case C48).

    Cosine, SQNR and norm-relative error say nothing of an output that is zero but for rounding: where a text detector
    sees no text, its scores are below 2e-7, and those of a correct engine 88 % off. Up to `near_zero`, and for an output
    of zeros alone if atol is given, the other bounds decide without them, and the verdict has a note.
    Whole numbers, booleans and text must be equal in at least `min_match` of their elements; nothing else applies.

    Attributes:
        atol: absolute part, in units of the output.
        rtol: part of the largest magnitude of the reference.
        error_at: which error atol and rtol bound: the largest, or a percentile of all.
        min_cosine: least `cosine_similarity`.
        min_sqnr_db: least `sqnr_db`.
        max_norm_relative: largest `norm_relative`.
        near_zero: largest magnitude of a reference whose own size says nothing.
        min_top1: least `top1_agreement`, for logits.
        min_topk: least `topk_agreement`, for logits.
        max_kl: largest `max_kl_divergence` in nats, for logits.
        min_match: least share of equal elements, 0 to 1, ties of declared scores counted as equal.
        dtype: the candidate's element type where it is meant to differ from the reference's, by numpy's name.
        reason: where the bounds come from.
    """

    atol: float | None = None
    rtol: float | None = None
    error_at: Statistic = "max"
    min_cosine: float | None = None
    min_sqnr_db: float | None = None
    max_norm_relative: float | None = None
    near_zero: float | None = None
    min_top1: float | None = None
    min_topk: float | None = None
    max_kl: float | None = None
    min_match: float = 1.0
    dtype: str | None = None
    reason: str = ""

    @property
    def needs_logits(self) -> bool:
        """Whether a bound is on figures of logits alone."""
        return (self.min_top1, self.min_topk, self.max_kl) != (None, None, None)


@dataclass(frozen=True, slots=True)
class Check:
    """One bound on one output.

    Attributes:
        metric: what was bounded, as `Metrics` calls it, or `length`, `type`, `finite`, `name` or `bounds`.
        found, allowed: for people.
        excess: found error over allowed error, up to 1 where it holds; the largest float64 where nothing could be
            allowed.
        at: the element with the largest difference, where that says something.
    """

    metric: str
    found: str
    allowed: str
    excess: float
    at: Element | None = None

    def __str__(self) -> str:
        return f"{self.metric} is {self.found}, allowed {self.allowed}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an output is within its tolerance.

    Attributes:
        reasons: the bounds that do not hold, worst first; empty if it passed.
        closest: of the bounds, the one with the greatest excess.
        notes: what a pass does not say.
    """

    passed: bool
    reasons: tuple[Check, ...]
    closest: Check | None
    notes: tuple[str, ...] = ()


NEVER = sys.float_info.max
"""Excess of what no tolerance allows."""

_EXPORT = Tolerance(
    atol=1e-5,
    rtol=1e-5,
    reason=(
        "both sides compute in float32; sums of thousands of products in another order differ by some hundred units "
        "in the last place (6e-8 of the largest magnitude each). Source: Higham, Accuracy and Stability of Numerical "
        "Algorithms, 2nd ed., section 4.2; atol is the default of polygraphy run"
    ),
)
_MENDED = Tolerance(
    atol=1e-6,
    rtol=1e-6,
    reason=(
        "renaming and sorting change nothing, and folding rounds a constant once where the graph rounded it at each "
        "run: 16 units of 6e-8 in the last place of float32. Source: IEEE 754-2019, table 3.5"
    ),
)
_FP32_ENGINE = Tolerance(
    atol=1e-4,
    rtol=1e-4,
    reason=(
        "float32 on both sides, but fused kernels, Winograd convolutions and approximate exponentials lose up to ten "
        "times what another order of sums does. Source: Lavin and Gray, Fast Algorithms for Convolutional Neural "
        "Networks (2016), on accuracy"
    ),
)
_FP16 = Tolerance(
    atol=1e-3,
    rtol=2e-2,
    min_cosine=0.9999,
    max_norm_relative=5e-3,
    near_zero=1e-2,
    reason=(
        "float16 and TF32 round each value by at most 2^-11 (4.9e-4), and roundings of one hundred layers add as the "
        "root of their number: ten times that. Source: IEEE 754-2019, table 3.5; Higham and Mary, A New Approach to "
        "Probabilistic Rounding Error Analysis (2019)"
    ),
)
_BF16 = Tolerance(
    atol=8e-3,
    rtol=0.16,
    min_cosine=0.999,
    max_norm_relative=4e-2,
    near_zero=5e-2,
    reason="eight times the bounds of fp16: bfloat16 rounds by at most 2^-8. Source: ONNX IR, element types, BFLOAT16",
)
_INT8 = Tolerance(
    atol=1e-2,
    rtol=0.1,
    error_at="p99",
    min_cosine=0.99,
    min_sqnr_db=17.0,
    near_zero=5e-2,
    reason=(
        "outliers are clipped on purpose, so the 99th percentile and the whole count. Cosine 0.99 and 17 dB are one "
        "error, 14 % of the output's norm: it tells broken scales from working ones, and a check of accuracy decides "
        "for good. Source: Wu et al., Integer Quantization for Deep Learning Inference (2020), on percentile calibration"
    ),
)
PRESETS: Mapping[Stage, Mapping[Precision, Tolerance]] = {
    "onnx": dict.fromkeys(("fp32", "tf32", "fp16", "bf16", "int8", "fp8"), _EXPORT),
    "mended": dict.fromkeys(("fp32", "tf32", "fp16", "bf16", "int8", "fp8"), _MENDED),
    "lowered": {"fp32": _MENDED, "tf32": _MENDED, "fp16": _FP16, "bf16": _BF16, "int8": _INT8, "fp8": _INT8},
    "engine": {"fp32": _FP32_ENGINE, "tf32": _FP16, "fp16": _FP16, "bf16": _BF16, "int8": _INT8, "fp8": _INT8},
}
"""Tolerance by stage, then by the precision that the spec asks for. Export and mending do not depend on it."""


def resolve_tolerances(
    outputs: Iterable[str], default: Tolerance, overrides: Mapping[str, Tolerance]
) -> dict[str, Tolerance]:
    """A tolerance for every output, in order.

    Raises:
        SeveralErrors: of `SpecError` problems, one for each override that names no output.
    """
    names = list(outputs)
    raise_any(_unknown_output(name, names) for name in overrides if name not in names)
    return {name: overrides.get(name, default) for name in names}


def _unknown_output(name: str, names: list[str]) -> Problem:
    meant = closest(name, names)
    return Problem(
        f"a tolerance names '{name}', which is no output of the model; its outputs: {', '.join(names)}",
        f"rename it to '{meant}'" if meant else f"remove '{name}'",
        exit_code=SpecError.exit_code,
    )


def judge(metrics: Metrics, tolerance: Tolerance) -> Verdict:
    """The verdict on one comparison.

    Guarantees: other lengths, another type than the tolerance names, values that are not finite and figures that were
    not measured never pass; neither does a real output that no bound applies to. An output equal in every
    element passes every other bound.
    """
    structural = list(_structural(metrics, tolerance))
    if structural:
        return verdict_of(structural)
    if metrics.max_abs_reference is None:
        return verdict_of([_match(metrics, tolerance)])
    checks = list(_real_checks(metrics, tolerance))
    if not checks:
        found = f"none applies to {metrics.reference_dtype}"
        return verdict_of([Check("bounds", found, "one at least", NEVER)])
    if metrics.num_different == 0:
        return verdict_of(replace(check, excess=0.0) for check in checks)
    return verdict_of(checks, tuple(_notes(metrics, tolerance)))


def verdict_of(checks: Iterable[Check], notes: tuple[str, ...] = ()) -> Verdict:
    """Passed if every check has an excess of at most 1."""
    ordered = sorted(checks, key=lambda check: -check.excess)
    broken = tuple(check for check in ordered if not check.excess <= 1)
    return Verdict(not broken, broken, ordered[0] if ordered else None, notes)


def _structural(metrics: Metrics, tolerance: Tolerance) -> Iterator[Check]:
    if metrics.reference_shape != metrics.candidate_shape:
        yield Check("length", str(list(metrics.candidate_shape)), str(list(metrics.reference_shape)), NEVER)
        return
    allowed = tolerance.dtype or metrics.reference_dtype
    if metrics.candidate_dtype != allowed:
        yield Check("type", metrics.candidate_dtype, allowed, NEVER)
    elif metrics.num_reference_not_finite == metrics.num_candidate_not_finite == 0 and metrics.num_different is None:
        yield Check("type", metrics.candidate_dtype, f"one comparable with {metrics.reference_dtype}", NEVER)
    if metrics.num_reference_not_finite:
        found = f"a reference with {_counted(metrics.num_reference_not_finite)}"
        yield Check("finite", found, "a finite reference", NEVER, metrics.worst)
    elif metrics.num_candidate_not_finite:
        yield Check("finite", _counted(metrics.num_candidate_not_finite), "finite values", NEVER, metrics.worst)


def _counted(count: int) -> str:
    return f"{count} NaN or infinite value{'' if count == 1 else 's'}"


def _match(metrics: Metrics, tolerance: Tolerance) -> Check:
    num, num_different = metrics.num_elements, metrics.num_different or 0
    equal = (num - num_different) / num if num else 1.0
    allowed = "all equal" if tolerance.min_match == 1 else f"{tolerance.min_match:.6g} equal"
    excess = _excess(1 - equal, 1 - tolerance.min_match, holds=equal >= tolerance.min_match)
    return Check("match", f"{num_different} of {num} different", allowed, excess, metrics.worst)


def _real_checks(metrics: Metrics, tolerance: Tolerance) -> Iterator[Check]:
    if tolerance.atol is not None or tolerance.rtol is not None:
        yield _error_check(metrics, tolerance)
    if not _is_rounding(metrics, tolerance):
        yield from _relative_checks(metrics, tolerance)
    if tolerance.min_top1 is not None:
        yield _share_check("top1_agreement", metrics.top1_agreement, tolerance.min_top1)
    if tolerance.min_topk is not None:
        yield _share_check("topk_agreement", metrics.topk_agreement, tolerance.min_topk)
    if tolerance.max_kl is not None:
        yield _limit_check("max_kl_divergence", metrics.max_kl_divergence, tolerance.max_kl)


def _is_rounding(metrics: Metrics, tolerance: Tolerance) -> bool:
    """Whether the output is too small for figures relative to its own size."""
    largest = metrics.max_abs_reference or 0.0
    return largest <= (tolerance.near_zero or 0.0) and (largest > 0 or tolerance.atol is not None)


def _relative_checks(metrics: Metrics, tolerance: Tolerance) -> Iterator[Check]:
    """Of the figures relative to the reference as a whole."""
    if tolerance.min_cosine is not None:
        yield _share_check("cosine_similarity", metrics.cosine_similarity, tolerance.min_cosine)
    if tolerance.max_norm_relative is not None:
        yield _limit_check("norm_relative", metrics.norm_relative, tolerance.max_norm_relative)
    if tolerance.min_sqnr_db is not None:
        # By the noise itself, which is defined where an error too small to square leaves no ratio in decibels.
        check = _limit_check("sqnr_db", metrics.norm_relative, 10 ** (-tolerance.min_sqnr_db / 20))
        found = "undefined" if metrics.sqnr_db is None else f"{metrics.sqnr_db:.4g} dB"
        yield replace(check, found=found, allowed=f"at least {tolerance.min_sqnr_db:.4g} dB")


def _error_check(metrics: Metrics, tolerance: Tolerance) -> Check:
    field = _FIELDS[tolerance.error_at]
    found: float | None = getattr(metrics, field)
    atol, rtol = tolerance.atol or 0.0, tolerance.rtol or 0.0
    allowed = atol + rtol * (metrics.max_abs_reference or 0.0)
    check = _limit_check(field, found or 0.0, allowed)
    return replace(check, at=metrics.worst if tolerance.error_at == "max" else None)


def _limit_check(metric: str, found: float | None, allowed: float) -> Check:
    text = f"at most {allowed:.4g}"
    if found is None:
        return Check(metric, "undefined", text, NEVER)
    return Check(metric, f"{found:.4g}", text, _excess(found, allowed, holds=found <= allowed))


def _share_check(metric: str, found: float | None, least: float) -> Check:
    text = f"at least {least:.8g}"
    if found is None:
        return Check(metric, "undefined", text, NEVER)
    return Check(metric, f"{found:.8g}", text, _excess(1 - found, 1 - least, holds=found >= least))


def _excess(error: float, allowed: float, *, holds: bool) -> float:
    """Error over allowed error, held to the side of 1 that `holds` says."""
    if not allowed > 0:
        return 0.0 if holds else NEVER
    share = error / allowed
    return min(share, 1.0) if holds else min(max(share, 1 + sys.float_info.epsilon), NEVER)


def _notes(metrics: Metrics, tolerance: Tolerance) -> Iterator[str]:
    largest = metrics.max_abs_reference or 0.0
    if tolerance.atol and 0 < largest <= tolerance.atol:
        yield f"atol {tolerance.atol:.4g} allows any value as small as this output's ({largest:.4g} at most)"
    if _is_rounding(metrics, tolerance) and list(_relative_checks(metrics, tolerance)):
        yield f"nothing relative to its size is bounded, as it is near zero ({largest:.4g} at most)"
