"""Kill -9 at every point where a build changes something on disk, and at every stage's begin and end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trtforge import pipeline

ROOT = Path(__file__).resolve().parents[2]
STAGES = {"external files": None, "ingest": "ingest", "profile check": "profile check", "build": "build sm86"}


def spec(**more):
    image = {"min": [1, 1, 8, 8], "opt": [2, 1, 8, 8], "max": [4, 1, 8, 8]}
    return json.dumps(
        {
            "version": 1,
            "name": "digits",
            "model": {"onnx": str(ROOT / "configs/models/digits.onnx")},
            "profiles": [{"inputs": {"image": image}}],
            "targets": [{"backend": "tensorrt_rtx", "gpus": ["sm86"]}],
            **more,
        }
    )


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """What was found at each point; the build before had another target and another precision."""
    folder = tmp_path_factory.mktemp("dying")
    before = folder / "before"
    old = spec(precision={"tf32": True}, targets=[{"backend": "tensorrt_rtx", "gpus": ["sm86", "sm89"]}])
    (folder / "old.yaml").write_text(old)
    (folder / "new.yaml").write_text(spec())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(before / "cache"))
        pipeline.build(folder / "old.yaml", before / "out", lambda _event: None, store_path=before / "store")
    # The model is new to the store, so that its stages run too.
    for path in (before / "store" / "records").glob("[!b]*/*"):
        path.unlink()
    result = subprocess.run(
        [sys.executable, Path(__file__).with_name("dying_builds.py"), folder],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_builds_died_until_one_got_through(lines):
    assert len(lines) > 30
    assert {line["status"] for line in lines[:-1]} == {signal.SIGKILL}
    assert lines[-1]["status"] == 0


def test_the_output_is_the_old_bundle_or_the_new_or_fails_verification(lines):
    uninterrupted = lines[-1]["first"][1]
    seen = set()
    for line in lines:
        killed = line["killed"]
        state = "new" if killed["digests"] == uninterrupted else "old" if len(killed["digests"]) == 2 else "other"
        seen.add((state, bool(killed["problems"])))
    # Between the first rename and the last, the old manifest is there with the new engine, and says so.
    assert seen == {("old", False), ("old", True), ("new", False)}


def test_the_store_is_whole_whenever_it_dies(lines):
    assert [line["killed"]["damage"] for line in lines if line["killed"]["damage"]] == []


def test_a_second_run_reuses_what_was_done_and_redoes_the_rest(lines):
    verdicts = set()
    for number, line in enumerate(lines, 1):
        assert line["again"] == 0, number
        there = {record.rpartition(" ")[0] for record in line["killed"]["records"] if not record.startswith("build")}
        if len([record for record in line["killed"]["records"] if record.startswith("build")]) == 3:
            there.add("build")
        for stage, label in STAGES.items():
            if label:
                verdict = line["second"][0][label]
                verdicts.add((stage, verdict))
                assert (verdict == "cached") == (stage in there), (number, stage, verdict)
    assert {("ingest", "new"), ("ingest", "cached"), ("build", "cached")} < verdicts
    assert ("build", "stale, precision.tf32 changed") not in verdicts  # another spec's build


def test_the_result_equals_that_of_an_uninterrupted_build(lines):
    (digest,) = lines[-1]["first"][1]
    for number, line in enumerate(lines, 1):
        assert line["second"][1] == [digest], number
        end = line["end"]
        assert (end["digests"], end["problems"], end["damage"]) == ([digest], [], []), number
        assert end["files"] == lines[-1]["end"]["files"], number


def test_nothing_is_left_behind(lines):
    for number, line in enumerate(lines, 1):
        assert line["end"]["leftovers"] == [], number
    assert any(line["killed"]["leftovers"] for line in lines)
