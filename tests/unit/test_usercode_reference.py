"""References to user code are read, and never run, in this process."""

from __future__ import annotations

import pytest

from trtforge.errors import SpecError
from trtforge.usercode.process import parse_reference


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "exports").mkdir()
    (tmp_path / "exports" / "bert.py").write_text("raise SystemExit('this must not run')\n")
    return tmp_path


def test_a_file_is_found_from_the_specs_folder(folder):
    reference = parse_reference("exports/bert.py:build", folder)

    assert (reference.file, reference.module) == (folder / "exports" / "bert.py", "")
    assert reference.function == "build"


def test_a_module_is_left_to_the_process_that_runs_it(folder):
    reference = parse_reference("exports.bert:build", folder)

    assert (reference.file, reference.module, reference.function) == (None, "exports.bert", "build")


@pytest.mark.parametrize(
    ("text", "summary", "next_step"),
    [
        ("build", "'build' names no function", "exports/bert.py:build"),
        ("exports/bert.py", "names no function", "exports/bert.py:build"),
        ("exports/bert.py:", "names no function", "exports/bert.py:build"),
        ("exports/bert:build", "names no function", "write, for example, exports/bert.py:build"),
        ("exports/bert.py:a-b", "names no function", "exports/bert.py:build"),
        ("exports/brt.py:build", "is not there", "write exports/bert.py:build"),
        ("nowhere/x.py:build", "is not there", "ls "),
    ],
)
def test_what_is_no_reference_is_told_with_one_that_is(folder, text, summary, next_step):
    with pytest.raises(SpecError) as caught:
        parse_reference(text, folder)

    assert summary in caught.value.problems[0].summary
    assert next_step in caught.value.problems[0].next_step


def test_a_folder_is_no_file(folder):
    (folder / "pack.py").mkdir()

    with pytest.raises(SpecError, match="is no file"):
        parse_reference("pack.py:build", folder)
