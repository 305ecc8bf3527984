"""`trtforge bench`: how fast the engines of a bundle are on this GPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli.console import JsonOption, ProgressOption, ProgressStyle

if TYPE_CHECKING:
    from trtforge.bench import Figures, QueueFigures


def bench(
    manifest: Annotated[Path, typer.Argument(help="The manifest of a bundle.", show_default=False)],
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=SIZE,SIZE of an open axis (INPUT[AXIS] where it has no name), for each that varies; by default opt of every profile.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[str | None, typer.Option(help="Identifier, where several fit.", show_default=False)] = None,
    cuda_graph: Annotated[bool, typer.Option(help="Replay the engine as a CUDA graph.")] = False,
    transfers: Annotated[bool, typer.Option(help="Copy inputs and outputs in each query.")] = True,
    spin_wait: Annotated[bool, typer.Option(help="Wait actively, which reacts sooner.")] = False,
    streams: Annotated[int, typer.Option(help="Queries at once, each in its own context.", min=1, max=64)] = 1,
    warm_up: Annotated[float, typer.Option(help="Milliseconds before figures count.", min=0)] = 200.0,
    duration: Annotated[float, typer.Option(help="Least seconds to measure at each size.", min=0)] = 3.0,
    iterations: Annotated[int, typer.Option(help="Least queries to measure at each size.", min=1)] = 10,
    p99_ms: Annotated[float | None, typer.Option(help="Gate: most p99 latency.", show_default=False)] = None,
    throughput_qps: Annotated[
        float | None, typer.Option(help="Gate: least queries a second.", show_default=False)
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Manifest of another bundle, measured by turns.", show_default=False)
    ] = None,
    max_regression: Annotated[
        float, typer.Option(help="Gate with --against: share by which the median may be larger.", min=0)
    ] = 0.02,
    replay: Annotated[
        Path | None,
        typer.Option(help="Log of single requests, to be served through a queue in front of the engine.", exists=True),
    ] = None,
    window_ms: Annotated[float, typer.Option(help="With --replay: how long a request waits for others.", min=0)] = 2.0,
    max_batch: Annotated[int, typer.Option(help="With --replay: largest batch that is formed.", min=1)] = 8,
    limit_ms: Annotated[
        float | None,
        typer.Option(help="With --replay: p99 for which the highest rate is sought.", min=0, show_default=False),
    ] = None,
    grid: Annotated[
        Path | None,
        typer.Option(help="Write medians by size here, for trtforge profile --latencies.", show_default=False),
    ] = None,
    prometheus: Annotated[
        Path | None, typer.Option(help="Write figures here in Prometheus' text format.", show_default=False)
    ] = None,
    device: Annotated[int, typer.Option(help="CUDA's index of the GPU.", min=0)] = 0,
    cuda_library: Annotated[
        str | None, typer.Option(help="cuda-python or pycuda.  [default: what is installed]", show_default=False)
    ] = None,
    plugin: Annotated[
        list[Path] | None,
        typer.Option(help="Library of operators that the engine needs.", exists=True, show_default=False),
    ] = None,
    allow_host_code: Annotated[
        bool, typer.Option("--allow-host-code", help="Let a version-compatible engine run the native code it brings.")
    ] = False,
    as_json: JsonOption = False,
    progress_style: ProgressOption = ProgressStyle.auto,
) -> None:
    """Measure an engine on the GPU at hand, with trtexec's definitions, and judge the figures."""
    from contextlib import ExitStack  # noqa: PLC0415 - keeps --help quick

    from trtforge import bench as core  # noqa: PLC0415
    from trtforge.cli.console import print_json, print_problems, problem_json, progress  # noqa: PLC0415
    from trtforge.errors import exit_code_of  # noqa: PLC0415
    from trtforge.files import write_text  # noqa: PLC0415
    from trtforge.machine import machine_facts  # noqa: PLC0415
    from trtforge.runtime.measure import Switches  # noqa: PLC0415
    from trtforge.runtime.session import EngineSession  # noqa: PLC0415

    sizes = core.parse_sizes(shapes or [])
    switches = Switches(
        cuda_graph=cuda_graph,
        transfers=transfers,
        spin_wait=spin_wait,
        streams=streams,
        warm_up_ms=warm_up,
        duration_s=duration,
        iterations=iterations,
    )
    gates = core.Gates(p99_ms=p99_ms, throughput_qps=throughput_qps, max_regression=max_regression if against else None)
    with progress(progress_style, as_json=as_json) as told, ExitStack() as opened:

        def session(path: Path, identifier: str | None) -> EngineSession:
            return opened.enter_context(
                EngineSession.open(
                    path,
                    identifier=identifier,
                    cuda_library=cuda_library,
                    device=device,
                    plugins=plugin or (),
                    allow_host_code=allow_host_code,
                )
            )

        measured = session(manifest, engine)
        other = session(against, engine) if against else None
        figures = core.bench(measured, sizes, switches, machine_facts().cuda_driver_version, told, other=other)
        served = None
        if replay:
            served = core.serve_log(
                measured, replay, switches, told, window_ms=window_ms, max_batch=max_batch, limit_ms=limit_ms
            )
    if grid:
        write_text(grid, json.dumps(core.latency_grid(figures), indent=1) + "\n")
    if prometheus:
        write_text(prometheus, core.prometheus(figures))
    problems = core.missed(figures, gates)
    code = exit_code_of(problems) if problems else 0
    if as_json:
        shown = {
            "figures": asdict(figures),
            "queue": asdict(served) if served else None,
            "problems": [problem_json(problem) for problem in problems],
        }
        print_json({"ok": code == 0, "exit_code": code, **shown})
    else:
        _print(figures)
        if served:
            _print_queue(served)
        print_problems(problems)
    raise typer.Exit(code)


def _print(figures: Figures) -> None:
    from trtforge.cli.console import say, shown_bytes  # noqa: PLC0415

    switches = figures.switches
    how = [
        "CUDA graph" if switches.cuda_graph else "no CUDA graph",
        "with copies" if switches.transfers else "without copies",
        f"{switches.streams} stream{'s' * (switches.streams > 1)}",
    ]
    say(f"{figures.identifier} on {figures.gpu}, driver {figures.driver}, {figures.tensorrt}, {figures.cuda}")
    say(f"{', '.join(how)}; the engine takes {shown_bytes(figures.engine_bytes)} of GPU memory; times in ms")
    say("  p50      p99      compute  copies   enqueue  queries/s  sizes")
    for point in figures.points:
        copies = point.copy_in.percentiles[50.0] + point.copy_out.percentiles[50.0]
        row = [point.latency.percentiles[50.0], point.latency.percentiles[99.0], point.compute.percentiles[50.0]]
        row += [copies, point.enqueue.percentiles[50.0]]
        sizes = " ".join(f"{name}={size}" for name, size in point.sizes.items())
        say("  " + "  ".join(f"{value:7.3f}" for value in row) + f"  {point.throughput_qps:9.1f}  {sizes}")
    for point, found in zip(figures.points, figures.slowdowns, strict=False):
        sizes = " ".join(f"{name}={size}" for name, size in point.sizes.items())
        say(f"  {found.ratio:+.1%} ({found.low:+.1%} to {found.high:+.1%}) against the other engine at {sizes}")
    for text in dict.fromkeys((*figures.warnings, *(text for point in figures.points for text in point.remarks))):
        say(f"  note: {text}")


def _print_queue(served: QueueFigures) -> None:
    from trtforge.cli.console import say  # noqa: PLC0415

    p50, p95, p99 = (served.latency_ms[share] for share in (50.0, 95.0, 99.0))
    say(
        f"the log: {served.requests} requests, {served.log_qps:.1f} a second; in batches of up to {served.max_batch} within "
        f"{served.window_ms:g} ms: p50 {p50:.3f}, p95 {p95:.3f}, p99 {p99:.3f} ms; "
        f"mean batch {served.mean_batch:.1f}, GPU busy {served.busy:.0%}"
    )
    if served.limit_qps is not None:
        say(f"  p99 stays within {served.limit_ms:g} ms up to {served.limit_qps:.1f} requests a second")
