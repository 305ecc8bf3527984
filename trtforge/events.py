"""What a long run tells while it works. Stages emit events; the command line draws them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Attributes:
        kind: `started` and `done` frame a stage, `step` is progress inside it, `warning` goes to the user and stays.
        stage: such as `ingest`, or `build digits-fp32-sm86-trtrtx1.7.1`.
        fraction: progress within the stage, 0 to 1, where it is known.
        seconds: wall seconds of a stage that is done.
    """

    kind: Literal["started", "step", "done", "warning"]
    stage: str
    text: str = ""
    fraction: float | None = None
    seconds: float | None = None


Report = Callable[[Event], None]
