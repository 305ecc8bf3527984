"""The spec's optimization profiles, checked against the model before any builder sees them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from trtforge.errors import Problem, SpecError, Where, closest, raise_any
from trtforge.shapes.ranges import range_problem
from trtforge.spec.load import SpecFile
from trtforge.spec.model import InputProfile, InputValues, ProfileSpec
from trtforge.spec.starter import yaml_key
from trtforge.types import POINTS, Dim, Graph, Point, Profile, Shape, ShapeRange, TensorSpec

Sizes = tuple[int, int, int]
"""Sizes of one axis at min, opt and max."""

MAX_SHAPE_VALUES = 64
"""Elements a shape-value input may have at most.

Source: https://docs.nvidia.com/deeplearning/tensorrt/latest/_static/python-api/infer/Core/OptimizationProfile.html
"""

_SUGGESTED_BATCH: Sizes = (1, 4, 8)
# Multiples of 32, because image networks commonly halve their input five times.
_SUGGESTED_PIXELS: Sizes = (32, 224, 448)
_SUGGESTED_LENGTH: Sizes = (1, 64, 128)
_UNUSED = "an exporter drops the arguments that the traced path does not use"


def resolve_profiles(spec_file: SpecFile, graph: Graph) -> tuple[Profile, ...]:
    """Checks the profiles of a spec against a model and completes them.

    Guarantees: every profile has every input, in graph order; ranks and fixed sizes are the model's; on every axis
    1 <= min <= opt <= max; one ONNX symbol has one size wherever it occurs, at min, at opt and at max; exactly the
    inputs that decide shapes have values. A fully static model without profiles gets one called `default`.

    Raises:
        SeveralErrors: of `SpecError` problems, those of all profiles and of `inputs` at once.
    """
    spec = spec_file.spec
    shape_values = frozenset(
        role.name for role in graph.roles if role.kind == "shape_values" and not _has_kind(spec.inputs, role.name)
    )
    in_need = [name.name for name in graph.inputs if name.is_dynamic or name.name in shape_values]
    written = _listed_profiles(spec_file) or (() if in_need else (ProfileSpec(inputs={}),))
    checks = [_ProfileCheck(spec_file, graph, shape_values, index, profile) for index, profile in enumerate(written)]
    raise_any(
        [
            *_declared_problems(spec_file, graph, shape_values),
            *([] if written else [_no_profile(spec_file, graph, in_need)]),
            *_same_names(spec_file),
            *(problem for check in checks for problem in check.problems()),
        ]
    )
    return tuple(check.resolved() for check in checks)


def paste_entry(graph: Graph, names: Iterable[str], known: Mapping[str, Sizes] | None = None) -> str:
    """Profile entries for inputs, as YAML to paste under a profile's `inputs:` and adjust, one line for each.

    Args:
        graph: the model.
        names: inputs of the model.
        known: sizes at min, opt and max of ONNX symbols, where they are decided; every other open size is a guess.
    """
    sizes = dict(known or {})
    return "\n".join(_entry_line(graph, graph.input(name), sizes) for name in names)


@dataclass(frozen=True, slots=True)
class _ProfileCheck:
    """One profile of the spec beside the model."""

    spec_file: SpecFile
    graph: Graph
    shape_values: frozenset[str]
    index: int
    profile: ProfileSpec

    def problems(self) -> Iterator[Problem]:
        inputs = {spec.name: spec for spec in self.graph.inputs}
        unknown = [name for name in self.profile.inputs if name not in inputs]
        absent = [spec for spec in self.graph.inputs if spec.name not in self.profile.inputs]
        meant = {name: closest(name, [spec.name for spec in absent]) for name in unknown}
        for name in unknown:
            yield _unknown_name(self.graph, f"{self}.inputs", name, meant[name], self.where(name))
        for spec in absent:
            if spec.name not in meant.values() and (spec.is_dynamic or spec.name in self.shape_values):
                yield self._missing(spec)
        for name, entry in self.profile.inputs.items():
            if name in inputs:
                yield from self._entry_problems(inputs[name], entry)
        yield from self._symbol_problems()

    def resolved(self) -> Profile:
        shapes, values = {}, {}
        for spec in self.graph.inputs:
            entry = self.profile.inputs.get(spec.name, InputProfile())
            shapes[spec.name] = ShapeRange(*(_shape_at(entry, point) or _static_shape(spec) for point in POINTS))
            if entry.values:
                values[spec.name] = ShapeRange(entry.values.min, entry.values.opt, entry.values.max)
        return Profile(self.profile.name, shapes, values)

    def __str__(self) -> str:
        return f"profiles[{self.index}]"

    def where(self, name: str, *key: str | int) -> Where:
        return self.spec_file.where("profiles", self.index, "inputs", name, *key)

    def _problem(self, name: str, key: tuple[str | int, ...], summary: str, next_step: str) -> Problem:
        return Problem(summary, next_step, self.where(name, *key), exit_code=SpecError.exit_code)

    def _missing(self, spec: TensorSpec) -> Problem:
        entry = paste_entry(self.graph, [spec.name], self._known_sizes())
        where = self.spec_file.where("profiles", self.index, "inputs")
        summary = f"{self}.inputs has no shapes for the model's input {spec}"
        if spec.name in self.shape_values:
            summary = f"{self}.inputs lacks {spec}, whose values decide the shape of another tensor"
        return Problem(summary, f"add this line to it and adjust: {entry}", where, exit_code=SpecError.exit_code)

    def _entry_problems(self, spec: TensorSpec, entry: InputProfile) -> Iterator[Problem]:
        given = {point: shape for point in POINTS if (shape := _shape_at(entry, point)) is not None}
        if len(given) < len(POINTS) and (given or (spec.is_dynamic and spec.name not in self.shape_values)):
            yield self._lacking(spec, given)
        misfits = {point: shape for point, shape in given.items() if len(shape) != len(spec.shape)}
        if misfits:
            yield self._rank_problem(spec, misfits)
        else:
            for axis, dim in enumerate(spec.shape):
                sizes = {point: shape[axis] for point, shape in given.items()}
                yield from self._axis_problems(spec, axis, dim, sizes)
        yield from self._values_problems(spec, entry)

    def _lacking(self, spec: TensorSpec, given: Mapping[Point, Shape]) -> Problem:
        lacking = [point for point in POINTS if point not in given]
        if given:
            shape = next(iter(given.values()))
            lines = ", ".join(f"{point}: {list(shape)}" for point in lacking)
        else:
            lines = paste_entry(self.graph, [spec.name], self._known_sizes())
        summary = f"{self}.inputs.{spec.name} has no {', '.join(lacking)}; the model's input is {spec}"
        return self._problem(spec.name, (), summary, f"add and adjust: {lines}")

    def _rank_problem(self, spec: TensorSpec, misfits: Mapping[Point, Shape]) -> Problem:
        found = _listed({point: list(shape) for point, shape in misfits.items()})
        summary = f"{self}.inputs.{spec.name} needs {len(spec.shape)} sizes, the model's input is {spec}; found {found}"
        entry = paste_entry(self.graph, [spec.name], self._known_sizes())
        return self._problem(spec.name, (next(iter(misfits)),), summary, f"replace it, and adjust: {entry}")

    def _axis_problems(self, spec: TensorSpec, axis: int, dim: Dim, sizes: Mapping[Point, int]) -> Iterator[Problem]:
        found = _listed(sizes)
        at = f"axis {axis} of '{spec.name}' in {self}"
        clash = next((point for point, size in sizes.items() if isinstance(dim, int) and size != dim), None)
        zero = next((point for point, size in sizes.items() if size == 0), None)
        if clash:
            summary = f"{at} is {dim} in the model, which fixes it; found {found}"
            yield self._problem(spec.name, (clash, axis), summary, f"write {dim} there at min, opt and max")
        elif zero:
            summary = f"{at} is empty; found {found}, expected 1 or more"
            yield self._problem(spec.name, (zero, axis), summary, "write the smallest size that is really used")
        elif any(first > second for first, second in pairwise(sizes.values())):
            ordered = _listed(dict(zip(sizes, sorted(sizes.values()), strict=True)))
            summary = f"{at}: found {found}, expected min <= opt <= max"
            yield self._problem(spec.name, ("opt", axis), summary, f"write {ordered} there")

    def _values_problems(self, spec: TensorSpec, entry: InputProfile) -> Iterator[Problem]:
        name = spec.name
        if name not in self.shape_values:
            if entry.values:
                summary = f"{self}.inputs.{name} has values, but the values of '{name}' decide no shape"
                yield self._problem(name, ("values",), summary, f"remove values from {self}.inputs.{name}")
            return
        count = _num_values(spec)
        if count is None or count > MAX_SHAPE_VALUES:
            summary = (
                f"the values of {spec} decide a shape; builders take a scalar or a fixed length of at most "
                f"{MAX_SHAPE_VALUES} there"
            )
            yield self._problem(name, (), summary, f"export the model with a fixed length of '{name}'")
        elif entry.values is None:
            summary = f"{self}.inputs.{name} needs values, as the values of {spec} decide the shape of another tensor"
            line = paste_entry(self.graph, [name])
            yield self._problem(name, (), summary, f"write its smallest, usual and largest values: {line}")
        else:
            yield from self._values_range_problems(spec, count, entry)

    def _values_range_problems(self, spec: TensorSpec, count: int, entry: InputProfile) -> Iterator[Problem]:
        values = {point: getattr(entry.values, point) for point in POINTS}
        misfits = {point: value for point, value in values.items() if len(value) != count}
        if misfits:
            found = _listed({point: list(value) for point, value in misfits.items()})
            summary = f"{self}.inputs.{spec.name}.values needs {count} numbers for {spec}; found {found}"
            key = ("values", next(iter(misfits)))
            yield self._problem(spec.name, key, summary, f"write {count} numbers at min, opt and max")
            return
        for position, numbers in enumerate(zip(*values.values(), strict=True)):
            if sorted(numbers) != list(numbers):
                found = _listed(dict(zip(POINTS, numbers, strict=True)))
                ordered = _listed(dict(zip(POINTS, sorted(numbers), strict=True)))
                summary = f"value {position} of '{spec.name}' in {self}: found {found}, expected min <= opt <= max"
                yield self._problem(spec.name, ("values", "opt", position), summary, f"write {ordered} there")

    def _symbol_problems(self) -> Iterator[Problem]:
        first: dict[str, tuple[str, int, Sizes]] = {}
        for name, axis, symbol, sizes in self._open_sizes():
            name_0, axis_0, sizes_0 = first.setdefault(symbol, (name, axis, sizes))
            differing = [place for place in range(len(POINTS)) if sizes[place] != sizes_0[place]]
            if differing:
                found = ", ".join(f"{sizes_0[place]} and {sizes[place]} at {POINTS[place]}" for place in differing)
                summary = (
                    f"the model's size '{symbol}' is axis {axis_0} of '{name_0}' and axis {axis} of '{name}', "
                    f"which must be equal; found {found} in {self}"
                )
                next_step = "write {} at min, {} at opt and {} at max in both".format(*sizes_0)
                yield self._problem(name, (POINTS[differing[0]], axis), summary, next_step)

    def _known_sizes(self) -> dict[str, Sizes]:
        """Size of each symbol where the profile gives it, the first mention deciding."""
        known: dict[str, Sizes] = {}
        for _, _, symbol, sizes in self._open_sizes():
            known.setdefault(symbol, sizes)
        return known

    def _open_sizes(self) -> Iterator[tuple[str, int, str, Sizes]]:
        """Input, axis, symbol and sizes of every symbolic axis that has all three."""
        for spec in self.graph.inputs:
            entry = self.profile.inputs.get(spec.name, InputProfile())
            shapes = (entry.min, entry.opt, entry.max)
            for axis, dim in enumerate(spec.shape):
                low, usual, high = (_axis_size(shape, spec, axis) for shape in shapes)
                if isinstance(dim, str) and low is not None and usual is not None and high is not None:
                    yield spec.name, axis, dim, (low, usual, high)


def _declared_problems(spec_file: SpecFile, graph: Graph, shape_values: frozenset[str]) -> Iterator[Problem]:
    inputs = {spec.name: spec for spec in graph.inputs}
    others = [name for name in inputs if name not in spec_file.spec.inputs]
    for name, declared in spec_file.spec.inputs.items():
        where = spec_file.where("inputs", name)
        if name not in inputs:
            yield _unknown_name(graph, "inputs", name, closest(name, others), where)
        elif declared.range and name in shape_values:
            summary = f"inputs.{name}.range has no effect: the values of '{name}' decide a shape and stand in profiles"
            yield Problem(summary, f"remove range from inputs.{name}", where, exit_code=SpecError.exit_code)
        elif declared.range and (reason := range_problem(inputs[name], *declared.range)):
            low, high = declared.range
            summary = f"inputs.{name}.range is [{low:g}, {high:g}], but {reason}"
            place = spec_file.where("inputs", name, "range")
            yield Problem(summary, "write bounds that its type holds", place, exit_code=SpecError.exit_code)


def _unknown_name(graph: Graph, holder: str, name: str, meant: str | None, where: Where) -> Problem:
    known = ", ".join(str(spec) for spec in graph.inputs)
    return Problem(
        f"{holder} names '{name}', which is no input of {graph.source.name}",
        f"rename it to '{meant}'" if meant else f"remove '{name}', or export the model so that it uses it",
        where,
        (f"the model's inputs: {known}", *(() if meant else (_UNUSED,))),
        SpecError.exit_code,
    )


def _no_profile(spec_file: SpecFile, graph: Graph, names: Sequence[str]) -> Problem:
    block = ["profiles:", "  - inputs:", *(f"      {line}" for line in paste_entry(graph, names).splitlines())]
    described = ", ".join(str(graph.input(name)) for name in names)
    return Problem(
        f"{graph.source.name} has inputs that need an optimization profile, and the spec has none: {described}",
        f"add these lines to {spec_file.path.name} and adjust the sizes",
        spec_file.where("profiles"),
        tuple(block),
        SpecError.exit_code,
    )


def _listed_profiles(spec_file: SpecFile) -> tuple[ProfileSpec, ...]:
    """The profiles as the spec lists them; those from traffic have to be chosen before."""
    profiles = spec_file.spec.profiles
    return profiles if isinstance(profiles, tuple) else ()


def _same_names(spec_file: SpecFile) -> Iterator[Problem]:
    names = [profile.name for profile in _listed_profiles(spec_file)]
    for name, count in Counter(names).items():
        if count > 1:
            places = [index for index, other in enumerate(names) if other == name]
            holders = ", ".join(f"profiles[{index}]" for index in places)
            yield Problem(
                f"{holders} are all named '{name}'" + (", the default" if name == "default" else ""),
                f"give each a name of its own, such as name: {name}-{places[1]}",
                spec_file.where("profiles", places[1], "name"),
                exit_code=SpecError.exit_code,
            )


def _has_kind(declared: Mapping[str, InputValues], name: str) -> bool:
    return name in declared and declared[name].kind is not None


def _listed(at_points: Mapping[Point, int | list[int]]) -> str:
    """What stands at each point: `min 1, opt 2, max 8`, or `8 at all points` where it is one thing."""
    found = list(at_points.values())
    if len(found) == len(POINTS) and found[0] == found[1] == found[2]:
        return f"{found[0]} at all points"
    return ", ".join(f"{point} {value}" for point, value in at_points.items())


def _shape_at(entry: InputProfile, point: Point) -> Shape | None:
    shape: Shape | None = getattr(entry, point)
    return shape


def _static_shape(spec: TensorSpec) -> Shape:
    return tuple(dim for dim in spec.shape if isinstance(dim, int))


def _axis_size(shape: Shape | None, spec: TensorSpec, axis: int) -> int | None:
    return shape[axis] if shape is not None and len(shape) == len(spec.shape) else None


def _num_values(spec: TensorSpec) -> int | None:
    """Elements of a shape-value input; None where that is open or it has more than one axis."""
    if spec.is_dynamic or len(spec.shape) > 1:
        return None
    return math.prod(_static_shape(spec))


def _entry_line(graph: Graph, spec: TensorSpec, sizes: dict[str, Sizes]) -> str:
    kind = graph.role(spec.name).kind
    if kind == "shape_values" and (count := _num_values(spec)):
        text = ", ".join(f"{point}: {[1] * count}" for point in POINTS)
        return f"{yaml_key(spec.name)}: {{values: {{{text}}}}}"
    axes = [_suggested(dim, axis, kind == "image", sizes) for axis, dim in enumerate(spec.shape)]
    text = ", ".join(f"{point}: {[axis[place] for axis in axes]}" for place, point in enumerate(POINTS))
    return f"{yaml_key(spec.name)}: {{{text}}}"


def _suggested(dim: Dim, axis: int, is_image: bool, sizes: dict[str, Sizes]) -> Sizes:  # noqa: FBT001 - private
    if isinstance(dim, int):
        return (dim, dim, dim)
    guess = _SUGGESTED_BATCH if axis == 0 else _SUGGESTED_PIXELS if is_image else _SUGGESTED_LENGTH
    return guess if dim is None else sizes.setdefault(dim, guess)
