"""Remembers digests of files that have not changed since, so that gigabytes of weights are hashed once."""

from __future__ import annotations

import contextlib
import errno
import json
import re
import stat
import time
from dataclasses import dataclass
from io import BytesIO
from os import stat_result
from pathlib import Path

from trtforge.digests import file_digest
from trtforge.errors import StoreError
from trtforge.files import commit, locked, remove_leftovers, write_aside

_MAX_ENTRIES = 1000
_RACY_NS = 2_000_000_000
"""A file touched this recently may change again without its time stamps moving, so its digest is not remembered.

Source: git's "racy clean" entries (Documentation/technical/racy-git); 2 s is the resolution of FAT, the coarsest in use.
"""


@dataclass(frozen=True, slots=True)
class DigestMemo:
    """Digests by (device, inode, size, mtime, ctime), in a JSON file that may be missing, damaged or read-only.

    The change time is part of the key because no program can set it back. Two processes that write at once
    wait for each other.

    Attributes:
        path: the JSON file; its folder is made when needed.
    """

    path: Path

    def digest(self, path: Path) -> str:
        """Lower-case hex SHA-256 of the file's bytes, remembered or computed.

        Raises:
            OSError: the file cannot be read.
        """
        before = path.stat()
        if not stat.S_ISREG(before.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if known := self._entries().get(_key(before)):
            return known
        digest = file_digest(path)
        newest = max(before.st_mtime_ns, before.st_ctime_ns)
        if _key(path.stat()) == _key(before) and time.time_ns() - newest > _RACY_NS:
            self._remember(_key(before), digest)
        return digest

    def _entries(self) -> dict[str, str]:
        try:
            entries = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(entries, dict):
            return {}
        return {k: v for k, v in entries.items() if isinstance(v, str) and re.fullmatch(r"[0-9a-f]{64}", v)}

    def _remember(self, key: str, digest: str) -> None:
        with contextlib.suppress(OSError, StoreError), locked(self.path.with_suffix(".lock"), on_wait=_briefly):
            # A memo that cannot be written only costs time.
            newest = list({**self._entries(), key: digest}.items())[-_MAX_ENTRIES:]
            remove_leftovers(self.path.parent)
            aside, _ = write_aside(self.path.parent, BytesIO(json.dumps(dict(newest)).encode()))
            commit(aside, self.path)


def _briefly() -> None:
    """Nothing to tell: the holder is done at once."""


def _key(status: stat_result) -> str:
    fields = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return ":".join(str(field) for field in fields)
