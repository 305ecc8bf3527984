"""The starter spec: loads as YAML whatever the model says, and once its blanks are filled it is a spec."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtforge.errors import TrtForgeError
from trtforge.spec.load import load_spec
from trtforge.spec.model import BLANK
from trtforge.spec.starter import starter_spec
from trtforge.spec.yaml_values import read_yaml
from trtforge.types import Graph, InputRole, TensorSpec

HOSTILE = (
    "a\nb",
    "a\n- version: 2",
    "\r\n\x85\u2028\u2029",
    "\t",
    'say "yes"',
    "it's",
    "a # b",
    "a: b",
    "{}",
    "[x]",
    "<<",
    "*alias",
    "&anchor",
    "!!tag",
    "%YAML 1.1",
    "---",
    "? x",
    "| x",
    "~",
    "null",
    "true",
    "010",
    "1e5",
    "",
    " ",
    " lead",
    "trail ",
    "back\\slash\\n",
    "bell\x07\x1b[31m\x7f\x9b",
    "Größe_入力",
    "smile😀",
    "\ufeffbom",
    "right\u202eleft",
    "x" * 3000,
    "é\n" * 600,
    "@at",
    "`tick",
    "::",
    "a/b.c-d:0",
    BLANK,
)


def _graph(*tensors, roles=()):
    """A graph of inputs; a role of `free` where none is given."""
    known = {role.name: role for role in roles}
    return Graph(
        path=Path("m.onnx"),
        source=Path("m.onnx"),
        weights_dir=Path(),
        digest="0" * 64,
        ir_version=9,
        opsets=(("", 17),),
        producer="",
        inputs=tensors,
        outputs=(),
        roles=tuple(known.get(t.name) or InputRole(t.name, "free", 0, 1, "nothing limits it") for t in tensors),
        data_dependent_outputs=(),
        operators=(),
        element_types=("float32",),
        has_qdq=False,
        wide_int_constants=(),
        num_nodes=3,
        weight_bytes=0,
    )


@pytest.fixture
def written(tmp_path):
    """Writes text to a spec file."""

    def write(text):
        path = tmp_path / "net.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_a_batch_is_proposed_and_the_spec_is_complete(written):
    graph = _graph(TensorSpec("image", "float32", ("N", 3, 8, 8)), TensorSpec("scale", "float32", (1,)))

    spec = load_spec(written(starter_spec(graph, name="net", onnx="m.onnx"))).spec

    (profile,) = spec.profiles
    assert list(profile.inputs) == ["image"]
    shapes = profile.inputs["image"]
    assert (shapes.min, shapes.opt, shapes.max) == ((1, 3, 8, 8), (8, 3, 8, 8), (32, 3, 8, 8))
    assert spec.name == "net"
    assert spec.model.onnx.name == "m.onnx"


@pytest.mark.parametrize(
    ("shape", "blanks"),
    [
        ((None, 3), 0),
        (("batch_size", 3), 0),
        (("unk__0", 3), 1),
        (("N", "seq"), 1),
        ((4, None, "H", "W"), 3),
        (("seq", "batch"), 2),
    ],
)
def test_only_a_leading_batch_is_guessed(written, shape, blanks):
    text = starter_spec(_graph(TensorSpec("x", "float32", shape)), name="net", onnx="m.onnx")

    (values, _) = read_yaml(written(text))

    assert values["profiles"][0]["inputs"]["x"]["min"].count(BLANK) == blanks


def test_a_static_model_needs_no_profile(written):
    text = starter_spec(_graph(TensorSpec("x", "float32", (1, 3))), name="net", onnx="m.onnx")

    assert load_spec(written(text)).spec.profiles == ()


SIZES = TensorSpec("size", "int64", (2,))
SIZES_ROLE = InputRole("size", "shape_values", 1, 64, "second input of Reshape")


def test_blanks_are_reported_where_they_stand(written):
    graph = _graph(TensorSpec("ids", "int64", ("N", "seq")), SIZES, roles=(SIZES_ROLE,))
    text = starter_spec(graph, name="net", onnx="m.onnx")

    with pytest.raises(TrtForgeError) as stopped:
        load_spec(written(text))

    marked = [(number, match.start() + 1) for number, line in _numbered(text) for match in re.finditer(BLANK, line)]
    assert len(marked) == 3 + 6
    assert [(problem.where.line, problem.where.column) for problem in stopped.value.problems] == marked
    assert all("the blank that trtforge init left" in problem.summary for problem in stopped.value.problems)


def _numbered(text):
    return [(n, line) for n, line in enumerate(text.splitlines(), start=1) if not line.lstrip().startswith("#")]


def test_filled_blanks_make_a_spec(written):
    graph = _graph(TensorSpec("ids", "int64", ("N", "seq")), SIZES, roles=(SIZES_ROLE,))
    text = starter_spec(graph, name="net", onnx="m.onnx").replace(BLANK, "16")

    inputs = load_spec(written(text)).spec.profiles[0].inputs

    assert (inputs["ids"].min, inputs["ids"].max) == ((1, 16), (32, 16))
    assert inputs["size"].values.opt == (16, 16)


@pytest.mark.parametrize(("shape", "num_values"), [((), 1), ((3,), 3), (("n",), 1), ((10**9,), 64)])
def test_shape_values_have_a_blank_for_each_element_up_to_tensorrts_limit(written, shape, num_values):
    graph = _graph(TensorSpec("size", "int64", shape), roles=(SIZES_ROLE,))

    values, _ = read_yaml(written(starter_spec(graph, name="net", onnx="m.onnx")))

    assert values["profiles"][0]["inputs"]["size"]["values"]["min"] == [BLANK] * num_values


@pytest.mark.parametrize(("low", "high"), [(0, 1234567), (-1.5, 2.25), (0, 2**40 - 1), (0.0, 1e-7), (-(2**31), 30521)])
def test_the_uncommented_ranges_are_exactly_those_seen(written, low, high):
    role = InputRole("x", "free", low, high, "seen in the model")
    text = starter_spec(_graph(TensorSpec("x", "float32", (1,)), roles=(role,)), name="net", onnx="m.onnx")

    spec = load_spec(written(_uncommented(text))).spec

    assert spec.inputs["x"].kind == "free"
    assert spec.inputs["x"].range == (low, high)


def _uncommented(text):
    before, marker, after = text.partition("# inputs:\n")
    assert marker
    return f"{before}inputs:\n{re.sub('^# ', '', after.replace('#   ', '  '), flags=re.MULTILINE)}"


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text)[:25])
def test_what_a_model_says_stays_data(written, text):
    tensors = (TensorSpec(text, "float32", ("N", text)), TensorSpec("other", "int64", (2,)))
    roles = (InputRole(text, "free", 0, 1, text), InputRole("other", "shape_values", 1, 9, text))

    values, _ = read_yaml(written(starter_spec(_graph(*tensors, roles=roles), name=text, onnx=text)))

    assert list(values) == ["version", "name", "model", "profiles", "precision", "targets", "output"]
    assert values["name"] == text
    assert values["model"] == {"onnx": text}
    assert list(values["profiles"][0]["inputs"]) == [text, "other"]
    assert values["profiles"][0]["inputs"][text]["min"] == [1, BLANK]


@settings(deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30))
def test_any_name_survives(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "starter.yaml"
    graph = _graph(TensorSpec(text, "float32", (None, text)), roles=(InputRole(text, "free", 0, 1, text),))
    path.write_text(starter_spec(graph, name="net", onnx=text), encoding="utf-8")

    values, _ = read_yaml(path)

    assert values["model"]["onnx"] == text
    assert list(values["profiles"][0]["inputs"]) == [text]


def test_hostile_text_in_comments_is_escaped():
    role = InputRole("x", "free", 0, 1, "seen\nversion: 2\x1b[2J")
    graph = _graph(TensorSpec("x", "float32", ("N", "a\nb")), roles=(role,))

    text = starter_spec(graph, name="net", onnx="m.onnx")

    assert "# float32 (N, a\\nb)" in text
    assert "# seen\\nversion: 2\\x1b[2J" in text
