"""Unit tests reach no network, start no process, load no TensorRT and write no file outside their own folder."""

from __future__ import annotations

import importlib.abc
import os
import socket
import subprocess
import sys

import pytest

TENSORRT = ("tensorrt", "tensorrt_rtx")


class _NoTensorRt(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in TENSORRT:
            _stop(f"import of {fullname}")()


def _stop(what):
    def stop(*args, **kwargs):
        # Not an Exception, so that no `except` in the code under test hides it.
        pytest.fail(f"{what} in a unit test; move the test to tests/integration")

    return stop


@pytest.fixture(autouse=True)
def _closed_world(monkeypatch, tmp_path):
    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, _stop(f"socket.{name}"))
    monkeypatch.setattr(socket, "getaddrinfo", _stop("name lookup"))
    monkeypatch.setattr(subprocess.Popen, "__init__", _stop("subprocess"))
    monkeypatch.setattr(subprocess.Popen, "__del__", lambda _: None)  # a half-made one would warn
    for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system", "execv", "execve"):
        monkeypatch.setattr(os, name, _stop(f"os.{name}"))
    for name in TENSORRT:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [_NoTensorRt(), *sys.meta_path])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
