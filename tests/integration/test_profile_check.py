"""Profiles tried on real models, and the reference session that tries them."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from trtforge.errors import GraphError, SeveralErrors, Where
from trtforge.reference import ReferenceSession
from trtforge.shapes.profile_check import check_profiles
from trtforge.spec.model import InputValues
from trtforge.types import POINTS, ExternalFile, Graph, InputRole, Profile, ShapeRange, TensorSpec

DTYPES = {TensorProto.FLOAT: "float32", TensorProto.INT32: "int32", TensorProto.INT64: "int64"}
NARROW = {TensorProto.BFLOAT16: "bfloat16", TensorProto.FLOAT8E4M3FN: "float8e4m3fn"}


def graph_of(path: Path, **roles: tuple[str, float, float]) -> Graph:
    """The parts of a graph that this stage reads, with roles as given and `free` in 0 to 1 elsewhere."""
    proto = onnx.load(path, load_external_data=False).graph
    weights = {tensor.name for tensor in proto.initializer}
    inputs = tuple(_spec(value) for value in proto.input if value.name not in weights)
    return Graph(
        source=path,
        path=path,
        weights_dir=path.parent,
        digest="",
        ir_version=8,
        opsets=(("", 17),),
        producer="",
        inputs=inputs,
        outputs=tuple(_spec(value) for value in proto.output),
        roles=tuple(InputRole(spec.name, *roles.get(spec.name, ("free", 0, 1)), "") for spec in inputs),
        data_dependent_outputs=(),
        operators=(),
        element_types=(),
        has_qdq=False,
        wide_int_constants=(),
        num_nodes=len(proto.node),
        weight_bytes=0,
    )


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    dims = tuple(dim.dim_param or (dim.dim_value if dim.dim_value > 0 else None) for dim in tensor.shape.dim)
    return TensorSpec(value.name, (DTYPES | NARROW).get(tensor.elem_type, "other"), dims)


def profile_of(graph: Graph, name: str = "p", **shapes: tuple[tuple[int, ...], ...]) -> Profile:
    fixed = {spec.name: (spec.shape,) * 3 for spec in graph.inputs if not spec.is_dynamic}
    given = fixed | shapes
    return Profile(name, {spec.name: ShapeRange(*given[spec.name]) for spec in graph.inputs})


@pytest.fixture
def check(tmp_path):
    def check_all(graph, *profiles, declared=None):
        points = []
        checks = check_profiles(
            graph,
            profiles,
            declared or {},
            failures_dir=tmp_path / "failures",
            where=lambda _, point: Where(Path("spec.yaml"), 1 + POINTS.index(point), 1),
            on_point=lambda profile, point: points.append((profile, point)),
        )
        assert [(made.profile, made.point) for made in checks] == points
        return checks

    return check_all


@pytest.fixture
def refused(check):
    def problems_of(graph, *profiles, declared=None):
        with pytest.raises(SeveralErrors) as caught:
            check(graph, *profiles, declared=declared)
        assert {problem.exit_code for problem in caught.value.problems} == {2}
        return caught.value.problems

    return problems_of


def save(path: Path, text: str) -> Path:
    onnx.save(parser.parse_model(f'<ir_version: 10, opset_import: ["":21, "acme":1, "com.microsoft":1]> {text}'), path)
    return path


def images(*sizes: tuple[int, int, int]) -> tuple[tuple[int, ...], ...]:
    return tuple((batch, 3, height, width) for batch, height, width in sizes)


@pytest.mark.parametrize(
    ("model", "sizes", "output_shapes"),
    [
        ("ocr_rec", [(1, 48, 32), (2, 48, 160), (2, 48, 320)], [(1, 4, 6625), (2, 20, 6625), (2, 40, 6625)]),
        ("ocr_det", [(1, 32, 32), (1, 64, 96), (2, 96, 96)], [(1, 1, 32, 32), (1, 1, 64, 96), (2, 1, 96, 96)]),
        ("ocr_cls", [(1, 48, 192), (2, 48, 192), (6, 48, 192)], [(1, 2), (2, 2), (6, 2)]),
    ],
)
def test_ocr_models_run_at_their_sizes(check, model_path, model, sizes, output_shapes):
    graph = graph_of(model_path(model), x=("image", 0, 1))
    checks = check(graph, profile_of(graph, x=images(*sizes)))
    assert [made.point for made in checks] == list(POINTS)
    assert [next(iter(made.output_shapes.values())) for made in checks] == output_shapes
    assert all(made.finite and made.seconds > 0 for made in checks)


def test_magika_and_silero_run(check, model_path):
    magika = graph_of(model_path("magika"), bytes=("token_ids", 0, 256))
    checks = check(magika, profile_of(magika, bytes=((1, 2048), (2, 2048), (4, 2048))))
    assert [made.output_shapes["target_label"] for made in checks] == [(1, 214), (2, 214), (4, 214)]
    silero = graph_of(model_path("silero_sequence"))
    checks = check(silero, profile_of(silero, input=((1, 576), (8, 576), (64, 576))))
    assert [made.output_shapes["speech_probs"] for made in checks] == [(1,), (8,), (64,)]
    assert checks[0].input_shapes["h"] == (1, 1, 128)


@pytest.mark.parametrize(
    ("model", "given", "expected"),
    [
        (
            "ocr_rec",
            {"x": images((1, 48, 64), (1, 48, 64), (1, 96, 64))},
            ("cannot be reshaped", "min ran; bring max nearer to it: axis 2 of 'x' from 96 towards 48"),
        ),
        (
            "silero_half",
            {"input": ((1, 512), (1, 512), (1, 1000)), "state": ((2, 1, 128),) * 3},
            (
                "Input X must have 3 dimensions only",
                "min ran; bring max nearer to it: axis 1 of 'input' from 1000 towards 512",
            ),
        ),
    ],
)
def test_refused_size_is_named_with_the_way_back(refused, model_path, model, given, expected):
    reason, hint = expected
    graph = graph_of(model_path(model))
    (problem,) = refused(graph, profile_of(graph, **given))
    assert problem.summary.startswith(f"{graph.path.name} does not run at the max of profile 'p': ")
    assert str(list(next(iter(given.values()))[2])) in problem.summary
    assert reason in problem.detail[0]
    assert "onnxruntime_src" not in problem.detail[0]
    assert "\n" not in problem.detail[0]
    assert problem.detail[1] == hint
    assert str(problem.where) == "spec.yaml:3:1"


def test_all_points_are_tried_and_the_named_command_reproduces_each(refused, model_path):
    graph = graph_of(model_path("ocr_det"))
    bad = profile_of(graph, "bad", x=images((1, 50, 50), (1, 64, 64), (1, 100, 100)))
    worse = profile_of(graph, "worse", x=images(*[(1, 40, 40)] * 3))
    problems = refused(graph, bad, worse)
    assert [problem.summary.split(": ")[0].partition(" at ")[2] for problem in problems] == [
        "the min of profile 'bad'",
        "the max of profile 'bad'",
        "the min of profile 'worse'",
    ]
    assert problems[0].detail[1].startswith("opt ran; bring min nearer to it: axis 2 of 'x' from 50 towards 64")
    assert problems[2].detail[1].startswith("no point of this profile ran; sizes to change: axis 0 of 'x'")
    run = polygraphy(problems[1].next_step)
    assert run.returncode != 0
    assert "shape=(1, 3, 100, 100)" in run.stdout
    assert "Attempting to broadcast an axis by a dimension other than 1. 7 by 8" in run.stderr


def polygraphy(command: str) -> subprocess.CompletedProcess[str]:
    program, *arguments = shlex.split(command)
    script = f"from polygraphy.tools._main import main; import sys; sys.argv[0] = {program!r}; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_command_reads_weights_from_their_own_folder(refused, tmp_path):
    graph = with_weights_elsewhere(tmp_path)
    (problem,) = refused(graph, profile_of(graph, x=((1, 4), (2, 4), (3, 4))))
    run = polygraphy(problem.next_step)
    assert run.returncode != 0
    assert "3 by 2" in run.stderr or "2 by 3" in run.stderr


def with_weights_elsewhere(folder: Path) -> Graph:
    """y = x + w, with w of shape (2, 4) in `src/w.bin` and the model to parse in `copy/`."""
    value = helper.make_tensor_value_info
    made = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        [value("x", TensorProto.FLOAT, ["N", 4])],
        [value("y", TensorProto.FLOAT, ["M", 4])],
        [numpy_helper.from_array(np.arange(8, dtype=np.float32).reshape(2, 4), "w")],
    )
    model = helper.make_model(made, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    for name in ("src", "copy"):
        (folder / name).mkdir()
    onnx.save(model, folder / "src/m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    shutil.move(folder / "src/m.onnx", folder / "copy/m.onnx")
    graph = graph_of(folder / "copy/m.onnx")
    return dataclasses.replace(graph, weights_dir=folder / "src", external_files=(ExternalFile("w.bin", 32, ""),))


def test_weights_are_read_from_their_own_folder(tmp_path):
    outputs = ReferenceSession(with_weights_elsewhere(tmp_path)).run({"x": np.ones((2, 4), np.float32)})
    np.testing.assert_array_equal(outputs["y"], np.arange(8).reshape(2, 4) + 1)


def test_static_model_runs_once_and_equal_points_once(check, tmp_path):
    static = graph_of(save(tmp_path / "s.onnx", "g (float[2] x) => (float[2] y) { y = Log(x) }"), x=("free", -2, -1))
    (made,) = check(static, profile_of(static))
    assert (made.point, made.finite) == ("min", False)
    open_one = graph_of(save(tmp_path / "o.onnx", "g (float[N] x) => (float[N] y) { y = Relu(x) }"))
    checks = check(open_one, profile_of(open_one, x=((1,), (1,), (3,))))
    assert [(made.point, made.input_shapes["x"]) for made in checks] == [("min", (1,)), ("max", (3,))]


def test_a_size_of_several_profiles_runs_once(tmp_path):
    graph = graph_of(save(tmp_path / "o.onnx", "g (float[N] x, float[M] y) => (float[N] z) { z = Relu(x) }"))
    one = profile_of(graph, "one", x=((1,), (2,), (4,)), y=((1,), (1,), (3,)))
    other = profile_of(graph, "other", x=((3,), (4,), (4,)), y=((1,), (1,), (3,)))
    told = []

    checks = check_profiles(
        graph,
        (one, other),
        {},
        failures_dir=tmp_path,
        where=lambda *_: None,
        on_point=lambda *point: told.append(point),
    )

    assert told == [("one", "min"), ("one", "opt"), ("one", "max"), ("other", "min"), ("other", "opt")]
    assert [(made.profile, made.point) for made in checks] == [*told, ("other", "max")]
    assert checks[5].output_shapes == checks[2].output_shapes == {"z": (4,)}


def test_points_that_differ_in_values_only_all_run(check, tmp_path):
    text = "g (float[12] x, int64[2] shp) => (float[A,B] y) { y = Reshape(x, shp) }"
    graph = graph_of(save(tmp_path / "m.onnx", text))
    profile = dataclasses.replace(profile_of(graph), values={"shp": ShapeRange((1, 12), (3, 4), (6, 2))})
    assert [made.output_shapes["y"] for made in check(graph, profile)] == [(1, 12), (3, 4), (6, 2)]


def test_index_beyond_a_table_is_blamed_on_values(refused, check, tmp_path):
    text = "g (int64[N] ids) => (float[N] y) <float[3] table = {1, 2, 3}> { y = Gather(table, ids) }"
    graph = graph_of(save(tmp_path / "m.onnx", text), ids=("free", 50, 60))
    profile = profile_of(graph, ids=((4,), (4,), (4,)))
    (problem,) = refused(graph, profile)
    assert any("give that input's range" in line for line in problem.detail)
    assert check(graph, profile, declared={"ids": InputValues(range=(0, 2))})


def test_bfloat16_and_float8_go_in_and_out(tmp_path):
    for dtype, name in ((ml_dtypes.bfloat16, "bfloat16"), (ml_dtypes.float8_e4m3fn, "float8e4m3fn")):
        graph = graph_of(save(tmp_path / "m.onnx", f"g ({name}[N,2] x) => ({name}[N,2] y) {{ y = Identity(x) }}"))
        x = np.array([[1, -0.5], [3, 0.25]]).astype(dtype)
        y = ReferenceSession(graph).run({"x": x})["y"]
        assert y.dtype == dtype
        np.testing.assert_array_equal(y.astype(np.float32), x.astype(np.float32))


def test_inputs_that_polygraphy_cannot_read_back_are_not_named(refused, tmp_path):
    text = "g (bfloat16[N] x, int64[2] shp) => (bfloat16[A,B] y) { y = Reshape(x, shp) }"
    graph = graph_of(save(tmp_path / "m.onnx", text), shp=("free", 2, 2))
    (problem,) = refused(graph, profile_of(graph, x=((4,), (4,), (5,))))
    assert problem.next_step == "change the profile: min ran; bring max nearer to it: axis 0 of 'x' from 5 towards 4"
    assert not (tmp_path / "failures").exists()


def test_c51_optimisations_are_off_and_said_to_be(tmp_path):
    text = """g (float[4] x) => (float[4] y)
        <float s1 = {0.1}, float s2 = {0.07}, int8 z = {0}> {
        q1 = QuantizeLinear(x, s1, z)  d1 = DequantizeLinear(q1, s1, z)
        q2 = QuantizeLinear(d1, s2, z) y = DequantizeLinear(q2, s2, z) }"""
    session = ReferenceSession(graph_of(save(tmp_path / "m.onnx", text)), threads=1)
    y = session.run({"x": np.array([0.33, -1.27, 5, 20], np.float32)})["y"]
    np.testing.assert_allclose(y, [0.28, -1.33, 4.97, 8.89], atol=1e-6)
    assert session.facts["graph_optimization"] == "ORT_DISABLE_ALL"
    assert session.facts["provider"] == "CPUExecutionProvider"
    assert session.facts["onnxruntime"][0].isdigit()


@pytest.mark.parametrize(
    ("node", "named"),
    [
        ("acme.Swish2(x)", "acme:Swish2"),
        ("com.microsoft.Gelux(x)", "com.microsoft:Gelux"),
        ("Swish2(x)", "Swish2"),
    ],
)
def test_unknown_operator_is_named(tmp_path, node, named):
    path = save(tmp_path / "m.onnx", f"g (float[2] x) => (float[2] y) {{ y = {node} }}")
    with pytest.raises(GraphError) as caught:
        ReferenceSession(graph_of(path))
    (problem,) = caught.value.problems
    assert problem.summary == f"onnxruntime has no operator '{named}', which m.onnx uses"


def test_model_that_does_not_load_is_quoted(tmp_path, capfd):
    path = save(tmp_path / "m.onnx", "g (float[2] x, int64[2] k) => (float[2] y) { y = Add(x, k) }")
    with pytest.raises(GraphError) as caught:
        ReferenceSession(graph_of(path))
    (problem,) = caught.value.problems
    assert problem.summary == "onnxruntime cannot load m.onnx"
    assert "Type parameter (T) of Optype (Add)" in problem.detail[0]
    assert capfd.readouterr() == ("", "")
