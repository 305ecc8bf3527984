"""Writes a bundle (engines and manifest) so that a reader sees the old one or the new one, never a half-written file."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, suppress
from io import BytesIO
from pathlib import Path

from platformdirs import user_cache_path

from trtforge.files import explained, folder_to_disk, free_bytes, locked, remove_leftovers, write_aside
from trtforge.release.manifest import MANIFEST_NAME

_NEXT_STEP = "set output: to a folder of its own that can be written"


def check_output(output_dir: Path, needed_bytes: int = 0) -> None:
    """Makes `output_dir` if it is not there, and proves that it can take `needed_bytes` of files.

    Worth calling before a long build. What killed runs left there is removed, so the caller holds `output_lock`.

    Raises:
        StoreError: it is no folder, cannot be written, or has too little space.
    """
    with explained(output_dir, needed_bytes, _NEXT_STEP):
        output_dir.mkdir(parents=True, exist_ok=True)
        remove_leftovers(output_dir)
        # Permission bits do not tell about read-only mounts, quotas or ACLs; writing does.
        write_aside(output_dir, BytesIO(b"probe"))[0].unlink()
        if free_bytes(output_dir) < needed_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def publish(output_dir: Path, engines: Mapping[str, Path], manifest_text: str, *, stale: Collection[str] = ()) -> None:
    """Copies `engines` and the manifest into `output_dir`, the manifest last.

    Every file appears whole, under its name, by one rename, after its bytes are on disk. Until the first rename the
    previous bundle is untouched, whatever goes wrong. A run killed in between leaves hidden temporary files, which the
    next run removes, and at worst new engines beside the old manifest, which `verify` tells. The caller holds
    `output_lock`.

    Args:
        output_dir: made if it is not there.
        engines: file name in `output_dir` -> where the engine is now. The source stays.
        manifest_text: what `manifest_json` gave.
        stale: file names of the previous manifest that the new one no longer has; removed.

    Raises:
        StoreError: no space (needed and free bytes are told), no permission, not a folder, a source that is gone.
    """
    manifest_data = manifest_text.encode()
    with explained(output_dir, len(manifest_data), _NEXT_STEP):
        needed_bytes = len(manifest_data) + sum(path.stat().st_size for path in engines.values())
    check_output(output_dir, needed_bytes)
    with explained(output_dir, needed_bytes, _NEXT_STEP):
        try:
            staged = []
            for name, source in engines.items():
                with source.open("rb") as reader:
                    staged.append((write_aside(output_dir, reader)[0], output_dir / name))
            staged.append((write_aside(output_dir, BytesIO(manifest_data))[0], output_dir / MANIFEST_NAME))
            *staged_engines, (staged_manifest, manifest_path) = staged
            for temporary, final in staged_engines:
                temporary.replace(final)
            for name in stale:  # while a manifest still names them: a run killed here is made good by the next
                path = output_dir / name
                if path.is_file() and path.parent.resolve().is_relative_to(
                    output_dir.resolve()
                ):  # others may have linked it
                    path.unlink()
            staged_manifest.replace(manifest_path)
            folder_to_disk(output_dir)
        finally:
            remove_leftovers(output_dir)


def output_lock(
    output_dir: Path, *, on_wait: Callable[[], None], fallback: Path | None = None
) -> AbstractContextManager[None]:
    """Holds the only lock of `output_dir` on this machine; a second process of the same user waits.

    The lock file lies in the user's cache folder, because the output folder is handed to others.

    Args:
        output_dir: need not exist. Two paths to one folder are one lock.
        on_wait: called once, before waiting, if another process holds the lock.
        fallback: folder for the lock file where the user's cache folder cannot be written.

    Raises:
        StoreError: the lock file cannot be written.
    """
    name = hashlib.sha256(os.fsencode(os.path.realpath(output_dir))).hexdigest()
    folder = user_cache_path("trtforge") / "locks"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if fallback and not os.access(folder, os.W_OK):
        folder = fallback
    return locked(folder / f"{name}.lock", on_wait=on_wait)
