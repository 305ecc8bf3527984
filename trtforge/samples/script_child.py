"""Runs inside the user's process: takes one set of feeds at a time from the user's function.

It uses numpy and nothing of trtforge, since the interpreter may be another environment's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def next_feeds(
    function: Callable[[], Any],
    payload: Mapping[str, Any],  # noqa: ARG001 - what every driver's function takes
    state: dict[str, Any],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """The next feeds, as `{"feeds": input name -> array}`.

    `{"other": what}` if the function gave something else, and an empty dict at the end.

    Args:
        function: the user's; gives an iterable of dicts of arrays, most often as a generator.
        payload: not used.
        state: kept from call to call.
        tell: what happens now, for error messages.
    """
    tell(f"making sample {state.setdefault('num_made', 0)}")
    if "samples" not in state:
        made = function()
        if not hasattr(made, "__iter__") or isinstance(made, Mapping | str | bytes):
            return {"other": f"returned {_kind(made)}, expected a generator or a list of dicts of arrays"}
        state["samples"] = iter(made)
    try:
        feeds = next(state["samples"])
    except StopIteration:
        return {}
    state["num_made"] += 1
    if not isinstance(feeds, Mapping) or not all(isinstance(name, str) for name in feeds):
        return {"other": f"yielded {_kind(feeds)}, expected a dict of input name -> array"}
    return {"feeds": {name: np.asarray(array) for name, array in feeds.items()}}


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"an object of type {type(value).__name__}"
