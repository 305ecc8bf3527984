"""What a backend is: a module that turns one build unit into one engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trtforge.backends.surroundings import NOTHING_AROUND, Surroundings
from trtforge.types import BuildUnit, BuiltEngine, Graph

if TYPE_CHECKING:
    from trtforge.backends.worker_process import BuildEvent


class Backend(Protocol):
    """Satisfied by modules, such as `trtforge.backends.tensorrt_rtx`."""

    NAME: str
    """As in the spec's `targets`."""

    def build(
        self,
        unit: BuildUnit,
        graph: Graph,
        work_dir: Path,
        on_event: Callable[[BuildEvent], None],
        timeout_seconds: float | None,
        around: Surroundings = NOTHING_AROUND,
    ) -> BuiltEngine:
        """Builds `unit` from `graph` into a file in the folder `work_dir`.

        Either the whole engine is there, written to the disk and hashed, or an exception says why not and nothing of
        the attempt is left in `work_dir`, except a folder `failure` with log and reproduction. Everything that `unit` asks for is applied or refused, never ignored.

        Raises:
            BuildError: the builder gave no engine, crashed, or took longer than `timeout_seconds`.
            CapabilityError: the installed library cannot do what `unit` asks.
            GraphError: the parsed network is not the graph.
            StoreError: the engine could not be written.
        """


def load_backend(name: str) -> Backend:
    """The module of a target's `backend`. Loaded when something is built, which most runs do not."""
    from trtforge.backends import tensorrt, tensorrt_rtx  # noqa: PLC0415

    backends: dict[str, Backend] = {tensorrt_rtx.NAME: tensorrt_rtx, tensorrt.NAME: tensorrt}
    return backends[name]
