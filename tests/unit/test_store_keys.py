"""What changes the keys of stages, and what does not."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import onnx
import onnx.parser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtforge import planning
from trtforge.errors import TrtForgeError
from trtforge.keys import bench_key, judgement_digest
from trtforge.machine import machine_facts
from trtforge.release.manifest import PerformanceRecord
from trtforge.run import open_run
from trtforge.spec.model import BuilderSettings, Precision

MODEL = """<ir_version: 8, opset_import: ["" : 17]>
g (float[N,4] x, float[M,4] name) => (float[N,4] y, float[M,4] z) <float[4] w = {1,2,3,4}, float[4] v = {5,6,7,8}>
{ [a] y = Mul(x, w)  [b] z = Mul(name, v) }"""
RANGE = {"min": [1, 4], "opt": [2, 4], "max": [8, 4]}
RTX = {"backend": "tensorrt_rtx", "gpus": ["sm86"]}
TENSORRT = {"backend": "tensorrt", "gpus": ["T4"], "version": "10.9"}
STAGES = {"ingest", "profile check", "build"}


def spec(*targets, **more):
    return {
        "version": 1,
        "name": "net",
        "model": {"onnx": "net.onnx"},
        "profiles": [{"name": "p", "inputs": {"x": RANGE, "name": RANGE}}],
        "targets": list(targets) or [RTX],
        **more,
    }


@contextmanager
def project():
    """A folder with a model, some of whose weights are in a file beside it, called as badly as it can be."""
    with tempfile.TemporaryDirectory() as folder:
        model = onnx.parser.parse_model(MODEL)
        (weights,) = (tensor for tensor in model.graph.initializer if tensor.name == "v")
        (Path(folder) / "model").write_bytes(bytes(range(16)))
        weights.ClearField("float_data")
        weights.data_location = onnx.TensorProto.EXTERNAL
        for key, value in {"location": "model", "offset": "0", "length": "16"}.items():
            weights.external_data.add(key=key, value=value)
        onnx.save(model, Path(folder) / "net.onnx")
        yield Path(folder)


def keys(folder, content, name="spec.yaml"):
    """Stage -> its key, for a spec with one engine."""
    path = Path(folder) / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with (
        tempfile.TemporaryDirectory() as store,
        open_run(path, Path(store), lambda _event: None) as run,
    ):
        plan = planning.make_plan(path, run)
        (ingest,) = run.stages.done
        (unit,) = plan.units
        return {"ingest": ingest.key, "profile check": plan.check_key.digest, "build": unit.key.digest}


def changed(before, after):
    return {stage for stage in before if before[stage] != after[stage]}


@pytest.fixture(scope="module")
def base():
    with project() as folder:
        yield keys(folder, spec())


def flip(path, place, mask):
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= mask
    path.write_bytes(data)


@given(place=st.integers(0, 15), mask=st.integers(1, 255))
@settings(max_examples=25, deadline=None)
def test_any_byte_of_external_data_changes_every_key(base, place, mask):
    with project() as folder:
        flip(folder / "model", place, mask)
        assert changed(base, keys(folder, spec())) == STAGES


@given(place=st.integers(0, 10_000), mask=st.integers(1, 255))
@settings(max_examples=60, deadline=None)
def test_any_byte_of_the_model_changes_every_key_or_is_refused(base, place, mask):
    with project() as folder:
        flip(folder / "net.onnx", place, mask)
        try:
            after = keys(folder, spec())
        except TrtForgeError:
            return
        assert changed(base, after) == STAGES


def test_same_model_with_other_bytes_beside_it_has_the_same_keys(base):
    with project() as folder:
        (folder / "other.bin").write_bytes(b"x")
        assert keys(folder, spec()) == base


@given(
    st.sampled_from(["x", "name"]),
    st.sampled_from([("min", 0, 2), ("opt", 0, 3), ("opt", 0, 8), ("max", 0, 9), ("max", 0, 1 << 20)]),
)
@settings(max_examples=10, deadline=None)
def test_any_number_of_a_profile_changes_check_and_build(base, name, change):
    point, axis, size = change
    shapes = {key: list(value) for key, value in RANGE.items()}
    shapes[point][axis] = size
    content = spec(profiles=[{"name": "p", "inputs": {"x": RANGE, "name": RANGE, name: shapes}}])
    with project() as folder:
        assert changed(base, keys(folder, content)) == {"profile check", "build"}


def test_a_second_profile_and_another_name_change_check_and_build(base):
    first = spec()["profiles"][0]
    with project() as folder:
        for profiles in ([first, first | {"name": "q"}], [first | {"name": "q"}]):
            assert changed(base, keys(folder, spec(profiles=profiles))) == {"profile check", "build"}


def test_a_declared_range_changes_the_profile_check_alone(base):
    with project() as folder:
        declared = spec(inputs={"x": {"range": [0, 1]}})
        assert changed(base, keys(folder, declared)) == {"profile check"}
        assert changed(keys(folder, declared), keys(folder, spec(inputs={"x": {"range": [0, 2]}}))) == {"profile check"}


OTHER_SETTINGS = {
    "optimization_level": 5,
    "avg_timing_iterations": 2,
    "workspace_mib": 64,
    "profiling_verbosity": "detailed",
    "sparse_weights": True,
    "strict_nans": True,
    "weight_streaming": True,
    "refit": True,
    "strip_weights": True,
    "version_compatible": True,
    "hardware_compatibility": "same_compute_capability",
    "max_aux_streams": 0,
    "tactic_sources": [],
    "record_tactics": True,
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(BuilderSettings)])
def test_any_builder_setting_changes_the_build_alone(monkeypatch, name):
    # Whether a version takes a setting is another test's; some are refused without others.
    monkeypatch.setattr(planning, "refusals", lambda *_: [])
    with project() as folder:
        before = keys(folder, spec(TENSORRT))
        assert changed(before, keys(folder, spec(TENSORRT, builder={name: OTHER_SETTINGS[name]}))) == {"build"}


OTHER_PRECISIONS = {"type": "fp16", "quantization": "implicit", "tf32": True, "keep": {"fp32": ["a*"]}}
OTHER_PRECISIONS |= {"rest": "bf16", "min_share": 0.9}
LOWERED = {"keep": {"type": "fp16"}, "min_share": {"type": "fp16"}, "rest": {"type": "int8"}}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Precision)])
def test_any_precision_changes_the_build_alone(monkeypatch, name):
    monkeypatch.setattr(planning, "refusals", lambda *_: [])
    with project() as folder:
        base = LOWERED.get(name, {})
        before = keys(folder, spec(TENSORRT, precision=base))
        after = keys(folder, spec(TENSORRT, precision=base | {name: OTHER_PRECISIONS[name]}))
        assert changed(before, after) == {"build"}


@pytest.mark.parametrize(
    "target",
    [RTX | {"gpus": ["sm89"]}, TENSORRT, TENSORRT | {"gpus": ["RTX 2080 Ti"]}, TENSORRT | {"version": "10.10"}],
    ids=str,
)
def test_backend_version_and_gpu_change_the_build_alone(base, target):
    with project() as folder:
        assert changed(base, keys(folder, spec(target))) == {"build"}


def test_each_target_has_its_own_key():
    targets = [RTX, RTX | {"gpus": ["sm89"]}, TENSORRT, TENSORRT | {"gpus": ["A100"]}, TENSORRT | {"version": "8.6"}]
    with project() as folder:
        assert len({keys(folder, spec(target))["build"] for target in targets}) == len(targets)


@pytest.mark.parametrize(
    ("package", "stages"),
    [
        ("onnxruntime", {"profile check"}),
        ("tensorrt_rtx", {"build"}),
        ("numpy", set()),
        ("onnx", set()),
        ("polygraphy", set()),
    ],
)
def test_a_tool_version_changes_the_stages_that_use_it(base, monkeypatch, package, stages):
    facts = machine_facts()
    newer = f"{facts.packages[package]}.1" if package != "tensorrt_rtx" else "1.7.1.999"
    other = dataclasses.replace(facts, packages={**facts.packages, package: newer})
    monkeypatch.setattr(planning, "machine_facts", lambda: other)
    with project() as folder:
        assert changed(base, keys(folder, spec())) == stages


HARMLESS = [
    {},
    {"name": "renamed"},
    {"output": "elsewhere"},
    {"fail_on_warning": ["*"]},
    {"build_timeout": 1.5},
    {"performance": {"p99_ms": 5, "sizes": {"N": [1, 8]}}},
    {"targets": [RTX | {"when_missing": "skip"}]},
]


def shuffled(value, rng):
    if isinstance(value, dict):
        items = [(key, shuffled(item, rng)) for key, item in value.items()]
        rng.shuffle(items)
        return dict(items)
    return [shuffled(item, rng) for item in value] if isinstance(value, list) else value


@given(st.randoms(use_true_random=False), st.sampled_from(HARMLESS), st.integers(0, 2**31), st.booleans())
@settings(max_examples=40, deadline=None)
def test_nothing_else_changes_a_key(base, rng, more, mtime, comments):
    content = shuffled(spec() | more, rng)
    text = json.dumps(content, indent=rng.choice([1, 3, 7]))
    if comments:
        text = "# who, when, why\n" + text.replace("\n", "  # why\n")
    with project() as folder:
        for path in folder.iterdir():
            os.utime(path, (mtime, mtime))
        moved = folder / "moved" / "here"
        moved.mkdir(parents=True)
        for name in ("net.onnx", "model"):
            (folder / name).rename(moved / name)
        assert keys(moved, text, f"{rng.choice('abc')}.yaml") == base


def test_shapes_and_values_of_inputs_with_clashing_names_do_not_hide_each_other():
    """`size` decides a shape; another input is called as its values might be."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[N,12] x, int64[2] size, float[K,2] inputs) => (float[A,B] y, float[K,2] z)
    { [r] y = Reshape(x, size)  [n] z = Neg(inputs) }"""

    def content(last_value, last_size):
        values = {"min": [1, 12], "opt": [2, 12], "max": [4, last_value]}
        inputs = {
            "x": {"min": [1, 12], "opt": [2, 12], "max": [4, 12]},
            "size": {"values": values},
            "inputs": {"min": [1, 2], "opt": [2, 2], "max": [last_size, 2]},
        }
        return spec(profiles=[{"inputs": inputs}])

    with tempfile.TemporaryDirectory() as folder:
        onnx.save(onnx.parser.parse_model(text), Path(folder) / "net.onnx")
        found = [keys(folder, content(*numbers))["build"] for numbers in ((12, 4), (24, 4), (12, 8))]
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    ("metric", "file"),
    [
        ("metric.py:f", "metric.py"),
        ("metric:f", "metric.py"),
        ("own.metric:f", "own/metric.py"),
        ("own:f", "own/__init__.py"),
    ],
)
def test_the_metric_decides_how_engines_are_judged(metric, file):
    with project() as folder:
        (folder / "own").mkdir()
        (folder / "own" / "__init__.py").touch()
        (folder / "eval.npz").touch()
        path = folder / "spec.yaml"
        path.write_text(json.dumps(spec(accuracy={"metric": metric, "data": "eval.npz", "max_drop": 0.1})))
        found = []
        for text in ("a = 1", "a = 1", "a = 2"):
            (folder / file).write_text(text)
            with tempfile.TemporaryDirectory() as store, open_run(path, Path(store), lambda _event: None) as run:
                plan = planning.make_plan(path, run)
                found.append(judgement_digest(plan.spec_file, plan.check_key, run.memo.digest))

    assert found[0] == found[1] != found[2]


def test_figures_are_of_the_plugins_too():
    unit, facts = SimpleNamespace(profiles=()), SimpleNamespace(cuda_driver_version="580")
    gpu = SimpleNamespace(device_name="NVIDIA T4", num_sms=40)
    asked = PerformanceRecord(
        p99_ms=None, throughput_qps=None, max_regression=None, sizes={}, cuda_graph=False, engines={}
    )

    one, other = (
        bench_key(unit, SimpleNamespace(digest="a", plugins=(plugin,)), None, asked, gpu, facts) for plugin in "bc"
    )

    assert one.digest != other.digest
