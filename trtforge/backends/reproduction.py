"""What a failed build leaves for a bug report: the builder's log, and a script that fails the same way without trtforge."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trtforge.backends import worker
from trtforge.backends.worker_process import Transcript

FOLDER: Final = "failure"
"""Name of the folder, in the work folder of the build."""

_SCRIPT: Final = """#!/bin/sh
# Builds again what trtforge could not build. Prints JSON lines; the last one is the answer.
# Needs only {module} {version} in the Python that PYTHON names.
cd "$(dirname "$0")" && rm -f reproduced.engine
exec "${{PYTHON:-{python}}}" -m trtforge.backends.worker 1 < request.json
"""


def leave_reproduction(work_dir: Path, request: Mapping[str, Any], said: Transcript) -> None:
    """Writes `builder.log`, `request.json`, `reproduce.sh` and what it runs into a folder of `work_dir`.

    Raises:
        OSError: no space or no permission.
    """
    folder = work_dir / FOLDER
    folder.mkdir()
    lines = [f"{message.severity}: {message.text}" for message in said.messages]
    printed = said.printed.decode(errors="replace").splitlines()
    (folder / "builder.log").write_text("\n".join([*lines, *printed, f"ended at: {said.phase}", ""]), encoding="utf-8")
    paths = {"timing_cache_path": None, "timing_record_path": None, "locked_timing_path": None}
    again = {**request, **paths, "engine_path": "reproduced.engine", "started": 0.0}
    if locked := request["locked_timing_path"]:
        again["locked_timing_path"] = shutil.copyfile(locked, folder / "recorded.timing").name
    if calibration := request["calibration"]:
        again["calibration"] = _without_batches(calibration, folder)
    if again.get("inspection_path"):
        again["inspection_path"] = "inspection.json"
    (folder / "request.json").write_text(json.dumps(again, indent=1), encoding="utf-8")
    _copy_worker(folder)
    script = folder / "reproduce.sh"
    python = shlex.quote(sys.executable)
    script.write_text(
        _SCRIPT.format(module=request["module"], version=request["version"], python=python), encoding="utf-8"
    )
    script.chmod(0o755)


def _copy_worker(folder: Path) -> None:
    for name in worker.__name__.split("."):
        folder /= name
        folder.mkdir()
        (folder / "__init__.py").touch()
    for source in Path(worker.__file__).parent.glob("*.py"):
        shutil.copyfile(source, folder / source.name)


def _without_batches(calibration: Mapping[str, Any], folder: Path) -> dict[str, Any] | None:
    """With the scales in the folder; None where there are none yet, as the user's inputs are not for others."""
    if not Path(calibration["path"]).exists():
        return None
    copied = shutil.copyfile(calibration["path"], folder / "calibration.cache")
    return {**calibration, "path": copied.name, "batches": None}
