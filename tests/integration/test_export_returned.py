"""What an export callable returns is checked whole before anything is exported."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

FOLDER = Path(__file__).parent / "exports"


@pytest.fixture(scope="module")
def callables():
    sys.path.insert(0, str(FOLDER))
    yield {name: importlib.import_module(name) for name in ("broken", "sound")}
    sys.path.remove(str(FOLDER))


@pytest.fixture
def problems(callables, tmp_path):
    from trtforge.graph import export_child

    def of(name):
        payload = {"path": str(tmp_path / "model.onnx"), "opset": 17, "inline_limit_bytes": 1 << 30}
        return export_child.export(getattr(callables["broken"], name), payload, {}, lambda _: None)["problems"]

    return of


@pytest.mark.parametrize(
    ("name", "summary", "next_step"),
    [
        ("returns_a_model", "returned sound.Tagger, expected a tuple", "return (model, {"),
        ("returns_nothing", "returned None, expected a tuple", "return (model, {"),
        ("returns_a_class", "returned the class Tagger as the model", "return an instance of it"),
        ("misnames", "gives the example input 'idz', which forward does not take", "rename it to 'ids'"),
        ("gives_a_number_as_input", "returned int as example input 'ids', expected a tensor", "make it a tensor"),
        ("forgets_an_input", "gives no example input 'ids', which forward needs", "add 'ids'"),
        ("wrong_number_of_names", "gives 1 output_names, the model returns 2 tensors", "output_0, output_1"),
        ("returns_text", "the model returns str as 'language', expected tensors", "returns tensors only"),
    ],
)
def test_a_wrong_part_is_named(problems, name, summary, next_step):
    (problem,) = problems(name)

    assert summary in problem["summary"]
    assert next_step in problem["next_step"]


def test_all_wrong_parts_are_named_at_once(problems):
    assert [problem["next_step"] for problem in problems("returns_a_dict_without_axes")] == [
        "rename it to 'example_inputs'",
        "return (model, {'input_ids': tensor}, {'input_ids': {0: 'batch'}})",
    ]
    assert [problem["summary"].partition(",")[0] for problem in problems("many_wrong_axes")] == [
        "gives the dynamic axis 2 of 'ids'",
        "gives dynamic axes of 'maks'",
        "calls two axes 'n' that differ in size: axis 0 of 'mask' is 2",
    ]
