"""Rendered lines of text for the OCR recogniser, and what it reads on them.

Seeded: a seed always gives the same lines. Upper and lower case of letters that differ in size alone are not mixed, since
no reader tells them apart in a line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnxruntime import InferenceSession
from PIL import Image, ImageDraw, ImageFilter, ImageFont

Array = NDArray[Any]

SHAPE = (3, 48, 320)
"""Channels, height and width of a line; narrower lines are padded with zeros, wider ones are not drawn."""

_WORDS = [
    "about",
    "after",
    "almost",
    "amount",
    "arrival",
    "balance",
    "because",
    "before",
    "began",
    "bridge",
    "castle",
    "customer",
    "date",
    "delivery",
    "departure",
    "down",
    "each",
    "email",
    "enough",
    "every",
    "first",
    "found",
    "garden",
    "general",
    "great",
    "hospital",
    "hotel",
    "house",
    "invoice",
    "large",
    "library",
    "line",
    "luggage",
    "made",
    "market",
    "mountain",
    "museum",
    "number",
    "order",
    "office",
    "other",
    "part",
    "passenger",
    "payment",
    "people",
    "phone",
    "place",
    "platform",
    "price",
    "product",
    "public",
    "quantity",
    "report",
    "reservation",
    "right",
    "river",
    "same",
    "school",
    "service",
    "square",
    "state",
    "station",
    "street",
    "table",
    "tax",
    "ticket",
    "time",
    "total",
    "train",
    "under",
    "until",
    "value",
    "village",
    "water",
    "while",
    "window",
    "without",
    "work",
    "world",
    "year",
]
_CAPITALS = frozenset("abdefghlmnpqrt")
_BATCH = 8


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """A line of text.

    Attributes:
        text: what stands in it.
        image: `SHAPE`, FP32 in [-1, 1], as the recogniser takes it.
    """

    text: str
    image: Array


def lines(num: int, seed: int, without: frozenset[str] = frozenset()) -> list[Line]:
    """`num` lines, none with a text in `without` or twice."""
    rng = np.random.default_rng(seed)
    found: dict[str, Line] = {}
    while len(found) < num:
        text = " ".join(_part(rng) for _ in range(rng.integers(1, 4)))
        image = _drawn(text, rng)
        width = round(SHAPE[1] * image.width / image.height)
        if width <= SHAPE[2] and text not in without:
            found.setdefault(text, Line(text, _prepared(image, width)))
    return list(found.values())


def _part(rng: np.random.Generator) -> str:
    word = _WORDS[rng.integers(len(_WORDS))]
    kind = rng.random()
    if kind < 0.45:  # noqa: PLR2004 - a share of the lines
        return word
    if kind < 0.68:  # noqa: PLR2004 - a share of the lines
        return word.capitalize() if word[0] in _CAPITALS else word
    if kind < 0.8:  # noqa: PLR2004 - a share of the lines
        return str(rng.integers(10 ** rng.integers(1, 7)))
    if kind < 0.88:  # noqa: PLR2004 - a share of the lines
        return f"{rng.integers(1000)}.{rng.integers(100):02d}"
    if kind < 0.94:  # noqa: PLR2004 - a share of the lines
        return f"{rng.integers(1, 29):02d}/{rng.integers(1, 13):02d}/{rng.integers(1990, 2030)}"
    return word + ",;:!?"[rng.integers(5)]


def _drawn(text: str, rng: np.random.Generator) -> Image.Image:
    size = int(rng.integers(18, 44))
    font = ImageFont.load_default(size)
    left, top, right, bottom = map(round, font.getbbox(text))
    margin = int(rng.integers(3, 9))
    paper, ink = int(rng.integers(200, 256)), int(rng.integers(0, 90))
    if rng.random() < 0.15:  # noqa: PLR2004 - a share of the lines
        paper, ink = ink, paper
    image = Image.new("RGB", (right - left + 2 * margin, bottom - top + 2 * margin), (paper, paper, paper))
    ImageDraw.Draw(image).text((margin - left, margin - top), text, font=font, fill=(ink, ink, ink))
    if rng.random() < 0.4:  # noqa: PLR2004 - a share of the lines
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.01, 0.03) * size))
    noise = rng.normal(0, rng.uniform(0, 8), (image.height, image.width, 3))
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


def _prepared(image: Image.Image, width: int) -> Array:
    """Scaled to the height, BGR, in [-1, 1]. Source: rapidocr-onnxruntime, `ch_ppocr_rec/main.py`, resize_norm_img."""
    small = np.asarray(image.resize((width, SHAPE[1]), Image.Resampling.BILINEAR), np.float32)
    result = np.zeros(SHAPE, np.float32)
    result[:, :, :width] = (small[:, :, ::-1] / 255 - 0.5).transpose(2, 0, 1) / 0.5
    return result


def characters(model: Path) -> list[str]:
    """Class -> character, as the model's metadata has them; class 0 is the blank, the last one the space."""
    metadata = {entry.key: entry.value for entry in onnx.load(model).metadata_props}
    return ["", *metadata["character"].split("\n"), " "]


def read(session: InferenceSession, given: Sequence[Line], alphabet: Sequence[str]) -> Iterator[str]:
    """What the recogniser reads on each line: the likeliest class of each step, repetitions and blanks dropped."""
    for start in range(0, len(given), _BATCH):
        (scores,) = session.run(None, {"x": np.stack([line.image for line in given[start : start + _BATCH]])})
        for classes in scores.argmax(-1):
            starts = np.diff(classes, prepend=-1) != 0
            yield "".join(alphabet[index] for index in classes[starts & (classes != 0)])


def right(session: InferenceSession, given: Sequence[Line], alphabet: Sequence[str]) -> NDArray[np.bool_]:
    """For each line, whether it is read right, spaces left aside."""
    pairs = zip(read(session, given, alphabet), given, strict=True)
    return np.array([found.replace(" ", "") == line.text.replace(" ", "") for found, line in pairs])
