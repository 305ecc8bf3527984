"""What a version cannot honour of a spec and a model: all of it, before anything is built."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from trtforge.backends.capabilities import BACKEND_NAMES, Capability, newest_version
from trtforge.errors import CapabilityError, Problem, SpecError, Where
from trtforge.gpu_models import GPU_MODELS, compute_capability_number, gpu_model, parse_compute_capability
from trtforge.spec.load import SpecFile
from trtforge.spec.model import BuilderSettings
from trtforge.types import Graph, OperatorUse, TensorSpec

_PRECISION_OF_TYPE = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8e4m3fn": "fp8",
    "int4": "int4",
    "float4e2m1": "fp4",
}
_NO_KERNELS_FOR = frozenset({"float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz", "uint4", "complex64", "complex128"})
_MATRIX_PRODUCTS = frozenset({"MatMul", "Gemm", "Einsum", "Attention", "LSTM", "GRU", "RNN"})
_LOWERED = ("fp16", "bf16", "int8")
_SHOWN_NODES = 3
_AMPERE = 80
_JETSON = frozenset({"sm72", "sm87", "sm110"})
"""Xavier, Orin and Thor."""


def refusals(spec_file: SpecFile, target_index: int, graph: Graph, capability: Capability) -> tuple[Problem, ...]:
    """Everything in the target, the settings and the model that this version cannot honour; exit code 6 each.

    Args:
        spec_file: the spec; `spec.targets[target_index]` names `capability.backend`.
        target_index: position of the target.
        graph: the model, read and checked.
        capability: the row of the version that would build.
    """
    return (
        *_gpu_problems(spec_file, target_index, capability),
        *(_calibration_problems(spec_file) if target_index == 0 else ()),
        *_precision_problems(spec_file, graph, capability),
        *_gpu_precision_problems(spec_file, target_index, graph, capability),
        *_setting_problems(spec_file, target_index, capability),
        *_opset_problems(spec_file, graph, capability),
        *_dtype_problems(spec_file, graph, capability),
        *_operator_problems(spec_file, graph, capability),
    )


def warnings(spec_file: SpecFile, target_index: int, graph: Graph, capability: Capability) -> tuple[Problem, ...]:
    """What this version does differently from the model without failing; for the same arguments as `refusals`."""
    where = spec_file.where("model", "onnx")
    return (
        *_clamped_constants(where, graph, capability),
        *_narrowed_tensors(where, graph, capability),
        *_undocumented_opset(where, graph, capability),
        *_off_label_gpus(spec_file, target_index, capability),
    )


def target_compute_capability(backend: str, gpu: str) -> str:
    """The compute capability that a target's `gpus` entry stands for.

    Raises:
        CapabilityError: it is not of the kind that `backend` takes.
    """
    if backend == "tensorrt":
        return _of_model(gpu)
    try:
        return parse_compute_capability(gpu)
    except CapabilityError:
        pass
    try:
        model = gpu_model(gpu)
    except CapabilityError:
        raise CapabilityError(
            f"'{gpu}' is no compute capability", next_step="write one such as sm86, sm89 or sm120"
        ) from None
    raise CapabilityError(
        f"'{gpu}' is a GPU model, and a tensorrt_rtx target names compute capabilities",
        next_step=f"write {model.compute_capability}",
    )


def _of_model(gpu: str) -> str:
    try:
        compute_capability = parse_compute_capability(gpu)
    except CapabilityError:
        return gpu_model(gpu).compute_capability
    models = [model.name for model in GPU_MODELS.values() if model.compute_capability == compute_capability]
    example = f"such as {' or '.join(models[:3])} for {compute_capability}" if models else "such as T4, A100 or H200"
    raise CapabilityError(
        f"'{gpu}' is a compute capability, and a tensorrt engine is tuned for one GPU model",
        next_step=f"write a GPU model, {example}",
    )


def _problem(summary: str, next_step: str, where: Where, detail: tuple[str, ...] = ()) -> Problem:
    return Problem(summary, next_step, where, detail, CapabilityError.exit_code)


def _gpus(spec_file: SpecFile, target_index: int) -> Iterator[tuple[str, Where]]:
    for position, gpu in enumerate(spec_file.spec.targets[target_index].gpus):
        yield gpu, spec_file.where("targets", target_index, "gpus", position)


def _known_gpus(spec_file: SpecFile, target_index: int, capability: Capability) -> Iterator[tuple[str, str, Where]]:
    """(as written, compute capability, place) of each GPU that the version builds for."""
    for gpu, where in _gpus(spec_file, target_index):
        try:
            compute_capability = target_compute_capability(capability.backend, gpu)
        except CapabilityError:
            continue
        if compute_capability in capability.compute_capabilities:
            yield gpu, compute_capability, where


def _gpu_problems(spec_file: SpecFile, target_index: int, capability: Capability) -> Iterator[Problem]:
    seen = _earlier_gpus(spec_file, target_index)
    for gpu, where in _gpus(spec_file, target_index):
        try:
            compute_capability = target_compute_capability(capability.backend, gpu)
        except CapabilityError as error:
            yield dataclasses.replace(error.problems[0], where=where)
            continue
        key = _gpu_key(capability.backend, gpu)
        if key in seen:
            yield _problem(f"GPU '{gpu}' stands here a second time (first as '{seen[key]}')", "remove one", where)
        elif compute_capability not in capability.compute_capabilities:
            yield _untargetable(gpu, compute_capability, capability, where)
        seen[key] = gpu


def _gpu_key(backend: str, gpu: str) -> str:
    return gpu_model(gpu).name if backend == "tensorrt" else parse_compute_capability(gpu)


def _earlier_gpus(spec_file: SpecFile, target_index: int) -> dict[str, str]:
    """GPUs of the targets before this one that have the same backend and version."""
    target = spec_file.spec.targets[target_index]
    seen = {}
    for earlier in spec_file.spec.targets[:target_index]:
        if (earlier.backend, earlier.version) != (target.backend, target.version):
            continue
        for gpu in earlier.gpus:
            with contextlib.suppress(CapabilityError):
                seen[_gpu_key(earlier.backend, gpu)] = gpu
    return seen


def _untargetable(gpu: str, compute_capability: str, capability: Capability, where: Where) -> Problem:
    named = gpu if capability.backend == "tensorrt_rtx" else f"{gpu} ({compute_capability})"
    summary = f"{capability.name} cannot target {named} (it targets {', '.join(capability.compute_capabilities)})"
    if capability.backend == "tensorrt_rtx":
        return _problem(summary, "use backend: tensorrt on a machine with that GPU", where)
    is_older = compute_capability_number(compute_capability) < compute_capability_number(
        capability.compute_capabilities[0]
    )
    step = "build on an older TensorRT" if is_older else f"install tensorrt {newest_version('tensorrt')}"
    return _problem(summary, f"{step}, or remove the GPU", where)


def _model_precisions(graph: Graph) -> dict[str, str]:
    """Precision other than FP32 that the model carries -> how it shows."""
    found = {
        _PRECISION_OF_TYPE[element_type]: element_type
        for element_type in graph.element_types
        if element_type in _PRECISION_OF_TYPE
    }
    if graph.has_qdq and ("int8" in graph.element_types or not found.keys() & {"fp8", "int4", "fp4"}):
        found["int8"] = "QuantizeLinear or DequantizeLinear"
    return found


def _precision_problems(spec_file: SpecFile, graph: Graph, capability: Capability) -> Iterator[Problem]:
    precision = spec_file.spec.precision
    where = spec_file.where("precision", "type")
    carried = _model_precisions(graph)
    if precision.quantization == "implicit":
        yield from _implicit_problems(spec_file, graph, capability)
    if precision.type == "fp32" and carried:
        yield _problem(
            f"precision type fp32, but the model carries {', '.join(carried.values())}",
            "write precision: {type: as_model}",
            where,
        )
    elif precision.type not in ("fp32", "as_model"):
        yield from _asked_type_problems(spec_file, carried, capability)
    if precision.keep.fp32 and precision.type not in _LOWERED:
        yield _problem(
            f"precision.keep has no effect with type {precision.type}, which lowers nothing",
            "remove keep, or write type: fp16",
            spec_file.where("precision", "keep"),
        )
    if precision.keep.rest and precision.type != "int8":
        yield _problem(
            f"precision.keep.rest has no effect with type {precision.type}, which quantizes nothing",
            "remove keep.rest, or write keep.fp32",
            spec_file.where("precision", "keep", "rest"),
        )
    for element_type in sorted(_NO_KERNELS_FOR & set(graph.element_types)):
        yield _problem(
            f"{capability.name} cannot compute with {element_type}, which the model carries",
            "export the model with another type",
            spec_file.where("model", "onnx"),
        )


def _implicit_problems(spec_file: SpecFile, graph: Graph, capability: Capability) -> Iterator[Problem]:
    """TensorRT itself chooses which layers are quantized, so that a spec can say little about it."""
    precision = spec_file.spec.precision
    where = spec_file.where("precision", "quantization")
    if reason := capability.implicit_quantization:
        yield _problem(
            f"{capability.name} cannot build quantization: implicit: {reason}",
            "remove 'quantization: implicit', and give a model with QuantizeLinear and DequantizeLinear",
            where,
        )
    elif precision.type != "int8":
        text = f"quantization: implicit is a way to INT8, and precision.type is {precision.type}"
        yield _problem(text, "write type: int8, or remove 'quantization: implicit'", where)
    elif precision.rest == "bf16":
        where = spec_file.where("precision", "rest")
        yield _problem("quantization: implicit leaves the rest in fp16 or fp32, not in bf16", "write rest: fp16", where)
    elif precision.keep.fp32 or precision.keep.rest:
        text = "precision.keep has no effect with quantization: implicit, where TensorRT chooses the layers"
        yield _problem(text, "remove keep, or 'quantization: implicit'", spec_file.where("precision", "keep"))
    elif spec_file.spec.calibration and spec_file.spec.calibration.is_builders:
        for role in graph.roles:
            if role.kind == "shape_values":
                text = f"TensorRT's calibrators feed no input whose values decide a shape, as those of '{role.name}' do"
                yield _problem(text, "write method: auto", spec_file.where("calibration", "method"))


def _asked_type_problems(spec_file: SpecFile, carried: dict[str, str], capability: Capability) -> Iterator[Problem]:
    """A type that the graph shall be lowered to."""
    asked = spec_file.spec.precision.type
    where = spec_file.where("precision", "type")
    rest = spec_file.spec.precision.rest if asked == "int8" else asked
    lowest = capability.precisions[asked]
    if not lowest.startswith("sm"):
        yield _problem(f"{capability.name} cannot build {asked}: {lowest}", "write precision: {type: fp32}", where)
    elif not capability.precisions[rest].startswith("sm"):
        yield _problem(
            f"{capability.name} cannot build rest: {rest}: {capability.precisions[rest]}",
            "write rest: fp16",
            spec_file.where("precision", "rest"),
        )
    elif carried:
        yield _problem(
            f"precision type {asked}, but the model carries {', '.join(carried.values())} already",
            "write precision: {type: as_model}, or give the FP32 model",
            where,
        )
    elif asked not in _LOWERED:
        yield _problem(
            f"precision type {asked}: this release of trtforge lowers to fp16, bf16 and int8 only",
            "export the model in that type and write precision: {type: as_model}",
            where,
        )


def _calibration_problems(spec_file: SpecFile) -> Iterator[Problem]:
    """Scales come from real inputs; there is no synthetic source."""
    calibration = spec_file.spec.calibration
    if calibration and calibration.is_builders and not spec_file.spec.precision.is_implicit:
        yield Problem(
            f"method: {calibration.method} is TensorRT's own calibrator, which only quantization: implicit uses",
            "write method: auto, or precision: {type: int8, quantization: implicit}",
            spec_file.where("calibration", "method"),
            exit_code=SpecError.exit_code,
        )
    if calibration and calibration.is_builders and calibration.table:
        yield Problem(
            f"method: {calibration.method} makes scales of samples, and the spec names a table that holds scales",
            "write data: in place of table:, or remove method",
            spec_file.where("calibration", "method"),
            exit_code=SpecError.exit_code,
        )
    if spec_file.spec.precision.type == "int8" and spec_file.spec.calibration is None:
        yield Problem(
            "precision type int8 takes its scales from real inputs, and the spec has no calibration",
            "add a line 'calibration: {data: samples.npz}'",
            spec_file.where("precision", "type"),
            exit_code=SpecError.exit_code,
        )


def _written_precisions(spec_file: SpecFile) -> tuple[str, ...]:
    """Types that lowering writes into the graph."""
    precision = spec_file.spec.precision
    if precision.type not in _LOWERED:
        return ()
    return tuple(dict.fromkeys((precision.type, precision.rest))) if precision.type == "int8" else (precision.type,)


def _gpu_precision_problems(
    spec_file: SpecFile, target_index: int, graph: Graph, capability: Capability
) -> Iterator[Problem]:
    carried = _model_precisions(graph)
    for precision, shown in carried.items():
        lowest = capability.precisions[precision]
        if not lowest.startswith("sm"):
            yield _problem(
                f"{capability.name} cannot build {precision}, and the model carries {shown}: {lowest}",
                "export the model in float32",
                spec_file.where("model", "onnx"),
            )
    written = _written_precisions(spec_file)
    for gpu, compute_capability, where in _known_gpus(spec_file, target_index, capability):
        for precision in written:
            if capability.precisions[precision].startswith("sm") and (
                reason := capability.can_compute(precision, compute_capability)
            ):
                yield _problem(
                    f"GPU '{gpu}' ({compute_capability}) lacks {precision}: {reason}",
                    "remove the GPU from this spec, or write precision: {type: fp16}",
                    where,
                )
        if written and "fp32" not in written:
            continue
        for precision, shown in carried.items():
            if capability.precisions[precision].startswith("sm") and (
                reason := capability.can_compute(precision, compute_capability)
            ):
                yield _problem(
                    f"GPU '{gpu}' ({compute_capability}) lacks {precision}, and the model carries {shown}: {reason}",
                    "remove the GPU from this spec, or give it a model without that type",
                    where,
                )
        if (node := _fp32_product(graph, carried)) and compute_capability_number(
            compute_capability
        ) < compute_capability_number(capability.fp32_products_from):
            yield _problem(
                f"{capability.name} has no FP32 matrix products on {compute_capability}, and the model has '{node}'",
                "remove that GPU, or export the model in float16 and write precision: {type: as_model}",
                where,
            )


def _fp32_product(graph: Graph, carried: dict[str, str]) -> str | None:
    """A node that multiplies matrices in FP32 for certain: the model has no lower type."""
    if carried:
        return None
    return next((use.node_names[0] for use in graph.operators if use.op_type in _MATRIX_PRODUCTS), None)


def _setting_problems(spec_file: SpecFile, target_index: int, capability: Capability) -> Iterator[Problem]:
    settings = spec_file.spec.builder
    for field in dataclasses.fields(BuilderSettings):
        value = getattr(settings, field.name)
        if value == field.default:
            continue
        for item in value if isinstance(value, tuple) else (value,):
            reason = capability.settings.get(field.name) or capability.settings.get(f"{field.name}={item}")
            if reason:
                yield _problem(
                    f"{capability.name} cannot honour {field.name}: {_as_yaml(item)}: {reason}",
                    f"remove '{field.name}', or that value",
                    spec_file.where("builder", field.name),
                )
    if settings.refit and settings.version_compatible and capability.name == "tensorrt 8.6":
        yield _problem(  # Source: seen with 8.6, "kREFIT can not be set if kVERSION_COMPATIBLE is set"
            f"{capability.name} takes builder.refit or builder.version_compatible, not both",
            "remove one of them",
            spec_file.where("builder", "refit"),
        )
    if settings.hardware_compatibility != "none" and capability.backend == "tensorrt":
        yield from _not_compatible(spec_file, target_index, capability)


def _as_yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _not_compatible(spec_file: SpecFile, target_index: int, capability: Capability) -> Iterator[Problem]:
    """Source: TensorRT developer guide, "Hardware Compatibility": Ampere or later, and not on JetPack."""
    level = spec_file.spec.builder.hardware_compatibility
    for gpu, compute_capability, where in _known_gpus(spec_file, target_index, capability):
        is_old = level == "ampere_plus" and compute_capability_number(compute_capability) < _AMPERE
        if is_old or compute_capability in _JETSON:
            wanted = "an Ampere or later GPU that is" if level == "ampere_plus" else "a GPU that is"
            yield _problem(
                f"hardware_compatibility: {level} needs {wanted} no Jetson, found '{gpu}' ({compute_capability})",
                "remove the GPU, or write hardware_compatibility: none",
                where,
            )


def _opset_problems(spec_file: SpecFile, graph: Graph, capability: Capability) -> Iterator[Problem]:
    opset = graph.opset
    if not opset or capability.min_opset <= opset <= capability.max_opset:
        return
    wanted = min(max(opset, capability.min_opset), capability.max_opset)
    yield _problem(
        f"{capability.name} reads ONNX opsets {capability.min_opset} to {capability.max_opset}, the model has {opset}",
        f"export the model with opset {wanted}, or convert it: onnx.version_converter.convert_version(model, {wanted})",
        spec_file.where("model", "onnx"),
    )


def _dtype_problems(spec_file: SpecFile, graph: Graph, capability: Capability) -> Iterator[Problem]:
    for kind, tensors in (("input", graph.inputs), ("output", graph.outputs)):
        for tensor in tensors:
            if reason := _dtype_reason(tensor, capability):
                yield _problem(
                    f"{kind} '{tensor.name}' has type {tensor.dtype}, which {capability.name} cannot take: {reason}",
                    f"change the type of '{tensor.name}' in the model and export it again",
                    spec_file.where("model", "onnx"),
                )


def _dtype_reason(tensor: TensorSpec, capability: Capability) -> str:
    return capability.io_dtypes.get(tensor.dtype, f"{BACKEND_NAMES[capability.backend]} has no such type")


def _operator_problems(spec_file: SpecFile, graph: Graph, capability: Capability) -> Iterator[Problem]:
    where = spec_file.where("model", "onnx")
    has_plugins = bool(spec_file.spec.plugins) and capability.backend == "tensorrt"
    for use in graph.operators:
        if reason := _operator_reason(use, capability, has_plugins=has_plugins):
            yield _problem(
                f"{capability.name} has no {_full_name(use)}: {_nodes(use)}", _operator_step(use), where, (reason,)
            )


def _operator_reason(use: OperatorUse, capability: Capability, *, has_plugins: bool) -> str:
    """With plugins, whether there is one for an operator that is not ONNX's own is for the parser to find out."""
    if use.op_type in capability.own_operators or (has_plugins and (use.domain or not use.since_version)):
        return ""
    if use.domain:
        is_local_function = use.since_version and not use.domain.startswith("ai.onnx")
        return capability.local_functions if is_local_function else capability.custom_operators
    if late := capability.late_operators.get((use.op_type, use.since_version)):
        return late
    if use.op_type in capability.unsupported_operators:
        return "its ONNX parser does not read this operator"
    return "" if use.since_version else f"it is no operator of the ONNX standard; {capability.custom_operators}"


def _full_name(use: OperatorUse) -> str:
    version = f" of opset {use.since_version}" if use.since_version and not use.domain else ""
    domain = f" of domain {use.domain}" if use.domain else ""
    return f"operator {use.op_type}{domain}{version}"


def _nodes(use: OperatorUse) -> str:
    prefix = f"{use.scope}/" if use.scope else ""
    shown = ", ".join(f"'{prefix}{name}'" for name in use.node_names[:_SHOWN_NODES])
    count = len(use.node_names)
    if count == 1:
        return f"node {shown}"
    more = f" and {count - _SHOWN_NODES} more" if count > _SHOWN_NODES else ""
    return f"{count} nodes, {shown}{more}"


def _operator_step(use: OperatorUse) -> str:
    if use.domain.startswith("com.microsoft"):
        return "export without onnxruntime's optimiser: it or its contrib operators wrote this domain"
    if use.domain == "ai.onnx.ml":
        return "keep the classical machine-learning part out of the model and run it with onnxruntime"
    if use.op_type in ("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "DynamicQuantizeLinear"):
        return "quantize again in the Q/DQ format (QuantizeLinear and DequantizeLinear around float operators)"
    return "export the model with standard ONNX operators in its place, or run this part outside the engine"


def _clamped_constants(where: Where, graph: Graph, capability: Capability) -> Iterator[Problem]:
    if capability.narrowed_dtypes.get("int64") != "int32" or not graph.wide_int_constants:
        return
    names = ", ".join(f"'{name}'" for name in graph.wide_int_constants[:_SHOWN_NODES])
    yield _problem(
        f"{capability.name} clamps int64 to int32: {len(graph.wide_int_constants)} constants do not fit ({names})",
        "build with tensorrt 10.0 or later, which has int64, or keep the values below 2147483648",
        where,
    )


def _narrowed_tensors(where: Where, graph: Graph, capability: Capability) -> Iterator[Problem]:
    for tensor in (*graph.inputs, *graph.outputs):
        becomes = capability.narrowed_dtypes.get(tensor.dtype)
        if becomes and not _dtype_reason(tensor, capability):
            yield _problem(
                f"'{tensor.name}' is {tensor.dtype} in the model and will be {becomes} in a {capability.name} engine",
                f"feed and read {becomes} at run time",
                where,
            )
    is_tensor = {tensor.dtype for tensor in (*graph.inputs, *graph.outputs)}
    if "float64" in graph.element_types and "float64" not in is_tensor:
        yield _problem(
            f"{capability.name} computes the model's float64 parts in float32",
            "export the model in float32",
            where,
        )


def _undocumented_opset(where: Where, graph: Graph, capability: Capability) -> Iterator[Problem]:
    if capability.documented_max_opset < graph.opset <= capability.max_opset:
        yield _problem(
            f"opset {graph.opset} is above {capability.documented_max_opset}, the last that is documented for"
            f" {capability.name}; an operator may be read by its older definition",
            f"export the model with opset {capability.documented_max_opset}",
            where,
        )


def _off_label_gpus(spec_file: SpecFile, target_index: int, capability: Capability) -> Iterator[Problem]:
    """Source: TensorRT-RTX support matrix 1.5: GeForce and RTX GPUs; sm80 is accepted by the builder, not listed."""
    if capability.backend != "tensorrt_rtx":
        return
    for gpu, compute_capability, where in _known_gpus(spec_file, target_index, capability):
        if compute_capability == "sm80":
            yield _problem(
                f"'{gpu}' is not among the GPUs that TensorRT-RTX supports (A100 and A30), though its builder takes it",
                "use backend: tensorrt on a machine with that GPU",
                where,
            )
