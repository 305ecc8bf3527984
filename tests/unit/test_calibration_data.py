"""Calibration data: what a pass gives, what it refuses and notes, and what its digest depends on."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tracemalloc

import numpy as np
import pytest
from onnx import parser, save
from PIL import Image

from trtforge.errors import CalibrationError, SeveralErrors, SpecError, TrtForgeError
from trtforge.graph.ingest import ingest
from trtforge.parity.interop import save_inputs
from trtforge.samples.calibration import open_calibration
from trtforge.spec.load import load_spec
from trtforge.types import Profile, ShapeRange

SPEC = """\
version: 1
name: net
model: {onnx: m.onnx}
targets:
  - {backend: tensorrt_rtx, gpus: [sm86]}
"""
MODELS = {
    "tokens": """
        <ir_version: 8, opset_import: ["": 17]>
        g (int64[batch, sequence] ids) => (float[batch, sequence, 2] y)
        <float[3, 2] table = {1, 2, 3, 4, 5, 6}> { y = Gather (table, ids) }""",
    "masked": """
        <ir_version: 8, opset_import: ["": 17]>
        g (float[batch, 4] score, float[batch, 4] mask) => (float[batch, 4] y)
        <float one = {1}, float low = {-1e9}> {
            off = Sub (one, mask)
            added = Mul (off, low)
            both = Add (score, added)
            y = Softmax <axis = -1> (both)
        }""",
    "image": """
        <ir_version: 8, opset_import: ["": 17]>
        g (float[batch, 3, 8, 8] x) => (float[batch, 3, 8, 8] y) { y = Relu (x) }""",
}
"""`masked` is case C25, `image` has the input of case C29."""
MODELS["fixed"] = MODELS["image"].replace("batch", "2")
MODELS["fixed tokens"] = MODELS["tokens"].replace("batch", "2")


@pytest.fixture
def graph_of(tmp_path):
    def read(name):
        save(parser.parse_model(MODELS[name]), tmp_path / "m.onnx")
        return ingest(tmp_path / "m.onnx", tmp_path)

    return read


@pytest.fixture
def opened(tmp_path, graph_of):
    """Opens what `calibration` says, for one of the models."""

    def open_it(model, calibration, *, more="", profiles=()):
        (tmp_path / "spec.yaml").write_text(f"{SPEC}{more}\ncalibration: {json.dumps(calibration)}\n")
        return open_calibration(load_spec(tmp_path / "spec.yaml"), graph_of(model), profiles)

    return open_it


@pytest.fixture
def problems_of(opened, tmp_path):
    def caught(model, calibration, **options):
        with pytest.raises(TrtForgeError) as error:
            list(opened(model, calibration, **options))
        problems = error.value.problems
        assert {problem.exit_code for problem in problems} == {CalibrationError.exit_code}
        assert {problem.where.path for problem in problems} == {tmp_path / "spec.yaml"}
        return problems

    return caught


def summaries(problems):
    return [problem.summary for problem in problems]


def notes_of(data):
    list(data)
    return [note for note in data.notes if "fewer than 1000" not in note]


@pytest.fixture
def npz(tmp_path):
    def save_it(name="c.npz", **arrays):
        np.savez(tmp_path / name, **arrays)
        return {"data": name}

    return save_it


def images(count=2, seed=0):
    return np.random.default_rng(seed).random((count, 3, 8, 8), np.float32)


def test_samples_come_in_order_as_often_as_asked(opened, npz):
    data = opened("image", npz(x=images(5)) | {"batch": 2})

    assert data.num_samples == 5
    for _ in range(2):
        samples = list(data)
        np.testing.assert_array_equal(np.concatenate([sample.feeds["x"] for sample in samples]), images(5))
        assert [sample.num_rows for sample in samples] == [2, 2, 1]
    assert samples[0].label == "c.npz[0] to c.npz[1]"


def test_so_many_from_the_start(opened, npz):
    data = opened("image", npz(x=images(5)) | {"batch": 2, "samples": 3})

    assert data.num_samples == 3
    np.testing.assert_array_equal(np.concatenate([sample.feeds["x"] for sample in data]), images(5)[:3])


def test_the_number_of_lines_is_known_at_the_end(opened, tmp_path):
    (tmp_path / "t.jsonl").write_text('{"ids": [0, 1]}\n{"ids": [2]}\n{"ids": [1]}\n')
    data = opened("tokens", {"data": "t.jsonl"})

    assert data.num_samples is None
    assert [sample.feeds["ids"].tolist() for sample in data] == [[[0, 1]], [[2]], [[1]]]
    assert data.num_samples == 3


def test_polygraphys_files_are_calibration_data(opened, tmp_path):
    save_inputs(tmp_path / "p.json", [{"x": images(2, seed)} for seed in range(3)])

    assert [sample.label for sample in opened("image", {"data": "p.json"})] == ["p.json[0]", "p.json[1]", "p.json[2]"]


@pytest.mark.parametrize(
    ("values", "summary"),
    [
        ([np.nan], "c.npz[1]: 'x' holds nan at [0, 1, 2, 3], not finite"),
        ([np.inf], "c.npz[1]: 'x' holds inf at [0, 1, 2, 3], not finite"),
        ([-np.inf, np.nan], "c.npz[1]: 'x' holds -inf at [0, 1, 2, 3], not finite; 2 of 192 values are"),
    ],
)
def test_c32_values_that_are_not_finite(problems_of, npz, values, summary):
    x = images()
    x[1, 1, 2, 3 : 3 + len(values)] = values

    assert summaries(problems_of("image", npz(x=x))) == [summary]


def test_c32_all_samples_are_told_and_the_rest_is_counted(problems_of, npz):
    problems = problems_of("image", npz(x=np.full((50, 3, 8, 8), np.nan, np.float32)))

    assert len(problems) == 20
    assert problems[-1].detail == ("and 30 more problems in the same data",)


@pytest.mark.parametrize(
    ("array", "found", "next_step"),
    [
        (images().astype(np.float64), "float64 [2, 3, 8, 8]", "array.astype('float32')"),
        ((images() * 255).astype(np.uint8), "uint8 [2, 3, 8, 8]", "(array / 255).astype('float32')"),
        (images().transpose(0, 2, 3, 1), "float32 [2, 8, 8, 3]", "array.transpose(0, 3, 1, 2)"),
        (images()[0], "float32 [3, 8, 8]", "reshape(shape)"),
    ],
    ids=["float64", "uint8", "channels last", "rank"],
)
def test_c33_each_mistake_has_its_own_message(problems_of, npz, array, found, next_step):
    (problem,) = problems_of("image", npz(x=array))

    assert problem.summary.startswith(f"c.npz: array 'x' is {found}, expected x float32 (batch, 3, 8, 8)")
    assert next_step in problem.next_step


def test_c33_pixels_that_were_not_scaled(opened, problems_of, npz):
    given = npz(x=np.round(images() * 255))

    assert notes_of(opened("image", given)) == [
        "image 'x' holds whole numbers up to 128 and more, like pixels before scaling: 2 samples, the first is c.npz[0]"
    ]
    declared = summaries(problems_of("image", given, more="inputs: {x: {range: [0, 1]}}"))
    assert len(declared) == 2
    assert "outside 0 to 1 (the range in the spec)" in declared[0]


def test_c33_fortran_order_gives_the_same_samples(opened, npz):
    data = opened("image", npz(x=np.asfortranarray(images(3))))

    np.testing.assert_array_equal(np.concatenate([sample.feeds["x"] for sample in data]), images(3))


@pytest.mark.parametrize(
    ("count", "summary"),
    [
        (0, "pictures holds no samples, expected the batch of 4 or more"),
        (1, "pictures holds 1 sample, expected the batch of 4 or more"),
        (3, "pictures holds 3 samples, expected the batch of 4 or more"),
    ],
)
def test_c35_fewer_samples_than_the_batch(problems_of, tmp_path, count, summary):
    (tmp_path / "pictures" / "folder").mkdir(parents=True)
    for name in (".DS_Store", "Thumbs.db"):
        (tmp_path / "pictures" / name).write_text("x")
    for index in range(count):
        Image.new("RGB", (8, 8), (index, 2, 3)).save(tmp_path / "pictures" / f"{index}.png")
    given = {"data": "pictures", "images": {"layout": "NCHW"}, "batch": 4}

    problems = problems_of("image", given)
    if count:
        assert summaries(problems) == [summary]
        assert problems[0].next_step == f"write batch: {count}"
    else:
        assert problems[0].summary.startswith("pictures holds no images")


def test_c35_few_samples_are_noted_and_none_refused(opened, problems_of, npz):
    data = opened("image", npz(x=images(10)))
    list(data)

    assert "10 calibration samples; where they are fewer than 1000, rare values are easily missed" in data.notes
    assert summaries(problems_of("image", npz(x=images(0)))) == ["c.npz holds no samples, expected one or more"]


SCORES = np.arange(8, dtype=np.float32).reshape(2, 4)
MASK = np.array([[1, 1, 0, 0], [1, 1, 1, 1]], np.float32)


def test_c38_an_input_is_missing(problems_of, npz):
    assert summaries(problems_of("masked", npz(score=SCORES))) == [
        "c.npz has no array for the input mask float32 (batch, 4)"
    ]


def test_c38_order_of_names_does_not_matter_and_others_are_noted(opened, npz):
    data = opened("masked", npz(mask=MASK, extra=MASK, score=SCORES))

    assert [sample.feeds["mask"].tolist() for sample in data] == [[row] for row in MASK.tolist()]
    assert "c.npz: 'extra' is no input of the model and was left aside" in data.notes


def test_c38_an_integer_mask_for_a_float_input(problems_of, npz):
    assert "array 'mask' is int64 [2, 4]" in problems_of("masked", npz(score=SCORES, mask=MASK.astype(int)))[0].summary


def test_masks_of_other_values_are_noted(opened, npz):
    mask = MASK.copy()
    mask[1] = 0.5

    assert notes_of(opened("masked", npz(score=SCORES, mask=mask))) == [
        "c.npz[1]: mask 'mask' holds values other than 0 and 1"
    ]


def test_tokens_outside_of_the_table_are_refused(problems_of, tmp_path):
    (tmp_path / "t.jsonl").write_text('{"ids": [0, 2]}\n{"ids": [0, 3]}\n{"ids": [-1]}\n')
    found = summaries(problems_of("tokens", {"data": "t.jsonl"}))

    assert found[0].startswith(
        "t.jsonl:2: 'ids' holds 3 at [0, 1], outside 0 to 2 (row index of the 3-row table 'table'"
    )
    assert found[1].startswith("t.jsonl:3: 'ids' holds -1 at [0, 0], outside 0 to 2")


def test_blank_images_and_repeated_samples_are_noted(opened, npz):
    x = images(6)
    x[1:3] = 0
    x[5] = x[4]

    assert notes_of(opened("image", npz(x=x))) == [
        "image 'x' is 0 throughout: 2 samples, the first is c.npz[1]",
        "is equal to an earlier sample: 2 samples, the first is c.npz[2]",
    ]


def test_samples_outside_of_every_profile_are_counted(opened, tmp_path):
    (tmp_path / "t.jsonl").write_text('{"ids": [0]}\n{"ids": [0, 1]}\n{"ids": [0, 1, 2]}\n{"ids": [0, 1, 2, 0]}\n')

    def profile(low, high):
        return Profile("p", {"ids": ShapeRange((1, low), (1, low), (8, high))})

    data = opened("tokens", {"data": "t.jsonl"}, profiles=(profile(1, 1), profile(3, 3)))
    assert notes_of(data) == ["lies outside of every profile: 2 samples, the first is t.jsonl:2"]


def test_rows_that_fill_no_batch_of_the_model_are_noted(opened, npz, tmp_path):
    data = opened("fixed", npz(x=images(5)))

    assert len(list(data)) == 2
    assert "c.npz[4]: fills no batch of 2, which the model fixes, and was left aside" in data.notes


def test_a_fixed_batch_that_nothing_fills_is_refused(problems_of, tmp_path):
    (tmp_path / "t.jsonl").write_text('{"ids": [0]}\n{"ids": [0, 1]}\n')

    assert summaries(problems_of("fixed tokens", {"data": "t.jsonl"})) == [
        "no neighbours in t.jsonl have equal shapes and fill a batch of 2, which the model fixes"
    ]


def _append_labels(data, given):
    for sample in data:
        given.append(sample.label)


def test_nothing_is_given_after_the_first_problem(opened, npz):
    x = images(4)
    x[1] = x[3] = np.nan
    given = []

    with pytest.raises(SeveralErrors) as caught:
        _append_labels(opened("image", npz(x=x)), given)
    assert given == ["c.npz[0]"]
    assert len(caught.value.problems) == 2


def test_other_data_and_missing_files_are_refused_at_the_spec(problems_of, tmp_path):
    (tmp_path / "c.pt").write_bytes(b"")

    problem = problems_of("image", {"data": "c.pt"})[0]
    assert "found the ending '.pt'" in problem.summary
    assert problem.where.line == 7
    assert "No such file" in problems_of("image", {"data": "gone.npz"})[0].summary
    assert "No such file" in problems_of("tokens", {"data": "gone.jsonl"})[0].summary
    (tmp_path / "list.txt").write_text("a.png\nb.png\n")
    listed = problems_of("image", {"data": "list.txt", "images": {"layout": "NCHW"}})
    assert [line.partition(":")[0] for line in summaries(listed)] == [
        f"cannot read {tmp_path}/a.png",
        f"cannot read {tmp_path}/b.png",
    ]


def test_a_reference_that_leads_nowhere_is_the_specs_own_fault(opened):
    with pytest.raises(SpecError, match=r"load\.py is not there") as caught:
        opened("image", {"callable": "load.py:rows"})
    assert caught.value.problems[0].exit_code == SpecError.exit_code


def test_c46_the_digest_follows_the_data_and_what_becomes_of_it(opened, npz, tmp_path):
    before = opened("image", npz(x=images())).digest
    other = images()
    other[1, 0, 0, 0] += 1

    assert opened("image", npz(x=other)).digest != before
    assert opened("image", npz("renamed.npz", x=images())).digest == before
    os.utime(tmp_path / "renamed.npz", (1, 1))
    assert opened("image", {"data": "renamed.npz"}).digest == before
    assert opened("image", {"data": "renamed.npz", "batch": 2}).digest != before
    assert opened("image", {"data": "renamed.npz", "samples": 1}).digest != before


def test_c46_every_image_counts_and_so_does_preprocessing(opened, tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for index in range(3):
        Image.new("RGB", (8, 8), (index, 0, 0)).save(folder / f"{index}.png")
    given = {"data": "pictures", "images": {"layout": "NCHW"}}
    before = opened("image", given).digest

    (folder / "1.png").rename(folder / "9.png")
    assert opened("image", given).digest == before
    assert opened("image", given | {"images": {"layout": "NCHW", "mean": [0.5]}}).digest != before
    shutil.copy(folder / "0.png", folder / "9.png")
    assert opened("image", given).digest != before
    assert opened("image", given | {"samples": 1}).digest != opened("image", given | {"samples": 2}).digest


def peak_bytes_of(data):
    tracemalloc.start()
    try:
        count = sum(sample.num_rows for sample in data)
        return count, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["npz", "compressed npz", "npy", "jsonl"])
def test_memory_does_not_grow_with_the_number_of_samples(opened, tmp_path, kind):
    x = np.random.default_rng(0).random((600, 3, 8, 8), np.float32)
    peaks = {}
    for count in (20, 600):
        if kind == "jsonl":
            line = json.dumps({"x": x[0].tolist()}).encode() + b"\n"
            (tmp_path / f"{count}.jsonl.gz").write_bytes(gzip.compress(line * count, 1))
            name = f"{count}.jsonl.gz"
        elif kind == "npy":
            name = f"{count}.npy"
            np.save(tmp_path / name, x[:count])
        else:
            name = f"{count}.npz"
            (np.savez if kind == "npz" else np.savez_compressed)(tmp_path / name, x=x[:count])
        found, peaks[count] = peak_bytes_of(opened("image", {"data": name}))
        assert found == count

    assert peaks[600] < peaks[20] + (1 << 18)  # the pixels are 460 kB, the digests of 600 samples 60 kB
