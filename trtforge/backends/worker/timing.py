"""Timing caches: what builds measured, kept for later ones, or recorded for one that repeats every choice."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtforge.backends.worker.answers import Json, Send, problem, refuse_if_any, send_warning, write_whole

_MOST_SHOWN = 10
_ANEW = "trtforge build SPEC  # without --locked, which records anew"


def set_timing_cache(config: Any, logger: Any, request: Json, send: Send) -> Any:
    """The recorded measurements of a locked build, none for one that records, else those of earlier builds.

    Raises:
        Refused: a recorded timing cache is not one of this TensorRT.
    """
    path = request["timing_cache_path"]
    if request["locked_timing_path"]:
        return _recorded(config, logger, request)
    if request["timing_record_path"]:
        return _fresh(config)
    if path is None:
        return None
    cache, _ = _read_back(config, logger, _read(Path(path)))
    if cache is not None and config.set_timing_cache(cache, False):
        return cache
    _forget(Path(path), send)
    return _fresh(config)


def keep_timing_cache(config: Any, cache: Any, logger: Any, request: Json, send: Send) -> str | None:
    """SHA-256 of the timing cache as this build used it, None without one.

    A locked build's and a recording one's are written where the request says, another's joined with what others measured.

    Raises:
        Refused: the recorded one could not be written.
    """
    if cache is None:
        return None
    locked, record = request["locked_timing_path"], request["timing_record_path"]
    data = Path(locked).read_bytes() if locked else bytes(cache.serialize())
    if record:
        write_whole(Path(record), memoryview(data), "timing cache")
    elif not locked:
        _join(config, cache, logger, Path(request["timing_cache_path"]), send)
    return hashlib.sha256(data).hexdigest()


def recorded_tactics(cache: Any) -> dict[str, int]:
    """Key of an operator -> hash of the tactic that a locked build has to take.

    Raises:
        Refused: there are none.
    """
    found = _tactics(cache)
    if not found:
        summary = "the recorded timing cache holds no tactics, so that there is nothing to repeat"
        step = "build without --locked, with builder.optimization_level: 1 or more, as 0 measures none"
        refuse_if_any([problem("CapabilityError", summary, step)])
    return found


def _tactics(cache: Any) -> dict[str, int]:
    return {str(key).lower(): int(cache.query(key).tacticHash) for key in cache.queryKeys()}


def lock_problems(cache: Any, recorded: Mapping[str, int], logger: Any, *, has_engine: bool) -> list[Json]:
    """Where a locked build took, or needed, other tactics than the recorded ones.

    They are compared besides the builder's own check, which let misses pass.

    Source: https://github.com/NVIDIA/TensorRT-Model-Connect/pull/451
    """
    if not has_engine and not logger.missed:
        return []  # it failed for a reason of its own
    found = _tactics(cache)
    missing = [key for key in {**found, **({} if has_engine else logger.tuned)} if key not in recorded]
    changed = [key for key, tactic in recorded.items() if found.get(key) != tactic]
    if has_engine and not missing and not changed:
        return []
    names = [f"no tactic of {_operator(key, logger)}" for key in missing]
    for key in changed:
        now = f"{found[key]:#x}" if key in found else "none"
        names.append(f"another tactic of {_operator(key, logger)}: {now}, recorded {recorded[key]:#x}")
    if len(names) > _MOST_SHOWN:
        names[_MOST_SHOWN:] = [f"and {len(names) - _MOST_SHOWN} more"]
    count = len(missing) + len(changed)
    differs = f"{count} of its tactics differ" if count else "it lacks one, and the log does not tell of which operator"
    return [problem("BuildError", f"the build does not follow the recorded timing cache: {differs}", _ANEW, *names)]


def _operator(key: str, logger: Any) -> str:
    return f"'{logger.tuned[key]}' (key {key})" if key in logger.tuned else f"key {key}"


def _recorded(config: Any, logger: Any, request: Json) -> Any:
    cache, why = _read_back(config, logger, Path(request["locked_timing_path"]).read_bytes())
    # The choices are replayed, and the times that led to them may be another GPU's of the same model.
    if cache is None or not config.set_timing_cache(cache, True):
        summary = f"{request['module']} {request['version']} does not take the recorded timing cache"
        refuse_if_any([problem("CapabilityError", summary, _ANEW, *why)])
    return cache


def _fresh(config: Any) -> Any:
    cache = config.create_timing_cache(b"")
    config.set_timing_cache(cache, False)
    return cache


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _read_back(config: Any, logger: Any, data: bytes) -> tuple[Any, list[str]]:
    """The timing cache that `data` are, None if TensorRT does not read them, and why.

    8.5 and 8.6 say so in their log alone, and give an empty one.

    Source: seen with 8.6 on an H200; https://github.com/lightvector/KataGo/issues/739 and 945
    """
    with logger.put_aside() as lines:
        cache = config.create_timing_cache(data)
    return (None if lines else cache), lines


def _forget(path: Path, send: Send) -> None:
    send_warning(send, f"timing cache {path} does not fit; a fresh one is begun")
    path.unlink(missing_ok=True)


def _join(config: Any, cache: Any, logger: Any, path: Path, send: Send) -> None:
    """Adds what this build measured to what others have written meanwhile.

    Not what the next build could not read: 8.6 writes timing caches with parts of Myelin that it does not take itself.
    """
    if logger.drops_timing:
        _forget(path, send)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            others = _read(path)
            measured = _read_back(config, logger, others)[0] if others else None
            if measured is not None and not cache.combine(measured, False):
                send_warning(send, f"timing cache {path} could not be joined with this build's, which takes its place")
            data = bytes(cache.serialize())
            if _read_back(config, logger, data)[0] is not None:
                aside = path.with_suffix(".part")
                aside.write_bytes(data)
                aside.replace(path)
    except OSError as error:  # the engine is good without it
        send_warning(send, f"timing cache {path} is not kept: {error}")
