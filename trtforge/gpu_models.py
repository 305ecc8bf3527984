"""GPU models by the names people use, and what CUDA calls them.

TensorRT engines are tuned for one GPU model: two models of one compute capability are two targets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trtforge.errors import CapabilityError, closest


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One GPU model.

    Attributes:
        name: as written in a spec (`A100`, `RTX 4090`).
        compute_capability: such as `sm80`.
        reported_as: what CUDA calls it, where that does not contain the name.
    """

    name: str
    compute_capability: str
    reported_as: str = ""


_NAMES_BY_COMPUTE_CAPABILITY = {
    "sm70": ("V100", "Titan V"),
    "sm75": ("T4", "T1000", "RTX 2060", "RTX 2070", "RTX 2080", "RTX 2080 Ti", "Quadro RTX 6000", "Quadro RTX 8000"),
    "sm80": ("A30", "A100", "A100X", "A800"),
    "sm86": (
        *("A2", "A10", "A10G", "A16", "A40"),
        *("RTX A2000", "RTX A4000", "RTX A4500", "RTX A5000", "RTX A5500", "RTX A6000"),
        *("RTX 3050", "RTX 3060", "RTX 3060 Ti", "RTX 3070", "RTX 3070 Ti"),
        *("RTX 3080", "RTX 3080 Ti", "RTX 3090", "RTX 3090 Ti"),
    ),
    "sm89": (
        *("L4", "L20", "L40", "L40S"),
        *("RTX 2000 Ada", "RTX 4000 Ada", "RTX 4500 Ada", "RTX 5000 Ada", "RTX 6000 Ada"),
        *("RTX 4060", "RTX 4060 Ti", "RTX 4070", "RTX 4070 SUPER", "RTX 4070 Ti", "RTX 4070 Ti SUPER"),
        *("RTX 4080", "RTX 4080 SUPER", "RTX 4090", "RTX 4090 D"),
    ),
    "sm90": ("H20", "H100", "H200", "H800", "GH200"),
    "sm100": ("B200", "GB200"),
    "sm103": ("B300", "GB300"),
    "sm120": (
        *("RTX 5050", "RTX 5060", "RTX 5060 Ti", "RTX 5070", "RTX 5070 Ti", "RTX 5080", "RTX 5090", "RTX 5090 D"),
        *("RTX PRO 4000", "RTX PRO 4500", "RTX PRO 5000", "RTX PRO 6000"),
    ),
    "sm121": ("GB10",),
}
_JETSON = (
    GpuModel("Jetson Xavier", "sm72", reported_as="Xavier"),
    GpuModel("Jetson Orin", "sm87", reported_as="Orin"),
    GpuModel("Jetson Thor", "sm110", reported_as="Thor"),
)

GPU_MODELS: dict[str, GpuModel] = {
    model.name: model
    for model in (
        *(GpuModel(name, sm) for sm, names in _NAMES_BY_COMPUTE_CAPABILITY.items() for name in names),
        *_JETSON,
    )
}
"""Every known model by name.

Source: NVIDIA, "CUDA GPU Compute Capability" (developer.nvidia.com/cuda-gpus), the table of compute capabilities; sm110 for Thor
and sm121 for GB10 also in the TensorRT 11.1 CMakeLists.txt and the TensorRT-RTX 1.5 support matrix.
"""

_VENDOR = re.compile(r"\b(nvidia|tesla|geforce)\b", re.IGNORECASE)
_WORD = re.compile(r"[a-z0-9.]+", re.IGNORECASE)
_FORM_FACTOR = re.compile(
    r"(sxm\d?|pcie|nvl\d*|hbm\d\w*|\d+gb|generation|blackwell|server|workstation|edition|max|q|nvgpu)", re.IGNORECASE
)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in _WORD.findall(_VENDOR.sub(" ", text)))


def _squeezed(text: str) -> str:
    return "".join(_words(text))


def model_of_device(device_name: str) -> str | None:
    """The model in `GPU_MODELS` that CUDA's `device_name` stands for, None if it stands for none of them.

    Memory size and form factor do not make another model (`NVIDIA A100-SXM4-80GB` is `A100`); `Laptop GPU`, `Ti`, `D`
    and MIG instances do, as they have another number of multiprocessors.
    """
    words = _words(device_name)
    by_words = {_words(model.reported_as or name): name for name, model in GPU_MODELS.items()}
    for length in range(len(words), 0, -1):
        name = by_words.get(words[:length])
        if name and all(_FORM_FACTOR.fullmatch(word) for word in words[length:]):
            return name
    return None


def gpu_model(name: str) -> GpuModel:
    """The model called `name`; capitals, spaces, dashes and vendor words do not matter (`rtx4090`, `NVIDIA RTX-4090`).

    Raises:
        CapabilityError: there is no such model.
    """
    known = {_squeezed(model): model for model in GPU_MODELS}
    if found := known.get(_squeezed(name)):
        return GPU_MODELS[found]
    near = closest(_squeezed(name), known)
    raise CapabilityError(
        f"unknown GPU model '{name}'",
        next_step=f"write {known[near]}" if near else "write a GPU model such as T4, A100, L4, H200 or RTX 4090",
    )


_COMPUTE_CAPABILITY = re.compile(r"(?:sm_?)?(\d{1,2})\.?(\d)", re.IGNORECASE)


def parse_compute_capability(text: str) -> str:
    """`text` in the form `sm86`, from `sm86`, `sm_86`, `8.6` or `86`.

    Raises:
        CapabilityError: it is none of these.
    """
    match = _COMPUTE_CAPABILITY.fullmatch(text.strip())
    if match is None:
        raise CapabilityError(
            f"'{text}' is no compute capability", next_step="write it as sm86, sm89 or sm120 (or 8.6, 8.9, 12.0)"
        )
    return f"sm{int(match[1])}{match[2]}"


def compute_capability_number(compute_capability: str) -> int:
    """For comparing: `sm86` -> 86, `sm120` -> 120."""
    return int(compute_capability.removeprefix("sm"))
