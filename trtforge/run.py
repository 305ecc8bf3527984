"""The surroundings of one run of a spec: the store, its stages, and the digests of files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

from trtforge.events import Event, Report
from trtforge.memo import DigestMemo
from trtforge.stages import Stages
from trtforge.store import default_store_path, open_store


@dataclass(frozen=True, slots=True)
class Run:
    """The surroundings of one run: its store, its stages, and the digests of files that it knows."""

    stages: Stages
    memo: DigestMemo


@contextmanager
def open_run(spec_path: Path, store_path: Path | None, report: Report) -> Iterator[Run]:
    """Opens the store for one run of a spec."""
    memo = DigestMemo(user_cache_path("trtforge") / "digests.json")
    stages: Stages

    def warn(text: str) -> None:
        stages.tell(Event("warning", "store", text))

    with open_store(store_path or default_store_path(), warn, memo.digest) as store:
        stages = Stages(store, report, str(spec_path.resolve()))
        yield Run(stages, memo)
