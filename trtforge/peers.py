"""The spec's PyTorch model on the same GPU, eager and compiled, beside an engine that was measured."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from trtforge.errors import CommandLineError, SpecError, TrtForgeError, closest
from trtforge.events import Event, Report
from trtforge.prometheus import Gauge
from trtforge.release.gates import sizes_text
from trtforge.release.manifest import TensorRecord
from trtforge.runtime.measure import Spread, Switches, spread, timings_of
from trtforge.runtime.sizes import generated
from trtforge.spec.load import SpecFile, load_spec
from trtforge.traffic.layout import Sizes
from trtforge.usercode.process import UserCode, parse_reference, user_code

PEERS: Final = {"eager-fp32": False, "eager-fp16": True, "compile-fp32": False, "compile-fp16": True}
"""Name -> whether weights and inputs are float16."""
_DRIVER: Final = Path(__file__).with_name("graph") / "peer_child.py"


@dataclass(frozen=True, slots=True)
class PeerTimes:
    """Milliseconds, as those of an engine.

    Attributes:
        ready_seconds: until the first query had ended; for torch.compile, compiling.
        is_settled: whether its times had stopped falling before they were taken.
    """

    latency: Spread
    compute: Spread
    response: Spread
    throughput_qps: float
    num_queries: int
    torch: str
    ready_seconds: float
    is_settled: bool


@dataclass(frozen=True, slots=True)
class PeerPoint:
    """A peer at one set of sizes.

    Attributes:
        mode: of torch.compile, empty for eager.
        times: None where it did not run; then `reason` says why.
    """

    peer: str
    mode: str
    sizes: dict[str, int]
    times: PeerTimes | None
    reason: str


def torch_spec(spec: Path, python: str) -> SpecFile:
    """The spec, which names a PyTorch model; looked at before anything is measured. None of its code is run.

    Args:
        spec: the file.
        python: the interpreter that shall run it.

    Raises:
        SpecError, SeveralErrors: it cannot be read, has an ONNX file as its model, or names a file that is not there.
        CommandLineError: there is no such interpreter.
    """
    spec_file = load_spec(spec)
    source = spec_file.spec.model.torch
    if source is None:
        raise SpecError(
            f"--peer-python: {spec.name} names an ONNX file, which PyTorch does not run",
            where=spec_file.where("model", "onnx"),
            next_step="write model: {torch: {callable: model.py:build}}, a function that returns the PyTorch model",
        )
    parse_reference(source.callable, _base_dir(spec_file), spec_file.where("model", "torch", "callable"))
    if shutil.which(python) is None:
        raise CommandLineError(f"--peer-python: there is no program '{python}'", next_step="which -a python3")
    return spec_file


def peer_names(asked: Sequence[str]) -> tuple[str, ...]:
    """The peers asked for, all of them where none are.

    Raises:
        CommandLineError: a name is none of theirs.
    """
    for name in asked:
        if name not in PEERS:
            meant = closest(name, PEERS)
            raise CommandLineError(
                f"--peer: found '{name}'",
                next_step=f"write --peer {meant}" if meant else f"name one of: {', '.join(PEERS)}",
            )
    return tuple(dict.fromkeys(asked or PEERS))


def measure_peers(
    spec_file: SpecFile,
    inputs: Sequence[TensorRecord],
    sizes: Sequence[Sizes],
    switches: Switches,
    report: Report,
    *,
    peers: Sequence[str],
    python: str,
    device: str,
    device_name: str,
    timeout_seconds: float | None,
) -> tuple[PeerPoint, ...]:
    """Measures the spec's PyTorch model at the sizes of an engine, each peer in a process of its own.

    The inputs are those of the engine. With CUDA graphs, torch.compile uses them too (mode reduce-overhead). A peer that
    fails is a point with its reason.

    Args:
        spec_file: of `torch_spec`.
        inputs: of the engine.
        sizes: to measure at.
        switches: how; always in one stream.
        report: told what happens.
        peers: of `PEERS`.
        python: an interpreter that has torch.
        device: torch's name, such as "cuda:0".
        device_name: of the GPU that the engine ran on; another one is a failure.
        timeout_seconds: for loading, and again for each point; None for no limit.
    """
    report(Event("started", "peer"))
    found: list[PeerPoint] = []
    for peer in peers:
        mode = "" if peer.startswith("eager") else "reduce-overhead" if switches.cuda_graph else "default"
        empty = [PeerPoint(peer, mode, dict(point), None, "") for point in sizes]
        try:
            with _opened(spec_file, python, timeout_seconds, peer, report) as code:
                found += _points(code, inputs, empty, switches, device, device_name, timeout_seconds, report)
        except TrtForgeError as error:
            found += [replace(point, reason=_reason(error)) for point in empty]
    return tuple(found)


def gauges(points: Sequence[PeerPoint], gpu: str) -> Iterator[Gauge]:
    """The figures for Prometheus; peers that did not run have none."""
    for point in points:
        if point.times is not None:
            labels = {"peer": point.peer, "mode": point.mode, "gpu": gpu, "sizes": sizes_text(point.sizes)}
            for share in (50, 99):
                value = point.times.latency.percentiles[share] / 1000
                yield Gauge(f"trtforge_peer_latency_p{share}_seconds", labels, value)


def _opened(
    spec_file: SpecFile, python: str, timeout_seconds: float | None, peer: str, report: Report
) -> AbstractContextManager[UserCode]:
    source = spec_file.spec.model.torch
    assert source is not None  # noqa: S101 - torch_spec looked
    report(Event("step", "peer", f"{peer}: loading {source.callable}"))
    return user_code(
        source.callable,
        _base_dir(spec_file),
        timeout_seconds=timeout_seconds,
        driver=_DRIVER,
        where=spec_file.where("model", "torch", "callable"),
        python=python,
    )


def _points(
    code: UserCode,
    inputs: Sequence[TensorRecord],
    empty: Sequence[PeerPoint],
    switches: Switches,
    device: str,
    device_name: str,
    timeout_seconds: float | None,
    report: Report,
) -> Iterator[PeerPoint]:
    last = ""
    for point in empty:
        if not code.is_alive:
            yield replace(point, reason=f"its process had ended before: {last}")
            continue
        report(Event("step", "peer", f"{point.peer} at {sizes_text(point.sizes)}"))
        payload = {
            "feeds": generated(inputs, point.sizes),
            "half": PEERS[point.peer],
            "mode": point.mode,
            "device": device,
            "transfers": switches.transfers,
            "spin_wait": switches.spin_wait,
            "one_at_a_time": switches.one_at_a_time,
            "warm_up_ms": switches.warm_up_ms,
            "duration_s": switches.duration_s,
            "iterations": switches.iterations,
        }
        try:
            answer = code.ask("measure", payload, timeout_seconds=timeout_seconds)
        except TrtForgeError as error:
            last = _reason(error)
            yield replace(point, reason=last)
            continue
        if answer["device"] != device_name:
            yield replace(point, reason=f"{device} of its torch is {answer['device']}, the engine ran on {device_name}")
        else:
            yield replace(point, times=_times(answer))


def _base_dir(spec_file: SpecFile) -> Path:
    return spec_file.marks[("model", "torch", "callable")].path.resolve().parent


def _reason(error: TrtForgeError) -> str:
    return "; ".join(problem.summary for problem in error.problems)


def _times(answer: Any) -> PeerTimes:
    timings = timings_of(answer["rows"], answer["wall_s"])
    return PeerTimes(
        spread(timings.latency),
        spread(timings.compute),
        spread(timings.response),
        timings.throughput_qps,
        len(timings.compute),
        answer["torch"],
        answer["ready_seconds"],
        answer["is_settled"],
    )
