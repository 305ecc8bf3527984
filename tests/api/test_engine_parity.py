"""Engines are run against onnxruntime before a build publishes them: GPU and TensorRT are stand-ins, the process is real."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import h200
import numpy as np
import pytest
from h200 import ENGINE, H200, build, checks_of, refused
from typer.testing import CliRunner

from trtforge import pipeline, planning
from trtforge.bundle import MissingTarget
from trtforge.cli.app import app
from trtforge.engine_process import answer_of
from trtforge.errors import ParityError, Problem
from trtforge.release.manifest import EngineRecord, NotRun


def test_a_right_engine_is_in_the_manifest_with_what_was_found(built):
    folder, bundle, events = built

    record = bundle.manifest.engines[ENGINE]
    assert isinstance(record, EngineRecord)
    assert (record.gpu, record.driver, record.tensorrt, record.cuda) == (
        "NVIDIA H200",
        "580.1",
        "tensorrt 8.6.1",
        "fake",
    )
    assert record.engine_digest == bundle.manifest.artifacts[0].digest
    # min, opt, max and three drawn sizes, as the spec's default is.
    assert (record.parity.stage, record.parity.verdict, record.parity.num_points) == ("engine", "passed", 6)
    assert list(record.parity.outputs) == ["y"]
    assert record.parity.outputs["y"].startswith("max_abs_diff is 0, allowed at most ")  # 1e-4 + 1e-4 of the largest
    assert ", at profile 'default' " in record.parity.outputs["y"]
    assert record.layer_types == {"float32": 1}
    assert record.accuracy == NotRun(reason="the spec names no metric")
    assert record.run_bytes > 0  # two tensors, which the stand-in counts
    steps = [event.text for event in events if event.stage == "parity H200" and event.kind == "step"]
    assert steps[0] == "running on NVIDIA H200"
    assert "profile 'default' max" in steps  # told by the other process
    assert checks_of(folder, "parity") == [
        ("ok", 0, f"engine: {ENGINE} within tolerance at 6 points on NVIDIA H200"),
    ]


def test_an_unchanged_build_runs_nothing(project, monkeypatch):
    monkeypatch.setenv("DIES", "verify")
    build(project)
    start = time.perf_counter()

    again = build(project)

    assert time.perf_counter() - start < 1
    assert not again.is_changed


@pytest.mark.parametrize(
    ("name", "value", "text", "detail"),
    [
        (
            "IS_OFF",
            "0.01",
            "does not do what the model does: beyond tolerance at 2 of 2 points (y)",
            r"y +profile 'default' opt: x \[32, 8\], seed \d+ +\[\d+, \d+\] \S+ -> \S+ +max_abs_diff 0\.01 +at most 0\.001",
        ),
        ("DIES", "verify", "was not compared with onnxruntime: its process ended by SIGSEGV", "about to die"),
    ],
    ids=["wrong", "crash"],
)
def test_a_wrong_engine_is_not_published_and_run_again(project, monkeypatch, name, value, text, detail):
    more = "parity: {random_shapes: 0, engine: {atol: 0.001, rtol: 0}}\n"
    spec = h200.SPEC.replace("[3, 8]", "[32, 8]")  # opt is max
    monkeypatch.setenv(name, value)

    (problem,) = refused(project, more, spec)

    assert (problem.summary, problem.exit_code) == (f"{ENGINE} {text}", 5)
    assert any(re.search(detail, line) for line in problem.detail)
    assert name != "IS_OFF" or problem.where.line == 8
    assert not (project / "out").exists()
    monkeypatch.delenv(name)
    assert build(project, more, spec=spec).manifest.engines[ENGINE].parity.verdict == "passed"


METRIC = """
import numpy as np
def near(outputs, targets):
    return float(np.mean(np.abs(outputs["y"] - targets["t"]).max(axis=1) < 0.5))
"""
ACCURACY = "parity: {engine: {atol: 100}}\naccuracy: {metric: metric.py:near, data: eval.npz, max_drop: 0.1}\n"


def test_the_metric_judges_the_engine(project, monkeypatch):
    (project / "metric.py").write_text(METRIC)
    x = np.random.default_rng(0).normal(size=(100, 8)).astype(np.float32)
    np.savez(project / "eval.npz", x=x, t=2 * x)
    monkeypatch.setenv("IS_OFF", "1")

    (problem,) = refused(project, ACCURACY)

    assert problem.exit_code == 5
    assert problem.summary == f"{ENGINE}: metric.py:near is 0, 1 in FP32, by 1; max_drop allows 0.1"
    assert not (project / "out").exists()

    monkeypatch.delenv("IS_OFF")
    record = build(project, ACCURACY).manifest.engines[ENGINE]
    assert (record.accuracy.reference, record.accuracy.candidate, record.accuracy.num_samples) == (1, 1, 100)
    assert checks_of(project, "accuracy")[0] == ("ok", 0, f"metric.py:near 1, 1 by {ENGINE} on NVIDIA H200")

    (project / "metric.py").write_text(METRIC.replace("0.5", "0.4"))  # another metric is another judgement
    monkeypatch.setenv("DIES", "verify")
    assert "SIGSEGV" in refused(project, ACCURACY)[0].summary


ENDLESS = """
import os, pathlib
print("printed by the metric", flush=True)
def near(outputs, targets):
    pathlib.Path("pid").write_text(str(os.getpid()))
    while True:
        pass
"""


def verify_arguments(project):
    paths = {"--spec": "net.yaml", "--exported-as": "net.onnx", "--store": "store"}
    options = [word for option, path in paths.items() for word in (option, str(project / path))]
    return ["verify", str(project / "out" / "manifest.json"), *options]


def answer(project):
    (project / "run").mkdir()
    return answer_of(
        verify_arguments(project),
        project / "run",
        key="engine",
        failure=ParityError,
        timeout_seconds=None,
        on_step=lambda _text: None,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_a_build_that_is_ended(project, number):
    (project / "metric.py").write_text(METRIC)
    x = np.zeros((100, 8), np.float32)
    np.savez(project / "eval.npz", x=x, t=x)
    build(project, ACCURACY)
    (project / "metric.py").write_text(ENDLESS)
    # What a shell runs in the background ignores SIGINT, and so would its children.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "import test_engine_parity as t, pathlib; t.answer(pathlib.Path.cwd())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)
    try:
        pid = int(_soon((project / "pid").read_text))
    finally:
        parent.send_signal(number)
        parent.wait()

    _soon(lambda: not _is_running(pid))


def _soon(look):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if found := look():
                return found
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError("not within a minute")


def _is_running(pid):
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


NOISY = """
import atexit, os
from pathlib import Path
exec(Path({real!r}).read_text())
_context = Rig._context
def _noisy(self, engine):
    os.write(1, b"{{a library prints ")
    return _context(self, engine)
Rig._context = _noisy
atexit.register(os.write, 1, b"and again at the end")
"""


def test_what_libraries_print_does_not_hide_the_answer(project, monkeypatch, tmp_path):
    (tmp_path / "noisy").mkdir()
    (tmp_path / "noisy" / "fake_gpu.py").write_text(NOISY.format(real=str(h200.HERE / "fake_gpu.py")))
    monkeypatch.syspath_prepend(tmp_path / "noisy")

    assert build(project, "parity: {seed: 1}\n").manifest.engines[ENGINE].parity.verdict == "passed"


def test_an_engine_is_verified_though_another_target_failed(project):
    build(project)
    path = project / "out" / "manifest.json"
    path.write_text(path.read_text().replace('"verdict": "skipped"', '"verdict": "failed"'))
    assert checks_of(project, "target")[0][:2] == ("failed", 11)

    assert answer(project)["parity"]["verdict"] == "passed"


def test_a_machine_without_the_gpu_keeps_the_engine_and_what_it_did(project, monkeypatch):
    spec = h200.SPEC.replace("targets: [", "targets: [{backend: tensorrt_rtx, gpus: [sm86]}, ").replace(", A100", "")
    record = build(project, spec=spec).manifest.engines[ENGINE]
    here = planning.machine_facts()
    packages = {name: version for name, version in here.packages.items() if name != "tensorrt"}
    laptop = replace(here, gpus=(), packages=packages, cuda_driver_version="", cuda_version="", cuda_error="no driver")
    monkeypatch.setattr(planning, "machine_facts", lambda: laptop)

    bundle = build(project, "fail_on_warning: [nothing]\n", spec=spec)

    assert bundle.manifest.engines[ENGINE] == record
    assert (project / "out" / f"{ENGINE}.engine").exists()
    assert not bundle.manifest.missing

    judged_anew = build(project, "parity: {engine: {atol: 1.0e-9}}\n", spec=spec).manifest
    assert ENGINE in {artifact.identifier for artifact in judged_anew.artifacts}
    assert isinstance(judged_anew.engines[ENGINE], NotRun)  # by bounds that this spec has no more

    pinned = build(project, spec=spec.replace("backend: tensorrt,", 'backend: tensorrt, version: "10.9",')).manifest
    assert ENGINE not in {artifact.identifier for artifact in pinned.artifacts}
    assert not (project / "out" / f"{ENGINE}.engine").exists()


def test_engines_that_were_not_built_are_told_with_the_wrong_one(project, monkeypatch):
    problem = Problem("no kernel", "build again", exit_code=7)
    failed = MissingTarget("net-fp32-a100-trt8.6.1", "A100", "tensorrt", skipped=False, problem=problem)
    real = pipeline.build_units
    monkeypatch.setattr(pipeline, "build_units", lambda *given: (real(*given)[0], [failed]))
    monkeypatch.setenv("DIES", "verify")

    wrong, other = refused(project, "parity: {seed: 2}\n")

    assert ("SIGSEGV" in wrong.summary, other) == (True, problem)


def test_fp16_that_is_fp32_is_warned_of(project):
    events = []
    spec = h200.SPEC + "precision: {type: fp16, min_share: 0}\n"

    build(project, events=events, spec=spec)

    text = "net-fp16-h200-trt8.6.1: the spec asks for fp16, and all 1 layers of a known type are float32"
    assert [event.text for event in events if event.kind == "warning"] == [text]
    assert checks_of(project, "precision") == [("warning", 0, text)]


def test_without_a_cuda_library_the_bundle_is_published_with_a_warning(project, monkeypatch):
    h200.machine(monkeypatch, H200, libraries=())
    events = []

    record = build(project, events=events).manifest.engines[ENGINE]

    reason = "neither cuda-python nor pycuda is installed on the machine that built it"
    next_step = "pip install cuda-python, then: trtforge verify MANIFEST --spec SPEC"
    assert record == NotRun(reason=reason, next_step=next_step)
    (warning,) = (event.text for event in events if event.kind == "warning")
    assert warning == f"{ENGINE} is published without a run: {reason}; {next_step}"
    assert checks_of(project, "parity") == [("not_checked", 0, f"engine: {ENGINE} was not run: {reason}")]


def test_an_engine_for_another_gpu_is_not_run(project):
    spec = h200.SPEC.replace("targets: [", "targets: [{backend: tensorrt_rtx, gpus: [sm86]}, ")

    engines = build(project, spec=spec).manifest.engines

    assert isinstance(engines[ENGINE], EngineRecord)
    (other,) = (record for name, record in engines.items() if name != ENGINE)
    assert other.reason == "it runs on sm86, and the machine that built it has NVIDIA H200"
    assert other.next_step == "trtforge verify MANIFEST --spec SPEC, on a machine with sm86"


def test_the_verb_prints_as_text_and_json_what_a_build_records(project):
    build(project)
    invoke = CliRunner().invoke
    arguments = ["build", "net.yaml", "--store", "store"]

    lines = invoke(app, arguments).stdout.splitlines()
    plain = json.loads(invoke(app, [*arguments, "--json"]).stdout)

    assert f"{ENGINE} on NVIDIA H200: within tolerance at 6 points; layers 1 float32; " in "\n".join(lines)
    assert plain["engine_runs"][ENGINE]["parity"]["num_points"] == 6


@pytest.mark.parametrize(
    ("libraries", "text"),
    [
        (("pycuda",), "run against onnxruntime on NVIDIA H200 before it is published"),
        ((), "not run against onnxruntime: neither cuda-python nor pycuda is installed on the machine that built it"),
    ],
)
def test_plan_says_whether_engines_are_run(project, monkeypatch, libraries, text):
    h200.machine(monkeypatch, H200, libraries=libraries)
    (project / "net.yaml").write_text(h200.SPEC)
    arguments = ["plan", "net.yaml", "--store", "store"]

    lines = CliRunner().invoke(app, arguments).stdout.splitlines()
    engines = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["engines"]

    assert lines.count(f"                   {text}") == 1
    assert lines.count("                   builder avg_timing_iterations 8") == 2
    assert [engine["run"] for engine in engines] == [bool(libraries), False]  # no A100 here


def test_a_spec_that_changed_during_the_build_is_refused(project):
    build(project)
    (project / "net.yaml").write_text(h200.SPEC + "parity: {engine: {atol: 100}}\n")
    arguments = ["verify", "out/manifest.json", "--spec", "net.yaml", "--exported-as", "net.onnx", "--store", "store"]

    (problem,) = CliRunner().invoke(app, arguments).exception.problems

    assert (problem.summary, problem.exit_code) == (
        "net.yaml changed during the build, so what was made of it is dropped",
        10,
    )


def test_a_run_that_takes_too_long_is_ended(project):
    (problem,) = refused(project, "build_timeout: 0.1\nparity: {engine: {atol: 1}}\n")

    text = "was not compared with onnxruntime: it took longer than 0.1 s, and was ended"
    assert (problem.summary, problem.exit_code) == (f"{ENGINE} {text}", 5)
