"""What every backend does the same way: the request to the worker, the run, and what its answer means."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from trtforge.backends.builder_log import error_lines, explain
from trtforge.backends.capabilities import Capability, capability
from trtforge.backends.reproduction import leave_reproduction
from trtforge.backends.worker_process import BuildEvent, Transcript, run_worker
from trtforge.errors import BuildError, CapabilityError, Problem, raise_any
from trtforge.types import BuilderMessage, BuildUnit, BuiltEngine, Graph, NetworkLayers, ShapeRange, TensorSpec

_MIB: Final = 1 << 20
_MOST_LINES: Final = 20
_OFF: Final = (False, None, "none")
FLAG_SETTINGS: Final = {
    "sparse_weights": "SPARSE_WEIGHTS",
    "strict_nans": "STRICT_NANS",
    "weight_streaming": "WEIGHT_STREAMING",
    "refit": "REFIT",
    "strip_weights": "STRIP_PLAN",
    "version_compatible": "VERSION_COMPATIBLE",
    "record_tactics": "EDITABLE_TIMING_CACHE",
}
"""Builder setting that is on or off -> the builder flag for it."""


def base_request(unit: BuildUnit, graph: Graph, engine_path: Path, *, install: str) -> dict[str, Any]:
    """What the worker is asked to do, in the names of TensorRT's own interface; enum members by name.

    Whoever calls this fills in what only one backend has.
    """
    settings = unit.settings
    row = capability(unit.backend, unit.backend_version)
    roles = {role.name: role.kind for role in graph.roles}
    workspace = settings.get("workspace_mib")
    sources = settings.get("tactic_sources")
    counts = {name: settings.get(name) for name in ("avg_timing_iterations", "max_aux_streams")}
    enums = {"profiling_verbosity": ("ProfilingVerbosity", str(settings["profiling_verbosity"]).upper())}
    level = settings.get("hardware_compatibility", "none")
    if level != "none":
        enums["hardware_compatibility_level"] = ("HardwareCompatibilityLevel", str(level).upper())
    return {
        "module": unit.backend,
        "version": unit.backend_version,
        "install": install,
        "environment": {},
        "plugins": [],
        "model_path": str(graph.path.absolute()),
        # A rewritten copy lies elsewhere; its weights are still beside the source.
        "parse_path": str((graph.weights_dir / graph.path.name).absolute()),
        "engine_path": str(engine_path.absolute()),
        "network_flags": row.network_flags,
        "inputs": [_expected(spec, roles.get(spec.name, ""), row) for spec in graph.inputs],
        "outputs": [_expected(spec, "", row) for spec in graph.outputs],
        "profiles": [
            {"name": profile.name, "shapes": _ranges(profile.shapes), "values": _ranges(profile.values)}
            for profile in unit.profiles
        ],
        "compute_capability": None,
        # A flag that is off is not named: older versions lack some of them. TF32 is on unless cleared.
        "flags": {"TF32": unit.tf32} | {flag: True for name, flag in FLAG_SETTINGS.items() if settings.get(name)},
        "numbers": {
            "builder_optimization_level": settings["optimization_level"],
            **{name: count for name, count in counts.items() if count is not None},
        },
        "enums": enums,
        "preview_features": row.preview_features,
        "memory_pools": {} if workspace is None else {"WORKSPACE": int(str(workspace)) * _MIB},
        "tactic_sources": [str(name).upper() for name in sources] if isinstance(sources, list | tuple) else None,
        "bound_tensors": {},
        "calibration": None,
        "timing_cache_path": None,
        "timing_record_path": None,
        "locked_timing_path": None,
        "inspection_path": None,
    }


def run_build(
    unit: BuildUnit,
    work_dir: Path,
    request: Mapping[str, Any],
    check: Callable[[Path, Transcript], None],
    on_event: Callable[[BuildEvent], None],
    timeout_seconds: float | None,
) -> BuiltEngine:
    """Runs one request, and takes the engine only if `check` (engine's path, transcript) raises nothing.

    Nothing is left in `work_dir` if it does, except a folder with log and reproduction after a `BuildError`.

    Raises:
        TrtForgeError: see `Backend.build`.
    """
    path = Path(request["engine_path"])
    said = Transcript()
    try:
        run_worker(request, said, subject=unit.identifier, on_event=on_event, timeout_seconds=timeout_seconds)
        answer = _engine_answer(unit, said)
        check(path, said)
    except BaseException as error:
        for half_made in work_dir.glob(f"{path.name}*"):
            half_made.unlink()
        if isinstance(error, BuildError):
            with contextlib.suppress(OSError):  # the disk may be full, which must not hide why the build failed
                leave_reproduction(work_dir, request, said)
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
        timing_cache_digest=answer["timing_cache_digest"],
        weighted_layers=tuple(
            NetworkLayers(group["kind"], group["dtype"], tuple(group["names"])) for group in answer["weighted_layers"]
        ),
    )


def refuse_settings(unit: BuildUnit, applied: Collection[str], next_step: str) -> None:
    """What a backend does not apply, or a version does not have, may only be off.

    Args:
        unit: whose settings are looked at.
        applied: names of the settings that the backend hands on.
        next_step: what to do about one; `{name}` is the setting.

    Raises:
        CapabilityError: some setting is neither; all of them at once.
    """
    reasons = capability(unit.backend, unit.backend_version).settings

    def reason(name: str, value: object) -> str:
        items = value if isinstance(value, list | tuple) else (value,)
        found = [reasons.get(f"{name}={item}", "") for item in items]
        own = "" if name in applied else f"trtforge does not apply it to {unit.backend}"
        return reasons.get(name) or next(filter(None, found), own)

    raise_any(
        Problem(
            f"{unit.identifier}: builder.{name}: {value}: {why}",
            next_step.format(name=name),
            exit_code=CapabilityError.exit_code,
        )
        for name, value in unit.settings.items()
        if value not in _OFF and (why := reason(name, value))
    )


def _expected(spec: TensorSpec, role: str, row: Capability) -> dict[str, Any]:
    """With the type that the parser makes of it, where the table allows that (int64 on 8.6)."""
    is_allowed = row.io_dtypes.get(spec.dtype) == ""
    dtype = row.narrowed_dtypes.get(spec.dtype, spec.dtype) if is_allowed else spec.dtype
    return {"name": spec.name, "dtype": dtype, "shape": spec.shape, "role": role}


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
