"""Projects for the stand-in GPU. One build with its comparisons is made once, and its store copied for each test."""

from __future__ import annotations

import shutil

import h200
import pytest


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as monkeypatch:
        h200.enter(folder, monkeypatch)
        events = []
        return folder, h200.build(folder, events=events), events


@pytest.fixture
def project(tmp_path, monkeypatch, built):
    h200.enter(tmp_path, monkeypatch)
    shutil.copytree(built[0] / "store", tmp_path / "store")
    return tmp_path
