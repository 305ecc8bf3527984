from __future__ import annotations

import json
import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from trtforge import upkeep
from trtforge.digests import file_digest, value_digest
from trtforge.errors import CommandLineError, IntegrityError, StoreError
from trtforge.files import locked
from trtforge.store import StageKey, blob_path, differences, open_store, read_record, record_path

HOUR = 3600.0
KEY = StageKey("a stage", 1, {"model": "0" * 64}, {"profiles": [{"name": "p", "inputs": {"x": {"max": [1, 3]}}}]}, {})


@pytest.fixture
def warnings():
    return []


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def store(root, warnings):
    with open_store(root, warnings.append) as opened:
        yield opened


def put(store, key=KEY, data=b"engine", about="net.engine", result=7):
    path = store.work_dir / "file"
    path.write_bytes(data)
    return store.put(key, result, {"engine": path}, about)


def other(number):
    return replace(KEY, version=number + 2)


def test_what_was_put_is_found(store, warnings):
    assert store.find(KEY) is None
    record = put(store)
    assert store.find(KEY) == record
    assert (record.stage, record.about, record.result) == ("a stage", "net.engine", 7)
    assert store.blob_path(record.blobs["engine"]).read_bytes() == b"engine"
    assert list(store.work_dir.iterdir()) == [store.work_dir / "lock"]
    assert warnings == []


def test_a_record_is_found_by_another_run_and_after_a_move(root, tmp_path, warnings):
    with open_store(root, warnings.append) as store:
        put(store)
    root.rename(tmp_path / "moved")
    with open_store(tmp_path / "moved", warnings.append) as store:
        assert store.find(KEY)
    assert warnings == []


def test_records_hold_no_path_and_no_time(store, root):
    put(store)
    text = record_path(root, KEY.stage, KEY.digest).read_text()
    assert str(root) not in text
    assert not re.search(r"20\d\d-|time|date", text)


def truncated(path):
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def emptied(path):
    path.write_bytes(b"")


def a_folder(path):
    path.unlink()
    path.mkdir()


DAMAGES = [truncated, flipped, emptied, a_folder, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_blob_is_noticed_and_made_again(store, root, warnings, damage):
    record = put(store)
    path = store.blob_path(record.blobs["engine"])
    damage(path)
    assert [found.path for found in upkeep.check(root).damage if found.path.parent.parent.name == "records"]
    assert store.find(KEY) is None
    assert warnings == [f"{path} is gone or damaged; the stage runs again"]
    if damage is a_folder:
        path.rmdir()
    assert put(store) == record
    assert store.find(KEY) == record
    assert upkeep.check(root).damage == ()


@pytest.mark.parametrize("damage", [*DAMAGES[:3], lambda path: path.write_text("[" * 100_000)])
def test_a_damaged_record_is_noticed_and_made_again(store, root, warnings, damage):
    record = put(store)
    path = record_path(root, KEY.stage, KEY.digest)
    damage(path)
    (found,) = upkeep.check(root).damage
    assert (found.path, found.reason) == (path, "is no whole record of the key in its name")
    assert store.find(KEY) is None
    assert warnings == [f"{path} is damaged; the stage runs again"]
    assert not path.exists()
    assert put(store) == record
    assert upkeep.check(root).damage == ()


def test_the_record_of_another_key_is_not_taken(store, root, warnings):
    put(store)
    path = record_path(root, KEY.stage, other(1).digest)
    path.write_bytes(record_path(root, KEY.stage, KEY.digest).read_bytes())
    assert store.find(other(1)) is None
    assert warnings == [f"{path} is damaged; the stage runs again"]


def test_a_record_that_was_edited_into_another_key_is_not_taken(store, root):
    put(store)
    path = record_path(root, KEY.stage, other(1).digest)
    body = json.loads(record_path(root, KEY.stage, KEY.digest).read_text())["record"] | {"key": other(1).digest}
    path.write_text(json.dumps({"sha256": value_digest(body), "record": body}))
    assert store.find(other(1)) is None


@pytest.mark.parametrize("digest", ["../../../secret", "0" * 63, "0" * 65, "A" * 64, 7])
def test_a_record_names_blobs_by_digest_and_by_nothing_else(store, root, digest):
    put(store)
    path = record_path(root, KEY.stage, KEY.digest)
    body = json.loads(path.read_text())["record"] | {"blobs": {"engine": digest}}
    path.write_text(json.dumps({"sha256": value_digest(body), "record": body}))
    assert read_record(path) is None


def test_a_digest_that_a_memo_remembers_is_not_what_damage_is_judged_by(root, warnings):
    """A memo may be wrong for a moment; a good blob must not be thrown away for it."""
    with open_store(root, warnings.append, lambda _path: "0" * 64) as store:
        record = put(store)
        assert store.find(KEY) is None
        assert store.blob_path(record.blobs["engine"]).read_bytes() == b"engine"


def test_a_folder_in_place_of_a_record_is_told(store, root, warnings):
    put(store)
    a_folder(record_path(root, KEY.stage, KEY.digest))
    assert store.find(KEY) is None
    assert "cannot be read (Is a directory)" in warnings[0]
    (found,) = upkeep.check(root).damage
    assert found.reason == "cannot be read: Is a directory"


@pytest.mark.parametrize("name", ["", "work", "locks"])
def test_a_store_that_is_a_file_is_a_clear_error(root, warnings, name):
    if name:
        root.mkdir()
    (root / name).touch()
    with pytest.raises(StoreError, match=r"(is a file, expected a folder|Not a directory|File exists)") as caught:
        open_store(root, warnings.append).__enter__()
    assert caught.value.problems[0].next_step


def test_two_results_with_one_content_share_a_blob(store, root):
    first, second = put(store), put(store, other(1))
    assert first.blobs == second.blobs
    assert len(list(root.glob("blobs/*/*"))) == 1


def test_changes_are_named_as_in_the_spec(store):
    assert store.changes("slot", KEY) is None
    store.note("slot", KEY)
    assert store.changes("slot", KEY) == ()
    new = replace(
        KEY, parameters={"profiles": [{"name": "p", "inputs": {"x": {"max": [2, 3]}}}]}, inputs={"model": "1" * 64}
    )
    assert store.changes("slot", new) == ("model", "profiles[0].x.max")
    assert store.changes("other slot", KEY) is None


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        ({"parameters": {"a": 1}}, {"parameters": {"a": 1}}, ()),
        ({"parameters": {"a": 1}}, {"parameters": {"b": 1}}, ("a", "b")),
        ({"parameters": {"a": None}}, {"parameters": {}}, ("a", "parameters")),
        ({"parameters": {"p": [{"x": 1}]}}, {"parameters": {"p": [{"x": 1}, {"x": 2}]}}, ("p[1].x",)),
        ({"stage_version": 1}, {"stage_version": 2}, ("stage_version",)),
        ({"environment": {"tensorrt_rtx": "1.7"}}, {"environment": {"tensorrt_rtx": "1.8"}}, ("tensorrt_rtx",)),
        ({"parameters": {"s": (1, 2)}}, {"parameters": {"s": [1, 2]}}, ()),
    ],
)
def test_differences(before, after, names):
    assert differences(before, after) == names


def test_a_damaged_note_is_ignored_and_replaced(store, root):
    store.note("slot", KEY)
    (path,) = root.glob("latest/*")
    path.write_text("{")
    assert store.changes("slot", KEY) is None
    store.note("slot", KEY)
    assert store.changes("slot", KEY) == ()


def test_a_note_that_says_the_same_is_not_written_again(store, root):
    store.note("slot", KEY)
    (path,) = root.glob("latest/*")
    inode = path.stat().st_ino
    store.note("slot", replace(KEY, parameters={"profiles": ({"name": "p", "inputs": {"x": {"max": (1, 3)}}},)}))
    assert path.stat().st_ino == inode


def test_work_of_killed_runs_goes_and_of_running_ones_stays(root, warnings):
    with open_store(root, warnings.append) as first:
        (first.work_dir / "mine").touch()
        for name in ("killed", "killed before its lock"):
            (root / "work" / name).mkdir()
        (root / "work" / "killed" / "lock").touch()
        (root / "work" / "killed" / "engine").touch()
        with open_store(root, warnings.append) as second:
            assert {path.name for path in (root / "work").iterdir()} == {first.work_dir.name, second.work_dir.name}
            assert (first.work_dir / "mine").exists()
    assert list((root / "work").iterdir()) == []


def test_the_work_folder_goes_whatever_happens(root, warnings):
    with pytest.raises(KeyboardInterrupt), open_store(root, warnings.append):
        raise KeyboardInterrupt
    assert list((root / "work").iterdir()) == []


def test_a_failure_is_kept_in_place_of_the_earlier(store, root):
    for text in ("first", "second"):
        folder = store.new_folder(text)
        (folder / "log").write_text(text)
        kept = store.keep_failure("unit", folder)
    assert kept == root / "failures" / "unit"
    assert (kept / "log").read_text() == "second"
    assert store.keep_failure("unit", store.work_dir / "not there") is None


def age(path, seconds):
    then = time.time() - seconds
    os.utime(path, (then, then))


def collect(root, days=30.0, now=None, **how):
    return upkeep.collect(root, days * 24 * HOUR, time.time() if now is None else now, **how)


@pytest.fixture
def three(root, warnings):
    """A closed store with a record used now, one used 40 days ago, and one whose blob both it and the first name."""
    with open_store(root, warnings.append) as store:
        put(store, other(0), b"kept")
        old = put(store, other(1), b"old")
        put(store, other(2), b"kept")
        store.note("old slot", KEY)
        store.note("new slot", KEY)
        (store.work_dir / "x").mkdir()
        store.keep_failure("old", store.work_dir / "x")
    for number in (1, 2):
        age(record_path(root, KEY.stage, other(number).digest), 40 * 24 * HOUR)
    age(root / "latest" / f"{value_digest('old slot')}.json", 40 * 24 * HOUR)
    age(root / "failures" / "old", 40 * 24 * HOUR)
    return old


def names(root):
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_gc_drops_what_was_not_used_and_nothing_else(root, three, warnings):
    gone = collect(root, now=time.time() + 2 * HOUR)
    assert gone == upkeep.Collected(num_records=2, num_blobs=1, num_young=0, freed_bytes=3)
    assert {name for name in names(root) if not name.startswith("locks")} == {
        f"blobs/{digest[:2]}/{digest}" for digest in [file_digest_of(b"kept")]
    } | {f"records/a-stage/{other(0).digest}.json", f"latest/{value_digest('new slot')}.json"}
    assert upkeep.check(root).damage == ()
    with open_store(root, warnings.append) as store:
        assert store.find(other(0))
        assert not store.find(other(1))
    assert warnings == []
    assert not (root / "failures" / "old").exists()


def file_digest_of(data):
    import hashlib

    return hashlib.sha256(data).hexdigest()


def test_a_dry_run_counts_the_same_and_changes_nothing(root, three):
    before = names(root)
    now = time.time() + 2 * HOUR
    counted = collect(root, now=now, dry_run=True)
    assert {name for name in names(root) if not name.startswith("locks")} == {
        name for name in before if not name.startswith("locks")
    }
    assert collect(root, now=now) == counted


def test_a_young_blob_stays(root, three):
    gone = collect(root)
    assert (gone.num_records, gone.num_blobs, gone.num_young, gone.freed_bytes) == (2, 0, 1, 0)
    assert blob_path(root, three.blobs["engine"]).exists()


def test_finding_a_record_is_using_it(root, three, warnings):
    with open_store(root, warnings.append) as store:
        assert store.find(other(1))
    assert collect(root, now=time.time() + 2 * HOUR).num_records == 1


def test_a_running_build_loses_nothing_that_it_used(root, warnings):
    with open_store(root, warnings.append) as store:
        record = put(store)
        later = time.time() + 365 * 24 * HOUR
        assert collect(root, days=0, now=later) == upkeep.Collected(0, 0, 0, 0)
        assert store.find(KEY) == record
    assert collect(root, days=0, now=later).num_records == 1


def test_the_key_of_a_running_stage_is_left_alone(root, three):
    with locked(root / "locks" / other(1).digest, on_wait=lambda: None):
        assert collect(root, now=time.time() + 2 * HOUR).num_records == 1
        assert blob_path(root, three.blobs["engine"]).exists()


def test_gc_drops_damaged_records(root, three):
    flipped(record_path(root, KEY.stage, other(0).digest))
    assert collect(root).num_records == 3


def test_gc_removes_old_locks_that_nobody_holds(root, three):
    for name in ("old", "held"):
        (root / "locks" / name).touch()
    with locked(root / "locks" / "held", on_wait=lambda: None):
        age(root / "locks" / "held", 40 * 24 * HOUR)
        age(root / "locks" / "old", 40 * 24 * HOUR)
        collect(root)
        assert (root / "locks" / "held").exists()
    assert not (root / "locks" / "old").exists()


def test_gc_beside_writers_leaves_every_record_whole(root, warnings):
    """Builds that use a store while it is collected find all that they put."""
    stop, failures = threading.Event(), []

    def write(first):
        with open_store(root, warnings.append) as store:
            for number in range(first, first + 40):
                with store.lock(other(number).digest, on_wait=lambda: None):
                    put_in(store, number)
                    if store.find(other(number)) is None:
                        failures.append(number)

    def put_in(store, number):
        path = store.work_dir / f"file{number}"
        path.write_bytes(b"%d" % (number % 10))  # contents shared between writers
        store.put(other(number), number, {"engine": path})

    def sweep():
        while not stop.is_set():
            collect(root, days=0, now=time.time() + 2 * HOUR)

    (root / "records").mkdir(parents=True)
    sweeper = threading.Thread(target=sweep)
    writers = [threading.Thread(target=write, args=(first,)) for first in (0, 100, 200)]
    for thread in (sweeper, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    sweeper.join()
    assert failures == []
    assert warnings == []
    assert upkeep.check(root).damage == ()


def test_ls_tells_what_is_there_last_used_first(root, three):
    found = upkeep.stored_stages(root)
    assert found[0].record.key == other(0).digest
    assert (found[0].record.about, found[0].size_bytes) == ("net.engine", 4)
    assert found[0].last_used > found[1].last_used
    assert upkeep.blob_bytes(root) == 7


@pytest.mark.parametrize("call", [upkeep.check, upkeep.stored_stages, collect])
@pytest.mark.parametrize("make", [lambda path: None, Path.touch, Path.mkdir])
def test_what_is_no_store_is_not_taken_for_one(root, call, make):
    make(root)
    with pytest.raises(StoreError) as caught:
        call(root)
    assert caught.value.problems[0].next_step == "name the folder of a store with --store"


def test_a_blob_under_another_digest_is_damage(root, three):
    path = blob_path(root, "1" * 64)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x")
    (found,) = upkeep.check(root).damage
    assert found == upkeep.Damage(path, f"its content has SHA-256 {file_digest(path)}, not the one in its name")


def test_a_file_is_copied_out_by_its_first_digits(root, three, tmp_path):
    digest = three.blobs["engine"]
    assert upkeep.copy_blob(root, digest[:6], tmp_path / "copy") == digest
    assert (tmp_path / "copy").read_bytes() == b"old"


def test_a_file_is_copied_out_by_the_key_of_its_record(root, three, tmp_path):
    (digest,) = three.blobs.values()
    assert upkeep.copy_blob(root, three.key[:8], tmp_path / "copy") == digest


def test_a_record_of_several_files_names_them(root, tmp_path, warnings):
    with open_store(root, warnings.append) as store:
        for name in ("engine", "graph"):
            (store.work_dir / name).write_text(name)
        files = {name: store.work_dir / name for name in ("engine", "graph")}
        record = store.put(KEY, 1, files, "two files")

    with pytest.raises(CommandLineError, match="holds 2 files whose digest, or record's key") as caught:
        upkeep.copy_blob(root, record.key[:12], tmp_path / "copy")

    (problem,) = caught.value.problems
    assert {line.partition(" ")[2] for line in problem.detail} == {"engine of a stage", "graph of a stage"}


@pytest.mark.parametrize(
    ("digits", "text"),
    [("../../x", "expected 6 or more"), ("abcde", "expected 6 or more"), ("0" * 64, "holds no files")],
)
def test_digits_that_name_no_file(root, three, tmp_path, digits, text):
    with pytest.raises(CommandLineError, match=text):
        upkeep.copy_blob(root, digits, tmp_path / "copy")


def test_no_file_is_overwritten_and_no_damaged_one_copied(root, three, tmp_path):
    digest = three.blobs["engine"]
    with pytest.raises(CommandLineError, match="is there already"):
        upkeep.copy_blob(root, digest, blob_path(root, digest))
    blob_path(root, digest).write_bytes(b"bad")
    with pytest.raises(IntegrityError, match="is damaged"):
        upkeep.copy_blob(root, digest, tmp_path / "copy")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
