"""Figures of measurements: percentiles, slowdowns, and a log simulated through a queue."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtforge.runtime.measure import Switches, Timings, percentile, remarks, spread
from trtforge.runtime.queue import (
    Batcher,
    confirmed_rate,
    highest_rate,
    keeps_up,
    levels,
    paced,
    padded,
    replay,
)
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
    timings = Timings(ones, ones * 10, ones * 100, ones * 1000, ones * 1e4, wall_s=1.5)

    assert timings.latency.tolist() == [111.0] * 3
    assert timings.throughput_qps == 2.0


def test_unstable_and_host_bound_figures_are_remarked():
    zeros = np.zeros(4)
    wild = Timings(zeros, np.array([1.0, 2.0, 1.0, 2.0]), zeros, np.full(4, 1.4), zeros, wall_s=1.0)
    calm = Timings(zeros, np.array([1.0, 1.01, 1.0, 1.01]), zeros, np.full(4, 0.1), zeros, wall_s=1.0)

    assert [remark.split()[0] for remark in remarks(wild, Switches())] == ["compute", "the"]
    assert remarks(calm, Switches()) == ()
    assert spread(wild.compute).variation == pytest.approx(0.5 / 1.5)


def plain_noise(rng):
    """1 %, by chance alone."""
    return lambda: 1 + 0.01 * rng.standard_normal(2)


def gpu_noise(rng):
    """0.3 % by chance, clocks that drift, 0.3 % for whichever runs first, and 1 run in 50 that something else disturbs."""
    drift = np.cumsum(0.003 * rng.standard_normal(30))
    rounds = iter(range(15))

    def pair():
        number = next(rounds)
        first_and_second = [1.003, 1.0] if number % 2 else [1.0, 1.003]
        disturbed = 1 + rng.uniform(0.1, 0.3, 2) * (rng.random(2) < 1 / 50)
        return (1 + drift[2 * number : 2 * number + 2] + 0.003 * rng.standard_normal(2)) * first_and_second * disturbed

    return pair


@pytest.mark.parametrize("noise", [plain_noise, gpu_noise])
def test_a_slower_engine_is_found_and_an_equal_one_is_not(noise):
    rng = np.random.default_rng(7)

    def compared(factor):
        pair = noise(rng)
        reference, candidate = np.array([pair() for _ in range(15)]).T
        return slowdown(2.0 * reference, 2.0 * factor * candidate)

    assert sum(compared(1.0).low > 0.0 for _ in range(400)) <= 4  # 99 of 100 pass even where nothing is allowed
    assert sum(compared(1.0).low > 0.02 for _ in range(100)) <= 1
    assert sum(compared(1.05).low > 0.02 for _ in range(100)) >= 99


def test_a_drift_of_both_cancels():
    drift = np.linspace(1, 3, 15)
    found = slowdown(drift, drift * 1.05)

    assert found.ratio == pytest.approx(0.05)
    assert found.low == pytest.approx(0.05)


def simulated(arrivals, cost, *, weights=None, window_ms, max_batch):
    arrivals = np.asarray(arrivals)
    weights = np.ones(len(arrivals), np.int64) if weights is None else np.array(weights)
    return replay(Batcher(arrivals, weights, window_ms=window_ms, max_batch=max_batch), cost)


def test_a_batch_waits_for_its_window_and_for_the_gpu():
    # 0 and 1 ms share a batch that starts at 5 ms and ends at 15; the one of 6 ms waits for the GPU until then.
    found = simulated([0.0, 0.001, 0.006], lambda *_: 10.0, window_ms=5.0, max_batch=8)

    assert found.latency_ms.tolist() == [15.0, 14.0, 19.0]
    assert found.batch_sizes == (2, 1)
    assert found.busy == pytest.approx(20 / 25)


def test_a_full_batch_starts_at_once():
    found = simulated(np.zeros(5), lambda first, end: float(end - first), window_ms=5.0, max_batch=2)

    assert found.batch_sizes == (2, 2, 1)
    # 2 ms each, and the last one has waited for its window, 5 ms, before it takes 1 ms.
    assert found.latency_ms.tolist() == [2.0, 2.0, 4.0, 4.0, 6.0]


def test_requests_with_batch_sizes_of_their_own():
    # 3 + 2 are too many for 4, which shows at 1 ms; 2 + 2 are just full at 2 ms, and wait for the GPU until 3.
    seconds = [0.0, 0.001, 0.002, 0.010]
    found = simulated(seconds, lambda *_: 2.0, weights=[3, 2, 2, 9], window_ms=50.0, max_batch=4)

    assert found.batch_sizes == (3, 4, 9)
    assert found.latency_ms.tolist() == [3.0, 4.0, 3.0, 2.0]


def test_what_cannot_be_served_stops_the_log():
    found = simulated(np.zeros(3), lambda first, _end: [1.0, np.inf, 1.0][first], window_ms=0.0, max_batch=1)

    assert found.latency_ms.tolist() == [1.0, np.inf, np.inf]


def test_the_highest_rate_that_holds():
    # One at a time and 10 ms each: a log of 10 requests a second, evenly spaced, is just never late at 100 a second.
    def holds(rate, limit_ms):
        _, times = paced(np.arange(20) / 10.0, rate / 10, seconds=3.0)
        return simulated(times, lambda *_: 10.0, window_ms=0.0, max_batch=1).latency_ms.max() <= limit_ms

    assert highest_rate(lambda rate: holds(rate, 10.001)) == pytest.approx(100, rel=0.002)
    assert highest_rate(lambda rate: holds(rate, 9.0)) == 0.0


@pytest.mark.parametrize(
    ("cost_ms", "window_ms", "max_batch", "is_held"),
    [
        (0.9, 0.0, 1, True),
        (5.0, 0.0, 16, True),  # always busy, in batches of 5
        (15.9, 0.0, 16, True),
        (16.5, 0.0, 16, False),  # 3 % too slow
        (1.03, 0.0, 1, False),
        (2.0, 100.0, 16, True),
    ],
)
def test_an_engine_keeps_up_where_batches_grow_as_requests_come(cost_ms, window_ms, max_batch, is_held):
    # 3000 requests, one a millisecond.
    found = simulated(np.arange(3000) / 1000, lambda *_: cost_ms, window_ms=window_ms, max_batch=max_batch)

    assert keeps_up(found) == is_held


def test_a_log_is_cut_or_begun_anew():
    log = np.array([0.0, 1.0, 2.0])  # the mean gap, 1 s, lies between two rounds

    which, times = paced(log, speed=1.0, seconds=1.5)
    assert (which.tolist(), times.tolist()) == ([0, 1], [0.0, 1.0])
    which, times = paced(log, speed=2.0, seconds=2.6)
    assert (which.tolist(), times.tolist()) == ([0, 1, 2, 0, 1, 2], [0.0, 0.5, 1.0, 1.5, 2.0, 2.5])
    assert len(paced(log, speed=1e9, seconds=3.0)[0]) == 200_000


@pytest.mark.parametrize(
    ("true", "tries", "runs", "expected"),
    [
        (10.0, 3, [8.0, 10.0, 12.5], 10.0),  # 25 % more until one does not hold
        (7.0, 4, [8.0, 6.4, pytest.approx(7.155, rel=1e-3), pytest.approx(6.767, rel=1e-3)], 6.767),  # then halves
        (1.0, 3, [8.0, 6.4, 5.12], 0.0),
    ],
)
def test_a_proposed_rate_is_confirmed_by_a_few_runs(true, tries, runs, expected):
    tried = []

    def holds(rate):
        tried.append(rate)
        return rate <= true

    assert confirmed_rate(8.0, holds, tries) == pytest.approx(expected, rel=1e-3)
    assert tried == runs


@given(
    st.lists(st.tuples(st.floats(0, 0.02), st.integers(1, 5)), min_size=1, max_size=30),
    st.floats(0, 10),
    st.integers(1, 6),
)
def test_batches_follow_the_rule_whatever_arrives(gaps_and_weights, window_ms, max_batch):
    arrivals = np.cumsum([gap for gap, _ in gaps_and_weights])
    weights = np.array([weight for _, weight in gaps_and_weights])
    spans = []

    def cost(first, end):
        spans.append((first, end))
        return 3.0

    found = simulated(arrivals, cost, weights=weights, window_ms=window_ms, max_batch=max_batch)

    assert [first for first, _ in spans] == [0, *(end for _, end in spans[:-1])]
    assert spans[-1][1] == len(arrivals)
    for first, end in spans:
        start = found.latency_ms[first] + arrivals[first] * 1000 - 3.0
        size = weights[first:end].sum()
        assert size <= max_batch or end == first + 1
        assert arrivals[end - 1] * 1000 <= start + 1e-6
        if end < len(arrivals) and arrivals[end] * 1000 < start - 1e-6:  # what had come did not fit
            assert size + weights[end] > max_batch


def test_levels_hold_every_batch_of_a_log():
    sizes = np.stack([np.full(1000, 1), np.arange(1000) + 1], axis=1)
    none = np.zeros((0, 2), int)
    batch, length = levels(sizes, batch=0, max_batch=12, most=none)

    assert batch.tolist() == [1, 2, 4, 8, 12]
    assert length[-1] == 1000
    assert np.diff([0, *length]) == pytest.approx(125, abs=1)  # as many requests between each two
    assert levels(np.array([[20, 7]]), batch=0, max_batch=12, most=none)[0].tolist() == [1, 2, 4, 8, 16, 20]


def test_what_fits_a_profile_is_padded_to_what_fits_it():
    sizes = np.stack([np.full(1000, 1), np.arange(1000) + 1], axis=1)
    batch, length = levels(sizes, batch=0, max_batch=8, most=np.array([[6, 300], [64, 40], [2, 2000]]))

    assert batch.tolist() == [1, 2, 4, 6, 8]
    assert {40, 300} < set(length.tolist())
    assert (len(length), length[-1]) == (10, 1000)


def test_a_batch_is_padded_to_the_next_measured_size():
    sizes = np.array([[1, 10], [1, 30], [1, 20]])
    cell = padded(sizes, 0, [np.array([1, 2, 4]), np.array([16, 32])])

    assert [cell(0, 1), cell(0, 2), cell(0, 3), cell(2, 3)] == [(0, 0), (1, 1), (2, 1), (0, 1)]
