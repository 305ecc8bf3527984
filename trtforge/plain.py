"""Frozen dataclasses to JSON values and back, checked on the way back."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from pydantic import TypeAdapter


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Making one takes up to 0.1 s."""
    return TypeAdapter(kind)


def to_plain(kind: Any, value: Any) -> Any:
    """`value` as JSON values."""
    return _adapter(kind).dump_python(value, mode="json")


def from_plain(kind: Any, plain: Any) -> Any:
    """The value of `kind` that `to_plain` gave as `plain`.

    Raises:
        ValidationError: `plain` is not of that kind.
    """
    return _adapter(kind).validate_json(json.dumps(plain))
