from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtforge.calibration.trt_cache import CacheHeader, missing_tensors, read_trt_cache, write_trt_cache
from trtforge.errors import CalibrationError, CapabilityError, SeveralErrors

HEADER = "TRT-8601-EntropyCalibration2\n"


def write(path, amax, version="8.6"):
    write_trt_cache(path, amax, tensorrt_version=version, algorithm="EntropyCalibration2")


def test_bytes_of_a_cache(tmp_path):
    # 1/127 is 0x3c010204 in float32, and 1.0 is 0x3f800000
    write(tmp_path / "c", {"images": 1.0, "a:0": 127.0, "with space": 127e-3})

    expected = HEADER + "images: 3c010204\na:0: 3f800000\nwith space: 3a83126f\n"
    assert (tmp_path / "c").read_text() == expected


@pytest.mark.parametrize(
    ("version", "number", "dotted"),
    [
        ("8.6", 8601, "8.6.1"),
        ("8.6.1", 8601, "8.6.1"),
        ("8.5.2.2", 8502, "8.5.2"),
        ("10.3", 100300, "10.3.0"),
        ("10.16.1", 101601, "10.16.1"),
    ],
)
def test_versions(tmp_path, version, number, dotted):
    write(tmp_path / "c", {"x": 1.0}, version)

    assert (tmp_path / "c").read_text().startswith(f"TRT-{number}-")
    assert read_trt_cache(tmp_path / "c")[0] == CacheHeader(dotted, "EntropyCalibration2")


@pytest.mark.parametrize(
    ("version", "reason"),
    [("11.0", "removed calibrators"), ("9.3", "8.x and 10.x"), ("7", "not one like"), ("8.x", "not one like")],
)
def test_versions_without_a_cache(tmp_path, version, reason):
    with pytest.raises(CapabilityError, match=reason):
        write(tmp_path / "c", {"x": 1.0}, version)
    assert not (tmp_path / "c").exists()


def test_all_bad_ranges_at_once(tmp_path):
    bad = {"zero": 0.0, "inf": math.inf, "nan": math.nan, "minus": -1.0, "denormal": 1e-37, "two\nlines": 1.0, "": 1.0}

    with pytest.raises(SeveralErrors) as error:
        write(tmp_path / "c", {"x": 1.0, **bad})
    assert len(error.value.problems) == len(bad)
    assert error.value.problems[0].exit_code == 4
    assert not (tmp_path / "c").exists()


def test_c30_what_is_wrong_with_a_cache_is_told_by_line(tmp_path):
    lines = [
        "x: 3c010204",
        "y 3c010204",
        "a:b: 3c0102",
        "x: 3c010204",
        "inf: 7f800000",
        "z: 00000000",
        "m: bf800000",
        "d: 00000001",
    ]
    (tmp_path / "c").write_text(HEADER + "\n".join(lines))

    with pytest.raises(SeveralErrors) as error:
        read_trt_cache(tmp_path / "c")
    told = {problem.where.line: problem.summary for problem in error.value.problems}
    assert sorted(told) == [3, 4, 5, 6, 7, 8, 9]
    assert told[4].startswith("tensor 'a:b' has '3c0102'")
    assert told[5] == "tensor 'x' is there twice, first in line 2"


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "is empty"),
        (b"\xff\xfe", "is no text"),
        (None, "No such file"),
        (b"x: 3c010204\n", "the first line is 'x: 3c010204'"),
        (HEADER.encode(), "names no tensor"),
    ],
)
def test_what_is_no_cache(tmp_path, data, error):
    if data is not None:
        (tmp_path / "c").write_bytes(data)

    with pytest.raises((CalibrationError, SeveralErrors)) as raised:
        read_trt_cache(tmp_path / "c")
    assert error in raised.value.problems[0].summary


def test_c30_missing_tensors(tmp_path):
    write(tmp_path / "c", {"x": 1.0, "y": 1.0})
    _, amax = read_trt_cache(tmp_path / "c")

    assert missing_tensors(amax, ["x", "c", "y"]) == "1 of 3 tensors missing: 'c'"
    assert missing_tensors(amax, ["x", "y"]) == ""


NAMES = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1)


@given(amax=st.dictionaries(NAMES, st.floats(1e-30, 1e30), min_size=1))
def test_ranges_come_back(tmp_path_factory, amax):
    path = tmp_path_factory.mktemp("cache") / "c"
    write(path, amax)

    _, found = read_trt_cache(path)
    assert list(found) == list(amax)
    assert all(math.isclose(found[name], value, rel_tol=2**-23) for name, value in amax.items())
