"""What a build spec may say. The JSON Schema in `configs/` is generated from these classes.

Every default stands here and nowhere else; `trtforge plan` prints them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    Tag,
    WithJsonSchema,
    with_config,
)
from typing_extensions import Self

DEFAULT_OUTPUT = Path("dist")
BLANK = "FILL_IN"
"""What `trtforge init` writes where only the user knows the size."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SHAPE_TEXT = re.compile(r"[0-9]{1,19}(x[0-9]{1,19})*")
_INT64_MAX = 2**63 - 1
SPEC_CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False)
_FORBID = with_config(SPEC_CONFIG)


class WrittenInt(int):
    """A whole number from YAML that remembers how it was written."""

    text: str

    def __new__(cls, text: str) -> Self:
        """The value of `text` by YAML 1.2: decimal, 0o17 or 0x1f."""
        bare = text.lstrip("+-")
        number = super().__new__(cls, text, 0 if bare[:2] in ("0o", "0x") else 10)
        number.text = text
        return number


class WrittenFloat(float):
    """A number from YAML that remembers how it was written, so that the version `10.10` is not read as 10.1."""

    text: str

    def __new__(cls, text: str) -> Self:
        """The value of `text` by YAML 1.2, which writes infinity as .inf."""
        number = super().__new__(cls, text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        number.text = text
        return number


def _as_written(value: Any) -> Any:
    return value.text if isinstance(value, WrittenInt | WrittenFloat) else value


def _shape(value: Any) -> Any:
    if isinstance(value, str):
        if not _SHAPE_TEXT.fullmatch(value):
            raise ValueError(f"found '{value[:60]}', expected a shape such as [1, 3, 224, 224] or 1x3x224x224")
        return tuple(int(size) for size in value.split("x"))
    return value


def _values(value: Any) -> Any:
    """A single number stands for the value of a scalar input."""
    return (value,) if isinstance(value, int | float | str) else value


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"found {str(value).lower()}, expected a number")  # noqa: TRY004 - pydantic catches ValueError
    return value


def _size(value: Any) -> Any:
    if value == BLANK:
        raise ValueError("found the blank that trtforge init left, expected the size of this axis")
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(f"found {str(_as_written(value)).lower()}, expected a whole number")
    return int(value) if isinstance(value, float) else value


def _fixed_shape(value: Any) -> Any:
    """A bare shape means min = opt = max."""
    if isinstance(value, Mapping):
        return value
    return {"min": value, "opt": value, "max": value}


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(
            f"found '{value[:60]}', expected letters, digits, '.', '_' and '-' only, as it becomes a file name"
        )
    return value


def _version(value: str) -> str:
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6}){0,3}", value):
        raise ValueError(f"found '{value}', expected a version such as 10.9")
    return value


def _input_range(value: tuple[float, float]) -> tuple[float, float]:
    if value[0] > value[1]:
        raise ValueError(f"found [{value[0]:g}, {value[1]:g}], expected the lower bound first")
    return value


Text = Annotated[str, BeforeValidator(_as_written)]
"""Text, or a number taken as it is written."""
_TEXT_SCHEMA = {"type": ["string", "number"]}
Word = Annotated[Text, WithJsonSchema(_TEXT_SCHEMA)]
Name = Annotated[Text, AfterValidator(_name), WithJsonSchema({**_TEXT_SCHEMA, "pattern": f"^{_NAME.pattern}$"})]
Version = Annotated[
    Text, AfterValidator(_version), WithJsonSchema({**_TEXT_SCHEMA, "pattern": r"^[0-9]+(\.[0-9]+){0,3}$"})
]
Size = Annotated[int, Field(ge=0, le=_INT64_MAX), BeforeValidator(_size)]
StreamCount = Annotated[int, Field(ge=0, le=2**31 - 1), BeforeValidator(_size)]
Mebibytes = Annotated[int, Field(ge=1, le=_INT64_MAX >> 20), BeforeValidator(_size)]
Number = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_number)]
Positive = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False), BeforeValidator(_number)]
Bound = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_number)]
_SHAPE_SCHEMA = {
    "anyOf": [
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": _INT64_MAX}},
        {"type": "string", "pattern": f"^{_SHAPE_TEXT.pattern}$"},
    ]
}
SpecShape = Annotated[tuple[Size, ...], BeforeValidator(_shape), WithJsonSchema(_SHAPE_SCHEMA)]
_Value = Annotated[int, Field(ge=-_INT64_MAX - 1, le=_INT64_MAX), BeforeValidator(_size)]
SpecValues = Annotated[tuple[_Value, ...], BeforeValidator(_values, json_schema_input_type=_Value | tuple[_Value, ...])]
SpecPath = Annotated[Path, BeforeValidator(_as_written)]


@_FORBID
@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSource:
    """A PyTorch model, exported to ONNX in a process of its own."""

    callable: Text
    """`file.py:function` or `module:function`, without arguments; returns model, example inputs, dynamic axes."""
    timeout: Positive | None = None
    """Seconds for loading, for the export, and for each run; without it, no limit."""


@_FORBID
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where the model comes from."""

    onnx: SpecPath | None = None
    """Path of the ONNX file, from the folder of the file that says so."""
    torch: TorchSource | None = None
    """A PyTorch model to export instead."""

    def __post_init__(self) -> None:
        """Exactly one source."""
        if (self.onnx is None) == (self.torch is None):
            found = "neither" if self.onnx is None else "both"
            raise ValueError(f"found {found} of onnx and torch, expected one of them")


@_FORBID
@dataclass(frozen=True, slots=True, kw_only=True)
class InputValues:
    """What valid values of one input are, for the inputs that trtforge generates where it needs data nobody gave."""

    kind: Literal["token_ids", "mask", "image", "free"] | None = None
    """Overrides what the graph's structure suggests."""
    range: Annotated[tuple[Number, Number], AfterValidator(_input_range)] | None = None
    """Inclusive lower and upper bound of the values."""


@_FORBID
@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRange:
    """min, opt and max *values* of an input that decides the shape of another tensor."""

    min: SpecValues
    opt: SpecValues
    max: SpecValues


@_FORBID
@dataclass(frozen=True, slots=True, kw_only=True)
class InputProfile:
    """min, opt and max shape of one input, or of its values. A bare shape means min = opt = max."""

    min: SpecShape | None = None
    opt: SpecShape | None = None
    max: SpecShape | None = None
    values: ValueRange | None = None


_INPUT_PROFILE = Annotated[InputProfile, BeforeValidator(_fixed_shape, json_schema_input_type=InputProfile | SpecShape)]


@_FORBID
@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSpec:
    """One optimization profile."""

    name: Name = "default"
    inputs: dict[Text, _INPUT_PROFILE]
    """Input name -> shapes. Static inputs need no entry."""


@_FORBID
@dataclass(frozen=True, slots=True, kw_only=True)
class FromTraffic:
    """Profiles chosen from the shapes of real requests."""

    log: SpecPath
    """Requests: .jsonl or .csv, also .gz, .parquet, or a histogram in .json."""
    coverage: Annotated[float, Field(gt=0, le=1), BeforeValidator(_number)] = 0.995
    """Least share of the requests that must lie in a profile; the costliest of the rest are left out."""
    max_profiles: Annotated[int, Field(ge=1, le=8), BeforeValidator(_size)] = 4
    """Most profiles to choose; fewer where more save less than 2 %."""
    multiple_of: dict[Text, Annotated[int, Field(ge=1, le=4096), BeforeValidator(_size)]] = field(default_factory=dict)
    """Open size -> what the server pads it to multiples of; min, opt and max are such."""
    max_batch: Annotated[int, Field(ge=1, le=1 << 20), BeforeValidator(_size)] | None = None
    """Largest batch a profile may allow, and the queue may form."""
    memory_mib: Mebibytes | None = None
    """Largest estimate of the memory for activations at a profile's max."""
    window_ms: Positive | None = None
    """How long the server's queue waits to form a batch; needs timestamps and `max_batch`."""
    latencies: SpecPath | None = None
    """Measured latencies (JSON), in place of the cost model."""
    padded: StrictBool = False
    """Whether the server pads every request to the max of its profile."""
    opt_by: Literal["requests", "cost"] = "requests"
    """Whether opt is the commonest shape, or the one that costs most in all."""


@_FORBID
@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficProfiles:
    """Profiles that are chosen from requests."""

    from_traffic: FromTraffic


LISTED, TRAFFIC = "listed profiles", "profiles from traffic"
_PROFILES = Annotated[
    Annotated[tuple[ProfileSpec, ...], Tag(LISTED)] | Annotated[TrafficProfiles, Tag(TRAFFIC)],
    Discriminator(lambda value: TRAFFIC if isinstance(value, dict) and "from_traffic" in value else LISTED),
]


@_FORBID
@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Globs on node names."""

    fp32: tuple[Text, ...] = ()
    """Nodes that compute in FP32 whatever `type` says; each glob must match one."""
    rest: tuple[Text, ...] = ()
    """Nodes that are not quantized and compute in `rest`; each glob must match one."""


@_FORBID
@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The types the engine computes in."""

    type: Literal["fp32", "as_model", "fp16", "bf16", "int8", "fp8"] = "fp32"
    """`fp32` refuses a model that carries other types; `as_model` builds the types the model file has."""
    rest: Literal["fp16", "bf16", "fp32"] = "fp16"
    """With `int8`, the type of what is not quantized."""
    quantization: Literal["explicit", "implicit"] = "explicit"
    """`implicit` is the calibrator route of TensorRT 8.6 and 10.x."""
    keep: Keep = field(default_factory=Keep)
    """Nodes that stay in another type than `type`."""
    min_share: Annotated[float, Field(ge=0, le=1), BeforeValidator(_number)] = 0.5
    """Least share of the work of Conv, MatMul and their like that must end up in `type`."""
    tf32: StrictBool = False
    """Let FP32 matrix products round their inputs to TF32 on Ampere and later."""

    @property
    def is_implicit(self) -> bool:
        """Whether the builder quantizes by scales, and the graph holds none."""
        return self.quantization == "implicit"


_Channel = tuple[Number, ...]


@_FORBID
@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """How image files become an input: decoded, resized, put into channel order, scaled, then (x - mean) / std."""

    layout: Literal["NCHW", "NHWC"]
    """Axes of the input; a batch of one is put before an image."""
    channels: Literal["rgb", "bgr", "gray"] = "rgb"
    size: tuple[Size, Size] | None = None
    """(height, width) to resize to; without it, images keep their size."""
    scale: Number = 1 / 255
    """Factor on the 0 to 255 of a pixel, before mean and std."""
    mean: _Channel = (0.0,)
    """One number a channel, or one for all."""
    std: _Channel = (1.0,)
    """One number a channel, or one for all; none is 0."""

    def __post_init__(self) -> None:
        """Numbers of channels agree."""
        count = 1 if self.channels == "gray" else 3
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, count):
                raise ValueError(f"found {len(values)} numbers in {name}, expected 1 or {count}")
        if 0 in self.std:
            raise ValueError("found 0 in std, expected numbers other than 0")


@_FORBID
@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Real inputs, from which INT8 gets its scales and every lower type its evidence."""

    data: SpecPath | None = None
    """npz, npy, JSONL, parquet, Polygraphy's JSON, a Polygraphy data script (.py), or a folder of images."""
    callable: Text | None = None
    """`file.py:function` or `module:function`, called without arguments; yields a dict of arrays for each sample."""
    table: SpecPath | None = None
    """A table that `trtforge calibrate` wrote, instead of data."""
    images: Images | None = None
    """How image files become an input."""
    method: Literal["auto", "minmax", "percentile", "entropy", "mse", "tensorrt_entropy", "tensorrt_minmax"] = "auto"
    """How a scale comes from what was seen; `auto` picks one for each tensor. `tensorrt_...` are the calibrators of
    TensorRT 8.6 and 10.x themselves, for `quantization: implicit`."""
    percentile: Annotated[float, Field(gt=50, le=100), BeforeValidator(_number)] = 99.99
    """Of `percentile`: the share of magnitudes, in percent, that stays inside the range."""
    samples: Annotated[int, Field(ge=1, le=_INT64_MAX), BeforeValidator(_size)] | None = None
    """Use so many samples from the start; without it, all."""
    batch: Annotated[int, Field(ge=1, le=1 << 20), BeforeValidator(_size)] = 1
    """Rows that are taken together where an array's first axis is an open batch."""
    memory_mib: Mebibytes = 512
    """Limit of the values that are held at once."""
    timeout: Positive | None = None
    """Seconds that `callable` or a data script may take for one sample; without it, no limit."""

    def __post_init__(self) -> None:
        """Exactly one source."""
        given = [name for name in ("data", "callable", "table") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"found {' and '.join(given) or 'none'} of data, callable and table, expected one of them")

    @property
    def is_builders(self) -> bool:
        """Whether TensorRT's own calibrator makes the scales, while it builds."""
        return self.method.startswith("tensorrt_")


@_FORBID
@dataclass(frozen=True, slots=True, kw_only=True)
class BuilderSettings:
    """Settings of TensorRT's builder. A version that cannot honour one refuses it."""

    optimization_level: Annotated[int, Field(ge=0, le=5), BeforeValidator(_size)] = 3
    """0 builds fastest, 5 searches longest."""
    avg_timing_iterations: Annotated[int, Field(ge=1, le=1000), BeforeValidator(_size)] | None = None
    """How often each kernel is timed; without it 8 times with TensorRT, as trtexec does."""
    workspace_mib: Mebibytes | None = None
    """Limit of scratch memory in MiB; without it, the GPU's whole memory."""
    profiling_verbosity: Literal["layer_names_only", "none", "detailed"] = "layer_names_only"
    """How much the engine can tell about its layers."""
    sparse_weights: StrictBool = False
    """Use 2:4 sparse kernels where the weights allow it."""
    strict_nans: StrictBool = False
    """Forbid optimisations that change how NaN propagates."""
    weight_streaming: StrictBool = False
    """Let weights stay in host memory at run time."""
    refit: StrictBool = False
    """Let weights be replaced after the build."""
    strip_weights: StrictBool = False
    """Leave refittable weights out of the engine."""
    version_compatible: StrictBool = False
    """Let later TensorRT versions load the engine."""
    hardware_compatibility: Literal["none", "ampere_plus", "same_compute_capability"] = "none"
    """Let other GPUs load the engine."""
    max_aux_streams: StreamCount | None = None
    """Limit of auxiliary CUDA streams."""
    tactic_sources: (
        tuple[Literal["cublas", "cublas_lt", "cudnn", "edge_mask_convolutions", "jit_convolutions"], ...] | None
    ) = None
    """Kernel libraries the builder may choose from; without it, the version's own choice."""
    record_tactics: StrictBool = False
    """Record the tactic of every operator, for `build --locked`. Equal operators are then measured one by one."""


@_FORBID
@dataclass(frozen=True, slots=True, kw_only=True)
class RtxTarget:
    """Engines by TensorRT-RTX, built ahead of time for compute capabilities; no GPU needed."""

    backend: Literal["tensorrt_rtx"]
    gpus: Annotated[tuple[Word, ...], Field(min_length=1)]
    """Compute capabilities, such as sm86."""
    version: Version | None = None
    """TensorRT-RTX version (1.7) the spec is meant for; without it, the installed one."""
    when_missing: Literal["fail", "skip"] = "fail"
    """What to do where this machine cannot build it."""


@_FORBID
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRtTarget:
    """Engines by TensorRT, each built on the GPU model that it is for."""

    backend: Literal["tensorrt"]
    gpus: Annotated[tuple[Word, ...], Field(min_length=1)]
    """GPU models, such as T4 or A100."""
    version: Version | None = None
    """TensorRT version (8.6, 10.9, 11.4) the spec is meant for; without it, the installed one."""
    when_missing: Literal["fail", "skip"] = "fail"
    """What to do where this machine cannot build it."""


@_FORBID
@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How far an output may be from its reference. What is not given is the preset of the stage and the precision."""

    atol: Bound | None = None
    """Absolute part of the largest error, in units of the output."""
    rtol: Bound | None = None
    """Relative part, times the largest magnitude of the reference output."""
    error_at: Literal["max", "p99.9", "p99", "p50"] | None = None
    """Which error atol and rtol bound."""
    min_cosine: Bound | None = None
    min_sqnr_db: Number | None = None
    max_norm_relative: Bound | None = None
    min_top1: Bound | None = None
    """Least share of rows with the same largest element; declares the output as logits."""
    max_kl: Bound | None = None
    """Largest Kullback-Leibler divergence in nats; declares the output as logits."""
    min_match: Bound | None = None
    """Least share of equal elements of an integer output."""


@_FORBID
@dataclass(frozen=True, slots=True, kw_only=True)
class OutputBounds:
    """Bounds of one output, by stage."""

    onnx: Bounds | None = None
    mended: Bounds | None = None
    lowered: Bounds | None = None
    engine: Bounds | None = None


@_FORBID
@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """How each step is compared with the one before it."""

    samples: SpecPath | None = None
    """Real inputs, npz, npy or Polygraphy's JSON, compared on besides generated ones."""
    random_shapes: Size = 3
    """Sizes drawn inside each profile, besides min, opt and max."""
    seed: Size = 0
    """Of generated inputs and drawn sizes."""
    onnx: Bounds = field(default_factory=Bounds)
    """The ONNX file against the PyTorch model."""
    mended: Bounds = field(default_factory=Bounds)
    """The mended graph against the ONNX file."""
    lowered: Bounds = field(default_factory=Bounds)
    """The graph in the asked types, emulated, against FP32."""
    engine: Bounds = field(default_factory=Bounds)
    """The engine on its GPU, against FP32."""
    outputs: dict[Text, OutputBounds] = field(default_factory=dict)
    """Output name -> its own bounds."""


@_FORBID
@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeDrop:
    """A share of the reference's metric."""

    relative: Annotated[float, Field(ge=0, le=1), BeforeValidator(_number)]


@_FORBID
@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """The gate on the user's own metric."""

    metric: Text
    """`file.py:function`, called as function(outputs, targets) -> float with arrays by name."""
    data: SpecPath
    """npz with an array for each input of the model and more for the targets; first axis the samples."""
    max_drop: Bound | RelativeDrop
    """Largest loss that passes, in points of the metric, or {relative: 0.01} of the reference's."""
    scale: Positive = 1.0
    """The metric's range: 1 for shares, 100 for percent."""


_MeasuredSize = Annotated[int, Field(ge=1, le=2**31 - 1), BeforeValidator(_size)]


@_FORBID
@dataclass(frozen=True, slots=True, kw_only=True)
class Performance:
    """Every engine whose GPU is in the machine that builds is measured, and must keep these limits."""

    p99_ms: Positive | None = None
    """Largest p99 latency in milliseconds, copies of inputs and outputs included, at each size."""
    throughput_qps: Positive | None = None
    """Least queries a second at each size; one batch is one query."""
    max_regression: Annotated[float, Field(ge=0, le=1), BeforeValidator(_number)] | None = None
    """Share by which the median latency may exceed that of the engine in `previous`, measured by turns."""
    previous: SpecPath | None = None
    """manifest.json of the bundle to compare with."""
    sizes: dict[Text, Annotated[tuple[_MeasuredSize, ...], Field(min_length=1)]] = field(default_factory=dict)
    """Name of an open size (INPUT[AXIS] where it has none) -> sizes to measure at, in every combination; by default opt
    of every profile."""
    cuda_graph: StrictBool = False
    """Measure the engine replayed as a CUDA graph."""

    def __post_init__(self) -> None:
        """A regression is one against something."""
        if (self.max_regression is None) != (self.previous is None):
            found = "max_regression" if self.previous is None else "previous"
            raise ValueError(f"found {found} alone, expected max_regression and previous together")


Target = RtxTarget | TensorRtTarget


@_FORBID
@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSpec:
    """How a model becomes engines."""

    version: Literal[1]
    """Version of this format."""
    name: Name
    """Begins every file name."""
    model: ModelSource
    targets: Annotated[tuple[Annotated[Target, Field(discriminator="backend")], ...], Field(min_length=1)]
    inputs: dict[Text, InputValues] = field(default_factory=dict)
    """Input name -> what its values are."""
    profiles: _PROFILES = ()
    """Optimization profiles; needed as soon as an input is dynamic."""
    precision: Precision = field(default_factory=Precision)
    calibration: Calibration | None = None
    """Real inputs; needed for `int8`."""
    builder: BuilderSettings = field(default_factory=BuilderSettings)
    parity: Parity = field(default_factory=Parity)
    accuracy: Accuracy | None = None
    performance: Performance | None = None
    """Without it, a build measures nothing."""
    plugins: tuple[SpecPath, ...] = ()
    """Libraries with operators of their own, for TensorRT on Linux; loaded while an engine is built."""
    fail_on_warning: tuple[Word, ...] = ()
    """Globs; a builder warning that matches one is an error."""
    build_timeout: Positive | None = None
    """Seconds that one engine may take; without it, no limit."""
    output: SpecPath = DEFAULT_OUTPUT
    """Folder for engines and manifest, from the folder of the file that says so."""
