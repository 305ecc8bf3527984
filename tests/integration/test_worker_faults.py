"""What happens to a build whose process dies, hangs, or cannot load the library. Each build is real and takes seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import onnx.parser
import pytest

from trtforge.backends import tensorrt_rtx
from trtforge.errors import BuildError, CapabilityError
from trtforge.graph.ingest import ingest
from trtforge.types import BuildUnit, Profile, ShapeRange

SETTINGS = {"optimization_level": 3, "profiling_verbosity": "layer_names_only"}


def child():
    """Process id of the worker: there is one at a time."""
    (pid,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return int(pid)


@pytest.fixture(scope="module")
def slow_graph(model_path, tmp_path_factory):
    return ingest(model_path("ocr_det"), tmp_path_factory.mktemp("ingested"))


@pytest.fixture
def build(slow_graph, tmp_path):
    unit = BuildUnit(
        identifier="det-fp32-sm86",
        backend="tensorrt_rtx",
        backend_version=version("tensorrt_rtx"),
        gpu="sm86",
        compute_capability="sm86",
        precision="fp32",
        tf32=False,
        settings=SETTINGS,
        graph_digest=slow_graph.digest,
        profiles=(Profile("p", {"x": ShapeRange((1, 3, 32, 32), (1, 3, 736, 736), (1, 3, 960, 960))}),),
    )
    pids = []

    def build(on_event, timeout=120):
        def noting(event):
            pids.append(child())
            on_event(event)

        return tensorrt_rtx.build(unit, slow_graph, tmp_path, noting, timeout)

    yield build
    assert {path.name for path in tmp_path.iterdir()} <= {"failure"}
    assert Path(f"/proc/self/task/{os.getpid()}/children").read_text() == ""
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def at_first_phase(action):
    done = []

    def on_event(event):
        if not done and event.kind == "phase":
            done.append(event)
            action()

    return on_event


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, r"was killed \(SIGKILL\); most often the system ran out of memory; it was at '.+'"),
        (signal.SIGSEGV, r"crashed \(SIGSEGV\); it was at '.+'"),
        (signal.SIGABRT, r"crashed \(SIGABRT\); it was at '.+'"),
    ],
)
def test_death_by_signal_is_named(build, number, words):
    with pytest.raises(BuildError, match="^det-fp32-sm86: the build process " + words) as caught:
        build(at_first_phase(lambda: os.kill(child(), number)))
    assert caught.value.problems[0].next_step


def test_timeout_ends_the_build(build):
    events = []
    with pytest.raises(BuildError, match=r"no engine after 1 s, the limit; it was at '(?!loading).+'"):
        build(events.append, timeout=1)
    assert events


def test_stopped_process_does_not_outlive_the_limit(build):
    with pytest.raises(BuildError, match="no engine after 1 s"):
        build(at_first_phase(lambda: os.kill(child(), signal.SIGSTOP)), timeout=1)


def test_interrupt_takes_the_worker_along(build):
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(at_first_phase(interrupt))


def pipes(pid):
    """Number and target of each open pipe of a process, standard streams left out."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if int(link.name) > 2 and str(link.readlink()).startswith("pipe:"):
                yield link, link.readlink()


def write_to_channel(data):
    """Writes into the channel that the worker's lines come through, as a stray native write would."""
    own = {target for _, target in pipes("self")}
    (channel,) = (link for link, target in pipes(child()) if target in own)
    with channel.open("wb", buffering=0) as file:
        assert file.write(data) == len(data)


@pytest.mark.parametrize("garbage", [b"\x7fELF\xff\n", b"[1, 2]\n", b'{"kind": 7, "fraction": "x"}\n', b"null\n"])
def test_garbage_in_the_channel(build, garbage):
    with pytest.raises(BuildError, match="sent something that is none of its lines"):
        build(at_first_phase(lambda: write_to_channel(garbage)))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ModuleNotFoundError(\"No module named 'tensorrt_rtx'\")", "No module named 'tensorrt_rtx'"),
        ("raise ImportError('libtensorrt_rtx.so.1: cannot open shared object file')", "cannot open shared object file"),
    ],
)
def test_library_that_cannot_be_loaded(build, tmp_path_factory, monkeypatch, source, reason):
    hidden = tmp_path_factory.mktemp("hidden")
    (hidden / "tensorrt_rtx.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(hidden))
    with pytest.raises(CapabilityError, match=f"tensorrt_rtx .* cannot be loaded in .*: .*{reason}") as caught:
        build(print)
    assert caught.value.problems[0].next_step.startswith("pip install tensorrt_rtx==")


def test_library_that_ends_the_process(build, tmp_path_factory, monkeypatch):
    hidden = tmp_path_factory.mktemp("hidden")
    (hidden / "tensorrt_rtx.py").write_text("import os\nprint('last words', flush=True)\nos._exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(hidden))
    with pytest.raises(BuildError, match="ended with status 3 and without an answer") as caught:
        build(print)
    assert caught.value.problems[0].detail == ("last words",)


def test_parent_that_is_killed_takes_the_worker_along(slow_graph, tmp_path):
    ready_read, ready_write = os.pipe()
    parent = os.fork()
    if not parent:
        with suppress(BaseException):
            tensorrt_rtx.build(
                BuildUnit(
                    *("det-fp32-sm86", "tensorrt_rtx", version("tensorrt_rtx"), "sm86", "sm86", "fp32"),
                    tf32=False,
                    settings=SETTINGS,
                    graph_digest=slow_graph.digest,
                    profiles=(Profile("p", {"x": ShapeRange((1, 3, 32, 32), (1, 3, 736, 736), (1, 3, 960, 960))}),),
                ),
                slow_graph,
                tmp_path,
                at_first_phase(lambda: os.write(ready_write, f"{child()}\n".encode())),
                None,
            )
        os._exit(0)
    worker = int(os.read(ready_read, 100))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    os.close(ready_read)
    os.close(ready_write)
    for _ in range(200):
        if not running(worker):
            return
        signal.sigtimedwait([], 0.05)
    pytest.fail("the worker runs on without its parent")


def running(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_failed_build_leaves_a_log_and_a_script_that_fails_the_same_way(tmp_path):
    model = tmp_path / "m.onnx"
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) <float s = {0.5}, int8 z = {3}> '
    text += "{ [q] q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z) }"
    model.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    graph = ingest(model, tmp_path)
    unit = BuildUnit(
        "m-int8-sm86", "tensorrt_rtx", version("tensorrt_rtx"), "sm86", "sm86", "int8", False, SETTINGS, "", ()
    )
    with pytest.raises(BuildError, match="zero point other than 0"):
        tensorrt_rtx.build(unit, graph, tmp_path, print, 60)
    folder = tmp_path / "failure"
    assert "Non-zero zero point" in (folder / "builder.log").read_text()
    again = subprocess.run([folder / "reproduce.sh"], capture_output=True, text=True, timeout=60, check=False)
    answer = json.loads(again.stdout.splitlines()[-1])
    assert answer["kind"] == "no_engine"
    assert "Non-zero zero point" in str(answer["lines"])
