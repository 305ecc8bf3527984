from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_manifest import manifest, missing, rtx_artifact, tensorrt_artifact

from trtforge.errors import CapabilityError, IntegrityError, exit_code_of
from trtforge.machine import GpuFacts, MachineFacts
from trtforge.plan_header import RTX_COMPUTE_CAPABILITIES
from trtforge.release.manifest import Artifact, BuiltOn, manifest_json
from trtforge.release.verify import Check, verify

SIZE = 200


def engine_bytes(artifact: Artifact) -> bytes:
    """The right header, then bytes that no other artifact has."""
    version = [int(part) for part in artifact.backend_version.split(".")]
    if artifact.backend == "tensorrt_rtx":
        mask = 1 << RTX_COMPUTE_CAPABILITIES.index(artifact.compute_capability)
        head = struct.pack("<4sIIIQ4B4sB31x", b"vtrt", 0, 2, 0, SIZE, *version, b"vtrt", mask)
    else:
        head = struct.pack("<4s20x4B36x", b"ftrt", *version)
    return head + hashlib.sha512(artifact.identifier.encode()).digest() + bytes(SIZE - 128)


def bundle(folder: Path, *artifacts: Artifact, **changes) -> Path:
    """A bundle whose files are what its manifest says."""
    recorded = []
    for artifact in artifacts:
        data = engine_bytes(artifact)
        path = folder / artifact.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        recorded.append(replace(artifact, size_bytes=len(data), digest=hashlib.sha256(data).hexdigest()))
    path = folder / "manifest.json"
    path.write_text(manifest_json(manifest(*recorded, **changes)))
    return path


def facts(*gpus: GpuFacts, **packages: str) -> MachineFacts:
    return MachineFacts("3.11.7", "linux", "Debian 12", "2.36", "x86_64", packages, "580.1", "13.0", "", gpus)


def gpu(device_name: str, model: str | None, capability: str, num_sms: int = 58, index: int = 0) -> GpuFacts:
    return GpuFacts(index, device_name, model, capability, num_sms, 24 << 30, "")


def checks(path: Path, *, gpu: str | None = None, tensorrt: str | None = None, facts=None) -> tuple[Check, ...]:
    report = verify(path, wanted_gpu=gpu, wanted_tensorrt=tensorrt, facts=facts)
    for check in report.checks:
        assert (check.exit_code > 0) == (check.verdict == "failed")
        assert check.next_step or check.verdict in ("ok", "not_checked")
    assert len(report.problems) == sum(check.verdict == "failed" for check in report.checks)
    return report.checks


def verdicts(found: tuple[Check, ...], *names: str) -> list[tuple[str | None, str]]:
    return [(check.artifact, check.verdict) for check in found if check.name in names]


def failed(found: tuple[Check, ...]) -> list[str]:
    return [check.name for check in found if check.verdict == "failed"]


RTX = rtx_artifact(file="a.engine")
T4 = tensorrt_artifact("T4", "sm75", file="t4.engine")
L4 = tensorrt_artifact("L4", "sm89", file="l4.engine")


def test_a_bundle_as_it_was_built(tmp_path):
    found = checks(bundle(tmp_path, RTX, L4))
    assert [(check.artifact, check.name, check.verdict) for check in found] == [
        ("l4.engine", "exists", "ok"),
        ("l4.engine", "size", "ok"),
        ("l4.engine", "sha256", "ok"),
        ("l4.engine", "header_kind", "ok"),
        ("l4.engine", "header_version", "ok"),
        ("a.engine", "exists", "ok"),
        ("a.engine", "size", "ok"),
        ("a.engine", "sha256", "ok"),
        ("a.engine", "header_kind", "ok"),
        ("a.engine", "header_version", "ok"),
        ("a.engine", "header_size", "ok"),
        ("a.engine", "header_compute_capability", "ok"),
        (None, "gpu", "not_checked"),
        (None, "tensorrt", "not_checked"),
        ("l4.engine", "parity", "not_checked"),
        ("a.engine", "parity", "not_checked"),
        (None, "accuracy", "not_checked"),
        (None, "performance", "not_checked"),
    ]


def test_it_works_from_the_bundles_own_folder(tmp_path, monkeypatch):
    bundle(tmp_path, RTX)
    monkeypatch.chdir(tmp_path)
    assert failed(checks(Path("manifest.json"))) == []


CORRUPTIONS = {
    "half": (lambda data: data[: SIZE // 2], ["size", "sha256", "header_size"]),
    "minus-1": (lambda data: data[:-1], ["size", "sha256", "header_size"]),
    "plus-64": (lambda data: data + bytes(64), ["size", "sha256", "header_size"]),
    "empty": (lambda _: b"", ["size", "sha256"]),
    "garbage": (lambda data: b"\x5a" * len(data), ["sha256"]),
    "other-backend": (lambda data: b"ftrt" + bytes(4) + data[8:], ["sha256", "header_kind"]),
    "other-version": (lambda data: data[:25] + b"\x08" + data[26:], ["sha256", "header_version"]),
    "other-gpu": (lambda data: data[:32] + b"\x08" + data[33:], ["sha256", "header_compute_capability"]),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_changed_engine(tmp_path, name):
    change, expected = CORRUPTIONS[name]
    path = bundle(tmp_path, RTX)
    engine = tmp_path / "a.engine"
    engine.write_bytes(change(engine.read_bytes()))
    found = checks(path)
    assert failed(found) == expected
    assert {check.exit_code for check in found if check.verdict == "failed"} == {IntegrityError.exit_code}


@pytest.mark.parametrize("data", [b"", b"\x5a" * SIZE])
def test_an_unknown_header_is_a_warning(tmp_path, data):
    path = bundle(tmp_path, RTX)
    (tmp_path / "a.engine").write_bytes(data)
    assert verdicts(checks(path), "header_kind") == [("a.engine", "warning")]


@pytest.mark.parametrize(
    ("mask", "capability", "verdict"), [(0x0C, "sm86", "warning"), (0x08, "sm86", "failed"), (0x40, "sm110", "warning")]
)
def test_the_mask_of_compute_capabilities(tmp_path, mask, capability, verdict):
    path = bundle(tmp_path, RTX)
    engine = tmp_path / "a.engine"
    engine.write_bytes(engine.read_bytes()[:32] + bytes([mask]) + engine.read_bytes()[33:])
    path.write_text(path.read_text().replace('"compute_capability": "sm86"', f'"compute_capability": "{capability}"'))
    assert verdicts(checks(path), "header_compute_capability") == [("a.engine", verdict)]


def test_the_header_is_compared_even_where_the_manifest_was_made_to_fit(tmp_path):
    path = bundle(tmp_path, RTX)
    path.write_text(
        path.read_text().replace("1.7.1.116", "1.8.0.2").replace('capability": "sm86"', 'capability": "sm89"')
    )
    assert failed(checks(path)) == ["header_version", "header_compute_capability"]


def test_a_wrong_digest_in_the_manifest(tmp_path):
    path = bundle(tmp_path, RTX)
    data = json.loads(path.read_text())
    data["artifacts"][0]["digest"] = "0" * 64
    path.write_text(json.dumps(data))
    assert failed(checks(path)) == ["sha256"]


def test_swapped_engines_each_fail(tmp_path):
    other = rtx_artifact("sm89", file="b.engine")
    path = bundle(tmp_path, RTX, other)
    a, b = (tmp_path / name for name in ("a.engine", "b.engine"))
    a.rename(tmp_path / "c")
    b.rename(a)
    (tmp_path / "c").rename(b)
    assert failed(checks(path)) == ["sha256", "header_compute_capability"] * 2


def test_the_file_is_read_again_every_time(tmp_path):
    path = bundle(tmp_path, RTX)
    engine = tmp_path / "a.engine"
    assert failed(checks(path)) == []
    before = engine.stat()
    engine.write_bytes(engine.read_bytes()[:-1] + b"\1")
    os.utime(engine, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert failed(checks(path)) == ["sha256"]


def gone(path):
    path.unlink()


def link_out(path):
    (path.parent.parent / "outside").write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to("../outside")


def link_out_by_folder(path):
    """Points into a folder whose name begins like the bundle's."""
    sibling = path.parent.with_name(path.parent.name + "-2")
    sibling.mkdir()
    path.rename(sibling / "x")
    path.symlink_to(sibling / "x")


def link_circle(path):
    path.unlink()
    path.symlink_to(path.name)


def dangling(path):
    path.unlink()
    path.symlink_to("nothing")


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def folder(path):
    path.unlink()
    path.mkdir()


def device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (gone, "a.engine is not there"),
        (dangling, "a.engine is not there"),
        (link_out, "a.engine is a link that leaves the bundle's folder"),
        (link_out_by_folder, "a.engine is a link that leaves the bundle's folder"),
        (device, "a.engine is a link that leaves the bundle's folder, to /dev/zero"),
        (link_circle, "a.engine is a link that leads in a circle"),
        (pipe, "a.engine is no regular file"),
        (folder, "a.engine is no regular file"),
    ],
)
def test_what_is_no_file_of_the_bundle_is_not_read(tmp_path, change, expected):
    path = bundle(tmp_path / "dist", RTX)
    change(tmp_path / "dist" / "a.engine")
    found = checks(path)
    assert [check.name for check in found if check.artifact] == ["exists", "parity"]
    assert expected in found[0].text
    assert found[0].exit_code == IntegrityError.exit_code


def test_a_link_inside_the_bundle_is_followed(tmp_path):
    path = bundle(tmp_path, RTX)
    (tmp_path / "..data").mkdir()
    (tmp_path / "a.engine").rename(tmp_path / "..data" / "x")
    (tmp_path / "a.engine").symlink_to("..data/x")
    assert failed(checks(path)) == []


def test_a_path_out_of_the_folder_stops_before_any_file(tmp_path):
    path = bundle(tmp_path, RTX)
    path.write_text(path.read_text().replace('"file": "a.engine"', '"file": "../a.engine"'))
    with pytest.raises(Exception, match="problem") as caught:
        checks(path)
    assert exit_code_of(caught.value.problems) == IntegrityError.exit_code


def test_engines_that_are_not_listed(tmp_path):
    path = bundle(tmp_path, RTX, replace(L4, file="sub/l4.engine"))
    for name in ("b c.engine", "sub/x.engine", "other/ours.engine", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    found = checks(path)
    assert verdicts(found, "listed") == [("b c.engine", "failed"), ("sub/x.engine", "failed")]
    assert f"rm '{tmp_path}/b c.engine'" in [check.next_step for check in found]


def test_no_engine_at_all(tmp_path):
    found = checks(bundle(tmp_path))
    assert failed(found) == ["artifacts"]


def test_missing_targets_are_told(tmp_path):
    path = bundle(tmp_path, RTX, missing=(missing("digits-fp16-t4-trt10.9.0", "failed"), missing("z", "skipped")))
    found = checks(path)
    assert verdicts(found, "target") == [(None, "failed"), (None, "not_checked")]
    assert "digits-fp16-t4-trt10.9.0 was not built: no T4 on this machine" in [check.text for check in found]


PLUS = {"hardware_compatibility": "ampere_plus"}
SAME = {"hardware_compatibility": "same_compute_capability"}
A10 = tensorrt_artifact("A10", "sm86", file="a10.engine")


@pytest.mark.parametrize(
    ("artifacts", "wanted", "expected"),
    [
        ([RTX, T4, L4], "L4", [("l4.engine", "ok")]),
        ([RTX, T4, L4], "nvidia-l4", [("l4.engine", "ok")]),
        ([RTX, T4, L4], "sm86", [("a.engine", "ok")]),
        ([RTX, T4, L4], "8.9", [("l4.engine", "ok")]),
        ([RTX, T4], "A10", [("a.engine", "ok")]),
        ([RTX, A10], "A10", [("a10.engine", "ok"), ("a.engine", "ok")]),
        ([RTX, T4], "H200", [(None, "failed")]),
        ([A10], "RTX 3080 Ti", [("a10.engine", "warning")]),
        ([RTX, A10], "RTX 3080 Ti", [("a.engine", "ok")]),
        ([replace(A10, settings=SAME)], "RTX 3080 Ti", [("a10.engine", "ok")]),
        ([replace(A10, settings=PLUS)], "RTX 5090", [("a10.engine", "ok")]),
        ([replace(A10, settings=PLUS)], "T4", [(None, "failed")]),
        ([replace(A10, target_gpu="nvidia a10")], "A10", [("a10.engine", "ok")]),
    ],
)
def test_a_wanted_gpu(tmp_path, artifacts, wanted, expected):
    found = checks(bundle(tmp_path, *artifacts), gpu=wanted)
    assert verdicts(found, "gpu") == expected
    assert {check.exit_code for check in found if check.verdict == "failed"} <= {CapabilityError.exit_code}


def test_what_there_is_instead_of_a_wanted_gpu(tmp_path):
    found = checks(bundle(tmp_path, RTX, T4), gpu="H200")
    text = next(check.text for check in found if check.name == "gpu")
    assert text == "no engine for H200 (sm90); there are engines for T4 (sm75), sm86 (sm86)"


@pytest.mark.parametrize("wanted", ["A1000000", "smx", "sm8999", ""])
def test_a_gpu_that_is_none(tmp_path, wanted):
    with pytest.raises(CapabilityError):
        checks(bundle(tmp_path, RTX), gpu=wanted)


@pytest.mark.parametrize(
    ("artifacts", "wanted", "expected"),
    [
        ([L4], "10.9", [("l4.engine", "ok")]),
        ([L4], "10", [("l4.engine", "ok")]),
        ([L4], "tensorrt 10.9.0.34", [("l4.engine", "ok")]),
        ([L4], "10.10", [("l4.engine", "failed")]),
        ([L4], "10.1", [("l4.engine", "failed")]),
        ([L4], "10.9.0.35", [("l4.engine", "failed")]),
        ([L4], "11.4", [("l4.engine", "failed")]),
        ([tensorrt_artifact("L4", "sm89", "10.10.0.1", file="x.engine")], "10.1", [("x.engine", "failed")]),
        ([RTX, L4], "1.7.1", [("a.engine", "ok")]),
        ([RTX, L4], "tensorrt-rtx==1.7", [("a.engine", "ok")]),
        ([RTX, L4], "tensorrt_rtx 1.8", [("a.engine", "failed")]),
        ([RTX], "10.9", [(None, "failed")]),
        ([T4, L4], "10.9", [("t4.engine", "ok"), ("l4.engine", "ok")]),
    ],
)
def test_a_wanted_version(tmp_path, artifacts, wanted, expected):
    path = bundle(tmp_path, *artifacts)
    found = checks(path, tensorrt=wanted)
    assert sorted(verdicts(found, "tensorrt"), key=str) == sorted(expected, key=str)
    for check in found:
        if check.verdict == "failed":
            assert check.exit_code == CapabilityError.exit_code
            assert "trtforge build SPEC" in check.next_step


@pytest.mark.parametrize("wanted", ["", "ten", "10.x", "10..9", "v10", "10.9\n--gpu", "1" * 5000])
def test_a_version_that_is_none(tmp_path, wanted):
    with pytest.raises(CapabilityError, match="is no TensorRT version"):
        checks(bundle(tmp_path, RTX), tensorrt=wanted)


@pytest.mark.parametrize(
    ("built", "wanted", "verdict"),
    [
        ("10.3.0.26", "11.4", "warning"),
        ("10.3.0.26", "10.9", "warning"),
        ("8.6.1.6", "10.9", "warning"),
        ("8.6.1.6", "11.4", "failed"),
        ("10.9.0.34", "10.3", "failed"),
        ("10.9.0.34", "10.9", "ok"),
    ],
)
def test_a_version_compatible_engine_loads_on_later_versions_only(tmp_path, built, wanted, verdict):
    artifact = tensorrt_artifact("L4", "sm89", built, file="x.engine", settings={"version_compatible": True})
    assert verdicts(checks(bundle(tmp_path, artifact), tensorrt=wanted), "tensorrt") == [("x.engine", verdict)]


def test_one_engine_of_the_version_for_each_gpu_is_enough(tmp_path):
    later = tensorrt_artifact("L4", "sm89", "11.4.0.1", file="l4-later.engine")
    path = bundle(tmp_path, L4, later, T4)
    assert verdicts(checks(path, tensorrt="10.9"), "tensorrt") == [("l4.engine", "ok"), ("t4.engine", "ok")]
    assert verdicts(checks(path, tensorrt="11.4"), "tensorrt") == [("l4-later.engine", "ok"), ("t4.engine", "failed")]
    assert failed(checks(path, gpu="L4", tensorrt="11.4")) == []
    assert failed(checks(path, gpu="T4", tensorrt="11.4")) == ["tensorrt"]


def test_one_engine_of_the_version_is_enough_for_a_wanted_gpu(tmp_path):
    path = bundle(tmp_path, replace(A10, settings=PLUS), tensorrt_artifact("L4", "sm89", "11.4.0.1", file="x.engine"))
    assert verdicts(checks(path, gpu="L4", tensorrt="10.9"), "tensorrt") == [("a10.engine", "ok")]
    assert verdicts(checks(path, tensorrt="10.9"), "tensorrt") == [("a10.engine", "ok"), ("x.engine", "failed")]


HERE_L4 = gpu("NVIDIA L4", "L4", "sm89")


@pytest.mark.parametrize(
    ("artifacts", "machine", "expected"),
    [
        ([T4, L4], facts(HERE_L4), [("l4.engine", "ok")]),
        ([T4], facts(HERE_L4), [(None, "failed")]),
        ([A10], facts(gpu("NVIDIA GeForce RTX 3050 Ti Laptop GPU", None, "sm86")), [("a10.engine", "warning")]),
        ([L4], facts(replace(HERE_L4, num_sms=29)), [("l4.engine", "warning")]),
        (
            [T4, L4],
            facts(HERE_L4, gpu("Tesla T4", "T4", "sm75", index=1)),
            [("l4.engine", "ok"), ("t4.engine", "ok")],
        ),
        ([L4], facts(HERE_L4, gpu("NVIDIA T1000", "T1000", "sm75", index=1)), [("l4.engine", "ok"), (None, "warning")]),
        ([L4], facts(), [(None, "not_checked")]),
        ([L4], None, [(None, "not_checked")]),
    ],
)
def test_the_gpus_of_this_machine(tmp_path, artifacts, machine, expected):
    assert verdicts(checks(bundle(tmp_path, *artifacts), facts=machine), "gpu") == expected


def test_an_unlisted_model_is_known_by_its_device_name(tmp_path):
    built_on = BuiltOn(device_name="NVIDIA X", num_sms=58, memory_bytes=1, driver="1")
    path = bundle(tmp_path, replace(A10, target_gpu="X", built_on=built_on))
    assert verdicts(checks(path, facts=facts(gpu("NVIDIA X", None, "sm86"))), "gpu") == [("a10.engine", "ok")]


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        ({"tensorrt": "10.9.0.34"}, [("l4.engine", "ok"), (None, "not_checked")]),
        ({"tensorrt": "11.4.0", "tensorrt_rtx": "1.7.1.116"}, [("l4.engine", "failed"), ("a.engine", "ok")]),
        ({"tensorrt": "unknown"}, [(None, "not_checked"), (None, "not_checked")]),
    ],
)
def test_the_versions_of_this_machine(tmp_path, packages, expected):
    found = checks(bundle(tmp_path, RTX, L4), facts=facts(**packages))
    assert verdicts(found, "tensorrt") == expected


def test_a_wanted_gpu_replaces_this_machine(tmp_path):
    found = checks(bundle(tmp_path, L4), gpu="L4", facts=facts(gpu("NVIDIA H200", "H200", "sm90"), tensorrt="11.4.0"))
    assert failed(found) == []


def test_integrity_comes_first_in_the_exit_code(tmp_path):
    path = bundle(tmp_path, L4)
    (tmp_path / "l4.engine").write_bytes(b"")
    report = verify(path, wanted_gpu="T4", wanted_tensorrt=None, facts=None)
    assert {problem.exit_code for problem in report.problems} == {IntegrityError.exit_code, CapabilityError.exit_code}
    assert exit_code_of(report.problems) == IntegrityError.exit_code


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(position=st.integers(0, SIZE - 1), flip=st.integers(1, 255))
def test_any_flipped_byte_is_noticed(tmp_path, position, flip):
    path = bundle(tmp_path, RTX)
    engine = tmp_path / "a.engine"
    data = bytearray(engine.read_bytes())
    data[position] ^= flip
    engine.write_bytes(data)
    assert "sha256" in failed(checks(path))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(position=st.integers(0, 63), character=st.sampled_from("0123456789abcdef"), size=st.integers(0, 1 << 40))
def test_any_changed_digest_or_size_in_the_manifest_is_noticed(tmp_path, position, character, size):
    path = bundle(tmp_path, RTX)
    data = json.loads(path.read_text())
    entry = data["artifacts"][0]
    changed = entry["digest"][:position] + character + entry["digest"][position + 1 :]
    expected = [*(["size"] * (size != SIZE)), *(["sha256"] * (changed != entry["digest"]))]
    entry.update(digest=changed, size_bytes=size)
    path.write_text(json.dumps(data))
    assert failed(checks(path)) == expected
