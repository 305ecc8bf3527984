from __future__ import annotations

import os
from pathlib import Path

import onnx.parser
import pytest

from trtforge.errors import GraphError, Where
from trtforge.graph.model_file import INLINE_LIMIT_BYTES, dtype_name, node_lists, read_model, size_bytes

AT = Where(Path("spec.yaml"), 3, 9)
RELU = '<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y) { [r] y = Relu(x) }'


def relu() -> bytes:
    return onnx.parser.parse_model(RELU).SerializeToString()


def refusal(path: Path) -> tuple[str, str]:
    with pytest.raises(GraphError) as caught:
        read_model(path, AT)
    (problem,) = caught.value.problems
    assert problem.where == AT
    assert problem.exit_code == 3
    return problem.summary, problem.next_step


@pytest.mark.parametrize(
    ("content", "summary", "next_step"),
    [
        (b"", "is empty (0 bytes)", "export or download it again"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "is a Git LFS pointer", "git lfs pull"),
        (b"<!DOCTYPE html><html>Not found</html>", "is HTML or XML text, expected ONNX", "head -n 3"),
        (b'\xef\xbb\xbf {"error": "unauthorized"}', "is JSON text, expected ONNX", "head -n 3"),
        ("Zugriff verweigert, schöne Grüße".encode(), "is text, expected ONNX", "head -n 3"),
        (b"PK\x03\x04\x14\x00", "is a ZIP archive", "torch.onnx.export"),
        (b"ftrt\x00\x01", "is a TensorRT engine", "ONNX file that it was built from"),
        (bytes(64), "begins with zero bytes", "export or download it again"),
        (b"\xff\xfe\xfd\xfc", "is not an ONNX model", "export or download it again"),
        (relu()[:-3], "begins like an ONNX model but is truncated", "export or download it again"),
        (
            relu().replace(b"Relu", b"Re\xff\xfe"),
            "is damaged: onnx.NodeProto.op_type is not UTF-8",
            "export or download",
        ),
        (b"\x08\x08", "holds no nodes", "export it again"),
    ],
)
def test_each_kind_of_wrong_file_has_its_own_message(tmp_path, content, summary, next_step):
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    found = refusal(path)
    assert summary in found[0]
    assert str(path) in found[0]
    assert next_step in found[1]


def test_missing_file_prints_the_resolved_path_and_the_nearest_name(tmp_path, monkeypatch):
    (tmp_path / "bert.onnx").write_bytes(relu())
    monkeypatch.chdir(tmp_path)
    assert refusal(Path("bret.onnx")) == (
        f"model file 'bret.onnx' ({tmp_path.resolve()}/bret.onnx) does not exist",
        "write 'bert.onnx' instead of 'bret.onnx'",
    )


def test_folder_names_the_models_in_it(tmp_path):
    (tmp_path / "a.onnx").write_bytes(relu())
    summary, next_step = refusal(tmp_path)
    assert "is a folder" in summary
    assert next_step == "name a file in it: 'a.onnx'"


def test_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "m.onnx")
    assert "not a regular file" in refusal(tmp_path / "m.onnx")[0]


@pytest.mark.parametrize(
    ("size", "summary"), [(0, "begins with zero bytes"), (1, "a protobuf file can have 2147483647")]
)
def test_inline_limit_is_2_gib_minus_one_byte(tmp_path, size, summary):
    path = tmp_path / "m.onnx"
    with path.open("wb") as file:
        file.truncate(INLINE_LIMIT_BYTES + size)
    assert summary in refusal(path)[0]


def test_model_without_opset_import_is_refused(tmp_path):
    model = onnx.parser.parse_model(RELU)
    del model.opset_import[:]
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    assert "imports no operator set" in refusal(tmp_path / "m.onnx")[0]


def test_every_scope_is_walked():
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17, "f": 1]>
        g (bool c, float[2] x) => (float[2] y) {
            [n] y = If (c) <then_branch = t () => (float[2] a) { [i] a = f.twice (x) },
                            else_branch = e () => (float[2] b) { [j] b = Neg (x) }>
        }
        <domain: "f", opset_import: ["": 17]> twice (p) => (q) { [k] q = Add (p, p) }
    """)
    assert [scope for scope, _ in node_lists(model)] == ["", "n/then_branch", "n/else_branch", "function twice"]


@pytest.mark.parametrize(
    ("data_type", "name", "size"),
    [
        ("FLOAT", "float32", 12),
        ("DOUBLE", "float64", 24),
        ("BFLOAT16", "bfloat16", 6),
        ("BOOL", "bool", 3),
        ("FLOAT8E4M3FN", "float8e4m3fn", 3),
        ("INT4", "int4", 2),
        ("COMPLEX64", "complex64", 24),
        ("STRING", "string", None),
    ],
)
def test_names_and_sizes_of_element_types(data_type, name, size):
    assert dtype_name(onnx.TensorProto.DataType.Value(data_type)) == name
    assert size_bytes(name, [3]) == size


@pytest.mark.parametrize("data_type", [0, 999, -1])
def test_unknown_element_type_has_no_name(data_type):
    assert dtype_name(data_type) is None
