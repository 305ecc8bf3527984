"""README's figures of a GPU, step by step, within some seconds; the next call goes on where one ended.

    python scripts/bench/gpu_steps.py FOLDER --torch-python PYTHON [--seconds 1800] [STEP ...]

Models, engines and the store go to FOLDER, what each step printed to FOLDER/steps/NAME.txt. Steps that are named are run again. One
that would not fit into what is left of the time is left to the next call, as is one that was stopped by it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from programs import ROOT, TRTFORGE

BENCH = Path(__file__).parent
TABLE = "gpu_models.py {folder} --torch-python {python} --models"


@dataclass(frozen=True, slots=True)
class Step:
    """One of them.

    Attributes:
        seconds: that it took on an H200, about.
        words: a script beside this one or of the tests, or a verb of trtforge, and its arguments.
        needs: steps that come before.
    """

    name: str
    seconds: float
    words: str
    needs: tuple[str, ...] = ()


def against(one: str, other: str, more: str) -> str:
    """Two engines by turns."""
    manifests = f"{{folder}}/{one}/manifest.json --against {{folder}}/{other}/manifest.json"
    return f"bench {manifests} --spin-wait --duration 0.5 --max-regression 9 {more}"


def table(model: str, precision: str, seconds: float, peers: str = "") -> Step:
    """A row, and PyTorch beside if peers are named."""
    return Step(f"{model}-{precision}", seconds, f"{TABLE} {model} --precisions {precision} --peers={peers}")


ALL_PEERS = "eager-fp32,eager-fp16,compile-fp16"
INT8 = ("resnet50-int8", "resnet50-implicit")
STEPS = (
    table("resnet50", "int8", 130),
    table("resnet50", "implicit", 180),
    Step("int8", 16, against(*INT8, "--shapes batch=32"), INT8),
    Step("int8-graph", 16, against(*INT8, "--shapes batch=32 --cuda-graph"), INT8),
    Step("int8-compute", 16, against(*INT8, "--shapes batch=32 --no-transfers"), INT8),
    Step("tests-runtime", 200, "tests/gpu/test_gpu_runtime.py"),
    table("bert_base", "fp16", 150),
    Step("grid", 250, "latency_grid.py {folder} {folder}/grid.json", ("bert_base-fp16",)),
    Step("mixed-1", 35, "mixed_lengths.py {folder}/bert_base-4x128/manifest.json seq 128 1", ("grid",)),
    Step("mixed-8", 45, "mixed_lengths.py {folder}/bert_base-4x128/manifest.json seq 128 8", ("grid",)),
    table("resnet50", "fp16", 135),
    Step("bare-resnet50", 40, "bare_loop.py {folder}/resnet50-fp16/manifest.json batch=1,8,32", ("resnet50-fp16",)),
    Step("bare-bert_base", 40, "bare_loop.py {folder}/bert_base-fp16/manifest.json batch=1,8,32", ("bert_base-fp16",)),
    Step("int8-fp16", 40, against("resnet50-int8", "resnet50-fp16", "--shapes batch=1,8,32 --cuda-graph"), INT8[:1]),
    Step("tests-faults", 160, "tests/gpu/test_gpu_faults.py"),
    Step("flag-resnet50", 150, "fp16_flag.py {folder} resnet50", ("resnet50-fp16",)),
    table("bert_intent", "fp16", 160, ALL_PEERS),
    table("bert_intent", "int8", 90),
    table("bert_base", "int8", 180),
    table("bert_base", "fp32", 220, ALL_PEERS),
    table("resnet50", "fp32", 210, ALL_PEERS),
    table("bert_intent", "fp32", 80),
    Step("flag-bert_base", 150, "fp16_flag.py {folder} bert_base", ("bert_base-fp16",)),
)


def command(step: Step, folder: Path, python: str) -> list[str]:
    """Program and arguments."""
    first, *rest = step.words.format(folder=folder, python=python).split()
    if not first.endswith(".py"):
        return [*TRTFORGE, first, *rest]
    return [sys.executable, str(ROOT / first if "/" in first else BENCH / first), *rest]


def next_step(codes: dict[str, int], seconds: float) -> Step | None:
    """The first that was not run, can be, and fits."""
    for step in STEPS:
        if step.name not in codes and all(codes.get(name) == 0 for name in step.needs) and step.seconds <= seconds:
            return step
    return None


def outcome(words: list[str], seconds: float) -> tuple[int, str] | None:
    """Exit code and what it printed, errors only where it failed; None where it took longer, and was killed with its children."""
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            printed, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None
    return process.returncode, f"{printed}\n{errors}" if process.returncode else printed


def main() -> None:
    """Runs what fits, and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("again", nargs="*", metavar="STEP")
    parser.add_argument("--torch-python", required=True)
    parser.add_argument("--seconds", type=float, default=1800.0)
    asked = parser.parse_args()
    end = time.monotonic() + asked.seconds
    told = asked.folder.absolute() / "steps"
    told.mkdir(parents=True, exist_ok=True)
    codes = {path.stem: int(path.read_text().partition("\n")[0]) for path in told.glob("*.txt")}
    codes = {name: code for name, code in codes.items() if name not in asked.again}
    while step := next_step(codes, end - time.monotonic()):
        start = time.monotonic()
        found = outcome(command(step, told.parent, asked.torch_python), max(end - start, 1))
        if found is None:
            print(f"== {step.name}: stopped after {time.monotonic() - start:.0f} s", flush=True)
            break
        codes[step.name], text = found
        (told / f"{step.name}.txt").write_text(f"{codes[step.name]}\n{text}", encoding="utf-8")
        print(f"== {step.name}: exit code {codes[step.name]}, {time.monotonic() - start:.0f} s\n{text}", flush=True)
    left = [step.name for step in STEPS if step.name not in codes]
    print(f"not run: {', '.join(left) or 'none'}")


if __name__ == "__main__":
    main()
