"""Does what the request on standard input says."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import json
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trtforge.backends.worker.answers import Json, Refused, Send, end, problem, refuse_if_any, sender, write_whole
from trtforge.backends.worker.calibration import calibration_problems, set_calibrator
from trtforge.backends.worker.config import add_profiles, configure
from trtforge.backends.worker.logger import make_logger, make_monitor
from trtforge.backends.worker.network import (
    is_strongly_typed,
    keep_float32,
    network_problems,
    parse,
    tensor_record,
    weighted_layers,
)
from trtforge.backends.worker.timing import keep_timing_cache, lock_problems, recorded_tactics, set_timing_cache


def main(events_fd: int) -> None:
    """Builds what the request on standard input describes, answers, and ends the process."""
    send = sender(events_fd)
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
    end(send, answer)


def build(request: Json, send: Send) -> Json:
    """Builds the engine that `request` describes, see `trtforge.backends.engine_build`.

    Raises:
        Refused: the builder gave no engine, or something asked for cannot be done.
    """
    trt = _load(request)
    _load_plugins(request)
    # TensorRT keeps plain pointers to its logger, and to weights that the parser holds: names keep them alive.
    logger = make_logger(trt, send)
    if request["module"] == "tensorrt":
        trt.init_libnvinfer_plugins(logger, "")
    builder = _builder(trt, logger)
    # The monotonic clock is the same in every process of a machine.
    seconds = {"start": time.monotonic() - request["started"]}
    with _timed(seconds, "parse"):
        network = builder.create_network(_network_flags(trt, request))
        parser = trt.OnnxParser(network, logger)
        parse(parser, request)
        refuse_if_any(network_problems(network, request))
        keep_float32(trt, network, request)
    with _timed(seconds, "build"):
        config = builder.create_builder_config()
        engine, timing_cache = _engine(trt, builder, network, config, logger, request, send)
    with _timed(seconds, "write"):
        view = memoryview(engine)
        digest = hashlib.sha256(view).hexdigest()
        write_whole(Path(request["engine_path"]), view, "engine")
        timing_cache_digest = keep_timing_cache(config, timing_cache, logger, request, send)
    if request["inspection_path"] is not None:
        with _timed(seconds, "inspect"):
            _inspect(trt, logger, engine, request)
    return {
        "kind": "built",
        "digest": digest,
        "size_bytes": view.nbytes,
        "seconds": seconds,
        "inputs": [tensor_record(network.get_input(i)) for i in range(network.num_inputs)],
        "outputs": [tensor_record(network.get_output(i)) for i in range(network.num_outputs)],
        "peak_memory_bytes": _peak_memory_bytes(),
        "weighted_layers": weighted_layers(network) if is_strongly_typed(request) else [],
        "timing_cache_digest": timing_cache_digest,
    }


def _engine(
    trt: Any, builder: Any, network: Any, config: Any, logger: Any, request: Json, send: Send
) -> tuple[Any, Any]:
    """The serialized engine, and the timing cache as it was used."""
    monitor = make_monitor(trt, send) if hasattr(trt, "IProgressMonitor") else None
    if monitor:
        config.progress_monitor = monitor
    else:
        send({"kind": "phase", "text": "build", "fraction": 0.0})
    refuse_if_any(configure(trt, config, request))
    first_profile = add_profiles(builder, config, request)
    calibrator = set_calibrator(trt, config, first_profile, request, send)
    timing_cache = set_timing_cache(config, logger, request, send)
    is_locked = request["locked_timing_path"] is not None
    recorded = recorded_tactics(timing_cache) if is_locked else {}
    engine = builder.build_serialized_network(network, config)
    if is_locked:
        refuse_if_any(lock_problems(timing_cache, recorded, logger, has_engine=engine is not None))
    if engine is None:
        raise Refused({"kind": "no_engine", "stage": "build", "lines": [], "recent": list(logger.recent)})
    refuse_if_any(calibration_problems(calibrator))
    return engine, timing_cache


def _load(request: Json) -> Any:
    name, version = request["module"], request["version"]
    os.environ.update(request["environment"])  # CUDA reads it when the library starts it
    try:
        trt = importlib.import_module(name)
    except ImportError as error:
        summary = f"{name} {version} cannot be loaded in {sys.executable}: {error}"
        answer = {"kind": "problems", "problems": [problem("CapabilityError", summary, request["install"])]}
        raise Refused(answer) from error
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


def _builder(trt: Any, logger: Any) -> Any:
    try:
        return trt.Builder(logger)
    except TypeError:  # pybind11's word for a null pointer; the logger was told why
        answer = {"kind": "no_engine", "stage": "start", "lines": [], "recent": list(logger.recent)}
        raise Refused(answer) from None


def _network_flags(trt: Any, request: Json) -> int:
    flags: int = sum(1 << int(getattr(trt.NetworkDefinitionCreationFlag, name)) for name in request["network_flags"])
    return flags


def _inspect(trt: Any, logger: Any, engine: Any, request: Json) -> None:
    """Writes what the finished engine says about its layers."""
    runtime = trt.Runtime(logger)
    runtime.engine_host_code_allowed = True  # it was built here a moment ago
    loaded = runtime.deserialize_cuda_engine(engine)
    if loaded is None:
        raise Refused({"kind": "no_engine", "stage": "load for inspection", "lines": []})
    inspector = loaded.create_engine_inspector()
    memory = _set_shapes(loaded, inspector, request["profiles"])
    text = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    write_whole(Path(request["inspection_path"]), memoryview(text.encode()), "layer information")
    del memory


def _set_shapes(engine: Any, inspector: Any, profiles: list[Json]) -> list[Any]:
    """Lets the inspector see a context at the first profile's opt; without one it tells no types of open sizes.

    Returns:
        What has to live until it was asked: values of inputs that hold sizes.

    Source: IEngineInspector::setExecutionContext of NvInferRuntime.h
    """
    context = engine.create_execution_context() if profiles else None
    if context is None:  # no memory for it: the engine is good, and its types stay untold
        return []
    memory: list[Any] = [context]
    for name, (_, opt, _) in profiles[0]["shapes"].items():
        context.set_input_shape(name, opt)
    for name, (_, opt, _) in profiles[0]["values"].items():
        kind = ctypes.c_int64 if engine.get_tensor_dtype(name).name == "INT64" else ctypes.c_int32
        memory.append((kind * len(opt))(*opt))
        context.set_tensor_address(name, ctypes.addressof(memory[-1]))
    with contextlib.suppress(RuntimeError):  # it finds none: the engine is good all the same
        context.infer_shapes()
    inspector.execution_context = context
    return memory


def _peak_memory_bytes() -> int:
    """Of this process alone: getrusage would count the parent, whose memory was shared until exec."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


@contextlib.contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    seconds[part] = time.monotonic() - started


def _die_with_parent(events_fd: int) -> None:
    """Ends the process as soon as nobody reads its lines any more, even when the parent was killed."""
    poll = select.poll()
    poll.register(events_fd, 0)
    poll.poll()
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
