"""The store: results of stages by the digest of everything that decides them. Nothing is done twice.

    blobs/ab/abcd...     files by their SHA-256
    records/STAGE/KEY    what a stage gave, written last: a record's existence means that the stage is done
    latest/SLOT          the key that a stage of a spec had last, to say what changed
    failures/NAME        log and reproduction of a build that failed
    work/RUN             files of a running build; everything is written there and moved to its place whole
    locks/               lock files

A store holds no path and no time in its keys, so it can be shared between machines and CI runs.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from trtforge.digests import file_digest, value_digest
from trtforge.files import commit, explained, locked, locked_if_free, write_aside

STORE_VARIABLE = "TRTFORGE_STORE"
SWEEP_LOCK = "sweep"
"""Held while a stage's blobs and its record appear, and while blobs that no record names are removed."""
_WORK_LOCK = "work"
_NEXT_STEP = "name a folder that can be written with --store"
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class StageKey:
    """Everything that decides a stage's result; two equal ones have equal results.

    Attributes:
        stage: name of the stage.
        version: raised whenever the stage's code starts to give another result for the same inputs.
        inputs: name -> SHA-256 of what goes in.
        parameters: settings, JSON values, under the names that a person knows from the spec.
        environment: name -> version of the tools that have a say.
    """

    stage: str
    version: int
    inputs: Mapping[str, str]
    parameters: Mapping[str, Any]
    environment: Mapping[str, str]

    @property
    def parts(self) -> dict[str, Any]:
        """The key as one JSON value."""
        return {
            "stage": self.stage,
            "stage_version": self.version,
            "inputs": dict(self.inputs),
            "parameters": dict(self.parameters),
            "environment": dict(self.environment),
        }

    @property
    def digest(self) -> str:
        """SHA-256 of the parts in canonical JSON."""
        return value_digest(self.parts)


@dataclass(frozen=True, slots=True)
class Record:
    """What a stage gave: a JSON value, and files by name as digests of blobs.

    Attributes:
        about: what it is, for people.
    """

    stage: str
    key: str
    about: str
    result: Any
    blobs: Mapping[str, str]


def default_store_path() -> Path:
    """The folder in TRTFORGE_STORE, else one in the user's cache folder."""
    named = os.environ.get(STORE_VARIABLE)
    return Path(named) if named else user_cache_path("trtforge") / "store"


@contextmanager
def open_store(
    root: Path, warn: Callable[[str], None], digest_of: Callable[[Path], str] = file_digest
) -> Iterator[Store]:
    """The store in the folder `root`, made if needed, for one run. What killed runs left in it is removed.

    Args:
        root: folder of the store.
        warn: told about everything damaged that is found and dropped.
        digest_of: SHA-256 of a file; may remember files that have not changed since.

    Raises:
        StoreError: the folder cannot be made or written.
    """
    work_dir = root / "work" / secrets.token_hex(8)
    with ExitStack() as stack:
        # Nobody sees the folder without its lock, and nobody takes it for that of a killed run.
        with locked(root / "locks" / _WORK_LOCK, on_wait=_briefly), explained(root, 0, _NEXT_STEP):
            work_dir.mkdir(parents=True)
            stack.callback(shutil.rmtree, work_dir, ignore_errors=True)
            stack.enter_context(locked(work_dir / "lock", on_wait=_briefly))
            _remove_killed(work_dir.parent)
        yield Store(root, work_dir, warn, digest_of)


@dataclass(frozen=True, slots=True)
class Store:
    """An open store, see `open_store`.

    Attributes:
        work_dir: folder of this run, in the store's file system, so that files move in by a rename.
    """

    root: Path
    work_dir: Path
    warn: Callable[[str], None]
    digest_of: Callable[[Path], str]

    def find(self, key: StageKey) -> Record | None:
        """The record of `key` if it is there and whole, with all its blobs by their digests; what is damaged is dropped."""
        path = record_path(self.root, key.stage, key.digest)
        try:
            record = read_record(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.warn(f"{path} cannot be read ({error.strerror}); the stage runs again")
            return None
        if record is None:
            self.warn(f"{path} is damaged; the stage runs again")
            self._forget(path, ())
            return None
        damaged = [digest for digest in record.blobs.values() if not self._is_whole(digest)]
        if damaged:
            self.warn(f"{self.blob_path(damaged[0])} is gone or damaged; the stage runs again")
            self._forget(path, damaged)
            return None
        with suppress(OSError):
            os.utime(path)  # for gc: last used now
        return record

    def put(self, key: StageKey, result: Any, files: Mapping[str, Path], about: str = "") -> Record:
        """Stores a stage's result: its files become blobs, which takes them away, and the record comes last.

        Args:
            key: everything that decides the result.
            result: a JSON value.
            files: by name, in `work_dir`.
            about: what it is, for people.

        Raises:
            StoreError: no space or no permission; no record exists then.
        """
        with self._explained():
            blobs = {name: file_digest(path) for name, path in files.items()}
            with self.lock(SWEEP_LOCK, on_wait=_briefly):
                for name, path in files.items():
                    self._take(path, self.blob_path(blobs[name]))
                record = Record(key.stage, key.digest, about, result, blobs)
                body = {"key": record.key, "parts": key.parts, "about": about, "result": result, "blobs": blobs}
                envelope = {"sha256": value_digest(body), "record": body}
                self._write(record_path(self.root, key.stage, key.digest), envelope)
        return record

    def blob_path(self, digest: str) -> Path:
        """Where the blob with this digest is, or would be."""
        return blob_path(self.root, digest)

    def changes(self, slot: str, key: StageKey) -> tuple[str, ...] | None:
        """What differs between `key` and the one that `slot` had last, as names of settings; None if it had none."""
        last = self._latest(slot)
        return None if last is None else differences(last, key.parts)

    def note(self, slot: str, key: StageKey) -> None:
        """Remembers `key` as the last of `slot`.

        Raises:
            StoreError: no space or no permission.
        """
        path = self._latest_path(slot)
        if self._latest(slot) == json.loads(json.dumps(key.parts)):
            with suppress(OSError):
                os.utime(path)  # for gc: last used now
            return
        with self._explained():
            self._write(path, key.parts)

    def lock(self, name: str, on_wait: Callable[[], None]) -> AbstractContextManager[None]:
        """Holds the store's lock `name`; others wait. The kernel frees it when its holder dies."""
        return locked(self.root / "locks" / name, on_wait=on_wait)

    def new_folder(self, name: str) -> Path:
        """An empty folder in the work folder.

        Raises:
            StoreError: no space or no permission.
        """
        with self._explained():
            folder = self.work_dir / name
            folder.mkdir()
        return folder

    def keep_failure(self, name: str, folder: Path) -> Path | None:
        """Keeps a folder of `work_dir` for people to look at, in place of an earlier one; None where it cannot be kept."""
        kept = self.root / "failures" / name
        shutil.rmtree(kept, ignore_errors=True)
        try:
            kept.parent.mkdir(exist_ok=True)
            folder.rename(kept)
        except OSError:
            return None
        return kept

    def _is_whole(self, digest: str) -> bool:
        try:
            return self.digest_of(self.blob_path(digest)) == digest
        except OSError:
            return False

    def _forget(self, path: Path, damaged: Iterable[str]) -> None:
        """Removes a record, and blobs that are still damaged now that nobody writes any."""
        with self.lock(SWEEP_LOCK, on_wait=_briefly), suppress(OSError):
            path.unlink()
            for digest in damaged:
                if file_digest(self.blob_path(digest)) != digest:
                    self.blob_path(digest).unlink()

    def _latest_path(self, slot: str) -> Path:
        return self.root / "latest" / f"{value_digest(slot)}.json"

    def _latest(self, slot: str) -> dict[str, Any] | None:
        try:
            last = json.loads(self._latest_path(slot).read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        return last if isinstance(last, dict) else None

    def _take(self, path: Path, final: Path) -> None:
        """Moves a finished file of `work_dir` into the blobs, after its bytes are on disk."""
        with path.open("rb") as file:
            os.fsync(file.fileno())
        final.parent.mkdir(parents=True, exist_ok=True)
        commit(path, final)

    def _write(self, path: Path, value: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = json.dumps(value, allow_nan=False).encode()
        with self._explained(len(data)):
            aside, _ = write_aside(self.work_dir, BytesIO(data))
            commit(aside, path)

    def _explained(self, needed_bytes: int = 0) -> AbstractContextManager[None]:
        return explained(self.root, needed_bytes, _NEXT_STEP)


def blob_path(root: Path, digest: str) -> Path:
    """Where the blob with this digest is, or would be, in the store at `root`."""
    return root / "blobs" / digest[:2] / digest


def record_path(root: Path, stage: str, key: str) -> Path:
    """Where the record of a stage's key is, or would be, in the store at `root`."""
    return root / "records" / stage.replace(" ", "-") / f"{key}.json"


def read_record(path: Path) -> Record | None:
    """The record in the file `path`, None if it is not whole or that of another key than its name says.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        envelope = json.loads(path.read_bytes())
        body = envelope["record"]
        record = Record(body["parts"]["stage"], body["key"], body["about"], body["result"], body["blobs"])
        is_whole = envelope["sha256"] == value_digest(body) and path.stem == record.key == value_digest(body["parts"])
        is_safe = all(_DIGEST.fullmatch(digest) for digest in record.blobs.values())  # they become paths
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return record if is_whole and is_safe else None


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the values that differ between two keys' parts, such as `profiles[0].image.max`."""
    old, new = dict(_flat(before, "")), dict(_flat(after, ""))
    names = [name for name in {**old, **new} if old.get(name, _ABSENT) != new.get(name, _ABSENT)]
    plain = [name.split(".", 1)[-1] if name.startswith(_GROUPS) else name for name in names]
    return tuple(name.replace("].inputs.", "].") for name in plain)


_ABSENT = object()
_GROUPS = ("inputs.", "parameters.", "environment.")


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        for position, item in enumerate(value):
            yield from _flat(item, f"{name}[{position}]")
    else:
        yield name, list(value) if isinstance(value, tuple) else value


def _remove_killed(folder: Path) -> None:
    """Removes the work folders of runs that hold no lock any more. The caller holds the lock for making new ones."""
    for other in folder.iterdir():
        with locked_if_free(other / "lock") as is_free:
            if is_free:
                shutil.rmtree(other, ignore_errors=True)


def _briefly() -> None:
    """Nothing to tell: the holder is done at once."""
