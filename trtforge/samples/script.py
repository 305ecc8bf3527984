"""Samples that the user's own Python makes, in a process of its own, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from trtforge.errors import CalibrationError, Where
from trtforge.samples.source import Found, Row, Source, problem
from trtforge.types import Graph
from trtforge.usercode.process import UserCode, parse_reference, user_code

DRIVER: Final = Path(__file__).with_name("script_child.py")
POLYGRAPHY_FUNCTION: Final = "load_data"
"""Source: Polygraphy, `--data-loader-script`."""


def open_script(
    reference: str, base_dir: Path, graph: Graph, *, timeout_seconds: float | None, where: Where | None
) -> Source:
    """What `reference` yields: a dict of arrays for each sample, as the model takes them, batch axis included.

    Nothing is run before the samples are read; each reading starts a new process, which is gone at its end.

    Args:
        reference: `file.py:function` or `module:function`, called without arguments.
        base_dir: the folder that it is relative to; the process works there.
        graph: the model, for its inputs.
        timeout_seconds: for loading the code, and for each sample; None for no limit.
        where: the place in the spec.

    Raises:
        SpecError: the reference leads to no file. While reading: it leads to no function.
    """
    found = parse_reference(reference, base_dir, where)
    beside = base_dir / f"{found.module.replace('.', '/')}.py"
    file = found.file or (beside if beside.is_file() else None)

    def rows() -> Iterator[Found]:
        with user_code(
            reference,
            base_dir,
            timeout_seconds=timeout_seconds,
            driver=DRIVER,
            where=where,
            failure=CalibrationError,
        ) as code:
            yield from _rows(code, reference, graph, timeout_seconds)

    return Source(reference, (file,) if file else (), None, lambda _: rows(), is_code=True)


def _rows(code: UserCode, reference: str, graph: Graph, timeout_seconds: float | None) -> Iterator[Found]:
    names = {spec.name for spec in graph.inputs}
    index = 0
    while answer := code.ask("next_feeds", {}, timeout_seconds=timeout_seconds):
        label = f"{reference}[{index}]"
        if other := answer.get("other"):
            wanted = ", ".join(f"'{spec.name}': array" for spec in graph.inputs)
            yield problem(f"{label}: {reference} {other}", f"yield {{{wanted}}} from it")
            return
        feeds: dict[str, Any] = answer["feeds"]
        extra = tuple(name for name in feeds if name not in names)
        yield Row(label, {name: array for name, array in feeds.items() if name in names}, extra)
        index += 1
