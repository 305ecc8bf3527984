"""`trtforge calibrate`: a calibration table from real data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trtforge.cli.console import JsonOption, ProgressOption, ProgressStyle, StoreOption


def calibrate(
    spec: Annotated[Path, typer.Argument(help="The build spec; its calibration names the data.", show_default=False)],
    output: Annotated[Path | None, typer.Option(help="Write the table here, as JSON.", show_default=False)] = None,
    write_trt_cache: Annotated[
        Path | None,
        typer.Option(help="Write a calibration cache for TensorRT's implicit route here.", show_default=False),
    ] = None,
    tensorrt: Annotated[str, typer.Option(help="With --write-trt-cache: version that shall read it.")] = "8.6",
    read_trt_cache: Annotated[
        Path | None,
        typer.Option(help="Compare the ranges with those of a calibration cache.", show_default=False),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
    progress_style: ProgressOption = ProgressStyle.auto,
) -> None:
    """Find the ranges that INT8 needs, on the spec's calibration data."""
    from dataclasses import asdict  # noqa: PLC0415 - keeps --help quick

    from trtforge import calibrate as core  # noqa: PLC0415
    from trtforge.calibration import trt_cache  # noqa: PLC0415
    from trtforge.calibration.table import write_table  # noqa: PLC0415
    from trtforge.cli.console import print_json, progress, say  # noqa: PLC0415
    from trtforge.errors import shown_path  # noqa: PLC0415
    from trtforge.evidence import calibration_table  # noqa: PLC0415
    from trtforge.run import open_run  # noqa: PLC0415

    with progress(progress_style, as_json=as_json) as told, open_run(spec, store, told) as run:
        table = calibration_table(spec, run)
    written = []
    if output:
        write_table(table, output)
        written.append(output)
    if write_trt_cache:
        algorithm = trt_cache.algorithm_of(table.method)
        trt_cache.write_trt_cache(write_trt_cache, table.amax, tensorrt_version=tensorrt, algorithm=algorithm)
        written.append(write_trt_cache)
    compared = tuple(core.compared(table, read_trt_cache)) if read_trt_cache else ()
    if as_json:
        print_json({"ok": True, "exit_code": 0, "table": asdict(table), "compared": list(compared)})
        return
    for line in core.lines(table):
        say(line)
    for line in compared:
        say(line)
    for path in written:
        say(f"wrote {shown_path(path)}")
