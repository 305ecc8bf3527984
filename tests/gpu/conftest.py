"""Without a GPU these tests are skipped; with `pytest tests/gpu --require-gpu` they fail then."""

from __future__ import annotations

import pytest

from trtforge.machine import machine_facts


def pytest_addoption(parser):
    parser.addoption("--require-gpu", action="store_true", help="fail, rather than skip, where there is no GPU")


def pytest_runtest_setup(item):
    facts = machine_facts()
    missing = facts.cuda_error or ("" if "tensorrt" in facts.packages else "tensorrt is not installed")
    if item.get_closest_marker("gpu") and missing:
        (pytest.fail if item.config.getoption("--require-gpu") else pytest.skip)(missing)
