"""Version-compatible engines in the lean and the dispatch runtime, and in later versions."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from stand_in import VERSIONS
from test_runtime_calls import Bundle, X, ends_clean

from trtforge.engine_proof import layer_types
from trtforge.errors import CapabilityError, SeveralErrors
from trtforge.runtime.session import EngineSession

NOT_IN_SMALL_RUNTIMES = ("EngineInspector", "init_libnvinfer_plugins", "Builder", "OnnxParser")
"""Read from tensorrt-lean 8.6.0 and from tensorrt-{lean,dispatch}-cu12-bindings 10.16.1.11."""
MODULES = (
    *("tensorrt", "tensorrt_lean", "tensorrt_lean_bindings", "tensorrt_dispatch", "tensorrt_dispatch_bindings"),
    "tensorrt_rtx",
)
COMPATIBLE = {"version_compatible": True}


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    return Bundle(tmp_path, monkeypatch)


def install(bundle, monkeypatch, built, **versions):
    """A version-compatible engine of `built`, and of TensorRT's modules these alone: name -> version."""
    rigs = {name: bundle.rig(built, installed=version, settings=COMPATIBLE) for name, version in versions.items()}
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, rigs[name].module if name in rigs else None)
    for name in set(rigs) - {"tensorrt"}:
        for missing in NOT_IN_SMALL_RUNTIMES:
            delattr(rigs[name].module, missing)
    return rigs


def opened(bundle, **changes):
    return EngineSession.open(bundle.path, allow_host_code=True, **changes)


@pytest.mark.parametrize("module", MODULES[1:5])
@pytest.mark.parametrize("version", [version for version in VERSIONS if version.startswith("10")])
def test_an_engine_of_8_6_runs_in_the_small_runtimes_of_10(bundle, monkeypatch, module, version):
    (rig,) = install(bundle, monkeypatch, "8.6.1", **{module: version}).values()

    with opened(bundle) as session:
        assert session.tensorrt == f"{module.removesuffix('_bindings')} {version}"
        assert session.run({"x": X})["y"].tolist() == (2 * X).tolist()
        assert session.run({"x": X}, with_graph=True)["y"].tolist() == (2 * X).tolist()
        assert session.run({"x": np.ones((8, 8))})["y"].tolist() == np.full((8, 8), 2.0).tolist()
        assert layer_types(session.layers_json()) == {}

    assert "Runtime.engine_host_code_allowed = True" in rig.trace
    assert ends_clean(rig)


@pytest.mark.parametrize(
    ("installed", "asked", "taken"),
    [
        (("tensorrt", "tensorrt_lean", "tensorrt_dispatch"), None, "tensorrt"),
        (("tensorrt_lean", "tensorrt_dispatch"), None, "tensorrt_lean"),
        (("tensorrt_dispatch", "tensorrt_dispatch_bindings"), None, "tensorrt_dispatch"),
        (("tensorrt", "tensorrt_lean", "tensorrt_dispatch"), "tensorrt_dispatch", "tensorrt_dispatch"),
    ],
)
def test_the_fullest_runtime_is_taken_unless_one_is_named(bundle, monkeypatch, installed, asked, taken):
    install(bundle, monkeypatch, "8.6.1", **dict.fromkeys(installed, "10.16.1.11"))

    with opened(bundle, runtime=asked) as session:
        assert session.tensorrt == f"{taken} 10.16.1.11"


@pytest.mark.parametrize(
    ("built", "found", "last"),
    [
        ("8.6.1", "8.6.1", None),
        ("8.6.1", "10.0.1", None),
        ("8.6.1", "10.16.1.11", None),
        ("8.6.1", "11.0.0.114", "10.x"),  # two majors on
        ("10.3.0", "10.16.1.11", None),
        ("10.3.0", "11.4.0.106", None),
        ("10.16.1.11", "10.3.0", "11.x"),  # back
        ("10.0.1", "8.6.1", "11.x"),
        ("11.0.0.114", "11.4.0.106", None),
        ("11.0.0.114", "10.16.1.11", "11.x"),
    ],
)
def test_which_versions_run_a_version_compatible_engine(bundle, monkeypatch, built, found, last):
    rig = install(bundle, monkeypatch, built, tensorrt=found)["tensorrt"]

    if last is None:
        opened(bundle).close()
        return
    with pytest.raises(SeveralErrors) as caught:
        opened(bundle)

    (problem,) = caught.value.problems
    assert problem.summary == f"net-h200 is for tensorrt {built} to {last}, and {found} is installed"
    assert problem.next_step == f"pip install tensorrt=={built}"
    assert not [line for line in rig.trace if line.startswith(("Runtime", "cuda."))]


def test_other_engines_run_in_the_full_runtime_alone(bundle, monkeypatch):
    bundle.rig("8.6.1")
    for module in MODULES:
        monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(CapabilityError, match=r"net-h200 needs tensorrt 8\.6\.1, which is not installed") as caught:
        opened(bundle)
    assert len(caught.value.problems[0].detail) == 1

    with pytest.raises(CapabilityError, match="net-h200 runs in tensorrt, found runtime 'tensorrt_lean'") as caught:
        opened(bundle, runtime="tensorrt_lean")
    assert caught.value.problems[0].next_step == "trtforge build SPEC  # with builder: {version_compatible: true}"


def test_a_runtime_that_is_none_or_not_installed(bundle, monkeypatch):
    install(bundle, monkeypatch, "8.6.1", tensorrt="8.6.1")

    with pytest.raises(CapabilityError, match="found runtime 'trt'") as caught:
        opened(bundle, runtime="trt")
    assert caught.value.problems[0].next_step == "name one of: tensorrt, tensorrt_lean, tensorrt_dispatch"

    with pytest.raises(CapabilityError, match="which is not installed") as caught:
        opened(bundle, runtime="tensorrt_dispatch")
    assert caught.value.problems[0].next_step == "pip install tensorrt_dispatch==8.6.1"
