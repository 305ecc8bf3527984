"""The data that ships with the quickstart is what its README says."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "calib_data" / "digits"
SIZES = {"train": 1297, "eval": 500}
MAX_BYTES = 100_000
PARTS = pytest.mark.parametrize("part", SIZES)


def load(part):
    with np.load(FOLDER / f"{part}.npz", allow_pickle=False) as arrays:
        return arrays["image"], arrays["label"]


def rows(images):
    return {image.tobytes() for image in images}


@PARTS
def test_arrays_have_the_stated_shapes_types_and_range(part):
    image, label = load(part)
    assert (image.dtype, image.shape) == (np.float32, (SIZES[part], 1, 8, 8))
    assert (label.dtype, label.shape) == (np.int64, (SIZES[part],))
    assert (image.min(), image.max()) == (0.0, 1.0)


@PARTS
def test_every_digit_has_a_tenth_of_the_images(part):
    counts = np.bincount(load(part)[1], minlength=10)
    assert counts.shape == (10,)
    assert np.all(np.abs(counts / SIZES[part] - 0.1) < 0.005), counts


def test_no_image_is_in_both_parts():
    train, held_out = rows(load("train")[0]), rows(load("eval")[0])
    assert (len(train), len(held_out)) == (SIZES["train"], SIZES["eval"])
    assert not train & held_out


def test_both_parts_together_are_the_source():
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    source = {
        image.tobytes(): label
        for image, label in zip((digits.images / 16).astype(np.float32), digits.target, strict=True)
    }
    ours = {image.tobytes(): label for part in SIZES for image, label in zip(*load(part), strict=True)}
    assert ours == source


@PARTS
def test_file_holds_nothing_of_when_and_where_it_was_written(part):
    with zipfile.ZipFile(FOLDER / f"{part}.npz") as archive:
        members = archive.infolist()
    assert [member.filename for member in members] == ["image.npy", "label.npy"]
    assert {(member.date_time, member.create_system) for member in members} == {((1980, 1, 1, 0, 0, 0), 3)}


@PARTS
def test_file_is_small(part):
    assert (FOLDER / f"{part}.npz").stat().st_size < MAX_BYTES
