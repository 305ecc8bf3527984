"""Which profile a request runs in."""

from __future__ import annotations

import pytest

from trtforge.profile_choice import profile_for
from trtforge.types import Profile, ShapeRange


def profile(name: str, low: int, best: int, high: int) -> Profile:
    return Profile(name, {"x": ShapeRange((1, low), (4, best), (8, high))})


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        pytest.param((2, 16), "short", id="the narrower of two that allow it"),
        pytest.param((2, 32), "short", id="its own max is inside"),
        pytest.param((2, 33), "long", id="one above goes to the wider"),
        pytest.param((9, 16), None, id="no profile allows the batch"),
        pytest.param((2, 16, 1), None, id="another rank"),
    ],
)
def test_the_narrowest_profile_that_allows_the_shape_runs_it(shape, expected):
    found = profile_for({"x": shape}, [profile("long", 1, 64, 128), profile("short", 1, 16, 32)])

    assert (found.name if found else None) == expected


def test_of_equally_wide_profiles_the_one_with_the_nearer_opt_runs_it():
    profiles = [profile("low", 1, 8, 64), profile("high", 1, 48, 64)]

    assert [profile_for({"x": (4, size)}, profiles).name for size in (8, 19, 20, 64)] == ["low", "low", "high", "high"]


def test_of_twins_the_first_runs_it():
    profiles = [profile("first", 1, 8, 64), profile("second", 1, 8, 64)]

    assert profile_for({"x": (4, 8)}, profiles).name == "first"
