"""Magnitude counts against a direct count, and that the order of the data does not matter."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trtforge.calibration.histogram import NUM_BINS, Histogram

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def _of(*parts):
    histogram = Histogram()
    for part in parts:
        values = np.asarray(part, np.float32)
        histogram.add(values, float(values.min()), float(values.max()))
    return histogram


def _facts(histogram):
    return (
        histogram.counts.tolist(),
        histogram.top,
        histogram.num_below,
        histogram.num_zeros,
        histogram.low,
        histogram.high,
    )


@settings(max_examples=60, deadline=None)
@given(
    values=hnp.arrays(np.float32, st.integers(2, 40), elements=FLOATS),
    data=st.data(),
)
def test_order_and_splits_do_not_matter(values, data):
    whole = _facts(_of(values))
    shuffled = values[np.array(data.draw(st.permutations(range(values.size))))]
    cut = data.draw(st.integers(1, values.size - 1))

    assert _facts(_of(shuffled[:cut], shuffled[cut:])) == whole
    merged = _of(shuffled[:cut])
    merged.merge(_of(shuffled[cut:]))
    assert _facts(merged) == whole


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 7e4, 1e38])
def test_counts_are_those_of_a_direct_count(scale):
    values = (np.random.default_rng(0).standard_normal((3, 70001)) * scale / 6).astype(np.float32)
    values[0, :10] = 0
    values[1, :10] = -0.0
    histogram = _of(*values)
    magnitudes = np.abs(values.astype(np.float64)).ravel()

    expected = np.histogram(magnitudes, np.append(histogram.edges[:-1], np.inf))[0]

    np.testing.assert_array_equal(histogram.counts, expected)
    assert histogram.num_zeros == 20
    assert histogram.num_below == ((magnitudes > 0) & (magnitudes < histogram.edges[0])).sum()
    assert histogram.num_values == values.size
    assert (histogram.low, histogram.high) == (values.min(), values.max())


def test_bins_end_at_the_power_of_two_above_the_largest_magnitude():
    histogram = _of([0.1, -5.0])

    assert histogram.edges[-1] == 8
    assert histogram.edges[0] == 2**-13
    assert histogram.edges.size == NUM_BINS + 1


def test_a_power_of_two_opens_the_next_octave():
    assert _of([4.0]).edges[-1] == 8


@pytest.mark.parametrize("values", [[0.0, -0.0], [1e-45, -1e-40]])
def test_zeros_and_denormals_are_in_no_bin(values):
    histogram = _of(values)

    assert histogram.counts.sum() == 0
    assert histogram.num_values == 2
    assert histogram.num_zeros == sum(value == 0 for value in values)
