"""Runs stages through the store, with their events: cached, stale with what changed, or new."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtforge.events import Event, Report
from trtforge.store import Record, StageKey, Store

Computed = tuple[Any, Mapping[str, Path]]
"""What a stage computes: a JSON value, and files that become blobs."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage that is done.

    Attributes:
        key: SHA-256 of everything that decides its result.
        verdict: `cached`, `new`, or `stale, NAMES changed`.
        notes: what it found, one sentence each.
    """

    name: str
    key: str
    verdict: str
    seconds: float
    notes: tuple[str, ...]


@dataclass(slots=True)
class Stages:
    """The stages of one run, in the order in which they ended. Safe to use from several threads.

    Attributes:
        slot: tells the runs of one spec from those of others, to say what changed since the last.
    """

    store: Store
    report: Report
    slot: str
    done: list[Stage] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, event: Event) -> None:
        """Reports an event, one at a time."""
        with self._lock:
            self.report(event)

    def verdict(self, label: str, key: StageKey) -> str:
        """What `run` would say of `key`, without running anything."""
        return "cached" if self.store.find(key) else self._reason(label, key)

    def run(
        self, label: str, key: StageKey, compute: Callable[[], Computed], describe: Callable[[Any], tuple[str, ...]]
    ) -> Record:
        """The record of `key`, from the store or computed and stored; another process that computes it is waited for.

        Args:
            label: name of the stage for people; several stages of a run have several labels.
            key: everything that decides the result.
            compute: called if the store has no record.
            describe: notes on a result, one at least, of which the first says what it is.

        Raises:
            TrtForgeError: what `compute` raises; nothing is stored then.
        """
        start = time.perf_counter()
        self.tell(Event("started", label))
        waiting = Event("warning", label, "another build makes the same; waiting for it")
        with self.store.lock(key.digest, on_wait=lambda: self.tell(waiting)):
            record = self.store.find(key)
            verdict = "cached" if record else self._reason(label, key)
            if record is None:
                result, files = compute()
                record = self.store.put(key, result, files, about=describe(result)[0])
            self.store.note(self._slot(label), key)
        seconds = time.perf_counter() - start
        notes = describe(record.result)
        with self._lock:
            self.done.append(Stage(label, key.digest, verdict, seconds, notes))
            shown = notes[:1] if verdict == "cached" else notes  # the rest was told when it was new
            self.report(Event("done", label, "; ".join((verdict, *shown)), seconds=seconds))
        return record

    def _reason(self, label: str, key: StageKey) -> str:
        changes = self.store.changes(self._slot(label), key)
        return f"stale, {_listed(changes)} changed" if changes else "new"

    def _slot(self, label: str) -> str:
        return f"{self.slot}|{label}"


def _listed(names: tuple[str, ...]) -> str:
    most = 3
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
