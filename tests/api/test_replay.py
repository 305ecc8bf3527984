"""A log served in real time by an engine that is none, whose GPU takes a known time for each row."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from test_runtime_calls import Bundle, ends_clean
from typer.testing import CliRunner

from trtforge import replay
from trtforge.cli.app import app
from trtforge.errors import CommandLineError
from trtforge.runtime.measure import Switches
from trtforge.runtime.queue import Batcher
from trtforge.runtime.serve import Server, serve
from trtforge.runtime.session import EngineSession


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    return Bundle(tmp_path, monkeypatch)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(replay, "_SECONDS_A_SIZE", 0.0)
    monkeypatch.setattr(replay, "_CONFIRM_SECONDS", 0.2)


def log_of(bundle, seconds, rows=1):
    log = bundle.folder / "log.jsonl"
    log.write_text("".join(json.dumps({"rows": rows, "timestamp": float(at)}) + "\n" for at in seconds))
    return log


def takes(rig, ms):
    """Makes the GPU take this long for a batch, as the wall clock and its own see it."""
    rig.cuda.wait_for = lambda _event: time.sleep(ms / 1000)
    rig.cuda.elapsed_ms = lambda _start, _end: ms


def serve_log(session, log, **changes):
    options = {"window_ms": 5.0, "max_batch": 4, "seconds": 30.0, "limit_ms": None, **changes}
    switches = options.pop("switches", Switches())
    return replay.serve_log(session, log, switches, lambda _event: None, **options)


@pytest.mark.parametrize("with_graph", [False, True])
def test_a_log_is_served_by_the_wall_clock(bundle, with_graph):
    rig = bundle.rig("8.6.1")
    takes(rig, 20.0)

    with EngineSession.open(bundle.path) as session:
        log = log_of(bundle, (0.0, 0.001, 0.002, 0.1))
        found = serve_log(session, log, switches=Switches(cuda_graph=with_graph))

    # Three requests wait until 5 ms and take 20: 25, 24 and 23 ms. The last one waits 5 and takes 20.
    for play in (found.measured, found.simulated):
        assert play.latency_ms[50.0] == pytest.approx(24.5, abs=8)
        assert play.latency_ms[50.0] >= 24.5
        assert play.mean_batch == 2.0
    assert (found.requests, found.num_sizes, found.has_own_contexts) == (4, 3, True)
    assert found.gpu_busy == pytest.approx(40 / 125, abs=0.1)
    assert found.limit is None
    assert ends_clean(rig)


def test_nothing_is_made_or_changed_while_requests_are_served(bundle):
    rig = bundle.rig("10.16.1.11")
    cells = {(rows,): {"rows": rows} for rows in (1, 2, 4, 8)}

    with EngineSession.open(bundle.path) as session:
        server = Server(session, cells, with_graph=True, spin=False)
        for cell in cells:
            server.run(cell)
        del rig.trace[:]
        for cell in (*cells, *reversed(cells)):
            server.run(cell)
        assert set(rig.trace) == {"cuda.launch"}
        server.close()

    assert ends_clean(rig)


def test_one_context_serves_all_sizes_of_a_profile_where_memory_is_short(bundle):
    rig = bundle.rig("8.6.1")

    with EngineSession.open(bundle.path) as session:
        session.engine.__dict__["device_memory_size"] = 200 << 20  # of 1 GiB; four contexts are more than half
        server = Server(session, {(rows,): {"rows": rows} for rows in (1, 2, 4, 8)}, with_graph=False, spin=False)
        assert not server.has_own_contexts
        assert sum("create_execution_context" in line for line in rig.trace) == 2  # small and large
        server.close()


def test_forming_and_serving_a_batch_costs_the_host_little():
    # 2000 requests of 1 kHz in batches of 1, by an engine that takes no time.
    found = serve(Batcher(np.arange(2000) / 1000, np.ones(2000, int), window_ms=0.0, max_batch=1), lambda *_: 0.0)

    assert found.replay.batch_sizes[0] == 1
    assert len(found.replay.latency_ms) == 2000
    assert (found.replay.latency_ms > 0).all()
    assert found.host_ms == pytest.approx(np.mean(found.replay.latency_ms), abs=0.2)


def test_what_the_gpu_did_not_do_is_host_work():
    # Each takes 2 ms longer than the 1 ms that the GPU tells: the rest is this process's.
    def run(_first, _end):
        time.sleep(0.003)
        return 1.0

    found = serve(Batcher(np.arange(20) / 100, np.ones(20, int), window_ms=0.0, max_batch=1), run)

    assert found.host_ms == pytest.approx(2.1, abs=0.8)
    assert found.gpu_busy == pytest.approx(20 * 1 / 193, abs=0.03)
    assert found.replay.busy == pytest.approx(20 * 3 / 193, abs=0.08)


def test_a_long_log_is_cut_and_says_so(bundle):
    bundle.rig("8.6.1")

    with EngineSession.open(bundle.path) as session:
        found = serve_log(session, log_of(bundle, np.arange(100) / 50), seconds=0.2)

    assert found.requests == 11
    assert found.log_qps == pytest.approx(50)
    assert found.remarks[0].startswith("the log lasts 2.0 s; served were 11 of 100 requests, those of its first 0.2 s")


def test_the_simulation_proposes_a_rate_and_real_runs_confirm_it(bundle, monkeypatch):
    rig = bundle.rig("8.6.1")
    takes(rig, 10.0)
    monkeypatch.setattr(replay, "_CONFIRM_SECONDS", 1.0)

    with EngineSession.open(bundle.path) as session:
        found = serve_log(session, log_of(bundle, np.arange(20) / 40), window_ms=0.0, max_batch=1, limit_ms=30.0)

    # 10 ms each, one at a time: no more than 100 a second, and a little less by this process.
    assert found.limit.simulated_qps == pytest.approx(100, rel=0.06)
    assert 50 < found.limit.qps < 110


def test_requests_faster_than_the_engine_are_remarked(bundle):
    rig = bundle.rig("8.6.1")
    takes(rig, 10.0)

    with EngineSession.open(bundle.path) as session:
        found = serve_log(session, log_of(bundle, np.arange(20) / 1000), window_ms=0.0, max_batch=1)

    assert any(text.startswith("requests come faster than they are served") for text in found.remarks)
    assert found.measured.latency_ms[99.0] > 150


@pytest.mark.parametrize(
    ("rows", "limit_ms", "text"),
    [(40, None, "some batches of the log lie in no profile"), (1, 5.0, "come at one time, which has no rate")],
)
def test_logs_that_cannot_be_served(bundle, rows, limit_ms, text):
    bundle.rig("8.6.1")

    with EngineSession.open(bundle.path) as session, pytest.raises(CommandLineError, match=text):
        serve_log(session, log_of(bundle, [0.0, 0.0], rows), limit_ms=limit_ms)


def test_the_command_prints_and_writes_the_replay(bundle):
    bundle.rig("8.6.1")
    text = bundle.folder / "trtforge.prom"
    words = ["bench", str(bundle.path), "--warm-up", "0", "--duration", "0", "--iterations", "4", "--one-at-a-time"]
    words += ["--replay", str(log_of(bundle, np.arange(10) / 200)), "--prometheus", str(text)]

    result = CliRunner().invoke(app, words)

    assert result.exit_code == 0, result.output
    assert "one query at a time" in result.output
    assert "the log: 10 requests in 0.0 s, 200.0 a second" in result.output
    assert "trtforge_replay_latency_p99_seconds{" in text.read_text()
    shown = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert shown["figures"]["switches"]["one_at_a_time"] is True
    assert shown["figures"]["points"][0]["response"]["percentiles"]["50.0"] > 0
    assert shown["replay"]["requests"] == 10
