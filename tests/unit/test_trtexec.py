"""The command of TensorRT's own tool for the same engine."""

from __future__ import annotations

import shlex

import pytest

from trtforge.backends.trtexec import trtexec_command
from trtforge.types import BuildUnit, Profile, ShapeRange

FIXED, MOVING = ShapeRange((1,), (1,), (1,)), ShapeRange((1, 3), (4, 3), (8, 3))


def words(version, *, profiles=1, tf32=True, nodes=(), **changes):
    request = {
        "plugins": [],
        "calibration": None,
        "network_flags": (),
        "flags": {"TF32": tf32},
        "numbers": {"builder_optimization_level": 3, "avg_timing_iterations": 8},
        "memory_pools": {},
        "enums": {"profiling_verbosity": ("ProfilingVerbosity", "NONE")},
        "preview_features": (),
        "tactic_sources": None,
        "timing_cache_path": None,
        "locked_timing_path": None,
    } | changes
    shapes = {"x": MOVING, "y": FIXED}
    all_profiles = tuple(Profile(f"p{number}", shapes, {"y": FIXED} if number else {}) for number in range(profiles))
    unit = BuildUnit("net", "tensorrt", version, "T4", "sm75", "fp32", tf32, {}, "0" * 64, all_profiles)
    return shlex.split(trtexec_command(unit, request, "net.onnx", list(nodes)))


BASE = ["trtexec", "--onnx=net.onnx", "--saveEngine=net.engine", "--skipInference"]
SHAPES = ["--minShapes=x:1x3", "--optShapes=x:4x3", "--maxShapes=x:8x3"]


def test_the_least():
    settings = ["--builderOptimizationLevel=3", "--avgTiming=8", "--profilingVerbosity=none"]
    assert words("10.9.0.34") == [*BASE, *SHAPES, *settings]


def test_several_profiles_are_numbered_and_values_are_shapes():
    found = words("10.9.0.34", profiles=2)

    assert [word for word in found if word.startswith(("--profile=", "--min"))] == [
        "--profile=0",
        "--minShapes=x:1x3",
        "--profile=1",
        "--minShapes=x:1x3,y:1",
    ]


def test_8_6_has_no_option_for_a_second_profile():
    assert words("8.6.1", profiles=2) == []


@pytest.mark.parametrize(
    ("version", "change", "option"),
    [
        ("8.6.1", {"flags": {"FP16": True}}, "--fp16"),
        ("8.6.1", {"flags": {"INT8": True}}, "--int8"),
        ("8.6.1", {"tf32": False, "flags": {}}, "--noTF32"),
        ("10.0.1", {"network_flags": ("STRONGLY_TYPED",)}, "--stronglyTyped"),
        ("10.0.1", {"flags": {"STRIP_PLAN": True}}, "--stripWeights"),
        ("8.6.1", {"preview_features": ("PROFILE_SHARING_0806",)}, "--preview=+profileSharing0806"),
        ("10.0.1", {"memory_pools": {"WORKSPACE": 3 << 20}}, "--memPoolSize=workspace:3"),
        ("10.0.1", {"tactic_sources": ["CUDNN"]}, "--tacticSources=-CUBLAS,-CUBLAS_LT,+CUDNN,-EDGE_MASK_CONVOLUTIONS,-JIT_CONVOLUTIONS"),
        ("11.0.0", {"tactic_sources": ["JIT_CONVOLUTIONS"]}, "--tacticSources=-EDGE_MASK_CONVOLUTIONS,+JIT_CONVOLUTIONS"),
        ("8.6.1", {"nodes": ["ln/a b", "c"]}, "--layerPrecisions=ln/a b:fp32,c:fp32"),
        ("10.9.0.34", {"flags": {"ERROR_ON_TIMING_CACHE_MISS": True}}, "--errorOnTimingCacheMiss"),
        ("10.9.0.34", {"locked_timing_path": "/a/b.timing"}, "--timingCacheFile=timing.cache"),
        ("8.6.1", {"plugins": ["/a/libx.so"]}, "--staticPlugins=libx.so"),
        ("8.6.1", {"calibration": {"path": "/a/c.cache"}}, "--calib=c.cache"),
    ],
)  # fmt: skip
def test_an_option_for_each_setting(version, change, option):
    assert option in words(version, **change)
