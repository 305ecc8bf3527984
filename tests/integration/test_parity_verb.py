"""`trtforge parity`, and parity, lowering and accuracy inside `trtforge build`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml

from trtforge.cli.app import main
from trtforge.release.manifest import read_manifest

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def trtforge(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return stopped.value.code, out, err

    return run


def spec(folder, base="digits-fp16.yaml", **values):
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump({"extends": str(CONFIGS / base), "output": "dist", **values}))
    return path


def test_fp16_build_is_typed_gated_and_recorded(tmp_path, trtforge):
    code, _, err = trtforge("build", spec(tmp_path, targets=[{"backend": "tensorrt_rtx", "gpus": ["sm86"]}]))
    assert (code, "within tolerance at 6 points" in err) == (0, True), err
    manifest = read_manifest(tmp_path / "dist/manifest.json")
    assert [artifact.precision for artifact in manifest.artifacts] == ["fp16"]
    assert [(record.stage, record.verdict) for record in manifest.parity] == [("lowered", "passed")]
    assert [record.status for record in manifest.engines.values()] == ["not_run"]
    assert manifest.accuracy.reference == pytest.approx(0.998)
    assert manifest.accuracy.num_samples == 500
    code, _, err = trtforge("build", tmp_path / "spec.yaml")
    assert (code, len(re.findall("cached; ", err))) == (0, 6)


def test_explain_names_the_parity_stages_too(tmp_path, trtforge):
    assert trtforge("build", spec(tmp_path))[0] == 0
    assert "parity lowered: cached" in trtforge("plan", tmp_path / "spec.yaml", "--explain")[1]
    changed = spec(tmp_path, parity={"lowered": {"atol": 0.5}})
    out = trtforge("plan", changed, "--explain")[1]
    assert "parity lowered: stale, bounds.atol changed" in out
    assert "lower: cached" in out


def test_small_evaluation_set_cannot_pass_by_luck(tmp_path, trtforge):
    few = {name: array[:50] for name, array in np.load(CONFIGS.parent / "calib_data/digits/eval.npz").items()}
    np.savez(tmp_path / "few.npz", **few)
    metric = f"{CONFIGS / 'evals/digits.py'}:accuracy"
    accuracy = {"metric": metric, "data": "few.npz", "max_drop": 0.005}
    code, _, err = trtforge("build", spec(tmp_path, accuracy=accuracy))
    assert code == 5
    assert "with 50 samples the true drop may be 0.058; max_drop allows 0.005" in err
    assert "evaluate on 598 samples or more" in err
    assert not (tmp_path / "dist").exists()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def score(outputs, targets): return float('nan')", "expected a finite number"),
        ("def score(outputs, targets): raise KeyError('labels')", "KeyError"),
        ("def score(outputs, targets): return 99.0", "beyond its scale of 1"),
        ("def other(outputs, targets): return 1.0", "score"),
        ("import no_such_package\ndef score(outputs, targets): return 1.0", "no_such_package"),
    ],
)
def test_metric_that_cannot_judge(tmp_path, trtforge, code, expected):
    (tmp_path / "metric.py").write_text(code + "\n")
    accuracy = {
        "metric": "metric.py:score",
        "data": str(CONFIGS.parent / "calib_data/digits/eval.npz"),
        "max_drop": 0.1,
    }
    code, _, err = trtforge("build", spec(tmp_path, accuracy=accuracy))
    assert code not in (0, 70), err
    assert expected in err
    assert "next: " in err


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"image": np.zeros((0, 1, 8, 8), np.float32), "label": np.zeros(0, np.int64)}, "or none"),
        ({"image": np.zeros((4, 1, 8, 8), np.float32), "label": np.zeros(3, np.int64)}, "different numbers of samples"),
        ({"image": np.zeros((4, 1, 8, 8)), "label": np.zeros(4, np.int64)}, "'image' is float64"),
        ({"images": np.zeros((4, 1, 8, 8), np.float32)}, "no array for the input image"),
    ],
)
def test_evaluation_set_that_does_not_fit(tmp_path, trtforge, arrays, expected):
    np.savez(tmp_path / "bad.npz", **arrays)
    accuracy = {"metric": f"{CONFIGS / 'evals/digits.py'}:accuracy", "data": "bad.npz", "max_drop": 0.1}
    code, _, err = trtforge("build", spec(tmp_path, accuracy=accuracy))
    assert (code, expected in err) == (2, True), err


def test_unknown_keep_glob_and_unknown_output_are_errors_at_their_place(tmp_path, trtforge):
    code, _, err = trtforge(
        "build", spec(tmp_path, precision={"type": "fp16", "keep": {"fp32": ["/stem/stem.0/Convv"]}})
    )
    assert (code, "spec.yaml:" in err, "/stem/stem.0/Conv" in err) == (2, True, True), err
    code, _, err = trtforge("build", spec(tmp_path, parity={"outputs": {"logit": {"lowered": {"atol": 1}}}}))
    assert (code, "rename it to 'logits'" in err) == (2, True), err


def test_parity_saves_rejudges_and_names_the_node(tmp_path, trtforge):
    code, out, _ = trtforge("parity", spec(tmp_path), "--report", "report.json")
    assert (code, "lowered" in out, "engine: not run" in out) == (0, True, True), out
    tight = {"lowered": {"atol": 1e-6, "rtol": 1e-6, "max_norm_relative": 1e-6}}
    code, out, _ = trtforge("parity", spec(tmp_path, parity=tight), "--rejudge", "report.json")
    assert (code, "failed" in out) == (5, True)
    code, out, _ = trtforge("parity", tmp_path / "spec.yaml", "--per-layer", "--reproduction", "node")
    assert (code, "at fault: Conv '/stem/stem.0/Conv'" in out) == (5, True), out
    assert onnx.load("node/node.onnx").graph.node[0].op_type == "Conv"


def test_keep_lines_are_applied_until_the_step_holds(tmp_path, trtforge):
    bounds = {"lowered": {"atol": 3e-3, "rtol": 0, "max_norm_relative": 5e-4}}
    code, out, _ = trtforge("parity", spec(tmp_path, parity=bounds), "--per-layer", "--apply-keep", "--json")
    found = json.loads(out)
    assert (code, found["kept"]) == (0, "passed"), out
    keep = {"type": "fp16", "keep": {"fp32": found["keep"]}}
    code, _, err = trtforge("build", spec(tmp_path, parity=bounds, precision=keep))
    assert (code, "min_share asks for 50.0%" in err) == (3, True), err
    code, _, err = trtforge("build", spec(tmp_path, parity=bounds, precision=keep | {"min_share": 0}))
    assert code == 0, err


def test_a_fault_of_another_tool_is_found_at_its_node(tmp_path, trtforge):
    model = onnx.load(CONFIGS / "models/digits.onnx")
    (weight,) = [tensor for tensor in model.graph.initializer if tensor.name == "classifier.bias"]
    weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) + np.float32(0.5), weight.name))
    onnx.save(model, tmp_path / "other.onnx")
    code, out, _ = trtforge("parity", spec(tmp_path, base="digits.yaml"), "--candidate", "other.onnx", "--per-layer")
    assert (code, "at fault: Gemm '/classifier/Gemm'" in out) == (5, True), out
    assert "classifier.bias" in out


def test_keeping_nodes_of_ours_does_not_clear_another_tool_s_file(tmp_path, trtforge):
    model = onnx.load(CONFIGS / "models/digits.onnx")
    (weight,) = [tensor for tensor in model.graph.initializer if tensor.name == "classifier.bias"]
    weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) + np.float32(0.5), weight.name))
    onnx.save(model, tmp_path / "other.onnx")
    for bounds in ({}, {"lowered": {"atol": 3e-3, "rtol": 0, "max_norm_relative": 5e-4}}):
        path = spec(tmp_path, parity=bounds)
        code, out, _ = trtforge("parity", path, "--candidate", "other.onnx", "--apply-keep", "--json")
        assert (code, json.loads(out)["ok"]) == (5, False), out
    assert json.loads(out)["kept"] == "passed"


def test_per_layer_says_when_there_is_nothing_to_compare(tmp_path, trtforge):
    code, out, _ = trtforge("parity", spec(tmp_path, base="digits.yaml"), "--per-layer", "--report", "new/report.json")
    assert (code, "there are no nodes to compare" in out) == (0, True), out
    assert (tmp_path / "new/report.json").exists()


def test_bf16_builds(tmp_path, trtforge):
    targets = [{"backend": "tensorrt_rtx", "gpus": ["sm89"]}]
    code, _, err = trtforge("build", spec(tmp_path, base="digits.yaml", precision={"type": "bf16"}, targets=targets))
    assert code == 0, err
    assert (tmp_path / "dist/digits-bf16-sm89-trtrtx1.7.1.engine").exists()


def test_pytorch_model_is_exported_checked_and_built(tmp_path, trtforge):
    pytest.importorskip("torch")
    (tmp_path / "net.py").write_text(
        "import torch\n"
        "def build():\n"
        "    torch.manual_seed(0)\n"
        "    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))\n"
        "    return net, {'input': torch.zeros(2, 8)}, {'input': {0: 'batch'}}\n"
    )
    profiles = [{"inputs": {"input": {"min": [1, 8], "opt": [4, 8], "max": [16, 8]}}}]
    values = {"version": 1, "name": "net", "model": {"torch": {"callable": "net.py:build"}}, "profiles": profiles}
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump({**values, "targets": [{"backend": "tensorrt_rtx", "gpus": ["sm86"]}]}))
    code, _, err = trtforge("plan", path)
    assert (code, "was not exported here yet" in err) == (3, True)
    code, _, err = trtforge("build", path)
    assert code == 0, err
    manifest = read_manifest(tmp_path / "dist/manifest.json")
    assert manifest.parity[0].stage == "onnx"
    assert (manifest.parity[0].verdict, manifest.parity[0].num_points) == ("passed", 3)
    assert trtforge("plan", path)[0] == 0


def test_polygraphy_continues_from_what_was_saved(tmp_path, trtforge):
    assert trtforge("parity", spec(tmp_path, base="digits.yaml"), "--save", "saved")[0] == 0
    words = ["run", CONFIGS / "models/digits.onnx", "--onnxrt", "--load-inputs", "saved/inputs.json"]
    words += ["--load-outputs", "saved/outputs.json", "--atol", "1e-4"]
    polygraphy = "import sys; from polygraphy.tools import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", polygraphy, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "PASSED" in done.stdout
