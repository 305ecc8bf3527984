"""What the builder says while it works: its log, and how far it is."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from trtforge.backends.worker.answers import LONGEST_TEXT, SECONDS_BETWEEN_STEPS, Send

_RECENT_LINES = 10
_SAID_EACH_TIME = "Registered plugin creator"
_AUTOTUNING = re.compile(r"Autotuning op (?P<op>.+?)\(key: (?P<key>0x[0-9a-fA-F]+)\)")
"""An operator whose tactics are measured, which those of a recorded timing cache are not.

Source: README of sampleEditableTimingCache, TensorRT 10.8.
"""
_MISS = "errorOnMiss"
"""Part of the assertion that stops a build with ERROR_ON_TIMING_CACHE_MISS; seen with 11.1."""
_UNUSED = "The timing cache will not be used"
"""Seen with 8.6."""


def make_logger(trt: Any, send: Send) -> Any:
    """A logger that sends on what is a warning or worse.

    Its attributes: `recent`, the last lines below that; `tuned`, key -> operator that was measured; `missed`, whether a
    locked build lacked a tactic; `drops_timing`, whether the timing cache is not used; `put_aside`, a context manager
    within which errors are collected only.
    """
    warning = int(trt.ILogger.Severity.WARNING)

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.recent: deque[str] = deque(maxlen=_RECENT_LINES)
            self.tuned: dict[str, str] = {}
            self.missed = False
            self.drops_timing = False
            self._aside: list[str] | None = None

        @contextlib.contextmanager
        def put_aside(self) -> Iterator[list[str]]:
            self._aside = []
            try:
                yield self._aside
            finally:
                self._aside = None

        def log(self, severity: Any, text: str) -> None:
            if found := _AUTOTUNING.search(text):
                self.tuned[found["key"].lower()] = found["op"]
            self.missed = self.missed or _MISS in text
            if int(severity) > warning:
                if not text.startswith(_SAID_EACH_TIME):
                    self.recent.append(text[:LONGEST_TEXT])
            elif self._aside is not None and int(severity) < warning:
                self._aside.append(text[:LONGEST_TEXT])
            else:
                self.drops_timing = self.drops_timing or _UNUSED in text
                send({"kind": "message", "severity": severity.name.lower(), "text": text[:LONGEST_TEXT]})

    return Logger()


def make_monitor(trt: Any, send: Send) -> Any:
    """A progress monitor that sends phases and steps, with a fraction that never falls."""

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
                if now - self._last_sent >= SECONDS_BETWEEN_STEPS:
                    self._last_sent = now
                    send({"kind": "step", "text": name, "fraction": fraction})
            return True

        def phase_finish(self, name: str) -> None:
            with self._lock:
                self._phases.pop(name, None)

    return Monitor()
