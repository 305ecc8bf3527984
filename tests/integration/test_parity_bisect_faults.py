"""Faults seeded into models are attributed to their nodes, and unmodified models raise no alarm."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from trtforge.parity.bisect import bisect

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "bench"))
import parity_bisect as bench
import seeded_faults

SMALL = ("silero_sequence", "digits", "BERT encoder")
LACKING = {
    "silero_sequence": ("wrong softmax axis", "wrong clip bound"),
    "digits": ("wrong transpose", "wrong softmax axis", "wrong clip bound"),
    "BERT encoder": ("wrong clip bound",),
}
"""Faults that the model has no node for."""


@pytest.fixture(scope="module")
def case_of(tmp_path_factory, model_path):
    model_path("ocr_rec")
    folder = tmp_path_factory.mktemp("faults")
    return {case.name: (case, bench.ingest(case.path, folder / case.name)) for case in bench.cases(folder)}


def seeded(case, graph, kind, seed):
    """A fault that shows, with inputs that show it."""
    model, feeds = onnx.load(graph.path), bench.feeds_of(case, graph, seed)
    rng = np.random.default_rng([seed, list(seeded_faults.KINDS).index(kind)])
    for _ in range(20):
        fault = seeded_faults.seed_fault(model, kind, rng, case.axis)
        assert fault is not None
        if bench.shows(fault.model, model, feeds):
            return fault, feeds
    return pytest.fail("no fault of this kind shows")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in SMALL for kind in seeded_faults.KINDS if kind not in LACKING[name]),
        *(("OCR recogniser", kind) for kind in ("wrong clip bound", "only at length 37")),
    ],
)
def test_a_fault_is_attributed_to_its_node(case_of, name, kind):
    case, graph = case_of[name]
    fault, feeds = seeded(case, graph, kind, seed=11)
    report = bisect(graph, fault.model, feeds, tolerance=bench.TOLERANCE)
    assert {culprit.node for culprit in report.culprits} <= fault.nodes
    assert report.first is not None
    assert report.first.changes
    assert len(report.unpaired) <= 1
    if kind == "only at length 37":
        assert report.first.feeds == ("size 37",)


@pytest.mark.parametrize("name", SMALL)
def test_unmodified_models_raise_no_alarm(case_of, name):
    case, graph = case_of[name]
    for seed in range(10):
        report = bisect(graph, onnx.load(graph.path), bench.feeds_of(case, graph, seed), tolerance=bench.TOLERANCE)
        assert (report.culprits, report.harmless, report.wrong_outputs, report.unpaired) == ((), (), (), ())
        assert report.share_compared == 1
