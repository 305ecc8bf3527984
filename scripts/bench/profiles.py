"""Profiles from traffic: time and memory on 10 million rows, gain over one profile, and distance to brute force.

    python scripts/bench/profiles.py rows [--distinct]        # JSONL, CSV and parquet, each in a process of its own
    python scripts/bench/profiles.py gain [LATENCIES.json]    # three traces; batch and seq ones from measured latencies
    python scripts/bench/profiles.py brute                    # small instances against every set of boxes

Targets: 10 million rows in 60 s and 500 MiB on 2 cores; 15 % under one min/opt/max profile over the same range; within
2 % of brute force.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from programs import print_table
from traces import TRACES, chat

from trtforge.traffic.batching import formed_batches
from trtforge.traffic.choose import Box, Option, Wishes, choose, fewest
from trtforge.traffic.cost import Cost, Counted, fit_work, measured, modelled, read_latencies
from trtforge.traffic.coverage import assignment, volumes
from trtforge.traffic.histogram import Floats, Ints, Traffic, distinct
from trtforge.traffic.layout import Layout, layout_of
from trtforge.traffic.read import read_traffic
from trtforge.types import TensorSpec

NUM_ROWS = 10_000_000
LAYOUT = layout_of([TensorSpec("ids", "int64", ("batch", "seq")), TensorSpec("mask", "int64", ("batch", "seq"))])
PIXELS = layout_of([TensorSpec("image", "float32", (1, 3, "height", "width"))])


def write_rows(folder: Path, *, all_distinct: bool) -> list[Path]:
    """The chat trace with timestamps in three formats; with `all_distinct`, nearly every row a shape of its own."""
    import pyarrow as pa  # noqa: PLC0415 - an extra
    import pyarrow.parquet as pq  # noqa: PLC0415

    paths = [folder / f"rows{suffix}" for suffix in (".jsonl", ".csv", ".parquet")]
    schema = pa.schema([("batch", pa.int64()), ("seq", pa.int64()), ("timestamp", pa.float64())])
    with paths[0].open("w") as jsonl, paths[1].open("w") as table, pq.ParquetWriter(paths[2], schema) as parquet:
        table.write("batch,seq,timestamp\n")
        for part in range(20):
            _, rows, seconds = chat(NUM_ROWS // 20, part)
            if all_distinct:
                rows = np.random.default_rng(part).integers(1, 900, rows.shape)
            seconds = np.round(seconds + part * 1e6, 6)
            columns = [rows[:, 0].tolist(), rows[:, 1].tolist(), seconds.tolist()]
            jsonl.writelines(
                f'{{"batch": {batch}, "seq": {seq}, "timestamp": {at}}}\n'
                for batch, seq, at in zip(*columns, strict=True)
            )
            table.writelines(f"{batch},{seq},{at}\n" for batch, seq, at in zip(*columns, strict=True))
            parquet.write_table(pa.table(columns, schema=schema))
    return paths


def read_one(path: Path, window_ms: float) -> None:
    """Reads a log in this process, forms batches if a window is given, and prints seconds and peak memory."""
    start = time.perf_counter()
    traffic = read_traffic(path, LAYOUT, with_arrivals=window_ms > 0)
    if window_ms:
        traffic = formed_batches(traffic, "batch", window_ms / 1e3, 32)
    seconds = time.perf_counter() - start
    # Not ru_maxrss, which a process inherits from the one that started it.
    peak = int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) / 1024  # type: ignore[index]
    print(f"{seconds:.1f} {time.process_time():.1f} {peak:.0f} {len(traffic.sizes)} {traffic.counts.sum()}")


def rows(*, all_distinct: bool) -> None:
    """Every format, with and without arrivals."""
    with tempfile.TemporaryDirectory() as folder:
        table = []
        for path in write_rows(Path(folder), all_distinct=all_distinct):
            for window in ("0", "5"):
                command = [sys.executable, __file__, "one", str(path), window]
                out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
                table.append([path.suffix, f"{path.stat().st_size / 1e6:.0f} MB", f"{window} ms", *out])
        print_table(["format", "file", "window", "seconds", "CPU seconds", "peak MiB", "shapes", "counted"], table)


def conv_cost() -> Cost:
    """ResNet-50-like work: all of it proportional to the pixels, 8.2 GFLOP at 224 x 224."""

    def count(sizes: Sequence[int]) -> Counted:
        height, width = sizes
        return Counted(8.2e9 * height * width / 224**2, 60e6 + 90e6 * height * width / 224**2, 0)

    return modelled(fit_work([[224, 640, 1920], [224, 640, 1920]], count))


def bert_cost() -> Cost:
    """BERT-base by its formulas: 12 layers of width 768, FP16."""

    def count(sizes: Sequence[int]) -> Counted:
        batch, seq = sizes
        return Counted(12 * (24 * batch * seq * 768**2 + 4 * batch * seq**2 * 768), 170e6 + batch * seq * 12 * 60e3, 0)

    return modelled(fit_work([[1, 8, 32], [16, 128, 512]], count))


def counted(names: tuple[str, ...], sizes: Ints) -> Traffic:
    """Requests as a histogram."""
    return Traffic(names, *distinct(sizes, np.ones(len(sizes), np.int64)))


def wishes(num_names: int, coverage: float = 0.995, most: int = 4) -> Wishes:
    """No constraints but the coverage."""
    return Wishes(coverage, most, (1,) * num_names, lambda sizes: np.ones(len(sizes), bool))


def mean_ms(sizes: Ints, counts: Ints, boxes: tuple[Box, ...], cost: Cost, layout: Layout) -> float:
    """Mean cost of the covered requests, each in the profile that `profile_for` takes: the definition itself."""
    found = assignment(sizes, boxes, layout)
    parts = [counts[found == at] @ cost(sizes[found == at], box.opt) for at, box in enumerate(boxes)]
    return float(sum(parts) / counts[found >= 0].sum())


def gain(latencies: Path | None) -> None:
    """Each trace: one profile with the commonest opt, the chosen ones, and one with each shape at its own opt."""
    table = []
    for name, trace in TRACES.items():
        names, sizes, _ = trace(200_000, 7)
        layout = PIXELS if "height" in names else LAYOUT
        source, cost = "model", conv_cost() if "height" in names else bert_cost()
        if latencies and "batch" in names:
            source, cost = latencies.name, measured(read_latencies(latencies, layout.names))
        traffic = counted(layout.names, sizes)
        start = time.perf_counter()
        options = choose(traffic, wishes(2, most=8), cost, lambda highs, layout=layout: volumes(highs, layout))  # type: ignore[misc]
        seconds = time.perf_counter() - start
        single = options[0].mean_ms
        best = fewest(options)
        steps = ", ".join(f"{1 - option.mean_ms / single:.1%}" for option in options[1:])
        check = mean_ms(traffic.sizes, traffic.counts, best.boxes, cost, layout)
        table.append(
            [
                name,
                source,
                f"{single:.4f}",
                f"{best.mean_ms:.4f}",
                f"{check:.4f}",
                str(len(best.boxes)),
                steps,
                f"{seconds:.1f}",
            ]
        )
    print_table(["trace", "cost", "one ms", "chosen ms", "again", "k", "gain of 2, 3, ... 8", "seconds"], table)


def brute_force(traffic: Traffic, cost: Cost, layout: Layout, most: int) -> Floats:
    """The least mean cost of 1 to `most` boxes, over every set of boxes that covers the range, nested ones too."""
    axes = [np.unique(column) for column in traffic.sizes.T]
    spans = [
        [
            (values[low - 1] + 1 if low else values[0], values[high])
            for low in range(len(values))
            for high in range(low, len(values))
        ]
        for values in axes
    ]
    lattice = np.array(list(itertools.product(*axes)))
    boxes = []
    for pick in itertools.product(*spans):
        low, high = np.array([p[0] for p in pick]), np.array([p[1] for p in pick])
        held = ((low <= traffic.sizes) & (traffic.sizes <= high)).all(axis=1)
        opt = traffic.sizes[held][traffic.counts[held].argmax()] if held.any() else high
        boxes.append(Box(low, opt, high))
    found = np.full(most, np.inf)
    for count in range(1, most + 1):
        for chosen in itertools.combinations(boxes, count):
            if (assignment(lattice, chosen, layout) >= 0).all():
                found[count - 1] = min(found[count - 1], mean_ms(traffic.sizes, traffic.counts, chosen, cost, layout))
    return np.minimum.accumulate(found)


def brute() -> None:
    """Random instances of one and two open sizes."""
    random = np.random.default_rng(3)
    one = layout_of([TensorSpec("x", "float32", ("batch", 64))])
    line = modelled(fit_work([[1, 8, 64]], lambda sizes: Counted(1e9 * sizes[0], 5e6 + 1e5 * sizes[0], 0)))
    worst: dict[str, list[float]] = {"one size": [], "two sizes": []}
    for _ in range(12):
        sizes = np.sort(random.choice(np.arange(1, 65), 7, replace=False))[:, None]
        traffic = Traffic(one.names, sizes, random.integers(1, 1000, 7))
        worst["one size"] += compared(traffic, line, one, 3)
    for _ in range(8):
        axes = [
            np.sort(random.choice([1, 2, 4, 8, 16, 32], 3, replace=False)),
            np.sort(random.choice(np.arange(16, 512), 3, replace=False)),
        ]
        lattice = np.array(list(itertools.product(*axes)))
        traffic = Traffic(LAYOUT.names, lattice, (random.pareto(0.7, len(lattice)) * 10 + 1).astype(np.int64))
        worst["two sizes"] += compared(traffic, bert_cost(), LAYOUT, 3)
    table = [[name, str(len(gaps)), f"{max(gaps):.2%}", f"{np.mean(gaps):.2%}"] for name, gaps in worst.items()]
    print_table(["instances", "compared", "worst gap", "mean gap"], table)


def compared(traffic: Traffic, cost: Cost, layout: Layout, most: int) -> list[float]:
    """How much the choice costs more than the best set, for each number of profiles."""
    options: tuple[Option, ...] = choose(
        traffic, wishes(len(layout.names), 1.0, most), cost, lambda highs: volumes(highs, layout)
    )
    best = brute_force(traffic, cost, layout, most)
    return [option.mean_ms / least - 1 for option, least in zip(options, best.tolist(), strict=True)]


def main(arguments: list[str]) -> None:
    """Runs what the command line names."""
    match arguments:
        case ["one", path, window]:
            read_one(Path(path), float(window))
        case ["rows", *flags]:
            rows(all_distinct="--distinct" in flags)
        case ["gain", *files]:
            gain(Path(files[0]) if files else None)
        case ["brute"]:
            brute()
        case _:
            print(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
