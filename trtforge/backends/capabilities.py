"""What each TensorRT and TensorRT-RTX version can do, as data.

A row is a version at which something changed, written as the difference from the row before. Every row says where its
facts come from; what no source says is marked "not documented".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trtforge.errors import CapabilityError

BACKEND_NAMES = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT-RTX"}


@dataclass(frozen=True, slots=True)
class Capability:
    """What one version can do. In every mapping, a text is "" for yes and otherwise the sentence that says why not.

    Attributes:
        backend: `tensorrt` or `tensorrt_rtx`.
        version: two-part number of the release ("10.9").
        min_opset, max_opset: ONNX opsets that it reads; a model outside is refused.
        documented_max_opset: the last opset that NVIDIA says is supported; between this and `max_opset` is a warning.
        late_operators: (operator, opset of its definition) -> why this version misreads that definition.
        network_flags: names of NetworkDefinitionCreationFlag that a typed graph needs.
        preview_features: names of PreviewFeature without which two contexts cannot use one profile.
        compute_capabilities: that it builds for, lowest first.
        io_dtypes: element type of graph inputs and outputs -> "" or why not; a type that is absent is not supported.
        narrowed_dtypes: element type that the parser replaces -> what it becomes.
        precisions: precision -> lowest compute capability that has it (`sm80`), or why not.
        fp32_products_from: lowest compute capability with FP32 matrix products.
        implicit_quantization: "" or why there is no calibrator.
        settings: field of `BuilderSettings`, or `field=value`, -> why it is refused; one that is absent is honoured.
        unsupported_operators: operators of the standard domain that the parser does not read.
        own_operators: operators outside the ONNX standard that the parser itself reads.
        custom_operators: "" or why operators of other domains are refused.
        local_functions: "" or why functions that the model itself defines are refused.
        needs_gpu: whether a build needs the GPU it is for.
        sources: where the row comes from, the rows before it included.
    """

    backend: str
    version: str
    min_opset: int
    max_opset: int
    documented_max_opset: int
    late_operators: dict[tuple[str, int], str]
    network_flags: tuple[str, ...]
    preview_features: tuple[str, ...]
    compute_capabilities: tuple[str, ...]
    io_dtypes: dict[str, str]
    narrowed_dtypes: dict[str, str]
    precisions: dict[str, str]
    fp32_products_from: str
    implicit_quantization: str
    settings: dict[str, str]
    unsupported_operators: frozenset[str]
    own_operators: frozenset[str]
    custom_operators: str
    local_functions: str
    needs_gpu: bool
    sources: tuple[str, ...]

    @property
    def name(self) -> str:
        """For messages: `tensorrt 10.9`."""
        return f"{self.backend} {self.version}"

    def flags_of_network(self, *, implicit: bool) -> tuple[str, ...]:
        """Names of NetworkDefinitionCreationFlag; a calibrator has no say in a strongly typed network."""
        return tuple(name for name in self.network_flags if not (implicit and name == "STRONGLY_TYPED"))

    def can_compute(self, precision: str, compute_capability: str) -> str:
        """Why GPUs of `compute_capability` do not compute in `precision`, "" if they do."""
        lowest = self.precisions[precision]
        if not lowest.startswith("sm"):
            return lowest
        if int(compute_capability[2:]) >= int(lowest[2:]):
            return ""
        return f"{self.name} computes in {precision} from {lowest} on"


_TEXT_TYPE = "TensorRT has no text type; split the tokenizer off and start the model at its numbers"
_FLOAT64 = "the parser silently makes it float32; cast it to float32 in the model"
_NO_TYPE = "TensorRT has no such type"

_IO_DTYPES_8 = {
    "float32": "",
    "float16": "",
    "int8": "",
    "int32": "",
    "int64": "",
    "uint8": "",
    "bool": "",
    "float64": _FLOAT64,
    "string": _TEXT_TYPE,
    "bfloat16": "TensorRT has BF16 from 10.0 on; cast it to float32 in the model",
    "int16": _NO_TYPE,
    "uint16": _NO_TYPE,
    "uint32": _NO_TYPE,
    "uint64": _NO_TYPE,
}
_IO_DTYPES_10 = _IO_DTYPES_8 | {"bfloat16": "", "float8e4m3fn": "", "int4": ""}

_ALWAYS_UNSUPPORTED = frozenset(
    (
        *("AffineGrid", "Bernoulli", "BitCast", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"),
        *("CenterCropPad", "Col2Im", "Compress", "ConcatFromSequence", "ConvInteger", "CumProd", "Det"),
        *("DynamicQuantizeLinear", "ImageDecoder", "MatMulInteger", "MaxRoiPool", "MaxUnpool", "MelWeightMatrix"),
        *("Multinomial", "NegativeLogLikelihoodLoss", "Optional", "OptionalGetElement", "OptionalHasElement"),
        *("QLinearConv", "QLinearMatMul", "RegexFullMatch", "SequenceAt", "SequenceConstruct", "SequenceEmpty"),
        *("SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap", "SoftmaxCrossEntropyLoss"),
        *("SplitToSequence", "StringConcat", "StringNormalizer", "StringSplit", "SwiGLU", "TfIdfVectorizer", "Unique"),
    )
)
_LATE_OPERATORS = frozenset(
    (
        *("Attention", "BlackmanWindow", "CastLike", "DFT", "DeformConv", "Gelu", "HammingWindow", "HannWindow"),
        *("Hardmax", "Mish", "RMSNormalization", "RotaryEmbedding", "STFT", "Swish", "TensorScatter"),
    )
)
_LEGACY_OPERATORS = frozenset({"ImageScaler", "ParametricSoftplus", "ScaledTanh"})

_NO_PLUGINS = "it needs a TensorRT plugin, and the spec names no plugins"
_ONLY_EXPLICIT = (
    "TensorRT 11 removed calibrators: quantization is part of the model (QuantizeLinear and DequantizeLinear)"
)
_EXTERNAL_LIBRARIES_GONE = "TensorRT 11 has no cuBLAS and cuDNN kernels"

_TENSORRT_8_6 = Capability(
    backend="tensorrt",
    version="8.6",
    min_opset=9,
    max_opset=17,
    documented_max_opset=17,
    late_operators={},
    network_flags=("EXPLICIT_BATCH",),
    preview_features=("PROFILE_SHARING_0806",),
    compute_capabilities=("sm70", "sm72", "sm75", "sm80", "sm86", "sm87", "sm89", "sm90"),
    io_dtypes=_IO_DTYPES_8,
    narrowed_dtypes={"int64": "int32", "float64": "float32"},
    precisions={
        "fp32": "sm70",
        "fp16": "sm70",
        "int8": "sm70",
        "bf16": "TensorRT has BF16 from 10.0 on",
        "fp8": "TensorRT quantizes to FP8 from 10.0 on",
        "int4": "TensorRT quantizes to INT4 from 10.0 on",
        "fp4": "TensorRT quantizes to FP4 from 10.8 on",
    },
    fp32_products_from="sm70",
    implicit_quantization="",
    settings={
        "strict_nans": "TensorRT has it from 10.6 on",
        "weight_streaming": "TensorRT has it from 10.0 on",
        "strip_weights": "TensorRT has it from 10.0 on",
        "hardware_compatibility=same_compute_capability": "TensorRT has it from 10.9 on",
        "record_tactics": "TensorRT has timing caches that hold the choice for each operator from 10.8 on",
    },
    unsupported_operators=_ALWAYS_UNSUPPORTED | _LATE_OPERATORS,
    own_operators=_LEGACY_OPERATORS,
    custom_operators=_NO_PLUGINS,
    local_functions="TensorRT reads functions defined in the model from 10.0 on; export without them, or inline them",
    needs_gpu=True,
    sources=(
        "onnx-tensorrt operators.md, branch 8.6-GA: opset 17, operators, INT64 to INT32 and DOUBLE to FLOAT clamped",
        "onnx-tensorrt operators.md, branch 10.0-GA: lowest opset 9; not documented for 8.6, taken to hold there too",
        "NvInfer.h release/8.6 and TensorRT 8.6.1 Python bindings: flags, data types, hardware compatibility levels",
        "NvInferRuntime.h release/8.6, PreviewFeature::kPROFILE_SHARING_0806: off by default; in release/10.0 always on",
        "TensorRT 8.5.2 release notes: Maxwell and Pascal are still there in 8.6; trtforge names no such GPU model",
        "FP16 and INT8 on sm70: not documented in what was read; a GPU of that age falls back to FP32 kernels",
    ),
)


def _changed(before: Capability, version: str, source: str, **changes: object) -> Capability:
    return replace(before, version=version, sources=(*before.sources, source), **changes)  # type: ignore[arg-type]


def _without(settings: dict[str, str], *names: str) -> dict[str, str]:
    return {name: reason for name, reason in settings.items() if name not in names}


_SINCE_10_9 = "TensorRT reads the opset 21 definition from 10.9 on; convert the model to opset 20"

_T10_0 = _changed(
    _TENSORRT_8_6,
    "10.0",
    "onnx-tensorrt operators.md, branch 10.0-GA: opset 9 to 20, operators and types; changelog 9.0: local functions; NvInfer.h release/10.0;"
    " onnx-tensorrt onnxOpImporters.cpp of 10.0: TRT_FP8 and TRT_INT4 operators; TensorRT 10.1.0 support matrix: SM 7.0"
    " or higher; BF16 from sm80, FP8 from sm89: TensorRT quantized types",
    max_opset=20,
    documented_max_opset=20,
    network_flags=("STRONGLY_TYPED",),
    preview_features=(),
    io_dtypes=_IO_DTYPES_10,
    narrowed_dtypes={"float64": "float32"},
    precisions=_TENSORRT_8_6.precisions | {"bf16": "sm80", "fp8": "sm89", "int4": "sm80"},
    settings=_without(_TENSORRT_8_6.settings, "weight_streaming", "strip_weights"),
    unsupported_operators=_TENSORRT_8_6.unsupported_operators - {"CastLike", "Gelu", "Hardmax", "Mish"},
    local_functions="",
    own_operators=_LEGACY_OPERATORS
    | {
        *("TRT_FP8QuantizeLinear", "TRT_FP8DequantizeLinear"),
        *("TRT_INT4QuantizeLinear", "TRT_INT4DequantizeLinear"),
    },
)
_T10_1 = _changed(
    _T10_0,
    "10.1",
    "onnx-tensorrt changelog 10.1: DeformConv; 10.1 to 10.5: highest opset not documented, kept at 20",
    unsupported_operators=_T10_0.unsupported_operators - {"DeformConv"},
)
_T10_2 = _changed(_T10_1, "10.2", "NvInfer.h release/10.2")
_T10_3 = _changed(_T10_2, "10.3", "NvInfer.h release/10.3")
_T10_4 = _changed(
    _T10_3,
    "10.4",
    "onnx-tensorrt changelog 10.4: BlackmanWindow, HammingWindow, HannWindow",
    unsupported_operators=_T10_3.unsupported_operators - {"BlackmanWindow", "HammingWindow", "HannWindow"},
)
_T10_5 = _changed(
    _T10_4,
    "10.5",
    "TensorRT 10.5.0 release notes: Volta (sm70) removed; onnx-tensorrt changelog 10.5: STFT",
    compute_capabilities=("sm72", "sm75", "sm80", "sm86", "sm87", "sm89", "sm90"),
    unsupported_operators=_T10_4.unsupported_operators - {"STFT"},
)
_T10_6 = _changed(
    _T10_5,
    "10.6",
    "NvInfer.h release/10.6: STRICT_NANS; onnx-tensorrt changelog 10.6: built with ONNX 1.17, whose last opset is 22;"
    " highest opset not documented; GroupNormalization of opset 21: NVIDIA/TensorRT issue 4336",
    max_opset=22,
    late_operators={("GroupNormalization", 21): _SINCE_10_9},
    settings=_without(_T10_5.settings, "strict_nans"),
)
_T10_7 = _changed(_T10_6, "10.7", "NvInfer.h release/10.7")
_T10_8 = _changed(
    _T10_7,
    "10.8",
    "TensorRT 10.8.0 release notes: Blackwell (sm100 early access, sm120) and FP4 on it; sampleEditableTimingCache of"
    " 10.8: EDITABLE_TIMING_CACHE, with which each layer has a tactic of its own",
    settings=_without(_T10_7.settings, "record_tactics"),
    compute_capabilities=(*_T10_7.compute_capabilities, "sm100", "sm120"),
    precisions=_T10_7.precisions | {"fp4": "sm100"},
)
_T10_9 = _changed(
    _T10_8,
    "10.9",
    "NvInfer.h release/10.9: SAME_COMPUTE_CAPABILITY; onnx-tensorrt changelog 10.9: GroupNormalization of opset 21",
    late_operators={},
    settings=_without(_T10_8.settings, "hardware_compatibility=same_compute_capability"),
)
_T10_10 = _changed(_T10_9, "10.10", "NvInfer.h release/10.10")
_T10_11 = _changed(
    _T10_10,
    "10.11",
    "onnx-tensorrt changelog 10.11: built with ONNX 1.18, whose last opset is 23; highest opset not documented",
    max_opset=23,
)
_T10_12 = _changed(
    _T10_11,
    "10.12",
    "onnx-tensorrt changelog 10.12: MXFP8 operators",
    own_operators=_T10_11.own_operators
    | {"TRT_MXFP8QuantizeLinear", "TRT_MXFP8DequantizeLinear", "TRT_MXFP8DynamicQuantize"},
)
_T10_13 = _changed(_T10_12, "10.13", "NvInfer.h release/10.13")
_T10_14 = _changed(
    _T10_13,
    "10.14",
    "onnx-tensorrt operators.md of 10.14: opset 9 to 24, Attention; TensorRT OSS CMakeLists.txt release/10.14:"
    " no sm72, sm110 with CUDA 13; sm103 and sm121 on 10.x: not documented in what was read",
    max_opset=24,
    documented_max_opset=24,
    compute_capabilities=("sm75", "sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm110", "sm120"),
    unsupported_operators=_T10_13.unsupported_operators - {"Attention"},
)
_T10_15 = _changed(
    _T10_14,
    "10.15",
    "onnx-tensorrt operators.md of 10.15: opset 9 to 24; changelog 10.15: RotaryEmbedding, RMSNormalization,"
    " TensorScatter",
    unsupported_operators=_T10_14.unsupported_operators - {"RotaryEmbedding", "RMSNormalization", "TensorScatter"},
)
_T10_16 = _changed(_T10_15, "10.16", "NvInfer.h release/10.16; highest opset not documented, kept at 24")
_T11_0 = _changed(
    _T10_16,
    "11.0",
    "TensorRT migration guide 10.x to 11.x and NvInfer.h release/11.0: always strongly typed, no calibrators, no"
    " external tactic sources; 11.0 changelog: Swish, TRT_Attention, TRT_MoE, TRT_KVCacheUpdate; prerequisites pages"
    " of 11.1 and 11.4: Turing (sm75) or later",
    network_flags=(),
    compute_capabilities=(
        *("sm75", "sm80", "sm86", "sm87", "sm89", "sm90"),
        *("sm100", "sm103", "sm110", "sm120", "sm121"),
    ),
    implicit_quantization=_ONLY_EXPLICIT,
    settings={f"tactic_sources={source}": _EXTERNAL_LIBRARIES_GONE for source in ("cublas", "cublas_lt", "cudnn")},
    unsupported_operators=_T10_16.unsupported_operators - {"Swish"},
    own_operators=_T10_16.own_operators | {"TRT_Attention", "TRT_MoE", "TRT_KVCacheUpdate"},
)
_T11_1 = _changed(_T11_0, "11.1", "onnx-tensorrt operators.md of 11.1: opset 9 to 24")
_T11_2 = _changed(
    _T11_1,
    "11.2",
    "TensorRT 11.2 GitHub release notes: DFT",
    unsupported_operators=_T11_1.unsupported_operators - {"DFT"},
)
_T11_3 = _changed(
    _T11_2,
    "11.3",
    "TensorRT 11.3 release notes: Vera Rubin (sm107)",
    compute_capabilities=(*_T11_2.compute_capabilities[:8], "sm107", *_T11_2.compute_capabilities[8:]),
)
_T11_4 = _changed(
    _T11_3,
    "11.4",
    "TensorRT 11.4.0 Python bindings; highest opset 24: the 11.5 release notes add opset 25, although the ONNX Opset"
    " Guide gives 25 for all of 11.x",
)

_RTX = "TensorRT-RTX"
_RTX_CPU_ONLY = "TensorRT-RTX builds it only with a GPU, and trtforge builds TensorRT-RTX engines without one"
_RTX_1_7 = Capability(
    backend="tensorrt_rtx",
    version="1.7",
    min_opset=9,
    max_opset=24,
    documented_max_opset=24,
    late_operators={},
    network_flags=(),
    preview_features=(),
    compute_capabilities=("sm75", "sm80", "sm86", "sm89", "sm120", "sm121"),
    io_dtypes=_IO_DTYPES_10,
    narrowed_dtypes={"float64": "float32"},
    precisions={
        "fp32": "sm75",
        "fp16": "sm75",
        "int8": "sm75",
        "bf16": "sm80",
        "int4": "sm80",
        "fp8": "sm89",
        "fp4": "sm120",
    },
    fp32_products_from="sm80",
    implicit_quantization=(
        "TensorRT-RTX has no calibrators: quantization is part of the model (QuantizeLinear and DequantizeLinear)"
    ),
    settings={
        "refit": _RTX_CPU_ONLY,
        "strip_weights": _RTX_CPU_ONLY,
        "version_compatible": f"{_RTX} engines run on the {_RTX} release that built them, and it ships no lean runtime",
        "hardware_compatibility": f"{_RTX} ignores it; name several compute capabilities under gpus instead",
        "avg_timing_iterations": f"{_RTX} measures nothing while it builds; kernels are chosen where the engine runs",
        "record_tactics": f"{_RTX} measures nothing while it builds; kernels are chosen where the engine runs",
        "tactic_sources=cublas": f"{_RTX} has no cuBLAS kernels",
        "tactic_sources=cublas_lt": f"{_RTX} has no cuBLAS kernels",
        "tactic_sources=cudnn": f"{_RTX} has no cuDNN kernels",
    },
    unsupported_operators=_ALWAYS_UNSUPPORTED | {"DFT", "DeformConv", "NonZero"},
    own_operators=_LEGACY_OPERATORS
    | {
        *("TRT_Attention", "TRT_MoE", "TRT_KVCacheUpdate", "TRT_FP8QuantizeLinear", "TRT_FP8DequantizeLinear"),
        *("TRT_INT4QuantizeLinear", "TRT_INT4DequantizeLinear", "TRT_FP4DynamicQuantize"),
        *("TRT_MXFP8QuantizeLinear", "TRT_MXFP8DequantizeLinear", "TRT_MXFP8DynamicQuantize"),
    },
    custom_operators=f"{_RTX} takes no plugins",
    local_functions="",
    needs_gpu=False,
    sources=(
        "tensorrt_rtx 1.7.1.116 Python bindings: ComputeCapability, TacticSource, BuilderFlag",
        (
            "seen with tensorrt_rtx 1.7.1.116 on a machine without a GPU: builds with optimization levels 0 to 5, a"
            " workspace limit, every profiling verbosity, SPARSE_WEIGHTS, STRICT_NANS, WEIGHT_STREAMING, max_aux_streams,"
            " the two convolution tactic sources and TF32 cleared; REFIT and STRIP_PLAN fail in Myelin with 'status =="
            " CUDA_SUCCESS'; VERSION_COMPATIBLE asks for libnvinfer_lean.so.1; setHardwareCompatibilityLevel() 'is"
            " unsupported in TensorRT-RTX'"
        ),
        (
            "seen with tensorrt_rtx 1.7.1.116: supports_operator() over all operators of ONNX 1.23; it says yes to NonZero,"
            " whose import then asks for a plugin that there is not"
        ),
        (
            "seen with tensorrt_rtx 1.7.1.116: float32, float16, bfloat16, int8, int32, int64, uint8, bool, float8e4m3fn"
            " and int4 inputs build, float64 becomes FLOAT, the other types are 'Unsupported ONNX data type'"
        ),
        (
            "seen with tensorrt_rtx 1.7.1.116: a MatMul in FP16 builds from sm75, BF16 from sm80, FP8 Q/DQ from sm89;"
            " sm75 says 'FP32 GEMM is not supported'; weight-only INT4 builds from sm80, NVFP4 from sm120"
        ),
        (
            "opsets: the parser checks no upper limit (opset 30 is accepted without a word) and warns only below 7; not"
            " documented for TensorRT-RTX; 9 to 24 from operators.md of onnx-tensorrt 11.1, which reads the same operators"
        ),
    ),
)

_TENSORRT_ROWS = (
    *(_TENSORRT_8_6, _T10_0, _T10_1, _T10_2, _T10_3, _T10_4, _T10_5, _T10_6, _T10_7, _T10_8, _T10_9, _T10_10),
    *(_T10_11, _T10_12, _T10_13, _T10_14, _T10_15, _T10_16, _T11_0, _T11_1, _T11_2, _T11_3, _T11_4),
)
CAPABILITIES: dict[str, dict[str, Capability]] = {
    "tensorrt": {row.version: row for row in _TENSORRT_ROWS},
    "tensorrt_rtx": {_RTX_1_7.version: _RTX_1_7},
}
"""Rows by backend and two-part version, oldest first."""


def known_versions(backend: str) -> tuple[str, ...]:
    """Two-part versions of `backend` ("10.9"), oldest first."""
    return tuple(CAPABILITIES[backend])


def newest_version(backend: str) -> str:
    """The newest version of `backend` that the table knows."""
    return known_versions(backend)[-1]


def version_numbers(version: str) -> tuple[int, ...]:
    """For comparing: "10.10" -> (10, 10), which is above (10, 9).

    Raises:
        ValueError: a part is not a number.
    """
    return tuple(int(part) for part in version.split("."))


def is_weakly_typed(version: str) -> bool:
    """Whether this version of TensorRT takes a graph's types as a wish; from 10 on they bind."""
    return version_numbers(version) < (10,)


def capability(backend: str, version: str) -> Capability:
    """The row for a version given in full ("1.7.1.116") or in two parts ("10.9").

    Raises:
        CapabilityError: the table has no such version.
    """
    row = CAPABILITIES[backend].get(".".join(version.split(".")[:2]))
    if row is not None:
        return row
    known = known_versions(backend)
    expected = known[0] if len(known) == 1 else f"{known[0]} to {known[-1]}"
    raise CapabilityError(
        f"{backend} {version} is not known to trtforge (it knows {expected})",
        next_step=f"install {backend} {known[-1]}, or a trtforge that knows {version}",
    )
