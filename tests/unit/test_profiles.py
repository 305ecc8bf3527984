"""Optimization profiles: what is refused, with which words and at which place, and what comes out."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trtforge.errors import SeveralErrors
from trtforge.shapes.profiles import paste_entry, resolve_profiles
from trtforge.spec.load import load_spec
from trtforge.types import POINTS, Graph, InputRole, ShapeRange, TensorSpec

HEAD = "version: 1\nname: net\nmodel: {onnx: m.onnx}\ntargets: [{backend: tensorrt_rtx, gpus: [sm86]}]\n"
X = TensorSpec("x", "float32", ("N", 3, 8, 8))
A, B = TensorSpec("a", "float32", ("N", 4)), TensorSpec("b", "float32", ("N", 4))
SHP = TensorSpec("shp", "int64", (2,))
DATA = TensorSpec("x", "float32", ("N", 12))
GOOD_X = "x: {min: [1, 3, 8, 8], opt: [2, 3, 8, 8], max: [8, 3, 8, 8]}"


def graph_of(*inputs: TensorSpec, **kinds: str) -> Graph:
    return Graph(
        source=Path("m.onnx"),
        path=Path("m.onnx"),
        weights_dir=Path(),
        digest="",
        ir_version=8,
        opsets=(("", 17),),
        producer="",
        inputs=inputs,
        outputs=(),
        roles=tuple(InputRole(spec.name, kinds.get(spec.name, "free"), 0, 1, "") for spec in inputs),
        data_dependent_outputs=(),
        operators=(),
        element_types=(),
        has_qdq=False,
        wide_int_constants=(),
        num_nodes=1,
        weight_bytes=0,
    )


@pytest.fixture
def resolve(tmp_path):
    """Resolves the spec made of HEAD and a text against a graph."""

    def resolve_text(text, graph):
        path = tmp_path / "spec.yaml"
        path.write_text(HEAD + text)
        return resolve_profiles(load_spec(path), graph)

    return resolve_text


@pytest.fixture
def problems(resolve):
    def problems_of(text, graph):
        with pytest.raises(SeveralErrors) as caught:
            resolve(text, graph)
        assert all(problem.exit_code == 2 and problem.next_step and problem.where for problem in caught.value.problems)
        return caught.value.problems

    return problems_of


def entry(text: str, name: str = "p") -> str:
    return f"profiles: [{{name: {name}, inputs: {{{text}}}}}]"


def test_points_keep_their_order_and_inputs_the_graphs(resolve):
    (profile,) = resolve(entry("b: [1, 4], a: {min: [1, 4], opt: [1, 4], max: [1, 4]}"), graph_of(A, B))
    assert list(profile.shapes) == ["a", "b"]
    (profile,) = resolve(entry(GOOD_X), graph_of(X))
    assert profile.shapes["x"] == ShapeRange((1, 3, 8, 8), (2, 3, 8, 8), (8, 3, 8, 8))


@pytest.mark.parametrize("text", ["", entry(""), entry("s: [1, 3]")])
def test_static_input_needs_no_entry_and_takes_an_exact_one(resolve, text):
    (profile,) = resolve(text, graph_of(TensorSpec("s", "float32", (1, 3))))
    assert profile.shapes == {"s": ShapeRange((1, 3), (1, 3), (1, 3))}


def test_c01_uncovered_input_is_named_with_an_entry_of_equal_symbols(problems):
    (problem,) = problems(entry("a: {min: [2, 4], opt: [3, 4], max: [9, 4]}"), graph_of(A, B))
    assert "b float32 (N, 4)" in problem.summary
    assert problem.next_step.endswith("b: {min: [2, 4], opt: [3, 4], max: [9, 4]}")


def test_c01_block_for_no_profile_at_all_can_be_pasted(problems, resolve):
    (problem,) = problems("", graph_of(A, B))
    assert "a float32 (N, 4), b float32 (N, 4)" in problem.summary
    (profile,) = resolve("\n".join(problem.detail), graph_of(A, B))
    assert profile.shapes["a"] == profile.shapes["b"]


@pytest.mark.parametrize(("batches", "ordered"), [((4, 2, 8), (2, 4, 8)), ((1, 16, 8), (1, 8, 16))])
def test_c03_order_names_axis_and_three_numbers(problems, batches, ordered):
    low, usual, high = batches
    text = entry(f"x: {{min: [{low}, 3, 8, 8], opt: [{usual}, 3, 8, 8], max: [{high}, 3, 8, 8]}}")
    (problem,) = problems(text, graph_of(X))
    assert f"axis 0 of 'x' in profiles[0]: found min {low}, opt {usual}, max {high}" in problem.summary
    assert "min {}, opt {}, max {}".format(*ordered) in problem.next_step


def test_c04_close_name_is_suggested_and_stands_for_the_missing_one(problems):
    (problem,) = problems(entry("X: 1x3x8x8"), graph_of(X))
    assert "'X'" in problem.summary
    assert problem.next_step == "rename it to 'x'"


def test_c04_c10_extra_name_does_not_pass(problems):
    (problem,) = problems(entry(f"{GOOD_X}, mask: [1, 4]"), graph_of(X))
    assert "profiles[0].inputs names 'mask', which is no input of m.onnx" in problem.summary
    assert problem.detail[0] == "the model's inputs: x float32 (N, 3, 8, 8)"
    assert "drops" in problem.detail[1]
    assert problem.next_step.startswith("remove 'mask'")


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ("[1, 3, 8]", "needs 4 sizes, the model's input is x float32 (N, 3, 8, 8); found [1, 3, 8] at all points"),
        ("[1, 3, 16, 8]", "axis 2 of 'x' in profiles[0] is 8 in the model, which fixes it; found 16 at all points"),
        ("{min: 1x3x4x8, opt: 1x3x8x8, max: 1x3x16x8}", "is 8 in the model, which fixes it; found min 4, opt 8"),
        ("[1, 3, 4, 8]", "axis 2 of 'x' in profiles[0] is 8 in the model, which fixes it; found 4 at all points"),
        ("{min: 0x3x8x8, opt: 1x3x8x8, max: 2x3x8x8}", "axis 0 of 'x' in profiles[0] is empty; found min 0"),
        ("{min: 1x3x8x8, max: 2x3x8x8}", "profiles[0].inputs.x has no opt; the model's input is x"),
    ],
)
def test_c05_one_message_for_each_clash(problems, shape, found):
    (problem,) = problems(entry(f"x: {shape}"), graph_of(X))
    assert found in problem.summary


def test_c05_range_on_a_static_axis(problems):
    static = graph_of(TensorSpec("x", "float32", (1, 3)))
    (problem,) = problems(entry("x: {min: [1, 3], opt: [1, 3], max: [8, 3]}"), static)
    assert "axis 0 of 'x' in profiles[0] is 1 in the model" in problem.summary


@pytest.mark.parametrize("text", [entry("x: [1, 12]"), entry("x: [1, 12], shp: [2]")])
def test_c06_shape_values_are_demanded(problems, text):
    (problem,) = problems(text, graph_of(DATA, SHP, shp="shape_values"))
    assert "values" in problem.summary
    assert problem.next_step.endswith("shp: {values: {min: [1, 1], opt: [1, 1], max: [1, 1]}}")


@pytest.mark.parametrize("shapes", ["", "min: [2], opt: [2], max: [2], "])
def test_c06_shape_values_are_taken(resolve, shapes):
    text = entry(f"x: [1, 12], shp: {{{shapes}values: {{min: [1, 12], opt: [2, 12], max: [4, 12]}}}}")
    (profile,) = resolve(text, graph_of(DATA, SHP, shp="shape_values"))
    assert profile.values == {"shp": ShapeRange((1, 12), (2, 12), (4, 12))}
    assert profile.shapes["shp"].opt == (2,)


def test_scalar_shape_value(resolve):
    count = TensorSpec("n", "int64", ())
    (profile,) = resolve(entry("n: {values: {min: [1], opt: [5], max: [9]}}"), graph_of(count, n="shape_values"))
    assert (profile.shapes["n"].opt, profile.values["n"].opt) == ((), (5,))


@pytest.mark.parametrize(
    ("shp", "values", "found"),
    [
        ((2,), "min: [1], opt: [2, 12], max: [4, 12]", "needs 2 numbers for shp int64 (2); found min [1]"),
        ((2,), "min: [4, 12], opt: [2, 12], max: [4, 12]", "value 0 of 'shp' in profiles[0]: found min 4, opt 2"),
        (("k",), "min: [1], opt: [2], max: [4]", "fixed length of at most 64"),
        ((65,), "min: [1], opt: [2], max: [4]", "fixed length of at most 64"),
        ((1, 2), "min: [1], opt: [2], max: [4]", "fixed length of at most 64"),
    ],
)
def test_shape_values_that_do_not_fit(problems, shp, values, found):
    graph = graph_of(TensorSpec("shp", "int64", shp), shp="shape_values")
    (problem,) = problems(entry(f"shp: {{values: {{{values}}}}}"), graph)
    assert found in problem.summary


def test_values_for_data_are_refused(problems):
    text = entry("x: {min: [1, 12], opt: [1, 12], max: [1, 12], values: {min: [1], opt: [1], max: [1]}}")
    (problem,) = problems(text, graph_of(DATA))
    assert problem.next_step == "remove values from profiles[0].inputs.x"


def test_declared_kind_says_that_an_input_is_no_shape(resolve):
    text = entry("x: [1, 12]") + "\ninputs: {shp: {kind: free}}"
    (profile,) = resolve(text, graph_of(DATA, SHP, shp="shape_values"))
    assert profile.values == {}


def test_shared_symbol_must_agree_at_each_point(problems):
    text = entry("a: {min: [1, 4], opt: [8, 4], max: [32, 4]}, b: {min: [1, 4], opt: [4, 4], max: [32, 4]}")
    (problem,) = problems(text, graph_of(A, B))
    assert "size 'N' is axis 0 of 'a' and axis 0 of 'b'" in problem.summary
    assert "found 8 and 4 at opt in profiles[0]" in problem.summary


def test_shared_symbol_within_one_input(problems, resolve):
    square = graph_of(TensorSpec("x", "float32", ("N", "N")))
    (problem,) = problems(entry("x: [2, 3]"), square)
    assert "found 2 and 3 at min, 2 and 3 at opt, 2 and 3 at max" in problem.summary
    assert resolve(entry("x: [3, 3]"), square)
    assert resolve(entry("x: [2, 3]"), graph_of(TensorSpec("x", "float32", (None, None))))


def test_same_profile_name_twice(problems):
    (problem,) = problems("profiles: [{inputs: {x: [1, 12]}}, {inputs: {x: [2, 12]}}]", graph_of(DATA))
    assert "profiles[0], profiles[1] are all named 'default'" in problem.summary


@pytest.mark.parametrize(
    ("dtype", "text", "found"),
    [
        ("float32", "inputs: {xx: {kind: free}}", "inputs names 'xx'"),
        ("uint8", "inputs: {x: {range: [0, 300]}}", "uint8 holds 0 to 255"),
        ("float16", "inputs: {x: {range: [0, 1e6]}}", "float16 holds"),
        ("int64", "inputs: {x: {range: [0.2, 0.8]}}", "no int64 value lies between them"),
    ],
)
def test_declared_inputs_are_checked(problems, dtype, text, found):
    (problem,) = problems(f"{entry('x: [1, 12]')}\n{text}", graph_of(TensorSpec("x", dtype, ("N", 12))))
    assert found in problem.summary


def test_range_of_shape_values_has_no_effect(problems):
    text = (
        entry("x: [1, 12], shp: {values: {min: [1, 1], opt: [1, 1], max: [1, 1]}}") + "\ninputs: {shp: {range: [0, 9]}}"
    )
    (problem,) = problems(text, graph_of(DATA, SHP, shp="shape_values"))
    assert "inputs.shp.range has no effect" in problem.summary


def test_all_problems_at_once_each_at_its_own_line(problems):
    text = """inputs: {maks: {kind: mask}}
profiles:
  - name: p
    inputs:
      x:
        min: [1, 3, 8, 8]
        opt: [4, 3, 8, 8]
        max: [2, 3, 8, 8]
  - name: p
    inputs:
      x:
        min: [1, 3, 9, 8]
        opt: [1, 3, 8, 8]
        max: [1, 3, 8, 8]
      y: [1]
"""
    found = {problem.where.line for problem in problems(text, graph_of(X))}
    assert found == {5, 11, 13, 16, 19}


def test_pasted_entry_quotes_a_key_that_yaml_would_misread():
    name = 'a: {b}, "c"'
    text = paste_entry(
        graph_of(TensorSpec(name, "float32", (None,)), TensorSpec("null", "int32", ("S", 2))), [name, "null"]
    )
    assert set(yaml.safe_load(text)) == {name, "null"}


_DIMS = st.lists(st.one_of(st.integers(1, 5), st.sampled_from(["N", "S"]), st.none()), max_size=4)


@given(dims=st.lists(_DIMS, min_size=1, max_size=3), kind=st.sampled_from(["free", "image", "mask"]))
def test_suggested_profile_is_always_a_good_one(tmp_path_factory, dims, kind):
    inputs = [TensorSpec(f"i{place}", "float32", tuple(shape)) for place, shape in enumerate(dims)]
    graph = graph_of(*inputs, **{spec.name: kind for spec in inputs})
    path = tmp_path_factory.mktemp("spec") / "spec.yaml"
    block = "".join(f"      {line}\n" for line in paste_entry(graph, [spec.name for spec in inputs]).splitlines())
    path.write_text(f"{HEAD}profiles:\n  - inputs:\n{block}")
    (profile,) = resolve_profiles(load_spec(path), graph)
    assert all(len(getattr(profile.shapes[spec.name], point)) == len(spec.shape) for spec in inputs for point in POINTS)
