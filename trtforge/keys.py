"""The keys of a build's stages: everything that decides a stage's result, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

from trtforge.digests import value_digest
from trtforge.errors import SpecError, shown_path
from trtforge.machine import GpuFacts, MachineFacts
from trtforge.release.manifest import Artifact, PerformanceRecord
from trtforge.spec.load import SpecFile
from trtforge.store import StageKey
from trtforge.types import BuildUnit, Graph, Profile

VERSIONS = {
    "export": 1,
    "ingest": 1,
    "traffic": 1,
    "profile check": 1,
    "calibrate": 2,
    "parity": 4,
    "parity engine": 2,
    "lower": 5,
    "build": 5,
    "bench": 3,
}
"""Raise one where the stage's code starts to give another result for the same inputs."""

TIMING_CACHE = "timing cache"
"""Name of an engine's timing cache among the blobs of its record, and of the one that a locked build repeats in its key."""

DigestOf = Callable[[Path], str]
"""SHA-256 of a file."""


def _profiles_parameter(profiles: tuple[Profile, ...]) -> list[dict[str, Any]]:
    """Profiles for keys."""
    return [
        {
            "name": profile.name,
            "inputs": {name: asdict(shapes) for name, shapes in profile.shapes.items()},
            "values": {name: asdict(values) for name, values in profile.values.items()},
        }
        for profile in profiles
    ]


def unit_key(
    unit: BuildUnit,
    spec_file: SpecFile,
    lowered: StageKey | None,
    inputs: Mapping[str, str],
    facts: MachineFacts,
) -> StageKey:
    """Of an engine; `inputs` are digests of files that the builder reads besides the graph."""
    precision: dict[str, Any] = {"type": unit.precision, "quantization": spec_file.spec.precision.quantization}
    if spec_file.spec.precision.is_implicit:
        precision["rest"] = spec_file.spec.precision.rest
    lowering = {"lowering": lowered.digest} if lowered else {}
    driver = {"driver": facts.cuda_driver_version} if unit.backend == "tensorrt" else {}
    return StageKey(
        "build",
        VERSIONS["build"],
        {"model": unit.graph_digest, **lowering, **inputs},
        {
            "gpu": unit.gpu,
            "compute_capability": unit.compute_capability,
            "precision": precision | {"tf32": unit.tf32},
            "builder": unit.settings,
            "profiles": _profiles_parameter(unit.profiles),
        },
        {unit.backend: unit.backend_version} | driver,
    )


def bench_key(
    unit: BuildUnit,
    artifact: Artifact,
    previous: str | None,
    asked: PerformanceRecord,
    gpu: GpuFacts,
    facts: MachineFacts,
) -> StageKey:
    """Of an engine's figures. Gates belong to it: figures that miss one are not kept."""
    # An engine's bytes do not tell of the bytes of its plugins.
    plugins = {f"plugin {number}": digest for number, digest in enumerate(artifact.plugins)}
    return StageKey(
        "bench",
        VERSIONS["bench"],
        {"engine": artifact.digest, **plugins} | ({"previous engine": previous} if previous else {}),
        {
            "performance": {
                "p99_ms": asked.p99_ms,
                "throughput_qps": asked.throughput_qps,
                "max_regression": asked.max_regression,
                "sizes": {name: list(sizes) for name, sizes in asked.sizes.items()},
                "cuda_graph": asked.cuda_graph,
            },
            "profiles": _profiles_parameter(unit.profiles),
        },
        {"driver": facts.cuda_driver_version, "GPU": f"{gpu.device_name}, {gpu.num_sms} SMs"},
    )


def check_key(spec_file: SpecFile, graph: Graph, profiles: tuple[Profile, ...], facts: MachineFacts) -> StageKey:
    """Of the run of the model at every point of every profile."""
    return StageKey(
        "profile check",
        VERSIONS["profile check"],
        {"model": graph.digest},
        {
            "profiles": _profiles_parameter(profiles),
            "inputs": {name: asdict(values) for name, values in spec_file.spec.inputs.items()},
        },
        {"onnxruntime": facts.packages["onnxruntime"]},
    )


def calibrate_key(
    spec_file: SpecFile, graph: Graph, profiles: tuple[Profile, ...], check: StageKey, digest_of: DigestOf
) -> StageKey | None:
    """Of the calibration, from the bytes of its data. Runs no Python of the spec; of a script, its own file counts."""
    calibration = spec_file.spec.calibration
    if calibration is None or calibration.table is not None or calibration.is_builders:
        return None
    from trtforge.samples.calibration import open_calibration  # noqa: PLC0415 - loads numpy

    data = open_calibration(spec_file, graph, profiles, digest_of=digest_of)
    return StageKey(
        "calibrate",
        VERSIONS["calibrate"],
        {"model": graph.digest, "data": data.digest},
        {
            "method": calibration.method,
            "percentile": float(calibration.percentile),
            "inputs": check.parameters["inputs"],
            "profiles": check.parameters["profiles"],
        }
        | ({"quantization": "implicit"} if spec_file.spec.precision.is_implicit else {}),
        check.environment,
    )


def calibration_input(spec_file: SpecFile, calibrated: StageKey | None, digest_of: DigestOf) -> dict[str, str]:
    """What scales come from, for keys."""
    calibration = spec_file.spec.calibration
    if calibrated:
        return {"calibration": calibrated.digest}
    if calibration is None or calibration.table is None:
        return {}
    next_step = "trtforge calibrate SPEC --output TABLE"
    digest = _digest_or_problem(calibration.table, spec_file, ("calibration", "table"), next_step, digest_of)
    return {"calibration": digest}


def _samples_digest(spec_file: SpecFile, digest_of: DigestOf) -> dict[str, str]:
    samples = spec_file.spec.parity.samples
    if samples is None:
        return {}
    next_step = "name an npz with an array for each input"
    return {"samples": _digest_or_problem(samples, spec_file, ("parity", "samples"), next_step, digest_of)}


def _digest_or_problem(
    path: Path, spec_file: SpecFile, key: tuple[str, ...], next_step: str, digest_of: DigestOf
) -> str:
    try:
        return digest_of(path)
    except OSError as error:
        text = f"{shown_path(path)}: {error.strerror}"
        raise SpecError(text, where=spec_file.where(*key), next_step=next_step) from None


def _proof_parameters(spec_file: SpecFile, check: StageKey) -> dict[str, Any]:
    """What decides the inputs that a model is compared on."""
    parity = spec_file.spec.parity
    return {**check.parameters, "parity": {"random_shapes": parity.random_shapes, "seed": parity.seed}}


def lower_key(
    spec_file: SpecFile, check: StageKey, calibrated: StageKey | None, max_opset: int, digest_of: DigestOf
) -> StageKey:
    """Of the lowering to the type that the spec asks for; `calibrated` is the calibration's."""
    spec = spec_file.spec
    precision = spec.precision
    inputs = {
        **check.inputs,
        **_samples_digest(spec_file, digest_of),
        **calibration_input(spec_file, calibrated, digest_of),
    }
    parameters: dict[str, Any] = {
        "type": precision.type,
        "keep": {"fp32": list(precision.keep.fp32)},
        "min_share": float(precision.min_share),
    }
    if precision.type != "fp16":
        parameters["max_opset"] = max_opset
    if precision.type == "int8":
        parameters["rest"] = precision.rest
        parameters["keep"] |= {"rest": list(precision.keep.rest)}
    return StageKey(
        "lower",
        VERSIONS["lower"],
        inputs,
        _proof_parameters(spec_file, check) | {"precision": parameters},
        check.environment,
    )


def parity_key(
    stage: Literal["mended", "lowered"], spec_file: SpecFile, check: StageKey, before: StageKey, digest_of: DigestOf
) -> StageKey:
    """Of the comparison of a step with the one whose key is `before`."""
    return StageKey(
        f"parity {stage}",
        VERSIONS["parity"],
        {**before.inputs, **_samples_digest(spec_file, digest_of), "before": before.digest},
        _proof_parameters(spec_file, check) | _bounds(spec_file, stage),
        before.environment,
    )


def engine_key(
    spec_file: SpecFile,
    check: StageKey,
    unit_digest: str,
    engine_digest: str,
    gpu: GpuFacts,
    facts: MachineFacts,
    digest_of: DigestOf,
) -> StageKey:
    """Of what an engine does on its GPU. Of the metric its own file counts, not what that reads."""
    inputs, parameters = _judgement(spec_file, check, digest_of)
    return StageKey(
        "parity engine",
        VERSIONS["parity engine"],
        {**inputs, "build": unit_digest, "engine": engine_digest},
        parameters,
        {**check.environment, "driver": facts.cuda_driver_version, "GPU": f"{gpu.device_name}, {gpu.num_sms} SMs"},
    )


def judgement_digest(spec_file: SpecFile, check: StageKey, digest_of: DigestOf) -> str:
    """Of what all engines of a spec are compared on and judged by, wherever they run."""
    inputs, parameters = _judgement(spec_file, check, digest_of)
    return value_digest({"inputs": inputs, "parameters": parameters})


def _judgement(spec_file: SpecFile, check: StageKey, digest_of: DigestOf) -> tuple[dict[str, str], dict[str, Any]]:
    """Inputs and parameters for keys."""
    accuracy = spec_file.spec.accuracy
    judged: dict[str, Any] = {}
    inputs = {**check.inputs, **_samples_digest(spec_file, digest_of)}
    if accuracy is not None:
        judged = {"accuracy": {"metric": accuracy.metric, "scale": accuracy.scale, "max_drop": str(accuracy.max_drop)}}
        files = {"data": accuracy.data, "metric": _metric_file(spec_file, accuracy.metric)}
        inputs |= {
            f"accuracy {key}": _digest_or_problem(path, spec_file, ("accuracy", key), "name the file there", digest_of)
            for key, path in files.items()
            if path
        }
    return inputs, _proof_parameters(spec_file, check) | _bounds(spec_file, "engine") | judged


def _metric_file(spec_file: SpecFile, metric: str) -> Path | None:
    """The file of the metric's module, which is not imported; None if it is not found."""
    from trtforge.usercode.process import parse_reference  # noqa: PLC0415 - few specs need it

    base_dir = spec_file.marks[("accuracy", "metric")].path.resolve().parent
    reference = parse_reference(metric, base_dir, spec_file.where("accuracy", "metric"))
    folders, origin = [str(base_dir), *filter(None, sys.path)], str(reference.file or "")
    for part in filter(None, reference.module.split(".")):
        found = PathFinder.find_spec(part, folders)
        folders, origin = (list(found.submodule_search_locations or ()), found.origin or "") if found else ([], "")
    return Path(origin) if Path(origin).is_file() else None


def _bounds(spec_file: SpecFile, stage: Literal["mended", "lowered", "engine"]) -> dict[str, Any]:
    parity = spec_file.spec.parity
    outputs = {name: asdict(entry) for name, entry in parity.outputs.items()}
    return {"bounds": asdict(getattr(parity, stage)), "outputs": outputs}
