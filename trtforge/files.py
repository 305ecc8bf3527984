"""Files that appear whole or not at all, and errors of the file system in words."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedIOBase, BytesIO
from pathlib import Path
from typing import BinaryIO

from trtforge.errors import StoreError

TEMPORARY = ".trtforge-*.tmp"
"""Glob of the files that a run killed while writing leaves behind."""
_COPY_BYTES = 1 << 20
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


def write_aside(folder: Path, reader: BinaryIO) -> tuple[Path, str]:
    """A new hidden file in `folder` with all that `reader` gives, on disk, and its SHA-256 in hex.

    `commit` gives it its name. Nothing is left of it if writing stops.

    Raises:
        OSError: no space, no permission.
    """
    path = folder / TEMPORARY.replace("*", secrets.token_hex(8))
    sha256 = hashlib.sha256()
    try:
        with path.open("xb") as writer:
            while data := reader.read(_COPY_BYTES):
                sha256.update(data)
                writer.write(data)
            writer.flush()
            os.fsync(writer.fileno())
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise
    return path, sha256.hexdigest()


def commit(aside: Path, final: Path) -> None:
    """Gives a file of `write_aside` its name, by one rename in the same folder or file system, and makes that last."""
    aside.replace(final)
    folder_to_disk(final.parent)


def write_text(path: Path, text: str) -> None:
    """Writes a text file whole or not at all.

    Raises:
        StoreError: it cannot be written.
    """
    data = text.encode()
    with explained(path.parent, len(data), f"ls -ld {path.parent}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        commit(write_aside(path.parent, BytesIO(data))[0], path)


def folder_to_disk(folder: Path) -> None:
    """Makes renames in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Removes temporary files of killed runs. The caller holds the folder's lock."""
    for path in folder.glob(TEMPORARY):
        if path.is_file() or path.is_symlink():
            path.unlink()


@contextmanager
def locked(
    path: Path, *, on_wait: Callable[[], None], next_step: str = "name another folder with --store"
) -> Iterator[None]:
    """Holds the lock file `path`, which is made if needed; a second process or thread waits.

    The kernel releases the lock when its holder ends, however it ends, so there is no stale lock. Only a holder may
    remove the file, as the last thing it does: whoever waited for it, or opened it before, sees that and locks the new one.

    Args:
        path: the lock file; it stays.
        on_wait: called once, before waiting, if another holds the lock.
        next_step: what to do where its folder cannot be written.

    Raises:
        StoreError: the lock file cannot be written.
    """
    with explained(path.parent, 0, next_step):
        file = _open_locked(path, on_wait)
    with file:
        yield


def _open_locked(path: Path, on_wait: Callable[[], None]) -> BufferedIOBase:
    waits = False
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not waits:
                on_wait()
            waits = True
            fcntl.flock(file, fcntl.LOCK_EX)
        if _is_at(file, path):
            return file
        file.close()


@contextmanager
def locked_if_free(path: Path) -> Iterator[bool]:
    """Holds the lock file `path`, made if its folder is there, unless another does; says whether it does."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("ab"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield _is_at(file, path)


def _is_at(file: BufferedIOBase, path: Path) -> bool:
    """Whether `path` still names the open `file`, which another holder of its lock may have removed."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def free_bytes(folder: Path) -> int:
    """Free bytes where `folder` is, or will be."""
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    return shutil.disk_usage(existing).free


@contextmanager
def explained(folder: Path, needed_bytes: int, next_step: str) -> Iterator[None]:
    """Turns an OSError into a StoreError that says what was needed and what there is.

    Args:
        folder: where files are written.
        needed_bytes: of all of them, 0 if not known.
        next_step: what to do where nothing better is known.
    """
    try:
        yield
    except OSError as error:
        summary, step = _explanation(error, folder, needed_bytes)
        raise StoreError(summary, next_step=step or next_step) from error


def _explanation(error: OSError, folder: Path, needed_bytes: int) -> tuple[str, str]:
    if error.errno in _NO_SPACE:
        needed = f"{needed_bytes} bytes needed, " if needed_bytes else ""
        return f"{folder} has too little space: {needed}{free_bytes(folder)} bytes free", f"df -h {folder}"
    if folder.is_symlink() and not folder.exists():
        return f"{folder} is a link to {folder.readlink()}, which is not there", f"rm {folder}"
    if folder.exists() and not folder.is_dir():
        return f"{folder} is a file, expected a folder", ""
    place = error.filename or folder
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return f"{place} cannot be written: {error.strerror}", f"ls -ld {folder}"
    return f"{place}: {error.strerror}", ""
