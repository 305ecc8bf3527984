"""Figures of measurements: percentiles, slowdowns, and a log replayed through a queue."""

from __future__ import annotations

import numpy as np
import pytest

from trtforge.runtime.measure import Switches, Timings, percentile, remarks, spread
from trtforge.runtime.queue import levels, most_qps, padded_cost, replay
from trtforge.runtime.regression import slowdown


@pytest.mark.parametrize(
    ("count", "share", "expected"),
    [
        (10, 99.0, 10),  # 10 - 1 - int(0.1) = 9
        (100, 99.0, 100),  # float32(0.99) is a little more than 0.99, so that nothing is left out
        (100, 90.0, 90),
        (1000, 95.0, 950),
        (1, 99.0, 1),
        (4, 50.0, 2.5),
        (5, 50.0, 3),
    ],
)
def test_percentiles_are_those_of_trtexec(count, share, expected):
    assert percentile(np.arange(1.0, count + 1), share) == expected


def test_latency_is_copy_in_and_compute_and_copy_out_without_enqueue():
    ones = np.ones(3)
    timings = Timings(ones, ones * 10, ones * 100, ones * 1000, wall_s=1.5)

    assert timings.latency.tolist() == [111.0] * 3
    assert timings.throughput_qps == 2.0


def test_unstable_and_host_bound_figures_are_remarked():
    zeros = np.zeros(4)
    wild = Timings(zeros, np.array([1.0, 2.0, 1.0, 2.0]), zeros, np.full(4, 1.4), wall_s=1.0)
    calm = Timings(zeros, np.array([1.0, 1.01, 1.0, 1.01]), zeros, np.full(4, 0.1), wall_s=1.0)

    assert [remark.split()[0] for remark in remarks(wild, Switches())] == ["compute", "the"]
    assert remarks(calm, Switches()) == ()
    assert spread(wild.compute).variation == pytest.approx(0.5 / 1.5)


def rounds(rng: np.random.Generator, factor: float) -> np.ndarray:
    """Medians of 15 rounds with 1 % of noise."""
    return factor * (1 + 0.01 * rng.standard_normal(15))


def test_a_slower_engine_is_found_and_an_equal_one_is_not():
    rng = np.random.default_rng(7)
    equal = [slowdown(rounds(rng, 2.0), rounds(rng, 2.0)).exceeds(0.02) for _ in range(100)]
    slower = [slowdown(rounds(rng, 2.0), rounds(rng, 2.1)).exceeds(0.02) for _ in range(100)]

    by_chance = [slowdown(rounds(rng, 2.0), rounds(rng, 2.0)).exceeds(0.0) for _ in range(400)]

    assert sum(equal) <= 1
    assert sum(by_chance) <= 4  # 99 of 100 pass even where nothing is allowed
    assert sum(slower) == 100


def test_a_drift_of_both_cancels():
    drift = np.linspace(1, 3, 15)
    found = slowdown(drift, drift * 1.05)

    assert found.ratio == pytest.approx(0.05)
    assert found.low == pytest.approx(0.05)


def ones(count):
    return np.ones(count, np.int64)


def test_a_batch_waits_for_its_window_and_for_the_gpu():
    # 0 and 1 ms share a batch that starts at 5 ms and ends at 15; the one of 6 ms waits for the GPU until then.
    found = replay(np.array([0.0, 0.001, 0.006]), ones(3), lambda *_: 10.0, window_ms=5.0, max_batch=8)

    assert found.latency_ms.tolist() == [15.0, 14.0, 19.0]
    assert found.batch_sizes == (2, 1)
    assert found.busy == pytest.approx(20 / 25)


def test_a_full_batch_starts_at_once():
    found = replay(np.zeros(5), ones(5), lambda first, end: float(end - first), window_ms=5.0, max_batch=2)

    assert found.batch_sizes == (2, 2, 1)
    # 2 ms each, and the last one has waited for its window, 5 ms, before it takes 1 ms.
    assert found.latency_ms.tolist() == [2.0, 2.0, 4.0, 4.0, 6.0]


def test_requests_with_batch_sizes_of_their_own():
    # 3 + 2 are too many for 4, which shows at 1 ms; 2 + 2 are just full at 2 ms, and wait for the GPU until 3.
    seconds = np.array([0.0, 0.001, 0.002, 0.010])
    found = replay(seconds, np.array([3, 2, 2, 9]), lambda *_: 2.0, window_ms=50.0, max_batch=4)

    assert found.batch_sizes == (3, 4, 9)
    assert found.latency_ms.tolist() == [3.0, 4.0, 3.0, 2.0]


def test_what_cannot_be_served_stops_the_log():
    found = replay(np.zeros(3), ones(3), lambda first, _end: [1.0, np.inf, 1.0][first], window_ms=0.0, max_batch=1)

    assert found.latency_ms.tolist() == [1.0, np.inf, np.inf]


def test_the_highest_rate_within_a_limit():
    # One at a time and 10 ms each: at 100 requests a second evenly spaced the GPU is just never late.
    arrivals = np.arange(200) / 10.0
    ten = {"weights": ones(200), "cost": lambda *_: 10.0, "window_ms": 0.0, "max_batch": 1}

    assert most_qps(arrivals, limit_ms=10.001, **ten) == pytest.approx(100, rel=0.02)
    assert most_qps(arrivals, limit_ms=9.0, **ten) == 0.0


def test_levels_hold_every_batch_of_a_log():
    sizes = np.stack([np.full(1000, 1), np.arange(1000) + 1], axis=1)
    batch, length = levels(sizes, batch=0, max_batch=12)

    assert batch.tolist() == [1, 2, 4, 8, 12]
    assert length[-1] == 1000
    assert np.diff([0, *length]) == pytest.approx(125, abs=1)  # as many requests between each two
    assert levels(np.array([[20, 7]]), batch=0, max_batch=12)[0].tolist() == [1, 2, 4, 8, 16, 20]


def test_a_batch_is_padded_to_the_next_measured_size():
    sizes = np.array([[1, 10], [1, 30], [1, 20]])
    grid = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    cost = padded_cost(sizes, 0, [np.array([1, 2, 4]), np.array([16, 32])], grid)

    assert [cost(0, 1), cost(0, 2), cost(0, 3), cost(2, 3)] == [1.0, 4.0, 6.0, 2.0]
    assert sizes[0].tolist() == [1, 10]
