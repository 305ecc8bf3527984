"""The reference that engines are compared with: onnxruntime on the CPU, running the graph as it is written."""

from __future__ import annotations

import ctypes
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
from onnx import ModelProto, TensorProto, TypeProto

from trtforge.errors import GraphError
from trtforge.types import Graph

Array = np.ndarray[Any, np.dtype[Any]]

_PROVIDER = "CPUExecutionProvider"
_SILENT = 4
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
# Names of element types in onnxruntime's "seq(tensor(float))".
_ELEMENT_TYPES = {name.lower(): number for name, number in TensorProto.DataType.items()}
_FLOATS = frozenset([TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE])
# Types that onnxruntime runs but does not exchange with numpy: (numpy type, same-sized carrier, ONNX type).
_CARRIED: dict[str, tuple[np.dtype[Any], Any, int]] = {
    "tensor(bfloat16)": (np.dtype(ml_dtypes.bfloat16), np.uint16, TensorProto.BFLOAT16),
    "tensor(float8e4m3fn)": (np.dtype(ml_dtypes.float8_e4m3fn), np.uint8, TensorProto.FLOAT8E4M3FN),
    "tensor(float8e5m2)": (np.dtype(ml_dtypes.float8_e5m2), np.uint8, TensorProto.FLOAT8E5M2),
}


class ReferenceSession:
    """A model loaded for the CPU with every graph optimisation off.

    The optimisations change results: on Q/DQ graphs they drop or merge rounding steps, so that a correct engine would
    be told apart from a wrong reference.
    Source: https://github.com/microsoft/onnxruntime/issues/20321

    Attributes:
        facts: what ran, for reports: `provider`, `onnxruntime` (its version) and `graph_optimization`.

    Raises:
        GraphError: onnxruntime does not load the model; its reason is quoted.
    """

    facts: dict[str, str]

    def __init__(self, graph: Graph, *, threads: int | None = None) -> None:
        self._graph = graph
        try:
            self._session = onnxruntime.InferenceSession(_model(graph), _options(graph, threads), providers=[_PROVIDER])
        except Exception as error:
            raise _load_error(graph, error) from error
        self.facts = {
            "provider": ", ".join(self._session.get_providers()),
            "onnxruntime": onnxruntime.__version__,
            "graph_optimization": self._session.get_session_options().graph_optimization_level.name,
        }

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Runs the model once.

        Args:
            feeds: input name -> array of that input's dtype; bfloat16 and float8 in the types of `ml_dtypes`.

        Returns:
            Output name -> array, in graph order.

        Raises:
            GraphError: onnxruntime stopped; `problems[0].detail` quotes its reason in one line.
        """
        names = [spec.name for spec in self._graph.outputs]
        try:
            values = self._session.run_with_ort_values(names, {name: _to_ort(feed) for name, feed in feeds.items()})
            return {name: _to_numpy(value) for name, value in zip(names, values, strict=True)}
        except Exception as error:
            raise GraphError(
                f"onnxruntime stopped while running {self._graph.source.name}",
                detail=[reason_of(error)],
                next_step="try other sizes or values of the inputs",
            ) from error


@dataclass(frozen=True, slots=True, eq=False)
class HeldValue:
    """A value that stays in onnxruntime's memory, to go from one piece of a model to the next without a copy."""

    held: Any

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor; sequences and optionals are none."""
        return bool(self.held.is_tensor())

    @property
    def is_float(self) -> bool:
        """Whether it is a tensor of FP16, BF16, FP32 or FP64."""
        return self.is_tensor and self.held.element_type() in _FLOATS

    @property
    def array(self) -> Array:
        """A tensor as an array, without a copy where onnxruntime and the type allow; good as long as this value lives."""
        return _to_numpy(self.held)

    @property
    def num_elements(self) -> int:
        """Of a tensor."""
        return math.prod(self.held.shape())

    def type_proto(self, *, with_shape: bool) -> TypeProto:
        """Its ONNX type."""
        found = TypeProto()
        if self.is_tensor:
            found.tensor_type.elem_type = self.held.element_type()
            if with_shape:
                found.tensor_type.shape.SetInParent()
                for size in self.held.shape():
                    found.tensor_type.shape.dim.add().dim_value = size
            return found
        kind, _, element = self.held.data_type().removesuffix("))").partition("(tensor(")
        element_type = _ELEMENT_TYPES[element]
        if kind == "seq":
            found.sequence_type.elem_type.tensor_type.elem_type = element_type
        else:
            found.optional_type.elem_type.tensor_type.elem_type = element_type
        return found


def held(array: Array) -> HeldValue:
    """`array` for a piece of a model; bfloat16 and float8 in the types of `ml_dtypes`."""
    return HeldValue(_to_ort(np.asarray(array)))


class PieceSession:
    """A piece of a model, run as `ReferenceSession` runs a whole one.

    Args:
        piece: the piece.
        weights: initializers that the piece names as external data, in C order; used where they are, without a copy.
        name: of the model, for messages.
        weights_dir: folder of the other external data that the piece names, which stays in its files: pages that are
            mapped, and shared by all pieces; None if there is none.
        threads: that one node may use; all cores if None.
        prepacks: whether onnxruntime may copy weights into an order that its matrix products like better.

    Raises:
        GraphError: onnxruntime does not load the piece; `problems[0].detail` quotes its reason in one line.
    """

    def __init__(
        self,
        piece: ModelProto,
        weights: Mapping[str, Array],
        name: str,
        *,
        weights_dir: Path | None = None,
        threads: int | None = None,
        prepacks: bool = True,
    ) -> None:
        self._name = name
        self._outputs = [output.name for output in piece.graph.output]
        self._weights = [_to_ort(weight) for weight in weights.values()]
        options = _plain_options()
        # Many are alive at once: none keeps memory for itself, or threads that wait by spinning.
        options.enable_cpu_mem_arena = False
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.disable_prepacking", "0" if prepacks else "1")
        if threads is not None:
            options.intra_op_num_threads = threads
        if weights_dir is not None:
            options.add_session_config_entry(_WEIGHTS_FOLDER, str(weights_dir.resolve()))
        if weights:
            options.add_external_initializers(list(weights), self._weights)
        try:
            self._session = onnxruntime.InferenceSession(piece.SerializeToString(), options, providers=[_PROVIDER])
        except Exception as error:
            raise self._stopped("loading", error) from error

    def run(self, feeds: Mapping[str, HeldValue]) -> dict[str, HeldValue]:
        """Runs the piece once: input name -> value to output name -> value.

        Raises:
            GraphError: onnxruntime stopped; `problems[0].detail` quotes its reason in one line.
        """
        try:
            values = self._session.run_with_ort_values(
                self._outputs, {name: value.held for name, value in feeds.items()}
            )
        except Exception as error:
            raise self._stopped("running", error) from error
        return {name: HeldValue(value) for name, value in zip(self._outputs, values, strict=True)}

    def _stopped(self, doing: str, error: Exception) -> GraphError:
        return GraphError(
            f"onnxruntime stopped while {doing} {self._name}",
            detail=[reason_of(error)],
            next_step="try other sizes or values of the inputs",
        )


def onnxruntime_version() -> str:
    """Of the onnxruntime that runs models here."""
    return str(onnxruntime.__version__)


def reason_of(error: BaseException) -> str:
    """Onnxruntime's reason in one line, without its error number and the places in its own source."""
    line = " ".join(str(error).split())
    line = re.sub(r"^\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ", "", line)
    return re.sub(r"/onnxruntime_src/\S+:\d+ [^()]*\([^()]*\)(?: \[[^\]]*\])? ", "", line)


def _plain_options() -> Any:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.use_deterministic_compute = True
    options.log_severity_level = _SILENT
    return options


def _options(graph: Graph, threads: int | None) -> Any:
    options = _plain_options()
    if threads is not None:
        options.intra_op_num_threads = threads
    if _has_weights_elsewhere(graph):
        options.add_session_config_entry(_WEIGHTS_FOLDER, str(graph.weights_dir.resolve()))
    return options


def _model(graph: Graph) -> str | bytes:
    """Path of the model, or its bytes: onnxruntime before 1.32 takes another weights folder only with bytes."""
    return graph.path.read_bytes() if _has_weights_elsewhere(graph) else str(graph.path)


def _has_weights_elsewhere(graph: Graph) -> bool:
    return bool(graph.external_files) and graph.path.parent.resolve() != graph.weights_dir.resolve()


def _load_error(graph: Graph, error: Exception) -> GraphError:
    reason = reason_of(error)
    unknown = re.search(r"(?:error: |Registered for )(\S+?)(?:\(-?\d+\)| with domain_version)", reason, re.IGNORECASE)
    if unknown:
        return GraphError(
            f"onnxruntime has no operator '{unknown[1]}', which {graph.source.name} uses",
            detail=[reason, *_operators_beyond_onnx(graph)],
            next_step="export the model with standard ONNX operators only",
        )
    return GraphError(
        f"onnxruntime cannot load {graph.source.name}",
        detail=[reason],
        next_step=f"look at what it names: polygraphy inspect model {shlex.quote(str(graph.source))} --show layers",
    )


def _operators_beyond_onnx(graph: Graph) -> list[str]:
    names = [f"{use.domain}:{use.op_type}" for use in graph.operators if use.since_version == 0]
    return [f"operators beyond ONNX's own in this model: {', '.join(names)}"] if names else []


def _to_ort(array: Array) -> Any:
    for dtype, carrier, onnx_type in _CARRIED.values():
        if array.dtype == dtype:
            carried: Array = np.asarray(array, order="C").view(carrier)
            return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(carried, onnx_type)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def _to_numpy(value: Any) -> Array:
    if value.data_type() not in _CARRIED:
        return np.asarray(value.numpy())
    dtype = _CARRIED[value.data_type()][0]
    copied = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(copied, dtype).reshape(value.shape())
