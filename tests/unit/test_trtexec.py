"""The command of TensorRT's own tool for the same engine."""

from __future__ import annotations

import shlex

import pytest

from trtforge.backends.trtexec import trtexec_command, trtexec_gap
from trtforge.types import BuildUnit, Profile, ShapeRange

FIXED, MOVING = ShapeRange((1,), (1,), (1,)), ShapeRange((1, 3), (4, 3), (8, 3))


def asked(version, *, profiles=1, tf32=True, nodes=(), **changes):
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
        "inputs": [{"name": "x", "shape": ("rows", 3)}, {"name": "y", "shape": (1,)}],
        "timing_cache_path": None,
        "locked_timing_path": None,
    } | changes
    shapes = {"x": MOVING, "y": FIXED}
    all_profiles = tuple(Profile(f"p{number}", shapes, {"y": FIXED} if number else {}) for number in range(profiles))
    unit = BuildUnit("net", "tensorrt", version, "T4", "sm75", "fp32", tf32, {}, "0" * 64, all_profiles)
    return shlex.split(trtexec_command(unit, request, "net.onnx", list(nodes))), trtexec_gap(unit, request)


def words(version, **changes):
    return asked(version, **changes)[0]


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


@pytest.mark.parametrize(
    ("version", "change", "gap"),
    [
        ("8.6.1", {"profiles": 2}, "no trtexec command asks for this engine: that of 8.6.1 takes one profile"),
        (
            "10.0.1",
            {"calibration": {"path": "/a/c.cache", "calibrator": "IInt8MinMaxCalibrator"}},
            "no trtexec command asks for this engine: its calibrator is IInt8EntropyCalibrator2",
        ),
    ],
)
def test_what_no_command_asks_for_says_so(version, change, gap):
    assert asked(version, **change) == ([], gap)


def test_what_the_command_leaves_out_is_told():
    found, gap = asked("10.9.0.34", flags={"STRICT_NANS": True, "EDITABLE_TIMING_CACHE": True, "REFIT": True})

    assert "--refit" in found
    assert gap == (
        "the trtexec command leaves out builder.strict_nans and builder.record_tactics, for which it has no option"
    )


def test_an_open_axis_is_named_even_where_its_profile_has_one_size():
    found = words("10.9.0.34", inputs=[{"name": "y", "shape": ("n",)}, {"name": "x", "shape": (8, 3)}])

    assert [word for word in found if "Shapes" in word] == ["--minShapes=y:1", "--optShapes=y:1", "--maxShapes=y:1"]


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
        ("8.6.1", {"calibration": {"path": "/a/c.cache", "calibrator": "IInt8EntropyCalibrator2"}}, "--calib=c.cache"),
    ],
)  # fmt: skip
def test_an_option_for_each_setting(version, change, option):
    assert option in words(version, **change)
