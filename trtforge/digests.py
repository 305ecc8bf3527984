"""SHA-256 of files and of plain values. Identity in trtforge is a digest, never a path."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def file_digest(path: Path) -> str:
    """Lower-case hex SHA-256 of a file's bytes, read in a stream.

    Raises:
        OSError: the file cannot be read.
    """
    sha256 = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            sha256.update(buffer[:size])
    return sha256.hexdigest()


def value_digest(value: Any) -> str:
    """Lower-case hex SHA-256 of a JSON value in canonical form: sorted keys, no spaces, UTF-8, no NaN."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def model_digest(model: str, external: Iterable[tuple[str, str]]) -> str:
    """SHA-256 of a model: of its file's digest, and of location and digest of each file with external data, in order."""
    return value_digest({"model": model, "external": [list(file) for file in external]})
