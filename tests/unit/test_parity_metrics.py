"""Metrics against plain float64 formulas, and where they are not defined."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trtforge.parity import metrics as module
from trtforge.parity.metrics import RELATIVE_FLOOR, Element, Metrics, compare
from trtforge.plain import from_plain, to_plain

SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
VALUES = st.floats(-1e6, 1e6, width=32)
FLOATS = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
WHOLE = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


@st.composite
def pairs(draw, shapes=SHAPES, elements=VALUES, dtype=np.float32):
    shape = draw(shapes)
    return [draw(arrays.arrays(dtype, shape, elements=elements)) for _ in range(2)]


@given(pairs())
def test_errors_are_those_of_the_formulas(pair):
    reference, candidate = (array.astype(np.float64) for array in pair)
    metrics, errors = compare(*pair), np.abs(reference - candidate)

    if not errors.size:
        assert (metrics.max_abs_diff, metrics.mean_abs_diff, metrics.worst, metrics.num_different) == (0, None, None, 0)
        return
    assert metrics.max_abs_diff == errors.max()
    assert metrics.mean_abs_diff == pytest.approx(errors.mean())
    assert metrics.num_different == (reference != candidate).sum()
    assert metrics.max_abs_reference == np.abs(reference).max()
    for field, share in (("p50", 0.5), ("p99", 0.99), ("p99_9", 0.999)):
        assert getattr(metrics, f"{field}_abs_diff") == np.quantile(errors, share, method="inverted_cdf")
    if metrics.worst:
        index = np.unravel_index(errors.argmax(), errors.shape)
        assert metrics.worst == Element(tuple(map(int, index)), float(pair[0][index]), float(pair[1][index]))


@given(pairs())
def test_norms_are_those_of_the_formulas(pair):
    reference, candidate = (array.astype(np.float64).reshape(-1) for array in pair)
    metrics = compare(*pair)
    relative = (metrics.max_rel_diff, metrics.norm_relative, metrics.cosine_similarity)

    if not reference.any():
        assert (*relative, metrics.sqnr_db) == (None, None, None, None)
        return
    largest, noise = np.abs(reference).max(), np.linalg.norm(reference - candidate)
    by_element = np.abs(reference - candidate) / np.maximum(np.abs(reference), largest * RELATIVE_FLOOR)
    lengths = np.linalg.norm(reference) * np.linalg.norm(candidate)
    assert relative == (
        pytest.approx(by_element.max()),
        pytest.approx(noise / np.linalg.norm(reference)),
        pytest.approx(reference @ candidate / lengths, abs=1e-12) if candidate.any() else 0,
    )
    if noise:
        assert metrics.sqnr_db == pytest.approx(20 * math.log10(np.linalg.norm(reference) / noise), abs=1e-6)
    else:
        assert metrics.sqnr_db is None


@given(pairs())
def test_both_directions_agree_on_what_is_symmetric(pair):
    there, back = compare(*pair), compare(*reversed(pair))

    for name in ("num_different", "max_abs_diff", "mean_abs_diff", "p50_abs_diff", "p99_abs_diff"):
        assert getattr(there, name) == getattr(back, name)
    if there.cosine_similarity and back.cosine_similarity:
        assert there.cosine_similarity == pytest.approx(back.cosine_similarity)


@given(pairs(), st.sampled_from([2.0**-500, 2.0**-30, 2.0, 2.0**500, 2.0**900]))
def test_scale_changes_no_relative_figure(pair, scale):
    plain, scaled = compare(*pair), compare(*(array.astype(np.float64) * scale for array in pair))

    for name in ("cosine_similarity", "norm_relative", "max_rel_diff", "sqnr_db"):
        found, expected = getattr(scaled, name), getattr(plain, name)
        assert found == (None if expected is None else pytest.approx(expected, rel=1e-9, abs=1e-9))
    assert scaled.max_abs_diff == plain.max_abs_diff * scale


@given(pairs())
def test_figures_stay_in_their_bounds(pair):
    metrics = compare(*pair, logits=True)

    for name in ("top1_agreement", "topk_agreement"):
        assert getattr(metrics, name) is None or 0 <= getattr(metrics, name) <= 1
    assert metrics.cosine_similarity is None or -1 <= metrics.cosine_similarity <= 1
    if metrics.p50_abs_diff is not None:
        assert metrics.p50_abs_diff <= metrics.p99_abs_diff <= metrics.p99_9_abs_diff <= metrics.max_abs_diff
        assert metrics.mean_abs_diff <= metrics.max_abs_diff * (1 + 1e-12)
    if metrics.max_kl_divergence is not None:
        assert 0 <= metrics.mean_kl_divergence <= metrics.max_kl_divergence * (1 + 1e-12)


@given(arrays.arrays(np.float32, SHAPES, elements=VALUES))
def test_equal_arrays_differ_in_nothing(array):
    metrics = compare(array, array.copy(), logits=True)

    assert (metrics.num_different, metrics.max_abs_diff, metrics.worst) == (0, 0, None)
    assert metrics.norm_relative in (None, 0)
    assert metrics.cosine_similarity is None or metrics.cosine_similarity == pytest.approx(1, abs=1e-12)
    assert (metrics.top1_agreement, metrics.topk_agreement) in ((None, None), (1, 1))
    assert metrics.max_kl_divergence in (None, 0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_narrow_types_are_compared_in_float64(dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    reference, candidate = np.array([1, 2, 224], dtype), np.array([1, 2, 192], dtype)
    metrics = compare(reference, candidate)

    assert metrics.reference_dtype == dtype.name
    assert (metrics.max_abs_diff, metrics.num_different, metrics.difference) == (32, 1, "none")
    assert metrics.worst == Element((2,), 224.0, 192.0)


def test_sums_of_float16_do_not_overflow():
    metrics = compare(np.full(100_000, 60_000, np.float16), np.full(100_000, -60_000, np.float16))

    assert (metrics.max_abs_diff, metrics.norm_relative) == (120_000, 2)
    assert metrics.cosine_similarity == pytest.approx(-1)


@pytest.mark.parametrize(
    ("reference", "candidate", "norm_relative"),
    [(1e300, 2e300, 1), (1e-300, 3e-300, 2), (1e308, -1e308, 2), (1e-300, 1e300, sys.float_info.max), (1e308, 0, 1)],
)
def test_values_whose_squares_float64_lacks(reference, candidate, norm_relative):
    metrics = compare(np.full(3, reference), np.full(3, float(candidate)))

    assert metrics.norm_relative == pytest.approx(norm_relative)
    assert metrics.max_abs_diff == min(abs(float(reference) - candidate), sys.float_info.max)
    json.dumps(to_plain(Metrics, metrics), allow_nan=False)


def test_errors_near_zero_do_not_decide_the_relative_one():  # C48
    reference = np.array([1e-9, 1, -2])
    metrics = compare(reference, reference + [5e-6, 1e-4, 1e-4])

    assert metrics.max_abs_diff == pytest.approx(1e-4)
    assert metrics.max_rel_diff == pytest.approx(5e-6 / 2e-3)


def test_an_all_zero_reference_has_no_relative_figures():
    metrics = compare(np.zeros(4, np.float32), np.full(4, 1e-3, np.float32))

    assert (metrics.norm_relative, metrics.cosine_similarity, metrics.sqnr_db, metrics.max_rel_diff) == (None,) * 4
    assert metrics.max_abs_diff == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("first", "second"), [((2, 3), (3, 2)), ((2, 1), (2, 3)), ((), (1,)), ((0, 3), (0, 2)), ((6,), (2, 3))]
)
def test_shapes_are_compared_before_anything_and_not_broadcast(first, second):  # C11
    metrics = compare(np.ones(first, np.float32), np.ones(second, np.float16))

    assert metrics.difference == "lengths differ"
    assert (metrics.reference_shape, metrics.candidate_shape, metrics.num_different) == (first, second, None)


def test_types_that_differ_are_said_and_compared_where_they_can_be():
    narrower = compare(np.array([1, 2], np.float32), np.array([1, 4], np.float16))
    integers = compare(np.array([1, -2], np.int64), np.array([1, 2**64 - 2], np.uint64))
    unlike = compare(np.array([1, 2], np.float32), np.array([1, 2], np.int64))

    assert [found.difference for found in (narrower, integers, unlike)] == ["types differ"] * 3
    assert [found.max_abs_diff for found in (narrower, integers, unlike)] == [2, 2.0**64, None]


def test_a_reference_that_is_not_finite_has_its_own_verdict():  # a mask of -inf that both sides share
    mask = np.array([[0, -np.inf], [0, -np.inf]], np.float32)
    metrics = compare(mask, mask.copy())

    assert (metrics.difference, metrics.num_reference_not_finite) == ("reference not finite", 2)
    assert metrics.worst == Element((0, 1), "-inf", "-inf")
    assert metrics.max_abs_diff is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_a_candidate_that_is_not_finite_is_counted_and_shown(bad, dtype):
    reference = np.ones((2, 3), dtype)
    candidate = reference.copy()
    candidate[1, :2] = bad
    metrics = compare(reference, candidate, logits=True)

    assert (metrics.difference, metrics.num_candidate_not_finite) == ("candidate not finite", 2)
    assert metrics.worst == Element((1, 0), 1.0, str(bad))
    assert (metrics.max_abs_diff, metrics.top1_agreement) == (None, None)


@pytest.mark.parametrize("dtype", WHOLE)
@given(data=st.data())
def test_whole_numbers_are_compared_exactly(dtype, data):
    dtype = np.dtype(dtype)
    pair = data.draw(pairs(elements=arrays.from_dtype(dtype), dtype=dtype))
    metrics = compare(*pair)
    distances = [abs(int(a) - int(b)) for a, b in zip(pair[0].flat, pair[1].flat, strict=True)]

    assert metrics.num_different == sum(distance > 0 for distance in distances)
    assert metrics.max_abs_diff == float(max(distances, default=0))
    if metrics.worst:
        assert abs(metrics.worst.reference - metrics.worst.candidate) == max(distances)


def test_int64_beyond_float64_is_told_apart():  # C13
    metrics = compare(np.array([2**53, 2**40]), np.array([2**53 + 1, 2**31 - 1]))

    assert (metrics.num_different, metrics.max_abs_diff) == (2, 2**40 - 2**31 + 1)
    assert metrics.worst == Element((1,), 2**40, 2**31 - 1)


def test_small_integers_and_text():
    int4 = compare(np.array([-8, 7], ml_dtypes.int4), np.array([7, 7], ml_dtypes.int4))
    text = compare(np.array(["cat", "dog"], object), np.array(["cat", "fox"], object))

    assert (int4.max_abs_diff, int4.worst) == (15, Element((0,), -8, 7))
    assert (text.num_different, text.max_abs_diff, text.worst) == (1, None, Element((1,), "dog", "fox"))


SCORES = np.array([[1, 3, 3, 0], [5, 1, 1, 5]], np.float32)


@pytest.mark.parametrize(
    ("reference", "candidate", "num_different", "num_tied"),
    [
        ([1, 0], [2, 3], 0, 2),
        ([1, 0], [2, 1], 1, 1),
        ([1, 0], [4, -1], 2, 0),
        ([[1], [0]], [[2], [1]], 1, 1),
        ([[1, 2], [0, 3]], [[2, 1], [0, 3]], 0, 2),
        ([[1, 2], [0, 3]], [[2, 2], [0, 3]], 1, 0),
    ],
    ids=["ties", "a tie and a fault", "out of range", "keepdims", "top k swapped", "top k twice the same"],
)
def test_an_index_is_right_where_the_reference_scores_a_tie(reference, candidate, num_different, num_tied):
    metrics = compare(np.array(reference), np.array(candidate), scores=SCORES)

    assert (metrics.num_different, metrics.num_tied) == (num_different, num_tied)


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_ties_on_any_axis(axis, keepdims):
    scores = np.random.default_rng(0).integers(0, 3, (4, 5, 6)).astype(np.float32)
    last = scores.shape[axis] - 1 - np.flip(scores, axis).argmax(axis, keepdims=keepdims)
    first = scores.argmax(axis, keepdims=keepdims)
    metrics = compare(first, last, scores=scores, axis=axis)
    broken = last.copy()
    broken.flat[7] = scores.argmin(axis).flat[7]

    assert (metrics.num_different, metrics.num_tied > 5) == (0, True)
    assert compare(first, broken, scores=scores, axis=axis).num_different == 1
    assert compare(first, broken, scores=scores, axis=axis).worst.index == np.unravel_index(7, first.shape)


def test_scores_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"scores of shape \(2, 4\) have no row"):
        compare(np.array([1, 0, 2]), np.array([1, 0, 1]), scores=SCORES)


@given(pairs(arrays.array_shapes(min_dims=1, max_dims=3, max_side=8), st.floats(-50, 50, width=32)))
def test_logits_are_those_of_the_formulas(pair):
    first, second = (array.astype(np.float64).reshape(-1, array.shape[-1]) for array in pair)
    p, q = (np.exp(x - x.max(-1, keepdims=True)) for x in (first, second))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    divergence = (p * np.log(p / q)).sum(-1)
    top1 = [a[b.argmax()] == a.max() for a, b in zip(first, second, strict=True)]
    metrics = compare(*pair, logits=True)

    assert metrics.max_kl_divergence == pytest.approx(divergence.max(), abs=1e-9)
    assert metrics.mean_kl_divergence == pytest.approx(divergence.mean(), abs=1e-9)
    assert metrics.top1_agreement == np.mean(top1)


def test_top_k_counts_what_is_among_the_best_five():
    reference = np.arange(10.0)[np.newaxis]
    candidate = reference.copy()
    candidate[0, :2] = 20

    assert compare(reference, candidate, logits=True).topk_agreement == pytest.approx(3 / 5)
    assert compare(np.zeros((1, 10)), candidate, logits=True).topk_agreement == 1  # every choice is right in a tie


def test_a_collapsed_candidate_agrees_on_nothing_by_chance():
    reference = np.random.default_rng(0).normal(size=(200, 1000))
    metrics = compare(reference, np.zeros_like(reference), logits=True)

    assert metrics.top1_agreement < 0.05
    assert metrics.topk_agreement < 0.05


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 0)])
def test_logits_without_rows_have_no_figures(shape):
    metrics = compare(np.ones(shape), np.ones(shape), logits=True)

    assert (metrics.top1_agreement, metrics.max_kl_divergence, metrics.num_different) == (None, None, 0)


def test_divergence_of_certain_predictions_stays_finite():
    metrics = compare(np.array([[1e308, -1e308]]), np.array([[-1e308, 1e308]]), logits=True)

    assert metrics.max_kl_divergence == sys.float_info.max


def test_chunks_change_nothing_but_the_rounding_of_percentiles(monkeypatch):
    rng = np.random.default_rng(0)
    reference = rng.normal(size=(40, 50)).astype(np.float32)
    candidate = (reference + rng.normal(size=(40, 50)) * 10.0 ** rng.uniform(-9, 0, (40, 50))).astype(np.float32)
    whole = compare(reference, candidate, logits=True)
    monkeypatch.setattr(module, "_CHUNK", 7 * 50)
    pieces = compare(reference, candidate, logits=True)

    for name, value in dataclasses.asdict(whole).items():
        found = getattr(pieces, name)
        if name.startswith("p") and name.endswith("_abs_diff"):
            assert value <= found <= value * 1.004
        else:
            assert found == (pytest.approx(value) if isinstance(value, float) else getattr(whole, name))
    assert compare(reference.T, candidate.T).max_abs_diff == whole.max_abs_diff


def test_percentiles_in_chunks_of_mostly_equal_arrays(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 10)
    reference, candidate = np.zeros(1000), np.zeros(1000)
    candidate[:5] = 3
    metrics = compare(reference, candidate)

    assert (metrics.p50_abs_diff, metrics.p99_abs_diff, metrics.p99_9_abs_diff) == (0, 0, 3)


def test_memory_is_flat(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 1 << 16)  # 512 KiB of float64
    reference = np.ones((1 << 11, 1 << 10), np.float32)  # 16 MiB in float64
    tracemalloc.start()
    compare(reference, reference, logits=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 14 << 20


@pytest.mark.parametrize(
    "pair",
    [
        (np.float32([1, 2]), np.float32([1, np.nan])),
        (np.array([2**63], np.uint64), np.array([1], np.uint64)),
        (np.array([True, False]), np.array([True, True])),
        (np.float32(3), np.float32(3.5)),
        (np.zeros((0, 2), np.float32), np.zeros((0, 2), np.float32)),
    ],
    ids=["nan", "uint64", "bool", "scalar", "empty"],
)
def test_metrics_survive_json(pair):
    metrics = compare(*pair, logits=True)
    plain = json.loads(json.dumps(to_plain(Metrics, metrics), allow_nan=False))
    back = from_plain(Metrics, plain)

    assert back == metrics
    if metrics.worst:
        assert type(back.worst.candidate) is type(metrics.worst.candidate)
