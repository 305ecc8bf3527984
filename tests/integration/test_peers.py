"""The spec's PyTorch model measured in a process of its own: on the CPU, where the host's clock takes the place of events."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from trtforge.errors import CommandLineError, SpecError
from trtforge.peers import PEERS, gauges, measure_peers, peer_names, torch_spec
from trtforge.release.manifest import TensorRecord
from trtforge.runtime.measure import Switches

pytest.importorskip("torch")

EXPORTS = Path(__file__).parent / "exports"
QUICK = Switches(warm_up_ms=0.0, duration_s=0.0, iterations=12)
INPUTS = tuple(
    TensorRecord(name=name, dtype="int64", shape=("batch", "length"), ranges={}, data_dependent=False)
    for name in ("ids", "mask")
)
SIZES = [{"batch": 2, "length": 5}, {"batch": 3, "length": 7}]


@pytest.fixture
def spec_of(tmp_path):
    def of(callable_, model="torch: {{callable: {}}}"):
        (tmp_path / "exports").symlink_to(EXPORTS)
        spec = tmp_path / "net.yaml"
        text = model.format(callable_)
        spec.write_text(
            f"version: 1\nname: net\nmodel: {{{text}}}\n"
            "profiles: [{name: only, inputs: {ids: {min: [1, 1], opt: [2, 5], max: [8, 9]}}}]\n"
            "targets: [{backend: tensorrt, gpus: [H200]}]\noutput: dist\n"
        )
        return spec

    return of


def measured(spec, peers, sizes=SIZES, **changes):
    options = {"device": "cpu", "device_name": "cpu", "timeout_seconds": 200.0, "python": sys.executable, **changes}
    switches = options.pop("switches", QUICK)
    return measure_peers(
        torch_spec(spec, sys.executable), INPUTS, sizes, switches, lambda _event: None, peers=peers, **options
    )


def test_eager_and_compiled_models_are_measured_at_the_sizes_of_the_engine(spec_of):
    spec = spec_of("exports/sound.py:tagger")
    one_at_a_time = replace(QUICK, one_at_a_time=True)
    points = [
        *measured(spec, ["eager-fp32"], switches=one_at_a_time),
        *measured(spec, ["compile-fp32"], sizes=SIZES[:1], switches=one_at_a_time),
    ]

    assert [(point.peer, point.mode, point.sizes, point.reason) for point in points] == [
        ("eager-fp32", "", SIZES[0], ""),
        ("eager-fp32", "", SIZES[1], ""),
        ("compile-fp32", "default", SIZES[0], ""),
    ]
    for point in points:
        times = point.times
        assert times.num_queries >= 12
        assert (
            0 < times.compute.percentiles[50.0] <= times.latency.percentiles[50.0] <= times.response.percentiles[50.0]
        )
        assert times.throughput_qps == pytest.approx(1000 / times.response.mean, rel=0.5)
    compiling, eager = points[2].times.ready_seconds, points[0].times.ready_seconds
    assert compiling > eager
    assert len(list(gauges(points, "cpu"))) == 2 * len(points)


def test_half_precision_converts_weights_and_inputs_that_are_no_integers(spec_of, tmp_path):
    source = tmp_path / "own.py"
    source.write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.weight = torch.nn.Parameter(torch.ones(3))\n"
        "    def forward(self, ids, mask):\n"
        "        assert (ids.dtype, self.weight.dtype) == (torch.int64, torch.float16), (ids.dtype, self.weight.dtype)\n"
        "        assert not torch.is_grad_enabled()\n"
        "        return ids * self.weight[0], mask\n"
        "def build():\n"
        "    ids = torch.ones(2, 2, dtype=torch.int64)\n"
        "    return Net(), {'ids': ids, 'mask': ids}, {name: {0: 'batch', 1: 'length'} for name in ('ids', 'mask')}\n"
    )

    peers, warm_up = ["eager-fp16", "eager-fp32"], replace(QUICK, warm_up_ms=400.0)
    (half, full) = measured(spec_of("own.py:build"), peers, sizes=SIZES[:1], switches=warm_up)

    assert half.times is not None, half.reason
    assert half.times.is_settled  # after far more queries in the warm-up than it takes to settle
    assert full.times is None
    assert "raised AssertionError" in full.reason


@pytest.mark.parametrize(
    ("callable_", "changes", "reason"),
    [
        ("exports/broken.py:raises", {}, "raised KeyError: 'head', while making the model"),
        ("exports/broken.py:returns_nothing", {}, "the function returned None, expected a tuple"),
        (
            "exports/sound.py:tagger",
            {"device_name": "NVIDIA H200"},
            "of its torch is cpu, the engine ran on NVIDIA H200",
        ),
        ("exports/sound.py:tagger", {"device": "cuda:0"}, "raised"),  # this machine's torch has no CUDA
        ("exports/sound.py:tagger", {"timeout_seconds": 0.01}, "gave no answer within 0.01 s"),
    ],
)
def test_a_peer_that_fails_is_a_row_with_its_reason(spec_of, callable_, changes, reason):
    points = measured(spec_of(callable_), ["eager-fp32"], **changes)

    assert [point.times for point in points] == [None, None]
    assert reason in points[0].reason


def test_inputs_of_another_model(spec_of):
    points = measure_peers(
        torch_spec(spec_of("exports/sound.py:tagger"), sys.executable),
        INPUTS[:1],
        SIZES[:1],
        QUICK,
        lambda _event: None,
        peers=["eager-fp32"],
        python=sys.executable,
        device="cpu",
        device_name="cpu",
        timeout_seconds=None,
    )

    assert "the model has the inputs ids, mask, the engine has ids" in points[0].reason


def test_what_the_user_has_to_change_is_an_error(spec_of):
    with pytest.raises(CommandLineError, match="--peer-python: there is no program 'no-python'"):
        torch_spec(spec_of("exports/sound.py:tagger"), "no-python")
    with pytest.raises(CommandLineError) as caught:
        peer_names(["eager-fp23"])
    assert caught.value.problems[0].next_step == "write --peer eager-fp32"
    assert peer_names(["compile-fp16", "compile-fp16"]) == ("compile-fp16",)
    assert peer_names([]) == tuple(PEERS)


@pytest.mark.parametrize(
    ("callable_", "model", "text"),
    [
        ("net.onnx", "onnx: {}", "names an ONNX file, which PyTorch does not run"),
        ("exports/sond.py:tagger", "torch: {{callable: {}}}", "sond.py is not there"),
    ],
)
def test_specs_that_name_no_torch_model(spec_of, callable_, model, text):
    with pytest.raises(SpecError, match=text):
        torch_spec(spec_of(callable_, model), sys.executable)
