"""Files that a build's process leaves: whole, or not at all."""

from __future__ import annotations

import errno
import os

import pytest

from trtforge.backends.worker.answers import Refused, write_whole


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "net.calibration"
    for data in (b"first, longer", b"second"):
        write_whole(path, memoryview(data), "calibration cache")

        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_what_was_there_and_is_told_with_sizes(tmp_path, monkeypatch):
    path = tmp_path / "net.calibration"
    path.write_bytes(b"first")

    def full(_fd):
        assert path.read_bytes() == b"first", "it is written in place"
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Refused) as caught:
        write_whole(path, memoryview(b"second"), "calibration cache")

    (problem,) = caught.value.answer["problems"]
    assert problem["error"] == "StoreError"
    assert "the calibration cache of 6 bytes could not be written: No space left on device" in problem["summary"]
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]
