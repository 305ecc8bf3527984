"""What a spec's targets are on this machine: versions, engines to build, and why one is not built here."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from platformdirs import user_cache_path

from trtforge.backends.capabilities import Capability, capability, is_weakly_typed, newest_version
from trtforge.backends.refusals import target_compute_capability
from trtforge.errors import CapabilityError, Problem, SeveralErrors
from trtforge.gpu_models import gpu_model
from trtforge.machine import GpuFacts, MachineFacts
from trtforge.spec.load import SpecFile
from trtforge.spec.model import BuilderSettings, Target
from trtforge.types import BuildUnit, Graph, Profile

_TIMING_ITERATIONS = 8
"""As trtexec, so that its engines and ours are chosen alike; TensorRT's own default is 1.

Source: --avgTiming of samples/common/sampleOptions.h.
"""

_INSTALL = {"tensorrt_rtx": "pip install 'trtforge[rtx]'", "tensorrt": "pip install 'trtforge[gpu-wheels]'"}


def version_of(target: Target, facts: MachineFacts) -> str:
    """The version that a target is planned for: the installed one, unless the spec asks for another."""
    installed = facts.packages.get(target.backend)
    if target.version and not (installed and is_version(installed, target.version)):
        return target.version
    return installed or newest_version(target.backend)


def is_version(installed: str, wanted: str) -> bool:
    """Whether a version is the wanted one, part by part as far as that says; nothing wanted is any."""
    return not wanted or installed.split(".")[: len(wanted.split("."))] == wanted.split(".")


def capabilities(spec_file: SpecFile, facts: MachineFacts) -> list[Capability]:
    """The row of each target's version, in the spec's order."""
    return [_capability(spec_file, index, facts) for index in range(len(spec_file.spec.targets))]


def _capability(spec_file: SpecFile, index: int, facts: MachineFacts) -> Capability:
    target = spec_file.spec.targets[index]
    try:
        return capability(target.backend, version_of(target, facts))
    except CapabilityError as error:
        problem = error.problems[0]
        raise SeveralErrors([replace(problem, where=spec_file.where("targets", index, "version"))]) from None


def missing_reason(spec_file: SpecFile, index: int, target: Target, facts: MachineFacts) -> Problem | None:
    """Why this machine builds no engine of a target, None if it does."""
    installed = facts.packages.get(target.backend)
    where = spec_file.where("targets", index)
    code = CapabilityError.exit_code
    if installed is None:
        return Problem(f"{target.backend} is not installed here", _INSTALL[target.backend], where, (), code)
    if target.version and not is_version(installed, target.version):
        text = f"the target is for {target.backend} {target.version}, and {installed} is installed"
        package = target.backend.replace("_", "-")
        return Problem(text, f"pip install '{package}=={target.version}.*'", where, (), code)
    return None


def gpu_reason(spec_file: SpecFile, index: int, position: int, facts: MachineFacts) -> Problem | None:
    """Why this machine does not build for one GPU of a target, None if it does."""
    target = spec_file.spec.targets[index]
    gpu = target.gpus[position]
    if target.backend == "tensorrt_rtx" or gpu_at_hand(gpu, facts):
        return None
    found = ", ".join(one.device_name for one in facts.gpus) or f"no GPU ({facts.cuda_error})"
    return Problem(
        f"the target is for {gpu}, and this machine has {found}; TensorRT builds on the GPU model that an engine is for",
        f"run trtforge build on a machine with {gpu}; here it may be left out with when_missing: skip",
        spec_file.where("targets", index, "gpus", position),
        (),
        CapabilityError.exit_code,
    )


def gpu_at_hand(gpu: str, facts: MachineFacts) -> GpuFacts | None:
    """The first GPU of this machine that is of the model `gpu`."""
    return next((one for one in facts.gpus if one.model == gpu_model(gpu).name), None)


def measured_on(unit: BuildUnit, facts: MachineFacts) -> GpuFacts | None:
    """The GPU of this machine that an engine can be measured on: of the model, or the compute capability, that it is for."""
    if unit.backend == "tensorrt":
        return gpu_at_hand(unit.gpu, facts)
    return next((gpu for gpu in facts.gpus if gpu.compute_capability == unit.compute_capability), None)


def gpu_lock(gpu: GpuFacts) -> Path:
    """The lock file that is held while a GPU builds or measures, whatever store is used; each user has one of their own."""
    return user_cache_path("trtforge") / "locks" / f"gpu-{gpu.uuid or gpu.index}"


def unit_of(
    spec_file: SpecFile, target: Target, gpu: str, version: str, graph: Graph, profiles: tuple[Profile, ...]
) -> BuildUnit:
    """The engine of one GPU of a target."""
    spec = spec_file.spec
    precision = _precision_tag(graph) if spec.precision.type == "as_model" else spec.precision.type
    if spec_file.spec.precision.is_implicit:
        precision += "-implicit"
    short = {"tensorrt": "trt", "tensorrt_rtx": "trtrtx"}[target.backend] + ".".join(version.split(".")[:3])
    return BuildUnit(
        identifier=f"{spec.name}-{precision}-{re.sub(r'[^a-z0-9]+', '-', gpu.lower())}-{short}",
        backend=target.backend,
        backend_version=version,
        gpu=gpu,
        compute_capability=target_compute_capability(target.backend, gpu),
        precision=precision,
        tf32=spec.precision.tf32,
        settings=_settings(spec.builder, target.backend, version, precision),
        graph_digest=graph.digest,
        profiles=profiles,
    )


def _settings(builder: BuilderSettings, backend: str, version: str, precision: str) -> dict[str, object]:
    """What the builder is told, where the spec leaves it to trtforge.

    Engines in lower types by a weakly typed TensorRT tell all, as their types are told in no other way.
    """
    settings = asdict(builder)
    if backend != "tensorrt":
        return settings
    settings["avg_timing_iterations"] = settings["avg_timing_iterations"] or _TIMING_ITERATIONS
    if is_weakly_typed(version) and precision != "fp32" and settings["profiling_verbosity"] == "layer_names_only":
        settings["profiling_verbosity"] = "detailed"
    return settings


def _precision_tag(graph: Graph) -> str:
    """One word for the types that a model carries, the narrowest deciding."""
    types = graph.element_types
    if any(name.startswith("float8") for name in types):
        return "fp8"
    if graph.has_qdq:
        return "int8"
    return "fp16" if "float16" in types else "bf16" if "bfloat16" in types else "fp32"


@dataclass(frozen=True, slots=True)
class BackendState:
    """Whether a backend builds here, for which GPUs, and what is missing."""

    name: str
    version: str | None
    builds_for: tuple[str, ...]
    text: str
    next_step: str


def backend_states(facts: MachineFacts) -> tuple[BackendState, ...]:
    """Every backend that the capability table knows, as this machine has it."""
    return tuple(_backend_state(name, facts.packages.get(name), facts) for name in _INSTALL)


def _backend_state(name: str, version: str | None, facts: MachineFacts) -> BackendState:
    if version is None:
        return BackendState(name, None, (), "not installed", _INSTALL[name])
    try:
        builds_for = capability(name, version).compute_capabilities
    except CapabilityError as error:
        return BackendState(name, version, (), error.problems[0].summary, error.problems[0].next_step)
    if name == "tensorrt":  # which builds for the GPUs at hand only
        builds_for = tuple(gpu.model for gpu in facts.gpus if gpu.model and gpu.compute_capability in builds_for)
    if not builds_for:
        return BackendState(name, version, (), f"{version}, and no GPU here that it builds for", "nvidia-smi")
    return BackendState(name, version, builds_for, f"{version}, builds here for {', '.join(builds_for)}", "")
