from __future__ import annotations

import re

import pytest

from trtforge.backends import builder_log
from trtforge.backends.builder_log import error_lines, explain, matching_warnings, readable_warning
from trtforge.types import BuilderMessage

NO_GPU = (
    "[checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda Runtime (In catchCudaError at "
    "/_src/common/dispatch/checkMacros.cpp:250 (cudaError 35: CUDA driver version is insufficient for CUDA runtime version))"
)
MISSING = (
    "IBuilder::buildSerializedNetwork: Error Code 4: API Usage Error (Dynamic input tensor b is missing dimensions in "
    "profile 0. In validate at /_src/optimizer/api/network.cpp:4046)"
)


def error(text):
    return BuilderMessage("error", text)


def test_explanation_names_what_the_line_names():
    (found,) = explain([error(NO_GPU), error(MISSING), error(MISSING)])
    assert found.cause == "profile 0 says nothing about the dynamic input 'b'"
    assert found.next_step == "add 'b' with min, opt and max to that profile"
    assert found.message.text == MISSING


def test_every_unsupported_operator_is_told_once():
    lines = [
        "UNSUPPORTED_NODE in Det 'd1': false",
        "UNSUPPORTED_NODE in Unique 'u': false",
        "UNSUPPORTED_NODE in Det 'd1': false",
    ]
    assert [found.cause for found in explain(map_errors(lines))] == [
        "operator Det (node 'd1') is not supported",
        "operator Unique (node 'u') is not supported",
    ]


def map_errors(lines):
    return [error(line) for line in lines]


@pytest.mark.parametrize("severity", ["warning", "info", "verbose"])
def test_only_errors_are_explained(severity):
    assert explain([BuilderMessage(severity, MISSING)]) == []


def test_unknown_text_and_braces_are_left_alone():
    assert explain([error("Assertion {0} failed: {unknown}")]) == []
    (found,) = explain([error("Dynamic input tensor {x} is missing dimensions in profile 0")])
    assert "'{x}'" in found.cause


def test_a_missing_driver_is_the_cause_only_if_nothing_else_went_wrong():
    assert explain([error(NO_GPU), error("Assertion failed: something new")]) == []
    (found,) = explain([error(NO_GPU)])
    assert "CUDA error 35" in found.cause
    assert found.next_step.startswith("nvidia-smi")


NO_KERNEL = (
    "[optimizer.cpp::computeCosts::2011] Error Code 10: Internal Error (Could not find any implementation for node "
)
FOREIGN = "{ForeignNode[onnx::Gather_72...ScatterND_170]}"


def warning(text):
    return BuilderMessage("warning", text)


QUOTED = [
    (
        f"no kernel for '{FOREIGN}' gets along with the scratch memory that builder.workspace_mib",
        [error(f"{NO_KERNEL}{FOREIGN} due to insufficient workspace. See verbose log for requested sizes.)")],
    ),
    (
        f"no kernel for '{FOREIGN}' could be tried, as the GPU's memory",
        [
            warning("Skipping tactic 0 due to insuficient memory on requested size of 29147520 detected for tactic 0."),
            error(f"{NO_KERNEL}{FOREIGN}.)"),
        ],
    ),
    (
        "no kernel for 'MaxPool_5' could be tried, as the GPU's memory",
        [
            warning("Tactic Device request: 4364MB Available: 3788MB. Device memory is insufficient to use tactic."),
            error(f"{NO_KERNEL}MaxPool_5.)"),
        ],
    ),
    ("this TensorRT has no kernel for 'ArgMax_260' on this GPU", [error(f"{NO_KERNEL}ArgMax_260.)")]),
    (
        "operator SequenceConstruct is none that TensorRT's parser knows",
        [error("3: getPluginCreator could not find plugin: SequenceConstruct version: 1")],
    ),
    (
        "libnvinfer_lean.so.1 is not where libraries are looked for",
        [
            error(
                "IBuilder::buildSerializedNetwork: Error Code 6: API Usage Error (Unable to load library: "
                "libnvinfer_lean.so.1: libnvinfer_lean.so.1: cannot open shared object file: No such file or directory)"
            )
        ],
    ),
    (
        "TensorRT 8.6 does not take INT8 weights of MatMul",
        [
            error(
                "2: [graphOptimizer.cpp::convertMyelinWeightsToFp32::7903] Error Code 2: Internal Error (Assertion "
                "params.weights.type() != DataType::kINT8 failed. )"
            )
        ],
    ),
    (
        "(CUDA error 35)",
        [warning("CUDA initialization failure with error: 35. Please check your CUDA installation:  http://docs")],
    ),
    (
        "(CUDA error 100)",
        [error("Cuda initialization failure with error 100. Please check cuda installation: http://docs")],
    ),
    (
        "the GPU's memory is too small or in use",
        [error("2: [virtualMemoryBuffer.cpp::resizePhysical::160] Error Code 2: OutOfMemory (no further information)")],
    ),
    (
        "the GPU's memory is too small or in use",
        [error("[defaultAllocator.cpp::allocate::19] Error Code 1: Cuda Runtime (out of memory)")],
    ),
    (
        "this TensorRT does not build for sm61",
        [
            error(
                "IBuilder::buildSerializedNetwork: Error Code 9: API Usage Error (Target GPU SM 61 is not supported by "
                "this TensorRT release.)"
            )
        ],
    ),
    (
        "the engine is for sm75, and this GPU is sm86",
        [
            error(
                "The engine plan file is generated on an incompatible device, expecting compute 8.6 got compute 7.5, "
                "please rebuild."
            )
        ],
    ),
    (
        "the engine was built by TensorRT 8.2.1, and 8.2.3 loads it",
        [
            error(
                "6: The engine plan file is not compatible with this version of TensorRT, expecting library version 8.2.3 "
                "got 8.2.1, please rebuild."
            )
        ],
    ),
    (
        "another version of TensorRT than the one that loads it (format 237 against 236)",
        [
            error(
                "1: [stdArchiveReader.cpp::StdArchiveReaderInitCommon::46] Error Code 1: Serialization (Serialization "
                "assertion stdVersionRead == serializationVersion failed.Version tag does not match. Note: Current "
                "Version: 236, Serialized Engine Version: 237)"
            )
        ],
    ),
]
"""What people reported of other TensorRT versions and of machines with a GPU; the table names where."""


@pytest.mark.parametrize(("cause", "log"), QUOTED)
def test_what_was_reported_elsewhere_is_explained(cause, log):
    (found,) = explain(log)
    assert cause in found.cause
    assert found.next_step


def test_every_row_of_the_gpu_table_has_a_source_and_a_quotation():
    explained = {explain(log)[0].cause for _, log in QUOTED}
    for row in builder_log._GPU_TABLE:
        assert row.source.startswith(("https://", "seen with "))
        cause = re.sub(r"\\{\w+\\}", ".+", re.escape(row.cause))
        assert any(re.fullmatch(cause, found) for found in explained), row.cause


def test_error_lines_leave_out_echoes():
    messages = [
        error(NO_GPU),
        error('ModelImporter.cpp:140: While parsing node number 0 [Det -> "y"]:'),
        error("first\nsecond"),
        BuilderMessage("warning", "only a warning"),
        error("second"),
    ]
    assert error_lines(messages) == ["first", "second"]


def test_missing_driver_is_shown_when_it_is_all_there_is():
    assert error_lines([error(NO_GPU)]) == [NO_GPU]


def test_a_timing_cache_that_is_not_used_is_no_cause():
    messages = [
        error("1: [myelinCache.h::deserializeFromBuffer::52] Error Code 1: Myelin (Myelin error from unknown graph)"),
        error("4: The timing cache will not be used!"),
        error("4: Could not find any implementation for node topk due to insufficient workspace."),
    ]

    assert error_lines(messages) == [
        "4: Could not find any implementation for node topk due to insufficient workspace."
    ]


@pytest.mark.parametrize(
    ("glob", "matches"),
    [
        ("*int64 BINDING*", True),
        ("make sure*", True),
        ("make sure", False),
        ("*second line*", True),
        ("*[[]MS]*", False),
    ],
)
def test_matching_warnings(glob, matches):
    warning = BuilderMessage("warning", "Make sure input x has Int64 binding.\nSecond line.")
    messages = [warning, error("Make sure Int64 binding"), BuilderMessage("info", "Int64 binding")]
    assert matching_warnings(messages, ["nothing", glob]) == ((warning,) if matches else ())


def test_matching_warnings_without_globs():
    assert matching_warnings([BuilderMessage("warning", "x")], []) == ()


def test_five_lines_about_weights_become_one():
    """As TensorRT 8.6 logs them."""
    log = [
        "TensorRT encountered issues when converting weights between types and that could affect accuracy.",
        "If this is not the desired behavior, please modify the weights or retrain with regularization to adjust them.",
        "Check verbose logs for the list of affected weights.",
        "- 29 weights are affected by this issue: Detected subnormal FP16 values.",
    ]
    assert [text for line in log if (text := readable_warning(line))] == [
        "29 weights are below 6.1e-5, where FP16 has fewer digits"
    ]


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        (", , , ln/mul, ln/add_beta", "LayerNorm in FP16, which may overflow: ln/mul, ln/add_beta"),
        (", , , , ", ""),
    ],
)
def test_layer_norms_are_named_without_those_that_stay_in_fp32(nodes, told):
    assert readable_warning(f"Detected layernorm nodes in FP16: {nodes}") == told


def test_other_warnings_stay_as_they_are():
    assert readable_warning("{odd} [text], - 3 weights") == "{odd} [text], - 3 weights"
