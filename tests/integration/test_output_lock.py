"""Two processes, one output folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

HOLD = """
import sys, pathlib
from trtforge.release.output import output_lock

with output_lock(pathlib.Path(sys.argv[1]), on_wait=lambda: print("waits", flush=True)):
    pathlib.Path(sys.argv[2]).touch()
    print("holds", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def holder(folder, home, name):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), str(home / f"{name}-holds")],
        env={**os.environ, "XDG_CACHE_HOME": str(home)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("end", ["release", "kill"])
def test_the_second_waits_until_the_first_ends(tmp_path, end):
    real, link = tmp_path / "dist", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    with holder(real, tmp_path, "first") as first:
        assert first.stdout.readline() == "holds\n"
        with holder(link, tmp_path, "second") as second:
            assert second.stdout.readline() == "waits\n"
            time.sleep(0.3)
            assert [path.name for path in tmp_path.glob("*-holds")] == ["first-holds"]
            if end == "kill":
                first.send_signal(signal.SIGKILL)
            else:
                first.stdin.write("\n")
                first.stdin.flush()
            assert second.stdout.readline() == "holds\n"
    assert list(real.iterdir()) == []


def test_other_folders_do_not_wait(tmp_path):
    with holder(tmp_path / "a", tmp_path, "first") as first, holder(tmp_path / "b", tmp_path, "second") as second:
        assert first.stdout.readline() == "holds\n"
        assert second.stdout.readline() == "holds\n"
