"""The command of TensorRT's own tool that asks for the same engine, for people who want to compare or report."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Final

from trtforge.types import BuildUnit, ShapeRange

_FLAGS: Final = {
    "FP16": "--fp16",
    "INT8": "--int8",
    "SPARSE_WEIGHTS": "--sparsity=enable",
    "REFIT": "--refit",
    "STRIP_PLAN": "--stripWeights",
    "VERSION_COMPATIBLE": "--versionCompatible",
    "WEIGHT_STREAMING": "--allowWeightStreaming",
    "OBEY_PRECISION_CONSTRAINTS": "--precisionConstraints=obey",
    "ERROR_ON_TIMING_CACHE_MISS": "--errorOnTimingCacheMiss",
}
"""Builder flag -> option. Source: samples/common/sampleOptions.cpp of TensorRT 8.6, 10.16 and 11.1."""
_WITHOUT_OPTION: Final = {
    "builder.strict_nans": "STRICT_NANS",
    "builder.record_tactics": "EDITABLE_TIMING_CACHE",
}
_CALIBRATOR: Final = "IInt8EntropyCalibrator2"
"""Source: samples/common/sampleEngines.cpp of 8.6 and 10.16."""
_LEVELS: Final = {"AMPERE_PLUS": "ampere+", "SAME_COMPUTE_CAPABILITY": "sameComputeCapability"}
_PREVIEWS: Final = {"PROFILE_SHARING_0806": "profileSharing0806"}
_ALL_SOURCES: Final = ("CUBLAS", "CUBLAS_LT", "CUDNN", "EDGE_MASK_CONVOLUTIONS", "JIT_CONVOLUTIONS")
_NEWER_SOURCES: Final = _ALL_SOURCES[3:]
_FIRST_WITHOUT_LIBRARIES: Final = 11
"""Major version without cuBLAS and cuDNN tactics."""
_FIRST_WITH_PROFILES: Final = 10
_MIB: Final = 1 << 20


def trtexec_command(unit: BuildUnit, request: Mapping[str, Any], model_name: str, float32_nodes: list[str]) -> str:
    """One line for a shell, with file names without folders; "" where trtexec cannot ask for it, see `trtexec_gap`.

    Args:
        unit: what is built.
        request: to the worker, see `trtforge.backends.engine_build`.
        model_name: file name of the ONNX model that is parsed.
        float32_nodes: that are bound to FP32, by the names that TensorRT's parser gives their layers.
    """
    if _why_no_command(unit, request):
        return ""
    words = ["trtexec", f"--onnx={model_name}", f"--saveEngine={unit.identifier}.engine", "--skipInference"]
    words += _profiles(unit, request)
    words += _settings(unit, request)
    words += [f"--staticPlugins={path.rsplit('/', 1)[-1]}" for path in request["plugins"]]
    if request["calibration"]:
        words.append(f"--calib={request['calibration']['path'].rsplit('/', 1)[-1]}")
    for option in ("layerPrecisions", "layerOutputTypes") if float32_nodes else ():
        words.append(f"--{option}=" + ",".join(f"{name}:fp32" for name in float32_nodes))
    return " ".join(shlex.quote(word) for word in words)


def trtexec_gap(unit: BuildUnit, request: Mapping[str, Any]) -> str:
    """A sentence on what trtexec cannot ask for; "" where its command asks for the same engine."""
    if reason := _why_no_command(unit, request):
        return f"no trtexec command asks for this engine: {reason}"
    missing = [name for name, flag in _WITHOUT_OPTION.items() if request["flags"].get(flag)]
    return f"the trtexec command leaves out {' and '.join(missing)}, for which it has no option" if missing else ""


def _why_no_command(unit: BuildUnit, request: Mapping[str, Any]) -> str:
    """Why, "" where there is one. Its only calibrator reads caches of entropy, and measures anew on noise if it finds another."""
    if len(unit.profiles) > 1 and _major(unit) < _FIRST_WITH_PROFILES:
        return f"that of {unit.backend_version} takes one profile"
    if request["calibration"] and request["calibration"]["calibrator"] != _CALIBRATOR:
        return f"its calibrator is {_CALIBRATOR}"
    return ""


def _profiles(unit: BuildUnit, request: Mapping[str, Any]) -> Iterator[str]:
    is_open = {
        entry["name"]: any(not isinstance(size, int) for size in entry["shape"] or ()) for entry in request["inputs"]
    }
    for number, profile in enumerate(unit.profiles):
        if len(unit.profiles) > 1:
            yield f"--profile={number}"
        ranges: Mapping[str, ShapeRange] = {**profile.shapes, **profile.values}
        moving = {name: entry for name, entry in ranges.items() if is_open.get(name) or name in profile.values}
        for point in ("min", "opt", "max") if moving else ():
            shapes = ",".join(f"{name}:{_joined(getattr(entry, point))}" for name, entry in moving.items())
            yield f"--{point}Shapes={shapes}"


def _joined(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


def _settings(unit: BuildUnit, request: Mapping[str, Any]) -> Iterator[str]:
    if "STRONGLY_TYPED" in request["network_flags"]:
        yield "--stronglyTyped"
    if not unit.tf32:
        yield "--noTF32"
    yield from (option for flag, option in _FLAGS.items() if request["flags"].get(flag))
    yield f"--builderOptimizationLevel={request['numbers']['builder_optimization_level']}"
    for name, option in (("avg_timing_iterations", "avgTiming"), ("max_aux_streams", "maxAuxStreams")):
        if name in request["numbers"]:
            yield f"--{option}={request['numbers'][name]}"
    if "WORKSPACE" in request["memory_pools"]:
        yield f"--memPoolSize=workspace:{request['memory_pools']['WORKSPACE'] // _MIB}"
    yield f"--profilingVerbosity={request['enums']['profiling_verbosity'][1].lower()}"
    if level := request["enums"].get("hardware_compatibility_level"):
        yield f"--hardwareCompatibilityLevel={_LEVELS[level[1]]}"
    if request["preview_features"]:
        yield "--preview=" + ",".join(f"+{_PREVIEWS[name]}" for name in request["preview_features"])
    if request["tactic_sources"] is not None:
        known = _ALL_SOURCES if _major(unit) < _FIRST_WITHOUT_LIBRARIES else _NEWER_SOURCES
        on = request["tactic_sources"]
        yield "--tacticSources=" + ",".join(f"{'+' if source in on else '-'}{source}" for source in known)
    if request["timing_cache_path"] or request["locked_timing_path"]:
        yield "--timingCacheFile=timing.cache"


def _major(unit: BuildUnit) -> int:
    return int(unit.backend_version.split(".")[0])
