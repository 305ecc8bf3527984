from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from trtforge.errors import Where
from trtforge.graph.external_data import external_locations, tensor_problems, weight_bytes

AT = Where(Path("m.onnx"))
LEN = 16


def model_with(*tensors: TensorProto) -> onnx.ModelProto:
    nodes = [helper.make_node("Add", ["x", tensor.name], [f"y{i}"]) for i, tensor in enumerate(tensors)]
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])
    return helper.make_model(helper.make_graph(nodes, "g", [value], [value], list(tensors)))


def external(dims: tuple[int, ...] = (4,), data_type: int = TensorProto.FLOAT, **entries: str | int) -> TensorProto:
    tensor = TensorProto(name="w", data_type=data_type, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def summaries(folder: Path, *tensors: TensorProto) -> list[str]:
    found = tensor_problems(model_with(*tensors), folder, AT)
    assert all(problem.exit_code == 3 and problem.where == AT for problem in found)
    return [problem.summary for problem in found]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "outside.bin").write_bytes(bytes(LEN))
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "w.bin").write_bytes(bytes(LEN))
    (folder / "sub" / "w.bin").write_bytes(bytes(LEN))
    (folder / "out").symlink_to(tmp_path)
    (folder / "link.bin").symlink_to(tmp_path / "outside.bin")
    (folder / "inside.bin").symlink_to(folder / "w.bin")
    (folder / "loop.bin").symlink_to(folder / "loop.bin")
    return folder


@pytest.mark.parametrize(
    "entries",
    [
        {"location": "w.bin"},
        {"location": "./w.bin", "offset": 0, "length": LEN},
        {"location": "sub/w.bin", "length": LEN, "checksum": "x"},
        {"location": "inside.bin"},
    ],
)
def test_sound_locations_are_accepted_from_any_working_directory(folder, monkeypatch, entries):
    monkeypatch.chdir("/")
    assert summaries(folder, external(**entries)) == []


@pytest.mark.parametrize(
    ("entries", "summary"),
    [
        ({}, "tensor 'w' is external but names no location"),
        ({"location": "/etc/passwd"}, "external data location '/etc/passwd' is absolute, expected relative"),
        ({"location": "C:\\w.bin"}, "external data location 'C:\\w.bin' is absolute, expected relative"),
        ({"location": "../outside.bin"}, "external data location '../outside.bin' leaves the model's folder"),
        ({"location": "sub\\..\\..\\outside.bin"}, "leaves the model's folder"),
        ({"location": "link.bin"}, "external data file 'link.bin' is a link that leaves the model's folder"),
        ({"location": "out/outside.bin"}, "external data file 'out/outside.bin' is a link that leaves"),
        ({"location": "none.bin"}, "external data file 'none.bin' is missing; looked for"),
        ({"location": "sub"}, "external data location 'sub' is not a regular file"),
        ({"location": "loop.bin"}, "external data file 'loop.bin' cannot be read"),
        ({"location": "a\0b"}, "cannot be read"),
        ({"location": "a" * 5000}, "cannot be read"),
        ({"location": "w.bin", "offset": 1}, "tensor 'w' needs bytes 1 to 17 of external file 'w.bin', which has 16"),
        ({"location": "w.bin", "length": 8}, "tensor 'w' has external length 8, float32 [4] needs 16"),
        ({"location": "w.bin", "offset": "-4"}, "has external offset '-4', expected a whole number of bytes"),
        ({"location": "w.bin", "offset": "9" * 5000}, "expected a whole number of bytes"),
        ({"location": "w.bin", "length": "²"}, "has external length '²', expected a whole number of bytes"),
    ],
)
def test_each_flaw_is_named(folder, entries, summary):
    (found,) = summaries(folder, external(**entries))
    assert summary in found


def test_key_written_twice_is_refused(folder):
    tensor = external(location="w.bin")
    tensor.external_data.add(key="location", value="sub/w.bin")
    (found,) = summaries(folder, tensor)
    assert found == "tensor 'w' writes an external-data key twice: 'location', 'location'"


@pytest.mark.parametrize(
    ("tensor", "summary"),
    [
        (external((-1,), location="w.bin"), "has shape [-1], expected sizes of 0 or more"),
        (external((2**40, 2**40), location="w.bin"), "needs bytes 0 to"),
        (external(data_type=999, location="w.bin"), "has element type 999, which ONNX does not define"),
        (external(data_type=TensorProto.STRING, location="w.bin"), "holds strings, which cannot be external"),
        (TensorProto(name="w", data_type=1, dims=[4], raw_data=bytes(8)), "holds 8 bytes, float32 [4] needs 16"),
        (TensorProto(name="w", data_type=1, dims=[4], float_data=[1]), "holds 1 values, float32 [4] needs 4"),
        (TensorProto(name="w", data_type=1, dims=[2**40]), "holds 0 values"),
    ],
)
def test_bytes_must_match_type_and_shape(folder, tensor, summary):
    (found,) = summaries(folder, tensor)
    assert summary in found


def test_four_bit_elements_are_packed(folder):
    assert summaries(folder, external((31,), TensorProto.INT4, location="w.bin", length=LEN)) == []


def test_all_problems_are_reported_and_a_missing_file_once(folder):
    tensors = [external(location="none.bin") for _ in range(3)] + [external(location="w.bin", length=3)]
    found = summaries(folder, *tensors)
    assert len(found) == 2


def test_tensors_of_subgraphs_functions_and_constants_count(folder):
    def constant(location: str) -> onnx.NodeProto:
        return helper.make_node("Constant", [], [location], value=external(location=location))

    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])
    branch = helper.make_graph([constant("c1")], "b", [], [value], [external(location="c2")])
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    function = helper.make_function("f", "fn", [], ["c3"], [constant("c3")], [helper.make_opsetid("", 17)])
    model = helper.make_model(helper.make_graph([node, constant("c4")], "g", [value], [value]), functions=[function])
    assert external_locations(model) == ("c1", "c2", "c3", "c4")
    assert len(tensor_problems(model, folder, AT)) == 4


def test_c21_weights_of_2_5_gib_are_not_read(tmp_path):
    with (tmp_path / "big.bin").open("wb") as file:
        file.truncate(5 << 29)
    model = model_with(external((5 << 17, 1024), location="big.bin", offset=0, length=5 << 29))
    tracemalloc.start()
    assert tensor_problems(model, tmp_path, AT) == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    assert weight_bytes(model) == 5 << 29


def test_weight_bytes_count_inline_and_external():
    inline = numpy_helper.from_array(np.zeros((2, 3), np.float16), "h")
    assert weight_bytes(model_with(inline, external(location="w.bin"))) == 12 + 16
