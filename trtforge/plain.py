"""Frozen dataclasses to JSON values and back, checked on the way back."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import TypeAdapter

T = TypeVar("T")


def to_plain(kind: type[T] | Any, value: T) -> Any:
    """`value` as JSON values."""
    return TypeAdapter(kind).dump_python(value, mode="json")


def from_plain(kind: type[T] | Any, plain: Any) -> Any:
    """The value of `kind` that `to_plain` gave as `plain`.

    Raises:
        ValidationError: `plain` is not of that kind.
    """
    return TypeAdapter(kind).validate_json(json.dumps(plain))
