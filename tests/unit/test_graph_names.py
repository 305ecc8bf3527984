from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtforge.errors import Where
from trtforge.graph.model_file import node_lists
from trtforge.graph.names import mend, name_nodes, sort_nodes

AT = Where(Path("m.onnx"))
HEAD = '<ir_version: 8, opset_import: ["": 17]> g (bool c, float[2] x) => (float[2] y)'

CHAIN = [f"[n{i}] v{i + 1} = Add (v{i}, v{max(0, i - 2)})" for i in range(8)]


def parse(*nodes: str, head: str = HEAD) -> onnx.ModelProto:
    return onnx.parser.parse_model(head + "{" + "\n".join(nodes) + "}")


def names(model: onnx.ModelProto) -> list[str]:
    return [node.name for _, nodes in node_lists(model) for node in nodes]


def problems(model: onnx.ModelProto) -> list[str]:
    return [problem.summary for problem in sort_nodes(model, AT)[1]]


def test_c22_nameless_and_duplicate_names_become_unique():
    nodes = ["[n] a = Relu (x)", "[n] b = Relu (a)", "d = Relu (b)", "y = Neg (d)"]
    model = parse(*nodes)
    assert name_nodes(model) == ("n_1", "Relu_2", "Neg_3")
    assert names(model) == ["n", "n_1", "Relu_2", "Neg_3"]
    assert [list(node.output) for node in model.graph.node] == [["a"], ["b"], ["d"], ["y"]]
    assert name_nodes(model) == ()


def test_generated_names_step_around_taken_ones():
    model = parse("[Neg_1] a = Relu (x)", "b = Neg (a)", "[n] d = Neg (b)", "[n_1] e = Neg (d)", "[n] y = Neg (e)")
    name_nodes(model)
    assert names(model) == ["Neg_1", "Neg_1_1", "n", "n_1", "n_2"]


def test_names_are_unique_across_subgraphs():
    model = parse(
        "[n] a = Relu (x)",
        "y = If (c) <then_branch = t () => (float[2] p) { [n] p = Neg (a) }, else_branch = e () => (float[2] q) { q = Abs (a) }>",
    )
    name_nodes(model)
    assert names(model) == ["n", "If_1", "n_1", "If_1/else_branch/Abs_0"]


def test_names_in_a_function_are_its_own():
    function = '<domain: "f", opset_import: ["": 17]> fn (p) => (r) { [n] q = Neg (p) r = Abs (q) }'
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "f": 1]> g (float[2] x) => (float[2] y) { [n] y = f.fn (x) }' + function
    )
    assert name_nodes(model) == ("Abs_1",)
    assert names(model) == ["n", "n", "Abs_1"]


def test_c24_late_node_moves_behind_what_it_reads():
    model = parse("[late] y = Neg (h)", "[early] h = Relu (x)")
    assert sort_nodes(model, AT) == (1, [])
    assert names(model) == ["early", "late"]
    assert mend(model, AT) == ([], [])


def test_order_of_the_file_stays_where_it_is_legal():
    model = parse("[a] p = Neg (x)", "[b] y = Add (q, p)", "[d] q = Abs (x)", "[e] r = Relu (x)")
    sort_nodes(model, AT)
    assert names(model) == ["a", "d", "b", "e"]


def test_subgraph_reads_of_outer_values_count_for_order():
    branch = "() => (float[2] p) { [deep] p = Neg (h) }"
    model = parse(
        f"[if] y = If (c) <then_branch = t {branch}, else_branch = e () => (float[2] p) {{ [d2] p = Abs (x) }}>",
        "[early] h = Relu (x)",
    )
    assert sort_nodes(model, AT) == (1, [])
    assert [node.name for node in model.graph.node] == ["early", "if"]


def test_nodes_inside_a_subgraph_are_sorted_too():
    model = parse(
        "[if] y = If (c) <then_branch = t () => (float[2] p) { [late] p = Neg (h) [early] h = Abs (x) },"
        " else_branch = e () => (float[2] p) { [d2] p = Abs (x) }>"
    )
    notes, found = mend(model, AT)
    assert (notes, found) == (["put 1 node into topological order"], [])
    assert names(model) == ["if", "early", "late", "d2"]


@pytest.mark.parametrize(
    ("nodes", "summary"),
    [
        (["[n] y = Neg (hh)"], "node 'n' (Neg) reads 'hh', but nothing produces that value"),
        (["y = Neg (hh)"], "node Neg that gives 'y' reads 'hh', but nothing produces that value"),
        (["[n] z = Neg (x)"], "output 'y' is declared, but nothing produces that value"),
        (
            ["[a] y = Neg (x)", "[b] y = Abs (x)"],
            "value 'y' is produced twice: by node 'a' (Neg) and by node 'b' (Abs)",
        ),
        (
            ["[a] y = Neg (x)", "[b] c = Abs (x)"],
            "value 'c' is produced twice: by an input or initializer and by node 'b' (Abs)",
        ),
        (
            ["[r] y = Relu (x)", "[a] p = Neg (q)", "[b] q = Abs (p)"],
            "nodes wait for each other in a cycle: 'b' (Abs), 'a' (Neg)",
        ),
        (["[r] y = Relu (y)"], "nodes wait for each other in a cycle: 'r' (Relu)"),
    ],
)
def test_broken_graphs_name_nodes_and_values(nodes, summary):
    assert problems(parse(*nodes)) == [summary]


def test_unknown_value_in_a_subgraph_is_reported_once_with_its_place():
    branch = "() => (float[2] p) { [i] p = Neg (nope) }"
    model = parse(f"[if] y = If (c) <then_branch = t {branch}, else_branch = e () => (float[2] p) {{ p = Abs (x) }}>")
    assert problems(model) == ["node 'i' (Neg) in if/then_branch reads 'nope', but nothing produces that value"]


def test_values_of_one_branch_are_unknown_in_the_other():
    model = parse(
        "[if] y = If (c) <then_branch = t () => (float[2] p) { [i] h = Neg (x) [j] p = Neg (h) },"
        " else_branch = e () => (float[2] q) { [k] q = Abs (h) }>"
    )
    assert problems(model) == ["node 'k' (Abs) in if/else_branch reads 'h', but nothing produces that value"]


def test_nearest_value_is_suggested():
    (problem,) = sort_nodes(parse("[a] hidden = Relu (x)", "[n] y = Neg (hiden)"), AT)[1]
    assert problem.next_step.startswith("correct 'hiden' to 'hidden'")


@given(st.permutations(range(len(CHAIN))))
@settings(deadline=None)
def test_shuffled_nodes_are_sorted_and_sorting_again_changes_nothing(permutation):
    head = '<ir_version: 8, opset_import: ["": 17]> g (float[2] v0) => (float[2] v8)'
    model = parse(*(CHAIN[i] for i in permutation), head=head)
    moved, found = sort_nodes(model, AT)
    assert found == []
    assert names(model) == [f"n{i}" for i in range(len(CHAIN))]
    assert (moved == 0) == (list(permutation) == sorted(permutation))
    before = model.SerializeToString()
    assert mend(model, AT) == ([], [])
    assert model.SerializeToString() == before
