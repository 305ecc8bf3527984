"""The capability table, and what it makes refusals and warnings say."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import onnx
import pytest

from trtforge.backends.capabilities import CAPABILITIES, capability, known_versions, newest_version, version_numbers
from trtforge.backends.refusals import refusals, target_compute_capability, warnings
from trtforge.errors import CapabilityError, SpecError
from trtforge.spec.load import load_spec
from trtforge.spec.model import BuilderSettings
from trtforge.types import Graph, OperatorUse, TensorSpec

OPERATORS = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if not schema.domain}
ROWS = [row for rows in CAPABILITIES.values() for row in rows.values()]
X = TensorSpec("x", "float32", ("N", 8))
GRAPH = Graph(
    source=Path("m.onnx"),
    path=Path("m.onnx"),
    weights_dir=Path(),
    digest="",
    ir_version=8,
    opsets=(("", 17),),
    producer="",
    inputs=(X,),
    outputs=(TensorSpec("y", "float32", ("N", 8)),),
    roles=(),
    data_dependent_outputs=(),
    operators=(OperatorUse("", "Relu", "", ("r",), 14),),
    element_types=("float32",),
    has_qdq=False,
    wide_int_constants=(),
    num_nodes=1,
    weight_bytes=0,
)
RTX = "{backend: tensorrt_rtx, gpus: [sm86]}"
TENSORRT = "{backend: tensorrt, gpus: [A100]}"
INT8 = "precision: {type: int8}\ncalibration: {data: x.npz}"

# Members of BuilderFlag and HardwareCompatibilityLevel in the Python bindings of these releases.
STRICT_NANS_IN_BINDINGS = {"8.6.1": False, "10.0.1": False, "10.3.0": False, "10.7.0": True, "11.4.0": True}
SAME_CAPABILITY_IN_BINDINGS = {"10.0.1": False, "10.7.0": False, "10.9.0": True, "11.4.0": True}
EDITABLE_IN_BINDINGS = {"8.6.1": False, "10.7.0": False, "10.9.0": True, "11.4.0": True}
CUBLAS_IN_BINDINGS = {"8.6.1": True, "10.16.1": True, "11.0.0": False, "11.4.0": False}


@pytest.fixture
def spec(tmp_path):
    def spec_of(targets=RTX, text=""):
        path = tmp_path / "spec.yaml"
        path.write_text(f"version: 1\nname: net\nmodel: {{onnx: m.onnx}}\ntargets: [{targets}]\n{text}")
        return load_spec(path)

    return spec_of


@pytest.fixture
def refused(spec):
    def refused_of(version, graph=GRAPH, targets=TENSORRT, text="", target_index=-1):
        spec_file = spec(targets, text)
        target_index %= len(spec_file.spec.targets)
        row = capability(spec_file.spec.targets[target_index].backend, version)
        problems = refusals(spec_file, target_index, graph, row)
        assert all(problem.exit_code == 6 and problem.next_step and problem.where for problem in problems)
        return problems

    return refused_of


def test_versions_are_looked_up_by_number():
    assert capability("tensorrt_rtx", "1.7.1.116").version == "1.7"
    assert capability("tensorrt", "10.10").version == "10.10"
    assert newest_version("tensorrt") == "11.4"
    assert version_numbers("10.10") > version_numbers("10.9")
    known = known_versions("tensorrt")
    assert list(known) == sorted(known, key=version_numbers)


@pytest.mark.parametrize(
    ("backend", "version", "expected"),
    [("tensorrt", "9.1", "8.6 to 11.4"), ("tensorrt", "10", "8.6 to 11.4"), ("tensorrt_rtx", "1.4.0.76", "knows 1.7")],
)
def test_unknown_version_gives_the_known_range(backend, version, expected):
    with pytest.raises(CapabilityError, match=expected):
        capability(backend, version)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row_is_consistent(row):
    settings = {field.name for field in fields(BuilderSettings)}
    assert row.sources
    assert row.min_opset <= row.documented_max_opset <= row.max_opset
    assert row.unsupported_operators <= OPERATORS
    assert not row.unsupported_operators & row.own_operators
    assert {key.partition("=")[0] for key in row.settings} <= settings
    assert row.precisions.keys() == {"fp32", "fp16", "bf16", "int8", "fp8", "int4", "fp4"}
    numbers = [int(sm[2:]) for sm in row.compute_capabilities]
    assert numbers == sorted(numbers)


@pytest.mark.parametrize(
    ("setting", "seen"),
    [
        ("strict_nans", STRICT_NANS_IN_BINDINGS),
        ("hardware_compatibility=same_compute_capability", SAME_CAPABILITY_IN_BINDINGS),
        ("tactic_sources=cublas", CUBLAS_IN_BINDINGS),
        ("record_tactics", EDITABLE_IN_BINDINGS),
    ],
)
def test_settings_agree_with_the_python_bindings(setting, seen):
    assert {version: setting not in capability("tensorrt", version).settings for version in seen} == seen


@pytest.mark.parametrize(
    ("version", "opset", "is_refused"),
    [
        *(("8.6", 17, False), ("8.6", 18, True), ("10.0", 20, False), ("10.5", 21, True), ("10.7", 22, False)),
        *(("11.4", 24, False), ("11.4", 25, True), ("11.4", 8, True)),
    ],
)
def test_opset(refused, version, opset, is_refused):
    problems = refused(version, replace(GRAPH, opsets=(("", opset),)))
    assert [f"the model has {opset}" in problem.summary for problem in problems] == [True] * is_refused


def test_operator_definition_newer_than_the_parser(refused):
    """C15: the opset is read, one operator's definition in it is not."""
    use = OperatorUse("", "GroupNormalization", "", ("gn",), 21)
    graph = replace(GRAPH, opsets=(("", 21),), operators=(use,))
    (problem,) = refused("10.7", graph)
    assert "GroupNormalization of opset 21: node 'gn'" in problem.summary
    assert not refused("10.9", graph)


@pytest.mark.parametrize("targets", [RTX, TENSORRT])
def test_every_custom_operator_is_found_at_once(refused, targets):
    """C18: three findings, the one inside If included."""
    operators = (
        OperatorUse("com.microsoft", "FusedThing", "", ("n1",), 0),
        OperatorUse("mmdeploy", "TRTBatchedNMSish", "", ("n2",), 0),
        OperatorUse("", "If", "", ("n3",), 16),
        OperatorUse("acme.ops", "MysteryNorm", "n3/then_branch", ("in_if",), 0),
    )
    problems = refused("1.7.1" if targets == RTX else "10.9", replace(GRAPH, operators=operators), targets)
    summaries = [problem.summary.partition(" has no ")[2] for problem in problems]
    assert summaries == [
        "operator FusedThing of domain com.microsoft: node 'n1'",
        "operator TRTBatchedNMSish of domain mmdeploy: node 'n2'",
        "operator MysteryNorm of domain acme.ops: node 'n3/then_branch/in_if'",
    ]
    assert "optimiser" in problems[0].next_step


def test_unsupported_operator_shows_three_nodes_and_the_count(refused):
    use = OperatorUse("", "Det", "", ("a", "b", "c", "d", "e"), 11)
    (problem,) = refused("11.4", replace(GRAPH, operators=(use,)))
    assert "operator Det of opset 11: 5 nodes, 'a', 'b', 'c' and 2 more" in problem.summary


@pytest.mark.parametrize(
    ("version", "domain", "is_refused"), [("8.6", "loc", True), ("10.0", "loc", False), ("10.0", "ai.onnx.ml", True)]
)
def test_function_defined_in_the_model(refused, version, domain, is_refused):
    """Ingest gives functions that the model defines a version; ai.onnx.ml has versions of its own."""
    problems = refused(version, replace(GRAPH, operators=(OperatorUse(domain, "Thing", "", ("f",), 1),)))
    assert len(problems) == is_refused


def test_operator_that_no_standard_knows(refused):
    (problem,) = refused("10.9", replace(GRAPH, operators=(OperatorUse("", "Frobnicate", "", ("f",), 0),)))
    assert "no operator of the ONNX standard" in problem.detail[0]


@pytest.mark.parametrize(
    ("version", "targets", "dtype", "reason"),
    [
        ("1.7.1", RTX, "float64", "silently makes it float32"),
        ("1.7.1", RTX, "string", "split the tokenizer off"),
        ("1.7.1", RTX, "int16", "no such type"),
        ("1.7.1", RTX, "uint8", None),
        ("1.7.1", RTX, "bool", None),
        ("8.6", TENSORRT, "bfloat16", "from 10.0 on"),
        ("8.6", TENSORRT, "int64", None),
        ("11.4", TENSORRT, "float8e5m2", "no such type"),
    ],
)
def test_io_dtypes(refused, version, targets, dtype, reason):
    """C14."""
    problems = refused(version, replace(GRAPH, inputs=(replace(X, dtype=dtype),)), targets)
    assert len(problems) == (reason is not None)
    assert all("input 'x'" in problem.summary and reason in problem.summary for problem in problems)


@pytest.mark.parametrize(
    ("graph", "text", "expected"),
    [
        (replace(GRAPH, element_types=("float32", "float16")), "", "carries float16"),
        (replace(GRAPH, has_qdq=True), "precision: {type: fp32}", "QuantizeLinear"),
        (replace(GRAPH, element_types=("float16",)), "precision: {type: as_model}", None),
        (GRAPH, "precision: {type: as_model}", None),
        (GRAPH, "precision: {type: fp16}", None),
        (GRAPH, "precision: {type: fp8}", "lowers to fp16, bf16 and int8 only"),
        (GRAPH, INT8, None),
        (replace(GRAPH, has_qdq=True), INT8, "carries QuantizeLinear or DequantizeLinear already"),
        (replace(GRAPH, has_qdq=True), "precision: {type: fp16}", "carries QuantizeLinear or DequantizeLinear already"),
    ],
)
def test_precision(refused, graph, text, expected):
    problems = refused("1.7.1", graph, RTX, text)
    assert [expected in problem.summary for problem in problems] == [True] * (expected is not None)
    assert all("{type: as_model}" in problem.next_step for problem in problems)


@pytest.mark.parametrize(
    ("version", "targets", "rest", "expected"),
    [
        ("1.7.1", RTX, "fp16", None),
        ("1.7.1", RTX.replace("sm86", "sm75"), "fp16", None),
        ("1.7.1", RTX.replace("sm86", "sm75"), "bf16", "lacks bf16"),
        ("1.7.1", RTX.replace("sm86", "sm75"), "fp32", "has no FP32 matrix products"),
        ("8.6", TENSORRT, "bf16", "cannot build rest: bf16"),
    ],
)
def test_what_int8_is_composed_with(refused, version, targets, rest, expected):
    graph = replace(GRAPH, operators=(OperatorUse("", "MatMul", "", ("product",), 13),))
    problems = refused(version, graph, targets, INT8.replace("int8", f"int8, rest: {rest}"))
    assert [expected in problem.summary for problem in problems] == [True] * (expected is not None)


def test_int8_without_calibration_is_refused_once(spec):
    spec_file = spec(f"{RTX}, {RTX.replace('sm86', 'sm89')}", "precision: {type: int8}")
    (problem,) = [
        problem for index in (0, 1) for problem in refusals(spec_file, index, GRAPH, capability("tensorrt_rtx", "1.7"))
    ]
    assert problem.exit_code == SpecError.exit_code
    assert "takes its scales from real inputs, and the spec has no calibration" in problem.summary
    assert problem.next_step == "add a line 'calibration: {data: samples.npz}'"


def test_keep_without_lowering_is_refused(refused):
    (problem,) = refused("1.7.1", GRAPH, RTX, "precision: {keep: {fp32: [a]}}")
    assert "keep has no effect with type fp32" in problem.summary


def test_keep_rest_without_int8_is_refused(refused):
    (problem,) = refused("1.7.1", GRAPH, RTX, "precision: {type: fp16, keep: {rest: [a]}}")
    assert "keep.rest has no effect with type fp16" in problem.summary


def test_bf16_on_8_6_names_the_version_that_has_it(refused):
    (problem,) = refused("8.6", text="precision: {type: bf16}")
    assert "from 10.0 on" in problem.summary


@pytest.mark.parametrize(
    ("version", "targets", "reason"), [("11.4", TENSORRT, "removed calibrators"), ("1.7.1", RTX, "no calibrators")]
)
def test_implicit_quantization_where_there_is_no_calibrator(refused, version, targets, reason):
    """C47: a sentence, never an AttributeError."""
    (problem,) = refused(version, GRAPH, targets, "precision: {quantization: implicit}")
    assert reason in problem.summary


_CALIBRATED = "calibration: {data: x.npz}"


@pytest.mark.parametrize("version", ["8.6", "10.0", "10.16"])
def test_implicit_quantization_where_there_is_a_calibrator(refused, version):
    assert not refused(version, GRAPH, TENSORRT, "precision: {type: int8, quantization: implicit}\n" + _CALIBRATED)


@pytest.mark.parametrize(
    ("precision", "reason"),
    [
        ("quantization: implicit", "a way to INT8, and precision.type is fp32"),
        ("type: fp16, quantization: implicit", "a way to INT8, and precision.type is fp16"),
        ("type: int8, quantization: implicit, rest: bf16", "in fp16 or fp32, not in bf16"),
        ("type: int8, quantization: implicit, keep: {fp32: [a]}", "precision.keep has no effect"),
        ("type: int8, quantization: implicit, keep: {rest: [a]}", "precision.keep has no effect"),
    ],
)
def test_what_implicit_quantization_cannot_do(refused, precision, reason):
    (problem,) = refused("10.9", GRAPH, TENSORRT, f"precision: {{{precision}}}\n" + _CALIBRATED)
    assert reason in problem.summary


@pytest.mark.parametrize(
    ("version", "flags"), [("8.6", ("EXPLICIT_BATCH",)), ("10.0", ()), ("10.16", ()), ("11.0", ())]
)
def test_a_calibrator_gets_a_weakly_typed_network(version, flags):
    assert capability("tensorrt", version).flags_of_network(implicit=True) == flags


def test_precision_that_one_gpu_lacks(refused):
    graph = replace(GRAPH, element_types=("float32", "float8e4m3fn"), has_qdq=True)
    targets = "{backend: tensorrt_rtx, gpus: [sm86, sm89]}"
    (problem,) = refused("1.7.1", graph, targets, "precision: {type: as_model}")
    assert problem.summary.startswith("GPU 'sm86' (sm86) lacks fp8")
    assert problem.where.line == 4


def test_fp32_matrix_product_on_turing(refused):
    graph = replace(GRAPH, operators=(OperatorUse("", "MatMul", "", ("mm",), 13),))
    (problem,) = refused("1.7.1", graph, "{backend: tensorrt_rtx, gpus: [sm75, sm86]}")
    assert "no FP32 matrix products on sm75" in problem.summary
    assert not refused("11.4", graph, "{backend: tensorrt, gpus: [T4]}")


@pytest.mark.parametrize(
    ("targets", "version", "summary", "step"),
    [
        ("{backend: tensorrt_rtx, gpus: [sm90]}", "1.7.1", "tensorrt_rtx 1.7 cannot target sm90", "backend: tensorrt"),
        ("{backend: tensorrt_rtx, gpus: [RTX 4090]}", "1.7.1", "is a GPU model", "write sm89"),
        ("{backend: tensorrt_rtx, gpus: [fast]}", "1.7.1", "no compute capability", "sm86"),
        ("{backend: tensorrt, gpus: [sm86]}", "10.9", "is a compute capability", "A10"),
        ("{backend: tensorrt, gpus: [A1000000]}", "10.9", "unknown GPU model", "A100"),
        ("{backend: tensorrt, gpus: [V100]}", "10.9", "cannot target V100 (sm70)", "older TensorRT"),
        ("{backend: tensorrt, gpus: [B200]}", "10.5", "cannot target B200 (sm100)", "install tensorrt 11.4"),
        ("{backend: tensorrt, gpus: [A100, a-100]}", "10.9", "a second time (first as 'A100')", "remove one"),
        ("{backend: tensorrt_rtx, gpus: [sm86, '8.6']}", "1.7.1", "a second time", "remove one"),
        (f"{TENSORRT}, {TENSORRT}", "10.9", "a second time", "remove one"),
    ],
)
def test_gpus(refused, targets, version, summary, step):
    (problem,) = refused(version, GRAPH, targets)
    assert summary in problem.summary
    assert step in problem.next_step


@pytest.mark.parametrize(
    ("version", "targets", "setting", "is_refused"),
    [
        *(("1.7.1", RTX, setting, True) for setting in ("refit: true", "strip_weights: true")),
        ("1.7.1", RTX, "version_compatible: true", True),
        ("1.7.1", RTX, "hardware_compatibility: ampere_plus", True),
        ("1.7.1", RTX, "tactic_sources: [jit_convolutions]", False),
        ("1.7.1", RTX, "record_tactics: true", True),
        ("1.7.1", RTX, "weight_streaming: true", False),
        ("1.7.1", RTX, "optimization_level: 5", False),
        ("11.0", TENSORRT, "tactic_sources: [cudnn]", True),
        ("10.16", TENSORRT, "tactic_sources: [cudnn]", False),
        ("10.8", TENSORRT, "hardware_compatibility: same_compute_capability", True),
        ("10.10", TENSORRT, "hardware_compatibility: same_compute_capability", False),
        ("10.5", TENSORRT, "strict_nans: true", True),
        ("8.6", TENSORRT, "weight_streaming: true", True),
        ("1.7.1", RTX, "avg_timing_iterations: 4", True),
        ("8.6", TENSORRT, "refit: true, version_compatible: true", True),
        ("10.9", TENSORRT, "refit: true, version_compatible: true", False),
        ("10.9", TENSORRT, "avg_timing_iterations: 4", False),
        ("10.9", "{backend: tensorrt, gpus: [T4]}", "hardware_compatibility: ampere_plus", True),
        ("10.16", "{backend: tensorrt, gpus: [Jetson Thor]}", "hardware_compatibility: ampere_plus", True),
        ("10.16", "{backend: tensorrt, gpus: [Jetson Orin]}", "hardware_compatibility: same_compute_capability", True),
    ],
)
def test_settings(refused, version, targets, setting, is_refused):
    problems = refused(version, GRAPH, targets, f"builder: {{{setting}}}")
    assert len(problems) == is_refused
    assert all(setting.partition(":")[0] in problem.summary for problem in problems)


def test_settings_have_their_place(refused):
    (problem,) = refused("1.7.1", GRAPH, RTX, "builder:\n  refit: true\n")
    assert problem.where.line == 6


def test_wide_constants_are_a_warning_on_8_6_only(spec):
    """C13."""
    graph = replace(GRAPH, wide_int_constants=("big",))
    (problem,) = warnings(spec(TENSORRT), 0, graph, capability("tensorrt", "8.6"))
    assert "'big'" in problem.summary
    assert not warnings(spec(TENSORRT), 0, graph, capability("tensorrt", "10.0"))


def test_other_warnings(spec):
    int64 = replace(GRAPH, inputs=(replace(X, dtype="int64"),))
    (narrowed,) = warnings(spec(TENSORRT), 0, int64, capability("tensorrt", "8.6"))
    assert "'x' is int64 in the model and will be int32" in narrowed.summary
    opset_21 = replace(GRAPH, opsets=(("", 21),))
    (undocumented,) = warnings(spec(TENSORRT), 0, opset_21, capability("tensorrt", "10.9"))
    assert "above 20" in undocumented.summary
    (off_label,) = warnings(
        spec("{backend: tensorrt_rtx, gpus: [sm80, sm86]}"), 0, GRAPH, capability("tensorrt_rtx", "1.7")
    )
    assert "'sm80'" in off_label.summary


def test_target_compute_capability():
    assert target_compute_capability("tensorrt", "H200") == "sm90"
    assert target_compute_capability("tensorrt_rtx", "8.6") == "sm86"
