"""The accuracy gate: the user's own metric on the reference and on the candidate, with what the sample size allows to say."""

from __future__ import annotations

import math
import shlex
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from trtforge.errors import ParityError, Problem, SpecError, Where, raise_any
from trtforge.parity.staged import Runner
from trtforge.types import Graph
from trtforge.usercode.process import user_code

Array = np.ndarray[Any, np.dtype[Any]]

DRIVER: Final = Path(__file__).with_name("accuracy_child.py")
NUM_RESAMPLES: Final = 1000
CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True)
class MaxDrop:
    """How much of the metric may be lost: absolute points, or a share of the reference's metric."""

    points: float
    is_relative: bool = False

    def allowed(self, reference: float) -> float:
        """In points of the metric."""
        return self.points * abs(reference) if self.is_relative else self.points


@dataclass(frozen=True, slots=True)
class AccuracyReport:
    """What the gate found. All values are points of the metric.

    Attributes:
        drop: reference minus candidate, negative where the candidate is better.
        drop_at_most: upper bound of the drop at the confidence.
        allowed: the largest drop that passes.
        verdict: `undecided` where the drop itself is allowed but the set is too small to say so.
        num_samples_needed: with no disagreement at all, the least for a pass.
    """

    num_samples: int
    reference: float
    candidate: float
    drop: float
    drop_at_most: float
    allowed: float
    confidence: float
    verdict: Literal["passed", "failed", "undecided"]
    num_samples_needed: int


def accuracy_gate(
    metric: str,
    base_dir: Path,
    data: Path,
    graph: Graph,
    reference: Runner,
    candidate: Runner,
    max_drop: MaxDrop,
    *,
    where: Where | None,
    scale: float = 1.0,
    batch_size: int = 32,
    seed: int = 0,
    timeout_seconds: float | None = None,
    on_phase: Callable[[str], None] = lambda _: None,
) -> AccuracyReport:
    """Judges a candidate by a metric of the user's over an evaluation set.

    The pass is one-sided at 95 %: the bound of the drop is the larger of the paired bootstrap's 95th percentile and
    `scale * (1 - 0.05 ** (1 / n))`, the largest loss that n samples could hide without a single disagreement. So a set of
    50 cannot pass by luck: it could hide 5.8 %.

    Args:
        metric: `file.py:function`, called as `function(outputs, targets) -> float` with arrays by name.
        base_dir: the folder that `metric` is relative to.
        data: npz with an array for each input of the model, and more for the targets; first axis the samples.
        graph: the model, for its inputs.
        reference: runs the evaluation set as it was.
        candidate: runs it as it became.
        max_drop: the largest drop that passes.
        where: the place in the spec.
        scale: the metric's range: 1 for shares, 100 for percent.
        batch_size: samples a run; a fixed first axis of the model decides instead.
        seed: of the resamples.
        timeout_seconds: wall seconds for all calls of the metric.
        on_phase: told what happens now.

    Raises:
        SpecError: the data does not fit the model, or the metric cannot be loaded.
        ParityError: the metric raised, or gave no finite number.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), chapter 13 (percentile bound); Clopper and
        Pearson, Biometrika 26 (1934), for no events in n trials.
    """
    feeds, targets = _evaluation_set(data, graph, where)
    num_samples = len(next(iter(feeds.values())))
    outputs = {}
    for name, runner in (("reference", reference), ("candidate", candidate)):
        on_phase(f"{runner.name}: {num_samples} samples")
        outputs[name] = _run_all(runner, graph, feeds, num_samples, batch_size)
    payload = {**outputs, "targets": targets, "num_resamples": NUM_RESAMPLES, "seed": seed}
    with user_code(
        metric,
        base_dir,
        timeout_seconds=timeout_seconds,
        driver=DRIVER,
        where=where,
        failure=ParityError,
        on_phase=on_phase,
    ) as code:
        answer = code.ask("evaluate", payload, timeout_seconds=timeout_seconds)
    if max(abs(answer["reference"]), abs(answer["candidate"])) > scale:
        raise SpecError(
            f"{metric} gave {answer['reference']:g}, beyond its scale of {scale:g}",
            where=where,
            next_step="write scale: 100 under accuracy if the metric is in percent",
        )
    return judge_accuracy(answer["reference"], answer["candidate"], answer["drops"], num_samples, max_drop, scale)


def judge_accuracy(
    reference: float, candidate: float, drops: Array, num_samples: int, max_drop: MaxDrop, scale: float
) -> AccuracyReport:
    """The verdict on metrics that were measured; `drops` are those of the resamples. See `accuracy_gate`."""
    drop, allowed = reference - candidate, max_drop.allowed(reference)
    hidden = scale * (1 - (1 - CONFIDENCE) ** (1 / num_samples))
    drop_at_most = max(float(np.quantile(drops, CONFIDENCE)), hidden)
    verdict: Literal["passed", "failed", "undecided"] = "passed" if drop_at_most <= allowed else "undecided"
    if drop > allowed:
        verdict = "failed"
    share = min(max(allowed / scale, 1e-9), 1 - 1e-9)
    needed = math.ceil(math.log(1 - CONFIDENCE) / math.log1p(-share))
    return AccuracyReport(num_samples, reference, candidate, drop, drop_at_most, allowed, CONFIDENCE, verdict, needed)


def _evaluation_set(path: Path, graph: Graph, where: Where | None) -> tuple[dict[str, Array], dict[str, Array]]:
    """Inputs and targets, all with one number of samples."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecError(
            f"evaluation set {path}: {reason}", where=where, next_step=f"ls -l {shlex.quote(str(path))}"
        ) from None
    problems = [
        Problem(
            f"evaluation set {path.name} has no array for the input {tensor}; it has {', '.join(arrays) or 'none'}",
            f"save it with numpy.savez({path.name!r}, {tensor.name}=...)",
            where,
            exit_code=SpecError.exit_code,
        )
        for tensor in graph.inputs
        if tensor.name not in arrays
    ]
    problems += [
        Problem(
            f"{path.name}: '{tensor.name}' is {arrays[tensor.name].dtype}, the model's input is {tensor}",
            f"convert it: array.astype('{tensor.dtype}')",
            where,
            exit_code=SpecError.exit_code,
        )
        for tensor in graph.inputs
        if tensor.name in arrays and str(arrays[tensor.name].dtype) != tensor.dtype
    ]
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) != 1 or not all(lengths.values()):
        found = ", ".join(f"{name} {length}" for name, length in lengths.items())
        summary = f"{path.name}: arrays have different numbers of samples, or none: {found or 'no arrays'}"
        problems.append(Problem(summary, "save as many targets as inputs", where, exit_code=SpecError.exit_code))
    raise_any(problems)
    names = {tensor.name for tensor in graph.inputs}
    return (
        {name: array for name, array in arrays.items() if name in names},
        {name: array for name, array in arrays.items() if name not in names},
    )


def _run_all(
    runner: Runner, graph: Graph, feeds: Mapping[str, Array], num_samples: int, batch_size: int
) -> dict[str, Array]:
    """All outputs, samples along the first axis. A fixed batch is filled up with the last sample."""
    fixed = [tensor.shape[0] for tensor in graph.inputs if tensor.shape and isinstance(tensor.shape[0], int)]
    size = fixed[0] if fixed else batch_size
    parts: list[dict[str, Array]] = []
    for start in range(0, num_samples, size):
        rows = np.minimum(np.arange(start, start + size), num_samples - 1)
        if not fixed:
            rows = rows[: num_samples - start]
        outputs = runner.run({name: array[rows] for name, array in feeds.items()})
        parts.append({name: array[: num_samples - start] for name, array in outputs.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
