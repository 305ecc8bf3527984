"""The metric of the digits model. It gets arrays by name: the model's outputs, and the targets of the evaluation set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def accuracy(outputs: Mapping[str, Any], targets: Mapping[str, Any]) -> float:
    """Share of images whose largest logit is at the right digit. Shapes: logits (sample, digit), label (sample)."""
    return float((outputs["logits"].argmax(axis=1) == targets["label"]).mean())
