from __future__ import annotations

import pytest

from trtforge.backends.builder_log import error_lines, explain, matching_warnings
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
