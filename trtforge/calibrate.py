"""Ranges from real data: what a spec's `calibration` becomes, and whether a table still belongs to its model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import onnx

from trtforge.calibration.observe import observe
from trtforge.calibration.table import CalibrationTable, PlainValue, make_table
from trtforge.calibration.trt_cache import missing_tensors, read_trt_cache
from trtforge.errors import CalibrationError, shown_path
from trtforge.events import Event
from trtforge.precision.fold import fold
from trtforge.precision.placement import place
from trtforge.samples.calibration import CalibrationData, open_calibration
from trtforge.samples.source import Sample
from trtforge.spec.load import SpecFile
from trtforge.spec.model import Calibration
from trtforge.stages import Stages
from trtforge.types import Graph, Profile, Range

_MIB = 1 << 20
_MOST_LISTED = 10


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What calibration found.

    Attributes:
        table: a range for each tensor that INT8 may need.
        ranges: value -> what was seen, of every float value; only those of the table where a spec names one.
    """

    table: CalibrationTable
    ranges: dict[str, Range]


def calibrate(
    spec_file: SpecFile, graph: Graph, profiles: tuple[Profile, ...], stages: Stages, digest_of: Callable[[Path], str]
) -> Calibrated:
    """Runs the model on a spec's calibration data once, one sample at a time. The spec's Python may run.

    Args:
        spec_file: its `calibration` names data or a callable.
        graph: the model in FP32.
        profiles: whose coverage by the data is stated.
        stages: told what happens.
        digest_of: SHA-256 of a file.

    Raises:
        SeveralErrors, CalibrationError: what is wrong with the data, or no range comes of them.
        GraphError: the model cannot be run, or is quantized already.
    """
    calibration = spec_file.spec.calibration
    assert calibration is not None  # noqa: S101 - the caller looked
    assert calibration.method != "tensorrt_entropy"  # noqa: S101 - nor is it TensorRT's own
    assert calibration.method != "tensorrt_minmax"  # noqa: S101
    data = open_calibration(spec_file, graph, profiles, digest_of=digest_of)
    rows = _Rows(data, stages)
    observed = observe(
        graph,
        rows,
        tensors_of(spec_file, graph),
        memory_bytes=calibration.memory_mib * _MIB,
        on_sample=lambda _count: rows.tell(),
    )
    table = make_table(
        observed,
        graph,
        method=calibration.method,
        percentile=calibration.percentile,
        data_digest=data.digest,
        preprocessing=preprocessing(calibration),
        profiles=profiles,
        notes=data.notes,
    )
    return Calibrated(replace(table, num_samples=rows.num_done), observed.ranges)


class _Rows:
    """Samples on their way to the model, with progress and the time that is left."""

    def __init__(self, data: CalibrationData, stages: Stages) -> None:
        self._data, self._stages = data, stages
        self._start = time.perf_counter()
        self._num_given = self.num_done = 0

    def __iter__(self) -> Iterator[Sample]:
        for sample in self._data:
            self._num_given += sample.num_rows
            yield sample

    def tell(self) -> None:
        self.num_done, total = self._num_given, self._data.num_samples
        seconds = time.perf_counter() - self._start
        if not total:
            text, fraction = f"{self.num_done} samples, {seconds:.0f} s", None
        else:
            fraction = self.num_done / total
            text = f"{self.num_done} of {total} samples, {seconds / fraction - seconds:.0f} s left"
        self._stages.tell(Event("step", "calibrate", text, fraction=fraction))


def tensors_of(spec_file: SpecFile, graph: Graph) -> tuple[str, ...]:
    """Tensors that INT8 may need a range for, whatever a spec keeps: of the graph as it is, and folded.

    Where TensorRT chooses the layers (`quantization: implicit`), that is every float value of the main graph.

    Raises:
        GraphError: the model is quantized already.
    """
    model = onnx.load(graph.path, load_external_data=False)
    if spec_file.spec.precision.quantization == "implicit":
        return tuple(_float_values(model))
    names = dict.fromkeys(place(model).tensors)
    known = {name for node in model.graph.node for name in node.output} | {info.name for info in model.graph.input}
    fold(model, folder=graph.weights_dir)
    names |= dict.fromkeys(place(model).tensors)
    return tuple(name for name in names if name in known)


def _float_values(model: onnx.ModelProto) -> Iterator[str]:
    """Inputs and results that are FP32, those of unknown type included, without constants."""
    typed = onnx.shape_inference.infer_shapes(model).graph
    values = (*typed.input, *typed.value_info, *typed.output)
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    constants = {tensor.name for tensor in typed.initializer}
    results = (name for node in typed.node if node.op_type != "Constant" for name in node.output)
    for name in (*(value.name for value in typed.input), *results):
        if name and name not in constants and types.get(name, onnx.TensorProto.FLOAT) == onnx.TensorProto.FLOAT:
            yield name


def scales_of(spec_file: SpecFile, graph: Graph, table: CalibrationTable) -> dict[str, float]:
    """Tensor -> amax, of every tensor that TensorRT's implicit route reads a range of.

    Raises:
        CalibrationError: the table that the spec names lacks some; it was made for the explicit route.
    """
    assert spec_file.spec.calibration is not None  # noqa: S101 - implicit without was refused
    source = spec_file.spec.calibration.table
    if source and (missing := missing_tensors(table.amax, tensors_of(spec_file, graph))):
        raise CalibrationError(
            f"{shown_path(source)} has not every tensor that quantization: implicit needs: {missing}",
            where=spec_file.where("calibration", "table"),
            next_step="calibrate again with this precision: write calibration: {data: ...}, then trtforge calibrate SPEC "
            f"--output {shown_path(source)}",
        )
    return table.amax


def preprocessing(calibration: Calibration) -> dict[str, PlainValue]:
    """How files become inputs, as the table states it."""
    images = {key: list(value) if isinstance(value, tuple) else value for key, value in _images(calibration).items()}
    return {"images": images or None, "batch": calibration.batch, "samples": calibration.samples}


def _images(calibration: Calibration) -> dict[str, PlainValue]:
    return asdict(calibration.images) if calibration.images else {}


def of_table(table: CalibrationTable) -> Calibrated:
    """What a table tells of ranges, which are those of its own tensors."""
    ranges = {
        tensor.name: Range(tensor.low, tensor.high, max(abs(tensor.low), abs(tensor.high)), finite=True)
        for tensor in table.tensors
    }
    return Calibrated(table, ranges)


def lines(table: CalibrationTable) -> Iterator[str]:
    """A table for people: what it is made of, and the tensors worth a look."""
    methods = sorted({tensor.method for tensor in table.tensors})
    counts = (f"{sum(tensor.method == method for tensor in table.tensors)} {method}" for method in methods)
    yield f"{len(table.tensors)} tensors ({', '.join(counts)}) from {table.num_samples} samples"
    for axis in table.coverage:
        yield f"  {axis.input} axis {axis.axis}: {axis.min} to {axis.max}, median {axis.median}"
    for profile, count in table.profiles.items():
        yield f"  {count} of {table.num_samples} samples fit profile '{profile}'"
    worst = sorted(table.tensors, key=lambda tensor: -tensor.saturated)[:_MOST_LISTED]
    if worst and worst[0].saturated:
        yield "  saturated   amax        of max      tensor"
    for tensor in worst:
        if tensor.saturated:
            top = max(-tensor.low, tensor.high)
            share = f"{tensor.saturated:9.4%}  {tensor.amax:10.4g}  {top:10.4g}"
            outliers = f"  outliers in {', '.join(tensor.outliers)}" if tensor.outliers else ""
            yield f"  {share}  {tensor.name}{outliers}"
    for note in table.notes:
        yield f"  note: {note}"


def compared(table: CalibrationTable, cache_path: Path) -> Iterator[str]:
    """How a TensorRT calibration cache differs from a table, the furthest ranges first.

    Raises:
        CalibrationError, SeveralErrors: it is no cache.
    """
    header, amax = read_trt_cache(cache_path)
    both = [tensor for tensor in table.tensors if tensor.name in amax]
    yield f"{cache_path.name}: TensorRT {header.tensorrt_version}, {header.algorithm}, {len(both)} of {len(table.tensors)} tensors"
    furthest = sorted(both, key=lambda tensor: -abs(math.log(amax[tensor.name] / tensor.amax)))
    for tensor in furthest[:_MOST_LISTED]:
        ratio = amax[tensor.name] / tensor.amax
        yield f"  {amax[tensor.name]:10.4g} there, {tensor.amax:10.4g} here ({ratio:.2f} times)  {tensor.name}"
