"""How far two arrays are apart, in numpy alone.

Every figure is a fact about the two arrays; what is still good enough is for `trtforge.parity.tolerances` to say.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from trtforge.types import Shape

Array = np.ndarray[Any, np.dtype[Any]]
Difference = Literal["none", "lengths differ", "types differ", "reference not finite", "candidate not finite"]

RELATIVE_FLOOR = 1e-3
"""Share of the reference's largest magnitude below which a denominator of `max_rel_diff` counts as that much.

Without it the figure is decided by the values nearest zero: 7694 where every absolute difference is below 0.1.
Source: https://github.com/NVIDIA/TensorRT/issues/2823
"""
TOP_K = 5
"""Scores of each row that `topk_agreement` looks at; all of them where a row has fewer."""
_CHUNK = 1 << 20
# Squares of float64 values outside these bounds overflow, or lose their precision to denormals.
_SQUARABLE = (1e-140, 1e140)
_HISTOGRAM_SHIFT = 44
_PERCENTILES = (0.5, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class Element:
    """The same element of both arrays. A value that is not finite is text: `nan`, `inf` or `-inf`."""

    index: tuple[int, ...]
    reference: bool | int | float | str
    candidate: bool | int | float | str


@dataclass(frozen=True, slots=True)
class Metrics:
    """What a comparison of two arrays gave. A figure that is not defined for them is None, and none is NaN or infinite.

    Where shapes differ, or one array is real and the other whole, nothing below `candidate_dtype` is filled; where a
    value is not finite, nothing below `worst`. Whole numbers (booleans too) and text have the figures up to
    `mean_abs_diff`, text up to `num_tied`. Sums are made in float64, differences of whole numbers exactly; a figure
    beyond float64 is its largest value.

    Attributes:
        num_elements: of the reference.
        num_reference_not_finite: values of the reference that are NaN or infinite, those of a -inf mask too.
        num_candidate_not_finite: values of the candidate that are NaN or infinite where the reference is finite.
        worst: the element with the largest absolute difference, the first of equals; where values are not finite, the
            first such of the reference, else of the candidate. None if nothing differs.
        num_different: elements that are not equal, `num_tied` left out.
        num_tied: indices that differ where the reference scores both alike.
        max_abs_diff: largest |reference - candidate|.
        mean_abs_diff: mean |reference - candidate|.
        max_abs_reference: largest |reference|.
        max_rel_diff: largest |reference - candidate| / max(|reference|, RELATIVE_FLOOR * max_abs_reference). None for
            an all-zero reference, as the next three are.
        norm_relative: ||reference - candidate|| / ||reference||, 2-norms of the flattened arrays.
            Source: Golub and Van Loan, Matrix Computations, 4th ed., section 2.2.3.
        cosine_similarity: dot(reference, candidate) / (||reference|| ||candidate||), in -1 to 1; 0 for an all-zero
            candidate.
        sqnr_db: 10 log10(sum reference^2 / sum (reference - candidate)^2), signal to quantization noise, in decibels;
            -20 log10(norm_relative). None if nothing differs.
            Source: Oppenheim and Schafer, Discrete-Time Signal Processing, 3rd ed., section 4.8.3.
        p50_abs_diff, p99_abs_diff, p99_9_abs_diff: the least error that at least this share of the elements does not
            exceed. Rounded up by at most 0.4 % in arrays beyond 2^20 elements.
            Source: Hyndman and Fan, Sample Quantiles in Statistical Packages, definition 1.
        max_kl_divergence, mean_kl_divergence: over the rows along the last axis, KL(softmax(reference) ||
            softmax(candidate)) in nats. For declared logits alone, as the two below.
            Source: Kullback and Leibler, On Information and Sufficiency (1951), section 2.
        top1_agreement: share of rows whose highest-scored index in the candidate scores highest in the reference, alone
            or tied.
        topk_agreement: mean share of the candidate's TOP_K highest-scored indices of a row that are among the
            reference's, ties at its last place included.
    """

    reference_shape: Shape
    candidate_shape: Shape
    reference_dtype: str
    candidate_dtype: str
    num_elements: int
    num_reference_not_finite: int = 0
    num_candidate_not_finite: int = 0
    worst: Element | None = None
    num_different: int | None = None
    num_tied: int | None = None
    max_abs_diff: float | None = None
    mean_abs_diff: float | None = None
    max_abs_reference: float | None = None
    max_rel_diff: float | None = None
    norm_relative: float | None = None
    cosine_similarity: float | None = None
    sqnr_db: float | None = None
    p50_abs_diff: float | None = None
    p99_abs_diff: float | None = None
    p99_9_abs_diff: float | None = None
    max_kl_divergence: float | None = None
    mean_kl_divergence: float | None = None
    top1_agreement: float | None = None
    topk_agreement: float | None = None

    @property
    def difference(self) -> Difference:
        """What forbids a comparison of the values as they are, the first of them, or `none`."""
        if self.reference_shape != self.candidate_shape:
            return "lengths differ"
        if self.reference_dtype != self.candidate_dtype:
            return "types differ"
        if self.num_reference_not_finite:
            return "reference not finite"
        return "candidate not finite" if self.num_candidate_not_finite else "none"


def compare(
    reference: Array, candidate: Array, *, logits: bool = False, scores: Array | None = None, axis: int = -1
) -> Metrics:
    """Compares two arrays, whatever they are; nothing is broadcast.

    Guarantees: memory beyond the arrays stays below 100 MiB, unless an array is not in C order (then a copy of it),
    `scores` are given (then a few times the indices), or one row of logits is longer than 2^20. Real arrays of different types are compared all the same, in float64, and so
    are whole ones; `Metrics.difference` still says that types differ.

    Args:
        reference: any shape and type; bfloat16 and float8 in the types of `ml_dtypes`.
        candidate: any shape and type.
        logits: whether the last axis holds unnormalised log-probabilities (or any scores to rank).
        scores: for indices such as those of ArgMax and TopK: the reference's scores, with the classes on `axis`. An
            index that differs is right where the reference scores it as it scores its own, unless it stands twice.
        axis: of `scores`, and of the indices where they have as many axes.

    Raises:
        ValueError: `scores` do not have the shape of the reference's indices.
    """
    reference, candidate = np.asarray(reference), np.asarray(candidate)
    metrics = Metrics(
        reference.shape, candidate.shape, reference.dtype.name, candidate.dtype.name, num_elements=reference.size
    )
    kind = _kind(reference.dtype)
    if reference.shape != candidate.shape or kind != _kind(candidate.dtype):
        return metrics
    if kind == "real":
        metrics = _compare_reals(metrics, reference, candidate)
        is_comparable = metrics.num_different is not None
        return _compare_rows(metrics, reference, candidate) if logits and is_comparable else metrics
    is_tied = np.zeros(0, np.int64) if scores is None else _tied(reference, candidate, scores, axis)
    return _compare_whole(metrics, reference, candidate, is_tied, are_numbers=kind == "whole")


def _kind(dtype: np.dtype[Any]) -> Literal["real", "whole", "other"]:
    if dtype.kind in "iub" or dtype.name in ("int2", "uint2", "int4", "uint4"):
        return "whole"
    if dtype.kind == "f":
        return "real"
    return "real" if dtype.name.startswith(("bfloat", "float")) else "other"


def _chunks(reference: Array, candidate: Array) -> Iterator[tuple[int, Array, Array]]:
    """Start, and equal parts of the flattened arrays."""
    reference, candidate = reference.reshape(-1), candidate.reshape(-1)
    for start in range(0, reference.size, _CHUNK):
        yield start, reference[start : start + _CHUNK], candidate[start : start + _CHUNK]


def _real_chunks(reference: Array, candidate: Array) -> Iterator[tuple[int, Array, Array]]:
    for start, first, second in _chunks(reference, candidate):
        yield start, first.astype(np.float64), second.astype(np.float64)


def _element(reference: Array, candidate: Array, position: int) -> Element:
    index = tuple(int(place) for place in np.unravel_index(position, reference.shape))
    return Element(index, _value(reference[index]), _value(candidate[index]))


def _value(value: Any) -> bool | int | float | str:
    kind = _kind(np.asarray(value).dtype)
    if kind == "real":
        return float(value) if math.isfinite(value) else str(float(value))
    if kind == "whole":
        return bool(value) if isinstance(value, np.bool_) else int(value)
    return str(value)[:100]


def _bounded(value: float) -> float:
    return float(min(value, sys.float_info.max))


def _compare_reals(metrics: Metrics, reference: Array, candidate: Array) -> Metrics:
    num_bad, num_new, first_bad, first_new = 0, 0, None, None
    peak_reference = peak_candidate = 0.0
    for start, first, second in _real_chunks(reference, candidate):
        is_bad = ~np.isfinite(first)
        is_new = ~np.isfinite(second) & ~is_bad
        if is_bad.any():
            first_bad = start + int(is_bad.argmax()) if first_bad is None else first_bad
            num_bad += int(is_bad.sum())
        if is_new.any():
            first_new = start + int(is_new.argmax()) if first_new is None else first_new
            num_new += int(is_new.sum())
        peak_reference = max(peak_reference, float(np.abs(first).max()))
        peak_candidate = max(peak_candidate, float(np.abs(second).max()))
    position = first_bad if first_bad is not None else first_new
    if position is not None:
        return replace(
            metrics,
            num_reference_not_finite=num_bad,
            num_candidate_not_finite=num_new,
            worst=_element(reference, candidate, position),
        )
    metrics = _with_errors(metrics, reference, candidate, peak_reference, peak_candidate)
    return _with_norms(metrics, reference, candidate, peak_reference, peak_candidate)


def _with_errors(
    metrics: Metrics, reference: Array, candidate: Array, peak_reference: float, peak_candidate: float
) -> Metrics:
    exponent = _exponent(max(peak_reference, peak_candidate), peak_reference, peak_candidate)
    floor = np.ldexp(peak_reference * RELATIVE_FLOOR, -exponent)
    num_different, total, largest, position, largest_relative = 0, 0.0, 0.0, 0, 0.0
    counts = np.zeros(1 << (64 - 1 - _HISTOGRAM_SHIFT), np.int64) if reference.size > _CHUNK else None
    errors = np.zeros(0)
    for start, first, second in _real_chunks(reference, candidate):
        scaled = _scaled(first, exponent)
        errors = np.abs(scaled - _scaled(second, exponent))
        num_different += int((first != second).sum())
        total += float(errors.sum())
        if errors.max() > largest:
            largest, position = float(errors.max()), start + int(errors.argmax())
        if floor > 0:
            largest_relative = max(largest_relative, float((errors / np.maximum(np.abs(scaled), floor)).max()))
        if counts is not None:
            bins = errors.view(np.uint64) >> np.uint64(_HISTOGRAM_SHIFT)
            counts += np.bincount(bins.astype(np.int64), minlength=counts.size)
    percentiles = _percentiles_of(errors) if counts is None else _percentiles_in(counts, largest)
    p50, p99, p99_9 = (_unscaled(value, exponent) for value in percentiles) if reference.size else (None, None, None)
    return replace(
        metrics,
        worst=_element(reference, candidate, position) if num_different else None,
        num_different=num_different,
        max_abs_diff=_unscaled(largest, exponent),
        mean_abs_diff=_unscaled(total / reference.size, exponent) if reference.size else None,
        max_abs_reference=peak_reference,
        max_rel_diff=_bounded(largest_relative) if floor > 0 else None,
        p50_abs_diff=p50,
        p99_abs_diff=p99,
        p99_9_abs_diff=p99_9,
    )


def _with_norms(
    metrics: Metrics, reference: Array, candidate: Array, peak_reference: float, peak_candidate: float
) -> Metrics:
    if not peak_reference:
        return metrics
    exponents = [
        _exponent(peak, peak_reference, peak_candidate)
        for peak in (peak_reference, peak_candidate, max(peak_reference, peak_candidate))
    ]
    square_reference = square_candidate = square_error = product = 0.0
    for _, first, second in _real_chunks(reference, candidate):
        error = _scaled(first, exponents[2]) - _scaled(second, exponents[2])
        square_error += _dot(error, error)
        first, second = _scaled(first, exponents[0]), _scaled(second, exponents[1])  # noqa: PLW2901 - the scaled ones
        square_reference += _dot(first, first)
        square_candidate += _dot(second, second)
        product += _dot(first, second)
    ratio = math.sqrt(square_error) / math.sqrt(square_reference)
    norm_relative = _unscaled(ratio, exponents[2] - exponents[0])
    lengths = math.sqrt(square_reference) * math.sqrt(square_candidate)
    return replace(
        metrics,
        norm_relative=norm_relative,
        cosine_similarity=max(-1.0, min(1.0, product / lengths)) if lengths else 0.0,
        sqnr_db=-20 * math.log10(norm_relative) if norm_relative else None,
    )


def _dot(first: Array, second: Array) -> float:
    """Summed pairwise and on one thread: BLAS starts threads whose order of sums, and wait for each other, vary."""
    return float((first * second).sum())


def _exponent(peak: float, *peaks: float) -> int:
    """The power of two to divide by before squaring: 0, unless one of the peaks has a square that float64 lacks."""
    if all(not value or _SQUARABLE[0] < value < _SQUARABLE[1] for value in peaks):
        return 0
    return math.frexp(peak)[1]


def _scaled(values: Array, exponent: int) -> Array:
    scaled: Array = np.ldexp(values, -exponent) if exponent else values
    return scaled


def _unscaled(value: float, exponent: int) -> float:
    with np.errstate(over="ignore"):
        return _bounded(np.ldexp(value, exponent))


def _percentiles_of(errors: Array) -> list[float]:
    if not errors.size:
        return []
    places = [math.ceil(share * errors.size) - 1 for share in _PERCENTILES]
    ordered = np.sort(errors)
    return [float(ordered[place]) for place in places]


def _percentiles_in(counts: Array, largest: float) -> list[float]:
    """Upper edges of the bins that hold the percentiles. Floats of one sign are ordered as their bits are."""
    upto = np.cumsum(counts)
    bins = [int(np.searchsorted(upto, math.ceil(share * int(upto[-1])))) for share in _PERCENTILES]
    edges = [np.array((bin_ + 1) << _HISTOGRAM_SHIFT, np.uint64).view(np.float64) if bin_ else 0.0 for bin_ in bins]
    return [min(float(edge), largest) for edge in edges]


def _compare_rows(metrics: Metrics, reference: Array, candidate: Array) -> Metrics:
    if not reference.ndim or not reference.size:
        return metrics
    num_classes = reference.shape[-1]
    num_rows = reference.size // num_classes
    reference, candidate = reference.reshape(num_rows, num_classes), candidate.reshape(num_rows, num_classes)
    rows_at_once = max(1, _CHUNK // num_classes)
    largest, total, top1, topk = 0.0, 0.0, 0, 0.0
    for start in range(0, num_rows, rows_at_once):
        first = reference[start : start + rows_at_once].astype(np.float64)
        second = candidate[start : start + rows_at_once].astype(np.float64)
        divergence = _kl_divergence(first, second)
        largest = max(largest, float(divergence.max()))
        total += float(divergence.sum())
        chosen = np.take_along_axis(first, second.argmax(axis=-1, keepdims=True), axis=-1)
        top1 += int((chosen[:, 0] >= first.max(axis=-1)).sum())
        topk += float(_topk_shares(first, second).sum())
    return replace(
        metrics,
        max_kl_divergence=_bounded(largest),
        mean_kl_divergence=_bounded(total / num_rows),
        top1_agreement=top1 / num_rows,
        topk_agreement=topk / num_rows,
    )


def _kl_divergence(reference: Array, candidate: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        log_p, log_q = _log_softmax(reference), _log_softmax(candidate)
        p = np.exp(log_p)
        # What has no probability adds nothing, also where both logarithms are infinite.
        divergence = np.where(p > 0, p * (log_p - log_q), 0.0).sum(axis=-1)
    return np.asarray(np.clip(divergence, 0.0, sys.float_info.max))


def _log_softmax(values: Array) -> Array:
    shifted = values - values.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def _topk_shares(reference: Array, candidate: Array) -> Array:
    """Share of the candidate's top k that is among the reference's, for each row."""
    k = min(TOP_K, reference.shape[-1])
    chosen = np.argpartition(-candidate, k - 1, axis=-1)[:, :k]
    least = -np.partition(-reference, k - 1, axis=-1)[:, k - 1 : k]
    return np.asarray((np.take_along_axis(reference, chosen, axis=-1) >= least).mean(axis=-1))


def _compare_whole(metrics: Metrics, reference: Array, candidate: Array, tied: Array, *, are_numbers: bool) -> Metrics:
    num_different, total, largest, position = 0, 0.0, -1.0, 0
    for start, first, second in _chunks(reference, candidate):
        distance = _distance(first, second) if are_numbers else np.not_equal(first, second, dtype=object).astype(bool)
        distance[tied[(tied >= start) & (tied < start + _CHUNK)] - start] = 0
        num_different += int((distance != 0).sum())
        total += float(distance.astype(np.float64).sum())
        if distance.max() > largest:
            largest, position = distance.max(), start + int(distance.argmax())
    metrics = replace(
        metrics,
        num_different=num_different,
        num_tied=tied.size,
        worst=_element(reference, candidate, position) if num_different else None,
    )
    if not are_numbers:
        return metrics
    mean = total / reference.size if reference.size else None
    return replace(metrics, max_abs_diff=max(float(largest), 0.0), mean_abs_diff=mean)


def _distance(first: Array, second: Array) -> Array:
    """|first - second| without overflow: in uint64, or in Python's integers where no numpy type holds both."""
    wide = np.result_type(*(_carrier(array.dtype) for array in (first, second)))
    if wide.kind == "f":
        return np.asarray(np.abs(first.astype(object) - second.astype(object)))
    first, second = first.astype(wide), second.astype(wide)
    # Modulo 2^64, where the difference of the larger and the smaller always fits.
    return np.asarray(np.maximum(first, second).astype(np.uint64) - np.minimum(first, second).astype(np.uint64))


def _carrier(dtype: np.dtype[Any]) -> np.dtype[Any]:
    is_signed = dtype.kind == "i" or dtype.name in ("int2", "int4")
    return np.dtype(np.int64 if is_signed or dtype.itemsize < np.dtype(np.uint64).itemsize else np.uint64)


def _tied(reference: Array, candidate: Array, scores: Array, axis: int) -> Array:
    """Flat positions of indices that differ and score alike.

    Positions are those of the arrays as they came; the rows of the moved ones only find them.
    """
    positions = np.arange(reference.size).reshape(reference.shape)
    if reference.ndim == scores.ndim and reference.ndim:
        reference, candidate, positions = (np.moveaxis(array, axis, -1) for array in (reference, candidate, positions))
    scores = np.moveaxis(scores, axis, -1)
    if scores.shape[:-1] not in (reference.shape, reference.shape[:-1]):
        raise ValueError(f"scores of shape {scores.shape} have no row for each index of shape {reference.shape}")
    num_rows, num_classes = math.prod(scores.shape[:-1]), scores.shape[-1]
    first, second, places = (array.reshape(num_rows, -1) for array in (reference, candidate, positions))
    rows, columns = np.nonzero(first != second)
    own, other = first[rows, columns], second[rows, columns]
    in_range = (other >= 0) & (other < num_classes) & (own >= 0) & (own < num_classes)
    rows, columns, own, other = rows[in_range], columns[in_range], own[in_range], other[in_range]
    table = scores.reshape(num_rows, num_classes)
    is_tied = table[rows, own] == table[rows, other]
    is_single = (second[rows] == other[:, np.newaxis]).sum(axis=-1) == 1
    return np.sort(places[rows, columns][is_tied & is_single])
