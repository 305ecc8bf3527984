"""Samples as JSONL and parquet: how rows become arrays, and what is refused with its line."""

from __future__ import annotations

import builtins
import gzip
import json
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from trtforge.errors import CapabilityError, SeveralErrors, SpecError
from trtforge.samples import tables
from trtforge.samples.opening import open_samples
from trtforge.types import Graph, TensorSpec

IDS = TensorSpec("ids", "int64", ("batch", "sequence"))
MASK = TensorSpec("mask", "float32", ("batch", "sequence"))


def graph_of(*inputs):
    names = ("outputs", "roles", "data_dependent_outputs", "operators", "element_types", "wide_int_constants")
    return Graph(
        source=Path("m.onnx"),
        path=Path("m.onnx"),
        weights_dir=Path(),
        digest="",
        ir_version=8,
        opsets=(("", 17),),
        producer="",
        inputs=inputs,
        has_qdq=False,
        num_nodes=1,
        weight_bytes=0,
        **dict.fromkeys(names, ()),
    )


BERT = graph_of(IDS, MASK)


@pytest.fixture
def jsonl(tmp_path):
    def save(*rows, name="t.jsonl"):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return tmp_path / name

    return save


def summaries(path, graph, **options):
    with pytest.raises((SpecError, SeveralErrors)) as caught:
        open_samples(path, graph, **options)
    return [problem.summary for problem in caught.value.problems]


def feeds_of(samples):
    return [{name: array.tolist() for name, array in sample.feeds.items()} for sample in samples]


def row(*ids):
    return {"ids": list(ids), "mask": [1] * len(ids)}


def test_a_line_is_a_sample_and_gets_its_batch_axis(jsonl):
    samples = open_samples(jsonl(row(7, 8, 9), "", row(5)), BERT)

    assert [sample.label for sample in samples] == ["t.jsonl:1", "t.jsonl:3"]
    assert feeds_of(samples) == [{"ids": [[7, 8, 9]], "mask": [[1, 1, 1]]}, {"ids": [[5]], "mask": [[1]]}]
    assert {array.dtype.name for sample in samples for array in sample.feeds.values()} == {"int64", "float32"}


def test_numbers_with_the_inputs_own_rank_are_taken_as_they_are(jsonl):
    path = jsonl({"x": [[[1, 2], [3, 4]]]}, {"x": [[1, 2], [3, 4]]})

    assert feeds_of(open_samples(path, graph_of(TensorSpec("x", "float32", ("n", 2, 2))))) == [
        {"x": [[[1, 2], [3, 4]]]},
        {"x": [[[1, 2], [3, 4]]]},
    ]


def test_neighbours_of_one_length_share_a_batch_and_nothing_is_padded(jsonl):
    path = jsonl(row(1, 2), row(3, 4), row(5, 6), row(7), row(8, 9))
    samples = list(open_samples(path, BERT, batch_size=2))

    assert [sample.feeds["ids"].tolist() for sample in samples] == [[[1, 2], [3, 4]], [[5, 6]], [[7]], [[8, 9]]]
    assert [sample.num_rows for sample in samples] == [2, 1, 1, 1]
    assert samples[0].label == "t.jsonl:1 to t.jsonl:2"


def test_rows_join_only_where_inputs_without_axes_agree(jsonl):
    graph = graph_of(IDS, TensorSpec("rate", "int64", ()))
    path = jsonl({"ids": [1], "rate": 8}, {"ids": [2], "rate": 8}, {"ids": [3], "rate": 16})

    assert feeds_of(open_samples(path, graph, batch_size=4)) == [
        {"ids": [[1], [2]], "rate": 8},
        {"ids": [[3]], "rate": 16},
    ]


def test_a_batch_that_the_model_fixes_is_filled(jsonl):
    fixed = graph_of(TensorSpec("x", "float32", (2, 1)))

    assert feeds_of(open_samples(jsonl(*({"x": [i]} for i in range(4))), fixed)) == [
        {"x": [[0], [1]]},
        {"x": [[2], [3]]},
    ]
    assert summaries(jsonl(*({"x": [i]} for i in range(3))), fixed) == [
        "t.jsonl: 1 of 3 samples fill no batch of 2, which the model fixes"
    ]


@pytest.mark.parametrize(
    ("dtype", "values", "found"),
    [
        ("int32", [2147483647, 5], [2147483647, 5]),
        ("int32", [2147483648], "'x' holds 2147483648, beyond int32"),
        ("uint8", [-1], "'x' holds -1, beyond uint8"),
        ("int64", [9223372036854775807], [9223372036854775807]),
        ("int64", [1.0], "'x' is float64 [1, 1]"),
        ("int64", [True], "'x' is bool [1, 1]"),
        ("int64", [1 << 70], "'x' holds something else than numbers, or a whole number beyond 64 bits"),
        ("float32", [0.1, 3], [float(np.float32(0.1)), 3.0]),
        ("float32", [1e39], "'x' holds 1e+39, beyond float32"),
        ("float16", [65504], [65504.0]),
        ("float16", [70000], "'x' holds 70000, beyond float16"),
        ("bfloat16", [1.0], [1.0]),
        ("bool", [True, False], [True, False]),
        ("bool", [1], "'x' is int64 [1, 1]"),
        ("float32", [1.0, None], "'x' holds something else than numbers"),
        ("float32", ["1"], "'x' holds something else than numbers"),
        ("float32", [[1], [1, 2]], "'x' holds lists of different lengths inside one row"),
        ("float32", [], "'x' is empty [0]"),
        ("float32", 3.0, "'x' is float32 []"),
    ],
)
def test_json_numbers_become_the_inputs_type_or_are_refused(jsonl, dtype, values, found):
    graph = graph_of(TensorSpec("x", dtype, ("n", "m")))
    path = jsonl({"x": values})

    if isinstance(found, str):
        assert summaries(path, graph)[0].startswith(f"t.jsonl:1: {found}")
    else:
        array = next(iter(open_samples(path, graph))).feeds["x"]
        assert array.dtype.name == dtype
        assert array.tolist() == [found]


def test_problems_of_all_lines_are_told_with_line_and_name(jsonl):
    path = jsonl(row(1), '{"ids": [1', "[1, 2]", {"ids": [1], "maks": [1]}, "[" * 100000)

    found = summaries(path, BERT)
    assert [line.partition(" ")[0] for line in found] == ["t.jsonl:2", "t.jsonl:3", "t.jsonl:4", "t.jsonl:5"]
    assert found[2] == "t.jsonl:4 has no array for the input mask float32 (batch, sequence)"
    assert found[3].endswith("nested too deeply")


def test_other_keys_are_noted_once(jsonl):
    samples = open_samples(jsonl(row(1) | {"text": "one"}, row(2) | {"text": "two"}), BERT)

    assert samples.notes == ("t.jsonl: 'text' is no input of the model and was left aside",)


def test_gzipped_lines_are_read_and_damaged_ones_refused(tmp_path):
    data = gzip.compress(b"".join(json.dumps(row(i, i)).encode() + b"\n" for i in range(1000)))
    (tmp_path / "t.jsonl.gz").write_bytes(data)
    assert open_samples(tmp_path / "t.jsonl.gz", BERT).num_samples == 1000

    for damaged in (data[: len(data) // 2], b"no gzip", data[:-8] + bytes(8)):
        (tmp_path / "t.jsonl.gz").write_bytes(damaged)
        assert "t.jsonl.gz is no whole gzip file" in summaries(tmp_path / "t.jsonl.gz", BERT)[0]


def test_what_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    squeezer = zlib.compressobj(wbits=31)
    line = squeezer.compress(b'{"ids": [' + b"1," * (1 << 20)) + squeezer.flush()
    (tmp_path / "t.jsonl.gz").write_bytes(line)
    monkeypatch.setattr(tables, "_LONGEST_LINE_BYTES", 1 << 20)

    assert "t.jsonl.gz:1: found more than a line of 1 MiB" in summaries(tmp_path / "t.jsonl.gz", BERT)[0]


@pytest.fixture
def table(tmp_path):
    def save(**columns):
        parquet.write_table(pa.table(columns), tmp_path / "t.parquet", row_group_size=2)
        return tmp_path / "t.parquet"

    return save


def test_parquet_rows_are_ragged_samples(table):
    ids = pa.array([[1, 2], [3], [4, 5, 6]], pa.list_(pa.int32()))  # widened to the input's int64 without loss
    mask = pa.array([[1, 1], [1], [1, 1, 0]], pa.large_list(pa.float32()))
    samples = open_samples(table(mask=mask, ids=ids, text=["a", "b", "c"]), BERT)

    assert [sample.label for sample in samples] == ["t.parquet[0]", "t.parquet[1]", "t.parquet[2]"]
    assert feeds_of(samples)[2] == {"ids": [[4, 5, 6]], "mask": [[1, 1, 0]]}
    assert next(iter(samples)).feeds["ids"].dtype == np.int64


def test_parquet_holds_nested_and_fixed_size_lists(table):
    column = pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], pa.list_(pa.list_(pa.float32(), 2)))
    samples = open_samples(table(x=column), graph_of(TensorSpec("x", "float32", (2, 2, 2))))

    assert feeds_of(samples) == [{"x": [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]}]


@pytest.mark.parametrize(
    ("column", "found"),
    [
        (pa.array([[1.0]], pa.list_(pa.float64())), "t.parquet[0]: 'x' is float64 [1, 1], expected x float32"),
        (pa.array([[1]], pa.list_(pa.int64())), "t.parquet[0]: 'x' is int64 [1, 1], expected x float32"),
        (pa.array([[1.0, None]], pa.list_(pa.float32())), "t.parquet[0]: 'x' holds something else than numbers"),
        (pa.array([None], pa.list_(pa.float32())), "t.parquet[0]: 'x' holds something else than numbers"),
        (pa.array([[{"a": 1.0}]]), "t.parquet[0]: 'x' holds something else than numbers"),
        (pa.array(["a"]), "t.parquet[0]: 'x' holds something else than numbers"),
    ],
)
def test_parquet_types_are_those_of_the_file(table, column, found):
    assert summaries(table(x=column), graph_of(TensorSpec("x", "float32", ("n", "m"))))[0].startswith(found)


def test_columns_that_lack_are_told_before_reading(table):
    assert summaries(table(ids=[[1]], maks=[[1.0]]), BERT) == [
        "t.parquet has no array for the input mask float32 (batch, sequence)"
    ]


def test_no_parquet_and_no_pyarrow(tmp_path, monkeypatch):
    (tmp_path / "t.parquet").write_bytes(b"PAR1 no more")
    assert summaries(tmp_path / "t.parquet", BERT) == ["t.parquet is no parquet file"]
    assert "cannot read" in summaries(tmp_path / "gone.parquet", BERT)[0]

    load = builtins.__import__

    def without(name, *rest):
        if name.startswith("pyarrow"):
            raise ModuleNotFoundError(name)
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CapabilityError, match="takes pyarrow") as caught:
        open_samples(tmp_path / "t.parquet", BERT)
    assert caught.value.problems[0].next_step == "pip install 'trtforge[parquet]'"
