"""`trtforge init`: a starter spec for a model."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from trtforge.cli.console import JsonOption
from trtforge.errors import GraphError, StoreError


def init(
    model: Annotated[Path, typer.Argument(help="The ONNX file.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option(help="Where to write the spec.  [default: the model's name .yaml, here]", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a commented starter spec for an ONNX file."""
    from platformdirs import user_cache_path  # noqa: PLC0415 - keeps --help quick, as in every verb

    from trtforge.cli.console import print_json, say  # noqa: PLC0415
    from trtforge.errors import shown_path  # noqa: PLC0415
    from trtforge.graph.ingest import ingest  # noqa: PLC0415
    from trtforge.memo import DigestMemo  # noqa: PLC0415
    from trtforge.spec.model import BLANK  # noqa: PLC0415
    from trtforge.spec.starter import starter_spec  # noqa: PLC0415

    name = re.sub(r"[^A-Za-z0-9._-]+", "-", model.stem).strip("-._") or "model"
    path = output or Path(f"{name}.yaml")
    with tempfile.TemporaryDirectory(prefix="trtforge-") as work_dir:
        graph = ingest(model, Path(work_dir), memo=DigestMemo(user_cache_path("trtforge") / "digests.json"))
    onnx = os.path.relpath(model.resolve(), path.resolve().parent)
    if not onnx.isprintable():
        raise GraphError(f"YAML cannot hold the name {model.name}", next_step="rename the file in plain letters")
    text = starter_spec(graph, name=name, onnx=onnx)
    _write(path, text, model)
    blanks = text.count(BLANK) - text.count(f"# {BLANK}")
    if as_json:
        print_json({"ok": True, "exit_code": 0, "spec": path, "blanks": blanks})
        return
    say(f"wrote {shown_path(path)}")
    fill = f"fill in its {blanks} blanks ({BLANK}), then: " if blanks else ""
    say(f"  next: {fill}trtforge plan {shown_path(path)}")


def _write(path: Path, text: str, model: Path) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise StoreError(
            f"{path} exists already", next_step=f"trtforge init {model} --output {path.stem}-2.yaml"
        ) from None
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}", next_step="name a writable place with --output") from None
