from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from trtforge import memo as memo_module
from trtforge.digests import file_digest
from trtforge.memo import DigestMemo

HOUR_NS = 3_600_000_000_000


@pytest.fixture
def later(monkeypatch):
    """A clock an hour ahead, so that files written by a test are not too young to be remembered."""
    now = time.time_ns()
    monkeypatch.setattr(memo_module.time, "time_ns", lambda: now + HOUR_NS)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "w.bin"
    path.write_bytes(b"one")
    return path


def forge(memo: DigestMemo, digest: str) -> None:
    """Replaces all remembered digests, so that a test can see whether they are used."""
    entries = json.loads(memo.path.read_text())
    memo.path.write_text(json.dumps(dict.fromkeys(entries, digest)))


@pytest.mark.usefixtures("later")
def test_unchanged_file_is_not_read_again(tmp_path, weights):
    memo = DigestMemo(tmp_path / "state" / "memo.json")
    assert memo.digest(weights) == file_digest(weights)
    forge(memo, "f" * 64)
    assert memo.digest(weights) == "f" * 64


@pytest.mark.usefixtures("later")
def test_same_size_and_mtime_but_new_content_is_read_again(tmp_path, weights):
    memo = DigestMemo(tmp_path / "memo.json")
    before = weights.stat()
    memo.digest(weights)
    time.sleep(0.02)  # past the tick of the file system's clock
    weights.write_bytes(b"two")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert memo.digest(weights) == file_digest(weights)


@pytest.mark.usefixtures("later")
def test_replaced_file_is_read_again(tmp_path, weights):
    memo = DigestMemo(tmp_path / "memo.json")
    memo.digest(weights)
    other = tmp_path / "other"
    other.write_bytes(b"two")
    other.replace(weights)
    assert memo.digest(weights) == file_digest(weights)


def test_young_file_is_not_remembered(tmp_path, weights):
    memo = DigestMemo(tmp_path / "memo.json")
    assert memo.digest(weights) == file_digest(weights)
    assert not memo.path.exists()


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"1:2:3:4:5": 7}', b"[" * 100_000])
def test_damaged_memo_is_ignored_and_replaced(tmp_path, weights, content):
    memo = DigestMemo(tmp_path / "memo.json")
    memo.path.write_bytes(content)
    assert memo.digest(weights) == file_digest(weights)
    assert list(json.loads(memo.path.read_text()).values()) == [file_digest(weights)]


@pytest.mark.usefixtures("later")
def test_memo_that_cannot_be_written_does_not_memoise(tmp_path, weights):
    (tmp_path / "file").touch()
    memo = DigestMemo(tmp_path / "file" / "memo.json")
    assert memo.digest(weights) == file_digest(weights)


@pytest.mark.usefixtures("later")
def test_only_the_newest_entries_stay_and_no_temporary_file(tmp_path, weights):
    memo = DigestMemo(tmp_path / "memo.json")
    memo.path.write_text(json.dumps({f"{i}": "0" * 64 for i in range(1500)}))
    memo.digest(weights)
    entries = json.loads(memo.path.read_text())
    assert len(entries) == 1000
    assert next(iter(entries)) == "501"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memo.json", "memo.lock", "w.bin"]


def test_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        DigestMemo(tmp_path / "memo.json").digest(tmp_path / "none")
