"""Reads a build spec: YAML text -> values with places -> `BuildSpec`, with every problem of the file at once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trtforge.digests import value_digest
from trtforge.errors import Problem, SeveralErrors, SpecError, Where, closest, shown_path
from trtforge.spec.model import DEFAULT_OUTPUT, LISTED, SPEC_CONFIG, TRAFFIC, BuildSpec
from trtforge.spec.yaml_values import Key, Marks, read_yaml

MAX_EXTENDS_DEPTH = 10
_PATH_KEYS: tuple[Key, ...] = (
    ("model", "onnx"),
    ("parity", "samples"),
    ("accuracy", "data"),
    ("calibration", "data"),
    ("calibration", "table"),
    ("profiles", "from_traffic", "log"),
    ("profiles", "from_traffic", "latencies"),
    ("performance", "previous"),
    ("output",),
    ("plugins",),
)
_SCHEMA_ID = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True, slots=True)
class SpecFile:
    """A loaded spec and the place where each of its values was written.

    Attributes:
        marks: path of keys and list positions (`("profiles", 0, "inputs", "image", "max")`) -> place.
        digest: SHA-256 of the spec's values in canonical form (extended files merged in; order of keys irrelevant).
    """

    path: Path
    spec: BuildSpec
    marks: Mapping[Key, Where]
    digest: str

    def where(self, *key: str | int) -> Where:
        """The place of `key`, or of the nearest value above it that was written."""
        return _nearest(self.marks, key) or Where(self.path)


def load_spec(path: Path) -> SpecFile:
    """The spec in `path`, extended files merged in, paths resolved from the folder of the file that names them.

    A symbolic link to a spec stands for the file it points to, so the same spec means the same from everywhere.
    `~` is the home folder; environment variables are not expanded.

    Raises:
        SpecError: a file cannot be read or is not YAML.
        SeveralErrors: all problems of the spec, each with its place.
    """
    values, marks = _read_extended(path, None, ())
    if not isinstance(values, dict):
        raise SpecError(
            "found a list or a single value, expected keys such as name, model, profiles, targets",
            where=Where(path, 1, 1),
            next_step="write one with: trtforge init MODEL.onnx",
        )
    digest = value_digest(_plain(values))
    values.setdefault("output", str(path.resolve().parent / DEFAULT_OUTPUT))
    _resolve_paths(values, marks)
    try:
        spec = _adapter().validate_python(values)
    except ValidationError as error:
        raise SeveralErrors(_problems(error, values, marks, path)) from None
    return SpecFile(path, spec, marks, digest)


def spec_schema() -> dict[str, Any]:
    """The JSON Schema of a spec file, for editors. `configs/spec.schema.json` is this, tested equal."""
    # Reading the docstrings takes a tenth of a second, which every build would pay.
    SPEC_CONFIG["use_attribute_docstrings"] = True
    try:
        schema = TypeAdapter(BuildSpec).json_schema()
    finally:
        del SPEC_CONFIG["use_attribute_docstrings"]
    required = schema.pop("required")
    schema["properties"]["extends"] = {
        "anyOf": [{"type": "string"}, {"items": {"type": "string"}, "type": "array"}],
        "description": "Specs whose values hold where this one says nothing; lists are replaced, not joined.",
    }
    schema["anyOf"] = [{"required": required}, {"required": ["extends"]}]
    return {"$schema": _SCHEMA_ID, **schema}


@cache
def _adapter() -> TypeAdapter[BuildSpec]:
    return TypeAdapter(BuildSpec)


def _nearest(marks: Mapping[Key, Where], key: Key) -> Where | None:
    return next((marks[key[:length]] for length in range(len(key), -1, -1) if key[:length] in marks), None)


def _read_extended(path: Path, named_at: Where | None, chain: tuple[Path, ...]) -> tuple[Any, Marks]:
    """A file's values over those of the files it extends."""
    values, marks = read_yaml(path, named_at=named_at)
    real = path.resolve()
    if real in chain or len(chain) >= MAX_EXTENDS_DEPTH:
        reason = "extends itself" if real in chain else f"is the {MAX_EXTENDS_DEPTH + 1}th file in a chain of 'extends'"
        raise SpecError(f"{shown_path(path)} {reason}", where=named_at, next_step="remove this 'extends'")
    if not isinstance(values, dict) or "extends" not in values:
        return values, marks
    extends = values.pop("extends")
    names = extends if isinstance(extends, list) else [extends]
    merged: Any = {}
    merged_marks: Marks = {}
    for position, name in enumerate(names):
        where = _nearest(marks, ("extends", position)) or Where(path)
        if not isinstance(name, str) or not name:
            raise SpecError(
                f"found {_shown(name)} in 'extends', expected a path", where=where, next_step="write a path"
            )
        base, base_marks = _read_extended(_from_folder_of(real, name), where, (*chain, real))
        if not isinstance(base, dict):
            raise SpecError(f"{name} holds no keys to extend", where=where, next_step="name a file with spec keys")
        merged = _overlay(merged, base, merged_marks, base_marks, ())
    return _overlay(merged, values, merged_marks, marks, ()), merged_marks


def _overlay(under: Any, over: Any, marks: Marks, over_marks: Marks, key: Key) -> Any:
    """`over` on top of `under`: mappings key by key, anything else replaced. Updates `marks` (of `under`) in place."""
    if isinstance(under, dict) and isinstance(over, dict):
        for name, value in over.items():
            under[name] = _overlay(under.get(name), value, marks, over_marks, (*key, name))
        if key in over_marks:
            marks[key] = over_marks[key]
        return under
    for old in [mark for mark in marks if mark[: len(key)] == key]:
        del marks[old]
    marks.update({mark: where for mark, where in over_marks.items() if mark[: len(key)] == key})
    return over


def _resolve_paths(values: dict[str, Any], marks: Marks) -> None:
    for *parents, last in _PATH_KEYS:
        holder: Any = values
        for parent in parents:
            holder = holder.get(parent) if isinstance(holder, dict) else None
        written = _plain(holder.get(last)) if isinstance(holder, dict) else None
        if isinstance(written, list):
            holder[last] = [
                str(_from_folder_of(marks[(*parents, last, index)].path.resolve(), item))
                if isinstance(item, str)
                else item
                for index, item in enumerate(written)
            ]
        if isinstance(written, str) and (*parents, last) in marks:
            holder[last] = str(_from_folder_of(marks[(*parents, last)].path.resolve(), written))


def _from_folder_of(file: Path, written: str) -> Path:
    return file.parent / os.path.expanduser(written)  # noqa: PTH111 - Path.expanduser raises where ~nobody has no home


def _plain(value: Any) -> Any:
    """`value` with numbers as they were written, so that equal specs have equal digests whatever reads them."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return getattr(value, "text", value)


def _problems(error: ValidationError, values: Any, marks: Marks, path: Path) -> list[Problem]:
    found: dict[tuple[Where, str], Problem] = {}
    for entry in error.errors(include_url=False):
        if entry["type"] == "too_short" and entry["input"]:
            continue  # only its entries are wrong, and they are reported
        key, rest = _written_key(entry["loc"], values)
        where = _nearest(marks, key) or Where(path)
        summary, next_step = _words(entry, key, rest)
        found.setdefault((where, summary), Problem(summary, next_step, where, (), SpecError.exit_code))
    return [found[key] for key in sorted(found, key=lambda key: (str(key[0].path), key[0].line, key[0].column))]


def _written_key(loc: tuple[str | int, ...], values: Any) -> tuple[Key, Key]:
    """The location as keys that stand in the file, and what is left over (absent keys; union tags are dropped)."""
    key: list[str | int] = []
    for position, part in enumerate(loc):
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            if part in (LISTED, TRAFFIC) or (isinstance(values, dict) and values.get("backend") == part):
                continue
            return tuple(key), loc[position:]
        key.append(part)
    return tuple(key), ()


def _dotted(key: Key) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key)
    return text.removeprefix(".") or "the spec"


def _words(entry: Any, key: Key, rest: Key) -> tuple[str, str]:
    """Summary and next step for one of pydantic's errors."""
    kind, context = entry["type"], entry.get("ctx") or {}
    name = _dotted(key)
    if kind == "unexpected_keyword_argument":
        allowed = sorted(_allowed_keys(key[:-1]))
        best = closest(str(key[-1]), allowed)
        change = f"rename it to '{best}'" if best else "remove it"
        return f"unknown key '{key[-1]}' in {_dotted(key[:-1])}", f"{change} (allowed: {', '.join(allowed)})"
    if kind == "too_long" or (kind == "missing" and isinstance(rest[-1], int)):
        return f"{name}: found {len(entry['input'])} entries, expected 2", "write 2 entries"
    if kind in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"{name} lacks the key '{rest[-1]}'", f"add '{rest[-1]}:' here"
    if kind == "union_tag_not_found":
        return f"{name} lacks the key 'backend'", "add 'backend: tensorrt_rtx' or 'backend: tensorrt'"
    if kind in ("literal_error", "union_tag_invalid"):
        expected = context.get("expected") or context["expected_tags"]
        given = _shown(entry["input"]["backend"] if "tag" in context else entry["input"])
        options = [option for option in expected.replace(" or ", ", ").replace("'", "").split(", ") if option]
        best = closest(given.strip("'"), options)
        return (
            f"found {given} at {name}{'.backend' if 'tag' in context else ''}, expected {expected}",
            f"write {best or options[0]}",
        )
    if kind == "value_error":
        message = str(context["error"])
        return f"{name}: {message}", f"write {message.rpartition('expected ')[2]}"
    expected = _expected(entry["msg"])
    if expected == "a mapping" and (keys := sorted(_allowed_keys(key))):
        expected += f" with keys such as {', '.join(keys[:3])}"
    return f"{name}: found {_shown(entry['input'])}, expected {expected}", f"write {expected}"


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f"'{value[:60]}'"
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    return str(value).lower() if isinstance(value, bool) else str(_plain(value))[:60]


_EXPECTED = {
    "valid boolean": "true or false",
    "valid dictionary": "a mapping",
    "instance of": "a mapping",
    "valid tuple": "a list",
    "valid integer": "a whole number",
    "valid string": "text",
    "valid number": "a number",
    "finite number": "a finite number",
    "not a valid path": "a path",
    "at least 1 item": "at least one entry",
}


def _expected(message: str) -> str:
    """A message of pydantic in the words of a spec."""
    known = next((words for part, words in _EXPECTED.items() if part in message), None)
    return known or message.replace("Input should be", "a value").removesuffix(".")


def _allowed_keys(key: Key) -> set[str]:
    """The keys that may stand in the mapping at `key`, read off the JSON Schema."""
    root = spec_schema()
    nodes = [root]
    for part in key:
        nodes = [child for node in nodes for child in _children(root, node, part)]
    return {name for node in nodes for name in node.get("properties", {})}


def _children(root: dict[str, Any], node: dict[str, Any], part: str | int) -> Iterator[dict[str, Any]]:
    if isinstance(part, int):
        candidates = [node["items"]] if "items" in node else []
    elif part in node.get("properties", {}):
        candidates = [node["properties"][part]]
    else:
        candidates = [node["additionalProperties"]] if isinstance(node.get("additionalProperties"), dict) else []
    while candidates:
        candidate = candidates.pop()
        if "$ref" in candidate:
            candidate = root["$defs"][candidate["$ref"].rsplit("/", 1)[-1]]
        if "anyOf" in candidate or "oneOf" in candidate:
            candidates += candidate.get("anyOf", []) + candidate.get("oneOf", [])
        else:
            yield candidate


def schema_text() -> str:
    """`spec_schema` as the text of `configs/spec.schema.json`."""
    return json.dumps(spec_schema(), indent=2) + "\n"
