"""`trtforge store`: what the store holds, whether it is whole, and making room."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated

import typer

from trtforge.cli.console import JsonOption, StoreOption
from trtforge.errors import CommandLineError, IntegrityError

verbs = typer.Typer(help="Look after the store: ls, get, gc, verify.", no_args_is_help=True)

_SECONDS = {"m": 60, "h": 3600, "d": 86400, "w": 604800}
_AGE = re.compile(r"(\d{1,6})([mhdw])")


@verbs.command("ls")
def list_records(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List what the store holds: stage, key, size, last use, what it is."""
    from trtforge.cli.console import print_json, say, shown_bytes  # noqa: PLC0415
    from trtforge.upkeep import blob_bytes, stored_stages  # noqa: PLC0415

    root = _root(store)
    found = stored_stages(root)
    size_bytes = blob_bytes(root)
    if as_json:
        records = [
            {
                "stage": stored.record.stage,
                "key": stored.record.key,
                "about": stored.record.about,
                "size_bytes": stored.size_bytes,
                "last_used": _when(stored.last_used),
                "blobs": dict(stored.record.blobs),
            }
            for stored in found
        ]
        print_json({"ok": True, "store": root, "size_bytes": size_bytes, "records": records})
        return
    for stored in found:
        stage, key, size = stored.record.stage, stored.record.key[:12], shown_bytes(stored.size_bytes)
        say(f"{stage:<14}  {key}  {size:>8}  {_when(stored.last_used)}  {stored.record.about}")
    say(f"{len(found)} records, {shown_bytes(size_bytes)} of blobs in {root}")


@verbs.command("get")
def get_file(
    digest: Annotated[
        str,
        typer.Argument(
            help="SHA-256 of a file as a manifest or ls --json names it, or a key as ls names it; its first digits."
        ),
    ],
    file: Annotated[Path, typer.Argument(help="Where to copy it.")],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a file out of the store, such as the lowered ONNX model that an engine was built from."""
    from trtforge.cli.console import print_json, say  # noqa: PLC0415
    from trtforge.upkeep import copy_blob  # noqa: PLC0415

    found = copy_blob(_root(store), digest, file)
    if as_json:
        print_json({"ok": True, "file": file, "digest": found})
    else:
        say(f"{file}  sha256 {found}")


@verbs.command("gc")
def collect_garbage(
    older_than: Annotated[str, typer.Option(help="Time since the last use: 12h, 30d, 8w.")] = "30d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove what was not used for a while. Builds may run meanwhile and lose nothing."""
    from trtforge.cli.console import print_json, say, shown_bytes  # noqa: PLC0415
    from trtforge.upkeep import collect  # noqa: PLC0415

    root = _root(store)
    gone = collect(root, _age(older_than), time.time(), dry_run=dry_run)
    if as_json:
        counts = {"records": gone.num_records, "blobs": gone.num_blobs, "young_blobs": gone.num_young}
        print_json({"ok": True, "store": root, "dry_run": dry_run, **counts, "freed_bytes": gone.freed_bytes})
        return
    freed = f"{gone.freed_bytes} bytes ({shown_bytes(gone.freed_bytes)})"
    say(
        f"{'would remove' if dry_run else 'removed'} {gone.num_records} records and {gone.num_blobs} blobs: {freed} "
        f"{'to free' if dry_run else 'freed'} in {root}"
    )
    if gone.num_young:
        say(f"{gone.num_young} blobs that no record names stay until they are an hour old")


@verbs.command("verify")
def verify_store(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Hash every blob and check every record."""
    from trtforge.cli.console import print_json, say  # noqa: PLC0415
    from trtforge.upkeep import check  # noqa: PLC0415

    root = _root(store)
    checked = check(root)
    code = IntegrityError.exit_code if checked.damage else 0
    if as_json:
        damage = [{"path": found.path, "reason": found.reason} for found in checked.damage]
        counts = {"records": checked.num_records, "blobs": checked.num_blobs}
        print_json({"ok": code == 0, "exit_code": code, "store": root, **counts, "damage": damage})
        raise typer.Exit(code)
    for found in checked.damage:
        say(f"damaged: {found.path}: {found.reason}")
    say(f"{len(checked.damage)} damaged of {checked.num_records} records and {checked.num_blobs} blobs in {root}")
    if checked.damage:
        say("  next: rm each of them; the next build makes again what it needs of it")
    raise typer.Exit(code)


def _root(store: Path | None) -> Path:
    from trtforge.store import default_store_path  # noqa: PLC0415

    return store or default_store_path()


def _age(text: str) -> float:
    """Seconds of a time such as `30d`.

    Raises:
        CommandLineError: it is none.
    """
    match = _AGE.fullmatch(text)
    if not match:
        raise CommandLineError(
            f"--older-than {text}: expected a number of minutes, hours, days or weeks",
            next_step="trtforge store gc --older-than 30d",
        )
    return float(match[1]) * _SECONDS[match[2]]


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
