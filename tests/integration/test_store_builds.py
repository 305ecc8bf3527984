"""Whole builds through a store: in parallel, with files that change meanwhile, on full and damaged disks."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import onnx
import onnx.parser
import pytest

import trtforge.graph.ingest
from trtforge import pipeline, upkeep
from trtforge.backends import tensorrt_rtx
from trtforge.errors import BuildError, StoreError, TrtForgeError, exit_code_of
from trtforge.machine import machine_facts
from trtforge.release.verify import verify
from trtforge.spec.load import load_spec
from trtforge.store import read_record

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "configs" / "models" / "digits.onnx"
TRTFORGE = (sys.executable, "-m", "trtforge")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def write_spec(tmp_path):
    """Writes a spec for a copy of the model, and gives its path."""
    shutil.copyfile(MODEL, tmp_path / "digits.onnx")

    def write(gpus=("sm86",), largest=4, **more):
        image = {"min": [1, 1, 8, 8], "opt": [2, 1, 8, 8], "max": [largest, 1, 8, 8]}
        spec = {
            "version": 1,
            "name": "digits",
            "model": {"onnx": "digits.onnx"},
            "profiles": [{"inputs": {"image": image}}],
            "targets": [{"backend": "tensorrt_rtx", "gpus": list(gpus)}],
            "output": "out",
        }
        (tmp_path / "spec.yaml").write_text(json.dumps(spec | more))
        return tmp_path / "spec.yaml"

    return write


def build(spec, events=None, **how):
    """Builds in this process; what is told goes to `events`."""
    report = (lambda _event: None) if events is None else events.append
    return pipeline.build(spec, None, report, store_path=spec.parent / "store", **how)


def command(spec, *words):
    return [*TRTFORGE, "build", str(spec), "--store", str(spec.parent / "store"), *words]


def verdicts(events):
    return {event.stage: event.text.split(";")[0] for event in events if event.kind == "done"}


def leftovers(folder):
    return [path for path in folder.rglob("*") if path.suffix == ".tmp" or path.parent.name == "work"]


def assert_good(folder):
    report = verify(folder / "out" / "manifest.json", wanted_gpu=None, wanted_tensorrt=None, facts=machine_facts())
    assert report.problems == ()
    assert upkeep.check(folder / "store").damage == ()
    assert leftovers(folder) == []


def digests(folder):
    manifest = json.loads((folder / "out" / "manifest.json").read_text())
    return {artifact["file"]: artifact["digest"] for artifact in manifest["artifacts"]}


def test_an_unchanged_build_says_cached_for_each_stage_and_writes_nothing(write_spec, tmp_path):
    spec, events = write_spec(), []
    build(spec)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    inodes = {path: path.stat().st_ino for path in tmp_path.rglob("*") if path.is_file() and "locks" not in path.parts}
    bundle = build(spec, events)
    assert set(verdicts(events).values()) == {"cached"}
    assert not bundle.is_changed
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    after = {path: path.stat().st_ino for path in tmp_path.rglob("*") if path.is_file() and "locks" not in path.parts}
    assert {path: inode for path, inode in after.items() if "cache" not in path.parts} == {
        path: inode for path, inode in inodes.items() if "cache" not in path.parts
    }


def test_plan_explains_what_a_build_would_do(write_spec):
    def explained(spec):
        words = [*TRTFORGE, "plan", str(spec), "--explain", "--store", str(spec.parent / "store"), "--json"]
        return json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)["stages"]

    spec = write_spec()
    assert explained(spec) == {"ingest": "new", "profile check": "new", "build sm86": "new"}
    build(spec)
    assert explained(spec) == {"ingest": "cached", "profile check": "cached", "build sm86": "cached"}
    stale = "stale, profiles[0].image.max changed"
    spec, events = write_spec(largest=8, gpus=("sm86", "sm89")), []
    assert explained(spec) == {"ingest": "cached", "profile check": stale, "build sm86": stale, "build sm89": "new"}
    build(spec, events)
    assert verdicts(events) == {
        "ingest": "cached",
        "profile check": stale,
        "build sm86": stale,
        "build sm89": "new",
        "publish": "written",
    }


def test_four_processes_on_one_output(write_spec, tmp_path):
    spec = write_spec(gpus=("sm86", "sm89"))
    runs = [
        subprocess.Popen(
            command(spec, "--json", "--progress", "plain"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    results = [(run.communicate(timeout=120), run.returncode) for run in runs]
    assert [code for _, code in results] == [0, 0, 0, 0], results
    found = [sorted(json.loads(out)["stages"].values()) for (out, _), _ in results]
    assert sorted(found) == [["cached", "cached"]] * 3 + [["new", "new"]]
    waits = [err for (_, err), _ in results if f"another build writes {tmp_path / 'out'}; waiting for it" in err]
    assert len(waits) >= 1
    assert_good(tmp_path)
    for name, digest in digests(tmp_path).items():
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == digest
    stages = sorted(stored.record.stage for stored in upkeep.stored_stages(tmp_path / "store"))
    assert stages == ["build", "build", "external files", "ingest", "profile check"]


def test_two_outputs_share_a_build_that_runs(write_spec, tmp_path):
    """The second build of the same finds the stage's lock held, says so, and reuses."""
    spec, events = write_spec(), []
    inside, go_on = threading.Event(), threading.Event()

    def first(event):
        if event.kind == "step" and event.stage == "build sm86":
            inside.set()
            assert go_on.wait(60)

    runs = [
        threading.Thread(
            target=pipeline.build, args=(spec, tmp_path / "a", first), kwargs={"store_path": tmp_path / "store"}
        )
    ]
    runs[0].start()
    assert inside.wait(60)
    runs += [
        threading.Thread(
            target=pipeline.build, args=(spec, tmp_path / "b", events.append), kwargs={"store_path": tmp_path / "store"}
        )
    ]
    runs[1].start()
    while not any(event.kind == "warning" for event in list(events)):
        runs[1].join(0.05)
    go_on.set()
    for run in runs:
        run.join()
    (warning,) = (event for event in events if event.kind == "warning")
    assert (warning.stage, warning.text) == ("build sm86", "another build makes the same; waiting for it")
    assert verdicts(events)["build sm86"] == "cached"
    assert (tmp_path / "a" / "manifest.json").exists()
    assert (tmp_path / "b" / "manifest.json").exists()


def during(stage, action):
    """A report that does something once, when a stage makes its first step or begins."""
    done = []

    def report(event):
        if not done and event.stage == stage and event.kind in ("started", "step"):
            done.append(event)
            action()

    return report


def test_a_spec_edited_during_a_build_does_not_mix(write_spec, tmp_path):
    spec = write_spec()
    digest = load_spec(spec).digest
    report = during("profile check", lambda: write_spec(gpus=("sm89",), largest=32, name="other"))
    bundle = pipeline.build(spec, None, report, store_path=tmp_path / "store")
    (artifact,) = bundle.manifest.artifacts
    assert (artifact.target_gpu, artifact.profiles[0].shapes["image"].max) == ("sm86", (4, 1, 8, 8))
    assert (bundle.manifest.name, bundle.manifest.spec.digest) == ("digits", digest)
    assert_good(tmp_path)


def another_model(path):
    """Another model of the same inputs and outputs, as a whole file."""
    data = MODEL.read_bytes()
    other = path.with_name("other.onnx")
    other.write_bytes(data + b"\x12\x03abc")  # producer_name, again: still a model
    other.replace(path)


@pytest.mark.parametrize("stage", ["profile check", "build sm86"])
@pytest.mark.parametrize("change", [another_model, Path.unlink])
def test_a_model_replaced_during_a_build_gives_no_result(write_spec, tmp_path, stage, change):
    spec = write_spec()
    report = during(stage, lambda: change(tmp_path / "digits.onnx"))
    with pytest.raises(TrtForgeError) as caught:
        pipeline.build(spec, None, report, store_path=tmp_path / "store")
    assert exit_code_of(caught.value.problems) == BuildError.exit_code
    assert "digits.onnx or a file with its weights changed during the build" in caught.value.problems[0].summary
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert list((tmp_path / "store" / "records").glob(f"{stage.split()[0]}*/*")) == []
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("again", [False, True])
def test_a_model_replaced_between_hashing_and_reading_gives_no_record(write_spec, tmp_path, monkeypatch, again):
    spec = write_spec()
    if again:
        build(spec)
        for path in (tmp_path / "store" / "records" / "ingest").iterdir():
            path.unlink()
    real = trtforge.graph.ingest.read_model

    def late(source, at):
        another_model(source)
        return real(source, at)

    monkeypatch.setattr(trtforge.graph.ingest, "read_model", late)
    with pytest.raises(BuildError, match="changed during the build"):
        build(spec)
    assert list((tmp_path / "store" / "records").glob("ingest/*")) == []
    assert len(list((tmp_path / "store" / "records").glob("external-files/*"))) == again


def test_a_model_replaced_after_the_engines_came_from_the_store_publishes_nothing(write_spec, tmp_path):
    spec = write_spec()
    build(spec)
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(BuildError, match="changed during the build"):
        pipeline.build(
            spec,
            None,
            during("build sm86", lambda: another_model(tmp_path / "digits.onnx")),
            store_path=tmp_path / "store",
        )
    assert not (tmp_path / "out" / "manifest.json").exists()


# Full disks


def fill_at(monkeypatch, number):
    """Makes the disk full at the n-th fsync of this process, for that one and all later ones. The count is given."""
    count = []
    real = os.fsync

    def fsync(descriptor):
        count.append(descriptor)
        if len(count) >= number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return count


def test_a_disk_that_is_full_at_any_write(write_spec, tmp_path, monkeypatch):
    build(write_spec(largest=2))  # an earlier bundle
    spec = write_spec()
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    (tmp_path / "store").rename(tmp_path / "earlier")
    for number in range(1, 100):
        shutil.copytree(tmp_path / "earlier", tmp_path / "store")
        with monkeypatch.context() as patch:
            fill_at(patch, number)
            try:
                build(spec)
            except TrtForgeError as error:
                assert exit_code_of(error.problems) == StoreError.exit_code, number
                assert re.search(
                    r"has too little space: (\d+ bytes needed, )?\d+ bytes free", error.problems[0].summary
                ), number
                assert error.problems[0].next_step.startswith("df -h ")
        assert upkeep.check(tmp_path / "store").damage == (), number
        assert leftovers(tmp_path / "store") + leftovers(tmp_path / "out") == [], number
        if {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} != before:
            break  # the last fsync, that of the folder, comes after the renames
        shutil.rmtree(tmp_path / "store")
    assert number > 10
    build(spec)
    assert_good(tmp_path)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, and a function that sets its size in kilobytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder, lambda size: subprocess.run(["mount", "-o", f"remount,size={size}k", folder], check=True)
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_store_on_a_disk_that_is_really_too_small(write_spec, small_disk, tmp_path):
    disk, resize = small_disk
    spec = write_spec()
    words = command(spec)[:-1] + [str(disk / "store"), "--json"]
    full = subprocess.run(words, capture_output=True, text=True, check=False)
    answer = json.loads(full.stdout)
    assert (full.returncode, answer["exit_code"]) == (8, 8)
    assert re.search(
        r"the engine of \d{6} bytes could not be written: No space left on device; \d+ bytes free", full.stdout
    )
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert leftovers(disk) == []
    checked = subprocess.run(
        [*TRTFORGE, "store", "verify", "--store", disk / "store"], capture_output=True, check=False
    )
    assert checked.returncode == 0
    resize(4000)
    again = subprocess.run(words, capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert digests(tmp_path)


def test_an_output_on_a_disk_that_is_really_too_small(write_spec, small_disk, tmp_path):
    disk, resize = small_disk
    words = [*command(write_spec()), "--output", str(disk / "out"), "--json"]
    full = subprocess.run(words, capture_output=True, text=True, check=False)
    assert full.returncode == 8
    assert re.search(r"out has too little space: \d{6} bytes needed, \d+ bytes free", full.stdout)
    assert list(disk.rglob("*")) == []
    resize(4000)
    again = subprocess.run(words, capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert set(json.loads(again.stdout)["stages"].values()) == {"cached"}


def test_a_store_on_a_read_only_disk_is_a_clear_error(write_spec, small_disk):
    disk, _ = small_disk
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    words = command(write_spec())[:-1] + [str(disk / "store")]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert result.returncode == 8
    assert re.search(r"disk/store.* cannot be written: Read-only file system\n  next: ls -ld ", result.stderr)


# Damaged stores


def damage_blob(store):
    (path,) = store.glob("blobs/*/*")
    path.write_bytes(path.read_bytes()[:-1])


def damage_record(store):
    (path,) = store.glob("records/build/*")
    path.write_text(path.read_text().replace("sha256", "sha255", 1))


def remove_blob(store):
    (path,) = store.glob("blobs/*/*")
    path.unlink()


@pytest.mark.parametrize("damage", [damage_blob, damage_record, remove_blob])
def test_damage_is_warned_about_and_made_good(write_spec, tmp_path, damage):
    spec = write_spec()
    build(spec)
    before = digests(tmp_path)
    damage(tmp_path / "store")
    verb = [*TRTFORGE, "store", "verify", "--store", str(tmp_path / "store")]
    checked = subprocess.run(verb, capture_output=True, text=True, check=False)
    assert checked.returncode == 10
    assert checked.stdout.startswith("damaged: ")
    result = subprocess.run(command(spec, "--progress", "plain"), capture_output=True, text=True, check=True)
    assert re.search(r"warning: store: .*(damaged|gone or damaged); the stage runs again", result.stderr)
    assert re.search(r"build sm86 .* new; ", result.stderr)
    assert digests(tmp_path) == before
    assert_good(tmp_path)


def test_an_engine_of_the_output_that_was_damaged_comes_back_from_the_store(write_spec, tmp_path):
    spec, events = write_spec(), []
    build(spec)
    (engine,) = (tmp_path / "out").glob("*.engine")
    engine.write_bytes(b"damaged")
    build(spec, events)
    assert verdicts(events)["build sm86"] == "cached"
    assert_good(tmp_path)


# Workers that die, hang, or give nothing


def workers(pid="self"):
    """Process ids of the builders that a process runs now, whichever thread started them."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for child in " ".join(texts).split()]


def test_one_target_that_fails_loses_no_other_and_the_next_run_builds_it_alone(write_spec, tmp_path, monkeypatch):
    spec, events = write_spec(gpus=("sm86", "sm89")), []
    real = tensorrt_rtx.build

    def killed_for_sm86(unit, graph, work_dir, on_event, timeout, around):
        def kill(event):
            if unit.gpu == "sm86":
                for pid in workers():
                    os.kill(pid, signal.SIGKILL)
            on_event(event)

        return real(unit, graph, work_dir, kill, timeout, around)

    with monkeypatch.context() as patch:
        patch.setattr(tensorrt_rtx, "build", killed_for_sm86)
        bundle = build(spec, events, jobs=1)
    (missing,) = bundle.missing
    assert missing.problem.exit_code == BuildError.exit_code
    assert "was killed (SIGKILL); most often the system ran out of memory; it was at '" in missing.problem.summary
    (kept,) = (line for line in missing.problem.detail if "reproduces it" in line)
    folder = Path(kept.rpartition(": ")[2])
    assert folder == tmp_path / "store" / "failures" / missing.identifier
    assert {path.name for path in folder.iterdir()} == {"builder.log", "request.json", "trtforge", "reproduce.sh"}
    assert [artifact.target_gpu for artifact in bundle.manifest.artifacts] == ["sm89"]
    assert [entry.verdict for entry in bundle.manifest.missing] == ["failed"]
    events.clear()
    assert build(spec, events).missing == ()
    assert (verdicts(events)["build sm86"], verdicts(events)["build sm89"]) == ("new", "cached")
    assert_good(tmp_path)


def test_a_target_that_the_builder_refuses_is_told_with_exit_code_11(write_spec, tmp_path):
    """sm75 has no FP32 deconvolution of volumes in TensorRT-RTX, which only its builder says."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,1,3,3,3] x) => (float[1,1,3,3,3] y)
    <float[1,1,1,1,1] w = {2}> { [c] y = ConvTranspose(x, w) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "volume.onnx")
    spec = write_spec(gpus=("sm75", "sm86"), model={"onnx": "volume.onnx"}, profiles=[])
    result = subprocess.run(command(spec, "--json"), capture_output=True, text=True, check=False)
    answer = json.loads(result.stdout)
    assert (result.returncode, answer["exit_code"]) == (11, 11)
    (missing,) = answer["missing"]
    assert "node 'c' needs FP32 3D deconvolution, which TensorRT-RTX does not have for sm75" in missing["summary"]
    assert [engine["identifier"] for engine in answer["engines"]] == [missing["identifier"].replace("sm75", "sm86")]
    again = subprocess.run(command(spec, "--json"), capture_output=True, text=True, check=False)
    assert (again.returncode, list(json.loads(again.stdout)["stages"].values())) == (11, ["cached"])


def test_a_build_that_hangs_ends_at_its_limit(write_spec, tmp_path):
    spec = write_spec(build_timeout=3)

    def stop_all():
        for pid in workers():
            os.kill(pid, signal.SIGSTOP)

    with pytest.raises(TrtForgeError) as caught:
        pipeline.build(spec, None, on_step("build sm86", stop_all), store_path=tmp_path / "store")
    (problem,) = caught.value.problems
    assert problem.exit_code == BuildError.exit_code
    assert "no engine after 3 s, the limit; it was at '" in problem.summary
    assert problem.next_step.startswith("raise build_timeout")
    assert (Path(problem.detail[-1].rpartition(": ")[2]) / "reproduce.sh").exists()
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert workers() == []
    assert leftovers(tmp_path) == []


def on_step(stage, action):
    done = []

    def report(event):
        if not done and event.stage == stage and event.kind == "step":
            done.append(event)
            action()

    return report


def test_an_interrupt_ends_all_builds_at_once(write_spec, tmp_path):
    spec = write_spec(gpus=("sm86", "sm89"))
    words = command(spec, "--progress", "json")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        for line in run.stderr:
            if json.loads(line)["kind"] == "step" and "build" in line:
                break
        children = workers(run.pid)
        for pid in children:
            os.kill(pid, signal.SIGSTOP)
        run.send_signal(signal.SIGINT)
        start = time.monotonic()
        run.communicate(timeout=20)
    assert time.monotonic() - start < 20
    assert run.returncode == 130
    assert children
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    assert leftovers(tmp_path) == []
    assert build(spec).missing == ()


# The verbs


def store_verb(folder, *words):
    result = subprocess.run(
        [*TRTFORGE, "store", *words, "--store", str(folder / "store")], capture_output=True, text=True, check=False
    )
    return result.returncode, result.stdout, result.stderr


def test_ls_gc_and_verify(write_spec, tmp_path):
    build(write_spec())
    (blob,) = (tmp_path / "store").glob("blobs/*/*")
    code, out, _ = store_verb(tmp_path, "ls")
    assert code == 0
    (line,) = (line for line in out.splitlines() if line.startswith("build "))
    assert re.fullmatch(
        r"build +[0-9a-f]{12} +[\d.]+ KB  20\d\d-\d\d-\d\dT[\d:]{8}Z  digits-fp32-sm86-trtrtx\S+, 0.5 MB", line
    )
    listed = json.loads(store_verb(tmp_path, "ls", "--json")[1])
    assert sum(record["size_bytes"] for record in listed["records"]) == listed["size_bytes"] == blob.stat().st_size
    assert store_verb(tmp_path, "get", blob.name[:12], str(tmp_path / "copy"))[0] == 0
    assert (tmp_path / "copy").read_bytes() == blob.read_bytes()
    checked = json.loads(store_verb(tmp_path, "verify", "--json")[1])
    assert (checked["ok"], checked["records"], checked["blobs"], checked["damage"]) == (True, 4, 1, [])
    assert "would remove 4 records and 0 blobs" in store_verb(tmp_path, "gc", "--older-than", "0m", "--dry-run")[1]
    gone = json.loads(store_verb(tmp_path, "gc", "--json")[1])
    assert (gone["records"], gone["freed_bytes"]) == (0, 0)
    gone = json.loads(store_verb(tmp_path, "gc", "--older-than", "0d", "--json")[1])
    assert (gone["records"], gone["blobs"], gone["young_blobs"]) == (4, 0, 1)
    assert upkeep.stored_stages(tmp_path / "store") == ()


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("gc", "--older-than", "soon"), 64, "--older-than soon: expected a number of minutes, hours, days or weeks"),
        (("gc",), 8, "does not exist"),
        (("ls",), 8, "does not exist"),
        (("verify",), 8, "does not exist"),
    ],
)
def test_wrong_uses_of_the_verbs(tmp_path, words, code, text):
    found, _, err = store_verb(tmp_path, *words)
    assert found == code
    assert text in err
    assert "  next: " in err


def test_records_tell_what_they_are_without_a_path(write_spec, tmp_path):
    build(write_spec())
    for path in (tmp_path / "store").glob("records/*/*.json"):
        record = read_record(path)
        assert record.about
        assert str(tmp_path) not in path.read_text()
