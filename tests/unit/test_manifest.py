from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from trtforge.errors import IntegrityError, StoreError, TrtForgeError, exit_code_of
from trtforge.release.manifest import (
    MAX_MANIFEST_BYTES,
    Artifact,
    BuiltOn,
    ExternalFileRecord,
    HostGpu,
    HostRecord,
    Manifest,
    MissingTarget,
    ModelRecord,
    NotRun,
    ProfileCheck,
    ProfileRecord,
    RangeRecord,
    SpecRecord,
    StageRecord,
    TensorRecord,
    manifest_json,
    manifest_schema,
    merge,
    read_manifest,
    same_before,
)


def digest(character: str) -> str:
    return character * 64


HOST = HostRecord(
    python="3.11.7",
    platform="linux",
    packages={"onnx": "1.23.0", "tensorrt": "10.9.0.34"},
    driver="580.159.03",
    cuda="13.0",
    gpus=(HostGpu(device_name="NVIDIA L4", compute_capability="sm89", num_sms=58, memory_bytes=24 << 30),),
)
RANGE = RangeRecord(min=(1, 8), opt=(4, 8), max=(16, 8))


def rtx_artifact(capability: str = "sm86", **changes) -> Artifact:
    base = Artifact(
        identifier=f"digits-fp32-{capability}-trtrtx1.7.1",
        file=f"digits-fp32-{capability}-trtrtx1.7.1.engine",
        size_bytes=133684,
        digest=digest("a"),
        backend="tensorrt_rtx",
        backend_version="1.7.1.116",
        network_flags=(),
        builder_flags=(),
        settings={"hardware_compatibility": "none", "optimization_level": 3, "workspace_mib": None, "refit": False},
        tf32=False,
        precision="fp32",
        target_gpu=capability,
        compute_capability=capability,
        built_on=None,
        host=digest("0"),
        timing_cache_digest=None,
        graph_digest=digest("b"),
        unit_digest=digest(capability[-1]),
        profiles=(ProfileRecord(name="default", shapes={"x": RANGE}, values={}),),
        inputs=(
            TensorRecord(name="x", dtype="float32", shape=("N", 8), ranges={"default": RANGE}, data_dependent=False),
        ),
        outputs=(TensorRecord(name="y", dtype="int32", shape=(None, 2), ranges={}, data_dependent=True),),
        seconds={"start": 0.3, "parse": 0.01, "build": 1.5, "write": 0.0},
        warnings=("a 'quoted' warning\x1b[31m",),
        peak_memory_bytes=1 << 29,
    )
    return replace(base, **changes)


def tensorrt_artifact(model: str, capability: str, version: str = "10.9.0.34", **changes) -> Artifact:
    identifier = f"digits-fp16-{model.lower().replace(' ', '')}-trt{version}"
    defaults = {
        "identifier": identifier,
        "file": f"{identifier}.engine",
        "backend": "tensorrt",
        "backend_version": version,
        "network_flags": ("STRONGLY_TYPED",),
        "builder_flags": ("TF32", "FP16"),
        "target_gpu": model,
        "built_on": BuiltOn(device_name=f"NVIDIA {model}", num_sms=58, memory_bytes=24 << 30, driver="580.159.03"),
        "unit_digest": digest("c"),
    }
    return rtx_artifact(capability, **{**defaults, **changes})


def manifest(*artifacts: Artifact, **changes) -> Manifest:
    base = Manifest(
        trtforge_version="0.1.0",
        created="2026-11-30T20:21:00Z",
        name="digits",
        spec=SpecRecord(file="digits.yaml", digest=digest("1")),
        model=ModelRecord(
            file="digits.onnx",
            digest=digest("b"),
            size_bytes=1234,
            opset=17,
            producer="pytorch 2.6",
            external_files=(ExternalFileRecord(location="digits.data", size_bytes=99, digest=digest("2")),),
        ),
        calibration_digest=None,
        stages=(StageRecord(name="ingest", key=digest("3"), seconds=0.25, notes=("3 nodes named",)),),
        hosts={digest("0"): HOST},
        artifacts=artifacts,
        profile_checks=(
            ProfileCheck(
                profile="default",
                point="min",
                input_shapes={"x": (1, 8)},
                output_shapes={"y": (0, 2)},
                finite=True,
                reference_provider="CPUExecutionProvider",
                reference_version="1.32.0",
            ),
        ),
        export=None,
        lowering=(),
        parity=(),
        accuracy=NotRun(reason="no metric"),
        engines={},
        performance=NotRun(reason="no GPU"),
        missing=(),
    )
    return replace(base, **changes)


def missing(identifier: str, verdict: str = "skipped") -> MissingTarget:
    return MissingTarget(
        identifier=identifier,
        gpu="T4",
        backend="tensorrt",
        verdict=verdict,
        reason="no T4 on this machine",
        next_step="run it on a machine with a T4",
        exit_code=6,
    )


def problems_of(tmp_path, text: str | bytes) -> list[str]:
    path = tmp_path / "manifest.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(TrtForgeError) as caught:
        read_manifest(path)
    assert exit_code_of(caught.value.problems) == IntegrityError.exit_code
    assert all(problem.next_step for problem in caught.value.problems)
    return [problem.lines()[0].removeprefix(str(path)) for problem in caught.value.problems]


def changed(*keys: str | int, value: object) -> str:
    data = json.loads(manifest_json(manifest(rtx_artifact(), rtx_artifact("sm89"))))
    place = data
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    return json.dumps(data)


FULL = manifest(
    rtx_artifact("sm89"), rtx_artifact(), tensorrt_artifact("L4", "sm89"), missing=(missing("b"), missing("a"))
)


def test_what_was_written_is_read(tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text(manifest_json(FULL))
    found = read_manifest(path)
    assert [artifact.target_gpu for artifact in found.artifacts] == ["L4", "sm86", "sm89"]
    assert found.artifacts[0] == replace(tensorrt_artifact("L4", "sm89"), builder_flags=("FP16", "TF32"))
    assert [target.identifier for target in found.missing] == ["a", "b"]
    assert found.hosts == FULL.hosts
    assert manifest_json(found) == path.read_text()


def test_order_that_means_nothing_does_not_change_the_text():
    a, b = rtx_artifact(), rtx_artifact("sm89")
    shuffled = replace(a, settings=dict(reversed(a.settings.items())), seconds=dict(reversed(a.seconds.items())))
    assert manifest_json(manifest(a, b)) == manifest_json(manifest(b, shuffled))


def test_it_begins_with_the_schema_version_and_ends_with_a_newline():
    text = manifest_json(FULL)
    assert text.startswith('{\n  "schema_version": 1,\n')
    assert text.endswith("}\n")


def test_schema_is_valid_and_accepts_what_is_written_and_no_other_key():
    validator = Draft202012Validator(manifest_schema())
    validator.check_schema(manifest_schema())
    data = json.loads(manifest_json(FULL))
    validator.validate(data)
    data["artifacts"][0]["engine"] = "x"
    assert not validator.is_valid(data)


@pytest.mark.parametrize(
    "file",
    ["", "/etc/passwd", "../x.engine", "a/../../x", "a//b", "./x", "a/", "C:x", "a\\b", "a\0b", "a\nb", "a\u202eb"],
)
def test_a_file_outside_the_folder_is_refused(tmp_path, file):
    (problem,) = problems_of(tmp_path, changed("artifacts", 0, "file", value=file))
    assert ": error: artifacts[0].file: found " in problem
    assert "expected a path inside the manifest's folder" in problem
    assert problem.isprintable()


def test_a_file_in_a_subfolder_is_accepted(tmp_path):
    (tmp_path / "manifest.json").write_text(changed("artifacts", 0, "file", value="sm86/x.engine"))
    assert read_manifest(tmp_path / "manifest.json").artifacts[0].file == "sm86/x.engine"


@pytest.mark.parametrize(
    ("keys", "value", "expected"),
    [
        (("artifacts", 0, "digest"), "ABC", "artifacts[0].digest: found 'ABC': string should match pattern"),
        (("artifacts", 0, "digest"), "a" * 63 + "\n", "artifacts[0].digest: found 'aaa"),
        (
            ("artifacts", 1, "size_bytes"),
            -1,
            "artifacts[1].size_bytes: found -1: input should be greater than or equal",
        ),
        (("artifacts", 1, "size_bytes"), "12", "artifacts[1].size_bytes: found '12': input should be a valid integer"),
        (("artifacts", 1, "size_bytes"), True, "artifacts[1].size_bytes: found True: "),
        (
            ("artifacts", 0, "builder_flags"),
            [3],
            "artifacts[0].builder_flags[0]: found 3: input should be a valid string",
        ),
        (("artifacts", 0, "builder_flags"), ["3"], "artifacts[0].builder_flags[0]: found '3': "),
        (("artifacts", 0, "backend"), "openvino", "artifacts[0].backend: found 'openvino': "),
        (("artifacts", 0, "backend_version"), "new", "artifacts[0].backend_version: found 'new': "),
        (("artifacts", 0, "extra"), 1, "artifacts[0].extra: unknown key"),
        (("artifacts", 0, "seconds", "build"), 10**400, "artifacts[0].seconds.build: "),
        (
            ("model", "external_files", 0),
            {"location": "x", "digest": "a" * 64},
            "size_bytes: not there, expected a value",
        ),
        (
            ("performance", "status"),
            "passed",
            "performance: found {'next_step': '', 'reason': 'no GPU', 'status': 'passed'}: input tag",
        ),
        (("created",), "yesterday", "created: found 'yesterday': "),
        (("artifacts", 0, "host"), digest("f"), f"hosts: no entry '{digest('f')}', which an artifact names"),
    ],
)
def test_wrong_values_are_named_with_their_place(tmp_path, keys, value, expected):
    assert expected in problems_of(tmp_path, changed(*keys, value=value))[0]


def test_all_problems_are_told_at_once(tmp_path):
    data = json.loads(manifest_json(FULL))
    data["name"] = 1
    del data["spec"]["digest"]
    assert len(problems_of(tmp_path, json.dumps(data))) == 2


def test_many_problems_are_cut(tmp_path):
    problems = problems_of(tmp_path, changed("artifacts", value=[{}] * 100))
    assert len(problems) == 51
    assert "more problems" in problems[-1]


def test_two_entries_for_one_file_are_refused(tmp_path):
    name = rtx_artifact().file
    (problem,) = problems_of(tmp_path, changed("artifacts", 1, "file", value=name))
    assert f"artifacts: 2 entries for the file '{name}', expected one" in problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{\n  "schema_version": 1,\n  "name" 2}', ":3:10: error: not JSON: Expecting ':' delimiter"),
        (b'{"a": "\xff"}', ": error: "),
        ("", ":1:1: error: not JSON"),
        ('{"schema_version": 1, "name": "a", "name": "b"}', "the key 'name' occurs twice"),
        ('{"schema_version": 1, "x": NaN}', "NaN is not a JSON number"),
        ('{"schema_version": 1, "x": ' + "1" * 5000 + "}", ": error: not a manifest: "),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "no 'schema_version'"),
        ('{"name": "a"}', "no 'schema_version'"),
        ('{"schema_version": 2}', "found schema_version 2, this trtforge reads 1"),
        ('{"schema_version": true}', "found schema_version True, this trtforge reads 1"),
        ('{"schema_version": "1"}', "found schema_version '1', this trtforge reads 1"),
    ],
)
def test_text_that_is_no_manifest(tmp_path, text, expected):
    (problem,) = problems_of(tmp_path, text)
    assert expected in problem


def test_a_cut_manifest_is_told_with_its_place(tmp_path):
    text = manifest_json(FULL)
    (problem,) = problems_of(tmp_path, text[: len(text) // 2])
    assert "not JSON" in problem


def test_a_huge_file_is_not_parsed(tmp_path):
    path = tmp_path / "manifest.json"
    with path.open("wb") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)
    with pytest.raises(IntegrityError, match="larger than 16 MiB"):
        read_manifest(path)


def test_no_manifest_there(tmp_path):
    with pytest.raises(StoreError, match="No such file"):
        read_manifest(tmp_path / "manifest.json")
    with pytest.raises(StoreError, match="is a folder") as caught:
        read_manifest(tmp_path)
    assert caught.value.problems[0].next_step == f"name {tmp_path}/manifest.json"
    with pytest.raises(StoreError, match="no regular file"):
        read_manifest(Path("/dev/null"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_changed_byte_is_refused_or_read(tmp_path, data):
    raw = bytearray(manifest_json(manifest(rtx_artifact())).encode())
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "manifest.json"
    path.write_bytes(raw)
    problems = ()
    try:
        read_manifest(path)
    except TrtForgeError as error:
        problems = error.problems
    assert {problem.exit_code for problem in problems} <= {IntegrityError.exit_code}


def test_merge_keeps_another_gpus_engine_as_it_was():
    a = tensorrt_artifact("T4", "sm75", unit_digest=digest("d"), host=digest("9"))
    b = tensorrt_artifact("L4", "sm89", unit_digest=digest("e"))
    previous = manifest(a, hosts={digest("9"): replace(HOST, driver="550.1.1")})
    new = manifest(b, missing=(missing(a.identifier), missing("digits-fp16-a10-trt10.9.0.34")))
    merged = merge(previous, new, {a.unit_digest: a.identifier, b.unit_digest: b.identifier}, digest("3"))
    before, after = (json.loads(manifest_json(value))["artifacts"] for value in (previous, merged))
    assert json.dumps(before[0]) in [json.dumps(entry) for entry in after]
    assert merged.artifacts == (b, a)
    assert set(merged.hosts) == {digest("0"), digest("9")}
    assert [target.identifier for target in merged.missing] == ["digits-fp16-a10-trt10.9.0.34"]


def test_merge_drops_stale_units_and_their_hosts():
    stale = rtx_artifact("sm89", unit_digest=digest("d"), host=digest("9"))
    new = manifest(rtx_artifact(), missing=(missing(stale.identifier),))
    merged = merge(manifest(stale, hosts={digest("9"): HOST}), new, {digest("6"): "other"}, digest("3"))
    assert replace(merged, engines={}) == new
    assert set(merged.engines) == {new.artifacts[0].identifier}


def test_merge_prefers_what_was_built_now():
    old = rtx_artifact(digest=digest("7"))
    same_file = rtx_artifact(digest=digest("7"), unit_digest=digest("d"))
    new = manifest(rtx_artifact())
    for artifact in (old, same_file):
        planned = dict.fromkeys((old.unit_digest, digest("d")), old.identifier)
        assert merge(manifest(artifact), new, planned, digest("3")).artifacts == new.artifacts


def test_what_differs_in_times_only_is_the_same(tmp_path):
    path = tmp_path / "manifest.json"
    now = manifest(rtx_artifact("sm86"), rtx_artifact("sm120"), missing=(missing("z"), missing("a")))
    path.write_text(manifest_json(now))
    later = replace(now, created="2031-01-01T00:00:00Z", stages=())

    assert same_before(path, later) == read_manifest(path)
    assert same_before(path, replace(later, name="other")) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"created": "', '"created": "x'),
        ('"stages": [', '"stages": [1, '),
        ("{", "[" * 100_000),
        ('"schema_version"', '"Schema_version"'),
        ("\n", "\r\n"),
    ],
)
def test_a_manifest_that_somebody_changed_is_looked_at_closely(tmp_path, old, new):
    path = tmp_path / "manifest.json"
    path.write_bytes(manifest_json(manifest(rtx_artifact("sm86"))).replace(old, new, 1).encode())

    assert same_before(path, manifest(rtx_artifact("sm86"))) is None
    assert same_before(tmp_path / "none.json", manifest(rtx_artifact("sm86"))) is None
