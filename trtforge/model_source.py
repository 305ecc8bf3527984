"""The model of a spec: read or exported, checked, with the profiles that its traffic gives, and unchanged since."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtforge.backends.capabilities import Capability
from trtforge.digests import model_digest
from trtforge.errors import BuildError, GraphError, SpecError, TrtForgeError, shown_path
from trtforge.events import Event
from trtforge.keys import VERSIONS
from trtforge.plain import from_plain, to_plain
from trtforge.run import Run
from trtforge.spec.load import SpecFile
from trtforge.spec.model import FromTraffic, InputProfile, ProfileSpec
from trtforge.store import StageKey
from trtforge.types import Graph

if TYPE_CHECKING:
    from trtforge.quality import Exported


def source_of(
    spec_file: SpecFile, rows: list[Capability], run: Run, *, may_export: bool
) -> tuple[Path, Exported | None]:
    """The ONNX file: the spec's own, or a fresh export of its PyTorch model, or the last one if nothing may run.

    An export is never taken for done: what the callable reads, weights for instance, is not known.
    """
    spec, store = spec_file.spec, run.stages.store
    if spec.model.onnx is not None:
        return spec.model.onnx, None
    assert spec.model.torch is not None  # noqa: S101 - the spec has one of the two
    from trtforge.usercode.process import parse_reference  # noqa: PLC0415 - few specs need it

    opset = min(row.max_opset for row in rows)
    base_dir = spec_file.marks[("model", "torch", "callable")].path.resolve().parent
    file = parse_reference(spec.model.torch.callable, base_dir, spec_file.where("model", "torch", "callable")).file
    parameters = {"callable": spec.model.torch.callable, "opset": opset}
    key = StageKey("export", VERSIONS["export"], {"callable": run.memo.digest(file)} if file else {}, parameters, {})
    if not may_export:
        record = store.find(key)
        if record is None:
            raise GraphError(
                f"{spec.model.torch.callable} was not exported here yet, and this verb runs no Python of a spec",
                where=spec_file.where("model", "torch"),
                next_step=f"trtforge build {shown_path(spec_file.path)}",
            )
        return store.blob_path(record.blobs["onnx"]), None
    from trtforge import quality  # noqa: PLC0415 - loads onnxruntime
    from trtforge.parity.refusal import refuse_broken  # noqa: PLC0415 - loads numpy

    start = time.perf_counter()
    run.stages.tell(Event("started", "export"))
    path = store.new_folder("export") / f"{spec.name}.onnx"
    exported = quality.export(spec_file, opset, path, run.stages)
    text = f"torch {exported.report.torch_version}, {exported.report.exporter}, opset {opset}; {exported.parity.reason}"
    run.stages.tell(Event("done", "export", text, seconds=time.perf_counter() - start))
    refuse_broken(exported.parity, spec_file, exported.report.traced)
    if not exported.report.graph.external_files:
        last = path.with_suffix(".last")
        shutil.copyfile(path, last)
        store.put(key, {"notes": list(exported.report.notes)}, {"onnx": last}, text)
    return path, exported


def ingested(spec_file: SpecFile, source: Path, run: Run) -> Graph:
    """The model, from the store where its bytes and those of its external data are known there."""
    where = spec_file.where("model", "onnx")

    store = run.stages.store

    def fresh_graph() -> Graph:
        from trtforge.graph.ingest import ingest  # noqa: PLC0415 - loads onnx

        graph = ingest(source, store.work_dir, memo=run.memo, where=where)
        read = [(file.location, file.digest) for file in graph.external_files]
        if graph.digest != model_digest(source_digest, read):
            raise _changed_model(spec_file, source)
        return graph

    fresh: Graph | None = None
    source_digest = ""
    try:
        source_digest = run.memo.digest(source)
        files_key = StageKey("external files", 1, {"model": source_digest}, {}, {})
        files = store.find(files_key)
        if files is None:
            fresh = fresh_graph()
            about = f"weights of {source.name} in {len(fresh.external_files)} other files"
            files = store.put(files_key, [file.location for file in fresh.external_files], {}, about)
        external = {name: run.memo.digest(source.parent / name) for name in files.result}
    except OSError:
        fresh_graph()  # says what is wrong with the files
        raise
    inputs = {"model": source_digest} | {f"external file {name}": digest for name, digest in external.items()}
    key = StageKey("ingest", VERSIONS["ingest"], inputs, {}, {})

    def compute() -> tuple[Any, dict[str, Path]]:
        graph = fresh or fresh_graph()
        if graph.digest != model_digest(source_digest, external.items()):
            raise _changed_model(spec_file, source)
        return graph_to_plain(graph), {} if graph.path == graph.source else {"graph": graph.path}

    record = run.stages.run("ingest", key, compute, _describe_graph)
    path = store.blob_path(record.blobs["graph"]) if record.blobs else source.absolute()
    places = {"path": path, "source": source.absolute(), "weights_dir": source.absolute().parent}
    graph: Graph = from_plain(Graph, record.result | {name: str(place) for name, place in places.items()})
    return graph


def with_traffic_profiles(spec_file: SpecFile, graph: Graph, run: Run) -> SpecFile:
    """The spec with the profiles that its traffic log gives, written out in place of `from_traffic`."""
    if isinstance(spec_file.spec.profiles, tuple):
        return spec_file
    wishes = spec_file.spec.profiles.from_traffic
    files = {"log": wishes.log} | ({"latencies": wishes.latencies} if wishes.latencies else {})
    parameters: dict[str, Any] = to_plain(FromTraffic, replace(wishes, log=Path(wishes.log.suffix), latencies=None))
    inputs = {"model": graph.digest}
    for name, path in files.items():
        where = spec_file.where("profiles", "from_traffic", name)
        try:
            inputs[name] = run.memo.digest(path)
        except OSError as error:
            text = f"{shown_path(path)}: {error.strerror}"
            raise SpecError(text, where=where, next_step=f"write the path of the {name} there") from None
    key = StageKey("traffic", VERSIONS["traffic"], inputs, parameters, {})

    def compute() -> tuple[Any, dict[str, Path]]:
        from trtforge.demand import choose_profiles  # noqa: PLC0415 - loads onnx and numpy

        chosen = choose_profiles(graph, wishes, lambda name: spec_file.where("profiles", "from_traffic", name))
        listed = tuple(
            ProfileSpec(
                name=profile.name,
                inputs={
                    name: InputProfile(min=shapes.min, opt=shapes.opt, max=shapes.max)
                    for name, shapes in profile.shapes.items()
                },
            )
            for profile in chosen.profiles
        )
        covered = f"{chosen.coverage.num_covered} of {chosen.coverage.num_requests} requests"
        return {"profiles": to_plain(tuple[ProfileSpec, ...], listed), "covered": covered}, {}

    record = run.stages.run(
        "traffic", key, compute, lambda plain: (f"{len(plain['profiles'])} profiles cover {plain['covered']}",)
    )
    profiles: tuple[ProfileSpec, ...] = from_plain(tuple[ProfileSpec, ...], record.result["profiles"])
    return replace(spec_file, spec=replace(spec_file.spec, profiles=profiles))


def graph_to_plain(graph: Graph) -> dict[str, Any]:
    """As JSON values without paths, which differ between machines."""
    plain: dict[str, Any] = to_plain(Graph, graph)
    return {name: value for name, value in plain.items() if name not in ("path", "source", "weights_dir")}


def _describe_graph(plain: Mapping[str, Any]) -> tuple[str, ...]:
    opset = dict(map(tuple, plain["opsets"])).get("", 0)
    size = f"opset {opset}, {plain['num_nodes']} nodes, sha256 {plain['digest'][:12]}"
    return (size, *plain["notes"])


@contextmanager
def unchanged_model(spec_file: SpecFile, graph: Graph, run: Run) -> Iterator[None]:
    """Around work that reads the model's files itself, whose result is what its key says only if they do not change."""
    try:
        yield
    except TrtForgeError:
        refuse_changed_model(spec_file, graph, run)  # which is why it failed
        raise
    refuse_changed_model(spec_file, graph, run)


def refuse_changed_model(spec_file: SpecFile, graph: Graph, run: Run) -> None:
    """Compares the model's files with the graph that was ingested.

    Raises:
        BuildError: they changed, or are gone.
    """
    digest_of = run.memo.digest
    try:
        external = [(file.location, digest_of(graph.weights_dir / file.location)) for file in graph.external_files]
        if model_digest(digest_of(graph.source), external) == graph.digest:
            return
    except OSError:
        pass  # it is gone, or being replaced
    raise _changed_model(spec_file, graph.source)


def _changed_model(spec_file: SpecFile, source: Path) -> BuildError:
    return BuildError(
        f"{shown_path(source)} or a file with its weights changed during the build, so what was made of it is dropped",
        where=spec_file.where("model", "onnx"),
        next_step="run the build again once the file is written",
    )
