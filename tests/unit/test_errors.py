"""Errors: exit codes, rendering, and the words of every message in the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trtforge
from trtforge import errors
from trtforge.errors import (
    Problem,
    SeveralErrors,
    SpecError,
    TrtForgeError,
    Where,
    closest,
    exit_code_of,
    printable,
    raise_any,
    shown_path,
)

SOURCES = sorted(Path(trtforge.__file__).parent.rglob("*.py"))


def _classes(parent=TrtForgeError):
    return [parent, *(found for child in parent.__subclasses__() for found in _classes(child))]


@pytest.mark.parametrize("error", [cls for cls in _classes() if cls is not SeveralErrors], ids=lambda cls: cls.__name__)
def test_an_error_carries_one_problem_with_the_exit_code_of_its_class(error):
    where = Where(Path("a.yaml"), 3, 4)

    (problem,) = error("summary", next_step="do this", where=where, detail=["one", "two"]).problems

    assert problem == Problem("summary", "do this", where, ("one", "two"), error.exit_code)


@pytest.mark.parametrize("error", [cls for cls in _classes() if cls is not SeveralErrors], ids=lambda cls: cls.__name__)
def test_the_next_step_cannot_be_left_out(error):
    with pytest.raises(TypeError, match="next_step"):
        error("summary")


def test_the_exit_codes_of_the_classes():
    codes = {cls.__name__: cls.exit_code for cls in _classes() if cls.__module__ == errors.__name__}

    assert codes["SpecError"] == 2
    assert codes["GraphError"] == 3
    assert codes["CapabilityError"] == 6
    assert codes["BuildError"] == 7
    assert codes["StoreError"] == 8
    assert codes["IntegrityError"] == 10
    assert codes["CommandLineError"] == 64
    assert codes["TrtForgeError"] == 70


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((2,), 2),
        ((2, 3), 2),
        ((3, 2), 3),
        ((2, 12), 12),
        ((12, 9), 9),
        ((9, 5), 5),
        ((5, 6), 6),
        ((6, 10), 10),
        ((3, 12, 9, 5, 6, 10), 10),
        ((7, 8, 64), 7),
    ],
)
def test_the_first_of_10_6_5_9_12_decides(codes, expected):
    assert exit_code_of(Problem("s", "n", exit_code=code) for code in codes) == expected


def test_several_problems_are_raised_together():
    problems = [Problem("a", "n"), Problem("b", "n")]

    raise_any([])
    with pytest.raises(SeveralErrors) as stopped:
        raise_any(iter(problems))
    assert stopped.value.problems == tuple(problems)


def test_a_problem_is_rendered_location_first_and_next_step_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    problem = Problem("summary", "do this", Where(tmp_path / "d" / "a.yaml", 3, 4), ("one", "two"))

    assert problem.lines() == ["d/a.yaml:3:4: error: summary", "  one", "  two", "  next: do this"]
    assert Problem("summary", "do this").lines("warning") == ["warning: summary", "  next: do this"]


@pytest.mark.parametrize(
    ("start", "path", "expected"),
    [
        ("d", "d/a.yaml", "a.yaml"),
        (".", "d/a.yaml", "d/a.yaml"),
        ("d", "a.yaml", "<root>/a.yaml"),
        ("d", "d2/a.yaml", "<root>/d2/a.yaml"),
    ],
)
def test_a_place_is_shown_from_the_working_folder(tmp_path, monkeypatch, start, path, expected):
    (tmp_path / "d").mkdir()
    monkeypatch.chdir(tmp_path / start)

    shown = expected.replace("<root>", str(tmp_path))
    assert str(Where(tmp_path / path, 7, 2)) == f"{shown}:7:2"
    assert str(Where(tmp_path / path)) == shown


def test_a_relative_path_is_shown_as_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert shown_path(Path("../x/a.yaml")) == "../x/a.yaml"


def test_a_removed_working_folder_is_no_obstacle(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    assert shown_path(tmp_path / "a.yaml") == str(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\nb\r", "a\\nb\\r"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x9b2J\x7f\x00", "\\x9b2J\\x7f\\x00"),
        ("right\u202eleft\u2066", "right\\u202eleft\\u2066"),
        ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
        ("\u2028\u2029\x85", "\\u2028\\u2029\\x85"),
        ("half\ud800", "half\\ud800"),
        ("Größe 入力 😀\t.", "Größe 入力 😀\t."),
    ],
)
def test_what_could_move_a_cursor_or_hide_text_is_escaped(text, expected):
    assert printable(text) == expected


@given(st.text(st.characters()))
def test_printable_text_is_one_line_without_controls(text):
    assert printable(text).replace("\t", "").isprintable()
    assert len(printable(text).splitlines()) <= 1


def test_every_part_of_a_problem_is_escaped():
    problem = Problem("a\x1b", "b\x1b", Where(Path("/c\x1b"), 1, 1), ("d\x1b\ne",))

    assert all(line.isprintable() for line in problem.lines())
    assert len(problem.lines()) == 3


@pytest.mark.parametrize(
    ("word", "expected"), [("optt", "opt"), ("OPT", "opt"), ("Output", "output"), ("zzz", None), ("", None)]
)
def test_closest(word, expected):
    assert closest(word, ["min", "opt", "max", "output"]) == expected


BANNED = re.compile(r"\b(please|invalid|failed to)\b", re.IGNORECASE)
MESSAGE_ARGUMENTS = {"summary", "next_step", "detail", "text", "message", "reason"}


def _messages(tree):
    """Literal text that goes into a message: arguments of errors and problems, and named arguments of any call."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", "")).lower()
        makes_problem = name.endswith(("error", "problem", "refused", "refusal"))
        spoken = [
            *(node.args if makes_problem else ()),
            *(k.value for k in node.keywords if k.arg in MESSAGE_ARGUMENTS),
        ]
        for part in (inner for argument in spoken for inner in ast.walk(argument)):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.lineno, part.value


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(SOURCES[0].parent)))
def test_no_message_pleads_or_blames(path):
    found = [(line, text) for line, text in _messages(ast.parse(path.read_text())) if BANNED.search(text)]

    assert found == []


def test_the_scan_sees_the_messages():
    tree = ast.parse("raise SpecError(f'{x} is invalid', next_step='please ' + y)\nf(next_step=('failed to',))")
    num_seen = sum(len(list(_messages(ast.parse(path.read_text())))) for path in SOURCES)

    assert [text for _, text in _messages(tree) if BANNED.search(text)] == [" is invalid", "please ", "failed to"]
    assert num_seen > 200


def test_an_error_is_an_exception_with_its_summary():
    assert str(SpecError("the summary", next_step="n")) == "the summary"
