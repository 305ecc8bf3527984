"""GPU names as people write them and as CUDA reports them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtforge.errors import CapabilityError
from trtforge.gpu_models import GPU_MODELS, gpu_model, model_of_device, parse_compute_capability


@pytest.mark.parametrize(
    ("device_name", "model"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("A100-PCIE-40GB", "A100"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 3080 Ti", "RTX 3080 Ti"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 D", "RTX 4090 D"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("Quadro RTX 6000", "Quadro RTX 6000"),
        ("Orin", "Jetson Orin"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3050 Ti Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA H999", None),
        ("", None),
    ],
)
def test_model_of_device(device_name, model):
    assert model_of_device(device_name) == model


@pytest.mark.parametrize("name", ["RTX 4090", "rtx4090", "RTX-4090", "NVIDIA GeForce RTX 4090", "GEFORCE RTX4090"])
def test_gpu_model_ignores_case_spaces_dashes_and_vendor(name):
    assert gpu_model(name) == GPU_MODELS["RTX 4090"]
    assert gpu_model(name).compute_capability == "sm89"


@pytest.mark.parametrize(("name", "step"), [("L40SS", "write L40S"), ("RTX 409", "RTX 4090"), ("zzz", "such as T4")])
def test_unknown_model_gives_the_closest(name, step):
    with pytest.raises(CapabilityError, match=f"'{name}'") as caught:
        gpu_model(name)
    assert step in caught.value.problems[0].next_step


@pytest.mark.parametrize(
    ("text", "expected"),
    [("sm86", "sm86"), ("SM_86", "sm86"), ("8.6", "sm86"), ("86", "sm86"), ("12.0", "sm120"), (" sm121 ", "sm121")],
)
def test_parse_compute_capability(text, expected):
    assert parse_compute_capability(text) == expected


@pytest.mark.parametrize("text", ["", "sm", "8", "8.66", "sm1200", "A100", "8.6.1", "-8.6", "sm8.x"])
def test_no_compute_capability(text):
    with pytest.raises(CapabilityError, match="no compute capability"):
        parse_compute_capability(text)


@given(st.sampled_from(sorted(GPU_MODELS)))
def test_every_model_is_found_by_its_own_name(name):
    assert gpu_model(name.lower().replace(" ", "")).name == name
    model = GPU_MODELS[name]
    assert model_of_device(f"NVIDIA {model.reported_as or name}") == name
    assert parse_compute_capability(model.compute_capability) == model.compute_capability
