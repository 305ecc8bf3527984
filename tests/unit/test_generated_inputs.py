"""Generated inputs: dtype, shape, bounds, masks, and the same data again for the same seed."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtforge.errors import SeveralErrors
from trtforge.shapes.inputs import generate_at, generate_inputs
from trtforge.shapes.ranges import BOUNDS
from trtforge.spec.model import InputValues
from trtforge.types import POINTS, Graph, InputRole, Profile, ShapeRange, TensorSpec

FLOATS = {"float16": np.float16, "float32": np.float32, "float64": np.float64}
NARROW_FLOATS = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8e5m2": ml_dtypes.float8_e5m2,
}
WHOLE = {name: np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")}
ALL = FLOATS | NARROW_FLOATS | WHOLE | {"bool": np.bool_}
SHAPES = st.lists(st.integers(1, 6), max_size=4).map(tuple)
KINDS = st.sampled_from(["token_ids", "mask", "image", "free"])


def graph_of(*inputs: tuple[str, str, str, float, float]) -> Graph:
    return Graph(
        source=Path("m.onnx"),
        path=Path("m.onnx"),
        weights_dir=Path(),
        digest="",
        ir_version=8,
        opsets=(("", 17),),
        producer="",
        inputs=tuple(TensorSpec(name, dtype, (None,)) for name, dtype, *_ in inputs),
        outputs=(),
        roles=tuple(InputRole(name, kind, low, high, "") for name, _, kind, low, high in inputs),
        data_dependent_outputs=(),
        operators=(),
        element_types=(),
        has_qdq=False,
        wide_int_constants=(),
        num_nodes=1,
        weight_bytes=0,
    )


def generate(dtype, kind, shape, *, low=0, high=1, seed=0, declared=None):
    return generate_at(graph_of(("x", dtype, kind, low, high)), {"x": shape}, {}, declared or {}, seed)["x"]


@given(
    dtype=st.sampled_from(sorted(ALL)),
    kind=KINDS,
    shape=SHAPES,
    seed=st.integers(0, 2**32),
    bounds=st.tuples(st.floats(-1e300, 0), st.floats(1, 1e300)),
)
def test_dtype_shape_finite_and_repeatable(dtype, kind, shape, seed, bounds):
    values = generate(dtype, kind, shape, low=bounds[0], high=bounds[1], seed=seed)
    assert values.dtype == np.dtype(ALL[dtype])
    assert values.shape == shape
    assert np.isfinite(values.astype(np.float64)).all()
    np.testing.assert_array_equal(values, generate(dtype, kind, shape, low=bounds[0], high=bounds[1], seed=seed))


@given(
    dtype=st.sampled_from(sorted(FLOATS)),
    shape=SHAPES,
    bounds=st.tuples(st.integers(-1000, 1000), st.integers(-1000, 1000)).map(sorted),
)
def test_floats_stay_inside_their_range(dtype, shape, bounds):
    values = generate(dtype, "free", shape, low=bounds[0], high=bounds[1])
    assert bounds[0] <= values.min()
    assert values.max() <= bounds[1]


@pytest.mark.parametrize("dtype", sorted(WHOLE))
def test_whole_numbers_reach_both_bounds(dtype):
    assert set(generate(dtype, "free", (200,), low=1, high=3).tolist()) == {1, 2, 3}


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64"])
def test_the_whole_range_of_a_type(dtype):
    values = generate(dtype, "free", (100,), low=-1.7e308, high=1.7e308)
    assert np.isfinite(values).all()
    assert np.ptp(values.astype(np.float64) / 1e9) > 1e9


def test_token_ids_are_whole_even_in_a_float_input():
    values = generate("float32", "token_ids", (100,), high=9)
    assert set(values.tolist()) == set(range(10))


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), seed=st.integers(0, 99))
def test_masks_are_ones_then_zeros(shape, seed):
    rows = generate("int64", "mask", shape, seed=seed).reshape(-1, shape[-1])
    assert set(np.unique(rows)) <= {0, 1}
    assert (np.diff(rows, axis=1) <= 0).all()
    assert (rows[:-1, 0] == 1).all()
    assert rows[-1].any() == (len(rows) == 1 and seed % 2 == 0)


def test_mask_lengths_vary():
    rows = generate("float32", "mask", (64, 16))
    assert len(set(rows.sum(axis=1).tolist())) > 8


def test_declared_kind_and_range_override_the_role():
    additive = {"x": InputValues(kind="mask", range=(-10.0, 0.0))}
    assert set(np.unique(generate("float32", "free", (8, 8), declared=additive))) == {-10, 0}
    pixels = {"x": InputValues(range=(5.0, 6.0))}
    assert generate("float32", "image", (1, 3, 8, 8), declared=pixels).min() >= 5
    assert set(np.unique(generate("int64", "free", (8, 8), high=900, declared={"x": InputValues(kind="mask")}))) == {
        0,
        1,
    }


def test_another_input_changes_no_data():
    x, y = ("x", "float32", "free", 0, 1), ("y", "float32", "free", 0, 1)
    alone = generate_at(graph_of(x), {"x": (3, 4)}, {}, {}, 7)["x"]
    both = generate_at(graph_of(y, x), {"x": (3, 4), "y": (3, 4)}, {}, {}, 7)
    np.testing.assert_array_equal(alone, both["x"])
    assert (both["x"] != both["y"]).any()
    assert (alone != generate_at(graph_of(x), {"x": (3, 4)}, {}, {}, 8)["x"]).any()


def test_data_does_not_change_between_releases():
    """Recorded digests of inputs, such as those in manifests, depend on it."""
    np.testing.assert_array_equal(generate("int64", "token_ids", (6,), high=999, seed=3), [422, 498, 277, 908, 64, 306])


def test_profile_points_and_shape_values():
    graph = graph_of(("x", "float32", "free", 0, 1), ("shp", "int64", "shape_values", 0, 1))
    shapes = {"x": ShapeRange((1, 12), (2, 12), (4, 12)), "shp": ShapeRange((2,), (2,), (2,))}
    profile = Profile("p", shapes, {"shp": ShapeRange((1, 12), (3, 8), (4, 12))})
    feeds = [generate_inputs(graph, profile, point, {}, 0) for point in POINTS]
    assert [feed["x"].shape for feed in feeds] == [(1, 12), (2, 12), (4, 12)]
    assert [feed["shp"].tolist() for feed in feeds] == [[1, 12], [3, 8], [4, 12]]
    assert feeds[0]["shp"].dtype == np.int64


def test_types_that_cannot_be_generated_are_named_at_once():
    graph = graph_of(("s", "string", "free", 0, 1), ("q", "int4", "free", 0, 1))
    with pytest.raises(SeveralErrors) as caught:
        generate_at(graph, {"s": (1,), "q": (1,)}, {}, {}, 0)
    assert [problem.summary.split(";")[0] for problem in caught.value.problems] == [
        "input 's' is string",
        "input 'q' is int4",
    ]
    assert {problem.exit_code for problem in caught.value.problems} == {3}


def test_bounds_are_those_of_numpy_and_ml_dtypes():
    for name, bounds in BOUNDS.items():
        dtype = np.dtype(
            getattr(ml_dtypes, {"float8e4m3fn": "float8_e4m3fn", "float8e5m2": "float8_e5m2"}.get(name, name), name)
        )
        if dtype.kind == "b":
            assert bounds == (0, 1)
        elif dtype.kind in "iu":
            assert bounds == (np.iinfo(dtype).min, np.iinfo(dtype).max)
        else:
            info = ml_dtypes.finfo(dtype)
            assert bounds == (float(info.min), float(info.max))
