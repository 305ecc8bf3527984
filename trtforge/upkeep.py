"""What a store holds, what of it is damaged, and what can go. Works beside running builds."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trtforge.digests import file_digest
from trtforge.errors import CommandLineError, IntegrityError, StoreError, shown_path
from trtforge.files import commit, explained, locked, locked_if_free, write_aside
from trtforge.store import SWEEP_LOCK, Record, blob_path, read_record

YOUNG_SECONDS = 3600.0
"""A blob that came within the last hour stays, whether or not a record names it."""
_NEXT_STEP = "name the folder of a store with --store"
_LIST = "trtforge store ls --json  # names the files of every stage by digest"
_DIGITS = re.compile("[0-9a-f]{6,64}")


@dataclass(frozen=True, slots=True)
class StoredStage:
    """One record.

    Attributes:
        size_bytes: of its blobs.
        last_used: seconds since 1970.
    """

    path: Path
    record: Record
    size_bytes: int
    last_used: float


@dataclass(frozen=True, slots=True)
class Collected:
    """What was removed, or would be.

    Attributes:
        num_young: blobs that no record names and that are too young to go.
        freed_bytes: of blobs.
    """

    num_records: int
    num_blobs: int
    num_young: int
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class Damage:
    """A file of a store that is not what it should be."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Checked:
    """What was looked at, and what of it is damaged."""

    num_records: int
    num_blobs: int
    damage: tuple[Damage, ...]


def stored_stages(root: Path) -> tuple[StoredStage, ...]:
    """Every whole record of the store at `root`, the one used last first.

    Raises:
        StoreError: there is no store.
    """
    _refuse_other_folder(root)
    found = []
    for path in _record_paths(root):
        with suppress(OSError):  # it may go meanwhile
            if record := read_record(path):
                size_bytes = sum(_size(blob_path(root, digest)) for digest in set(record.blobs.values()))
                found.append(StoredStage(path, record, size_bytes, path.stat().st_mtime))
    return tuple(sorted(found, key=lambda stored: (-stored.last_used, stored.path)))


def blob_bytes(root: Path) -> int:
    """Size of all blobs of the store at `root`."""
    return sum(map(_size, _blob_paths(root)))


def collect(root: Path, older_than_seconds: float, now: float, *, dry_run: bool = False) -> Collected:
    """Removes records not used for longer than `older_than_seconds`, damaged ones, and then blobs that no record names.

    Notes on the last keys, kept failures and lock files of that age go too. A running build loses nothing: what was
    used since it began stays, a blob and its record appear under a lock that is held here, and a blob younger than
    `YOUNG_SECONDS` stays in any case.

    Args:
        root: folder of the store.
        older_than_seconds: since the last use.
        now: seconds since 1970.
        dry_run: only count.

    Raises:
        StoreError: there is no store, or it cannot be written.
    """
    _refuse_other_folder(root)
    before = min((now - older_than_seconds, *_starts_of_running_builds(root)))
    with explained(root, 0, _NEXT_STEP), locked(root / "locks" / SWEEP_LOCK, on_wait=_briefly):
        num_records, named = _drop_records(root, before, dry_run=dry_run)
        blobs = [path for path in _blob_paths(root) if path.name not in named]
        # The change time: a blob that was moved in keeps the modification time of its writing.
        old = [path for path in blobs if path.stat().st_ctime <= now - YOUNG_SECONDS]
        freed_bytes = sum(_size(path) for path in old)
        if not dry_run:
            for path in old:
                path.unlink()
            _drop_the_rest(root, before)
    return Collected(num_records, len(old), len(blobs) - len(old), freed_bytes)


def check(root: Path) -> Checked:
    """Reads every record and hashes every blob of the store at `root`.

    Raises:
        StoreError: there is no store.
    """
    _refuse_other_folder(root)
    damage: list[Damage] = []
    blobs = list(_blob_paths(root))
    for path in blobs:
        with suppress(FileNotFoundError):  # collected meanwhile
            damage += _blob_damage(path)
    bad = {found.path.name for found in damage}
    records = list(_record_paths(root))
    for path in records:
        with suppress(FileNotFoundError):
            damage += _record_damage(root, path, bad)
    return Checked(len(records), len(blobs), tuple(damage))


def copy_blob(root: Path, digits: str, target: Path) -> str:
    """Copies a blob out of the store at `root`, whole or not at all. Returns its digest.

    Args:
        root: folder of the store.
        digits: the first digits of its SHA-256, or of the key of the one record that has it, as many as tell it from others.
        target: the new file.

    Raises:
        CommandLineError: `digits` are no such digits, or name no blob or several; or `target` is there.
        IntegrityError: the blob is damaged.
        StoreError: there is no store, or the file cannot be written.
    """
    _refuse_other_folder(root)
    if not _DIGITS.fullmatch(digits):
        raise CommandLineError(f"found '{digits}', expected 6 or more hexadecimal digits", next_step=_LIST)
    found = {path.name: "" for path in _blob_paths(root) if path.name.startswith(digits)}
    if not found:
        records = [stored.record for stored in stored_stages(root) if stored.record.key.startswith(digits)]
        named = {digest: f" {name} of {one.stage}" for one in records for name, digest in one.blobs.items()}
        found = {digest: what for digest, what in named.items() if blob_path(root, digest).exists()}
    if len(found) != 1:
        raise CommandLineError(
            f"{root} holds {len(found) or 'no'} files whose digest, or record's key, begins with {digits}",
            detail=[f"{digest[:12]}{what}" for digest, what in found.items()],
            next_step=f"trtforge store get {next(iter(found))[:12]} {shown_path(target)}" if found else _LIST,
        )
    if target.exists():
        raise CommandLineError(f"{shown_path(target)} is there already", next_step="name another file")
    (name,) = found
    source = blob_path(root, name)
    with explained(target.parent, _size(source), f"ls -ld {target.parent}"):
        with source.open("rb") as reader:
            aside, digest = write_aside(target.parent, reader)
        if digest != source.name:
            aside.unlink()
            raise IntegrityError(f"{source} is damaged: its content has SHA-256 {digest}", next_step=f"rm {source}")
        commit(aside, target)
    return digest


def _blob_damage(path: Path) -> Iterator[Damage]:
    try:
        digest = file_digest(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        yield Damage(path, f"cannot be read: {error.strerror}")
        return
    if digest != path.name or path.parent.name != digest[:2]:
        yield Damage(path, f"its content has SHA-256 {digest}, not the one in its name")


def _record_damage(root: Path, path: Path, bad_blobs: set[str]) -> Iterator[Damage]:
    try:
        record = read_record(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        yield Damage(path, f"cannot be read: {error.strerror}")
        return
    if record is None:
        yield Damage(path, "is no whole record of the key in its name")
        return
    for name, digest in record.blobs.items():
        if digest in bad_blobs or not blob_path(root, digest).is_file():
            state = "is damaged" if digest in bad_blobs else "is gone"
            yield Damage(path, f"{record.about}: its blob '{name}', {digest[:12]}, {state}")


def _refuse_other_folder(root: Path) -> None:
    if not (root / "records").is_dir():
        found = "holds no store" if root.is_dir() else "does not exist" if not root.exists() else "is no folder"
        raise StoreError(f"{root} {found}", next_step=_NEXT_STEP)


def _record_paths(root: Path) -> list[Path]:
    return sorted(root.glob("records/*/*.json"))


def _blob_paths(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("blobs/*/*") if not path.is_dir())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _starts_of_running_builds(root: Path) -> Iterator[float]:
    for lock in root.glob("work/*/lock"):
        with locked_if_free(lock) as is_free, suppress(OSError):
            if not is_free:
                yield lock.stat().st_mtime


def _drop_records(root: Path, before: float, *, dry_run: bool) -> tuple[int, set[str]]:
    """How many records go, and the digests that the others name."""
    num_dropped, named = 0, set()
    for path in _record_paths(root):
        # A build that looks for this record, or makes it, holds the lock of its key.
        with locked_if_free(root / "locks" / path.stem) as is_free, suppress(FileNotFoundError):
            record = read_record(path)
            if is_free and (record is None or path.stat().st_mtime <= before):
                num_dropped += 1
                if not dry_run:
                    path.unlink()
            elif record:
                named |= set(record.blobs.values())
    return num_dropped, named


def _drop_the_rest(root: Path, before: float) -> None:
    """Notes on last keys, kept failures, and locks that nobody holds, unless they are young."""
    for path in _older(root.glob("latest/*.json"), before):
        path.unlink()
    for path in _older(root.glob("failures/*"), before):
        shutil.rmtree(path, ignore_errors=True)
    for path in _older(root.glob("locks/*"), before):
        with locked_if_free(path) as is_free:
            if is_free:
                path.unlink()


def _older(paths: Iterable[Path], before: float) -> list[Path]:
    return [path for path in paths if path.stat().st_mtime <= before]


def _briefly() -> None:
    """Nothing to tell: the holder is done at once."""
