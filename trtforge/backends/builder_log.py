"""What a log of TensorRT means: its own lines, and for those that people meet often, a cause and a next step in plain words.

Every row of the first table is a sentence that TensorRT-RTX 1.7.1 says without a GPU; an integration test makes it say
each one. Rows of the second take a GPU or another TensorRT; each names where the sentence was reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from trtforge.types import BuilderMessage


@dataclass(frozen=True, slots=True)
class Explanation:
    """What one line of the log means.

    Attributes:
        cause: what is wrong, naming what the line names.
        next_step: one thing to do about it.
        message: the line that says so.
    """

    cause: str
    next_step: str
    message: BuilderMessage


class _Row(NamedTuple):
    """`cause` and `next_step` are format strings over the named groups of `pattern`.

    Attributes:
        beside: a pattern that some other line of the log has to match, of whatever severity.
        severities: of the lines that it is looked for in.
        source: where the sentence was reported, for rows that no test here can provoke.
    """

    pattern: str
    cause: str
    next_step: str
    beside: str = ""
    severities: tuple[str, ...] = ("error", "internal_error")
    source: str = ""


_AS_NODE = r"in (?P<op>\S+) '(?P<node>[^']*)': "

_TABLE: Final[tuple[_Row, ...]] = (
    # Operators
    _Row(
        rf"UNSUPPORTED_NODE {_AS_NODE}(false$|.* plugin creator version .* not found)",
        "operator {op} (node '{node}') is not supported",
        "export the model without {op}",
    ),
    _Row(
        rf'INVALID_NODE {_AS_NODE}.*"Plugin not found',
        "operator {op} (node '{node}') is not a standard ONNX operator, and no plugin provides it",
        "export the model with standard ONNX operators; a file that onnxruntime has optimised carries operators of its own",
    ),
    # Types
    _Row(
        r"Failed to convert ONNX date type to TensorRT data type",
        "the model has an input, output or constant of a type that TensorRT does not have, such as string",
        "split the part that handles strings (most often the tokenizer) off the model",
    ),
    _Row(
        r"(?P<node>[^\s(]+): input has type (?P<type>\w+) but must have type FP8, FP4, Int4, Int8, or UInt8",
        "DequantizeLinear '{node}' reads {type}; most often a bias that onnxruntime's quantizer stored as int32",
        "quantize again with the bias left in float (onnxruntime: extra_options={{'QuantizeBias': False}})",
    ),
    _Row(
        rf"{_AS_NODE}.*Non-zero zero point is not supported",
        "{op} '{node}' has a zero point other than 0; TensorRT quantizes symmetrically",
        "quantize again symmetrically (onnxruntime: extra_options={{'ActivationSymmetric': True}}, QInt8)",
    ),
    _Row(
        rf"{_AS_NODE}.*Scale coefficients must all be positive",
        "{op} '{node}' has a scale that is zero or negative",
        "quantize again with data that reaches this tensor; a scale of 0 means it was always 0 during calibration",
    ),
    _Row(
        r"(?P<node>[^\s(]+): ElementWiseOperation \w+ must have same input types. But they are of types (?P<a>\w+) and (?P<b>\w+)",
        "node '{node}' combines {a} and {b}; TensorRT does not convert between them by itself",
        "insert a Cast before one input of '{node}', so that both have one type",
    ),
    _Row(
        r"(?P<node>[^\s(]+): \w+ must have same input types. `A` is of type (?P<a>\w+) and `B` is of type (?P<b>\w+)",
        "node '{node}' multiplies {a} by {b}; TensorRT does not convert between them by itself",
        "insert a Cast before one input of '{node}', so that both have one type",
    ),
    _Row(
        r"Cannot compile for target\(s\) (?P<gpu>\w+), because the model contains HW-specific datatypes: (?P<type>[\w, ]+)",
        "{gpu} has no hardware for {type}, which the graph uses",
        "leave {gpu} out of targets, or choose a precision.type that it has",
    ),
    _Row(
        r"Cannot compile operation '(?P<node>[^']*)' for Turing \(SM75\): (?P<what>[^.]+) is not supported",
        "node '{node}' needs {what}, which TensorRT-RTX does not have for sm75",
        "choose precision.type: fp16, or leave sm75 out of targets",
    ),
    # Shapes
    _Row(
        r"Network has dynamic or shape inputs, but no optimization profile has been defined",
        "the model has dynamic inputs and the build has no optimization profile",
        "add profiles: with min, opt and max for each dynamic input",
    ),
    _Row(
        r"Dynamic input tensor (?P<input>\S+) is missing dimensions in profile (?P<profile>\d+)",
        "profile {profile} says nothing about the dynamic input '{input}'",
        "add '{input}' with min, opt and max to that profile",
    ),
    _Row(
        r"Dynamic-shaped input tensor (?P<input>\S+) has (?P<a>\d+) dimensions but profile (?P<profile>\d+) has (?P<b>\d+)",
        "profile {profile} gives '{input}' {b} dimensions, the model has {a}",
        "write {a} sizes for '{input}'",
    ),
    _Row(
        r"Dimension mismatch for tensor (?P<input>\S+) and profile (?P<profile>\d+). At dimension axis (?P<axis>\d+), "
        r"profile has min=(?P<min>\d+), opt=(?P<opt>\d+), max=(?P<max>\d+) but tensor has (?P<size>\d+)",
        "profile {profile} asks for sizes {min}, {opt}, {max} on axis {axis} of '{input}', which the model fixes to {size}",
        "write {size} for axis {axis} of '{input}' in min, opt and max",
    ),
    _Row(
        r"Invalid optimization profiles for input tensors (?P<input>.+?), please",
        "min <= opt <= max does not hold for '{input}'",
        "order the sizes of '{input}' so that min <= opt <= max on every axis",
    ),
    _Row(
        r"Optimization profile (?P<profile>\d+) is missing values for shape input tensor (?P<input>\S+?)\. In",
        "the values of '{input}' decide the shape of another tensor, and profile {profile} has none for it",
        "add values: {{min: ..., opt: ..., max: ...}} for '{input}' to that profile",
    ),
    _Row(
        r"Profile k(?P<point>MIN|OPT|MAX) values are not self-consistent. Dimensions with name (?P<dim>.+?) must be equal. "
        r"Condition '==' violated: (?P<a>\d+) != (?P<b>\d+)",
        "the {point} shapes of a profile give the dimension '{dim}' two sizes, {a} and {b}",
        "give '{dim}' one size in every input that has it",
    ),
    _Row(
        r"API Usage Error \((?P<dim>.+?): Input dimensions with this name have different constant values or have "
        r"contradictory IOptimizationProfile",
        "the model uses the name '{dim}' for several input dimensions, so TensorRT takes them to be equal, and a profile "
        "gives them different sizes",
        "give each of these dimensions a name of its own in the model, or the same sizes in the profile",
    ),
    _Row(
        r"Network input (?P<input>\S+) is a shape tensor and must have type Int32 or Int64. Type is (?P<type>\w+)",
        "the values of the {type} input '{input}' decide the shape of another tensor; TensorRT allows that for integers only",
        "export the model with these sizes as constants or as an int64 input",
    ),
    _Row(
        rf"{_AS_NODE}[\s\S]*!isInFlight\(p\.second\.symbolicRep\) failed",
        "the output shape of {op} '{node}' depends on computed numbers, not on input shapes alone",
        "export the model so that the shape of '{node}' comes from constants, input shapes or an int64 input",
    ),
    _Row(
        r"reshape changes volume.* Reshaping (?P<a>\[[^\]]*\]) to (?P<b>\[[^\]]*\])",
        "the sizes do not fit the model: it reshapes {a} to {b}, which has another number of elements",
        "give the inputs sizes that the model was exported for",
    ),
    # Control flow
    _Row(
        r"IConditionalOutputLayer (?P<node>\S+?)(_OutputLayer)?: Must have inputs with equal ranks when condition is not a "
        r"build-time constant. Dimensions are (?P<a>\[[^\]]*\]) and (?P<b>\[[^\]]*\])",
        "the branches of If '{node}' give {a} and {b}, and which one runs is known at run time only; TensorRT needs one "
        "number of dimensions. Most often it is a squeeze() without dim",
        "name the dimension in the model's code (squeeze(0)) or fix the sizes, and export again",
    ),
    _Row(
        r"graphScope\.cpp::analyze.*\(Assertion (tScope\.getType|mScopedOp2Scopes)",
        "an LSTM, GRU or RNN stands in a branch of an If node and its last state (Y_h or Y_c) is used; the builder cannot "
        "take a loop's end value out of a branch",
        "export the model so that no If is around the LSTM: trace it with fixed sizes, or take out the case that is not used",
    ),
    # Files and memory
    _Row(
        r"Failed to open file: (?P<path>.+)",
        "the model's weights file {path} cannot be opened",
        "put the weights file beside the model, under the name that the model has for it",
    ),
    _Row(
        r"Network must have at least one output",
        "the model file holds no graph: it is empty, cut short or not ONNX",
        "export the model again and check its size",
    ),
    _Row(
        r"no tactics to implement the operation within workspace limit",
        "an operation needs more scratch memory than builder.workspace_mib allows",
        "raise builder.workspace_mib or leave it out",
    ),
    _Row(
        r"Trying to load an engine created with incompatible serialization version",
        "the file is no engine of this TensorRT: of another kind (TensorRT, TensorRT-RTX) or version, or no engine at all",
        "run trtforge verify on its manifest, or build it again with the TensorRT that loads it",
    ),
    _Row(
        r"plan\.header\.size == blobSize failed",
        "the engine file is not as long as its header says: it is cut short or damaged",
        "copy it again, then run trtforge verify on its manifest",
    ),
    _Row(
        r"cudaError 35: ",
        "there is no NVIDIA driver, or it is older than the CUDA that this TensorRT was made for (CUDA error 35)",
        "nvidia-smi  # shows the driver; in a container, start it with --gpus all",
    ),
    _Row(
        r"MyelinCheckException: (?P<check>.+?) In ",
        "TensorRT's compiler stopped at a check of its own: {check}",
        "build with builder.optimization_level: 0; if that stops too, bisect the model and report the smallest part to NVIDIA",
    ),
)
_TRT_ISSUES = "https://github.com/NVIDIA/TensorRT/issues"
_NO_KERNEL = r"Could not find any implementation for node (?P<node>.+?)"
_GPU_TABLE: Final[tuple[_Row, ...]] = (
    # No kernel: three causes that the same sentence hides
    _Row(
        _NO_KERNEL + r" due to insufficient workspace",
        "no kernel for '{node}' gets along with the scratch memory that builder.workspace_mib allows",
        "raise builder.workspace_mib or leave it out",
        source="https://github.com/NVIDIA/TensorRT/tree/release/8.6/demo/HuggingFace, Out of Memory Errors",
    ),
    _Row(
        _NO_KERNEL + r"\.?\)",
        "no kernel for '{node}' could be tried, as the GPU's memory was too small or in use",
        "free the GPU's memory (nvidia-smi shows who holds it), or lower builder.workspace_mib",
        beside=r"insuff?icient memory on requested size|Device memory is insufficient|could not be allocated|OutOfMemory",
        source=f"{_TRT_ISSUES}/2035, https://github.com/open-mmlab/mmdeploy/issues/1059",
    ),
    _Row(
        _NO_KERNEL + r"\.?\)",
        "this TensorRT has no kernel for '{node}' on this GPU, with its types and shapes",
        "build a part of the model up to '{node}'; most often one type (Q/DQ, FP16) or size there is to blame",
        source=f"{_TRT_ISSUES}/1768",
    ),
    # Plugins
    _Row(
        r"getPluginCreator could not find plugin:? (?P<op>\S+) version",
        "operator {op} is none that TensorRT's parser knows, and no plugin provides it",
        "export the model without {op}",
        source=f"{_TRT_ISSUES}/3164",
    ),
    # Libraries and types
    _Row(
        r"Unable to load library: (?P<library>libnvinfer_lean[\w.]*)",
        "a version-compatible engine carries TensorRT's lean runtime, and {library} is not where libraries are looked for",
        "pip install tensorrt-lean, of the version that builds, and name the folder of {library} in LD_LIBRARY_PATH",
        source="seen with TensorRT-RTX 1.7.1, asked for such an engine past trtforge's own refusal",
    ),
    _Row(
        r"convertMyelinWeightsToFp32.*kINT8",
        "TensorRT 8.6 does not take INT8 weights of MatMul and Gemm",
        "give the FP32 model, with precision: {{type: int8}}, which keeps such weights FP32 before their QuantizeLinear",
        source="seen with TensorRT 8.6 on an H200",
    ),
    # GPU, driver, memory
    _Row(
        r"C[Uu][Dd][Aa] initialization failure with error:? 35\b",
        "there is no NVIDIA driver, or it is older than the CUDA that this TensorRT was made for (CUDA error 35)",
        "nvidia-smi  # shows the driver; in a container, start it with --gpus all",
        severities=("error", "internal_error", "warning"),
        source=f"{_TRT_ISSUES}/2879",
    ),
    _Row(
        r"C[Uu][Dd][Aa] initialization failure with error:? (?P<code>\d+)",
        "CUDA does not start here (CUDA error {code})",
        "nvidia-smi  # shows driver and GPUs; error 100 is no GPU, 2 is no memory",
        severities=("error", "internal_error", "warning"),
        source=f"{_TRT_ISSUES}/149",
    ),
    _Row(
        r"Error Code 2: OutOfMemory|Cuda Runtime \(out of memory\)",
        "the GPU's memory is too small or in use",
        "free the GPU's memory (nvidia-smi shows who holds it), or lower builder.workspace_mib",
        source="https://github.com/marcoslucianops/DeepStream-Yolo/issues/366, " + f"{_TRT_ISSUES}/4254",
    ),
    _Row(
        r"Target GPU SM (?P<sm>\d+) is not supported by this TensorRT release",
        "this TensorRT does not build for sm{sm}, the GPU of this machine",
        "install a TensorRT that has sm{sm}, and name it with version: in that target",
        source=f"{_TRT_ISSUES}/4359",
    ),
    # Loading
    _Row(
        r"generated on an incompatible device, expecting compute (?P<a>\d+)\.(?P<b>\d+) got compute (?P<c>\d+)\.(?P<d>\d+)",
        "the engine is for sm{c}{d}, and this GPU is sm{a}{b}",
        "load the engine of sm{a}{b}, or add that GPU to targets and build again",
        source=f"{_TRT_ISSUES}/2176",
    ),
    _Row(
        r"not compatible with this version of TensorRT, expecting library version (?P<a>[\d.]+) got (?P<b>[\d.]+)",
        "the engine was built by TensorRT {b}, and {a} loads it",
        "install TensorRT {b} where it is loaded, or build again with {a}",
        source="https://github.com/SthPhoenix/InsightFace-REST/issues/84",
    ),
    _Row(
        r"Version tag does not match\. Note: Current Version: (?P<a>\d+), Serialized Engine Version: (?P<b>\d+)",
        "the engine was built by another version of TensorRT than the one that loads it (format {b} against {a})",
        "install the TensorRT that its manifest names where it is loaded, or build it again",
        source=f"{_TRT_ISSUES}/3898",
    ),
)

# A builder without a GPU adds this line to whatever really went wrong.
_NO_GPU_ECHO: Final = re.compile(r".*catchCudaError.*cudaError 35: .*")
# A timing cache that 8.6 does not take; the build goes on with a fresh one.
_TIMING_ECHO: Final = re.compile(r"1: \[myelinCache\.h::|4: The timing cache will not be used")
# The parser spreads each error over several lines and gives the same again, whole, through its own interface.
_PARSER_ECHO: Final = re.compile(r"ModelImporter\.cpp:\d+: (While parsing|--- |ERROR: |Node name: )")


_WEIGHTS: Final = r"- (?P<count>\d+) weights are affected by this issue: Detected "
_WARNINGS: Final = (
    (re.compile(_WEIGHTS + "subnormal"), "{count} weights are below 6.1e-5, where FP16 has fewer digits"),
    (re.compile(_WEIGHTS + "values less"), "{count} weights are below 6e-8, and become 6e-8 in FP16"),
    (re.compile(_WEIGHTS + "finite FP32 values"), "{count} weights are above 65504, and become 65504 in FP16"),
    # TensorRT leaves the names of nodes that are bound to FP32 empty.
    (re.compile("Detected layernorm nodes in FP16: (?P<nodes>.*)"), "LayerNorm in FP16, which may overflow: {nodes}"),
    (re.compile("Running layernorm after self-attention in FP16 may cause overflow"), ""),
    (re.compile("TensorRT encountered issues when converting weights between types"), ""),
    (re.compile("If this is not the desired behavior, please modify the weights or retrain"), ""),
    (re.compile("Check verbose logs for the list of affected weights"), ""),
)
"""What a warning begins with -> what is told instead. Source: seen with TensorRT 8.6 on an H200; logs of 8.5 and 8.6 builds that users published."""


_OTHER_USE: Final = _Row(
    rf"(UNSUPPORTED|INVALID)_NODE\w* {_AS_NODE}(?P<text>.{{1,300}})",
    "operator {op} (node '{node}') is used in a way that TensorRT does not support: {text}",
    "export the model so that '{node}' is not needed, or written with other operators",
)
"""Only where no row of the tables says more."""


def explain(messages: Sequence[BuilderMessage]) -> list[Explanation]:
    """What `messages` mean, in their order, each cause once; empty if none is known.

    That a driver is missing is a cause only where nothing else went wrong, as every build without a GPU says so.
    """
    errors = [message for message in messages if message.severity in ("error", "internal_error")]
    echoes = [message for message in errors if _NO_GPU_ECHO.fullmatch(message.text)]
    found: dict[str, Explanation] = {}
    for message in messages:
        if message in echoes and len(echoes) < len(errors):
            continue
        if row_match := _first_match(message, messages):
            row, match = row_match
            words = {key: value or "" for key, value in match.groupdict().items()}
            cause = row.cause.format(**words)
            found.setdefault(cause, Explanation(cause, row.next_step.format(**words), message))
    return list(found.values()) or list(_other_uses(errors))


def _other_uses(errors: Iterable[BuilderMessage]) -> Iterator[Explanation]:
    for message in errors:
        if match := re.search(_OTHER_USE.pattern, message.text):
            words = match.groupdict()
            yield Explanation(_OTHER_USE.cause.format(**words), _OTHER_USE.next_step.format(**words), message)


def _first_match(message: BuilderMessage, messages: Sequence[BuilderMessage]) -> tuple[_Row, re.Match[str]] | None:
    for row in (*_TABLE, *_GPU_TABLE):
        if message.severity not in row.severities:
            continue
        match = re.search(row.pattern, message.text)
        if match and (not row.beside or any(re.search(row.beside, other.text) for other in messages)):
            return row, match
    return None


def error_lines(messages: Iterable[BuilderMessage]) -> list[str]:
    """The builder's own error lines, each once, without the echoes that say nothing about the cause."""
    lines: dict[str, None] = {}
    for message in messages:
        if message.severity in ("error", "internal_error") and not _PARSER_ECHO.match(message.text):
            lines.update(dict.fromkeys(line for line in message.text.splitlines() if line.strip()))
    causes = [line for line in lines if not _NO_GPU_ECHO.fullmatch(line) and not _TIMING_ECHO.match(line)]
    return causes or list(lines)


def readable_warning(text: str) -> str:
    """A frequent warning in one line; "" for lines that only stand around one; any other text as it is."""
    for pattern, told in _WARNINGS:
        if match := pattern.match(text):
            words = {key: ", ".join(re.findall(r"[^,\s]+", value)) for key, value in match.groupdict().items()}
            return told.format(**words) if all(words.values()) else ""
    return text


def matching_warnings(messages: Iterable[BuilderMessage], globs: Sequence[str]) -> tuple[BuilderMessage, ...]:
    """The warnings whose whole text matches one of `globs`; case does not count, `*` also matches line ends."""
    lowered = [glob.lower() for glob in globs]
    return tuple(
        message
        for message in messages
        if message.severity == "warning" and any(fnmatchcase(message.text.lower(), glob) for glob in lowered)
    )
