"""`trtforge profile`: optimization profiles from traffic, and whether a release still covers it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trtforge.cli.console import JsonOption

if TYPE_CHECKING:
    from trtforge.demand import Chosen
    from trtforge.release.manifest import Manifest
    from trtforge.spec.model import FromTraffic
    from trtforge.traffic.choose import Box
    from trtforge.traffic.coverage import Coverage
    from trtforge.traffic.histogram import Traffic
    from trtforge.traffic.layout import Layout
    from trtforge.types import Profile


class OptBy(str, Enum):
    """What the opt of a profile is the most of."""

    requests = "requests"
    cost = "cost"


def profile(
    traffic: Annotated[
        Path, typer.Argument(help="Log of requests: .jsonl, .csv (also .gz), .parquet, .json.", show_default=False)
    ],
    model: Annotated[
        Path | None, typer.Option(help="The ONNX file to choose profiles for.", show_default=False)
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="A manifest: check that its profiles cover the log.", show_default=False)
    ] = None,
    coverage: Annotated[float, typer.Option(min=0, max=1, help="Least share of requests to cover.")] = 0.995,
    max_profiles: Annotated[int, typer.Option(min=1, max=8, help="Most profiles to choose.")] = 4,
    multiple_of: Annotated[
        list[str] | None, typer.Option(help="SIZE=N: the server pads SIZE to multiples of N.", show_default=False)
    ] = None,
    max_batch: Annotated[int | None, typer.Option(min=1, help="Largest batch.", show_default=False)] = None,
    memory_mib: Annotated[
        int | None, typer.Option(min=1, help="Limit of the estimated activations at max.", show_default=False)
    ] = None,
    window_ms: Annotated[
        float | None, typer.Option(min=0, help="Form batches as a queue with this window would.", show_default=False)
    ] = None,
    latencies: Annotated[
        Path | None, typer.Option(help="Measured latencies (JSON) in place of the cost model.", show_default=False)
    ] = None,
    padded: Annotated[bool, typer.Option("--padded", help="The server pads requests to their profile's max.")] = False,
    opt_by: Annotated[
        OptBy, typer.Option(help="opt is the shape with most requests, or with most cost.")
    ] = OptBy.requests,
    svg: Annotated[Path | None, typer.Option(help="Write the picture here.", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """Choose optimization profiles from real requests, or check a release against them."""
    from trtforge.errors import CommandLineError  # noqa: PLC0415 - keeps --help quick, as in every verb
    from trtforge.spec.model import FromTraffic  # noqa: PLC0415

    if (model is None) == (against is None):
        found = "neither" if model is None else "both"
        raise CommandLineError(
            f"found {found} of --model and --against, expected one of them",
            next_step=f"trtforge profile {traffic} --model MODEL.onnx",
        )
    wishes = FromTraffic(
        log=traffic,
        coverage=coverage,
        max_profiles=max_profiles,
        multiple_of=_multiples(multiple_of or []),
        max_batch=max_batch,
        memory_mib=memory_mib,
        window_ms=window_ms or None,
        latencies=latencies,
        padded=padded,
        opt_by=opt_by.value,
    )
    if model is not None:
        _choose(model, wishes, svg, as_json=as_json)
    elif against is not None:
        _compare(against, wishes, svg, as_json=as_json)


def _multiples(words: list[str]) -> dict[str, int]:
    from trtforge.errors import CommandLineError  # noqa: PLC0415

    found = {}
    for word in words:
        name, _, number = word.rpartition("=")
        if not name or not number.isdecimal() or not 1 <= int(number[:9]) <= 4096:  # noqa: PLR2004 - as in a spec
            raise CommandLineError(
                f"--multiple-of {word}: expected SIZE=N with N from 1 to 4096", next_step="--multiple-of seq=8"
            )
        found[name] = int(number)
    return found


def _choose(model: Path, wishes: FromTraffic, svg: Path | None, *, as_json: bool) -> None:
    import tempfile  # noqa: PLC0415

    from platformdirs import user_cache_path  # noqa: PLC0415

    from trtforge.cli.console import print_json, say  # noqa: PLC0415
    from trtforge.demand import choose_profiles  # noqa: PLC0415
    from trtforge.graph.ingest import ingest  # noqa: PLC0415
    from trtforge.memo import DigestMemo  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="trtforge-") as work_dir:
        graph = ingest(model, Path(work_dir), memo=DigestMemo(user_cache_path("trtforge") / "digests.json"))
        chosen = choose_profiles(graph, wishes)
    names = [one.name for one in chosen.profiles]
    _write_svg(svg, chosen.traffic, chosen.option.boxes, names, f"{wishes.log.name}: profiles of {model.name}")
    if as_json:
        print_json(_chosen_json(chosen))
        return
    _picture(chosen.traffic, chosen.option.boxes, names)
    _print_options(chosen, wishes)
    _print_coverage(chosen.coverage, chosen.layout, names)
    for outlier in chosen.outliers:
        say(
            f"outliers: {outlier.name} reaches {outlier.largest}, in requests far above the others: {outlier.count}; "
            f"99.9 % need {outlier.usual} at most"
        )
    if chosen.cover_all:
        everything = chosen.cover_all
        largest = ", ".join(f"{n} {s}" for n, s in zip(chosen.layout.names, everything.largest, strict=True))
        say(
            f"to cover all: max {largest}; {everything.mean_ms:.4g} ms a request in place of {chosen.option.mean_ms:.4g}, "
            f"{everything.held_bytes / 1e6:.1f} MB of activations in place of {max(chosen.held_bytes) / 1e6:.1f}"
        )
    say()
    for line in yaml_profiles(chosen.profiles, chosen.layout):
        say(line)


def yaml_profiles(profiles: Sequence[Profile], layout: Layout) -> list[str]:
    """The lines of a spec's `profiles:` block."""
    from trtforge.spec.starter import yaml_key  # noqa: PLC0415

    lines = ["profiles:"]
    for one in profiles:
        lines += [f"  - name: {one.name}", "    inputs:"]
        for name, axes in layout.axes.items():
            if any(isinstance(axis, str) for axis in axes):
                shapes = one.shapes[name]
                ranges = ", ".join(f"{point}: {list(getattr(shapes, point))}" for point in ("min", "opt", "max"))
                lines.append(f"      {yaml_key(name)}: {{{ranges}}}")
    return lines


def _print_options(chosen: Chosen, wishes: FromTraffic) -> None:
    from trtforge.cli.console import say  # noqa: PLC0415

    source = f"measured in {wishes.latencies.name}" if wishes.latencies else "by counted work on a nominal GPU"
    say(f"profiles  mean cost  gain over one less   ({source})")
    before = None
    for number, option in enumerate(chosen.options, start=1):
        gain = f"{1 - option.mean_ms / before:8.1%}" if before else "        "
        taken = "  <- the fewest within 2 % of the least" if option is chosen.option else ""
        say(f"{number:>8}  {option.mean_ms:8.4g} ms  {gain}{taken}")
        before = option.mean_ms


def _print_coverage(coverage: Coverage, layout: Layout, names: Sequence[str]) -> None:
    from trtforge.cli.console import say  # noqa: PLC0415
    from trtforge.traffic.coverage import left_out, shown_share  # noqa: PLC0415

    say(f"covered: {shown_share(coverage.num_covered, coverage.num_requests)} of {coverage.num_requests} requests")
    for name, count in zip(names, coverage.by_profile, strict=True):
        say(f"  {name}: {count}")
    for line in left_out(coverage, layout.names):
        say(f"  {line}")


def _picture(traffic: Traffic, boxes: Sequence[Box], labels: Sequence[str]) -> None:
    import shutil  # noqa: PLC0415

    from trtforge.cli.console import say  # noqa: PLC0415
    from trtforge.traffic.picture import terminal_picture  # noqa: PLC0415

    for line in terminal_picture(traffic, boxes, labels, shutil.get_terminal_size().columns):
        say(line)


def _write_svg(path: Path | None, traffic: Traffic, boxes: Sequence[Box], labels: Sequence[str], title: str) -> None:
    from trtforge.files import write_text  # noqa: PLC0415
    from trtforge.traffic.picture import svg_picture  # noqa: PLC0415

    if path is not None and len(traffic.sizes):
        write_text(path, svg_picture(traffic, boxes, labels, title))


def _coverage_json(coverage: Coverage, layout: Layout, names: Sequence[str]) -> dict[str, Any]:
    from dataclasses import asdict  # noqa: PLC0415

    return {
        "num_requests": coverage.num_requests,
        "num_covered": coverage.num_covered,
        "coverage": coverage.share,
        "by_profile": dict(zip(names, coverage.by_profile, strict=True)),
        "uncovered": [
            dict(zip(layout.names, one.sizes, strict=True)) | {"count": one.count} for one in coverage.uncovered
        ],
        "never_fit": [asdict(misfit) for misfit in coverage.misfits],
    }


def _chosen_json(chosen: Chosen) -> dict[str, Any]:
    from dataclasses import asdict  # noqa: PLC0415

    return {
        "ok": True,
        "exit_code": 0,
        "profiles": [asdict(one) for one in chosen.profiles],
        "options": [
            {"num_profiles": number, "mean_ms": option.mean_ms, "taken": option is chosen.option}
            for number, option in enumerate(chosen.options, start=1)
        ],
        "activation_bytes": list(chosen.held_bytes),
        "outliers": [asdict(outlier) for outlier in chosen.outliers],
        "cover_all": asdict(chosen.cover_all) if chosen.cover_all else None,
        **_coverage_json(chosen.coverage, chosen.layout, [one.name for one in chosen.profiles]),
    }


def _compare(path: Path, wishes: FromTraffic, svg: Path | None, *, as_json: bool) -> None:
    """The log against the profiles of a manifest's engines."""
    from trtforge.cli.console import print_json, say  # noqa: PLC0415
    from trtforge.demand import read_demand  # noqa: PLC0415
    from trtforge.release.manifest import read_manifest  # noqa: PLC0415
    from trtforge.traffic.coverage import boxes_of, coverage_of, refuse_low  # noqa: PLC0415
    from trtforge.traffic.layout import layout_of  # noqa: PLC0415

    inputs, profiles = _released(read_manifest(path), path)
    layout = layout_of(inputs)
    traffic = read_demand(layout, wishes)
    boxes = boxes_of(profiles, layout)
    names = [one.name for one in profiles]
    coverage = coverage_of(traffic, boxes, layout)
    _write_svg(svg, traffic, boxes, names, f"{wishes.log.name} against {path.name}")
    step = f"trtforge profile {wishes.log} --model MODEL.onnx, then build again"
    refuse_low(coverage, wishes.coverage, layout.names, f"the profiles in {path.name} cover", step, None)
    if as_json:
        print_json({"ok": True, "exit_code": 0, **_coverage_json(coverage, layout, names)})
        return
    if len(traffic.sizes):
        _picture(traffic, boxes, names)
    _print_coverage(coverage, layout, names)
    say(f"{path.name} still covers the log")


def _released(manifest: Manifest, path: Path) -> tuple[list[Any], list[Profile]]:
    """Inputs and profiles of the engines that a manifest lists, all of which were built from one spec."""
    from trtforge.errors import SpecError  # noqa: PLC0415
    from trtforge.types import Profile, ShapeRange, TensorSpec  # noqa: PLC0415

    if not manifest.artifacts:
        raise SpecError(f"{path} lists no engine", next_step="trtforge build SPEC")
    engine = manifest.artifacts[0]
    inputs = [TensorSpec(one.name, one.dtype, one.shape) for one in engine.inputs]
    profiles = [
        Profile(one.name, {name: ShapeRange(given.min, given.opt, given.max) for name, given in one.shapes.items()})
        for one in engine.profiles
    ]
    return inputs, profiles
