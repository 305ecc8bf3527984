"""A module `tensorrt` of one version that has exactly the names that version has, and writes down how it is called.

Any other name is an AttributeError, a call with other arguments a TypeError. It proves names and the shape of calls,
not what TensorRT makes of them: the parser here only reads names and types, and the engine is 64 bytes.

The data of a version was read by importing that release's Python bindings: classes with their members, call
signatures without types, and enums.
"""

from __future__ import annotations

import enum
import inspect
import json
from pathlib import Path

DATA = Path(__file__).parent / "data"
VERSIONS = sorted((path.stem for path in DATA.glob("*.json")), key=lambda name: [int(part) for part in name.split(".")])
_SEVERITIES = ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE")


def shown(value):
    """A value as it stands in a trace."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(bytes(value))} bytes>"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(shown, value)) + "]"
    return repr(value) if isinstance(value, str | int | float | None) else f"<{getattr(value, 'kind', '?')}>"


class StandIn:
    """Names of one version, as the attributes of a module, in `names`.

    Args:
        version: one of `VERSIONS`.
        note: takes each line of the trace.
        methods: "Class.method" -> what is called for it with the object and its arguments; None is the answer else.
    """

    def __init__(self, version, note, methods):
        self.data = json.loads((DATA / f"{version}.json").read_text(encoding="utf-8"))
        self.note = note
        self.methods = methods
        self.names = {"__version__": version}
        self.names |= {name: enum.IntEnum(name, members) for name, members in self.data["enums"].items()}
        self.names |= {name: self._class(name, members) for name, members in self.data["classes"].items()}
        self.names |= {name: type(name, (), {}) for name in self.data["other_classes"] if name not in self.names}
        for name, signature in self.data["functions"].items():
            self.names[name] = self._call(name, signature, lambda *_: True)

    def make(self, kind, **values):
        """An object of class `kind`, whose properties have `values`."""
        made = object.__new__(self.names[kind])
        made.__dict__.update(values)
        return made

    def _class(self, kind, members):
        """A class whose objects take and give only what `members` names. Classes that users derive from it are free."""

        def set_attribute(this, name, value):
            if type(this) is made:
                if members.get(name) != "property":
                    raise AttributeError(f"{kind}.{name}")
                self.note(f"{kind}.{name} = {shown(value)}")
            this.__dict__[name] = value

        def get_attribute(this, name):
            if members.get(name) != "property":
                raise AttributeError(f"{kind}.{name}")

        body = {"kind": kind, "__setattr__": set_attribute, "__getattr__": get_attribute}
        for name, signature in members.items():
            if name == "Severity":
                body[name] = enum.IntEnum("Severity", {level: place for place, level in enumerate(_SEVERITIES)})
            elif signature != "property" and name != "__init__":
                body[name] = self._method(kind, name, signature)
        if f"{kind}.__str__" in self.methods:  # the data have none of Python's own methods
            body["__str__"] = self.methods[f"{kind}.__str__"]
        start = self.methods.get(f"{kind}.__init__")
        body["__init__"] = lambda this, *arguments: (
            self.note(f"{kind}({', '.join(map(shown, arguments))})"),
            start and start(this, *arguments),
        )[-1]
        made = type(kind, (), body)
        return made

    def _method(self, kind, name, signature):
        return self._call(
            f"{kind}.{name}", signature, self.methods.get(f"{kind}.{name}", lambda *_: None), is_method=True
        )

    def _call(self, name, signature, answer, *, is_method=False):
        wanted = _signature(signature)

        def call(*arguments):
            given = arguments[1:] if is_method else arguments
            if wanted is not None:
                wanted.bind(*given)  # TypeError if they do not fit
            self.note(f"{name}({', '.join(map(shown, given))})")
            return answer(*arguments)

        return call


def _signature(text):
    """Of "(flags=, name)"; None where the bindings tell none."""
    if text == "*":
        return None
    parameters: list[inspect.Parameter] = []
    for name in filter(None, text.strip("()").split(", ")):
        is_optional = name.endswith("=") or (parameters and parameters[-1].default is None)
        default = None if is_optional else inspect.Parameter.empty
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(inspect.Parameter(name.rstrip("="), kind, default=default))
    return inspect.Signature(parameters)
