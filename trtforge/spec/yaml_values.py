"""YAML text to plain values with the meaning of YAML 1.2, keeping the place of every value.

PyYAML follows YAML 1.1, where `1e-5` is text, `no` is false, `010` is eight and the last of two equal keys wins. Here
scalars follow the core schema of YAML 1.2.2 (section 10.3.2), equal keys are an error, and merge keys (`<<`) stay legal.
Specs come from other people, so size, nesting and the expansion of aliases are capped.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from yaml.reader import ReaderError

from trtforge.errors import SpecError, Where, shown_path
from trtforge.spec.model import WrittenFloat, WrittenInt

Key = tuple[str | int, ...]
Marks = dict[Key, Where]

MAX_BYTES = 1 << 20
MAX_DEPTH = 50
MAX_WRITTEN_VALUES = 20_000
"""About two seconds of PyYAML."""
MAX_VALUES = 100_000
"""Once aliases are expanded."""

MAX_NUMBER_LENGTH = 400
"""Characters; Python refuses to read a whole number of more than 4300 digits."""

_FIT_FOR_NAMES = re.compile(r"[^\0\ud800-\udfff]*")
_NULL = "tag:yaml.org,2002:null"
_BOOL = "tag:yaml.org,2002:bool"
_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
_STR = "tag:yaml.org,2002:str"
_MERGE = "tag:yaml.org,2002:merge"
_SCALARS = (
    (_NULL, re.compile(r"~|null|Null|NULL|"), (*"~nN", "")),
    (_BOOL, re.compile(r"true|True|TRUE|false|False|FALSE"), "tTfF"),
    (_INT, re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"), "-+0123456789"),
    (_FLOAT, re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), "-+.0123456789"),
    (_FLOAT, re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), "-+."),
    (_MERGE, re.compile(r"<<"), "<"),
)


class _Loader(yaml.SafeLoader):
    """Composes nodes only; no Python object is ever constructed by PyYAML."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - declared so by PyYAML
    depth = 0
    num_written = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        self.num_written += 1
        if self.depth > MAX_DEPTH or self.num_written > MAX_WRITTEN_VALUES:
            cap = f"{MAX_DEPTH} levels of nesting" if self.depth > MAX_DEPTH else f"{MAX_WRITTEN_VALUES} values"
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=f"more than {cap}", problem_mark=mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern.pattern})\Z"), _first)


def read_yaml(path: Path, *, named_at: Where | None = None) -> tuple[Any, Marks]:
    """The value of a YAML file and the place of each part of it.

    Args:
        path: the file; places carry it as given.
        named_at: where another file names this one, for the error that it cannot be read.

    Raises:
        SpecError: the file cannot be read, is not YAML, holds equal keys or a foreign tag, or exceeds a cap.
    """
    root = _compose(path, _read_text(path, named_at))
    reader = _Reader(path)
    return reader.value(root, ()), reader.marks


def _read_text(path: Path, named_at: Where | None) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SpecError(
            f"{shown_path(path)}: {error.strerror}",
            where=named_at,
            next_step="name an existing spec file, or write one with: trtforge init MODEL.onnx",
        ) from None
    is_utf16 = raw.startswith((b"\xff\xfe", b"\xfe\xff"))
    if (b"\0" in raw[:4096] and not is_utf16) or raw.startswith(b"\x08"):  # how protobuf begins an ONNX model
        raise SpecError(
            f"{shown_path(path)} is no text, expected a YAML spec",
            where=named_at,
            next_step=f"trtforge init {shown_path(path)}",
        )
    if len(raw) > MAX_BYTES:
        raise SpecError(
            f"the spec is larger than {MAX_BYTES} bytes", where=Where(path), next_step="name the spec, not the model"
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        good = error.object[: error.start].decode()
        raise SpecError(
            f"byte 0x{error.object[error.start]:02x} is not UTF-8",
            where=_place(path, good),
            next_step="save the file as UTF-8",
        ) from None


def _place(path: Path, before: str) -> Where:
    """The place that follows the text `before`."""
    return Where(path, before.count("\n") + 1, len(before) - before.rfind("\n"))


def _compose(path: Path, text: str) -> yaml.Node:
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = Where(path, mark.line + 1, mark.column + 1) if mark else Where(path)
        if "character '\\t'" in (error.problem or ""):
            raise SpecError(
                "tab character; YAML indents and separates with spaces",
                where=where,
                next_step="replace the tab by spaces",
            ) from None
        raise SpecError(
            f"not YAML: {error.problem or error.context}",
            where=where,
            next_step="mend the line; trtforge plan reads it again",
        ) from None
    except ReaderError as error:
        raise SpecError(
            f"character U+{ord(text[error.position]):04X} may not stand in YAML",
            where=_place(path, text[: error.position]),
            next_step="remove it, or save the file as plain UTF-8 text",
        ) from None
    except (ValueError, OverflowError) as error:  # PyYAML on "\UFFFFFFFF" and on %YAML with thousands of digits
        raise SpecError(
            f"not YAML: {error}", where=Where(path), next_step="correct the backslash escape or the %YAML line"
        ) from None
    if root is None:
        raise SpecError("the spec is empty", where=Where(path), next_step="write one with: trtforge init MODEL.onnx")
    return root


class _Reader:
    """Turns composed nodes into values, expanding aliases and merge keys under a cap."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.marks: Marks = {}
        self.num_values = 0
        self.open_nodes: set[int] = set()

    def where(self, node: yaml.Node) -> Where:
        return Where(self.path, node.start_mark.line + 1, node.start_mark.column + 1)

    def value(self, node: yaml.Node, key: Key) -> Any:
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise SpecError(
                f"more than {MAX_VALUES} values once aliases are expanded",
                where=self.where(node),
                next_step="write the values out, or use fewer aliases of aliases",
            )
        self.marks.setdefault(key, self.where(node))
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node)
        if id(node) in self.open_nodes:
            raise SpecError("an alias contains itself", where=self.where(node), next_step="remove the inner alias")
        if len(self.open_nodes) >= MAX_DEPTH:
            raise SpecError(
                f"more than {MAX_DEPTH} levels of nesting once aliases are expanded",
                where=self.where(node),
                next_step="write the values out",
            )
        self.open_nodes.add(id(node))
        value = self.mapping(node, key) if isinstance(node, yaml.MappingNode) else self.sequence(node, key)
        self.open_nodes.discard(id(node))
        return value

    def sequence(self, node: yaml.Node, key: Key) -> list[Any]:
        self.check_tag(node, "tag:yaml.org,2002:seq")
        return [self.value(item, (*key, position)) for position, item in enumerate(node.value)]

    def mapping(self, node: yaml.MappingNode, key: Key) -> dict[str, Any]:
        self.check_tag(node, "tag:yaml.org,2002:map")
        written: dict[str, yaml.Node] = {}
        merges = []
        for name_node, value_node in node.value:
            if name_node.tag == _MERGE:
                merges.append(value_node)
                continue
            if not isinstance(name_node, yaml.ScalarNode):
                raise SpecError(
                    "a list or mapping stands as a key",
                    where=self.where(name_node),
                    next_step="write the key as plain text",
                )
            self.scalar(name_node)
            name = name_node.value
            if name in written:
                first = self.where(written[name])
                raise SpecError(
                    f"key '{name}' stands twice, first in line {first.line}; the second would silently win",
                    where=self.where(name_node),
                    next_step=f"remove or rename one '{name}'",
                )
            written[name] = name_node
        values = {}
        for name_node, value_node in node.value:
            if name_node.tag != _MERGE:
                self.marks.setdefault((*key, name_node.value), self.where(name_node))
                values[name_node.value] = self.value(value_node, (*key, name_node.value))
        for merge in merges:
            for name, value in self.merged(merge, key).items():
                values.setdefault(name, value)
        return values

    def merged(self, node: yaml.Node, key: Key) -> dict[str, Any]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, Any] = {}
        for source in sources:
            value = self.value(source, key)
            if not isinstance(value, dict):
                raise SpecError(
                    "'<<' merges something that is not a mapping",
                    where=self.where(node),
                    next_step="point '<<' at an anchored mapping",
                )
            merged = {**value, **merged}
        return merged

    def scalar(self, node: yaml.ScalarNode) -> Any:
        """The value of a scalar: text, None, a bool, or a number that remembers its text."""
        text = node.value
        if not _FIT_FOR_NAMES.fullmatch(text):
            raise SpecError(
                "text with a NUL or half a surrogate pair, which no name or path can hold",
                where=self.where(node),
                next_step="correct the backslash escape",
            )
        if node.tag == _STR:
            return text
        if node.tag not in (_NULL, _BOOL, _INT, _FLOAT):
            self.check_tag(node, _STR)
        fits = any(tag == node.tag and pattern.fullmatch(text) for tag, pattern, _ in _SCALARS)
        if not fits or len(text) > MAX_NUMBER_LENGTH:
            kind = node.tag.rpartition(":")[2]
            raise SpecError(
                f"'{text[:60]}' is no {kind}",
                where=self.where(node),
                next_step="correct the value, or remove its tag",
            )
        if node.tag == _NULL:
            return None
        if node.tag == _BOOL:
            return text.lower() == "true"
        return WrittenInt(text) if node.tag == _INT else WrittenFloat(text)

    def check_tag(self, node: yaml.Node, expected: str) -> None:
        if node.tag != expected:
            raise SpecError(
                f"tag '{node.tag.replace('tag:yaml.org,2002:', '!!')}' is not part of a spec",
                where=self.where(node),
                next_step="remove the tag",
            )
