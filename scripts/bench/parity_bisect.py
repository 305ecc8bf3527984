"""Whether bisecting names the right node, raises no false alarm, and at what cost.

    python scripts/bench/parity_bisect.py [--seeds 2] [--alarm-seeds 50] [--model EXPORTED_ENCODER.onnx]

Faults of every kind in `seeded_faults.py` are put at random nodes of five models, each seed others; a fault that shows
in no output is drawn again. A fault counts as attributed if every node named is one at fault. False alarms are looked for on
unmodified models at as many seeds. The cost is that of one bisection of an encoder of MiniLM's size, or of `--model`,
against loading and running both models plainly, each in a process of its own; memory is the peak of the process. Of three rounds in
turns, the one with the median ratio is shown.

The file is not called `bisect.py`: Python would take it for its own module of that name.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto
from programs import ROOT, print_table
from seeded_faults import LENGTH, encoder, faults, seed_fault

from trtforge.graph.ingest import ingest
from trtforge.parity.bisect import bisect
from trtforge.parity.tolerances import PRESETS
from trtforge.shapes.inputs import generate_at
from trtforge.types import Graph

Feeds = dict[str, dict[str, np.ndarray[Any, np.dtype[Any]]]]
TOLERANCE = PRESETS["onnx"]["fp32"]
NUM_ROUNDS = 3
MODELS = ROOT / "tests" / "models"


@dataclass(frozen=True, slots=True)
class Case:
    """A model to put faults into.

    Attributes:
        axis: the input and axis that the sizes are of.
        shape: of that input, with -1 on the axis; other inputs have it too if `is_shared`, else their own.
        sizes: on the axis; the length of faults of one length is added.
    """

    name: str
    path: Path
    axis: tuple[str, int]
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    is_shared: bool = False


def cases(folder: Path) -> Iterator[Case]:
    """The models; the encoder is written into `folder`."""
    onnx.save(encoder(3, 96, 4, 500, seed=1), folder / "encoder.onnx")
    rec = MODELS / "rapidocr_onnxruntime" / "ch_PP-OCRv4_rec_infer.onnx"
    silero = MODELS / "silero_vad" / "silero_vad_16k_sequence.onnx"
    yield Case("OCR recogniser", rec, ("x", 3), (2, 3, 48, -1), (64, 320))
    yield Case("magika", MODELS / "magika" / "model.onnx", ("bytes", 0), (-1, 2048), (2,))
    yield Case("silero_sequence", silero, ("input", 0), (-1, 576), (5, 12))
    yield Case("digits", ROOT / "configs" / "models" / "digits.onnx", ("image", 0), (-1, 1, 8, 8), (1, 16))
    yield Case("BERT encoder", folder / "encoder.onnx", ("input_ids", 1), (3, -1), (16, 64), is_shared=True)


def feeds_of(case: Case, graph: Graph, seed: int) -> Feeds:
    """Inputs at all sizes of a case, by label."""
    found = {}
    for size in (*case.sizes, LENGTH):
        shape = tuple(size if dim == -1 else dim for dim in case.shape)
        shapes = {
            spec.name: shape
            if spec.name == case.axis[0] or case.is_shared
            else tuple(dim if isinstance(dim, int) else 1 for dim in spec.shape)
            for spec in graph.inputs
        }
        found[f"size {size}"] = generate_at(graph, shapes, {}, {}, seed)
    return found


def shows(model: ModelProto, reference: ModelProto, feeds: Feeds) -> bool:
    """Whether a model, run plainly, stops or gives an output outside the tolerance."""
    sessions = [onnxruntime.InferenceSession(reference.SerializeToString(), plain_options())]
    try:
        sessions.append(onnxruntime.InferenceSession(model.SerializeToString(), plain_options()))
        runs = [[session.run(None, feed) for feed in feeds.values()] for session in sessions]
    except Exception:  # noqa: BLE001 - onnxruntime throws many types, all of which show
        return True
    return any(
        mine.shape != theirs.shape or not np.abs(mine - theirs).max() <= allowed(mine)
        for before, after in zip(*runs, strict=True)
        for mine, theirs in zip(before, after, strict=True)
    )


def allowed(output: np.ndarray[Any, np.dtype[Any]]) -> float:
    """The largest error that the tolerance allows."""
    return float((TOLERANCE.atol or 0) + (TOLERANCE.rtol or 0) * np.abs(output).max())


def plain_options() -> Any:
    """Optimisations off, silent."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return options


def attribute_faults(case: Case, folder: Path, num_seeds: int) -> tuple[Counter[str], list[str]]:
    """Faults by kind, and a line for each that was not attributed."""
    graph = ingest(case.path, folder / case.name)
    model, kinds, missed = onnx.load(graph.path), Counter[str](), []
    for seed in range(num_seeds):
        feeds = feeds_of(case, graph, seed)
        for fault in faults(model, seed, case.axis, lambda faulty: shows(faulty, model, feeds)):  # noqa: B023 - at once
            report = bisect(graph, fault.model, feeds, tolerance=TOLERANCE)
            named = {culprit.node for culprit in report.culprits}
            kinds[fault.kind] += 1
            at_length = {feed for culprit in report.culprits for feed in culprit.feeds}
            is_right = bool(named) and named <= fault.nodes
            if not is_right or (fault.kind.startswith("only at") and at_length != {f"size {LENGTH}"}):
                missed.append(f"{case.name}, seed {seed}, {fault.kind}: {sorted(fault.nodes)}, named {sorted(named)}")
    return kinds, missed


def false_alarms(case: Case, folder: Path, num_seeds: int) -> int:
    """Seeds at which something is said against an unmodified model: written anew, and read from its file."""
    graph = ingest(case.path, folder / case.name)
    model, num_alarms = onnx.load(graph.path), 0
    for seed in range(num_seeds):
        report = bisect(graph, model, feeds_of(case, graph, seed), tolerance=TOLERANCE)
        num_alarms += bool(report.culprits or report.harmless or report.wrong_outputs or report.share_compared < 1)
    return num_alarms


def print_faults(num_seeds: int, num_alarm_seeds: int) -> None:
    """Both tables."""
    rows, misses = [], []
    with tempfile.TemporaryDirectory() as name:
        for case in cases(Path(name)):
            kinds, missed = attribute_faults(case, Path(name), num_seeds)
            alarms = false_alarms(case, Path(name), num_alarm_seeds)
            print(f"{case.name}: {dict(kinds)}", file=sys.stderr, flush=True)
            total = kinds.total()
            rows.append([case.name, str(total), f"{total - len(missed)}", f"{alarms} of {num_alarm_seeds}"])
            misses += missed
    print_table(["model", "faults", "attributed", "false alarms, seeds"], rows)
    print("\n".join(misses))


def plain(paths: list[Path], feeds: dict[str, Any]) -> None:
    """Loads and runs models one after the other, as two plain runs do, and prints what that took."""
    start, running = time.perf_counter(), 0.0
    for path in paths:
        session = onnxruntime.InferenceSession(str(path), plain_options(), providers=["CPUExecutionProvider"])
        before = time.perf_counter()
        session.run(None, feeds)
        running += time.perf_counter() - before
    print(time.perf_counter() - start, running, peak_mib())


def bisected(paths: list[Path], feeds: dict[str, Any]) -> None:
    """Bisects the second model and prints what that took."""
    start = time.perf_counter()
    report = bisect(paths[0], paths[1], {"feeds": feeds}, tolerance=TOLERANCE)
    print(time.perf_counter() - start, report.num_compared, peak_mib(), len(report.culprits))


def peak_mib() -> float:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def print_cost(given: Path | None) -> None:
    """The cost at three sizes, each in fresh processes."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        reference, faulty = given or Path(name) / "reference.onnx", Path(name) / "faulty.onnx"
        if given is None:
            onnx.save(encoder(6, 384, 12, 30522, seed=1), reference)
        model = onnx.load(reference)
        fault = seed_fault(model, "constant off by 1 %", np.random.default_rng(3), ("input_ids", 1))
        if fault is None:
            raise SystemExit("error: the model has no constant to change")
        onnx.save(fault.model, faulty)
        del model, fault
        for batch, length in ((1, 128), (8, 128), (16, 128)):
            words = ["--measure", f"{reference},{faulty},{batch},{length}"]
            rounds = [(measured([*words, "plain"]), measured([*words, "bisect"])) for _ in range(NUM_ROUNDS)]
            (seconds, running, memory), (cost, _, peak, _) = sorted(rounds, key=lambda pair: pair[1][0] / pair[0][0])[
                NUM_ROUNDS // 2
            ]
            rows.append(
                [
                    f"({batch}, {length})",
                    f"{seconds:.2f} ({running:.2f})",
                    f"{cost:.2f}",
                    f"{cost / seconds:.2f} ({cost / running:.2f})",
                    f"{peak - memory:.0f} MiB",
                ]
            )
    print_table(["input", "two plain runs, s (run call)", "bisect, s", "times (of run call)", "extra memory"], rows)


def measured(words: list[str]) -> list[float]:
    """The figures that this script prints in a process of its own."""
    result = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, check=True)
    return [float(word) for word in result.stdout.split()]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--alarm-seeds", type=int, default=50)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--measure", nargs=2)
    words = parser.parse_args()
    if words.measure:
        reference, faulty, batch, length = words.measure[0].split(",")
        shape = (int(batch), int(length))
        ids = np.random.default_rng(1).integers(0, 30522, shape)
        mask = (np.arange(shape[1]) < shape[1] // 2).astype(np.int64) * np.ones(shape, np.int64)
        feeds = {"input_ids": ids, "attention_mask": mask}
        (plain if words.measure[1] == "plain" else bisected)([Path(reference), Path(faulty)], feeds)
        return
    print_cost(words.model)
    print_faults(words.seeds, words.alarm_seeds)


if __name__ == "__main__":
    main()
