"""The store: results of stages by the digest of everything that decides them. Nothing is done twice.

    blobs/ab/abcd...     files by their SHA-256
    records/STAGE/KEY    what a stage gave, written last: a record's existence means that the stage is done
    latest/SLOT          the key that a stage of a spec had last, to say what changed
    locks/, work/        lock files; folders of running builds

A store holds no path and no time in its keys, so it can be shared between machines and CI runs.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from trtforge.digests import file_digest, value_digest
from trtforge.files import commit, explained, is_locked, locked, write_aside

STORE_VARIABLE = "TRTFORGE_STORE"
_NEXT_STEP = "name a folder that can be written with --store"


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
    """What a stage gave: a JSON value, and files by name as digests of blobs."""

    key: str
    result: Any
    blobs: Mapping[str, str]


def default_store_path() -> Path:
    """The folder in TRTFORGE_STORE, else one in the user's cache folder."""
    named = os.environ.get(STORE_VARIABLE)
    return Path(named) if named else user_cache_path("trtforge") / "store"


@dataclass(frozen=True, slots=True)
class Store:
    """A store in the folder `root`, made when first written.

    Attributes:
        warn: told about everything damaged that is found and dropped.
        digest_of: SHA-256 of a file; may remember files that have not changed since.
    """

    root: Path
    warn: Callable[[str], None]
    digest_of: Callable[[Path], str] = file_digest

    def find(self, key: StageKey) -> Record | None:
        """The record of `key` if it is there and whole, with all its blobs by their digests; what is damaged is dropped."""
        path = self._record_path(key.stage, key.digest)
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.warn(f"{path} cannot be read ({error.strerror}); the stage runs again")
            return None
        record = _parsed(text, key.digest)
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

    def put(self, key: StageKey, result: Any, files: Mapping[str, Path]) -> Record:
        """Stores a stage's result: its files become blobs, which takes them away, and the record comes last.

        Raises:
            StoreError: no space or no permission; no record exists then.
        """
        with self._explained(sum(path.stat().st_size for path in files.values())):
            blobs = {name: self._take(path) for name, path in files.items()}
            record = Record(key.digest, result, blobs)
            body = {"key": record.key, "parts": key.parts, "result": result, "blobs": blobs}
            self._write(self._record_path(key.stage, key.digest), {"sha256": value_digest(body), "record": body})
        return record

    def blob_path(self, digest: str) -> Path:
        """Where the blob with this digest is, or would be."""
        return self.root / "blobs" / digest[:2] / digest

    def changes(self, slot: str, key: StageKey) -> tuple[str, ...] | None:
        """What differs between `key` and the one that `slot` had last, as names of settings; None if it had none."""
        try:
            last = json.loads(self._latest_path(slot).read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        return differences(last, key.parts) if isinstance(last, dict) else None

    def note(self, slot: str, key: StageKey) -> None:
        """Remembers `key` as the last of `slot`."""
        with self._explained(0):
            self._write(self._latest_path(slot), key.parts)

    def lock(self, name: str, on_wait: Callable[[], None]) -> AbstractContextManager[None]:
        """Holds the store's lock `name`; others wait. The kernel frees it when its holder dies."""
        return locked(self.root / "locks" / name, on_wait=on_wait)

    @contextmanager
    def work_folder(self) -> Iterator[Path]:
        """A folder for one run, in the store's file system, so that results move in by a rename. Removed at the end.

        Folders of runs that were killed are removed here.
        """
        folder = self.root / "work" / secrets.token_hex(8)
        with self._explained(0):
            folder.mkdir(parents=True)
        with locked(folder / "lock", on_wait=_nobody_else):
            for other in folder.parent.iterdir():
                if other != folder and not is_locked(other / "lock") and _older_than(other, seconds=5):
                    shutil.rmtree(other, ignore_errors=True)
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def records(self) -> Iterator[tuple[Path, dict[str, Any] | None]]:
        """Every record's path, and its content; None where it is damaged."""
        for path in sorted(self.root.glob("records/*/*.json")):
            try:
                yield path, _body(path.read_bytes(), path.stem)
            except OSError:
                yield path, None

    def _is_whole(self, digest: str) -> bool:
        try:
            return self.digest_of(self.blob_path(digest)) == digest
        except OSError:
            return False

    def _forget(self, record_path: Path, blobs: Iterable[str]) -> None:
        for path in (record_path, *map(self.blob_path, blobs)):
            with suppress(OSError):
                path.unlink()

    def _record_path(self, stage: str, key: str) -> Path:
        return self.root / "records" / stage.replace(" ", "-") / f"{key}.json"

    def _latest_path(self, slot: str) -> Path:
        return self.root / "latest" / f"{value_digest(slot)}.json"

    def _take(self, path: Path) -> str:
        """Moves a finished file into the blobs. It must be on disk already and lie in the store's file system."""
        digest = file_digest(path)
        final = self.blob_path(digest)
        final.parent.mkdir(parents=True, exist_ok=True)
        commit(path, final)
        return digest

    def _write(self, path: Path, value: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside, _ = write_aside(path.parent, BytesIO(json.dumps(value, allow_nan=False).encode()))
        commit(aside, path)

    def _explained(self, needed_bytes: int) -> Any:
        return explained(self.root, needed_bytes, _NEXT_STEP)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the values that differ between two keys' parts, such as `profiles[0].image.max`."""
    old, new = dict(_flat(before, "")), dict(_flat(after, ""))
    names = [name for name in {**old, **new} if old.get(name, _ABSENT) != new.get(name, _ABSENT)]
    return tuple(name.split(".", 1)[-1] if name.startswith(_GROUPS) else name for name in names)


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


def _nobody_else() -> None:
    """A folder with a random name has no other holder."""


def _older_than(path: Path, *, seconds: float) -> bool:
    """A folder just made may not hold its lock yet."""
    try:
        return time.time() - path.stat().st_mtime > seconds
    except OSError:
        return False


def _body(text: bytes, key: str) -> dict[str, Any] | None:
    try:
        envelope = json.loads(text)
        body = envelope["record"]
        if envelope["sha256"] == value_digest(body) and body["key"] == key:
            return dict(body)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def _parsed(text: bytes, key: str) -> Record | None:
    body = _body(text, key)
    return Record(key, body["result"], body["blobs"]) if body else None
