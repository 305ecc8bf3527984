"""The stand-in as an importable `tensorrt`, for the process that builds. What it shall be stands in the environment.

STAND_IN_VERSION: of the module. STAND_IN_TRACE: file that takes the calls. STAND_IN_NETWORK: JSON file with what the
parser finds in whatever it is given. STAND_IN_FAILS_TO_START: what the builder logs before it does not start.
STAND_IN_SWALLOW: node whose output the engine has in FP16, whatever was asked. STAND_IN_TACTIC: number of the tactic
that is measured to be the fastest, of every operator. STAND_IN_LETS_MISSES_PASS: ERROR_ON_TIMING_CACHE_MISS has no effect.
STAND_IN_BATCH_SIZES: values of each input in a batch. STAND_IN_FORGETS: the builder takes the tactic that is fastest
now, whatever the timing cache says. STAND_IN_MYELIN: timing caches get a part that cannot be read back, as with 8.6. STAND_IN_JOINS_NOTHING: two of them do not join.
"""

import ctypes
import hashlib
import json
import os

from stand_in import StandIn

_VERSION = os.environ["STAND_IN_VERSION"]
_GOOD_TIMING_CACHE = b"timing of " + _VERSION.encode()
_MYELIN = b" with Myelin"
_trace = open(os.environ["STAND_IN_TRACE"], "a", buffering=1, encoding="utf-8")  # noqa: SIM115, PTH123 - stays open


_ALGORITHMS = {"IInt8EntropyCalibrator2": "EntropyCalibration2", "IInt8MinMaxCalibrator": "MinMaxCalibration"}


def _note(line):
    _trace.write(line + "\n")


def _start(builder, logger):
    builder.__dict__["logger"] = logger
    if line := os.environ.get("STAND_IN_FAILS_TO_START"):
        logger.log(stand_in.names["ILogger"].Severity.ERROR, line)
        raise TypeError("pybind11::init(): factory function returned nullptr")


def _parse(parser, _data, _path):
    with open(os.environ["STAND_IN_NETWORK"], encoding="utf-8") as file:  # noqa: PTH123
        network = json.load(file)
    tensors = {
        name: stand_in.make("ITensor", **{**tensor, "dtype": _dtype(tensor["dtype"]), "shape": tuple(tensor["shape"])})
        for name, tensor in network["tensors"].items()
    }
    found = {kind: [tensors[name] for name in network[kind]] for kind in ("inputs", "outputs")}
    found["layers"] = [
        _layer(layer, *([tensors[name] for name in layer[kind]] for kind in ("inputs", "outputs")))
        for layer in network["layers"]
    ]
    parser.network.__dict__.update(found | {f"num_{name}": len(entries) for name, entries in found.items()})
    return True


def _dtype(name):
    members = stand_in.names["DataType"].__members__
    return members.get(name, members["INT32"])  # 8.6 has no INT64, and narrows it


def _layer(values, inputs, outputs):
    layer = stand_in.make("ILayer", name=values["name"], type=stand_in.names["LayerType"][values["type"]])
    layer.__dict__.update(inputs=inputs, outputs=outputs, types={}, num_inputs=len(inputs), num_outputs=len(outputs))
    return layer


def _set_output_type(layer, index, dtype):
    layer.types[index] = dtype


def _network(builder, flags=0):
    network = stand_in.make("INetworkDefinition")
    network.__dict__.update(builder=builder, flags=flags)
    return network


def _calibrate(calibrator, network):
    """Reads all batches, and notes the values of each. Scales are written twice, which nothing forbids."""
    names = [tensor.name for tensor in network.inputs]
    types = [{"FLOAT": ctypes.c_float, "INT32": ctypes.c_int32}[tensor.dtype.name] for tensor in network.inputs]
    _note(f"batch size {calibrator.get_batch_size()}")
    while (pointers := calibrator.get_batch(names)) is not None:
        sizes = [int(size) for size in os.environ["STAND_IN_BATCH_SIZES"].split(",")]
        values = [list((kind * size).from_address(at)) for kind, size, at in zip(types, sizes, pointers, strict=True)]
        _note(f"batch of {names}: {values}")
    for name in ("other", "x"):
        calibrator.write_calibration_cache(f"TRT-8601-{_ALGORITHMS[calibrator.kind]}\n{name}: 3c010204\n".encode())


def _choose_tactics(builder, network, config):
    """The tactic of each layer, by the timing cache or measured; None where one is missing and must not be."""
    cache = config.__dict__.get("timing_cache")
    if "EDITABLE_TIMING_CACHE" not in config.on or cache is None:
        return {}
    severity, chosen = stand_in.names["ILogger"].Severity, {}
    for layer in network.layers:
        key = f"0x{hashlib.md5(layer.name.encode()).hexdigest()}"  # noqa: S324
        if key not in cache.tactics or os.environ.get("STAND_IN_FORGETS"):
            builder.logger.log(severity.VERBOSE, f"Autotuning op {layer.name}(key: {key}):")  # noqa: G004
            if "ERROR_ON_TIMING_CACHE_MISS" in config.on and not os.environ.get("STAND_IN_LETS_MISSES_PASS"):
                text = "Error Code 2: Internal Error (Assertion !errorOnMiss failed. )"
                builder.logger.log(severity.ERROR, text)
                return None
            cache.tactics[key] = int(os.environ.get("STAND_IN_TACTIC", "1"))
        chosen[layer.name] = cache.tactics[key]
    return chosen


def _build(builder, network, config):
    stand_in.chosen = _choose_tactics(builder, network, config)
    if stand_in.chosen is None:
        return None
    if getattr(config, "progress_monitor", None):
        config.progress_monitor.phase_start("Building engine", None, 2)
        config.progress_monitor.step_complete("Building engine", 0)
        config.progress_monitor.phase_finish("Building engine")
    if config.__dict__.get("int8_calibrator"):
        cache = bytes(config.int8_calibrator.read_calibration_cache() or b"")
        if not cache:
            _calibrate(config.int8_calibrator, network)
        _note(f"calibration cache read: {cache!r}")
        if cache and not cache.startswith(b"TRT-8601-") and config.int8_calibrator.get_batch(["x"]) is None:
            return None
    stand_in.last = network, config
    major, minor, patch = (int(part) for part in _VERSION.split(".")[:3])
    return b"ftrt" + bytes(20) + bytes((major, minor, patch, 0)) + bytes(36)


def _information(inspector, _format):
    """Like the real one, it tells no types of open sizes without a context that inferred all its shapes."""
    network, config = stand_in.last
    context = inspector.__dict__.get("execution_context")
    is_told = (context is not None and context.is_inferred) or all(-1 not in tensor.shape for tensor in network.inputs)
    low = "FP16" if "FP16" in config.on else "FP32"
    swallowed = os.environ.get("STAND_IN_SWALLOW")

    def entry(layer, tensor, index):
        bound = layer is not None and layer.types.get(index) is not None and layer.name != swallowed
        return {
            "Name": tensor.name,
            "Dimensions": [1],
            "Format/Datatype": f"Row major linear {'FP32' if bound else low}"
            if is_told
            else "N/A due to dynamic shapes",
        }

    return json.dumps(
        {
            "Layers": [
                {
                    "Name": layer.name,
                    "LayerType": layer.type.name,
                    "Inputs": [],
                    "Outputs": [entry(layer, tensor, index) for index, tensor in enumerate(layer.outputs)],
                }
                | ({"TacticName": f"kernel_{stand_in.chosen[layer.name]}"} if stand_in.chosen else {})
                for layer in network.layers
            ],
            "Bindings": [],
        }
    )


def _infer_shapes(context):
    network, _ = stand_in.last
    missing = [tensor.name for tensor in network.inputs if -1 in tensor.shape and tensor.name not in context.sizes]
    context.__dict__["is_inferred"] = not missing
    return missing


def _config(builder):
    config = stand_in.make("IBuilderConfig")
    config.__dict__.update(on={"TF32"}, previews=set(), pools={}, sources=31, profiles=0, logger=builder.logger)
    return config


def _set_preview_feature(config, feature, is_on):
    (config.previews.add if is_on else config.previews.discard)(feature.name)


def _add_profile(config, _profile):
    config.__dict__["profiles"] += 1
    return config.profiles - 1


def _create_timing_cache(config, data):
    if bytes(data).endswith(_MYELIN):
        for line in ("1: [myelinCache.h::deserializeFromBuffer::52] Error", "4: The timing cache will not be used!"):
            config.logger.log(stand_in.names["ILogger"].Severity.ERROR, line)
        data = b""
    if data and not bytes(data).startswith(_GOOD_TIMING_CACHE):
        return None
    tactics = json.loads(bytes(data)[len(_GOOD_TIMING_CACHE) :] or b"{}")
    return stand_in.make("ITimingCache", tactics=tactics)


def _serialize(cache):
    data = _GOOD_TIMING_CACHE + (json.dumps(cache.tactics).encode() if cache.tactics else b"")
    return data + (_MYELIN if os.environ.get("STAND_IN_MYELIN") else b"")


def _query(cache, key):
    return stand_in.make("TimingCacheValue", tacticHash=cache.tactics[key.text], timingMSec=0.5)


def _set_sources(config, sources):
    config.__dict__["sources"] = sources
    return True


def _set_timing_cache(config, cache, _ignore):
    config.__dict__["timing_cache"] = cache
    return True


_METHODS = {
    "Builder.__init__": _start,
    "Builder.create_network": _network,
    "Builder.create_builder_config": _config,
    "Builder.create_optimization_profile": lambda _builder: stand_in.make("IOptimizationProfile"),
    "Builder.build_serialized_network": _build,
    "OnnxParser.__init__": lambda parser, network, _logger: parser.__dict__.update(network=network, num_errors=0),
    "OnnxParser.parse": _parse,
    "INetworkDefinition.get_input": lambda network, index: network.inputs[index],
    "INetworkDefinition.get_output": lambda network, index: network.outputs[index],
    "INetworkDefinition.get_layer": lambda network, index: network.layers[index],
    "ILayer.get_input": lambda layer, index: layer.inputs[index],
    "ILayer.get_output": lambda layer, index: layer.outputs[index],
    "ILayer.set_output_type": _set_output_type,
    "ITensor.get_dimension_name": lambda tensor, index: tensor.axes[index],
    "IBuilderConfig.set_flag": lambda config, flag: config.on.add(flag.name),
    "IBuilderConfig.clear_flag": lambda config, flag: config.on.discard(flag.name),
    "IBuilderConfig.get_flag": lambda config, flag: flag.name in config.on,
    "IBuilderConfig.set_preview_feature": _set_preview_feature,
    "IBuilderConfig.get_preview_feature": lambda config, feature: feature.name in config.previews,
    "IBuilderConfig.set_memory_pool_limit": lambda config, pool, size: config.pools.update({pool: size}),
    "IBuilderConfig.get_memory_pool_limit": lambda config, pool: config.pools[pool],
    "IBuilderConfig.set_tactic_sources": _set_sources,
    "IBuilderConfig.get_tactic_sources": lambda config: config.sources,
    "IBuilderConfig.add_optimization_profile": _add_profile,
    "IBuilderConfig.create_timing_cache": _create_timing_cache,
    "IBuilderConfig.set_timing_cache": _set_timing_cache,
    "IBuilderConfig.get_timing_cache": lambda config: config.__dict__.get("timing_cache"),
    "IBuilderConfig.set_calibration_profile": lambda _config, _profile: True,
    "ITimingCache.combine": lambda _cache, _other, _ignore: not os.environ.get("STAND_IN_JOINS_NOTHING"),
    "ITimingCache.serialize": _serialize,
    "ITimingCache.queryKeys": lambda cache: [stand_in.make("TimingCacheKey", text=key) for key in cache.tactics],
    "ITimingCache.query": _query,
    "TimingCacheKey.__str__": lambda key: key.text,
    "Runtime.deserialize_cuda_engine": lambda _runtime, _data: stand_in.make("ICudaEngine"),
    "ICudaEngine.create_execution_context": lambda _engine: stand_in.make(
        "IExecutionContext", sizes={}, is_inferred=False
    ),
    "IExecutionContext.infer_shapes": _infer_shapes,
    "IExecutionContext.set_input_shape": lambda context, name, shape: context.sizes.update({name: shape}) or True,
    "ICudaEngine.create_engine_inspector": lambda _engine: stand_in.make("EngineInspector"),
    "EngineInspector.get_engine_information": _information,
}
stand_in = StandIn(_VERSION, _note, _METHODS)
globals().update(stand_in.names)
