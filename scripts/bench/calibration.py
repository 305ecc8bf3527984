"""Calibrates and quantizes a model by trtforge, onnxruntime and ModelOpt, on the same samples: time, memory, accuracy.

    python scripts/bench/calibration.py [--model rec|det|minilm|digits|resnet50] [--samples 16 64 256] [--judged 1000]
        [--programs trtforge ort-minmax ...] [--modelopt-python PYTHON] [--torch-python PYTHON]

Each runs in a fresh process; its memory is the resident memory of it and its children, sampled. The time is that of all
that leads from the model to the quantized one: of ours reading and checking, the pass over the data, thresholds, folding
and lowering; of onnxruntime `quant_pre_process` and `quantize_static`; of ModelOpt `quantize`. What `calibrate` alone takes
of ours is printed beside it. ModelOpt runs in the environment of PYTHON, which has nvidia-modelopt[onnx]; without one it is
left out. MiniLM is exported by an environment with torch. No sample is judged by that was calibrated on.

Exit code 1 if a bound is missed; a program that stops has missed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from calibration_models import NAMES, Case, Judgement, Scores, case
from programs import ROOT, print_table

MIB = 1 << 20
OURS = "trtforge"
PEERS = ("ort-minmax", "ort-entropy", "modelopt-max", "modelopt-entropy")
_SAMPLING_SECONDS = 0.02
_LEAST_RIGHT = 0.97
_RESAMPLES = 2000
_TIME_BOUNDS = {"ort-entropy": 0.7, "modelopt-entropy": 1.0}
"""Program -> largest share of its time that ours may take."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one program took and gave.

    Attributes:
        seconds: without imports.
        calibrating: seconds of them that our `calibrate` took.
        peak_bytes: of the process and its children.
    """

    seconds: float
    calibrating: float
    peak_bytes: int
    judgement: Judgement

    @property
    def scores(self) -> Scores:
        """Of each sample."""
        return self.judgement.scores


Results = Mapping[tuple[str, int], Measured | str]
"""(program, number of samples) -> what was measured, or why it stopped."""


def tree_bytes(pid: int) -> int:
    """Resident memory of a process and its children; 0 for one that has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return pages * 4096 + sum(tree_bytes(int(child)) for child in children)


def run(command: list[str]) -> tuple[float, float, int]:
    """The two times that the process printed, and its peak memory.

    Raises:
        RuntimeError: it ended with another exit code than 0.
    """
    peak = 0
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        while process.poll() is None:
            peak = max(peak, tree_bytes(process.pid))
            time.sleep(_SAMPLING_SECONDS)
        log.seek(0)
        printed = log.read().strip().splitlines() or ["it printed nothing"]
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {printed[-1]}")
    seconds, calibrating = map(float, printed[-1].split()[1:])
    return seconds, calibrating, peak


def measure(pythons: Mapping[str, str], given: Case, folder: Path, counts: list[int]) -> Results:
    """Each program with each number of samples."""
    for name, array in given.feeds.items():
        np.save(folder / f"{name}.npy", array)
    np.savez(folder / "samples.npz", allow_pickle=False, **given.feeds)
    script = str(Path(__file__).with_name("calibrate_once.py"))
    results: dict[tuple[str, int], Measured | str] = {}
    for count in counts:
        for program, python in pythons.items():
            path = folder / f"{program}-{count}.onnx"
            try:
                found = run([python, script, program, str(given.model), str(folder), str(count), str(path)])
                measured = Measured(*found, given.judge(path))
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
                results[program, count] = " ".join(str(error).split())[:200]
                print(f"{program} with {count} samples stopped: {results[program, count]}", flush=True)
                continue
            results[program, count] = measured
            print(f"{program} with {count} samples: {', '.join(cells(measured, count))}", flush=True)
    return results


def cells(found: Measured, count: int) -> tuple[str, ...]:
    """Seconds a sample, of which `calibrate`, MiB, and accuracy with its 95 % interval."""
    return (
        f"{found.seconds / count:.3f}",
        f"{found.calibrating / count:.3f}",
        f"{found.peak_bytes / MIB:.0f}",
        _accuracy(found),
    )


def _accuracy(found: Measured) -> str:
    if not found.scores.size:
        return "-"
    low, high = interval(found.scores)
    return f"{found.scores.mean():.4f} ({low:.4f} to {high:.4f}) {found.judgement.more}".rstrip()


def interval(scores: Scores) -> tuple[float, float]:
    """Bootstrap interval of the mean, 95 %. Source: Efron, percentile bootstrap."""
    rng = np.random.default_rng(0)
    means = [rng.choice(scores, scores.size).mean() for _ in range(_RESAMPLES)]
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def rows(results: Results) -> Iterator[tuple[str, ...]]:
    """The table: a line for each program and number of samples."""
    for (program, count), found in results.items():
        yield program, str(count), *(("-", "-", "-", "stopped") if isinstance(found, str) else cells(found, count))


def missed(results: Results, name: str) -> Iterator[str]:
    """The bounds that were missed, each with what was found."""
    yield from (
        f"{program} stopped with {count} samples"
        for (program, count), found in results.items()
        if isinstance(found, str)
    )
    measured = {key: found for key, found in results.items() if isinstance(found, Measured)}
    ours = {count: found for (program, count), found in measured.items() if program == OURS}
    if ours and ours[max(ours)].peak_bytes > 1.1 * (least := ours[min(ours)].peak_bytes):
        yield f"memory grows with the samples: {ours[max(ours)].peak_bytes / least:.2f} times, at most 1.1"
    for (program, count), other in measured.items():
        if program != OURS and count in ours:
            # Digits take less time than starting does.
            most = _TIME_BOUNDS.get(program, np.inf) if name != "digits" else np.inf
            yield from _behind(ours[count], other, f"{program} with {count} samples", most)
    for count, found in ours.items():
        if name == "rec" and found.scores.mean() < _LEAST_RIGHT:
            yield f"{found.scores.mean():.1%} of lines right with {count} samples, at least {_LEAST_RIGHT:.0%}"
    for few, many in combinations(sorted(ours), 2):
        low, high = interval(ours[many].scores - ours[few].scores) if ours[few].scores.size else (0, 0)
        if name == "rec" and (low > 0 or high < 0):
            yield f"{few} and {many} samples differ: by {low:.4f} to {high:.4f} of the same lines"


def _behind(ours: Measured, other: Measured, peer: str, most: float) -> Iterator[str]:
    """Where a peer is ahead; ours may take `most` of its time, and 150 MiB more memory than onnxruntime's MinMax."""
    if ours.seconds > most * other.seconds:
        yield f"ours takes {ours.seconds / other.seconds:.2f} of the time of {peer}, at most {most}"
    if peer.startswith("ort-minmax") and ours.peak_bytes > other.peak_bytes + 150 * MIB:
        yield f"ours takes {(ours.peak_bytes - other.peak_bytes) / MIB:.0f} MiB more than {peer}, at most 150"
    if ours.scores.size and interval(ours.scores - other.scores)[1] < 0:
        yield f"{peer} is better: {other.scores.mean():.4f}, ours {ours.scores.mean():.4f}"


def main() -> None:
    """Measures, prints the table, and exits with 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=NAMES, default="rec")
    parser.add_argument("--samples", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--judged", type=int, default=1000, help="lines, pages, or pairs of texts")
    parser.add_argument("--programs", nargs="+", choices=[OURS, *PEERS], default=[OURS, *PEERS])
    parser.add_argument("--modelopt-python", default="")
    parser.add_argument("--torch-python", default=sys.executable)
    asked = parser.parse_args()
    pythons = {name: asked.modelopt_python if "modelopt" in name else sys.executable for name in asked.programs}
    pythons = {name: python for name, python in pythons.items() if python}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        given = case(asked.model, folder, max(asked.samples), asked.judged, asked.torch_python)
        results = measure(pythons, given, folder, asked.samples)
        if given.score:
            print(f"FP32: {_accuracy(Measured(0, 0, 0, given.judge(given.model)))}")
    head = (
        "program",
        "samples",
        "s/sample",
        "calibrating",
        "peak MiB",
        f"{given.score} (95 %)" if given.score else "-",
    )
    print_table(head, list(rows(results)))
    problems = list(missed(results, asked.model))
    for problem in problems:
        print(f"missed: {problem}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
