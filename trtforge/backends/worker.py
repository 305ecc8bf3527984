"""The child side of a build: loads one TensorRT module, builds one engine, and tells its parent in JSON lines.

It is run as a file by a fresh interpreter and uses nothing of trtforge, so that the interpreter may be another
environment's; only where TensorRT itself calibrates, it loads the module that the request names. Standard input is the
request, one JSON object; the file descriptor in the first argument takes the lines. What the native libraries print
themselves goes elsewhere and cannot mix with them.

Lines: `message` (severity, text), `phase` and `step` (text, fraction), and as the last one `built`, `no_engine` (the
builder refused; its reasons are in `lines`) or `problems` (something asked for cannot be done).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib
import json
import os
import re
import select
import shutil
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Send = Callable[[Json], None]

_LONGEST_TEXT = 8000
_SECONDS_BETWEEN_STEPS = 0.1
_SAID_EACH_TIME = "Registered plugin creator"
_RECENT_LINES = 10

_DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT8": "int8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
    "UINT8": "uint8",
    "FP8": "float8e4m3fn",
    "INT4": "int4",
    "FP4": "float4e2m1",
    "E8M0": "float8e8m0",
}
"""TensorRT's DataType -> the name that `TensorSpec` uses."""

_OWN_TYPE = frozenset(
    (
        *("CAST", "CONSTANT", "QUANTIZE", "DEQUANTIZE", "SHAPE", "ASSERTION", "FILL", "NON_ZERO"),
        *("TRIP_LIMIT", "ITERATOR", "RECURRENCE", "LOOP_OUTPUT"),
        *("CONDITION", "CONDITIONAL_INPUT", "CONDITIONAL_OUTPUT", "PLUGIN", "PLUGIN_V2"),
    )
)
"""LayerType of layers whose types are not the builder's to choose, or that take no precision."""

_AUTOTUNING = re.compile(r"Autotuning op (?P<op>.+?)\(key: (?P<key>0x[0-9a-fA-F]+)\)")
"""An operator whose tactics are measured, which those of a recorded timing cache are not.

Source: README of sampleEditableTimingCache, TensorRT 10.8.
"""
_MISS = "errorOnMiss"
"""Part of the assertion that stops a build with ERROR_ON_TIMING_CACHE_MISS; seen with 11.1."""
_MOST_SHOWN = 10

_WEIGHTED = ("CONVOLUTION", "DECONVOLUTION", "EINSUM", "MATRIX_MULTIPLY")
"""LayerType of the layers that do most of the work."""


class Refused(Exception):  # noqa: N818 - it carries an answer, and is caught in one place
    """Ends the build; `answer` becomes the last line."""

    def __init__(self, answer: Json) -> None:
        super().__init__(answer["kind"])
        self.answer = answer


def problem(error: str, summary: str, next_step: str, *detail: str) -> Json:
    """One problem for the parent to raise as the class `error` of `trtforge.errors`."""
    return {"error": error, "summary": summary, "next_step": next_step, "detail": detail}


def refuse_if_any(problems: list[Json]) -> None:
    """Ends the build if there is a problem.

    Raises:
        Refused: with all of them.
    """
    if problems:
        raise Refused({"kind": "problems", "problems": problems})


def main(events_fd: int) -> None:
    """Does what the request on standard input says and ends the process."""
    send = _sender(events_fd)
    threading.Thread(target=_die_with_parent, args=(events_fd,), daemon=True).start()
    request = json.load(sys.stdin)
    try:
        answer = build(request, send)
    except Refused as refused:
        answer = refused.answer
    except Exception:  # noqa: BLE001 - whatever it was has to reach the parent
        tail = traceback.format_exc().splitlines()
        step = "report this to the makers of trtforge with the lines above"
        answer = {"kind": "problems", "problems": [problem("TrtForgeError", tail[-1], step, *tail)]}
    send(answer)
    # The library's own clean-up can crash or take seconds, and nothing of it is needed.
    os._exit(0)


def build(request: Json, send: Send) -> Json:
    """Builds the engine that `request` describes.

    Raises:
        Refused: the builder gave no engine, or something asked for cannot be done.
    """
    trt = _load(request)
    _load_plugins(request)
    # TensorRT keeps plain pointers to its logger and monitor: these names keep the objects alive.
    logger = _logger(trt, send)
    if request["module"] == "tensorrt":
        trt.init_libnvinfer_plugins(logger, "")
    builder = _builder(trt, logger)
    # The monotonic clock is the same in every process of a machine.
    seconds = {"start": time.monotonic() - request["started"]}
    with _timed(seconds, "parse"):
        network = builder.create_network(_network_flags(trt, request))
        parser = trt.OnnxParser(network, logger)
        _parse(parser, request)
        refuse_if_any(_network_problems(network, request))
        _keep_float32(trt, network, request)
    with _timed(seconds, "build"):
        config = builder.create_builder_config()
        if hasattr(trt, "IProgressMonitor"):
            monitor = _monitor(trt, send)
            config.progress_monitor = monitor
        else:
            send({"kind": "phase", "text": "build", "fraction": 0.0})
        refuse_if_any(_configure(trt, config, request))
        first_profile = _add_profiles(builder, config, request)
        calibrator = _set_calibrator(trt, config, first_profile, request, send)
        timing_cache = _set_timing_cache(config, request, send)
        recorded = _recorded_tactics(timing_cache) if request["locked_timing_path"] else {}
        engine = builder.build_serialized_network(network, config)
    if calibrator is not None:
        refuse_if_any(calibrator.problems(has_engine=engine is not None))
    if request["locked_timing_path"]:
        refuse_if_any(_lock_problems(timing_cache, recorded, logger, has_engine=engine is not None))
    if engine is None:
        raise Refused({"kind": "no_engine", "stage": "build", "lines": [], "recent": list(logger.recent)})
    with _timed(seconds, "write"):
        view = memoryview(engine)
        digest = hashlib.sha256(view).hexdigest()
        write_new(Path(request["engine_path"]), view, "engine")
        timing_cache_digest = _keep_timing_cache(config, timing_cache, request, send)
    if request["inspection_path"] is not None:
        with _timed(seconds, "inspect"):
            _inspect(trt, logger, engine, request)
    return {
        "kind": "built",
        "digest": digest,
        "size_bytes": view.nbytes,
        "seconds": seconds,
        "inputs": [_tensor(network.get_input(i)) for i in range(network.num_inputs)],
        "outputs": [_tensor(network.get_output(i)) for i in range(network.num_outputs)],
        "peak_memory_bytes": _peak_memory_bytes(),
        "weighted_layers": _weighted_layers(network) if _is_strongly_typed(request) else [],
        "timing_cache_digest": timing_cache_digest,
    }


def _is_strongly_typed(request: Json) -> bool:
    """Whether the builder keeps the types of the parsed network."""
    is_always = request["module"] == "tensorrt_rtx" or int(request["version"].split(".")[0]) >= 11  # noqa: PLR2004
    return is_always or "STRONGLY_TYPED" in request["network_flags"]


def _weighted_layers(network: Any) -> list[Json]:
    """The layers that do most of the work, by kind and type."""
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    quantized: dict[str, str] = {}
    for layer in layers:
        if layer.type.name == "DEQUANTIZE":
            quantized[layer.get_output(0).name] = layer.get_input(0).dtype.name
        elif layer.type.name == "SHUFFLE" and layer.get_input(0).name in quantized:
            # The parser gives weights of fewer dimensions than the other operand more of them.
            quantized[layer.get_output(0).name] = quantized[layer.get_input(0).name]
    groups: dict[tuple[str, str], list[str]] = {}
    for layer in layers:
        if layer.type.name in _WEIGHTED:
            dtype = _computed_dtype(layer, quantized)
            groups.setdefault((layer.type.name, _DTYPES.get(dtype, dtype)), []).append(layer.name)
    return [{"kind": kind, "dtype": dtype, "names": names} for (kind, dtype), names in sorted(groups.items())]


def _computed_dtype(layer: Any, quantized: Mapping[str, str]) -> str:
    """That of the quantized values where both operands are dequantized right before the layer; a bias does not count."""
    operands = [tensor.name for i in range(min(layer.num_inputs, 2)) if (tensor := layer.get_input(i)) is not None]
    is_quantized = len(operands) > 1 and all(name in quantized for name in operands)
    found: str = quantized[operands[0]] if is_quantized else layer.get_output(0).dtype.name
    return found


def write_new(path: Path, data: memoryview, what: str) -> None:
    """Writes a new file and forces it to the disk.

    Raises:
        Refused: the file could not be written whole; what was written is removed.
    """
    try:
        with path.open("xb", buffering=0) as file:
            rest = data.cast("B")
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
    except OSError as error:
        path.unlink(missing_ok=True)
        free = shutil.disk_usage(path.parent).free
        summary = f"{path}: the {what} of {data.nbytes} bytes could not be written: {error.strerror}; {free} bytes free"
        step = f"make room for {data.nbytes} bytes in {path.parent}, or lift its size limit"
        refuse_if_any([problem("StoreError", summary, step)])


def _sender(fd: int) -> Send:
    lock = threading.Lock()

    def send(line: Json) -> None:
        data = memoryview(json.dumps(line).encode() + b"\n")
        with lock:
            while data:
                data = data[os.write(fd, data) :]

    return send


def _die_with_parent(events_fd: int) -> None:
    """Ends the process as soon as nobody reads its lines any more, even when the parent was killed."""
    poll = select.poll()
    poll.register(events_fd, 0)
    poll.poll()
    os._exit(1)


@contextlib.contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    seconds[part] = time.monotonic() - started


def _load(request: Json) -> Any:
    name, version = request["module"], request["version"]
    os.environ.update(request["environment"])  # CUDA reads it when the library starts it
    try:
        trt = importlib.import_module(name)
    except ImportError as error:
        summary = f"{name} {version} cannot be loaded in {sys.executable}: {error}"
        raise Refused(
            {"kind": "problems", "problems": [problem("CapabilityError", summary, request["install"])]}
        ) from error
    if trt.__version__ != version:
        summary = f"{name} {trt.__version__} was loaded, the build was planned for {version}"
        refuse_if_any([problem("CapabilityError", summary, f"install {name} {version}, or plan the build again")])
    return trt


def _load_plugins(request: Json) -> None:
    """Loads libraries whose operators register themselves."""
    problems = []
    for path in request["plugins"]:
        try:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            summary = f"plugin library {path} cannot be loaded: {error}"
            problems.append(problem("CapabilityError", summary, f"ldd {path}"))
    refuse_if_any(problems)


def _logger(trt: Any, send: Send) -> Any:
    warning = int(trt.ILogger.Severity.WARNING)

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.recent: deque[str] = deque(maxlen=_RECENT_LINES)
            self.tuned: dict[str, str] = {}
            self.missed = False

        def log(self, severity: Any, text: str) -> None:
            if found := _AUTOTUNING.search(text):
                self.tuned[found["key"].lower()] = found["op"]
            self.missed = self.missed or _MISS in text
            if int(severity) <= warning:
                send({"kind": "message", "severity": severity.name.lower(), "text": text[:_LONGEST_TEXT]})
            elif not text.startswith(_SAID_EACH_TIME):
                self.recent.append(text[:_LONGEST_TEXT])

    return Logger()


def _builder(trt: Any, logger: Any) -> Any:
    try:
        return trt.Builder(logger)
    except TypeError:  # pybind11's word for a null pointer; the logger was told why
        answer = {"kind": "no_engine", "stage": "start", "lines": [], "recent": list(logger.recent)}
        raise Refused(answer) from None


def _monitor(trt: Any, send: Send) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._lock = threading.Lock()
            self._phases: dict[str, list[int]] = {}
            self._fraction = 0.0
            self._last_sent = 0.0

        def _advance(self) -> float:
            """Phases nest: each open one is worth one step of the phase around it."""
            begin, width = 0.0, 1.0
            for num_steps, done in self._phases.values():
                width /= max(num_steps, 1)
                begin += width * min(done, num_steps)
            self._fraction = max(self._fraction, min(begin, 1.0))
            return self._fraction

        def phase_start(self, name: str, parent: str | None, num_steps: int) -> None:  # noqa: ARG002 - TensorRT's names
            with self._lock:
                self._phases[name] = [num_steps, 0]
                send({"kind": "phase", "text": name, "fraction": self._advance()})

        def step_complete(self, name: str, step: int) -> bool:
            with self._lock:
                if name in self._phases:
                    self._phases[name][1] = step + 1
                fraction, now = self._advance(), time.monotonic()
                if now - self._last_sent >= _SECONDS_BETWEEN_STEPS:
                    self._last_sent = now
                    send({"kind": "step", "text": name, "fraction": fraction})
            return True

        def phase_finish(self, name: str) -> None:
            with self._lock:
                self._phases.pop(name, None)

    return Monitor()


def _network_flags(trt: Any, request: Json) -> int:
    flags: int = sum(1 << int(getattr(trt.NetworkDefinitionCreationFlag, name)) for name in request["network_flags"])
    return flags


def _parse(parser: Any, request: Json) -> None:
    data = Path(request["model_path"]).read_bytes()
    # The path is not opened: its folder is the one that external data locations are relative to.
    parsed = parser.parse(data, request["parse_path"])
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    if errors or not parsed:
        raise Refused({"kind": "no_engine", "stage": "parse", "lines": [_parser_line(error) for error in errors]})


def _parser_line(error: Any) -> str:
    if not hasattr(error, "node_name"):  # before TensorRT 10
        return f"{_code(error)} in node number {error.node()}: {error.desc()}"[:_LONGEST_TEXT]
    node = error.node_name() or f"number {error.node()}"
    operator = error.node_operator() or "the graph"
    stack = "".join(f", in function {name}" for name in error.local_function_stack())
    return f"{_code(error)} in {operator} '{node}'{stack}: {error.desc()}"[:_LONGEST_TEXT]


def _code(error: Any) -> str:
    """Name of a parser error's code; 8.6 has a method where later versions have the name."""
    return str(error.code()).rpartition(".")[2]


def _tensor(tensor: Any) -> Json:
    shape = [size if size >= 0 else tensor.get_dimension_name(axis) or None for axis, size in enumerate(tensor.shape)]
    return {"name": tensor.name, "dtype": _DTYPES.get(tensor.dtype.name, tensor.dtype.name), "shape": shape}


def _network_problems(network: Any, request: Json) -> list[Json]:
    """Where the parsed network is not the graph that was checked before: the parser changes types without a word."""
    inputs = {network.get_input(i).name: network.get_input(i) for i in range(network.num_inputs)}
    outputs = {network.get_output(i).name: network.get_output(i) for i in range(network.num_outputs)}
    problems = []
    for kind, expected, found in (("input", request["inputs"], inputs), ("output", request["outputs"], outputs)):
        names = [spec["name"] for spec in expected]
        if set(names) != set(found):
            summary = f"the parsed network has the {kind}s {', '.join(found) or 'none'}, the model {', '.join(names)}"
            problems.append(problem("GraphError", summary, "export the model again; its file is damaged"))
        for spec in expected:
            if spec["name"] in found:
                problems += _dtype_problems(kind, spec, _tensor(found[spec["name"]]), request)
    problems += _tie_problems(inputs, request)
    for name, tensor in inputs.items():
        problems += _profile_problems(name, tensor, request)
    for profile in request["profiles"]:
        # The builder takes ranges for inputs that do not exist without a word.
        for name in {**profile["shapes"], **profile["values"]}.keys() - inputs.keys():
            summary = f"profile '{profile['name']}' names '{name}', the network has {', '.join(inputs)}"
            problems.append(problem("BuildError", summary, f"remove '{name}' from the profile"))
    return problems


def _dtype_problems(kind: str, spec: Json, parsed: Json, request: Json) -> list[Json]:
    if parsed["dtype"] == spec["dtype"]:
        return []
    summary = (
        f"{request['module']} {request['version']} makes {kind} '{spec['name']}' {parsed['dtype']}, "
        f"the model says {spec['dtype']}"
    )
    return [problem("CapabilityError", summary, f"cast '{spec['name']}' to {parsed['dtype']} in the model")]


def _tie_problems(inputs: Mapping[str, Any], request: Json) -> list[Json]:
    """TensorRT takes dimensions of one name to be equal; names that mean nothing would forbid sizes in silence."""
    meant = {spec["name"]: spec["shape"] for spec in request["inputs"]}
    places: dict[str, list[tuple[str, int]]] = {}
    for name, tensor in inputs.items():
        for axis, dim in enumerate(_tensor(tensor)["shape"]):
            if isinstance(dim, str):
                places.setdefault(dim, []).append((name, axis))
    problems = []
    for dim, where in places.items():
        if len(where) > 1 and any(meant.get(name, [])[axis : axis + 1] != [dim] for name, axis in where):
            axes = ", ".join(f"'{name}' axis {axis}" for name, axis in where)
            summary = f"the model names {axes} all '{dim}', so TensorRT takes their sizes to be equal"
            step = f"give each of these dimensions a name of its own, or none, in place of '{dim}'"
            problems.append(problem("GraphError", summary, step))
    return problems


def _profile_problems(name: str, tensor: Any, request: Json) -> list[Json]:
    role = {spec["name"]: spec["role"] for spec in request["inputs"]}.get(name, "")
    problems = []
    for profile in request["profiles"]:
        if -1 in tensor.shape and name not in profile["shapes"]:
            summary = f"profile '{profile['name']}' has no shapes for the dynamic input '{name}'"
            problems.append(problem("BuildError", summary, f"add '{name}' with min, opt and max"))
        if tensor.is_shape_tensor and name not in profile["values"]:
            summary = (
                f"profile '{profile['name']}' has no values for '{name}', whose values decide another tensor's shape"
            )
            step = f"add values: {{min: [...], opt: [...], max: [...]}} for '{name}'"
            problems.append(problem("BuildError", summary, step, f"the graph check took it for: {role}"))
        if not tensor.is_shape_tensor and name in profile["values"] and role != "shape_values":
            summary = f"profile '{profile['name']}' has values for '{name}', which decides no tensor's shape"
            problems.append(problem("BuildError", summary, f"remove values: of '{name}'"))
    return problems


def _configure(trt: Any, config: Any, request: Json) -> list[Json]:
    """Applies every setting and reads it back, since most setters of this library take anything without a word."""
    problems = []

    def check(what: str, applied: bool) -> None:  # noqa: FBT001
        if not applied:
            summary = f"{request['module']} {request['version']} did not take {what}"
            problems.append(problem("CapabilityError", summary, "leave it out, or use another version"))

    for name, on in request["flags"].items():
        flag = getattr(trt.BuilderFlag, name)
        (config.set_flag if on else config.clear_flag)(flag)
        check(f"{name} = {on}", config.get_flag(flag) == on)
    for name, value in request["numbers"].items():
        setattr(config, name, value)
        check(f"{name} = {value}", getattr(config, name) == value)
    for name, value in request["memory_pools"].items():
        pool = getattr(trt.MemoryPoolType, name)
        config.set_memory_pool_limit(pool, value)
        check(f"{name} limit = {value} bytes", config.get_memory_pool_limit(pool) == value)
    for name, (enum, member) in request["enums"].items():
        setattr(config, name, getattr(getattr(trt, enum), member))
        check(f"{name} = {member}", getattr(config, name) == getattr(getattr(trt, enum), member))
    for name in request["preview_features"]:
        feature = getattr(trt.PreviewFeature, name)
        config.set_preview_feature(feature, True)
        check(f"{name} = True", config.get_preview_feature(feature))
    if request["tactic_sources"] is not None:
        sources = sum(1 << int(getattr(trt.TacticSource, name)) for name in request["tactic_sources"])
        check(f"tactic sources {request['tactic_sources']}", config.set_tactic_sources(sources))
        check(f"tactic sources {request['tactic_sources']}", config.get_tactic_sources() == sources)
    if request["compute_capability"] is not None:
        problems += _set_compute_capability(trt, config, request)
    return problems


def _set_compute_capability(trt: Any, config: Any, request: Json) -> list[Json]:
    """Without a slot for it the setter returns False and the builder builds for a default set of GPUs, silently."""
    known = [name for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
    asked = request["compute_capability"]
    if asked in known:
        wanted = getattr(trt.ComputeCapability, asked)
        config.num_compute_capabilities = 1
        if config.set_compute_capability(wanted, 0) and config.get_compute_capability(0) == wanted:
            return []
        summary = f"{request['module']} {request['version']} did not take {asked.lower()} as its target"
    else:
        targets = ", ".join(name.lower() for name in known)
        summary = f"{request['module']} {request['version']} cannot target {asked.lower()} (it targets {targets})"
    return [problem("CapabilityError", summary, "use backend: tensorrt on a machine with that GPU")]


def _add_profiles(builder: Any, config: Any, request: Json) -> Any:
    """Adds all, and returns the first one, None where there is none."""
    first = None
    for number, profile in enumerate(request["profiles"]):
        profile_of_trt = builder.create_optimization_profile()
        first = profile_of_trt if first is None else first
        for name, (low, opt, high) in profile["shapes"].items():
            profile_of_trt.set_shape(name, low, opt, high)
        for name, (low, opt, high) in profile["values"].items():
            profile_of_trt.set_shape_input(name, low, opt, high)
        if config.add_optimization_profile(profile_of_trt) != number:
            raise Refused({"kind": "no_engine", "stage": f"profile '{profile['name']}'", "lines": []})
    return first


def _keep_float32(trt: Any, network: Any, request: Json) -> None:
    """Binds what the graph computes in FP32, which a weakly typed network is free to run in a lower type.

    The parser makes several layers of some nodes; the tensors between them have names of its own and take the type of
    the layer that reads them, so layers are looked at from the last to the first.
    """
    bound = dict(request["bound_tensors"])
    for index in reversed(range(network.num_layers if bound else 0)):
        layer = network.get_layer(index)
        outputs = [layer.get_output(place) for place in range(layer.num_outputs)]
        is_bound = any(tensor is not None and bound.get(tensor.name, False) for tensor in outputs)
        if not is_bound or layer.type.name in _OWN_TYPE:
            continue
        for tensor in filter(None, (layer.get_input(place) for place in range(layer.num_inputs))):
            bound.setdefault(tensor.name, True)
        layer.precision = trt.DataType.FLOAT
        for place, tensor in enumerate(outputs):
            if tensor is not None and tensor.dtype.name in ("FLOAT", "HALF"):
                layer.set_output_type(place, trt.DataType.FLOAT)


def _set_calibrator(trt: Any, config: Any, profile: Any, request: Json, send: Send) -> Any:
    """The calibrator that is asked for, None where there is none. Its `problems()` are asked for after the build."""
    asked = request["calibration"]
    if asked is None:
        return None
    base = getattr(trt, asked["calibrator"])
    calibrator = _streaming(base, asked, send) if asked["batches"] else _handing_over(base, asked, request)
    config.int8_calibrator = calibrator
    if profile is not None:
        config.set_calibration_profile(profile)
    return calibrator


def _handing_over(base: Any, asked: Json, request: Json) -> Any:
    """A calibrator that only hands over the scales that it was given."""
    given = _with_own_version(Path(asked["path"]).read_bytes(), request)

    class Calibrator(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)
            self.was_refused = False

        def get_batch_size(self) -> int:
            return 1

        def get_batch(self, names: list[str]) -> None:  # noqa: ARG002 - TensorRT's names
            """Called only where the scales were not taken; no batch ends the build."""
            self.was_refused = True

        def read_calibration_cache(self) -> bytes:
            return given

        def write_calibration_cache(self, cache: Any) -> None:
            pass

        def problems(self, *, has_engine: bool) -> list[Json]:  # noqa: ARG002 - the other kind asks
            if not self.was_refused:
                return []
            summary = "TensorRT did not take the calibration cache, whose first line names another version or algorithm"
            return [problem("BuildError", summary, "trtforge calibrate SPEC  # writes one for this version")]

    return Calibrator()


def _streaming(base: Any, asked: Json, send: Send) -> Any:
    """A calibrator that hands over one batch after the other, and writes the scales that TensorRT makes of them."""
    batches = asked["batches"]
    num_batches = batches["num_batches"]

    class Calibrator(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)
            self.feed: Any = None
            self.num_given = 0
            self.found: list[Json] = []
            self.is_written = False
            self.last_sent = 0.0

        def get_batch_size(self) -> int:
            size: int = batches["batch_size"]
            return size

        def get_batch(self, names: list[str]) -> list[int] | None:
            if self.num_given == num_batches or self.found:
                return None
            try:
                self.feed = self.feed or _feed(batches)
                pointers: list[int] = self.feed.next_batch(names)
            except Exception as error:  # noqa: BLE001 - TensorRT would print and forget it
                self.found = _stopped(error, f"calibration stopped at batch {self.num_given + 1} of {num_batches}")
                return None
            self.num_given += 1
            if time.monotonic() - self.last_sent >= _SECONDS_BETWEEN_STEPS or self.num_given == num_batches:
                self.last_sent = time.monotonic()
                send({"kind": "step", "text": f"calibration, batch {self.num_given} of {num_batches}"})
            return pointers

        def read_calibration_cache(self) -> None:
            pass

        def write_calibration_cache(self, cache: Any) -> None:
            if self.found or self.num_given < num_batches:
                return
            try:
                write_new(Path(asked["path"]), memoryview(bytes(cache)), "calibration cache")
            except Refused as refused:
                self.found = refused.answer["problems"]
            self.is_written = True

        def problems(self, *, has_engine: bool) -> list[Json]:
            if self.feed is not None:
                self.feed.close()
            if self.found or self.is_written or not has_engine:
                return self.found
            summary = f"TensorRT took {self.num_given} of {num_batches} calibration batches and gave no scales"
            return [problem("BuildError", summary, "read the lines of the builder's log, or write method: auto")]

    return Calibrator()


def _feed(batches: Json) -> Any:
    """Puts batches into the GPU's memory; a module of trtforge does, as CUDA is none of Python's own libraries."""
    sys.path.append(batches["import_from"])
    return importlib.import_module(batches["module"]).Feed(batches["files"])


def _stopped(error: Exception, what: str) -> list[Json]:
    """An exception that TensorRT shall not swallow, as problems; those of trtforge keep their class and words."""
    if found := getattr(error, "problems", ()):
        kind = type(error).__name__
        return [problem(kind, f"{what}: {one.summary}", one.next_step, *one.detail) for one in found]
    tail = traceback.format_exc().splitlines()
    return [problem("BuildError", f"{what}: {tail[-1]}", "read the lines above; the last is the error itself", *tail)]


def _with_own_version(cache: bytes, request: Json) -> bytes:
    """The header names the library's version to the patch, which the Python module's may differ from."""
    try:
        library = ctypes.CDLL(f"libnvinfer.so.{request['version'].split('.')[0]}")
        number = int(library.getInferLibVersion())
    except (OSError, AttributeError):
        return cache
    _, _, algorithm_and_rest = cache.partition(b"-")[2].partition(b"-")
    return f"TRT-{number}-".encode() + algorithm_and_rest


def _set_timing_cache(config: Any, request: Json, send: Send) -> Any:
    """The recorded measurements of a locked build, else those of earlier builds, or fresh ones where none fit."""
    if request["locked_timing_path"]:
        return _recorded_timing_cache(config, request)
    path = request["timing_cache_path"]
    if path is None:
        return None
    try:
        data = Path(path).read_bytes()
    except OSError:
        data = b""
    cache = config.create_timing_cache(data)
    if cache is None or not config.set_timing_cache(cache, False):
        send(
            {
                "kind": "message",
                "severity": "warning",
                "text": f"timing cache {path} does not fit; a fresh one is begun",
            }
        )
        Path(path).unlink(missing_ok=True)
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache


def _recorded_timing_cache(config: Any, request: Json) -> Any:
    cache = config.create_timing_cache(Path(request["locked_timing_path"]).read_bytes())
    # The choices are replayed, and the times that led to them may be another GPU's of the same model.
    if cache is None or not config.set_timing_cache(cache, True):
        summary = f"{request['module']} {request['version']} does not take the recorded timing cache"
        refuse_if_any(
            [problem("CapabilityError", summary, "trtforge build SPEC  # without --locked, which records anew")]
        )
    return cache


def _tactics(cache: Any) -> dict[str, int]:
    """Key of an operator -> hash of the tactic that was chosen for it."""
    return {str(key).lower(): int(cache.query(key).tacticHash) for key in cache.queryKeys()}


def _recorded_tactics(cache: Any) -> dict[str, int]:
    found = _tactics(cache)
    if not found:
        summary = "the recorded timing cache holds no tactics, so that there is nothing to repeat"
        step = "build without --locked, with builder.optimization_level: 1 or more, as 0 measures none"
        refuse_if_any([problem("CapabilityError", summary, step)])
    return found


def _lock_problems(cache: Any, recorded: Mapping[str, int], logger: Any, *, has_engine: bool) -> list[Json]:
    """Where a locked build took, or needed, other tactics than the recorded ones.

    They are compared besides the builder's own check, which let misses pass.

    Source: https://github.com/NVIDIA/TensorRT-Model-Connect/pull/451
    """
    if not has_engine and not logger.missed:
        return []  # it failed for a reason of its own
    found = _tactics(cache)
    missing = [key for key in {**found, **({} if has_engine else logger.tuned)} if key not in recorded]
    changed = [key for key, tactic in recorded.items() if found.get(key, tactic) != tactic]
    if has_engine and not missing and not changed:
        return []
    names = [*(f"no tactic of {_operator(key, logger)}" for key in missing)]
    names += [
        f"another tactic of {_operator(key, logger)}: {found[key]:#x}, recorded {recorded[key]:#x}" for key in changed
    ]
    if len(names) > _MOST_SHOWN:
        names[_MOST_SHOWN:] = [f"and {len(names) - _MOST_SHOWN} more"]
    count = len(missing) + len(changed)
    of_which = (
        f"{count} of its tactics differ" if count else "it lacks one, and the log does not tell of which operator"
    )
    summary = f"the build does not follow the recorded timing cache: {of_which}"
    return [problem("BuildError", summary, "trtforge build SPEC  # without --locked, which records anew", *names)]


def _operator(key: str, logger: Any) -> str:
    return f"'{logger.tuned[key]}' (key {key})" if key in logger.tuned else f"key {key}"


def _keep_timing_cache(config: Any, cache: Any, request: Json, send: Send) -> str | None:
    """SHA-256 of the timing cache as this build used it, which is kept; what was measured is joined with others'."""
    if cache is None:
        return None
    locked = request["locked_timing_path"]
    data = Path(locked).read_bytes() if locked else bytes(cache.serialize())
    if request["timing_record_path"]:
        write_new(Path(request["timing_record_path"]), memoryview(data), "timing cache")
    if not locked:
        _join_timing_cache(config, cache, request, send)
    return hashlib.sha256(data).hexdigest()


def _join_timing_cache(config: Any, cache: Any, request: Json, send: Send) -> None:
    """Adds what this build measured to what others have written meanwhile."""
    path = Path(request["timing_cache_path"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            other = config.create_timing_cache(path.read_bytes()) if path.exists() else None
            if other is not None:
                cache.combine(other, False)
            aside = path.with_suffix(f".{os.getpid()}")
            aside.write_bytes(bytes(cache.serialize()))
            aside.replace(path)
    except OSError as error:  # the engine is good without it
        send({"kind": "message", "severity": "warning", "text": f"timing cache {path} is not kept: {error}"})


def _inspect(trt: Any, logger: Any, engine: Any, request: Json) -> None:
    """Writes what the finished engine says about its layers."""
    runtime = trt.Runtime(logger)
    runtime.engine_host_code_allowed = True  # it was built here a moment ago
    loaded = runtime.deserialize_cuda_engine(engine)
    if loaded is None:
        raise Refused({"kind": "no_engine", "stage": "load for inspection", "lines": []})
    inspector = loaded.create_engine_inspector()
    text = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    Path(request["inspection_path"]).write_text(text, encoding="utf-8")


def _peak_memory_bytes() -> int:
    """Of this process alone: getrusage would count the parent, whose memory was shared until exec."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
