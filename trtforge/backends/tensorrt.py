"""TensorRT 8.6, 10 and 11: builds on the GPU model that the engine is for.

From 10 on the graph's types bind (STRONGLY_TYPED, and always in 11). 8.6 is weakly typed: flags allow the graph's lower
types, nodes that the user keeps in FP32 are bound to it, and the finished engine is compared with the graph.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from trtforge.backends.capabilities import capability, is_weakly_typed, version_numbers
from trtforge.backends.engine_build import FLAG_SETTINGS, base_request, refuse_settings, run_build
from trtforge.backends.inspection import EngineLayer, Islands, engine_layers, islands, layer_tactics
from trtforge.backends.surroundings import NOTHING_AROUND, CalibrationBatches, Recorded, Surroundings
from trtforge.backends.trtexec import trtexec_command, trtexec_gap
from trtforge.backends.worker_process import BuildEvent, Transcript
from trtforge.errors import BuildError, CapabilityError
from trtforge.plan_header import read_plan_header
from trtforge.types import BuilderMessage, BuildUnit, BuiltEngine, Graph

NAME: Final = "tensorrt"

_APPLIED: Final = frozenset(
    (
        *(*FLAG_SETTINGS, "optimization_level", "workspace_mib", "profiling_verbosity", "hardware_compatibility"),
        *("avg_timing_iterations", "max_aux_streams", "tactic_sources"),
    )
)
_CALIBRATORS: Final = {
    "EntropyCalibration2": "IInt8EntropyCalibrator2",
    "MinMaxCalibration": "IInt8MinMaxCalibrator",
}
"""Algorithm in the first line of a calibration cache -> the class that reads it."""
_LOW: Final = ("float16", "bfloat16")
_MOST_SHOWN: Final = 10
_MOST_NAMED: Final = 3
_JUDGED_BYTES: Final = 4 << 20
_FP32_RATIO: Final = 1.8
"""Seen with 8.6: 2.0 for engines in FP32, 1.03 to 1.07 for those in FP16. Winograd kernels alone may give up to 1.78."""


def build(
    unit: BuildUnit,
    graph: Graph,
    work_dir: Path,
    on_event: Callable[[BuildEvent], None],
    timeout_seconds: float | None,
    around: Surroundings = NOTHING_AROUND,
) -> BuiltEngine:
    """Builds `unit` on the GPU of this machine that `around` names; see `Backend.build`.

    Raises:
        BuildError: the builder gave no engine, crashed, took longer than `timeout_seconds`, or ran in a lower type
            what the graph has in FP32.
        CapabilityError: this version cannot do what `unit` asks, or narrows the type of an input or output.
        GraphError: the parsed network is not the graph.
        StoreError: the engine could not be written.
    """
    refuse_settings(unit, _APPLIED, "remove builder.{name}, or use another version of tensorrt")
    request = base_request(unit, graph, work_dir / f"{unit.identifier}.engine", install=_install(unit))
    request["environment"] = {"CUDA_VISIBLE_DEVICES": around.gpu_uuid} if around.gpu_uuid else {}
    request["plugins"] = [str(path.absolute()) for path in around.plugins]
    _keep_tactics(request, unit, around)
    if around.calibration_cache:
        request["network_flags"] = _weakly_typed(unit)
        request["calibration"] = _calibration(around.calibration_cache, around.calibration_batches)
    tensors = _allow_types(request, unit, graph, around)
    float32 = {name: node for name, node in tensors.items() if request["bound_tensors"].get(name)}
    inspection_path = work_dir / f"{unit.identifier}.inspection.json"
    is_recorded = around.timing_record is not None or around.recorded is not None
    tells_tactics = is_recorded and unit.settings["profiling_verbosity"] == "detailed"
    if tensors or tells_tactics:
        request["inspection_path"] = str(inspection_path.absolute())
    notes: list[str] = []
    tactics: dict[str, str] = {}

    def check(path: Path, _said: Transcript) -> None:
        _check_header(path, unit)
        text = inspection_path.read_text(encoding="utf-8") if tensors or tells_tactics else ""
        if tensors:
            notes.extend(_float32_parts(unit, engine_layers(text), tensors, float32))
        if tells_tactics:
            tactics.update(layer_tactics(text))
            _compare_tactics(unit, tactics, around.recorded)

    try:
        engine = run_build(unit, work_dir, request, check, on_event, timeout_seconds)
    finally:
        inspection_path.unlink(missing_ok=True)
    if too_large := _too_large(unit, graph, engine.size_bytes):
        notes.append(too_large)
        engine = replace(engine, messages=(*engine.messages, BuilderMessage("warning", too_large)))
    command = trtexec_command(unit, request, _model_name(graph), list(dict.fromkeys(float32.values())))
    notes += filter(None, [trtexec_gap(unit, request)])
    return replace(engine, trtexec=command, notes=tuple(notes), tactics=tuple(tactics.items()))


def _model_name(graph: Graph) -> str:
    """A rewritten graph is a file of the store, which its digest names."""
    return graph.path.name if graph.path.suffix else f"{graph.path.name[:12]}.onnx"


def _install(unit: BuildUnit) -> str:
    return f"pip install tensorrt=={unit.backend_version}"


def _keep_tactics(request: dict[str, Any], unit: BuildUnit, around: Surroundings) -> None:
    """Sets what is measured and kept, or replayed."""
    paths = {
        "timing_cache_path": around.timing_cache,
        "timing_record_path": around.timing_record,
        "locked_timing_path": around.recorded and around.recorded.timing_cache,
    }
    request |= {name: str(path.absolute()) if path else None for name, path in paths.items()}
    if around.recorded:
        if reason := capability(NAME, unit.backend_version).settings.get("record_tactics"):
            raise CapabilityError(f"{unit.identifier}: no locked build: {reason}", next_step="leave out --locked")
        request["flags"] |= {"EDITABLE_TIMING_CACHE": True, "ERROR_ON_TIMING_CACHE_MISS": True}


def _compare_tactics(unit: BuildUnit, tactics: Mapping[str, str], recorded: Recorded | None) -> None:
    """Compares what the engine says of its layers with what the recorded one said, where both do.

    Raises:
        BuildError: a layer has another tactic.
    """
    if not recorded or not recorded.tactics or not tactics:
        return
    names = {**recorded.tactics, **tactics}
    lines = [
        f"layer '{name}': {tactics.get(name, 'not there')}, recorded {recorded.tactics.get(name, 'not there')}"
        for name in names
        if tactics.get(name) != recorded.tactics.get(name)
    ]
    if lines:
        more = [f"and {len(lines) - _MOST_SHOWN} more"] if len(lines) > _MOST_SHOWN else []
        raise BuildError(
            f"{unit.identifier}: {len(lines)} of {len(names)} layers have another tactic than the recorded engine",
            next_step="trtforge build SPEC  # without --locked, which records anew",
            detail=[*lines[:_MOST_SHOWN], *more],
        )


def _weakly_typed(unit: BuildUnit) -> tuple[str, ...]:
    row = capability(NAME, unit.backend_version)
    if reason := row.implicit_quantization:
        raise CapabilityError(
            f"{unit.identifier}: no implicit quantization: {reason}",
            next_step="remove 'quantization: implicit'",
        )
    return row.flags_of_network(implicit=True)


def _calibration(path: Path, batches: CalibrationBatches | None) -> dict[str, Any]:
    if batches:
        return {
            "path": str(path.absolute()),
            "calibrator": _CALIBRATORS[batches.algorithm],
            "batches": {
                "files": {
                    name: (str(file.absolute()), batches.batch_bytes[name]) for name, file in batches.files.items()
                },
                "batch_size": batches.batch_size,
                "num_batches": batches.num_batches,
            },
        }
    with path.open("rb") as file:
        header = file.readline(200).decode(errors="replace").strip()
    algorithm = header.rpartition("-")[2]
    if not header.startswith("TRT-") or algorithm not in _CALIBRATORS:
        raise CapabilityError(
            f"{path} begins with '{header}', expected a calibration cache of {' or '.join(_CALIBRATORS)}",
            next_step="trtforge calibrate SPEC  # writes a new one",
        )
    return {"path": str(path.absolute()), "calibrator": _CALIBRATORS[algorithm], "batches": None}


def _allow_types(request: dict[str, Any], unit: BuildUnit, graph: Graph, around: Surroundings) -> dict[str, str]:
    """Sets the flags for the graph's lower types where types do not bind by themselves, and binds what the user keeps FP32.

    Only that: seen with 8.6, one bound layer inside a fused block runs the whole block in FP32. An encoder whose
    norms were bound took 0.44 ms in place of 0.21 ms, at FP32's size. What else the graph has in FP32 is for the
    engine's parity to judge.

    Returns:
        Tensor -> node, of all that a lowered graph has in FP32 and that the engine can be asked about.

    Raises:
        CapabilityError: the engine shall keep nodes in FP32 and tell nothing of its layers.
    """
    implicit = request["calibration"] is not None
    if not is_weakly_typed(unit.backend_version) and not implicit:
        return {}
    is_lowered = any(name in graph.element_types for name in _LOW)
    allowed = {"FP16": is_lowered or around.rest_fp16, "INT8": graph.has_qdq or implicit}
    request["flags"] |= {flag: True for flag, on in allowed.items() if on}
    is_told = unit.settings["profiling_verbosity"] == "detailed"
    if not is_lowered or not (is_told or around.keep_fp32):
        return {}
    from trtforge.backends.weak_typing import float32_tensors  # noqa: PLC0415 - loads onnx, which few builds need

    tensors = float32_tensors(graph.path)
    bound = {
        name: any(fnmatch.fnmatchcase(node, pattern) for pattern in around.keep_fp32 if node)
        for name, node in tensors.items()
    }
    if any(bound.values()):
        if not is_told:
            raise CapabilityError(
                f"{unit.identifier}: whether precision.keep.fp32 holds cannot be told of an engine that tells no types",
                next_step="write builder: {profiling_verbosity: detailed}",
            )
        request["bound_tensors"] = bound
        request["flags"]["OBEY_PRECISION_CONSTRAINTS"] = True
    return {name: node for name, node in tensors.items() if node}


def _float32_parts(
    unit: BuildUnit, layers: Sequence[EngineLayer], tensors: Mapping[str, str], bound: Mapping[str, str]
) -> Iterator[str]:
    """Sentences on what became of the FP32 parts.

    Raises:
        BuildError: some that are bound run in a lower type.
    """
    if bound:
        yield _kept(unit, islands(layers, bound))
    kept = set(bound.values())
    free = islands(layers, {name: node for name, node in tensors.items() if node not in kept})
    if lowered := free.swallowed:
        shown = ", ".join(f"'{node}'" for node in list(lowered)[:_MOST_NAMED])
        shown += " and others" if len(lowered) > _MOST_NAMED else ""
        yield (
            f"{len(lowered)} nodes that the graph has in FP32 run in a lower type, as types do not bind in TensorRT "
            f"{unit.backend_version}: {shown}"
        )


def _kept(unit: BuildUnit, found: Islands) -> str:
    """A sentence on what became of the parts bound to FP32.

    Raises:
        BuildError: some run in a lower type.
    """
    if found.swallowed:
        lines = [f"node '{node}': {why}" for node, why in found.swallowed.items()]
        more = [f"and {len(lines) - _MOST_SHOWN} more"] if len(lines) > _MOST_SHOWN else []
        raise BuildError(
            f"{unit.identifier}: the engine runs node '{next(iter(found.swallowed))}' in a lower type, which the graph "
            f"has in FP32 ({len(found.swallowed)} such nodes)",
            next_step="build with tensorrt 10 or later, where types bind, or with precision.type: fp32",
            detail=[*lines[:_MOST_SHOWN], *more],
        )
    return (
        f"of {len(found.kept) + len(found.hidden)} nodes bound to FP32 the engine shows {len(found.kept)} in FP32; "
        f"of {len(found.hidden)} it tells no type"
    )


def _too_large(unit: BuildUnit, graph: Graph, size_bytes: int) -> str:
    """A sentence where an engine of a weakly typed version looks as if it had gone back to FP32, "" otherwise.

    Its fused blocks do not tell their types, but FP32 weights take twice the bytes of FP16 ones. Each profile may bring
    its own copy, and small engines hold more kernels than weights, so that these are not judged.
    """
    is_weak = is_weakly_typed(unit.backend_version)
    is_lowered = any(name in graph.element_types for name in _LOW)
    if not is_weak or not is_lowered or len(unit.profiles) > 1 or graph.weight_bytes < _JUDGED_BYTES:
        return ""
    ratio = size_bytes / graph.weight_bytes
    if ratio < _FP32_RATIO:
        return ""
    return (
        f"the engine is {ratio:.1f} times as large as its weights in the asked types, as if TensorRT "
        f"{unit.backend_version} computed in FP32; compare its speed with precision.type: fp32"
    )


def _check_header(path: Path, unit: BuildUnit) -> None:
    """Only to the second number: a Python module can be newer than the library that it loads by the third."""
    header = read_plan_header(path)
    wanted = version_numbers(unit.backend_version)[:2]
    if header and header.kind == NAME and header.version[:2] == wanted:
        return
    raise BuildError(
        f"{unit.identifier}: the engine is not one of {NAME} {unit.backend_version}",
        next_step=f"install a trtforge that knows {NAME} {unit.backend_version}",
        detail=[f"header: {header}"],
    )
