"""TensorRT-RTX: builds for compute capabilities named in advance, without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from trtforge.backends.builder_log import error_lines, explain, matching_warnings
from trtforge.backends.capabilities import capability
from trtforge.backends.reproduction import leave_reproduction
from trtforge.backends.worker_process import BuildEvent, Transcript, run_worker
from trtforge.errors import BuildError, CapabilityError, Problem, raise_any
from trtforge.plan_header import PlanHeader, read_plan_header
from trtforge.types import BuilderMessage, BuildUnit, BuiltEngine, Graph, ShapeRange, TensorSpec

NAME: Final = "tensorrt_rtx"

_MIB: Final = 1 << 20
_MOST_LINES: Final = 20
_FLAG_SETTINGS: Final = {
    "sparse_weights": "SPARSE_WEIGHTS",
    "strict_nans": "STRICT_NANS",
    "weight_streaming": "WEIGHT_STREAMING",
}
_APPLIED: Final = frozenset(
    (*_FLAG_SETTINGS, "optimization_level", "workspace_mib", "profiling_verbosity", "max_aux_streams", "tactic_sources")
)
_OFF: Final = (False, None, "none")

_OTHER_NETWORK: Final = {
    "*UINT8 zero_point*Defaulting to INT8*": "quantize again with int8 and zero point 0 (onnxruntime: QInt8)",
}
"""Globs of warnings after which the network is not the graph's -> what to do.

Source: seen with 1.7.1.116 on a uint8 QuantizeLinear.
"""


def build(
    unit: BuildUnit,
    graph: Graph,
    work_dir: Path,
    on_event: Callable[[BuildEvent], None],
    timeout_seconds: float | None,
) -> BuiltEngine:
    """Builds `unit` for exactly the compute capability that it names; see `Backend.build`.

    Raises:
        BuildError: the builder gave no engine, crashed, took longer than `timeout_seconds`, or built for another GPU.
        CapabilityError: this version cannot do what `unit` asks, or narrows the type of an input or output.
        GraphError: the parsed network is not the graph.
        StoreError: the engine could not be written.
    """
    path = work_dir / f"{unit.identifier}.engine"
    request = _request(unit, graph, path)
    path.unlink(missing_ok=True)
    said = Transcript()
    try:
        run_worker(request, said, subject=unit.identifier, on_event=on_event, timeout_seconds=timeout_seconds)
        answer = _engine_answer(unit, said)
        _refuse_other_network(unit, said.messages)
        _check_header(path, unit)
    except BuildError:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the disk may be full, which must not hide why the build failed
            leave_reproduction(work_dir, request, said)
        raise
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return BuiltEngine(
        path=path,
        digest=answer["digest"],
        size_bytes=answer["size_bytes"],
        seconds=answer["seconds"],
        messages=tuple(said.messages),
        inputs=_tensors(answer["inputs"]),
        outputs=_tensors(answer["outputs"]),
        builder_flags=tuple(sorted(name for name, on in request["flags"].items() if on)),
        peak_memory_bytes=answer["peak_memory_bytes"],
    )


def _request(unit: BuildUnit, graph: Graph, engine_path: Path) -> dict[str, Any]:
    """What the worker is asked to do, in the names of TensorRT's own interface."""
    _refuse_settings(unit)
    settings = unit.settings
    roles = {role.name: role.kind for role in graph.roles}
    workspace, streams = settings.get("workspace_mib"), settings.get("max_aux_streams")
    sources = settings.get("tactic_sources")
    numbers = {"builder_optimization_level": settings["optimization_level"]}
    return {
        "module": NAME,
        "version": unit.backend_version,
        "install": f"pip install tensorrt_rtx=={unit.backend_version}",
        "model_path": str(graph.path.absolute()),
        # A rewritten copy lies elsewhere; its weights are still beside the source.
        "parse_path": str((graph.weights_dir / graph.path.name).absolute()),
        "engine_path": str(engine_path.absolute()),
        "network_flags": capability(NAME, unit.backend_version).network_flags,
        "inputs": [_expected(spec, roles.get(spec.name, "")) for spec in graph.inputs],
        "outputs": [_expected(spec, "") for spec in graph.outputs],
        "profiles": [
            {"name": profile.name, "shapes": _ranges(profile.shapes), "values": _ranges(profile.values)}
            for profile in unit.profiles
        ],
        "compute_capability": unit.compute_capability.upper(),
        "flags": {"TF32": unit.tf32} | {flag: bool(settings.get(name)) for name, flag in _FLAG_SETTINGS.items()},
        "numbers": numbers | ({} if streams is None else {"max_aux_streams": streams}),
        "memory_pools": {} if workspace is None else {"WORKSPACE": int(str(workspace)) * _MIB},
        "profiling_verbosity": str(settings["profiling_verbosity"]).upper(),
        "tactic_sources": [str(name).upper() for name in sources] if isinstance(sources, list | tuple) else None,
    }


def _refuse_settings(unit: BuildUnit) -> None:
    """What this module does not apply may only be off."""
    reasons = capability(NAME, unit.backend_version).settings
    raise_any(
        Problem(
            f"{unit.identifier}: builder.{name}: {value}: {reasons.get(name, f'trtforge does not apply it to {NAME}')}",
            f"leave builder.{name} out, or use backend: tensorrt",
            exit_code=CapabilityError.exit_code,
        )
        for name, value in unit.settings.items()
        if name not in _APPLIED and value not in _OFF
    )


def _expected(spec: TensorSpec, role: str) -> dict[str, Any]:
    return {"name": spec.name, "dtype": spec.dtype, "shape": spec.shape, "role": role}


def _ranges(ranges: Mapping[str, ShapeRange]) -> dict[str, Any]:
    return {name: (shape.min, shape.opt, shape.max) for name, shape in ranges.items()}


def _tensors(values: Sequence[Mapping[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(value["name"], value["dtype"], tuple(value["shape"])) for value in values)


def _engine_answer(unit: BuildUnit, said: Transcript) -> Mapping[str, Any]:
    """The worker's answer if it is an engine; else an error with the cause in plain words, then the builder's own lines."""
    answer = said.answer or {}
    if answer.get("kind") == "built":
        return answer
    own = [BuilderMessage("error", line) for line in answer.get("lines", ())]
    found = explain([*own, *said.messages])
    lines = error_lines([*own, *said.messages]) or [*said.last_lines(), *answer.get("recent", ())]
    detail = [f"also: {other.cause}; {other.next_step}" for other in found[1:]] + lines
    if len(detail) > _MOST_LINES:
        detail[_MOST_LINES:] = [f"and {len(detail) - _MOST_LINES} lines more"]
    cause = found[0].cause if found else f"the builder gave no engine ({answer.get('stage')})"
    step = found[0].next_step if found else "read the builder's own lines above; the first is most often the cause"
    raise BuildError(f"{unit.identifier}: {cause}", next_step=step, detail=detail)


def _refuse_other_network(unit: BuildUnit, messages: Sequence[BuilderMessage]) -> None:
    for glob, step in _OTHER_NETWORK.items():
        if found := matching_warnings(messages, [glob]):
            summary = f"{unit.identifier}: {NAME} built another network than the graph"
            raise BuildError(summary, next_step=step, detail=[message.text for message in found])


def _check_header(path: Path, unit: BuildUnit) -> None:
    """The builder has a default set of GPUs that it takes when it did not understand which were meant."""
    header = read_plan_header(path)
    version = tuple(int(part) % 256 for part in unit.backend_version.split("."))
    expected = PlanHeader(NAME, version, path.stat().st_size, (unit.compute_capability,))
    if header == expected:
        return
    raise BuildError(
        f"{unit.identifier}: the engine is not one of {NAME} {unit.backend_version} for {unit.compute_capability}: it was "
        f"silently built for other GPUs, or the format has changed",
        next_step=f"install a trtforge that knows {NAME} {unit.backend_version}",
        detail=[f"header: {header}", f"expected: {expected}"],
    )
