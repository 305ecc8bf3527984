"""The calibration table: one readable, diffable file with a range for each tensor, bound to what it was made from."""

from __future__ import annotations

import json
import math
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

import trtforge
from trtforge.calibration.histogram import Histogram
from trtforge.calibration.thresholds import (
    METHODS,
    SMALLEST_AMAX,
    Choice,
    Method,
    amaxes,
    choose,
    has_outliers,
    saturated_share,
)
from trtforge.digests import value_digest
from trtforge.errors import CalibrationError, Problem, StoreError, Where, raise_any
from trtforge.files import write_text
from trtforge.types import Graph, Profile, Shape

if TYPE_CHECKING:
    from trtforge.calibration.observe import Observations

MAX_TABLE_BYTES = 64 << 20
"""A table with ten thousand tensors is below 8 MiB."""

_MAX_PROBLEMS = 20
_MOST_NAMED = 3
_CALIBRATE = "trtforge calibrate SPEC --output {}"
_STRICT = with_config(ConfigDict(extra="forbid", allow_inf_nan=False, strict=True))

_EXPECTED = {
    "dataclass_type": "an object",
    "dict_type": "an object",
    "float_type": "a number",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "int_type": "a whole number",
    "less_than": "less than {lt:.3g}",
    "less_than_equal": "{le:.3g} or less",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "a SHA-256 in 64 hexadecimal digits",
    "string_too_long": "{max_length} characters at most",
    "string_too_short": "a name",
    "string_type": "text",
    "too_long": "{max_length} entries at most",
    "tuple_type": "a list",
}
"""Kind of pydantic's error -> what was expected, filled with the limits that it names."""

Asked = Literal["auto", "minmax", "percentile", "entropy", "mse"]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Name = Annotated[str, Field(min_length=1, max_length=4096)]
Text = Annotated[str, Field(max_length=4096)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Amax = Annotated[float, Field(ge=SMALLEST_AMAX, le=float(np.finfo(np.float32).max))]
Share = Annotated[float, Field(ge=0, le=1)]
PlainValue = bool | int | float | str | list[Any] | dict[str, Any] | None


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRange:
    """What was seen of one tensor, and the range that it gets.

    Attributes:
        name: of the value in the graph.
        low, high: smallest and largest value.
        amaxes: method -> amax, all methods.
        method: the one that was picked.
        amax: the magnitude that 127 stands for; `scale` follows from it.
        reason: why this method.
        num_values, num_zeros: over all samples.
        saturated: share of the values above `amax`.
        outliers: labels of up to three samples with the largest magnitudes, where these are far above nearly all others.
    """

    name: Name
    low: float
    high: float
    amaxes: dict[Method, Amax]
    method: Method
    amax: Amax
    reason: Text
    num_values: Count
    num_zeros: Count
    saturated: Share
    outliers: Annotated[tuple[Text, ...], Field(max_length=3)] = ()

    @property
    def scale(self) -> float:
        """Of symmetric INT8 with zero point 0."""
        return self.amax / 127


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class AxisCoverage:
    """Sizes of one dynamic axis of an input over all samples."""

    input: Name
    axis: Count
    min: Count
    median: Count
    max: Count


@_STRICT
@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationTable:
    """Ranges of all tensors to be quantized.

    Attributes:
        version: of this format.
        trtforge, onnxruntime: versions that made it.
        graph_digest: of the graph that was observed.
        data_digest: of the calibration data.
        preprocessing: how files became inputs, plain values.
        method: as asked for.
        percentile: of the method of that name.
        num_samples: 1 or more.
        coverage: for each dynamic axis of an input.
        profiles: profile name -> number of samples that fit into it.
        notes: what is worth knowing, one sentence each.
        tensors: in graph order.
    """

    version: Literal[1] = 1
    trtforge: Text
    onnxruntime: Text
    graph_digest: Digest
    data_digest: Digest
    preprocessing: dict[str, PlainValue] = field(default_factory=dict)
    method: Asked
    percentile: Annotated[float, Field(gt=50, le=100)]
    num_samples: Annotated[int, Field(ge=1, lt=2**63)]
    coverage: tuple[AxisCoverage, ...] = ()
    profiles: dict[Name, Count] = field(default_factory=dict)
    notes: tuple[Text, ...] = ()
    tensors: tuple[TensorRange, ...]

    @property
    def amax(self) -> dict[str, float]:
        """Tensor -> amax."""
        return {tensor.name: tensor.amax for tensor in self.tensors}


def make_table(
    observations: Observations,
    graph: Graph,
    *,
    method: Asked,
    percentile: float,
    data_digest: str,
    preprocessing: Mapping[str, PlainValue],
    profiles: Iterable[Profile] = (),
    notes: Iterable[str] = (),
) -> CalibrationTable:
    """Picks a range for each tensor that was observed.

    Args:
        observations: of `graph`.
        graph: the one whose values have these names.
        method: one for all tensors, or `auto`.
        percentile: above 50, at most 100.
        data_digest: of the data behind the observations.
        preprocessing: how files became inputs.
        profiles: whose coverage is stated.
        notes: of whoever read the data; they come first.
    """
    tensors = tuple(
        _tensor_range(name, histogram, observations.largest[name], method, percentile)
        for name, histogram in observations.histograms.items()
    )
    counts = {profile.name: _num_inside(profile, observations) for profile in profiles}
    return CalibrationTable(
        trtforge=trtforge.__version__,
        onnxruntime=observations.onnxruntime,
        graph_digest=graph.digest,
        data_digest=data_digest,
        preprocessing=dict(preprocessing),
        method=method,
        percentile=float(percentile),
        num_samples=observations.num_samples,
        coverage=tuple(_coverage(graph, observations)),
        profiles=counts,
        notes=(*notes, *_notes(observations, counts, tensors)),
        tensors=tensors,
    )


def _tensor_range(
    name: str, histogram: Histogram, largest: tuple[tuple[float, str], ...], method: Asked, percentile: float
) -> TensorRange:
    found = amaxes(histogram, percentile)
    if method == "auto" or histogram.absmax < SMALLEST_AMAX:
        choice = choose(histogram, found)
    else:
        choice = Choice(method, "asked for")
    return TensorRange(
        name=name,
        low=histogram.low,
        high=histogram.high,
        amaxes=found,
        method=choice.method,
        amax=found[choice.method],
        reason=choice.reason,
        num_values=histogram.num_values,
        num_zeros=histogram.num_zeros,
        saturated=saturated_share(histogram, found[choice.method]),
        outliers=tuple(label for _, label in largest) if has_outliers(histogram) else (),
    )


def _coverage(graph: Graph, observations: Observations) -> Iterator[AxisCoverage]:
    for spec in graph.inputs:
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, int):
                continue
            sizes: Counter[int] = Counter()
            for shapes, count in observations.shapes.items():
                sizes[dict(shapes)[spec.name][axis]] += count
            yield AxisCoverage(
                input=spec.name, axis=axis, min=min(sizes), median=sorted(sizes.elements())[sizes.total() // 2],
                max=max(sizes),
            )  # fmt: skip


def _num_inside(profile: Profile, observations: Observations) -> int:
    return sum(
        count
        for shapes, count in observations.shapes.items()
        if all(_is_between(shape, profile.shapes[name].min, profile.shapes[name].max) for name, shape in shapes)
    )


def _is_between(shape: Shape, low: Shape, high: Shape) -> bool:
    return len(shape) == len(low) and all(a <= size <= b for a, size, b in zip(low, shape, high, strict=True))


def _notes(observations: Observations, profiles: Mapping[str, int], tensors: Iterable[TensorRange]) -> Iterator[str]:
    for name, count in profiles.items():
        if count == 0:
            yield f"no sample fits into profile '{name}'"
    flat = [tensor.name for tensor in tensors if max(-tensor.low, tensor.high) < SMALLEST_AMAX]
    if flat:
        yield f"nothing but zeros in {_some(flat)}: amax 1 stands for an unknown range"
    if observations.missing:
        yield f"no sample gave a value of {_some(observations.missing)}: no range"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(map(repr, names[:_MOST_NAMED])) + more


def write_table(table: CalibrationTable, path: Path) -> None:
    """Writes a table whole or not at all: one line for each tensor, in graph order, floats that read back the same.

    Raises:
        StoreError: it cannot be written.
    """
    head = asdict(table)
    tensors = head.pop("tensors")
    head["tensors_digest"] = tensors_digest(table)
    lines = [f"  {json.dumps(key)}: {_json(value)},\n" for key, value in head.items()]
    rows = ",\n".join(f"    {_json(tensor)}" for tensor in tensors)
    write_text(path, "{\n" + "".join(lines) + f'  "tensors": [\n{rows}\n  ]\n}}\n')


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def tensors_digest(table: CalibrationTable) -> str:
    """SHA-256 of the ranges, which is what a model is quantized by."""
    return value_digest(json.loads(_json([asdict(tensor) for tensor in table.tensors])))


def read_table(path: Path) -> CalibrationTable:
    """Reads a table and checks everything in it.

    A table whose tensors were edited by hand is taken as it is, with a note.

    Raises:
        StoreError: it cannot be read.
        CalibrationError: it is no table, or a value in it cannot be.
    """
    data = _parsed(_text(path), path)
    next_step = _CALIBRATE.format(path)
    if not isinstance(data, dict) or data.get("version") != 1:
        found = data.get("version") if isinstance(data, dict) else None
        raise CalibrationError(
            f"found version {found!r:.80}, expected a calibration table of version 1",
            where=Where(path),
            next_step=next_step,
        )
    digest = data.pop("tensors_digest", None)
    try:
        # Validated as JSON, in which arrays are tuples; every value else keeps its type.
        table = TypeAdapter(CalibrationTable).validate_json(_json(data))
    except ValidationError as error:
        raise_any(_problems_of(error, path))
        raise
    raise_any(
        Problem(reason, next_step, Where(path), exit_code=CalibrationError.exit_code)
        for reason in _contradictions(table)
    )
    if digest == tensors_digest(table):
        return table
    return replace(table, notes=(*table.notes, "the tensors were edited after the table was written"))


def _contradictions(table: CalibrationTable) -> Iterator[str]:
    repeated = [name for name, count in Counter(tensor.name for tensor in table.tensors).items() if count > 1]
    yield from (f"tensors: {name!r:.200} occurs more than once" for name in repeated[:_MAX_PROBLEMS])
    for index, tensor in enumerate(table.tensors):
        if tensor.low > tensor.high:
            yield f"tensors[{index}].low: found {tensor.low!r}, expected at most high ({tensor.high!r})"
        if set(tensor.amaxes) != set(METHODS):
            yield f"tensors[{index}].amaxes: found {', '.join(sorted(tensor.amaxes))}, expected {', '.join(METHODS)}"


def stale_reasons(
    table: CalibrationTable,
    *,
    graph_digest: str,
    data_digest: str | None = None,
    preprocessing: Mapping[str, PlainValue] | None = None,
) -> tuple[str, ...]:
    """Why a table does not belong to a model, data or preprocessing; none if it does. None: not compared."""
    reasons = []
    if table.graph_digest != graph_digest:
        reasons.append(
            f"the model changed: the table was made for {table.graph_digest[:12]}, this is {graph_digest[:12]}"
        )
    if data_digest is not None and table.data_digest != data_digest:
        reasons.append(
            f"the data changed: the table was made from {table.data_digest[:12]}, these are {data_digest[:12]}"
        )
    if preprocessing is not None:
        keys = sorted({*table.preprocessing, *preprocessing})
        for key in keys:
            before, now = table.preprocessing.get(key), preprocessing.get(key)
            if _json(before) != _json(now):
                reasons.append(f"preprocessing changed: {key} was {_json(before)}, is {_json(now)}")
    return tuple(reasons)


def _text(path: Path) -> str:
    next_step = _CALIBRATE.format(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise StoreError(f"{path} is no regular file, expected a calibration table", next_step=next_step)
        with path.open("rb") as file:
            data = file.read(MAX_TABLE_BYTES + 1)
        if len(data) > MAX_TABLE_BYTES:
            raise CalibrationError(
                f"larger than {MAX_TABLE_BYTES >> 20} MiB, so it is no calibration table",
                where=Where(path),
                next_step=next_step,
            )
        return data.decode()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}", next_step=next_step) from error
    except UnicodeDecodeError as error:
        raise CalibrationError(
            f"not UTF-8 text (byte {error.start})", where=Where(path), next_step=next_step
        ) from error


def _parsed(text: str, path: Path) -> Any:
    next_step = _CALIBRATE.format(path)
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_number, parse_float=_finite)
    except json.JSONDecodeError as error:
        where = Where(path, error.lineno, error.colno)
        raise CalibrationError(f"not JSON: {error.msg}", where=where, next_step=next_step) from error
    except (ValueError, RecursionError) as error:
        reason = "values nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CalibrationError(f"no calibration table: {reason}", where=Where(path), next_step=next_step) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {repeated!r:.200} occurs twice in one object")
    return found


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text:.80} is no finite number")


def _problems_of(error: ValidationError, path: Path) -> Iterator[Problem]:
    details = error.errors(include_url=False)
    next_step = _CALIBRATE.format(path)
    for detail in details[:_MAX_PROBLEMS]:
        keys = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in detail["loc"]).lstrip(".")
        summary = f"{keys or 'the table'}: found {detail['input']!r:.80}, expected {_expected(detail)}"
        if detail["type"] == "missing":
            summary = f"{keys} is missing"
        elif detail["type"] == "unexpected_keyword_argument":
            summary = f"{keys} is no key of a calibration table"
        yield Problem(summary, next_step, Where(path), exit_code=CalibrationError.exit_code)
    if len(details) > _MAX_PROBLEMS:
        summary = f"and {len(details) - _MAX_PROBLEMS} more problems"
        yield Problem(summary, next_step, Where(path), exit_code=CalibrationError.exit_code)


def _expected(detail: Any) -> str:
    """What pydantic expected, in a few words."""
    context = detail.get("ctx", {})
    if context.get("ge") == SMALLEST_AMAX:
        return "a number above 0"
    words = _EXPECTED.get(detail["type"])
    return words.format(**context) if words else detail["msg"].removeprefix("Input should be ")
