"""Images as samples: each rule of decoding against values worked out by hand."""

from __future__ import annotations

import builtins
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from test_samples_tables import graph_of, summaries

from trtforge.errors import CapabilityError
from trtforge.samples.opening import open_samples
from trtforge.spec.model import Images
from trtforge.types import TensorSpec

CHW = graph_of(TensorSpec("x", "float32", ("n", 3, "h", "w")))
GRAY = graph_of(TensorSpec("x", "float32", ("n", 1, "h", "w")))
RAW = {"scale": 1.0}


@pytest.fixture
def read(tmp_path):
    """Saves one picture and gives what becomes of it, without the batch axis."""

    def saved(picture, graph=CHW, name="a.png", save=None, **images):
        folder = tmp_path / "pictures"
        folder.mkdir(exist_ok=True)
        if not isinstance(picture, Image.Image):
            picture = Image.fromarray(picture)
        picture.save(folder / name, **(save or {}))
        samples = open_samples(folder, graph, images=Images(**{"layout": "NCHW", **RAW, **images}))
        (sample,) = samples
        assert sample.label == f"pictures/{name}"
        return sample.feeds["x"][0], samples.notes

    return saved


TWO = np.array([[[10, 20, 30], [40, 50, 60]]], np.uint8)


def test_layout_channel_order_and_normalisation(read):
    nhwc = graph_of(TensorSpec("x", "float32", ("n", "h", "w", 3)))
    plain = read(TWO)[0]

    assert plain.dtype == np.float32
    assert plain.tolist() == [[[10, 40]], [[20, 50]], [[30, 60]]]
    assert read(TWO, channels="bgr")[0].tolist() == [[[30, 60]], [[20, 50]], [[10, 40]]]
    assert read(TWO, nhwc, layout="NHWC")[0].tolist() == [[[10, 20, 30], [40, 50, 60]]]
    scaled = read(TWO, scale=0.1, mean=(1.0, 2.0, 3.0), std=(0.5, 1.0, 2.0))[0]
    np.testing.assert_allclose(scaled, [[[0, 6]], [[0, 3]], [[0, 1.5]]], atol=1e-6)
    # Mean and std follow the order of the channels as they are fed.
    assert read(TWO, channels="bgr", mean=(30.0, 20.0, 10.0))[0][:, 0, 0].tolist() == [0, 0, 0]


def test_the_default_scale_gives_0_to_1(read):
    assert read(np.full((1, 1, 3), 255, np.uint8), scale=1 / 255)[0].tolist() == [[[1]]] * 3


def test_a_picture_is_turned_upright(read):
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by 90 degrees clockwise, EXIF 2.32 section 4.6.4
    upright, _ = read(np.array([[1, 2]], np.uint8), GRAY, channels="gray", save={"exif": exif})

    assert upright.tolist() == [[[1], [2]]]


def test_alpha_is_dropped_with_a_note(read):
    pixels, notes = read(np.array([[[10, 20, 30, 0]]], np.uint8))

    assert pixels.ravel().tolist() == [10, 20, 30]
    assert notes == ("pictures/a.png: has transparency, which was dropped",)


def test_palettes_and_single_bits_become_colours(read):
    palette = Image.new("P", (2, 1))
    palette.putpalette([1, 2, 3, 4, 5, 6])
    palette.putdata([0, 1])

    assert read(palette)[0].tolist() == [[[1, 4]], [[2, 5]], [[3, 6]]]
    assert read(np.array([[True, False]]))[0].tolist() == [[[255, 0]]] * 3


def test_gray_and_colours_become_each_other(read):
    assert read(np.array([[7, 8]], np.uint8))[0].tolist() == [[[7, 8]]] * 3
    luma, _ = read(np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255]]], np.uint8), GRAY, channels="gray")
    np.testing.assert_allclose(luma[0, 0], [0.299 * 255, 0.587 * 255, 0.114 * 255], atol=1)  # ITU-R BT.601


def test_sixteen_bits_keep_what_eight_would_lose(read):
    pixels, _ = read(np.array([[0, 257, 65535, 300]], np.uint16), GRAY, channels="gray")

    np.testing.assert_allclose(pixels[0, 0], [0, 1, 255, 300 / 257], rtol=1e-6)


def test_an_animation_is_its_first_frame(read):
    frames = [Image.new("L", (1, 1), value) for value in (0, 255)]
    pixels, notes = read(frames[0], GRAY, "a.gif", {"save_all": True, "append_images": frames[1:]}, channels="gray")

    assert pixels.tolist() == [[[0]]]
    assert notes == ("pictures/a.gif: holds several pictures, of which the first was taken",)


def test_size_stretches_and_averages_what_it_covers(read):
    pixels, _ = read(np.array([[0, 100], [100, 200]], np.uint8), GRAY, channels="gray", size=(1, 1))
    wide, _ = read(np.full((2, 2), 9, np.uint8), GRAY, channels="gray", size=(3, 5))

    assert pixels.tolist() == [[[100]]]
    assert wide.shape == (1, 3, 5)
    assert np.unique(wide).tolist() == [9]


def test_uint8_inputs_take_pixels_as_they_are(read, tmp_path):
    graph = graph_of(TensorSpec("x", "uint8", ("n", 3, "h", "w")))

    assert read(TWO, graph)[0].dtype == np.uint8
    with pytest.raises(Exception, match="normalised images are fractions") as caught:
        read(TWO, graph, scale=1 / 255)
    assert caught.value.problems[0].next_step == "write scale: 1, mean: [0] and std: [1]"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for index, size in enumerate([(2, 2), (2, 2), (2, 2), (3, 2), (3, 2)]):
        Image.new("RGB", size, (index, index, index)).save(folder / f"{index}.png")
    return folder


def test_pictures_of_one_size_share_a_batch(folder):
    samples = list(open_samples(folder, CHW, images=Images(layout="NCHW"), batch_size=2))

    assert [sample.feeds["x"].shape for sample in samples] == [(2, 3, 2, 2), (1, 3, 2, 2), (2, 3, 2, 3)]
    assert samples[0].label == "pictures/0.png to pictures/1.png"


def test_other_files_and_folders_are_left_aside(folder):  # C35
    for name in (".DS_Store", "Thumbs.db", "._0.png"):
        (folder / name).write_bytes(b"x")
    (folder / "more").mkdir()
    samples = open_samples(folder, CHW, images=Images(layout="NCHW"))

    assert samples.num_samples == 5
    assert samples.notes == ("pictures: the folder more, .DS_Store, ._0.png, Thumbs.db left aside",)


def test_a_list_names_pictures_from_its_own_folder(folder):
    (folder.parent / "list.txt").write_text("pictures/4.png\n\npictures/0.png\n")
    samples = open_samples(folder.parent / "list.txt", CHW, images=Images(layout="NCHW"))

    assert [sample.label for sample in samples] == ["pictures/4.png", "pictures/0.png"]


def test_folders_of_folders_are_told_how_to_be_listed(tmp_path):
    (tmp_path / "train" / "cat").mkdir(parents=True)

    with pytest.raises(Exception, match="train holds no images but 1 folders") as caught:
        open_samples(tmp_path / "train", CHW, images=Images(layout="NCHW"))
    assert "find" in caught.value.problems[0].next_step


def png_that_claims(width, height):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_every_damaged_picture_is_named(folder):
    (folder / "1.png").write_bytes((folder / "0.png").read_bytes()[:45])
    (folder / "2.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n")
    (folder / "3.png").write_bytes(png_that_claims(12000, 12000))
    (folder / "4.png").write_bytes(png_that_claims(60000, 60000))
    found = summaries(folder, CHW, images=Images(layout="NCHW"))

    assert [line.partition(" ")[0] for line in found] == [f"pictures/{index}.png" for index in (1, 2, 3, 4)]
    assert all("cannot be decoded" in line for line in found[:2])
    assert found[2] == "pictures/3.png has 12000 x 12000 pixels, more than the 100000000 that are read"
    assert found[3] == "pictures/4.png has too many pixels, more than the 100000000 that are read"


def test_pixels_of_an_unknown_kind_are_refused(folder):
    Image.fromarray(np.ones((2, 2), np.float32)).save(folder / "0.tif")

    assert summaries(folder, CHW, images=Images(layout="NCHW")) == [
        "pictures/0.tif has pixels of mode 'F', expected 8 or 16 bits a channel"
    ]


def test_the_wrong_layout_is_seen(folder):
    fixed = graph_of(TensorSpec("x", "float32", (1, 2, 2, 3)))

    found = summaries(folder, fixed, images=Images(layout="NCHW"))
    assert found[0] == "pictures/0.png: 'x' is float32 [1, 3, 2, 2], expected x float32 (1, 2, 2, 3)"


@pytest.mark.parametrize(
    ("graph", "images", "found"),
    [
        (CHW, None, "pictures holds images, and nothing says how they become an input"),
        (graph_of(*CHW.inputs, TensorSpec("y", "float32", (1,))), Images(layout="NCHW"), "found x float32"),
        (graph_of(TensorSpec("x", "float32", (1, 3))), Images(layout="NCHW"), "one input of rank 4"),
        (CHW, Images(layout="NCHW", size=(10**6, 10**6)), "images are resized to [1000000, 1000000]"),
    ],
)
def test_what_images_cannot_feed_is_refused(folder, graph, images, found):
    assert found in summaries(folder, graph, images=images)[0]


def test_images_for_something_else_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones((1, 3, 2, 2), np.float32))

    assert summaries(tmp_path / "a.npz", CHW, images=Images(layout="NCHW")) == [
        "images is for image files, and a.npz holds none"
    ]


def test_no_pillow(folder, monkeypatch):
    load = builtins.__import__

    def without(name, *rest):
        if name.startswith("PIL"):
            raise ModuleNotFoundError(name)
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CapabilityError, match="takes Pillow") as caught:
        open_samples(folder, CHW, images=Images(layout="NCHW"))
    assert caught.value.problems[0].next_step == "pip install 'trtforge[images]'"
