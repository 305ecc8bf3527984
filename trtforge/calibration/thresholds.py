"""Where to clip for symmetric INT8, from one histogram: amax is the magnitude that 127 stands for."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trtforge.calibration.histogram import FRACTION_BITS, Histogram

LEVELS = 127
"""Positive steps of symmetric INT8; -128 is not used."""
FALLBACK_AMAX = 1.0
"""Of tensors that held nothing but zeros, or numbers that `SMALLEST_AMAX` bounds."""
SMALLEST_AMAX = LEVELS * 2.0**-126
"""Below it the scale would be a denormal FP32 number. Source: IEEE 754-2019 binary32."""
Method = Literal["minmax", "percentile", "entropy", "mse"]
METHODS: tuple[Method, ...] = ("minmax", "percentile", "entropy", "mse")

_KL_BINS = 2048
_KL_LEVELS = 128
_GOOD_ENOUGH_DB = 20.0
"""Rounding then costs a tenth of the tensor's norm. Measured: all tensors of a text recogniser lie above 24 dB, and clipping
them costs lines; the inputs of MiniLM's second feed-forward products lie at 13 to 17 dB, and clipping those gains."""
_OUTLIER_FACTOR = 8.0
_OUTLIER_PERCENTILE = 99.99

Floats = NDArray[np.float64]


def is_empty(histogram: Histogram) -> bool:
    """Whether the values are too small for a scale of their own; all methods then give `FALLBACK_AMAX`."""
    return histogram.absmax < SMALLEST_AMAX


def amaxes(histogram: Histogram, percentile: float) -> dict[Method, float]:
    """Method -> amax, for each of `METHODS`; finite, at least `SMALLEST_AMAX`, at most the largest magnitude."""
    if is_empty(histogram):
        return dict.fromkeys(METHODS, FALLBACK_AMAX)
    found: dict[Method, float] = {
        "minmax": histogram.absmax,
        "percentile": percentile_amax(histogram, percentile),
        "entropy": entropy_amax(histogram),
        "mse": mse_amax(histogram),
    }
    return {method: max(amax, SMALLEST_AMAX) for method, amax in found.items()}


def percentile_amax(histogram: Histogram, percentile: float) -> float:
    """The upper bound of the first bin below which at least `percentile` percent of all values lie, zeros counted.

    Bounded by the largest magnitude; `percentile` is above 0 and at most 100.
    """
    wanted = percentile / 100 * histogram.num_values
    inside = histogram.num_zeros + histogram.num_below + np.cumsum(histogram.counts)
    place = int(np.searchsorted(inside, wanted))
    return float(min(histogram.edges[min(place, histogram.counts.size - 1) + 1], histogram.absmax))


def mse_amax(histogram: Histogram) -> float:
    """The bin bound, or largest magnitude, at which quantizing costs the least squared error."""
    bounds, errors = _squared_errors(histogram)
    return float(bounds[np.argmin(errors)])


def unclipped_db(histogram: Histogram) -> float:
    """How far, in dB, the squared values lie above the squared error of quantizing them up to the largest magnitude."""
    _, errors = _squared_errors(histogram)
    middles = (histogram.edges[:-1] + histogram.edges[1:]) / 2 / histogram.absmax
    return float(10 * np.log10((histogram.counts * middles**2).sum() / errors[-1])) if errors[-1] > 0 else math.inf


def _squared_errors(histogram: Histogram) -> tuple[Floats, Floats]:
    """Bounds, the largest magnitude last, and the squared error that quantizing at each costs, in units of absmax squared.

    With step s = amax / 127, values below s / 2 become zero and lose their square, values up to amax lose s^2 / 12 on
    average, and those beyond lose the square of what is cut off. Sums over bins are differences of cumulative sums, so
    that all bounds are judged at once.

    Source: Widrow and Kollar, Quantization Noise (2008), eq. 1.1: the variance of a uniform rounding error.
    """
    edges, counts = histogram.edges, histogram.counts
    middles = (edges[:-1] + edges[1:]) / 2
    unit = histogram.absmax  # keeps the squares within double precision's range
    middles, edges = middles / unit, edges / unit
    weighted = counts * middles
    number, total, squares = _from_zero(counts), _from_zero(weighted), _from_zero(weighted * middles)
    last = int(np.flatnonzero(counts)[-1])
    first = min(1 << FRACTION_BITS, last)
    places = np.arange(first, last + 1) + 1
    bounds = np.minimum(edges[places], 1.0)
    small = _half_steps()[places]
    clipped = (squares[-1] - squares[places]) - 2 * bounds * (total[-1] - total[places])
    clipped += bounds**2 * (number[-1] - number[places])
    errors = squares[small] + (bounds / LEVELS) ** 2 / 12 * (number[places] - number[small]) + clipped
    return bounds * unit, errors


@functools.cache
def _half_steps() -> NDArray[np.intp]:
    """For each bin bound taken for amax, the first bin bound from half a step on; the same whatever `top` is."""
    edges = Histogram().edges
    return np.searchsorted(edges, edges / LEVELS / 2)


def entropy_amax(histogram: Histogram) -> float:
    """The bound at which the clipped values and their 128 levels have the least Kullback-Leibler divergence.

    The magnitudes stand in 2048 equal bins up to a power of two. For each bound from 128 bins on: P is the counts up to
    the bound, with all that lies beyond in its last bin; Q spreads the counts of each of 128 levels evenly over those
    of its bins that are not empty. Of equal divergences the largest bound counts. Zeros stay out: they cost nothing.

    onnxruntime's entropy is another, so its ranges differ: it judges both signs at once with zeros, gives the last
    level all bins that are left over, and fills empty bins of P and Q with a small number.

    Source: Migacz, 8-bit Inference with TensorRT (GTC 2017), slide 38; NVIDIA pytorch-quantization,
    calib/histogram.py `_compute_amax_entropy`.
    """
    counts, width = linear_counts(histogram)
    sizes = np.arange(_KL_LEVELS, _last(counts) + 2)
    if sizes.size <= 1:
        return histogram.absmax
    number, entropy = _from_zero(counts), _from_zero(_x_log_x(counts))
    sums, mean = _levels(counts)
    levels = _level_places()[: sizes.size]
    cross = (sums * np.log(np.maximum(mean, 1))).take(levels).sum(axis=1)
    inside, beyond, at_end = number[sizes], number[-1] - number[sizes], counts[sizes - 1]
    # Of Q's last bin, before Q is divided by its sum.
    last = mean.take(levels[:, -1])
    moved = beyond * np.log(np.maximum(last, 1))
    own = entropy[sizes] - _x_log_x(at_end) + _x_log_x(at_end + beyond)
    divergence = (own - cross - moved) / number[-1] - np.log(number[-1]) + np.log(np.maximum(inside, 1))
    # An empty last bin takes the values beyond but stands in no level: Q cannot be compared with P.
    divergence[(beyond > 0) & (at_end == 0) | (inside == 0)] = np.inf
    best = sizes.size - 1 - int(np.argmin(divergence[::-1]))
    return float(min(sizes[best] * width, histogram.absmax))


def _levels(counts: Floats) -> tuple[Floats, Floats]:
    """All levels there can be, (bins in it, its first bin): the count, and the mean over bins that are not empty."""
    starts = np.arange(_KL_BINS)
    ends = np.minimum(starts + np.arange(_KL_BINS // _KL_LEVELS + 1)[:, np.newaxis], _KL_BINS)
    number, filled = _from_zero(counts), _from_zero(counts > 0)
    sums = number[ends] - number[starts]
    return sums, sums / np.maximum(filled[ends] - filled[starts], 1)


@functools.cache
def _level_places() -> NDArray[np.intp]:
    """For each bound from 128 bins on, where its 128 levels are in `_levels`, flat."""
    bounds = np.arange(_KL_LEVELS, _KL_BINS + 1)[:, np.newaxis]
    starts = -(-bounds * np.arange(_KL_LEVELS + 1) // _KL_LEVELS)
    places: NDArray[np.intp] = np.diff(starts) * _KL_BINS + starts[:, :-1]
    return places


def linear_counts(histogram: Histogram) -> tuple[Floats, float]:
    """Counts in 2048 equal bins from 0 to the end of the histogram, zeros left out, and a bin's width."""
    counts: Floats = np.bincount(_linear_places(), histogram.counts, _KL_BINS).astype(np.float64)
    counts[0] += histogram.num_below
    return counts, float(histogram.edges[-1] / _KL_BINS)


@functools.cache
def _linear_places() -> NDArray[np.int64]:
    edges = Histogram().edges
    places: NDArray[np.int64] = (edges[:-1] / edges[-1] * _KL_BINS).astype(np.int64)
    return places


def saturated_share(histogram: Histogram, amax: float) -> float:
    """Share of all values whose magnitude is above `amax`, to a bin."""
    beyond = histogram.counts[histogram.edges[:-1] >= amax].sum() if amax < histogram.absmax else 0
    return float(beyond / histogram.num_values)


def has_outliers(histogram: Histogram) -> bool:
    """Whether the largest magnitude is over 8 times the one that 99.99 % of the values stay within."""
    return histogram.absmax > _OUTLIER_FACTOR * percentile_amax(histogram, _OUTLIER_PERCENTILE)


@dataclass(frozen=True, slots=True)
class Choice:
    """The method for one tensor, and why."""

    method: Method
    reason: str


def choose(histogram: Histogram, found: Mapping[Method, float]) -> Choice:
    """What `auto` picks for one tensor: the largest magnitude, unless rounding then costs over a tenth of the norm.

    Rounding errors are independent and average out in the sums behind them; what is cut off a value is not, and the largest
    values decide most. So a little less squared error does not pay for clipping, unless outliers leave the rest few steps.

    Entropy is never picked: on the first layers of a text recogniser it clips away nearly all that matters.
    """
    if is_empty(histogram):
        return Choice("minmax", f"nothing but zeros or numbers below {SMALLEST_AMAX:.3g}; stands for any range")
    unclipped = unclipped_db(histogram)
    if unclipped >= _GOOD_ENOUGH_DB:
        return Choice("minmax", f"{unclipped:.1f} dB above its rounding error without clipping")
    share = found["mse"] / histogram.absmax
    return Choice(
        "mse", f"{unclipped:.1f} dB without clipping; at {share:.3g} of the largest magnitude the error is least"
    )


def _x_log_x(x: Floats) -> Floats:
    return x * np.log(np.where(x > 0, x, 1.0))


def _last(counts: Floats) -> int:
    return int(np.flatnonzero(counts)[-1])


def _from_zero(values: NDArray[np.generic]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
