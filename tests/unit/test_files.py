from __future__ import annotations

import errno
import hashlib
import os
import threading
from io import BytesIO

import pytest

from trtforge.errors import StoreError
from trtforge.files import (
    TEMPORARY,
    commit,
    explained,
    free_bytes,
    locked,
    locked_if_free,
    remove_leftovers,
    write_aside,
)


def nothing():
    pass


class Stops(BytesIO):
    """Gives some bytes, then fails as a reader on a broken disk does."""

    def read(self, size=-1):
        data = super().read(10)
        if not data:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return data


def test_a_file_is_hidden_until_it_is_whole(tmp_path):
    aside, digest = write_aside(tmp_path, BytesIO(b"x" * 3_000_000))
    assert digest == hashlib.sha256(b"x" * 3_000_000).hexdigest()
    assert aside.match(TEMPORARY)
    commit(aside, tmp_path / "final")
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert (tmp_path / "final").stat().st_size == 3_000_000


def test_bytes_are_on_disk_before_the_name_is(tmp_path, monkeypatch):
    order = []
    fsync = os.fsync

    def noted(descriptor):
        order.append(("fsync", [path.name for path in tmp_path.glob("final")]))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    aside, _ = write_aside(tmp_path, BytesIO(b"x"))
    commit(aside, tmp_path / "final")
    assert order == [("fsync", []), ("fsync", ["final"])]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_nothing_is_left_of_a_write_that_stops(tmp_path, monkeypatch, error):
    def fsync(_descriptor):
        raise error

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(type(error)):
        write_aside(tmp_path, BytesIO(b"x"))
    with pytest.raises(OSError, match="Input/output"):
        write_aside(tmp_path, Stops(b"x" * 30))
    assert list(tmp_path.iterdir()) == []


def test_leftovers_go_and_everything_else_stays(tmp_path):
    keep = [tmp_path / name for name in (".trtforge-x", "trtforge-1.tmp", ".trtforge-1.tmp.d")]
    for path in (*keep, tmp_path / ".trtforge-0a.tmp"):
        path.touch()
    (tmp_path / ".trtforge-link.tmp").symlink_to(keep[0])
    (tmp_path / ".trtforge-dir.tmp").mkdir()
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*(path.name for path in keep), ".trtforge-dir.tmp"}


def test_one_holder_at_a_time(tmp_path):
    inside, worst = [], []

    def hold():
        for _ in range(50):
            with locked(tmp_path / "locks" / "a", on_wait=nothing):
                inside.append(1)
                worst.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=hold) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(worst) == 200
    assert set(worst) == {1}


def test_one_holder_at_a_time_although_holders_remove_the_file(tmp_path):
    """What a collector of old lock files does; a waiter must not hold a lock that nobody else can see."""
    path = tmp_path / "a"
    inside, worst, removed = [], [], []

    def hold():
        for _ in range(100):
            with locked(path, on_wait=nothing):
                inside.append(1)
                worst.append(len(inside))
                inside.pop()

    def remove():
        for _ in range(300):
            with locked_if_free(path) as is_free:
                if is_free:
                    inside.append(1)
                    worst.append(len(inside))
                    inside.pop()
                    path.unlink()
                    removed.append(1)

    threads = [threading.Thread(target=target) for target in (hold, hold, hold, remove)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert removed
    assert set(worst) == {1}


def test_a_waiter_says_so_once_and_goes_on_when_the_file_was_removed(tmp_path):
    path, waits, held = tmp_path / "a", [], threading.Event()

    def wait():
        with locked(path, on_wait=lambda: (waits.append(1), held.set())):
            assert path.exists()

    with locked(path, on_wait=nothing):
        thread = threading.Thread(target=wait)
        thread.start()
        assert held.wait(10)
        path.unlink()
    thread.join()
    assert waits == [1]


def test_a_free_lock_is_held_and_a_held_one_is_left(tmp_path):
    path = tmp_path / "a"
    with locked_if_free(path) as is_free:
        assert is_free
        with locked_if_free(path) as again:
            assert not again
    with locked(path, on_wait=nothing), locked_if_free(path) as is_free:
        assert not is_free
    with locked_if_free(tmp_path / "no folder" / "a") as is_free:
        assert not is_free


def test_an_exception_inside_a_lock_frees_it(tmp_path):
    for lock in (lambda path: locked(path, on_wait=nothing), locked_if_free):
        with pytest.raises(KeyboardInterrupt), lock(tmp_path / "a"):
            raise KeyboardInterrupt
        with locked_if_free(tmp_path / "a") as is_free:
            assert is_free


def test_a_lock_that_cannot_be_made_is_a_store_error(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(StoreError, match="is a file, expected a folder"),
        locked(tmp_path / "file" / "a", on_wait=nothing),
    ):
        pass


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_says_needed_and_free(tmp_path, code):
    with pytest.raises(StoreError) as caught, explained(tmp_path / "not there", 5, "do something"):
        raise OSError(code, os.strerror(code))
    (problem,) = caught.value.problems
    assert problem.summary.startswith(f"{tmp_path / 'not there'} has too little space: 5 bytes needed, ")
    assert int(problem.summary.split()[-3]) == pytest.approx(free_bytes(tmp_path), rel=0.1)
    assert problem.next_step.startswith("df -h ")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EPERM])
def test_no_permission_names_the_file(tmp_path, code):
    with (
        pytest.raises(StoreError, match=r"locks/a cannot be written: ") as caught,
        explained(tmp_path, 0, "do something"),
    ):
        raise OSError(code, os.strerror(code), str(tmp_path / "locks/a"))
    assert caught.value.problems[0].next_step == f"ls -ld {tmp_path}"


def test_other_errors_keep_the_step_that_is_given(tmp_path):
    with pytest.raises(StoreError) as caught, explained(tmp_path, 0, "do something"):
        raise OSError(errno.EIO, "Input/output error", "place")
    assert (caught.value.problems[0].summary, caught.value.problems[0].next_step) == (
        "place: Input/output error",
        "do something",
    )
