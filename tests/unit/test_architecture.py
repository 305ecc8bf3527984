"""The layers of the package, who may import what, and that unit tests are closed off."""

from __future__ import annotations

import ast
import fnmatch
import graphlib
import importlib
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import trtforge

ROOT = Path(trtforge.__file__).parent

LAYERS = (
    ("__main__",),
    ("cli",),
    ("proof", "bench", "engine_proof", "replay", "peers"),
    ("pipeline",),
    ("locking", "engine_evidence"),
    ("evidence", "engines"),
    ("planning",),
    ("model_source", "performance"),
    ("engine_process",),
    ("keys", "targets", "lowering"),
    ("quality", "bundle", "calibrate", "builder_calibration", "demand"),
    ("parity", "runtime"),
    ("graph", "shapes", "backends", "release", "precision", "calibration", "traffic"),
    ("samples", "run"),
    ("reference", "wiring", "stages", "memo", "upkeep", "usercode"),
    ("spec", "machine", "store", "cuda"),
    ("profile_choice",),
    ("types", "events", "files", "gpu_models", "plan_header", "plain", "prometheus"),
    ("digests", "errors"),
)
"""Packages and modules, top first. Each imports from layers below its own and from itself, never from a neighbour."""

HOMES = {
    "tensorrt": ("backends/worker/*", "runtime/*"),
    "tensorrt_rtx": ("backends/worker/*", "runtime/*"),
    "tensorrt_lean": ("runtime/*",),
    "tensorrt_dispatch": ("runtime/*",),
    "onnxruntime": ("reference.py",),
    "torch": ("graph/export*.py", "graph/peer_child.py"),
    "pycuda": ("cuda.py",),
    "cuda": ("cuda.py",),
    "yaml": ("spec/yaml_values.py",),
    "onnx": (
        "graph/*",
        "lowering.py",
        "backends/weak_typing.py",
        "precision/*",
        "parity/*",
        "quality.py",
        "reference.py",
        "wiring.py",
        "calibrate.py",
        "calibration/observe.py",
        "demand.py",
    ),
    "PIL": ("samples/images.py",),
    "pyarrow": ("samples/tables.py", "traffic/parquet.py"),
    "rich": ("cli/*",),
    "typer": ("cli/*",),
    "subprocess": ("backends/worker_process.py", "usercode/process.py", "engine_process.py"),
}
"""Libraries that only these files may import."""

SOURCES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def _module(file):
    return ".".join(["trtforge", *Path(file).with_suffix("").parts]).removesuffix(".__init__")


MODULES = {_module(file) for file in SOURCES}


def _imports(tree):
    """Full names of what a file imports anywhere, in functions and for type checkers too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "import_module":
            yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant))


def _own_imports(tree):
    """The imported modules of this package. Its root holds the version alone, so everyone may import that."""
    return {name for name in _imports(tree) if name.startswith("trtforge.")}


def _member(module):
    return module.split(".")[1]


LEVELS = {member: level for level, members in enumerate(LAYERS) for member in members}


def test_every_module_has_a_layer():
    members = {_member(module) for module in MODULES - {"trtforge"}}

    assert members == set(LEVELS)


@pytest.mark.parametrize("file", SOURCES)
def test_imports_point_down(file):
    module = _module(file)
    if module == "trtforge":
        assert not _own_imports(SOURCES[file])
        return
    own = _member(module)
    upward = {
        name for name in _own_imports(SOURCES[file]) if _member(name) != own and LEVELS[_member(name)] <= LEVELS[own]
    }

    assert not upward


def test_modules_do_not_import_each_other_in_a_circle():
    graph = {_module(file): _own_imports(tree) - {_module(file)} for file, tree in SOURCES.items()}

    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


@pytest.mark.parametrize("file", SOURCES)
def test_libraries_stay_in_their_homes(file):
    strays = {
        library
        for library in {name.partition(".")[0] for name in _imports(SOURCES[file])} & set(HOMES)
        if not any(fnmatch.fnmatch(file, home) for home in HOMES[library])
    }

    assert not strays


def test_the_worker_needs_nothing_but_python():
    # Its folder alone, beside a TensorRT, reproduces a build; only a calibrator of TensorRT's has to be fed.
    names = {name for file, tree in SOURCES.items() if file.startswith("backends/worker/") for name in _imports(tree)}
    others = {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}

    assert {name for name in others if not name.startswith("trtforge.backends.worker.")} == {
        "trtforge.backends.feeding"
    }


def test_only_child_processes_import_by_a_name_they_are_given():
    def names_given(tree):
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        names = [(call, getattr(call.func, "attr", getattr(call.func, "id", ""))) for call in calls]
        return [
            call
            for call, name in names
            if name in ("import_module", "__import__", "exec", "eval")
            and not isinstance([*call.args, ast.Constant(0)][0], ast.Constant)
        ]

    assert [file for file, tree in SOURCES.items() if names_given(tree)] == [
        "backends/worker/__main__.py",
        "usercode/child.py",
    ]


def test_the_checks_above_see_what_they_look_for():
    text = "import os\ndef f():\n    from trtforge.spec import load\n    importlib.import_module('tensorrt.plugin')\n"

    assert set(_imports(ast.parse(text))) == {"os", "trtforge.spec.load", "tensorrt.plugin"}
    assert _own_imports(SOURCES["cli/build.py"]) >= {"trtforge.pipeline", "trtforge.errors"}


def _connect():
    with socket.socket() as end:
        end.connect(("127.0.0.1", 1))


@pytest.mark.parametrize(
    "reach_out",
    [
        lambda: subprocess.run(["true"], check=False),
        lambda: socket.create_connection(("localhost", 1)),
        _connect,
        lambda: importlib.import_module("tensorrt_rtx"),
        lambda: importlib.import_module("tensorrt"),
    ],
    ids=["process", "name lookup", "socket", "tensorrt_rtx", "tensorrt"],
)
def test_unit_tests_reach_nothing_outside(reach_out):
    with pytest.raises(pytest.fail.Exception, match="in a unit test"):
        reach_out()
