"""Whether the values of a row are what a model is used with: evidence from others misleads calibration in silence."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trtforge.errors import Problem
from trtforge.samples.fit import NARROW
from trtforge.samples.source import Notes, Row, Sample, problem
from trtforge.spec.model import InputValues
from trtforge.types import Graph, InputRole, Profile

Array = np.ndarray[Any, np.dtype[Any]]

_PIXEL = 128
"""A float image with whole numbers this large and none below 0 was most likely not normalised."""
_NUM_BYTES_OF_HASH = 16


@dataclass(frozen=True, slots=True)
class ValueChecks:
    """The checks of one pass over the data.

    Refused: values that are not finite, token ids outside of their table, values outside of a range that the spec
    declares. Noted: masks with other values than 0 and 1, images of one value or of raw pixels, rows that occurred before.

    Attributes:
        declared: `inputs` of the spec.
        notes: where notes go.
    """

    graph: Graph
    declared: Mapping[str, InputValues]
    notes: Notes
    _seen: set[bytes] = field(default_factory=set)

    def of_row(self, row: Row) -> list[Problem]:
        """What is wrong; notes what is odd."""
        problems = [
            found
            for name, array in row.feeds.items()
            for found in self._of_array(f"{row.label}: '{name}'", name, array)
        ]
        if not problems:
            for name, array in row.feeds.items():
                self._note_oddities(row.label, name, array)
            self._note_repetition(row)
        return problems

    def _of_array(self, place: str, name: str, array: Array) -> Iterator[Problem]:
        if array.dtype.kind == "f" or array.dtype in NARROW.values():
            is_odd = ~np.isfinite(array)
            if is_odd.any():
                found = _described(array, is_odd, "not finite")
                yield problem(f"{place} holds {found}", "remove that sample, or mend what makes it")
                return
        if bounds := self._bounds(self.graph.role(name)):
            low, high, reason = bounds
            is_odd = (array < low) | (array > high)
            if is_odd.any():
                found = _described(array, is_odd, f"outside {low:g} to {high:g} ({reason})")
                yield problem(f"{place} holds {found}", f"write the data that belongs to {self.graph.source.name}")

    def _bounds(self, role: InputRole) -> tuple[float, float, str] | None:
        """Range that no value may leave, and who says so."""
        declared = self.declared.get(role.name, InputValues())
        if declared.range:
            return *declared.range, "the range in the spec"
        if role.kind == "token_ids" and declared.kind in (None, "token_ids"):
            return role.low, role.high, role.reason
        return None

    def _note_oddities(self, label: str, name: str, array: Array) -> None:
        kind = self.declared.get(name, InputValues()).kind or self.graph.role(name).kind
        if kind == "mask" and not ((array == 0) | (array == 1)).all():
            self.notes.add(f"mask '{name}' holds values other than 0 and 1", label)
        if kind != "image" or not array.size:
            return
        low, high = array.min(), array.max()
        if low == high:
            self.notes.add(f"image '{name}' is {low:g} throughout", label)
        elif array.dtype != np.uint8 and low >= 0 and high >= _PIXEL and (array == np.round(array)).all():
            self.notes.add(
                f"image '{name}' holds whole numbers up to {_PIXEL} and more, like pixels before scaling", label
            )

    def _note_repetition(self, row: Row) -> None:
        digest = hashlib.blake2b(digest_size=_NUM_BYTES_OF_HASH)
        for array in row.feeds.values():
            digest.update(repr(array.shape).encode())
            digest.update(array.tobytes())
        if digest.digest() in self._seen:
            self.notes.add("is equal to an earlier sample", row.label)
        self._seen.add(digest.digest())


def _described(array: Array, is_odd: Array, what: str) -> str:
    first = tuple(int(position) for position in np.argwhere(is_odd)[0])
    count = int(np.count_nonzero(is_odd))
    more = f"; {count} of {array.size} values are" if count > 1 else ""
    return f"{array[first]} at {list(first)}, {what}{more}"


def fits_a_profile(sample: Sample, profiles: tuple[Profile, ...]) -> bool:
    """Whether all sizes, and the values that decide shapes, lie inside one profile; True without profiles."""
    return not profiles or any(_fits(sample, profile) for profile in profiles)


def _fits(sample: Sample, profile: Profile) -> bool:
    found = [(sample.feeds[name].shape, within) for name, within in profile.shapes.items()]
    found += [(tuple(sample.feeds[name].reshape(-1).tolist()), within) for name, within in profile.values.items()]
    return all(
        len(sizes) == len(within.min)
        and all(low <= size <= high for low, size, high in zip(within.min, sizes, within.max, strict=True))
        for sizes, within in found
    )
