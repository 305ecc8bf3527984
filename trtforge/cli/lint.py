"""`trtforge lint`: what TensorRT would refuse, misread or waste in a quantized model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli.console import JsonOption

if TYPE_CHECKING:
    from trtforge.graph.qdq_lint import Finding


def lint(
    model: Annotated[Path, typer.Argument(help="The ONNX model.", show_default=False)],
    fix: Annotated[
        Path | None,
        typer.Option(help="Write a copy with all that can be mended surely; the model stays.", show_default=False),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option("--for", help="Judge by one backend, as in tensorrt:8.6 or tensorrt_rtx.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check Q/DQ nodes and quantized operators of an ONNX model; exit code 13 if there are errors."""
    from trtforge.cli.console import print_json, say  # noqa: PLC0415 - keeps --help quick
    from trtforge.errors import LintError  # noqa: PLC0415
    from trtforge.graph import qdq_file, qdq_fix, qdq_lint  # noqa: PLC0415

    refused = _refused_types(backend) if backend else {}
    folder = model.absolute().parent
    opened = qdq_file.open_model(model)
    found = qdq_fix.lint(opened, folder, refused)
    left = found
    if fix:
        qdq_fix.mend(opened, folder)
        left = qdq_lint.findings(opened, folder, refused)
        qdq_file.write_model(opened, model, fix)
    code = LintError.exit_code if any(one.severity == "error" for one in left) else 0
    if as_json:
        fixed = {"fixed": str(fix), "left": [asdict(one) for one in left]} if fix else {}
        print_json({"ok": code == 0, "exit_code": code, "findings": [asdict(one) for one in found], **fixed})
        raise typer.Exit(code)
    for one in left:
        say(_line(one))
    for step, rules in _next_steps(left, model, fix).items():
        say(f"  next for {', '.join(rules)}: {step}")
    if fix:
        say(f"{_counted(found)} in {model}; {fix} has {_counted(left)}")
    else:
        say(f"{model}: {_counted(found)}")
    raise typer.Exit(code)


def _refused_types(backend: str) -> dict[str, str]:
    """Quantized element type -> why the backend does not take it."""
    from trtforge.backends.capabilities import CAPABILITIES, capability, newest_version  # noqa: PLC0415
    from trtforge.errors import CommandLineError, closest  # noqa: PLC0415

    name, _, version = backend.partition(":")
    if name not in CAPABILITIES:
        near = closest(name, CAPABILITIES) or "tensorrt"
        raise CommandLineError(
            f"--for '{backend}' names no backend (known: {', '.join(CAPABILITIES)})", next_step=f"--for {near}"
        )
    row = capability(name, version or newest_version(name))
    named = {"int8": "int8", "int4": "int4", "float8e4m3fn": "fp8", "float4e2m1": "fp4"}
    reasons = {dtype: row.precisions[precision] for dtype, precision in named.items()}
    return {dtype: reason for dtype, reason in reasons.items() if not reason.startswith("sm")}


def _line(one: Finding) -> str:
    node = f"'{one.scope}/{one.node}'" if one.scope else f"'{one.node}'"
    return f"{one.severity}: {one.rule} {node} ({one.op}): found {one.found}, expected {one.expected}; {one.why}"


def _next_steps(found: Iterable[Finding], model: Path, fix: Path | None) -> dict[str, list[str]]:
    """Each step once, with the rules that it is for."""
    steps: dict[str, list[str]] = {}
    for one in found:
        step = f"trtforge lint {model} --fix OUT.onnx" if one.mendable and fix is None else one.next_step
        rules = steps.setdefault(step, [])
        rules += [one.rule] * (one.rule not in rules)
    return steps


def _counted(findings: Iterable[Finding]) -> str:
    severities = [one.severity for one in findings]
    errors, warnings = severities.count("error"), severities.count("warning")
    return f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}"
