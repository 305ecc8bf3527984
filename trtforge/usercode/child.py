"""The child side: loads the function that a spec names and calls it, once for each request.

It is run as a file by a fresh interpreter and uses nothing of trtforge and, without arrays, nothing but the standard
library, so that the interpreter may be another environment's. Requests come as JSON lines on the first file descriptor in
the arguments, answers go as JSON lines to the second. What the user's code prints goes elsewhere and cannot mix with them.

The first request says what to load: `file` or `module`, `function`, `paths` to search first, `folder` for arrays and
`driver`. Each later one has `call` and `payload`. `call` is `call`, for `function(**payload)`, or a function of the
driver, a file of trtforge's that knows what to do with the user's function: `do(function, payload, state, tell)`.

Lines back: `phase` (text), and as the last one for each request `result` (value), `raised`, `no_module`, `no_function` or
`unsendable`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import json
import math
import os
import resource
import select
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Send = Callable[[Json], None]

_LONGEST_TEXT = 4000
_MOST_FRAMES = 8
_DEEPEST = 40
_NATIVE_KINDS = "biufcSU"


class Unsendable(TypeError):  # noqa: N818 - it says what the value is
    """A value that cannot cross to the parent."""


def main(requests_fd: int, answers_fd: int) -> None:
    """Answers requests until there are no more, and ends the process."""
    _prepare(requests_fd, answers_fd)
    send = _sender(answers_fd)
    with os.fdopen(requests_fd, encoding="utf-8") as requests:
        setup = json.loads(requests.readline())
        state: Json = {}
        with _reported(send):
            state["function"], state["driver"] = _load(setup), _driver(setup)
            send({"kind": "result", "value": None})
        for line in requests:
            with _reported(send):
                send({"kind": "result", "value": _call(json.loads(line), Path(setup["folder"]), state, send)})
    # Clean-up of native libraries can crash or take seconds, and nothing of it is needed.
    os._exit(0)


def _prepare(requests_fd: int, answers_fd: int) -> None:
    for descriptor in (requests_fd, answers_fd):
        os.set_inheritable(descriptor, False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # A crash prints where it was; so does the parent's signal before it ends a call that takes too long.
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2)
    threading.Thread(target=_die_with_parent, args=(answers_fd,), daemon=True).start()


def _die_with_parent(answers_fd: int) -> None:
    """Ends the process once nobody can read its answers."""
    poll = select.poll()
    poll.register(answers_fd, select.POLLERR)
    poll.poll()
    os._exit(1)


def _sender(answers_fd: int) -> Send:
    lock = threading.Lock()

    def send(line: Json) -> None:
        data = json.dumps(line).encode() + b"\n"
        with lock:
            while data:
                data = data[os.write(answers_fd, data) :]

    return send


@contextlib.contextmanager
def _reported(send: Send) -> Iterator[None]:
    """Whatever ends the body early becomes an answer."""
    try:
        yield
    except _NotThere as missing:
        send(missing.answer)
    except Unsendable as unsendable:
        send({"kind": "unsendable", "message": str(unsendable)})
    except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit too
        send(raised(error))


class _NotThere(Exception):  # noqa: N818 - it carries an answer
    def __init__(self, **answer: Any) -> None:
        super().__init__(answer["kind"])
        self.answer = answer


def _load(setup: Json) -> Any:
    sys.path[:0] = setup["paths"]
    module = _module_from_file(Path(setup["file"])) if setup["file"] else _module_by_name(setup["module"])
    function = getattr(module, setup["function"], None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        found = None if function is None else type(function).__name__
        raise _NotThere(kind="no_function", names=names, found=found)
    return function


def _module_from_file(file: Path) -> Any:
    name = file.stem
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec, file  # noqa: S101 - the parent lets only names that end in .py through
    assert spec.loader, file  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    # Pickles and dataclasses look their module up there. A library of the same name stays what it is.
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module


def _module_by_name(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise _NotThere(kind="no_module", name=error.name) from error
        raise


def _driver(setup: Json) -> Any:
    return _module_from_file(Path(setup["driver"])) if setup["driver"] else None


def _call(request: Json, folder: Path, state: Json, send: Send) -> Any:
    if "function" not in state:
        raise RuntimeError("nothing was loaded")
    payload = decoded(request["payload"], folder / "request.npz")
    if state["driver"] is None:
        value = state["function"](**payload)
    else:

        def tell(text: str) -> None:
            send({"kind": "phase", "text": text})

        value = getattr(state["driver"], request["call"])(state["function"], payload, state, tell)
    return encoded(value, folder / "answer.npz")


def raised(error: BaseException) -> Json:
    """What the parent needs to tell the user: type, message, the user's own lines, and a module that is missing."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename:
        frames.append(traceback.FrameSummary(error.filename, error.lineno or 0, "<module>", line=error.text or ""))
    others = [frame for frame in frames if not _is_of_child(frame.filename)]
    own = [frame for frame in others if is_users(frame.filename)]
    shown = own[-_MOST_FRAMES:] or others[-1:]
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return {
        "kind": "raised",
        "type": _type_name(error),
        "message": _text(error),
        "frames": [[frame.filename, frame.lineno or 0, frame.name, (frame.line or "").strip()] for frame in shown],
        "cause": f"{_type_name(cause)}: {_text(cause)}" if cause else None,
        "missing": error.name if isinstance(error, ModuleNotFoundError) and _is_absent(error.name) else None,
    }


def _is_absent(name: str | None) -> bool:
    """Whether the package itself is missing, and not just a part of it that this version does not have."""
    if not name:
        return False
    top = name.partition(".")[0]
    try:
        return top not in sys.modules and importlib.util.find_spec(top) is None
    except (ImportError, ValueError):
        return True


def is_users(filename: str) -> bool:
    """Whether code in `filename` is the user's: none of Python, of an installed package or of trtforge."""
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    inside = any(filename.startswith(f"{folder}{os.sep}") for folder in libraries)
    installed = "site-packages" in Path(filename).parts
    return not (inside or installed or filename.startswith("<") or _is_of_child(filename))


def _is_of_child(filename: str) -> bool:
    package = Path(__file__).parent.parent
    return package in Path(filename).parents or filename.startswith("<frozen")


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_LONGEST_TEXT]
    except Exception as second:  # noqa: BLE001 - the user's __str__
        return f"(its text cannot be shown: {type(second).__name__})"


def encoded(value: Any, arrays_path: Path) -> Json:
    """`value` as JSON, with its arrays in `arrays_path`, an npz file without pickles.

    Numbers, text, None, arrays, and dicts, lists and tuples of them can cross. Tuples become lists.

    Raises:
        Unsendable: it holds anything else.
    """
    arrays: list[Any] = []
    plain = _encoded(value, arrays, "", 0)
    if arrays:
        import numpy as np  # noqa: PLC0415 - only where there are arrays

        np.savez(arrays_path, **{str(index): array for index, array in enumerate(arrays)})
    return {"plain": plain, "num_arrays": len(arrays)}


def _encoded(value: Any, arrays: list[Any], place: str, depth: int) -> Any:
    if depth > _DEEPEST:
        raise Unsendable(f"a value nested deeper than {_DEEPEST}")
    if value is None or isinstance(value, bool | int | float | str):
        return value if type(value) in (type(None), bool, int, float, str) else _base(value)
    if isinstance(value, Mapping):
        if strange := [key for key in value if not isinstance(key, str)]:
            raise Unsendable(f"a dict{place and f' at {place}'} with the key {strange[0]!r}, which is no text")
        return {"dict": {key: _encoded(item, arrays, f"{place}[{key!r}]", depth + 1) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        return [_encoded(item, arrays, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)]
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, numpy.generic) and value.dtype.kind in "biufSU":
        return value.item()
    if numpy and isinstance(value, numpy.ndarray):
        return _array(value, arrays, place)
    raise Unsendable(f"{_kind(value)}{place and f' at {place}'}")


def _base(value: Any) -> Any:
    """The plain value of a subclass, such as an enum that is an int."""
    base: type[Any] = next(kind for kind in (bool, int, float, str) if isinstance(value, kind))
    return base(value)


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _array(array: Any, arrays: list[Any], place: str) -> Json:
    dtype = str(array.dtype)
    if array.dtype.kind not in _NATIVE_KINDS:
        if array.dtype.kind != "V" or array.dtype.names or array.dtype.itemsize not in (1, 2):
            raise Unsendable(f"an array of {dtype}{place and f' at {place}'}")
        array = array.view(f"u{array.dtype.itemsize}")  # bfloat16 and float8, which npy files cannot name
    arrays.append(array)
    return {"array": len(arrays) - 1, "dtype": dtype}


def decoded(sent: Json, arrays_path: Path) -> Any:
    """The value that `encoded` made `sent` and `arrays_path` of. bfloat16 and float8 stay unsigned without ml_dtypes."""
    arrays: list[Any] = []
    if sent["num_arrays"]:
        import numpy as np  # noqa: PLC0415 - only where there are arrays

        with np.load(arrays_path, allow_pickle=False) as file:
            arrays = [file[str(index)] for index in range(sent["num_arrays"])]
    return _decoded(sent["plain"], arrays)


def _decoded(plain: Any, arrays: list[Any]) -> Any:
    if isinstance(plain, list):
        return [_decoded(item, arrays) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if "dict" in plain:
        return {key: _decoded(item, arrays) for key, item in plain["dict"].items()}
    array = arrays[plain["array"]]
    if str(array.dtype) == plain["dtype"] or array.dtype.kind in "SU":
        return array
    try:
        import ml_dtypes  # noqa: PLC0415 - only for its types
    except ImportError:
        return array
    return array.view(getattr(ml_dtypes, plain["dtype"]))


def is_number(value: Any) -> bool:
    """Whether `value` is a number or an array of one; NaN and infinity count."""
    size = math.prod(getattr(value, "shape", (0,)))
    return (isinstance(value, int | float) and not isinstance(value, bool)) or size == 1


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
