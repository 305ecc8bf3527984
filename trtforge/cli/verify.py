"""`trtforge verify`: whether a bundle is what its manifest says, and fits."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from trtforge.cli.console import JsonOption, ProgressOption, ProgressStyle, StoreOption
from trtforge.errors import PARTIAL_EXIT_CODE, ParityError, PerformanceError, RegressionError, exit_code_of

if TYPE_CHECKING:
    from trtforge.engine_proof import EngineProof
    from trtforge.events import Report

_STILL_RUN: Final = {PARTIAL_EXIT_CODE, ParityError.exit_code, PerformanceError.exit_code, RegressionError.exit_code}
"""What is missing, or was found of engines before, does not keep an engine from the GPU."""


_NEED_SPEC: Final = ("engine", "device", "runtime", "allow_host_code", "cuda_library")
"""Options that do nothing without --spec."""


def verify(
    context: typer.Context,
    manifest: Annotated[Path, typer.Argument(help="The manifest.json of a bundle.", show_default=False)],
    gpu: Annotated[
        str | None, typer.Option("--for", help="GPU that it is for: sm89, or a model such as L4.", show_default=False)
    ] = None,
    tensorrt: Annotated[
        str | None,
        typer.Option(help="TensorRT that it shall run on: 10.9, or 'tensorrt_rtx 1.7.1'.", show_default=False),
    ] = None,
    spec: Annotated[
        Path | None,
        typer.Option(
            help="Run the engine for the GPU at hand against onnxruntime, on the samples and profiles of this spec.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="With --spec: identifier, where several fit.", show_default=False)
    ] = None,
    device: Annotated[int, typer.Option(help="With --spec: CUDA's index of the GPU.", min=0)] = 0,
    runtime: Annotated[
        str | None,
        typer.Option(
            help="With --spec: tensorrt, or for a version-compatible engine tensorrt_lean or tensorrt_dispatch.  [default: the first that is installed]",
            show_default=False,
        ),
    ] = None,
    allow_host_code: Annotated[
        bool,
        typer.Option(
            "--allow-host-code", help="With --spec: let a version-compatible engine run the native code it brings."
        ),
    ] = False,
    cuda_library: Annotated[
        str | None,
        typer.Option(help="With --spec: cuda-python or pycuda.  [default: what is installed]", show_default=False),
    ] = None,
    exported_as: Annotated[
        Path | None, typer.Option(help="With --spec: ONNX file that a running build has of the model.", hidden=True)
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
    progress_style: ProgressOption = ProgressStyle.auto,
) -> None:
    """Check a bundle before a release: digests, sizes, headers, versions, GPU. Loads an engine only with --spec."""
    from trtforge.cli.console import print_json, print_problems, problem_json, progress, say  # noqa: PLC0415
    from trtforge.machine import machine_facts  # noqa: PLC0415
    from trtforge.release.verify import verify as verify_bundle  # noqa: PLC0415

    _refuse_idle_options(context)
    report = verify_bundle(manifest, wanted_gpu=gpu, wanted_tensorrt=tensorrt, facts=machine_facts())
    proof = None
    problems = report.problems
    # An engine that is not what the manifest says, or not for here, is not loaded.
    if spec and _STILL_RUN.issuperset(problem.exit_code for problem in problems):
        with progress(progress_style, as_json=as_json) as told:
            proof = _prove(
                manifest,
                spec,
                store,
                told,
                exported_as=exported_as,
                identifier=engine,
                cuda_library=cuda_library,
                device=device,
                runtime=runtime,
                allow_host_code=allow_host_code,
            )
        problems = (*problems, *proof.problems)
    code = exit_code_of(problems) if problems else 0
    if as_json:
        shown: dict[str, Any] = {"checks": [asdict(check) for check in report.checks]}
        shown["problems"] = [problem_json(problem) for problem in problems]
        print_json({"ok": code == 0, "exit_code": code, **shown, "engine": _proof_json(proof) if proof else None})
        raise typer.Exit(code)
    for check in report.checks:
        say(f"{check.verdict.replace('_', ' '):<11} {check.name:<25} {check.text}")
        if check.next_step and check.verdict in ("failed", "warning"):
            say(f"{'':<11} next: {check.next_step}")
    failed = len(report.problems)
    warned = sum(check.verdict == "warning" for check in report.checks)
    warnings = f", {warned} warnings" if warned else ""
    say(
        f"{failed} failed of {len(report.checks)} checks{warnings}"
        if failed
        else f"all {len(report.checks)} checks passed or not due{warnings}"
    )
    if proof:
        _print_proof(proof)
        print_problems(proof.problems)
    raise typer.Exit(code)


def _refuse_idle_options(context: typer.Context) -> None:
    from trtforge.errors import CommandLineError, Problem, raise_any  # noqa: PLC0415

    if context.params["spec"] is not None:
        return
    given = (name for name in _NEED_SPEC if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE")
    raise_any(
        Problem(
            f"found --{name.replace('_', '-')} without --spec", "add --spec SPEC", exit_code=CommandLineError.exit_code
        )
        for name in given
    )


def _prove(
    manifest: Path,
    spec: Path,
    store: Path | None,
    told: Report,
    *,
    exported_as: Path | None,
    identifier: str | None,
    cuda_library: str | None,
    device: int,
    runtime: str | None,
    allow_host_code: bool,
) -> EngineProof:
    from trtforge.engine_proof import prove_engine  # noqa: PLC0415
    from trtforge.run import open_run  # noqa: PLC0415

    with open_run(spec, store, told) as run:
        return prove_engine(
            manifest,
            spec,
            run,
            exported_as=exported_as,
            identifier=identifier,
            cuda_library=cuda_library,
            device=device,
            runtime=runtime,
            allow_host_code=allow_host_code,
        )


def _proof_json(proof: EngineProof) -> Any:
    from trtforge.engine_proof import EngineProof  # noqa: PLC0415
    from trtforge.plain import to_plain  # noqa: PLC0415

    return to_plain(EngineProof, proof)


def _print_proof(proof: EngineProof) -> None:
    from trtforge.cli.console import say, shown_bytes  # noqa: PLC0415
    from trtforge.parity.report import lines  # noqa: PLC0415
    from trtforge.release.gates import silently_wider  # noqa: PLC0415

    say(f"{proof.identifier} on the GPU:")
    for line in lines(proof.parity):
        say(line)
    if proof.accuracy:
        say(
            f"accuracy {proof.accuracy.candidate:.4g}, {proof.accuracy.reference:.4g} in FP32: {proof.accuracy.verdict}"
        )
    types = ", ".join(f"{count} {name}" for name, count in proof.layer_types.items())
    hint = "; builder: {profiling_verbosity: detailed} makes an engine that tells them"
    say(f"layers by type: {types}{hint if set(proof.layer_types) == {'unknown'} else ''}")
    if warning := silently_wider(proof.precision, proof.layer_types):
        say(f"warning: {warning}")
    say(f"GPU memory: {shown_bytes(proof.engine_bytes)} loaded, {shown_bytes(proof.run_bytes)} more to run")
