"""What this machine is: Python, packages, CUDA driver and GPUs. Nothing here raises, imports TensorRT or allocates on a GPU."""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.metadata
import platform
import re
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

from trtforge.gpu_models import model_of_device

_DISTRIBUTIONS = {
    "tensorrt": (
        *("tensorrt", "tensorrt-cu13", "tensorrt-cu12", "tensorrt-cu11"),
        *("tensorrt-cu13-bindings", "tensorrt-cu12-bindings", "tensorrt-cu11-bindings", "tensorrt-bindings"),
    ),
    "tensorrt_lean": ("tensorrt-lean", "tensorrt-lean-cu13", "tensorrt-lean-cu12"),
    "tensorrt_dispatch": ("tensorrt-dispatch", "tensorrt-dispatch-cu13", "tensorrt-dispatch-cu12"),
    "tensorrt_rtx": ("tensorrt-rtx", "tensorrt-rtx-cu13", "tensorrt-rtx-cu12"),
    "onnx": ("onnx",),
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "polygraphy": ("polygraphy",),
    "pycuda": ("pycuda",),
    "cuda-python": ("cuda-python", "cuda-bindings"),
    "numpy": ("numpy",),
}
_VERSION_FILES = (Path("/proc/driver/nvidia/version"), Path("/sys/module/nvidia/version"))
_DRIVER_VERSION = re.compile(r"\b(\d{3}\.\d+(?:\.\d+)?)\b")

# Source: CUDA driver API, enum CUdevice_attribute.
_MULTIPROCESSOR_COUNT = 16
_COMPUTE_CAPABILITY_MAJOR = 75
_COMPUTE_CAPABILITY_MINOR = 76


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU that this process may use.

    Attributes:
        index: CUDA's device index, after CUDA_VISIBLE_DEVICES.
        device_name: as CUDA reports it (`NVIDIA H200`).
        model: the name in `gpu_models.GPU_MODELS`, None for a GPU that is not listed there.
        compute_capability: such as `sm90`.
        num_sms: streaming multiprocessors.
        uuid: such as `GPU-8f6a...`, "" where the driver gives none.
    """

    index: int
    device_name: str
    model: str | None
    compute_capability: str
    num_sms: int
    memory_bytes: int
    uuid: str


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """This machine, as far as builds depend on it.

    Attributes:
        python_version: "3.11.7".
        platform: `sys.platform`, such as `linux`.
        os: name and version of the distribution.
        glibc: "2.35", "" where there is none.
        cpu: such as `x86_64`.
        packages: import name (cuda-python: project name) -> version, of those that are installed.
        cuda_driver_version: of the kernel driver ("580.159.03"), "" without one.
        cuda_version: the newest CUDA that the driver supports ("13.0"), "" without a driver.
        cuda_error: why `gpus` is empty, "" otherwise.
    """

    python_version: str
    platform: str
    os: str
    glibc: str
    cpu: str
    packages: dict[str, str]
    cuda_driver_version: str
    cuda_version: str
    cuda_error: str
    gpus: tuple[GpuFacts, ...]


def machine_facts() -> MachineFacts:
    """Looks at this machine. Creates no CUDA context and starts no process; never raises."""
    cuda_version, gpus, cuda_error = _cuda_facts()
    return MachineFacts(
        python_version=platform.python_version(),
        platform=sys.platform,
        os=_os_name(),
        glibc=platform.libc_ver()[1] if platform.libc_ver()[0] == "glibc" else "",
        cpu=platform.machine(),
        packages=_packages(),
        cuda_driver_version=_driver_version(),
        cuda_version=cuda_version,
        cuda_error=cuda_error,
        gpus=gpus,
    )


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.platform(terse=True)


def _packages() -> dict[str, str]:
    found = {}
    for name, distributions in _DISTRIBUTIONS.items():
        for distribution in distributions:
            try:
                found[name] = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
            break
    if "tensorrt" not in found and (
        version := _version_in_source("tensorrt_bindings") or _version_in_source("tensorrt")
    ):
        found["tensorrt"] = version
    return found


def _version_in_source(module: str) -> str:
    """`__version__` of a module that lies on the path without a distribution, as in some containers; not imported."""
    spec = importlib.machinery.PathFinder.find_spec(module)
    try:
        text = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
    except (OSError, UnicodeDecodeError):
        return ""
    match = re.search(r'^__version__ = "([0-9.]+)"', text, re.MULTILINE)
    return match[1] if match else ""


def _driver_version() -> str:
    for path in _VERSION_FILES:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if match := _DRIVER_VERSION.search(text):
            return match[1]
    return _driver_version_from_nvml()


def _driver_version_from_nvml() -> str:
    """For WSL and Windows, where no file tells it."""
    try:
        nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, len(text)):
            return ""
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return ""
    return text.value.decode(errors="replace")


class _CudaCallError(Exception):
    """A call into the CUDA driver gave something else than CUDA_SUCCESS."""


def _cuda_facts() -> tuple[str, tuple[GpuFacts, ...], str]:
    """(CUDA version of the driver, GPUs, why there are none)."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        cuda = ctypes.CDLL(name)
    except OSError as error:
        return "", (), f"no CUDA driver on this machine ({error})"
    version = ""
    try:
        version = _supported_cuda(cuda)
        _call(cuda, "cuInit", 0)
        count = ctypes.c_int()
        _call(cuda, "cuDeviceGetCount", ctypes.byref(count))
        gpus = tuple(_gpu_facts(cuda, index) for index in range(count.value))
    except (_CudaCallError, AttributeError) as error:
        return version, (), str(error)
    return version, gpus, "" if gpus else "the CUDA driver reports no GPU"


def _call(cuda: ctypes.CDLL, function: str, *arguments: object) -> None:
    code = getattr(cuda, function)(*arguments)
    if code:
        text = ctypes.c_char_p()
        cuda.cuGetErrorName(code, ctypes.byref(text))
        raise _CudaCallError(f"{function} gave {(text.value or b'an unknown error').decode()} ({code})")


def _supported_cuda(cuda: ctypes.CDLL) -> str:
    version = ctypes.c_int()
    _call(cuda, "cuDriverGetVersion", ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _attribute(cuda: ctypes.CDLL, attribute: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    _call(cuda, "cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
    return value.value


def _gpu_facts(cuda: ctypes.CDLL, index: int) -> GpuFacts:
    device = ctypes.c_int()
    _call(cuda, "cuDeviceGet", ctypes.byref(device), index)
    text = ctypes.create_string_buffer(256)
    _call(cuda, "cuDeviceGetName", text, len(text), device)
    memory = ctypes.c_size_t()
    _call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    device_name = text.value.decode(errors="replace")
    major = _attribute(cuda, _COMPUTE_CAPABILITY_MAJOR, device)
    minor = _attribute(cuda, _COMPUTE_CAPABILITY_MINOR, device)
    return GpuFacts(
        index=index,
        device_name=device_name,
        model=model_of_device(device_name),
        compute_capability=f"sm{major}{minor}",
        num_sms=_attribute(cuda, _MULTIPROCESSOR_COUNT, device),
        memory_bytes=memory.value,
        uuid=_gpu_uuid(cuda, device),
    )


def _gpu_uuid(cuda: ctypes.CDLL, device: ctypes.c_int) -> str:
    raw = (ctypes.c_ubyte * 16)()
    try:
        _call(cuda, "cuDeviceGetUuid", raw, device)
    except (_CudaCallError, AttributeError):
        return ""
    return f"GPU-{uuid.UUID(bytes=bytes(raw))}"
