"""The runtime against stand-ins of every version: which calls it makes, and that it gives everything back.

The traces in golden/ are for reading. UPDATE_EXPECTED=1 writes them anew.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from fake_gpu import TOTAL, Rig
from stand_in import VERSIONS
from test_tensorrt_calls import matches
from typer.testing import CliRunner

import trtforge
from trtforge import bench
from trtforge.cli.app import app
from trtforge.cuda import open_cuda
from trtforge.errors import CapabilityError, CommandLineError, GraphError, IntegrityError, SeveralErrors, TrtForgeError
from trtforge.events import Event
from trtforge.graph.ingest import ingest
from trtforge.machine import GpuFacts, machine_facts
from trtforge.release.manifest import (
    Artifact,
    BuiltOn,
    HostRecord,
    Manifest,
    ModelRecord,
    NotRun,
    ProfileRecord,
    RangeRecord,
    SpecRecord,
    TensorRecord,
    manifest_json,
)
from trtforge.runtime import lane as lane_module
from trtforge.runtime import session as session_module
from trtforge.runtime.measure import Switches, lanes_of, measure
from trtforge.runtime.session import EngineSession

H200 = GpuFacts(0, "NVIDIA H200", "H200", "sm90", 132, 150_000_000_000, "GPU-1")
ENGINE = b"ftrt" + bytes(60)
SMALL, LARGE = (RangeRecord(min=(0, 8), opt=(opt, 8), max=(top, 8)) for opt, top in ((2, 4), (16, 32)))
X = np.arange(-8, 8, dtype=np.float32).reshape(2, 8)
NONE = "0" * 64


def artifact(version, **changes):
    ranges = {"small": SMALL, "large": LARGE}
    base = Artifact(
        identifier="net-h200",
        file="net.engine",
        size_bytes=len(ENGINE),
        digest=hashlib.sha256(ENGINE).hexdigest(),
        backend="tensorrt",
        backend_version=version,
        network_flags=(),
        builder_flags=(),
        settings={},
        tf32=False,
        precision="fp32",
        target_gpu="H200",
        compute_capability="sm90",
        built_on=BuiltOn(device_name="NVIDIA H200", num_sms=132, memory_bytes=1, driver="1"),
        host=NONE,
        timing_cache_digest=None,
        graph_digest=NONE,
        unit_digest=NONE,
        profiles=tuple(ProfileRecord(name=name, shapes={"x": one}, values={}) for name, one in ranges.items()),
        inputs=(TensorRecord(name="x", dtype="float32", shape=("rows", 8), ranges=ranges, data_dependent=False),),
        outputs=(TensorRecord(name="y", dtype="float32", shape=("rows", 8), ranges={}, data_dependent=False),),
        seconds={},
        warnings=(),
        peak_memory_bytes=None,
    )
    return replace(base, **changes)


def manifest(*artifacts):
    return Manifest(
        trtforge_version="0",
        created="2026-11-30T20:21:00Z",
        name="net",
        spec=SpecRecord(file="net.yaml", digest=NONE),
        model=ModelRecord(file="net.onnx", digest=NONE, size_bytes=1, opset=13, producer=""),
        calibration_digest=None,
        stages=(),
        hosts={NONE: HostRecord(python="3.11", platform="linux", packages={}, driver=None, cuda=None, gpus=())},
        artifacts=artifacts,
        profile_checks=(),
        export=None,
        lowering=(),
        parity=(),
        accuracy=NotRun(reason="-"),
        engines={},
        performance=NotRun(reason="-"),
        missing=(),
    )


class Bundle:
    """A bundle in a folder, a machine that looks as if it had an H200, and a TensorRT that looks like one."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.patch = folder, monkeypatch
        self.path = folder / "manifest.json"
        self.machine(H200)

    def machine(self, *gpus, cuda_error=""):
        facts = replace(machine_facts(), gpus=gpus, cuda_error=cuda_error)
        self.patch.setattr(session_module, "machine_facts", lambda: facts)

    def rig(self, version, *, installed=None, sized_by_data=False, **changes):
        rig = Rig(installed or version, sized_by_data=sized_by_data)
        self.patch.setitem(sys.modules, "tensorrt", rig.module)
        self.patch.setattr(session_module, "open_cuda", lambda _library, _device: rig.cuda)
        (self.folder / "net.engine").write_bytes(ENGINE)
        self.path.write_text(manifest_json(manifest(artifact(version, **changes))))
        return rig


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    return Bundle(tmp_path, monkeypatch)


def bench_words(bundle):
    """Of a quick bench."""
    return ["bench", str(bundle.path), "--warm-up", "0", "--duration", "0", "--iterations", "4"]


def ends_clean(rig):
    gc.collect()
    return not rig.cuda.live and rig.trace.count("cuda.close") == 1


@pytest.mark.parametrize("version", VERSIONS)
def test_load_run_and_close(bundle, version):
    rig = bundle.rig(version)

    with EngineSession.open(bundle.path) as session:
        assert session.run({"x": X})["y"].tolist() == (2 * X).tolist()
        assert session.run({"x": X + 1})["y"].tolist() == (2 * X + 2).tolist()
        assert session.run({"x": X[:1]})["y"].tolist() == (2 * X[:1]).tolist()
        assert session.run({"x": np.ones((8, 8))})["y"].tolist() == np.full((8, 8), 2.0).tolist()
        for _ in range(2):
            assert session.run({"x": X}, with_graph=True)["y"].tolist() == (2 * X).tolist()

    assert ends_clean(rig)
    ends = [line for line in rig.trace if line.startswith("~")]
    assert ends == ["~IExecutionContext"] * 3 + ["~ICudaEngine", "~Runtime"]  # small, large, and the graph's own
    assert matches(f"runtime-{version}", rig.text())


def test_a_request_of_the_same_shape_changes_nothing_in_the_context(bundle):
    rig = bundle.rig("8.6.1")

    with EngineSession.open(bundle.path) as session:
        session.run({"x": X})
        before = len(rig.trace)
        session.run({"x": X + 1})

    calls = [line.partition("(")[0] for line in rig.trace[before : before + 4]]
    assert calls == ["cuda.to_device", "IExecutionContext.execute_async_v3", "cuda.to_host", "cuda.synchronize"]


def test_a_lane_records_again_after_another_shape(bundle):
    rig = bundle.rig("10.16.1.11")

    with EngineSession.open(bundle.path) as session:
        lane = session.lane(session.profiles[0])
        for x in (X, X[:1], X):
            lane.prepare({"x": x})
            lane.run(with_graph=True)
            assert lane.outputs()["y"].tolist() == (2 * x).tolist()

    assert rig.trace.count("cuda.begin_capture") == 3


@pytest.mark.parametrize("version", VERSIONS)
def test_an_output_whose_size_depends_on_the_data(bundle, version):
    rig = bundle.rig(version, sized_by_data=True)

    with EngineSession.open(bundle.path) as session:
        for x in (X, -np.ones((2, 8), np.float32), np.arange(1, 33, dtype=np.float32).reshape(4, 8)):
            assert session.run({"x": x})["y"].tolist() == x[x[:, 0] > 0].tolist()
        with pytest.raises(CapabilityError, match="size of output 'y' depends on the data"):
            session.run({"x": X}, with_graph=True)

    assert ends_clean(rig)


@pytest.mark.parametrize("version", ["8.6.1", "10.16.1.11"])
def test_no_memory_for_an_output_whose_size_depends_on_the_data(bundle, version):
    rig = bundle.rig(version, sized_by_data=True)
    rig.cuda.allocations_left = 2  # both sides of the input

    with pytest.raises(CapabilityError, match="bytes are needed"), EngineSession.open(bundle.path) as session:
        session.run({"x": X + 8})

    assert ends_clean(rig)


@pytest.mark.parametrize("allocations", range(5))
def test_whatever_memory_is_short_of_everything_is_given_back(bundle, allocations):
    rig = bundle.rig("8.6.1")
    rig.cuda.allocations_left = allocations

    def run():
        with EngineSession.open(bundle.path) as session:
            return session.run({"x": X})["y"].tolist()

    if allocations < 4:
        with pytest.raises(
            CapabilityError, match="needed" if allocations else r"context needs 5\.0 MiB .* 1024\.0 MiB"
        ):
            run()
    else:
        assert run() == (2 * X).tolist()
    assert ends_clean(rig)


def test_a_gpu_that_stops_is_told_of_once_and_everything_is_left(bundle):
    rig = bundle.rig("8.6.1")

    def stopped(*_):
        raise CapabilityError("CUDA stopped again", next_step="trtforge doctor")

    def stops(*_):
        for name in ("synchronize", "wait_for", "free", "free_host", "free_stream", "free_event"):
            setattr(rig.cuda, name, stopped)
        raise CapabilityError("CUDA stopped", next_step="trtforge doctor")

    rig.cuda.wait_for = stops
    result = CliRunner().invoke(app, [*bench_words(bundle), "--streams", "3", "--shapes", "rows=2"])

    assert [problem.summary for problem in result.exception.problems] == ["CUDA stopped"]
    del result
    gc.collect()
    ends = [line for line in rig.trace if line.startswith("~") or line == "cuda.close"]
    assert ends == ["~IExecutionContext"] * 6 + ["~ICudaEngine", "~Runtime", "cuda.close"]


def test_a_session_may_be_closed_twice(bundle):
    rig = bundle.rig("8.6.1")

    with EngineSession.open(bundle.path) as session:
        session.run({"x": X})
        session.close()

    assert ends_clean(rig)


def test_a_second_context_of_a_profile_that_may_have_one_only(bundle):
    rig = bundle.rig("8.6.1")
    rig.shares_profiles = False

    with EngineSession.open(bundle.path) as session:
        session.lane(session.profiles[0], 0)
        session.lane(session.profiles[1], 0)
        with pytest.raises(CapabilityError, match="second context of the same profile"):
            session.lane(session.profiles[0], 1)

    assert ends_clean(rig)


def test_no_rows_at_all(bundle):
    rig = bundle.rig("11.4.0.106")

    with EngineSession.open(bundle.path) as session:
        assert session.run({"x": np.empty((0, 8), np.float32)})["y"].shape == (0, 8)

    assert "cuda.to_device(0)" not in rig.trace


def test_shapes_and_names_that_do_not_fit(bundle):
    bundle.rig("8.6.1")

    with EngineSession.open(bundle.path) as session:
        with pytest.raises(GraphError, match=r"no profile of net-h200 allows x \[33, 8\]") as caught:
            session.run({"x": np.ones((33, 8))})
        assert caught.value.problems[0].detail == (
            "profile 'small' allows 'x' from [0, 8] to [4, 8]",
            "profile 'large' allows 'x' from [0, 8] to [32, 8]",
        )
        with pytest.raises(SeveralErrors) as several:
            session.run({"X": X})
        assert [problem.summary for problem in several.value.problems] == [
            "input 'x' is missing",
            "'X' is no input of net-h200",
        ]


def other_bytes(bundle):
    (bundle.folder / "net.engine").write_bytes(ENGINE[:-1] + b"x")


def no_file(bundle):
    (bundle.folder / "net.engine").unlink()


@pytest.mark.parametrize(
    ("changes", "spoil", "error", "text"),
    [
        ({}, other_bytes, IntegrityError, "net.engine is not the engine of the manifest: found sha256"),
        ({}, no_file, IntegrityError, "net.engine: No such file or directory"),
        ({"installed": "10.0.1"}, None, CapabilityError, "is for tensorrt 8.6.1, and 10.0.1 is installed"),
        ({"settings": {"version_compatible": True}}, None, CapabilityError, "brings native code"),
        (
            {"plugins": ("ab" * 32,)},
            None,
            CapabilityError,
            "needs 1 plugin libraries that were not given: abababababab",
        ),
        ({"compute_capability": "sm80"}, None, CapabilityError, r"the manifest has 0 engines for NVIDIA H200 \(sm90\)"),
    ],
)
def test_what_does_not_fit_never_reaches_tensorrt(bundle, changes, spoil, error, text):
    rig = bundle.rig("8.6.1", **changes)
    if spoil:
        spoil(bundle)

    with pytest.raises(TrtForgeError) as caught:
        EngineSession.open(bundle.path)

    (problem,) = caught.value.problems
    assert re.search(text, problem.summary)
    assert problem.exit_code == error.exit_code
    assert not [line for line in rig.trace if "deserialize" in line]
    assert not rig.cuda.live


@pytest.mark.parametrize(
    ("capability", "level", "is_loaded"),
    [("sm80", "ampere_plus", True), ("sm80", "none", False), ("sm86", "same_compute_capability", False)],
)
def test_an_engine_for_another_gpu(bundle, capability, level, is_loaded):
    bundle.rig("8.6.1", compute_capability=capability, settings={"hardware_compatibility": level})

    if is_loaded:
        EngineSession.open(bundle.path, identifier="net-h200").close()
    else:
        with pytest.raises(SeveralErrors) as caught:
            EngineSession.open(bundle.path, identifier="net-h200")
        summaries = [problem.summary for problem in caught.value.problems]
        assert summaries == [f"net-h200 is for {capability}, and NVIDIA H200 is sm90"]


def test_an_engine_for_all_from_ampere_on_is_found_without_its_name(bundle):
    bundle.rig("8.6.1", compute_capability="sm80", settings={"hardware_compatibility": "ampere_plus"})

    EngineSession.open(bundle.path).close()


def model(folder, *, digest=None):
    folder.mkdir(exist_ok=True)
    path = folder / "net.onnx"
    onnx.save(
        onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> g (float[n] x) => (float[n] y) {y = Relu(x)}'),
        path,
    )
    graph = ingest(path, folder)
    return graph if digest is None else replace(graph, digest=digest)


@pytest.mark.parametrize("version", [version for version in VERSIONS if not version.startswith("8.")])
def test_a_stripped_engine_gets_its_weights_from_the_model_it_was_built_from(bundle, tmp_path, version):
    built_from, other = model(tmp_path / "a"), model(tmp_path / "b", digest="1" * 64)
    rig = bundle.rig(version, settings={"strip_weights": True}, graph_digest=built_from.digest)

    with EngineSession.open(bundle.path, models=(other, built_from)) as session:
        assert session.run({"x": X})["y"].tolist() == (2 * X).tolist()

    names = [line.partition("(")[0] for line in rig.trace]
    refit = ["Refitter", "OnnxParserRefitter", "OnnxParserRefitter.refit_from_bytes", "Refitter.refit_cuda_engine"]
    begin = names.index("Refitter")
    assert names[begin : begin + 4] == refit
    assert begin < names.index("ICudaEngine.create_execution_context")
    assert f"'{built_from.path}'" in rig.trace[begin + 2]


def test_a_stripped_engine_does_not_run_without_its_weights(bundle, tmp_path):
    bundle.rig("10.9.0.34", settings={"strip_weights": True}, graph_digest="1" * 64)

    for models in ((), (model(tmp_path),)):
        with pytest.raises(CapabilityError, match="built without its weights, which are in the model 111111111111"):
            EngineSession.open(bundle.path, models=models)
    result = CliRunner().invoke(app, [*bench_words(bundle), "--model", str(tmp_path / "net.onnx")])
    (problem,) = result.exception.problems
    assert problem.next_step.startswith("add --model FILE.onnx, that model; trtforge store get 111111111111 FILE.onnx")


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (np.int8([-1]), np.uint8),
        (np.uint8([200]), np.int8),
        (np.uint64([2**63 + 5]), np.int64),
        (np.float32([2.5]), np.int32),
        (np.float64([1e10]), np.int32),
        (np.float32([np.nan]), np.int32),
        (np.int64([2**40]), np.int32),
    ],
)
def test_values_that_integers_do_not_hold_are_refused(values, dtype):
    with pytest.raises(GraphError, match=f"input 'x' is {np.dtype(dtype)} in the engine, and holds values from"):
        lane_module._converted("x", values, np.dtype(dtype))
    assert lane_module._converted("x", np.full_like(values, 3), np.dtype(dtype)).tolist() == [3]


def test_a_session_that_is_closed_runs_nothing(bundle):
    rig = bundle.rig("8.6.1")
    with EngineSession.open(bundle.path) as session:
        runs = session.run_each([{"x": X}] * 4)
        next(runs)

    for go_on in (lambda: next(runs), lambda: session.run({"x": X})):
        with pytest.raises(CapabilityError, match="the session of net-h200 is closed"):
            go_on()
    assert ends_clean(rig)


def test_a_context_in_place_of_another_that_takes_no_profile(bundle):
    rig = bundle.rig("8.6.1", sized_by_data=True)

    with EngineSession.open(bundle.path) as session:
        session.run({"x": X})
        rig.takes_profiles = False
        with pytest.raises(CapabilityError, match="TensorRT gives a second context"):
            session.run({"x": X[:1]})

    assert ends_clean(rig)


def test_files_that_an_engine_takes_nothing_from_are_refused(bundle, tmp_path):
    rig = bundle.rig("10.9.0.34")
    model(tmp_path)
    (tmp_path / "own.so").touch()
    words = ["--model", str(tmp_path / "net.onnx"), "--plugin", str(tmp_path / "own.so")]

    result = CliRunner().invoke(app, [*bench_words(bundle), *words])

    found = [(problem.summary, problem.exit_code) for problem in result.exception.problems]
    assert found == [(f"found --{name}, of which net-h200 takes nothing", 64) for name in ("model", "plugin")]
    assert ends_clean(rig)


def test_weights_that_do_not_fit_are_told(bundle, tmp_path):
    graph = model(tmp_path)
    rig = bundle.rig("10.9.0.34", settings={"strip_weights": True}, graph_digest=graph.digest)
    rig.takes_weights = False

    with pytest.raises(IntegrityError, match="does not take the weights of"):
        EngineSession.open(bundle.path, models=(graph,))
    assert ends_clean(rig)


def test_what_tensorrt_says_as_it_refuses_is_in_the_error(bundle):
    rig = bundle.rig("8.6.1")

    did_not, free = "TensorRT did not start the engine", r"1024\.0 MiB of 1024\.0 MiB of GPU memory are free"
    for line, text in (
        ("Cuda Runtime (out of memory)", f"{did_not}: {free}, and it needs more"),
        ("OutOfMemory: Requested amount of GPU memory (268435456 bytes)", f"{did_not}: {free}, and it needs 256.0 MiB"),
        ("out of Memory (Requested size was 22942842880 bytes.)", f"{did_not}: {free}, and it needs 21880.0 MiB"),
        ("the stream is unwell", f"{did_not}$"),
    ):
        with EngineSession.open(bundle.path) as session:
            session.run({"x": X})
            rig.refuses = line
            with pytest.raises(CapabilityError, match=text) as caught:
                session.run({"x": X})
            rig.refuses = ""
        assert caught.value.problems[0].detail == (f"ERROR: {line}",)


def test_another_model_of_the_same_compute_capability_is_a_warning(bundle):
    bundle.rig("8.6.1", built_on=BuiltOn(device_name="NVIDIA H100", num_sms=132, memory_bytes=1, driver="1"))

    with EngineSession.open(bundle.path) as session:
        assert session.warnings == ("net-h200 was built and timed on NVIDIA H100, and this is NVIDIA H200",)


def test_host_code_runs_only_where_it_is_allowed(bundle):
    rig = bundle.rig("8.6.1", installed="10.16.1.11", settings={"version_compatible": True})

    EngineSession.open(bundle.path, allow_host_code=True).close()

    assert "Runtime.engine_host_code_allowed = True" in rig.trace


def test_no_gpu(bundle):
    bundle.rig("8.6.1")
    bundle.machine(cuda_error="the driver is too old (CUDA error 35)")

    with pytest.raises(CapabilityError, match="there is no GPU 0 here: the driver is too old"):
        EngineSession.open(bundle.path)


@pytest.mark.parametrize(
    ("line", "error", "text"),
    [
        (
            "Error Code 2: OutOfMemory (no further information)",
            CapabilityError,
            "needs at least .* 1024.0 MiB are free",
        ),
        ("Version tag does not match", IntegrityError, "TensorRT 8.6.1 does not load net.engine"),
    ],
)
def test_an_engine_that_tensorrt_does_not_load(bundle, line, error, text):
    rig = bundle.rig("8.6.1")
    rig.log = (line,)

    with pytest.raises(error, match=text) as caught:
        EngineSession.open(bundle.path)

    assert caught.value.problems[0].detail == (f"ERROR: {line}",)
    assert ends_clean(rig)


QUICK = Switches(warm_up_ms=0.0, duration_s=0.0, iterations=6)


@pytest.mark.parametrize("with_graph", [False, True])
def test_measuring_gives_its_events_back_and_counts_what_the_gpu_did(bundle, with_graph):
    rig = bundle.rig("8.6.1")

    with EngineSession.open(bundle.path) as session:
        switches = replace(QUICK, cuda_graph=with_graph, streams=2)
        lanes = [lanes_of(session, session.profiles[0], number, switches) for number in range(2)]
        found = measure(lanes, session.cuda, {"x": X}, switches)
        assert not [name for name, _ in rig.cuda.live.values() if name.startswith("event")]

    assert len(found.compute) >= 6
    assert set(found.copy_in) == set(found.copy_out) == {1.0}
    assert set(found.compute) == {2.0}  # two rows
    assert ends_clean(rig)


def test_events_made_before_one_that_fails_are_given_back(bundle):
    rig = bundle.rig("8.6.1")
    make, made = rig.cuda.event, []

    def event(*, spin):
        if len(made) == 5:
            raise CapabilityError("no event", next_step="trtforge doctor")
        made.append(make(spin=spin))
        return made[-1]

    rig.cuda.event = event
    with pytest.raises(CapabilityError, match="no event"), EngineSession.open(bundle.path) as session:
        measure([lanes_of(session, session.profiles[0], 0, QUICK)], session.cuda, {"x": X}, QUICK)

    assert ends_clean(rig)


def count_starts(lane, under_way):
    start = lane.enqueue
    lane.enqueue = lambda: (under_way.append(under_way[-1] + 1), start())


def test_copies_run_beside_the_compute_of_the_query_before(bundle):
    rig = bundle.rig("8.6.1")
    calls = []
    with EngineSession.open(bundle.path) as session:
        lanes = lanes_of(session, session.profiles[0], 0, QUICK)
        for name in ("record", "hold", "to_device", "to_host"):
            watch(rig.cuda, name, calls)
        execute = lanes[0].stream
        measure([lanes], session.cuda, {"x": X}, QUICK)

    first, second = lanes
    assert first.stream == second.stream != 0
    names = [name for name, _ in calls]
    begin = names.index("record")  # after both lanes were made ready
    query = [
        *("record", "to_device", "record", "hold", "record"),  # copy in; the compute waits for it
        *("record", "hold", "record", "to_host", "record"),  # computed; the copy out waits for it
    ]
    assert names[begin : begin + 20] == query * 2
    copies = {arguments[-1] for name, arguments in calls if name in ("to_device", "to_host")} - {execute}
    assert len(copies) == 4  # two streams a lane, and none of them computes
    assert execute in {arguments[0] for name, arguments in calls if name == "hold"}


@pytest.mark.parametrize("version", ["8.6.1", "10.16.1.11"])
@pytest.mark.parametrize("sized_by_data", [False, True])
def test_many_requests_overlap_and_keep_their_order(bundle, version, sized_by_data):
    rig = bundle.rig(version, sized_by_data=sized_by_data)
    rng = np.random.default_rng(0)
    rows = (2, 2, 3, 20, 20, 32, 1)  # both profiles, in both contexts of each
    requests = [rng.normal(0, 1, (count, 8)).astype(np.float32) for count in rows]
    calls = []
    for name in ("hold", "to_device", "to_host"):
        watch(rig.cuda, name, calls)

    with EngineSession.open(bundle.path) as session:
        found = [outputs["y"] for outputs in session.run_each({"x": x} for x in requests)]
        assert len({arguments[-1] for name, arguments in calls if name == "to_device"}) == 4  # one for each context
        left = session.run_each([{"x": X}, {"x": X}, {"x": X}])
        next(left)  # and nobody reads the rest

    for x, y in zip(requests, found, strict=True):
        assert np.array_equal(y, x[x[:, 0] > 0] if sized_by_data else 2 * x)
    assert sum(name == "hold" for name, _ in calls) == 2 * (len(rows) + 2)
    assert ends_clean(rig)


@pytest.mark.parametrize("sized_by_data", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_streams_that_go_on_at_their_own_pace_mix_no_requests(bundle, seed, sized_by_data):
    rig = bundle.rig("8.6.1", sized_by_data=sized_by_data)
    rig.cuda.chance = random.Random(seed)  # noqa: S311 - no secret
    rng = np.random.default_rng(seed)
    requests = [rng.normal(0, 1, (rows, 8)).astype(np.float32) for rows in rng.integers(1, 33, 8)]

    with EngineSession.open(bundle.path) as session:
        abandoned = session.run_each({"x": x} for x in requests)
        next(abandoned)
        del abandoned
        one, other = (session.run_each([{"x": sign * x} for x in requests]) for sign in (1, -1))  # by turns
        found = [(first["y"], second["y"]) for first, second in zip(one, other, strict=True)]

    for x, ys in zip(requests, found, strict=True):
        for sign, y in zip((1, -1), ys, strict=True):
            assert np.array_equal(y, sign * x[sign * x[:, 0] > 0] if sized_by_data else 2 * sign * x)
    assert ends_clean(rig)


@pytest.mark.parametrize("with_graph", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_measuring_leaves_the_outputs_of_the_inputs(bundle, seed, with_graph):
    rig = bundle.rig("8.6.1")
    rig.cuda.chance = random.Random(seed)  # noqa: S311 - no secret

    with EngineSession.open(bundle.path) as session:
        switches = replace(QUICK, cuda_graph=with_graph)
        lanes = lanes_of(session, session.profiles[0], 0, switches)
        for x in (X, X[:1] + 1):
            measure([lanes], session.cuda, {"x": x}, switches)
            assert all(np.array_equal(lane.outputs()["y"], 2 * x) for lane in lanes)

    assert ends_clean(rig)


def test_requests_before_one_that_does_not_fit_are_answered(bundle):
    rig = bundle.rig("8.6.1")

    with EngineSession.open(bundle.path) as session:
        found = session.run_each({"x": x} for x in (X, X + 1, np.ones((33, 8)), X))
        assert np.array_equal(next(found)["y"], 2 * X)
        assert np.array_equal(next(found)["y"], 2 * X + 2)
        with pytest.raises(GraphError, match="no profile"):
            next(found)

    assert ends_clean(rig)


@pytest.mark.parametrize("events", range(3))
def test_copy_streams_are_given_back_where_an_event_is_missing(bundle, events):
    rig = bundle.rig("8.6.1")
    make, made = rig.cuda.event, []

    def event(*, spin):
        if len(made) == events:
            raise CapabilityError("no event", next_step="trtforge doctor")
        made.append(make(spin=spin))
        return made[-1]

    rig.cuda.event = event
    with pytest.raises(CapabilityError, match="no event"), EngineSession.open(bundle.path) as session:
        list(session.run_each([{"x": X}]))

    assert ends_clean(rig)


def test_a_shape_that_is_refused_is_no_lack_of_memory_that_was_told_before(bundle):
    rig = bundle.rig("8.6.1")

    with EngineSession.open(bundle.path) as session:
        session.run({"x": X})
        rig.refuses = "Cuda Runtime (out of memory)"
        with pytest.raises(CapabilityError, match="GPU memory"):
            session.run({"x": X})
        rig.takes_shapes = False
        with pytest.raises(CapabilityError, match=r"TensorRT does not take \[1, 8\] for input 'x'$") as caught:
            session.run({"x": X[:1]})

    assert caught.value.problems[0].detail == ("ERROR: the shape is unwell",)


def watch(cuda, name, calls):
    method = getattr(cuda, name)
    setattr(cuda, name, lambda *arguments: (calls.append((name, arguments)), method(*arguments))[1])


@pytest.mark.parametrize(("one_at_a_time", "most"), [(True, 1), (False, 2)])
def test_as_many_queries_are_under_way_as_asked(bundle, one_at_a_time, most):
    rig = bundle.rig("8.6.1")
    under_way = [0]

    with EngineSession.open(bundle.path) as session:
        switches = replace(QUICK, one_at_a_time=one_at_a_time)
        lanes = lanes_of(session, session.profiles[0], 0, switches)
        for lane in lanes:
            count_starts(lane, under_way)
        rig.cuda.wait_for = lambda _event: under_way.append(under_way[-1] - 1)
        found = measure([lanes], session.cuda, {"x": X}, switches)

    assert max(under_way) == most + len(lanes)  # each ran once to make everything ready
    assert (found.response > found.enqueue).all()


def test_bench_measures_every_size_that_a_profile_allows(bundle):
    bundle.rig("8.6.1")
    told: list[Event] = []

    with EngineSession.open(bundle.path) as session:
        found = bench.bench(session, {"rows": [1, 4, 99]}, QUICK, "580", told.append)

    assert [(point.sizes, point.profile, point.opt) for point in found.points] == [
        ({"rows": 1}, "small", {"rows": 2}),
        ({"rows": 4}, "small", {"rows": 2}),
    ]
    assert [point.latency.percentiles[50.0] for point in found.points] == [3.0, 6.0]
    assert [event.text for event in told if event.kind == "warning"] == ["rows=99 lies in no profile, and is left out"]
    grid = bench.latency_grid(found)
    assert grid["symbols"] == ["rows"]
    assert grid["points"][1] == {"rows": 4, "ms": 6.0, "profile": "small", "opt": {"rows": 2}}


def test_bench_without_sizes_takes_the_opt_of_every_profile(bundle):
    bundle.rig("8.6.1")

    with EngineSession.open(bundle.path) as session:
        found = bench.bench(session, {}, QUICK, "580", lambda _event: None)

    assert [(point.sizes, point.profile) for point in found.points] == [({"rows": 2}, "small"), ({"rows": 16}, "large")]


@pytest.mark.parametrize(
    ("sizes", "text"), [({"row": [1]}, "'row' is no open axis"), ({"rows": [33]}, "none of the 1 combinations")]
)
def test_bench_of_sizes_that_are_none(bundle, sizes, text):
    bundle.rig("8.6.1")

    with EngineSession.open(bundle.path) as session, pytest.raises(CommandLineError, match=text):
        bench.bench(session, sizes, QUICK, "580", lambda _event: None)


def test_free_memory_is_what_was_not_taken(bundle):
    rig = bundle.rig("8.6.1")

    with EngineSession.open(bundle.path) as session:
        session.run({"x": X})
        assert session.run_bytes == 4 * X.nbytes == TOTAL - rig.cuda.memory()[0]


def test_the_command_measures_writes_and_judges(bundle):
    bundle.rig("8.6.1")
    grid, text = bundle.folder / "grid.json", bundle.folder / "trtforge.prom"
    words = [*bench_words(bundle), "--json", "--streams", "64"]
    words += ["--shapes", "rows=2,8", "--grid", str(grid), "--prometheus", str(text), "--p99-ms", "5"]

    result = CliRunner().invoke(app, words)

    assert result.exit_code == 9, result.output
    shown = json.loads(result.stdout)
    assert [point["latency"]["percentiles"]["50.0"] for point in shown["figures"]["points"]] == [4.0, 10.0]
    assert [problem["summary"] for problem in shown["problems"]] == [
        "net-h200 at rows=8: p99 latency is 10.000 ms, and p99_ms allows 5"
    ]
    assert [point["ms"] for point in json.loads(grid.read_text())["points"]] == [4.0, 10.0]
    assert (
        'sizes="rows=8",cuda_graph="false",transfers="true",one_at_a_time="false",streams="64"} 0.01'
        in text.read_text()
    )


def test_figures_are_shown_where_a_file_cannot_be_written(bundle):
    bundle.rig("8.6.1")

    result = CliRunner().invoke(app, [*bench_words(bundle), "--json", "--grid", str(bundle.path / "grid.json")])

    shown = json.loads(result.stdout)
    assert (result.exit_code, shown["exit_code"], len(shown["figures"]["points"])) == (8, 8, 2)


@pytest.mark.parametrize(
    ("words", "summaries"),
    [
        (["--spec", __file__], ["found --spec without --peer-python"]),
        (["--peer-python", "python"], ["found --peer-python without --spec"]),
        (["--peer", "eager-fp32"], ["found --peer without --peer-python"]),
        (["--max-regression", "0.1"], ["found --max-regression without --against"]),
        (
            ["--limit-ms", "9", "--window-ms", "1", "--p99-ms", "nan", "--duration", "inf"],
            [
                "found --limit-ms without --replay",
                "found --window-ms without --replay",
                "--p99-ms: found nan",
                "--duration: found inf",
            ],
        ),
        (
            ["--peer-python", "python", "--spec", __file__, "--streams", "2"],
            ["--peer-python measures one stream, found --streams 2"],
        ),
        (
            ["--replay", __file__, "--streams", "2", "--no-transfers"],
            [
                "--replay serves one batch at a time, with its copies; found --streams",
                "--replay serves one batch at a time, with its copies; found --no-transfers",
            ],
        ),
    ],
)
def test_options_that_would_do_nothing_are_refused(bundle, words, summaries):
    rig = bundle.rig("8.6.1")

    result = CliRunner().invoke(app, ["bench", str(bundle.path), *words])

    assert [problem.summary for problem in result.exception.problems] == summaries
    assert {problem.exit_code for problem in result.exception.problems} == {64}
    assert not rig.trace


def test_a_graph_of_an_output_that_is_sized_by_data(bundle):
    rig = bundle.rig("8.6.1", sized_by_data=True)

    result = CliRunner().invoke(app, [*bench_words(bundle), "--cuda-graph"])

    (problem,) = result.exception.problems
    assert (problem.exit_code, problem.next_step) == (6, "run without CUDA graph")
    assert ends_clean(rig)


def test_a_cuda_library_that_is_none():
    with pytest.raises(CapabilityError, match="found CUDA library 'cupy'") as caught:
        open_cuda("cupy")

    assert caught.value.problems[0].next_step == "name one of: cuda-python, pycuda"


PYCUDA = """
import atexit, os

stack = []

@atexit.register  # it ends the process later than whatever registers after its import
def end():
    if stack:
        os.abort()

class Error(Exception): pass

class Context:
    def push(self): stack.append(self)
    def pop(self): stack.pop()

class Device:
    def __init__(self, index): pass
    def retain_primary_context(self): return Context()

def init(): pass
"""


@pytest.mark.parametrize(
    ("program", "ending"),
    [
        ("import pycuda.driver; pycuda.driver.Device(0).retain_primary_context().push()", -signal.SIGABRT),
        ("open_cuda('pycuda')", 0),
        ("one, two = open_cuda('pycuda'), open_cuda('pycuda'); one.close()", 0),
        ("one, two = open_cuda('pycuda'), open_cuda('pycuda'); one.close(); two.close()", 0),
        ("one = open_cuda('pycuda'); raise SystemExit(3)", 3),
    ],
)
def test_a_process_that_closes_nothing_ends_well_with_pycuda(tmp_path, program, ending):
    (tmp_path / "pycuda").mkdir()
    (tmp_path / "pycuda" / "__init__.py").touch()
    (tmp_path / "pycuda" / "driver.py").write_text(PYCUDA)
    (tmp_path / "pycuda-2025.1.dist-info").mkdir()
    (tmp_path / "pycuda-2025.1.dist-info" / "METADATA").write_text("Name: pycuda\nVersion: 2025.1\n")
    folders = [str(tmp_path), str(Path(trtforge.__file__).parents[1])]

    done = subprocess.run(
        [sys.executable, "-c", f"from trtforge.cuda import open_cuda; {program}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        check=False,
    )

    assert done.returncode == ending
    assert not done.stderr or ending < 0


def test_the_other_engine_may_have_another_name_and_must_take_the_same_sizes(bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "_ROUND_SECONDS", 0.0)
    (tmp_path / "old").mkdir()
    old = Bundle(tmp_path / "old", monkeypatch)
    narrow = ProfileRecord(name="small", shapes={"x": SMALL}, values={})
    old.rig("8.6.1", identifier="net-fp32-h200", profiles=(narrow,))
    bundle.rig("8.6.1", precision="fp16")
    words = [*bench_words(bundle), "--engine", "net-h200", "--against", str(old.path)]

    result = CliRunner().invoke(app, [*words, "--shapes", "rows=4"])
    outside = CliRunner().invoke(app, [*words, "--shapes", "rows=4,8"])

    assert "+0.0% (+0.0% to +0.0%) against net-fp32-h200 at rows=4" in result.output
    assert "fp16 does not pay on NVIDIA H200 at rows=4" in result.output
    (problem,) = outside.exception.problems
    assert problem.summary == "--against: net-fp32-h200 has no profile for rows=8"


def test_two_engines_are_measured_by_turns_and_must_have_the_same_inputs(bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "_ROUND_SECONDS", 0.0)
    bundle.rig("8.6.1")
    with EngineSession.open(bundle.path) as one, EngineSession.open(bundle.path) as two:
        found = bench.bench(one, {"rows": [4]}, QUICK, "580", lambda _event: None, other=two)
        assert [(slow.ratio, slow.low, slow.high) for slow in found.slowdowns] == [(0.0, 0.0, 0.0)]

        named = TensorRecord(name="x", dtype="float32", shape=("batch", 8), ranges={}, data_dependent=False)
        two.artifact = replace(two.artifact, inputs=(named,))
        with pytest.raises(CommandLineError, match="--against: net-h200 has other inputs than net-h200"):
            bench.bench(one, {"rows": [4]}, QUICK, "580", lambda _event: None, other=two)


def test_an_open_axis_without_a_name(bundle):
    unnamed = TensorRecord(name="x", dtype="float32", shape=(None, 8), ranges={}, data_dependent=False)
    bundle.rig("8.6.1", inputs=(unnamed,))

    with EngineSession.open(bundle.path) as session:
        found = bench.bench(session, {"x[0]": [3]}, QUICK, "580", lambda _event: None)

    assert bench.latency_grid(found)["points"] == [{"x[0]": 3, "ms": 5.0, "profile": "small", "opt": {"x[0]": 2}}]


def test_options_of_verify_that_need_a_spec_are_refused_without(bundle):
    bundle.rig("8.6.1")

    result = CliRunner().invoke(app, ["verify", str(bundle.path), "--engine", "net-h200", "--allow-host-code"])

    assert [problem.summary for problem in result.exception.problems] == [
        "found --engine without --spec",
        "found --allow-host-code without --spec",
    ]
