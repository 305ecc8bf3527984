"""Plugin libraries: operators that are not in TensorRT's own libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from trtforge.errors import CapabilityError, Problem, SpecError, raise_any, shown_path
from trtforge.spec.load import SpecFile

_ELF_64_LITTLE: Final = b"\x7fELF\x02\x01"
_SHARED_OBJECT: Final = 3
_TYPE_AT: Final = slice(16, 18)
"""Source: System V ABI, ELF header: e_ident, then e_type, where ET_DYN is 3."""


def plugin_digests(spec_file: SpecFile, digest_of: Callable[[Path], str]) -> dict[Path, str]:
    """Library in the spec's `plugins` -> SHA-256. Nothing of them is loaded or run.

    Raises:
        SpecError: one is not there, or no shared library.
        CapabilityError: a target takes no plugins.
    """
    raise_any(_problems(spec_file))
    return {path: digest_of(path) for path in spec_file.spec.plugins}


def _problems(spec_file: SpecFile) -> Iterator[Problem]:
    for index, path in enumerate(spec_file.spec.plugins):
        if found := _not_a_library(path):
            where = spec_file.where("plugins", index)
            yield Problem(
                f"plugin {shown_path(path)}: {found}",
                f"file {shown_path(path)}",
                where,
                exit_code=SpecError.exit_code,
            )
    for index, target in enumerate(spec_file.spec.targets if spec_file.spec.plugins else ()):
        if target.backend == "tensorrt_rtx":
            yield Problem(
                "TensorRT-RTX takes no plugins, and the spec names some",
                "remove this target or plugins",
                spec_file.where("targets", index),
                exit_code=CapabilityError.exit_code,
            )


def _not_a_library(path: Path) -> str:
    """Why `path` cannot be loaded, "" if it looks as if it could."""
    try:
        with path.open("rb") as file:
            head = file.read(_TYPE_AT.stop)
    except OSError as error:
        return error.strerror or "it cannot be read"
    is_library = head.startswith(_ELF_64_LITTLE) and int.from_bytes(head[_TYPE_AT], "little") == _SHARED_OBJECT
    return "" if is_library else "expected a 64-bit ELF shared library (.so)"
