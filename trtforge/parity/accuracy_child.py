"""Runs inside the user's process: the metric on both sets of outputs, and on resamples of the evaluation set.

It uses numpy and nothing of trtforge, since the interpreter may be another environment's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Arrays = Mapping[str, Any]


def evaluate(
    function: Callable[[Arrays, Arrays], Any],
    payload: Mapping[str, Any],
    state: Mapping[str, Any],  # noqa: ARG001 - what every driver's function takes
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """The metric of the reference and the candidate, and its paired drops over bootstrap resamples.

    Args:
        function: the user's `metric(outputs, targets) -> float`; arrays by name, first axis the samples.
        payload: `reference`, `candidate` and `targets` (arrays by name), `num_resamples`, `seed`.
        state: not used.
        tell: what happens now, for progress.
    """
    reference, candidate, targets = payload["reference"], payload["candidate"], payload["targets"]
    num_samples = len(next(iter(reference.values())))
    values = [_number(function(outputs, targets)) for outputs in (reference, candidate)]
    rng = np.random.default_rng(payload["seed"])
    drops = []
    for resample in range(payload["num_resamples"]):
        rows = rng.integers(0, num_samples, num_samples)
        picked = {name: array[rows] for name, array in targets.items()}
        one, other = (
            _number(function({name: array[rows] for name, array in outputs.items()}, picked))
            for outputs in (reference, candidate)
        )
        drops.append(one - other)
        if resample % 100 == 0:
            tell(f"resample {resample} of {payload['num_resamples']}")
    return {"reference": values[0], "candidate": values[1], "drops": np.array(drops)}


def _number(value: Any) -> float:
    number = float(np.asarray(value).item())
    if not np.isfinite(number):
        raise ValueError(f"the metric gave {number}, expected a finite number")
    return number
