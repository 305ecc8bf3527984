from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import stat
from pathlib import Path

import pytest

from trtforge.errors import StoreError
from trtforge.release.output import check_output, output_lock, publish


@pytest.fixture
def work(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def engine(work, name: str, data: bytes = b"engine"):
    path = work / name
    path.write_bytes(data)
    return path


def files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_engines_and_manifest_appear_and_sources_stay(tmp_path, work):
    a, b = engine(work, "1", b"a"), engine(work, "2", b"b")
    publish(tmp_path / "out" / "dist", {"a.engine": a, "b.engine": b}, "{é}\n")
    assert files(tmp_path / "out" / "dist") == {"a.engine": b"a", "b.engine": b"b", "manifest.json": "{é}\n".encode()}
    assert a.read_bytes() == b"a"


def test_files_have_the_modes_that_the_user_gives_new_files(tmp_path, work):
    publish(tmp_path / "dist", {"a.engine": engine(work, "a")}, "{}")
    plain = engine(work, "plain")
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "dist").iterdir()} == {
        stat.S_IMODE(plain.stat().st_mode)
    }


def test_other_files_stay_stale_ones_and_leftovers_go(tmp_path, work):
    dist = tmp_path / "dist"
    publish(dist, {"a.engine": engine(work, "a", b"old"), "b.engine": engine(work, "b", b"b")}, "old")
    (dist / "notes.txt").write_bytes(b"mine")
    (dist / ".trtforge-0123.tmp").write_bytes(b"half an eng")
    publish(dist, {"c.engine": engine(work, "c", b"c")}, "new", stale=["b.engine", "gone.engine"])
    assert files(dist) == {"a.engine": b"old", "c.engine": b"c", "manifest.json": b"new", "notes.txt": b"mine"}


def test_a_stale_name_takes_nothing_outside_the_folder_and_no_folder(tmp_path, work):
    dist, home = tmp_path / "dist", tmp_path / "home"
    (dist / "folder.engine").mkdir(parents=True)
    home.mkdir()
    (home / "precious").write_bytes(b"mine")
    (dist / "sub").symlink_to(home)

    publish(dist, {"a.engine": engine(work, "a")}, "{}", stale=["sub/precious", "folder.engine", "../home/precious"])

    assert (home / "precious").read_bytes() == b"mine"
    assert (dist / "folder.engine").is_dir()


def test_a_link_in_the_folder_is_replaced_not_followed(tmp_path, work):
    dist = tmp_path / "dist"
    dist.mkdir()
    outside = engine(tmp_path, "outside", b"precious")
    for name in ("a.engine", "manifest.json"):
        (dist / name).symlink_to(outside)
    publish(dist, {"a.engine": engine(work, "a", b"a")}, "{}")
    assert outside.read_bytes() == b"precious"
    assert files(dist) == {"a.engine": b"a", "manifest.json": b"{}"}


@pytest.fixture
def published(tmp_path, work):
    dist = tmp_path / "dist"
    publish(dist, {"a.engine": engine(work, "a", b"old")}, "old")
    return dist


OLD = {"a.engine": b"old", "manifest.json": b"old"}


def test_too_little_space_is_told_before_anything_is_written(published, work):
    huge = work / "huge"
    with huge.open("wb") as file:
        file.truncate(shutil.disk_usage(work).free + (1 << 40))
    with pytest.raises(StoreError, match=r"too little space: \d{13,} bytes needed, \d+ bytes free") as caught:
        publish(published, {"a.engine": engine(work, "b", b"new"), "huge.engine": huge}, "new")
    assert caught.value.problems[0].next_step == f"df -h {published}"
    assert files(published) == OLD


def test_a_write_that_stops_midway_leaves_the_old_bundle(published, work):
    """A file size limit stops a real write, as a full disk or a quota would."""
    big = engine(work, "big", b"x" * 3_000_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, hard))
    try:
        with pytest.raises(StoreError, match="File too large"):
            publish(published, {"a.engine": engine(work, "b", b"new"), "big.engine": big}, "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(published) == OLD


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_midway_says_needed_and_free(published, work, monkeypatch, code):
    new = engine(work, "b", b"x" * 5_000)

    def fsync(descriptor):
        if os.fstat(descriptor).st_size == 5_000:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StoreError, match=r"dist has too little space: 5003 bytes needed, \d+ bytes free"):
        publish(published, {"a.engine": new}, "new")
    assert files(published) == OLD


def test_an_interrupt_leaves_no_temporary_file(published, work, monkeypatch):
    def fsync(descriptor):
        if os.fstat(descriptor).st_size == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(KeyboardInterrupt):
        publish(published, {"a.engine": engine(work, "b", b"new")}, "new!")
    assert files(published) == OLD


def test_a_source_that_is_gone(published, work):
    with pytest.raises(StoreError, match="No such file"):
        publish(published, {"a.engine": engine(work, "b", b"new"), "b.engine": work / "gone"}, "new")
    assert files(published) == OLD


def test_the_manifest_is_the_last_file_to_appear(tmp_path, work, monkeypatch):
    order = []
    replace = type(tmp_path).replace
    monkeypatch.setattr(
        type(tmp_path), "replace", lambda path, target: (order.append(target.name), replace(path, target))
    )
    publish(tmp_path / "dist", {"b.engine": engine(work, "b"), "a.engine": engine(work, "a")}, "{}")
    assert order == ["b.engine", "a.engine", "manifest.json"]


def a_file(path):
    path.write_bytes(b"")


def a_link_to_nowhere(path):
    path.symlink_to(path.parent / "nowhere")


def a_link_to_a_file(path):
    path.symlink_to(path.parent / "file")
    (path.parent / "file").write_bytes(b"")


def below_a_file(path):
    path.parent.rmdir()
    path.parent.write_bytes(b"")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (a_file, "dist is a file, expected a folder"),
        (a_link_to_a_file, "dist is a file, expected a folder"),
        (a_link_to_nowhere, "nowhere, which is not there"),
        (below_a_file, "Not a directory"),
    ],
)
def test_what_is_no_folder(tmp_path, make, expected):
    dist = tmp_path / "parent" / "dist"
    dist.parent.mkdir()
    make(dist)
    with pytest.raises(StoreError, match=expected):
        check_output(dist)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path):
    dist = tmp_path / "dist"
    dist.mkdir(mode=0o500)
    with pytest.raises(StoreError, match="cannot be written: Permission denied"):
        check_output(dist)


@pytest.mark.skipif(not os.access("/proc/self", os.X_OK), reason="needs /proc")
def test_a_folder_that_takes_no_files():
    with pytest.raises(StoreError):
        check_output(Path("/proc/self"))


def test_a_link_to_a_folder_is_that_folder(tmp_path, work):
    (tmp_path / "real").mkdir()
    (tmp_path / "dist").symlink_to(tmp_path / "real")
    publish(tmp_path / "dist", {}, "{}")
    assert files(tmp_path / "real") == {"manifest.json": b"{}"}


def test_a_lock_can_be_taken_again_and_another_folder_has_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    waits = []
    for _ in range(2):
        with (
            output_lock(tmp_path / "a", on_wait=lambda: waits.append("a")),
            output_lock(tmp_path / "b", on_wait=lambda: waits.append("b")),
        ):
            assert not (tmp_path / "a").exists()
    assert waits == []
    assert len(list((tmp_path / "home/trtforge/locks").iterdir())) == 2


def test_a_cache_folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "home").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    with pytest.raises(StoreError, match="home"), output_lock(tmp_path / "a", on_wait=lambda: None):
        pass
