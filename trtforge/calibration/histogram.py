"""Magnitudes of a tensor, counted so that the order of the data does not matter."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

FRACTION_BITS = 10
OCTAVES = 16
NUM_BINS = OCTAVES << FRACTION_BITS
"""Bins between the power of two above the largest magnitude and 2^-16 of it, 1024 to an octave.

What lies below is less than half a step of INT8 for any amax down to 1/256 of the largest magnitude.
"""

_SHIFT = 23 - FRACTION_BITS
_BIAS = 127
_MAGNITUDE = 0x7FFFFFFF
_CHUNK = 1 << 17
"""Values at a time; they stay in a core's own memory from one step to the next."""

Counts = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Histogram:
    """How often each magnitude occurred.

    A bin holds the FP32 numbers that share the exponent and the first fraction bits, so its bounds do not depend on the
    data, and a larger value only moves the window of bins up by whole octaves. Any order of `add`, and any split of the
    data into histograms that are merged, give the same one.

    Attributes:
        counts: (NUM_BINS,), ascending magnitudes.
        top: exponent of the highest bins as FP32 stores it; they end at 2^(top - 126).
        num_below: values, not zero, that lie below the bins.
        num_zeros: of either sign.
        low, high: smallest and largest value; inf and -inf where there are none.
    """

    counts: Counts = field(default_factory=lambda: np.zeros(NUM_BINS, np.int64))
    top: int = OCTAVES
    num_below: int = 0
    num_zeros: int = 0
    low: float = np.inf
    high: float = -np.inf

    @property
    def num_values(self) -> int:
        """All that were added."""
        return int(self.counts.sum()) + self.num_below + self.num_zeros

    @property
    def absmax(self) -> float:
        """Largest magnitude, 0 without values."""
        return max(-self.low, self.high, 0.0)

    @property
    def edges(self) -> NDArray[np.float64]:
        """Bounds of the bins, (NUM_BINS + 1,), ascending: bin i holds `edges[i] <= magnitude < edges[i + 1]`."""
        return np.ldexp(_edges_below_one(), self.top + 1 - _BIAS)

    def add(self, values: NDArray[np.float32], low: float, high: float) -> None:
        """Counts `values`.

        Args:
            values: any shape, all finite, at least one.
            low: the smallest of them.
            high: the largest.
        """
        self._grow(max(-low, high))
        self.low, self.high = min(self.low, low), max(self.high, high)
        first = ((self.top - OCTAVES + 1) << FRACTION_BITS) - 1
        bits = np.ascontiguousarray(values).reshape(-1).view(np.int32)
        buffer = np.empty(min(_CHUNK, bits.size), np.int32)
        for start in range(0, bits.size, _CHUNK):
            chunk = bits[start : start + _CHUNK]
            keys = np.bitwise_and(chunk, _MAGNITUDE, out=buffer[: chunk.size])
            num_zeros = chunk.size - int(np.count_nonzero(keys))
            np.right_shift(keys, _SHIFT, out=keys)
            np.subtract(keys, first, out=keys)
            np.maximum(keys, 0, out=keys)
            counts = np.bincount(keys, minlength=NUM_BINS + 1)
            self.counts += counts[1:]
            self.num_zeros += num_zeros
            self.num_below += int(counts[0]) - num_zeros

    def merge(self, other: Histogram) -> None:
        """Adds all that `other` counted."""
        self._grow(other.absmax)
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        counts, num_below = _moved_up(other.counts, self.top - other.top)
        self.counts += counts
        self.num_below += num_below + other.num_below
        self.num_zeros += other.num_zeros

    def _grow(self, absmax: float) -> None:
        top = max(self.top, int(np.float32(absmax).view(np.int32)) >> 23)
        self.counts, num_below = _moved_up(self.counts, top - self.top)
        self.num_below += num_below
        self.top = top


@functools.cache
def _edges_below_one() -> NDArray[np.float64]:
    fractions = 1 + np.arange(1 << FRACTION_BITS) / (1 << FRACTION_BITS)
    return np.append(np.ldexp(fractions, np.arange(-OCTAVES, 0)[:, np.newaxis]).ravel(), 1.0)


def _moved_up(counts: Counts, octaves: int) -> tuple[Counts, int]:
    """The counts in bins that begin `octaves` higher, and how many values fell out below."""
    if octaves == 0:
        return counts, 0
    step = min(octaves << FRACTION_BITS, NUM_BINS)
    moved = np.concatenate([counts[step:], np.zeros(step, np.int64)])
    return moved, int(counts[:step].sum())


def as_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """The same numbers in FP32; those beyond it become infinite."""
    with np.errstate(over="ignore"):
        return array.astype(np.float32, copy=False)
