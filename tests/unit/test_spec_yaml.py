"""YAML read with the meaning of 1.2.2's core schema, places kept, caps held."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtforge.errors import SpecError, TrtForgeError
from trtforge.spec import yaml_values
from trtforge.spec.yaml_values import MAX_BYTES, MAX_DEPTH, MAX_VALUES, MAX_WRITTEN_VALUES, read_yaml


@pytest.fixture
def read(tmp_path):
    def read_text(text):
        path = tmp_path / "spec.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_yaml(path)

    return read_text


@pytest.fixture
def refusal(read):
    """(line, column, summary) of the one problem of a text."""

    def of(text):
        with pytest.raises(SpecError) as stopped:
            read(text)
        (problem,) = stopped.value.problems
        place = (problem.where.line, problem.where.column) if problem.where else (0, 0)
        assert "\n" not in problem.summary
        assert len(problem.summary) < 200
        return (*place, problem.summary)

    return of


@pytest.mark.parametrize(
    ("written", "value"),
    [
        # C60: the first two are text to YAML 1.1.
        ("1e-5", 1e-5),
        ("1e5", 1e5),
        ("1.0e-5", 1e-5),
        (".5", 0.5),
        ("5.", 5.0),
        ("-.5E+3", -500.0),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("+12", 12),
        ("-0", 0),
        # Numbers of YAML 1.1 alone are text, or decimal.
        ("010", 10),
        ("0o10", 8),
        ("0x1F", 31),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("inf", "inf"),
        ("-0x1", "-0x1"),
        ("2024-01-01", "2024-01-01"),
        *[(word, word) for word in ("yes", "no", "on", "off", "y", "N", "tRUE", "none", "=")],
        *[(word, True) for word in ("true", "True", "TRUE")],
        *[(word, False) for word in ("false", "False", "FALSE")],
        *[(word, None) for word in ("null", "Null", "NULL", "~", "")],
        ('"1e-5"', "1e-5"),
        ("'010'", "010"),
        ('"true"', "true"),
        ("!!str 5", "5"),
        ("!!float 2", 2.0),
        ("|\n  5\n", "5\n"),
    ],
)
def test_scalars(read, written, value):
    values, _ = read(f"key: {written}")

    assert values == {"key": value}
    assert isinstance(values["key"], type(value))


def test_not_a_number(read):
    assert math.isnan(read("key: .nan")[0]["key"])


@pytest.mark.parametrize("written", ["10.10", "010", "0x1F", "1E5", "+1"])
def test_numbers_remember_how_they_were_written(read, written):
    assert read(f"key: {written}")[0]["key"].text == written


def test_keys_are_text_as_written(read):
    assert list(read("{010: a, 1.50: b, no: c, ~: d, true: e}")[0]) == ["010", "1.50", "no", "~", "true"]


@pytest.mark.parametrize("tag", ["!!bool maybe", "!!int abc", "!!int 1.5", "!!float x", "!!null no"])
def test_a_tag_that_its_text_does_not_fit_is_refused(refusal, tag):
    line, column, summary = refusal(f"a: 1\nkey: {tag}")

    assert (line, column) == (2, 6)
    assert f"is no {tag[2:].split()[0]}" in summary


@pytest.mark.parametrize(
    "text",
    [
        "key: !!python/object/apply:os.system [id]",
        "key: !!python/name:os.system",
        "key: !!binary aGk=",
        "key: !!timestamp 2024-01-01",
        "key: !!set {a}",
        "key: !mine x",
        "key: !!omap [a: 1]",
        "!!python/name:os.system key: 1",
        "key: <<",
    ],
)
def test_foreign_tags_are_refused(refusal, text):
    assert "is not part of a spec" in refusal(text)[2]


# C61
@pytest.mark.parametrize(
    ("text", "place", "key", "first_line"),
    [
        ("a: 1\nb: 2\na: 3\n", (3, 1), "a", 1),
        ("top:\n  deep:\n  - {x: 1,\n     x: 2}\n", (4, 6), "x", 3),
        ('1: a\n"1": b\n', (2, 1), "1", 1),
        ("a: &b {x: 1}\nc: {<<: *b, x: 1, x: 2}\n", (2, 19), "x", 2),
    ],
)
def test_equal_keys_are_refused_with_both_places(refusal, text, place, key, first_line):
    line, column, summary = refusal(text)

    assert (line, column) == place
    assert summary.startswith(f"key '{key}' stands twice, first in line {first_line}")


@pytest.mark.parametrize("merging", ["{<<: *b, max: 9}", "{max: 9, <<: *b}"])
def test_merge_keys_hold_in_either_order_and_lose_to_written_ones(read, merging):
    values, marks = read(f"base: &b {{min: 1, max: 2}}\nkey: {merging}\n")

    assert values["key"] == {"min": 1, "max": 9}
    assert marks["key", "min"].line == 1
    assert marks["key", "max"].line == 2


def test_the_first_of_several_merged_mappings_wins(read):
    values, marks = read("a: &a {x: 1}\nb: &b\n  x: 2\n  y: 2\nlisted: {<<: [*a, *b]}\ntwice: {<<: *a, <<: *b}\n")

    assert values["listed"] == values["twice"] == {"x": 1, "y": 2}
    assert [marks["listed", name].line for name in "xy"] == [1, 4]


def test_a_quoted_merge_sign_is_an_ordinary_key(read):
    assert read('{"<<": 3}')[0] == {"<<": 3}


@pytest.mark.parametrize("text", ["a: {<<: 3}", "a: {<<: [{x: 1}, 3]}", "a: {<<: x}"])
def test_only_mappings_are_merged(refusal, text):
    assert "merges something that is not a mapping" in refusal(text)[2]


def test_aliases_stand_for_values_and_places_point_at_the_anchor(read):
    values, marks = read("a: &a [1, {x: 2}]\nb: *a\n")

    assert values["b"] == values["a"] == [1, {"x": 2}]
    assert (marks[("b",)].line, marks[("b",)].column) == (2, 1)
    assert (marks["b", 1, "x"].line, marks["b", 1, "x"].column) == (1, 12)


def test_places_count_from_one_and_name_keys_and_list_entries(read):
    _, marks = read("a:\n  - 1\n  - b: [x,\n        y]\n")
    places = {key: (where.line, where.column) for key, where in marks.items()}

    assert places == {
        (): (1, 1),
        ("a",): (1, 1),
        ("a", 0): (2, 5),
        ("a", 1): (3, 5),
        ("a", 1, "b"): (3, 5),
        ("a", 1, "b", 0): (3, 9),
        ("a", 1, "b", 1): (4, 9),
    }


# C63
@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a:\n\tb: 1", (2, 1)),
        ("a: 1\t# c", (1, 5)),
        ("a:\t\n  - 1", (1, 3)),
        ("a: [1,\t2]", (1, 7)),
        ("a:\n  b: 1\n\tc: 2", (3, 1)),
    ],
)
def test_a_tab_is_named_at_its_place(refusal, text, place):
    line, column, summary = refusal(text)

    assert (line, column) == place
    assert summary.startswith("tab character")


def test_a_tab_inside_quotes_is_not_blamed(read, refusal):
    assert read('a: "x\ty"')[0] == {"a": "x\ty"}
    assert "tab" not in refusal('a: "x\ty" b')[2]


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        (b"", (0, 0), "empty"),
        (b"# only a comment\n", (0, 0), "empty"),
        (b"---\n...\n", (1, 4), None),
        (b"a: 1\n---\nb: 2\n", (2, 1), "another document"),
        (b"a: *nowhere\n", (1, 4), "nowhere"),
        (b"a: &a [*a]\n", (1, 4), "alias contains itself"),
        (b"? [x]\n: 1\n", (1, 3), "stands as a key"),
        (b"a: [1\n", (2, 1), "not YAML"),
        (b"a: 1\nb: caf\xe9\n", (2, 7), "byte 0xe9 is not UTF-8"),
        (b"\xef\xbb\xbf\xe9", (1, 1), "byte 0xe9 is not UTF-8"),
        ("ä: \x07\n".encode(), (1, 4), "U+0007"),
        ("a: 1\n".encode("utf-16"), (1, 1), "byte 0xff is not UTF-8"),
        (b"a: '" + b"x" * 5000 + b"\0'", (1, 5005), "U+0000"),
        (b"\x08\x07\x12\x04onnx", (0, 0), "no text"),
        (b'a: "\\UFFFFFFFF"', (0, 0), "not YAML"),
        (b'a: "\\U00110000"', (0, 0), "not YAML"),
        (b"%YAML 1." + b"9" * 5000 + b"\n---\na: 1\n", (0, 0), "not YAML"),
        (b'a: "\\ud800"', (1, 4), "surrogate"),
        (b'"\\0": 1', (1, 1), "NUL"),
        (b"a: " + b"9" * 5000, (1, 4), "is no int"),
    ],
)
def test_what_is_no_spec_is_refused_at_its_place(read, refusal, text, place, words):
    if words is None:
        assert read(text)[0] is None
    else:
        line, column, summary = refusal(text)
        assert (line, column) == place
        assert words in summary


@pytest.mark.parametrize("text", ["a: 1\r\nb:\r\n  - x\r\n", "\ufeffa: 1\nb:\n  - x\n", "---\na: 1\nb:\n  - x\n...\n"])
def test_windows_line_ends_a_byte_order_mark_and_document_marks_change_nothing(read, text):
    values, marks = read(text)

    assert values == {"a": 1, "b": ["x"]}
    assert marks["b", 0].column == 5


@pytest.mark.parametrize("number", ["1.1", "1.2"])
def test_a_yaml_version_line_does_not_change_the_meaning(read, number):
    assert read(f"%YAML {number}\n---\na: no\n")[0] == {"a": "no"}


def _aliased_depth(levels):
    rows = [f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, levels)]
    return "\n".join(["a0: &a0 [x]", *rows])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("#" * (MAX_BYTES + 1), f"{MAX_BYTES} bytes", id="bytes"),
        pytest.param("[" * 100_000, f"{MAX_DEPTH} levels of nesting", id="brackets"),
        pytest.param("".join(f"{' ' * n}a:\n" for n in range(200)), f"{MAX_DEPTH} levels", id="indents"),
        pytest.param("? " * 500, f"{MAX_DEPTH} levels", id="complex keys"),
        pytest.param(f"[{'1,' * (MAX_WRITTEN_VALUES + 1)}]", f"{MAX_WRITTEN_VALUES} values", id="values"),
        pytest.param(_aliased_depth(2000), "levels of nesting once aliases", id="alias depth"),
        pytest.param(
            "\n".join(["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: *a{n - 1}}}" for n in range(1, 2000))]),
            "levels of nesting once aliases",
            id="merge depth",
        ),
        pytest.param(
            "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))]),
            f"{MAX_VALUES} values once aliases are expanded",
            id="alias bomb",
        ),
    ],
)
def test_caps(refusal, text, words):
    assert words in refusal(text)[2]


def test_what_stays_below_the_caps_is_read(read):
    assert read(_aliased_depth(MAX_DEPTH - 2))[0]["a0"] == ["x"]
    assert len(read(f"[{'1,' * 5000}]")[0]) == 5000


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    for name in ("missing.yaml", ".", "loop.yaml"):
        with pytest.raises(SpecError) as stopped:
            read_yaml(tmp_path / name)
        assert stopped.value.problems[0].summary.startswith(f"{name}: ")


_YAML_BITS = (
    *("a", "b: ", "- ", "{", "}", "[", "]", ", ", "&x ", "*x", "<<: ", "? ", ": ", "\n", "  ", "\t", "|", ">-\n", "'"),
    *('"', "\\", "\\U", "#", "!!int ", "!x ", "%YAML 1.2\n", "---\n", "...\n", "~", "1e5", "0x", "\r", "\x85", "😀"),
)


@settings(max_examples=400, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=60), st.text(max_size=60), st.lists(st.sampled_from(_YAML_BITS), max_size=40).map("".join)
    )
)
def test_any_input_gives_values_or_a_spec_error(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass"))

    values, problems = _outcome(path)

    assert problems or _is_plain(values)
    assert all(line.isprintable() for problem in problems for line in problem.lines())


def _outcome(path):
    try:
        return read_yaml(path)[0], ()
    except TrtForgeError as error:
        return None, error.problems


def _is_plain(value):
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(item) for name, item in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    plain = (str, bool, type(None), yaml_values.WrittenInt, yaml_values.WrittenFloat)
    return isinstance(value, plain)


_TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
_PLAIN_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), _TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_TEXTS, inner, max_size=4)),
    max_leaves=15,
)


@settings(deadline=None)
@given(_PLAIN_VALUES)
def test_json_means_the_same_in_yaml(tmp_path_factory, value):
    text = json.dumps(value, ensure_ascii=False)
    path = tmp_path_factory.getbasetemp() / "json.yaml"
    path.write_text("".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text), encoding="utf-8")

    assert read_yaml(path)[0] == value
