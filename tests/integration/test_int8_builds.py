"""From real calibration data to INT8 engines of the quickstart model, through the command line and the store."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from trtforge.calibration.table import read_table
from trtforge.cli.app import main

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "calib_data" / "digits" / "train.npz"
SPEC = f"""\
version: 1
name: digits
model: {{{{onnx: {ROOT}/configs/models/digits.onnx}}}}
inputs: {{{{image: {{{{kind: image, range: [0, 1]}}}}}}}}
profiles: [{{{{name: p, inputs: {{{{image: {{{{min: [1, 1, 8, 8], opt: [16, 1, 8, 8], max: [64, 1, 8, 8]}}}}}}}}}}}}]
precision: {{precision}}
calibration: {{calibration}}
builder: {{{{optimization_level: 0}}}}
targets: [{{{{backend: tensorrt_rtx, gpus: [sm86]}}}}]
"""


@pytest.fixture
def trtforge(tmp_path, monkeypatch, capfd):
    """Runs a verb on a spec with these settings in a folder of its own; gives exit code and all that was printed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def run(verb: str, *options: str, precision: str = "{type: int8}", calibration: str = f"{{data: {TRAIN}}}"):
        Path("spec.yaml").write_text(SPEC.format(precision=precision, calibration=calibration))
        with pytest.raises(SystemExit) as stopped:
            main([verb, "spec.yaml", *options])
        out, err = capfd.readouterr()
        return stopped.value.code or 0, out + err

    return run


def verdicts(text: str) -> dict[str, str]:
    """Stage -> `cached`, `new` or `stale`, as printed."""
    return dict(re.findall(r"^  ([a-z]+(?: [a-z0-9]+)?) +[\d.]+ s  (\w+)", text, re.MULTILINE))


def test_a_build_calibrates_once_and_a_table_takes_its_place(trtforge):
    code, text = trtforge("build")
    assert code == 0
    assert {verdicts(text)[stage] for stage in ("calibrate", "lower", "build sm86")} == {"new"}
    assert "in int8" in text

    code, text = trtforge("calibrate", "--output", "table.json")
    assert code == 0
    assert verdicts(text)["calibrate"] == "cached"
    with np.load(TRAIN) as arrays:
        assert read_table(Path("table.json")).num_samples == len(arrays["image"])

    code, text = trtforge("build", calibration="{table: table.json}")
    assert code == 0
    assert verdicts(text)["lower"] == "stale"
    assert "calibrate" not in verdicts(text)

    code, text = trtforge("build", calibration="{table: table.json}")
    assert {verdicts(text)[stage] for stage in ("lower", "build sm86")} == {"cached"}


def test_the_manifest_states_the_calibration(trtforge):
    trtforge("calibrate", "--output", "table.json")
    code, _ = trtforge("build", calibration="{table: table.json}")
    assert code == 0
    table = json.loads(Path("table.json").read_text())

    manifest = json.loads(Path("dist/manifest.json").read_text())

    assert manifest["calibration_digest"] == table["tensors_digest"]
    kept = {key: table[key] for key in ("method", "num_samples", "data_digest", "notes")}
    assert manifest["calibration"] == {**kept, "num_tensors": len(table["tensors"])}


def test_decisions_are_listed_for_every_node_once_the_graph_was_lowered(trtforge):
    code, text = trtforge("plan", "--decisions")
    assert code != 0
    assert "trtforge build" in text

    trtforge("build")
    code, text = trtforge("plan", "--decisions", "--json")
    assert code == 0
    rows = json.loads(text[text.index("{") :])["decisions"]
    model = onnx.load(ROOT / "configs" / "models" / "digits.onnx")
    assert {node.name for node in model.graph.node if node.op_type in ("Conv", "Gemm", "MatMul")} <= {
        row[0] for row in rows
    }
    assert {"int8", "float16"} <= {row[2] for row in rows}
    assert all(row[4] for row in rows)
    assert any(re.fullmatch(r"-?[\d.e+-]+ to -?[\d.e+-]+", row[3]) for row in rows)

    code, text = trtforge("plan", "--decisions")
    assert code == 0
    heads, *lines = text[text.index("node ") :].splitlines()
    column = heads.index("operator")
    assert [line[column:].split()[0] for line in lines[: len(rows)]] == [row[1] for row in rows]


@pytest.mark.parametrize("verb", ["plan", "build"])
def test_a_table_of_another_model_is_refused_before_anything_runs(trtforge, verb):
    trtforge("calibrate", "--output", "table.json")
    table = json.loads(Path("table.json").read_text())
    Path("table.json").write_text(json.dumps(table | {"graph_digest": "0" * 64}))

    code, text = trtforge(verb, calibration="{table: table.json}")

    assert code == 4
    assert "table.json is stale: the model changed" in text
    assert "profile check" not in text


def test_an_edited_table_is_taken_and_lowers_anew(trtforge):
    trtforge("calibrate", "--output", "table.json")
    trtforge("build", calibration="{table: table.json}")
    table = json.loads(Path("table.json").read_text())
    table["tensors"][0]["amax"] *= 2
    Path("table.json").write_text(json.dumps(table))

    code, text = trtforge("build", calibration="{table: table.json}")

    assert code == 0
    assert verdicts(text)["lower"] == "stale"


def test_other_ways_to_keep_lower_anew_and_calibrate_no_more(trtforge):
    trtforge("build")

    code, text = trtforge("build", precision="{type: int8, rest: fp32, keep: {rest: ['/head*']}}")

    assert code == 0
    assert verdicts(text)["calibrate"] == "cached"
    assert verdicts(text)["lower"] == "stale"
    manifest = json.loads(Path("dist/manifest.json").read_text())
    assert any("keep '/head*'" in entry["reason"] for entry in manifest["lowering"])


def test_a_cache_for_tensorrt_holds_the_scales_of_the_table(trtforge):
    code, _ = trtforge("calibrate", "--output", "table.json", "--write-trt-cache", "scales.cache", "--tensorrt", "8.6")
    assert code == 0
    header, *rows = Path("scales.cache").read_text().splitlines()

    assert header == "TRT-8601-EntropyCalibration2"
    found = {
        name: np.frombuffer(bytes.fromhex(word), ">f4")[0] for name, _, word in (row.rpartition(": ") for row in rows)
    }
    amax = read_table(Path("table.json")).amax
    assert found.keys() == amax.keys()
    for name, scale in found.items():
        assert scale == np.float32(amax[name] / 127)

    code, text = trtforge("calibrate", "--read-trt-cache", "scales.cache")
    assert code == 0
    assert f"{len(amax)} of {len(amax)} tensors" in text


def test_what_a_user_keeps_out_of_int8_is_not_quantized(trtforge, tmp_path):
    trtforge("build", precision="{type: int8, keep: {rest: ['/stem*']}}")
    lowered = [
        model
        for path in (tmp_path / "cache").rglob("blobs/**/*")
        if path.is_file() and (model := _as_model(path)) is not None
    ]
    (model,) = [model for model in lowered if any(node.op_type == "QuantizeLinear" for node in model.graph.node)]
    quantized = {name for node in model.graph.node if node.op_type == "DequantizeLinear" for name in node.output}
    stems = [node for node in model.graph.node if node.name.startswith("/stem") and node.op_type == "Conv"]

    assert stems
    assert not any(name in quantized for node in stems for name in node.input)


def _as_model(path: Path) -> onnx.ModelProto | None:
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception:  # noqa: BLE001 - engines lie there too
        return None
    return model if model.graph.node else None


PRODUCTS = """
<ir_version: 8, opset_import: ["": 17]>
net (float[batch, 16, 64] x) => (float[batch, 16, 64] y)
{
    [wide] a = MatMul(x, w)
    [relu] b = Relu(a)
    [narrow] y = MatMul(b, v)
}
"""


def test_the_manifest_counts_int8_layers_whose_weights_have_fewer_dimensions(trtforge):
    """For such weights the parser puts a layer of its own between DequantizeLinear and the product."""
    model = onnx.parser.parse_model(PRODUCTS)
    rng = np.random.default_rng(0)
    for name, shape in (("w", (64, 128)), ("v", (128, 64))):
        array = rng.standard_normal(shape).astype(np.float32) / 8
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, "net.onnx")
    np.savez("x.npz", x=rng.standard_normal((32, 16, 64)).astype(np.float32))
    spec = SPEC.format(precision="{type: int8}", calibration="{data: x.npz}").splitlines()
    profiles = "profiles: [{inputs: {x: {min: [1, 16, 64], opt: [4, 16, 64], max: [8, 16, 64]}}}]"
    kept = [line for line in spec if not line.startswith(("model:", "inputs:", "profiles:"))]
    Path("net.yaml").write_text("\n".join([*kept, "model: {onnx: net.onnx}", profiles]))

    with pytest.raises(SystemExit) as stopped:
        main(["build", "net.yaml", "--output", "out"])

    assert not stopped.value.code
    (artifact,) = json.loads(Path("out/manifest.json").read_text())["artifacts"]
    assert artifact["weighted_layers"] == [{"kind": "MATRIX_MULTIPLY", "dtype": "int8", "num_layers": 2}]
