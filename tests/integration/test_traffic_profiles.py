"""From a log to engines: the verb, the spec's `from_traffic`, real RTX builds, and the log against the release."""

import json

import onnx.parser
import pytest
import yaml

from trtforge.cli.app import main

MODEL = """
<ir_version: 8, opset_import: ["":17]>
g (float[batch,seq,16] x, float[batch,seq,16] z) => (float[batch,seq,seq] y)
{ t = Transpose<perm=[0,2,1]>(z) y = MatMul(x, t) }
"""
ROWS = [(1, 16, 600), (2, 64, 300), (8, 64, 96), (8, 512, 4)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model.onnx").write_bytes(onnx.parser.parse_model(MODEL).SerializeToString())
    _log(tmp_path / "log.jsonl", ROWS)
    return tmp_path


def _log(path, rows):
    path.write_text("".join(json.dumps({"batch": b, "seq": s, "count": c}) + "\n" for b, s, c in rows))


def _run(capsys, command):
    with pytest.raises(SystemExit) as stopped:
        main(command.split())
    return stopped.value.code, *capsys.readouterr()


SPEC = """
version: 1
name: net
model: {{onnx: model.onnx}}
{profiles}
targets: [{{backend: tensorrt_rtx, gpus: [sm86]}}]
"""


def test_engines_build_with_chosen_profiles_and_the_release_is_held_against_new_traffic(folder, capsys):
    traffic = "profiles: {from_traffic: {log: log.jsonl, coverage: 0.99, max_profiles: 3}}"
    (folder / "spec.yaml").write_text(SPEC.format(profiles=traffic))

    code, _, err = _run(capsys, "build spec.yaml")
    assert code == 0, err
    assert "cover 996 of 1000 requests" in err
    manifest = json.loads((folder / "dist/manifest.json").read_text())
    profiles = [profile["shapes"]["x"] for profile in manifest["artifacts"][0]["profiles"]]
    # 0.4 % at length 512 are left out; the commonest shape of the log is some profile's opt.
    assert max(shape["max"] for shape in profiles) == [8, 64, 16]
    assert [1, 16, 16] in [shape["opt"] for shape in profiles]

    code, _, err = _run(capsys, "build spec.yaml")
    assert code == 0
    assert "traffic" in err
    assert "new" not in err

    code, out, _ = _run(capsys, "profile log.jsonl --against dist/manifest.json --coverage 0.99")
    assert code == 0
    assert "covered: 99.60 % of 1000 requests" in out

    _log(folder / "drifted.jsonl", [(1, 16, 600), (8, 300, 400)])
    code, _, err = _run(capsys, "profile drifted.jsonl --against dist/manifest.json --coverage 0.99")
    assert code == 12
    assert "the profiles in manifest.json cover 60.00 % of 1000 requests, expected 99 % or more" in err
    assert "400 requests outside: batch 8, seq 300" in err


def test_the_printed_block_can_be_pasted(folder, capsys):
    code, out, _ = _run(capsys, "profile log.jsonl --model model.onnx --multiple-of seq=8 --svg traffic.svg")
    assert code == 0
    block = out[out.index("profiles:\n") :]
    assert set(yaml.safe_load(block)["profiles"][0]["inputs"]) == {"x", "z"}
    (folder / "spec.yaml").write_text(SPEC.format(profiles=block))

    code, _, err = _run(capsys, "plan spec.yaml")
    assert code == 0, err
    assert (folder / "traffic.svg").read_text().startswith("<svg ")


def test_json_says_what_was_chosen_and_why(folder, capsys):
    code, out, _ = _run(capsys, "profile log.jsonl --model model.onnx --json")
    found = json.loads(out)

    assert code == 0
    assert [option["num_profiles"] for option in found["options"]] == [1, 2, 3, 4]
    assert sum(option["taken"] for option in found["options"]) == 1
    assert found["coverage"] == 0.996
    assert found["uncovered"] == [{"batch": 8, "seq": 512, "count": 4}]
    assert found["cover_all"]["largest"] == [8, 512]
    # Two inputs of 8 x 512 x 16 floats are no node's; the product of 8 x 512 x 512 and the transpose are held at once.
    assert found["cover_all"]["held_bytes"] == 4 * (8 * 512 * 512 + 8 * 512 * 16)


def test_a_queue_makes_opt_what_the_server_will_see(folder, capsys):
    rows = [{"batch": 1, "seq": 16, "timestamp": at // 4 * 1.0} for at in range(400)]
    (folder / "single.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    alone = json.loads(_run(capsys, "profile single.jsonl --model model.onnx --json")[1])
    queued = json.loads(_run(capsys, "profile single.jsonl --model model.onnx --json --window-ms 5 --max-batch 32")[1])

    assert alone["profiles"][0]["shapes"]["x"]["opt"] == [1, 16, 16]
    assert queued["profiles"][0]["shapes"]["x"]["opt"] == [4, 16, 16]
    assert queued["num_requests"] == 100


def test_memory_limits_what_is_covered(folder, capsys):
    code, _, err = _run(capsys, "profile log.jsonl --model model.onnx --memory-mib 1 --coverage 1")

    assert code == 12
    assert "4 requests outside: batch 8, seq 512" in err


def test_a_log_for_another_model(folder, capsys):
    (folder / "other.jsonl").write_text('{"x": [1, 16, 99]}\n')

    for command in ("--coverage 0.9", "--coverage 0"):
        code, _, err = _run(capsys, f"profile other.jsonl --model model.onnx {command}")
        assert code == 12
        assert "1 request can never fit: axis 2 of 'x' is 99, the model fixes it at 16 (line 1)" in err
