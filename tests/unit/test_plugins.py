"""Plugin libraries that a spec names: looked at, never loaded; and TensorRT's version where no distribution tells it."""

from __future__ import annotations

import pytest

from trtforge.backends.plugins import plugin_digests
from trtforge.digests import file_digest
from trtforge.errors import SeveralErrors
from trtforge.machine import _version_in_source
from trtforge.spec.load import load_spec

ELF = b"\x7fELF\x02\x01\x01" + bytes(9)
SPEC = "version: 1\nname: net\nmodel: {onnx: net.onnx}\ntargets: [{backend: %s, gpus: [%s]}]\nplugins: [lib/own.so]\n"


def digests(folder, content, backend="tensorrt", gpu="T4"):
    (folder / "lib").mkdir()
    if content is not None:
        (folder / "lib" / "own.so").write_bytes(content)
    (folder / "net.yaml").write_text(SPEC % (backend, gpu))
    return plugin_digests(load_spec(folder / "net.yaml"), file_digest)


def test_a_shared_library_lies_beside_the_spec(tmp_path):
    path = tmp_path / "lib" / "own.so"

    assert digests(tmp_path, ELF + b"\x03\x00") == {path: file_digest(path)}


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, "No such file or directory"),
        (b"", "expected a 64-bit ELF shared library (.so)"),
        (ELF + b"\x02\x00", "expected a 64-bit ELF shared library (.so)"),  # an executable
        (b"\x7fELF\x01\x01" + bytes(10) + b"\x03\x00", "expected a 64-bit ELF shared library (.so)"),  # 32 bits
        (b"version https://git-lfs.github.com/spec/v1\n", "expected a 64-bit ELF shared library (.so)"),
    ],
)
def test_anything_else_is_refused(tmp_path, content, found):
    with pytest.raises(SeveralErrors) as caught:
        digests(tmp_path, content)

    (problem,) = caught.value.problems
    assert problem.summary.endswith(f"own.so: {found}")
    assert (problem.exit_code, problem.where.line) == (2, 5)


def test_tensorrt_rtx_takes_none(tmp_path):
    with pytest.raises(SeveralErrors) as caught:
        digests(tmp_path, ELF + b"\x03\x00", "tensorrt_rtx", "sm86")

    (problem,) = caught.value.problems
    assert (problem.summary, problem.exit_code) == ("TensorRT-RTX takes no plugins, and the spec names some", 6)


@pytest.mark.parametrize(
    ("text", "version"), [('__version__ = "8.6.1"\n', "8.6.1"), ("from x import __version__\n", ""), (None, "")]
)
def test_version_of_a_module_without_a_distribution(tmp_path, monkeypatch, text, version):
    if text is not None:
        (tmp_path / "some_bindings").mkdir()
        (tmp_path / "some_bindings" / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    assert _version_in_source("some_bindings") == version
