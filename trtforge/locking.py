"""Locked builds: the tactics that the published engines were built with, chosen again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from trtforge.backends.capabilities import capability
from trtforge.backends.surroundings import Recorded
from trtforge.errors import CapabilityError, Problem, raise_any, shown_path
from trtforge.keys import TIMING_CACHE
from trtforge.planning import Plan, PlannedUnit
from trtforge.release.manifest import MANIFEST_NAME, Artifact, read_manifest
from trtforge.run import Run
from trtforge.store import read_record, record_path
from trtforge.types import BuildUnit

_RECORDED: Final = "EDITABLE_TIMING_CACHE"


def locked_plan(plan: Plan, output_dir: Path, run: Run) -> Plan:
    """The plan with what each engine in `output_dir` was built with, for every unit that is built here.

    Args:
        plan: of the spec as it is now.
        output_dir: folder of the bundle that was published last.
        run: whose store has the timing caches.

    Raises:
        SeveralErrors: of `CapabilityError` problems, one for each engine that cannot be repeated.
        IntegrityError: the manifest cannot be read.
    """
    manifest_path = output_dir / MANIFEST_NAME
    artifacts = read_manifest(manifest_path).artifacts if manifest_path.exists() else ()
    found = {artifact.identifier: artifact for artifact in artifacts}
    here = [planned for planned in plan.units if not planned.missing]
    raise_any(problem for planned in here if (problem := _why_not(planned.unit, found, manifest_path, run)))
    units = (planned if planned.missing else _with_recorded(planned, found, run) for planned in plan.units)
    return replace(plan, units=tuple(units))


def _why_not(unit: BuildUnit, found: Mapping[str, Artifact], manifest_path: Path, run: Run) -> Problem | None:
    artifact = found.get(unit.identifier)
    if reason := capability(unit.backend, unit.backend_version).settings.get("record_tactics"):
        text, step = f"its build cannot be locked: {reason}", "leave out --locked"
    elif artifact is None or artifact.timing_cache_digest is None or _RECORDED not in artifact.builder_flags:
        text = f"{shown_path(manifest_path)} records no tactics of it"
        step = "write builder: {record_tactics: true}, and build without --locked"
    elif artifact.backend_version != unit.backend_version:
        text = f"its tactics were recorded by {unit.backend} {artifact.backend_version}, and this is {unit.backend_version}"
        step = f"pip install '{unit.backend}=={artifact.backend_version}'"
    elif not _is_there(artifact.timing_cache_digest, run):
        store = run.stages.store.root
        text = f"its timing cache (sha256 {artifact.timing_cache_digest[:12]}) is not in the store {store}"
        step = "name the store of the build that recorded it with --store"
    else:
        return None
    return Problem(f"{unit.identifier}: {text}", step, exit_code=CapabilityError.exit_code)


def _is_there(digest: str, run: Run) -> bool:
    store = run.stages.store
    try:
        return store.digest_of(store.blob_path(digest)) == digest
    except OSError:
        return False


def _with_recorded(planned: PlannedUnit, found: Mapping[str, Artifact], run: Run) -> PlannedUnit:
    artifact = found[planned.unit.identifier]
    assert artifact.timing_cache_digest is not None  # noqa: S101 - else it was refused
    store = run.stages.store
    try:
        record = read_record(record_path(store.root, planned.key.stage, artifact.unit_digest))
    except OSError:  # the timing cache is there by another record's name
        record = None
    tactics = dict(record.result["engine"]["tactics"]) if record else {}
    return replace(
        planned,
        key=replace(planned.key, inputs={**planned.key.inputs, TIMING_CACHE: artifact.timing_cache_digest}),
        recorded=Recorded(store.blob_path(artifact.timing_cache_digest), tactics),
    )
