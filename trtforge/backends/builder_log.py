"""What a builder's log means: its own lines, and for those that people meet often, a cause and a next step in plain words.

Every row of the table is a sentence that TensorRT-RTX 1.7.1 says; an integration test makes it say each one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
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
    """`cause` and `next_step` are format strings over the named groups of `pattern`."""

    pattern: str
    cause: str
    next_step: str


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
        r"MyelinCheckException: (?P<check>.+?) In ",
        "TensorRT's compiler stopped at a check of its own: {check}",
        "build with builder.optimization_level: 0; if that stops too, bisect the model and report the smallest part to NVIDIA",
    ),
)
_COMPILED: Final = tuple((re.compile(row.pattern), row) for row in _TABLE)

# A builder without a GPU adds this line to whatever really went wrong.
_NO_GPU_ECHO: Final = re.compile(r".*catchCudaError.*cudaError 35: .*")
# The parser spreads each error over several lines and gives the same again, whole, through its own interface.
_PARSER_ECHO: Final = re.compile(r"ModelImporter\.cpp:\d+: (While parsing|--- |ERROR: |Node name: )")


def explain(messages: Sequence[BuilderMessage]) -> list[Explanation]:
    """What the errors in `messages` mean, in their order, each cause once; empty if none is known."""
    found: dict[str, Explanation] = {}
    for message in messages:
        if message.severity in ("error", "internal_error"):
            for pattern, row in _COMPILED:
                if match := pattern.search(message.text):
                    words = {key: value or "" for key, value in match.groupdict().items()}
                    cause = row.cause.format(**words)
                    found.setdefault(cause, Explanation(cause, row.next_step.format(**words), message))
                    break
    return list(found.values())


def error_lines(messages: Iterable[BuilderMessage]) -> list[str]:
    """The builder's own error lines, each once, without the echoes that say nothing about the cause."""
    lines: dict[str, None] = {}
    for message in messages:
        if message.severity in ("error", "internal_error") and not _PARSER_ECHO.match(message.text):
            lines.update(dict.fromkeys(line for line in message.text.splitlines() if line.strip()))
    causes = [line for line in lines if not _NO_GPU_ECHO.fullmatch(line)]
    return causes or list(lines)


def matching_warnings(messages: Iterable[BuilderMessage], globs: Sequence[str]) -> tuple[BuilderMessage, ...]:
    """The warnings whose whole text matches one of `globs`; case does not count, `*` also matches line ends."""
    lowered = [glob.lower() for glob in globs]
    return tuple(
        message
        for message in messages
        if message.severity == "warning" and any(fnmatchcase(message.text.lower(), glob) for glob in lowered)
    )
