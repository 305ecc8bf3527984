"""Three seeded traces in the forms that public ones have: chat lengths in bursts, images of mixed sizes, two-mode batches.

They are synthetic. The chat trace follows what published ones of chat services report: lengths near log-normal with a
heavy tail, arrivals in bursts; the images are the common camera, screen and square sizes with free crops between.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
IN_BURSTS, FREE_CROPS, OFFLINE = 0.5, 0.1, 0.3
"""Shares of the requests."""


def chat(num: int, seed: int) -> tuple[tuple[str, str], Rows, NDArray[np.float64]]:
    """(names, (num, 2) batch and seq, seconds): log-normal lengths of 8 to 512, half of the arrivals in bursts."""
    random = np.random.default_rng(seed)
    seq = np.exp(random.normal(4.0, 0.8, num)).astype(np.int64).clip(8, 512)
    gaps = np.where(random.random(num) < IN_BURSTS, random.exponential(0.0002, num), random.exponential(0.004, num))
    batch = random.choice([1, 2, 4, 8, 16], num, p=[0.55, 0.15, 0.15, 0.1, 0.05])
    return ("batch", "seq"), np.stack([batch, seq], 1), np.cumsum(gaps)


def images(num: int, seed: int) -> tuple[tuple[str, str], Rows, NDArray[np.float64]]:
    """(names, (num, 2) height and width, seconds): six usual sizes, and a tenth of free crops in steps of 32."""
    random = np.random.default_rng(seed)
    usual = np.array([(224, 224), (480, 640), (640, 480), (640, 640), (736, 1280), (1088, 1920)])
    sizes = usual[random.choice(6, num, p=[0.35, 0.2, 0.1, 0.2, 0.1, 0.05])]
    crops = random.integers(4, 34, (num, 2)) * 32
    is_crop = random.random(num) < FREE_CROPS
    return ("height", "width"), np.where(is_crop[:, None], crops, sizes), np.cumsum(random.exponential(0.005, num))


def two_modes(num: int, seed: int) -> tuple[tuple[str, str], Rows, NDArray[np.float64]]:
    """(names, (num, 2) batch and seq, seconds): single short requests online, large batches of long ones offline."""
    random = np.random.default_rng(seed)
    is_offline = random.random(num) < OFFLINE
    batch = np.where(is_offline, random.integers(24, 33, num), random.integers(1, 3, num))
    seq = np.where(is_offline, random.integers(200, 385, num), random.integers(8, 65, num))
    return ("batch", "seq"), np.stack([batch, seq], 1), np.cumsum(random.exponential(0.01, num))


TRACES = {"chat": chat, "images": images, "two modes": two_modes}
