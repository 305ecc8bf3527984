"""The JSON Schemas in configs/: generated, and of one mind with the loaders."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from trtforge.errors import TrtForgeError
from trtforge.spec.load import load_spec
from trtforge.spec.yaml_values import read_yaml

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
SCHEMAS = runpy.run_path(str(ROOT / "scripts" / "write_schemas.py"))["schemas"]()


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_file_is_what_the_code_generates(name):
    assert (CONFIGS / name).read_text(encoding="utf-8") == SCHEMAS[name], "run: python scripts/write_schemas.py"


@pytest.mark.parametrize("name", SCHEMAS)
def test_it_is_a_schema(name):
    schema = json.loads(SCHEMAS[name])

    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    assert schema["additionalProperties"] is False


def _is_valid(path):
    return Draft202012Validator(json.loads(SCHEMAS["spec.schema.json"])).is_valid(read_yaml(path)[0])


def _loads(path):
    try:
        load_spec(path)
    except TrtForgeError:
        return False
    return True


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("**/*.yaml")), ids=lambda path: path.name)
def test_every_spec_in_configs_is_valid(path):
    assert _is_valid(path)
    assert _loads(path)


HEAD = "version: 1\nname: net\nmodel: {onnx: net.onnx}\n"
TARGET = "targets: [{backend: tensorrt_rtx, gpus: [sm86]}]\n"

GOOD = (
    "",
    "profiles: [{inputs: {x: [1, 3, 8, 8]}}]",
    "profiles: [{inputs: {x: 1x3x8x8}}]",
    "profiles: [{inputs: {x: {min: [1, 3], opt: 2x3, max: [4, 3]}}}]",
    "profiles: [{name: a, inputs: {x: {min: []}}}]",
    "profiles: [{inputs: {x: {values: {min: [-1, 2], opt: 3, max: [4]}}}}]",
    "profiles: [{name: 7, inputs: {}}]",
    "inputs: {x: {kind: mask, range: [0, 1e-5]}}",
    "precision: {type: as_model, tf32: true}",
    "builder: {workspace_mib: 512, max_aux_streams: 0, tactic_sources: [cudnn]}",
    "performance: {}",
    "performance: {p99_ms: 5, throughput_qps: 1.5, sizes: {batch: [1, 8], 'x[0]': [2]}, cuda_graph: true}",
    "performance: {max_regression: 0.02, previous: old/manifest.json}",
    "fail_on_warning: ['*', 10.10]",
    "output: ../dist",
    "extends: []",
)
BAD = (
    "x: 1",
    "profile: []",
    "profiles: [{inputs: {x: {optt: [1]}}}]",
    "profiles: [{inputs: {x: {values: {min: 1, opt: 1}}}}]",
    "profiles: [{inputs: {x: 1,3}}]",
    "profiles: [{inputs: {x: 8}}]",
    "profiles: [{inputs: {x: '1x3xax8'}}]",
    "profiles: [{inputs: {x: '(1, 3)'}}]",
    "profiles: [{inputs: {x: [1.5]}}]",
    "profiles: [{inputs: {x: [true]}}]",
    "profiles: [{inputs: {x: [-1]}}]",
    "profiles: [{inputs: {x: FILL_IN}}]",
    "profiles: [{inputs: {x: [FILL_IN]}}]",
    "profiles: [{inputs: {x: [9223372036854775808]}}]",
    "profiles: [{inputs: {}, name: a/b}]",
    "profiles: [{}]",
    "inputs: {x: {kind: text}}",
    "inputs: {x: {range: [1]}}",
    "inputs: {x: {range: [1, 2, 3]}}",
    "inputs: {x: {range: [false, true]}}",
    "precision: {type: fp23}",
    "precision: {tf32: yes}",
    "precision: {tf32: 1}",
    "builder: {optimization_level: 6}",
    "builder: {workspace_mib: 0}",
    "builder: {max_aux_streams: 3000000000}",
    "builder: {tactic_sources: [x]}",
    "performance: {p99: 5}",
    "performance: {p99_ms: 0}",
    "performance: {throughput_qps: fast}",
    "performance: {max_regression: 2, previous: manifest.json}",
    "performance: {sizes: {batch: 8}}",
    "performance: {sizes: {batch: []}}",
    "performance: {sizes: {batch: [0]}}",
    "performance: {cuda_graph: 1}",
    "output: ",
    "output: [x]",
    "extends: 5",
)
BAD_TARGETS = (
    "",
    "targets: []\n",
    "targets: [{backend: tensorrt_rtx}]\n",
    "targets: [{backend: tensorrt_rtx, gpus: []}]\n",
    "targets: [{backend: tensorrt_rtx, gpus: sm86}]\n",
    "targets: [{backend: onnxruntime, gpus: [sm86]}]\n",
    "targets: [{gpus: [sm86]}]\n",
    "targets: [{backend: tensorrt, gpus: [T4], when_missing: never}]\n",
    "targets: {backend: tensorrt, gpus: [T4]}\n",
)


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        *[(f"{HEAD}{TARGET}{more}\n", True) for more in GOOD],
        *[
            (f"{HEAD}targets: [{{backend: tensorrt, gpus: [T4, A100], version: {v}}}]\n", True)
            for v in ("10.10", "'8'")
        ],
        *[(f"{HEAD}{TARGET}{more}\n", False) for more in BAD],
        *[(f"{HEAD}{targets}", False) for targets in BAD_TARGETS],
        (TARGET, False),
        ("[]", False),
        (f"{HEAD.replace('version: 1', 'version: 2')}{TARGET}", False),
        (f"{HEAD.replace('name: net', 'name: a b')}{TARGET}", False),
    ],
)
def test_the_schema_and_the_loader_agree(tmp_path, text, is_good):
    path = tmp_path / "spec.yaml"
    path.write_text(text)

    assert (_is_valid(path), _loads(path)) == (is_good, is_good)


def test_a_spec_that_extends_another_need_not_be_whole(tmp_path):
    (tmp_path / "base.yaml").write_text(HEAD + TARGET)
    path = tmp_path / "spec.yaml"
    path.write_text("extends: base.yaml\nname: other\n")

    assert _is_valid(path)
    assert _loads(path)
