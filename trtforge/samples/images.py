"""Image files as an input: decoded in a defined way, resized, normalised."""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from trtforge.errors import CapabilityError, Problem, SpecError, shown_path
from trtforge.samples.fit import NARROW
from trtforge.samples.source import Found, Notes, Row, Source, problem, rows_at_once
from trtforge.spec.model import Images
from trtforge.types import Graph, TensorSpec

Array = np.ndarray[Any, np.dtype[Any]]

IMAGE_ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
MAX_PIXELS = 100_000_000
"""Of one image. A file of a few KiB can claim any size."""
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Never Pillow's whole list, in which EPS starts Ghostscript."""
_SIXTEEN_BIT_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N")
_SIXTEEN_TO_EIGHT = 65535 / 255
_IMAGE_RANK = 4


def open_images(path: Path, graph: Graph, images: Images | None, batch_size: int) -> Source:
    """The images in a folder by name, those that a `.txt` file lists, or a single one.

    Files of other endings and folders inside are left aside, with a note. A list holds one path a line, from its own
    folder.

    An image is turned upright by its EXIF orientation, an animation is its first frame, alpha is dropped (the colours
    beneath it stay). 16-bit gray counts as value / 257, so that all pixels are 0 to 255; 16-bit colours keep their
    high byte. Gray becomes three equal channels, and colours become gray by ITU-R 601 luma. `size` stretches with a
    bilinear filter that averages over all pixels it covers. Then `pixel * scale`, minus `mean`, over `std`, in float32.

    Raises:
        CapabilityError: Pillow is not installed.
        SpecError: images cannot feed this model, nothing says how, or there are none.
    """
    spec = _input(path, graph, images)
    assert images is not None  # noqa: S101 - _input has refused that
    _pillow(path)
    files, others = _listed(path)
    joins = rows_at_once(graph, batch_size) is not None

    def rows(notes: Notes) -> Iterator[Found]:
        for text in others:
            notes.add(text)
        for label, file in files.items():
            image = _image(label, file, images, notes)
            yield image if isinstance(image, Problem) else Row(label, {spec.name: _typed(image, spec)}, (), joins)

    return Source(path.name, tuple(files.values()), len(files), rows)


def _input(path: Path, graph: Graph, images: Images | None) -> TensorSpec:
    """The input that images feed."""
    if images is None:
        raise SpecError(
            f"{path.name} holds images, and nothing says how they become an input",
            next_step="write images: {layout: NCHW, size: [224, 224]} under calibration, "
            "or save arrays with numpy.savez(FILE.npz, INPUT=array)",
        )
    spec = graph.inputs[0]
    if len(graph.inputs) != 1 or len(spec.shape) != _IMAGE_RANK:
        found = ", ".join(str(tensor) for tensor in graph.inputs)
        raise SpecError(
            f"images feed a model with one input of rank 4, found {found}",
            next_step="save all inputs with numpy.savez(FILE.npz, INPUT=array, ...), or name a callable",
        )
    is_plain = (images.scale, set(images.mean), set(images.std)) == (1, {0}, {1})
    if "float" not in spec.dtype and not (spec.dtype == "uint8" and is_plain):
        raise SpecError(
            f"normalised images are fractions, and the input is {spec}",
            next_step="write scale: 1, mean: [0] and std: [1]" if spec.dtype == "uint8" else "name a callable instead",
        )
    if images.size and images.size[0] * images.size[1] not in range(1, MAX_PIXELS + 1):
        raise SpecError(
            f"images are resized to {list(images.size)}, expected 1 to {MAX_PIXELS} pixels",
            next_step="write the height and width of the input",
        )
    return spec


def _listed(path: Path) -> tuple[dict[str, Path], list[str]]:
    """Label -> file, and what was left aside."""
    try:
        if path.is_dir():
            return _in_folder(path)
        if path.suffix == ".txt":
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
            return {line: path.parent / line for line in lines if line}, []
        path.stat()
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{path.name} is no UTF-8 text with one path a line", next_step=f"file {shlex.quote(str(path))}"
        ) from error
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}", next_step=f"ls -l {shlex.quote(str(path))}") from error
    return {path.name: path}, []


def _in_folder(path: Path) -> tuple[dict[str, Path], list[str]]:
    with os.scandir(path) as scan:
        entries = sorted(scan, key=lambda entry: entry.name)
    folders = [entry.name for entry in entries if entry.is_dir()]
    files = [entry.name for entry in entries if entry.name not in folders]
    images = [name for name in files if is_image(Path(name))]
    if not images and folders:
        raise SpecError(
            f"{path.name} holds no images but {len(folders)} folders, which are not searched",
            next_step=f"list the images: find {shlex.quote(shown_path(path.absolute()))} -name '*.jpg' | shuf > images.txt",
        )
    aside = [f"the folder {name}" for name in folders] + [name for name in files if name not in images]
    notes = [f"{path.name}: {', '.join(aside[:5])}{' and more' * (len(aside) > 5)} left aside"] if aside else []  # noqa: PLR2004
    return {f"{path.name}/{name}": path / name for name in images}, notes


def is_image(path: Path) -> bool:
    """Whether a file's name ends as an image's; the hidden files that macOS puts beside images do not count."""
    return path.suffix.lower() in IMAGE_ENDINGS and not path.name.startswith(".")


def _image(label: str, file: Path, images: Images, notes: Notes) -> Array | Problem:
    """An image in its layout, normalised, float32, with a batch axis of 1."""
    try:
        with _decoded(file) as picture:
            width, height = picture.size
            if width * height > MAX_PIXELS:
                return _too_large(label, f"{width} x {height}")
            mode, is_animated = picture.mode, getattr(picture, "is_animated", False)
            if not _is_known(picture):
                return problem(f"{label} has pixels of mode '{mode}', expected 8 or 16 bits a channel", _replace(file))
            pixels = _pixels(picture, images)
            has_alpha = picture.has_transparency_data
    except _pillow(file).Image.DecompressionBombError:
        return _too_large(label, "too many")
    except Exception as error:  # noqa: BLE001 - decoders raise anything on damaged files
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200] or type(error).__name__
        return problem(f"{label} cannot be decoded: {reason}", _replace(file))
    if has_alpha:
        notes.add("has transparency, which was dropped", label)
    if is_animated:
        notes.add("holds several pictures, of which the first was taken", label)
    mean, std = np.asarray(images.mean, np.float32), np.asarray(images.std, np.float32)
    values = (pixels * np.float32(images.scale) - mean) / std
    if images.layout == "NCHW":
        values = values.transpose(2, 0, 1)
    return np.ascontiguousarray(values[np.newaxis], np.float32)


def _is_known(picture: Any) -> bool:
    if picture.mode == "I":
        return picture.format in ("PNG", "PPM")  # 16 bits that Pillow holds in 32
    return picture.mode in (*_SIXTEEN_BIT_MODES, "1", "CMYK", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "YCbCr")


def _pixels(picture: Any, images: Images) -> Array:
    """(height, width, channels), float32, 0 to 255."""
    pillow = _pillow(Path())
    size = images.size and (images.size[1], images.size[0])
    upright = pillow.ImageOps.exif_transpose(picture)
    if upright.mode in _SIXTEEN_BIT_MODES:
        upright = pillow.Image.fromarray(np.asarray(upright, np.float32) / np.float32(_SIXTEEN_TO_EIGHT))
    else:
        upright = upright.convert("L" if images.channels == "gray" else "RGB")
    if size and upright.size != size:
        upright = upright.resize(size, pillow.Image.Resampling.BILINEAR)
    pixels = np.asarray(upright, np.float32)
    if pixels.ndim == 2:  # noqa: PLR2004
        pixels = np.repeat(pixels[..., np.newaxis], 1 if images.channels == "gray" else 3, axis=2)
    return pixels[..., ::-1] if images.channels == "bgr" else pixels


def _typed(image: Array, spec: TensorSpec) -> Array:
    return image.astype(NARROW.get(spec.dtype) or spec.dtype, copy=False)


@contextmanager
def _decoded(file: Path) -> Iterator[Any]:
    with warnings.catch_warnings():
        # Pillow warns of sizes that are checked here, and of metadata that is not used.
        warnings.simplefilter("ignore")
        with _pillow(file).Image.open(file, formats=_FORMATS) as picture:
            yield picture


def _pillow(path: Path) -> Any:
    try:
        import PIL.Image  # noqa: PLC0415 - an extra
        import PIL.ImageOps  # noqa: PLC0415
    except ImportError as error:
        raise CapabilityError(
            f"reading the images of {path.name} takes Pillow, which is not installed",
            next_step="pip install 'trtforge[images]'",
        ) from error
    return PIL


def _too_large(label: str, found: str) -> Problem:
    return problem(f"{label} has {found} pixels, more than the {MAX_PIXELS} that are read", "make it smaller")


def _replace(file: Path) -> str:
    return f"replace it, or: rm {shlex.quote(shown_path(file.absolute()))}"
