"""The open sizes of a model's inputs, by name: what a row of a traffic log has to say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trtforge.types import Shape, TensorSpec


@dataclass(frozen=True, slots=True)
class Layout:
    """The inputs of a model and the names of their open sizes.

    Attributes:
        axes: input name -> for each axis its fixed size, or the name of its open size. One ONNX symbol is one name
            wherever it occurs; an axis without a symbol is called `INPUT[AXIS]`.
        names: the open sizes, in order of first occurrence.
        batch: the open size at axis 0 of every input that has open sizes, None where they differ.
    """

    axes: Mapping[str, tuple[int | str, ...]]
    names: tuple[str, ...]
    batch: str | None

    def shapes(self, sizes: Iterable[int]) -> dict[str, Shape]:
        """Input name -> shape, for the sizes of `names` in order."""
        known = dict(zip(self.names, map(int, sizes), strict=True))
        return {
            name: tuple(axis if isinstance(axis, int) else known[axis] for axis in axes)
            for name, axes in self.axes.items()
        }


def layout_of(inputs: Iterable[TensorSpec]) -> Layout:
    """The layout of a model with these inputs."""
    axes = {
        spec.name: tuple(f"{spec.name}[{axis}]" if dim is None else dim for axis, dim in enumerate(spec.shape))
        for spec in inputs
    }
    names = tuple(dict.fromkeys(axis for given in axes.values() for axis in given if isinstance(axis, str)))
    first = {given[0] for given in axes.values() if any(isinstance(axis, str) for axis in given)}
    only = first.pop() if len(first) == 1 else None
    return Layout(axes, names, only if isinstance(only, str) else None)
