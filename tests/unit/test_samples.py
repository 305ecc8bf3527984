"""Samples and Polygraphy's files: what is read, how it is cut, and what is refused with file and index."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from trtforge.errors import SeveralErrors, SpecError, StoreError
from trtforge.parity.interop import save_inputs, save_outputs
from trtforge.samples import arrays as module
from trtforge.samples.opening import open_samples
from trtforge.samples.polygraphy_files import load_inputs, load_outputs
from trtforge.types import Graph, TensorSpec

IDS = TensorSpec("ids", "int64", ("batch", "sequence"))
MASK = TensorSpec("mask", "float32", ("batch", "sequence"))


def graph_of(*inputs):
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
        roles=(),
        data_dependent_outputs=(),
        operators=(),
        element_types=(),
        has_qdq=False,
        wide_int_constants=(),
        num_nodes=1,
        weight_bytes=0,
    )


BERT = graph_of(IDS, MASK)


@pytest.fixture
def npz(tmp_path):
    def save(**arrays):
        np.savez(tmp_path / "s.npz", **arrays)
        return tmp_path / "s.npz"

    return save


def problems_of(path, graph, **options):
    with pytest.raises((SpecError, SeveralErrors)) as caught:
        list(open_samples(path, graph, **options))
    assert {problem.exit_code for problem in caught.value.problems} == {SpecError.exit_code}
    return caught.value.problems


def shapes_of(samples):
    return [[feed.shape for feed in sample.feeds.values()] for sample in samples]


def test_one_axis_more_counts_samples(npz):
    ids = np.arange(24).reshape(3, 2, 4)
    samples = open_samples(npz(ids=ids, mask=np.ones((3, 2, 4), np.float32)), BERT)

    assert samples.num_samples == 3
    assert [sample.label for sample in samples] == ["s.npz[0]", "s.npz[1]", "s.npz[2]"]
    np.testing.assert_array_equal([sample.feeds["ids"] for sample in samples], ids)  # a second time


@pytest.mark.parametrize(
    ("dims", "batch_size", "shapes"),
    [
        (("batch", "sequence"), 1, [[(1, 4)]] * 5),
        (("batch", "sequence"), 2, [[(2, 4)], [(2, 4)], [(1, 4)]]),
        ((5, "sequence"), 1, [[(5, 4)]]),
        ((1, 4), 3, [[(1, 4)]] * 5),
    ],
)
def test_the_same_number_of_axes_is_cut_along_the_batch(npz, dims, batch_size, shapes):
    samples = open_samples(
        npz(ids=np.arange(20).reshape(5, 4)), graph_of(TensorSpec("ids", "int64", dims)), batch_size=batch_size
    )

    assert shapes_of(samples) == shapes
    np.testing.assert_array_equal(np.concatenate([s.feeds["ids"] for s in samples]), np.arange(20).reshape(5, 4))


def test_inputs_without_axes_go_with_every_sample(npz):
    rate = TensorSpec("rate", "int64", ())
    ids = np.zeros((2, 1, 4), np.int64)
    together = list(open_samples(npz(ids=ids, rate=np.array(16000)), graph_of(IDS, rate)))
    each = list(open_samples(npz(ids=ids, rate=np.array([8, 16])), graph_of(IDS, rate)))

    assert [sample.feeds["rate"].tolist() for sample in together] == [16000, 16000]
    assert [sample.feeds["rate"].tolist() for sample in each] == [8, 16]


def test_order_is_the_models_and_other_names_are_noted(npz):  # C38
    path = npz(mask=np.ones((1, 4), np.float32), extra=np.ones(3), ids=np.ones((1, 4), np.int64))
    samples = open_samples(path, BERT)

    assert list(next(iter(samples)).feeds) == ["ids", "mask"]
    assert samples.notes == ("s.npz: 'extra' is no input of the model and was left aside",)


def test_a_missing_input_is_named_with_what_it_may_be_called(npz):  # C38
    absent = problems_of(npz(ids=np.ones((1, 4), np.int64)), BERT)
    misspelt = problems_of(npz(ids=np.ones((1, 4), np.int64), maks=np.ones((1, 4), np.float32)), BERT)

    assert absent[0].summary == "s.npz has no array for the input mask float32 (batch, sequence)"
    assert absent[0].next_step == "add an array named 'mask'"
    assert misspelt[0].next_step == "rename 'maks' to 'mask'"


@pytest.mark.parametrize(
    ("array", "found"),
    [
        (np.ones((1, 4)), "float64 [1, 4]"),
        (np.ones((1, 4), np.int64), "int64 [1, 4]"),
        (np.ones(4, np.float32), "float32 [4]"),
        (np.ones((1, 1, 1, 4), np.float32), "float32 [1, 1, 1, 4]"),
        (np.ones((2, 5), np.float32), "float32 [2, 5]"),
        (np.ones((2, 1, 5), np.float32), "float32 [2, 1, 5]"),
    ],
)
def test_another_type_rank_or_fixed_size_is_refused(npz, array, found):
    problem, *others = problems_of(npz(x=array), graph_of(TensorSpec("x", "float32", (1, 4))))

    expected = "x float32 (1, 4), stacked along a new first axis or along its batch"
    assert problem.summary == f"s.npz: array 'x' is {found}, expected {expected}"
    assert not others


def test_all_problems_are_told_at_once(npz):
    assert len(problems_of(npz(ids=np.ones((1, 4)), mask=np.ones(4, np.int64)), BERT)) == 2


def test_a_batch_the_model_fixes_must_divide_the_rows(npz):
    fixed = graph_of(TensorSpec("x", "float32", (2, 4)))

    assert shapes_of(open_samples(npz(x=np.ones((6, 4), np.float32)), fixed)) == [[(2, 4)]] * 3
    assert problems_of(npz(x=np.ones((5, 4), np.float32)), fixed)


def test_numbers_of_samples_must_agree(npz):
    problem = problems_of(npz(ids=np.ones((2, 1, 4), np.int64), mask=np.ones((3, 4), np.float32)), BERT)[0]

    found = "2 of 'ids' [2, 1, 4], 3 of 'mask' [3, 4]"
    assert problem.summary == f"s.npz holds differing numbers of samples: {found}"


def test_no_samples_are_refused(npz):
    arrays = {"ids": np.ones((0, 4), np.int64), "mask": np.ones((0, 4), np.float32)}

    assert problems_of(npz(**arrays), BERT)[0].summary == "s.npz holds no samples"


def test_npy_is_for_models_with_one_input(tmp_path):
    np.save(tmp_path / "s.npy", np.arange(8).reshape(2, 4))
    samples = open_samples(tmp_path / "s.npy", graph_of(IDS))

    assert [(sample.label, sample.feeds["ids"].tolist()) for sample in samples] == [
        ("s.npy[0]", [[0, 1, 2, 3]]),
        ("s.npy[1]", [[4, 5, 6, 7]]),
    ]
    assert (
        "s.npy holds one array, and m.onnx has 2 inputs: ids, mask" in problems_of(tmp_path / "s.npy", BERT)[0].summary
    )


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_narrow_types_come_back_from_numpys_raw_values(npz, dtype):
    name = {"bfloat16": "bfloat16", "float8_e4m3fn": "float8e4m3fn"}[np.dtype(dtype).name]
    array = np.array([[1, 2, 3, 4]], dtype)
    sample = next(iter(open_samples(npz(x=array), graph_of(TensorSpec("x", name, (1, 4))))))

    assert sample.feeds["x"].dtype == dtype
    assert sample.feeds["x"].tobytes() == array.tobytes()


def test_feeds_are_native_and_in_c_order(npz):
    array = np.asfortranarray(np.arange(12, dtype=">f4").reshape(1, 3, 4))
    sample = next(iter(open_samples(npz(x=array), graph_of(TensorSpec("x", "float32", (3, 4))))))

    assert sample.feeds["x"].dtype == np.float32
    assert sample.feeds["x"].dtype.isnative
    assert sample.feeds["x"].flags.c_contiguous
    np.testing.assert_array_equal(sample.feeds["x"], array[0])


class Evil:
    def __reduce__(self):
        return print, ("ran",)


@pytest.mark.parametrize("ending", [".npz", ".npy"])
def test_pickles_are_not_run(tmp_path, ending, capsys):
    path = tmp_path / f"s{ending}"
    (np.savez if ending == ".npz" else np.save)(path, np.array([Evil()], object))
    problem = problems_of(path, graph_of(IDS))[0]

    assert problem.summary == f"s{ending} is no {ending} file of plain arrays"
    assert "allow_pickle" in problem.detail[0] or "Python objects" in problem.detail[0]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["s.npz", "s.npy", "s.json", "s.jsonl", "s.jsonl.gz", "s.parquet", "s.png"])
@pytest.mark.parametrize(
    "data", [b"", b"\x93NUMPY\x01\x00", b"PK\x03\x04 cut short", b"[[[", b'{"polygraphy_class": "x"}']
)
def test_damaged_files_are_refused(tmp_path, name, data, capsys):
    (tmp_path / name).write_bytes(data)

    assert problems_of(tmp_path / name, graph_of(IDS))
    assert capsys.readouterr() == ("", "")


def test_files_that_lie_about_their_kind_or_size(tmp_path, npz, monkeypatch):
    npz(ids=np.ones((1, 4), np.int64)).rename(tmp_path / "zip.npy")
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (1 << 50, 4)})
    with zipfile.ZipFile(tmp_path / "big.npz", "w") as archive:
        archive.writestr("ids.npy", header.getvalue())

    assert problems_of(tmp_path / "zip.npy", graph_of(IDS))
    assert problems_of(tmp_path / "big.npz", graph_of(IDS))
    monkeypatch.setattr(module, "MAX_UNPACKED_BYTES", 3 << 20)
    problem = problems_of(npz(ids=np.ones((1 << 19, 1), np.int64)), graph_of(IDS))[0]
    assert problem.summary == "s.npz unpacks to 4 MiB, more than the 3 MiB that are read"


@pytest.mark.parametrize("name", ["gone.npz", "gone.npy", "gone.json"])
def test_a_file_that_is_not_there_is_named(tmp_path, name):
    problem = problems_of(tmp_path / name, graph_of(IDS))[0]

    assert problem.summary == f"cannot read {tmp_path / name}: No such file or directory"


def test_other_endings_are_refused(tmp_path):
    assert "found the ending '.pt'" in problems_of(tmp_path / "s.pt", BERT)[0].summary


def feed(batch=1, **changes):
    return {"ids": np.ones((batch, 4), np.int64), "mask": np.ones((batch, 4), np.float32)} | changes


def test_json_samples_are_checked_each_with_its_index(tmp_path):
    path = tmp_path / "s.json"
    save_inputs(path, [feed(), feed(mask=np.ones((1, 4))), {"ids": feed()["ids"]}])

    assert [problem.summary for problem in problems_of(path, BERT)] == [
        "s.json[1]: 'mask' is float64 [1, 4], expected mask float32 (batch, sequence)",
        "s.json[2] has no array for the input mask float32 (batch, sequence)",
    ]


def test_json_samples_may_differ_in_length(tmp_path):
    path = tmp_path / "s.json"
    save_inputs(path, [feed(), feed(3, extra=np.ones(1))])
    samples = open_samples(path, BERT)

    assert shapes_of(samples) == [[(1, 4)] * 2, [(3, 4)] * 2]
    assert samples.notes == ("s.json: 'extra' is no input of the model and was left aside",)


def test_many_problems_are_counted(tmp_path):
    save_inputs(tmp_path / "s.json", [{"ids": feed()["ids"]}] * 50)
    problems = problems_of(tmp_path / "s.json", BERT)

    assert len(problems) == 20
    assert problems[-1].detail == ("and 30 more problems in the same data",)


def test_inputs_and_outputs_come_back_as_they_went(tmp_path):
    feeds = [feed(), feed(2)]
    save_inputs(tmp_path / "deep" / "in.json", feeds)
    save_outputs(tmp_path / "out.json", "ours", [{"y": np.float16([1])}, {"y": np.array(True)}])

    np.testing.assert_equal(list(load_inputs(tmp_path / "deep" / "in.json")), feeds)
    loaded = load_outputs(tmp_path / "out.json")
    np.testing.assert_equal(loaded, {"ours": [{"y": np.float16([1])}, {"y": np.array(True)}]})
    assert loaded["ours"][0]["y"].dtype == np.float16


def test_types_that_the_format_loses_are_refused(tmp_path):
    with pytest.raises(SeveralErrors) as caught:
        save_inputs(tmp_path / "in.json", [{"x": np.ones(2, ml_dtypes.bfloat16)}])

    assert caught.value.problems[0].exit_code == StoreError.exit_code
    assert caught.value.problems[0].summary == "in.json: 'x' is bfloat16, which numpy's file format does not keep"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("plain", [[1], [{"x": 1}], 3, {"x": [1, 2]}, None])
def test_json_of_something_else_is_refused(tmp_path, plain):
    (tmp_path / "s.json").write_text(json.dumps(plain))

    with pytest.raises(SpecError):
        list(load_inputs(tmp_path / "s.json"))
    with pytest.raises(SpecError, match="holds no outputs of runs"):
        load_outputs(tmp_path / "s.json")


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"holds no \.json file"):
        list(load_inputs(tmp_path))


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(StoreError, match="is a file, expected a folder"):
        save_inputs(tmp_path / "file" / "in.json", [])
