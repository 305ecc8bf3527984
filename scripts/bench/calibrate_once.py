"""Calibrates and quantizes one model once, by one program, in a process of its own; run by calibration.py.

    python calibrate_once.py PROGRAM MODEL.onnx SAMPLES NUM_SAMPLES RESULT.onnx

PROGRAM is trtforge, ort-minmax, ort-entropy, modelopt-max or modelopt-entropy. SAMPLES is a folder: an INPUT.npy for each
input, with samples along the first axis, and the same as samples.npz. Every program reads it one sample at a time. Prints
the seconds from after the imports to the end, and those of them that our `calibrate` takes. Imports stand in functions,
since no environment has all programs.
"""
# ruff: noqa: PLC0415

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Feeds = Mapping[str, Array]

_OPERATORS = ["Conv", "ConvTranspose", "MatMul", "Gemm"]
_FIRST_WITH_AXIS = 13
"""Opset from which a scale may be given for each channel."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked for."""

    model: Path
    samples: Path
    num_samples: int
    result: Path

    def feeds(self) -> Iterator[Feeds]:
        """Inputs of each sample, with a batch of 1."""
        for index in range(self.num_samples):
            files = self.samples.glob("*.npy")
            yield {file.stem: np.load(file, mmap_mode="r")[index : index + 1].copy() for file in files}


class Reader:
    """The samples as onnxruntime's and ModelOpt's calibrators take them."""

    def __init__(self, task: Task) -> None:
        """Starts at the first sample."""
        self._task = task
        self.rewind()

    def rewind(self) -> None:
        """Back to the first sample."""
        self._left = self._task.feeds()

    def get_next(self) -> Feeds | None:
        """Inputs of the next sample, None after the last."""
        return next(self._left, None)

    def get_first(self) -> Feeds:
        """Inputs of the first sample."""
        return next(self._task.feeds())

    def __iter__(self) -> Iterator[Feeds]:
        """All samples."""
        return self._task.feeds()

    def __next__(self) -> Feeds:
        """Inputs of the next sample."""
        return next(self._left)

    def __len__(self) -> int:
        """Number of samples."""
        return self._task.num_samples

    def set_range(self, start_index: int, end_index: int) -> None:
        """The samples from `start_index` to before `end_index` are next."""
        self._left = (feeds for index, feeds in enumerate(self._task.feeds()) if start_index <= index < end_index)


def spec_of(task: Task, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """A spec that asks for INT8, the rest in FP32, with the method that the tool picks by itself."""
    return {
        "version": 1,
        "name": "bench",
        "model": {"onnx": str(task.model)},
        "profiles": [{"inputs": {name: dict.fromkeys(("min", "opt", "max"), shape) for name, shape in shapes.items()}}],
        "precision": {"type": "int8", "rest": "fp32"},
        "calibration": {"data": str(task.samples / "samples.npz"), "samples": task.num_samples},
        "targets": [{"backend": "tensorrt_rtx", "gpus": ["sm86"]}],
        "output": "out",
    }


def trtforge(task: Task) -> tuple[float, float]:
    """Ours, as a build does it: the model is read, checked, calibrated on the spec's data, folded and lowered."""
    from trtforge.calibrate import calibrate
    from trtforge.digests import file_digest
    from trtforge.graph.ingest import ingest
    from trtforge.lowering import lower_graph
    from trtforge.run import open_run
    from trtforge.shapes.profiles import resolve_profiles
    from trtforge.spec.load import load_spec

    folder = task.result.with_suffix("")
    folder.mkdir()
    start = time.perf_counter()
    path = folder / "spec.yaml"  # JSON is YAML too
    path.write_text(json.dumps(spec_of(task, {name: array.shape for name, array in next(task.feeds()).items()})))
    with open_run(path, folder / "store", lambda _event: None) as run:
        spec = load_spec(path)
        graph = ingest(task.model, folder)
        profiles = resolve_profiles(spec, graph)
        start_calibration = time.perf_counter()
        calibrated = calibrate(spec, graph, profiles, run.stages, file_digest)
        seconds = time.perf_counter() - start_calibration
        lowered = lower_graph(spec, graph, profiles, folder, run.stages, max_opset=21, calibrated=calibrated)
    lowered.graph.path.rename(task.result)
    return time.perf_counter() - start, seconds


def onnxruntime(task: Task, method: str) -> float:
    """`quantize_static` on our operators, signed and symmetric, so that TensorRT would take the result."""
    import onnx
    import onnx.version_converter
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    start = time.perf_counter()
    prepared = task.result.with_suffix(".prepared.onnx")
    model = onnx.load(task.model)
    if model.opset_import[0].version < _FIRST_WITH_AXIS:
        model = onnx.version_converter.convert_version(model, _FIRST_WITH_AXIS)
    onnx.save(model, prepared)
    # Without convolutions there are no additions that fuse, and those of attention masks stop Entropy.
    operators = [*_OPERATORS, "Add"] if any(node.op_type == "Conv" for node in model.graph.node) else _OPERATORS
    quant_pre_process(str(prepared), str(prepared), skip_symbolic_shape=True)
    quantize_static(
        str(prepared),
        str(task.result),
        Reader(task),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=operators,
        per_channel=True,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        calibrate_method=CalibrationMethod.MinMax if method == "minmax" else CalibrationMethod.Entropy,
        extra_options={
            "ActivationSymmetric": True,
            "QuantizeBias": False,
            "OpTypesToExcludeOutputQuantization": operators,
        },
    )
    return time.perf_counter() - start


def modelopt(task: Task, method: str) -> float:
    """ModelOpt's INT8 for ONNX as it comes, what is not quantized in FP32."""
    from modelopt.onnx.quantization import quantize

    start = time.perf_counter()
    quantize(
        str(task.model),
        quantize_mode="int8",
        calibration_data_reader=Reader(task),
        calibration_method=method,
        calibration_eps=["cpu"],
        output_path=str(task.result),
        high_precision_dtype="fp32",
    )
    return time.perf_counter() - start


def main() -> None:
    """Runs the program named on the command line."""
    program, model, samples, num_samples, result = sys.argv[1:]
    task = Task(Path(model), Path(samples), int(num_samples), Path(result))
    name, _, method = program.partition("-")
    if name == "trtforge":
        seconds, calibrating = trtforge(task)
    else:
        seconds = calibrating = (onnxruntime if name == "ort" else modelopt)(task, method)
    print(f"\nseconds {seconds} {calibrating}")


if __name__ == "__main__":
    main()
