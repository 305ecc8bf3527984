"""`trtforge doctor`: what this machine can build, and whether it fits a spec."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trtforge.cli.console import JsonOption, StoreOption

if TYPE_CHECKING:
    from trtforge.backends.compatibility import Check
    from trtforge.machine import MachineFacts
    from trtforge.targets import BackendState


def doctor(
    spec: Annotated[
        Path | None,
        typer.Option(
            "--for", help="Check the machine against this spec; exit code 6 if it does not fit.", show_default=False
        ),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what is installed, which GPUs can be built for here, and what to install for the rest."""
    from trtforge.cli.console import print_json  # noqa: PLC0415
    from trtforge.machine import machine_facts  # noqa: PLC0415
    from trtforge.targets import backend_states  # noqa: PLC0415

    facts = machine_facts()
    states = backend_states(facts)
    checks = _checks(spec, store, facts) if spec else ()
    mismatches = [check for check in checks if check.verdict == "mismatch"]
    code = 6 if mismatches else 0
    if as_json:
        print_json(
            {
                "ok": code == 0,
                "exit_code": code,
                "machine": asdict(facts),
                "backends": [asdict(state) for state in states],
                "checks": [asdict(check) for check in checks],
            }
        )
    else:
        _print(facts, states, checks)
    raise typer.Exit(code)


def _checks(spec: Path, store: Path | None, facts: MachineFacts) -> tuple[Check, ...]:
    from trtforge.backends.compatibility import compatibility  # noqa: PLC0415
    from trtforge.planning import read_model  # noqa: PLC0415

    spec_file, graph = read_model(spec, store)
    return compatibility(spec_file, graph, facts)


def _print(facts: MachineFacts, states: tuple[BackendState, ...], checks: tuple[Check, ...]) -> None:
    from trtforge.cli.console import say  # noqa: PLC0415

    say(f"Python {facts.python_version}, {facts.os}, glibc {facts.glibc or 'none'}, {facts.cpu}")
    for name, version in sorted(facts.packages.items()):
        say(f"  {name:<14} {version}")
    for gpu in facts.gpus:
        say(
            f"  GPU {gpu.index}: {gpu.device_name} ({gpu.compute_capability}, {gpu.num_sms} SMs, {gpu.memory_bytes >> 20} MiB)"
        )
    if facts.gpus:
        say(f"  driver {facts.cuda_driver_version}, CUDA {facts.cuda_version}")
    else:
        say(f"  no GPU: {facts.cuda_error}")
    for state in states:
        say(f"{state.name}: {state.text}")
        if state.next_step:
            say(f"  next: {state.next_step}")
    for check in checks:
        say(f"{check.verdict:<9} {check.name}: found {check.found}, expected {check.expected}")
        if check.verdict == "mismatch":
            say(f"          source: {check.source}")
            say(f"          next: {check.next_step}")
