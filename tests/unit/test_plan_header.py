from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtforge.plan_header import PlanHeader, read_plan_header

RTX_HEAD = struct.pack("<4sIIIQ4B4sB31x", b"vtrt", 0, 2, 0, 133684, 1, 7, 1, 116, b"vtrt", 0x04)
TENSORRT_HEAD = struct.pack("<I20x4B36x", 0x74727466, 10, 9, 0, 34)


def header(tmp_path, data: bytes) -> PlanHeader | None:
    path = tmp_path / "x.engine"
    path.write_bytes(data)
    return read_plan_header(path)


def test_tensorrt_rtx(tmp_path):
    assert header(tmp_path, RTX_HEAD + b"weights") == PlanHeader("tensorrt_rtx", (1, 7, 1, 116), 133684, ("sm86",))


def test_tensorrt(tmp_path):
    assert header(tmp_path, TENSORRT_HEAD + b"weights") == PlanHeader("tensorrt", (10, 9, 0, 34))


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        (0x00, ()),
        (0x01, ("sm75",)),
        (0x0C, ("sm86", "sm89")),
        (0x7E, ("sm80", "sm86", "sm89", "sm120", "sm121", "bit 0x40")),
    ],
)
def test_mask(tmp_path, mask, names):
    data = RTX_HEAD[:32] + bytes([mask]) + RTX_HEAD[33:]
    assert header(tmp_path, data).compute_capabilities == names


@pytest.mark.parametrize(
    "data",
    [b"", RTX_HEAD[:-1], TENSORRT_HEAD[:28], b"\x08" * 64, TENSORRT_HEAD[:4] + b"\1" + TENSORRT_HEAD[5:]],
    ids=["empty", "short-rtx", "short-tensorrt", "garbage", "other-serialisation-version"],
)
def test_unknown_is_none(tmp_path, data):
    assert header(tmp_path, data) is None


@given(data=st.binary(max_size=80))
def test_any_bytes_are_read_without_error(tmp_path_factory, data):
    for head in (b"", b"ftrt", b"vtrt"):
        header(tmp_path_factory.getbasetemp(), head + data)
