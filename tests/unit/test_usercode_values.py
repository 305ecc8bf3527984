"""What crosses between trtforge and the user's code, and what is told of an exception there."""

from __future__ import annotations

import enum
import json
import math
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtforge.usercode.child import Unsendable, decoded, encoded, is_number, is_users, raised

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(plain)
def test_plain_values_come_back(value):
    assert decoded(json.loads(json.dumps(encoded(value, None))), None) == value


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8", "bool", "<U3", ml_dtypes.bfloat16])
def test_arrays_come_back_with_their_type(tmp_path, dtype):
    array = np.array([[1, 0, 1]]).astype(dtype)

    value = decoded(encoded({"a": [array], "b": "x"}, tmp_path / "a.npz"), tmp_path / "a.npz")

    assert value["b"] == "x"
    assert value["a"][0].dtype == array.dtype
    assert value["a"][0].tolist() == array.tolist()


def test_names_of_arrays_are_free(tmp_path):
    names = ["file", "a/b", "../../etc/passwd", "", "array"]

    value = decoded(encoded({name: np.ones(1) for name in names}, tmp_path / "a.npz"), tmp_path / "a.npz")

    assert list(value) == names


def test_numbers_of_numpy_and_enums_become_plain(tmp_path):
    class Level(enum.IntEnum):
        HIGH = 3

    value = decoded(encoded([np.float32(0.5), np.bool_(True), Level.HIGH, math.nan], tmp_path), tmp_path)

    assert value[:3] == [0.5, True, 3]
    assert [type(item) for item in value[:3]] == [float, bool, int]
    assert math.isnan(value[3])


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"x": [1, object()]}, r"object at \['x'\]\[1\]"),
        (np.array([{}], dtype=object), "an array of object"),
        ({"x": np.zeros(1, "datetime64[s]")}, r"an array of datetime64\[s\] at \['x'\]"),
        ({1: 2}, "the key 1, which is no text"),
        (print, "builtin_function_or_method"),
    ],
)
def test_what_would_need_a_pickle_does_not_cross(tmp_path, value, named):
    with pytest.raises(Unsendable, match=named):
        encoded(value, tmp_path / "a.npz")


def test_a_pickle_in_the_arrays_file_is_not_loaded(tmp_path):
    np.savez(tmp_path / "a.npz", **{"0": np.array([{}], dtype=object)})

    with pytest.raises(ValueError, match="allow_pickle=False"):
        decoded({"plain": {"array": 0, "dtype": "object"}, "num_arrays": 1}, tmp_path / "a.npz")


def test_a_value_that_holds_itself_ends():
    value = []
    value.append(value)

    with pytest.raises(Unsendable, match="nested deeper"):
        encoded(value, None)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, True), (math.nan, True), (np.array([0.5]), True), (True, False), ("1", False), (None, False), ([1], False)],
)
def test_one_number(value, expected):
    assert is_number(value) == expected


def _answer(error):
    try:
        raise error
    except type(error) as caught:
        return raised(caught)


def test_an_exception_is_told_by_the_users_own_lines():
    def deep(text):
        return json.loads(text)

    with pytest.raises(json.JSONDecodeError) as caught:
        deep("{")
    answer = raised(caught.value)

    assert answer["type"] == "json.decoder.JSONDecodeError"
    assert {frame[0] for frame in answer["frames"]} == {__file__}
    assert answer["frames"][-1][2:] == ["deep", "return json.loads(text)"]


def test_an_exception_whose_text_raises_is_told_all_the_same():
    class MeanError(Exception):
        def __str__(self):
            raise RuntimeError

    assert _answer(MeanError())["message"] == "(its text cannot be shown: RuntimeError)"


def test_a_part_that_an_installed_package_lacks_is_no_missing_package():
    assert _answer(ModuleNotFoundError("no", name="json.nothing"))["missing"] is None
    assert _answer(ModuleNotFoundError("no", name="nowhere_at_all.x"))["missing"] == "nowhere_at_all.x"


def test_what_is_the_users():
    assert is_users(__file__)
    assert not is_users(json.__file__)
    assert not is_users(np.__file__)
    assert not is_users(sys.modules["trtforge.usercode.child"].__file__)
