"""The program starts without loading what only some verbs need."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {
    *("numpy", "ml_dtypes", "onnx", "onnxruntime", "polygraphy", "google.protobuf", "pydantic", "yaml", "rich"),
    *("tensorrt", "tensorrt_rtx", "torch", "pycuda", "cuda", "jsonschema", "sklearn"),
}
_LOADED = "import json, sys; print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
_PROGRAM = f"""
import runpy
try:
    runpy.run_module("trtforge", run_name="__main__")
finally:
    {_LOADED}
"""


def _run(*arguments, program=_PROGRAM):
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_importing_the_program_loads_nothing_heavy():
    done = _run(program=f"import trtforge.cli.app; {_LOADED}")

    assert done.returncode == 0, done.stderr
    assert "trtforge.cli.app" in json.loads(done.stderr)
    assert not HEAVY & set(json.loads(done.stderr))


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], *[[verb, "--help"] for verb in ("init", "plan", "build", "verify", "doctor")]],
)
def test_help_loads_nothing_heavy(arguments):
    done = _run(*arguments)

    assert done.returncode == 0, done.stderr
    assert done.stdout
    by_typer = {"pydantic"}  # which typer reads a verb's parameters with
    assert not (HEAVY - by_typer) & set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("verb", ["plan", "build"])
def test_a_missing_spec_is_told_before_anything_heavy_is_loaded(verb, tmp_path):
    done = _run(verb, str(tmp_path / "missing.yaml"))

    assert done.returncode == 2, done.stderr
    assert not {"onnxruntime", "tensorrt_rtx", "torch"} & set(json.loads(done.stderr.splitlines()[-1]))
