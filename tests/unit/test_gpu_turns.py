"""Builds of one user take turns on a GPU, whatever their stores."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from trtforge.engine_process import gpu_to_itself
from trtforge.machine import GpuFacts
from trtforge.targets import gpu_lock

H200, OTHER = (
    GpuFacts(index, "NVIDIA H200", "H200", "sm90", 132, 150_000_000_000, f"GPU-{index}") for index in range(2)
)


def run_that_tells(told):
    """As far as waiting for a GPU needs it: two runs have nothing in common, stores included."""
    return SimpleNamespace(stages=SimpleNamespace(tell=lambda event: told.set()))


def test_a_second_run_waits_until_the_first_leaves_the_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    waits, enters = threading.Event(), threading.Event()

    def second():
        with gpu_to_itself(H200, "build H200", run_that_tells(waits)):
            enters.set()

    with gpu_to_itself(H200, "build H200", run_that_tells(threading.Event())):
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(10)
        assert not enters.is_set()
        with gpu_to_itself(OTHER, "build H200", run_that_tells(threading.Event())):
            pass  # another GPU of the model is free
    thread.join(10)

    assert enters.is_set()
    assert gpu_lock(H200).is_relative_to(tmp_path)
