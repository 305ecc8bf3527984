"""TensorRT's own INT8 calibrators, of 8.6 and 10.x: one that hands scales over, one that has them made of samples.

TensorRT prints an exception of a calibrator and goes on building with what it has; so one ends the process instead.
"""

from __future__ import annotations

import ctypes
import time
import traceback
from pathlib import Path
from typing import Any

from trtforge.backends.worker.answers import (
    SECONDS_BETWEEN_STEPS,
    Json,
    Refused,
    Send,
    end,
    problem,
    refuse_if_any,
    write_whole,
)


def set_calibrator(trt: Any, config: Any, profile: Any, request: Json, send: Send) -> Any:
    """The calibrator that is asked for, None where there is none. TensorRT keeps a plain pointer to it.

    Args:
        trt: the module.
        config: gets it.
        profile: whose opt is calibrated at, None where no input is dynamic.
        request: see `trtforge.backends.engine_build`.
        send: takes progress.

    Raises:
        Refused: TensorRT does not take the profile.
    """
    asked = request["calibration"]
    if asked is None:
        return None
    base = getattr(trt, asked["calibrator"])
    calibrator = _streaming(base, asked, send) if asked["batches"] else _handing_over(base, asked, request, send)
    config.int8_calibrator = calibrator
    if profile is not None and not config.set_calibration_profile(profile):
        step = "report this to the makers of trtforge"
        refuse_if_any([problem("BuildError", "TensorRT did not take the first profile for calibration", step)])
    return calibrator


def calibration_problems(calibrator: Any) -> list[Json]:
    """Why an engine was not built with scales of its calibrator."""
    if calibrator is None or calibrator.is_done:
        return []
    summary = f"TensorRT took {calibrator.num_given} calibration batches and gave no scales"
    return [problem("BuildError", summary, "read the lines of the builder's log, or write method: auto")]


def _handing_over(base: Any, asked: Json, request: Json, send: Send) -> Any:
    given = _with_own_version(Path(asked["path"]).read_bytes(), request)

    class Calibrator(base):  # type: ignore[misc]
        is_done = True

        def __init__(self) -> None:
            base.__init__(self)

        def get_batch_size(self) -> int:
            return 1

        def get_batch(self, names: list[str]) -> None:  # noqa: ARG002 - TensorRT's names
            """Called only where the scales were not taken."""
            summary = "TensorRT did not take the calibration cache, whose first line names another version or algorithm"
            step = "trtforge calibrate SPEC  # writes one for this version"
            end(send, {"kind": "problems", "problems": [problem("BuildError", summary, step)]})

        def read_calibration_cache(self) -> bytes:
            return given

        def write_calibration_cache(self, cache: Any) -> None:
            pass

    return Calibrator()


def _streaming(base: Any, asked: Json, send: Send) -> Any:
    batches = asked["batches"]
    num_batches = batches["num_batches"]

    class Calibrator(base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self)
            self.is_done = False
            self.num_given = 0
            self._feed: Any = None
            self._last_sent = 0.0

        def get_batch_size(self) -> int:
            size: int = batches["batch_size"]
            return size

        def get_batch(self, names: list[str]) -> list[int] | None:
            if self.num_given == num_batches:
                return None
            try:
                self._feed = self._feed or _feed(batches)
                pointers: list[int] = self._feed.next_batch(names)
            except Exception as error:  # noqa: BLE001 - TensorRT would print and forget it
                what = f"calibration stopped at batch {self.num_given + 1} of {num_batches}"
                end(send, {"kind": "problems", "problems": _told(error, what)})
            self.num_given += 1
            if time.monotonic() - self._last_sent >= SECONDS_BETWEEN_STEPS or self.num_given == num_batches:
                self._last_sent = time.monotonic()
                send({"kind": "step", "text": f"calibration, batch {self.num_given} of {num_batches}"})
            return pointers

        def read_calibration_cache(self) -> None:
            pass

        def write_calibration_cache(self, cache: Any) -> None:
            if self.num_given < num_batches:
                return  # scales of a part of the data are none
            try:
                write_whole(Path(asked["path"]), memoryview(bytes(cache)), "calibration cache")
            except Refused as refused:
                end(send, refused.answer)
            self.is_done = True

    return Calibrator()


def _feed(batches: Json) -> Any:
    # Loads numpy and CUDA, which no other build needs.
    from trtforge.backends.feeding import Feed  # noqa: PLC0415

    return Feed(batches["files"])


def _told(error: Exception, what: str) -> list[Json]:
    """An exception as problems; those of trtforge keep their class and words."""
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
