"""TensorRT-RTX: builds for compute capabilities named in advance, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from trtforge.backends.builder_log import matching_warnings
from trtforge.backends.engine_build import base_request, refuse_settings, run_build
from trtforge.backends.surroundings import NOTHING_AROUND, Surroundings
from trtforge.backends.worker_process import BuildEvent, Transcript
from trtforge.errors import BuildError
from trtforge.plan_header import PlanHeader, read_plan_header
from trtforge.types import BuilderMessage, BuildUnit, BuiltEngine, Graph

NAME: Final = "tensorrt_rtx"

_APPLIED: Final = frozenset(
    (
        *("sparse_weights", "strict_nans", "weight_streaming", "optimization_level", "workspace_mib"),
        *("profiling_verbosity", "max_aux_streams", "tactic_sources"),
    )
)

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
    around: Surroundings = NOTHING_AROUND,  # noqa: ARG001 - it needs no GPU and takes no plugins
) -> BuiltEngine:
    """Builds `unit` for exactly the compute capability that it names; see `Backend.build`.

    Raises:
        BuildError: the builder gave no engine, crashed, took longer than `timeout_seconds`, or built for another GPU.
        CapabilityError: this version cannot do what `unit` asks, or narrows the type of an input or output.
        GraphError: the parsed network is not the graph.
        StoreError: the engine could not be written.
    """
    refuse_settings(unit, _APPLIED, "leave builder.{name} out, or use backend: tensorrt")
    path = work_dir / f"{unit.identifier}.engine"
    install = f"pip install tensorrt_rtx=={unit.backend_version}"
    request = base_request(unit, graph, path, install=install)
    request["compute_capability"] = unit.compute_capability.upper()

    def check(path: Path, said: Transcript) -> None:
        _refuse_other_network(unit, said.messages)
        _check_header(path, unit)

    return run_build(unit, work_dir, request, check, on_event, timeout_seconds)


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
