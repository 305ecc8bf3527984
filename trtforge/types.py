"""The values that travel between stages: frozen, with tuples, identified by digests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Dim = int | str | None
"""A size, a symbol (ONNX `dim_param`), or None for an unnamed dynamic dimension."""

Shape = tuple[int, ...]
Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, element type (numpy's name, `bfloat16` and `float8e4m3fn` as in ONNX) and shape of a graph input or output."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]

    @property
    def is_dynamic(self) -> bool:
        """Whether any dimension is open."""
        return not all(isinstance(dim, int) for dim in self.shape)

    def __str__(self) -> str:
        dims = ", ".join("?" if dim is None else str(dim) for dim in self.shape)
        return f"{self.name} {self.dtype} ({dims})"


RoleKind = Literal["token_ids", "mask", "image", "shape_values", "free"]


@dataclass(frozen=True, slots=True)
class InputRole:
    """What a graph's own structure says about the values of one of its inputs.

    Attributes:
        name: the input.
        kind: `token_ids` indexes an embedding table or a one-hot; `mask` marks valid positions with ones;
            `shape_values` are sizes that decide the shape of another tensor; `image` is channels-first or -last
            pixels; `free` is any other number.
        low, high: inclusive range of the values.
        reason: why, for people ("row index of the 30522-row table 'bert.embeddings.word'").
    """

    name: str
    kind: RoleKind
    low: float
    high: float
    reason: str


@dataclass(frozen=True, slots=True)
class OperatorUse:
    """All nodes of one operator in one (sub)graph.

    Attributes:
        domain: "" for the standard ONNX operators.
        op_type: operator name.
        scope: "" for the main graph, else the path of control-flow nodes, such as `n3/then_branch`.
        node_names: names of all its nodes there, after unique naming.
        since_version: the opset version that defines the operator as used here; 0 where the operator is not known.
    """

    domain: str
    op_type: str
    scope: str
    node_names: tuple[str, ...]
    since_version: int


@dataclass(frozen=True, slots=True)
class ExternalFile:
    """A file that holds weights of the model, by its location relative to the model's folder."""

    location: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Graph:
    """A model that was read and checked, ready for a stage to use.

    Attributes:
        source: the model file as it was given.
        path: the file to parse. The source itself, or a rewritten copy where names or order needed mending.
        weights_dir: the folder that external data locations are relative to (always the source's own).
        digest: SHA-256 over the source's bytes and its external files' locations and bytes.
        opsets: (domain, version) pairs, "" for the standard domain.
        inputs: real inputs (graph inputs minus initializers), in order; `roles` has one entry for each.
        data_dependent_outputs: outputs whose shape depends on the data (NonZero, NonMaxSuppression and the like).
        element_types: every tensor element type that occurs in weights, inputs, outputs and casts.
        has_qdq: whether QuantizeLinear or DequantizeLinear occurs.
        wide_int_constants: names of int64 constants with a value that int32 cannot hold, the INT64_MAX and INT64_MIN
            sentinels of Slice left out.
        notes: what ingest changed or noticed, one sentence each.
    """

    source: Path
    path: Path
    weights_dir: Path
    digest: str
    ir_version: int
    opsets: tuple[tuple[str, int], ...]
    producer: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    roles: tuple[InputRole, ...]
    data_dependent_outputs: tuple[str, ...]
    operators: tuple[OperatorUse, ...]
    element_types: tuple[str, ...]
    has_qdq: bool
    wide_int_constants: tuple[str, ...]
    num_nodes: int
    weight_bytes: int
    external_files: tuple[ExternalFile, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def opset(self) -> int:
        """Version of the standard operator set, 0 if the model imports none."""
        return dict(self.opsets).get("", 0)

    def input(self, name: str) -> TensorSpec:
        """The input called `name`; KeyError if there is none."""
        return {spec.name: spec for spec in self.inputs}[name]

    def role(self, name: str) -> InputRole:
        """The role of the input called `name`; KeyError if there is none."""
        return {role.name: role for role in self.roles}[name]


@dataclass(frozen=True, slots=True)
class Range:
    """Values of a tensor over all data seen.

    Attributes:
        low, high: smallest and largest; NaN where a value was not finite.
        absmax: largest magnitude; inf where a value was not finite.
        finite: whether every value was.
    """

    low: float
    high: float
    absmax: float
    finite: bool


@dataclass(frozen=True, slots=True)
class ShapeRange:
    """min, opt and max shape of one input in an optimization profile; for a shape-value input, of its values."""

    min: Shape
    opt: Shape
    max: Shape


@dataclass(frozen=True, slots=True)
class Profile:
    """One optimization profile.

    Attributes:
        name: as in the spec.
        shapes: input name -> shapes, in graph order, one for every input (a static input has min = opt = max).
        values: shape-value input name -> values.
    """

    name: str
    shapes: dict[str, ShapeRange]
    values: dict[str, ShapeRange] = field(default_factory=dict)


Point = Literal["min", "opt", "max"]
POINTS: tuple[Point, ...] = ("min", "opt", "max")


@dataclass(frozen=True, slots=True)
class BuildUnit:
    """One engine to build.

    Attributes:
        identifier: readable and unique within a build, begins the engine's file name
            (`digits-fp32-sm86-trtrtx1.7.1`).
        backend: `tensorrt_rtx` or `tensorrt`.
        backend_version: full version of the builder ("1.7.1.116").
        gpu: as in the spec: a compute capability for tensorrt_rtx, a GPU model for tensorrt.
        compute_capability: such as `sm86`.
        precision: the tag in the name: fp32, fp16, bf16, int8, fp8 or mixed.
        tf32: whether FP32 matrix products may use TF32.
        settings: builder settings by name, defaults included, JSON values only.
    """

    identifier: str
    backend: str
    backend_version: str
    gpu: str
    compute_capability: str
    precision: str
    tf32: bool
    settings: dict[str, object]
    graph_digest: str
    profiles: tuple[Profile, ...]


@dataclass(frozen=True, slots=True)
class BuilderMessage:
    """One line of a builder's or parser's log."""

    severity: Literal["internal_error", "error", "warning", "info", "verbose"]
    text: str


@dataclass(frozen=True, slots=True)
class NetworkLayers:
    """Layers of a parsed network that do most of the work, of one kind and type.

    Attributes:
        kind: TensorRT's LayerType, such as `CONVOLUTION`.
        dtype: of what they give; of the quantized values where all operands are dequantized right before them.
        names: as the parser named them: the ONNX nodes' own, for all but layers inside of LSTM and the like.
    """

    kind: str
    dtype: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """What a backend made of a unit.

    Attributes:
        path: the engine, in the work folder; whoever called the backend moves it.
        seconds: wall seconds by part: `start` (interpreter and library load), `parse`, `build`, `write`.
        messages: the log from warning upwards, in order.
        inputs, outputs: as the parsed network has them (dtypes after the parser's own narrowing).
        builder_flags: names of the builder flags that were set.
        peak_memory_bytes: largest resident memory of the process that built it, 0 where the system does not tell.
        timing_cache_digest: SHA-256 of the timing cache as the build used it, None without one.
        trtexec: the command of TensorRT's own tool that asks for the same engine, "" where there is none.
        notes: what the build found out besides, one sentence each.
        weighted_layers: of the parsed network, where the builder keeps its types; else empty.
        tactics: (layer, tactic) pairs of the engine, where it tells; else empty.
    """

    path: Path
    digest: str
    size_bytes: int
    seconds: dict[str, float]
    messages: tuple[BuilderMessage, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    builder_flags: tuple[str, ...]
    peak_memory_bytes: int
    timing_cache_digest: str | None = None
    trtexec: str = ""
    notes: tuple[str, ...] = ()
    weighted_layers: tuple[NetworkLayers, ...] = ()
    tactics: tuple[tuple[str, str], ...] = ()
