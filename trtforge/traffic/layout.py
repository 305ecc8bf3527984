"""The open sizes of a model's inputs, by name: what a row of a traffic log has to say."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trtforge.profile_choice import profile_for
from trtforge.types import Point, Profile, Shape, TensorSpec

Sizes = Mapping[str, int]
"""Name of an open size -> size."""


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


def profile_sizes(layout: Layout, profile: Profile, point: Point) -> dict[str, int]:
    """The sizes of a profile's min, opt or max, in the order of `layout.names`."""
    return {
        dim: size
        for name, axes in layout.axes.items()
        for dim, size in zip(axes, getattr(profile.shapes[name], point), strict=True)
        if isinstance(dim, str)
    }


def is_taken(layout: Layout, sizes: Sizes, profiles: Iterable[Profile]) -> bool:
    """Whether some profile allows these sizes, of all names."""
    return profile_for(layout.shapes(sizes[name] for name in layout.names), profiles) is not None


def combinations(
    layout: Layout, profiles: Sequence[Profile], asked: Mapping[str, Sequence[int]]
) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    """The sets of sizes to measure at, and those that lie in no profile.

    Args:
        layout: of the inputs.
        profiles: of the engine.
        asked: name -> sizes, which are combined; a name that is left out has the first profile's opt. Without any, the
            opt of every profile.
    """
    opts = [profile_sizes(layout, profile, "opt") for profile in profiles]
    if not asked:
        return list({tuple(opt.items()): opt for opt in opts}.values()), []
    rest = {name: size for name, size in (opts[0] if opts else {}).items() if name not in asked}
    wanted = [dict(zip(asked, values, strict=True)) | rest for values in itertools.product(*asked.values())]
    fitting = [sizes for sizes in wanted if is_taken(layout, sizes, profiles)]
    return fitting, [sizes for sizes in wanted if sizes not in fitting]
