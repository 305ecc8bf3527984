"""Facts of this machine, and what is made of a CUDA driver that answers or does not."""

from __future__ import annotations

import ctypes
import platform
from types import SimpleNamespace

import onnx
import pytest

from trtforge import machine


def test_facts_of_this_machine():
    facts = machine.machine_facts()
    assert facts.python_version == platform.python_version()
    assert facts.packages["onnx"] == onnx.__version__
    assert bool(facts.gpus) != bool(facts.cuda_error)


def stores(value):
    """A driver call that writes `value` through its first argument."""

    def call(pointer, *_):
        pointer._obj.value = value
        return 0

    return call


def device_name(text, *_):
    text.value = b"NVIDIA H200"
    return 0


def attribute(value, number, *_):
    value._obj.value = {16: 132, 75: 9, 76: 0}[number]
    return 0


def uuid_bytes(raw, *_):
    raw[:] = range(16)
    return 0


def error_name(_, text):
    text._obj.value = b"CUDA_ERROR_NO_DEVICE"
    return 0


@pytest.fixture
def driver(monkeypatch):
    """What libcuda answers on a machine with one H200."""
    answers = SimpleNamespace(
        cuDriverGetVersion=stores(13000),
        cuInit=lambda _: 0,
        cuGetErrorName=error_name,
        cuDeviceGetCount=stores(1),
        cuDeviceGet=stores(0),
        cuDeviceGetName=device_name,
        cuDeviceTotalMem_v2=stores(150_109_880_320),
        cuDeviceGetAttribute=attribute,
        cuDeviceGetUuid=uuid_bytes,
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda _: answers)
    return answers


def test_gpus_of_a_driver(driver):
    version, gpus, error = machine._cuda_facts()
    assert (version, error) == ("13.0", "")
    assert gpus == (
        machine.GpuFacts(
            index=0,
            device_name="NVIDIA H200",
            model="H200",
            compute_capability="sm90",
            num_sms=132,
            memory_bytes=150_109_880_320,
            uuid="GPU-00010203-0405-0607-0809-0a0b0c0d0e0f",
        ),
    )


def test_driver_without_gpu_says_why(driver):
    driver.cuInit = lambda _: 100
    assert machine._cuda_facts() == ("13.0", (), "cuInit gave CUDA_ERROR_NO_DEVICE (100)")


def test_gpu_without_uuid(driver):
    driver.cuDeviceGetUuid = lambda *_: 999
    assert machine._cuda_facts()[1][0].uuid == ""


def test_no_driver(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    version, gpus, error = machine._cuda_facts()
    assert (version, gpus) == ("", ())
    assert "no CUDA driver on this machine" in error


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n", "535.104.05"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build\nGCC version: 12.2.0",
            "580.159.03",
        ),
        ("570.86\n", "570.86"),
    ],
)
def test_driver_version_file(tmp_path, monkeypatch, text, version):
    path = tmp_path / "version"
    path.write_text(text)
    monkeypatch.setattr(machine, "_VERSION_FILES", (tmp_path / "absent", path))
    assert machine._driver_version() == version
