"""`trtforge bench`: how fast the engines of a bundle are on this GPU."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from trtforge.cli.console import JsonOption, ProgressOption, ProgressStyle

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from trtforge.bench import Figures
    from trtforge.errors import Problem
    from trtforge.peers import PeerPoint
    from trtforge.release.manifest import Artifact
    from trtforge.replay import ReplayFigures

_NEEDS: Final = {
    "replay_seconds": ("replay", "LOG"),
    "window_ms": ("replay", "LOG"),
    "max_batch": ("replay", "LOG"),
    "limit_ms": ("replay", "LOG"),
    "max_regression": ("against", "MANIFEST"),
    "spec": ("peer_python", "PYTHON"),
    "peer": ("peer_python", "PYTHON"),
    "peer_timeout": ("peer_python", "PYTHON"),
    "peer_python": ("spec", "SPEC"),
}
"""Option -> the one without which it does nothing."""
_NOT_SERVED: Final = {"streams": 1, "transfers": True}
"""Option -> its value as a log is served."""


def bench(
    context: typer.Context,
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
    one_at_a_time: Annotated[
        bool,
        typer.Option(
            "--one-at-a-time",
            help="Start a stream's next query once the last one has ended, as a server with single requests does; trtexec: --exposeDMA.",
        ),
    ] = False,
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
        typer.Option(
            help="Log of single requests, served as they arrived, in batches that are formed in real time.", exists=True
        ),
    ] = None,
    replay_seconds: Annotated[float, typer.Option(help="With --replay: a longer log is cut.", min=0)] = 30.0,
    window_ms: Annotated[float, typer.Option(help="With --replay: how long a request waits for others.", min=0)] = 2.0,
    max_batch: Annotated[int, typer.Option(help="With --replay: largest batch that is formed.", min=1)] = 8,
    limit_ms: Annotated[
        float | None,
        typer.Option(help="With --replay: p99 for which the highest rate is sought.", min=0, show_default=False),
    ] = None,
    spec: Annotated[
        Path | None,
        typer.Option(help="With --peer-python: the spec, whose model.torch is run.", exists=True, show_default=False),
    ] = None,
    peer_python: Annotated[
        str | None,
        typer.Option(help="Python that has torch: measure the spec's PyTorch model beside.", show_default=False),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="With --peer-python: eager-fp32, eager-fp16, compile-fp32, compile-fp16; by default all.",
            show_default=False,
        ),
    ] = None,
    peer_timeout: Annotated[
        float, typer.Option(help="Seconds for a peer to load, and for each of its sizes.", min=1)
    ] = 300.0,
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
    model: Annotated[
        Path | None,
        typer.Option(
            help="ONNX file with the weights of an engine that was built without.", exists=True, show_default=False
        ),
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            help="tensorrt, or for a version-compatible engine tensorrt_lean or tensorrt_dispatch.  [default: the first that is installed]",
            show_default=False,
        ),
    ] = None,
    allow_host_code: Annotated[
        bool, typer.Option("--allow-host-code", help="Let a version-compatible engine run the native code it brings.")
    ] = False,
    as_json: JsonOption = False,
    progress_style: ProgressOption = ProgressStyle.auto,
) -> None:
    """Measure an engine on the GPU at hand, with trtexec's definitions, and judge the figures."""
    from contextlib import ExitStack  # noqa: PLC0415 - keeps --help quick
    from tempfile import TemporaryDirectory  # noqa: PLC0415

    from trtforge import bench as core  # noqa: PLC0415
    from trtforge import peers as peering  # noqa: PLC0415
    from trtforge import replay as replaying  # noqa: PLC0415
    from trtforge.cli.console import print_json, print_problems, problem_json, progress  # noqa: PLC0415
    from trtforge.errors import exit_code_of, raise_any  # noqa: PLC0415
    from trtforge.graph.ingest import ingest  # noqa: PLC0415
    from trtforge.machine import machine_facts  # noqa: PLC0415
    from trtforge.runtime.measure import Switches  # noqa: PLC0415
    from trtforge.runtime.session import EngineSession  # noqa: PLC0415

    raise_any(_misused(context))
    peer_spec = peering.torch_spec(spec, peer_python) if spec and peer_python else None
    peer_names = peering.peer_names(peer or [])
    sizes = core.parse_sizes(shapes or [])
    switches = Switches(
        cuda_graph=cuda_graph,
        transfers=transfers,
        spin_wait=spin_wait,
        streams=streams,
        one_at_a_time=one_at_a_time,
        warm_up_ms=warm_up,
        duration_s=duration,
        iterations=iterations,
    )
    gates = core.Gates(p99_ms=p99_ms, throughput_qps=throughput_qps, max_regression=max_regression if against else None)
    served: ReplayFigures | None = None
    peers: tuple[PeerPoint, ...] = ()
    with progress(progress_style, as_json=as_json) as told:
        with ExitStack() as opened:
            models = (ingest(model, Path(opened.enter_context(TemporaryDirectory()))),) if model else ()

            def session(path: Path, identifier: str | None) -> EngineSession:
                return opened.enter_context(
                    EngineSession.open(
                        path,
                        identifier=identifier,
                        cuda_library=cuda_library,
                        device=device,
                        plugins=plugin or (),
                        models=models,
                        runtime=runtime,
                        allow_host_code=allow_host_code,
                    )
                )

            measured = session(manifest, engine)
            other = session(against, _if_in(against, engine)) if against else None
            raise_any(_unneeded(given=context.params, artifacts=[one.artifact for one in (measured, other) if one]))
            requests = replay and replaying.read_requests(
                measured, replay, window_ms=window_ms, max_batch=max_batch, seconds=replay_seconds, limit_ms=limit_ms
            )
            figures = core.bench(measured, sizes, switches, machine_facts().cuda_driver_version, told, other=other)
            if requests:
                served = replaying.serve_log(measured, requests, switches, told, limit_ms=limit_ms)
        if peer_spec and peer_python:  # once the engine has left the GPU
            peers = peering.measure_peers(
                peer_spec,
                measured.artifact.inputs,
                [point.sizes for point in figures.points],
                switches,
                told,
                peers=peer_names,
                python=peer_python,
                device=f"cuda:{device}",
                device_name=figures.gpu,
                timeout_seconds=peer_timeout,
            )
    problems = [*core.missed(figures, gates)]
    if grid:
        problems += _unwritten(grid, json.dumps(core.latency_grid(figures), indent=1) + "\n")
    if prometheus:
        problems += _unwritten(prometheus, _gauges_text(figures, served, peers))
    code = exit_code_of(problems) if problems else 0
    if as_json:
        shown = {
            "figures": asdict(figures),
            "replay": asdict(served) if served else None,
            "peers": [asdict(point) for point in peers],
            "problems": [problem_json(problem) for problem in problems],
        }
        print_json({"ok": code == 0, "exit_code": code, **shown})
    else:
        _print(figures)
        _print_peers(figures, peers)
        if served:
            _print_replay(served)
        print_problems(problems)
    raise typer.Exit(code)


def _misused(context: typer.Context) -> Iterator[Problem]:
    """Options that would do nothing, or that no figure can be compared with."""
    from trtforge.errors import CommandLineError, Problem  # noqa: PLC0415

    values: Mapping[str, Any] = context.params
    given = {name for name in values if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    code = CommandLineError.exit_code
    for name in sorted(given & set(_NEEDS)):
        needed, value = _NEEDS[name]
        if needed not in given:
            yield Problem(
                f"found {_flag(name)} without {_flag(needed)}", f"add {_flag(needed)} {value}", exit_code=code
            )
    for name, number in values.items():
        if isinstance(number, float) and not math.isfinite(number):
            yield Problem(f"{_flag(name)}: found {number}", f"write {_flag(name)} with a finite number", exit_code=code)
    for name in sorted(given & set(_NOT_SERVED)) if "replay" in given else ():
        shown = "--no-transfers" if name == "transfers" else _flag(name)
        if values[name] != _NOT_SERVED[name]:
            text = f"--replay serves one batch at a time, with its copies; found {shown}"
            yield Problem(text, f"leave {shown} out, or measure with it in a run of its own", exit_code=code)
    if "peer_python" in given and values["streams"] > 1:
        text = f"--peer-python measures one stream, found --streams {values['streams']}"
        yield Problem(text, "leave --streams out", exit_code=code)


def _unneeded(given: Mapping[str, Any], artifacts: Sequence[Artifact]) -> Iterator[Problem]:
    """Files that no engine takes anything from."""
    from trtforge.errors import CommandLineError, Problem  # noqa: PLC0415

    names = " and ".join(dict.fromkeys(artifact.identifier for artifact in artifacts))
    takes = {
        "model": any(artifact.settings.get("strip_weights") for artifact in artifacts),
        "plugin": any(artifact.plugins for artifact in artifacts),
    }
    for name, is_taken in takes.items():
        if given[name] and not is_taken:
            text = f"found {_flag(name)}, of which {names} takes nothing"
            yield Problem(text, f"leave {_flag(name)} out", exit_code=CommandLineError.exit_code)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _if_in(manifest: Path, identifier: str | None) -> str | None:
    """An engine of another precision has another identifier; then the only one for the GPU is meant."""
    from trtforge.release.manifest import read_manifest  # noqa: PLC0415

    return identifier if identifier in {one.identifier for one in read_manifest(manifest).artifacts} else None


def _gauges_text(figures: Figures, served: ReplayFigures | None, peers: Sequence[PeerPoint]) -> str:
    from trtforge import bench as core  # noqa: PLC0415
    from trtforge import peers as peering  # noqa: PLC0415
    from trtforge import replay as replaying  # noqa: PLC0415
    from trtforge.prometheus import prometheus_text  # noqa: PLC0415

    gauges = [*core.gauges(figures), *peering.gauges(peers, figures.gpu)]
    replayed = replaying.gauges(served, figures.gpu, cuda_graph=figures.switches.cuda_graph) if served else ()
    return prometheus_text([*gauges, *replayed])


def _unwritten(path: Path, text: str) -> tuple[Problem, ...]:
    """Why a file could not be written: figures that took minutes are shown all the same."""
    from trtforge.errors import StoreError  # noqa: PLC0415
    from trtforge.files import write_text  # noqa: PLC0415

    try:
        write_text(path, text)
    except StoreError as error:
        return error.problems
    return ()


def _print(figures: Figures) -> None:
    from trtforge.cli.console import say, shown_bytes  # noqa: PLC0415
    from trtforge.release.gates import sizes_text  # noqa: PLC0415

    switches = figures.switches
    how = [
        "CUDA graph" if switches.cuda_graph else "no CUDA graph",
        "with copies" if switches.transfers else "without copies",
        f"{switches.streams} stream{'s' * (switches.streams > 1)}",
        "one query at a time" if switches.one_at_a_time else "two queries under way in each",
    ]
    say(f"{figures.identifier} on {figures.gpu}, driver {figures.driver}, {figures.tensorrt}, {figures.cuda}")
    say(f"{', '.join(how)}; the engine takes {shown_bytes(figures.engine_bytes)} of GPU memory; times in ms")
    say("  p50      p99      compute  copies   enqueue  response  queries/s  sizes")
    for point in figures.points:
        copies = point.copy_in.percentiles[50.0] + point.copy_out.percentiles[50.0]
        row = [point.latency.percentiles[50.0], point.latency.percentiles[99.0], point.compute.percentiles[50.0]]
        row += [copies, point.enqueue.percentiles[50.0], point.response.percentiles[50.0]]
        say(
            "  "
            + "  ".join(f"{value:7.3f}" for value in row)
            + f"  {point.throughput_qps:9.1f}  {sizes_text(point.sizes)}"
        )
    if figures.other:
        for point, found in zip(figures.points, figures.slowdowns, strict=True):
            text = f"{found.ratio:+.1%} ({found.low:+.1%} to {found.high:+.1%})"
            say(f"  {text} against {figures.other.identifier} at {sizes_text(point.sizes)}")
    for text in dict.fromkeys((*figures.warnings, *(text for point in figures.points for text in point.remarks))):
        say(f"  note: {text}")


def _print_peers(figures: Figures, peers: Sequence[PeerPoint]) -> None:
    from trtforge.cli.console import say  # noqa: PLC0415
    from trtforge.release.gates import sizes_text  # noqa: PLC0415

    ours = {tuple(point.sizes.items()): point for point in figures.points}
    if peers:
        modes = ", ".join({f"torch.compile in mode {point.mode}": None for point in peers if point.mode})
        say(f"PyTorch on the same GPU{modes and ', ' + modes}; engine: how many times as fast, by the median latency")
        say("  p50      p99      compute  response  queries/s  engine  peer          sizes")
    for point in peers:
        name, sizes = f"{point.peer:<12}", sizes_text(point.sizes)
        if point.times is None:
            say(f"  not measured: {point.reason}; {name.strip()} {sizes}")
            continue
        p50, times = point.times.latency.percentiles[50.0], point.times
        row = [p50, times.latency.percentiles[99.0], times.compute.percentiles[50.0], times.response.percentiles[50.0]]
        ratio = p50 / ours[tuple(point.sizes.items())].latency.percentiles[50.0]
        shown = "  ".join(f"{value:7.3f}" for value in row)
        unsettled = "" if times.is_settled else "  (its times had not settled)"
        say(f"  {shown}  {times.throughput_qps:9.1f}  {ratio:5.2f}x  {name}  {sizes}{unsettled}")


def _print_replay(served: ReplayFigures) -> None:
    from trtforge.cli.console import say  # noqa: PLC0415

    say(
        f"the log: {served.requests} requests in {served.seconds:.1f} s, {served.log_qps:.1f} a second; in batches of up "
        f"to {served.max_batch} within {served.window_ms:g} ms, {served.num_sizes} sizes made ready"
    )
    say("            p50      p95      p99      mean batch  busy")
    for name, play in (("measured", served.measured), ("simulated", served.simulated)):
        row = "  ".join(f"{play.latency_ms[share]:7.3f}" for share in (50.0, 95.0, 99.0))
        say(f"  {name:<9} {row}  {play.mean_batch:10.1f}  {play.busy:4.0%}")
    say(f"  GPU busy {served.gpu_busy:.0%}; {served.host_ms:.3f} ms of host work a batch; {served.late_share:.1%} late")
    if served.limit:
        qps, simulated = served.limit.qps, served.limit.simulated_qps
        difference = f" ({qps / simulated - 1:+.0%})" if simulated else ""
        say(
            f"  p99 within {served.limit.limit_ms:g} ms: up to {qps:.1f} requests a second were served, "
            f"{simulated:.1f} simulated{difference}"
        )
    for text in served.remarks:
        say(f"  note: {text}")
