"""Verdicts: what passes, what never does, and by how much."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trtforge.errors import SeveralErrors, SpecError
from trtforge.parity.metrics import compare
from trtforge.parity.tolerances import NEVER, PRESETS, STAGES, Tolerance, judge, resolve_tolerances

LOOSE = Tolerance(atol=1e9, min_cosine=-1, max_norm_relative=1e9, min_match=0)
BOUNDS = (
    "atol",
    "rtol",
    "min_cosine",
    "min_sqnr_db",
    "max_norm_relative",
    "min_top1",
    "min_topk",
    "max_kl",
)
RNG = np.random.default_rng(0)
REFERENCE = RNG.normal(size=(64, 10)).astype(np.float32)


def verdict(reference, candidate, tolerance, **options):
    return judge(compare(np.asarray(reference), np.asarray(candidate), **options), tolerance)


def metrics_of(checks):
    return [check.metric for check in checks]


@given(
    arrays.arrays(np.float32, (2, 5), elements=st.floats(-1e3, 1e3, width=32)),
    arrays.arrays(np.float32, (2, 5), elements=st.floats(-1, 1, width=32)),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_atol_and_rtol_are_relative_to_the_tensor(reference, noise, atol, rtol):
    candidate = reference + noise
    error = np.abs(reference.astype(np.float64) - candidate.astype(np.float64)).max()
    allowed = atol + rtol * float(np.abs(reference).max())
    found = verdict(reference, candidate, Tolerance(atol=atol, rtol=rtol))

    assert found.passed == (error <= allowed)
    assert found.passed == (found.closest.excess <= 1)


def test_errors_near_zero_pass_where_they_are_small_for_the_tensor():  # C48
    reference = np.array([1e-9, 1, -2])
    candidate = reference + [5e-6, 1e-4, 1e-4]

    assert verdict(reference, candidate, Tolerance(atol=1e-5, rtol=1e-3)).passed
    assert verdict(reference, candidate, Tolerance(rtol=1e-3)).passed
    assert not verdict(reference, candidate, Tolerance(atol=1e-5)).passed


@pytest.mark.parametrize(
    ("bound", "holds", "breaks"),
    [
        ("atol", 1e-1, 1e-4),
        ("rtol", 1e-1, 1e-4),
        ("min_cosine", 0.999, 0.9999999),
        ("min_sqnr_db", 30.0, 60.0),
        ("max_norm_relative", 1e-1, 1e-4),
        ("min_top1", 0.9, 1.1),
        ("min_topk", 0.9, 1.1),
        ("max_kl", 1e-2, 1e-9),
    ],
)
def test_each_bound_can_break_alone(bound, holds, breaks):
    metrics = compare(REFERENCE, REFERENCE + RNG.normal(size=REFERENCE.shape).astype(np.float32) * 1e-2, logits=True)

    assert judge(metrics, Tolerance(**{bound: holds})).passed
    broken = judge(metrics, replace(LOOSE, **{"atol": None, bound: breaks}))
    assert not broken.passed
    assert len(broken.reasons) == 1
    assert broken.reasons[0].excess > 1
    assert broken.reasons[0] == broken.closest


def test_the_worst_bound_is_told_first():
    found = verdict([1.0, 2.0], [1.0, 2.5], Tolerance(atol=1e-3, max_norm_relative=0.2))

    assert metrics_of(found.reasons) == ["max_abs_diff", "norm_relative"]
    assert str(found.reasons[0]) == "max_abs_diff is 0.5, allowed at most 0.001"
    assert found.reasons[0].excess == pytest.approx(500)
    assert found.reasons[0].at.index == (1,)


def test_a_percentile_forgives_the_outliers_that_it_leaves_out():
    candidate = REFERENCE.copy()
    candidate[0, :3] += 1

    assert verdict(REFERENCE, candidate, Tolerance(atol=1e-6, error_at="p99")).passed
    assert not verdict(REFERENCE, candidate, Tolerance(atol=1e-6, error_at="p99.9")).passed
    assert not verdict(REFERENCE, candidate, Tolerance(atol=1e-6)).passed


@pytest.mark.parametrize(
    ("reference", "candidate", "metric"),
    [
        (np.ones((2, 3)), np.ones((3, 2)), "length"),
        (np.ones((2, 1)), np.ones((2, 3)), "length"),
        (np.ones((2, 0)), np.ones((2, 2)), "length"),
        (np.ones(3, np.float32), np.ones(3, np.float16), "type"),
        (np.ones(3, np.int64), np.ones(3, np.int32), "type"),
        (np.array([np.nan]), np.array([np.nan]), "finite"),
        (np.array([0, -np.inf]), np.array([0, -np.inf]), "finite"),
        (np.array([1.0, 1.0]), np.array([1.0, np.nan]), "finite"),
        (np.array([1.0, 1.0]), np.array([1.0, np.inf]), "finite"),
    ],
)
def test_some_differences_no_tolerance_allows(reference, candidate, metric):
    found = verdict(reference, candidate, LOOSE)

    assert not found.passed
    assert metrics_of(found.reasons) == [metric]
    assert found.closest.excess == NEVER


def test_who_is_not_finite_is_told():
    both = verdict([0, -np.inf], [0, -np.inf], LOOSE)
    candidate = verdict([0.0, 1.0], [np.nan, np.nan], LOOSE)

    assert both.reasons[0].found == "a reference with 1 NaN or infinite value"
    assert candidate.reasons[0].found == "2 NaN or infinite values"
    assert candidate.reasons[0].at.index == (0,)


def test_a_type_that_is_meant_to_differ_is_allowed_by_name():
    reference, candidate = np.float32([1, 2]), np.float16([1, 2.001])
    meant = replace(LOOSE, dtype="float16")

    assert verdict(reference, candidate, meant).passed
    assert not verdict(reference, candidate, replace(meant, atol=1e-6)).passed
    assert not verdict(reference, candidate, replace(meant, dtype="bfloat16")).passed
    assert not verdict(reference, reference, meant).passed
    assert not verdict(reference, np.float16([1, np.nan]), meant).passed
    assert not verdict(reference, np.int64([1, 2]), replace(meant, dtype="int64")).passed


@pytest.mark.parametrize("tolerance", [Tolerance(), Tolerance(min_match=0)])
def test_a_tolerance_without_bounds_passes_no_real_output(tolerance):
    assert metrics_of(verdict([1.0], [1.0], tolerance).reasons) == ["bounds"]


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_bound_that_is_nan_holds_for_nothing(bound):
    assert not verdict([[1.0, 2.0]], [[1.1, 2.0]], replace(LOOSE, **{bound: math.nan}), logits=True).passed


@pytest.mark.parametrize("bound", ["min_top1", "min_topk", "max_kl"])
def test_figures_of_logits_that_were_not_measured_do_not_pass(bound):
    found = verdict([[1.0, 2.0]], [[1.1, 2.0]], replace(LOOSE, **{bound: 0.0}))

    assert not found.passed
    assert found.reasons[0].found == "undefined"


@pytest.mark.parametrize("bound", BOUNDS)
def test_an_equal_output_passes_every_bound(bound):
    tolerance = Tolerance(**{bound: 0.0 if bound.startswith(("atol", "rtol", "max")) else 1.0})

    for shape in ((2, 3), (0, 3), ()):
        assert verdict(np.zeros(shape), np.zeros(shape), tolerance).passed
        assert verdict(np.ones(shape), np.ones(shape), tolerance).passed


@pytest.mark.parametrize("size", [0.0, 1e-7, 9e-3])
def test_atol_decides_without_relative_figures_on_an_output_near_zero(size):
    noise = np.full(4, 5e-4) * [1, -1, 1, -1]
    fp16 = PRESETS["engine"]["fp16"]

    assert verdict(np.full(4, size), size + noise, fp16).passed
    assert not verdict(np.full(4, size), size + noise * 4, fp16).passed
    assert verdict(np.full(4, size), size + noise, fp16).notes[-1].startswith("nothing relative to its size is bounded")
    assert not verdict(np.full(4, 0.02), 0.02 + noise, fp16).passed
    assert not verdict(np.full(4, 9e-3), 9e-3 + noise, replace(fp16, near_zero=None)).passed
    assert not verdict(np.full(4, size), size + noise, Tolerance(max_norm_relative=1e-3)).passed


def test_an_atol_above_the_output_is_noted():
    swapped = verdict([1e-7, 2e-7], [2e-7, 1e-7], Tolerance(atol=1e-5))

    assert swapped.passed
    assert swapped.notes == ("atol 1e-05 allows any value as small as this output's (2e-07 at most)",)
    assert not verdict([1e-7, 2e-7], [2e-7, 1e-7], Tolerance(atol=1e-5, min_cosine=0.99)).passed


@pytest.mark.parametrize(
    ("num_different", "min_match", "passed"),
    [(0, 1, True), (1, 1, False), (1, 0.9, True), (2, 0.9, False), (3, 0.7, True), (10, 0, True)],
)
def test_whole_numbers_match_exactly_whatever_the_other_bounds(num_different, min_match, passed):  # C17
    reference = np.arange(10)
    found = verdict(reference, reference + (reference < num_different), replace(LOOSE, min_match=min_match))

    assert found.passed == passed
    assert found.closest.found == f"{num_different} of 10 different"


def test_every_stage_after_the_first_has_every_precision():
    assert set(PRESETS) == set(STAGES[1:])
    assert {tuple(sorted(presets)) for presets in PRESETS.values()} == {tuple(sorted(PRESETS["engine"]))}
    for presets in PRESETS.values():
        assert all("Source: " in preset.reason and preset.atol for preset in presets.values())


@pytest.mark.parametrize(
    ("precision", "round_to"), [("fp16", "float16"), ("bf16", "bfloat16"), ("fp8", "float8_e4m3fn")]
)
def test_presets_allow_rounding_and_no_fault_of_one_part_in_ten(precision, round_to):
    import ml_dtypes

    dtype = getattr(ml_dtypes, round_to, None) or round_to
    preset = PRESETS["lowered"][precision]
    reference = RNG.normal(size=(32, 384)).astype(np.float32)
    rounded = reference.astype(dtype).astype(np.float32)
    one_row_swapped = rounded.copy()
    one_row_swapped[:6] = np.roll(rounded[:6], 1, axis=-1)

    assert verdict(reference, rounded, preset).passed
    assert not verdict(reference, one_row_swapped, preset).passed


def test_overrides_must_name_outputs():
    default, mine = Tolerance(atol=1.0), Tolerance(atol=2.0)

    assert resolve_tolerances(["a", "b"], default, {"b": mine}) == {"a": default, "b": mine}
    with pytest.raises(SeveralErrors) as caught:
        resolve_tolerances(["logits", "slots"], default, {"logit": mine, "zzz": mine})
    assert [problem.exit_code for problem in caught.value.problems] == [SpecError.exit_code] * 2
    assert [problem.next_step for problem in caught.value.problems] == ["rename it to 'logits'", "remove 'zzz'"]
