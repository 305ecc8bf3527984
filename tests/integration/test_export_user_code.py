"""User code in a process of its own: what it returns, and every way in which it can fail to."""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from trtforge.errors import BuildError, CapabilityError, GraphError, SpecError
from trtforge.usercode.process import run_user_code, user_code

FOLDER = Path(__file__).parent / "exports"


def call(function, payload=None, **options):
    options = {"timeout_seconds": 60, **options}
    return run_user_code(f"plain.py:{function}", FOLDER, payload or {}, **options)


def test_arrays_and_numbers_cross_both_ways():
    answer = call("scales", {"values": np.array([1.0, math.inf, 3.0], np.float32), "factor": 2})

    assert answer["values"].dtype == np.float32
    assert answer["values"].tolist() == [2, math.inf, 6]
    assert answer["total"] == math.inf
    assert answer["folder"] == str(FOLDER)  # relative paths in user code start at the spec's folder


def test_a_module_is_found_in_the_specs_folder():
    assert run_user_code("plain:is_asked", FOLDER, {"question": "so"}, timeout_seconds=60) == "so!"


def test_a_metric_is_a_number():
    assert call("accuracy", {"predicted": np.array([1, 2]), "labels": np.array([1, 3])}, returns="number") == 0.5


def test_one_process_answers_many_times_and_survives_an_exception():
    with user_code("plain.py:is_asked", FOLDER, timeout_seconds=60) as code:
        assert code.ask("call", {"question": "one"}, timeout_seconds=60) == "one!"
        with pytest.raises(GraphError, match="unexpected keyword argument 'other'"):
            code.ask("call", {"other": 1}, timeout_seconds=60)
        assert code.is_alive
        assert code.ask("call", {"question": "two"}, timeout_seconds=60) == "two!"


@pytest.mark.parametrize(
    ("function", "summary", "detail", "next_step"),
    [
        ("raises", "raised KeyError: 'head'", 'in raises: return {}["head"]', "look at"),
        ("raises", "raised KeyError", "printed: before it went wrong", "plain.py:"),
        ("returns_an_object", "returned object at ['model']", "", "return numbers"),
        ("ends_the_process", "ended its process with status 3", "", "os._exit"),
        ("exits", "raised SystemExit: no model today", "in exits", "look at"),
        ("crashes", "crashed (SIGSEGV)", "in crashes", "native code"),
        ("writes_everywhere", "sent something into the channel", "", "file descriptor"),
        ("reads_standard_input", "raised EOFError", "in reads_standard_input", "look at"),
    ],
)
def test_code_that_misbehaves_is_told_with_its_own_line(function, summary, detail, next_step):
    with pytest.raises(GraphError) as caught:
        call(function)

    problem = caught.value.problems[0]
    assert f"plain.py:{function} {summary}" in problem.summary
    assert detail in "\n".join(problem.detail)
    assert next_step in problem.next_step


def test_a_wrong_return_type_is_told_in_the_callers_class():
    with pytest.raises(BuildError, match=r"plain\.py:returns_text returned a str, expected one number"):
        call("returns_text", returns="number", failure=BuildError)


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    with pytest.raises(CapabilityError, match="imports 'a_package_that_is_nowhere'") as caught:
        call("needs_a_package")

    assert caught.value.problems[0].next_step.endswith("-m pip install a_package_that_is_nowhere")


@pytest.mark.parametrize(
    ("reference", "summary", "next_step"),
    [
        ("plain.py:accurcy", "'accurcy' is not in it", "write plain.py:accuracy"),
        ("plain.py:not_a_function", "is of type int, expected a function", "define not_a_function in"),
        ("plain_text:accuracy", "there is no module 'plain_text'", "plain_text.py:accuracy"),
    ],
)
def test_a_function_that_is_not_there(reference, summary, next_step):
    with pytest.raises(SpecError) as caught:
        run_user_code(reference, FOLDER, {}, timeout_seconds=60)

    assert summary in caught.value.problems[0].summary
    assert next_step in caught.value.problems[0].next_step


def test_a_syntax_error_is_told_with_its_line(tmp_path):
    (tmp_path / "typo.py").write_text("x = 1\ndef build(:\n")

    with pytest.raises(GraphError, match="raised SyntaxError") as caught:
        run_user_code("typo.py:build", tmp_path, {}, timeout_seconds=60)

    assert "typo.py:2" in caught.value.problems[0].next_step


def test_an_endless_loop_ends_at_the_limit_and_tells_where_it_was():
    with pytest.raises(GraphError, match=r"gave no answer within 1 s, the limit") as caught:
        call("loops", timeout_seconds=1)

    assert "plain.py" in caught.value.problems[0].detail[0]
    assert "in loops" in caught.value.problems[0].detail[0]


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_the_code_started_ends_with_it(tmp_path):
    shutil.copy(FOLDER / "plain.py", tmp_path)

    with pytest.raises(GraphError, match="the limit"):
        run_user_code("plain.py:sleeps_in_a_child", tmp_path, {}, timeout_seconds=2)

    pid = int((tmp_path / "child.pid").read_text())
    end = time.monotonic() + 10
    while _runs(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _runs(pid)


def test_nothing_is_left_open(tmp_path):
    call("is_asked", {"question": "so"})
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(GraphError):
        call("crashes")

    assert sorted(Path("/proc/self/fd").iterdir()) == before
