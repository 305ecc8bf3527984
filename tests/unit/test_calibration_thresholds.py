"""Each way to clip against a slow calculation from its definition, on the values themselves."""

from __future__ import annotations

import numpy as np
import pytest

from trtforge.calibration.histogram import Histogram
from trtforge.calibration.thresholds import (
    FALLBACK_AMAX,
    METHODS,
    SMALLEST_AMAX,
    amaxes,
    choose,
    entropy_amax,
    has_outliers,
    mse_amax,
    percentile_amax,
    saturated_share,
)


def _values(name):
    rng = np.random.default_rng(7)
    match name:
        case "normal":
            found = rng.standard_normal(50_000)
        case "relu":
            found = np.maximum(rng.standard_normal(50_000), 0)
        case "laplace":
            found = rng.laplace(size=50_000)
        case "heavy":
            found = rng.standard_t(2, size=50_000)
        case "outlier":
            found = np.append(rng.standard_normal(50_000), 900.0)
        case "uniform":
            found = rng.uniform(-3, 3, 50_000)
        case "tiny":
            found = rng.standard_normal(50_000) * 1e-20
    return found.astype(np.float32)


NAMES = ["normal", "relu", "laplace", "heavy", "outlier", "uniform", "tiny"]


def _histogram(values):
    histogram = Histogram()
    histogram.add(values, float(values.min()), float(values.max()))
    return histogram


def _quantization_error(values, amax):
    scale = amax / 127
    return np.mean((values - np.clip(np.rint(values / scale), -127, 127) * scale) ** 2)


@pytest.mark.parametrize("name", NAMES)
def test_mse_loses_hardly_more_than_the_best_of_many_bounds(name):
    values = _values(name).astype(np.float64)
    absmax = np.abs(values).max()
    found = mse_amax(_histogram(values.astype(np.float32)))

    best = min(_quantization_error(values, amax) for amax in np.geomspace(absmax / 1000, absmax, 60))

    assert _quantization_error(values, found) <= 1.01 * best
    assert found <= absmax


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("percentile", [90, 99.9, 99.99, 100])
def test_percentile_is_the_quantile_of_the_magnitudes_to_a_bin(name, percentile):
    values = _values(name)

    found = percentile_amax(_histogram(values), percentile)

    exact = np.quantile(np.abs(values.astype(np.float64)), percentile / 100, method="inverted_cdf")
    assert exact <= found <= exact * (1 + 2**-9)


def _slow_entropy_amax(magnitudes):
    """As pytorch-quantization does it, on 2048 bins up to a power of two, without zeros."""
    end = 2.0 ** (np.floor(np.log2(magnitudes.max())) + 1)
    bins = np.histogram(magnitudes[magnitudes > 0], 2048, range=(0, end))[0].astype(np.float64)
    last = np.flatnonzero(bins)[-1] + 1
    best, best_size = np.inf, 0
    for size in range(128, last + 1):
        levels = np.digitize(range(size), np.linspace(0, size, 129)) - 1
        filled = bins[:size] > 0
        sums = np.bincount(levels, bins[:size])
        q = np.where(filled, (sums / np.maximum(np.bincount(levels, filled), 1))[levels], 0)
        p = bins[:size].copy()
        p[-1] += bins[size:].sum()
        p, q = p / p.sum(), q / q.sum()
        used = p > 0
        divergence = np.inf if (q[used] == 0).any() else np.sum(p[used] * np.log(p[used] / q[used]))
        if divergence <= best:
            best, best_size = divergence, size
    return min(best_size * end / 2048, magnitudes.max()), end / 2048


@pytest.mark.parametrize("name", ["normal", "relu", "heavy", "uniform"])
def test_entropy_is_that_of_a_slow_calculation(name):
    values = _values(name)[:20_000]

    expected, width = _slow_entropy_amax(np.abs(values.astype(np.float64)))

    assert entropy_amax(_histogram(values)) == pytest.approx(expected, abs=width)


@pytest.mark.parametrize("name", NAMES)
def test_every_method_stays_within_what_was_seen(name):
    values = _values(name)

    found = amaxes(_histogram(values), 99.99)

    assert set(found) == set(METHODS)
    assert found["minmax"] == np.abs(values).max()
    assert all(SMALLEST_AMAX <= amax <= found["minmax"] for amax in found.values())


@pytest.mark.parametrize("values", [[0.0, 0.0], [1e-45, 0.0], [-1e-38, 1e-39]])
def test_nothing_to_measure_gives_the_fallback(values):
    histogram = _histogram(np.array(values, np.float32))
    found = amaxes(histogram, 99.99)

    assert set(found.values()) == {FALLBACK_AMAX}
    assert choose(histogram, found).method == "minmax"


@pytest.mark.parametrize("value", [2e-36, 1.0, -3.0, 3e38])
def test_a_constant_keeps_its_value(value):
    found = amaxes(_histogram(np.full(50, value, np.float32)), 99.99)

    np.testing.assert_allclose(list(found.values()), abs(np.float32(value)), rtol=1e-3)


def test_the_saturated_share_is_counted():
    histogram = _histogram(np.array([1.0] * 98 + [4.0, -8.0], np.float32))

    assert saturated_share(histogram, 2.0) == 0.02
    assert saturated_share(histogram, 4.5) == 0.01
    assert saturated_share(histogram, 8.0) == 0


def test_outliers_are_far_above_nearly_all_values():
    assert has_outliers(_histogram(_values("outlier")))
    assert not has_outliers(_histogram(_values("normal")))
