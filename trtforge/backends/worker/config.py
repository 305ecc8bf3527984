"""The builder's settings and optimization profiles, applied and read back."""

from __future__ import annotations

from typing import Any

from trtforge.backends.worker.answers import Json, Refused, problem


def configure(trt: Any, config: Any, request: Json) -> list[Json]:
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


def add_profiles(builder: Any, config: Any, request: Json) -> Any:
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
