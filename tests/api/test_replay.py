"""A log served by an engine that is none, on a clock that passes only while somebody sleeps or the GPU works."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_runtime_calls import Bundle, bench_words, ends_clean
from typer.testing import CliRunner

from trtforge import replay
from trtforge.cli.app import app
from trtforge.errors import CommandLineError, SeveralErrors
from trtforge.runtime import queue, serve
from trtforge.runtime.measure import Switches
from trtforge.runtime.session import EngineSession


class Clock:
    """Takes the place of the module `time`. To look at it takes a microsecond."""

    def __init__(self, look_s=1e-6):
        self.now, self.look_s = 1e5 / 3, look_s

    def perf_counter(self):
        self.now += self.look_s
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (replay, serve):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(replay, "_SECONDS_A_SIZE", 0.0)
    monkeypatch.setattr(replay, "_CONFIRM_SECONDS", 1.0)
    return clock


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    return Bundle(tmp_path, monkeypatch)


def log_of(bundle, seconds, rows=1):
    log = bundle.folder / "log.jsonl"
    sizes = np.broadcast_to(rows, len(seconds))
    lines = [{"rows": int(size), "timestamp": float(at)} for size, at in zip(sizes, seconds, strict=True)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return log


def takes(rig, clock, ms):
    """Makes the GPU take this long for a batch, as the host's clock and its own see it."""
    rig.cuda.wait_for = lambda _event: clock.sleep(ms / 1000)
    rig.cuda.elapsed_ms = lambda _start, _end: ms


def serve_log(session, log, switches=None, **changes):
    options = {"window_ms": 5.0, "max_batch": 4, "seconds": 30.0, "limit_ms": None, **changes}
    requests = replay.read_requests(session, log, **options)
    return replay.serve_log(
        session, requests, switches or Switches(), lambda _event: None, limit_ms=options["limit_ms"]
    )


def served(clock, cost_ms, seconds, *, window_ms=0.0, max_batch=1):
    """By an engine of which the GPU tells 1 ms a batch."""

    def run(first, end):
        assert end > first
        clock.sleep(cost_ms / 1000)
        return 1.0

    batcher = queue.Batcher(np.asarray(seconds), np.ones(len(seconds), int), window_ms=window_ms, max_batch=max_batch)
    return batcher, serve.serve(batcher, run)


@pytest.mark.parametrize("with_graph", [False, True])
def test_a_log_is_served_as_it_arrived(bundle, clock, with_graph):
    rig = bundle.rig("8.6.1")
    takes(rig, clock, 20.0)

    with EngineSession.open(bundle.path) as session:
        log = log_of(bundle, (0.0, 0.001, 0.002, 0.1))
        found = serve_log(session, log, Switches(cuda_graph=with_graph))

    # Three requests wait until 5 ms and take 20: 25, 24 and 23 ms. The last one waits 5 and takes 20.
    for play in (found.measured, found.simulated):
        assert play.latency_ms[50.0] == pytest.approx(24.5, abs=0.02)
        assert play.mean_batch == 2.0
        assert play.busy == pytest.approx(40 / 125, abs=0.001)
    assert (found.requests, found.num_sizes, found.has_own_contexts, found.limit) == (4, 3, True, None)
    assert found.gpu_busy == pytest.approx(40 / 125, abs=0.001)
    assert (found.late_share, found.remarks) == (0.0, ())
    assert ends_clean(rig)


@settings(max_examples=30)  # each collects garbage, as a real run does
@given(st.lists(st.integers(0, 200), max_size=19), st.integers(0, 100), st.integers(1, 6))
def test_an_engine_is_served_by_the_rule_that_is_simulated(gaps, window, max_batch):
    # Requests come at tenths of a millisecond, and no batch begins near one unless it is full with it.
    cost_ms, window_ms = 3.0013, window / 10 + 0.037
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(look_s=1e-8)
        patch.setattr(serve, "time", clock)
        patch.setattr(serve, "_SPIN_S", 0.0)
        arrivals = np.cumsum([0, *gaps]) / 1e4
        batcher, found = served(clock, cost_ms, arrivals, window_ms=window_ms, max_batch=max_batch)

    expected = queue.replay(batcher, lambda *_: cost_ms)
    assert found.replay.batch_sizes == expected.batch_sizes
    assert found.replay.latency_ms == pytest.approx(expected.latency_ms, abs=0.001)
    assert found.replay.busy == pytest.approx(expected.busy, abs=0.001)
    assert (found.host_ms, found.late_share) == (pytest.approx(2.0013, abs=0.001), 0.0)


def test_a_batch_never_begins_before_its_request_arrives(clock):
    # The clock's numbers are rounded: seen from its begin, the moment that was waited for lies a little before the arrival.
    begin = clock.now
    arrival = next(x for x in np.arange(1, 99) / 100 if (begin + x - begin) * 1000 < x * 1000)
    clock.perf_counter = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", begin + arrival if seconds else clock.now)

    _, found = served(clock, 0.0, [0.0, arrival])

    assert found.replay.batch_sizes == (1, 1)


def test_what_the_gpu_did_not_do_is_host_work(clock):
    # Each takes 3 ms, of which the GPU tells 1.
    _, found = served(clock, 3.0, np.arange(20) / 100)

    assert found.host_ms == pytest.approx(2.0, abs=0.01)
    assert found.gpu_busy == pytest.approx(20 * 1 / 193, abs=0.001)
    assert found.replay.busy == pytest.approx(20 * 3 / 193, abs=0.001)


def test_batches_that_begin_late_are_counted_and_their_wait_is_in_the_latency(bundle, clock):
    sleep = clock.sleep
    rig = bundle.rig("8.6.1")
    takes(rig, clock, 1.0)
    clock.sleep = lambda seconds: sleep(seconds + (0.002 if seconds > 0.005 else 0))  # wakes 1.5 ms late

    with EngineSession.open(bundle.path) as session:
        found = serve_log(session, log_of(bundle, np.arange(10) / 100), window_ms=0.0)

    assert found.late_share == pytest.approx(0.9)
    assert found.host_ms == pytest.approx(0.9 * 1.5, abs=0.02)
    assert found.measured.latency_ms[50.0] == pytest.approx(2.5, abs=0.02)
    assert found.simulated.latency_ms[50.0] == pytest.approx(1.0, abs=0.02)
    assert found.remarks[0].startswith("this process began 90% of the batches more than 0.2 ms late")


def test_nothing_is_made_or_changed_while_requests_are_served(bundle):
    rig = bundle.rig("10.16.1.11")
    cells = {(rows,): {"rows": rows} for rows in (1, 2, 4, 8)}

    with EngineSession.open(bundle.path) as session:
        server = serve.Server(session, cells, with_graph=True, spin=False)
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
        server = serve.Server(session, {(rows,): {"rows": rows} for rows in (1, 2, 4, 8)}, with_graph=False, spin=False)
        assert not server.has_own_contexts
        assert sum("create_execution_context" in line for line in rig.trace) == 2  # small and large
        server.close()


def test_a_long_log_is_cut_and_requests_that_fit_no_profile_are_left_out(bundle, clock):
    bundle.rig("8.6.1")
    rows = np.where(np.arange(100) % 10 == 5, 40, 1)  # the profiles end at 32

    with EngineSession.open(bundle.path) as session:
        found = serve_log(session, log_of(bundle, np.arange(100) / 50, rows), seconds=0.2)

    assert found.requests == 10
    assert found.seconds == pytest.approx(0.2)
    assert found.log_qps == pytest.approx(45)
    assert found.remarks == (
        "10 of 100 requests of the log fit no profile, and were left out",
        "the log lasts 2.0 s; served were 10 of 90 requests, those of its first 0.2 s (--replay-seconds)",
    )


def test_the_simulation_proposes_a_rate_and_real_runs_confirm_it(bundle, clock):
    rig = bundle.rig("8.6.1")
    takes(rig, clock, 10.0)

    with EngineSession.open(bundle.path) as session:
        log = log_of(bundle, np.arange(20) / 40)
        found = serve_log(session, log, window_ms=0.0, max_batch=1, limit_ms=30.0).limit
        slow = serve_log(
            session, log_of(bundle, [0.0, 1000.0, 2000.0]), window_ms=0.0, seconds=1e4, limit_ms=30.0
        ).limit
        none = serve_log(session, log_of(bundle, np.arange(20) / 40), window_ms=0.5, limit_ms=9.0)

    # 10 ms each, one at a time: no more than 100 a second, within a second's queue of 20 ms.
    assert found.simulated_qps == pytest.approx(100, rel=0.03)
    assert 90 < found.qps < 104
    assert slow.simulated_qps > 150  # in batches of 4, though the log has 1 in 1000 s
    assert (none.limit.qps, none.limit.simulated_qps) == (0.0, 0.0)
    assert none.remarks == ("no rate holds a p99 of 9 ms, of which waiting for others may take 0.5 (--window-ms)",)


def test_a_limit_that_a_short_run_does_not_reach_is_no_rate_that_holds(bundle, clock):
    rig = bundle.rig("8.6.1")
    takes(rig, clock, 10.0)

    with EngineSession.open(bundle.path) as session:
        log = log_of(bundle, np.arange(20) / 40)
        found = serve_log(session, log, window_ms=0.0, max_batch=1, limit_ms=5000.0).limit

    # At 200 a second, the last of a second's requests would wait for 1 s only: within the limit, and more each second.
    assert found.simulated_qps == pytest.approx(100, rel=0.05)
    assert 90 < found.qps < 106


def test_requests_faster_than_the_engine_are_remarked(bundle, clock):
    rig = bundle.rig("8.6.1")
    takes(rig, clock, 10.0)

    with EngineSession.open(bundle.path) as session:
        found = serve_log(session, log_of(bundle, np.arange(20) / 1000), window_ms=0.0, max_batch=1)

    assert found.remarks == (
        "requests come faster than they are served, so that latencies grow with the length of the log",
    )
    # The first takes 10 ms, the last one waits for 19 others from 19 ms on.
    assert found.measured.latency_ms[99.0] == pytest.approx(10 + 19 * 9 * 0.99, abs=0.1)


@pytest.mark.parametrize(
    ("seconds", "rows", "changes", "text", "step"),
    [
        ([0.0, 0.0], 40, {}, "no profile of net-h200 takes any of the 2 requests of", "trtforge profile"),
        ([0.0, 0.0], 1, {"limit_ms": 5.0}, "comes at one time, which has no rate", "leave --limit-ms out"),
        ([7.0], 1, {"limit_ms": 5.0}, "comes at one time, which has no rate", "leave --limit-ms out"),
        (
            [0.0, 1.0],
            1,
            {"max_batch": 33},
            "found 33, and the profiles of net-h200 end at a batch of 32",
            "--max-batch 32",
        ),
    ],
)
def test_logs_that_cannot_be_served(bundle, seconds, rows, changes, text, step):
    bundle.rig("8.6.1")

    with EngineSession.open(bundle.path) as session, pytest.raises(CommandLineError, match=text) as caught:
        serve_log(session, log_of(bundle, seconds, rows), **changes)

    assert caught.value.problems[0].next_step.startswith(step)


def test_a_log_that_is_not_in_order(bundle):
    bundle.rig("8.6.1")

    with EngineSession.open(bundle.path) as session, pytest.raises(SeveralErrors) as caught:
        serve_log(session, log_of(bundle, [1.0, 0.5]))

    assert caught.value.problems[0].summary.startswith("its timestamp is 0.5 s before that of the row above it")


@pytest.mark.parametrize(("window_ms", "seconds"), [(0.0, [5.0]), (0.0, [5.0] * 6), (3.0, [5.0] * 6)])
def test_a_log_of_one_request_and_of_equal_times(bundle, clock, window_ms, seconds):
    rig = bundle.rig("8.6.1")
    takes(rig, clock, 10.0)

    with EngineSession.open(bundle.path) as session:
        found = serve_log(session, log_of(bundle, seconds), window_ms=window_ms)

    # Batches of 4 and 2, the first full at once, the second after the first. A lone request without a window waits for none.
    first, last = (10.0, 20.0) if len(seconds) == 6 else (10.0, 10.0)
    assert found.measured.latency_ms[50.0] == pytest.approx(first, abs=0.02)
    assert found.measured.latency_ms[99.0] == pytest.approx(last, abs=0.02)
    assert (found.seconds, found.log_qps) == (0.0, 0.0)


def test_the_command_prints_and_writes_the_replay(bundle, monkeypatch):
    monkeypatch.setattr(replay, "_SECONDS_A_SIZE", 0.0)
    bundle.rig("8.6.1")
    text = bundle.folder / "trtforge.prom"
    words = [*bench_words(bundle), "--one-at-a-time"]
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
