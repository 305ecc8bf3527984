from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from trtforge.digests import file_digest
from trtforge.errors import StoreError, TrtForgeError, Where
from trtforge.graph.ingest import ingest
from trtforge.memo import DigestMemo
from trtforge.types import OperatorUse, TensorSpec

RELU = "g (float[N, 4] x) => (float[N, 4] y) { [r] y = Relu (x) }"


def parse(text: str, opset: int = 17, domains: str = "") -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}{domains}]> {text}')


def save(folder: Path, model: onnx.ModelProto, name: str = "m.onnx") -> Path:
    path = folder / name
    path.write_bytes(model.SerializeToString())
    return path


def graph_of(folder: Path, text: str, opset: int = 17, domains: str = ""):
    return ingest(save(folder, parse(text, opset, domains)), folder / "work")


def problems(folder: Path, model: onnx.ModelProto) -> list[str]:
    at = Where(Path("spec.yaml"), 3, 9)
    with pytest.raises(TrtForgeError) as caught:
        ingest(save(folder, model), folder / "work", where=at)
    assert all(problem.where == at and problem.exit_code == 3 for problem in caught.value.problems)
    return [problem.summary for problem in caught.value.problems]


def test_sound_model_is_used_as_it_is(tmp_path):
    path = save(tmp_path, parse(RELU))
    graph = ingest(path, tmp_path / "work")
    assert graph.path == path
    assert not (tmp_path / "work").exists()
    assert graph.notes == ()
    assert graph.inputs == (TensorSpec("x", "float32", ("N", 4)),)
    assert graph.operators == (OperatorUse("", "Relu", "", ("r",), 14),)
    assert (graph.opsets, graph.opset, graph.ir_version, graph.num_nodes) == ((("", 17),), 17, 8, 1)


def test_mended_model_is_written_and_ingested_again_unchanged(tmp_path):
    text = "g (float[2] x) => (float[2] y) { y = Neg (h) [early] h = Relu (x) }"
    graph = graph_of(tmp_path, text)
    assert graph.path == tmp_path / "work" / "graph.onnx"
    assert graph.notes == (
        "put 1 node into topological order",
        "renamed 1 node without a unique name: 'Neg_1'",
    )
    onnx.checker.check_model(graph.path)
    again = ingest(graph.path, tmp_path / "again")
    assert (again.path, again.notes) == (graph.path, ())
    assert again.operators == graph.operators
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["graph.onnx"]


def test_work_folder_that_cannot_be_made_is_a_store_error(tmp_path):
    (tmp_path / "file").touch()
    path = save(tmp_path, parse("g (float[2] x) => (float[2] y) { y = Neg (x) }"))
    with pytest.raises(StoreError, match="file is a file, expected a folder"):
        ingest(path, tmp_path / "file")


def test_c02_zero_symbol_and_unnamed_sizes_are_three_things(tmp_path):
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, "N", -1, "?", "", 4])
    model = parse(RELU)
    model.graph.input[0].CopyFrom(value)
    graph = ingest(save(tmp_path, model), tmp_path)
    assert graph.inputs[0].shape == (None, "N", None, None, None, 4)
    model.graph.input[0].type.tensor_type.shape.dim[5].dim_value = 0
    assert problems(tmp_path, model) == ["input 'x' has size 0 on axis 5; did you mean a symbol?"]


@pytest.mark.parametrize(
    ("type_text", "summary"),
    [
        ("float", "has no shape, not even a rank"),
        ("seq(float[2])", "is of sequence type, TensorRT takes dense tensors"),
        ("optional(float[2])", "is of optional type, TensorRT takes dense tensors"),
        ("map(int64, float[2])", "is of map type, TensorRT takes dense tensors"),
        ("sparse_tensor(float[2])", "is of sparse tensor type, TensorRT takes dense tensors"),
    ],
)
def test_inputs_must_be_dense_tensors_of_known_rank(tmp_path, type_text, summary):
    model = parse(f"g ({type_text} x) => (float[2] y) {{ [n] y = Neg (x) }}")
    if type_text == "float":
        model.graph.input[0].type.tensor_type.ClearField("shape")
    assert problems(tmp_path, model) == [f"input 'x' {summary}"]


def test_output_of_unknown_rank_is_inferred_where_possible(tmp_path):
    model = parse(RELU)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    assert ingest(save(tmp_path, model), tmp_path).outputs == (TensorSpec("y", "float32", ("N", 4)),)
    model.graph.node[0].domain = "acme"
    assert problems(tmp_path, model) == ["output 'y' has no shape, not even a rank"]


def test_graph_needs_inputs_and_outputs(tmp_path):
    model = parse(RELU)
    del model.graph.output[:]
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((1, 4), np.float32), "x"))
    assert problems(tmp_path, model) == ["the model has no inputs", "the model has no outputs"]


def test_initializers_are_no_inputs_and_unread_inputs_are_noted(tmp_path):
    model = parse("g (float[2] x, float[2] w, float[2] mask) => (float[2] y) { [n] y = Add (x, w) }")
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(2, np.float32), "w"))
    graph = ingest(save(tmp_path, model), tmp_path)
    assert [spec.name for spec in graph.inputs] == ["x", "mask"] == [role.name for role in graph.roles]
    assert graph.notes == ("no node reads input 'mask'",)


def test_c15_operator_is_checked_against_the_opset(tmp_path):
    text = "g (float[N, 4, 2] x, float[4] s) => (float[N, 4, 2] y) {{ [g] y = {} <num_groups = 2> (x, s, s) }}"
    norm = text.format("GroupNormalization")
    (use,) = graph_of(tmp_path, norm, 21).operators
    assert use.since_version == 21
    assert graph_of(tmp_path, norm, 18).notes == ("deprecated in ONNX: GroupNormalization-18",)
    assert problems(tmp_path, parse(norm, 17)) == [
        "operator GroupNormalization begins at opset 18, the model imports opset 17"
    ]
    with pytest.raises(TrtForgeError) as caught:
        graph_of(tmp_path, text.format("GroupNormalisation"), 21)
    (problem,) = caught.value.problems
    assert problem.summary == "operator GroupNormalisation is not in the standard operator set (opset 21)"
    assert problem.detail == ("node: 'g'",)
    assert problem.next_step.startswith("write GroupNormalization if that was meant; ")


@pytest.mark.parametrize("opset", [0, -3, 9999])
def test_unknown_opset_is_refused(tmp_path, opset):
    model = parse(RELU)
    model.opset_import[0].version = opset
    assert f"opset {opset} is not one that onnx" in problems(tmp_path, model)[0]


def test_conflicting_and_missing_imports_are_refused(tmp_path):
    model = parse(RELU)
    model.opset_import.append(helper.make_opsetid("ai.onnx", 13))
    assert problems(tmp_path, model) == ["operator set 'ai.onnx' is imported twice, at 17 and 13"]
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("acme", 1))
    assert problems(tmp_path, model) == [
        "standard operator Relu is used, but the standard operator set is not imported"
    ]


def test_c18_custom_operators_are_listed_with_their_scope(tmp_path):
    graph = graph_of(
        tmp_path,
        """g (float[2] x, bool c) => (float[2] y) {
            [n1] a = com.microsoft.FusedThing (x)
            [n2] b = mmdeploy.TRTBatchedNMSish (a)
            [n3] d = If (c) <then_branch = t () => (float[2] p) { [in_if] p = acme.ops.MysteryNorm (x) },
                             else_branch = e () => (float[2] q) { [id] q = Identity (x) }>
            [n4] y = Add (b, d)
        }""",
        domains=', "com.microsoft": 1, "mmdeploy": 1',
    )
    assert [use for use in graph.operators if use.since_version == 0] == [
        OperatorUse("com.microsoft", "FusedThing", "", ("n1",), 0),
        OperatorUse("mmdeploy", "TRTBatchedNMSish", "", ("n2",), 0),
        OperatorUse("acme.ops", "MysteryNorm", "n3/then_branch", ("in_if",), 0),
    ]


def test_local_functions_are_known_and_their_own_operators_listed(tmp_path):
    model = parse(
        """g (float[2] x) => (float[2] y) { [n] y = f.fn (x) }
        <domain: "f", opset_import: ["": 11]> fn (p) => (q) { [k] q = Relu (p) }""",
        domains=', "f": 3',
    )
    graph = ingest(save(tmp_path, model), tmp_path)
    assert graph.operators == (
        OperatorUse("f", "fn", "", ("n",), 3),
        OperatorUse("", "Relu", "function fn", ("k",), 6),
    )


def test_all_problems_at_once(tmp_path):
    model = parse("g (float[0] x) => (float[2] y) { [a] y = Neg (hh) [b] z = Nope (x) [d] w = Nada (x) }")
    model.graph.initializer.append(TensorProto(name="w0", data_type=1, dims=[4], raw_data=b""))
    assert len(problems(tmp_path, model)) == 5


def test_element_types_and_qdq(tmp_path):
    graph = graph_of(
        tmp_path,
        """g (float[2] x) => (int64[2] y) <float s = {0.5}, int8 z = {0}> {
            [q] a = QuantizeLinear (x, s, z) [d] b = DequantizeLinear (a, s, z)
            [c] h = Cast <to = 10> (b) [e] y = Cast <to = 7> (h)
        }""",
    )
    assert graph.has_qdq
    assert graph.element_types == ("float16", "float32", "int64", "int8")
    assert graph.weight_bytes == 5


def external_model(folder: Path, fill: float = 1.0) -> Path:
    folder.mkdir(exist_ok=True)
    model = parse("g (float[4] x) => (float[4] y) { y = Add (x, w) }")
    model.graph.initializer.append(numpy_helper.from_array(np.full(4, fill, np.float32), "w"))
    for name in ("m.onnx", "m.bin"):
        (folder / name).unlink(missing_ok=True)
    onnx.save(model, folder / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    return folder / "m.onnx"


def test_c19_external_data_is_found_from_any_folder_also_for_a_mended_copy(tmp_path, monkeypatch):
    path = external_model(tmp_path / "sub")
    digests = set()
    for folder, source in ((tmp_path, Path("sub/m.onnx")), (tmp_path / "sub", Path("m.onnx")), (Path("/"), path)):
        monkeypatch.chdir(folder)
        graph = ingest(source, tmp_path / "work")
        digests.add(graph.digest)
        assert graph.weights_dir == tmp_path / "sub"
        (file,) = graph.external_files
        assert (file.location, file.size_bytes) == ("m.bin", 16)
        assert file.digest == file_digest(tmp_path / "sub" / "m.bin")
        (tensor,) = onnx.load(graph.path, load_external_data=False).graph.initializer
        assert tensor.external_data[0].value == "m.bin"
    assert len(digests) == 1


def test_digest_follows_external_bytes_not_paths(tmp_path):
    one, same, other = (
        ingest(external_model(tmp_path / name, fill), tmp_path / "work").digest
        for name, fill in (("a", 1.0), ("b", 1.0), ("c", 2.0))
    )
    assert one == same != other


def test_memo_gives_the_same_digest(tmp_path):
    path = external_model(tmp_path / "a")
    plain = ingest(path, tmp_path).digest
    memo = DigestMemo(tmp_path / "memo.json")
    assert ingest(path, tmp_path, memo=memo).digest == plain == ingest(path, tmp_path, memo=memo).digest


SEEDS = [
    parse(RELU),
    parse(
        """g (int64[1] s, float[N] x, bool c) => (float[?] y) <int64[1] k = {3}, float[2, 2] w = {1, 2, 3, 4}> {
            a = Constant <value_float = 1.5> () b = Add (x, a) d = Mul (s, k) e = Reshape (b, d)
            f = OneHot (s, k, a) h = Equal (s, k) n = NonZero (x) r = Gather (w, s) m = Where (h, a, a)
            y = If (c) <then_branch = t () => (float[?] p) { p = Slice (e, s, k) },
                        else_branch = u () => (float[?] q) { q = f.fn (e, w) }>
        } <domain: "f", opset_import: ["": 17]> fn (p, q) => (r) { r = Add (p, q) }""",
        domains=', "f": 1',
    ),
    parse(
        """g (int64 t, float[2] x) => (float[?, 2] y, float[2] z) {
            z, y = Loop (t, , x) <body = b (int64 i, bool k, float[2] v) => (bool k2, float[2] v2, float[2] s) {
                k2 = Identity (k) v2 = Neg (v) s = Abs (v)
            }>
        }"""
    ),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_seeds_of_the_fuzz_test_are_sound(tmp_path, seed):
    ingest(save(tmp_path, seed), tmp_path)


@given(
    seed=st.sampled_from([seed.SerializeToString() for seed in SEEDS]),
    cut=st.none() | st.integers(0, 1000),
    flips=st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 255)), max_size=4),
)
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_bytes_give_an_error_or_a_graph(tmp_path, seed, cut, flips):
    data = bytearray(seed)
    for position, byte in flips:
        data[position % len(data)] = byte
    path = tmp_path / "m.onnx"
    path.write_bytes(data[: cut if cut is None else cut % len(data)])
    try:
        ingest(path, tmp_path)
    except TrtForgeError as error:
        text = "".join(line for problem in error.problems for line in problem.lines())
        assert text.replace("\t", "").isprintable()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root reads every file")
def test_unreadable_file_is_a_graph_error(tmp_path):
    path = save(tmp_path, parse(RELU))
    path.chmod(0)
    with pytest.raises(TrtForgeError, match="cannot be read: Permission denied"):
        ingest(path, tmp_path)
