"""README's commands, run as they stand there. Times, digests, sizes and versions may differ; all else may not.

UPDATE_README=1 writes the outputs anew: read the difference before committing.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
MASKS = (
    (r"(?m)^  .* \.\.\. .*\n", ""),  # progress of a slow machine
    (r"\b[0-9a-f]{12,64}\b", "DIGEST"),
    (r"\b\d+\.\d+ s\b", "SECONDS"),
    (r"\b[\d.]+ (?:B|KB|MB|bytes)\b", "SIZE"),
    (r"\b\d+\.\d+\.\d+(?:\.\d+)?\b", "VERSION"),
    (r"(?<=trtrtx)VERSION|(?<=trtrtx)\d+\.\d+\.\d+", "VERSION"),
    (r" +", " "),
)


def masked(text: str) -> str:
    for pattern, word in MASKS:
        text = re.sub(pattern, word, text)
    return text


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what a fresh clone holds, so that outputs of other runs are not seen."""
    folder = tmp_path_factory.mktemp("readme") / "trtforge"
    names = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, names.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def run(command: str, checkout: Path, cache: Path) -> str:
    program, *arguments = shlex.split(command)
    assert program == "trtforge"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, "-m", "trtforge", *arguments],
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout


def test_console_blocks_say_what_really_comes(checkout, tmp_path):
    readme = README.read_text()
    for block in BLOCK.findall(readme):
        command, _, expected = block.partition("\n")
        found = run(command.removeprefix("$ "), checkout, tmp_path)
        if os.environ.get("UPDATE_README"):
            readme = readme.replace(block, f"{command}\n{found}")
        else:
            assert masked(found) == masked(expected), command
    README.write_text(readme)


def test_the_spec_shown_is_the_quickstart():
    (shown,) = re.findall(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL)
    assert yaml.safe_load(shown) == yaml.safe_load((ROOT / "configs/digits.yaml").read_text())


@pytest.mark.slow
def test_first_command_sets_up_and_builds(checkout, tmp_path):
    first, second = re.findall(r"```sh\n(.*?)```", README.read_text(), re.DOTALL)
    assert second.strip() == "scripts/test.sh"  # runs this very suite
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("PYTHONPATH", None)
    fresh = tmp_path / "clone"
    shutil.copytree(checkout, fresh)
    done = subprocess.run(
        ["sh", "-ec", first], cwd=fresh, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(list((fresh / "configs/dist/digits").glob("*.engine"))) == 3


def test_every_verb_and_spec_key_is_documented():
    readme = README.read_text()
    help_text = subprocess.run(
        [sys.executable, "-m", "trtforge", "--help"], capture_output=True, text=True, check=True
    ).stdout
    verbs = re.findall(r"^  (\w+) ", help_text.split("Commands:")[1].split("\n\n")[0], re.MULTILINE)
    assert verbs
    assert [verb for verb in verbs if f"`{verb}" not in readme] == []
    schema = yaml.safe_load((ROOT / "configs/spec.schema.json").read_text())
    keys = {
        *schema["properties"],
        *schema["$defs"]["BuilderSettings"]["properties"],
        *schema["$defs"]["Precision"]["properties"],
    }
    assert [key for key in keys if key not in readme] == []
