"""Builds a spec again and again, killed at the first point, at the second, and so on until a build gets through.

    python dying_builds.py FOLDER

FOLDER holds `before/` with a store, a cache folder and a bundle of an earlier build, and `new.yaml`. Each point gets a
copy of `before`; a process that dies there; then a second one that is left alone. A JSON line tells what each left.
Points are all calls that change something on disk, and every stage's begin and end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import sys
from pathlib import Path

import trtforge.graph.ingest
import trtforge.shapes.profile_check  # noqa: F401 - loaded once, before the forks
from trtforge import pipeline, stages, upkeep
from trtforge.machine import machine_facts
from trtforge.release.verify import verify
from trtforge.store import read_record


def kill_at(point):
    """Makes this process die at that point, counted from 1."""
    count = 0

    def reached():
        nonlocal count
        count += 1
        if count == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(owner, name, changes=lambda *_: True):
        real = getattr(owner, name)

        def wrapped(*arguments, **named):
            if changes(*arguments):
                reached()
            return real(*arguments, **named)

        setattr(owner, name, wrapped)

    def loses(descriptor):
        """What is not yet on disk may be lost; a folder's new entries are another point's."""
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        if count + 1 == point and Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".tmp":
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
        return True

    before(os, "fsync", loses)
    for name in ("replace", "rename"):
        before(Path, name)
    before(Path, "unlink", lambda path, *_: path.exists())
    before(Path, "mkdir", lambda path, *_: not path.exists())
    before(shutil, "rmtree")
    tell = stages.Stages.tell

    def told(self, event):
        tell(self, event)
        if event.kind in ("started", "done"):
            reached()

    stages.Stages.tell = told


def forked(function):
    """The wait status of a child that runs `function`, and what it returned."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        code = 70
        try:
            os.write(write_end, json.dumps(function()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write_end)
    with open(read_end, "rb") as reader:  # noqa: PTH123 - a descriptor
        text = reader.read()
    return os.waitpid(child, 0)[1], json.loads(text) if text else None


def build(folder):
    """Verdicts of all stages, and the digest of each engine."""
    verdicts = {}

    def report(event):
        if event.kind == "done":
            verdicts[event.stage] = event.text.split(";")[0]

    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    bundle = pipeline.build(folder.parent / "new.yaml", folder / "out", report, store_path=folder / "store", jobs=1)
    return verdicts, [artifact.digest for artifact in bundle.manifest.artifacts]


def state(folder):
    """What is in the store and in the output folder."""
    records = [read_record(path) for path in (folder / "store").glob("records/*/*.json")]
    report = verify(folder / "out" / "manifest.json", wanted_gpu=None, wanted_tensorrt=None, facts=machine_facts())
    text = (folder / "out" / "manifest.json").read_text()
    return {
        "records": [f"{record.stage} {record.key}" for record in records if record],
        "damage": [str(found) for found in upkeep.check(folder / "store").damage],
        "problems": [problem.summary for problem in report.problems],
        "digests": [artifact["digest"] for artifact in json.loads(text)["artifacts"]],
        "files": sorted(path.name for path in (folder / "out").iterdir()),
        "leftovers": [
            str(path.relative_to(folder))
            for path in folder.rglob("*")
            if path.suffix == ".tmp" or path.parent.name == "work"
        ],
    }


def main(folder):
    point = 0
    while True:
        point += 1
        copy = folder / str(point)
        shutil.copytree(folder / "before", copy)

        def dying(copy=copy, point=point):
            kill_at(point)
            return build(copy)

        status, first = forked(dying)
        killed = state(copy)
        again, second = forked(lambda copy=copy: build(copy))
        line = {
            "status": status,
            "first": first,
            "killed": killed,
            "again": again,
            "second": second,
            "end": state(copy),
        }
        sys.stdout.write(json.dumps(line) + "\n")
        shutil.rmtree(copy)
        if status == 0:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
