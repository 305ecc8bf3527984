"""Figures in Prometheus' text format, for the node exporter's textfile collector."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gauge:
    """One figure; the name ends in its unit, as Prometheus' naming rules ask."""

    name: str
    labels: Mapping[str, str]
    value: float


def prometheus_text(gauges: Iterable[Gauge]) -> str:
    """Gauges of one name under one TYPE line, in the order in which names come first.

    Source: Prometheus, exposition formats, text format.
    """
    by_name: dict[str, list[str]] = {}
    for gauge in gauges:
        labels = ",".join(f'{key}="{_escaped(label)}"' for key, label in gauge.labels.items())
        by_name.setdefault(gauge.name, []).append(f"{gauge.name}{{{labels}}} {gauge.value:.9g}\n")
    return "".join(f"# TYPE {name} gauge\n{''.join(lines)}" for name, lines in by_name.items())


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
