"""The choice of profiles: against exhaustive search, the definition of its cost, and the tie rule."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtforge.errors import CoverageError, TrtForgeError
from trtforge.profile_choice import profile_for
from trtforge.traffic.choose import Box, Wishes, choose, fewest
from trtforge.traffic.cost import Counted, fit_work, measured, modelled, read_latencies
from trtforge.traffic.coverage import assignment, boxes_of, coverage_of, outliers, profiles_of, refuse_low, volumes
from trtforge.traffic.histogram import Misfit, Traffic
from trtforge.traffic.layout import layout_of
from trtforge.types import TensorSpec

LINE = layout_of([TensorSpec("x", "float32", ("batch", 4))])
BERT = layout_of([TensorSpec("ids", "int64", ("batch", "seq")), TensorSpec("mask", "int64", ("batch", "seq"))])


def _any(sizes):
    return np.ones(len(sizes), bool)


def _wishes(num=1, coverage=1.0, most=4, **given):
    return Wishes(**{"coverage": coverage, "max_profiles": most, "multiples": (1,) * num, "is_allowed": _any, **given})


def _doublings(sizes, opt):
    """A cost that is easy to redo by hand: elements, and as much again for each doubling from opt."""
    return sizes.prod(axis=1) * (1 + np.abs(np.log2(sizes / opt)).sum(axis=1))


def _choose(sizes, counts, layout=LINE, cost=_doublings, **wishes):
    traffic = Traffic(layout.names, np.array(sizes, np.int64).reshape(len(counts), -1), np.array(counts, np.int64))
    return choose(traffic, _wishes(len(layout.names), **wishes), cost, lambda highs: volumes(highs, layout))


def _sizes(box):
    return [array.tolist() for array in (box.min, box.opt, box.max)]


def test_opt_is_the_commonest_shape_and_never_the_mean():
    # The mean is 5.5; the commonest size is 1.
    (option,) = _choose([1, 9, 10], [4, 3, 2], most=1)

    assert _sizes(option.boxes[0]) == [[1], [1], [10]]


def test_opt_by_cost_is_opt_in():
    # 4 requests of 1 element against 3 of 9.
    (option,) = _choose([1, 9, 10], [4, 3, 2], most=1, by_cost=True)

    assert option.boxes[0].opt.tolist() == [9]


def test_the_mean_cost_is_that_of_the_definition():
    (one, two) = _choose([1, 8], [3, 1], most=2)

    # One profile, tuned for 1: three requests cost 1, the other 8 elements times 1 + 3 doublings.
    assert one.mean_ms == pytest.approx((3 * 1 + 8 * 4) / 4)
    assert two.mean_ms == pytest.approx((3 * 1 + 8) / 4)
    assert [_sizes(box) for box in two.boxes] == [[[1], [1], [1]], [[2], [8], [8]]]


def test_no_size_between_profiles_is_left_out():
    option = _choose([3, 4, 30, 200], [5, 5, 5, 5])[-1]
    between = np.arange(3, 201)[:, None]

    assert (assignment(between, option.boxes, LINE) >= 0).all()


def test_one_giant_is_left_out_and_told():
    traffic = Traffic(("batch",), np.array([[1], [2], [4096]]), np.array([6000, 3999, 1]))
    (option,) = choose(traffic, _wishes(coverage=0.995, most=1), _doublings, lambda highs: volumes(highs, LINE))
    coverage = coverage_of(traffic, option.boxes, LINE)

    assert option.boxes[0].max.tolist() == [2]
    assert (coverage.num_covered, coverage.num_requests) == (9999, 10000)
    assert [(one.sizes, one.count) for one in coverage.uncovered] == [((4096,), 1)]
    assert [(one.name, one.largest, one.count, one.usual) for one in outliers(traffic)] == [("batch", 4096, 1, 2)]
    assert _choose([1, 2, 4096], [6000, 3999, 1], most=1)[0].boxes[0].max.tolist() == [4096]


def test_multiples_hold_for_every_end_of_every_profile():
    (option,) = _choose([3, 13, 17], [1, 5, 1], most=1, multiples=(8,))

    assert _sizes(option.boxes[0]) == [[8], [16], [24]]
    ends = [_sizes(box) for box in _choose([3, 13, 40], [5, 5, 5], multiples=(8,))[-1].boxes]
    assert {size[0] % 8 for box in ends for size in box} == {0}


def test_limits_bound_every_profile():
    options = _choose([1, 8, 64], [5, 5, 5], is_allowed=lambda sizes: sizes[:, 0] <= 8)

    assert {box.max[0] for option in options for box in option.boxes} <= {1, 8}
    assert _choose([64], [5], is_allowed=lambda sizes: sizes[:, 0] <= 8) == ()


def test_where_the_server_pads_a_request_costs_as_much_as_max():
    (one, two) = _choose([1, 2, 16], [8, 1, 1], most=2, padded=True)

    assert one.mean_ms == pytest.approx(16)
    # [1, 2] and [16]: nine requests at 2, one at 16.
    assert two.mean_ms == pytest.approx((9 * 2 + 16) / 10)
    assert [_sizes(box) for box in two.boxes] == [[[1], [2], [2]], [[3], [16], [16]]]


def test_the_fewest_profiles_near_the_least_cost_are_taken():
    options = _choose([1, 8], [3, 1], most=4)

    assert fewest(options) is options[1]


def _exhaustive(traffic, layout, cost, most):
    """The least cost of at most `most` boxes over every set of them that covers the whole range."""
    axes = [np.unique(column) for column in traffic.sizes.T]
    spans = [[(low, high) for low in range(len(axis)) for high in range(low, len(axis))] for axis in axes]
    lattice = np.array(list(itertools.product(*axes)))
    boxes = []
    for pick in itertools.product(*spans):
        low = np.array([axis[first - 1] + 1 if first else axis[0] for axis, (first, _) in zip(axes, pick, strict=True)])
        high = np.array([axis[last] for axis, (_, last) in zip(axes, pick, strict=True)])
        held = ((low <= traffic.sizes) & (traffic.sizes <= high)).all(axis=1)
        opt = traffic.sizes[held][traffic.counts[held].argmax()] if held.any() else high
        boxes.append(Box(low, opt, high))
    least = np.inf
    for chosen in (chosen for num in range(1, most + 1) for chosen in itertools.combinations(boxes, num)):
        if (assignment(lattice, chosen, layout) >= 0).all():
            found = assignment(traffic.sizes, chosen, layout)
            parts = [
                traffic.counts[found == at] @ cost(traffic.sizes[found == at], box.opt) for at, box in enumerate(chosen)
            ]
            least = min(least, sum(parts) / traffic.counts.sum())
    return least


@settings(max_examples=8, deadline=None)
@given(st.dictionaries(st.integers(1, 40), st.integers(1, 99), min_size=2, max_size=5), st.integers(1, 3))
def test_one_size_is_solved_as_well_as_by_every_set_of_boxes(requests, most):
    sizes = np.array(sorted(requests), np.int64)[:, None]
    traffic = Traffic(LINE.names, sizes, np.array([requests[size] for size in sizes[:, 0].tolist()]))
    options = _choose(sizes, traffic.counts, most=most)

    assert options[-1].mean_ms <= _exhaustive(traffic, LINE, _doublings, most) * 1.02


@pytest.mark.parametrize("seed", range(6))
def test_two_sizes_are_solved_within_two_percent_of_every_set_of_boxes(seed):
    random = np.random.default_rng(seed)
    lattice = np.array(list(itertools.product([1, 4, 16], [16, 50, 300])))
    traffic = Traffic(BERT.names, lattice, (random.pareto(0.7, 9) * 10 + 1).astype(np.int64))
    options = _choose(lattice, traffic.counts, BERT, most=2)

    assert options[-1].mean_ms <= _exhaustive(traffic, BERT, _doublings, 2) * 1.02


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=3, max_size=3), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(1, 10), st.integers(1, 10)), min_size=1, max_size=5),
)
def test_many_shapes_go_where_the_tie_rule_sends_each(corners, requests):
    boxes = [Box(*np.sort(np.array(three), axis=0)) for three in corners]
    profiles = profiles_of(boxes, BERT)
    found = assignment(np.array(requests, np.int64), boxes, BERT)

    for sizes, place in zip(requests, found.tolist(), strict=True):
        assert profile_for(BERT.shapes(sizes), profiles) is (profiles[place] if place >= 0 else None)
    assert [_sizes(box) for box in boxes_of(profiles, BERT)] == [_sizes(box) for box in boxes]


def test_too_few_covered_is_an_error_that_lists_what_is_left_out():
    sizes, counts = np.array([[1], [3], [8]]), np.array([60, 30, 9])
    traffic = Traffic(("batch",), sizes, counts, (Misfit("'x' has 3 sizes, the model's has 2", 1, 7),))
    boxes = [Box(*(np.array([size]) for size in three)) for three in ((1, 1, 2), (5, 8, 8))]
    coverage = coverage_of(traffic, boxes, LINE)

    assert (coverage.num_covered, coverage.by_profile) == (69, (60, 9))
    refuse_low(coverage, 0.69, ("batch",), "profiles cover", "-", None)
    with pytest.raises(CoverageError) as raised:
        refuse_low(coverage, 0.95, ("batch",), "the profiles cover", "build again", None)
    (problem,) = raised.value.problems
    assert problem.exit_code == 12
    assert problem.summary == "the profiles cover 69.00 % of 100 requests, expected 95 % or more"
    assert problem.detail == (
        "1 request can never fit: 'x' has 3 sizes, the model's has 2 (line 7)",
        "30 requests outside: batch 3",
    )


def test_work_is_the_polynomial_through_the_counted_points():
    def count(sizes):
        batch, seq = sizes
        return Counted(7 * batch * seq**2 + 5 * batch * seq, 1000 + 3 * batch * seq, 2 * batch)

    work = fit_work([[1, 4, 32], [16, 100, 512]], count)
    sizes = np.array([[1, 16], [7, 33], [32, 500]])

    expected = [(one.flops, one.moved_bytes, one.held_bytes) for one in map(count, sizes.tolist())]
    np.testing.assert_allclose(work.at(sizes), expected, rtol=1e-9)


def test_modelled_cost_is_the_slower_of_arithmetic_and_memory_and_grows_with_distance():
    cost = modelled(fit_work([[1, 2]], lambda sizes: Counted(2e11 * sizes[0] - 2e11, 1e9, 0)))
    sizes = np.array([[1], [2]])

    # 1e9 bytes take 1 ms, 2e11 operations 2 ms; one doubling from opt adds 5 %.
    np.testing.assert_allclose(cost(sizes, np.array([1])), [1.0, 2.0 * 1.05])


def _latencies(tmp_path, points, symbols=("seq", "batch"), **other):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"symbols": symbols, "points": points, **other}))
    return path


def test_measured_latencies_are_met_and_power_laws_between_them_too(tmp_path):
    points = [
        {"batch": batch, "seq": seq, "ms": 0.01 * batch * seq**1.5, "opt": {"batch": 4, "seq": opt}}
        for batch in (1, 4, 16)
        for seq in (16, 64, 256)
        for opt in (64, 256)
    ]
    grids = read_latencies(_latencies(tmp_path, points, gpu="H200", how="trtexec"), ("batch", "seq"))
    cost = measured(grids)
    sizes = np.array([[1, 16], [3, 100], [16, 256], [32, 512]])

    assert [grid.opt.tolist() for grid in grids] == [[4, 64], [4, 256]]
    for opt in ([4, 64], [4, 256], [4, 100]):
        np.testing.assert_allclose(cost(sizes, np.array(opt)), 0.01 * sizes[:, 0] * sizes[:, 1] ** 1.5, rtol=1e-9)


def test_a_measured_opt_is_taken_as_it_was_measured(tmp_path):
    points = [
        {"batch": batch, "ms": ms, "opt": {"batch": opt}} for opt, ms in ((1, 2.0), (16, 8.0)) for batch in (1, 16)
    ]
    cost = measured(read_latencies(_latencies(tmp_path, points, ("batch",)), ("batch",)))
    sizes = np.array([[1], [16]])

    assert cost(sizes, np.array([1])).tolist() == pytest.approx([2, 2])
    assert cost(sizes, np.array([16])).tolist() == pytest.approx([8, 8])
    assert cost(sizes, np.array([4])).tolist() == pytest.approx([4, 4])  # halfway in doublings: the geometric mean


def test_latencies_measured_on_a_gpu_make_two_profiles_cheaper_than_one():
    path = Path(__file__).parents[1] / "data" / "bert_base_h200_latencies.json"
    cost = measured(read_latencies(path, BERT.names))
    # The figures are the file's own: an engine tuned for one short request, and one tuned for large batches.
    both = np.array([[1, 32], [32, 128]])
    np.testing.assert_allclose(cost(both, np.array([1, 32])), [1.1523, 30.4005], rtol=1e-6)
    np.testing.assert_allclose(cost(both, both), [1.1523, 17.5705], rtol=1e-6)

    one, two = _choose(both, [3, 1], BERT, cost, most=2)

    assert one.mean_ms == pytest.approx((3 * 1.1523 + 30.4005) / 4)
    assert two.mean_ms == pytest.approx((3 * 1.1523 + 17.5705) / 4)


@pytest.mark.parametrize(
    ("points", "words"),
    [
        (
            [{"batch": 1, "seq": 16, "ms": 1}, {"batch": 2, "seq": 32, "ms": 1}],
            "has a gap: no latency at batch 1, seq 32",
        ),
        ([{"batch": 1, "seq": 16, "ms": 0}], "points[0]: ms is 0, expected a number above 0"),
        ([{"batch": 1, "ms": 1}], "points[0]: 'seq' is None, expected a whole number of 1 or more"),
        (
            [{"batch": 1, "seq": 16, "ms": 1, "msec": 2}],
            "points[0]: found the key 'msec', expected batch, seq, ms and opt",
        ),
        (
            [{"batch": 1, "seq": 16, "ms": 1}, {"batch": 1, "seq": 16, "ms": 1, "opt": {"batch": 1, "seq": 16}}],
            "has an opt at some points only",
        ),
        ([], "holds no latencies: points: "),
    ],
)
def test_latencies_that_cannot_be_used(tmp_path, points, words):
    with pytest.raises(TrtForgeError) as raised:
        read_latencies(_latencies(tmp_path, points), ("batch", "seq"))
    assert words in raised.value.problems[0].summary


def test_latencies_of_other_sizes(tmp_path):
    with pytest.raises(TrtForgeError) as raised:
        read_latencies(_latencies(tmp_path, [{"n": 1, "ms": 1}], ("n",)), ("batch", "seq"))
    assert raised.value.problems[0].summary.endswith("measures n; the model's open sizes are batch, seq")
