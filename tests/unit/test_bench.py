"""Figures of a bench: gates, the grid for profiles, and Prometheus' text. Running engines is in tests/api and tests/gpu."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from trtforge.bench import Figures, Gates, OtherEngine, PointFigures, gauges, latency_grid, missed, parse_sizes
from trtforge.errors import CommandLineError, exit_code_of
from trtforge.prometheus import prometheus_text
from trtforge.runtime.measure import Spread, Switches
from trtforge.runtime.regression import Slowdown


def times(p50: float, p99: float) -> Spread:
    return Spread(p50, p50, p99, {50.0: p50, 90.0: p50, 95.0: p99, 99.0: p99}, 0.0)


def figures(*slowdowns: Slowdown, gpu: str = "NVIDIA H200", precision: str = "fp16", other: str = "fp16"):
    points = tuple(
        PointFigures(
            sizes=size,
            profile="main",
            opt={"n": 4},
            latency=times(1.0 * count, 2.0 * count),
            compute=times(0.5 * count, 0.75 * count),
            copy_in=times(0.1, 0.1),
            copy_out=times(0.1, 0.1),
            enqueue=times(0.1, 0.1),
            response=times(1.5 * count, 2.5 * count),
            throughput_qps=1000.0 / count,
            num_queries=100,
            context_bytes=1,
            remarks=(),
        )
        for count, size in enumerate(({"n": 1}, {"n": 8}), start=1)
    )
    return Figures(
        identifier="net-h200",
        precision=precision,
        gpu=gpu,
        driver="580",
        tensorrt="tensorrt 8.6.1",
        cuda="fake",
        switches=Switches(),
        engine_bytes=1,
        points=points,
        other=OtherEngine("old-h200", other) if slowdowns else None,
        slowdowns=slowdowns,
        warnings=(),
    )


@pytest.mark.parametrize(
    ("gates", "found", "code"),
    [
        (Gates(), [], None),
        (Gates(p99_ms=4.0, throughput_qps=500.0), [], None),  # what is allowed is held
        (Gates(p99_ms=3.9), ["net-h200 at n=8: p99 latency is 4.000 ms, and p99_ms allows 3.9"], 9),
        (Gates(throughput_qps=501), ["net-h200 at n=8: 500.0 queries a second, and throughput_qps asks for 501"], 9),
        (Gates(p99_ms=1.0, throughput_qps=2000.0), [None] * 4, 9),
    ],
)
def test_gates(gates, found, code):
    problems = missed(figures(), gates)

    assert len(problems) == len(found)
    assert all(text in (None, problem.summary) for problem, text in zip(problems, found, strict=True))
    assert not problems or exit_code_of(problems) == code


def test_figures_that_are_no_numbers_miss_every_gate():
    unknown = Slowdown(math.nan, math.nan, math.nan)
    measured = figures(unknown, unknown)
    points = [replace(one, latency=times(1.0, math.nan), throughput_qps=math.nan) for one in measured.points]

    found = missed(replace(measured, points=tuple(points)), Gates(p99_ms=1e9, throughput_qps=0.0, max_regression=1e9))
    assert len(found) == 3 * len(points)


def test_a_slower_engine_fails_by_what_is_sure():
    by_chance, surely = Slowdown(0.03, 0.01, 0.05), Slowdown(0.05, 0.04, 0.06)
    problems = missed(figures(by_chance, surely), Gates(max_regression=0.02))

    (problem,) = problems
    assert problem.summary.startswith("net-h200 at n=8 is 5.0% slower than old-h200 (at least 4.0%)")
    assert exit_code_of(problems) == 14
    assert missed(figures(by_chance, surely), Gates(max_regression=0.04)) == ()


@pytest.mark.parametrize(
    ("precision", "other", "step"),
    [
        ("fp16", "fp16", "trtforge build SPEC --store NEW "),
        ("fp16", "fp32", "trtforge plan SPEC --decisions  # shows what did not become fp16; or release old-h200"),
        ("fp8", "bf16", "trtforge plan SPEC --decisions  # shows what did not become fp8"),
        ("fp32", "fp16", "name a bundle in fp32 with --against: old-h200 is in fp16"),
        ("mixed", "fp16", "name a bundle in mixed with --against"),  # as the model has them
    ],
)
def test_what_helps_a_slower_engine_depends_on_what_it_was_compared_with(precision, other, step):
    slower = Slowdown(0.05, 0.04, 0.06)
    one, two = missed(figures(slower, slower, precision=precision, other=other), Gates(max_regression=0.02))

    assert one.next_step == two.next_step
    assert one.next_step.startswith(step)


def test_the_grid_is_what_profile_selection_reads():
    grid = latency_grid(figures())

    assert grid["symbols"] == ["n"]
    assert grid["points"] == [
        {"n": 1, "ms": 1.0, "profile": "main", "opt": {"n": 4}},
        {"n": 8, "ms": 2.0, "profile": "main", "opt": {"n": 4}},
    ]
    assert grid["how"] == "median latency, without CUDA graph, with copies, 1 streams"


def test_prometheus_text():
    lines = prometheus_text(gauges(figures(gpu='a"b\\c\nd'))).splitlines()

    assert lines[0] == "# TYPE trtforge_latency_p50_seconds gauge"
    assert lines[1] == (
        'trtforge_latency_p50_seconds{engine="net-h200",gpu="a\\"b\\\\c\\nd",profile="main",sizes="n=1",'
        'cuda_graph="false",transfers="true",one_at_a_time="false",streams="1"} 0.001'
    )
    values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if 'sizes="n=8"' in line}
    assert values == {
        "trtforge_latency_p50_seconds": 0.002,
        "trtforge_latency_p99_seconds": 0.004,
        "trtforge_compute_p50_seconds": 0.001,
        "trtforge_compute_p99_seconds": 0.0015,
        "trtforge_response_p50_seconds": 0.003,
        "trtforge_response_p99_seconds": 0.005,
        "trtforge_throughput_queries_per_second": 500.0,
    }
    # Source: Prometheus, exposition formats: each line is a comment or name{labels} value.
    line = re.compile(r'[a-z_0-9]+\{[a-z_]+="(\\.|[^"\\\n])*"(,[a-z_]+="(\\.|[^"\\\n])*")*\} \S+')
    assert all(text.startswith("# TYPE ") or line.fullmatch(text) for text in lines)


def test_sizes_on_the_command_line():
    assert parse_sizes(["batch=1,8", "x.0=128"]) == {"batch": [1, 8], "x.0": [128]}
    assert parse_sizes(["a=b=2"]) == {"a=b": [2]}  # a symbol may be an expression
    assert parse_sizes(["batch=8,1", "batch=1,4"]) == {"batch": [8, 1, 4]}


@pytest.mark.parametrize(
    "word", ["batch", "=1", "batch=", "batch=1,", "batch=0", "batch=-1", "batch=1.5", "n=4294967296", "n=" + "9" * 5000]
)
def test_sizes_that_are_none(word):
    with pytest.raises(CommandLineError, match="--shapes: found"):
        parse_sizes([word])
