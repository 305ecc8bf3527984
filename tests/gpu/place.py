"""A folder in which the command line builds engines for the GPU at hand, and tests that run without pytest too."""

# ruff: noqa: T201 - what runs without pytest is read by people
from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from trtforge.errors import TrtForgeError
from trtforge.graph.ingest import ingest
from trtforge.machine import machine_facts
from trtforge.reference import ReferenceSession

ROOT = Path(__file__).parents[2]
DIGITS_MODEL = ROOT / "configs/models/digits.onnx"
TARGET = """
builder: {{tactic_sources: [edge_mask_convolutions, jit_convolutions]{settings}}}
targets: [{{backend: tensorrt, gpus: [{gpu}]}}]
output: {folder}/{name}
"""
DIGITS = """
version: 1
name: {name}
model: {{onnx: {digits}}}
inputs: {{image: {{kind: image, range: [0, 1]}}}}
profiles:
  - {{name: small, inputs: {{image: {{min: [1, 1, 8, 8], opt: [16, 1, 8, 8], max: [64, 1, 8, 8]}}}}}}
  - {{name: large, inputs: {{image: {{min: [64, 1, 8, 8], opt: [128, 1, 8, 8], max: [256, 1, 8, 8]}}}}}}
precision: {{type: {precision}}}
"""


class Place:
    """Specs, bundles and the cache of one test file."""

    def __init__(self, folder):
        self.folder = folder
        gpu = machine_facts().gpus[0]
        self.gpu, self.capability = gpu.model, gpu.compute_capability

    def spec(self, name, text, *, settings="", **values):
        """Writes a spec: `text`, then target and output."""
        path = self.folder / f"{name}.yaml"
        values |= {"name": name, "gpu": self.gpu, "folder": self.folder, "settings": settings, "digits": DIGITS_MODEL}
        path.write_text((text + TARGET).format(**values))
        return path

    def build(self, name, text, **values):
        """Builds a spec that builds; the path of its manifest."""
        done = self.trtforge("build", self.spec(name, text, **values))
        assert done.returncode == 0, done.stderr
        return self.manifest(name)

    def manifest(self, name):
        return self.folder / name / "manifest.json"

    def copy(self, name, change):
        """A bundle beside it, whose manifest went through `change`."""
        target = Path(tempfile.mkdtemp(dir=self.folder))
        data = json.loads(self.manifest(name).read_text())
        (artifact,) = data["artifacts"]
        change(artifact)
        (target / artifact["file"]).write_bytes((self.folder / name / artifact["file"]).read_bytes())
        (target / "manifest.json").write_text(json.dumps(data))
        return target / "manifest.json", target / artifact["file"]

    def surroundings(self, **variables):
        path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
        return {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(self.folder / "cache"), **variables}

    def trtforge(self, *words, **variables):
        return self.python("-m", "trtforge", *map(str, words), **variables)

    def python(self, *words, **variables):
        command = [sys.executable, *words]
        around = self.surroundings(**variables)
        return subprocess.run(command, env=around, capture_output=True, text=True, timeout=300, check=False)

    def digits(self):
        """The model of `DIGITS` in onnxruntime."""
        return ReferenceSession(ingest(DIGITS_MODEL, Path(tempfile.mkdtemp(dir=self.folder))))


@contextmanager
def raises(error, text):
    """What pytest.raises does, of the first problem of a TrtForgeError."""
    try:
        yield
    except TrtForgeError as caught:
        problem = caught.problems[0]
        assert text in problem.summary, problem
        assert problem.exit_code == error.exit_code, problem
    else:
        raise AssertionError(f"no {error.__name__}")


def images(count):
    return np.random.default_rng(count).random((count, 1, 8, 8), np.float32)


def cosine(one, other):
    one, other = (np.ravel(array).astype(np.float64) for array in (one, other))
    return one @ other / np.linalg.norm(one) / np.linalg.norm(other)


def run_all(module, make):
    """Runs the tests of a module without pytest, in a folder that `make` fills; the number of those that fail."""
    if not machine_facts().gpus:
        sys.exit(machine_facts().cuda_error)
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        built = make(Path(folder))
        for name, test in vars(module).items():
            if not name.startswith("test_") or not inspect.isfunction(test):
                continue
            started = time.monotonic()
            try:
                test(built)
                verdict = "passes"
            except unittest.SkipTest as reason:
                verdict = f"SKIPPED ({reason})"
            except Exception:  # noqa: BLE001 - the others are of interest too
                traceback.print_exc(file=sys.stdout)
                failed.append(name)
                verdict = "FAILS"
            print(f"== {verdict} {name}, {time.monotonic() - started:.1f} s", flush=True)
    print(f"{len(failed)} failed: {', '.join(failed)}")
    return len(failed)
