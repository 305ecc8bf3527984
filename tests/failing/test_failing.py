"""Every mistake a person can make, as a folder: what they wrote, the command they typed, and the exact answer.

`expected.txt` begins with the command line; then standard output and standard error; then the exit code. `*.onnxtxt`
files are models in ONNX's text format. UPDATE_EXPECTED=1 writes the files anew: read the difference before committing.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import onnx.parser
import pytest

from trtforge.cli.app import main

CASES = sorted(path.parent for path in Path(__file__).parent.glob("*/expected.txt"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_answer_is_exactly_as_expected(case, tmp_path, monkeypatch, capfd):
    folder = tmp_path / "case"
    shutil.copytree(case, folder, symlinks=True)
    for text_model in folder.glob("**/*.onnxtxt"):
        text_model.with_suffix(".onnx").write_bytes(onnx.parser.parse_model(text_model.read_text()).SerializeToString())
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    command, _, _ = (case / "expected.txt").read_text().partition("\n")
    before = _files(folder)

    with pytest.raises(SystemExit) as stopped:
        main(command.removeprefix("$ trtforge ").split())

    out, err = capfd.readouterr()
    answer = f"{command}\n{out}{err}exit {stopped.value.code}\n".replace(str(tmp_path.resolve()), "<TMP>")
    answer = re.sub(r" +\d+\.\d\d s  ", "  <seconds>  ", answer)
    if os.environ.get("UPDATE_EXPECTED"):
        (case / "expected.txt").write_text(answer)
    assert answer == (case / "expected.txt").read_text()
    assert stopped.value.code not in (0, 70)
    assert "\n  next: " in answer
    assert _files(folder) == before, "something half-written stayed"


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
