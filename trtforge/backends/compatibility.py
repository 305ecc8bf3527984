"""Does this machine fit a spec: the checks behind `trtforge doctor --for SPEC`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from trtforge.backends.capabilities import capability, version_numbers
from trtforge.backends.refusals import target_compute_capability
from trtforge.errors import CapabilityError
from trtforge.gpu_models import gpu_model
from trtforge.machine import MachineFacts
from trtforge.spec.load import SpecFile
from trtforge.spec.model import Target
from trtforge.types import Graph

Verdict = Literal["ok", "mismatch", "unknown"]


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison of the machine with what the spec needs.

    Attributes:
        name: what was compared (`targets[0]: tensorrt version`).
        verdict: `unknown` where the machine or the table does not tell; never a guess.
        found, expected: both sides, for people.
        source: where `expected` comes from.
        next_step: what to do about a mismatch; "" where nothing is to be done.
    """

    name: str
    verdict: Verdict
    found: str
    expected: str
    source: str
    next_step: str = ""


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a range of versions needs of the machine.

    Attributes:
        backend: `tensorrt` or `tensorrt_rtx`.
        first_version: the range begins here and ends before the next row of that backend.
        cuda_majors: of the packages that exist.
        driver: lowest major version of the Linux driver with the lowest of `cuda_majors`.
        python: lowest and highest minor version of Python 3 with bindings; None where no source was found.
        glibc: lowest version on x86-64, "" where no source was found.
    """

    backend: str
    first_version: str
    cuda_majors: tuple[int, ...]
    driver: int
    python: tuple[int, int] | None
    glibc: str
    source: str


_CUDA_DRIVERS = "CUDA Compatibility, Minor Version Compatibility: 450 for CUDA 11, 525 for 12, 580 for 13"

REQUIREMENTS: tuple[Requirements, ...] = (
    Requirements(
        backend="tensorrt",
        first_version="8.6",
        cuda_majors=(11, 12),
        driver=450,
        python=(6, 11),
        glibc="2.17",
        source=(
            f"TensorRT 8.6.1 support matrix (CUDA 11.0 to 12.1); {_CUDA_DRIVERS}; TensorRT 10.0.1 release notes (glibc"
            " 2.17; Python 3.6 and 3.7 until 8.6, 3.12 from 10.0)"
        ),
    ),
    Requirements(
        backend="tensorrt",
        first_version="10.0",
        cuda_majors=(11, 12),
        driver=450,
        python=(8, 12),
        glibc="2.17",
        source=f"TensorRT 10.0.1 support matrix and release notes; {_CUDA_DRIVERS}",
    ),
    Requirements(
        backend="tensorrt",
        first_version="10.8",
        cuda_majors=(11, 12),
        driver=450,
        python=None,
        glibc="2.28",
        source=f"TensorRT 10.8.0 release notes (glibc); {_CUDA_DRIVERS}; highest Python not documented in what was read",
    ),
    Requirements(
        backend="tensorrt",
        first_version="10.13",
        cuda_majors=(11, 12, 13),
        driver=450,
        python=None,
        glibc="2.28",
        source=(
            "TensorRT 10.8.0 release notes (glibc); TensorRT OSS changelog: 10.13.2 adds CUDA 13 and drops CUDA 11,"
            f" 10.13.0 still has it; {_CUDA_DRIVERS}; highest Python not documented in what was read"
        ),
    ),
    Requirements(
        backend="tensorrt",
        first_version="10.14",
        cuda_majors=(12, 13),
        driver=525,
        python=(8, 13),
        glibc="2.28",
        source=(
            f"TensorRT OSS changelog 10.13.2 (CUDA 11 dropped); {_CUDA_DRIVERS}; prerequisites page before 11.1"
            " (Python 3.8 to 3.13); TensorRT 10.8.0 release notes (glibc)"
        ),
    ),
    Requirements(
        backend="tensorrt",
        first_version="11.0",
        cuda_majors=(12, 13),
        driver=535,
        python=(8, 14),
        glibc="2.28",
        source=(
            "TensorRT 11.1 and 11.4 prerequisites (driver 535, 580 for CUDA 13; Python 3.10 to 3.14, bindings from"
            " 3.8); TensorRT 10.8.0 release notes (glibc, not documented for 11)"
        ),
    ),
    Requirements(
        backend="tensorrt_rtx",
        first_version="1.7",
        cuda_majors=(12, 13),
        driver=525,
        python=(8, 14),
        glibc="2.28",
        source=(
            "tensorrt_rtx_cu13_bindings 1.7.1.116 on PyPI: wheels from cp38 to cp314, manylinux_2_28; TensorRT-RTX 1.4"
            f" prerequisites (packages for CUDA 12 and 13); {_CUDA_DRIVERS}"
        ),
    ),
)

_ONNX_RUNTIME_OPSETS = (
    ("1.16", 19),
    ("1.17", 20),
    ("1.18", 21),
    ("1.23", 24),
    ("1.24", 25),
    ("1.25", 26),
    ("1.32", 28),
)
_ONNX_RUNTIME_SOURCE = (
    "ONNX Runtime compatibility page (to 1.20: opset 21); vcpkg port of 1.23 (ONNX 1.19); release notes of 1.24 (ONNX"
    " 1.20) and 1.25 (ONNX 1.21); 1.32 seen to load opset 28; other versions not documented"
)
_DOCUMENTED_TO = (1, 20)


def compatibility(spec_file: SpecFile, graph: Graph | None, facts: MachineFacts) -> tuple[Check, ...]:
    """Compares a machine with a spec, target by target.

    Args:
        spec_file: the spec.
        graph: the model, or None where it could not be read; then nothing is said about opsets.
        facts: the machine.

    Returns:
        all checks in a stable order; the machine fits if no verdict is `mismatch`.
    """
    checks: list[Check] = []
    for index, target in enumerate(spec_file.spec.targets):
        checks += _target_checks(f"targets[{index}]", target, facts)
    if graph is not None:
        checks.append(_onnxruntime_check(graph, facts))
    return tuple(checks)


def _target_checks(name: str, target: Target, facts: MachineFacts) -> list[Check]:
    checks = _version_checks(name, target, facts)
    if requirements := _requirements(target, facts):
        checks += _machine_checks(f"{name}: {target.backend}", requirements, facts)
    checks += _gpu_checks(name, target, facts)
    return [_skippable(check) for check in checks] if target.when_missing == "skip" else checks


def _skippable(check: Check) -> Check:
    """A mismatch that the spec allows: the build leaves the target out."""
    if check.verdict != "mismatch":
        return check
    return replace(check, verdict="ok", found=f"{check.found} (left out: when_missing: skip)", next_step="")


def _two_part(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _version_checks(name: str, target: Target, facts: MachineFacts) -> list[Check]:
    installed = facts.packages.get(target.backend)
    name = f"{name}: {target.backend} version"
    expected = target.version or "a version that trtforge knows"
    source = "the spec" if target.version else "trtforge's capability table"
    package = target.backend.replace("_", "-")
    if installed is None:
        wanted = f"{package}~={target.version}.0" if target.version and target.version.count(".") == 1 else package
        return [Check(name, "mismatch", "not installed", expected, source, f"pip install '{wanted}'")]
    if target.version and installed.split(".")[: target.version.count(".") + 1] != target.version.split("."):
        return [
            Check(name, "mismatch", installed, expected, source, f"pip install '{package}=={target.version}.*'"),
        ]
    try:
        row = capability(target.backend, installed)
    except CapabilityError as error:
        return [Check(name, "mismatch", installed, str(error), source, error.problems[0].next_step)]
    return [Check(name, "ok", installed, target.version or row.version, source)]


def _requirements(target: Target, facts: MachineFacts) -> Requirements | None:
    """The row for the installed version, else for the one that the spec names."""
    version = facts.packages.get(target.backend) or target.version
    if version is None:
        return None
    try:
        numbers = version_numbers(_two_part(version))
    except ValueError:
        return None
    rows = [
        row for row in REQUIREMENTS if row.backend == target.backend and version_numbers(row.first_version) <= numbers
    ]
    return rows[-1] if rows else None


def _machine_checks(name: str, requirements: Requirements, facts: MachineFacts) -> list[Check]:
    checks = [_python_check(name, requirements, facts), _glibc_check(name, requirements, facts)]
    if requirements.backend == "tensorrt":
        checks.append(_driver_check(name, requirements, facts))
    return checks


def _python_check(name: str, requirements: Requirements, facts: MachineFacts) -> Check:
    name = f"{name}: Python"
    if requirements.python is None:
        return Check(name, "unknown", facts.python_version, "not documented", requirements.source)
    low, high = requirements.python
    expected = f"3.{low} to 3.{high}"
    fits = (3, low) <= version_numbers(_two_part(facts.python_version)) <= (3, high)
    if fits:
        return Check(name, "ok", facts.python_version, expected, requirements.source)
    step = f"run trtforge with Python 3.{max(low, min(high, 12))}"
    return Check(name, "mismatch", facts.python_version, expected, requirements.source, step)


def _glibc_check(name: str, requirements: Requirements, facts: MachineFacts) -> Check:
    name = f"{name}: glibc"
    if not requirements.glibc or not facts.glibc or facts.cpu != "x86_64":
        expected = f"{requirements.glibc} or later (on x86_64)" if requirements.glibc else "not documented"
        return Check(name, "unknown", facts.glibc or f"none ({facts.platform})", expected, requirements.source)
    expected = f"{requirements.glibc} or later"
    if version_numbers(facts.glibc) >= version_numbers(requirements.glibc):
        return Check(name, "ok", facts.glibc, expected, requirements.source)
    step = "use Ubuntu 20.04, Red Hat 8 or a later distribution"
    return Check(name, "mismatch", facts.glibc, expected, requirements.source, step)


def _driver_check(name: str, requirements: Requirements, facts: MachineFacts) -> Check:
    name = f"{name}: CUDA driver"
    expected = f"{requirements.driver} or later, with CUDA {' or '.join(map(str, requirements.cuda_majors))} packages"
    if facts.cuda_driver_version:
        found = f"{facts.cuda_driver_version} (CUDA {facts.cuda_version or '?'})"
        if version_numbers(facts.cuda_driver_version)[0] >= requirements.driver:
            return Check(name, "ok", found, expected, requirements.source)
        step = f"install NVIDIA driver {requirements.driver} or later"
        return Check(name, "mismatch", found, expected, requirements.source, step)
    if facts.cuda_error:
        step = "run on a machine with an NVIDIA GPU and its driver"
        return Check(name, "mismatch", facts.cuda_error, expected, requirements.source, step)
    return Check(name, "unknown", "a driver that does not tell its version", expected, requirements.source)


def _gpu_checks(name: str, target: Target, facts: MachineFacts) -> list[Check]:
    """A tensorrt engine needs its GPU model here; a tensorrt_rtx engine is built without one."""
    if target.backend == "tensorrt_rtx":
        return []
    models = [gpu.model or gpu.device_name for gpu in facts.gpus]
    found = ", ".join(models) or facts.cuda_error
    source = "TensorRT engines are built on the GPU model that runs them (TensorRT developer guide, Engine Portability)"
    checks = []
    for gpu in target.gpus:
        try:
            model = gpu_model(gpu).name
            target_compute_capability(target.backend, gpu)
        except CapabilityError as error:
            step = error.problems[0].next_step
            checks.append(Check(f"{name}: GPU {gpu}", "mismatch", found, str(error), source, step))
            continue
        verdict: Verdict = "ok" if model in models else "mismatch"
        step = "" if verdict == "ok" else f"run on a machine with a {model}, or write when_missing: skip"
        checks.append(Check(f"{name}: GPU {gpu}", verdict, found, model, source, step))
    return checks


def _onnxruntime_check(graph: Graph, facts: MachineFacts) -> Check:
    """Source: ONNX Runtime compatibility: newer versions run all models that worked with earlier ones."""
    name, expected = "onnxruntime: opset", f"runs opset {graph.opset}"
    installed = facts.packages.get("onnxruntime")
    if installed is None:
        step = "pip install onnxruntime"
        return Check(name, "mismatch", "not installed", expected, _ONNX_RUNTIME_SOURCE, step)
    numbers = version_numbers(_two_part(installed))
    reached = [(version_numbers(version), opset) for version, opset in _ONNX_RUNTIME_OPSETS]
    at_least = max((opset for version, opset in reached if version <= numbers), default=0)
    found = f"{installed} (opset {at_least})"
    if graph.opset <= at_least:
        return Check(name, "ok", found, expected, _ONNX_RUNTIME_SOURCE)
    is_exact = numbers <= _DOCUMENTED_TO or numbers in [version for version, _ in reached]
    enough = next((version for version, opset in _ONNX_RUNTIME_OPSETS if opset >= graph.opset), None)
    if is_exact and enough:
        step = f"pip install 'onnxruntime>={enough}'"
        return Check(name, "mismatch", found, expected, _ONNX_RUNTIME_SOURCE, step)
    return Check(name, "unknown", installed, expected, _ONNX_RUNTIME_SOURCE)
